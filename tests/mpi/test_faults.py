"""Every fault ends, says once what it was, and leaves ranks that go on communicating.

`FAULT_TABLE=file` has the measured seconds written to a file as a Markdown table.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_tools import Notebook, Row, Shown, Table, notebook

pytestmark = pytest.mark.timeout(300)

N = 4
# Seconds after which a wait without any certainty ends; short, as several faults need it.
TIMEOUT = 6


# --- the table --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(request) -> Iterator[Table]:
    """Collects what the tests measured; shown after the last one."""
    collected = Table()
    yield collected
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{collected}\n")
    if path := os.environ.get("FAULT_TABLE"):
        Path(path).write_text(f"{collected}\n", encoding="utf-8")


# --- a notebook with four ranks ---------------------------------------------------------------

# What `ranks.ask` calls on the ranks.
PROBE = """
import torch
import torch.distributed as dist

def deadlock(user_ns, rank):
    if rank < 2:
        dist.recv(torch.zeros(3), src=1 - rank)

def fail(user_ns, rank):
    if rank == 1:
        raise ValueError("mine")
    dist.all_reduce(torch.ones(3))

def forget(user_ns, rank):
    if rank == 0:
        dist.isend(torch.ones(3), 1, tag=7)
"""

SET_UP = """\
%%px
import ctypes, os, signal, sys, threading, time, traceback
import numpy as np, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
rank, size = mpi_rank, mpi_size
def mark():
    open(f"{os.environ['FAULT_MARKS']}/{rank}", "w").close()
def mark_once_in(name):
    # Marks when this thread has been in a function of this name for three looks.
    own = threading.get_ident()
    def look():
        looks = 0
        while looks < 3:
            names = [one.name for one in traceback.extract_stack(sys._current_frames()[own])]
            looks = looks + 1 if name in names else 0
            time.sleep(0.02)
        mark()
    threading.Thread(target=look, daemon=True).start()
"""
JOIN = "%%px\ndist.init_process_group('mpi')\npair = dist.new_group([0, 1])\n"

# The next cell: its values tell a message of this cell from one that was left behind.
NEXT = """\
%%px
total = torch.tensor([{serial} + rank])
dist.all_reduce(total)
assert total.item() == {serial} * size + sum(range(size)), total
for count, tag in [(1, 0), (7, 3), (1_000_000, 0)]:
    for hop in range(size):
        mine = torch.full((count,), {serial} * 100 + 10 * hop + rank)
        theirs = torch.zeros_like(mine)
        right, left = (rank + 1) % size, (rank - 1) % size
        if rank % 2:
            dist.recv(theirs, src=left, tag=tag)
            dist.send(mine, dst=right, tag=tag)
        else:
            dist.send(mine, dst=right, tag=tag)
            dist.recv(theirs, src=left, tag=tag)
        assert (theirs == {serial} * 100 + 10 * hop + left).all(), (count, hop, theirs[0])
if rank < 2:
    both = torch.tensor([{serial}])
    dist.all_reduce(both, group=pair)
    assert both.item() == 2 * {serial}
