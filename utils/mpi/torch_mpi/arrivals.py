"""Has every rank come, and does it mean the same? Asked before each collective.

A rank writes one word for each collective of its group: the number of the collective and a
signature of the call. When all words are there and equal, the MPI call can be made: it can neither
hang nor mix up different calls. PyTorch's own check (``TORCH_DISTRIBUTED_DEBUG=DETAIL``) compares
such fingerprints, too, but by collectives, which a missing rank hangs.

A rank may take its word back (an error, a deadline, Ctrl-C), and must not where another one is in
the MPI call already. So who sees all words tells that it starts, and looks again; who takes its
word back looks for ranks that have started, and returns if there is one. Either of the two sees the
other: they write first, and read afterwards. ``tests/test_backend_core.py`` goes through all orders
of these steps.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass

from . import fence
from .board import Board

# How many collectives a rank may begin before the slowest rank has begun the first of them.
DEPTH = 64
WORDS = DEPTH + 1
STARTED = DEPTH
# A rank that has started a collective looks at its words once more: one place stays free.
_AHEAD = DEPTH - 1
# How often a rank says by message how far it is; a part of DEPTH.
EVERY = 16

# A word: 1 bit "here", 1 bit "in a blocking call", 20 bits of the number, 42 of the signature.
HERE, DIRECT, NUMBER_AT = 1 << 63, 1 << 62, 42
NUMBER, _SIGNATURE = 0xFFFFF, (1 << NUMBER_AT) - 1


@functools.lru_cache(maxsize=65_536)
def signature(key: tuple) -> int:
    """42 bits that stand for what has to be equal on all ranks; the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNATURE


def word(number: int, code: int, direct: bool) -> int:
    """The word of a collective with this signature."""
    return HERE | (DIRECT if direct else 0) | (number & NUMBER) << NUMBER_AT | code


@dataclass(frozen=True, slots=True)
class Sight:
    """Who is there.

    Attributes:
        missing: ranks (of the group) that have not come.
        odd: ranks that came with another call.
        direct: all are there, in blocking calls.
    """

    missing: list[int]
    odd: list[int]
    direct: bool

    @property
    def complete(self) -> bool:
        """Whether all have come with the same call."""
        return not (self.missing or self.odd)


class Arrivals:
    """The words of a group's ranks on its board.

    Attributes:
        number: of the last collective that this rank came to; the first one has 1.
        limit: the last one whose place is known to be free.
    """

    def __init__(self, board: Board):
        self.board = board
        self.number = 0
        self.limit = _AHEAD

    def may_come(self, number: int) -> bool:
        """Whether the place for the word is free: nobody still has to read what stands there."""
        if number > self.limit:
            if self.board.refresh:
                self.board.refresh()
            self.limit = min(self.board.of_all(STARTED)) + _AHEAD
        return number <= self.limit

    def come(self, number: int, written: int) -> None:
        """Tell all ranks that this one is there."""
        self.board.set(number % DEPTH, written)

    def enter(self, number: int, mine: int) -> Sight:
        """All have come: begin, unless one takes its word back just now and is missing again."""
        if self.board.refresh:
            # Messages are late: whoever has come by them may leave unseen, and nobody blocks.
            if number % EVERY == 0:
                self.board.set(STARTED, number)
            return self.look(number, mine)
        self.board.set(STARTED, number)
        sight = self.look(number, mine)
        if not sight.complete:
            self.board.set(STARTED, number - 1)
        return sight

    def withdraw(self, number: int, mine: int) -> bool:
        """As if this rank had not come; ``False`` where another one has begun: it takes part."""
        return self._take_back(number, mine, 0)

    def refuse(self, number: int, mine: int) -> bool:
        """Never begin it: for those with the same call as if this rank were missing.

        ``False`` where another rank has begun.

        What did not fit may do so a moment later: one thread of a rank leaves, another one comes.
        """
        if self.board.refresh:
            return True  # nobody blocks there, and what is begun in vain is found afterwards
        return self._take_back(number, mine, mine ^ _SIGNATURE)

    def _take_back(self, number: int, mine: int, instead: int) -> bool:
        self.board.set(number % DEPTH, instead)
        if self.board.refresh:
            sight = self.look(number, mine)
            begun = sight.missing == [self.board.rank] and not sight.odd
        else:
            fence.everywhere()
            begun = max(self.board.of_all(STARTED)) >= number
        if begun:
            self.come(number, mine)
        return not begun

    def go_on_after(self, number: int) -> None:
        """All ranks have agreed to count on from here."""
        self.number = number
        self.limit = number + _AHEAD
        self.board.set(STARTED, number)

    def look(self, number: int, mine: int) -> Sight:
        """Who has come, compared with this rank's word."""
        if self.board.refresh:
            self.board.refresh()
        words = self.board.of_all(number % DEPTH)
        if all(w == mine for w in words):
            return Sight([], [], bool(mine & DIRECT))
        # Who has refused this very call will not come to it.
        there = [
            w & HERE
            and (w >> NUMBER_AT & NUMBER) == number & NUMBER
            and (w ^ mine) & _SIGNATURE != _SIGNATURE
            for w in words
        ]
        missing = [r for r, here in enumerate(there) if not here]
        odd = [r for r, w in enumerate(words) if there[r] and (w ^ mine) & _SIGNATURE]
        return Sight(missing, odd, not missing and all(w & DIRECT for w in words))
