"""The recorded cell as a run that another machine can replay, see :mod:`utils.forecast`."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import numpy as np
from numpy.typing import NDArray

from utils.forecast.errors import RunError
from utils.forecast.run import COMPUTE, START, WAIT, Call, Event, Run

from . import activity, ideal_network
from .activity import COMPUTING, Lane

#: The beginnings of the backend's names, and what a forecast calls the operation.
_OPERATIONS = {
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


def run(lanes: list[Lane], cores: int = 0, title: str = "", steps: int = 0) -> Run:
    """Return the run of a cell.

    Args:
        lanes: of all ranks.
        cores: of the machine; 0 if several machines took part.
        title: what the run is.
        steps: how many equal steps the cell has; 0 means that the calls tell, see `steps_of`.

    Raises:
        RunError: a rank gave no answer or an error, or a call never ended.
    """
    for lane in lanes:
        if lane.problem:
            raise RunError(
                f"Rank {lane.rank} did not report its cell ({lane.problem}). Run the cell again "
                "without the error."
            )
    places = {lane.rank: place for place, lane in enumerate(lanes)}
    calls, numbers = _calls(lanes, places)
    try:
        events = tuple(_events(lane, numbers) for lane in lanes)
    except ideal_network.StuckError:
        raise RunError(
            "A rank of this run waits for a call that never ends. Repair the program, and record "
            "it again."
        ) from None
    shares = tuple(_share(lane) for lane in lanes)
    made = Run(calls, events, shares, cores, title)
    return dataclasses.replace(made, steps=steps or steps_of(made))


def steps_of(run: Run) -> int:
    """Return how many equal steps a run has.

    A step is what repeats: rank 0 starts and awaits the same calls. If its waits differ from step
    to step, because a call sometimes ends early, only the calls that it starts are compared. A step
    of several equal calls looks like several steps. Then the computing between the calls tells how
    many of them belong together.
    """
    events = run.events[0] if run.ranks else ()
    names = [(kind, run.calls[int(value)]) for kind, value in events if kind != COMPUTE]
    parts = _repeats(names)
    if parts == 1 and run.ranks:
        parts = _repeats(run.started(0))
    if parts == 1:
        return 1
    apart = dataclasses.replace(run, steps=parts)
    computed = np.array([apart.computing(rank) for rank in range(run.ranks)])
    return parts // _period(computed)


def _repeats(names: list[Any]) -> int:
    """Return how often the shortest beginning of a list repeats, if it fills the list."""
    for length in range(1, len(names) // 2 + 1):
        if len(names) % length == 0 and names == names[:length] * (len(names) // length):
            return len(names) // length
    return 1


def _period(computed: NDArray[np.float64]) -> int:
    """Return after how many parts of a run its computing repeats; 1 if all parts compute alike.

    The parts of a period compute differently, and each part computes alike in all periods. A tenth
    of the parts doesn't count, because other programs disturb some of them.

    Args:
        computed: seconds, of shape [ranks, parts].
    """
    ranks, parts = computed.shape
    for length in range(2, parts // 3 + 1):
        if parts % length:
            continue
        by_place = computed.reshape(ranks, -1, length)
        usual = np.median(by_place, axis=1, keepdims=True)
        differ = np.abs(usual - np.median(usual, axis=2, keepdims=True)).mean()
        off = np.sort(np.abs(by_place - usual).ravel())
        if differ > 0.05 * usual.mean() and off[: int(0.9 * off.size)].mean() < 0.35 * differ:
            return length
    return 1


def _calls(lanes: list[Lane], places: dict[int, int]) -> tuple[tuple[Call, ...], dict[int, int]]:
    """Return all calls, and the number of each record's call by the record's identity.

    A call whose partners are not all in the record gets no number. It costs nothing.
    """
    calls: list[Call] = []
    numbers: dict[int, int] = {}
    records = activity.all_records(lanes)
    for send, recv in activity.messages(records):
        group = (places[send["rank"]], places[recv["rank"]])
        numbers[id(send)] = numbers[id(recv)] = len(calls)
        calls.append(Call("message", group, send["nbytes"]))
    for met in activity.collectives(records):
        op = _operation(met[0]["op"])
        numbers.update((id(record), len(calls)) for record in met)
        group = _from_root([places[rank] for rank in met[0]["group"]], met[0]["peer"])
        calls.append(Call(op, group, _nbytes(op, met)))
    return tuple(calls), numbers


def _operation(name: str) -> str:
    for beginning, op in _OPERATIONS.items():
        if name.startswith(beginning):
            return op
    raise RunError(f"This run calls {name}, and there is no model of its time.")


def _from_root(group: list[int], root: int | None) -> tuple[int, ...]:
    """Return the group so that it begins with the root, if there is one."""
    k = root or 0
    return tuple(group[k:] + group[:k])


def _nbytes(op: str, met: list[dict]) -> int:
    """Return the bytes of a collective's tensor, see `utils.forecast.collectives.price`."""
    sides = {"all_gather": "received", "scatter": "received"}
    sizes = [record[sides.get(op, "sent")] for record in met]
    # A root may get more than the other ranks; a broadcast's other ranks send nothing.
    return round(statistics.median(sizes)) if op in {"gather", "scatter"} else max(sizes)


def _events(lane: Lane, numbers: dict[int, int]) -> tuple[Event, ...]:
    """Return a rank's events: computing, and starts and waits of calls."""
    computed = ideal_network.Computed(lane)
    events: list[Event] = []
    before = 0.0
    for time, waits, _, record in ideal_network.events(lane):
        if id(record) not in numbers:
            continue
        now = computed.until(time)
        if now > before:
            events.append((COMPUTE, now - before))
            before = now
        events.append((WAIT if waits else START, numbers[id(record)]))
    if (rest := computed.until(lane.end) - before) > 0:
        events.append((COMPUTE, rest))
    return tuple(events)


def _share(lane: Lane) -> float:
    """Return the CPU seconds of the computing thread per second of computing, at most 1."""
    parts = activity.states(lane)
    computing = sum(end - begin for begin, end, state in parts if state == COMPUTING)
    return 1.0 if not lane.cpu or not computing else min(1.0, lane.cpu / computing)
