"""Build the site: copy its pages into one folder, and run Sphinx on it, without any notebook.

python docs/site/course_site/build.py [--labs 00 01] [-o build/site]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from course_site import address, api, glossary, overview  # noqa: E402
from course_site.address import ROOT  # noqa: E402
from course_site.lab_pages import page_of  # noqa: E402
from utils.course.about import labs as all_labs  # noqa: E402
from utils.course.about import number_of  # noqa: E402
from utils.course.notebook import (  # noqa: E402
    LABS,
    SOLUTIONS,
    dumps,
    is_named,
    notebooks,
    read,
)

#: Pages and pictures in the repository. Each of them has the same path on the site.
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hpc/README.md", "utils/mpi/*.md"),
    *("labs/cheat_sheet.md", "docs/*.md"),
    *("docs/**/*.svg", "docs/**/*.png", ".github/*.png", ".github/*.gif"),
)
#: Files that only a site made by Sphinx has, and the folder in which Sphinx keeps parsed pages.
SITE = ("objects.inv", ".buildinfo")
DOCTREES = ".doctrees"
#: Keeps the changelog out of the search, which would otherwise find it for every word.
NOT_FOUND = b"---\nnosearch: true\n---\n"


def build(target: Path, labs: Sequence[str] = (), source: Path | None = None) -> int:
    """Write the site to a folder, and return Sphinx's exit status.

    Args:
        target: the folder, which is made or updated.
        labs: numbers or names of the labs that get a page, or nothing for all labs.
        source: the folder into which the pages are copied; None: a folder beside the target.
    """
    from sphinx.cmd.build import main

    source = source or _pages(target)
    chosen = [path for path in notebooks(SOLUTIONS) if _wanted(path, labs)]
    files = dict(_files(chosen))
    parts = overview.parts(all_labs(), _by_number(chosen))
    parts["modules"] = api.listed()
    readme = overview.with_address(files["README.md"].decode())
    parts |= overview.promise(readme)
    files["README.md"] = overview.with_linked_map(readme, parts["map"]).encode()
    _lay_out(files | dict(_own_pages([*files], parts)), source)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(HERE)]
    return main([*options, "-d", str(source / DOCTREES), str(source), str(target)])


def _wanted(path: Path, labs: Sequence[str]) -> bool:
    return not labs or any(is_named(name, path) for name in labs)


def _files(labs: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the path on the site and the content of each page and picture."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            head = NOT_FOUND if path.name == "CHANGELOG.md" else b""
            yield path.relative_to(ROOT).as_posix(), head + path.read_bytes()
    for path in labs:
        page = page_of(read(path), read(LABS / path.name))
        yield f"labs/{path.name}", dumps(page).encode()
    words = (LABS / "glossary.md").read_text("utf-8")
    yield "labs/glossary.md", glossary.page(words, _by_number(labs)).encode()
    for module in api.modules():
        yield f"api/{module}.rst", api.api_page(module).encode()


def _by_number(labs: Sequence[Path]) -> dict[str, str]:
    return {number_of(path): path.name for path in labs}


def _own_pages(names: Sequence[str], parts: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """Yield the path and the content of each page that only the site has.

    A pattern in a table of contents becomes the list of matching pages, and a comment such as
    ``<!-- map -->`` becomes the part with this name.
    """
    for path in sorted((HERE / "pages").rglob("*.md")):
        lines = []
        for line in path.read_text("utf-8").splitlines():
            pattern = line.removeprefix("/") if line.startswith("/") and "*" in line else ""
            found = [f"/{name}" for name in sorted(names, key=_stem) if fnmatch(name, pattern)]
            lines += found if pattern else [line]
        text = "\n".join(lines)
        for name, part in parts.items():
            text = text.replace(f"<!-- {name} -->", part)
        yield path.relative_to(HERE / "pages").as_posix(), text.encode()


def _stem(name: str) -> str:
    return name.rpartition(".")[0]  # install.md before install-wsl.md


def _lay_out(files: dict[str, bytes], source: Path) -> None:
    """Write only files that differ, so that Sphinx reads only those again, and remove old ones."""
    _require_own(source, DOCTREES)
    (source / DOCTREES).mkdir(parents=True, exist_ok=True)  # marks the folder as ours
    for name, content in files.items():
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)
    for path in source.rglob("*"):
        name = path.relative_to(source).as_posix()
        if path.is_file() and name not in files and not name.startswith(f"{DOCTREES}/"):
            path.unlink()


def remove(target: Path) -> None:
    """Remove a site and the folder with its pages.

    Raises:
        SystemExit: one of the two folders holds something else; nothing was removed.
    """
    _require_own(target, *SITE)
    _require_own(_pages(target), DOCTREES)
    for folder in (target, _pages(target)):
        shutil.rmtree(folder, ignore_errors=True)


def _pages(target: Path) -> Path:
    return target.with_name(f"{target.name}-pages")


def _require_own(folder: Path, *marks: str) -> None:
    """Raise SystemExit unless a folder, from which we remove files, is empty or from a build."""
    if not folder.exists() or any((folder / mark).exists() for mark in marks):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise SystemExit(
            f"{folder}: nothing was removed, because no earlier build made this folder (it has no "
            f"{' and no '.join(marks)}). Name another folder with -o, or empty this one yourself"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "build/site", help="build/site")
    parser.add_argument(
        "--labs", nargs="*", default=[], metavar="LAB", help="such as 01; default: all"
    )
    parser.add_argument("--clean", action="store_true", help="remove the old site first")
    told = parser.parse_args(arguments)
    print(f"The repository: {address.repository()}, branch {address.branch()}")
    if address.is_placeholder():
        print(
            "  which is a placeholder, because the repository isn't public yet. The site therefore "
            "has no links to it, to Binder or to hubs. To give its address, set "
            f"{address.VARIABLES[0]}=https://…, or Repository in pyproject.toml"
        )
    out = told.out.resolve()
    if told.clean:
        remove(out)
    status = build(out, told.labs)
    if not status:
        print(f"Open {out / 'index.html'}")
    return status


if __name__ == "__main__":
    sys.exit(main())
