"""Calls that don't match, drawn from a seed, on each rank; after each one a call that does.

    mpiexec -n 4 python mismatch_program.py 1 100

The arguments are the first seed and the number of seeds. Rank 0 prints a line of JSON for each
seed: the calls, and what was wrong. `play` makes the calls on ranks inside the kernel, too.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

DTYPES = (torch.float32, torch.float64, torch.int64, torch.uint8, torch.bfloat16)
SIZES = (1, 2, 5, 300, 5_000, 300_000)


def drawn(seed: int, ranks: int) -> dict[str, Any]:
    """What each rank does: one of them calls with another size, dtype, or operation."""
    draw = random.Random(f"{seed} of {ranks}")
    one = {
        "op": draw.choice(sorted(CALLS)),
        "dtype": draw.randrange(len(DTYPES)),
        "size": draw.choice(SIZES),
        "blocking": draw.random() < 0.5,
        "waits_first": draw.random() < 0.5,
    }
    other = dict(one)
    what = draw.choice(["size", "size", "dtype", "op"])
    if what == "size" or (one["op"] == "barrier" and what == "dtype"):
        other["size"] = draw.choice([size for size in SIZES if size != one["size"]])
    elif what == "dtype":
        other["dtype"] = (one["dtype"] + 1 + draw.randrange(len(DTYPES) - 1)) % len(DTYPES)
    else:
        other["op"] = draw.choice([op for op in sorted(CALLS) if op != one["op"]])
    if one["op"] == "barrier":
        other["op"] = "all_reduce"
    return {"odd": draw.randrange(ranks), "one": one, "other": other}


def _all_to_all(x: torch.Tensor, others: int, n: int, rank: int, **options: Any) -> Any:
    """Each rank keeps a part of its own size, and expects parts of the size that others have."""
    size = x.numel()
    sends = [x.clone() for _ in range(n)]
    receives = [torch.zeros(size if k == rank else others, dtype=x.dtype) for k in range(n)]
    return dist.all_to_all(receives, sends, **options)


def _all_to_all_single(x: torch.Tensor, others: int, n: int, rank: int, **options: Any) -> Any:
    size = x.numel()
    splits = [size if k == rank else others for k in range(n)]
    output = torch.zeros(sum(splits), dtype=x.dtype)
    return dist.all_to_all_single(output, x.repeat(n), splits, [size] * n, **options)


CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda x, o, n, r, **more: dist.all_reduce(x, **more),
    "broadcast": lambda x, o, n, r, **more: dist.broadcast(x, 0, **more),
    "reduce": lambda x, o, n, r, **more: dist.reduce(x, n - 1, **more),
    "all_gather": lambda x, o, n, r, **more: dist.all_gather(
        [torch.zeros_like(x) for _ in range(n)], x, **more
    ),
    "all_gather_into_tensor": lambda x, o, n, r, **more: dist.all_gather_into_tensor(
        x.repeat(n), x, **more
    ),
    "reduce_scatter_tensor": lambda x, o, n, r, **more: dist.reduce_scatter_tensor(
        torch.zeros_like(x), x.repeat(n), **more
    ),
    "gather": lambda x, o, n, r, **more: dist.gather(
        x, [torch.zeros_like(x) for _ in range(n)] if r == 0 else None, **more
    ),
    "scatter": lambda x, o, n, r, **more: dist.scatter(
        x, [x.clone() for _ in range(n)] if r == 0 else None, **more
    ),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": lambda x, o, n, r, **more: dist.barrier(**more),
}


def play(seed: int) -> dict[str, str]:
    """Make the calls of a seed on this rank; return the error's kind and text, and the next sum."""
    rank, n = dist.get_rank(), dist.get_world_size()
    plan = drawn(seed, n)
    mine = plan["other"] if rank == plan["odd"] else plan["one"]
    # On a rank of an all_to_all, most other ranks have the usual size.
    usual = plan["one"]["size"]
    told = {"kind": "", "error": "", "next": ""}
    x = torch.ones(mine["size"]).to(DTYPES[mine["dtype"]])
    try:
        work = CALLS[mine["op"]](x, usual, n, rank, async_op=not mine["blocking"])
        if work is not None:
            if mine["waits_first"]:
                work.wait()
            else:
                y = torch.ones(3)
                dist.all_reduce(y)  # another call while the first is under way
                work.wait()
        dist.barrier()
    except Exception as error:
        told |= {"kind": type(error).__name__, "error": str(error)}
    junk = [torch.full((size,), 7.0) for size in SIZES]  # takes what was freed too early
    z = torch.full((5,), float(rank))
    dist.all_reduce(z)
    told["next"] = "right" if z.tolist() == [n * (n - 1) / 2] * 5 else str(z)
    assert all(bool((one == 7.0).all()) for one in junk)
    return told


BOTH_SIDES = re.compile(
    r"rank \d+ calls .* but rank \d+ (calls|makes) |rank \d+ sent \d+ bytes, rank \d+ "
)


def wrong(told: list[dict[str, str]]) -> Iterator[str]:
    """Yield what is wrong with what the ranks said."""
    if any(one["next"] != "right" for one in told):
        yield f"the next call: {[one['next'] for one in told]}"
    kinds = {one["kind"] for one in told}
    if not kinds <= {"CommunicationMismatch", "CommunicationStopped"}:
        yield f"errors of the kinds {sorted(kinds)}"
    if not any(BOTH_SIDES.search(one["error"]) for one in told):
        yield f"no report names both sides: {[one['error'] for one in told]}"


def main(first: int, count: int) -> None:
    """Play seeds; rank 0 prints what came of each."""
    dist.init_process_group("mpi")
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Dup()
    for seed in range(first, first + count):
        told = world.gather(play(seed))
        if world.rank == 0:
            said = {"seed": seed, "plan": drawn(seed, world.size), "wrong": list(wrong(told))}
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
