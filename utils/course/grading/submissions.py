"""Whose notebooks there are: in a folder, one folder per student, or an LMS's zip.

Nothing here trusts what it reads. Links are not followed, a zip can't write outside of its
folder, and sizes are limited; what is left out is said in a remark.
"""

from __future__ import annotations

import re
import shutil
import stat
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from ..notebook import NotebookError

MB = 1 << 20
#: A notebook with pictures has a few MB; JSON of 200 MB takes gigabytes to read.
MOST_NOTEBOOK = 25 * MB
MOST_UNPACKED, MOST_FILES = 4096 * MB, 20_000

#: Full Name_12345_assignsubmission_file_
MOODLE = re.compile(r"(?P<name>.+)_(?P<id>\d+)_assignsubmission_(?:file|onlinetext)_?")
#: lastname_LATE_userid_attemptid_original-1.ipynb
CANVAS = re.compile(
    r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<attempt>\d+)_(?P<file>.+)", re.IGNORECASE
)
IGNORED = {".ipynb_checkpoints", "__MACOSX", ".git", ".Trash", "@eaDir"}


class SubmissionsError(NotebookError):
    """There are no submissions to be found; the message says where they were looked for."""


@dataclass(frozen=True)
class Student:
    """Who handed in. `lms` has what an LMS needs to know the student again: system, id, folder."""

    name: str
    lms: dict[str, str] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class File:
    """A notebook that a student handed in; `name` as the student called it."""

    student: Student
    path: Path
    name: str
    attempt: int = 0


@dataclass
class Found:
    """All files, every student (also those without a file), and remarks by student's name.

    Remarks that belong to nobody have the name "".
    """

    files: list[File] = field(default_factory=list)
    students: dict[str, Student] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)

    def remark(self, text: str, name: str = "") -> None:
        """Add a remark, once."""
        said = self.remarks.setdefault(name, [])
        if text not in said:
            said.append(text)

    def student(self, name: str, lms: dict[str, str] | None = None) -> Student:
        """The student of this name; a namesake, whom the LMS tells apart, has the number, too."""
        name = clean(name)
        if lms and name in self.students and self.students[name].lms.get("id") != lms["id"]:
            name = f"{name} ({lms['id']})"
        return self.students.setdefault(name, Student(name, lms or {}))


def find(source: Path, scratch: Path, labs: list[str]) -> Found:
    """Every submission in a folder, a zip or a single notebook.

    scratch: a folder for what comes out of a zip. labs: stems of the labs' files, such as
    "01_c10d", which a file's name may contain beside the student's.
    """
    found = Found()
    if source.is_file() and source.suffix.lower() == ".zip":
        folder = scratch / "unpacked"
        for remark in unpack(source, folder):
            found.remark(remark)
    elif source.is_file() and source.suffix.lower() == ".ipynb":
        _add_flat(found, source, labs)
        return found
    elif source.is_dir():
        folder = source
    else:
        raise SubmissionsError(f"{source}: no folder, no .zip and no .ipynb")
    _add_all(found, _only_folder(folder), labs, scratch)
    if not found.students:
        raise SubmissionsError(f"{source}: there is no notebook (.ipynb) in it")
    return found


def clean(name: str) -> str:
    """A name as a person would write it: composed characters, single spaces, nothing invisible."""
    name = unicodedata.normalize("NFC", name)
    name = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(name.split()) or "(no name)"


def _only_folder(folder: Path) -> Path:
    """Go through folders that hold one folder and nothing else: what zipping a folder gives."""
    entries = [path for path in _entries(folder) if not path.is_symlink()]
    if len(entries) == 1 and entries[0].is_dir() and any(p.is_dir() for p in _entries(entries[0])):
        return _only_folder(entries[0])
    return folder


def _entries(folder: Path) -> list[Path]:
    paths = (path for path in folder.iterdir() if path.name not in IGNORED)
    return sorted(path for path in paths if not path.name.startswith("._"))


def _add_all(found: Found, folder: Path, labs: list[str], scratch: Path) -> None:
    for path in _entries(folder):
        if path.is_symlink():
            found.remark(f"{path.name}: a link, not followed")
        elif path.is_dir():
            _add_folder(found, path, scratch)
        elif path.suffix.lower() == ".ipynb":
            _add_flat(found, path, labs)


