"""What the ranks and the kernel hold, now and at first: nothing may grow."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from .cells import JOIN_AGAIN

# Groups that a cell has left are the user's, and PyTorch keeps them: nobody counts those.
CLEAN = """\
%%px
group = pair = work = works = request = requests = both = model = None
"""
ASK = 'import json\nprint("CENSUS", json.dumps(ranks.ask_or_raise("utils.mpi.tests.counts:count")))'

# By how much a number may be larger than at first. A rank's log of its communications takes up to
# 60 MB by design; IPython keeps what cells have shown; a fork server may be started again.
SLACK = {
    "communicators": 0, "windows": 0, "descriptors": 4, "threads": 2, "memory": 120,
    "files in /dev/shm": 1, "processes": 1,
}  # fmt: skip


@dataclass
class Census:
    """One count.

    Attributes:
        cell: after the how-manieth cell.
        generation: how often the ranks had been restarted.
        rows: numbers by name, for "rank 0", …, and "kernel".
        files: kinds of open files, by rank.
        shared: names of the ranks' files in /dev/shm.
    """

    cell: int
    generation: int
    rows: dict[str, dict[str, int]]
    files: dict[str, dict[str, int]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def fresh(self, kernel: dict[str, int]) -> Census:
        """A copy to compare with; with these numbers of the kernel, if there are any."""
        rows = {who: dict(row) for who, row in self.rows.items()}
        rows["kernel"] = dict(kernel or rows["kernel"])
        return Census(self.cell, self.generation, rows, self.files, self.shared)

    def growth(self, allowed: Census) -> list[str]:
        """What has become larger than is allowed, in words. It is allowed from now on."""
        found = []
        for who, row in self.rows.items():
            for name, number in row.items():
                before = allowed.rows[who][name]
                if number > before + SLACK[name]:
                    more = self._more_files(allowed, who) if name == "descriptors" else ""
                    found.append(f"{who}: {before} {name}, now {number}{more}")
                    allowed.rows[who][name] = number
        return found

    def __str__(self) -> str:
        """One line."""
        names = list(self.rows["rank 0"])
        ranks = [row for who, row in self.rows.items() if who != "kernel"]
        parts = [f"{name} {'/'.join(str(row[name]) for row in ranks)}" for name in names]
        kernel = " ".join(f"{n} {name}" for name, n in self.rows["kernel"].items())
        return f"after cell {self.cell}: {', '.join(parts)}; kernel: {kernel}"

    def _more_files(self, first: Census, who: str) -> str:
        before, now = first.files.get(who, {}), self.files.get(who, {})
        more = {kind: n - before.get(kind, 0) for kind, n in now.items()}
        kinds = [f"{n} × {kind}" for kind, n in sorted(more.items()) if n > 0]
        return f" ({', '.join(kinds)})" if kinds else ""


def take(ok: Callable, kernel: int, cell: int, generation: int) -> Census:
    """Count, on the ranks by a cell, of the kernel from outside.

    Args:
        ok: runs a cell that must not fail.
        kernel: process of the notebook's kernel.
    """
    ok(CLEAN)
    ok(JOIN_AGAIN)
    told = json.loads(re.search(r"^CENSUS (.*)$", ok(ASK).streams, re.MULTILINE)[1])
    census = Census(cell, generation, {"kernel": _of_process(kernel)})
    for rank, counted in enumerate(told):
        who = f"rank {rank}"
        census.files[who] = counted.pop("open files")
        shared = counted.pop("shared")
        census.shared |= {name for name in shared if not name.endswith("(deleted)")}
        row = {name: number for name, number in counted.items() if number is not None}
        census.rows[who] = row | {"files in /dev/shm": len(shared)}
    return census


def _of_process(pid: int) -> dict[str, int]:
    process = psutil.Process(pid)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "memory": process.memory_info().rss // 2**20,
        "processes": len(process.children()),
    }


def left_in_shared_memory(census: Census) -> list[str]:
    """Files of ranks that are gone, which are there all the same."""
    return sorted(name for name in census.shared if Path(name).exists())
