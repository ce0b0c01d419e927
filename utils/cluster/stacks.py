"""A rank's place, from its stack: "cell line 3 in ring(), in recv: dist.recv(x, src=1)".

A rank that is stuck inside C can't answer. But at a SIGUSR1 it writes its stack to a file, and
another file has the source of its cells (see `rank_side.prepare`).
"""

from __future__ import annotations

import functools
import itertools
import json
import linecache
import os
import re
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from utils.cluster.notebook_words import place_in_cell
from utils.cluster.questions import NUMBER

# faulthandler starts each dump of the thread that got the signal with this line.
DUMP = "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

# The function that runs a task on an engine: IPython's for a cell, ipyparallel's for a call.
TASK = {"run_code", "do_apply"}

# Wrappers between the name that a student calls and the code of the library.
WRAPPERS = {"wrapper", "wrapped", "inner", "decorate_context", "fn"}

# Seconds without a new line after which a stack counts as complete.
QUIET = 0.06


class Frame(NamedTuple):
    """One call on a thread's stack."""

    file: str
    line: int
    function: str


class Look:
    """The ranks' stack files before they get a signal, so that it can read what they add."""

    def __init__(self, folder: Path, ranks: Iterable[int]):
        self._files = {rank: folder / f"stack-{rank}" for rank in ranks}
        self._sizes = {
            rank: file.stat().st_size if file.exists() else 0 for rank, file in self._files.items()
        }

    def dumps(self, alive: Iterable[int], timeout: float) -> dict[int, str]:
        """Return what these ranks added, once all of them are quiet or `timeout` s have passed."""
        deadline = time.monotonic() + timeout
        quiet_since = time.monotonic()
        texts = {rank: "" for rank in alive if rank in self._files}
        while time.monotonic() < deadline:
            now = {rank: self._added(rank) for rank in texts}
            if now != texts:
                quiet_since = time.monotonic()
                texts = now
            if all(texts.values()) and time.monotonic() - quiet_since > QUIET:
                break
            time.sleep(0.01)
        return texts

    def _added(self, rank: int) -> str:
        with self._files[rank].open(errors="replace", encoding="utf-8") as file:
            file.seek(self._sizes[rank])
            return file.read()


def place(dump: str, cells: Path) -> str:
    """Return where a rank is, from the text of its stack and the file with its cells."""
    frames = main_stack(dump)
    if not frames:
        return "unknown, because the rank did not answer (it is stopped or very busy)"
    return place_of(frames, cells)


def place_of(frames: list[Frame], cells: Path) -> str:
    """Return where a rank is, from the frames of its stack and the file with its cells."""
    try:
        lines = cells.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    notes = [json.loads(line) for line in lines if line.endswith("}")]
    return explain(frames, {note["file"]: note["source"] for note in notes})


def main_stack(text: str) -> list[Frame]:
    """Return the main thread's frames, innermost first, from the last dump of it in the text."""
    for dump in reversed(text.split(DUMP)[1:]):
        frames = [
            Frame(frame[1], int(frame[2]), frame[3])
            for frame in map(FRAME.match, dump.splitlines())
            if frame
        ]
        if "\n  ..." in dump:
            # faulthandler stops after 100 frames, and only a task goes that deep.
            return [*frames, Frame("...", 0, "run_code")]
        # If the system gave the signal to another thread, its stack begins in `_bootstrap`.
        if frames and frames[-1].function != "_bootstrap":
            return frames
    return []


def explain(frames: list[Frame], cells: dict[str, str]) -> str:
    """Return a rank's place for a student: its innermost own line, and the library call there.

    Args:
        cells: the source of each notebook cell, by the name of its file; the source may begin
            with the cell's number (`questions.FIRST_LINE`).
    """
    depth = next((i for i, frame in enumerate(frames) if frame.function in TASK), None)
    if depth is None:
        return "idle"
    task = frames[:depth]
    inside = list(itertools.takewhile(lambda frame: _is_library(frame, cells), task))
    if inside == task:
        return _line(task[0], cells, task) if task else "busy, between two lines"
    students = task[len(inside)]
    call = _library_call(inside)
    source = _source(students, cells)
    line = _line(students, cells, task)
    return line + (f", in {call}" if call else "") + (f": {source}" if source else "")


def _line(frame: Frame, cells: dict[str, str], task: list[Frame]) -> str:
    """Return a frame's place; it names the cell, unless this cell runs the task."""
    if frame.file not in cells:
        inside = "" if frame.function.startswith("<") else f" in {frame.function}()"
        return f"{Path(frame.file).name} line {frame.line}{inside}"
    running = next(one.file for one in reversed(task) if one.file in cells)
    tag = NUMBER.match(cells[frame.file])
    number = int(tag[1]) if tag and frame.file != running else None
    return place_in_cell(frame.line, frame.function, number)


def _source(frame: Frame, cells: dict[str, str]) -> str:
    if frame.file not in cells:
        return linecache.getline(frame.file, frame.line).strip()
    lines = cells[frame.file].splitlines()
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def _library_call(inside: list[Frame]) -> str | None:
    """Return the call in the student's line: the outermost library frame with a readable name."""
    names = (frame.function for frame in reversed(inside))
    return next((n for n in names if n[0] not in "_<" and n not in WRAPPERS), None)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {str(Path(__file__).parents[1])}
    return tuple(f"{Path(f)}{os.sep}" for f in folders | {str(Path(f).resolve()) for f in folders})


def _is_library(frame: Frame, cells: dict[str, str]) -> bool:
    """Return whether a line belongs to Python, a package or the course, not to the student."""
    file = frame.file
    if file in cells:
        return False
    if file.startswith("<") or file.startswith(_library_folders()):
        return True
    return "site-packages" in file or file.startswith(os.path.join(sys.base_prefix, "lib", ""))
