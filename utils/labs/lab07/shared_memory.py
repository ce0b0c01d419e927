"""Tasks 7.5 and 7.6: steps on shared weights, and the updates that are lost."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checks.comparison import NO_NUMBER, TOGETHER, Mistake, some, table
from utils.checks.probe import answer_named, number, numbers, recorded
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.cluster.questions import Ranks, Reply

from .servers import SERVER, WORLD, enough, rate_of, toy_gradient


class Others:
    """Gradients on shared weights, which other ranks change meanwhile."""

    def __init__(self, shared: torch.Tensor, seed: int, steps: int):
        self.shared = shared
        self.seed = seed
        self.left = steps
        self.computed = 0

    def more(self) -> bool:
        """Return whether there is another step to do; if so, others have added to the weights."""
        self.left -= 1
        if self.left >= 0:
            self.shared += _of_others(self.seed + 400, self.computed, len(self.shared))
        return self.left >= 0

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the weights; before it is there, others have added to them."""
        gradient = toy_gradient(weights.clone(), self.seed, self.computed)
        self.shared += _of_others(self.seed, self.computed, len(weights))
        self.computed += 1
        return gradient


class Overwritten(TorchDispatchMode):
    """Notes whether a tensor is copied into some memory, over what was there."""

    def __init__(self, pointer: int):
        super().__init__()
        self.pointer = pointer
        self.found = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            into, source = (tensor.data_ptr() for tensor in args[:2])
            self.found = self.found or (into == self.pointer != source)
        return function(*args, **kwargs or {})


def _of_others(seed: int, k: int, size: int) -> torch.Tensor:
    """Return what others have added to the weights by the end of step k."""
    return numbers(seed + 100 + k, size)


def probe_hogwild(user_ns: dict, *, rank: int, seed: int, rate: float, steps: int) -> dict:
    """Call `hogwild` on memory that others write to."""
    shared = numbers(seed, 3 + steps)
    others = Others(shared, seed, steps)
    function = answer_named(user_ns, "hogwild")
    with Overwritten(shared.data_ptr()) as overwritten:
        _, calls = recorded(function, shared, others.compute, rate, others.more)
    return {
        "overwritten": overwritten.found,
        "weights": shared,
        "computed": others.computed,
        "calls": calls,
    }


@task("7.5", "Hogwild", points=2)
def hogwild(ranks: Ranks, report: Report) -> None:
    """Check that each step is added to what stands in the memory then, and nothing is sent."""
    cases = [
        {"seed": report.seed, "rate": rate_of(report.seed), "steps": steps} for steps in (4, 6)
    ]
    report.judge_cases(ranks, probe_hogwild, cases, _alone_on_shared)


