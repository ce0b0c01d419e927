"""From faulthandler's text to "cell line 3 in ring(), in recv: dist.recv(x, src=1)"."""

from __future__ import annotations

import functools
import linecache
import re
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

# faulthandler begins each dump of the thread that got the signal with this line.
DUMP = "Stack (most recent call first):"
FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')

# The function that runs a task on an engine: IPython's for a cell, ipyparallel's for a call.
TASK = {"run_code", "do_apply"}

# Wrappers between the name that a student calls and the library's own work.
WRAPPERS = {"wrapper", "wrapped", "inner", "decorate_context", "fn"}


class Frame(NamedTuple):
    """One call on a thread's stack."""

    file: str
    line: int
    function: str


def main_stack(text: str) -> list[Frame]:
    """Return the main thread's frames, innermost first, from the last dump of it in the text."""
    for dump in reversed(text.split(DUMP)[1:]):
        frames = [
            Frame(frame[1], int(frame[2]), frame[3])
            for frame in map(FRAME.match, dump.splitlines())
            if frame
        ]
        if "\n  ..." in dump:
            # After 100 frames faulthandler stops: only a task goes that deep.
            return [*frames, Frame("...", 0, "run_code")]
        # The system may give the signal to another thread; that one began in `_bootstrap`.
        if frames and frames[-1].function != "_bootstrap":
            return frames
    return []


def explain(frames: list[Frame], cells: dict[str, str]) -> str:
    """Return where a rank is, for a student: the innermost own line and the library call it made.

    `cells` maps the file name of each notebook cell to its source.
    """
    depth = next((i for i, frame in enumerate(frames) if frame.function in TASK), None)
    if depth is None:
        return "idle"
    task = frames[:depth]
    own = next((i for i, f in enumerate(task) if f.file in cells or not is_library(f.file)), None)
    if own is None:
        return _place(task[0], cells) if task else "busy, between two lines"
    call = _library_call(task[:own])
    place = _place(task[own], cells)
    source = _source(task[own], cells)
    return place + (f", in {call}" if call else "") + (f": {source}" if source else "")


def _place(frame: Frame, cells: dict[str, str]) -> str:
    where = "cell" if frame.file in cells else Path(frame.file).name
    inside = "" if frame.function.startswith("<") else f" in {frame.function}()"
    return f"{where} line {frame.line}{inside}"


def _source(frame: Frame, cells: dict[str, str]) -> str:
    if frame.file not in cells:
        return linecache.getline(frame.file, frame.line).strip()
    lines = cells[frame.file].splitlines()
    return lines[frame.line - 1].strip() if 0 < frame.line <= len(lines) else ""


def _library_call(inside: list[Frame]) -> str | None:
    """What the own line called: the outermost library frame that has a name to show."""
    names = (frame.function for frame in reversed(inside))
    return next((n for n in names if n[0] not in "_<" and n not in WRAPPERS), None)


@functools.cache
def _library_folders() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {sysconfig.get_path(name) for name in names} | {str(Path(__file__).parents[1])}
    return tuple(str(Path(f)) + "/" for f in folders | {str(Path(f).resolve()) for f in folders})


def is_library(file: str) -> bool:
    """Return whether a file is Python's, a package's or the course's, rather than the student's."""
    if file.startswith("<") or file.startswith(_library_folders()):
        return True
    return "site-packages" in file or file.startswith(f"{sys.base_prefix}/lib/")
