"""The processor time of a test run by kind of test: of pytest, and of all that it starts.

`/usr/bin/time` misses most of a run: kernels, launchers and ranks end without anybody who waits for
them, and the fork server outlives its tests. So the controller of pytest-xdist looks at the
processes of the run once a second, and credits what each has used since the last look to the test
that started it. A process carries this test in its environment, or a parent of it does. Linux only,
because other systems have no /proc.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from processes import FORK_SERVER
from tabulate import tabulate

#: Minutes of processor time, user and system, that a run may take on a quiet machine, and seconds
#: that a lab may add to `make test`: its notebook, its answers and its own tests. A new test pays
#: for itself: if a run is above its budget, find what is done twice.
BUDGETS = {"test": 17.0, "test-all": 60.0, "ci": 35.0}
SECONDS_OF_A_LAB = 25.0

#: Processors are shared and differ, so a run's minutes count at the speed of a quiet one: seconds
#: that a quiet core at 2.5 GHz takes for so many additions.
ADDITIONS, QUIET = 200_000, 0.005
#: Looks between two measurements of the speed.
EACH = 20
#: Seconds between two looks. A process that starts and ends between them counts for its parent.
INTERVAL = 1.0
#: Seconds in which a process may get its final environment: a fork becomes a rank, for example.
YOUNG = 2.0
#: In this folder each process that runs tests keeps the name of its test, in a file of its number.
FOLDER = "DDL_LABS_PROCESSOR_TIME"
#: The test in the environment of all that it starts. pytest's own variable won't do, because nbval
#: is a pytest, too.
TEST = "DDL_LABS_TEST"

#: Patterns of test ids, and what the table calls their kind: the first that fits. All other tests
#: are of the kind of their folder.
KINDS = (
    (r"test_(solutions|without_processes)\.py", "solutions"),
    (r"test_answers\.py", "answers"),
    (r"test_(answers_on_ranks|forged_\w+)\.py", "answers on ranks, forged answers"),
    (r"^utils/mpi/|^tests/mpi/", "backend"),
    (r"^tests/(course|doctor|house)/", "release, installation, house"),
    (r"^tests/(timeline|figures|forecast)/", "timelines, figures, forecasts"),
    (r"^tests/(jobs|hpc)/", "jobs, hosts, Slurm, hub"),
    (r"^tests/pages/", "site, pages in a browser"),
    (r"^tests/labs/", "labs, other tests"),
    (r"^tests/(\w+)/", r"\1"),
)
#: A test of one lab has its number in its id.
OF_A_LAB = re.compile(r"tests/labs/test_\w+\.py::.*\[(?:lab)?(\d\d?)(?:\.\d|_[a-z]|\])")


def kind_of(test: str) -> str:
    """Return what kind of test this is, by its id: "answers", "backend", ..."""
    for pattern, kind in KINDS:
        if found := re.search(pattern, test):
            return found.expand(kind)
    return "data, models, collection"


# --- processes -----------------------------------------------------------------------------------


class Process(NamedTuple):
    """A process that was looked at: its number, and when it began, as numbers are used again."""

    pid: int
    began: int


class Usage(NamedTuple):
    """Seconds of processor time: of a process, and of the children that it has waited for."""

    own: float
    children: float


NOTHING = Usage(0.0, 0.0)


@dataclass
class Seen:
    """What is known of a process."""

    parent: Process | None
    since: float
    usage: Usage = NOTHING
    test: str = ""
    is_fork_server: bool = False


def looked_at() -> dict[Process, tuple[int, Usage]]:
    """Return all processes of this machine with the number of their parent and their usage."""
    tick = os.sysconf("SC_CLK_TCK")
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if not (text := _read(f"/proc/{name}/stat")):
            continue
        # From the state on, which is field 3 of `man proc_pid_stat`; the name before it may have
        # spaces and parentheses.
        fields = text.rpartition(b")")[2].split()
        user, system, of_children, system_of_children = map(int, fields[11:15])
        usage = Usage((user + system) / tick, (of_children + system_of_children) / tick)
        found[Process(int(name), int(fields[19]))] = (int(fields[1]), usage)
    return found


def _read(path: str) -> bytes:
    """Return the content of a file of /proc; nothing if the process is gone or another user's."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def test_in_environment(pid: int) -> str:
    """Return the id of the test that started a process; "" if its environment names none."""
    found = re.search(rb"(?:^|\0)%b=([^\0]*)" % TEST.encode(), _read(f"/proc/{pid}/environ"))
    return found[1].decode(errors="replace") if found else ""


def seconds_of_additions() -> float:
    """Return the processor time of :data:`ADDITIONS` additions, here and now."""
    begin, total = time.thread_time(), 0
    for number in range(ADDITIONS):
        total += number
    return time.thread_time() - begin


# --- the clock -----------------------------------------------------------------------------------


