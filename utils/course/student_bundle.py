"""What students get: a zip or a repository with labs and what they need, without any solution.

It has only committed files, so that nobody's answers or notes get into it. The same commit gives
the same bytes. Parts of pages between ``<!-- authors -->`` and ``<!-- /authors -->`` are left out,
because they describe files that students don't get. A small bundle has some of the labs: what
belongs to other labs is left out, and a link to another lab becomes text.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .notebook import NotebookError

#: The files that students get; everything else stays with the authors. Without the room of
#: grading, `ddl-labs` has no commands of grading.
FOR_STUDENTS = (
    *("labs", "utils", ":(exclude)utils/grading", ":(exclude)utils/course/lectures"),
    *(".ci/constraints.txt", ".gitignore", ".github/course.gif"),
    *("LICENSE", "Makefile", "README.md", "environment.yml", "pyproject.toml"),
    *("requirements.txt", "uv.lock", "docs/install.md", "docs/install-macos.md"),
    *("docs/students.md", "docs/admins.md", "docs/install-windows.md", "docs/install-wsl.md"),
    *("docs/fork-server.md", "docs/forecast.md", "docs/diagnosis.md"),
    "docs/ranks-here.md",
)
#: Files that students get under another name as well. Assistants look for this one in both folders.
ALSO = {"labs/AGENTS.md": "AGENTS.md"}
#: The packed answers for `use_model`. The same folder has the minutes that checks announce.
MODELS, MINUTES = "labs/.models/", ".json"
#: The part of a page for authors; words after `authors` are a comment.
AUTHORS = re.compile(r"<!-- authors\b[^>]*-->.*?<!-- /authors -->\n?", re.DOTALL)
#: A file that belongs to one lab, and a link to a lab's notebook.
OF_A_LAB = re.compile(r"labs/(?:\.models/(?:minutes_)?)?(\d\d)|utils/labs/lab(\d\d)/")
LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./labs/|labs/)?(\d\d)_\w+\.ipynb(?:#[^)]*)?\)")
EXECUTABLE = 0o111


@dataclass(frozen=True)
class Selection:
    """What a bundle has.

    Attributes:
        name: The end of its file's name; "" for the whole course.
        labs: The numbers of its labs; None for all.
        readme: The page that it has as README.md.
        models: Whether it has the packed answers for `use_model`.
    """

    name: str = ""
    labs: frozenset[str] | None = None
    readme: str = "README.md"
    models: bool = True

    def has(self, number: str) -> bool:
        """Return whether the bundle has a lab."""
        return self.labs is None or number in self.labs

    def wants(self, name: str) -> bool:
        """Return whether the bundle has a file of the course."""
        if name.startswith(MODELS) and not self.models and not name.endswith(MINUTES):
            return False
        if self.labs is not None and name in ("README.md", ".github/course.gif"):
            return False
        found = OF_A_LAB.match(name)
        return found is None or self.has(found[1] or found[2])


#: The bundles by name, for `make dist ARGS=assignment`.
BUNDLES = {
    "course": Selection(),
    "afternoon": Selection("afternoon", frozenset({"00", "01", "03"}), "docs/bundles/afternoon.md"),
    "assignment": Selection("assignment", frozenset({"00", "06"}), "docs/bundles/assignment.md"),
    "debugging": Selection("debugging", frozenset({"00", "18"}), "docs/bundles/debugging.md"),
}


def bundle(
    root: Path, version: str, target: Path, selection: Selection = BUNDLES["course"]
) -> Path:
    """Write ``target/ddl-labs-VERSION.zip``, with the selection's name; return its path.

    Raises:
        NotebookError: ``root`` isn't a git clone, or has changes that aren't committed.
    """
    target.mkdir(parents=True, exist_ok=True)
    stem = "-".join(filter(None, ["ddl-labs", selection.name, version]))
    path = target / f"{stem}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(_files(root, selection)):
            archive.writestr(_entry(file, f"{stem}/{name}"), _content(file, selection))
    return path


def repository(root: Path, version: str, target: Path, selection: Selection) -> str:
    """Write a git repository that students can clone; return what its newest commit is.

    Its history has only what students get. If `target` is such a repository, it gets another commit
    with the present version, and students can pull it.

    Raises:
        NotebookError: `target` has files but no repository that this function has made, or `root`
            has changes that aren't committed.
    """
    files = dict(_files(root, selection))
    mark = target / ".git" / "ddl-labs-students"
    if not mark.exists():
        if target.exists() and any(target.iterdir()):
            raise NotebookError(f"{target} isn't empty: name a new folder for the repository")
        target.mkdir(parents=True, exist_ok=True)
        _git(target, "init", "--quiet", "--initial-branch=main")
        mark.write_text("Made by `make student-repo`.\n", encoding="utf-8")
    for name in _git(target, "ls-files", "-z").split("\0")[:-1]:
        (target / name).unlink(missing_ok=True)
    for name, file in files.items():
        written = target / name
        written.parent.mkdir(parents=True, exist_ok=True)
        written.write_bytes(_content(file, selection))
        written.chmod(_mode(file))
    _git(target, "add", "--all")
    if not _git(target, "status", "--porcelain"):
        return "nothing has changed since the last commit"
    who = ("-c", "user.name=ddl-labs", "-c", "user.email=ddl-labs@localhost")
    _git(target, *who, "commit", "--quiet", "-m", f"Labs, version {version}")
    return _git(target, "log", "-1", "--format=%h %s").strip()


def _files(root: Path, selection: Selection) -> Iterator[tuple[str, Path]]:
    """Yield the files of a bundle: the name in the bundle, and the file.

    Raises:
        NotebookError: Some of them aren't committed.
    """
    pages = (selection.readme, *FOR_STUDENTS)
    names = _git(root, "ls-files", "-z", "--", *pages).split("\0")[:-1]
    if changed := _git(root, "status", "--porcelain", "--", *pages).splitlines():
        raise NotebookError(
            f"{len(changed)} files are not committed, such as {changed[0][3:]}, so students would "
            "get a version that no commit has. Commit or remove these files"
        )
    for name in names:
        if name == selection.readme:
            yield "README.md", root / name
        elif selection.wants(name):
            yield name, root / name
            if name in ALSO:
                yield ALSO[name], root / name


def _content(file: Path, selection: Selection) -> bytes:
    """Return the content of a file that students get."""
    if file.suffix not in (".md", ".ipynb"):
        return file.read_bytes()
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        text = AUTHORS.sub("", text)
    return LINK.sub(lambda link: link[0] if selection.has(link[2]) else link[1], text).encode()


def _entry(file: Path, name: str) -> zipfile.ZipInfo:
    """Return an entry without a date, so that the same commit gives the same bytes."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = _mode(file) << 16
    return entry


def _mode(file: Path) -> int:
    return 0o755 if file.stat().st_mode & EXECUTABLE else 0o644


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, encoding="utf-8", check=False
        )
    except FileNotFoundError:
        raise NotebookError("git, which lists the course's files, isn't installed") from None
    if done.returncode:
        raise NotebookError(f"{root}: {done.stderr.strip()}. Make the bundle in a git clone")
    return done.stdout
