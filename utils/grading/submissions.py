"""Whose notebooks there are: in a folder, one folder per student, or an LMS's zip.

Nothing here trusts what it reads. Links are not followed, a zip can't write outside of its
folder, and sizes are limited; what is left out is said in a remark.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import tempfile
import time
import unicodedata
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from utils.course.notebook import NotebookError

MB = 1 << 20
#: A notebook with its outputs: one that prints in a loop gets large.
MOST_FILE = 200 * MB
MOST_UNPACKED = 4096 * MB
MOST_FILES = 20_000
#: The same for all that one student has zipped: no bomb may fill the disk for the others.
MOST_OF_ONE = 512 * MB
MOST_FILES_OF_ONE = 500
#: How deep a student's folder lies at most, in a folder that was zipped.
MOST_ABOVE = 2
#: Files of others than notebooks that are told of.
MOST_LISTED = 8
#: Bytes of a name, with what writing in one step adds to it.
MOST_NAME = 220
#: Students pack notebooks with these, too; not looked into, but for `.zip`.
ARCHIVES = {*(".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".zipx", ".zip")}
#: What reading an entry raises: damaged, encrypted, packed in a way that Python does not know.
UNREADABLE = (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, zlib.error)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
#: Browsers and Windows lengthen a notebook's name.
NOTEBOOK = re.compile(r"\.ipynb(\.(json|txt|download))?$", re.IGNORECASE)
#: Zips in zips that are looked into.
MOST_DEPTH = 2
#: What lies beside a folder's notebooks and is nobody's submission.
LITTER = {".csv", ".json", ".log", ".ini", ".db", ".yml", ".toml"}

#: Full Name_12345_assignsubmission_file_; what follows in a file's name is the student's.
MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_(?:file|onlinetext)_?")
#: lastname_LATE_userid_attemptid_original-1.ipynb
CANVAS = re.compile(
    r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<attempt>\d+)_(?P<file>.+)", re.IGNORECASE
)
IGNORED = {".ipynb_checkpoints", "__MACOSX", ".git", ".Trash", "@eaDir"}


class SubmissionsError(NotebookError):
    """There are no submissions to be found; the message says where they were looked for."""


def clean(name: str) -> str:
    """Return a name as a person writes it: composed characters, single spaces, nothing invisible.

    No semicolon: where a spreadsheet takes it for the end of a cell, a formula could follow.
    """
    name = unicodedata.normalize("NFC", name).replace(";", ",")
    name = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(name.split()) or "(no name)"


@dataclass(frozen=True)
class Student:
    """Who handed in. `lms` has what an LMS needs to know the student again: system, id, folder."""

    name: str
    lms: dict[str, str] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class File:
    """A notebook that a student handed in; `name` as the student called it.

    error: why it can't be read at all.
    """

    student: Student
    path: Path
    name: str
    attempt: int = 0
    error: str = ""


@dataclass
class Found:
    """All files of a class, and every student, also those without a file.

    Attributes:
        remarks: By student's name; those that belong to nobody have the name "".
        others: Files that aren't notebooks, by student's name.
        closed: What can't be looked into, so that nobody knows what was handed in, by name.
        damaged: Files that did not come out of a zip whole, and why.
    """

    files: list[File] = field(default_factory=list)
    students: dict[str, Student] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    closed: dict[str, list[str]] = field(default_factory=dict)
    damaged: dict[Path, str] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)

    def remark(self, text: str, name: str = "") -> None:
        """Add a remark, once."""
        remarks = self.remarks.setdefault(name, [])
        text = clean(text)
        if text not in remarks:
            remarks.append(text)

    def close(self, text: str, name: str) -> None:
        """Note what can't be looked into."""
        self.closed.setdefault(name, []).append(clean(text))

    def student(self, name: str, lms: dict[str, str] | None = None) -> Student:
        """Return the student of a name; one whom the LMS tells from a namesake has a number."""
        name = clean(name)
        if lms and name in self.students and self.students[name].lms.get("id") != lms["id"]:
            name = f"{name} ({lms['id']})"
        return self.students.setdefault(name, Student(name, lms or {}))

    def owner(self, folder: str) -> Student:
        """Return the student of a folder. Two folders are two students, even if of one name."""
        name = clean(folder)
        count = 1
        while name in self.folders:
            count += 1
            name = f"{clean(folder)} ({count})"
        self.folders.add(name)
        if count > 1:
            self.remark(f"{count} folders have this name, but for blanks or accents", name)
        return self.student(name)


