"""Checks of lab 02: who gets which sample, minibatch by minibatch.

Functions of numbers (n samples, p ranks, rank r) are called on every rank for the same list of
calls, whatever the number of ranks here. Functions that communicate are tried in groups of 1, 2, 3
and 4 ranks (`utils.checks.groups`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from utils import data
from utils.checks.calls import inside
from utils.checks.functions import Results
from utils.checks.groups import (
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    partitions,
    places,
)
from utils.checks.mistakes import Mistake, is_number, one_of, same, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, numbers, reading_answer, recorded, told
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared.replicas import one_number

#: Samples: one number that all p of 1 … 4 divide, and awkward ones.
SAMPLES = (24, 25, 7, 1)
RANK_COUNTS = (1, 2, 3, 4)
#: The first and the last rank of each: (p, r).
PLACES = [(p, r) for p in RANK_COUNTS for r in sorted({0, p - 1})]

Batches = list[list[int]]
#: Arguments of a call, in order and by name.
Call = tuple[tuple[int, ...], Mapping[str, Any]]


# -- what the sampler does ------------------------------------------------------------------------


def share(
    n: int, p: int, r: int, *, shuffle=False, drop_last=False, seed: int = 0, epoch: int = 0
) -> list[int]:
    """The sample numbers that `DistributedSampler` gives to rank r of p."""
    sampler = DistributedSampler(
        range(n), num_replicas=p, rank=r, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    return list(sampler)


def batches(samples: Sequence[int], size: int, drop_last: bool = False) -> Batches:
    """The samples in lists of `size`; the last list may be shorter, or is dropped."""
    return list(BatchSampler(samples, size, drop_last))


# -- functions of numbers: call and compare ----------------------------------------------------


def probe_calls(
    user_ns: dict, *, rank: int, name: str, calls: list, turned: bool = False
) -> list[dict]:
    """Call a function once for each (arguments, keywords); results or errors, and what it used.

    turned: the samplers give their samples in reverse, and the items are others, see `_turned`.
    """
    function, answers, results = answer_named(user_ns, name), [], Results()
    used: list[str] = []
    with contextlib.ExitStack() as patches:
        if turned:
            patches.enter_context(_turned())
        for method in ("__init__", "set_epoch", "__iter__"):
            patches.enter_context(_noted(method, used))
        for arguments, named in calls:
            used.clear()
            try:
                result = function(*arguments, **named)
                parts = result if isinstance(result, list | tuple) else ()
                tensors = any(isinstance(part, torch.Tensor) for part in parts)
                answer = {"value": told(result), "tensors": tensors}
            except NotImplementedError:
                raise
            except Exception as error:
                kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
                answer = {"error": f"{kind}: {error}"}
            else:
                results.add(name, result)
            answers.append(answer | {"used": list(used)})
    return answers


def _noted(name: str, used: list[str]):
    """Note each call of this method of a DistributedSampler."""
    original = getattr(DistributedSampler, name)

    def noting(self, *args, **kwargs) -> Any:
        used.append(name)
        return original(self, *args, **kwargs)

    return mock.patch.object(DistributedSampler, name, noting)


@contextlib.contextmanager
def _turned() -> Iterator[None]:
    """Let samplers give their samples in reverse, and data sets items that are larger by 3.

    An answer that uses them follows; one that makes the numbers itself does not.
    """
    samples, item = DistributedSampler.__iter__, data.SimpleDataSet.__getitem__
    with (
        mock.patch.object(
            DistributedSampler, "__iter__", lambda self: iter([*samples(self)][::-1])
        ),
        mock.patch.object(data.SimpleDataSet, "__getitem__", lambda self, k: item(self, k) + 3),
    ):
        yield


@dataclass(frozen=True)
class NumberTask:
    """A function of numbers, and what is asked of it.

    Attributes:
        name: what the student calls the function.
        expected: of a call's arguments and keywords, the result; or the type of an error.
        mistakes: of (number of ranks, rank) and the same, what likely mistakes give.
        form: the result, in words.
        tidy: done to a result before it is compared.
    """

    name: str
    expected: Callable[..., Any]
    mistakes: Callable[..., Iterator[Mistake]]
    form: str
    tidy: Callable[[Any], Any] = lambda result: result


def _right_answers(
    ranks: Ranks, report: Report, number_task: NumberTask, calls: Sequence[Call]
) -> list[Reply]:
    """Compare a function's results on every rank; the first wrong one of each rank is a problem.

    Returns:
        The answers if all are right, for more questions; otherwise none.
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
    """Yield that each call gives the result, or the error, that is expected."""
    form = number_task.form
    for (arguments, named), outcome in zip(calls, answer.value, strict=True):
        given = [*map(str, arguments), *(f"{key}={it}" for key, it in named.items())]
        call = f"{number_task.name}({', '.join(given)})"
        expected = number_task.expected(*arguments, **named)
        error = outcome.get("error", "")
        if error:
            asked_for = expected is ValueError and error.startswith("ValueError")
            yield facts({f"{call}: raised {error}": not asked_for})
        elif expected is ValueError:
            yield facts({f"{call}: expected a ValueError, got {short(outcome['value'])}": True})
        else:
            mistakes = number_task.mistakes(world, answer.rank, *arguments, **named)
            got = number_task.tidy(outcome["value"])
            yield value(got, expected, mistakes, what=call, form=form)
            tensors = f"{call}: there are tensors in it; expected {form}: .tolist()"
            yield facts({tensors: outcome["tensors"]})


