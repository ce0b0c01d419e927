"""The words by which the ranks of a group tell each other which collective they have called.

One word per rank and collective, a *fingerprint*, on the group's board, which has a place for each
of the last :data:`DEPTH` collectives; and one word per rank: the last collective it has begun.
:mod:`torch_mpi.protocol.handshake` says what they are for. Nothing here needs torch or MPI.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import fence

if TYPE_CHECKING:
    from .board import Board

# Places for fingerprints. A rank that has acknowledged a collective looks at it once more, so that
# one place stays free: a rank announces at most DEPTH − 1 beyond the slowest acknowledgement.
DEPTH = 64
WORDS = DEPTH + 1
ACKNOWLEDGED = DEPTH
_AHEAD = DEPTH - 1
# How often a rank acknowledges by message how far it is; a part of DEPTH.
ACKNOWLEDGE_EVERY = 16

# A fingerprint: 1 bit "here", 1 bit "in a blocking call", 20 bits of the number, 42 of signature.
HERE, BLOCKING, NUMBER_AT = 1 << 63, 1 << 62, 42
NUMBER, _SIGNATURE = 0xFFFFF, (1 << NUMBER_AT) - 1


@functools.lru_cache(maxsize=65_536)
def signature(key: tuple[object, ...]) -> int:
    """42 bits that stand for what has to be equal on all ranks; the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNATURE


def fingerprint(number: int, code: int, blocking: bool) -> int:
    """The word for collective ``number`` with this signature."""
    return HERE | (BLOCKING if blocking else 0) | (number & NUMBER) << NUMBER_AT | code


@dataclass(frozen=True, slots=True)
class Seen:
    """What a rank sees of the others' fingerprints.

    Attributes:
        missing: ranks (of the group) that have not announced the collective.
        mismatched: ranks that announced another call.
        blocking: all are there, in blocking calls.
    """

    missing: list[int]
    mismatched: list[int]
    blocking: bool

    @property
    def complete(self) -> bool:
        """Whether all have announced the same call."""
        return not (self.missing or self.mismatched)


class Announcements:
    """The fingerprints of a group's ranks on its board.

    Attributes:
        number: of the last collective that this rank has called; the first one has 1.
        limit: the last one whose place is known to be free.
    """

    def __init__(self, board: Board):
        self.board = board
        self.number = 0
        self.limit = _AHEAD

    def may_announce(self, number: int) -> bool:
        """Whether the word's place is free: every rank has read what stands there."""
        if number > self.limit:
            self.board.refresh()
            self.limit = min(self.board.of_all(ACKNOWLEDGED)) + _AHEAD
        return number <= self.limit

    def announce(self, number: int, mine: int) -> None:
        """Tell all ranks that this one is there."""
        self.board.set(number % DEPTH, mine)

    def acknowledge(self, number: int, mine: int) -> Seen:
        """All are there: begin if what is returned is complete, else one has just withdrawn."""
        if not self.board.immediate:
            # Messages are late: a rank may have withdrawn unseen. Nobody blocks, so none is stuck.
            if number % ACKNOWLEDGE_EVERY == 0:
                self.board.set(ACKNOWLEDGED, number)
            return self.look(number, mine)
        self.board.set(ACKNOWLEDGED, number)
        seen = self.look(number, mine)
        if not seen.complete:
            self.board.set(ACKNOWLEDGED, number - 1)
        return seen

    def withdraw(self, number: int, mine: int) -> bool:
        """As if this rank had not come; ``False`` where another one has begun: it takes part."""
        return self._take_back(number, mine, 0)

    def refuse(self, number: int, mine: int) -> bool:
        """Never begin it: by a word that no call has. For ranks with the same call it is missing.

        ``False`` where another rank has begun. What did not fit may do so a moment later: one
        thread of a rank leaves, another one comes.
        """
        if not self.board.immediate:
            return True  # nobody blocks there, and what is begun in vain is found afterwards
        return self._take_back(number, mine, mine ^ _SIGNATURE)

    def _take_back(self, number: int, mine: int, instead: int) -> bool:
        self.board.set(number % DEPTH, instead)
        if not self.board.immediate:
            seen = self.look(number, mine)
            begun = seen.missing == [self.board.rank] and not seen.mismatched
        else:
            fence.everywhere()
            begun = max(self.board.of_all(ACKNOWLEDGED)) >= number
        if begun:
            self.announce(number, mine)
        return not begun

    def go_on_after(self, number: int) -> None:
        """All ranks have agreed to count on from here."""
        self.number = number
        self.limit = number + _AHEAD
        self.board.set(ACKNOWLEDGED, number)

    def look(self, number: int, mine: int) -> Seen:
        """Whose fingerprints are there, compared with this rank's."""
        self.board.refresh()
        words = self.board.of_all(number % DEPTH)
        if all(w == mine for w in words):
            return Seen([], [], bool(mine & BLOCKING))
        # Who has refused this very call will not come to it.
        there = [
            w & HERE
            and (w >> NUMBER_AT & NUMBER) == number & NUMBER
            and (w ^ mine) & _SIGNATURE != _SIGNATURE
            for w in words
        ]
        missing = [r for r, here in enumerate(there) if not here]
        mismatched = [r for r, w in enumerate(words) if there[r] and (w ^ mine) & _SIGNATURE]
        return Seen(missing, mismatched, not missing and all(w & BLOCKING for w in words))
