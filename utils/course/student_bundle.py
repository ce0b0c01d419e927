"""The bundle for students: one zip with the labs and what they need, without solutions and grading.

It has only committed files, so that nobody's answers or notes get into it. The same commit gives
the same bytes. Parts of pages between ``<!-- authors -->`` and ``<!-- /authors -->`` are left out,
because they describe files that students don't get.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
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
#: The part of a page for authors; words after `authors` are a comment.
AUTHORS = re.compile(r"<!-- authors\b[^>]*-->.*?<!-- /authors -->\n?", re.DOTALL)
EXECUTABLE = 0o111


def bundle(root: Path, version: str, target: Path) -> Path:
    """Write ``target/ddl-labs-VERSION.zip``; return its path.

    Raises:
        NotebookError: ``root`` isn't a git clone, or has changes that aren't committed.
    """
    names = _git(root, "ls-files", "-z", "--", *FOR_STUDENTS).split("\0")[:-1]
    if changed := _git(root, "status", "--porcelain", "--", *FOR_STUDENTS).splitlines():
        raise NotebookError(
            f"{len(changed)} files are not committed, such as {changed[0][3:]}, so students would "
            "get a version that no commit has. Commit or remove these files"
        )
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"ddl-labs-{version}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            archive.writestr(_entry(root / name, f"{path.stem}/{name}"), _content(root / name))
    return path


def _content(file: Path) -> bytes:
    """Return the content of a file that students get."""
    if file.suffix != ".md":
        return file.read_bytes()
    return AUTHORS.sub("", file.read_text(encoding="utf-8")).encode()


def _entry(file: Path, name: str) -> zipfile.ZipInfo:
    """Return an entry without a date, so that the same commit gives the same bytes."""
    entry = zipfile.ZipInfo(name)
    entry.compress_type = zipfile.ZIP_DEFLATED
    mode = 0o755 if file.stat().st_mode & EXECUTABLE else 0o644
    entry.external_attr = mode << 16
    return entry


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