def _none_is_so(
    report: Report, answers: list[Reply], wrong: Callable[[list[dict]], dict[str, bool]]
) -> bool:
    """Say what else is wrong on each rank; return whether there are answers, and nothing is.

    Args:
        wrong: of the outcomes of a rank's calls; see `Report.facts`.
    """
    right = [report.facts(answer.rank, wrong(answer.value)) for answer in answers]
    return bool(answers) and all(right)


def _follows(ranks: Ranks, report: Report, number_task: NumberTask, calls: Sequence[Call]) -> None:
    """Ask again where sampler and data set give other numbers: the answer has to follow them."""
    with _turned():
        expected = [number_task.expected(*arguments, **named) for arguments, named in calls]
    unmoved = (
        "not what the DistributedSampler and the data set give: the check let them give other "
        "numbers, and the answer did not change. Take the numbers from them"
    )
    asked = {"name": number_task.name, "calls": calls, "turned": True}
    for answer in report.answers(ranks, probe_calls, **asked):
        pairs = zip(answer.value, expected, strict=True)
        stays = any(not same(outcome.get("value"), right) for outcome, right in pairs)
        report.facts(answer.rank, {unmoved: stays})


def _numbers(seed: int, low: int, high: int) -> int:
    """A fresh number from low to high, both included."""
    return low + seed % (high - low + 1)


def _epochs(seed: int) -> list[tuple[bool, int]]:
    """Whether to shuffle, and in which epoch; in order all epochs are alike."""
    return [(False, 0), (False, 3), (True, 0), (True, 3), (True, 5 + seed % 1000)]


def _unused(outcomes: list[dict[str, Any]], wanted: dict[str, str]) -> dict[str, bool]:
    """Return what a function does not use, though its results are right.

    Args:
        wanted: by the method of a DistributedSampler, what to say if a call does not use it.
    """
    uses = [outcome["used"] for outcome in outcomes if "error" not in outcome]
    return {
        f"right, but {text}": any(method not in methods for methods in uses)
        for method, text in wanted.items()
    }


_IGNORED = "the DistributedSampler is made and not used: take the samples from it"
_BY_HAND = "made by hand: the task asks for a DistributedSampler, which your trainings will use"
_SAMPLED = {"__init__": _BY_HAND, "__iter__": _IGNORED}


# -- 2.1 --------------------------------------------------------------------------------------


@task("2.1", "the items of a rank", points=2)
def items_of(ranks: Ranks, report: Report) -> None:
    """Each rank's items, for every n, p, r, with and without shuffle and drop_last."""
    calls = [
        ((n, p, r), {"shuffle": shuffle, "drop_last": drop_last})
        for shuffle in (False, True)
        for drop_last in (False, True)
        for n in (*SAMPLES, _numbers(report.seed, 30, 60))
        for p, r in PLACES
    ]
    number_task = NumberTask("items_of", _items, _wrong_items, "a flat list with the items")
    answers = _right_answers(ranks, report, number_task, calls)
    if _none_is_so(report, answers, functools.partial(_unused, wanted=_SAMPLED)):
        _follows(ranks, report, number_task, calls[::7])


def _items(n: int, p: int, r: int, **how: bool) -> list[int]:
    """Return the items of rank r of p."""
    dataset = data.SimpleDataSet(n)
    return [int(dataset[sample]) for sample in share(n, p, r, **how)]


