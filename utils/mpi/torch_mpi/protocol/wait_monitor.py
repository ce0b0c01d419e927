"""A wait that ends: with the communication, or with an error that says why it never will."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CommunicationTimeout, users_line
from ..mpi import MPI
from ..record import Call
from . import diagnosis
from .interfaces import Waitable

if TYPE_CHECKING:
    from .status import Status
    from .world import World

# A wait first tests without a pause: as long as the data may be on their way. Then it leaves
# its core to others; a large message moves only while somebody tests.
SPIN = 200e-6  # seconds
SPIN_PER_BYTE = 5e-9  # seconds; 200 MB/s
# Pauses between tests: up to so many seconds of waiting, so long at most.
PAUSES = ((0.1, 200e-6), (1.0, 1e-3), (math.inf, 4e-3))
# Between machines a message is under way for longer than the wait spins, and MPI may need two
# tests to see that it has come: longer pauses would look like a slower network.
PAUSES_BETWEEN_MACHINES = ((10e-3, 20e-6), *PAUSES)
# How often a wait looks at the board, and from when on it shows itself there.
LOOK = 10e-3  # seconds
SHOW = 20e-3  # seconds
# How often the ranks' waits are searched for a deadlock.
SEARCH = 0.25  # seconds
# A rank whose section is over may get another one; only after that long it counts as gone.
LEFT_FOR_GOOD = 3.0  # seconds
# A wait that could end now is given that long to end before another rank's error ends it.
GRACE = 50e-3  # seconds
# The scheduler wakes a sleeper late; the rest until a point in time is waited without a pause.
LATE = 150e-6  # seconds


def wait_for(
    waitable: Waitable,
    timeout: float,
    world: World | None = None,
    where: str = "",
    fatal: bool = True,
) -> None:
    """Return when it is over.

    Args:
        timeout: seconds; of a communication that has begun, seconds without any movement.
        world: whose board to look at, and to show this wait on.
        where: the user's line; found on the stack where it is not given.
        fatal: a timeout is an incident, which ends the waits of all ranks.

    Raises:
        CommunicationTimeout: after ``timeout``, or when a deadlock is certain.
        CommunicationStopped: another rank failed.
    """
    start = time.perf_counter()
    spin = SPIN + SPIN_PER_BYTE * waitable.call.nbytes
    pauses = PAUSES if world is None or world.one_machine else PAUSES_BETWEEN_MACHINES
    monitor = None
    pause = 0.0
    try:
        while not waitable.poll():
            waited = time.perf_counter() - start
            if waited < spin:
                os.sched_yield()
                continue
            monitor = monitor or WaitMonitor(waitable, timeout, world, where, fatal)
            monitor.look(waited)
            longest = next(length for until, length in pauses if waited < until)
            pause = min(1.1 * pause + 5e-6, longest)
            _sleep(pause, waitable.due())
    finally:
        if monitor is not None:
            monitor.end()


def is_true_within(seconds: float, condition: Callable[[], object], pause: float = 1e-3) -> bool:
    """Return whether a condition comes true within a time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _sleep(pause: float, due: float | None) -> None:
    if due is not None:
        left = due - time.perf_counter()
        if left < LATE:
            return
        pause = min(max(pause, left - LATE), 1e-3)
    time.sleep(pause)


