"""What each rank runs for `test_kinds_of_ranks.py`: one call, and what it leaves in the record."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.distributed as dist

from torch_mpi import record
from utils.checks.probe import told

#: What a record says besides times and numbers, which depend on the calls before.
FACTS = (
    *("op", "group", "nbytes", "shape", "dtype", "peer", "tag", "reduce_op", "blocking", "waited"),
    *("any_source", "sent", "received", "parts"),
)


def join(user_ns: dict[str, Any], *, rank: int) -> None:
    """Make the world's group, and a group of the ranks 0 and 2."""
    dist.init_process_group("mpi")
    user_ns["pair"] = dist.new_group([0, 2])


def call(user_ns: dict[str, Any], *, rank: int, code: str) -> Any:
    """Run lines that set `out`, and return it."""
    user_ns["mark"] = record.log.mark()
    r, n = dist.get_rank(), dist.get_world_size()
    names = {"torch": torch, "dist": dist, "r": r, "n": n, "pair": user_ns["pair"], "out": None}
    exec(compile(code, "calls.py", "exec"), names)
    return told(names["out"])


def recorded(user_ns: dict[str, Any], *, rank: int) -> list[dict[str, Any]]:
    """Return what the latest call has left in the record."""
    calls = record.log.since(user_ns["mark"])
    return [
        {name: told(getattr(one, name)) for name in FACTS} | {"is over": one.end > 0}
        for one in calls
    ]


def boast(user_ns: dict[str, Any], *, rank: int, **said: Any) -> list[dict[str, Any]]:
    """Make an all_reduce, and say something else of it."""
    mark = record.log.mark()
    dist.all_reduce(torch.ones(3))
    return [record.as_dict(one) | said for one in record.log.since(mark)]


def hide(user_ns: dict[str, Any], *, rank: int, shows: int = 0) -> list[dict[str, Any]]:
    """Make three calls, and report so many of them."""
    mark = record.log.mark()
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    dist.all_reduce(torch.ones(3))
    return [record.as_dict(one) for one in record.log.since(mark)[:shows]]


def go_on(user_ns: dict[str, Any], *, rank: int) -> str:
    """Make a call that fails, and return the words of its error, which tell of other ranks."""
    try:
        dist.all_reduce(torch.ones(3 + rank))
    except RuntimeError as error:
        return str(error)
    return ""


def hide_later(user_ns: dict[str, Any], *, rank: int) -> str:
    """Let a thread make a call when this question has been answered."""
    ended = threading.Event()

    def late() -> None:
        ended.wait(1)
        dist.all_reduce(torch.ones(1))
        ended.set()

    threading.Thread(target=late, daemon=True).start()
    return "begun"