def _add_flat(found: Found, path: Path, labs: list[str]) -> None:
    """A file beside others: the student is in its name."""
    if match := CANVAS.fullmatch(path.stem):
        lms = {"system": "canvas", "id": match["id"]}
        student = found.student(match["name"], lms)
        name = re.sub(r"-\d+$", "", match["file"]) + path.suffix
        if match["late"]:
            found.remark("handed in late", student.name)
        found.files.append(File(student, path, clean(name), int(match["attempt"])))
        return
    student = found.student(_without_lab(path.stem, labs))
    found.files.append(File(student, path, clean(path.name)))


def _without_lab(stem: str, labs: list[str]) -> str:
    """The student's name in a file name such as 01_c10d_Ada_Lovelace."""
    for lab in labs:
        at = stem.casefold().find(lab.casefold())
        if at >= 0:
            rest = (stem[:at] + " " + stem[at + len(lab) :]).strip(" _-.()")
            return rest or stem
    return stem


def _add_folder(found: Found, folder: Path, scratch: Path) -> None:
    """A student's folder, with what is zipped in it."""
    match = MOODLE.fullmatch(folder.name)
    lms = {"system": "moodle", "id": match["id"], "folder": folder.name} if match else {}
    student = found.student(match["name"] if match else folder.name, lms)
    for path in _walk(folder, found, student.name):
        if path.suffix.lower() == ".ipynb":
            found.files.append(File(student, path, clean(path.name)))
        elif path.suffix.lower() == ".zip":
            target = scratch / "zips" / str(len(found.files)) / folder_name(student.name)
            for remark in unpack(path, target):
                found.remark(remark, student.name)
            for inner in _walk(target, found, student.name):
                if inner.suffix.lower() == ".ipynb":
                    found.files.append(File(student, inner, clean(inner.name)))


def _walk(folder: Path, found: Found, name: str) -> Iterator[Path]:
    for path in _entries(folder) if folder.is_dir() else ():
        if path.is_symlink():
            found.remark(f"{path.name}: a link, not followed", name)
        elif path.is_dir():
            yield from _walk(path, found, name)
        elif path.is_file():
            yield path


# --- zips ----------------------------------------------------------------------------------------


def unpack(source: Path, target: Path) -> list[str]:
    """Unpack the notebooks and zips of a zip; returns remarks on what was left out."""
    target.mkdir(parents=True, exist_ok=True)
    remarks, left, files = [], MOST_UNPACKED, 0
    try:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                if why := _refused(entry):
                    remarks.append(f"{clean(entry.filename)}: {why}")
                    continue
                if entry.is_dir():
                    (target / entry.filename).mkdir(parents=True, exist_ok=True)
                    continue
                if PurePosixPath(entry.filename).suffix.lower() not in {".ipynb", ".zip"}:
                    continue
                files += 1
                if files > MOST_FILES or left <= 0:
                    remarks.append(f"{source.name}: more than fits; the rest was left out")
                    break
                left -= _extract(archive, entry, target, remarks)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError) as error:
        remarks.append(f"{source.name}: not a zip that can be read ({error})")
    return remarks


def _refused(entry: zipfile.ZipInfo) -> str | None:
    """Why an entry is not unpacked, or None."""
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", entry.filename):
        return "leads out of its folder, left out"
    mode = entry.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "a link, left out"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "no ordinary file, left out"
    if any(len(part.encode()) > 255 for part in path.parts):
        return "its name is too long, left out"
    return None


def _extract(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: Path, remarks: list) -> int:
    """Write one file, no more than a notebook may have; returns the bytes written.

    What the zip says of a file's size is not believed. Of a file that is too large as much is
    kept as tells so later.
    """
    path = target / entry.filename
    path.parent.mkdir(parents=True, exist_ok=True)
    most, written = MOST_NOTEBOOK + 1, 0
    if path.suffix.lower() == ".zip":
        most = 4 * MOST_NOTEBOOK
    try:
        with archive.open(entry) as packed, path.open("wb") as file:
            while written < most and (block := packed.read(min(MB, most - written))):
                file.write(block)
                written += len(block)
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError, NotImplementedError) as error:
        remarks.append(f"{clean(entry.filename)}: can't be unpacked ({error})")
    return written


def folder_name(name: str) -> str:
    """A student's name as the name of a folder on every system."""
    safe = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name).strip(" .")
    return safe[:80] or "_"


def clear(folder: Path) -> None:
    """Remove what was unpacked."""
    shutil.rmtree(folder, ignore_errors=True)
