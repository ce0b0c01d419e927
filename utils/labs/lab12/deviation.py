"""The check of a server that deviates in lab 12: what it reads, and what its clients compare."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import Mistake, inside, some, table
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.checks.trials import EVERYWHERE, GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks

from .clients import has_nan, has_other_length
from .deviation_probes import LADDERS, WEIGHTS, probe_ladder, probe_same

#: Bytes that a client may pass to its collective.
MOST = 64


@task("12.10", "a server that deviates", points=3)
def deviating_server(ranks: Ranks, report: Report) -> None:
    """Judge the images that the server reads, and what the clients say about their weights."""
    for answer in report.answers(ranks, probe_ladder, seed=report.seed):
        report.follow(answer.rank, _all_ladders(answer.value, report.seed))
    if report.found or report.open:
        return
    cases = [{"partition": partition, "seed": report.seed} for partition in EVERYWHERE]
    judge_groups(ranks, report, probe_same, cases, _comparison)


def _all_ladders(results: list[Any], seed: int) -> Iterator[Step]:
    for k, (ladder, result) in enumerate(zip(LADDERS, results, strict=True)):
        weight, bias = ladder.gradients(seed + k)
        right = read(weight, bias)
        where = f"{len(bias)} steps, {len(right)} of them with images"
        yield facts({
            f"{where}: Return a tensor [images, pixels], not {result}": not isinstance(result, dict)
        })
        mistakes = _wrong_images(weight, bias)
        yield value(result["images"], right.flatten().tolist(), mistakes, what=where)
        yield value(result["shape"], list(right.shape), what=f"{where}: the shape")


def read(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the images that the gradients of a ladder reveal, one in a row."""
    rows, steps, used = _ladder(weight, bias)
    return rows[used] / steps[used, None]


def _ladder(weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the steps of both gradients, and which of them have images."""
    rows, steps = (one - torch.cat([one[1:], torch.zeros_like(one[:1])]) for one in (weight, bias))
    return rows, steps, steps.abs() > 1e-6 * bias.abs().max()


def _wrong_images(weight: Tensor, bias: Tensor) -> Iterator[Mistake]:
    rows, steps, used = _ladder(weight, bias)
    exact, inner = steps != 0, used.clone()
    inner[-1] = False
    right = rows[used] / steps[used, None]
    yield from table({
        "The last neuron has a step, too: the images that reach it": (
            rows[inner] / steps[inner, None]
        ).flatten(),
        "A step of the bias gradient of less than 1e-6 of the largest entry is rounding. Leave it "
        "out": (rows[exact] / steps[exact, None]).flatten(),
        "You didn't divide. Divide each step of the weight gradient by the step of the bias "
        "gradient": rows[used].flatten(),
        "You divided by a neuron's bias gradient. Divide by its step": (
            rows[used] / bias[used, None]
        ).flatten(),
        "You divided the neurons' own gradients, which mix all images above. Subtract the next "
        "neuron first": (weight[used] / bias[used, None]).flatten(),
        "Your images are in the opposite order. Begin with the first neuron": (
            right.flip(0).flatten()
        ),
    })
    yield Mistake(has_nan, "You divided by 0. Leave out the steps on which no image lies")
    said = f"Return {len(right)} images, one for each step that has any"
    yield Mistake(has_other_length(right.numel()), said)


def _comparison(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge what a client says about each kind of weights."""
    members = answer.members
    for given, outcome in zip(WEIGHTS, answer.value, strict=True):
        where = f"{given.what} {on(members)}"
        calls = outcome["calls"]
        yield communication(calls, inside(members), some(members))
        expected = given.same or len(members) == 1
        yield facts({
            f"{where}: Return True or False, not {outcome['result']}": not isinstance(
                outcome["result"], bool
            )
        })
        said = "are the same" if expected else "differ"
        words = f"{where}: The weights {said} bit by bit, but you returned {outcome['result']}"
        yield facts({words: outcome["result"] != expected})
        passed = sum(call["nbytes"] for call in calls)
        yield facts({
            f"{where}: You made {len(calls)} collectives. One is enough": len(calls) > 1,
            f"{where}: You passed {passed} bytes to the others. Pass a digest of at most {MOST} "
            "bytes": passed > MOST,
        })
