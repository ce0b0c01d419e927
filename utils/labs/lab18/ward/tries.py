"""Count a student's tries at a finding, and pause after several wrong ones.

A loop over all ranks, lines and kinds should take longer than a look at the evidence. So the first
wrong findings of a bed are judged at once, and each later one starts a pause, in which the check
judges no other finding of this bed. Nothing sleeps, and other beds go on. Grading asks for
one finding in a fresh kernel, so it never meets a pause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: Wrong findings of a bed that cost no pause.
FREE = 3
#: Seconds of the first pause. Each further one is twice as long, but not longer than the longest.
FIRST_PAUSE = 30
LONGEST_PAUSE = 120


@dataclass
class Bed:
    """What was tried for one bed.

    Attributes:
        tries: different findings that were judged, one after the other.
        wrong: how many of them were wrong.
        last: the finding that was judged last.
        again: seconds of the clock at which the next finding is judged.
        found_at: the try at which the finding was right; 0 before.
    """

    tries: int = 0
    wrong: int = 0
    last: Any = None
    again: float = 0.0
    found_at: int = 0


class Tries:
    """The tries of all wards of this kernel.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._beds: dict[tuple[str, int], Bed] = {}
        self._ward = ""

    def admit(self, ward: object) -> bool:
        """Open a ward; return whether another one was open before."""
        before, self._ward = self._ward, str(ward)
        return before not in ("", self._ward)

    def of(self, ward: object, bed: int) -> Bed:
        """Return what was tried for a bed in the ward of this name."""
        return self._beds.setdefault((str(ward), bed), Bed())

    def pause(self, ward: object, bed: int, finding: Any) -> int:
        """Return for how many seconds this finding isn't judged yet; 0 for the last one again."""
        of = self.of(ward, bed)
        left = 0 if finding == of.last else of.again - self.clock()
        return max(0, -int(-left // 1))

    def note(self, ward: object, bed: int, finding: Any, is_right: bool) -> int:
        """Count a finding that was judged, until one is right; return the number of its try."""
        of = self.of(ward, bed)
        if of.found_at:
            return of.found_at
        if finding != of.last:
            of.tries += 1
            of.last = finding
            of.wrong += not is_right
            if not is_right and of.wrong > FREE:
                length = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (of.wrong - FREE - 1))
                of.again = self.clock() + length
        if is_right:
            of.found_at = of.tries
        return of.tries

    def clear(self) -> None:
        """Forget everything."""
        self._beds.clear()


#: The tries of this kernel.
TRIES = Tries()