print("works on", rank)
"""


class Course:
    """A notebook whose ranks have a process group; brings them back where a test broke them."""

    def __init__(self, book: Notebook, marks: Path, where: str = "processes"):
        self.book, self._marks, self.where = book, marks, where
        self._serial = 0
        self.whole = False
        start = f"cluster.start({N}, where={where!r}, timeout={TIMEOUT})"
        self.ok(f"from utils import cluster\nranks = {start}")
        self.set_up()

    def ok(self, code: str, timeout: float = 60) -> Shown:
        shown = self.book.run(code, timeout)
        assert not shown.failed(), shown.everything()
        return shown

    def set_up(self, join: bool = True) -> None:
        self.ok(SET_UP)
        if join:
            self.ok(JOIN)
        self.whole = join

    def restart(self, join: bool = True) -> None:
        self.ok("ranks.restart()")
        self.set_up(join)

    def make_whole(self) -> None:
        """Working ranks, whatever the test before has left."""
        if not self.whole:
            self.restart()

    def fail(self, code: str, stop: bool = False, computes: bool = False) -> Shown:
        """Run a cell that may break things; with `stop`, stop it once all ranks have called `mark`.

        computes: the cell computes forever, so that ranks that take turns don't all begin.
        """
        self.whole = False
        for file in self._marks.iterdir():
            file.unlink()
        wanted = 1 if computes and self.where == "here" else N

        def have_marked() -> bool:
            return len(list(self._marks.iterdir())) >= wanted

        return self.book.run(code, stop_when=have_marked if stop else None)

    def next_cell(self) -> Shown:
        """All ranks communicate with all; values are checked."""
        self._serial += 1
        shown = self.book.run(NEXT.replace("{serial}", str(self._serial)))
        self.whole = not shown.failed() and shown.streams.count("works on") == N
        return shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("faults")
    (path / "fault_probe.py").write_text(PROBE)
    (path / "marks").mkdir()
    return path


def environment(folder: Path, noninteractive: str | None) -> dict[str, str | None]:
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "IPP_NONINTERACTIVE": noninteractive,
        "PYTHONPATH": os.pathsep.join(paths),
        "FAULT_MARKS": str(folder / "marks"),
    }


@pytest.fixture(scope="module")
def ordered(folder) -> Iterator[Course]:
    with notebook(**environment(folder, "1")) as book:
        yield Course(book, folder / "marks")


@pytest.fixture
def course(ordered) -> Course:
    ordered.make_whole()
    return ordered


@pytest.fixture(scope="module")
def inside(folder) -> Iterator[Course]:
    """A notebook whose ranks are threads of its kernel."""
    with notebook(**environment(folder, "1")) as book:
        yield Course(book, folder / "marks", "here")


@pytest.fixture(scope="module")
def boxed(folder) -> Iterator[Course]:
    """A notebook whose ranks are processes without MPI."""
    with notebook(**environment(folder, "1")) as book:
        yield Course(book, folder / "marks", "boxes")


#: The fixtures by kind of ranks.
COURSES = {"processes": "ordered", "here": "inside", "boxes": "boxed"}


@pytest.fixture(params=["processes", "here", pytest.param("boxes", marks=pytest.mark.extended)])
def either(request: pytest.FixtureRequest) -> Course:
    course = request.getfixturevalue(COURSES[request.param])
    course.make_whole()
    return course


def next_one_works(course: Course, row: Row) -> None:
    shown = course.next_cell()
    row.works = "yes" if course.whole else "NO"
    assert course.whole, f"the next cell:\n{shown.everything()}"


def explained_once(shown: Shown, says: tuple[str, ...], never: tuple[str, ...] = ()) -> None:
    """One error, of our kind, that says all of it and nothing twice."""
    text = shown.message()
    assert shown.errors[0][0] in {"CellFailed", "RanksLostError"}, shown.everything()
    # The notebook wraps long lines.
    plain = re.sub(r"\s+", " ", text)
    for part in says:
        assert re.search(part, plain), f"not said: {part}\n{text}"
    for part in never:
        assert not re.search(part, plain), f"said: {part}\n{text}"
    headline = text.splitlines()[0].strip()
    assert text.count(headline) == 1, text
    assert shown.everything().count("Traceback (most recent call last)") <= 1, shown.everything()


# --- faults that all ranks survive ------------------------------------------------------------


@dataclass
class Fault:
    """A cell, without `%%px`, and what has to be said of it; lines count from `%%px`."""

    name: str
    cell: str
    says: tuple[str, ...]
    never: tuple[str, ...] = ("Traceback", "restart")
    stop: bool = False
    computes: bool = False  # for ever, without letting another rank run
    needs_processes: bool = False


def waits(rank: int, call: str, line: int) -> str:
    return rf"rank {rank} waits in {re.escape(call)} at cell line {line}\b"


DEADLOCKS = [
    Fault(
        "both receive first",
        "if rank < 2:\n    dist.recv(torch.zeros(3), src=1 - rank)",
        (
            "^Deadlock", waits(0, "recv(src=1, tag=0)", 3), waits(1, "recv(src=0, tag=0)", 3),
            "cycle 0 → 1 → 0", "What to try: both receive first",
        ),
    ),
    Fault(
        "both send first (large)",
        "if 0 < rank < 3:\n    dist.send(torch.ones(1_000_000), dst=3 - rank)",
        (
            "^Deadlock", waits(1, "send(dst=2, tag=0)", 3), waits(2, "send(dst=1, tag=0)", 3),
            "cycle 1 → 2 → 1", "both send first", "isend",
        ),
    ),
    Fault(
        "ring of four, all receive first",
        "x = torch.zeros(3)\ndist.recv(x, src=(rank - 1) % 4)\ndist.send(x, dst=(rank + 1) % 4)",
        (
            "^Deadlock", waits(3, "recv(src=2, tag=0)", 3), "cycle 0 → 3 → 2 → 1 → 0",
            "all receive first",
        ),
    ),
    Fault(
        "receive without send",
        "if rank == 0:\n    dist.recv(torch.zeros(3), src=2)",
        (
            "^rank 0 waits for rank 2, which has left the cell", "rank 2 has left the cell",
            waits(0, "recv(src=2, tag=0)", 3), "rank 2 never sends this message",
        ),
    ),
    Fault(
        "send without receive (4 MB)",
        "if rank == 3:\n    dist.send(torch.ones(1_000_000), dst=1)",
        (
            "^rank 3 waits for rank 1, which has left the cell",
            waits(3, "send(dst=1, tag=0)", 3), "rank 1 never receives this message",
        ),
    ),
    Fault(
        "tags that differ (large)",
        "if rank == 0:\n    dist.send(torch.ones(1_000_000), dst=1, tag=1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(1_000_000), src=0, tag=2)",
        ("^Deadlock", "cycle 0 → 1 → 0", "with tag=1, and rank 1 waits for one with tag=2",
         waits(1, "recv(src=0, tag=2)", 5)),
    ),
    Fault(
        "tags that differ (small)",
        "if rank == 0:\n    dist.send(torch.ones(3), dst=1, tag=1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(3), src=0, tag=2)",
        ("^rank 1 waits for rank 0", "with tag=1, and rank 1 waits for one with tag=2",
         waits(1, "recv(src=0, tag=2)", 5)),
    ),
    Fault(
        "missing rank in a collective",
        "if rank != 2:\n    dist.barrier()",
        (
            "^ranks 0, 1, 3 wait for rank 2, which has left the cell",
            "rank 2 has left the cell",
            waits(0, "barrier()", 3), "same collective calls in the same order", "if rank == …",
        ),
    ),
    Fault(
        "extra collective on one rank",
        "x = torch.ones(3)\ndist.all_reduce(x)\nif rank == 3:\n    dist.all_reduce(x)",
        (
            "^rank 3 waits for ranks 0, 1, 2, which have left the cell",
            waits(3, "all_reduce(SUM)", 5), "same collective calls",
        ),
    ),
    Fault(
        "collective against receive",
        "if rank == 1:\n    dist.recv(torch.zeros(1), src=0)\ndist.barrier()",
        (
            "^Deadlock", "cycle 0 → 1 → 0", waits(0, "barrier()", 4),
            waits(1, "recv(src=0, tag=0)", 3), "different calls",
        ),
    ),
    Fault(
        "async collective that nobody joins",
        "if rank == 2:\n    work = dist.all_reduce(torch.ones(3), async_op=True)\n    work.wait()",
        ("^rank 2 waits for ranks 0, 1, 3", r"rank 2 waits in all_reduce\(SUM\) at cell line [34]"),
    ),
    Fault(
        "fault in a subgroup while others compute",
        "end = time.time() + 1\nif rank == 0:\n    dist.barrier(group=pair)\n"
        "while rank > 1 and time.time() < end:\n    pass",
        ("^rank 0 waits for rank 1, which has left the cell", waits(0, "barrier()", 4)),
    ),
]  # fmt: skip

MISMATCHES = [
    Fault(
        "different collectives",
        "x = torch.ones(3)\nif rank == 0:\n    dist.all_reduce(x)\nelse:\n    dist.broadcast(x, 0)",
        (
            r"^rank 0 calls all_reduce\(SUM\) of float32\[3\] \(12 bytes\) at cell line 4, but "
            r"rank \d calls broadcast\(root=0\) of float32\[3\] \(12 bytes\) at cell line 6",
        ),
    ),
    Fault(
        "different shapes",
        "x = torch.ones(3 + (rank == 2))\ndist.all_reduce(x)",
        (
            r"^rank \d calls all_reduce\(SUM\) of float32\[[34]\] \(1[26] bytes\) at cell line 3, "
            r"but rank \d calls all_reduce\(SUM\) of float32\[[34]\]", "rank 2 calls .*?float32.4.",
        ),
    ),
    Fault(
        "different dtypes",
        "x = torch.ones(3, dtype=[torch.float32, torch.float64][rank % 2])\ndist.all_reduce(x)",
        (r"^rank \d calls all_reduce", r"float32\[3\]", r"float64\[3\]", "at cell line 3"),
    ),
    Fault(
        "different roots",
        "dist.broadcast(torch.ones(3), src=int(rank == 3))",
        (r"^rank \d calls broadcast\(root=0\)", r"rank 3 calls broadcast\(root=1\)", "cell line 2"),
    ),
    Fault(
        "different reduce ops",
        "op = dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM\n"
        "dist.all_reduce(torch.ones(3), op=op)",
        (r"all_reduce\(SUM\)", r"rank 1 calls all_reduce\(MAX\)", "cell line 3"),
    ),
    Fault(
        "message of another size",
        "if rank == 0:\n    dist.send(torch.ones(3), dst=1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(4), src=0)",
        (
            r"^rank 0 sent float32\[3\] \(12 bytes, tag=0\), but rank 1 receives float32\[4\] "
            r"\(16 bytes\)", "rank 1 .*cell line 5",
        ),
    ),
    Fault(
        "message of another size (large)",
        "if rank == 0:\n    dist.send(torch.ones(1_000_000), dst=1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(1_000_001), src=0)",
        (r"^rank 0 sent float32\[1000000\]", r"rank 1 receives float32\[1000001\]", "cell line 5"),
    ),
    Fault(
        "message of another dtype",
        "if rank == 2:\n    dist.send(torch.ones(3), dst=1)\n"
        "if rank == 1:\n    dist.recv(torch.ones(3, dtype=torch.int32), src=2)",
        (r"^rank 2 sent float32\[3\]", r"rank 1 receives int32\[3\]", "cell line 5"),
    ),
]  # fmt: skip

ONE_RAISES = (r"ValueError: mine", "on rank 1", "Traceback", "raise ValueError")
ERRORS = [
    Fault(
        "one raises, others in a collective",
        "if rank == 1:\n    time.sleep(0.3)\n    raise ValueError('mine')\n"
        "dist.all_reduce(torch.ones(3))",
        (
            *ONE_RAISES, r"rank 0 stopped waiting in all_reduce\(SUM\) at cell line 5",
            "rank 3 stopped waiting",
        ),
        never=("restart", "CommunicationStopped"),
    ),
    Fault(
        "one raises, others in recv",
        "if rank == 1:\n    time.sleep(0.5)\n    raise ValueError('mine')\n"
        "dist.recv(torch.ones(3), src=1)",
        (
            *ONE_RAISES, r"rank 0 stopped waiting in recv\(src=1, tag=0\) at cell line 5",
            "rank 2 stopped waiting",
        ),
        never=("restart", "CommunicationStopped", "Deadlock"),
    ),
    Fault(
        "the same error on all ranks",
        "def broken():\n    return undefined_name\nbroken()",
        ("NameError: name 'undefined_name'", "The same error occurred on ranks 0, 1, 2, 3"),
        never=("restart",),
    ),
    Fault(
        "infinite loop while others wait",
        "if rank == 3:\n    while True:\n        time.sleep(0.01)\ndist.barrier()",
        (
            "^ranks 0, 1, 2 wait for rank 3", waits(0, "barrier()", 5), "rank 3 still computes",
            "endless loop",
        ),
    ),
    Fault(
        "pending isend and irecv beside an error",
        "a, b = torch.ones(1_000_000), torch.zeros(7)\n"
        "kept = [dist.isend(a, (rank + 1) % 4), dist.irecv(b, (rank + 2) % 4)]\n"
        "dist.barrier()\nif rank == 0:\n    raise KeyError('gone')\ndist.barrier()",
        ("KeyError: 'gone'", "on rank 0"),
        never=("restart",),
    ),
]  # fmt: skip

INTERRUPTS = [
    Fault(
        "stop button: all compute",
        "mark()\nwhile True:\n    pass",
        ("^The ranks were interrupted", r"rank 0 .*cell line [34]", "rank 3 "),
        stop=True,
        computes=True,
    ),
    Fault(
        "stop button: one in recv, others compute",
        "if rank == 0:\n    mark_once_in('recv')\n    dist.recv(torch.ones(1), src=1)\nmark()\n"
        "while True:\n    time.sleep(0.01)",
        ("^The ranks were interrupted", r"rank 0 .*recv\(src=1, tag=0\) at cell line 4"),
        stop=True,
    ),
    Fault(
        "stop button: loop of collectives",
        "x = torch.ones(3)\nwhile True:\n    dist.all_reduce(x)\n    mark()",
        ("^The ranks were interrupted", "rank 0 ", "rank 3 "),
        stop=True,
    ),
    Fault(
        # As for one that had not begun the cell yet, or whose KeyboardInterrupt a finalizer took.
        "stop button: a rank takes no notice of the first interrupt",
        "def deaf(number, frame):\n    signal.signal(number, before)\n"
        "before = signal.getsignal(signal.SIGINT)\n"
        "rank == 1 and signal.signal(signal.SIGINT, deaf)\nmark()\nwhile True:\n"
        "    time.sleep(0.01)",
        ("^The ranks were interrupted", r"rank 1 was interrupted at cell line [78]"),
        stop=True,
        needs_processes=True,
    ),
    Fault(
        "stop button: DDP's backward waits",
        "model = DistributedDataParallel(torch.nn.Linear(300, 300))\n"
        "loss = model(torch.ones(2, 300)).sum()\nmark()\nwhile rank == 3:\n    time.sleep(0.01)\n"
        "loss.backward()",
        ("^The ranks were interrupted", "rank 0 ", r"rank 3 .*cell line [56]"),
        stop=True,
    ),
]
# Of a tensor that a rank changes while its message is under way: both lines.
OVERWRITTEN = [
    Fault(
        "one buffer for two messages",
        "if rank == 0:\n    x, works = torch.zeros(5000), []\n    for k in range(2):\n"
        "        x.fill_(k)\n        works.append(dist.isend(x, 1))\n"
        "    [work.wait() for work in works]\nelif rank == 1:\n"
        "    [dist.recv(torch.zeros(5000), 0) for _ in range(2)]",
        (r"tensor of isend\(dst=1.* sent at cell line 6,", "when cell line 7"),
    ),
    Fault(
        "a small tensor changed before the wait",
        "if rank == 2:\n    x = torch.ones(3)\n    work = dist.isend(x, 3)\n    x += 1\n"
        "    work.wait()\n"
        "elif rank == 3:\n    dist.recv(torch.ones(3), 2)",
        ("rank 3 may receive", "sent at cell line 4,", "when cell line 6 ran"),
    ),
    Fault(
        "a message received into what is being sent",
        "if rank < 2:\n    x = torch.full((5000,), 1.0 * rank)\n"
        "    work = dist.isend(x, 1 - rank)\n"
        "    dist.recv(x, 1 - rank)\n    work.wait()",
        ("sent at cell line 4,", "when cell line 6 ran"),
    ),
]
SURVIVED = [*DEADLOCKS, *MISMATCHES, *OVERWRITTEN, *ERRORS, *INTERRUPTS]


def survived() -> list:
    """All faults that ranks survive, for pytest; every second one is of the rest."""
    return [
        pytest.param(
            fault, id=fault.name.replace(" ", "-"), marks=pytest.mark.rest if k % 2 else ()
        )
        for k, fault in enumerate(SURVIVED)
    ]


@pytest.mark.parametrize("fault", survived())
def test_a_student_is_told_once_what_went_wrong_and_goes_on(fault, either, table):
    course = either
    if fault.needs_processes and course.where == "here":
        pytest.skip("threads have no signal handlers")
    shown = course.fail(f"%%px\n{fault.cell}", fault.stop, fault.computes)
    row = table.add(fault.name, shown.seconds, "\n".join(text for _, text in shown.errors))
    explained_once(shown, fault.says, fault.never)
    next_one_works(course, row)


# Presses the stop button when the next cell was sent to one rank, and not to the others yet.
STOP_WHILE_IT_IS_SENT = """\
import os, signal
send = ranks.client.send_execute_request
def send_and_stop(*args, **kwargs):
    ranks.client.send_execute_request = send
    sent = send(*args, **kwargs)
    os.kill(os.getpid(), signal.SIGINT)
    return sent
