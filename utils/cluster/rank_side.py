"""What runs on the ranks: the set-up after a start, what happens around each cell, and answers.

Nothing here goes into the student's namespace. Only JSON text travels back to the kernel: what
a student's code can reach must not be unpickled there.
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
from utils.cluster import notebook_words, rank_notes
from utils.cluster.questions import BALANCE, NUMBER, QUESTION, about, plain
from utils.cluster.rank_notes import Notes
from utils.jobs.forkserver.stub import WHY_NOT_VARIABLE
from utils.timeline.cell_log import backend_world, start_watching

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult, InteractiveShell

    from torch_mpi.protocol.world import World

# What IPython tells of a cell before it runs, or after.
Event = TypeVar("Event")

# Longest text kept of what a check's call prints, and of an error, in characters.
MOST_OUTPUT = 64_000
MOST_ERROR = 4_000
# Longest output of one cell, in characters: more brings the browser down.
MOST_OF_A_CELL = 1_000_000
# Most frames of a traceback.
MOST_FRAMES = 40
# Seconds that ranks wait for each other after an error.
MEETING = 15.0
# Seconds of processor time that the question for a busy machine takes.
WORK = 0.03

# Of this rank: its real standard output and error, the files that are cells, the file for its
# stacks, how much the present cell may still print, how long a wait of the next one may last, and
# its notes for the kernel.
_here = SimpleNamespace(
    streams=(), cells=set(), dump=None, rank=0, room=MOST_OF_A_CELL, limit=None, notes=None
)


class _Kept(io.TextIOBase):
    """A stream that keeps the beginning only: an endless loop must not fill the memory."""

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
        folder: the kernel's. This rank writes `stack-RANK` (its stack at every SIGUSR1),
            `cells-RANK` (the source of every cell it has run, as JSON lines) and `now-RANK` (what
            it does in a long cell).
        fault_tolerant: whether this rank survives the death of another one.

    Raises:
        RuntimeError: it should survive, and would not.
    """
    from mpi4py import MPI

    from torch_mpi.mpi import why_not_survived

    if fault_tolerant and (lacking := why_not_survived()):
        raise RuntimeError(f"fault_tolerant=True: {lacking}")
    notebook_words.use()
    _here.dump = open(Path(folder) / f"stack-{rank}", "w")  # noqa: SIM115 - faulthandler's, for good
    # Not of all threads: to walk the stack of one that runs meanwhile is a segmentation fault.
    faulthandler.register(signal.SIGUSR1, file=_here.dump, all_threads=False)
    _note_cells(Path(folder) / f"cells-{rank}")
    _here.notes = Notes(rank_notes.path_of(Path(folder), rank), _here.cells)
    _here.rank = rank
    events = get_ipython().events
    events.register("pre_run_cell", _cell_begins)
    events.register("post_run_cell", _cell_ends)
    get_ipython().set_custom_exc((Exception, KeyboardInterrupt), _error_in_cell)
    # IPython keeps each error's traceback with its history, and takes a second to write one.
    get_ipython()._format_exception_for_storage = _without_traceback
    start_watching(user_ns, rank=rank)
    return {
        "rank": MPI.COMM_WORLD.Get_rank(),
        "size": MPI.COMM_WORLD.Get_size(),
        "host": socket.gethostname(),
        "cores": _cores(),
        "numa": _numa_domains(_cores()),
        "threads": int(os.environ.get("OMP_NUM_THREADS", 0)) or os.cpu_count(),
        "library": _library(MPI.Get_library_version()),
        "pid": os.getpid(),
        "not_forked": os.environ.get(WHY_NOT_VARIABLE, ""),
    }


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _numa_domains(cores: list[int]) -> list[int]:
    """Return the numbers of the NUMA domains of these cores, where the system tells."""
    folders = [Path(f"/sys/devices/system/cpu/cpu{core}") for core in cores]
    links = [link.name for folder in folders for link in folder.glob("node[0-9]*")]
    return sorted({int(name.removeprefix("node")) for name in links})


