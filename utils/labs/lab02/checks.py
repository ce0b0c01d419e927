"""Checks of lab 02: which rank gets which sample, minibatch by minibatch.

Every rank makes the same list of calls to a function of numbers (n samples, p ranks, rank r),
however many ranks there are here. Functions that communicate are tried in groups of 1, 2, 3 and 4
ranks (`utils.checks.trials`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

from utils import data
from utils.checks.comparison import Mistake, one_of, table
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, facts, task
from utils.cluster.questions import Ranks

from .samples import (
    PLACES,
    RANK_COUNTS,
    SAMPLES,
    UNUSED,
    Batches,
    Call,
    NumberTask,
    answers_are_right,
    batches,
    epochs_to_try,
    fresh_number,
    judge_samples,
    microbatches_of,
    share,
    unused_parts,
)
from .unions import mean_once as mean_once
from .unions import same_minibatches as same_minibatches

# -- 2.1 --------------------------------------------------------------------------------------


@task("2.1", "the items of a rank", points=2)
def items_of(ranks: Ranks, report: Report) -> None:
    """Check each rank's items for every n, p, r, with and without shuffle and drop_last."""
    calls = [
        ((n, p, r), {"shuffle": shuffle, "drop_last": drop_last})
        for shuffle in (False, True)
        for drop_last in (False, True)
        for n in (*SAMPLES, fresh_number(report.seed, 30, 60))
        for p, r in (*PLACES, (5, 2), (7, 6))
    ]
    number_task = NumberTask("items_of", _items, _wrong_items, "a flat list with the items")
    judge_samples(ranks, report, number_task, calls, calls[::7])


def _items(n: int, p: int, r: int, **how: bool) -> list[int]:
    dataset = data.SimpleDataSet(n)
    return [int(dataset[sample]) for sample in share(n, p, r, **how)]


def _wrong_items(world: int, rank: int, n: int, p: int, r: int, **how: bool) -> Iterator[Mistake]:
    right = _items(n, p, r, **how)
    shuffled = (
        "Your items are shuffled, but shuffle=False. Pass shuffle=shuffle to the sampler, which "
        "shuffles by default"
    )
    if how["shuffle"]:
        shuffled = "Your items are in order, but shuffle=True. Pass shuffle to the sampler"
    repeated = _items(n, p, r, **how | {"drop_last": False})
    among_all = _items(n, max(p, world), r, **how)

    def is_cut(got: Any) -> bool:
        return isinstance(got, list) and got == right[: len(got)]

    def is_nested(got: Any) -> bool:
        return isinstance(got, list) and any(isinstance(part, list) for part in got)

    yield from table({
        "You returned indices. Return the items": share(n, p, r, **how),
        shuffled: _items(n, p, r, **how | {"shuffle": not how["shuffle"]}),
        "Some samples were repeated, but drop_last=True. Pass drop_last to the sampler": repeated,
        "You returned all items. Pass the sampler to the DataLoader": [10 * k for k in range(n)],
        f"You returned the items of rank {rank % p}, because rank {rank} runs the check. "
        "Use the argument r, not dist.get_rank()": _items(n, p, rank % p, **how),
        f"You shared the items among {world} ranks. Use the argument p": among_all,
        "The last items are missing. Pass drop_last to the "
        "sampler, and not to the DataLoader": is_cut,
        "You returned a list of minibatches. Make one flat list of them": is_nested,
    })


# -- 2.2 --------------------------------------------------------------------------------------


@task("2.2", "a new order in every epoch", points=2)
def epoch_orders(ranks: Ranks, report: Report) -> None:
    """Check the shuffled order of each epoch, which is one permutation for all ranks."""
    seed = fresh_number(report.seed, 5, 1000)
    calls: list[Call] = [
        ((n, p, r, epochs, seed), {})
        for n, epochs in ((24, 3), (25, 11), (7, 2), (1, 1))
        for p, r in PLACES
    ]
    calls += [((24, 2, 1, 3, other), {}) for other in (0, seed + 1)]
    form = "a list with one list of sample numbers per epoch"
    number_task = NumberTask("epoch_orders", _orders, _wrong_orders, form)
    judge_samples(ranks, report, number_task, calls, calls[::3], _unused_by_epochs)