def _wrong_items(world: int, rank: int, n: int, p: int, r: int, **how: bool) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    right = _items(n, p, r, **how)
    shuffled = "shuffled, but shuffle=False: the sampler shuffles unless you say shuffle=shuffle"
    if how["shuffle"]:
        shuffled = "in order, but shuffle=True: hand shuffle on to the sampler"
    yield from table({
        "these are indices, not items": share(n, p, r, **how),
        shuffled: _items(n, p, r, **how | {"shuffle": not how["shuffle"]}),
        "samples were repeated, but drop_last=True: hand drop_last on to the sampler":
            _items(n, p, r, **how | {"drop_last": False}),
        "these are all items: give the sampler to the DataLoader": [10 * k for k in range(n)],
        f"these are the items of rank {rank % p}, as rank {rank} runs the check: use the argument "
        "r, not dist.get_rank()": _items(n, p, rank % p, **how),
        f"shared among {world} ranks: use the argument p, not the world size":
            _items(n, max(p, world), r, **how),
        "the last items are missing. Did the DataLoader get drop_last? It is the sampler's":
            lambda got: isinstance(got, list) and got == right[: len(got)],
        "this is a list of minibatches: make one flat list of it":
            lambda got: isinstance(got, list) and any(isinstance(part, list) for part in got),
    })  # fmt: skip


# -- 2.2 --------------------------------------------------------------------------------------


@task("2.2", "a new order in every epoch", points=2)
def epoch_orders(ranks: Ranks, report: Report) -> None:
    """The shuffled order of each epoch, the same permutation on all ranks."""
    seed = _numbers(report.seed, 5, 1000)
    calls: list[Call] = [
        ((n, p, r, epochs, seed), {})
        for n, epochs in ((24, 3), (25, 11), (7, 2), (1, 1))
        for p, r in PLACES
    ]
    form = "a list with one list of sample numbers per epoch"
    number_task = NumberTask("epoch_orders", _orders, _wrong_orders, form)
    answers = _right_answers(ranks, report, number_task, calls)
    if _none_is_so(report, answers, _unused_by_epochs):
        _follows(ranks, report, number_task, calls[::3])


def _unused_by_epochs(outcomes: list[dict[str, Any]]) -> dict[str, bool]:
    """Return what is not used, or made anew in each epoch."""
    never = "set_epoch was never called: a sampler lives as long as a training, and is told each "
    wanted = {"__init__": _BY_HAND, "set_epoch": never + "epoch's number", "__iter__": _IGNORED}
    anew = any(outcome["used"].count("__init__") > 1 for outcome in outcomes)
    return {
        **_unused(outcomes, wanted),
        "each epoch has a new sampler: make one, and tell it each epoch by set_epoch(epoch)": anew,
    }


def _orders(n: int, p: int, r: int, epochs: int, seed: int) -> Batches:
    """Return the sample numbers of rank r of p, epoch by epoch."""
    return [share(n, p, r, shuffle=True, seed=seed, epoch=epoch) for epoch in range(epochs)]


def _wrong_orders(
    world: int, rank: int, n: int, p: int, r: int, epochs: int, seed: int
) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""

    def with_seeds(*seeds: int) -> Callable:
        return one_of(*(_orders(n, p, r, epochs, other) for other in seeds))

    right = _orders(n, p, r, epochs, seed)
    own_seed = "this rank shuffles with a seed of its own: all ranks need the same one"
    yield from table({
        "every epoch has the same order: call set_epoch(epoch) before each": right[:1] * epochs,
        "epochs 0 and 1 have the same order: set_epoch counts only if it comes before the sampler "
        "is iterated": right[:1] + right[:-1],
        "these are samplers: make a list of each with list(sampler)":
            lambda got: isinstance(got, list) and "<DistributedSampler>" in got,
        "not shuffled": [share(n, p, r)] * epochs,
        "the argument seed was not used": _orders(n, p, r, epochs, 0),
        own_seed: with_seeds(r, seed + r),
        "seed + epoch is one too large: the first epoch is number 0, and all ranks have the same "
        "seed": with_seeds(seed + 1),
        f"{own_seed}.": with_seeds(rank, seed + rank),
        "these are items, the task asks for sample numbers":
            [[10 * sample for sample in order] for order in right],
        "this is one long list: make one list per epoch": [*chain(*right)],
    })  # fmt: skip


# -- 2.3 --------------------------------------------------------------------------------------


