"""One rank that is a thread: its IPython, its names, and what it begins with."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch_mpi.group.arguments
import torch_mpi.present
import torch_mpi.record
from utils.cluster import notebook_words, rank_side
from utils.cluster.rank_shell import Output, RankShell, Stream
from utils.cluster.world.shared_ranks import World
from utils.timeline import cell_log

from .own import Place


class Rank:
    """A rank.

    Attributes:
        number: its number.
        shell: the IPython that runs its cells.
        user_ns: the names of its cells.
        world: its view of all ranks.
    """

    def __init__(self, number: int, size: int, world: World):
        self.number = number
        self.world = world
        hook = sys.excepthook
        self.shell = RankShell()
        sys.excepthook = hook
        self.main = types.ModuleType("__main__")
        self.main.__dict__.update(self.shell.user_ns)
        self.shell.user_module = self.main
        self.shell.user_ns = self.main.__dict__
        self.user_ns: dict[str, Any] = self.main.__dict__
        # ipyparallel's engines have these names as well.
        self.user_ns |= {"mpi_rank": number, "mpi_size": size}

    def first_values(self) -> dict[Place, Any]:
        """Return what this rank has for itself from the beginning."""
        return {
            (sys, "stdout"): Stream("stdout", self._output),
            (sys, "stderr"): Stream("stderr", self._output),
            (torch_mpi.record, "recorder"): torch_mpi.record.Log(),  # type: ignore[no-untyped-call]
            (torch_mpi.present, "world"): None,
            (torch_mpi.group.arguments, "warned"): set(),
            (rank_side, "_here"): rank_side.fresh_state(),
            (cell_log, "_cell"): cell_log.fresh_cell(),
            (notebook_words, "_now"): types.SimpleNamespace(number=None),
        }

    def _output(self) -> Output:
        return self.shell.output

    def prepare(self, folder: Path) -> None:
        """Follow each cell; the rank calls this in its turn."""
        rank_side.keep_streams()
        rank_side.watch_cells(self.user_ns, self.number, folder, self._world)

    def _world(self) -> World | None:
        return self.world if self.world.has_joined else None
