"""The words by which the ranks of a group tell each other which collective they have called.

One word per rank and collective, its :mod:`fingerprint <torch_mpi.protocol.fingerprints>`, on the
group's board, which has a place for each of the last :data:`DEPTH` collectives; and one word per
rank: the last collective that it has *acknowledged*, which means that it has seen all ranks there
and begins, unless a second look finds that one has withdrawn. :mod:`torch_mpi.protocol.handshake`
says what they are for. Nothing here needs torch or MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from . import fence
from .fingerprints import alike, is_blocking, is_same_call, is_there, refusal

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
        """All are there: say so. Begin if what is returned is complete, else one has withdrawn."""
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
        """As if this rank had not come; ``False`` where another one relies on it: it takes part."""
        return self._replace(number, mine, 0)

    def refuse(self, number: int, mine: int) -> bool:
        """Never begin it: by a word that no call has. For ranks with the same call it is missing.

        ``False`` where another rank has acknowledged it. What did not fit may do so a moment
        later: one thread of a rank leaves, another one comes.
        """
        if not self.board.immediate:
            return True  # nobody blocks there, and what is begun in vain is found afterwards
        return self._replace(number, mine, refusal(mine))

    def _replace(self, number: int, mine: int, instead: int) -> bool:
        self.board.set(number % DEPTH, instead)
        if not self.board.immediate:
            seen = self.look(number, mine)
            relied_on = seen.missing == [self.board.rank] and not seen.mismatched
        else:
            fence.everywhere()
            relied_on = max(self.board.of_all(ACKNOWLEDGED)) >= number
        if relied_on:
            self.announce(number, mine)
        return not relied_on

    def go_on_after(self, number: int) -> None:
        """All ranks have agreed to count on from here."""
        self.number = number
        self.limit = number + _AHEAD
        self.board.set(ACKNOWLEDGED, number)

    def look(self, number: int, mine: int) -> Seen:
        """Whose fingerprints are there, compared with this rank's."""
        self.board.refresh()
        words = self.board.of_all(number % DEPTH)
        if words == alike(mine, len(words)):
            return Seen([], [], is_blocking(mine))
        there = [is_there(word, number, mine) for word in words]
        missing = [rank for rank, here in enumerate(there) if not here]
        mismatched = [r for r, w in enumerate(words) if there[r] and not is_same_call(w, mine)]
        return Seen(missing, mismatched, not missing and all(map(is_blocking, words)))