def find(source: Path, scratch: Path, labs: list[str]) -> Found:
    """Return every submission in a folder, a zip or a single notebook.

    What comes out of a zip goes to the folder `scratch`. A file's name may contain one of `labs`,
    such as "01_c10d", beside the student's.
    """
    submissions = Found()
    search = Search(submissions, labs, scratch)
    suffix = source.suffix.lower() if source.is_file() else ""
    if suffix == ".ipynb":
        search.add_flat(source)
        return submissions
    folder = source
    if suffix == ".zip":
        folder = scratch / "unpacked"
        unpack(source, folder, Room(MOST_UNPACKED, MOST_FILES, MOST_FILES), submissions)
    elif not source.is_dir():
        raise SubmissionsError(f"{source}: no folder, no .zip and no .ipynb")
    try:
        search.add_all(_only_folder(folder))
    except OSError as error:
        raise SubmissionsError(f"{source}: can't be read: {error.strerror}") from error
    if not submissions.students:
        lines = "".join(f"\n  {text}" for text in submissions.remarks.get("", [])[:10])
        raise SubmissionsError(f"{source}: there is no notebook (.ipynb) in it{lines}")
    return submissions


def _only_folder(folder: Path) -> Path:
    """Go through folders that hold one folder and nothing else: what zipping a folder gives.

    Not into that of the only student whom nbgrader has collected, with a folder per assignment.
    """
    entries = [path for path in _entries(folder) if not path.is_symlink()]
    if len(entries) != 1 or not entries[0].is_dir():
        return folder
    inside = [path for path in _entries(entries[0]) if path.is_dir()]
    collected = any((path / "timestamp.txt").exists() for path in inside)
    return _only_folder(entries[0]) if inside and not collected else folder


def _entries(folder: Path) -> list[Path]:
    paths = (path for path in folder.iterdir() if path.name not in IGNORED)
    return sorted(path for path in paths if not path.name.startswith("._"))


