"""The handshake before each collective: is every rank here, and does it mean the same?

Each rank *announces* a collective by one word on the group's board, a *fingerprint*: the number of
the collective in its group and a signature of the call. When all fingerprints are there and equal,
the MPI call can be made: it can neither hang nor mix up different calls. PyTorch's own check
(``TORCH_DISTRIBUTED_DEBUG=DETAIL``) compares fingerprints, too, but by collectives, which a missing
rank hangs.

A rank may *withdraw* what it has announced (an error, a deadline, Ctrl-C), and must not where
another one is in the MPI call already. So a rank that sees all fingerprints *acknowledges* the
number, and looks again; a rank that withdraws takes its word back, and looks for acknowledgements
afterwards. Either sees the other, as both write first and read then. :class:`State` has the states
of a collective on one rank, PROTOCOL.md their diagram.

``PROTOCOL.md`` has the invariants; ``tests/protocol_model.py`` goes through all orders of the steps
of this module. Nothing here needs torch or MPI.
"""

from __future__ import annotations

import enum
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .announcements import ACKNOWLEDGED, DEPTH, Announcements
from .contracts import Owner
from .fingerprints import alike, as_blocking, fingerprint
from .interrupts import guard

if TYPE_CHECKING:
    from ..record import Call
    from .board import Board

# How often the fast path looks for the other ranks before it hands over to a patient wait; how
# often it does so without giving up its core.
_LOOKS, _BUSY_LOOKS = 1000, 30


class State(enum.Enum):
    """Of a collective on this rank; the last three are final.

    To acknowledge is not a state: within one step of :meth:`Handshake.pump` the rank acknowledges,
    looks again, and either begins or takes the acknowledgement back.
    """

    CALLED = "called"  # in the queue; no other rank knows
    ANNOUNCED = "announced"  # its fingerprint is on the board
    BEGUN = "begun"  # all ranks are there: its MPI calls are made
    REFUSED = "refused"  # another rank made another call
    WITHDRAWN = "withdrawn"  # taken back: this rank had an error, a deadline, Ctrl-C


@dataclass(slots=True, eq=False)
class Entry:
    """A collective that this rank has called.

    Attributes:
        code: its :func:`~.fingerprints.signature`.
        call: its record, for the other side of a mismatch.
        owner: its ``begin(blocking)`` makes the MPI calls, all ranks being there; its
            ``refuse(ranks)`` ends it, as these ranks made another call. ``None`` after either.
        may_block: whether there is a blocking call to begin it by.
        not_before: when it is announced at the earliest (``time.perf_counter``), if nobody waits.
        number: in its group.
        mine: this rank's fingerprint.
        missing: ranks of the group that the last look did not find: here, or at an older one.
    """

    code: int
    call: Call
    owner: Owner | None
    may_block: bool
    not_before: float = 0.0
    state: State = State.CALLED
    number: int = 0
    mine: int = 0
    missing: list[int] = field(default_factory=list)

    @property
    def begun(self) -> bool:
        """Whether its MPI calls are made."""
        return self.state is State.BEGUN

    def end(self, state: State) -> Owner:
        """It is over for the handshake; returns the owner, which knows this entry, too."""
        self.state, owner, self.owner = state, self.owner, None
        assert owner is not None, "a collective ends once"
        return owner


