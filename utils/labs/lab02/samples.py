"""The sample numbers of ranks, and how checks call, compare and watch answers about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from utils.checks.comparison import Mistake, same, short
from utils.checks.task import Report, Step, facts, value
from utils.cluster.questions import Ranks, Reply

from .probes import probe_calls, turned_samples

#: Numbers of samples: 24, which 1, 2, 3 and 4 ranks divide, and awkward ones.
SAMPLES = (24, 25, 7, 1)
RANK_COUNTS = (1, 2, 3, 4)
#: The first and the last rank for each number of ranks, as (p, r).
PLACES = [(p, r) for p in RANK_COUNTS for r in sorted({0, p - 1})]

Batches = list[list[int]]
#: The arguments of a call, by position and by name.
Call = tuple[tuple[int, ...], Mapping[str, Any]]

#: What to say if the samples are right, but a call didn't use this method of the sampler.
UNUSED = {
    "__init__": "You computed the samples by hand. Use a DistributedSampler, as your trainings do",
    "__iter__": "You made a DistributedSampler, but you didn't use it. Read the samples from it",
}


# -- what the sampler does ------------------------------------------------------------------------


def share(
    n: int,
    p: int,
    r: int,
    *,
    shuffle: bool = False,
    drop_last: bool = False,
    seed: int = 0,
    epoch: int = 0,
) -> list[int]:
    """Return the sample numbers that `DistributedSampler` gives to rank r of p."""
    sampler = DistributedSampler(
        range(n), num_replicas=p, rank=r, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def batches(samples: Sequence[int], size: int, drop_last: bool = False) -> Batches:
    """Return the samples in lists of `size`; the last list may be shorter, or is dropped."""
    return list(BatchSampler(samples, size, drop_last))


def microbatches_of(
    n: int,
    m: int,
    p: int,
    r: int,
    shuffle: bool = False,
    epoch: int = 0,
    drop_last: bool = False,
) -> Batches:
    """Return the microbatches of rank r of p, for minibatches of m samples."""
    return batches(share(n, p, r, shuffle=shuffle, epoch=epoch), m // p, drop_last)


# -- functions of numbers: call and compare ----------------------------------------------------


@dataclass(frozen=True)
class NumberTask:
    """A function of numbers that a task asks for.

    Attributes:
        name: the function's name in the notebook.
        expected: returns the result for a call's arguments, or the type of an error.
        mistakes: yields likely mistakes; it also gets the number of ranks and the rank.
        form: the result in words.
        tidy: changes a result before it is compared.
    """

    name: str
    expected: Callable[..., Any]
    mistakes: Callable[..., Iterator[Mistake]]
    form: str
    tidy: Callable[[Any], Any] = lambda result: result


def answers_are_right(
    ranks: Ranks, report: Report, number_task: NumberTask, calls: Sequence[Call]
) -> list[Reply]:
    """Compare a function's results on every rank, and report each rank's first wrong result.

    Returns:
        The answers if all are right, so that a check can ask more; otherwise an empty list.
    """
    answers = report.answers(ranks, probe_calls, name=number_task.name, calls=calls)
    right = [
        report.follow(answer.rank, _result_steps(number_task, ranks.n, calls, answer))
        for answer in answers
    ]
    return answers if all(right) else []


def _result_steps(
    number_task: NumberTask, world: int, calls: Sequence[Call], answer: Reply
) -> Iterator[Step]:
    """Yield steps that compare each call with the expected result or error."""
    form = number_task.form
    for (arguments, named), outcome in zip(calls, answer.value, strict=True):
        given = [*map(str, arguments), *(f"{key}={it}" for key, it in named.items())]
        call = f"{number_task.name}({', '.join(given)})"
        expected = number_task.expected(*arguments, **named)
        error = outcome.get("error", "")
        if error:
            asked_for = expected is ValueError and error.startswith("ValueError")
            yield facts({f"{call} raised {error}": not asked_for})
        elif expected is ValueError:
            yield facts({
                f"{call} must raise a ValueError, but it returned {short(outcome['value'])}": True
            })
        else:
            mistakes = number_task.mistakes(world, answer.rank, *arguments, **named)
            got = number_task.tidy(outcome["value"])
            yield value(got, expected, mistakes, what=call, form=form)
            tensors = f"{call} returned tensors. Return {form}: use .tolist()"
            yield facts({tensors: outcome["tensors"]})


def unused_parts(outcomes: list[dict], wanted: Mapping[str, str] = UNUSED) -> dict[str, bool]:
    """Return what a function with right results doesn't use."""
    uses = [outcome["used"] for outcome in outcomes if "error" not in outcome]
    return {
        f"The result is right, but: {text}": any(method not in methods for methods in uses)
        for method, text in wanted.items()
    }


def judge_samples(
    ranks: Ranks,
    report: Report,
    number_task: NumberTask,
    calls: Sequence[Call],
    again: Sequence[Call],
    wrong: Callable[[list[dict]], dict[str, bool]] = unused_parts,
) -> None:
    """Compare a function's results, and judge whether it gets them from a sampler.

    Args:
        again: calls to repeat while sampler and data set return other numbers, which the answer has
            to follow.
        wrong: returns what is wrong with the outcomes of a rank's calls, by the student's text.
    """
    answers = answers_are_right(ranks, report, number_task, calls)
    right = [report.follow(answer.rank, [facts(wrong(answer.value))]) for answer in answers]
    if not answers or not all(right):
        return
    with turned_samples():
        expected = [number_task.expected(*arguments, **named) for arguments, named in again]
    unmoved = (
        "Your result didn't change when the check made the DistributedSampler and the data set "
        "return other numbers. Read the numbers from them"
    )
    asked = {"name": number_task.name, "calls": again, "turned": True}
    for answer in report.answers(ranks, probe_calls, **asked):
        pairs = zip(answer.value, expected, strict=True)
        stays = any(not same(outcome.get("value"), right) for outcome, right in pairs)
        report.follow(answer.rank, [facts({unmoved: stays})])


def fresh_number(seed: int, low: int, high: int) -> int:
    """Return a number from low to high, both included, that depends on the seed."""
    return low + seed % (high - low + 1)


def epochs_to_try(seed: int) -> list[tuple[bool, int]]:
    """Return pairs of shuffle and epoch; without shuffling, all epochs are equal."""
    return [(False, 0), (False, 3), (True, 0), (True, 3), (True, 5 + seed % 1000)]
