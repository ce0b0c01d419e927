"""The handshake before each collective: is every rank here, and with the same call?

``PROTOCOL.md`` explains how and why a rank *announces*, *acknowledges* and *withdraws* a call, the
layout of a *fingerprint*, which no other module knows, and how to announce one more bit.
``tests/protocol_model.py`` tries all orders of the steps of this module.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import math
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .interfaces import Owner
from .interrupts import guard

if TYPE_CHECKING:
    from ..record import Call
    from .board import Board

# The number of places for fingerprints. A rank looks once more after it has acknowledged, so one
# place stays free: a rank announces at most DEPTH − 1 beyond the slowest acknowledgement.
DEPTH = 64
WORDS = DEPTH + 1
ACKNOWLEDGED = DEPTH
_AHEAD = DEPTH - 1
# On a board of messages, a rank acknowledges every so many collectives; DEPTH is a multiple of it.
ACKNOWLEDGE_EVERY = 16

# `Handshake.meet` looks so often for the other ranks before a patient wait takes over, and so often
# before it starts to yield its core.
_LOOKS = 1000
_BUSY_LOOKS = 30

_CALLED = 1 << 63
_BLOCKING = 1 << 62
_NUMBER_AT = 42
#: The bits of the number, and the number of the last collective before it begins at 0 again.
NUMBER = (1 << 20) - 1
_SIGNATURE = (1 << _NUMBER_AT) - 1


@functools.lru_cache(maxsize=65_536)
def signature(key: tuple[object, ...]) -> int:
    """Return a hash of everything that has to be equal; it is the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNATURE


def fingerprint(number: int, code: int, blocking: bool) -> int:
    """Return the word for collective ``number`` with the signature ``code``."""
    return _CALLED | (_BLOCKING if blocking else 0) | (number & NUMBER) << _NUMBER_AT | code


def unnumbered(code: int) -> int:
    """Return the word of a blocking call without its number, for :meth:`Handshake.meet`."""
    return fingerprint(0, code, blocking=True)


