"""Wait for a communication until it is over, or until it is certain that it never will be."""

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
from . import diagnosis, words
from .interfaces import Waitable

if TYPE_CHECKING:
    from .status import Status
    from .world import World

# A wait first tests without a pause, for as long as the data may need. Then it leaves its core to
# others. It spins longer for a large message, which moves only while somebody tests.
SPIN = 200e-6  # seconds
SPIN_PER_BYTE = 5e-9  # seconds; 200 MB/s
# Up to so many seconds of waiting, a pause between two tests lasts at most so long.
PAUSES = ((0.1, 200e-6), (1.0, 1e-3), (math.inf, 4e-3))
# Between machines a message travels for longer than the wait spins, and MPI may need two tests to
# notice it. Longer pauses would look like a slower network.
PAUSES_BETWEEN_MACHINES = ((10e-3, 20e-6), *PAUSES)
# A wait looks at the board this often, and shows itself there after this time.
LOOK = 10e-3  # seconds
SHOW = 20e-3  # seconds
# A wait searches all ranks' waits for a deadlock this often.
SEARCH = 0.25  # seconds
# A rank whose section is over may get another one, so it counts as gone only after this time.
LEFT_FOR_GOOD = 3.0  # seconds
# A wait that could end now gets this long to end well before another rank's error ends it.
GRACE = 50e-3  # seconds
# The scheduler wakes a sleeper late, so a wait spins for this last part.
LATE = 150e-6  # seconds


def wait_for(
    waitable: Waitable,
    timeout: float,
    world: World | None = None,
    where: str = "",
    fatal: bool = True,
) -> None:
    """Block until the communication is over.

    Args:
        timeout: seconds; after a communication has begun, seconds without any movement.
        world: the world on whose board the wait shows itself, and reads about other ranks.
        where: the user's line; by default, the function finds it on the stack.
        fatal: whether a timeout is an incident, which ends the waits of all ranks.

    Raises:
        CommunicationTimeout: the timeout has passed, or a deadlock is certain.
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
    """Return whether a condition becomes true within so many seconds."""
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
    """The slow part of a wait, which shows it on the board and watches the other ranks."""

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
        # Per rank, its present state, when this rank first saw that state, and the beats then.
        self._seen: dict[int, tuple[object, float, int]] = {}

    def look(self, waited: float) -> None:
        """End the wait with an error if it has lasted too long, or if the other ranks demand it."""
        if waited >= self.timeout and not self._moves(waited):
            self._give_up("timeout", waited)
        if self.world is not None and waited >= self._next_look:
            self._next_look = waited + LOOK
            self._look_around(self.world, waited)

    def _look_around(self, world: World, waited: float) -> None:
        """Read what the other ranks do, and follow an incident or search for a deadlock."""
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
        """Return whether the data still move, as large data on a slow network do for long.

        A wait with its own deadline, which the user may repeat, ends in any case.
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
        """Remove the wait from the board."""
        if self.world is not None and self._shown and not self.world.stopped:
            self.world.running()

    def _show(self, world: World) -> None:
        # Only a wait of the main thread keeps a rank from going on.
        if threading.current_thread() is threading.main_thread():
            self.where = self.where or users_line()
            self._status = world.waiting(self.waitable, self.where)
            self._shown = True

    def _refresh_status(self, world: World) -> None:
        """Show the wait again if other ranks have come since."""
        missing, _, moving = self.waitable.missing()
        if (missing, moving) != (self._status["for"], self._status["moving"]):
            self._status = world.waiting(self.waitable, self.where)

    def _search(self, world: World, waited: float) -> None:
        """Give up when it is certain that this rank would wait forever."""
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
        """Return whether a future can never complete, because it waits for ranks that are gone."""
        missing, any_of_them, _ = self.waitable.missing()
        gone = [by_rank[rank]["state"] in diagnosis.GONE for rank in missing]
        return bool(gone) and (all(gone) if any_of_them else any(gone))

    def _lasting(self, world: World, status: Status, waited: float) -> Status:
        """Return the status if it has lasted for a while; before, return that the rank runs."""
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
            if beats < beat + 2:  # no test since, so the rank is frozen or not scheduled
                return {**status, "state": "running"}
        elif state == "left":
            patience = min(LEFT_FOR_GOOD, self.timeout)
            if status["section"] != world.section:
                patience = self.timeout + 1  # the rank has not begun this section yet
        else:
            return status
        return status if waited - since >= patience else {**status, "state": "running"}

    def _follow(self, world: World, waited: float) -> None:
        if self.waitable.withdraw():
            raise world.stopped_by_another(self.waitable.call, self.waitable, waited)
        self._incident_since = 0.0

    def _give_up(self, kind: str, waited: float, certain: bool = False) -> None:
        if not self.waitable.withdraw():
            self.timeout += GRACE  # all ranks have just come, so it is about to complete
            return
        call = self.waitable.call
        where = self.where or users_line()
        rank = MPI.COMM_WORLD.rank if self.world is None else self.world.rank
        text = words.of_wait(rank, call, where, self._what_is_missing(certain))
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
        if not certain:
            return words.is_late(call, missing, any_of_them, self.timeout)
        return words.never_comes(call, missing, any_of_them)
