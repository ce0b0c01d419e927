"""The code that runs on the ranks: the set-up after a start, the hooks of each cell, and answers.

Nothing here enters the student's namespace. Only JSON text travels back to the kernel, because
the kernel must not unpickle anything that a student's code can reach.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import importlib
import io
import linecache
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable
from json import dumps, loads
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from ipyparallel.engine.datapub import publish_data
from IPython import get_ipython

from torch_mpi import settings
from torch_mpi.lines import sayable_error, text_of
from utils.cluster import cell_replies, notebook_words, rank_notes
from utils.cluster.memory_limit import limited_memory
from utils.cluster.questions import BALANCE, NUMBER, QUESTION, about, plain
from utils.cluster.rank_notes import Notes
from utils.jobs import RanksError, other_backend
from utils.timeline.cell_log import backend_world, start_watching

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from torch_mpi.present import World

# IPython's description of a cell, before or after it runs.
Event = TypeVar("Event")

# Most characters kept of what a check's call prints, and of an error.
MOST_OUTPUT = 64_000
MOST_ERROR = 4_000
# Most characters of output of one cell, because more would freeze the browser.
MOST_OF_A_CELL = 1_000_000
# Most frames of a traceback.
MOST_FRAMES = 40
# Seconds that ranks wait for each other after an error.
MEETING = 15.0


# The state of this rank: its real standard output and error, the files that are cells, the file for
# its stacks, how many characters the present cell may still print, how long a wait of the next cell
# may last, its notes for the kernel, whether a cell runs, and what threads have printed since then.
def fresh_state() -> SimpleNamespace:
    """Return the state with which a rank begins."""
    return SimpleNamespace(
        streams=(),
        cells=set(),
        dump=None,
        rank=0,
        room=MOST_OF_A_CELL,
        limit=None,
        notes=None,
        said=(None, None),
        runs_cell=False,
        kept=[],
    )


_here = fresh_state()


class _Kept(io.TextIOBase):
    """A stream that keeps only its beginning, so that an endless loop can't fill the memory."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.room = MOST_OUTPUT

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


def prepare(
    user_ns: dict[str, Any], *, rank: int, folder: str, fault_tolerant: bool = False
) -> dict[str, Any]:
    """Make this rank ready for `where` and `ask`, and return what `describe` shows.

    Args:
        folder: the kernel's folder. This rank writes `stack-RANK` (its stack at every SIGUSR1),
            `cells-RANK` (the source of every cell it has run, as JSON lines) and `now-RANK` (its
            note in a long cell).
        fault_tolerant: whether this rank must survive the death of another rank.

    Raises:
        RuntimeError: this rank would not survive, although it must.
    """
    from mpi4py import MPI

    from torch_mpi.mpi import why_not_survived
    from utils.jobs.forkserver.stub import WHY_NOT_VARIABLE

    if fault_tolerant and (lacking := why_not_survived()):
        raise RuntimeError(f"fault_tolerant=True: {lacking}")
    _here.dump = open(Path(folder) / f"stack-{rank}", "w", encoding="utf-8")  # noqa: SIM115 - faulthandler's, for good
    # The stacks of other threads may change while faulthandler walks them, and crash the process.
    faulthandler.register(signal.SIGUSR1, file=_here.dump, all_threads=False)
    watch_cells(user_ns, rank, Path(folder))
    if other_backend.is_gloo():
        from utils.cluster import gloo_ranks

        gloo_ranks.use(Path(folder))
    get_ipython().ask_exit = refuse_exit
    return {
        "rank": MPI.COMM_WORLD.Get_rank(),
        "size": MPI.COMM_WORLD.Get_size(),
        "host": socket.gethostname(),
        "cores": cores(),
        "numa": _numa_domains(cores()),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count(),
        "library": _library(MPI.Get_library_version()),
        "pid": os.getpid(),
        "not_forked": os.environ.get(WHY_NOT_VARIABLE, ""),
    }