@dataclass(eq=False)
class WaitMonitor:
    """The slow part of a wait, see :func:`wait_for`: shows it, and looks what other ranks do."""

    waitable: Waitable
    timeout: float
    world: World | None
    where: str = ""
    fatal: bool = True

    def __post_init__(self) -> None:
        self._shown = False
        self._next_look = LOOK
        self._next_search = SEARCH
        self._incident_since = 0.0
        self._moved = self.waitable.moved()
        self._still_since = 0.0
        # When each rank's present state was first seen here, by this rank's clock.
        self._seen: dict[int, tuple[object, float, int]] = {}

    def look(self, waited: float) -> None:
        """End the wait with an error, if there is reason to after so many seconds."""
        if waited >= self.timeout and not self._moves(waited):
            self._give_up("timeout", waited)
        if self.world is not None and waited >= self._next_look:
            self._next_look = waited + LOOK
            self._look_around(self.world, waited)

    def _look_around(self, world: World, waited: float) -> None:
        """See what the other ranks do."""
        if world.incident():
            self._incident_since = self._incident_since or waited
            if waited - self._incident_since > GRACE:
                self._follow(world, waited)
        if waited > SHOW and not self._shown:
            self._show(world)
        if waited >= self._next_search:
            self._next_search = waited + SEARCH
            self._search(world, waited)

    def _moves(self, waited: float) -> bool:
        """Return whether data move: that takes long where they are many, or the network slow.

        A wait with a deadline of its own, which may be tried again, ends all the same.
        """
        due = self.waitable.due()
        moved = self.waitable.moved()
        if moved != self._moved:
            self._moved = moved
            self._still_since = waited
        if not self.fatal:
            return False
        return waited - self._still_since < self.timeout or (
            due is not None and due > time.perf_counter()
        )

    def end(self) -> None:
        """End the wait, on the board, too."""
        if self.world is not None and self._shown and not self.world.stopped:
            self.world.running()

    def _show(self, world: World) -> None:
        # The main thread is the one whose wait keeps a rank from going on.
        if threading.current_thread() is threading.main_thread():
            self.where = self.where or users_line()
            self._status = world.waiting(self.waitable, self.where)
            self._shown = True

    def _refresh_status(self, world: World) -> None:
        """Show it again if other ranks have come meanwhile."""
        missing, _, moving = self.waitable.missing()
        if (missing, moving) != (self._status["for"], self._status["moving"]):
            self._status = world.waiting(self.waitable, self.where)

    def _search(self, world: World, waited: float) -> None:
        """Stop when it is certain that this rank waits for ever."""
        world.beat()
        if self._shown:
            self._refresh_status(world)
        by_rank = {s["rank"]: self._lasting(world, s, waited) for s in world.statuses()}
        if any(s["state"] == "dead" for s in by_rank.values()):
            self._follow(world, waited)
        elif self._shown:
            stuck = diagnosis.stuck_ranks(by_rank)
            if world.rank in stuck:
                cycle = diagnosis.find_cycle({rank: by_rank[rank] for rank in stuck})
                self._give_up("deadlock" if cycle else "timeout", waited, certain=True)
        elif self._is_hopeless(by_rank):
            self._give_up("timeout", waited, certain=True)

    def _is_hopeless(self, by_rank: dict[int, Status]) -> bool:
        """Return whether a future never completes: it waits for ranks that are gone."""
        missing, any_of_them, _ = self.waitable.missing()
        gone = [by_rank[rank]["state"] in diagnosis.GONE for rank in missing]
        return bool(gone) and (all(gone) if any_of_them else any(gone))

    def _lasting(self, world: World, status: Status, waited: float) -> Status:
        """Return the status, as a running rank's until it has been the same for a while."""
        state = status["state"]
        name = (state, status.get("wait"), status.get("section"))
        beats = world.beats(status["rank"])
        known, since, beat = self._seen.get(status["rank"], (None, 0.0, 0))
        if known != name:
            since = waited
            beat = beats
            self._seen[status["rank"]] = name, since, beat
        if state == "waiting":
            patience = status["patience"]
            if beats < beat + 2:  # it has not tested its wait since: frozen, or not scheduled
                return {**status, "state": "running"}
        elif state == "left":
            patience = min(LEFT_FOR_GOOD, self.timeout)
            if status["section"] != world.section:
                patience = self.timeout + 1  # it has not begun this section yet
        else:
            return status
        return status if waited - since >= patience else {**status, "state": "running"}

    def _follow(self, world: World, waited: float) -> None:
        if self.waitable.withdraw():
            raise world.stopped_by_another(self.waitable.call, self.waitable, waited)
        self._incident_since = 0.0

    def _give_up(self, kind: str, waited: float, certain: bool = False) -> None:
        if not self.waitable.withdraw():
            self.timeout += GRACE  # everybody has just come: it is about to complete
            return
        call = self.waitable.call
        where = self.where or users_line()
        rank = MPI.COMM_WORLD.rank if self.world is None else self.world.rank
        text = f"rank {rank} waits in {call.describe()} at {where}, and "
        text += self._what_is_missing(certain)
        record: Status = {"where": where, "waited": waited}
        if self.world is not None and self.fatal:
            record = self.world.begin_incident(
                kind, text, waitable=self.waitable, where=where, waited=waited
            )
            text = f"{text}\n{diagnosis.diagnose(self.world.statuses())}"
        raise CommunicationTimeout(text, call, record)

    def _what_is_missing(self, certain: bool) -> str:
        call = self.waitable.call
        missing, any_of_them, moving = self.waitable.missing()
        if moving:
            return f"its data, which were on their way, have not moved for {self.timeout:g} s."
        text = _partner(call, missing, any_of_them)
        if not certain:
            return f"{text} did not come within the timeout of {self.timeout:g} s."
        several = call.op not in ("send", "recv") and len(missing) > 1
        return text + (" never come." if several else " never comes.")


def _partner(call: Call, missing: list[int], any_of_them: bool) -> str:
    if call.op in ("send", "recv"):
        verb = "receive" if call.op == "send" else "send"
        peer = "any rank" if any_of_them else f"rank {call.partner}"
        return f"the matching {verb} of {peer}"
    return diagnosis.names(missing) if missing else "its end"
