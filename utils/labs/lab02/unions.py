"""Tasks 2.5 and 2.6: whether the ranks of a group together have each sample once."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

from utils.checks.comparison import Mistake, inside, is_number, one_of, same, short, table
from utils.checks.probe import numbers
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import GroupAnswer, judge_groups, on, partitions, places
from utils.cluster.questions import Ranks
from utils.labs.shared.small_models import one_number

from .probes import probe_mean, probe_same
from .samples import (
    PLACES,
    SAMPLES,
    Batches,
    NumberTask,
    answers_are_right,
    epochs_to_try,
    fresh_number,
    microbatches_of,
    share,
)

ALONE = "that the first rank has alone"
A_SET = "A set forgets how often a sample occurs. Compare sorted lists"
SHORTEST = "zip stops at the shortest list. Compare the numbers of batches, too"
#: A rank's microbatches, the minibatches to compare them with, and what an answer may overlook.
Scenario = tuple[Batches, Batches, str]


def _scenarios(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return the scenarios of rank r of p, by name."""
    return _as_sampled(p, r, seed) | _large_numbers(p, r, seed) | _damaged(p, r, seed)


def _sampled(
    n: int, m: int, p: int, r: int, seed: int, shuffle: bool = True
) -> tuple[Batches, Batches]:
    """Return the microbatches of rank r of p, and the minibatches."""
    epoch = seed % 50
    return microbatches_of(n, m, p, r, shuffle, epoch), microbatches_of(n, m, 1, 0, shuffle, epoch)


