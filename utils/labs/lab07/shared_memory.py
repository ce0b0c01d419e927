"""Tasks 7.5 and 7.6: steps on shared weights, and lost updates."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from utils.checks.comparison import NO_NUMBER, Mistake, some, table
from utils.checks.probe import numbers
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.cluster.questions import Ranks, Reply

from .probes import WORLD, kept_updates, of_others, probe_count, probe_hogwild, toy_gradient
from .servers import enough, rate_of


@task("7.5", "Hogwild", points=2)
def hogwild(ranks: Ranks, report: Report) -> None:
    """Check that each step is added to the current content of the memory, without messages."""
    cases = [
        {"seed": report.seed, "rate": rate_of(report.seed), "steps": steps} for steps in (4, 6)
    ]
    report.judge_cases(ranks, probe_hogwild, cases, _alone_on_shared)


def _alone_on_shared(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield the steps for a rank that adds to weights that others change as well."""
    computed = answer.value["computed"]
    steps = case["steps"]
    ops = [call["op"] for call in answer.value["calls"]]
    no_calls = "Don't communicate in Hogwild: the ranks share the memory"
    yield facts({f"You call {', '.join(ops[:1])}. {no_calls}": ops}, kind="communication")
    miscounted = (
        f"You called compute {computed} times, but more() returned True {steps} times. Ask more() "
        "before each step, and take one step each time"
    )
    yield facts({miscounted: computed != steps})
    after = functools.partial(_after_hogwild, **case)
    wrong = {
        "You read the weights before you asked more(), and others have changed them since. Ask "
        "first, then read": after(mistake="early"),
        _OVERWRITTEN: after(mistake="back"),
        "Only the other ranks changed shared, because shared = shared - … makes a new tensor. "
        "Change it in place: shared -= lr · gradient": after(factor=0.0),
        "You computed all gradients at the first weights. Read shared before each": after(
            mistake="first"
        ),
        "You went uphill. Subtract lr · gradient": after(factor=-1.0),
        "The learning rate is missing": after(factor=1 / case["rate"]),
        f"You divided by the {WORLD} ranks. Don't average: each gradient is a separate step": after(
            factor=1 / WORLD
        ),
        "You took only one step. Take one each time that more() returns True": after(
            mistake="once"
        ),
        "You applied all gradients at the end. Apply each one before you compute the next": after(
            mistake="late"
        ),
    }
    what = "the final shared weights"
    yield value(answer.value["weights"], after(), table(wrong), what=what)
    yield facts({
        _OVERWRITTEN: answer.value["overwritten"],
        "You gave shared new memory, so other ranks don't see it. Change it in place": (
            answer.value["moved"]
        ),
    })
    at_once = [after(taken=k) for k in range(steps + 1)]
    said = "Other ranks didn't see your steps at once. Take each on shared before you ask more()"
    about = {"what": "the shared weights each time that more() is called"}
    yield value(answer.value["seen"], at_once, [Mistake(lambda _: True, said)], **about)


_OVERWRITTEN = (
    "You overwrote updates that other ranks made after you had read the weights. Don't write back "
    "a copy, but change shared in place: shared -= lr · gradient"
)


def _after_hogwild(
    seed: int,
    rate: float,
    steps: int,
    mistake: str = "",
    factor: float = 1.0,
    taken: int | None = None,
) -> list[float]:
    """Return the content of the memory in the end, for a right answer or after a mistake.

    Args:
        taken: the steps taken so far; all of them by default.
        mistake: "back" writes back a copy without others' updates; "first" computes all gradients
            at the start; "early" reads the weights before it asks more(); "once" takes one step;
            "late" takes all steps at the end.
        factor: multiplies each step.
    """
    start = numbers(seed, 3 + steps)
    shared = start.clone()
    owed = 0
    for k in range(steps if taken is None else taken):
        before = shared.clone()
        shared += of_others(seed + 400, k, len(start))
        read = shared.clone()
        at = {"first": start, "early": before}.get(mistake, read)
        gradient = toy_gradient(at, seed, k)
        shared += of_others(seed, k, len(start))
        if mistake == "late":
            owed = owed + rate * gradient
        elif mistake != "once" or k == 0:
            shared = (read if mistake == "back" else shared) - factor * rate * gradient
    return (shared - owed).tolist()


@task("7.6", "lost updates, counted", points=2)
def count_lost(ranks: Ranks, report: Report) -> None:
    """Check that all ranks begin and end together, and find the share of lost updates."""
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
    miscounted = f"Call update(counters) {times} times on each rank, not {made}"
    yield facts({miscounted: made != times})
    apart = {
        "A rank begins without the others, so it may finish before they start and collide with "
        "none. Call dist.barrier() before the first update": not answer.value["before"],
        "A rank reads the counters before all others have finished, so it counts late updates as "
        "lost. Call dist.barrier() after the last update": not answer.value["after"],
    }
    yield facts(apart, kind="communication")
    yield communication(answer.value["calls"], some(range(WORLD)))
    kept = torch.stack([
        kept_updates(each["seed"], r, times) for r, each in enumerate(case["each"])
    ])
    share = 1 - kept.sum((0, 1)).mean().item() / (WORLD * times)
    yield value(
        answer.value["result"],
        share,
        _wrong_shares(kept, answer.rank, times, share),
        what=f"times={times}, the lost share",
        form="the share of lost updates",
        tolerance=1e-4,
    )


def _wrong_shares(kept: torch.Tensor, rank: int, times: int, share: float) -> list[Mistake]:
    """Return wrong shares of lost updates; `kept` is 1 where an update reached a counter."""
    counters = kept.sum((0, 1))
    updates = WORLD * times
    wrong = {
        "You returned the share that arrived. Return 1 minus this share": 1 - share,
        "Return a share from 0 to 1, not percent": 100 * share,
        "You returned the number of lost updates. Divide by all updates": share * updates,
        f"You divided by one rank's updates. All {WORLD} ranks made {WORLD} · times": 1
        - counters.mean().item() / times,
        "You used a counter that lost nothing. Use the mean over all counters": 0,
        "You used the counter that lost most. Use the mean over all counters": 1
        - counters.min().item() / updates,
        "You divided the sum over all counters by the updates of one counter. Use the mean": 1
        - counters.sum().item() / updates,
        "The sign is wrong. Return missing / made": -share,
        "You counted only this rank's updates. Read counters, which has all updates": 1
        - kept[rank].sum(0).mean().item() / times,
    }
    return [NO_NUMBER, *table(wrong)]
