"""Checks of lab 12: federated rounds, what gradients reveal, and what hides an update.

Most tasks are functions of tensors, and every rank tries them with fresh inputs. The check of a
round is in :mod:`utils.labs.lab12.clients`, the checks of attacks in
:mod:`utils.labs.lab12.inversion`, and the checks of defenses in :mod:`utils.labs.lab12.privacy`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import vector_to_parameters

from utils.checks.comparison import EXACT, TOLERANCE, Calls, Mistake, table
from utils.checks.draws import seeded
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.cluster.questions import Ranks
from utils.labs.shared.replicas import ReferenceModel
from utils.labs.shared.small_models import weights_of

from .clients import facts_about, has_other_length
from .clients import run_round as run_round
from .deviation import deviating_server as deviating_server
from .inversion import mismatch as mismatch
from .inversion import read_image as read_image
from .privacy import masked_sum as masked_sum
from .privacy import private_mean as private_mean
from .probes import (
    CALLS,
    LOCAL,
    SELECT,
    Updates,
    drawn_counts,
    drawn_labels,
    drawn_updates,
    probe_local,
    probe_mean,
    probe_select,
    probe_shards,
    samples,
    small_model,
)

#: Images, classes, clients, pieces per client. Only in the last case do pieces mix two classes.
SHARDS = ((240, 10, 20, 2), (96, 12, 12, 1), (180, 5, 10, 3), (103, 7, 9, 2))


@task("12.1", "shards by class", points=2)
def shards_by_class(ranks: Ranks, report: Report) -> None:
    """Judge whether each image is in one shard, and each client gets few classes, by the draw."""
    for answer in report.answers(ranks, probe_shards, seed=report.seed, cases=SHARDS):
        report.follow(answer.rank, _all_shards(answer.value, report.seed))


def _all_shards(results: list[list], seed: int) -> Iterator[Step]:
    """Judge each case's shards: from a draw, from the same draw again, and from another one."""
    for case, (first, again, other, used, kind) in zip(SHARDS, results, strict=True):
        n, classes, count, each = case
        about = f"{n} images of {classes} classes, {count} clients, each = {each}"
        labels = drawn_labels(seed, n, classes).tolist()
        yield from _shards(first, labels, case, about)
        said = f"You returned {kind}. Return a list with one tensor of indices for each client"
        yield facts_about(about, {said: kind != "list of Tensor"})
        as_sets = [[sorted(shard) for shard in shards] for shards in (first, again, other)]
        wrong = {
            "You returned another result for the same seed. Take all randomness from draw: "
            "generator=draw": as_sets[0] != as_sets[1],
            "You returned the same shards for another seed. Distribute the pieces at random": (
                case == SHARDS[0] and as_sets[0] == as_sets[2]
            ),
            "Every client keeps a class under another seed, or no client has two classes. "
            "Distribute all pieces at random, not some of them": (
                case == SHARDS[0] and not _is_dealt_out(first, other, labels)
            ),
            "You join the same pieces under another seed. Give each client any of the pieces": (
                each > 1 and set(map(tuple, as_sets[0])) == set(map(tuple, as_sets[2]))
            ),
            "You left draw itself unused, so the next call returns the same. Pass draw, and make "
            "no other generator": not used,
        }
        yield facts_about(about, wrong)


def _is_dealt_out(first: list, other: list, labels: list[int]) -> bool:
    """Return whether clients have pieces from anywhere, by two draws.

    One right answer in 10⁸ gets False by chance.
    """
    kinds = [[{labels[k] for k in shard} for shard in shards] for shards in (first, other)]
    mixed = any(len(classes) > 1 for classes in kinds[0])
    return mixed and not all(a & b for a, b in zip(*kinds, strict=True))