ranks.client.send_execute_request = send_and_stop
"""


def test_the_stop_button_while_a_cell_is_sent_leaves_no_rank_alone_with_it(course):
    course.ok(STOP_WHILE_IT_IS_SENT)
    shown = course.fail("%%px\ndist.barrier()\nwhile True:\n    time.sleep(0.01)")
    explained_once(shown, ("^The ranks were interrupted", "rank 0 ", "rank 3 "), ("restart",))
    assert course.next_cell().streams.count("works on") == N


# Its text takes a minute: that of a large tensor, on a busy machine, takes seconds.
SLOW_TO_SAY = """\
%%px
class Slow(Exception):
    def __str__(self):
        mark()
        time.sleep(60)
        return "slow"
if rank == 1:
    raise Slow()
mark()
dist.barrier()
"""


def test_the_stop_button_ends_the_writing_of_an_error_and_the_next_error_is_told_at_once(course):
    shown = course.fail(SLOW_TO_SAY, stop=True)
    explained_once(shown, ("^The ranks were interrupted", "rank 1 was interrupted at cell line 8"))
    assert "Custom TB Handler" not in shown.everything(), "IPython has dropped ours"
    fault = next(fault for fault in ERRORS if fault.name.startswith("one raises"))
    explained_once(course.fail(f"%%px\n{fault.cell}"), fault.says, fault.never)
    assert course.next_cell().streams.count("works on") == N


def test_a_picture_shows_who_waits_for_whom(either):
    shown = either.fail(f"%%px\n{DEADLOCKS[0].cell}")
    assert shown.pictures == 1
    either.next_cell()


def test_a_second_fault_is_explained_as_well_as_the_first(either, table):
    first, second = DEADLOCKS[0], MISMATCHES[0]
    explained_once(either.fail(f"%%px\n{first.cell}"), first.says, first.never)
    shown = either.fail(f"%%px\n{second.cell}")
    row = table.add("two faults in a row", shown.seconds, shown.message())
    explained_once(shown, second.says, second.never)
    next_one_works(either, row)


def test_handles_that_are_dropped_do_no_harm(either, table):
    cell = (
        "%%px\nout, into = torch.full((1_000_000,), rank), torch.zeros(1_000_000, dtype=int)\n"
        "dist.isend(out, (rank + 1) % 4)\ndist.irecv(into, (rank - 1) % 4)\nNone"
    )
    shown = either.fail(cell)
    row = table.add("isend, irecv never waited for", shown.seconds, "(no error, as it should be)")
    assert not shown.failed(), shown.everything()
    next_one_works(either, row)


def test_a_collective_that_one_rank_left_behind_is_named_in_the_next_cell(either, table):
    cell = "%%px\nif rank == 2:\n    work = dist.all_reduce(torch.ones(5), async_op=True)"
    shown = either.fail(cell)
    if not shown.failed():
        shown = either.fail("%%px\ndist.all_reduce(torch.ones(3))")
    row = table.add("async collective, never waited for", shown.seconds, shown.message())
    whose = (r"rank 2 calls all_reduce\(SUM\) of float32\[5\]", r"(In\[\d+\],|cell) line 3")
    explained_once(shown, whose)
    next_one_works(either, row)


def test_a_flood_of_output_ends_and_is_cut(either, table):
    shown = either.fail("%%px\nfor _ in range(1000):\n    print('x' * 100_000)")
    row = table.add("100 MB of output on every rank", shown.seconds, "(no error, as it should be)")
    assert not shown.failed(), shown.everything()[-3000:]
    assert shown.streams.count("printed more than 1 MB") == N
    assert len(shown.streams) < 5_000_000
    next_one_works(either, row)


ASK = """\
for reply in ranks.ask("fault_probe:{function}", timeout=30):
    print(reply.rank, reply.status, reply.error)
