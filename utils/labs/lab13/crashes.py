"""What is on the disk if a save ends in the middle: after each of its operations on files.

The student's function runs on real files. After each call into the system, :class:`Watched` looks
what is there, twice: what other processes see, which is what a killed process leaves; and what has
been forced to the disk, which is all that a power failure leaves for certain. Of the entries that
are not forced yet, a power failure may keep all or none, or lose only the names of new folders.

The ranks save to folders of their own, one copy each. :func:`states` puts together what the
machine has if all ranks end at once: what one rank has after its k-th operation, with the others as
far as they must be, or at most can be, by the collectives between them.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
import sys
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

#: Of a rank's folder: what is in each file, by its path.
Tree = dict[str, bytes]

#: Modules of the functions and file objects after which something may have changed.
_SYSTEM = {"posix", "_io", "io"}
_IN_MEMORY = (io.BytesIO, io.StringIO)
#: What may end the ranks: in the order of :attr:`Moment.left`.
KINDS = ("kill", "power", "power, folders kept", "power, new folders lost")


@dataclass(frozen=True)
class Moment:
    """After an operation of a rank.

    Attributes:
        calls: collectives that the rank had called by then.
        sure: of how many of these all others had called, too, for certain.
        left: what may be left: after a kill; after a power failure that loses what it can; after
            one that keeps the entries of folders; after one that keeps them, but no new folder.
    """

    calls: int
    sure: int
    left: tuple[Tree, Tree, Tree, Tree]


@dataclass
class Watched:
    """A folder, and what there has been in it while a function ran.

    Args:
        folder: of this rank alone.
        calls: says how many collectives were called, and how many of them all have come to.
        unsure: names in the folder that are there, and that nobody has forced to the disk yet.
    """

    folder: Path
    calls: Callable[[], tuple[int, int]] = lambda: (0, 0)
    unsure: Collection[str] = ()
    moments: list[Moment] = field(default_factory=list)
    _forced: dict[int, bytes] = field(default_factory=dict)  # content of files, by inode
    _entries: dict[int, dict[str, int]] = field(default_factory=dict)  # of folders, by inode
    _held: dict[int, int] = field(default_factory=dict)  # open, so that no inode is used again

    def __post_init__(self) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            self._force(path)
        for name in self.unsure:
            self._entries[self.folder.stat().st_ino].pop(name)
        self._look()

    def run(self, function: Callable, *args: Any, names: dict[str, Any], **kwargs: Any) -> Any:
        """Call a function; `names`: where it looks up its own."""
        with contextlib.ExitStack() as patches:
            for name in ("fsync", "fdatasync"):
                original = getattr(os, name)
                forcing = self._forcing(original)
                patches.enter_context(mock.patch.object(os, name, forcing))
                own = {key: forcing for key, value in names.items() if value is original}
                patches.enter_context(mock.patch.dict(names, own))
            before = sys.getprofile()
            sys.setprofile(self._returned)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)
                self._look()
                while self._held:
                    os.close(self._held.popitem()[1])

    # -- what happens ---------------------------------------------------------------------

    def _returned(self, frame: types.FrameType, event: str, called: Any) -> None:
        if event != "c_return":
            return
        owner = getattr(called, "__self__", None)
        if isinstance(owner, _IN_MEMORY):
            return
        name = owner.__name__ if isinstance(owner, types.ModuleType) else type(owner).__module__
        if name in _SYSTEM:
            self._look()

    def _forcing(self, original: Callable) -> Callable:
        def fsync(file: Any) -> None:
            original(file)
            number = file if isinstance(file, int) else file.fileno()
            self._force_number(os.fstat(number))
            self._look()

        return fsync

    def _force_number(self, told: os.stat_result) -> None:
        for path in [self.folder, *self.folder.rglob("*")]:
            if path.stat().st_ino == told.st_ino:
                self._force(path)
                return

    def _force(self, path: Path) -> None:
        number = path.stat().st_ino
        if path.is_dir():
            self._entries[number] = {one.name: one.stat().st_ino for one in path.iterdir()}
        else:
            self._forced[number] = path.read_bytes()

    # -- what there is --------------------------------------------------------------------

    def _look(self) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            seen, forced = self._seen()
            old = {name: one for name, one in forced.items() if self._is_in_a_forced_folder(name)}
            left = (seen, self._lasting(), forced, old)
            calls = self.calls()
            if not self.moments or (self.moments[-1].left, self.moments[-1].calls) != (
                left, calls[0],
            ):  # fmt: skip
                self.moments.append(Moment(*calls, left))
        finally:
            sys.setprofile(profile)

    def _seen(self) -> tuple[Tree, Tree]:
        """All files as they are, and with the content that was forced."""
        seen, forced = {}, {}
        for path in sorted(self.folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                told, name = path.stat(), str(path.relative_to(self.folder))
                if told.st_ino not in self._held:
                    self._held[told.st_ino] = os.open(path, os.O_RDONLY)
                if stat.S_ISREG(told.st_mode):
                    seen[name] = path.read_bytes()
                    forced[name] = self._forced.get(told.st_ino, b"")
        return seen, forced

    def _is_in_a_forced_folder(self, name: str) -> bool:
        """Whether the names of all folders on the way to a file are on the disk."""
        path = self.folder / name
        for folder in path.relative_to(self.folder).parents[:-1]:
            at = self.folder / folder
            known = self._entries.get(at.parent.stat().st_ino, {})
            if known.get(at.name) != at.stat().st_ino:
                return False
        return True

    def _lasting(self) -> Tree:
        """Only entries that were forced, with the content that was."""
        found: Tree = {}

        def walk(number: int, at: str) -> None:
            for name, inside in self._entries.get(number, {}).items():
                if inside in self._entries:
                    walk(inside, f"{at}{name}/")
                else:
                    found[f"{at}{name}"] = self._forced.get(inside, b"")

        walk(self.folder.stat().st_ino, "")
        return found


def states(ranks: Sequence[Sequence[dict]]) -> Iterator[tuple[str, int, list[int]]]:
    """What may be left if all ranks end at once.

    Args:
        ranks: of each rank its moments, with ``calls`` and ``sure`` as in :class:`Moment`.

    Yields:
        What ended them (one of :data:`KINDS`), the rank that is told of, and which of its moments
        each rank is at.
    """
    for rank, own in enumerate(ranks):
        for k, moment in enumerate(own):
            behind, ahead = [], []
            for other, theirs in enumerate(ranks):
                if other == rank:
                    behind.append(k)
                    ahead.append(k)
                    continue
                # They have called what this rank knows, and done all that comes before.
                must = [j for j, m in enumerate(theirs) if m["calls"] < moment["sure"]]
                can = [j for j, m in enumerate(theirs) if m["sure"] <= moment["calls"]]
                behind.append(max(must, default=0))
                ahead.append(max(can, default=0))
            for chosen in (behind, ahead):
                for ended in KINDS:
                    yield ended, rank, chosen


@contextlib.contextmanager
def written_by_python() -> Iterator[None]:
    """`torch.save` to a path writes through Python, which can be watched."""
    import torch

    original = torch.save

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            return original(obj, f, *args, **kwargs)
        buffer = io.BytesIO()
        original(obj, buffer, *args, **kwargs)
        with open(f, "wb") as file:
            for part in (buffer.getvalue()[:100], buffer.getvalue()[100:]):
                file.write(part)
                file.flush()
        return None

    with mock.patch.object(torch, "save", save):
        yield