@dataclass
class Search:
    """A walk through a folder, which adds to `found` what is in it."""

    found: Found
    labs: list[str]
    scratch: Path
    rooms: dict[str, Room] = field(default_factory=dict)

    def add_all(self, folder: Path) -> None:
        """Add every student's folder or file."""
        paths = _entries(folder)
        flat = not any(path.is_dir() for path in paths)
        for path in paths:
            if path.is_symlink():
                self.found.remark(f"{path.name}: a link, not followed")
            elif path.is_dir():
                self._add_folder(path)
            elif path.is_file() and _is_students(path, flat):
                self.add_flat(path)
            else:
                self.found.remark(f"{clean(path.name)}: nobody's submission, not looked at")

    def add_flat(self, path: Path) -> None:
        """Add a file beside others: the student is in its name."""
        attempt = 0
        name = path.name
        stem = NOTEBOOK.sub("", name) if NOTEBOOK.search(name) else path.stem
        if match := CANVAS.fullmatch(stem):  # first: the rest of its names is the student's, too
            lms = {"system": "canvas", "id": match["id"]}
            student = self.found.student(match["name"], lms)
            name = re.sub(r"-\d+$", "", match["file"]) + name[len(stem) :]
            attempt = int(match["attempt"])
            if match["late"]:
                self.found.remark("handed in late", student.name)
        elif match := MOODLE.match(stem):
            lms = {"system": "moodle", "id": match["id"], "prefix": match[0]}
            student = self.found.student(match["name"], lms)
            name = path.name[match.end() :]
        else:
            student = self.found.student(_without_lab(stem, self.labs))
        self._add_file(student, path, clean(name), attempt)

    def _add_folder(self, folder: Path) -> None:
        if match := MOODLE.fullmatch(folder.name):
            lms = {"system": "moodle", "id": match["id"], "folder": folder.name}
            student = self.found.student(match["name"], lms)
        else:
            student = self.found.owner(folder.name)
        self._walk(student, folder)

    def _walk(self, student: Student, folder: Path, depth: int = 0) -> None:
        try:
            for path in _entries(folder):
                if path.is_symlink():
                    self.found.remark(f"{path.name}: a link, not followed", student.name)
                elif path.is_dir():
                    self._walk(student, path, depth)
                elif path.is_file():
                    self._add_file(student, path, clean(path.name), depth=depth)
        except OSError as error:
            self.found.close(f"{clean(folder.name)} can't be read: {error.strerror}", student.name)

    def _add_file(
        self, student: Student, path: Path, name: str, attempt: int = 0, depth: int = 0
    ) -> None:
        """Add a notebook, a zip of notebooks, or something else to be told of."""
        suffix = path.suffix.lower()
        error = self.found.damaged.get(path, "")
        if NOTEBOOK.search(path.name):
            self.found.files.append(File(student, path, name, attempt, error))
        elif suffix == ".zip" and not error and depth < MOST_DEPTH:
            self._add_zip(student, path, name, depth + 1)
        elif error or suffix in ARCHIVES:
            why = error or f"{name}: unpack it by hand, {suffix} is not looked into"
            self.found.close(why, student.name)
        else:
            self.found.others.setdefault(student.name, []).append(name)

    def _add_zip(self, student: Student, path: Path, name: str, depth: int) -> None:
        target = Path(tempfile.mkdtemp(dir=self.scratch))
        room = self.rooms.setdefault(
            student.name, Room(MOST_OF_ONE, MOST_FILES_OF_ONE, MOST_FILES_OF_ONE)
        )
        if why := unpack(path, target, room, self.found, student.name):
            self.found.close(why, student.name)
        if not _entries(target):
            self.found.others.setdefault(student.name, []).append(f"{name}, with nothing in it")
        self._walk(student, target, depth)


def _is_students(path: Path, flat: bool) -> bool:
    """Return whether a file can be a submission: beside folders only what an LMS names."""
    if NOTEBOOK.search(path.name) or MOODLE.match(path.stem) or CANVAS.fullmatch(path.stem):
        return True
    return flat and path.suffix.lower() not in LITTER and not path.name.startswith(".")


def _without_lab(stem: str, labs: list[str]) -> str:
    """Return the student's name in a file name such as 01_c10d_Ada_Lovelace."""
    for lab in labs:
        at = stem.casefold().find(lab.casefold())
        if at >= 0:
            rest = (stem[:at] + " " + stem[at + len(lab) :]).strip(" _-.()")
            return rest or stem
    return stem


def student_folders(names: list[str], out: Path) -> dict[str, Path]:
    """Return a folder for each student, also where a file system sees no difference in names."""
    folders: dict[str, Path] = {}
    used = set()
    for name in names:
        wanted = folder = _folder_name(name)
        count = 1
        while folder.casefold() in used:
            count += 1
            folder = f"{wanted} ({count})"
        used.add(folder.casefold())
        folders[name] = out / "students" / folder
    return folders


def _folder_name(name: str) -> str:
    safe = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name).strip(" .")
    return safe[:80].encode()[:MOST_NAME].decode(errors="ignore").rstrip(" .") or "_"


# --- out of a zip ---------------------------------------------------------------------------------


@dataclass
class Room:
    """What may still be unpacked: bytes, files, and folders and files with nothing in them."""

    left: int
    files: int
    empty: int


def unpack(source: Path, target: Path, room: Room, notes: Found, name: str = "") -> str:
    """Unpack the notebooks and zips of a zip, and a few empty files in place of others.

    It uses up `room`, and writes into `notes` what was left out or did not come out whole.

    Args:
        name: The student to whom remarks belong; "" for nobody.

    Returns:
        Why the zip itself can't be read; "" if it can.

    Raises:
        SubmissionsError: There is no room for it, which is no student's fault.
    """
    target.mkdir(parents=True, exist_ok=True)
    unpacking = Unpacking(source, target, room, notes, name)
    try:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                unpacking.add(archive, entry)
    except SubmissionsError:
        raise
    except (*UNREADABLE, OSError, ValueError) as error:
        why = f"{source.name}: not a zip that can be read ({error})"
        notes.remark(why, name)
        return why
    return ""


