"""The probe of a save, which sees what a crash at any moment would leave.

The student's function runs on real files. After each system call, :class:`Watched` notes two
things. One is what other processes see, because a killed process leaves this. The other is what
was forced to the disk, because only this survives a power failure for certain. A power failure may
keep all or none of the entries that aren't forced yet, or lose only the names of new folders.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
import sys
import tempfile
import types
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from utils.checks.groups import Group, Partition, in_group, keywords
from utils.checks.probe import TOGETHER, as_dict, reading_answer

#: The content of each file in a rank's folder, by path.
Tree = dict[str, bytes]

#: Something may have changed after a call of a function or a file object of these modules.
_SYSTEM = {"posix", "_io", "io"}
_IN_MEMORY = (io.BytesIO, io.StringIO)


@dataclass(frozen=True)
class Moment:
    """The state of a rank's folder after an operation.

    Attributes:
        calls: how many collectives the rank had called by then.
        sure: how many of these all other ranks had certainly called, too.
        left: what may be left after a kill, after a power failure that loses what it can, after
            one that keeps all entries of folders, and after one that loses only new folders.
    """

    calls: int
    sure: int
    left: tuple[Tree, Tree, Tree, Tree]


@dataclass
class Watched:
    """A folder that is watched while a function runs.

    Args:
        folder: the folder, which only this rank uses.
        calls: returns how many collectives this rank called, and how many of them all ranks joined.
        unsure: names in the folder that aren't forced to the disk yet.
    """

    folder: Path
    calls: Callable[[], tuple[int, int]] = lambda: (0, 0)
    unsure: Collection[str] = ()
    moments: list[Moment] = field(default_factory=list)
    _forced: dict[int, bytes] = field(default_factory=dict)  # contents of files, by inode
    _entries: dict[int, dict[str, int]] = field(default_factory=dict)  # names in folders, by inode
    _held: dict[int, int] = field(default_factory=dict)  # kept open, so that no inode is reused

    def __post_init__(self) -> None:
        for path in self._paths():
            self._force(path)
        for name in self.unsure:
            self._entries[_inode(self.folder)].pop(name)
        self._look()

    def run(self, function: Callable, *args: Any, names: dict[str, Any], **kwargs: Any) -> Any:
        """Call a function; `names` is the namespace in which it looks up names."""
        with contextlib.ExitStack() as patches:
            for name in ("fsync", "fdatasync"):
                original = getattr(os, name)
                forcing = self._forcing(original)
                patches.enter_context(mock.patch.object(os, name, forcing))
                aliases = {key: forcing for key, value in names.items() if value is original}
                patches.enter_context(mock.patch.dict(names, aliases))
            before = sys.getprofile()
            sys.setprofile(self._returned)
            try:
                return function(*args, **kwargs)
            finally:
                sys.setprofile(before)
                self._look()
                while self._held:
                    os.close(self._held.popitem()[1])

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
            inode = os.fstat(file if isinstance(file, int) else file.fileno()).st_ino
            path = next((path for path in self._paths() if _inode(path) == inode), None)
            if path is not None:
                self._force(path)
            self._look()

        return fsync

    def _paths(self) -> list[Path]:
        return [self.folder, *self.folder.rglob("*")]

    def _force(self, path: Path) -> None:
        if path.is_dir():
            self._entries[_inode(path)] = {entry.name: _inode(entry) for entry in path.iterdir()}
        else:
            self._forced[_inode(path)] = path.read_bytes()

    def _look(self) -> None:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            seen, forced = self._seen()
            old = {name: data for name, data in forced.items() if self._is_in_forced_folders(name)}
            moment = Moment(*self.calls(), (seen, self._lasting(), forced, old))
            last = self.moments[-1] if self.moments else None
            if last is None or (last.left, last.calls) != (moment.left, moment.calls):
                self.moments.append(moment)
        finally:
            sys.setprofile(profile)

    def _seen(self) -> tuple[Tree, Tree]:
        """Return all files with their present content, and with their forced content."""
        seen = {}
        forced = {}
        for path in sorted(self.folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                name = str(path.relative_to(self.folder))
                if status.st_ino not in self._held:
                    self._held[status.st_ino] = os.open(path, os.O_RDONLY)
                if stat.S_ISREG(status.st_mode):
                    seen[name] = path.read_bytes()
                    forced[name] = self._forced.get(status.st_ino, b"")
        return seen, forced

    def _is_in_forced_folders(self, name: str) -> bool:
        """Return whether the names of all folders above a file are on the disk."""
        folders = [self.folder / parent for parent in Path(name).parents[:-1]]
        return all(
            self._entries.get(_inode(folder.parent), {}).get(folder.name) == _inode(folder)
            for folder in folders
        )

    def _lasting(self) -> Tree:
        """Return only the forced entries, with their forced content."""
        lasting: Tree = {}

        def walk(folder: int, at: str) -> None:
            for name, inode in self._entries.get(folder, {}).items():
                if inode in self._entries:
                    walk(inode, f"{at}{name}/")
                else:
                    lasting[f"{at}{name}"] = self._forced.get(inode, b"")

        walk(_inode(self.folder), "")
        return lasting


def _inode(path: Path) -> int:
    return path.stat().st_ino


@contextlib.contextmanager
def written_by_python() -> Iterator[None]:
    """Let `torch.save` to a path write through Python, so that :class:`Watched` notices it."""
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


OLD, NEW = 10, 137
#: The folders of the two checkpoints.
OLD_FOLDER, NEW_FOLDER = (f"step-{step:06d}" for step in (OLD, NEW))
REMAINS = b"half of a file"  # of a save that crashed


def _state(step: int, place: int) -> dict:
    return {"step": step, "place": place, "weights": torch.arange(40.0) + step + place}


def _prepare(folder: Path, p: int, leftover: bool) -> None:
    """Write an old checkpoint of p ranks, and the remains of a crashed save if `leftover`."""
    (folder / OLD_FOLDER).mkdir(parents=True)
    for place in range(p):
        torch.save(_state(OLD, place), folder / OLD_FOLDER / f"rank-{place}.pt")
    (folder / "latest").write_text(OLD_FOLDER, encoding="utf-8")
    if leftover:
        (folder / NEW_FOLDER).mkdir()
        for place in range(p):
            (folder / NEW_FOLDER / f"rank-{place}.pt").write_bytes(REMAINS)


def whole_state(step: int, place: int) -> str:
    """Return the words for a file that has a whole state."""
    return f"the state of step {step} and group rank {place}"


def _content(path: str, content: bytes) -> str:
    """Return a file's content in words: its text, or which state it contains."""
    if path == "latest":
        return content.decode(errors="replace").strip()
    if content == REMAINS:
        return "still what a crashed save left"
    if not content:
        return "empty"
    try:
        state = torch.load(io.BytesIO(content))
        if not isinstance(state, dict):
            return "incomplete"
        place, step = state["place"], state["step"]
        whole = torch.equal(state["weights"], _state(step, place)["weights"])
        return whole_state(step, place) if whole else "incomplete"
    except Exception:
        return "incomplete"