def refuse_exit() -> None:
    """Refuse ``exit()`` and ``quit()``, after which the other ranks would wait for this one."""
    raise RanksError(
        "exit() would end this rank, and the other ranks could not communicate any more. To leave "
        "out the rest of a cell on this rank, put it below an if."
    )


def watch_cells(
    user_ns: dict[str, Any],
    rank: int,
    folder: Path,
    world: Callable[[], World | None] = backend_world,
) -> None:
    """Follow each cell of this rank: its source, its line, its errors, and what it communicates."""
    notebook_words.use()
    sys.breakpointhook = cell_replies.refuse_breakpoint
    _note_cells(folder / f"cells-{rank}")
    _here.notes = Notes(rank_notes.path_of(folder, rank), _here.cells, world)
    _here.rank = rank
    events = get_ipython().events
    events.register("pre_run_cell", _cell_begins)
    events.register("post_run_cell", _cell_ends)
    get_ipython().set_custom_exc((Exception, KeyboardInterrupt), _error_in_cell)
    # IPython would store each error's traceback in its history, which takes a second.
    get_ipython()._format_exception_for_storage = _without_traceback
    get_ipython().loop_runner = cell_replies.run_to_the_end
    get_ipython().set_hook("show_in_pager", cell_replies.print_help, 0)
    if kernel := getattr(get_ipython(), "kernel", None):
        kernel.session.pack = cell_replies.packing(kernel.session.pack)
        kernel.raw_input = kernel.getpass = cell_replies.refuse_input
    start_watching(user_ns, rank=rank)


def cores() -> list[int]:
    """Return the numbers of the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _numa_domains(cores: list[int]) -> list[int]:
    """Return the numbers of the NUMA domains of these cores; [] if the system has no such list."""
    folders = [Path(f"/sys/devices/system/cpu/cpu{core}") for core in cores]
    links = [link.name for folder in folders for link in folder.glob("node[0-9]*")]
    return sorted({int(name.removeprefix("node")) for name in links})


def _library(version: str) -> str:
    """Return the MPI library's name and version, from a text that may have many lines."""
    first = version.strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def limit_next_cell(seconds: float) -> None:
    """Let each communication of the next cell wait this long, whatever its group's timeout is."""
    _here.limit = seconds


def _even_if_interrupted(callback: Callable[[Event], None]) -> Callable[[Event], None]:
    """Wrap a callback so that it runs again after an interrupt, which IPython would swallow."""

    @functools.wraps(callback)
    def called(event: Event) -> None:
        try:
            callback(event)
        except KeyboardInterrupt:
            callback(event)

    return called


@_even_if_interrupted
def _cell_begins(info: ExecutionInfo) -> None:
    _here.notes.begin_cell()
    _here.room = MOST_OF_A_CELL
    settings.time_limit = _here.limit
    _here.limit = None
    tag = NUMBER.match(info.raw_cell or "")
    notebook_words.cell_runs(int(tag[1]) if tag else None)
    # Repeated for each cell, because IPython temporarily replaces the streams' `write`.
    for stream in _here.streams:
        if not hasattr(stream.write, "__wrapped__"):
            stream.write = _limited(stream.write)
    _here.runs_cell = True
    if _here.kept:
        text, _here.kept = "".join(_here.kept), []
        print(f"[a thread printed this after its cell had ended]\n{text}", end="")
    if world := backend_world():
        world.begin_section(f"{zlib.crc32((info.raw_cell or '').encode()):x}")


@_even_if_interrupted
def _cell_ends(result: ExecutionResult) -> None:
    _here.notes.end_cell()
    _here.runs_cell = False
    settings.time_limit = None
    error = result.error_before_exec or result.error_in_exec
    _tell(backend_world(), error)
    # The engine's reply has the error's text, which may take long, or fail, if it is asked again.
    asked, said = _here.said
    if result.error_in_exec is not None and result.error_in_exec is asked:
        result.error_in_exec = said
    _here.said = None, None
    # A balance of zero, the normal case, need not travel to the kernel.
    if error is None and (balance := _balance()):
        publish_data({BALANCE: balance})


