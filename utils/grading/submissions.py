"""Finds the students' notebooks in a folder, in one folder per student, or in an LMS's zip.

Nothing that is read here is trusted. Links are not followed, a zip can't write outside its folder,
and sizes are limited. A remark says what was left out.
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
#: A notebook with its outputs gets large if it prints in a loop.
MOST_FILE = 200 * MB
MOST_UNPACKED = 4096 * MB
MOST_FILES = 20_000
#: The same limits for one student's zips, so that a zip bomb leaves room for other students.
MOST_OF_ONE = 512 * MB
MOST_FILES_OF_ONE = 500
#: A student's folder is at most so deep in a zipped folder.
MOST_ABOVE = 2
#: How many files that aren't notebooks are listed.
MOST_LISTED = 8
#: Bytes of a file's name, including what `write_text` adds to a temporary file.
MOST_NAME = 220
#: Formats in which students pack notebooks; only `.zip` is unpacked.
ARCHIVES = {*(".rar", ".7z", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".zst", ".zipx", ".zip")}
#: Reading an entry raises these if it is damaged, encrypted, or packed in an unknown way.
UNREADABLE = (zipfile.BadZipFile, EOFError, RuntimeError, NotImplementedError, zlib.error)
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
#: Browsers and Windows lengthen a notebook's name.
NOTEBOOK = re.compile(r"\.ipynb(\.(json|txt|download))?$", re.IGNORECASE)
#: Nested zips are unpacked to this depth.
MOST_DEPTH = 2
#: Files next to a folder's notebooks with these suffixes are not submissions.
LITTER = {".csv", ".json", ".log", ".ini", ".db", ".yml", ".toml"}

#: Full Name_12345_assignsubmission_file_, followed by the student's own file name.
MOODLE = re.compile(r"(?P<name>.+?)_(?P<id>\d+)_assignsubmission_(?:file|onlinetext)_?")
#: lastname_LATE_userid_attemptid_original-1.ipynb
CANVAS = re.compile(
    r"(?P<name>[^_]+)_(?P<late>LATE_)?(?P<id>\d+)_(?P<attempt>\d+)_(?P<file>.+)", re.IGNORECASE
)
IGNORED = {".ipynb_checkpoints", "__MACOSX", ".git", ".Trash", "@eaDir"}


class SubmissionsError(NotebookError):
    """There are no submissions to grade; the message says where we searched."""


def clean(name: str) -> str:
    """Return a name as a person writes it, with composed characters and without invisible ones.

    A comma replaces each semicolon, because in some spreadsheets a formula could follow one.
    """
    name = unicodedata.normalize("NFC", name).replace(";", ",")
    name = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(name.split()) or "(no name)"


@dataclass(frozen=True)
class Student:
    """A student. `lms` has what an LMS needs to know the student: system, id, folder or file."""

    name: str
    lms: dict[str, str] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class File:
    """A notebook that a student submitted; `name` is the student's own file name.

    error: why it can't be read at all; "" if it can.
    """

    student: Student
    path: Path
    name: str
    attempt: int = 0
    error: str = ""


@dataclass
class Found:
    """All files and students of a class, including students without a file.

    Attributes:
        remarks: Remarks by the student's name; remarks about no student have the name "".
        others: Files that aren't notebooks, by the student's name.
        closed: Files and folders that can't be read, so that nobody knows what was submitted, by
            the student's name.
        damaged: Files that could not be unpacked completely, and the reasons.
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
        """Note a file or folder that can't be read."""
        self.closed.setdefault(name, []).append(clean(text))

    def student(self, name: str, lms: dict[str, str] | None = None) -> Student:
        """Return the student with a name; the LMS's id is added if two students share the name."""
        name = clean(name)
        if lms and name in self.students and self.students[name].lms.get("id") != lms["id"]:
            name = f"{name} ({lms['id']})"
        return self.students.setdefault(name, Student(name, lms or {}))

    def owner(self, folder: str) -> Student:
        """Return the student of a folder. Two folders are two students, even with equal names."""
        name = clean(folder)
        count = 1
        while name in self.folders:
            count += 1
            name = f"{clean(folder)} ({count})"
        self.folders.add(name)
        if count > 1:
            self.remark(f"{count} folders have this name, except for blanks or accents.", name)
        return self.student(name)


