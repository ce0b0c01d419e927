"""The rank's side of a timeline: begin and end of its cells, and the records in between."""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionInfo, ExecutionResult

    from torch_mpi.present import World
    from torch_mpi.record import Call


# This rank's last cell: when it began and ended, the CPU time of its thread at both moments, and
# the position of its first record.
def fresh_cell() -> SimpleNamespace:
    """Return the state of a rank that has run no cell."""
    return SimpleNamespace(begin=None, end=None, cpu=[0.0, 0.0], mark=0)


_cell = fresh_cell()
# The communicator for comparing clocks.
_clock = SimpleNamespace(comm=None, usable=True)

# Seconds that a comparison of clocks may take.
PATIENCE = 2.0


def start_watching(user_ns: dict[str, Any], *, rank: int) -> None:
    """Make every cell of this rank begin a new timeline."""
    from IPython import get_ipython

    events = get_ipython().events
    # The kernel's questions run as silent cells, which IPython does not announce, so they don't
    # change the timeline of the last cell.
    for name, function in (("pre_run_cell", _begin), ("post_run_cell", _end)):
        if function not in events.callbacks[name]:
            events.register(name, function)


def _begin(info: ExecutionInfo) -> None:
    from torch_mpi.record import log

    _cell.mark = log.mark()
    _cell.begin = time.perf_counter()
    _cell.cpu = [time.thread_time(), 0.0]
    _cell.end = None


def _end(result: ExecutionResult) -> None:
    _cell.end = time.perf_counter()
    _cell.cpu[1] = time.thread_time()


def backend_world() -> World | None:
    """Return the backend's view of all ranks; None before the first process group."""
    module = sys.modules.get("torch_mpi.present")
    return module.world if module else None


def report(user_ns: dict[str, Any], *, rank: int) -> dict[str, Any]:
    """Return this rank's communication since its last cell began, with times of its clock."""
    from torch_mpi.record import log

    records = [as_record(call) for call in log.since(_cell.mark)]
    # Ranks that continued without a dead rank have new numbers.
    world = backend_world()
    rank = world.rank if world else rank
    return {
        "rank": rank,
        "begin": _cell.begin,
        "end": _cell.end,
        "cpu": max(0.0, _cell.cpu[1] - _cell.cpu[0]),
        "cores": os.cpu_count() if world is None or world.one_machine else 0,
        "records": records,
    }


def clock_offset(user_ns: dict[str, Any], *, rank: int) -> float:
    """Return the seconds that this rank's clock is ahead of rank 0's.

    All ranks must call this at the same time.

    Raises:
        TimeoutError: a rank does not take part, now or at an earlier call.
    """
    world = backend_world()
    if world and world.one_machine:
        return 0.0
    from mpi4py import MPI

    from utils.timeline import clocks

    if not _clock.usable or MPI.Is_finalized():
        raise TimeoutError("this rank's clock can no longer be compared")
    # Late messages of a failed comparison would disturb the next comparison.
    _clock.usable = False
    if _clock.comm is None:
        _clock.comm = clocks.duplicate(MPI.COMM_WORLD, timeout=PATIENCE)
    offset = clocks.offsets(_clock.comm, timeout=PATIENCE)[rank]
    _clock.usable = True
    return offset


def as_record(call: Call) -> dict[str, Any]:
    """Return a :class:`~torch_mpi.record.Call` as JSON."""
    from torch_mpi.errors import place_text

    plain = ("op", "nbytes", "dtype", "peer", "tag", "blocking", "sequence", "any_source")
    traffic = ("sent", "received", "moved_out", "moved_in")
    times = ("start", "matched", "end")
    return {
        **{name: getattr(call, name) for name in (*plain, *traffic, *times)},
        "group": list(call.group),
        "shape": list(call.shape),
        # Another thread may end a wait at any moment.
        "waits": [list(wait) for wait in list(call.waits)],
        "message": None if call.message is None else list(call.message),
        "where": place_text(*call.place) if call.place else "",
    }
