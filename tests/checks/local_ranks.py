"""Ranks for tests of checks: the course's own ranks inside a process, with what tests ask of them.

:class:`LocalRanks` has what checks use of :class:`utils.cluster.Ranks`: ``n`` and ``ask``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch_mpi.record import Call, as_dict
from utils import cluster
from utils.cluster.boxes.records import Confirmation
from utils.cluster.questions import Ranks, Reply

#: How many accidents there were, and the names on each rank.
Traces = tuple[int, list[dict[str, Any]]]


class Look(Confirmation):
    """The kernel's look at a reply, as in grading. Nobody forges here, so a record stays as it is.

    A record has the number of its call where the kernel carries messages for processes. Here, the
    time and the tag, or the number of the collective, say which call it shows.
    """

    def __init__(self, calls: list[Call]):
        super().__init__(dict(enumerate(calls)))
        self._shown_by: dict[tuple[Any, ...], set[int]] = {}
        for number, call in enumerate(calls):
            self._shown_by.setdefault(_key(as_dict(call)), set()).add(number)

    def _record(self, value: dict[str, Any]) -> dict[str, Any]:
        self.numbers |= self._shown_by.get(_key(value), set())
        return value


def _key(record: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(record.get(name) for name in ("op", "start", "tag", "sequence"))


def looked_at(reply: Reply, calls: list[Call]) -> Reply:
    """Return a reply that says which of the rank's calls it has no records of, as in grading.

    Its lists of records notice whether a check reads them.
    """
    look = Look(calls)
    value = look.of(reply.value)
    return replace(reply, value=value, records=look.lists, unseen=look.left_out())


class LocalRanks:
    """Ranks for checks. Use it with ``with``."""

    def __init__(self, n: int):
        self.n = n
        #: Runs that ended with an error, in a deadlock, or with messages that nobody received.
        self.accidents = 0

    def __enter__(self) -> LocalRanks:
        self._ranks = cluster.start(self.n, where="here")
        self.run(f"world_size = {self.n}")
        self.user_ns = self._ranks.client.namespaces
        for rank, namespace in enumerate(self.user_ns):
            namespace["rank"] = rank
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.stop()

    def run(self, code: str) -> None:
        """Run a cell on every rank; raises ipyparallel's RemoteError if it raises there."""
        try:
            self._ranks.view.execute(code, block=True)
        except Exception:
            self.accidents += 1
            self.meet_again()
            raise

    def meet_again(self) -> None:
        """Let the ranks meet, so that nothing of an incident is left."""
        self._ranks.running().meet_again()

    def ask(self, target: str | Callable[..., Any], **arguments: Any) -> list[Reply]:
        """One `Reply` of each rank, as `cluster.Ranks.ask` gives it."""
        turns = self._ranks.running()._turns
        logs = [turns.log(rank) for rank in range(self.n)]
        marks = [log.mark() for log in logs]
        replies = self._ranks.ask(target, **arguments)
        bad = any(reply.status != "ok" or reply.unreceived for reply in replies)
        self.accidents += bad
        return [looked_at(reply, logs[reply.rank].since(marks[reply.rank])) for reply in replies]

    def apart(self) -> contextlib.AbstractContextManager[Ranks]:
        """Ranks for a check's own code, as `cluster.Ranks.apart` gives them."""
        return self._ranks.apart()

    def traces(self) -> Traces:
        """What a run may leave behind that another one notices."""
        return self.accidents, [dict(namespace) for namespace in self.user_ns]
