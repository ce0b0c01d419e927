"""The check of a save that may be interrupted: what is on the disk after each file operation.

The student's function runs on real files. After each system call, :class:`Watched` notes two
things. One is what other processes see, because a killed process leaves this. The other is what
was forced to the disk, because only this survives a power failure for certain. A power failure may
keep all or none of the entries that aren't forced yet, or lose only the names of new folders.

Each rank saves to a separate copy of the folder. :func:`states` combines the copies into what the
machine has if all ranks end together: one rank is after its k-th operation, and the others are as
far as the collectives between them require, or as far as they allow.
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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from utils.checks.comparison import TOGETHER, inside, some, waited
from utils.checks.probe import as_dict, reading_answer
from utils.checks.task import Report, Step, communication, facts, task
from utils.checks.trials import Group, in_group, keywords, on, tried
from utils.cluster.questions import Ranks

#: The content of each file in a rank's folder, by path.
Tree = dict[str, bytes]

#: Something may have changed after a call of a function or a file object of these modules.
_SYSTEM = {"posix", "_io", "io"}
_IN_MEMORY = (io.BytesIO, io.StringIO)
#: What may end the ranks, in the order of :attr:`Moment.left`.
KINDS = ("kill", "power", "power, folders kept", "power, new folders lost")


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


def states(ranks: Sequence[Sequence[dict]]) -> Iterator[tuple[str, int, list[int]]]:
    """Yield moments at which all ranks may end together.

    Args:
        ranks: the moments of each rank, with ``calls`` and ``sure`` as in :class:`Moment`.

    Yields:
        What ends the ranks (one of :data:`KINDS`), the rank that a message would name, and the
        number of each rank's moment.
    """
    for rank, moments in enumerate(ranks):
        for k, moment in enumerate(moments):
            behind = []
            ahead = []
            for theirs in ranks:
                # The others have called what this rank is sure of, and done all that comes before.
                must = [j for j, m in enumerate(theirs) if m["calls"] < moment["sure"]]
                can = [j for j, m in enumerate(theirs) if m["sure"] <= moment["calls"]]
                behind.append(max(must, default=0))
                ahead.append(max(can, default=0))
            behind[rank] = ahead[rank] = k
            for chosen in (behind, ahead):
                for kind in KINDS:
                    yield kind, rank, chosen


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


# -- 13.3: a save that may end at any moment --------------------------------------------------

OLD, NEW = 10, 20
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


def _whole(step: int, place: int) -> str:
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
        return _whole(step, place) if whole else "incomplete"
    except Exception:
        return "incomplete"


@in_group
def probe_save(user_ns: dict, *, rank: int, group: Group, partition) -> dict:
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


@task("13.3", "a save that may crash", points=4)
def safe_save(ranks: Ranks, report: Report) -> None:
    """Judge whether `latest` names a whole checkpoint whenever the ranks end."""
    cases = [{"partition": [[1, 2, 3], [0]]}, {"partition": None}]
    for _, members, results in tried(ranks, report, probe_save, cases):
        kept_in_group = [
            report.communication(rank, result["calls"], inside(members), waited)
            for rank, result in zip(members, results, strict=True)
        ]
        if all(kept_in_group):
            report.follow(None, _saves(members, results))


def to_rank(rank: int, step: Step) -> Step:
    """Return a step whose problem is reported for this rank."""
    return lambda report, _: step(report, rank)


def _saves(members: list[int], results: list[dict]) -> Iterator[Step]:
    for place, rank in enumerate(members):
        wrong = _wrong_files(members, results, place) | _shared_files(members, results, place)
        yield to_rank(rank, facts(wrong))
    for left, place, kill, done in _ends(results):
        for step in _loaded(left, len(members), kill, done, on(members)):
            yield to_rank(members[place], step)
    for rank, result in zip(members, results, strict=True):
        yield to_rank(rank, communication(result["calls"], some(members)))


def _ends(results: list[dict]) -> Iterator[tuple[dict[str, str], int, bool, bool]]:
    """Yield each distinct end once: the files, the rank to name, if by a kill, if all were done."""
    moments = [result["moments"] for result in results]
    last = [len(of_rank) - 1 for of_rank in moments]
    seen = set()
    for kind, place, chosen in [*states(moments), *((kind, 0, last) for kind in KINDS)]:
        left = _left(results, chosen, kind)
        how = kind == "kill", chosen == last
        key = how, tuple(sorted(left.items()))
        if key not in seen:
            seen.add(key)
            yield left, place, *how


def _at_first(results: list[dict]) -> dict[str, str]:
    return results[0]["moments"][0]["left"][0]


def _wrong_files(members: list[int], results: list[dict], place: int) -> dict[str, object]:
    """Return what is wrong with the files that a rank writes and leaves at the end."""
    first = _at_first(results)
    result = results[place]
    path = f"{NEW_FOLDER}/rank-{place}.pt"
    last = result["moments"][-1]["left"][0]
    changed = {name for name, text in last.items() if first.get(name) != text}
    others = [name for name in changed if name.endswith(".pt") and name != path]
    overwritten = [name for name in others if name.startswith(OLD_FOLDER)]
    markers = [rank for rank, other in zip(members, results, strict=True) if _writes_marker(other)]
    content = last.get(path)
    left_by_crash = content == first.get(path) is not None
    return {
        f"You overwrote {''.join(overwritten[:1])}, which a crash now would need. Write into the "
        "folder of the new step": overwritten,
        f"You wrote {''.join(others[:1])} on group rank {place}. Write {path} there": others,
        f"You left no {path}, only {result['files'][:6]}. Write each rank's state into its file": (
            path not in result["files"]
        ),
        f"{path} is still what a crashed save left. Let every rank write its file": left_by_crash,
        f"{path} is {content}. Save the whole state, so that torch.load returns it": (
            content != _whole(NEW, place)
        ),
        "No rank wrote `latest`. Let group rank 0 write it, which place_and_size(group) finds: "
        "it need not be rank 0 of the world": not markers,
        f"Ranks {markers} wrote `latest`. Let only group rank 0 write it": len(markers) > 1,
    }


def _writes_marker(result: dict) -> bool:
    return any(moment["left"][0].get("latest") != OLD_FOLDER for moment in result["moments"])


def _shared_files(members: list[int], results: list[dict], place: int) -> dict[str, object]:
    """Return what would go wrong in a shared folder, although each rank has a copy here."""
    first = _at_first(results)
    written = [
        {path for moment in result["moments"] for path in moment["left"][0]} - set(first)
        for result in results
    ]
    others = [k for k in range(len(members)) if k != place]
    shared = sorted(path for k in others for path in written[place] & written[k])
    paths = {k: f"{NEW_FOLDER}/rank-{k}.pt" for k in others}
    removed = [
        path for k, path in paths.items() if _removes(results[place], results[k], first, path)
    ]
    return {
        f"Several ranks write {''.join(shared[:1])} at the same time, because all ranks of the lab "
        "save into one folder. Give each rank's temporary file a separate name": shared,
        f"You removed {''.join(removed[:1])}, which another rank may just have written. Remove "
        "only this rank's files": removed,
    }


def _removes(result: dict, other: dict, first: dict[str, str], path: str) -> bool:
    """Return whether a rank may remove a file after the other rank has written it."""
    wrote = (m for m in other["moments"] if m["left"][0].get(path) != first.get(path))
    gone = (m for m in result["moments"] if path not in m["left"][0])
    begins, ends = next(wrote, None), next(gone, None)
    return bool(path in first and begins and ends and begins["sure"] <= ends["calls"])


def _left(results: list[dict], chosen: list[int], kind: str) -> dict[str, str]:
    """Return the shared disk's content: each file as the rank that changes it leaves it."""
    trees = [
        result["moments"][k]["left"][KINDS.index(kind)]
        for result, k in zip(results, chosen, strict=True)
    ]
    first = _at_first(results)
    left = {}
    for path in set(first).union(*trees):
        changed = [tree.get(path) for tree in trees if tree.get(path) != first.get(path)]
        # If a rank removes another rank's file, it does so in its copy, but the file was written.
        changed.sort(key=lambda content: content is None)
        content = changed[0] if changed else first.get(path)
        if content is not None:
            left[path] = content
    return left