@dataclass
class Unpacking:
    """What has come out of a zip so far. What the zip says of sizes is not believed."""

    source: Path
    target: Path
    room: Room
    found: Found
    student: str
    listed: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        """Unpack an entry. Whatever it is, its student's folder or file is there afterwards."""
        name = clean(entry.filename)
        if why := _refused(entry):
            self.found.remark(f"{name}: {why}", self.student)
            return
        inside = PurePosixPath(entry.filename.replace("\\", "/"))
        path = self.target.joinpath(*map(_short, inside.parts))
        try:
            if entry.is_dir():
                self._make_folder(path)
            elif NOTEBOOK.search(path.name) or path.suffix.lower() == ".zip":
                self._extract(archive, entry, path)
            else:
                self._list(path)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise SubmissionsError(
                    f"{self.source.name}: no room to unpack it: {error}"
                ) from error
            self._spoil(path, f"{name}: can't be unpacked ({error.strerror})")

    def _make_folder(self, path: Path) -> None:
        """Make a folder that may be a student's, so that who has handed in nothing has a row.

        Others are made for the files in them: a `.git` has thousands, a bomb has millions.
        """
        if len(path.relative_to(self.target).parts) <= MOST_ABOVE and self.room.empty > 0:
            self.room.empty -= 1
            path.mkdir(parents=True, exist_ok=True)

    def _list(self, path: Path) -> None:
        """Put an empty file in place of what is not looked into: it tells what was handed in.

        Of an archive always, as the notebook may be in there: nobody knows, so it is no zero.
        """
        owner = path.relative_to(self.target).parts[:MOST_ABOVE]
        self.listed[owner] += 1
        is_told = self.listed[owner] <= MOST_LISTED or path.suffix.lower() in ARCHIVES
        if is_told and self.room.empty > 0:
            self.room.empty -= 1
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _spoil(self, path: Path, why: str) -> None:
        self.found.remark(why, self.student)
        self.found.damaged[path] = why
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()

    def _extract(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo, path: Path) -> None:
        """Write one file, no more than a notebook may have: enough of a larger one to tell so."""
        self.room.files -= 1
        if self.room.files < 0 or self.room.left <= 0:
            self._spoil(path, f"{clean(entry.filename)}: more than fits; it was left out")
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        most = MOST_FILE + 1
        written = 0
        try:
            with archive.open(entry) as packed, path.open("wb") as file:
                while written < most and (block := packed.read(min(MB, most - written))):
                    file.write(block)
                    written += len(block)
        except UNREADABLE as error:
            self._spoil(path, f"{clean(entry.filename)}: can't be unpacked ({error})")
        self.room.left -= written
        with contextlib.suppress(OSError, ValueError, OverflowError):
            date = time.mktime((*entry.date_time, 0, 0, -1))  # of several files the youngest counts
            os.utime(path, (date, date))


def _short(part: str) -> str:
    """Return a part of a path as every file system takes it, with its beginning and its end."""
    suffix = PurePosixPath(part).suffix[:10]
    if len(part.encode()) <= MOST_NAME:
        return part
    mark = hashlib.sha256(part.encode()).hexdigest()[:8]
    kept = part.encode()[: MOST_NAME - 20].decode(errors="ignore")
    return f"{kept} {mark}{suffix}"


def _refused(entry: zipfile.ZipInfo) -> str | None:
    """Return why an entry is not unpacked, or None."""
    path = PurePosixPath(entry.filename.replace("\\", "/"))
    if path.is_absolute() or ".." in path.parts or re.match(r"[A-Za-z]:", entry.filename):
        return "leads out of its folder, left out"
    if not path.parts or "\0" in entry.filename:
        return "has no name, left out"
    mode = entry.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "a link, left out"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "no ordinary file, left out"
    return None