"""


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("deadlock", ("0 error Communication", "1 error Communication", "cycle 0 → 1 → 0",
                      r"rank 0 waits in recv\(src=1, tag=0\) at fault_probe.py:7", "2 ok", "3 ok")),
        ("fail", ("0 error CommunicationStopped: rank 0 .*rank 1 raised ValueError: mine",
                  "1 error ValueError: mine")),
    ],
)  # fmt: skip
def test_a_fault_in_a_check_is_an_answer_and_leaves_nothing_behind(function, says, either, table):
    shown = either.fail(ASK.replace("{function}", function))
    row = table.add(f"{function} inside ranks.ask", shown.seconds, shown.streams)
    assert not shown.failed(), shown.everything()
    for part in says:
        assert re.search(part, re.sub(r"\s+", " ", shown.streams)), shown.streams
    next_one_works(either, row)


# --- messages that nobody receives ---------------------------------------------------------------

# The values differ from those of the next cell, which uses the same ranks and tags.
FORGET = """\
%%px
if rank == 2:
    work = dist.isend(torch.full(({count},), -1), 3, tag={tag})
print("sent", rank)
"""


@pytest.mark.parametrize(("count", "tag"), [(1, 0), (7, 3), (1_000_000, 0)])
def test_a_message_that_no_rank_receives_is_told_and_reaches_no_later_receive(count, tag, either):
    shown = either.book.run(FORGET.format(count=count, tag=tag))
    assert not shown.failed(), shown.everything()
    text = re.sub(r"\s+", " ", shown.streams)
    sent = rf"int64\[{count}\] \({8 * count} bytes, tag={tag}\) to rank 3 at cell line 3"
    assert len(re.findall(rf"rank 2 sent {sent}, and no rank has received it", text)) == 1, text
    assert either.next_cell().streams.count("works on") == N
    assert "received" not in either.next_cell().streams


def test_a_message_of_one_cell_may_be_received_in_a_later_cell_of_its_own_ranks(either):
    """A cell of some ranks only can't be looked at by itself."""
    either.ok("%%px --targets 2\ndist.send(torch.tensor([5]), 3)")
    shown = either.ok("%%px --targets 3\ngot = torch.zeros(1, dtype=torch.int64)\n"
                      "dist.recv(got, 2)\nprint('got', got.item())")  # fmt: skip
    assert "got 5" in shown.streams
    assert "no rank has received" not in either.next_cell().streams


