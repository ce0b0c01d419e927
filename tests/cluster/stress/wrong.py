"""Cells with an error: the notebook says what it is, and the next cell works."""

from __future__ import annotations

import random

from .cells import WRONG, Cell, count, px

# One rank fails: before, while or after the others communicate.
RAISES = """\
y = torch.ones($count)
if rank == $one and $moment == "before":
    raise ValueError("mine")
$call
if rank == $one:
    raise ValueError("mine")
$call
"""
CALLS = (
    "dist.all_reduce(y)",
    "dist.barrier()",
    "dist.broadcast(y, 0)",
    "dist.all_gather_object([None] * size, rank)",
    "dist.all_reduce(y, async_op=True).wait()",
)
DIFFERENT = (
    "dist.all_reduce(torch.ones($count + (rank == $one)))",
    "dist.all_reduce(torch.ones($count, dtype=torch.float64 if rank == $one else torch.float32))",
    "dist.broadcast(torch.ones($count), src=int(rank == $one))",
    "dist.all_reduce(torch.ones($count), op=dist.ReduceOp.MAX if rank == $one"
    " else dist.ReduceOp.SUM)",
    "if rank == $one:\n    dist.all_reduce(torch.ones($count))\n"
    "else:\n    dist.broadcast(torch.ones($count), 0)",
)
CYCLE = "x = torch.zeros($count)\ndist.recv(x, src=(rank + $step) % size, tag=$tag)\n"
OTHER_SIZE = """\
if rank == $one:
    dist.send(torch.ones($count), dst=$other)
if rank == $other:
    dist.recv(torch.ones($count + 1), src=$one)
"""
FORGOTTEN = "if rank == $one:\n    dist.isend(torch.full(($count,), -1), $other, tag=$tag)\n"
LEFT_BEHIND = """\
if rank == $one:
    work = dist.all_reduce(torch.ones(5), async_op=True)
"""
LARGE = "both = [dist.isend(torch.ones(1_000_000), (rank + 1) % size),\n" \
    "        dist.irecv(torch.zeros(7), (rank + 2) % size)]\n"  # fmt: skip
SOME_MAKE = "if rank != $one:\n    group = dist.new_group([r for r in range(size) if r != $one])\n"


def _two(chance: random.Random, n: int) -> dict[str, int]:
    one, other = chance.sample(range(n), 2)
    return {"one": one, "other": other, "count": count(chance), "tag": chance.choice([0, 3])}


def raises(chance: random.Random, n: int, number: int) -> Cell:
    """One rank raises an exception."""
    moment, call = chance.choice(["before", "after"]), chance.choice(CALLS)
    drawn = {**_two(chance, n), "moment": repr(moment), "call": call}
    prefix = LARGE if chance.random() < 0.25 else ""
    return Cell(WRONG, "one rank raises", px(prefix + RAISES, **drawn), says="ValueError: mine")


def all_raise(chance: random.Random, n: int, number: int) -> Cell:
    """All ranks raise the same."""
    return Cell(WRONG, "all ranks raise", px("undefined_name\n"), says="NameError.*same on ranks")


def different(chance: random.Random, n: int, number: int) -> Cell:
    """Calls that do not belong together."""
    text = px(chance.choice(DIFFERENT), **_two(chance, n))
    return Cell(WRONG, "mismatch", text, says=r"rank \d+ calls .*but rank \d+ calls")


def other_size(chance: random.Random, n: int, number: int) -> Cell:
    """A message of another size than is expected."""
    text = px(OTHER_SIZE, **_two(chance, n))
    return Cell(WRONG, "message of another size", text, says=r"sent float32.*receives float32")


def cycle(chance: random.Random, n: int, number: int) -> Cell:
    """All ranks receive first."""
    text = px(CYCLE, **_two(chance, n), step=chance.randint(1, n - 1))
    return Cell(WRONG, "all receive", text, says="^Deadlock.*cycle")


def missing(chance: random.Random, n: int, number: int) -> Cell:
    """A rank that does not come to a collective."""
    drawn = _two(chance, n)
    text = px("y = torch.ones($count)\nif rank != $one:\n    $call\n", **drawn,
              call=chance.choice(CALLS))  # fmt: skip
    return Cell(
        WRONG, "missing rank", text, says=rf"waits? for rank {drawn['one']}, which has left"
    )


def extra(chance: random.Random, n: int, number: int) -> Cell:
    """A collective too many on one rank."""
    drawn = _two(chance, n)
    text = px("y = torch.ones($count)\ndist.all_reduce(y)\nif rank == $one:\n    dist.barrier()\n",
              **drawn)  # fmt: skip
    says = rf"rank {drawn['one']} waits for .*left the cell"
    return Cell(WRONG, "extra collective", text, says=says)


def never_sent(chance: random.Random, n: int, number: int) -> Cell:
    """A receive without a send."""
    text = px("if rank == $one:\n    dist.recv(torch.zeros($count), src=$other)\n",
              **_two(chance, n))  # fmt: skip
    return Cell(WRONG, "recv without send", text, says="waits for rank .*never sends")


def never_received(chance: random.Random, n: int, number: int) -> Cell:
    """A message that nobody receives: told, and no later receive gets it."""
    return Cell(
        WRONG,
        "message never received",
        px(FORGOTTEN, **_two(chance, n)),
        prints="no rank has received it",
    )


def left_behind(chance: random.Random, n: int, number: int) -> Cell:
    """A collective that one rank begins and never waits for; it shows here, or in the next cell."""
    text = px(LEFT_BEHIND, **_two(chance, n))
    says = "all_reduce"
    return Cell(WRONG, "forgotten wait", text, says=says, may_pass=True, echo=says)


def some_make_a_group(chance: random.Random, n: int, number: int) -> Cell:
    """A group that is not made by all."""
    text = "%%px --timeout 2\n" + px(SOME_MAKE, **_two(chance, n)).removeprefix("%%px\n")
    return Cell(WRONG, "group made by some", text, says="rank|new_group", may_pass=True)


def endless(chance: random.Random, n: int, number: int) -> Cell:
    """One rank never comes, as it computes."""
    drawn = _two(chance, n)
    text = "%%px --timeout 2\n" + px(
        "while rank == $one:\n    pass\ndist.barrier()\n", **drawn
    ).removeprefix("%%px\n")
    says = rf"wait for rank {drawn['one']}"
    return Cell(WRONG, "endless loop", text, says=says.replace("wait", "waits?"))


MAKERS = {
    raises: 5, all_raise: 1, different: 4, other_size: 2, cycle: 2, missing: 3, extra: 2,
    never_sent: 2, never_received: 2, left_behind: 2, some_make_a_group: 1, endless: 1,
}  # fmt: skip
