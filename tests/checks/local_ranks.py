"""Ranks for tests of checks: the course's own ranks inside a process, with what tests ask of them.

:class:`LocalRanks` has what checks use of :class:`utils.cluster.Ranks`: ``n`` and ``ask``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from utils import cluster
from utils.cluster.boxes.records import KEY, Records
from utils.cluster.questions import Ranks, Reply

#: How many accidents there were, and the names on each rank.
Traces = tuple[int, list[dict[str, Any]]]


def with_records(reply: Reply) -> Reply:
    """Return a reply whose lists of records notice whether a check reads them, as in grading."""
    lists: list[Records] = []

    def of(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: of(one) for name, one in value.items()}
        if not isinstance(value, list):
            return value
        if not any(isinstance(one, dict) and KEY in one for one in value):
            return list(map(of, value))
        lists.append(Records(value))
        return lists[-1]

    return replace(reply, value=of(reply.value), records=lists)


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
        replies = self._ranks.ask(target, **arguments)
        bad = any(reply.status != "ok" or reply.unreceived for reply in replies)
        self.accidents += bad
        return list(map(with_records, replies))

    def apart(self) -> contextlib.AbstractContextManager[Ranks]:
        """Ranks for a check's own code, as `cluster.Ranks.apart` gives them."""
        return self._ranks.apart()

    def traces(self) -> Traces:
        """What a run may leave behind that another one notices."""
        return self.accidents, [dict(namespace) for namespace in self.user_ns]
