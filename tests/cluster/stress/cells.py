"""A cell that was drawn, what has to come of it, and what is done while it runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from string import Template

# Kinds of cells.
RIGHT, WRONG, INTERRUPT = "right", "wrong", "interrupted"
KILL, RESTART, FREEZE = "rank killed", "ranks.restart()", "rank frozen"

# What is done while a cell runs.
STOP_BUTTON, SIGKILL, SIGSTOP = "stop button", "SIGKILL", "SIGSTOP for 1 s"


@dataclass(frozen=True)
class Act:
    """Something that happens to a cell.

    Attributes:
        what: STOP_BUTTON, SIGKILL or SIGSTOP.
        after: seconds after the cell was sent.
        rank: to which rank; the stop button is for all.
    """

    what: str
    after: float
    rank: int = 0


@dataclass(frozen=True)
class Cell:
    """One cell of the notebook.

    Attributes:
        kind, name: what it is.
        text: its source, the magic included.
        says: pattern of the error that it must have; empty: it must have none.
        may_pass: it may also end well: an act can come too late.
        act: what happens meanwhile.
        before, after: cells around it; they must work.
        restart: the error has to advise `ranks.restart()`, which is then followed.
        prints: pattern of what has to be printed, where nothing fails.
        echo: pattern of an error that the next cell may have instead, once.
    """

    kind: str
    name: str
    text: str
    says: str = ""
    may_pass: bool = False
    act: Act | None = None
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    restart: bool = False
    prints: str = ""
    echo: str = ""


# Draws a cell for n ranks; the number differs for each cell, and so do its values.
Maker = Callable[[random.Random, int, int], Cell]

IMPORTS = """\
%%px
import ctypes, gc, os, signal, sys, time
import numpy as np, torch, torch.distributed as dist
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel
rank, size = mpi_rank, MPI.COMM_WORLD.size
def same(found, expected):
    assert torch.equal(found, expected), (rank, found, expected)
"""
JOIN = "%%px\ndist.init_process_group('mpi')\npair = dist.new_group([0, 1])\n"
# Also where some ranks have a group and others have none.
JOIN_AGAIN = """\
%%px
if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group('mpi')
pair = dist.new_group([0, 1])
"""

# The known right cell: its values tell a message of this cell from one that was left behind.
NEXT = """\
%%px
total = torch.tensor([$serial + rank])
dist.all_reduce(total)
assert total.item() == $serial * size + sum(range(size)), total
for count, tag in [(1, 0), (7, 3), (100_000, 0)]:
    for hop in range(size):
        mine = torch.full((count,), $serial * 100 + 10 * hop + rank)
        theirs = torch.zeros_like(mine)
        requests = [dist.irecv(theirs, (rank - 1) % size, tag=tag)]
        requests += [dist.isend(mine, (rank + 1) % size, tag=tag)]
        for request in requests:
            request.wait()
        assert (theirs == $serial * 100 + 10 * hop + (rank - 1) % size).all(), theirs[0]
if rank < 2:
    both = torch.tensor([$serial])
    dist.all_reduce(both, group=pair)
    assert both.item() == 2 * $serial
print("works on", rank)
"""
WORKS = 'print("works on", rank)\n'


def fill(text: str, **values: object) -> str:
    """The text with `$name` replaced."""
    return Template(text).substitute(values)


def px(text: str, **values: object) -> str:
    """A cell for the ranks, of a text with `$name`."""
    return "%%px\n" + fill(text, **values)


def count(chance: random.Random) -> int:
    """A number of elements: mostly small, at times beyond every limit of MPI's eager messages."""
    return chance.choice([1, 3, 7, 1000, 1000, 20_000, 300_000])