def _shards(
    shards: Any, labels: list[int], case: tuple[int, int, int, int], about: str
) -> Iterator[Step]:
    """Judge whether shards have each image once, of few classes, in pieces of the right size."""
    n, _, count, each = case
    pieces = count * each
    yield from _are_indices(shards, n, count, pieces, about)
    indices = [k for shard in shards for k in shard]
    repeats = len(set(indices)) != len(indices)
    least, most = each * (n // pieces), each * -(-n // pieces)
    sizes = sorted(map(len, shards))
    kinds = max(len({labels[k] for k in shard}) for shard in shards)
    wrong = {
        "You returned labels. Return the indices of the images": (
            repeats and sorted(indices) == sorted(labels)
        ),
        "You put an image into two shards. Give each piece to one client only (no "
        "replacement)": repeats,
        f"You left {n - len(indices)} of {n} images without a client. Distribute the rest, too": (
            len(indices) != n
        ),
        f"You gave clients {sizes[0]} to {sizes[-1]} images, expected {least} to {most}. Split "
        "the images into pieces whose sizes differ by at most one, with .tensor_split(clients * "
        "each) and not with chunk()": sizes[0] < least or sizes[-1] > most,
        f"You gave a client {kinds} classes. Sort the images by class before you split them, and "
        "keep the pieces whole": n % pieces == 0 and kinds > each,
    }
    yield facts_about(about, wrong)


def _are_indices(shards: Any, n: int, count: int, pieces: int, about: str) -> Iterator[Step]:
    """Judge whether there is a list for each client, with indices of images in it."""
    are_lists = isinstance(shards, list) and all(isinstance(shard, list) for shard in shards)
    said = "Return a list with one tensor of indices for each client"
    yield facts_about(about, {said: not are_lists})
    join = " (these are the pieces: join each client's)" if len(shards) == pieces else ""
    are_indices = all(isinstance(k, int) and 0 <= k < n for shard in shards for k in shard)
    wrong = {
        f"You returned {len(shards)} shards for {count} clients{join}": len(shards) != count,
        f"You put entries into a shard that aren't in range({n}). Return indices of images": (
            not are_indices
        ),
    }
    yield facts_about(about, wrong)


@task("12.2", "select clients", points=1)
def select_clients(ranks: Ranks, report: Report) -> None:
    """Judge the number of clients, that all are different, and that nobody is left out."""
    for answer in report.answers(ranks, probe_select, seed=report.seed):
        report.follow(answer.rank, _all_choices(answer.value))


def _all_choices(results: list[list]) -> Iterator[Step]:
    """Judge each case's choices: many from one draw, the first again, and all their types."""
    for (fraction, n), (many, again, kinds) in zip(SELECT, results, strict=True):
        call = f"select({fraction}, {n}, draw)"
        for kind in kinds:
            said = f"{call}: You returned {kind}. Return a list of numbers, of int"
            yield facts({said: kind not in ("list of int", "list of nothing")})
        wrong = _wrong_choices(fraction, n, many, again)
        yield facts({f"{call}: {text}": is_so for text, is_so in wrong.items()})


def _wrong_choices(fraction: float, n: int, many: list, again: list) -> dict[str, bool]:
    wanted = max(1, round(fraction * n))
    lengths = [len(choice) for choice in many if len(choice) != wanted] or [wanted]
    chosen = {client for choice in many for client in choice}
    return {
        f"You chose {lengths[0]} clients, expected {wanted}. Round the share of clients as round() "
        "does, and take at least one": lengths != [wanted],
        "You chose a client twice. Choose without replacement": (
            any(len(set(choice)) < len(choice) for choice in many)
        ),
        f"You chose a number outside 0 … {n - 1}": not all(0 <= client < n for client in chosen),
        "You chose the same clients in each call. Use draw, and make no new generator": (
            1 < wanted < n and len({tuple(sorted(choice)) for choice in many}) == 1
        ),
        "You chose others with the same seed. Take all randomness from draw": many[0] != again,
        f"You never chose some clients in {CALLS} calls. Give each an equal chance": (
            wanted > 1 and len(chosen) < n
        ),
    } | _unequal_chances(wanted, n, many)


def _unequal_chances(wanted: int, n: int, many: list) -> dict[str, bool]:
    """Return what is wrong if some sets of clients are chosen more often than others."""
    pairs = {pair for choice in many for pair in itertools.combinations(sorted(choice), 2)}
    among = math.comb(n, 2)
    usual_pairs = among * (1 - (1 - math.comb(wanted, 2) / among) ** CALLS)
    # Count pairs of consecutive numbers. If all sets have the same chance, all pairs do, too.
    neighbours = sum((client + 1) % n in choice for choice in many for client in choice)
    usual_neighbours = CALLS * wanted * (wanted - 1) / max(n - 1, 1)
    return {
        "You choose neighbors together. Give all sets of clients an equal chance": (
            wanted > 1 and neighbours > 1.6 * usual_neighbours
        ),
        f"You chose only {len(pairs)} different pairs of clients in {CALLS} calls. Give all sets "
        "of clients an equal chance": len(pairs) < 0.8 * usual_pairs,
    }


#: The default values of the arguments rate and batch.
USUAL = (0.1, 20)
WRONG_LOCAL = {
    "weights": "You returned the weights. Return the difference, after minus before",
    "not loaded": "You didn't train from the argument weights. Load them first",
    "adds up": "You kept gradients of earlier minibatches. Call model.zero_grad() before each "
    "backward",
    "no shuffle": "You kept the samples in order. Use torch.randperm(len(labels), generator=draw)",
    "same order": "You used the same order in every epoch. Draw a new one in each",
    "one epoch": "You trained for one epoch only. Train for `epochs`",
    "one batch": "You made each epoch one step. Use minibatches of `batch`",
    "drop last": "You left out the last, smaller minibatch. Use it, too",
    "sum": "You summed over the samples. cross_entropy returns the mean",
    "no rate": "You left out the learning rate",
    "sum / batch": "You divided by `batch`, but the last minibatch is smaller. Let cross_entropy "
    "take the mean over its samples",
    "own start": "You trained from the weights that were in the model. Load the argument weights "
    "first",
}


@functools.cache
def reference(seed: int, n: int, epochs: int, rate: float, batch: int, how: str = "") -> Tensor:
    """Return the update of a client's training; ``how`` names one of :data:`WRONG_LOCAL`."""
    weights, images, labels = samples(seed, n)
    model = small_model(seed)
    if how not in ("not loaded", "own start"):
        vector_to_parameters(weights.clone(), model.parameters())
    first = weights_of(model)
    alone = ReferenceModel(model, {"no rate": 1.0, "sum / batch": rate / batch}.get(how, rate))
    reduction = "sum" if how in ("sum", "sum / batch") else "mean"
    before = 0.0  # the gradients that are still there
    for part in _minibatches(seed, n, epochs, batch, how):
        gradient = before + alone.gradient(images[part], labels[part], reduction=reduction)
        alone.move(gradient)
        before = gradient if how == "adds up" else 0.0
    after = weights_of(alone.model)
    return after if how == "weights" else after - (weights if how == "not loaded" else first)


def _minibatches(seed: int, n: int, epochs: int, batch: int, how: str) -> Iterator[Tensor]:
    """Yield the samples of each step."""
    draw = seeded(seed)
    orders = [torch.randperm(n, generator=draw) for _ in range(epochs)]
    of_mistakes = {
        "one epoch": orders[:1],
        "same order": orders[:1] * epochs,
        "no shuffle": [torch.arange(n)] * epochs,
    }
    for order in of_mistakes.get(how, orders):
        for part in order.split(n if how == "one batch" else batch):
            if how != "drop last" or len(part) == batch:
                yield part


@task("12.3", "local training", points=2)
def train_locally(ranks: Ranks, report: Report) -> None:
    """Compare updates with the reference; weights must stay as they are, without a message."""
    for answer in report.answers(ranks, probe_local, seed=report.seed):
        report.follow(answer.rank, _all_updates(answer.value, report.seed))


def _all_updates(results: list[dict[str, Any]], seed: int) -> Iterator[Step]:
    another = Mistake(
        lambda _: True,
        "You returned another update for the same call. Set the model's weights and its gradients "
        "first",
    )
    form = "the difference, one flat tensor"
    for (n, epochs, more), result in zip(LOCAL, results, strict=True):
        rate, batch = more or USUAL
        about = f"{n} samples, {epochs} epochs, batch {batch}"
        expected = reference(seed, n, epochs, rate, batch).tolist()
        mistakes = _wrong_updates(seed, n, epochs, rate, batch)
        first, again = result["delta"]
        yield communication(result["calls"], _silent)
        yield value(first, expected, mistakes, what=about, form=form, tolerance=1e-8)
        wrong = {
            "You changed the argument weights. Load weights.clone()": result["changed"],
            "You returned an update that still has a graph. Detach it": result["graph"],
        }
        yield facts_about(about, wrong)
        yield value(again, expected, [another], what=about, form=form, tolerance=1e-8)


def _silent(calls: Calls) -> str | None:
    """Return what is wrong with a client's training that communicates."""
    return f"You called {calls[0]['op']}. Local training communicates nothing" if calls else None


def _wrong_updates(seed: int, n: int, epochs: int, rate: float, batch: int) -> Iterator[Mistake]:
    right = reference(seed, n, epochs, rate, batch)
    yield Mistake(
        [0.0] * len(right),
        "You returned zeros, because the parameters are views of the vector that you loaded. Load "
        "weights.clone()",
    )
    yield Mistake((-right).tolist(), "You have the wrong sign. Return after minus before")
    for how, text in WRONG_LOCAL.items():
        yield Mistake(reference(seed, n, epochs, rate, batch, how).tolist(), text)
    usual_rate, usual_batch = USUAL
    hard_coded = {
        "rate": (usual_rate, batch),
        "batch": (rate, usual_batch),
        "rate and batch": USUAL,
    }
    for name, used in hard_coded.items():
        text = f"You used the lab's usual {name}. Use the argument {name}"
        yield Mistake(reference(seed, n, epochs, *used).tolist(), text)
    text = f"Return one flat tensor with {len(right)} numbers, one for each weight"
    yield Mistake(has_other_length(len(right)), text)


@task("12.4", "federated averaging", points=2)
def fedavg(ranks: Ranks, report: Report) -> None:
    """Compare the weights with the mean of the updates, weighted by their samples."""
    for answer in report.answers(ranks, probe_mean, seed=report.seed):
        report.follow(answer.rank, _all_averages(answer.value, report.seed))
    if "ZeroDivisionError" in report.kinds:
        report.problem("Without any update, return a copy of the weights: the sum of all n is 0")


def _all_averages(results: list[list], seed: int) -> Iterator[Step]:
    for counts, (new_weights, same_weights, untouched, new) in zip(
        drawn_counts(seed), results, strict=True
    ):
        weights, updates = drawn_updates(seed, counts)
        about = f"updates of clients {list(counts)} with n = {list(counts.values())}"
        expected = (weights + _mean(weights, updates)).tolist()
        mistakes = _wrong_averages(weights, updates)
        near = EXACT if weights.dtype == torch.float64 else TOLERANCE
        form = {"form": "the new weights", "tolerance": near}
        yield value(new_weights, expected, mistakes, what=about, **form)
        wrong = {
            "You changed the argument weights. Begin with weights.clone()": not same_weights,
            "You returned the argument weights themselves. Return new weights": not new,
            "You changed an update in place. Add into a new tensor": not untouched,
        }
        yield facts_about(about, wrong)


def _mean(weights: Tensor, updates: Updates) -> Tensor:
    """Return the mean of the updates, weighted by their samples; zeros without updates."""
    total = sum(n for n, _ in updates.values())
    return sum((n / total * delta for n, delta in updates.values()), torch.zeros_like(weights))


def _wrong_averages(weights: Tensor, updates: Updates) -> Iterator[Mistake]:
    """Yield the wrong weights of likely mistakes; nothing without updates."""
    if not updates:
        return
    counts, deltas = zip(*updates.values(), strict=True)
    n = torch.tensor(counts, dtype=weights.dtype)
    numbers = torch.tensor(list(updates), dtype=weights.dtype)
    changes = torch.stack(deltas)
    total = n.sum()
    mean = n / total @ changes
    learned = n[changes.any(1)].sum()
    yield from table({
        "You returned the mean of the updates. Add it to the weights": mean,
        "You returned the weights unchanged. Add the updates": weights,
        "You ignored a client whose update is zero. Count it, too": (
            weights + total / learned.clamp(1) * mean
        ),
        "You counted all clients alike. Weight each by its n": weights + changes.mean(0),
        "You returned the plain sum. Weight by n / sum of all n": weights + changes.sum(0),
        "You didn't divide the factors n by their sum. Divide": weights + total * mean,
        "You divided by the number of clients, too. The factors already sum to 1": (
            weights + mean / len(n)
        ),
        "You subtracted the updates. Add them": weights - mean,
        "You used only the last client's update. Use all": weights + changes[-1],
        "You weighted by the clients' numbers, which are the keys of the dict. Weight by n, the "
        "first of each pair": weights + numbers / numbers.sum().clamp(1) @ changes,
        "You divided each update by the n up to it. Add up all n first, then add the "
        "updates": weights + n / n.cumsum(0) @ changes,
        "You returned nan. Without any update, return a copy of the weights": float("nan")
        * weights,
    })
