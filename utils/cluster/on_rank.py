"""What runs on the ranks: the set-up after a start, and the answers to the kernel's questions.

Nothing here goes into the student's namespace. Only JSON text travels back to the kernel: what
a student's code can reach must not be unpickled there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import io
import os
import signal
import socket
import sys
import threading
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace

from IPython import get_ipython

# Longest text kept of what a check's call prints, and of an error, in characters.
MOST_OUTPUT = 64_000
MOST_ERROR = 4_000

# Of this rank: its real standard output, the files that are cells, the file for its stacks.
_here = SimpleNamespace(stdout=None, cells=set(), dump=None)


class _Kept(io.TextIOBase):
    """Takes what is printed and keeps the beginning: an endless loop must not fill the memory."""

    def __init__(self):
        self.parts, self.room = [], MOST_OUTPUT

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self.room > 0:
            self.parts.append(text[: self.room])
            self.room -= len(text)
        return len(text)

    def text(self) -> str:
        return "".join(self.parts) + ("\n[… and more]" if self.room < 0 else "")


# --- the set-up -------------------------------------------------------------------------------


def prepare(user_ns: dict, *, rank: int, folder: str) -> dict:
    """Make this rank ready for `where` and `ask`; returns what `describe` shows.

    `folder` is the kernel's: this rank writes `stack-RANK` (its stack at every SIGUSR1) and
    `cells-RANK` (the source of every cell it has run, as JSON lines).
    """
    from mpi4py import MPI

    _here.dump = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115 - faulthandler's, for good
    faulthandler.register(signal.SIGUSR1, file=_here.dump, all_threads=True)
    _note_cells(Path(folder) / f"cells-{rank}")
    return {
        "rank": MPI.COMM_WORLD.Get_rank(),
        "size": MPI.COMM_WORLD.Get_size(),
        "host": socket.gethostname(),
        "cores": _cores(),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count(),
        "library": _library(MPI.Get_library_version()),
        "pid": os.getpid(),
        "main_thread": threading.main_thread().ident,
    }


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _library(version: str) -> str:
    """The MPI library's name and version, from a text that may go on for many lines."""
    first = version.strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def _note_cells(path: Path) -> None:
    """Write down each cell's file name and source before it runs.

    A rank that is stuck inside C can't be asked any more, so the kernel reads this instead.
    """
    compiler = get_ipython().compile
    compile_and_cache = compiler.cache

    @functools.wraps(compile_and_cache)
    def cache(source, *args, **kwargs):
        name = compile_and_cache(source, *args, **kwargs)
        if name not in _here.cells:
            _here.cells.add(name)
            # A full disk must not stop the student's cell.
            with contextlib.suppress(OSError), path.open("a") as file:
                file.write(dumps({"file": name, "source": source}) + "\n")
        return name

    compiler.cache = cache


# --- answers ----------------------------------------------------------------------------------


def answer(target: str, arguments: str, rank: int, token: str) -> None:
    """Run `package.module:function` on the user's namespace; print one marked line of JSON."""
    printed = _Kept()
    # The stream of the first minute: a student's code may replace sys.stdout later.
    _here.stdout = _here.stdout or sys.stdout
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            module, _, name = target.partition(":")
            function = getattr(importlib.import_module(module), name)
            value = function(get_ipython().user_ns, rank=rank, **loads(arguments))
            reply = dumps({"status": "ok", "value": value, "stdout": printed.text()})
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers, too
        reply = dumps(_failure(error) | {"stdout": printed.text()})
    # The line break before the mark ends what a thread may have printed meanwhile.
    _here.stdout.write(f"\n{token}{reply}\n")
    _here.stdout.flush()


def _failure(error: BaseException) -> dict:
    kind = type(error).__name__
    try:
        said = str(error)
    except Exception as worse:  # the student's own __str__
        said = f"(its text can't be shown: {type(worse).__name__})"
    return {
        "status": "error",
        "kind": kind,
        "error": f"{kind}: {said}"[:MOST_ERROR],
        "line": _cell_line(error),
    }


def _cell_line(error: BaseException) -> str | None:
    """The innermost line of a notebook cell on the way to this error."""
    found, entry = None, error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code.co_filename in _here.cells:
            found = f"cell line {entry.tb_lineno}"
        entry = entry.tb_next
    return found