def _library(version: str) -> str:
    """Return the MPI library's name and version, from a text that may go on for many lines."""
    first = version.strip("\0 \n").splitlines()[0].split(",")[0]
    return " ".join(first.replace("Version:", "").split())


def limit_next_cell(seconds: float) -> None:
    """Have each communication of the next cell wait for so long, whatever its group's timeout."""
    _here.limit = seconds


def _even_if_interrupted(callback: Callable[[Event], None]) -> Callable[[Event], None]:
    """Call it again after an interrupt, which IPython catches: the cell would end unheard."""

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
    # Again for each cell: IPython puts a `write` of its own into the streams, and takes it out.
    for stream in _here.streams:
        if not hasattr(stream.write, "__wrapped__"):
            stream.write = _limited(stream.write)
    if world := backend_world():
        world.begin_section(f"{zlib.crc32((info.raw_cell or '').encode()):x}")


@_even_if_interrupted
def _cell_ends(result: ExecutionResult) -> None:
    _here.notes.end_cell()
    settings.time_limit = None
    error = result.error_before_exec or result.error_in_exec
    _tell(backend_world(), error)
    # A number that is not zero goes to the kernel with the cell's output; mostly there is none.
    if error is None and (balance := _balance()):
        publish_data({BALANCE: balance})


def _error_in_cell(
    shell: InteractiveShell,
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    tb_offset: int | None = None,
) -> None:
    """Tell the others first: to write a long traceback takes a second.

    An interrupt meanwhile cuts it short. None may get out of here: IPython would never call this
    function again.
    """
    try:
        _tell(backend_world(), error)
        if kind is not KeyboardInterrupt:
            shell.showtraceback((kind, error, shortened(trace)), running_compiled_code=True)
            return
    except KeyboardInterrupt as stopped:
        error = stopped.with_traceback(trace)
        _tell(backend_world(), error)
    shell._showtraceback(KeyboardInterrupt, error, ["KeyboardInterrupt"])


