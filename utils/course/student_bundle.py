"""The bundle for students: one zip with the labs and all that they need, and no solution.

It has what is committed, so that nobody's answers or notes get into it. The same commit gives the
same bytes. Of its pages parts between ``<!-- authors -->`` and ``<!-- /authors -->`` are left out:
what tells of files that students don't get.
"""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

from .notebook import NotebookError

#: What students get; everything else stays with the authors.
FOR_STUDENTS = (
    *("labs", "utils", ".ci/constraints.txt", ".gitignore", ".github/course.gif"),
    *("LICENSE", "Makefile", "README.md", "environment.yml", "hatch_build.py", "pyproject.toml"),
    *("requirements.txt", "uv.lock", "docs/install.md", "docs/install-macos.md"),
    *("docs/students.md", "docs/admins.md", "docs/install-wsl.md", "docs/fork-server.md"),
)
#: What a page says to authors only; the words after the first one are a comment.
AUTHORS = re.compile(r"<!-- authors\b[^>]*-->.*?<!-- /authors -->\n?", re.DOTALL)
EXECUTABLE = 0o111


def bundle(root: Path, version: str, target: Path) -> Path:
    """Write ``target/ddl-labs-VERSION.zip``; return its path.

    Raises:
        NotebookError: ``root`` is no git checkout, or has changes that are not committed.
    """
    names = _git(root, "ls-files", "-z", "--", *FOR_STUDENTS).split("\0")[:-1]
    if changed := _git(root, "status", "--porcelain", "--", *FOR_STUDENTS).splitlines():
        raise NotebookError(
            f"{len(changed)} files are not committed, such as {changed[0][3:]}: students would get "
            "something that no commit holds. Commit them, or take them away"
        )
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"ddl-labs-{version}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(names):
            archive.writestr(_entry(root / name, f"{path.stem}/{name}"), _content(root / name))
    return path


def _content(file: Path) -> bytes:
    """Return what students get of a file."""
    if file.suffix != ".md":
        return file.read_bytes()
    return AUTHORS.sub("", file.read_text(encoding="utf-8")).encode()


def _entry(file: Path, name: str) -> zipfile.ZipInfo:
    """Return an entry without a date: the same commit gives the same bytes."""
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
        raise NotebookError("git is not installed; it tells which files are the course's") from None
    if done.returncode:
        raise NotebookError(f"{root}: {done.stderr.strip()}. The bundle is made in a git clone")
    return done.stdout