def test_a_message_that_an_answer_leaves_behind_is_told_to_the_check(either):
    shown = either.ok(
        "for r in ranks.ask('fault_probe:forget'):\n    print(r.rank, r.status, r.unreceived)"
    )
    assert "0 ok ('sent float32[3] (12 bytes, tag=7) to rank 1 at fault_probe.py" in shown.streams
    assert shown.streams.count("ok ()") == N - 1
    assert either.next_cell().streams.count("works on") == N


# --- a limit for one cell ------------------------------------------------------------------------

LATE_RANK = "import time\nif rank == 0:\n    time.sleep(2.5)\ndist.all_reduce(torch.ones(1))"
SHORT = "%px import datetime; dist.group.WORLD.set_timeout(datetime.timedelta(seconds={}))"


def test_one_cell_can_wait_longer_or_shorter_than_its_groups_say(course):
    shown = course.fail(f"%%px --timeout 0.7\n{LATE_RANK}")
    assert shown.message().startswith("ranks 1, 2, 3 wait for rank 0."), shown.everything()
    # The limit was that cell's only.
    course.ok(f"%%px\n{LATE_RANK}")
    course.ok(SHORT.format(0.7))
    course.ok(f"%%px --timeout 30\n{LATE_RANK}")
    shown = course.fail(f"%%px\n{LATE_RANK}")
    assert shown.message().startswith("ranks 1, 2, 3 wait for rank 0."), shown.everything()
    course.ok(SHORT.format(TIMEOUT))
    assert course.next_cell().streams.count("works on") == N