@task("2.3", "predict what is repeated and what is lost", points=3)
def repeated_and_lost(ranks: Ranks, report: Report) -> None:
    """Repeated and lost samples by arithmetic, for more ranks than there are here, too."""
    calls: list[Call] = [
        ((n, p, drop_last), {})
        for drop_last in (False, True)
        for n in (*SAMPLES, 2, 3, _numbers(report.seed, 30, 60))
        for p in (*RANK_COUNTS, 6, 7, _numbers(report.seed, 40, 99))
    ]
    calls += calls[::9]  # a second time
    form = "two lists, (repeated, lost)"
    number_task = NumberTask(
        "repeated_and_lost", _repeated_and_lost, _wrong_predictions, form, _in_order
    )
    asks = "it asks a DistributedSampler: predict with arithmetic, then compare with the sampler"
    for answer in _right_answers(ranks, report, number_task, calls)[:1]:
        report.facts(None, {asks: any(outcome["used"] for outcome in answer.value)})


def _repeated_and_lost(n: int, p: int, drop_last: bool) -> Batches:
    """Return what the sampler really repeats and leaves out, in order."""
    seen = sorted(sample for r in range(p) for sample in share(n, p, r, drop_last=drop_last))
    lost = [sample for sample in range(n) if sample not in seen]
    for sample in set(seen):
        seen.remove(sample)
    return [seen, lost]


def _in_order(result: Any) -> Any:
    """Return the lists in a list sorted, if they are lists of numbers."""
    if not isinstance(result, list):
        return result
    return [sorted(part) if _is_list_of_int(part) else part for part in result]


def _is_list_of_int(part: Any) -> bool:
    """Return whether this is a list of whole numbers."""
    return isinstance(part, list) and all(isinstance(k, int) for k in part)


def _wrong_predictions(world: int, rank: int, n: int, p: int, drop_last: bool) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""

    def again(count: int) -> list:
        """The first `count` samples are repeated: from 0 on, and from 0 again after n - 1."""
        return [sorted(k % n for k in range(count)), []]

    rest, missing, right = n % p, -n % p, _repeated_and_lost(n, p, drop_last)
    from_the_end = list(range(max(n - missing, 0), n))
    dropped = {
        f"{rest} samples are too many for equal shares, and that many are left out; {missing} "
        "would be missing to the next multiple of p": [[], from_the_end],
        "drop_last leaves out the last samples, not the first": [[], list(range(rest))],
    }
    repeated = {
        "p divides n, so nothing is missing, but p - n % p is p": again(p - rest),
        f"{missing} samples are missing, but there are only {n}: the sampler goes through them "
        "again and again": [list(range(min(missing, n))), []],
        f"n % p = {rest} samples are too many for equal shares. The sampler adds samples until p "
        "divides their number: how many are missing?": again(rest),
        "the sampler repeats the first samples of the order, not the last": [from_the_end, []],
    }
    yield from table((dropped if drop_last else repeated) | {
        f"that is what happens with drop_last={not drop_last}":
            _repeated_and_lost(n, p, not drop_last),
        f"that is the result for {world} ranks: use the argument p":
            _repeated_and_lost(n, world, drop_last),
        "the two lists are swapped: return (repeated, lost)": right[::-1],
        "these are numbers: return two lists of samples": list(map(len, right)),
    })  # fmt: skip


# -- 2.4 --------------------------------------------------------------------------------------