class ProcessorTime:
    """Adds up the processor time of a process and of all that it starts, by test."""

    def __init__(self, folder: Path, root: int | None = None):
        self.by_test: Counter[str] = Counter()
        self._additions: list[float] = []
        self._folder = folder
        self._root = os.getpid() if root is None else root
        self._seen: dict[Process, Seen] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="processor time", daemon=True)

    def start(self) -> None:
        """Look at the processes from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Look a last time, and remove the folder."""
        self._ended.set()
        self._thread.join()
        self.look()
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def slowness(self) -> float:
        """How many times longer the processor took, at the median, than a quiet one."""
        return statistics.median(self._additions or [QUIET]) / QUIET

    def _watch(self) -> None:
        looks = 0
        while not self._ended.wait(INTERVAL):
            self.look()
            if looks % EACH == 0:
                self._additions.append(seconds_of_additions())
            looks += 1

    def look(self) -> None:
        """Credit what each process has used since the last look to its test."""
        now = looked_at()
        by_number = {process.pid: process for process in now}
        moment = os.times().elapsed
        for process, (parent, _) in now.items():
            if process not in self._seen and self._is_ours(process, now, by_number):
                self._seen[process] = Seen(by_number.get(parent), moment)
        ended = self._seen.keys() - now.keys()
        # A child that was waited for is counted by its parent, too. It was credited before.
        counted: Counter[Process | None] = Counter()
        for process in sorted(ended, key=lambda one: one.began, reverse=True):  # children first
            seen = self._seen[process]
            counted[seen.parent] += seen.usage.own + seen.usage.children + counted[process]
        for process in self._seen.keys() & now.keys():
            seen, usage = self._seen[process], now[process][1]
            if moment - seen.since < YOUNG:
                self._identify(process, seen)
            unseen = usage.children - seen.usage.children - counted[process]
            used = usage.own - seen.usage.own + max(unseen, 0.0)
            seen.usage = usage
            if used:
                self.by_test[self._test_of(process)] += used
        for process in ended:
            del self._seen[process]

    def _is_ours(
        self,
        process: Process,
        now: Mapping[Process, tuple[int, Usage]],
        by_number: Mapping[int, Process],
    ) -> bool:
        """Return whether a new process descends from the root, or from a process that did."""
        one: Process | None = process
        while one is not None:
            if one.pid == self._root or one in self._seen:
                return True
            one = by_number.get(now[one][0])
        return False

    def _identify(self, process: Process, seen: Seen) -> None:
        seen.test = test_in_environment(process.pid)
        command = _read(f"/proc/{process.pid}/cmdline").decode(errors="replace")
        seen.is_fork_server = f"\0{FORK_SERVER}\0" in command

    def _test_of(self, process: Process) -> str:
        """Return the test that a process works for: its own, or that of its next ancestor."""
        one: Process | None = process
        while one is not None and (seen := self._seen.get(one)):
            with contextlib.suppress(OSError):
                return (self._folder / str(one.pid)).read_text(encoding="utf-8")
            if seen.is_fork_server:
                return "fork server"
            if seen.test:
                return seen.test
            one = seen.parent
        return ""


# --- the plugin of pytest's processes ------------------------------------------------------------


def begin() -> ProcessorTime | None:
    """Start to look, in the controller of a run; None where there is no /proc."""
    if not Path("/proc/self/stat").exists():
        return None
    folder = tempfile.mkdtemp(prefix="processor-time-")
    os.environ[FOLDER] = folder  # for the processes that run the tests
    clock = ProcessorTime(Path(folder))
    clock.start()
    return clock


def name_test(test: str) -> None:
    """Tell the controller which test this process runs from now on, and all that it starts."""
    os.environ[TEST] = test
    if folder := os.environ.get(FOLDER):
        with contextlib.suppress(OSError):
            (Path(folder) / str(os.getpid())).write_text(test, encoding="utf-8")


def table(by_test: Mapping[str, float], run: str = "", slowness: float = 1.0) -> list[str]:
    """Return the lines that tell who used the time, and whether a run kept its budget.

    Args:
        by_test: seconds by test id.
        run: a key of BUDGETS; "": a run without a budget.
        slowness: see :attr:`ProcessorTime.slowness`.
    """
    kinds: Counter[str] = Counter()
    labs: Counter[str] = Counter()
    for test, seconds in by_test.items():
        kinds["fork server" if test == "fork server" else kind_of(test)] += seconds
        if found := OF_A_LAB.search(test):
            labs[f"{int(found[1]):02}"] += seconds
    minutes = sum(kinds.values()) / 60
    rows = [[kind, f"{seconds:.0f}"] for kind, seconds in kinds.most_common()]
    lines = tabulate(rows, ["kind of test", "seconds"], colalign=("left", "right")).splitlines()
    most = SECONDS_OF_A_LAB * slowness
    heavy = [f"{lab} ({s:.0f} s)" for lab, s in labs.most_common() if s > most]
    if heavy and run == "test":
        lines.append(f"labs above {most:.0f} s: {', '.join(heavy)}")
    return [*lines, *_judged(minutes, run, slowness)]


def _judged(minutes: float, run: str, slowness: float) -> list[str]:
    used = f"{minutes:.1f} minutes of processor time"
    if run not in BUDGETS:
        return [used]
    quiet = minutes / slowness
    told = "within" if quiet <= BUDGETS[run] else "ABOVE"
    return [
        f"{used}; {ADDITIONS:,} additions took {1000 * QUIET * slowness:.1f} ms here",
        f"{quiet:.1f} minutes on a quiet processor, where they take {1000 * QUIET:.0f} ms, {told} "
        f"the budget of `make {run}`, {BUDGETS[run]:.0f} minutes",
    ]