def _as_sampled(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return scenarios with the samples of samplers, and with parts that are cut differently."""
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
    """Return scenarios with numbers that float32 can't represent and that index no list."""
    offset = 2**24 + seed % 10**6
    mine, minibatches = (
        [[offset + sample for sample in batch] for batch in few]
        for few in _sampled(60, 12, p, r, seed)
    )
    first, *others = mine[2]
    damaged = [*mine[:2], [first + 1, *others], *mine[3:]]
    every = "Compare all minibatches, not some of them"
    damage = "number 2 has another sample on the last rank"
    last = r == p - 1
    return {
        "five minibatches of large sample numbers": (mine, minibatches, ""),
        "five minibatches of large sample numbers once more": (mine, minibatches, ""),
        f"five minibatches, of which {damage}": (damaged if last else mine, minibatches, every),
    }


def _damaged(p: int, r: int, seed: int) -> dict[str, Scenario]:
    """Return scenarios with something wrong, in most of them on the group's last rank."""
    mine, minibatches = _sampled(24, 12, p, r, seed)
    epochs = "Compare minibatch by minibatch, not the whole epoch"
    subset = "A subset is not enough. Let all ranks look at all microbatches"
    sums = "Equal sums are not enough. Compare sorted lists"
    twice = [mine[0], [*mine[1], mine[1][0]]]
    low, *others, high = sorted(mine[0])
    same_sum = [[low + 1, *others, high - 1], mine[1]]
    # The group's last rank gets these instead of its microbatches.
    instead = {
        "microbatches 0 and 1 swapped on the group's last rank": (mine[1::-1], epochs),
        "one sample twice in a microbatch of the last rank": (twice, A_SET),
        "one sample missing on the last rank": ([mine[0], mine[1][1:]], subset),
        "the last rank has one microbatch less": (mine[:1], SHORTEST),
        "the last rank has no microbatch": ([], SHORTEST),
        "the last rank has one microbatch too many": ([*mine, [0]], SHORTEST),
        "on the last rank one sample is larger by 1, and another one smaller by 1": (
            same_sum,
            sums,
        ),
    }
    scenarios = {
        name: (damaged if r == p - 1 else mine, minibatches, overlooked)
        for name, (damaged, overlooked) in instead.items()
    }
    scenarios["a minibatch that no rank has"] = mine, [*minibatches, [24]], SHORTEST
    # With these, the other ranks can't know which of the scenarios are damaged.
    for k in range(6):
        scenarios[f"24 samples shuffled, m = 12, trial {k}"] = mine, minibatches, ""
    return scenarios


@functools.cache
def _truth(p: int, seed: int) -> dict[str, tuple[str, bool]]:
    """Return for each scenario what an answer may overlook, and the right verdict of p ranks."""
    ranks = [_scenarios(p, r, seed) for r in range(p)]
    truth = {}
    for name, (_, minibatches, overlooked) in ranks[0].items():
        parts = [scenarios[name][0] for scenarios in ranks]
        truth[name] = overlooked, _is_union(parts, minibatches)
    return truth


def _is_union(parts: list[Batches], minibatches: Batches) -> bool:
    """Return whether the ranks' microbatches make up each minibatch, in any order."""
    rows = zip_longest(minibatches, *parts, fillvalue=[])
    return all(sorted(chain(*of_ranks)) == sorted(minibatch) for minibatch, *of_ranks in rows)


def group_in_words(case: dict) -> str:
    """Return in words with which groups an answer failed."""
    groups = " and ".join(str(tuple(members)) for members in case["partition"] or ())
    return groups and f"with groups of the ranks {groups}"


@task("2.5", "the union is the sequential minibatch", points=4)
def same_minibatches(ranks: Ranks, report: Report) -> None:
    """Check the baseline's minibatches, then a group's verdict about its microbatches."""
    if not _makes_minibatches(ranks, report):
        return
    # Each case has a different order, because a rank alone in its group sees which are damaged.
    names = list(_scenarios(1, 0, report.seed))
    draw = random.Random(report.seed)
    for partition in (*partitions(ranks.n), None):
        order = draw.sample(names, len(names))
        of_ranks = [_scenarios(p, r, report.seed) for r, p in places(partition, ranks.n)]
        given = [[scenarios[name][:2] for name in order] for scenarios in of_ranks]
        case = {"partition": partition, "each": to_each(scenarios=given)}
        judge = functools.partial(_verdict_steps, order, report.seed)
        if not judge_groups(ranks, report, probe_same, [case], judge, group_in_words, ranks.n):
            return


def _verdict_steps(order: list[str], seed: int, answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's communication and its verdict in each scenario."""
    members = answer.members
    outcomes = dict(zip(order, answer.value, strict=True))
    for name, (overlooked, expected) in _truth(len(members), seed).items():
        calls = outcomes[name]["calls"]
        result = outcomes[name]["result"]
        yield communication(calls, inside(members))
        silent = len(members) > 1 and not calls
        knows = (
            f"{on(members)}: This rank didn't communicate, but it knows only its own "
            "microbatches. Call a collective"
        )
        no_bool = f"You returned {short(result)}. Return True or False"
        yield facts({knows: silent, no_bool: not isinstance(result, bool)})
        if expected:
            overlooked = "Ignore the order of the samples"
            if ALONE in name:
                overlooked = "Ranks may have different numbers of microbatches"
        hint = f". {overlooked}" if overlooked else ""
        text = f"{on(members)}: {name}. Expected {expected}, got {result}{hint}"
        yield facts({text: result is not expected})


def _makes_minibatches(ranks: Ranks, report: Report) -> bool:
    """Judge `sequential_minibatches`, and return whether it is right on all ranks."""
    calls = [
        ((n, m), {"shuffle": shuffle, "epoch": epoch})
        for shuffle, epoch in epochs_to_try(report.seed)
        for n, m in ((24, 8), (25, 8), (7, 4), (1, 4), (fresh_number(report.seed, 30, 60), 12))
    ]
    form = "a list of minibatches, each a list of sample numbers"
    number_task = NumberTask("sequential_minibatches", _twins, _wrong_twins, form)
    return bool(answers_are_right(ranks, report, number_task, calls))


def _twins(n: int, m: int, shuffle: bool, epoch: int) -> Batches:
    """Return the minibatches of the sequential baseline."""
    return microbatches_of(n, m, 1, 0, shuffle, epoch)


def _wrong_twins(
    world: int, rank: int, n: int, m: int, shuffle: bool, epoch: int
) -> Iterator[Mistake]:
    def is_permutation(got: Any) -> bool:
        nested = isinstance(got, list) and all(isinstance(part, list) for part in got)
        return nested and sorted(map(str, chain(*got))) == sorted(map(str, range(n)))

    order = "Your samples are shuffled, but shuffle=False. Pass shuffle to the sampler"
    if shuffle:
        order = "Your samples aren't shuffled, but shuffle=True. Pass shuffle to the sampler"
    of_ranks = {
        f"You returned the microbatches of rank {r} of {p}. Use one rank, as the sequential "
        "run does": (microbatches_of(n, m, p, r, shuffle, epoch))
        for p, r in PLACES[1:]
        if m % p == 0
    }
    yield from table({
        "You returned the order of epoch 0. Use the argument epoch": _twins(n, m, shuffle, 0),
        order: _twins(n, m, not shuffle, epoch),
        **of_ranks,
        "You returned a flat list. Divide it into minibatches": share(
            n, 1, 0, shuffle=shuffle, epoch=epoch
        ),
        "The last, smaller minibatch is missing. Keep it": microbatches_of(
            n, m, 1, 0, shuffle, epoch, True
        ),
        "All samples are there, but not in the sampler's order. Draw with a separate generator, "
        "seeded with seed + epoch": lambda got: shuffle and is_permutation(got),
    })


# -- 2.6 --------------------------------------------------------------------------------------


def _shares(seed: int, n: int, p: int) -> list[list[float]]:
    """Return the values of each of p ranks in the sampler's order, padding included.

    If there are many samples, the values are large, and some are negative.
    """
    low, high = (-4000, 4000) if n > 200 else (1, 90)
    values = numbers(seed, n, low=low, high=high).tolist()  # one for each sample
    how = {"shuffle": True, "seed": seed % 100, "epoch": seed % 7}
    return [[values[k] for k in share(n, p, r, **how)] for r in range(p)]


@task("2.6", "every sample counts once", points=3)
def mean_once(ranks: Ranks, report: Report) -> None:
    """Check the mean over n samples, by one all_reduce, from shares that contain padding."""
    cases = []
    for partition in (*partitions(ranks.n), None):
        for n in (*SAMPLES, fresh_number(report.seed, 30, 60), fresh_number(report.seed, 201, 400)):
            (seed,) = report.seeds(1)
            values = [_shares(seed, n, p)[r] for r, p in places(partition, ranks.n)]
            cases.append({"partition": partition, "n": n, "each": to_each(values=values)})
    judge_groups(ranks, report, probe_mean, cases, _mean_steps, group_in_words, ranks.n)


def _mean_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's mean and its communication."""
    n = answer.case["n"]
    members = answer.members
    outcome = answer.value
    parts = [answer.case["each"][rank]["values"] for rank in members]
    ops = [call["op"] for call in outcome["calls"]]
    where = f"n = {n}{', values of -4000 to 4000' * (n > 200)} {on(members)}"
    yield communication(outcome["calls"], inside(members))
    expected = sum(map(sum, _without_padding(parts, n))) / n
    mistakes = _wrong_means(parts, n, members, answer.place)
    form = "the mean, one number"
    yield value(one_number(outcome["result"]), expected, mistakes, what=where, form=form)
    yield facts({
        "You returned a tensor. Return a Python float: .item() gives one": outcome["tensor"],
        f"{where}: You made {', '.join(ops) or 'nothing'}. Make one all_reduce, of sum and count "
        "together": ops != ["all_reduce"],
    })


def _without_padding(parts: list[list[float]], n: int) -> list[list[float]]:
    """Return the ranks' values without padding: index j of rank r has position r + j·p."""
    return [part[: max(0, math.ceil((n - r) / len(parts)))] for r, part in enumerate(parts)]


def _wrong_means(
    parts: list[list[float]], n: int, members: list[int], place: int
) -> Iterator[Mistake]:
    """Yield mistakes that give a wrong mean over a group's ranks."""
    p = len(parts)
    size = len(parts[0])
    real = _without_padding(parts, n)
    everything, once = (sum(map(sum, of_ranks)) for of_ranks in (parts, real))
    means = [sum(part) / max(len(part), 1) for part in real]
    # An answer that uses the rank in the world instead of the group rank keeps wrong values.
    of_rank = zip(parts, members, strict=True)
    kept = [v for part, rank in of_rank for j, v in enumerate(part) if rank + p * j < n]
    dropped, shorter = (sum(sum(part[:k]) for part in parts) for k in (n // p, size - 1))
    of_means = one_of(sum(means) / p, sum(means) / sum(map(bool, real)))
    of_dropped = one_of(dropped / max(n // p * p, 1), dropped / n)

    def is_nan(result: Any) -> bool:
        return result != result

    def has_right_sum(result: Any) -> bool:
        return any(same(result, once / count) for count in range(1, 2 * n))

    yield from table({
        "The result is nan, because a rank without a sample has the mean 0 / 0. Add up sums "
        "instead": is_nan,
        "Return the mean as one number": lambda got: not is_number(got),
        "You returned the mean of this rank's values. Reduce over the group": (
            sum(parts[place]) / size
        ),
        "You returned the mean of this rank's samples. Reduce over the group": means[place],
        "You counted positions from this rank's number in the world. Use dist.get_rank(group), "
        "its number in the group": one_of(*(sum(kept) / max(count, 1) for count in (n, len(kept)))),
        f"You counted repeated samples twice: {p * size} values for {n} samples. Index j of rank "
        f"r has position r + j·p in the order, so leave out positions from {n} on": (
            everything / (p * size)
        ),
        f"You divided by {n}, but your sum contains repeated samples. Leave them out of the sum": (
            everything / n
        ),
        f"Your sum is right, but you divided it by {p * size}, padding included. Don't count the "
        "padding": once / (p * size),
        "You returned a sum. Divide it by the number of samples": one_of(everything, once),
        "You divided by the number of ranks. Divide by the number of samples": once / p,
        "You returned the mean of the ranks' means. Reduce sums and counts": of_means,
        "You looked for padding at the end of the last rank, but ranks take turns. Find it by "
        "its position: index j of rank r has position r + j·p in the order": (
            sum([*chain(*parts)][:n]) / n
        ),
        "You left samples out, as drop_last does. Leave out only the padding": of_dropped,
        "You left out the last value of every rank. Leave out only the padding": (
            shorter / max(p * (size - 1), 1)
        ),
        "Your sum is right, but you divided it by the wrong number. Divide by n": has_right_sum,
    })
