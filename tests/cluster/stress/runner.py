"""Plays cells in a notebook, and looks at what came of each."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tests.mpi.fault_tools import ROOT, Notebook, NotOver, Shown

from . import census, draw, stacks
from .cells import (
    IMPORTS,
    JOIN,
    NEXT,
    RESTART,
    SIGKILL,
    STOP_BUTTON,
    Act,
    Cell,
    px,
)
from .judge import advises_restart, beginning, problem, squeezed
from .record import Finding, Record

# Seconds that a communication waits where nothing is certain: not to be reached by right cells.
TIMEOUT = 15
# Seconds within which a cell must have come back; a restart.
DEADLINE, OF_A_RESTART = 75.0, 150.0
# Seconds that a frozen rank stands still.
FROZEN = 1.0
RESTART_CELL = "ranks.restart()"
PIDS = 'print("PIDS", *(record["pid"] for record in ranks.describe().records))'


class Broken(Exception):
    """A cell that must work did not."""


class Runner:
    """A notebook with n ranks, played as hard as it comes.

    Args:
        seed: of what is drawn. n: ranks. every: how many cells there are from census to census.
        deadline: seconds within which every cell must come back.
        warm: play `draw.warm_up` on fresh ranks before they are counted for the first time.
        say: what to do with a line of progress.
    """

    def __init__(
        self,
        seed: int,
        n: int,
        every: int = 20,
        deadline: float = DEADLINE,
        warm: bool = True,
        say: Callable[[object], object] = print,
    ):
        self.seed, self.n, self.every, self.deadline = seed, n, every, deadline
        self._warm, self._say = warm, say
        self.record = Record()
        self._folder = tempfile.TemporaryDirectory(prefix="stress-")
        self._number, self._serial, self._generation = 0, 100_000, 0
        # What is compared with: the first census of the present ranks; of the kernel, its own.
        self._allowed: dict[int, census.Census] = {}
        self._kernel_at_first: dict[str, int] = {}
        self._pids: list[int] = []
        self._open()

    # -- the notebook -------------------------------------------------------------------------

    def _open(self) -> None:
        self.record.notebooks += 1
        # As a student has it: what the ranks print is shown at once.
        paths = [*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)]
        environment = {"IPP_NONINTERACTIVE": None, "PYTHONPATH": os.pathsep.join(paths)}
        self._book = Notebook(environment)
        path = str(Path(self._folder.name) / f"stack-kernel-{self.record.notebooks}")
        shown = self._book.run(stacks.REGISTER.format(path=path))
        self._kernel = int(re.search(r"KERNEL (\d+)", shown.streams)[1])
        start = f"from utils import cluster\nranks = cluster.start({self.n}, timeout={TIMEOUT})"
        self._ok(start, OF_A_RESTART)
        self._kernel_at_first = {}
        self._set_up()

    def close(self) -> list[str]:
        """End it; returns what stays behind."""
        pids, seen = self._pids, self._last_census()
        with contextlib.suppress(NotOver):
            self._book.run("ranks.stop()", OF_A_RESTART)
        self._book.close()
        self._folder.cleanup()
        left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
        return left + (census.left_in_shared_memory(seen) if seen else [])

    def _set_up(self) -> None:
        self._ok(IMPORTS)
        self._ok(JOIN)
        found = re.search(r"PIDS ([\d ]+)", self._ok(PIDS).streams)
        self._pids = [int(pid) for pid in found[1].split()]

    def _ok(self, text: str, deadline: float | None = None) -> Shown:
        """Run a cell that must work."""
        shown = self._book.run(text, deadline or self.deadline)
        if shown.failed():
            raise Broken(f"this cell must work:\n{text}\n{shown.everything()}")
        return shown

    # -- the ranks ----------------------------------------------------------------------------

    def _restart(self) -> None:
        before = self._last_census()
        self._ok(RESTART_CELL, OF_A_RESTART)
        self._fresh(before)

    def _fresh(self, before: census.Census | None) -> None:
        """The ranks are new: nothing of the old ones may be left."""
        self.record.restarts += 1
        self._generation += 1
        if before and (left := census.left_in_shared_memory(before)):
            self._find(None, f"left by ranks that are gone: {', '.join(left)}")
        self._set_up()

    def _last_census(self) -> census.Census | None:
        """The last one of the present ranks."""
        found = self.record.censuses[-1:]
        return found[0] if found and found[0].generation == self._generation else None

    def _wake(self) -> None:
        """Press the stop button, until cells run again: what was sent before that is dropped."""
        self._book.interrupt()
        for _ in range(5):
            with contextlib.suppress(NotOver):
                if "awake" in self._book.run("print('awake')", 10).streams:
                    return

    def _heal(self) -> None:
        """Working ranks after a finding, if need be in a new notebook."""
        try:
            self._restart()
        except (NotOver, Broken) as error:
            self._find(None, f"ranks.restart() did not help: {error}")
            self._book.close()
            self._generation += 1
            self._open()

    # -- cells ----------------------------------------------------------------------------------

    def play(self, cells: Iterable[tuple[int, Cell]], until: float = float("inf")) -> None:
        """Play these cells, one after the other, to the end or until that time (monotonic)."""
        self.warm_up()
        for count, (number, cell) in enumerate(cells, 1):
            if time.monotonic() > until:
                break
            generation = self._generation
            self._play(number, cell)
            if self._generation != generation:
                self.warm_up()
            elif count % self.every == 0:
                self.count()

    def warm_up(self) -> None:
        """Have the ranks make what they make only once, and count for the first time."""
        generation = self._generation
        for cell in draw.warm_up(self.seed, self.n) if self._warm else ():
            self._play(self._number, cell)
        if self._generation == generation:
            self.count()

    def count(self) -> None:
        """Take a census; what has grown is a finding."""
        try:
            taken = census.take(self._ok, self._kernel, self._number, self._generation)
        except (NotOver, Broken) as error:
            self._find(None, f"the census did not work: {error}")
            return self._heal()
        self.record.censuses.append(taken)
        self._say(taken)
        allowed = self._allowed.setdefault(self._generation, taken.fresh(self._kernel_at_first))
        self._kernel_at_first = allowed.rows["kernel"]
        for text in taken.growth(allowed):
            self._find(None, f"it grows: {text}")
        return None

    def _play(self, number: int, cell: Cell) -> None:
        self._number = number
        self.record.cells[cell.kind, cell.name] += 1
        try:
            self._around(cell)
        except NotOver as late:
            self._find(cell, str(late).splitlines()[0], str(late), self._stacks())
            self._wake()
            self._heal()
        except Broken as broken:
            self._find(cell, "what follows it does not work", str(broken), self._stacks())
            self._heal()

    def _around(self, cell: Cell) -> None:
        """The cell, with what belongs to it; and the next one, which must work."""
        for text in cell.before:
            self._ok(text)
        seen = self._last_census()
        shown = self._run(cell)
        if what := problem(cell, shown, self.n):
            self._find(cell, what, shown.everything())
        if shown.failed():
            self.record.errors[beginning(shown)] += 1
        for text in cell.after:
            self._ok(text)
        if cell.kind == RESTART and not shown.failed():
            self._fresh(seen)
        elif shown.failed() and (cell.restart or advises_restart(shown)):
            self._restart()
        if shown.failed() or cell.act or cell.echo:
            self._next_works(cell, shown)

    def _next_works(self, cell: Cell, shown: Shown) -> None:
        followed = self._next()
        if followed.failed() and cell.echo and re.search(cell.echo, squeezed(followed)):
            self.record.errors[beginning(followed)] += 1
            followed = self._next()
        if followed.failed() or followed.streams.count("works on") != self.n:
            raise Broken(
                f"the cell showed:\n{shown.everything()}\n--- and the next one\n"
                f"{followed.everything()}"
            )
        seconds = shown.seconds + followed.seconds
        self.record.slowest = max(self.record.slowest, (seconds, self._number, cell.name))

    def _next(self) -> Shown:
        self._serial += 1
        return self._book.run(px(NEXT.removeprefix("%%px\n"), serial=self._serial), self.deadline)

    def _run(self, cell: Cell) -> Shown:
        deadline = OF_A_RESTART if cell.kind == RESTART else self.deadline
        if cell.act is None:
            return self._book.run(cell.text, deadline)
        moment = time.monotonic() + cell.act.after
        with self._acting(cell.act) as press:
            return self._book.run(
                cell.text, deadline, stop_when=lambda: time.monotonic() > moment, press=press
            )

    @contextlib.contextmanager
    def _acting(self, act: Act) -> Iterator[object]:
        """What to call at the moment of the act; None is the stop button."""
        if act.what == STOP_BUTTON:
            yield None
            return
        pid = self._pids[act.rank]
        if act.what == SIGKILL:
            yield lambda: os.kill(pid, signal.SIGKILL)
            return
        thaw = threading.Timer(FROZEN, os.kill, (pid, signal.SIGCONT))

        def freeze() -> None:
            os.kill(pid, signal.SIGSTOP)
            thaw.start()

        try:
            yield freeze
        finally:
            if thaw.ident is not None:
                thaw.join()

    # -- findings -------------------------------------------------------------------------------

    def _find(self, cell: Cell | None, what: str, shown: str = "", where: str = "") -> None:
        finding = Finding(self._number, cell, what, shown, where)
        self.record.findings.append(finding)
        self._say(f"\n{finding}\n")

    def _stacks(self) -> str:
        ranks = {f"rank {rank}": pid for rank, pid in enumerate(self._pids)}
        return stacks.of({"kernel": self._kernel, **ranks})
