"""What the tests of the site share: the site, which takes 20 seconds to build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from site_tools import REPOSITORY, SITE, build, serving


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The whole site, built once."""
    return build(tmp_path_factory.mktemp("site") / "site", repository=REPOSITORY)


@pytest.fixture(scope="session")
def served(site) -> Iterator[str]:
    """The site's address."""
    with serving(site) as address:
        yield address


@pytest.fixture
def modules(monkeypatch) -> None:
    """The site's own modules, which lie beside its settings."""
    monkeypatch.syspath_prepend(str(SITE))