@pytest.mark.parametrize("given", ["0", "-1", "inf", "soon"])
def test_a_limit_that_is_none_is_refused_and_nothing_runs(either, given):
    shown = either.book.run(f"%%px --timeout {given}\nprint('ran')")
    assert re.search("UsageError.*--timeout", shown.streams), shown.everything()
    assert "ran" not in shown.streams


# --- faults that need fresh ranks -------------------------------------------------------------

DEADLY = [
    Fault("os._exit(3) on one rank", "if rank == 1:\n    os._exit(3)\ndist.barrier()",
          (r"^rank 1 died \(.*3", "MPI then ended ranks 0, 2, 3")),
    Fault("kill -9 of one rank",
          "if rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()",
          (r"^rank 2 died \(signal 9",)),
    Fault("segmentation fault on one rank",
          "if rank == 3:\n    ctypes.string_at(0)\ndist.barrier()",
          (r"^rank 3 died \(signal 11, segmentation fault",)),
]  # fmt: skip


@pytest.mark.parametrize("fault", DEADLY, ids=lambda fault: fault.name.replace(" ", "-"))
def test_a_dead_rank_is_named_and_restart_brings_all_back(fault, course, table):
    shown = course.fail(f"%%px\n{fault.cell}")
    row = table.add(fault.name, shown.seconds, shown.message())
    explained_once(shown, (*fault.says, r"ranks\.restart\(\)"), ("Traceback",))
    again = course.fail("%%px\nprint(rank)")
    assert again.failed(), "a cell without ranks"
    assert "restart()" in again.everything(), again.everything()
    course.restart()
    next_one_works(course, row)


def test_stop_frees_the_notebook_from_a_rank_that_is_stuck_inside_c(course, table):
    cell = "%%px\nfrom mpi4py import MPI\nbuffer = np.zeros(1)\nmark()\nif rank == 0:\n"
    cell += "    MPI.COMM_WORLD.Recv(buffer, 1)"
    shown = course.fail(cell, stop=True)
    row = table.add("stop button: mpi4py's Recv", shown.seconds, shown.message())
    says = ("^The ranks were interrupted", "rank 0 .*cell line 6", "Recv", r"ranks\.restart\(\)")
    explained_once(shown, says, ("Traceback",))
    course.restart()
    next_one_works(course, row)


# Deaf to the stop button until the file is there.
DEAF = """%%px
mark()
if rank == 1:
    while not os.path.exists(f"{os.environ['FAULT_MARKS']}/enough"):
        try:
            while not os.path.exists(f"{os.environ['FAULT_MARKS']}/enough"):
                time.sleep(0.01)
        except KeyboardInterrupt:
            pass
"""


