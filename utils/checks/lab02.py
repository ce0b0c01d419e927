"""Checks of lab 02: who gets which sample, minibatch by minibatch.

Functions of numbers (n samples, p ranks, rank r) are called on every rank for the same list of
calls, whatever the number of ranks here. Functions that communicate are tried in groups of 1, 2, 3
and 4 ranks (`utils.checks.groups`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from .calls import broken, inside
from .groups import in_group, keywords, members_of, on, partitions
from .mistakes import Mistake, explain, same, short
from .model import use_model as use_model
from .probe import answer_named, integers, recorded, told
from .task import Report, task

#: Samples: one number that all p of 1 … 4 divide, and awkward ones.
SAMPLES = (24, 25, 7, 1)
RANK_COUNTS = (1, 2, 3, 4)


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


def batches(samples: Sequence[int], size: int, drop_last: bool = False) -> list[list[int]]:
    """The samples in lists of `size`; the last list may be shorter, or is dropped."""
    return list(BatchSampler(samples, size, drop_last))


_BY_HAND = "made by hand: the task asks for a DistributedSampler, which your trainings will use"


# -- functions of numbers: call and compare ----------------------------------------------------


def probe_calls(user_ns: dict, *, rank: int, name: str, calls: list) -> list[dict]:
    """Call a function once for each (arguments, keywords); results or errors, and what it used."""
    function = answer_named(user_ns, name)
    answers = []
    for arguments, named in calls:
        answer = {}
        with _watched_sampler() as used:
            try:
                value = function(*arguments, **named)
                answer = {"value": told(value), "tensors": _has_tensors(value)}
            except NotImplementedError:
                raise
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error}"
        answers.append(answer | {"samplers": used["__init__"], "epochs": used["set_epoch"]})
    return answers


def _has_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value)


@contextlib.contextmanager
def _watched_sampler() -> Iterator[dict[str, int]]:
    """How often a DistributedSampler is made, and told its epoch."""
    used = {"__init__": 0, "set_epoch": 0}

    def counted(name: str) -> Callable:
        original = getattr(DistributedSampler, name)

        def count(self, *args, **kwargs) -> None:
            used[name] += 1
            original(self, *args, **kwargs)

        return count

    with contextlib.ExitStack() as patches:
        for name in used:
            patches.enter_context(mock.patch.object(DistributedSampler, name, counted(name)))
        yield used


def _judge_calls(
    ranks,
    report: Report,
    name: str,
    calls: list,
    expected: Callable[..., Any],
    mistakes: Callable[..., Iterable[Mistake]],
    form: str,
    tidy: Callable[[Any], Any] = lambda value: value,
) -> list:
    """Compare a function's results on every rank; the first wrong one of each rank is a problem.

    expected: of a call's arguments and keywords, the result. mistakes: of the rank and the same,
    wrong results and what they mean. form: what the function must return, in words. tidy: done to
    a result before it is compared.
    Returns the answers, for more questions.
    """
    answers = report.answers(ranks, __name__, "probe_calls", name=name, calls=calls)
    for answer in answers:
        for (arguments, named), got in zip(calls, answer.value, strict=True):
            wanted = expected(*arguments, **named)
            if "value" in got:
                got = got | {"value": tidy(got["value"])}
            likely = functools.partial(mistakes, answer.rank, *arguments, **named)
            said = _compare(got, wanted, likely, form)
            if said:
                report.problem(f"{_call(name, arguments, named)}: {said}", answer.rank)
                break
    return answers


def _compare(
    got: dict, wanted: Any, mistakes: Callable[[], Iterable[Mistake]], form: str
) -> str | None:
    """What is wrong with a result; None for a right one."""
    if "error" in got:
        right = wanted is ValueError and got["error"].startswith("ValueError")
        return None if right else f"raised {got['error']}"
    if wanted is ValueError:
        return f"expected a ValueError, got {short(got['value'])}"
    return explain(got["value"], wanted, mistakes(), form=form)


def _call(name: str, arguments: Sequence, keywords: dict) -> str:
    """A call as one would write it."""
    parts = [str(a) for a in arguments] + [f"{key}={value}" for key, value in keywords.items()]
    return f"{name}({', '.join(parts)})"


def _numbers(seed: int, low: int, high: int) -> int:
    """A fresh number from low to high, both included."""
    return low + seed % (high - low + 1)


# -- 2.1 --------------------------------------------------------------------------------------


@task("2.1", "the items of a rank", points=2)
def items_of(ranks, report: Report) -> None:
    """Each rank's items, for every n, p, r, with and without shuffle and drop_last."""
    fresh = _numbers(report.seed, 30, 60)
    calls = [
        ((n, p, r), {"shuffle": shuffle, "drop_last": drop_last})
        for shuffle in (False, True)
        for drop_last in (False, True)
        for n in (*SAMPLES, fresh)
        for p in RANK_COUNTS
        for r in range(p)
    ]

    def expected(n, p, r, **keywords) -> list[int]:
        return [10 * sample for sample in share(n, p, r, **keywords)]

    def mistakes(rank, n, p, r, shuffle, drop_last) -> Iterable[Mistake]:
        def items(n=n, p=p, r=r, shuffle=shuffle, drop_last=drop_last) -> list[int]:
            return expected(n, p, r, shuffle=shuffle, drop_last=drop_last)

        yield Mistake(
            share(n, p, r, shuffle=shuffle, drop_last=drop_last), "these are indices, not items"
        )
        yield Mistake(
            items(shuffle=not shuffle),
            "shuffled, but shuffle=False: the sampler shuffles unless you say shuffle=shuffle"
            if not shuffle
            else "in order, but shuffle=True: hand shuffle on to the sampler",
        )
        if drop_last:
            yield Mistake(
                items(drop_last=False),
                "samples were repeated, but drop_last=True: hand drop_last on to the sampler",
            )
        yield Mistake(
            [10 * k for k in range(n)], "these are all items: give the sampler to the DataLoader"
        )
        if rank < p:
            yield Mistake(
                items(r=rank),
                f"these are the items of rank {rank}, which runs the check: use the argument r, "
                "not dist.get_rank()",
            )
        if r < ranks.n:
            yield Mistake(
                items(p=ranks.n),
                f"shared among {ranks.n} ranks: use the argument p, not the world size",
            )

        yield Mistake(
            lambda value: isinstance(value, list) and value == items()[: len(value)],
            "the last items are missing. Did the DataLoader get drop_last? It is the sampler's",
        )
        yield Mistake(_is_nested, "this is a list of minibatches: make one flat list of it")

    form = "a flat list with the items"
    answers = _judge_calls(ranks, report, "items_of", calls, expected, mistakes, form)
    for answer in answers if not report.found else []:
        if any(got["tensors"] for got in answer.value):
            report.problem(
                "the entries are tensors of one number; the task asks for numbers: .tolist(), or "
                "int(item)",
                answer.rank,
            )
        elif not all(got["samplers"] for got in answer.value):
            report.problem(f"right, but {_BY_HAND}", answer.rank)


