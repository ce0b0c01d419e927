"""The running ranks of a notebook that are threads of its kernel."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from ipyparallel.client.asyncresult import AsyncResult

from torch_mpi import present
from utils.cluster import notebook_words, stacks
from utils.cluster.failure import Outcome
from utils.cluster.running import Running
from utils.cluster.world.shared_ranks import SharedRanks
from utils.jobs.thread_plan import ThreadPlan

from .client import Client
from .own import Own
from .patience import Patience
from .rank import Rank
from .stand_ins import StandIns
from .turns import Turns


class Threads(Running):
    """Ranks that take turns in this process."""

    client: Client
    slow = 1.5  # the machine has no other rank that could keep this one from moving

    def __init__(self, plan: ThreadPlan):
        super().__init__(plan.n)
        self._plan = plan
        self._folder = Path(tempfile.mkdtemp(prefix="ddl-labs-"))
        self._exit = contextlib.ExitStack()
        self._exit.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._by_thread: dict[int, Rank] = {}
        notebook_words.use()
        self._exit.enter_context(StandIns(self.create, self.mine))
        self._exit.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(plan.threads)
        self._begin()

    def _begin(self) -> None:
        self._turns = Turns(self.n)
        self._shared = SharedRanks(self._turns)
        self._ranks = [Rank(k, self.n, self._shared.worlds[k]) for k in range(self.n)]
        clocks = self._turns.clocks.functions()
        self._turns.own = Own(self.n, clocks, lambda rank: self._ranks[rank].first_values())
        for rank in self._ranks:
            self._turns.own.set_main(rank.number, rank.main)
        self._turns.start()
        self._by_thread = dict(zip(self._turns.idents(), self._ranks, strict=True))
        self.client = Client(self._turns, self._ranks)
        tasks = {n: lambda rank, future: rank.prepare(self._folder) for n in self.client.ids}
        for future in self.client.submit(tasks).values():
            future.result()
        self._patience = Patience(self._turns, self._shared, self._plan.timeout, self._place_of)
        self.facts = [self._facts_of(rank) for rank in range(self.n)]

    def _facts_of(self, rank: int) -> dict[str, Any]:
        return {
            "rank": rank,
            "host": socket.gethostname(),
            "cores": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
            "numa": [],
            "threads": self._plan.threads,
            "library": "none: threads of this kernel",
            "pid": os.getpid(),
        }

    def create(self, ranks: list[int]) -> Any:
        """Make a group of ranks, in the place of PyTorch's ``ProcessGroupMPI.create``.

        Args:
            ranks: its global ranks; empty for all.
        """
        mine = self.mine()
        if mine is None:
            raise RuntimeError('init_process_group("mpi") works on the ranks, so in a %%px cell')
        present.world = mine.world
        members = tuple(ranks) if ranks else tuple(range(self.n))
        return self._shared.new_group(members) if mine.number in members else None

    def mine(self) -> Rank | None:
        """Return the rank whose thread calls this; ``None`` in a thread of the kernel."""
        return self._by_thread.get(threading.get_ident())

    # -- the contract of ranks -------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Return the folder that the kernel and its ranks share."""
        return self._folder

    def over(self) -> bool:
        """Return False: a rank lives as long as the kernel."""
        return False

    def last_words(self) -> str:
        """Return nothing."""
        return ""

    def send(self, cells: Mapping[int, str]) -> dict[int, AsyncResult]:
        """Send a silent cell to each of these ranks, all at once."""
        return self.client.question_each(cells)

    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Interrupt ranks, if the signal is SIGINT."""
        if name == signal.Signals.SIGINT.name:
            self._turns.interrupt(range(self.n) if targets is None else targets)

    def places(self, timeout: float) -> list[str]:
        """Return the place of each rank, in words."""
        busy = self._turns.busy()
        return [self._place_of(r) if r in busy else "idle" for r in range(self.n)]

    def _place_of(self, rank: int) -> str:
        frames = _frames(self._turns.frame(rank))
        return stacks.place_of(frames, self._folder / f"cells-{rank}")

    def beside(self, busy: set[int]) -> set[int]:
        """Return no rank while one is busy, because it has its turn for good."""
        return set() if busy else super().beside(busy)

    def _that_do_not_move(self, busy: set[int]) -> dict[int, str]:
        """Return the rank that doesn't give up its turn: all others only wait for theirs."""
        stuck = super()._that_do_not_move(busy)
        present, _ = self._turns.present()
        return {rank: place for rank, place in stuck.items() if rank == present}

    def examine(self, outcome: Outcome, busy: set[int]) -> None:
        """Ask the ranks what happened, see `Running.examine`; this needs no answer of theirs."""
        super().examine(outcome, busy)
        if outcome.busy:
            outcome.statuses |= {status["rank"]: status for status in self._shared.statuses()}

    def replace_ranks(self) -> bool:
        """Begin with new threads; the old ones end at their next communication."""
        self._retire()
        for notes in self._folder.glob("cells-*"):
            notes.unlink()
        view = self.client
        self._begin()
        view.become(self.client)
        self.client = view
        return True

    def _retire(self) -> None:
        self._patience.end()
        self._turns.retire()

    def close(self) -> None:
        """End the ranks, and leave the process as it was."""
        self._retire()
        self.client.close()
        self._exit.close()


def _frames(frame: FrameType | None) -> list[stacks.Frame]:
    """Return a thread's frames, innermost first, without those of taking turns."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(stacks.Frame(code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return frames
