"""Where the repository is: from this address links to it, to Binder and to hubs are made."""

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
    """DDL_LABS_REPOSITORY, else the one that pyproject.toml names, without a slash at its end.

    Raises ValueError for one that is no http(s) URL.
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
    """DDL_LABS_BRANCH, else main: what links lead to."""
    return os.environ.get(VARIABLES[1]) or "main"


def is_placeholder() -> bool:
    """Whether nobody has given the address: example.org belongs to everybody."""
    return (urlsplit(repository()).hostname or "").endswith("example.org")


def in_repository(path: str, folder: bool = False) -> str:
    """The page of a file or folder, by its path in the repository, as GitHub has it."""
    return f"{repository()}/{'tree' if folder else 'blob'}/{branch()}/{quote(path)}"


def in_binder(notebook: str) -> str:
    """The link that opens a notebook in Binder. JupyterLab starts in labs/ there: Dockerfile."""
    url = urlsplit(repository())
    if url.hostname == "github.com":
        source = f"gh{url.path}"
    else:
        source = f"git/{quote(repository(), safe='')}"
    path = quote(notebook.removeprefix("labs/"))
    return f"https://mybinder.org/v2/{source}/{branch()}?urlpath=lab/tree/{path}"