class Handshake:
    """The collectives of one group on this rank: in which order they begin, and whether they may.

    Args:
        board: of the group's ranks, with :data:`WORDS` words each.

    Attributes:
        announcements: this rank's and the others' fingerprints.
        lock: held while a collective is called, begins, or is withdrawn.
    """

    def __init__(self, board: Board):
        self.announcements = Announcements(board)
        self.lock = threading.RLock()
        # Called and not begun, oldest first.
        self._queue: deque[Entry] = deque()
        # The first one that was withdrawn or refused. What comes after it must not begin: another
        # rank may still have the one before, and waits for it. An incident follows, and clears it.
        self._gap = math.inf
        # Of the fast path: what it has called and not begun; the fingerprint that it could not take
        # back, which the next call goes on with, or 0.
        self._fast_call: Call | None = None
        self._promised = 0

    @property
    def can_block(self) -> bool:
        """Whether blocking calls are safe: a withdrawal has to be seen at once."""
        return self.announcements.board.immediate

    @property
    def idle(self) -> bool:
        """Whether everything that was called has begun."""
        return not self._queue

    def call(self, entry: Entry) -> None:
        """Number a collective, and queue it. The caller holds :attr:`lock`."""
        announcements = self.announcements
        if self._promised:
            entry.state, entry.mine = State.ANNOUNCED, self._promised
        else:
            announcements.number += 1
            entry.mine = fingerprint(announcements.number, entry.code, blocking=False)
        self._promised, self._fast_call = 0, None
        entry.number = announcements.number
        self._queue.append(entry)

    def pump(self) -> None:
        """Begin the collectives which all ranks have announced, in the order of their calls."""
        with guard:
            if not self.lock.acquire(blocking=False):
                return  # another thread does
            try:
                self._announce_due()
                while self._queue and self._advance(self._queue[0]):
                    pass
                for entry in self._queue:  # none begins before the oldest one
                    entry.missing = self._queue[0].missing
            finally:
                self.lock.release()

    def _announce_due(self) -> None:
        for entry in self._queue:
            if entry.state is State.CALLED:
                if entry.number > self._gap:
                    break
                due = entry.not_before <= time.perf_counter()
                if not due or not self.announcements.may_announce(entry.number):
                    break
                self.announcements.announce(entry.number, entry.mine)
                entry.state = State.ANNOUNCED

    def _advance(self, entry: Entry) -> bool:
        """Move the oldest one on; whether the next one may be tried."""
        if entry.state is not State.ANNOUNCED or entry.number > self._gap:
            return False
        seen = self.announcements.look(entry.number, entry.mine)
        if seen.complete:
            seen = self.announcements.acknowledge(entry.number, entry.mine)
        entry.missing = seen.missing
        if seen.mismatched:
            if self.announcements.refuse(entry.number, entry.mine):
                self._queue.popleft()
                self._gap = min(self._gap, entry.number)
                entry.end(State.REFUSED).refuse(seen.mismatched)
            return True
        if seen.missing:
            return False
        if entry.owner is not None:
            entry.owner.begin(seen.blocking)
        entry.end(State.BEGUN)  # last: another thread may poll
        self._queue.popleft()  # the fast path must not overtake it
        return True

    def hasten(self) -> None:
        """This rank waits now: announce what is queued, for blocking calls."""
        with self.lock:
            for entry in self._queue:
                if entry.state is State.CALLED:
                    entry.not_before = 0.0
                    if entry.may_block:
                        entry.mine = as_blocking(entry.mine)

    def withdraw(self, entry: Entry) -> bool:
        """Take a collective back; ``False`` when all the others have announced it, too."""
        with self.lock:
            self.pump()
            if entry.begun or entry not in self._queue:
                return not entry.begun
            if entry.state is State.ANNOUNCED and not self.announcements.withdraw(
                entry.number, entry.mine
            ):
                return False
            self._gap = min(self._gap, entry.number)
            self._queue.remove(entry)
            entry.end(State.WITHDRAWN)
            return True

    def called(self) -> dict[int, Call]:
        """The records of what has not begun, by number: what another rank may have to be told."""
        # Without the lock, which another thread may hold that wants to tell, too.
        calls = {entry.number: entry.call for entry in list(self._queue)}
        if (fast := self._fast_call) is not None and fast.sequence is not None:
            calls[fast.sequence] = fast
        return calls

    def start_anew(self) -> None:
        """Forget what was called; all ranks of the group do so, after an incident."""
        self._queue.clear()
        self._gap = math.inf
        self._promised, self._fast_call = 0, None

    # -- the fast path: a blocking call of which everything is known beforehand ----------------

    def find_all(self, number: int, mine: int) -> bool:
        """Look for the other ranks for a moment; without success, take the announcement back.

        ``False``: not begun. Where the other ranks rely on the announcement it stays, and the
        next :meth:`call` goes on with it.
        """
        announcements = self.announcements
        board = announcements.board
        first = number % DEPTH * board.size
        end, everybody = first + board.size, alike(mine, board.size)
        for look in range(_LOOKS):
            if board.words[first:end].tolist() == everybody:
                return True
            if look > _BUSY_LOOKS:
                os.sched_yield()
        while not announcements.withdraw(number, mine):
            seen = announcements.look(number, mine)
            if seen.blocking and seen.complete:
                return True
            if not seen.missing:
                # Some are in calls that do not block: this one has to be made like theirs.
                announcements.number, self._promised = number, mine
                return False
        return False

    def find_all_again(self, number: int, mine: int) -> bool:
        """One has withdrawn after all: until all are there, or this rank is not there either."""
        while True:
            self.announcements.board.set(ACKNOWLEDGED, number - 1)
            if not self.find_all(number, mine):
                return False
            if self.announcements.acknowledge(number, mine).complete:
                return True

    def leave_to_next_call(self, call: Call) -> None:
        """The fast path did not begin ``call``: another rank's mismatch may have to name it."""
        self._fast_call = call

    def end_fast_path(self) -> None:
        """After the fast path, and the :meth:`call` that it may have led to: or an error did.

        After an error, what was promised is withdrawn once. A refusal is ignored, no gap is set.
        """
        if self._promised:
            self.announcements.withdraw(self.announcements.number, self._promised)
        self._promised, self._fast_call = 0, None
