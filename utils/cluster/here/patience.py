"""Looks after ranks that wait while another rank computes on and on, perhaps in an endless loop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch_mpi.settings
from utils.cluster.world.shared_ranks import SharedRanks

from .own import Place
from .turns import Turns

# Seconds between two looks.
EVERY = 0.25
_LIMIT: Place = (torch_mpi.settings, "time_limit")


class Patience:
    """A thread that stops ranks that have waited for longer than their timeout.

    Args:
        turns: the ranks' threads.
        ranks: what the ranks share.
        timeout: seconds for which a rank may compute while others wait.
        place: returns where a rank is, in words.
    """

    def __init__(
        self, turns: Turns, ranks: SharedRanks, timeout: float, place: Callable[[int], str]
    ):
        self._turns = turns
        self._ranks = ranks
        self._timeout = timeout
        self._place = place
        self._over = threading.Event()
        threading.Thread(target=self._look_for_good, name="patience", daemon=True).start()

    def end(self) -> None:
        """End the thread."""
        self._over.set()

    def _look_for_good(self) -> None:
        while not self._over.wait(EVERY):
            self._look()

    def _look(self) -> None:
        turns = self._turns
        rank, seconds = turns.present()
        # Only the ranks: what they wait for keeps tensors alive that the ranks may have dropped.
        waiting = list(turns.waiting())
        if rank is None or not waiting or self._ranks.incident:
            return
        limits = [turns.own.of(other, _LIMIT) or self._timeout for other in waiting]
        if seconds > min(limits):
            self._ranks.give_up(rank, self._place(rank), min(limits))
