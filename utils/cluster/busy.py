"""Whether other programs keep a rank from its processor, so that measured times mislead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

# If a rank gets less than this share of a processor, measured times may change their order.
_ENOUGH = 0.6
# Seconds of processor time that the test for a busy machine uses.
WORK = 0.03


def processor_share(user_ns: dict[str, Any], *, rank: int) -> float:
    """Return for which share of the time rank 0 gets a processor if it wants one; 1 elsewhere.

    Only rank 0 works, so that the ranks don't compete for processors.
    """
    if rank:
        return 1.0
    begin = time.perf_counter()
    used = time.thread_time()
    while time.thread_time() - used < WORK:
        pass
    return min(1.0, WORK / (time.perf_counter() - begin))


def busy_warning(shares: Sequence[float]) -> str:
    """Return a warning if the ranks' shares of a processor are small; "" on a quiet machine."""
    share = min(shares)
    if share >= _ENOUGH:
        return ""
    return (
        f"This machine is busy, so a rank gets a processor for only {100 * share:.0f} % of the "
        "time that it asks for, and measured times can mislead. Close other programs, then run "
        "the cell that measures again, and after it this cell."
    )
