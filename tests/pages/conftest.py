"""What the tests of the site share: the site, which takes 20 seconds to build.

`make test` builds it with two labs, which takes half of that time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT
from site_tools import REPOSITORY, SITE, build, serving

#: The labs that have a page if no extended test runs.
FEW = ("01", "02")


@pytest.fixture(scope="session")
def labs(request) -> list[Path]:
    """The students' notebooks that have a page: all of them if an extended test runs."""
    found = sorted((ROOT / "labs").glob("[0-9]*.ipynb"))
    if any(item.get_closest_marker("extended") for item in request.session.items):
        return found
    return [path for path in found if path.stem.startswith(FEW)]


@pytest.fixture(scope="session")
def site(tmp_path_factory, labs) -> Path:
    """The site, built once."""
    out = tmp_path_factory.mktemp("site") / "site"
    return build(out, "--labs", *(path.stem for path in labs), repository=REPOSITORY)


@pytest.fixture(scope="session")
def served(site) -> Iterator[str]:
    """The site's address."""
    with serving(site) as address:
        yield address


@pytest.fixture
def modules(monkeypatch) -> None:
    """The site's own modules, which lie beside its settings."""
    monkeypatch.syspath_prepend(str(SITE))