def find(source: Path, scratch: Path, labs: list[str]) -> Found:
    """Return every submission in a folder, a zip or a single notebook.

    Zips are unpacked into the folder `scratch`. A file's name may contain one of `labs`, such as
    "01_c10d", in addition to the student's name.
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
        raise SubmissionsError(f"{source} is not a folder, a .zip or an .ipynb.")
    try:
        search.add_all(_only_folder(folder))
    except OSError as error:
        raise SubmissionsError(f"{source} can't be read: {error.strerror}") from error
    if not submissions.students:
        lines = "".join(f"\n  {text}" for text in submissions.remarks.get("", [])[:10])
        raise SubmissionsError(f"There is no notebook (.ipynb) in {source}.{lines}")
    return submissions


def _only_folder(folder: Path) -> Path:
    """Return the folder inside folders that hold just one folder, as zipping a folder makes them.

    A folder of nbgrader's only student stays as it is, because it has a folder per assignment.
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
    """A search through a folder, which adds students and files to `found`."""

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
                self.found.remark(f"{path.name} is a link and was not followed.")
            elif path.is_dir():
                self._add_folder(path)
            elif path.is_file() and _is_students(path, flat):
                self.add_flat(path)
            else:
                self.found.remark(f"{clean(path.name)} belongs to no student and was ignored.")

    def add_flat(self, path: Path) -> None:
        """Add a file in the top folder, whose name contains the student's name."""
        attempt = 0
        name = path.name
        stem = NOTEBOOK.sub("", name) if NOTEBOOK.search(name) else path.stem
        if match := CANVAS.fullmatch(stem):  # first, because the file part may look like Moodle's
            lms = {"system": "canvas", "id": match["id"], "file": name}
            student = self.found.student(match["name"], lms)
            name = re.sub(r"-\d+$", "", match["file"]) + name[len(stem) :]
            attempt = int(match["attempt"])
            if match["late"]:
                self.found.remark("The submission was late.", student.name)
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
                    self.found.remark(f"{path.name} is a link and was not followed.", student.name)
                elif path.is_dir():
                    self._walk(student, path, depth)
                elif path.is_file():
                    self._add_file(student, path, clean(path.name), depth=depth)
        except OSError as error:
            self.found.close(f"{clean(folder.name)} can't be read: {error.strerror}.", student.name)

    def _add_file(
        self, student: Student, path: Path, name: str, attempt: int = 0, depth: int = 0
    ) -> None:
        """Add a notebook or the notebooks in a zip; list any other file by its name."""
        suffix = path.suffix.lower()
        error = self.found.damaged.get(path, "")
        if NOTEBOOK.search(path.name):
            self.found.files.append(File(student, path, name, attempt, error))
        elif suffix == ".zip" and not error and depth < MOST_DEPTH:
            self._add_zip(student, path, name, depth + 1)
        elif error or suffix in ARCHIVES:
            why = error or f"{name} is a {suffix} archive, which grading can't open. Unpack it."
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
            self.found.others.setdefault(student.name, []).append(f"{name} (empty)")
        self._walk(student, target, depth)


def _is_students(path: Path, flat: bool) -> bool:
    """Return whether a file can be a submission; next to folders only a notebook or LMS file."""
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
    """Return a separate folder for each student, even on file systems that ignore case."""
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
    """The room that is left for unpacking: bytes, files, and empty files and folders."""

    left: int
    files: int
    empty: int


def unpack(source: Path, target: Path, room: Room, notes: Found, name: str = "") -> str:
    """Unpack the notebooks and zips in a zip, and make empty files for a few other entries.

    It reduces `room`, and notes in `notes` which files were left out or damaged.

    Args:
        name: The student whom the remarks concern; "" for none.

    Returns:
        Why the zip itself can't be read; "" if it can.

    Raises:
        SubmissionsError: The disk has no room for it, which is not a student's fault.
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
        why = f"{source.name} is a zip that can't be read ({error})."
        notes.remark(why, name)
        return why
    return ""


@dataclass
class Unpacking:
    """The unpacking of one zip, which counts sizes itself instead of trusting the zip."""

    source: Path
    target: Path
    room: Room
    found: Found
    student: str
    listed: Counter[tuple[str, ...]] = field(default_factory=Counter)

    def add(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        """Unpack an entry, or at least leave a folder or file that shows the student."""
        name = clean(entry.filename)
        if why := _refused(entry):
            self.found.remark(f"{name} was left out, because it {why}.", self.student)
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
                    f"There is no room to unpack {self.source.name}: {error}"
                ) from error
            self._spoil(path, f"{name} can't be unpacked ({error.strerror}).")

    def _make_folder(self, path: Path) -> None:
        """Make a folder that may be a student's, so that a student without files gets a row.

        Deeper folders are made only for their files, because a `.git` has thousands of them.
        """
        if len(path.relative_to(self.target).parts) <= MOST_ABOVE and self.room.empty > 0:
            self.room.empty -= 1
            path.mkdir(parents=True, exist_ok=True)

    def _list(self, path: Path) -> None:
        """Make an empty file that shows the name of a file that isn't unpacked.

        Archives are always shown, because the notebook may be inside, so a 0 would be wrong.
        """
        owner = path.relative_to(self.target).parts[:MOST_ABOVE]
        self.listed[owner] += 1
        is_listed = self.listed[owner] <= MOST_LISTED or path.suffix.lower() in ARCHIVES
        if is_listed and self.room.empty > 0:
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
        """Write one file, but of a too large one only enough bytes to show that it is too large."""
        self.room.files -= 1
        if self.room.files < 0 or self.room.left <= 0:
            why = "was left out, because the zip is over the limit of files or bytes"
            self._spoil(path, f"{clean(entry.filename)} {why}.")
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
            self._spoil(path, f"{clean(entry.filename)} can't be unpacked ({error}).")
        self.room.left -= written
        with contextlib.suppress(OSError, ValueError, OverflowError):
            date = time.mktime((*entry.date_time, 0, 0, -1))  # the newest of several files counts
            os.utime(path, (date, date))


def _short(part: str) -> str:
    """Return a part of a path, shortened in the middle if it is too long for a file system."""
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
        return "points outside its folder"
    if not path.parts or "\0" in entry.filename:
        return "has no valid name"
    mode = entry.external_attr >> 16
    if stat.S_ISLNK(mode):
        return "is a link"
    if stat.S_IFMT(mode) not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is not an ordinary file"
    return None