def _is_there(word: int, number: int, mine: int) -> bool:
    """Return whether a rank has announced the collective, and has not refused the call ``mine``."""
    return bool(
        word & _CALLED
        and (word >> _NUMBER_AT & NUMBER) == number & NUMBER
        and (word ^ mine) & _SIGNATURE != _SIGNATURE
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of comparing the fingerprints of all ranks with this rank's.

    Attributes:
        missing: ranks (of the group) that have not announced the collective.
        mismatched: ranks that announced another call.
        blocking: whether all ranks are there in blocking calls.
    """

    missing: list[int]
    mismatched: list[int]
    blocking: bool

    @property
    def complete(self) -> bool:
        """Return whether all ranks have announced the same call."""
        return not (self.missing or self.mismatched)


class Announcements:
    """The fingerprints of a group's ranks on its board.

    Attributes:
        number: the number of the last collective that this rank has called, from 1.
        limit: the last number whose place is certainly free.
    """

    def __init__(self, board: Board):
        self.board = board
        self.number = 0
        self.limit = _AHEAD
        self._rows = board.rows
        self._rank, self._size = board.rank, board.size

    def may_announce(self, number: int) -> bool:
        """Return whether the place for a word is free, because every rank has read its content."""
        if number > self.limit:
            self.board.refresh()
            self.limit = min(self.board.of_all(ACKNOWLEDGED)) + _AHEAD
        return number <= self.limit

    def announce(self, number: int, mine: int) -> None:
        """Write the fingerprint, from which all ranks see that this one is there."""
        self.board.set(number % DEPTH, mine)

    def agree(self, number: int, mine: int) -> bool:
        """Look, acknowledge, and look again; return True if the call may begin as ``mine`` says.

        This is the usual case: all ranks have made the same call in the same way, so their whole
        words are equal. If the result is False, nothing stays acknowledged. The board must be
        ``immediate``.
        """
        row = self._rows[number % DEPTH]
        everybody = [mine] * self._size
        if row.tolist() != everybody:
            return False
        acknowledgements = self._rows[ACKNOWLEDGED]
        acknowledgements[self._rank] = number
        if row.tolist() == everybody:
            return True
        acknowledgements[self._rank] = number - 1
        return False

    def acknowledge(self, number: int, mine: int) -> Seen:
        """Acknowledge a collective and look again; the caller begins it only if all still agree."""
        if not self.board.immediate:
            # Messages are late, so a rank may have withdrawn unseen. But no rank blocks in MPI.
            if number % ACKNOWLEDGE_EVERY == 0:
                self.board.set(ACKNOWLEDGED, number)
            return self.look(number, mine)
        self.board.set(ACKNOWLEDGED, number)
        seen = self.look(number, mine)
        if not seen.complete:
            self.board.set(ACKNOWLEDGED, number - 1)
        return seen

    def withdraw(self, number: int, mine: int) -> bool:
        """Remove the word; return False if another rank relies on it, so this one takes part."""
        return self._replace(number, mine, 0)

    def refuse(self, number: int, mine: int) -> bool:
        """Refuse a call by a word that no call has; return False if the call may match after all.

        Then another rank has acknowledged it: a thread of a rank has left and another one has come.
        """
        if not self.board.immediate:
            return True  # no rank blocks there, and recovery finds a call that began in vain
        return self._replace(number, mine, mine ^ _SIGNATURE)

    def _replace(self, number: int, mine: int, instead: int) -> bool:
        self.board.set(number % DEPTH, instead)
        if not self.board.immediate:
            seen = self.look(number, mine)
            relied_on = seen.missing == [self.board.rank] and not seen.mismatched
        else:
            self.board.fence()
            relied_on = max(self.board.of_all(ACKNOWLEDGED)) >= number
        if relied_on:
            self.announce(number, mine)
        return not relied_on

    def go_on_after(self, number: int) -> None:
        """Continue to count from the number on which all ranks have agreed."""
        self.number = number
        self.limit = number + _AHEAD
        self.board.set(ACKNOWLEDGED, number)

    def look(self, number: int, mine: int) -> Seen:
        """Compare the fingerprints of all ranks with this rank's."""
        self.board.refresh()
        words = self.board.of_all(number % DEPTH)
        missing = []
        mismatched = []
        for rank, word in enumerate(words):
            if not _is_there(word, number, mine):
                missing.append(rank)
            elif (word ^ mine) & _SIGNATURE:
                mismatched.append(rank)
        blocking = not missing and all(word & _BLOCKING for word in words)
        return Seen(missing, mismatched, blocking)


class State(enum.Enum):
    """The state of a collective on this rank; the last three are final."""

    CALLED = "called"  # it is in the queue, and no other rank knows
    ANNOUNCED = "announced"  # its fingerprint is on the board
    BEGUN = "begun"  # all ranks are there, and its MPI calls are made
    REFUSED = "refused"  # another rank made another call
    WITHDRAWN = "withdrawn"  # this rank removed it after an error, a deadline or Ctrl-C


@dataclass(slots=True, eq=False)
class Entry:
    """A collective that this rank has called.

    Attributes:
        code: its :func:`signature`.
        call: its record, which describes it to the other side of a mismatch.
        owner: the object that begins or refuses it; ``None`` after either.
        may_block: whether MPI has a blocking call for it.
        not_before: the earliest time to announce it (``time.perf_counter``), unless a caller waits.
        mine: this rank's fingerprint.
        missing: ranks of the group that the last look missed, in this call or in an older one.
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
        """Return whether its MPI calls have been made."""
        return self.state is State.BEGUN

    def end(self, state: State) -> Owner:
        """End the handshake of this collective; return its owner, and forget the reference."""
        self.state = state
        owner = self.owner
        assert owner is not None, "a collective ends once"
        self.owner = None
        return owner


class Handshake:
    """The queue of one group's collectives on this rank, which decides what may begin and when.

    Attributes:
        lock: held while a collective is called, begins, or is withdrawn.
        fast_call: a call that the fast path made but didn't begin; a mismatch may have to name it.
    """

    def __init__(self, board: Board):
        self.announcements = Announcements(board)
        self.lock = threading.RLock()
        # The calls that have not begun, oldest first.
        self._queue: deque[Entry] = deque()
        # The number of the first call that was withdrawn or refused. No later call may begin (P11).
        self._gap = math.inf
        self.fast_call: Call | None = None
        # A fingerprint that the fast path could not remove. The next call takes it over; 0 if none.
        self._promised = 0

    def call(self, entry: Entry) -> None:
        """Number a collective, and queue it. The caller holds :attr:`lock`."""
        announcements = self.announcements
        if self._promised:
            entry.state = State.ANNOUNCED
            entry.mine = self._promised
        else:
            announcements.number += 1
            entry.mine = fingerprint(announcements.number, entry.code, blocking=False)
        self._forget_fast_call()
        entry.number = announcements.number
        self._queue.append(entry)

    def _forget_fast_call(self) -> None:
        self._promised = 0
        self.fast_call = None

    def pump(self) -> None:
        """Begin the collectives that all ranks have announced, in the order of their calls."""
        with guard:
            if not self.lock.acquire(blocking=False):
                return  # another thread does it
            try:
                self._announce_due()
                while self._queue and self._advance(self._queue[0]):
                    pass
                for entry in self._queue:  # no call begins before the oldest one
                    entry.missing = self._queue[0].missing
            finally:
                self.lock.release()

    def _announce_due(self) -> None:
        for entry in self._queue:
            if entry.state is State.CALLED:
                if entry.number > self._gap or entry.not_before > time.perf_counter():
                    break
                if not self.announcements.may_announce(entry.number):
                    break
                self.announcements.announce(entry.number, entry.mine)
                entry.state = State.ANNOUNCED

    def _advance(self, entry: Entry) -> bool:
        """Try to begin the oldest call; return whether the next one may be tried."""
        if entry.state is not State.ANNOUNCED or entry.number > self._gap:
            return False
        seen = self._seen(entry)
        entry.missing = seen.missing
        if seen.mismatched:
            if self.announcements.refuse(entry.number, entry.mine):
                self._queue.popleft()
                self._leave_gap(entry.number)
                entry.end(State.REFUSED).refuse(seen.mismatched)
            return True
        if seen.missing:
            return False
        if entry.owner is not None:
            entry.owner.begin(seen.blocking)
        entry.end(State.BEGUN)  # last, because another thread may poll
        self._queue.popleft()  # the fast path must not overtake it
        return True

    def _seen(self, entry: Entry) -> Seen:
        """Look for the other ranks; if all have announced the same call, acknowledge it, too."""
        announcements = self.announcements
        if announcements.board.immediate and announcements.agree(entry.number, entry.mine):
            return Seen([], [], bool(entry.mine & _BLOCKING))
        seen = announcements.look(entry.number, entry.mine)
        return announcements.acknowledge(entry.number, entry.mine) if seen.complete else seen

    def _leave_gap(self, number: int) -> None:
        self._gap = min(self._gap, number)

    def hasten(self) -> None:
        """Have the queue announced at once, and as blocking calls, because this rank waits now."""
        with self.lock:
            for entry in self._queue:
                if entry.state is State.CALLED:
                    entry.not_before = 0.0
                    if entry.may_block:
                        entry.mine |= _BLOCKING

    def withdraw(self, entry: Entry) -> bool:
        """Withdraw a collective; return False if all other ranks have announced it, too."""
        with self.lock:
            self.pump()
            if entry.begun or entry not in self._queue:
                return not entry.begun
            if entry.state is State.ANNOUNCED and not self.announcements.withdraw(
                entry.number, entry.mine
            ):
                return False
            self._leave_gap(entry.number)
            self._queue.remove(entry)
            entry.end(State.WITHDRAWN)
            return True

    def called(self) -> dict[int, Call]:
        """Return the records of calls that have not begun, by number; a mismatch may name them.

        The function takes no lock: a thread that holds it may need these records, too.
        """
        calls = {entry.number: entry.call for entry in list(self._queue)}
        if (fast := self.fast_call) is not None and fast.sequence is not None:
            calls[fast.sequence] = fast
        return calls

    def start_anew(self) -> None:
        """Forget all calls, as all ranks of the group do after an incident."""
        self._queue.clear()
        self._gap = math.inf
        self._forget_fast_call()

    # -- the fast path: a blocking call that is like an earlier one -----------------------------

    @property
    def coming(self) -> int:
        """Return the number of the collective that :meth:`meet` didn't begin."""
        return self.announcements.number + (not self._promised)

    def meet(self, word: int) -> int:
        """Announce the next collective as a blocking call; return its number if it may begin now.

        Otherwise, return 0: nothing has begun, and the call has to take the long way. If other
        ranks rely on the announcement, it stays, and :meth:`call` takes it over. The caller holds
        :attr:`lock` and :data:`guard`.

        Args:
            word: see :func:`unnumbered`.
        """
        announcements = self.announcements
        number = announcements.number + 1
        if self._queue or (number > announcements.limit and not announcements.may_announce(number)):
            return 0  # the call must not overtake one in the queue, and needs a free place
        mine = word | (number & NUMBER) << _NUMBER_AT
        announcements.announce(number, mine)
        if announcements.agree(number, mine) or self._find_all(number, mine):
            announcements.number = number
            return number
        return 0

    def _find_all(self, number: int, mine: int) -> bool:
        """Look for the other ranks for a moment; if some are missing, withdraw the announcement."""
        announcements = self.announcements
        for look in range(_LOOKS):
            if announcements.agree(number, mine):
                return True
            if look > _BUSY_LOOKS:
                os.sched_yield()
        while not announcements.withdraw(number, mine):
            if announcements.agree(number, mine):
                return True
            seen = announcements.look(number, mine)
            if not (seen.missing or (seen.complete and seen.blocking)):
                # All ranks are here, but some with another call or without blocking. The long way
                # takes over the announced word.
                announcements.number = number
                self._promised = mine
                return False
        return False

    def end_fast_path(self) -> None:
        """End the fast path, and the :meth:`call` that may have followed it.

        If an error came first, a fingerprint may still be promised. The method tries once to
        withdraw it, see PROTOCOL.md.
        """
        if self._promised:
            number = self.announcements.number
            self.announcements.withdraw(number, self._promised)
            self._leave_gap(number)
        self._forget_fast_call()
