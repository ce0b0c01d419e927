"""The running ranks of a notebook, whatever they are: what the kernel asks of them.

:class:`Running` is the one contract of ranks. `ipp_cluster.Processes` are MPI ranks,
`boxes.box_ranks.Boxes` are processes without MPI, and `here.thread_ranks.Threads` are threads of
the kernel.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_mpi.protocol.diagnosis import names
from utils.cluster import questions, rank_side
from utils.cluster.failure import Outcome, RanksLostError
from utils.cluster.notebook_words import FRESH_RANKS
from utils.cluster.questions import AskStopped, Confirmed, Question, Reply, target_of
from utils.jobs import RanksError

if TYPE_CHECKING:
    import ipyparallel as ipp

# Seconds in which the ranks must report what happened and meet again, after a cell that failed.
MEETING_DEADLINE = 20.0

# Seconds between two looks at the place of a rank that was interrupted. A rank that is at the same
# place twice is stuck.
BETWEEN_LOOKS = 0.5


class Running(ABC):
    """Ranks that run.

    Attributes:
        n: number of ranks.
        fault_tolerant: whether the others survive if a rank dies.
        facts: what `Ranks.describe` shows of each rank.
        client: ipyparallel's `Client`, or one with the names that labs and `%%px` use.
        slow: seconds that a rank gets to leave an interrupted cell while it moves.
    """

    client: Any
    slow = 6.0

    def __init__(self, n: int, fault_tolerant: bool = False):
        self.n = n
        self.fault_tolerant = fault_tolerant
        self.facts: list[dict[str, Any]] = []
        # Ranks that could not be stopped, when somebody looked last.
        self._stuck: set[int] = set()

    # -- what each kind of ranks does in its way --------------------------------------------

    @property
    @abstractmethod
    def folder(self) -> Path:
        """Return the folder that the kernel and its ranks share."""

    def notes(self) -> list[str]:
        """Return what `Ranks.describe` says about this start, in addition to the plan."""
        return []

    def living(self) -> list[int]:
        """Return the ranks' numbers at the start, without fault-tolerant ranks that have died."""
        return list(range(self.n))

    @abstractmethod
    def over(self) -> bool:
        """Return whether whatever started the ranks has ended, and every rank with it."""

    @abstractmethod
    def last_words(self) -> str:
        """Return what is known about a rank that died."""

    def job_state(self) -> str:
        """Return the state of the ranks' own Slurm job, in Slurm's words; "" without a job."""
        return ""

    @abstractmethod
    def send(self, cells: Mapping[int, str]) -> dict[int, ipp.AsyncResult]:
        """Send a silent cell to each of these ranks; the ranks that are gone have no result."""

    @abstractmethod
    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Send a signal, such as "SIGINT", to ranks, by default to all."""

    @abstractmethod
    def places(self, timeout: float) -> list[str]:
        """Return the place of each rank, in words, after at most `timeout` seconds."""

    @abstractmethod
    def replace_ranks(self) -> bool:
        """Stop the ranks and start new ranks; return False if everything has to start anew."""

    @abstractmethod
    def close(self) -> None:
        """End everything that was started for these ranks."""

    def beside(self, busy: set[int]) -> set[int]:
        """Return the ranks that can answer while these are busy."""
        return set(self.client.ids) - busy

    def expect(self, module: str, of_ours: bool) -> None:  # noqa: B027 - most kinds do nothing
        """Get ready for a question. of_ours: whether it runs no code of the student."""

    def confirmed(self, rank: int, value: Any) -> Confirmed:
        """Return a rank's reply with the kernel's own records of its calls, if it has some.

        Raises:
            ValueError: the reply has a record that the kernel does not know.
        """
        return Confirmed(value)

    # -- what the kernel asks of all kinds --------------------------------------------------

    def refuse_if_stuck(self) -> None:
        """Raise RanksLostError if a rank still runs an earlier cell that could not be stopped."""
        if not self._stuck:
            return
        places = self.places(1.0)
        self._stuck = {rank for rank in self._stuck if places[rank] != "idle"}
        if not self._stuck:
            self.meet_again()
            return
        verb = "runs" if len(self._stuck) == 1 else "run"
        where = ", ".join(f"rank {rank}: {places[rank]}" for rank in sorted(self._stuck))
        raise RanksLostError(
            f"{names(self._stuck)} still {verb} an earlier cell and could not be stopped ({where})."
            f" {FRESH_RANKS}"
        )

    def examine(self, outcome: Outcome, busy: set[int]) -> None:
        """Ask the ranks what happened in a cell that failed, and have them meet again.

        Args:
            outcome: the outcome of the cell, to which the ranks' replies are added.
            busy: ranks that are not done, and can't be asked.
        """
        dead = set(outcome.dead())
        before = sorted(dead | set(self.living()))
        if dead:
            outcome.output = self.last_words()
            outcome.over = self.over()
            outcome.job_state = self.job_state()
        if busy:
            outcome.busy = self._that_do_not_move(busy)
            busy = self._stuck = set(outcome.busy)
        idle = self.beside(busy) - dead
        for reply in self.ask(rank_side.after_a_failure, idle, meet=not busy and not dead):
            outcome.add(reply)
        if self.fault_tolerant:
            outcome.survivors = sorted(set(before) - dead)
        if outcome.statuses and len(outcome.statuses) == len(before) < self.n:
            # Ranks have died before, so the surviving ranks have new numbers from 0 on.
            outcome.renumber({rank: number for number, rank in enumerate(before)})

    def _that_do_not_move(self, busy: set[int]) -> dict[int, str]:
        """Return the places of the ranks that don't move.

        A rank that ends during this call was only slow, because the machine may be busy.
        """
        deadline = time.monotonic() + self.slow
        before: dict[int, str] = {}
        while True:
            places = self.places(1.0)
            stuck = {rank: places[rank] for rank in busy if places[rank] != "idle"}
            if stuck == before or not stuck or time.monotonic() >= deadline:
                return stuck
            before = stuck
            time.sleep(BETWEEN_LOOKS)

    def ask(
        self,
        function: Callable[..., Any],
        ranks: set[int] | None = None,
        timeout: float = MEETING_DEADLINE,
        **arguments: Any,
    ) -> list[Reply]:
        """Call a function without student code on these ranks, by default on all living ranks."""
        texts = [json.dumps(arguments)] * self.n
        return Question(self, target_of(function), texts, ranks).answers(timeout)

    def reply(self, target: str, arguments: list[str], timeout: float) -> list[Reply]:
        """Return each rank's reply to a question that may run a student's code.

        Args:
            target: "package.module:function".
            arguments: JSON text for each rank.
            timeout: see :meth:`utils.cluster.Ranks.ask`, which says what is raised, too.
        """
        self.refuse_if_stuck()
        question = Question(self, target, arguments, of_ours=False)
        replies = question.answers(timeout)
        failed = any(reply.status != "ok" for reply in replies)
        if failed:
            self.meet_again(question.busy())
        if question.was_stopped:
            raise AskStopped(replies)
        if failed:
            return replies
        left = self.unreceived([reply.balance for reply in replies])
        return [replace(reply, unreceived=left.get(reply.rank, ())) for reply in replies]

    def use_network(self, values: dict[str, Any] | None) -> None:
        """Use the network with these attributes, or the machine's own network for ``None``.

        Raises:
            RanksError: a rank did not answer.
        """
        for reply in self.ask(rank_side.use_network, network=values):
            if reply.status != "ok":
                raise RanksError(f"rank {reply.rank}: {reply.error}")

    def meet_again(self, busy: set[int] | None = None) -> None:
        """Have the ranks meet after an error in an answer, so that the next call starts clean.

        Args:
            busy: ranks that have not answered. If one of them is stuck, there is no meeting,
                because it would not come.
        """
        living = set(self.living())
        if living == set(self.client.ids):
            self._stuck = set(self._that_do_not_move(busy)) if busy else set()
            self.ask(rank_side.after_a_failure, self.beside(self._stuck), meet=not self._stuck)

    def unreceived(self, balances: list[int]) -> dict[int, tuple[str, ...]]:
        """Return by sender the messages that no rank has received, and let the ranks discard them.

        A rank's balance says how many more messages it sent than received.
        """
        living = self.living()
        if len(balances) < len(living) or sum(balances) == 0:
            return {}
        replies = self.ask(rank_side.unreceived, set(living))
        return {
            living.index(reply.rank): tuple(map(questions.unreceived, reply.value))
            for reply in replies
            if reply.status == "ok" and reply.value
        }

    def where(self, timeout: float) -> list[str]:
        """Return a line per rank once the lines stay the same, at the latest after `timeout` s.

        A cell that was just sent (`%%px --noblock`) may not have begun on every rank. So while
        more cells are pending than ranks are busy, this method looks at idle ranks again.
        """
        deadline = time.monotonic() + timeout
        before: list[str] = []
        while True:
            places = self.places(timeout)
            busy = sum(place != "idle" for place in places)
            to_begin = busy < min(len(self.client.outstanding), self.n)
            if (places == before and not to_begin) or time.monotonic() >= deadline:
                return [f"rank {rank}: {place}" for rank, place in enumerate(places)]
            before = places
            time.sleep(0.02)