def _unused_by_epochs(outcomes: list[dict[str, Any]]) -> dict[str, bool]:
    """Return which parts of the sampler are unused, or are made anew in each epoch."""
    never = "You never called set_epoch. Give the sampler the number of each epoch"
    by_hand, ignored = UNUSED.values()
    wanted = {"__init__": by_hand, "set_epoch": never, "__iter__": ignored}
    anew = any(outcome["used"].count("__init__") > 1 for outcome in outcomes)
    return {
        **unused_parts(outcomes, wanted),
        "You made a new sampler in each epoch. Make one sampler, and call set_epoch(epoch) "
        "before each epoch": anew,
    }


def _orders(n: int, p: int, r: int, epochs: int, seed: int) -> Batches:
    """Return the sample numbers of rank r of p, epoch by epoch."""
    return [share(n, p, r, shuffle=True, seed=seed, epoch=epoch) for epoch in range(epochs)]


def _wrong_orders(
    world: int, rank: int, n: int, p: int, r: int, epochs: int, seed: int
) -> Iterator[Mistake]:
    def with_seeds(*seeds: int) -> Callable:
        return one_of(*(_orders(n, p, r, epochs, other) for other in seeds))

    def has_samplers(orders: Any) -> bool:
        return isinstance(orders, list) and "<DistributedSampler>" in orders

    right = _orders(n, p, r, epochs, seed)
    items = [[10 * sample for sample in order] for order in right]
    own_seed = "This rank shuffles with a different seed. Use the same seed on all ranks"
    yield from table({
        "Every epoch has the same order. Call set_epoch(epoch) before each": right[:1] * epochs,
        "Epochs 0 and 1 have the same order. Call set_epoch before "
        "you iterate over the sampler": right[:1] + right[:-1],
        "You returned samplers. Make a list of each with list(sampler)": has_samplers,
        "Your order isn't shuffled. Pass shuffle=True": [share(n, p, r)] * epochs,
        "You didn't use the argument seed. Pass it to the sampler": _orders(n, p, r, epochs, 0),
        own_seed: with_seeds(r, seed + r),
        "Your seed + epoch is one too large. Count the epochs from 0, and use the same seed on "
        "all ranks": with_seeds(seed + 1),
        f"{own_seed}.": with_seeds(rank, seed + rank),
        "You returned items. Return the sample numbers": items,
        "You returned one long list. Make one list per epoch": [*chain(*right)],
    })


# -- 2.3 --------------------------------------------------------------------------------------


@task("2.3", "predict what is repeated and what is lost", points=3)
def repeated_and_lost(ranks: Ranks, report: Report) -> None:
    """Check which samples are repeated and lost, even for more ranks than there are here."""
    calls: list[Call] = [
        ((n, p, drop_last), {})
        for drop_last in (False, True)
        for n in (*SAMPLES, 2, 3, fresh_number(report.seed, 30, 60))
        for p in (*RANK_COUNTS, 6, 7, fresh_number(report.seed, 40, 99))
    ]
    calls += calls[::9]  # a second time
    form = "two lists, (repeated, lost)"
    number_task = NumberTask(
        "repeated_and_lost", _repeated_and_lost, _wrong_predictions, form, _in_order
    )
    asks = (
        "You asked a DistributedSampler. Predict by arithmetic, and then compare with the sampler"
    )
    for answer in answers_are_right(ranks, report, number_task, calls)[:1]:
        used = any(outcome["used"] for outcome in answer.value)
        report.follow(None, [facts({asks: used})])


def _repeated_and_lost(n: int, p: int, drop_last: bool) -> Batches:
    """Return which samples the sampler really repeats and leaves out, in order."""
    seen = sorted(sample for r in range(p) for sample in share(n, p, r, drop_last=drop_last))
    lost = [sample for sample in range(n) if sample not in seen]
    for sample in set(seen):
        seen.remove(sample)
    return [seen, lost]


def _in_order(result: Any) -> Any:
    """Return a list of lists with each list of numbers sorted."""

    def in_order(part: Any) -> Any:
        is_numbers = isinstance(part, list) and all(isinstance(k, int) for k in part)
        return sorted(part) if is_numbers else part

    return list(map(in_order, result)) if isinstance(result, list) else result


