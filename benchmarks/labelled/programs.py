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
    dist.distributed_c10d.default_pg_timeout = limit["timeout"]  # of new groups
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
    "wrong numbers": "all calls match, and the ranks compute something else than they should",
    "too slow": "the numbers are right, and the ranks wait more than they need to",
    "memory leak": "each step leaves something behind",
    "silent corruption": "the hardware changes a bit, here by a line of the program",
}


@dataclass(frozen=True)
class Pair:
    """A wrong program and the right one.

    Attributes:
        name, kind: what it is called; one of :data:`KINDS`.
        diff: their text after the prelude: lines of the wrong one begin with ``-``, those of the
            right one with ``+``, those of both with a blank.
        says: regular expressions, of which each has to be found in a report of the wrong one.
        instead: "", or how to find the mistake, because the backend can't see it and is silent.
        proof: "", or what shows that the wrong one does something wrong, see `proof.py`.
        ranks: how many it needs.
    """

    name: str
    kind: str
    diff: str
    says: tuple[str, ...]
    instead: str = ""
    proof: str = ""
    ranks: int = 2

    def text(self, right: bool) -> str:
        """Return the whole program."""
        other = "-" if right else "+"
        program = [line[2:] for line in self.diff.splitlines() if not line.startswith(other)]
        if right:
            program = [line.removesuffix("  #!") for line in program]
        return PRELUDE + "\n".join([*program, ""])


#: Begin the lines of a label, above the diff.
LABELS = ("says: ", "instead: ", "proof: ")


def read_pairs(text: str) -> list[Pair]:
    """Return the pairs of a text.

    A line ``# KIND`` begins a class, and ``## NAME`` or ``## NAME [3 ranks]`` a pair. Below it are
    the lines of its label, which begin with one of :data:`LABELS`, then the diff. ``says:`` is
    there once for each regular expression.
    """
    pairs = []
    for of_a_kind in text.split("\n# ")[1:]:
        kind, *blocks = of_a_kind.split("\n## ")
        pairs += [_pair(kind.strip(), block) for block in blocks]
    return pairs


def _pair(kind: str, block: str) -> Pair:
    head, *lines = block.rstrip().splitlines()
    name, _, ranks = head.removesuffix(" ranks]").partition(" [")
    says, instead, proof = (
        [line.removeprefix(begin) for line in lines if line.startswith(begin)] for begin in LABELS
    )
    diff = "\n".join(line for line in lines if not line.startswith(LABELS))
    return Pair(name, kind, diff, tuple(says), "".join(instead), "".join(proof), int(ranks or 2))
