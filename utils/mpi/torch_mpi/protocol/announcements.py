"""The words by which the ranks of a group tell each other which collective they have called.

A rank announces a collective by one word of 64 bits on the group's board, its *fingerprint*. The
board has a place for each of the last :data:`DEPTH` collectives.

=========  ======================================================================================
bits       meaning
=========  ======================================================================================
63         the rank has called the collective
62         it waits in a blocking call
61 to 42   the number of the collective in its group, modulo 2²⁰
41 to 0    the signature of the call: what has to be equal on all ranks
=========  ======================================================================================

No other module knows this layout, and no bit is free: one more bit takes one of the number or of
the signature. If all ranks make the same call in the same way, their words are equal. The callers
of :func:`alike` compare whole words, and miss their usual case if ranks differ in a bit. A mask in
:func:`alike` is not enough, as it sees only this rank's word: PROTOCOL.md says how to announce one
more bit.

One more word per rank says which collective it has *acknowledged* last: it has seen all ranks there
and begins, unless a second look finds that one has withdrawn. :mod:`torch_mpi.protocol.handshake`
says what these words are for. Nothing here needs torch or MPI.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

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

_CALLED = 1 << 63
_BLOCKING = 1 << 62
_NUMBER_AT = 42
#: The bits of the number, and the number of the last collective before it begins at 0 again.
NUMBER = (1 << 20) - 1
_SIGNATURE = (1 << _NUMBER_AT) - 1


@functools.lru_cache(maxsize=65_536)
def signature(key: tuple[object, ...]) -> int:
    """Return the bits that stand for what has to be equal; the same in every process."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SIGNATURE


def fingerprint(number: int, code: int, blocking: bool) -> int:
    """Return the word for collective ``number`` with the signature ``code``."""
    return _CALLED | (_BLOCKING if blocking else 0) | (number & NUMBER) << _NUMBER_AT | code


def numbered(unnumbered: int, number: int) -> int:
    """Return the fingerprint of collective 0, ``unnumbered``, for collective ``number``."""
    return unnumbered | (number & NUMBER) << _NUMBER_AT


def as_blocking(word: int) -> int:
    """Return the fingerprint of the same call in which the rank waits."""
    return word | _BLOCKING


def alike(word: int, ranks: int) -> list[int]:
    """Return the words of all ranks if they make the same call in the same way."""
    return [word] * ranks


def _is_there(word: int, number: int, mine: int) -> bool:
    """Return whether a rank has announced the collective, and has not refused the call ``mine``."""
    return bool(
        word & _CALLED
        and (word >> _NUMBER_AT & NUMBER) == number & NUMBER
        and (word ^ mine) & _SIGNATURE != _SIGNATURE
    )


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
        """Return whether all have announced the same call."""
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
        """Return whether the word's place is free: every rank has read what stands there."""
        if number > self.limit:
            self.board.refresh()
            self.limit = min(self.board.of_all(ACKNOWLEDGED)) + _AHEAD
        return number <= self.limit

    def announce(self, number: int, mine: int) -> None:
        """Tell all ranks that this one is there."""
        self.board.set(number % DEPTH, mine)

    def acknowledge(self, number: int, mine: int) -> Seen:
        """Say that all are there. Begin if what is returned is complete, else one has withdrawn."""
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
        """Take the word back; return False if another rank relies on it: this one takes part."""
        return self._replace(number, mine, 0)

    def refuse(self, number: int, mine: int) -> bool:
        """Never begin it: put a word there that no call has. Ranks with this call miss this one.

        Returns:
            False if another rank has acknowledged it. What did not fit may do so a moment later:
            one thread of a rank leaves, another one comes.
        """
        if not self.board.immediate:
            return True  # nobody blocks there, and what is begun in vain is found afterwards
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
        """Count on from here, as all ranks have agreed."""
        self.number = number
        self.limit = number + _AHEAD
        self.board.set(ACKNOWLEDGED, number)

    def look(self, number: int, mine: int) -> Seen:
        """Compare the fingerprints that are there with this rank's."""
        self.board.refresh()
        words = self.board.of_all(number % DEPTH)
        if words == alike(mine, len(words)):
            return Seen([], [], bool(mine & _BLOCKING))
        missing = []
        mismatched = []
        for rank, word in enumerate(words):
            if not _is_there(word, number, mine):
                missing.append(rank)
            elif (word ^ mine) & _SIGNATURE:
                mismatched.append(rank)
        blocking = not missing and all(word & _BLOCKING for word in words)
        return Seen(missing, mismatched, blocking)