def _loaded(left: dict[str, str], p: int, kill: bool, done: bool, where: str) -> Iterator[Step]:
    """Judge whether a rank could load what is left after a kill or a power failure."""
    marker = left.get("latest", "")
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    why = (
        "open(…, 'w') empties the file before the text comes. Write to another file, then call "
        "os.replace"
        if kill
        else "its name may be on the disk without its content. Call file.flush() and os.fsync "
        "before you rename the file"
    )
    yield facts({
        f"{end} may leave `latest` empty or missing, because {why}": not marker,
        f"{end} may leave {marker!r} in `latest` instead of the folder's name, {NEW_FOLDER!r}. "
        "Write it to another file, then call os.replace": marker not in (OLD_FOLDER, NEW_FOLDER),
    })
    for place in range(p):
        content = left.get(f"{marker}/rank-{place}.pt", "missing")
        yield _file(marker, place, content, kill, where)
    yield facts({
        f"{where}: a power failure after save has returned may bring the old `latest` back. Let "
        "one rank write it, then call os.fsync, os.replace and "
        "flush_folder(folder)": done and marker == OLD_FOLDER
    })


def _file(marker: str, place: int, content: str, kill: bool, where: str) -> Step:
    """Judge the content of a rank's file, after a kill or a power failure."""
    end = f"{where}: {'a kill' if kill else 'a power failure'}"
    old = marker == OLD_FOLDER
    name = f"rank-{place}.pt"
    why = (
        "you wrote the marker too early. Write the data of all ranks first, then call a barrier, "
        "then write the marker"
        if kill
        else "its content or its name isn't on the disk yet. Before the marker, call flush_folder "
        "of the parent after mkdir, file.flush() and os.fsync before the renaming, and "
        "flush_folder of the file's folder after it"
    )
    wrong = content != _whole(OLD if old else NEW, place)
    return facts({
        f"{end} during the save leaves `latest` at {marker}, whose {name} is {content}, because "
        "you overwrote the only complete checkpoint. Write into a new folder": wrong and old,
        f"{where}: {marker}/{name} is {content}. Let each rank save its own state": wrong
        and content.startswith("the state"),
        f"{end} may leave `latest` at {marker}, whose {name} is {content}, because {why}": wrong,
    })