def _is_nested(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(part, list) for part in value)


# -- 2.2 --------------------------------------------------------------------------------------


@task("2.2", "a new order in every epoch", points=2)
def epoch_orders(ranks, report: Report) -> None:
    """The shuffled order of each epoch, the same permutation on all ranks."""
    seed = _numbers(report.seed, 5, 1000)
    calls = [
        ((n, p, r, epochs, seed), {})
        for n, epochs in ((24, 3), (25, 4), (7, 2), (1, 1))
        for p in RANK_COUNTS
        for r in range(p)
    ]

    def expected(n, p, r, epochs, seed, first=0) -> list[list[int]]:
        return [
            share(n, p, r, shuffle=True, seed=seed, epoch=e) for e in range(first, first + epochs)
        ]

    def mistakes(rank, n, p, r, epochs, seed) -> Iterable[Mistake]:
        yield Mistake(
            [share(n, p, r, shuffle=True, seed=seed)] * epochs,
            "every epoch has the same order: call set_epoch(epoch) before each",
        )
        yield Mistake(
            [share(n, p, r, shuffle=True, seed=seed, epoch=max(e - 1, 0)) for e in range(epochs)],
            "epochs 0 and 1 have the same order: set_epoch counts only if it comes before the "
            "sampler is iterated",
        )
        yield Mistake(
            lambda value: isinstance(value, list) and "<DistributedSampler>" in value,
            "these are samplers: make a list of each with list(sampler)",
        )
        yield Mistake([share(n, p, r)] * epochs, "not shuffled")
        yield Mistake(expected(n, p, r, epochs, 0), "the argument seed was not used")
        own_seed = "this rank shuffles with a seed of its own: all ranks need the same one"
        if r > 0:
            yield Mistake(expected(n, p, r, epochs, r), own_seed)
            yield Mistake(expected(n, p, r, epochs, seed + r), own_seed)
        yield Mistake(
            expected(n, p, r, epochs, seed, first=1),
            "seed + epoch is one too large: the first epoch is number 0, and all ranks have the "
            "same seed",
        )
        yield Mistake(expected(n, p, r, epochs, rank), own_seed)
        yield Mistake(expected(n, p, r, epochs, seed + rank), own_seed)
        items = [[10 * sample for sample in order] for order in expected(n, p, r, epochs, seed)]
        yield Mistake(items, "these are items, the task asks for sample numbers")
        yield Mistake(
            [sample for order in expected(n, p, r, epochs, seed) for sample in order],
            "this is one long list: make one list per epoch",
        )

    form = "a list with one list of sample numbers per epoch"
    answers = _judge_calls(ranks, report, "epoch_orders", calls, expected, mistakes, form)
    for answer in answers if not report.found else []:
        if not all(got["samplers"] for got in answer.value):
            report.problem(f"right, but {_BY_HAND}", answer.rank)
        elif not all(got["epochs"] for got in answer.value):
            report.problem(
                "right, but set_epoch was never called: a sampler lives as long as a training, "
                "and is told each epoch's number",
                answer.rank,
            )


