"""Out of a zip: the notebooks and zips in it, and a few empty files in place of others.

A zip is not trusted: it can't write outside of its folder, links are left out, sizes are limited.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import stat
import time
import unicodedata
import zipfile
import zlib
from collections import Counter
from dataclasses import dataclass
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


class SubmissionsError(NotebookError):
    """There are no submissions to be found; the message says where they were looked for."""


def clean(name: str) -> str:
    """Return a name as a person writes it: composed characters, single spaces, nothing invisible.

    No semicolon: where a spreadsheet takes it for the end of a cell, a formula could follow.
    """
    name = unicodedata.normalize("NFC", name).replace(";", ",")
    name = "".join(char if char.isprintable() else " " for char in name)
    return " ".join(name.split()) or "(no name)"


@dataclass
class Room:
    """What may still be unpacked: bytes, files, and folders and files with nothing in them."""

    left: int
    files: int
    empty: int

    @classmethod
    def of_all(cls) -> Room:
        """Return what a class's zip may hold."""
        return cls(MOST_UNPACKED, MOST_FILES, MOST_FILES)

    @classmethod
    def of_one(cls) -> Room:
        """Return what all zips of one student may hold."""
        return cls(MOST_OF_ONE, MOST_FILES_OF_ONE, MOST_FILES_OF_ONE)


def unpack(
    source: Path, target: Path, room: Room | None = None
) -> tuple[list[str], dict[Path, str]]:
    """Unpack the notebooks and zips of a zip, and a few empty files in place of others.

    It uses up `room`; by default there is room for a class.

    Returns:
        Remarks on what was left out, and the paths of what did not come out whole, with the
        reason; `target` is among them when the zip itself can't be read.

    Raises:
        SubmissionsError: There is no room for it, which is no student's fault.
    """
    target.mkdir(parents=True, exist_ok=True)
    unpacking = Unpacking(source, target, room or Room.of_all())
    try:
        with zipfile.ZipFile(source) as archive:
            for entry in archive.infolist():
                unpacking.add(archive, entry)
    except SubmissionsError:
        raise
    except (*UNREADABLE, OSError, ValueError) as error:
        text = f"{source.name}: not a zip that can be read ({error})"
        unpacking.remarks.append(text)
        unpacking.damaged[target] = text
    return unpacking.remarks, unpacking.damaged


class Unpacking:
    """What has come out of a zip so far. What the zip says of sizes is not believed."""

    def __init__(self, source: Path, target: Path, room: Room):
        self.source = source
        self.target = target
        self.room = room
        self.remarks: list[str] = []
        self.damaged: dict[Path, str] = {}
        self.listed: Counter[tuple[str, ...]] = Counter()

    def add(self, archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> None:
        """Unpack an entry. Whatever it is, its student's folder or file is there afterwards."""
        name = clean(entry.filename)
        if why := _refused(entry):
            self.remarks.append(f"{name}: {why}")
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
        """A folder that may be a student's, so that who has handed in nothing has a row.

        Others are made for the files in them: a `.git` has thousands, a bomb has millions.
        """
        if len(path.relative_to(self.target).parts) <= MOST_ABOVE and self.room.empty > 0:
            self.room.empty -= 1
            path.mkdir(parents=True, exist_ok=True)

    def _list(self, path: Path) -> None:
        """An empty file in place of what is not looked into: it tells what was handed in.

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
        self.remarks.append(why)
        self.damaged[path] = why
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
    """A part of a path that every file system takes, with the name at its beginning and its end."""
    suffix = PurePosixPath(part).suffix[:10]
    if len(part.encode()) <= MOST_NAME:
        return part
    mark = hashlib.sha256(part.encode()).hexdigest()[:8]
    kept = part.encode()[: MOST_NAME - 20].decode(errors="ignore")
    return f"{kept} {mark}{suffix}"


def _refused(entry: zipfile.ZipInfo) -> str | None:
    """Why an entry is not unpacked, or None."""
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