def test_after_a_rank_could_not_be_stopped_no_cell_waits_for_it_and_it_may_come_back(
    either, folder, table
):
    shown = either.fail(DEAF, stop=True, computes=True)
    row = table.add("stop button: a rank that takes no notice", shown.seconds, shown.message())
    says = ("rank 1 still runs: cell line [567]", "rank 1 could not be stopped", r"restart\(\)")
    explained_once(shown, ("^The ranks were interrupted", *says), ("Traceback",))
    for code in ("%%px\nprint(rank)", "ranks.ask('fault_probe:forget')", "%%px\ndist.barrier()"):
        again = either.book.run(code)
        assert again.errors[0][0] == "RanksLostError", again.everything()
        assert "rank 1 still runs an earlier cell" in again.message()
        assert "restart()" in again.message()
    (folder / "marks" / "enough").touch()
    either.ok("while 'rank 1: idle' not in '\\n'.join(ranks.running().where(1.0)): time.sleep(0.1)")
    next_one_works(either, row)


def test_a_rank_that_never_joins_is_named_and_may_join_later(course, table):
    course.restart(join=False)
    shown = course.fail("%%px\nif rank != 3:\n    dist.init_process_group('mpi')")
    row = table.add("one rank without init_process_group", shown.seconds, shown.message())
    explained_once(shown, ("rank 3", "init_process_group", "cell line 3"))
    course.ok(JOIN)
    next_one_works(course, row)


# --- the same, streaming ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def streaming(folder, ordered) -> Iterator[Course]:
    """A notebook as a student has it: what the ranks print comes at once."""
    with notebook(**environment(folder, None)) as book:
        yield Course(book, folder / "marks")


STREAMED = [DEADLOCKS[0], ERRORS[0], ERRORS[2], INTERRUPTS[1]]


@pytest.mark.parametrize("fault", STREAMED, ids=lambda fault: fault.name.replace(" ", "-"))
def test_output_that_streams_holds_no_second_explanation(fault, streaming, table):
    streaming.make_whole()
    shown = streaming.fail(f"%%px\nprint('early', rank)\n{fault.cell}", fault.stop)
    row = table.add(f"streaming: {fault.name}", shown.seconds, shown.message())
    explained_once(shown, _lower_lines(fault.says), fault.never)
    assert shown.streams.count("early") == N, shown.streams
    next_one_works(streaming, row)


def _lower_lines(says: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns for a cell with one more line above it."""
    raised = [re.sub(r"cell line (\d)", lambda m: f"cell line {int(m[1]) + 1}", s) for s in says]
    return tuple(re.sub(r"cell line \[\d(\d)\]", r"cell line \\d", s) for s in raised)


# --- plain scripts under mpiexec ----------------------------------------------------------------

START = """\
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()
"""
FIRST = START.count("\n") + 1  # the line that a script's own text begins at
# Seconds for the start of Python and PyTorch on every rank, and for the fault: a deadline.
JOB = 100


@dataclass
class Script:
    """A program for two ranks, and how its one explanation begins."""

    name: str
    text: str
    headline: str
    says: tuple[str, ...]
    traceback_of: str = ""


def waits_in_script(rank: int, call: str, line: int) -> str:
    return rf"rank {rank} waits in {re.escape(call)} at train.py:{FIRST + line - 1}\b"


SCRIPTS = [
    Script(
        "deadlock of a pair",
        "dist.recv(torch.zeros(3), src=1 - rank)",
        "Deadlock: these ranks wait for each other",
        (
            waits_in_script(0, "recv(src=1, tag=0)", 1),
            waits_in_script(1, "recv(src=0, tag=0)", 1),
            "cycle 0 → 1 → 0", "both receive first",
        ),
    ),
    Script(
        "missing rank in a collective",
        "if rank == 0:\n    dist.barrier()",
        "rank 0 waits for rank 1, which has ended.",
        (waits_in_script(0, "barrier()", 2), "rank 1 has ended", "same collective calls"),
    ),
    Script(
        "mismatch",
        "dist.all_reduce(torch.ones(3 + rank))",
        "rank 0 calls all_reduce(SUM) of float32[3]",
        (rf"but rank 1 calls all_reduce\(SUM\) of float32\[4\] \(16 bytes\) at train.py:{FIRST}",),
    ),
    Script(
        "ValueError on one rank",
        "if rank == 1:\n    time.sleep(0.3)\n    raise ValueError('mine')\ndist.barrier()",
        f"rank 1 raised ValueError: mine at train.py:{FIRST + 2}; the others stopped waiting.",
        (rf"rank 0 (was stopped|waits) in barrier\(\) at train.py:{FIRST + 3}",),
        traceback_of="ValueError: mine",
    ),
    Script(
        "sys.exit(3) on one rank",
        "if rank == 1:\n    sys.exit(3)\ndist.barrier()",
        "rank 0 waits for rank 1, which has ended.",
        (waits_in_script(0, "barrier()", 3), "rank 1 has ended"),
    ),
]  # fmt: skip
BOARDS = {"shared": None, "messages": "messages"}


@dataclass
class Job:
    """A program that ran on two ranks; the seconds are with the start."""

    board: str
    seconds: float
    done: subprocess.CompletedProcess


@pytest.fixture
def jobs(mpiexec, tmp_path) -> Callable[[str], list[Job]]:
    """`jobs(text)` runs a program with each kind of board, at the same time."""
    path = tmp_path / "train.py"

    def run(board: str) -> Job:
        env = {"MPI_BACKEND_BOARD": BOARDS[board], "MPI_BACKEND_TIMEOUT": str(TIMEOUT)}
        begin = time.monotonic()
        done = mpiexec(2, path, timeout=JOB, check=False, env=env)
        return Job(board, time.monotonic() - begin, done)

    def run_all(text: str) -> list[Job]:
        path.write_text(START + text)
        with ThreadPoolExecutor() as pool:
            return list(pool.map(run, BOARDS))

    return run_all


def noted(table: Table, name: str, job: Job, message: str = "") -> Row:
    said = message or job.done.stderr
    return table.add(f"script, {job.board} board: {name}", job.seconds, said)


@pytest.mark.parametrize("program", SCRIPTS, ids=lambda program: program.name.replace(" ", "-"))
def test_a_failed_job_ends_by_itself_and_says_once_why(program, jobs, table):
    for job in jobs(program.text):
        row = noted(table, program.name, job, program.headline)
        said = job.done.stderr
        assert job.done.returncode != 0
        assert said.count(program.headline) == 1, f"{job.board} board:\n{said}"
        for part in program.says:
            assert re.search(part, said), f"{job.board} board: not said: {part}\n{said}"
        last_lines = re.findall(ends_with(program.traceback_of), said, re.MULTILINE)
        assert len(last_lines) == 1 or not program.traceback_of, said
        assert said.count("Traceback (most recent call last)") <= 1, said
        row.works = "ends"


def ends_with(error: str) -> str:
    """A traceback's last line, with or without PyTorch's `[rank1]: `."""
    return rf"^(?:\[rank\d\]: )?{error}$"


def test_a_job_whose_rank_vanishes_ends_and_names_it(jobs, table):
    for job in jobs("if rank == 1:\n    os._exit(3)\ndist.barrier()"):
        row = noted(table, "os._exit(3)", job)
        said = job.done.stderr
        assert job.done.returncode != 0
        assert re.search(r"rank 1 died|process rank 1 |,1\]\s+Exit code: +3", said), said
        assert "Traceback" not in said
        row.works = "ends"


RECOVERS = """\
def check():
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total)
    theirs = torch.zeros(3, 2)
    for tag in (0, 5):
        if rank:
            dist.recv(theirs, src=0, tag=tag)
            dist.send(theirs + 1, dst=0, tag=tag)
        else:
            dist.send(torch.full((3, 2), 5.0), dst=1, tag=tag)
            dist.recv(theirs, src=1, tag=tag)
    print("GOES ON", rank, total.item(), theirs.sum().item(), flush=True)