def _error_in_cell(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Notify the other ranks, then write the traceback, which may take a second.

    An interrupt cuts the traceback short. No interrupt may leave this function, because IPython
    would never call it again.
    """
    said = error
    try:
        said = sayable_error(error)
        _tell(backend_world(), said)
        if kind is not KeyboardInterrupt:
            shown = type(said), said, shortened(trace)
            shell.showtraceback(shown, running_compiled_code=True)
            return
    except KeyboardInterrupt as stopped:
        said = stopped.with_traceback(trace)
        _tell(backend_world(), said)
    finally:
        _here.said = error, said
    shell._showtraceback(KeyboardInterrupt, said, ["KeyboardInterrupt"])


def shortened(trace: TracebackType | None) -> TracebackType | None:
    """Return both ends of a traceback: all frames of an endless recursion would take seconds."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if len(frames) > MOST_FRAMES:
        frames[MOST_FRAMES // 2 - 1].tb_next = frames[-MOST_FRAMES // 2]
    return frames[0] if frames else None


def _without_traceback(error: BaseException, *_: object, **__: object) -> dict[str, Any]:
    return {"ename": type(error).__name__, "evalue": "", "traceback": []}


def _tell(world: World | None, error: BaseException | None) -> None:
    """Tell the other ranks how the cell ended here, so that they stop waiting for this rank."""
    if world is None:
        return
    if error is None:
        world.end_section()
    else:
        world.raised(error, _cell_line(error) or "")


def _limited(write: Callable[[str], object]) -> Callable[[str], int]:
    """Return a `write` that stops with a remark once a cell has printed too much."""

    @functools.wraps(write)
    def limited(text: str) -> int:
        if _here.room > 0:
            _here.room -= len(text)
            write(text[: len(text) + min(_here.room, 0)])
            if _here.room <= 0:
                write(f"\n[… rank {_here.rank} printed more than 1 MB, so the rest is left out]\n")
        return len(text)

    return limited


def is_between_cells() -> bool:
    """Return whether this is a thread of the user's, while the rank runs no cell."""
    in_thread = threading.current_thread() is not threading.main_thread()
    return in_thread and not _here.runs_cell and _here.notes is not None


def keep_for_next_cell(text: str) -> None:
    """Keep what a thread prints between cells, up to as much as a cell may print."""
    if _here.room > 0:
        _here.room -= len(text)
        _here.kept.append(text)


def _note_cells(path: Path) -> None:
    """Write each cell's file name and source to a file before the cell runs.

    The kernel reads this file, because a rank that is stuck inside C can't answer.
    """
    compiler = get_ipython().compile
    compile_and_cache = compiler.cache

    @functools.wraps(compile_and_cache)
    def cache(source: str, number: int = 0, raw_code: str | None = None) -> str:
        tag = NUMBER.match(source)
        name: str = compile_and_cache(source, int(tag[1]) if tag else number, raw_code)
        if tag:
            notebook_words.number_cell(name, int(tag[1]))
        if name not in _here.cells:
            _here.cells.add(name)
            # A full disk must not stop the student's cell.
            with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as file:
                # Other ranks can read this file, but must not learn the arguments of a question.
                noted = f"{QUESTION}…)" if source.startswith(QUESTION) else source
                file.write(dumps({"file": name, "source": noted}) + "\n")
        return name

    compiler.cache = cache


# --- answers ----------------------------------------------------------------------------------


def answer(target: str, arguments: str, rank: int, token: str, of_ours: bool) -> None:
    """Run a function on the user's namespace; print one line of JSON, marked by the token.

    `questions.Question` describes the arguments. Other ranks are notified of a question only if
    it runs student code, so not if it is `of_ours`.
    """
    printed = _Kept()
    began = time.perf_counter()
    if not of_ours:
        notebook_words.cell_runs(None)  # the running cell is one of the kernel, such as a check
    if world := _students_world(of_ours):
        world.begin_section(token)
    keep_streams()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            module, _, name = target.partition(":")
            function = getattr(importlib.import_module(module), name)
            with contextlib.nullcontext() if of_ours else limited_memory():
                result = function(get_ipython().user_ns, rank=rank, **loads(arguments))
            value = plain(result)
            if world := _students_world(of_ours):
                world.withdraw_receives(began)
            values = {"status": "ok", "value": value, BALANCE: _balance()}
            reply = dumps(values | {"stdout": printed.text()})
        _tell(_students_world(of_ours), None)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers, too
        _tell(_students_world(of_ours), error)
        reply = dumps(_failure(error) | {"stdout": printed.text()})
    # The line break before the mark ends a line that another thread may have printed.
    _here.streams[0].write(f"\n{token}{reply}\n")
    _here.streams[0].flush()


def keep_streams() -> None:
    """Keep the original streams, because a student's code may replace sys.stdout later."""
    _here.streams = _here.streams or (sys.stdout, sys.stderr)


def _students_world(of_ours: bool) -> World | None:
    """Return the ranks to notify of a question; None if the question runs no student code.

    The called function may create the backend, so call this again after it.
    """
    return None if of_ours else backend_world()


def _balance() -> int:
    world = backend_world()
    return world.balance() if world else 0


def _failure(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    text = text_of(error)
    return {
        **about(error, text),
        "status": "error",
        "error": f"{kind}: {text}"[:MOST_ERROR],
        "line": _cell_line(error, with_code=True),
        **_of_communication(error),
    }


def _of_communication(error: BaseException) -> dict[str, Any]:
    """Return which communication failed, and whether all will fail until there are fresh ranks."""
    world = backend_world()
    if world is None:
        return {}
    from torch_mpi.errors import CommunicationError

    if not isinstance(error, CommunicationError):
        return {}
    lost = False
    try:
        world.refuse_if_not_whole()
    except CommunicationError:
        lost = True
    because = error.record.get("because", "")
    return {"call": error.record.get("op", ""), "because": because, "lost": lost}


def _cell_line(error: BaseException, *, with_code: bool = False) -> str | None:
    """Return the innermost line of a notebook cell on the way to this error.

    Args:
        error: what was raised.
        with_code: whether a line of a cell other than the running one comes with its code.
    """
    from torch_mpi.errors import place_text

    place = None
    entry = error.__traceback__
    while entry is not None:
        code = entry.tb_frame.f_code
        if code.co_filename in _here.cells:
            place = place_text(code.co_filename, entry.tb_lineno, code.co_name)
            if with_code and place.startswith("In["):
                place += f": {linecache.getline(code.co_filename, entry.tb_lineno).strip()}"
        entry = entry.tb_next
    return place


# --- the kernel's own questions ---------------------------------------------------------------


def after_a_failure(user_ns: dict[str, Any], *, rank: int, meet: bool) -> dict[str, Any]:
    """Return the ranks' statuses after the last cell; with `meet`, resynchronize the ranks."""
    world = backend_world()
    state = {"statuses": world.statuses() if world else [], "fresh": True}
    if world and meet:
        try:
            world.recover(MEETING)
        except RuntimeError:  # the notebook reports it
            state["fresh"] = False
    return state


def unreceived(user_ns: dict[str, Any], *, rank: int) -> list[dict[str, Any]]:
    """Discard messages that no rank has received; return this rank's, and where it sent them."""
    world = backend_world()
    return world.sweep() if world else []


def use_network(user_ns: dict[str, Any], *, rank: int, network: dict[str, Any] | None) -> None:
    """Use the network with these attributes, or the machine's own network for ``None``."""
    from torch_mpi.network import Network, link

    link.set(Network.from_dict(network))
    if network is not None and (world := backend_world()):
        for group in [*world.groups][:1]:
            link.calibrate(group)