def shortened(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback's two ends: endless recursion has a thousand frames, seconds of work."""
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
    """Tell the other ranks how it ended here: who waits for this rank must not wait any more."""
    if world is None:
        return
    if error is None:
        world.end_section()
    else:
        world.raised(error, _cell_line(error) or "")


def _limited(write: Callable[[str], object]) -> Callable[[str], int]:
    """Return a stream's `write` that ends with a remark when one cell prints too much."""

    @functools.wraps(write)
    def limited(text: str) -> int:
        if _here.room > 0:
            _here.room -= len(text)
            write(text[: len(text) + min(_here.room, 0)])
            if _here.room <= 0:
                write(f"\n[… rank {_here.rank} printed more than 1 MB; the rest is left out]\n")
        return len(text)

    return limited


def _note_cells(path: Path) -> None:
    """Write down each cell's file name and source before it runs.

    A rank that is stuck inside C can't be asked any more, so the kernel reads this instead.
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
            with contextlib.suppress(OSError), path.open("a") as file:
                # Other ranks can read this file, and must not find what a question tells this one.
                noted = f"{QUESTION}…)" if source.startswith(QUESTION) else source
                file.write(dumps({"file": name, "source": noted}) + "\n")
        return name

    compiler.cache = cache


# --- answers ----------------------------------------------------------------------------------


def answer(target: str, arguments: str, rank: int, token: str, of_ours: bool) -> None:
    """Run a function on the user's namespace; print one line of JSON, marked by the token.

    The arguments are those of `questions.Question`. Other ranks hear of a question only if the
    student's code runs, so not if it is `of_ours`.
    """
    printed = _Kept()
    began = time.perf_counter()
    if not of_ours:
        notebook_words.cell_runs(None)  # a cell of the kernel runs, such as a check
    if world := _students_world(of_ours):
        world.begin_section(token)
    # The stream of the first minute: a student's code may replace sys.stdout later.
    _here.streams = _here.streams or (sys.stdout, sys.stderr)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            module, _, name = target.partition(":")
            function = getattr(importlib.import_module(module), name)
            result = function(get_ipython().user_ns, rank=rank, **loads(arguments))
            before = _communications()
            value = plain(result)
            late = _communications() - before
            if world := _students_world(of_ours):
                world.withdraw_receives(began)
            values = {"status": "ok", "value": value, BALANCE: _balance(), "late": late}
            reply = dumps(values | {"stdout": printed.text()})
        _tell(_students_world(of_ours), None)
    except BaseException as error:  # SystemExit and KeyboardInterrupt are answers, too
        _tell(_students_world(of_ours), error)
        reply = dumps(_failure(error) | {"stdout": printed.text()})
    # The line break before the mark ends what a thread may have printed meanwhile.
    _here.streams[0].write(f"\n{token}{reply}\n")
    _here.streams[0].flush()


def _students_world(of_ours: bool) -> World | None:
    """Return the ranks that hear of a question: none of a function that runs no student's code.

    The function itself may have made the backend, so this is asked again after it.
    """
    return None if of_ours else backend_world()


def _balance() -> int:
    world = backend_world()
    return world.balance() if world else 0


def _communications() -> int:
    """Return how many communications this rank has recorded; none without the backend."""
    module = sys.modules.get("torch_mpi.record")
    return module.recorder.mark() if module else 0


def _failure(error: BaseException) -> dict[str, Any]:
    kind = type(error).__name__
    try:
        text = str(error)
    except Exception as worse:  # the student's own __str__
        text = f"(its text can't be shown: {type(worse).__name__})"
    return {
        **about(error, text),
        "status": "error",
        "error": f"{kind}: {text}"[:MOST_ERROR],
        "line": _cell_line(error, with_code=True),
        "lost": _is_final(error),
    }


def _is_final(error: BaseException) -> bool:
    """Return whether a communication has failed, and will fail until there are fresh ranks."""
    world = backend_world()
    if world is None:
        return False
    from torch_mpi.errors import CommunicationError

    if not isinstance(error, CommunicationError):
        return False
    try:
        world.refuse_if_not_whole()
    except CommunicationError:
        return True
    return False


def _cell_line(error: BaseException, *, with_code: bool = False) -> str | None:
    """Return the innermost line of a notebook cell on the way to this error.

    Args:
        error: what was raised.
        with_code: whether a line of another cell than the one that runs shows its code.
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
    """Return what the ranks said of the last cell; with `meet`, have them get together again."""
    world = backend_world()
    state = {"statuses": world.statuses() if world else [], "fresh": True}
    if world and meet:
        try:
            world.recover(MEETING)
        except RuntimeError:  # the notebook says so
            state["fresh"] = False
    return state


def unreceived(user_ns: dict[str, Any], *, rank: int) -> list[dict[str, Any]]:
    """Throw away messages that nobody has received; of those from here, where they were sent."""
    world = backend_world()
    return world.sweep() if world else []


def use_network(user_ns: dict[str, Any], *, rank: int, network: dict[str, Any] | None) -> None:
    """Use the network of `Ranks.network`: its attributes, or the machine's own."""
    from torch_mpi.network import Network, link

    link.set(Network.from_dict(network))
    if network is not None and (world := backend_world()):
        for group in [*world.groups][:1]:
            link.calibrate(group)


def processor_share(user_ns: dict[str, Any], *, rank: int) -> float:
    """Return how much of the time rank 0 gets a processor when it wants one; 1 on other ranks.

    One rank alone works, so that the ranks don't wait for each other's processors.
    """
    if rank:
        return 1.0
    begin = time.perf_counter()
    used = time.thread_time()
    while time.thread_time() - used < WORK:
        pass
    return min(1.0, WORK / (time.perf_counter() - begin))