try:
    dist.recv(torch.zeros(3, 2), src=1 - rank, tag=5)
except dist.DistBackendError as error:
    print("RECORD", json.dumps([rank, error.record]), flush=True)
check()
try:
    dist.all_reduce(torch.ones(3 + rank))
except dist.DistBackendError as error:
    print("RECORD", json.dumps([rank, error.record]), flush=True)
check()
"""


def test_a_program_that_catches_the_error_on_all_ranks_goes_on(jobs, table):
    for job in jobs(RECOVERS):
        row = noted(table, "errors caught", job, "(both faults are caught)")
        said = job.done.stdout
        assert job.done.returncode == 0, said + job.done.stderr
        for rank, total in ((0, 36.0), (1, 30.0)):
            assert said.count(f"GOES ON {rank} 3.0 {total}") == 2, said
        records = [json.loads(text) for text in re.findall("^RECORD (.*)$", said, re.MULTILINE)]
        assert sorted(rank for rank, _ in records) == [0, 0, 1, 1]
        first = {rank: record for rank, record in reversed(records)}
        about_the_receive(first[0])
        last = dict(records)
        about_the_mismatch(last[1])
        row.works = "yes"


def line_of(text: str) -> str:
    """Where this piece of the program stands."""
    return f"train.py:{RECOVERS[: RECOVERS.index(text)].count(chr(10)) + FIRST}"


def holds(record: dict, **expected: object) -> None:
    """An error tells a program what it tells a person."""
    assert {key: record.get(key) for key in expected} == expected
    assert record.get("waited", -1) > 0, record


def about_the_receive(record: dict) -> None:
    holds(
        record, op="recv", partner=1, tag=5, dtype="float32", shape=[3, 2], nbytes=24,
        where=line_of("dist.recv(torch.zeros(3, 2)"),
    )  # fmt: skip


def about_the_mismatch(record: dict) -> None:
    holds(
        record, op="all_reduce", partner=None, dtype="float32", shape=[4], nbytes=16,
        where=line_of("dist.all_reduce(torch.ones(3 + rank))"),
    )  # fmt: skip


ONE_SIDED = """\
if rank == 1:
    raise ValueError("mine")
try:
    dist.barrier()
except dist.DistBackendError as error:
    print("CAUGHT", error, flush=True)
dist.all_reduce(torch.ones(3))
print("all_reduce came back", flush=True)
"""


def test_a_program_that_goes_on_without_the_failed_rank_is_ended(jobs, table):
    for job in jobs(ONE_SIDED):
        out, said = job.done.stdout, job.done.stderr
        row = noted(table, "error caught on one rank only", job)
        assert job.done.returncode != 0
        caught = r"CAUGHT rank 0 (stopped waiting in|did not begin) barrier.* rank 1 raised ValueE"
        assert re.search(caught, out), out
        assert "all_reduce came back" not in out
        assert len(re.findall(ends_with("ValueError: mine"), said, re.MULTILINE)) == 1, said
        row.works = "ends"
