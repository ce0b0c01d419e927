"""Measure what a Python subclass of C10D's ``Backend`` costs, and list what it can't do.

`python docs/pytorch_backend.py` needs PyTorch 2.15 or newer and nothing else. It communicates
nothing: every operation returns a finished work. So the times are PyTorch's own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

ROUNDS, CALLS = 9, 5000


class FinishedWork(dist.Work):
    """A work that is complete, with everything that a caller may ask."""

    def wait(self, timeout: object = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> Exception:
        """Return an error, to see whether it arrives."""
        return ValueError("the work failed")

    def _source_rank(self) -> int:
        return 0


FINISHED = FinishedWork()


def _finished(self: object, *arguments: object) -> FinishedWork:
    return FINISHED


class AsBackend(c10d.Backend):
    """A backend as PyTorch 2.15 wants it: PyTorch's own group calls it from C++."""

    allreduce = recv_anysource = _finished

    def getBackendName(self) -> str:  # noqa: D102  (PyTorch's name)
        return "as-backend"


class AsGroup(dist.ProcessGroup):
    """A backend that is the whole process group: torch.distributed calls it directly."""

    allreduce = _finished

    def getBackendName(self) -> str:  # noqa: D102
        return "as-group"

    def setGroupName(self, name: str) -> None:  # noqa: D102
        pass

    _set_group_desc = _set_group_name = setGroupDesc = setGroupName

    @property
    def _device_types(self) -> list[torch.device]:
        return []

    def rank(self) -> int:  # noqa: D102
        return 0

    def size(self) -> int:  # noqa: D102
        return 1


def groups() -> dict[str, dist.ProcessGroup]:
    """Make the three groups to compare, in one process."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"
    for name, kind in (("as-group", AsGroup), ("as-backend", AsBackend)):
        dist.Backend.register_backend(
            name, lambda store, rank, size, timeout, kind=kind: kind(rank, size), devices=["cpu"]
        )
    dist.init_process_group("as-backend", store=dist.HashStore(), rank=0, world_size=1)
    made = {name: dist.new_group([0], backend=name) for name in ("as-group", "as-backend")}
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    return {**made, "as-backend, recorder": dist.new_group([0], backend="as-backend")}


def microseconds(call: Callable[[], object]) -> float:
    """Return the time of one call, from many of them."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def costs(made: dict[str, dist.ProcessGroup]) -> dict[str, float]:
    """Return the median time of ``all_reduce`` in each group, which take turns."""
    tensor = torch.ones(1)
    times: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(ROUNDS):
        for name, group in made.items():
            times[name].append(microseconds(lambda g=group: dist.all_reduce(tensor, group=g)))
    return {name: statistics.median(rounds) for name, rounds in times.items()}


def gaps(group: dist.ProcessGroup) -> dict[str, bool]:
    """Return what doesn't work; True means that PyTorch still has the gap."""
    tensor = torch.ones(1)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    try:
        dist.recv(tensor, group=group)
        no_source = False
    except RuntimeError:
        no_source = True
    dump = json.loads(c10d._dump_fr_trace_json(backend="as-backend"))
    return {
        "the caller gets another object than the backend's Work": type(work) is not FinishedWork,
        "is_completed() of a complete work is False": not work.is_completed(),
        "exception() of a failed work is None": work.exception() is None,
        "recv() from any rank raises, because the work has no source rank": no_source,
        "the recorder's entries of complete calls stay 'scheduled'": all(
            entry["state"] == "scheduled" for entry in dump["entries"]
        ),
    }


def main() -> int:
    """Print the report as JSON; return 2 if PyTorch is too old."""
    if not hasattr(c10d, "FlightRecorderHook"):
        print(f"PyTorch {torch.__version__} has no PyBackend. Run this with 2.15 or newer.")
        return 2
    made = groups()
    report = {
        "PyTorch": torch.__version__,
        "all_reduce, µs": {name: round(cost, 2) for name, cost in costs(made).items()},
        "gaps": gaps(made["as-backend, recorder"]),
    }
    print(json.dumps(report, indent=2, ensure_ascii=False))
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
