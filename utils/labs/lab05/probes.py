"""The probes of lab 05, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from utils.checks.clock import Clock, moved_clocks
from utils.checks.probe import also_calls, answer_named, as_dict, probe_calls, reading_answer, told
from utils.labs.shared import script_runs

# -- the stopwatch and its spread ------------------------------------------------------------------


# Calls that no rank leaves before all others have joined.
MEETINGS = ("barrier", "allreduce", "allgather", "_allgather_base")


@also_calls("barrier", "all_reduce", "all_gather", "all_gather_into_tensor")
def probe_stopwatch(
    user_ns: dict, *, rank: int, steps: int, rounds: int, late: float, takes: list, warm: float
) -> dict:
    """Call `time_rounds` on clocks that each step advances and each collective synchronizes.

    We call it twice, because nothing of the first call may remain in the second.

    Args:
        late: seconds of `prepare` on this rank.
        takes: seconds of each step on this rank, in the order of the calls.
        warm: the additional seconds of the very first step.
    """
    from torch_mpi.record import log

    if not dist.is_initialized():
        dist.init_process_group("mpi")
    function = answer_named(user_ns, "time_rounds")
    events = []

    def prepare() -> None:
        events.append("prepare")
        clock.advance(late)

    def step() -> None:
        events.append("step")
        # As in training, the ranks first average gradients, so an early rank waits here.
        dist.all_reduce(torch.zeros(1))
        made = events.count("step")
        clock.advance(takes[min(made, len(takes)) - 1] + (warm if made == 1 else 0.0))

    known = getattr(function, "__globals__", {})
    with moved_clocks(known) as clock, _meetings(clock, events):
        clock.offset = 1e4 * rank
        mark = log.mark()
        first = told(function(prepare, step, rounds, steps))
        events.clear()
        result = function(prepare, step, rounds, steps)
        not_waited = [as_dict(call) for call in log.since(mark) if not call.waited]
    return {
        "first": first,
        "result": told(result),
        "kind": type(result).__name__,
        "events": events,
        "open": not_waited,
    }


@contextlib.contextmanager
def _meetings(clock: Clock, events: list[str]) -> Iterator[None]:
    """Make a collective end at the same moment on all ranks, when the last rank has joined."""
    group = dist.group.WORLD
    reduce_all = group.allreduce
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX

    def meeting(name: str, call: Callable) -> Callable:
        def met(*args: Any, **kwargs: Any) -> Any:
            events.append(name)
            work = call(*args, **kwargs)
            if work is not None:
                work.wait()
                if record := getattr(work, "call", None):  # blocking calls have no record
                    record.waited = record.blocking  # the answer has not waited yet
            latest = torch.tensor([clock.ahead], dtype=torch.float64)
            reduce_all([latest], options).wait()
            clock.ahead = latest.item()
            return work

        return met

    known = [name for name in MEETINGS if hasattr(group, name)]
    patched = {name: meeting(name, getattr(group, name)) for name in known}
    with mock.patch.multiple(group, **patched):
        yield


def probe_bands(user_ns: dict, *, rank: int, trials: list) -> list:
    """Return the bands of times in the same two lists, whose content changes between calls."""
    lists: tuple[list, list] = ([], [])
    bands = []
    for times in trials:
        for kept, new in zip(lists, times, strict=True):
            kept[:] = new
        bands += probe_calls(user_ns, rank=rank, calls=[("speedup_band", lists)])
    return bands


# -- laws and scripts ------------------------------------------------------------------------------


def probe_law(user_ns: dict, *, rank: int, law: str, ps: list, serial: float, times: list) -> dict:
    """Return a law at one p and at several, and the fit of this law."""
    function, fit = (reading_answer(user_ns, name) for name in (law, f"fit_{law}"))
    fit(list(ps), [1.5 * times[0], *times[1:]])  # another program, which leaves nothing behind
    return {
        "one": told(function(ps[-1], serial)),
        "array": told(function(np.array(ps, float), serial)),
        "whole": told(function(np.array(ps), serial)),
        "fit": told(fit(list(ps), list(times))),
    }


def probe_script(user_ns: dict, *, rank: int, settings: list) -> list[dict]:
    """Return the script for several settings, as text and as bash runs it."""
    texts = [told(answer_named(user_ns, "job_script")(*setting)) for setting in settings]
    scripts = []
    for text, (*size, _) in zip(texts, settings, strict=True):
        script = {"text": text}
        if isinstance(text, str):
            script["said"] = script_runs.unreadable(text)
            script["left"] = script_runs.left(text, *size)
            script["launches"] = script_runs.launches(text, *size)
        scripts.append(script)
    return scripts
