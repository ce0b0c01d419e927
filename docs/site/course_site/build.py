"""Build the site: lay out its pages as one tree, and run Sphinx over it. No notebook is run.

python docs/site/course_site/build.py [--labs 00 01] [-o build/site]
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

import nbformat

HERE = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from course_site import address, api, glossary, overview  # noqa: E402
from course_site.address import ROOT  # noqa: E402
from course_site.lab_pages import page_of  # noqa: E402
from utils.course.about import labs as all_labs  # noqa: E402
from utils.course.about import number_of  # noqa: E402
from utils.course.notebook import LABS, SOLUTIONS, is_named, notebooks, read  # noqa: E402

#: Files of the repository that are pages, and pictures in them: each has the same path on the site.
PAGES = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "hpc/README.md", "utils/mpi/*.md"),
    *("labs/cheat_sheet.md", "docs/*.md"),
    *("docs/**/*.svg", "docs/**/*.png", ".github/*.png", ".github/*.gif"),
)
#: Files by which a site is known that Sphinx has made, and the folder beside the pages for it.
SITE = ("objects.inv", ".buildinfo")
DOCTREES = ".doctrees"
#: What a search leaves out: it would find the log of changes for every word.
NOT_FOUND = b"---\nnosearch: true\n---\n"


def build(target: Path, labs: Sequence[str] = (), source: Path | None = None) -> int:
    """Write the site to a folder; Sphinx's exit status.

    Args:
        target: is made, or brought up to date.
        labs: numbers or names of those that get a page; none: all.
        source: where the tree of pages is laid out; None: beside the target.
    """
    from sphinx.cmd.build import main

    source = source or _pages(target)
    chosen = [path for path in notebooks(SOLUTIONS) if _wanted(path, labs)]
    files = dict(_files(chosen))
    parts = overview.parts(all_labs(), _by_number(chosen))
    parts["modules"] = api.listed()
    readme = overview.with_address(files["README.md"].decode())
    parts["promise"] = overview.promise(readme)
    files["README.md"] = overview.with_linked_map(readme, parts["map"]).encode()
    _lay_out(files | dict(_own_pages([*files], parts)), source)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-c", str(HERE)]
    return main([*options, "-d", str(source / DOCTREES), str(source), str(target)])


def _wanted(path: Path, labs: Sequence[str]) -> bool:
    return not labs or any(is_named(name, path) for name in labs)


def _files(labs: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Path on the site and content of each page and picture."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            head = NOT_FOUND if path.name == "CHANGELOG.md" else b""
            yield path.relative_to(ROOT).as_posix(), head + path.read_bytes()
    for path in labs:
        page = page_of(read(path), read(LABS / path.name))
        yield f"labs/{path.name}", nbformat.writes(page).encode()
    words = (LABS / "glossary.md").read_text("utf-8")
    yield "labs/glossary.md", glossary.page(words, _by_number(labs)).encode()
    for module in api.modules():
        yield f"api/{module}.rst", api.api_page(module).encode()


def _by_number(labs: Sequence[Path]) -> dict[str, str]:
    return {number_of(path): path.name for path in labs}


def _own_pages(names: Sequence[str], parts: Mapping[str, str]) -> Iterator[tuple[str, bytes]]:
    """The pages that only the site has.

    A pattern in one's contents becomes the pages that there are, and ``<!-- map -->`` that part.
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
    """Write what differs, so that Sphinx reads only that again; remove what is gone."""
    _require_own(source, DOCTREES)
    (source / DOCTREES).mkdir(parents=True, exist_ok=True)  # from now on it is known
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
    """Remove a site and the pages that it was made of.

    Raises SystemExit, and removes nothing, where one of the two folders holds something else.
    """
    _require_own(target, *SITE)
    _require_own(_pages(target), DOCTREES)
    for folder in (target, _pages(target)):
        shutil.rmtree(folder, ignore_errors=True)


def _pages(target: Path) -> Path:
    return target.with_name(f"{target.name}-pages")


def _require_own(folder: Path, *marks: str) -> None:
    """Files are removed there: it has to be empty, or one that an earlier build has made."""
    if not folder.exists() or any((folder / mark).exists() for mark in marks):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise SystemExit(
            f"{folder}: nothing was removed, as it is no folder of an earlier build (it has no "
            f"{' and no '.join(marks)}). Give another one with -o, or empty it yourself"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Build what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, default=ROOT / "build/site", help="build/site")
    parser.add_argument("--labs", nargs="*", default=[], metavar="LAB", help="such as 01; all")
    parser.add_argument("--clean", action="store_true", help="begin with nothing")
    told = parser.parse_args(arguments)
    print(f"The repository: {address.repository()}, branch {address.branch()}")
    if address.is_placeholder():
        print(
            "  which stands for one that is not public yet: links to it, to Binder and to hubs "
            f"lead nowhere. {address.VARIABLES[0]}=https://… gives another, or Repository in "
            "pyproject.toml"
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