def _alone_on_shared(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps for a rank that adds its steps to weights that others change, too."""
    computed = answer.value["computed"]
    steps = case["steps"]
    ops = [call["op"] for call in answer.value["calls"]]
    no_calls = "with Hogwild nothing is communicated, the memory is shared"
    yield facts({f"it calls {', '.join(ops[:1])}: {no_calls}": ops}, kind="communication")
    miscounted = (
        f"compute was called {computed} times, more() said True {steps} times: ask more() before "
        "each step, and take as many steps"
    )
    yield facts({miscounted: computed != steps})
    after = functools.partial(_after_hogwild, **case)
    wrong = {
        "the weights were read before more() was asked, and others have changed them since: ask, "
        "then read": after(mistake="early"),
        _OVERWRITTEN: after(mistake="back"),
        "only the other ranks have changed shared: shared = shared - … makes a new tensor, in "
        "memory of its own. Change it in place: shared -= lr · gradient": after(factor=0.0),
        "all gradients were computed with the weights of the beginning: read shared anew for "
        "each": after(mistake="first"),
        "uphill: subtract lr · gradient": after(factor=-1.0),
        "the learning rate is missing": after(factor=1 / case["rate"]),
        f"divided by the {WORLD} ranks: nothing is averaged here, each gradient is a step": after(
            factor=1 / WORLD
        ),
        "only one step was taken": after(mistake="once"),
        "the gradients were added up, and applied at the end: each has to be in the memory when "
        "the next is computed": after(mistake="late"),
    }
    what = "the shared weights in the end"
    yield value(answer.value["weights"], after(), table(wrong), what=what)
    yield facts({_OVERWRITTEN: answer.value["overwritten"]})


_OVERWRITTEN = (
    "the updates of other ranks were overwritten: between reading and writing others have added to "
    "the weights. Do not write back a copy: change shared in place, shared -= lr · gradient"
)


def _after_hogwild(
    seed: int, rate: float, steps: int, mistake: str = "", factor: float = 1.0
) -> list[float]:
    """Return what the memory holds in the end: if all is right, or after a mistake.

    Args:
        mistake: "back": a copy is written back, which others' updates are not in; "first": all
            gradients are those at the start; "early": weights are read before more() is asked;
            "once": one step is taken; "late": all steps are taken at the end.
        factor: what each step is multiplied by.
    """
    start = numbers(seed, 3 + steps)
    shared = start.clone()
    owed = 0
    for k in range(steps):
        before = shared.clone()
        shared += _of_others(seed + 400, k, len(start))
        read = shared.clone()
        at = {"first": start, "early": before}.get(mistake, read)
        gradient = toy_gradient(at, seed, k)
        shared += _of_others(seed, k, len(start))
        if mistake == "late":
            owed = owed + rate * gradient
        elif mistake != "once" or k == 0:
            shared = (read if mistake == "back" else shared) - factor * rate * gradient
    return (shared - owed).tolist()


@contextlib.contextmanager
def _shared_counters(count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Share zeros among all ranks, with a file to lock them by; all ranks do this."""
    path = [None]
    if dist.get_rank() == SERVER:
        file, path[0] = tempfile.mkstemp(prefix="lost-updates-")
        os.ftruncate(file, 4 * count)
        os.close(file)
    dist.broadcast_object_list(path, src=SERVER)
    counters = torch.from_file(path[0], shared=True, size=count)
    lock = os.open(path[0], os.O_RDWR)
    dist.barrier()
    try:
        if dist.get_rank() == SERVER:
            os.unlink(path[0])
        yield counters, lock
    finally:
        os.close(lock)


def probe_count(user_ns: dict, *, rank: int, seed: int, times: int) -> dict:
    """Call `count_lost` with updates of which a known part is lost."""
    from torch_mpi.record import log

    function = answer_named(user_ns, "count_lost")
    keep = _kept(seed, rank, times)  # what is lost of the others' is their secret
    made: list[int] = []
    together: list[bool] = []  # at each update: whether the ranks have met

    with _shared_counters(keep.shape[1]) as (counters, lock):

        def update(tensor: torch.Tensor) -> None:
            if len(made) == times:
                raise RuntimeError(f"update was called more than {times} times on a rank")
            if tensor.data_ptr() != counters.data_ptr():
                raise ValueError(
                    "update got another tensor than counters: its memory is not shared with the "
                    "other ranks"
                )
            if rank == WORLD - 1:
                time.sleep(0.002)
            fcntl.flock(lock, fcntl.LOCK_EX)
            counters.add_(keep[len(made)])
            fcntl.flock(lock, fcntl.LOCK_UN)
            together.append(any(c.op in TOGETHER and c.end for c in log.since(mark)))
            made.append(log.mark() - mark)

        mark = log.mark()
        result, calls = recorded(function, counters, update, times)
        dist.barrier()
    return {
        "result": number(result),
        "made": len(made),
        "before": bool(together and together[0]),
        "after": len(calls) - made[-1] if made else 0,
        "calls": calls,
    }


def _kept(seed: int, rank: int, times: int) -> torch.Tensor:
    """Return which updates of a rank arrive: 1, and 0 for lost ones. The first all do."""
    draw = torch.Generator().manual_seed(seed)
    counters = 5 * (times + 1)  # another number for each number of updates
    kept = (torch.rand(times, counters, generator=draw) > 0.1 + 0.1 * rank).float()
    kept[0] = 1
    kept[:, 0] = 1
    return kept


@task("7.6", "lost updates, counted", points=2)
def count_lost(ranks: Ranks, report: Report) -> None:
    """Check that all begin and end together, and the share of updates that is missing."""
    if not enough(ranks, report):
        return
    cases = (
        {"each": to_each(seed=report.seeds(WORLD)), "times": times, "patience": 20.0}
        for times in (7, 3)
    )
    report.judge_cases(ranks, probe_count, cases, _lost)


def _lost(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps that ranks begin together, and find the share of lost updates."""
    times = case["times"]
    made = answer.value["made"]
    miscounted = f"update(counters) was called {made} times, expected {times}, on each rank"
    yield facts({miscounted: made != times})
    apart = {
        "begins without the others: who is first may be done before the next one starts, and "
        "nothing collides. dist.barrier() before the first update": not answer.value["before"],
        "reads the counters when its own updates are done; those of others may still come, and "
        "would be counted as lost. dist.barrier() after the last update": not answer.value["after"],
    }
    yield facts(apart, kind="communication")
    yield communication(answer.value["calls"], some(range(WORLD)))
    kept = torch.stack([_kept(each["seed"], r, times) for r, each in enumerate(case["each"])])
    share = 1 - kept.sum((0, 1)).mean().item() / (WORLD * times)
    yield value(
        answer.value["result"],
        share,
        _wrong_shares(kept, answer.rank, times, share),
        what=f"times={times}: the lost share",
        form="the share of updates that are lost",
        tolerance=1e-4,
    )


def _wrong_shares(kept: torch.Tensor, rank: int, times: int, share: float) -> list[Mistake]:
    """Return wrong shares of lost updates; kept: of each rank and update, in which counters."""
    counters = kept.sum((0, 1))
    updates = WORLD * times
    wrong = {
        "this is the share that arrived: the lost one is 1 minus it": 1 - share,
        "a share from 0 to 1, not percent": 100 * share,
        "this is how many are lost: divide by the number of all updates": share * updates,
        f"all {WORLD} ranks update: {WORLD} · times updates were made": 1
        - counters.mean().item() / times,
        "the first counter lost nothing, or the largest: take the mean of all": 0,
        "this is the counter that lost most: take the mean of all": 1
        - counters.min().item() / updates,
        "sum over the counters, but one counter's updates: take the mean of the counters": 1
        - counters.sum().item() / updates,
        "the sign: missing / made": -share,
        "these are this rank's own updates: read all of counters": 1
        - kept[rank].sum(0).mean().item() / times,
    }
    return [NO_NUMBER, *table(wrong)]
