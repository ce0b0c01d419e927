"""A pair of the labelled set: a wrong program and its right twin.

Each is a script by itself: ``mpiexec -n 2 python program.py``. It begins with :data:`PRELUDE`,
which joins the backend that ``LABELLED_BACKEND`` names, and gives ``rank``, ``size``, ``small`` (4
elements of float32) and ``large`` (4 MB, more than any library sends before it is received).
``LABELLED_TIMEOUT`` has the seconds that a wait may last; a backend other than ``mpi`` needs a file
to meet in, ``LABELLED_STORE``. A pair is written as a diff, from the wrong program to the right
one. A line that ends in ``#!`` is one that a report of the wrong one has to name.
"""

from __future__ import annotations

from dataclasses import dataclass

PRELUDE = """\
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

backend = os.environ.get("LABELLED_BACKEND", "mpi")
limit = {"timeout": timedelta(seconds=float(os.environ.get("LABELLED_TIMEOUT", "20")))}
if backend != "mpi":
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    store = dist.FileStore(os.environ["LABELLED_STORE"], size)
    limit |= {"store": store, "rank": rank, "world_size": size}
dist.init_process_group(backend, **limit)
rank, size = dist.get_rank(), dist.get_world_size()
small, large = torch.full((4,), float(rank)), torch.full((1_000_000,), float(rank))
"""

#: Classes that run through by luck: they are tried with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
BY_LUCK = {"buffer and wait", "buffering hazard"}

#: The classes, and what they are in words.
KINDS = {
    "call matching": "a rank leaves out a collective, or makes one too many",
    "mixed collectives": "the ranks call different collectives, or in another order",
    "type or size": "dtype, number of elements or shape differ",
    "peer and tag": "a rank, root or tag that does not exist, or does not fit",
    "deadlock by blocking": "calls that wait for each other",
    "deadlock by waiting": "non-blocking calls, waited for in an order that cannot be",
    "buffer and wait": "a tensor is used before its communication is waited for",
    "buffering hazard": "right only while the library buffers small messages",
    "group misuse": "the wrong process group, or one that is gone",
    "unmatched at the end": "something was sent, or begun, that nobody takes",
}


@dataclass(frozen=True)
class Pair:
    """A wrong program and the right one.

    Attributes:
        name, kind: what it is called; one of :data:`KINDS`.
        diff: their text after the prelude: lines of the wrong one begin with ``-``, those of the
            right one with ``+``, those of both with a blank.
        says: regular expressions, of which each has to be found in a report of the wrong one.
        ranks: how many it needs.
    """

    name: str
    kind: str
    diff: str
    says: tuple[str, ...]
    ranks: int = 2

    def text(self, right: bool) -> str:
        """Return the whole program."""
        other = "-" if right else "+"
        program = [line[2:] for line in self.diff.splitlines() if not line.startswith(other)]
        if right:
            program = [line.removesuffix("  #!") for line in program]
        return PRELUDE + "\n".join([*program, ""])


#: Begins a line with what a report says.
SAYS = "says: "


def read_pairs(text: str) -> list[Pair]:
    """Return the pairs of a text.

    A line ``# KIND`` begins a class, and ``## NAME`` or ``## NAME [3 ranks]`` a pair. Below it is
    what a report says, a regular expression in each line that begins with ``says:``, then the diff.
    """
    pairs = []
    for of_a_kind in text.split("\n# ")[1:]:
        kind, *blocks = of_a_kind.split("\n## ")
        for block in blocks:
            head, *lines = block.rstrip().splitlines()
            name, _, ranks = head.removesuffix(" ranks]").partition(" [")
            says = tuple(line[len(SAYS) :] for line in lines if line.startswith(SAYS))
            diff = "\n".join(lines[len(says) :])
            pairs.append(Pair(name, kind.strip(), diff, says, int(ranks or 2)))
    return pairs