# -- 2.3 --------------------------------------------------------------------------------------


def _repeated_and_lost(n: int, p: int, drop_last: bool) -> list[list[int]]:
    """What the sampler really repeats and leaves out, in order."""
    seen = sorted(sample for r in range(p) for sample in share(n, p, r, drop_last=drop_last))
    lost = [sample for sample in range(n) if sample not in seen]
    for sample in set(seen):
        seen.remove(sample)
    return [seen, lost]


def _in_order(value: Any) -> Any:
    """The lists in a list sorted, where they can be."""
    if not isinstance(value, list):
        return value
    numbers = [isinstance(part, list) and all(isinstance(k, int) for k in part) for part in value]
    return [sorted(part) if n else part for part, n in zip(value, numbers, strict=True)]


def _again(n: int, count: int) -> list[int]:
    """`count` samples, from 0 on, and from 0 again after n - 1; in order."""
    return sorted(k % n for k in range(count))


@task("2.3", "predict what is repeated and what is lost", points=3)
def repeated_and_lost(ranks, report: Report) -> None:
    """Repeated and lost samples by arithmetic, for more ranks than there are here, too."""
    fresh = _numbers(report.seed, 30, 60)
    calls = [
        ((n, p, drop_last), {})
        for drop_last in (False, True)
        for n in (*SAMPLES, 2, fresh)
        for p in (*RANK_COUNTS, 6, 7)
    ]

    def mistakes(rank, n, p, drop_last) -> Iterable[Mistake]:
        rest, missing = n % p, -n % p
        if drop_last:
            yield Mistake(
                [[], list(range(max(n - missing, 0), n))],
                f"{rest} samples are too many for equal shares, and that many are left out; "
                f"{missing} would be missing to the next multiple of p",
            )
            yield Mistake(
                [[], list(range(rest))], "drop_last leaves out the last samples, not the first"
            )
        else:
            yield Mistake(
                [_again(n, p - rest), []],
                "p divides n, so nothing is missing, but p - n % p is p",
            )
            yield Mistake(
                [list(range(min(missing, n))), []],
                f"{missing} samples are missing, but there are only {n}: the sampler goes "
                "through them again and again",
            )
            yield Mistake(
                [_again(n, rest), []],
                f"n % p = {rest} samples are too many for equal shares. The sampler adds samples "
                "until p divides their number: how many are missing?",
            )
            yield Mistake(
                [list(range(max(n - missing, 0), n)), []],
                "the sampler repeats the first samples of the order, not the last",
            )
        yield Mistake(
            _repeated_and_lost(n, p, not drop_last),
            f"that is what happens with drop_last={not drop_last}",
        )
        wanted = _repeated_and_lost(n, p, drop_last)
        yield Mistake(
            _repeated_and_lost(n, ranks.n, drop_last),
            f"that is the result for {ranks.n} ranks: use the argument p",
        )
        yield Mistake(wanted[::-1], "the two lists are swapped: return (repeated, lost)")
        yield Mistake(list(map(len, wanted)), "these are numbers: return two lists of samples")

    form = "two lists, (repeated, lost)"
    answers = _judge_calls(
        ranks, report, "repeated_and_lost", calls, _repeated_and_lost, mistakes, form, _in_order
    )
    if answers and not report.problems and any(got["samplers"] for got in answers[0].value):
        report.problem(
            "it asks a DistributedSampler: predict with arithmetic, then compare with the sampler"
        )


