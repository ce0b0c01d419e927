"""Whether other programs take so much of the machine that measured times mislead."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

#: Seconds of processor time that the question takes.
WORK = 0.03
#: Below this share of a processor a picture of times may turn over.
ENOUGH = 0.6


def processor_share(user_ns: dict[str, Any], *, rank: int) -> float:
    """Return how much of the time rank 0 gets a processor when it wants one; 1 on other ranks.

    One rank alone works, so that the ranks don't wait for each other's processors.
    """
    if rank:
        return 1.0
    begin = time.perf_counter()
    used = time.thread_time()
    while time.thread_time() - used < WORK:
        pass
    return min(1.0, WORK / (time.perf_counter() - begin))


def warning(shares: Sequence[float]) -> str:
    """Return what to say of the shares of all ranks; "" on a quiet machine."""
    share = min(shares)
    if share >= ENOUGH:
        return ""
    return (
        f"This machine is busy: a rank gets a processor for {100 * share:.0f} % of the time that "
        "it asks for. Times that were measured now can mislead. When less is going on, run the "
        "cell that measures again, and then this one."
    )
