"""Is there a processor that no rank computes on?

Within a machine the data of a collective are moved by the rank's own processor. Begun early, by the
progress thread, that is hidden behind computing only where a processor is idle. Where the ranks use
all of them it takes its time from computing, and some more for two threads that share one.
"""

from __future__ import annotations

import torch


def one_is_idle(cores: int, ranks: int) -> bool:
    """Whether each rank has one beside those of its threads (``torch.get_num_threads()``)."""
    return cores >= ranks * (torch.get_num_threads() + 1)