@in_group
def probe_save(user_ns: dict, *, rank: int, group: Group, partition: Partition) -> dict:
    """Run a save, and return what may be left of this rank's folder at each moment."""
    from torch_mpi.record import log

    save = reading_answer(user_ns, "save")
    place, p = dist.get_rank(group), dist.get_world_size(group)
    mark = log.mark()
    content_of = functools.cache(_content)

    def calls() -> tuple[int, int]:
        made = [c for c in log.since(mark) if c.op not in ("send", "recv")]
        sure = [k + 1 for k, c in enumerate(made) if c.op in TOGETHER and c.waited]
        return len(made), max(sure, default=0)

    with tempfile.TemporaryDirectory() as parent, written_by_python():
        folder = Path(parent, "checkpoints")
        _prepare(folder, p, leftover=p > 1)
        watched = Watched(folder, calls, unsure={NEW_FOLDER} if p > 1 else ())
        state = _state(NEW, place)
        watched.run(save, folder, NEW, state, names=user_ns, **keywords(partition, group))
        files = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    moments = []
    for moment in watched.moments:
        left = [{path: content_of(path, c) for path, c in tree.items()} for tree in moment.left]
        moments.append({"calls": moment.calls, "sure": moment.sure, "left": left})
    made = [as_dict(call) for call in log.since(mark)]
    return {"moments": moments, "files": sorted(files), "calls": made}