def _wrong_predictions(world: int, rank: int, n: int, p: int, drop_last: bool) -> Iterator[Mistake]:
    def again(count: int) -> list:
        """Return a result that repeats the first `count` samples, again from 0 after the last."""
        return [sorted(k % n for k in range(count)), []]

    rest = n % p
    missing = -n % p
    right = _repeated_and_lost(n, p, drop_last)
    from_the_end = list(range(max(n - missing, 0), n))
    dropped = {
        f"You left out {missing} samples, which are missing to the next multiple of p. Leave out "
        f"the {rest} samples that are too many": [[], from_the_end],
        "You left out the first samples. Leave out the last ones, as drop_last does": [
            [],
            list(range(rest)),
        ],
    }
    repeated = {
        "p divides n, so nothing is missing, but your p - n % p "
        "is p. Treat this case separately": again(p - rest),
        f"{missing} samples are missing, but there are only {n}. Go through them again and again, "
        "as the sampler does": [list(range(min(missing, n))), []],
        f"You repeated the n % p = {rest} samples that are too many. Repeat as many as are "
        "missing until p divides their number": again(rest),
        "You repeated the last samples of the order. Repeat the first ones, as the sampler does": [
            from_the_end,
            [],
        ],
    }
    other_way = _repeated_and_lost(n, p, not drop_last)
    of_the_world = _repeated_and_lost(n, world, drop_last)
    yield from table(dropped if drop_last else repeated)
    yield from table({
        f"You returned what happens with drop_last={not drop_last}. Swap the two cases": other_way,
        f"You returned the result for {world} ranks. Use the argument p": of_the_world,
        "You swapped the two lists. Return (repeated, lost)": right[::-1],
        "You returned numbers. Return two lists of samples": list(map(len, right)),
    })


# -- 2.4 --------------------------------------------------------------------------------------


def _microbatches_or_error(n: int, m: int, p: int, r: int, **how: Any) -> Batches | type:
    """Return the microbatches, or ValueError if p doesn't divide m."""
    return ValueError if m % p else microbatches_of(n, m, p, r, **how)


@task("2.4", "the microbatches of a rank", points=3)
def microbatches(ranks: Ranks, report: Report) -> None:
    """Check lists of m / p sample numbers, for every rank, epoch and drop_last."""
    fresh = fresh_number(report.seed, 30, 60)
    calls = [
        ((n, m, p, r), {"shuffle": shuffle, "epoch": epoch, "drop_last": drop_last})
        for shuffle, epoch in epochs_to_try(report.seed)
        for drop_last in (False, True)
        for n, m in ((24, 8), (24, 12), (25, 8), (7, 4), (1, 4), (fresh, 12))
        for p, r in PLACES
        if m % p == 0
    ]
    # Minibatches that the ranks can't share, with each remainder.
    calls += [((24, m, p, r), {}) for m, p, r in ((8, 3, 0), (6, 4, 1), (9, 4, 0), (7, 4, 3))]
    form = "a list of microbatches, each a list of sample numbers"
    number_task = NumberTask("microbatches", _microbatches_or_error, _wrong_microbatches, form)
    judge_samples(ranks, report, number_task, calls, calls[:-4:7])


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
    of_rank = share(n, p, r, shuffle=shuffle, epoch=epoch)
    fewer = share(n, p, r, shuffle=shuffle, epoch=epoch, drop_last=True)
    right = batches(of_rank, m // p, drop_last)
    last = "You dropped a last microbatch, but drop_last=False. Pass drop_last to the BatchSampler"
    if drop_last:
        last = "Your last microbatch is too short. Pass drop_last to the BatchSampler"
    too_large = batches(of_rank, m, drop_last)
    first_epoch = microbatches_of(n, m, p, r, shuffle, 0, drop_last)
    order = "Your samples are shuffled, but shuffle=False. Pass shuffle to the sampler"
    if shuffle:
        order = "Your samples aren't shuffled, but shuffle=True. Pass shuffle to the sampler"
    of_this_rank = microbatches_of(n, m, p, rank % p, shuffle, epoch, drop_last)
    yield from table({
        f"Your microbatches have up to {m} samples. Let batch_size be the samples of one rank, m "
        "/ p": too_large,
        last: batches(of_rank, m // p, not drop_last),
        "You passed drop_last to the DistributedSampler, which left samples out. Pass it to the "
        "BatchSampler": one_of(*(batches(fewer, m // p, drops) for drops in (drop_last, False))),
        "You returned the order of epoch 0. Call set_epoch(epoch)": first_epoch,
        order: microbatches_of(n, m, p, r, not shuffle, epoch, drop_last),
        "You returned a flat list. Put a BatchSampler around the sampler": of_rank,
        "You returned items. Return the sample numbers": [[10 * k for k in b] for b in right],
        "You returned the BatchSampler. Make a list of it": "<BatchSampler>",
        f"You returned the microbatches of rank {rank % p}, because rank {rank} runs the "
        "check. Use the argument r": (of_this_rank),
    })