# -- 2.4 --------------------------------------------------------------------------------------


def _microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False) -> list[list[int]]:
    return batches(share(n, p, r, shuffle=shuffle, epoch=epoch), m // p, drop_last)


@task("2.4", "the microbatches of a rank", points=3)
def microbatches(ranks, report: Report) -> None:
    """Lists of m / p sample numbers, for every rank, epoch and drop_last."""
    fresh = _numbers(report.seed, 30, 60)
    calls = [
        ((n, m, p, r), {"shuffle": shuffle, "epoch": epoch, "drop_last": drop_last})
        for shuffle, epoch in ((False, 0), (True, 0), (True, 2))
        for drop_last in (False, True)
        for n, m in ((24, 8), (24, 12), (25, 8), (7, 4), (1, 4), (fresh, 12))
        for p in RANK_COUNTS
        for r in range(p)
        if m % p == 0
    ]
    calls += [((24, 8, 3, 0), {}), ((25, 6, 4, 1), {})]

    def expected(n, m, p, r, **keywords) -> Any:
        return ValueError if m % p else _microbatches(n, m, p, r, **keywords)

    def mistakes(rank, n, m, p, r, shuffle=False, epoch=0, drop_last=False) -> Iterable[Mistake]:
        own = share(n, p, r, shuffle=shuffle, epoch=epoch)
        yield Mistake(
            batches(own, m, drop_last),
            f"microbatches of up to {m}: batch_size counts the samples of one rank, m / p",
        )
        yield Mistake(
            batches(own, m // p, not drop_last),
            "the last microbatch is too short and must go: hand drop_last on to the BatchSampler"
            if drop_last
            else "a last microbatch was dropped, but drop_last=False",
        )
        short_share = share(n, p, r, shuffle=shuffle, epoch=epoch, drop_last=True)
        for last in (drop_last, False):
            yield Mistake(
                batches(short_share, m // p, last),
                "here drop_last is that of the BatchSampler; the DistributedSampler got it and "
                "left samples out",
            )
        yield Mistake(
            batches(share(n, p, r, shuffle=shuffle), m // p, drop_last),
            "this is the order of epoch 0: set_epoch(epoch)",
        )
        yield Mistake(
            batches(share(n, p, r, shuffle=not shuffle, epoch=epoch), m // p, drop_last),
            "shuffled, but shuffle=False" if not shuffle else "not shuffled, but shuffle=True",
        )
        yield Mistake(own, "this is a flat list: wrap the sampler in a BatchSampler")
        items = [[10 * k for k in part] for part in batches(own, m // p, drop_last)]
        yield Mistake(items, "these are items, the task asks for sample numbers")
        yield Mistake("<BatchSampler>", "this is the BatchSampler itself: make a list of it")
        if rank < p:
            yield Mistake(
                _microbatches(n, m, p, rank, shuffle, epoch, drop_last),
                f"these are rank {rank}'s, which runs the check: use the argument r",
            )

    form = "a list of microbatches, each a list of sample numbers"
    _judge_calls(ranks, report, "microbatches", calls, expected, mistakes, form)


# -- groups -----------------------------------------------------------------------------------


def _answers(ranks, report: Report, probe: str, partition, **kwargs) -> list:
    """Ask the ranks in the groups of a partition; a failure says which groups these were."""
    kwargs |= {"partition": partition, "world": ranks.n, "seed": report.seed}
    answers = report.answers(ranks, __name__, probe, **kwargs)
    if not answers and partition is not None:
        groups = " and ".join(str(tuple(members)) for members in partition)
        report.problem(f"(that was with groups of these ranks: {groups})")
    return answers


# -- 2.5 --------------------------------------------------------------------------------------


def _scenarios(p: int, r: int, seed: int) -> dict[str, tuple[list, list]]:
    """By name: rank r's microbatches, and the minibatches to compare with."""
    epoch, last = seed % 50, r == p - 1

    def sampled(n: int, m: int, shuffle: bool) -> tuple[list, list]:
        mine = _microbatches(n, m, p, r, shuffle, epoch)
        return mine, batches(share(n, 1, 0, shuffle=shuffle, epoch=epoch), m)

    made = {
        "24 samples in order, m = 12": sampled(24, 12, False),
        "24 samples shuffled, m = 12": sampled(24, 12, True),
        "a smaller minibatch at the end (36 samples, m = 24)": sampled(36, 24, True),
        "25 samples: the sampler repeats some": sampled(25, 12, True),
    }
    mine, minibatches = sampled(24, 12, True)
    eights = batches(share(24, 1, 0, shuffle=True, epoch=epoch), 8)
    made["microbatches of unequal size"] = [batch[r::p] for batch in eights], eights
    made["microbatches 0 and 1 swapped on the group's last rank"] = (
        mine[1::-1] if last else mine,
        minibatches,
    )
    again = [mine[0], [*mine[1], mine[1][0]]]
    made["one sample twice in a microbatch of the last rank"] = again if last else mine, minibatches
    less = [mine[0], mine[1][1:]]
    made["one sample missing on the last rank"] = less if last else mine, minibatches
    made["the last rank has one microbatch less"] = mine[:1] if last else mine, minibatches
    made["the last rank has no microbatch"] = [] if last else mine, minibatches
    made["a minibatch that no rank has"] = mine, [*minibatches, [24]]
    more = [*mine, [0]]
    made["the last rank has one microbatch too many"] = more if last else mine, minibatches
    return made


def _truth(p: int, seed: int) -> dict[str, bool]:
    """By scenario: what a group of p ranks must find."""
    ranks = [_scenarios(p, r, seed) for r in range(p)]
    truth = {}
    for name, (_, minibatches) in ranks[0].items():
        parts = [scenario[name][0] for scenario in ranks]
        steps = max(map(len, [*parts, minibatches]))
        truth[name] = all(
            sorted(sample for part in parts for sample in _at(part, k))
            == sorted(_at(minibatches, k))
            for k in range(steps)
        )
    return truth


def _at(batches_: list, k: int) -> list:
    return batches_[k] if k < len(batches_) else []


@in_group
def probe_same(user_ns: dict, *, rank: int, group, partition, world: int, seed: int) -> list[dict]:
    """`same_minibatches` in this rank's group, once for each scenario."""
    function = answer_named(user_ns, "same_minibatches")
    members = members_of(partition, rank, world)
    named = keywords(partition, group)
    answers = []
    for mine, minibatches in _scenarios(len(members), members.index(rank), seed).values():
        result, calls = recorded(function, mine, minibatches, **named)
        answers.append({"result": told(result), "calls": calls})
    return answers


@task("2.5", "the union is the sequential minibatch", points=4)
def same_minibatches(ranks, report: Report) -> None:
    """The twin's minibatches, then the verdict of a group about its microbatches."""
    _judge_twin(ranks, report)
    for partition in () if report.problems else [*partitions(ranks.n), None]:
        answers = _answers(ranks, report, "probe_same", partition)
        for answer in answers:
            members = members_of(partition, answer.rank, ranks.n)
            said = _judge_same(answer.value, members, _truth(len(members), report.seed))
            if said:
                report.problem(said, answer.rank)
        if report.problems:
            return


def _judge_twin(ranks, report: Report) -> None:
    fresh = _numbers(report.seed, 30, 60)
    calls = [
        ((n, m), {"shuffle": shuffle, "epoch": epoch})
        for shuffle, epoch in ((False, 0), (True, 0), (True, 3))
        for n, m in ((24, 8), (25, 8), (7, 4), (1, 4), (fresh, 12))
    ]

    def expected(n, m, shuffle, epoch) -> list[list[int]]:
        return _microbatches(n, m, 1, 0, shuffle, epoch)

    def mistakes(rank, n, m, shuffle, epoch) -> Iterable[Mistake]:
        yield Mistake(expected(n, m, shuffle, 0), "this is the order of epoch 0: use epoch")
        yield Mistake(
            expected(n, m, not shuffle, epoch),
            ("shuffled, but shuffle=False" if not shuffle else "not shuffled, but shuffle=True"),
        )
        for p in RANK_COUNTS[1:]:
            for r in range(p):
                if m % p == 0:
                    yield Mistake(
                        _microbatches(n, m, p, r, shuffle, epoch),
                        f"these are the microbatches of rank {r} of {p}; the twin is alone",
                    )
        yield Mistake(
            share(n, 1, 0, shuffle=shuffle, epoch=epoch), "this is a flat list: cut it into lists"
        )
        yield Mistake(
            batches(share(n, 1, 0, shuffle=shuffle, epoch=epoch), m, True),
            "the last, smaller minibatch is missing",
        )
        yield Mistake(
            lambda value: shuffle and _is_permutation(value, n),
            "all samples are there, but in another order than the sampler's: it draws with a "
            "generator of its own, seeded with seed + epoch",
        )

    form = "a list of minibatches, each a list of sample numbers"
    name = "sequential_minibatches"
    _judge_calls(ranks, report, name, calls, expected, mistakes, form)


def _is_permutation(value: Any, n: int) -> bool:
    if not isinstance(value, list) or not all(isinstance(part, list) for part in value):
        return False
    flat = [sample for part in value for sample in part]
    return all(isinstance(k, int) for k in flat) and sorted(flat) == list(range(n))


def _judge_same(value: list[dict], members: list[int], truth: dict[str, bool]) -> str | None:
    """The first thing that is wrong with a rank's verdicts, in words."""
    for (name, wanted), got in zip(truth.items(), value, strict=True):
        if astray := broken(got["calls"], inside(members)):
            return astray
        if len(members) > 1 and not got["calls"]:
            return f"{on(members)}: it communicated nothing; a rank knows its own microbatches only"
        if not isinstance(got["result"], bool):
            return f"returned {short(got['result'])}, expected True or False"
        if got["result"] is not wanted:
            why = _why_same(name, wanted)
            return f"{on(members)}: {name}. Expected {wanted}, got {got['result']}{why}"
    return None


def _why_same(name: str, wanted: bool) -> str:
    if wanted:
        return ". Compare without regard to the order of the samples"
    if "twice" in name or "repeats" in name:
        return ". A set forgets how often a sample occurs: compare sorted lists"
    if "swapped" in name:
        return ". Compare minibatch by minibatch, not the whole epoch"
    if "less" in name or "too many" in name or "no rank has" in name or "no microbatch" in name:
        return ". zip stops at the shortest list: compare the numbers of batches, too"
    if "missing" in name:
        return ". A subset is not enough, and all ranks have to look at all microbatches"
    return ""


# -- 2.6 --------------------------------------------------------------------------------------


def _values(seed: int, n: int) -> list[float]:
    """One value for each sample."""
    return integers(seed, n, low=1, high=90).tolist()


def _shares(seed: int, n: int, p: int) -> list[list[float]]:
    """The values of each of p ranks in the sampler's order, padding included."""
    values = _values(seed, n)
    return [
        [values[k] for k in share(n, p, r, shuffle=True, seed=seed % 100, epoch=seed % 7)]
        for r in range(p)
    ]


@in_group
def probe_mean(
    user_ns: dict, *, rank: int, group, partition, world: int, seed: int, n: int
) -> dict:
    """`mean_once` of this rank's values."""
    function = answer_named(user_ns, "mean_once")
    members = members_of(partition, rank, world)
    mine = torch.tensor(_shares(seed, n, len(members))[members.index(rank)])
    named = keywords(partition, group)
    result, calls = recorded(function, mine, n, **named)
    return {"result": told(result), "tensor": isinstance(result, torch.Tensor), "calls": calls}


@task("2.6", "every sample counts once", points=3)
def mean_once(ranks, report: Report) -> None:
    """The mean over n samples, by one all_reduce, from shares that contain padding."""
    for partition in [*partitions(ranks.n), None]:
        for n in (*SAMPLES, _numbers(report.seed, 30, 60)):
            answers = _answers(ranks, report, "probe_mean", partition, n=n)
            for answer in answers:
                members = members_of(partition, answer.rank, ranks.n)
                said = _judge_mean(answer.value, n, members, answer.rank, report.seed, ranks.n)
                if said:
                    report.problem(said, answer.rank)
            if report.problems:
                return


def _judge_mean(value: dict, n, members, rank, seed, world) -> str | None:
    """What is wrong with a rank's mean, or with how it came about."""
    if astray := broken(value["calls"], inside(members)):
        return astray
    got, wanted = value["result"], sum(_values(seed, n)) / n
    if isinstance(got, list) and len(got) == 1:
        got = got[0]
    if isinstance(got, bool) or not isinstance(got, int | float):
        return f"returned {short(got)}, expected the mean, one number"
    where = f"n = {n} {on(members)}"
    if math.isnan(got):
        return f"{where}: nan. A rank without a sample of its own has the mean 0 / 0: add sums"
    if not same(got, wanted):
        parts = _shares(seed, n, len(members))
        return f"{where}: {explain(got, wanted, _mean_mistakes(parts, n, members, rank))}"
    if value["tensor"]:
        return "returned a tensor, expected a Python float: .item() makes one of it"
    ops = [call["op"] for call in value["calls"]]
    if ops != ["all_reduce"]:
        made = ", ".join(ops) or "nothing"
        return f"{where}: expected one all_reduce, of sum and count together; it made: {made}"
    return None


def _mean_mistakes(
    parts: list[list[float]], n: int, members: list[int], rank: int
) -> Iterable[Mistake]:
    """Wrong means of the shares of a group's ranks, and where they come from."""
    p, size, place = len(parts), len(parts[0]), members.index(rank)
    real = [part[: max(0, math.ceil((n - r) / p))] for r, part in enumerate(parts)]
    own = sum(parts[place])
    yield Mistake(own / size, "this is the mean of this rank's values")
    if real[place]:
        yield Mistake(
            sum(real[place]) / len(real[place]), "this is the mean of this rank's samples"
        )
    everything = sum(map(sum, parts))
    once = sum(map(sum, real))
    # Who takes the rank in the world for the one in the group keeps the wrong values.
    kept = [
        value
        for part, number in zip(parts, members, strict=True)
        for j, value in enumerate(part)
        if number + p * j < n
    ]
    for count in (n, len(kept)) if members != list(range(p)) else ():
        yield Mistake(
            sum(kept) / max(count, 1),
            "the places are counted from this rank's number in the world: "
            "dist.get_rank(group) is its number in the group",
        )
    yield Mistake(
        everything / (p * size),
        f"repeated samples count twice: {p * size} values for {n} samples. The value at place j "
        f"of rank r is number r + j·p of the order; from number {n} on it is padding",
    )
    yield Mistake(everything / n, f"divided by {n}, but the sum contains repeated samples")
    yield Mistake(
        once / (p * size), f"the sum is right, but divided by {p * size}, padding included"
    )
    yield Mistake(everything, "this is a sum: divide it by the number of samples")
    yield Mistake(once, "this is a sum: divide it by the number of samples")
    yield Mistake(once / p, "divided by the number of ranks, not of samples")
    means = [sum(part) / max(len(part), 1) for part in real]
    yield Mistake(sum(means) / p, "this is the mean of the ranks' means: reduce sums and counts")
    filled = [mean for part, mean in zip(real, means, strict=True) if part]
    yield Mistake(
        sum(filled) / len(filled), "this is the mean of the ranks' means: reduce sums and counts"
    )
    flat = [value for part in parts for value in part]
    yield Mistake(
        sum(flat[:n]) / n,
        "padding was looked for at the end of the last rank. But ranks take turns: the value at "
        "place j of rank r is number r + j·p of the order",
    )
    floor = n // p
    if floor:
        yield Mistake(
            sum(sum(part[:floor]) for part in parts) / (floor * p),
            "samples were left out, as drop_last does: only padding must go",
        )
        yield Mistake(
            sum(sum(part[:floor]) for part in parts) / n,
            "samples were left out, as drop_last does: only padding must go",
        )
    if size > 1:
        yield Mistake(
            sum(sum(part[:-1]) for part in parts) / (p * (size - 1)),
            "the last value of every rank was left out: only some of them are padding",
        )
