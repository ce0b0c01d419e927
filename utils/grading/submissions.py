"""Whose notebooks there are: in a folder, one folder per student, or an LMS's zip.

Nothing here trusts what it reads. Links are not followed, a zip can't write outside of its
folder, and sizes are limited; what is left out is said in a remark.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from .zips import ARCHIVES, MOST_NAME, NOTEBOOK, Room, SubmissionsError, clean, unpack

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
        others: Files that are no notebooks, by student's name.
        closed: What can't be looked into, so that nobody knows what was handed in, by name.
    """

    files: list[File] = field(default_factory=list)
    students: dict[str, Student] = field(default_factory=dict)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    others: dict[str, list[str]] = field(default_factory=dict)
    closed: dict[str, list[str]] = field(default_factory=dict)
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
    damaged: dict[Path, str] = {}
    folder = source
    if source.is_file() and source.suffix.lower() == ".zip":
        folder = scratch / "unpacked"
        remarks, damaged = unpack(source, folder)
        for remark in remarks:
            submissions.remark(remark)
    elif source.is_file() and source.suffix.lower() == ".ipynb":
        Search(submissions, labs, scratch, damaged).add_flat(source)
        return submissions
    elif not source.is_dir():
        raise SubmissionsError(f"{source}: no folder, no .zip and no .ipynb")
    try:
        Search(submissions, labs, scratch, damaged).add_all(_only_folder(folder))
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


class Search:
    """A walk through a folder, which adds to `found` what is in it.

    damaged: of files that came out of a zip, those that did not come out whole, and why.
    """

    def __init__(self, found: Found, labs: list[str], scratch: Path, damaged: dict[Path, str]):
        self.found = found
        self.labs = labs
        self.scratch = scratch
        self.damaged = damaged
        self.rooms: dict[str, Room] = {}

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
        """A student's folder, with what is zipped in it."""
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
        """A notebook, a zip of notebooks, or something else to be told of."""
        suffix = path.suffix.lower()
        error = self.damaged.get(path, "")
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
        room = self.rooms.setdefault(student.name, Room.of_one())
        remarks, damaged = unpack(path, target, room)
        for remark in remarks:
            self.found.remark(remark, student.name)
        if target in damaged:
            self.found.close(damaged[target], student.name)
        self.damaged |= damaged
        if not _entries(target):
            self.found.others.setdefault(student.name, []).append(f"{name}, with nothing in it")
        self._walk(student, target, depth)


def _is_students(path: Path, flat: bool) -> bool:
    """Whether a file beside others can be a submission: beside folders only what an LMS names."""
    if NOTEBOOK.search(path.name) or MOODLE.match(path.stem) or CANVAS.fullmatch(path.stem):
        return True
    return flat and path.suffix.lower() not in LITTER and not path.name.startswith(".")


def _without_lab(stem: str, labs: list[str]) -> str:
    """The student's name in a file name such as 01_c10d_Ada_Lovelace."""
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
    """A student's name as the name of a folder on every system."""
    safe = re.sub(r'[<>:"/\\|?*\x00-\x1f]', "_", name).strip(" .")
    return safe[:80].encode()[:MOST_NAME].decode(errors="ignore").rstrip(" .") or "_"
