"""The address of the repository, and the links to it, to Binder and to hubs."""

from __future__ import annotations

import os
import tomllib
from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

ROOT = Path(__file__).resolve().parents[3]
VARIABLES = ("DDL_LABS_REPOSITORY", "DDL_LABS_BRANCH")


@cache
def repository() -> str:
    """Return DDL_LABS_REPOSITORY or, if it isn't set, `Repository` of pyproject.toml.

    The address has no slash at its end.

    Raises:
        ValueError: the address isn't an http(s) URL.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    url = os.environ.get(VARIABLES[0]) or project["urls"]["Repository"]
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise ValueError(
            "the repository must be a URL such as https://github.com/school/ddl-labs, "
            f"not {url!r}: set {VARIABLES[0]}, or Repository in pyproject.toml"
        )
    return url.rstrip("/").removesuffix(".git")


def branch() -> str:
    """Return the branch that links lead to: DDL_LABS_BRANCH, or main if it isn't set."""
    return os.environ.get(VARIABLES[1]) or "main"


def is_placeholder() -> bool:
    """Return whether the address is still the placeholder, which is on example.org."""
    return (urlsplit(repository()).hostname or "").endswith("example.org")


def in_repository(path: str, folder: bool = False) -> str:
    """Return the address of GitHub's page for a file or folder with this path in the repository."""
    return f"{repository()}/{'tree' if folder else 'blob'}/{branch()}/{quote(path)}"


def in_binder(notebook: str) -> str:
    """Return the link that opens a notebook in Binder, where the Dockerfile starts it in labs/."""
    url = urlsplit(repository())
    if url.hostname == "github.com":
        source = f"gh{url.path}"
    else:
        source = f"git/{quote(repository(), safe='')}"
    path = quote(notebook.removeprefix("labs/"))
    return f"https://mybinder.org/v2/{source}/{branch()}?urlpath=lab/tree/{path}"