def _microbatches(
    n: int,
    m: int,
    p: int,
    r: int,
    shuffle: bool = False,
    epoch: int = 0,
    drop_last: bool = False,
) -> Batches:
    """Return the microbatches of rank r of p, of minibatches of m samples."""
    return batches(share(n, p, r, shuffle=shuffle, epoch=epoch), m // p, drop_last)


def _microbatches_or_error(n: int, m: int, p: int, r: int, **how: Any) -> Batches | type:
    """Return the microbatches, or the error if p does not divide m."""
    return ValueError if m % p else _microbatches(n, m, p, r, **how)


@task("2.4", "the microbatches of a rank", points=3)
def microbatches(ranks: Ranks, report: Report) -> None:
    """Lists of m / p sample numbers, for every rank, epoch and drop_last."""
    fresh = _numbers(report.seed, 30, 60)
    calls = [
        ((n, m, p, r), {"shuffle": shuffle, "epoch": epoch, "drop_last": drop_last})
        for shuffle, epoch in _epochs(report.seed)
        for drop_last in (False, True)
        for n, m in ((24, 8), (24, 12), (25, 8), (7, 4), (1, 4), (fresh, 12))
        for p, r in PLACES
        if m % p == 0
    ]
    calls += [((24, 8, 3, 0), {}), ((25, 6, 4, 1), {})]
    form = "a list of microbatches, each a list of sample numbers"
    number_task = NumberTask("microbatches", _microbatches_or_error, _wrong_microbatches, form)
    answers = _right_answers(ranks, report, number_task, calls)
    if _none_is_so(report, answers, functools.partial(_unused, wanted=_SAMPLED)):
        _follows(ranks, report, number_task, calls[:-2:7])


def _wrong_microbatches(
    world: int,
    rank: int,
    n: int,
    m: int,
    p: int,
    r: int,
    shuffle: bool = False,
    epoch: int = 0,
    drop_last: bool = False,
) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""
    of_rank = share(n, p, r, shuffle=shuffle, epoch=epoch)
    fewer = share(n, p, r, shuffle=shuffle, epoch=epoch, drop_last=True)
    right = batches(of_rank, m // p, drop_last)
    last = "a last microbatch was dropped, but drop_last=False"
    if drop_last:
        last = "the last microbatch is too short and must go: hand drop_last on to the BatchSampler"
    yield from table({
        f"microbatches of up to {m}: batch_size counts the samples of one rank, m / p":
            batches(of_rank, m, drop_last),
        last: batches(of_rank, m // p, not drop_last),
        "here drop_last is that of the BatchSampler; the DistributedSampler got it and left "
        "samples out": one_of(*(batches(fewer, m // p, drops) for drops in (drop_last, False))),
        "this is the order of epoch 0: set_epoch(epoch)":
            _microbatches(n, m, p, r, shuffle, 0, drop_last),
        "not shuffled, but shuffle=True" if shuffle else "shuffled, but shuffle=False":
            _microbatches(n, m, p, r, not shuffle, epoch, drop_last),
        "this is a flat list: wrap the sampler in a BatchSampler": of_rank,
        "these are items, the task asks for sample numbers": [[10 * k for k in b] for b in right],
        "this is the BatchSampler itself: make a list of it": "<BatchSampler>",
        f"these are rank {rank % p}'s, as rank {rank} runs the check: use the argument r":
            _microbatches(n, m, p, rank % p, shuffle, epoch, drop_last),
    })  # fmt: skip


# -- 2.5 --------------------------------------------------------------------------------------


ALONE = "that the first rank has alone"
A_SET = "A set forgets how often a sample occurs: compare sorted lists"
SHORTEST = "zip stops at the shortest list: compare the numbers of batches, too"
#: A rank's microbatches, the minibatches to compare with, and what an answer may overlook.
Scenario = tuple[Batches, Batches, str]


def _scenarios(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return by name what rank r of p is given."""
    parts = _as_sampled(p, r, seed), _large_numbers(p, r, seed), _damaged(p, r, seed)
    return {name: scenario for part in parts for name, scenario in part.items()}


def _sampled(
    n: int, m: int, p: int, r: int, seed: int, shuffle: bool = True
) -> tuple[Batches, Batches]:
    """Return the microbatches of rank r of p, and the minibatches."""
    epoch = seed % 50
    return _microbatches(n, m, p, r, shuffle, epoch), _microbatches(n, m, 1, 0, shuffle, epoch)


def _as_sampled(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return the scenarios of what samplers give, and of parts that are cut in another way."""
    mine, minibatches = _sampled(24, 12, p, r, seed)
    _, eights = _sampled(24, 8, 1, 0, seed)
    unequal = [batch[r::p] for batch in eights]
    longer = [*mine, [24, 25]] if r == 0 else mine
    return {
        "24 samples in order, m = 12": (*_sampled(24, 12, p, r, seed, shuffle=False), ""),
        "24 samples shuffled, m = 12": (mine, minibatches, ""),
        "a smaller minibatch at the end (36 samples, m = 24)": (*_sampled(36, 24, p, r, seed), ""),
        "25 samples: the sampler repeats some": (*_sampled(25, 12, p, r, seed), A_SET),
        "microbatches of unequal size": (unequal, eights, ""),
        f"a last minibatch {ALONE}": (longer, [*minibatches, [24, 25]], ""),
    }


def _large_numbers(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return the scenarios of five minibatches whose numbers no float32 and no list has."""
    offset = 2**24 + seed % 10**6
    mine, minibatches = (
        [[offset + sample for sample in batch] for batch in few]
        for few in _sampled(60, 12, p, r, seed)
    )
    first, *others = mine[2]
    damaged = [*mine[:2], [first + 1, *others], *mine[3:]]
    every = "Compare all minibatches, not some of them"
    return {
        "five minibatches of large sample numbers": (mine, minibatches, ""),
        "five minibatches of large sample numbers once more": (mine, minibatches, ""),
        "five minibatches, of which number 2 has another sample on the last rank":
            (damaged if r == p - 1 else mine, minibatches, every),
    }  # fmt: skip


def _damaged(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return the scenarios in which something is wrong, mostly on the group's last rank."""
    mine, minibatches = _sampled(24, 12, p, r, seed)
    epochs = "Compare minibatch by minibatch, not the whole epoch"
    subset = "A subset is not enough, and all ranks have to look at all microbatches"
    # What the group's last rank has instead of its microbatches.
    instead = {
        "microbatches 0 and 1 swapped on the group's last rank": (mine[1::-1], epochs),
        "one sample twice in a microbatch of the last rank":
            ([mine[0], [*mine[1], mine[1][0]]], A_SET),
        "one sample missing on the last rank": ([mine[0], mine[1][1:]], subset),
        "the last rank has one microbatch less": (mine[:1], SHORTEST),
        "the last rank has no microbatch": ([], SHORTEST),
        "the last rank has one microbatch too many": ([*mine, [0]], SHORTEST),
        "on the last rank one sample is larger by 1, and another one smaller by 1":
            ([_of_same_sum(mine[0]), mine[1]], "Equal sums are not enough: compare sorted lists"),
    }  # fmt: skip
    scenarios = {
        name: (damaged if r == p - 1 else mine, minibatches, overlooked)
        for name, (damaged, overlooked) in instead.items()
    }
    scenarios["a minibatch that no rank has"] = mine, [*minibatches, [24]], SHORTEST
    # The other ranks' view of all these: they cannot tell which of them are damaged.
    for k in range(6):
        scenarios[f"24 samples shuffled, m = 12, trial {k}"] = mine, minibatches, ""
    return scenarios


def _of_same_sum(batch: list[int]) -> list[int]:
    """Return the batch with its smallest sample larger by 1, and its largest one smaller."""
    low, *others, high = sorted(batch)
    return [low + 1, *others, high - 1]


@functools.cache
def _truth(p: int, seed: int) -> dict[str, tuple[str, bool]]:
    """Return by scenario: what is overlooked, and what a group of p ranks must find."""
    ranks = [_scenarios(p, r, seed) for r in range(p)]
    truth = {}
    for name, (_, minibatches, overlooked) in ranks[0].items():
        parts = [scenarios[name][0] for scenarios in ranks]
        truth[name] = overlooked, _is_union(parts, minibatches)
    return truth


def _is_union(parts: list[Batches], minibatches: Batches) -> bool:
    """Return whether the ranks' microbatches are the minibatches, one by one, in any order."""
    return all(
        sorted(chain(*(_at(part, k) for part in parts))) == sorted(_at(minibatches, k))
        for k in range(max(map(len, [*parts, minibatches])))
    )


def _at(few: Batches, k: int) -> list[int]:
    """Return the batch at a place; an empty one behind the last."""
    return few[k] if k < len(few) else []


@in_group
def probe_same(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, scenarios: list
) -> list[dict]:
    """`same_minibatches` in this rank's group, once for each scenario."""
    function, answers = reading_answer(user_ns, "same_minibatches"), []
    named = keywords(partition, group)
    for mine, minibatches in scenarios:
        result, calls = recorded(function, mine, minibatches, **named)
        answers.append({"result": told(result), "calls": calls})
    return answers


def _groups(case: dict) -> str:
    """Where an answer failed, in words."""
    groups = " and ".join(str(tuple(members)) for members in case["partition"] or ())
    return groups and f"that was with groups of these ranks: {groups}"


@task("2.5", "the union is the sequential minibatch", points=4)
def same_minibatches(ranks: Ranks, report: Report) -> None:
    """The twin's minibatches, then the verdict of a group about its microbatches."""
    if not _makes_minibatches(ranks, report):
        return
    # In another order in each case: in a group of its own a rank sees which are damaged.
    names, draw = list(_scenarios(1, 0, report.seed)), random.Random(report.seed)
    cases, orders = [], []
    for partition in (*partitions(ranks.n), None):
        order = draw.sample(names, len(names))
        of_ranks = [_scenarios(p, r, report.seed) for r, p in places(partition, ranks.n)]
        given = [[scenarios[name][:2] for name in order] for scenarios in of_ranks]
        orders.append(order)
        cases.append({"partition": partition, "each": to_each(scenarios=given)})

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        order = orders[cases.index(answer.case)]
        outcomes = dict(zip(order, answer.value, strict=True))
        for name, (overlooked, expected) in _truth(len(answer.members), report.seed).items():
            yield from _verdict_steps(outcomes[name], answer.members, name, expected, overlooked)

    judge_groups(ranks, report, probe_same, cases, judge, _groups, ranks.n)


def _verdict_steps(
    outcome: dict[str, Any], members: list[int], name: str, expected: bool, overlooked: str
) -> Iterator[Step]:
    """Yield what a rank of a group has to communicate, and to find in a scenario."""
    calls, got = outcome["calls"], outcome["result"]
    yield communication(calls, inside(members))
    yield facts({
        f"{on(members)}: it communicated nothing; a rank knows its own microbatches only":
            len(members) > 1 and not calls,
        f"returned {short(got)}, expected True or False": not isinstance(got, bool),
    })  # fmt: skip
    if expected:
        overlooked = "Compare without regard to the order of the samples"
        if ALONE in name:
            overlooked = "Ranks may have different numbers of microbatches"
    hint = f". {overlooked}" if overlooked else ""
    text = f"{on(members)}: {name}. Expected {expected}, got {got}{hint}"
    yield facts({text: got is not expected})


def _makes_minibatches(ranks: Ranks, report: Report) -> bool:
    """Judge `sequential_minibatches`; return whether it is right on all ranks."""
    calls = [
        ((n, m), {"shuffle": shuffle, "epoch": epoch})
        for shuffle, epoch in _epochs(report.seed)
        for n, m in ((24, 8), (25, 8), (7, 4), (1, 4), (_numbers(report.seed, 30, 60), 12))
    ]
    form = "a list of minibatches, each a list of sample numbers"
    number_task = NumberTask("sequential_minibatches", _twins, _wrong_twins, form)
    return bool(_right_answers(ranks, report, number_task, calls))


def _twins(n: int, m: int, shuffle: bool, epoch: int) -> Batches:
    """Return the minibatches of the sequential baseline."""
    return _microbatches(n, m, 1, 0, shuffle, epoch)


def _wrong_twins(
    world: int, rank: int, n: int, m: int, shuffle: bool, epoch: int
) -> Iterator[Mistake]:
    """Yield what likely mistakes give."""

    def is_permutation(got: Any) -> bool:
        nested = isinstance(got, list) and all(isinstance(part, list) for part in got)
        return nested and sorted(map(str, chain(*got))) == sorted(map(str, range(n)))

    yield from table({
        "this is the order of epoch 0: use epoch": _twins(n, m, shuffle, 0),
        "not shuffled, but shuffle=True" if shuffle else "shuffled, but shuffle=False":
            _twins(n, m, not shuffle, epoch),
        **{
            f"these are the microbatches of rank {r} of {p}; the twin is alone":
                _microbatches(n, m, p, r, shuffle, epoch)
            for p, r in PLACES[1:] if m % p == 0
        },
        "this is a flat list: cut it into lists": share(n, 1, 0, shuffle=shuffle, epoch=epoch),
        "the last, smaller minibatch is missing": _microbatches(n, m, 1, 0, shuffle, epoch, True),
        "all samples are there, but in another order than the sampler's: it draws with a generator "
        "of its own, seeded with seed + epoch": lambda got: shuffle and is_permutation(got),
    })  # fmt: skip


# -- 2.6 --------------------------------------------------------------------------------------


def _shares(seed: int, n: int, p: int) -> list[list[float]]:
    """The values of each of p ranks in the sampler's order, padding included.

    Of many samples they are large, and negative as well.
    """
    low, high = (-4000, 4000) if n > 200 else (1, 90)
    values = numbers(seed, n, low=low, high=high).tolist()  # one for each sample
    how = {"shuffle": True, "seed": seed % 100, "epoch": seed % 7}
    return [[values[k] for k in share(n, p, r, **how)] for r in range(p)]


@in_group
def probe_mean(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, values: list, n: int
) -> dict:
    """`mean_once` of this rank's values."""
    function, mine = reading_answer(user_ns, "mean_once"), torch.tensor(values)
    result, calls = recorded(function, mine, n, **keywords(partition, group))
    return {"result": told(result), "tensor": isinstance(result, torch.Tensor), "calls": calls}


@task("2.6", "every sample counts once", points=3)
def mean_once(ranks: Ranks, report: Report) -> None:
    """The mean over n samples, by one all_reduce, from shares that contain padding."""
    cases = []
    for partition in (*partitions(ranks.n), None):
        for n in (*SAMPLES, _numbers(report.seed, 30, 60), _numbers(report.seed, 201, 400)):
            (seed,) = report.seeds(1)
            values = [_shares(seed, n, p)[r] for r, p in places(partition, ranks.n)]
            cases.append({"partition": partition, "n": n, "each": to_each(values=values)})
    judge_groups(ranks, report, probe_mean, cases, _mean_steps, _groups, ranks.n)


def _mean_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a rank's mean has to be, and how it comes about."""
    n, members, outcome = answer.case["n"], answer.members, answer.value
    parts = [answer.case["each"][rank]["values"] for rank in members]
    ops = [call["op"] for call in outcome["calls"]]
    where = f"n = {n}{', values of -4000 to 4000' * (n > 200)} {on(members)}"
    yield communication(outcome["calls"], inside(members))
    expected = sum(map(sum, _without_padding(parts, n))) / n
    mistakes = _wrong_means(parts, n, members, answer.place)
    form = "the mean, one number"
    yield value(one_number(outcome["result"]), expected, mistakes, what=where, form=form)
    yield facts({
        "returned a tensor, expected a Python float: .item() makes one of it": outcome["tensor"],
        f"{where}: expected one all_reduce, of sum and count together; it made: "
        f"{', '.join(ops) or 'nothing'}": ops != ["all_reduce"],
    })  # fmt: skip


def _without_padding(parts: list[list[float]], n: int) -> list[list[float]]:
    """What is left of the ranks' values: that at place j of rank r is number r + j·p."""
    return [part[: max(0, math.ceil((n - r) / len(parts)))] for r, part in enumerate(parts)]


def _wrong_means(
    parts: list[list[float]], n: int, members: list[int], place: int
) -> Iterator[Mistake]:
    """Yield wrong means of the shares of a group's ranks, and where they come from."""
    p, size, real = len(parts), len(parts[0]), _without_padding(parts, n)
    everything, once = (sum(map(sum, of_ranks)) for of_ranks in (parts, real))
    means = [sum(part) / max(len(part), 1) for part in real]
    # Who takes the rank in the world for the one in the group keeps the wrong values.
    of_rank = zip(parts, members, strict=True)
    kept = [v for part, rank in of_rank for j, v in enumerate(part) if rank + p * j < n]
    dropped, shorter = (sum(sum(part[:k]) for part in parts) for k in (n // p, size - 1))
    yield from table({
        "nan: a rank without a sample of its own has the mean 0 / 0: add sums":
            lambda got: got != got,
        "expected the mean, one number": lambda got: not is_number(got),
        "this is the mean of this rank's values": sum(parts[place]) / size,
        "this is the mean of this rank's samples": means[place],
        "the places are counted from this rank's number in the world: dist.get_rank(group) is its "
        "number in the group": one_of(*(sum(kept) / max(count, 1) for count in (n, len(kept)))),
        f"repeated samples count twice: {p * size} values for {n} samples. The value at place j "
        f"of rank r is number r + j·p of the order; from number {n} on it is padding":
            everything / (p * size),
        f"divided by {n}, but the sum contains repeated samples": everything / n,
        f"the sum is right, but divided by {p * size}, padding included": once / (p * size),
        "this is a sum: divide it by the number of samples": one_of(everything, once),
        "divided by the number of ranks, not of samples": once / p,
        "this is the mean of the ranks' means: reduce sums and counts":
            one_of(sum(means) / p, sum(means) / sum(map(bool, real))),
        "padding was looked for at the end of the last rank. But ranks take turns: the value at "
        "place j of rank r is number r + j·p of the order": sum([*chain(*parts)][:n]) / n,
        "samples were left out, as drop_last does: only padding must go":
            one_of(dropped / max(n // p * p, 1), dropped / n),
        "the last value of every rank was left out: only some of them are padding":
            shorter / max(p * (size - 1), 1),
        "the sum is right, but divided by another number than that of the samples":
            lambda got: any(same(got, once / count) for count in range(1, 2 * n)),
    })  # fmt: skip
