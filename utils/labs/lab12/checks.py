"""Checks of lab 12: federated rounds, what gradients tell, and what hides it.

Most tasks are functions of tensors, tried on every rank with fresh inputs. The check of a round is
in :mod:`utils.labs.lab12.clients`, those of attacks and of what hides an update in
:mod:`utils.labs.lab12.inversion` and :mod:`utils.labs.lab12.privacy`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from utils.checks.comparison import Calls, Mistake, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, kind_of, reading_answer, recorded, told
from utils.checks.task import Report, Step, communication, facts, task, value
from utils.cluster.questions import Ranks
from utils.labs.shared.replicas import Twin, weights_of

from .clients import facts_about, has_other_length, seeded
from .clients import run_round as run_round
from .inversion import mismatch as mismatch
from .inversion import read_image as read_image
from .privacy import masked_sum as masked_sum
from .privacy import private_mean as private_mean

#: Images, classes, clients, pieces for each; in all but the last no piece has two classes.
SHARDS = ((240, 10, 20, 2), (120, 6, 6, 1), (180, 5, 10, 3), (103, 7, 9, 2))


def _labels(seed: int, n: int, classes: int) -> Tensor:
    """Return labels of n images in any order, of all classes alike."""
    return (torch.arange(n) % classes)[torch.randperm(n, generator=seeded(seed))]


def probe_shards(user_ns: dict, *, rank: int, seed: int, cases: list) -> list:
    """Return the shards of each case; again with the same draw, and with another one."""
    function = reading_answer(user_ns, "shards_by_class")
    by_case = []
    for n, classes, count, each in cases:
        labels = _labels(seed, n, classes)
        results = []
        for draw_seed in (seed, seed, seed + 1):
            torch.manual_seed(len(results))
            draw = seeded(draw_seed)
            results.append(told(function(labels, count, each, draw)))
        used = not torch.equal(draw.get_state(), seeded(seed + 1).get_state())
        by_case.append([*results, used])
    return by_case


@task("12.1", "shards by class", points=2)
def shards_by_class(ranks: Ranks, report: Report) -> None:
    """Judge whether each image is dealt out once, few classes for each client, by the draw."""
    for answer in report.answers(ranks, probe_shards, seed=report.seed, cases=SHARDS):
        report.follow(answer.rank, _all_shards(answer.value, report.seed))


def _all_shards(results: list[list], seed: int) -> Iterator[Step]:
    """Judge each case's shards: those of a draw, of the same one again, and of another one."""
    for case, (first, again, other, used) in zip(SHARDS, results, strict=True):
        n, classes, count, each = case
        about = f"{n} images of {classes} classes, {count} clients, each = {each}"
        labels = _labels(seed, n, classes).tolist()
        yield from _shards(first, labels, case, about)
        as_sets = [[sorted(shard) for shard in shards] for shards in (first, again, other)]
        wrong = {
            "the same seed gave another result the second time: draw has to be the only source of "
            "randomness, generator=draw": as_sets[0] != as_sets[1],
            "another seed gave the same shards: the pieces are not dealt out at random": (
                case == SHARDS[0] and as_sets[0] == as_sets[2]
            ),
            "every client has a class in common with what it has with another seed, or no client "
            "has two classes: deal out all pieces at random, not some of them": (
                case == SHARDS[0] and not _is_dealt_out(first, other, labels)
            ),
            "draw itself was not used, so the next call with it deals out the same: do not make "
            "another generator": not used,
        }
        yield facts_about(about, wrong)


def _is_dealt_out(first: list, other: list, labels: list[int]) -> bool:
    """Return whether clients have pieces from anywhere, by two draws.

    By chance one in 10⁸ right answers is told that they do not.
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
        "these are labels: return the indices of the images": (
            repeats and sorted(indices) == sorted(labels)
        ),
        "an image is in two shards: a piece may be dealt out only once (no replacement)": repeats,
        f"{n - len(indices)} of {n} images have no client: also what is left over is dealt out": (
            len(indices) != n
        ),
        f"clients have {sizes[0]} to {sizes[-1]} images, expected {least} to {most}: cut the "
        "images into pieces whose sizes differ by one at most, as .tensor_split(clients * each) "
        "does, and chunk() does not": sizes[0] < least or sizes[-1] > most,
        f"a client has {kinds} classes: the images have to be sorted by class before they are cut, "
        "and the pieces dealt out whole": n % pieces == 0 and kinds > each,
    }
    yield facts_about(about, wrong)


def _are_indices(shards: Any, n: int, count: int, pieces: int, about: str) -> Iterator[Step]:
    """Judge whether there is a list for each client, and indices of images are in them."""
    are_lists = isinstance(shards, list) and all(isinstance(shard, list) for shard in shards)
    said = "return a list with one tensor of indices for each client"
    yield facts_about(about, {said: not are_lists})
    join = " (these are the pieces: join each client's)" if len(shards) == pieces else ""
    are_indices = all(isinstance(k, int) and 0 <= k < n for shard in shards for k in shard)
    wrong = {
        f"{len(shards)} shards for {count} clients{join}": len(shards) != count,
        f"a shard has entries that are no index in range({n}): return indices of images": (
            not are_indices
        ),
    }
    yield facts_about(about, wrong)


CALLS = 120
SELECT = ((0.2, 30), (0.29, 100), (0.01, 20), (1.0, 7), (0.34, 5), (0.3, 11), (0.5, 5))


def probe_select(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return choices of each case: many from one draw, and the first again from its like."""
    function = answer_named(user_ns, "select")
    choices = []
    for fraction, count in SELECT:
        draw = seeded(seed)
        torch.manual_seed(1)
        many = [function(fraction, count, draw) for _ in range(CALLS)]
        torch.manual_seed(2)
        kinds = sorted({kind_of(choice) for choice in many})
        choices.append([told(many), told(function(fraction, count, seeded(seed))), kinds])
    return choices


@task("12.2", "select clients", points=1)
def select_clients(ranks: Ranks, report: Report) -> None:
    """Judge the number of clients, that all are different, and that nobody is left out."""
    for answer in report.answers(ranks, probe_select, seed=report.seed):
        report.follow(answer.rank, _all_choices(answer.value))


def _all_choices(results: list[list]) -> Iterator[Step]:
    """Judge each case's choices: many of one draw, the first again, and the types of them all."""
    for (fraction, n), (many, again, kinds) in zip(SELECT, results, strict=True):
        call = f"select({fraction}, {n}, draw)"
        for kind in kinds:
            said = f"{call} returned {kind}: return a list of numbers, of int"
            yield facts({said: kind not in ("list of int", "list of nothing")})
        wrong = _wrong_choices(fraction, n, many, again)
        yield facts({f"{call} {text}": is_so for text, is_so in wrong.items()})


def _wrong_choices(fraction: float, n: int, many: list, again: list) -> dict[str, bool]:
    wanted = max(1, round(fraction * n))
    lengths = [len(choice) for choice in many if len(choice) != wanted] or [wanted]
    chosen = {client for choice in many for client in choice}
    return {
        f"chose {lengths[0]} clients, expected {wanted}: round the share "
        "of the n that was handed in as round() does, and take at least one": lengths != [wanted],
        "chose a client twice: choose without replacement": (
            any(len(set(choice)) < len(choice) for choice in many)
        ),
        f"chose a number outside of 0 … {n - 1}": not all(0 <= client < n for client in chosen),
        "chose the same clients in each call: use draw, and make no new generator": (
            1 < wanted < n and len({tuple(sorted(choice)) for choice in many}) == 1
        ),
        "chose others with the same seed: draw has to be the only randomness": many[0] != again,
        f"left some clients out in {CALLS} calls: all have to have the same chance": (
            wanted > 1 and len(chosen) < n
        ),
    } | _unequal_chances(wanted, n, many)


def _unequal_chances(wanted: int, n: int, many: list) -> dict[str, bool]:
    """Return what is wrong if some sets of clients are chosen more often than others."""
    pairs = {pair for choice in many for pair in itertools.combinations(sorted(choice), 2)}
    among = math.comb(n, 2)
    usual_pairs = among * (1 - (1 - math.comb(wanted, 2) / among) ** CALLS)
    # Two clients with consecutive numbers. If all sets have the same chance, each pair has it.
    neighbours = sum((client + 1) % n in choice for choice in many for client in choice)
    usual_neighbours = CALLS * wanted * (wanted - 1) / max(n - 1, 1)
    return {
        "chooses neighbours together: all sets of clients have to have the same chance": (
            wanted > 1 and neighbours > 1.6 * usual_neighbours
        ),
        f"chose only {len(pairs)} different pairs of clients in {CALLS} calls: all sets of "
        "clients have to have the same chance": len(pairs) < 0.8 * usual_pairs,
    }


#: Samples, epochs, and further arguments: none, then by name, then by place.
LOCAL = ((50, 1, None), (23, 2, (0.3, 5)), (12, 3, (0.5, 4)), (150, 5, (0.2, 16)))
#: What the arguments rate and batch are, if nobody hands them in.
USUAL = (0.1, 20)
WRONG_LOCAL = {
    "weights": "these are the weights: return the difference, after minus before",
    "not loaded": "the model was not trained from the argument weights: load them first",
    "adds up": "gradients of earlier minibatches are still in it: model.zero_grad() before each "
    "backward",
    "no shuffle": "the samples are in their own order: torch.randperm(len(labels), generator=draw)",
    "same order": "every epoch has the same order: draw a new one in each",
    "one epoch": "this is one epoch only: train for `epochs`",
    "one batch": "each epoch was one step with all samples: use minibatches of `batch`",
    "drop last": "the last, smaller minibatch is left out",
    "sum": "this is the gradient of a sum over the samples: cross_entropy has the mean",
    "no rate": "the learning rate is missing",
    "sum / batch": "divided by `batch`, but the last minibatch is smaller: cross_entropy takes the "
    "mean over the samples that are in it",
    "own start": "the model was trained from the weights that were in it: load the argument "
    "weights first",
}


def small_model(seed: int) -> nn.Module:
    """Return a model of 6 features and 3 classes in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, images and labels of a client."""
    draw = seeded(seed)
    weights = torch.randn(53, generator=draw, dtype=torch.float64)
    images = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    return weights, images, torch.randint(0, 3, (n,), generator=draw)


@functools.cache
def twin(seed: int, n: int, epochs: int, rate: float, batch: int, how: str = "") -> Tensor:
    """Return the update of a client's training; ``how`` names one of :data:`WRONG_LOCAL`."""
    weights, images, labels = samples(seed, n)
    model = small_model(seed)
    if how not in ("not loaded", "own start"):
        vector_to_parameters(weights.clone(), model.parameters())
    first = weights_of(model)
    alone = Twin(model, {"no rate": 1.0, "sum / batch": rate / batch}.get(how, rate))
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


def probe_local(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return updates of small clients; each is asked for twice with the same model."""
    function = reading_answer(user_ns, "train_locally", changes=(1,))
    updates = []
    for n, epochs, more in LOCAL:
        weights, images, labels = samples(seed, n)
        before = weights.clone()
        model = small_model(seed)
        results = []
        named = {} if more is None else {"rate": more[0], "batch": more[1]}
        for _ in range(2):
            arguments = (model, weights, images, labels, epochs, seeded(seed))
            for parameter in model.parameters():  # as after a backward of somebody else
                parameter.grad = torch.ones_like(parameter) if results else None
            result, calls = recorded(function, *arguments, **named)
            graph = isinstance(result, Tensor) and result.requires_grad
            results.append(told(result))
        changed = not torch.equal(weights, before)
        updates.append({"delta": results, "changed": changed, "graph": graph, "calls": calls})
    return updates


@task("12.3", "local training", points=2)
def train_locally(ranks: Ranks, report: Report) -> None:
    """Judge the update by the twin's, from weights that stay as they are, without a message."""
    for answer in report.answers(ranks, probe_local, seed=report.seed):
        report.follow(answer.rank, _all_updates(answer.value, report.seed))


def _all_updates(results: list[dict[str, Any]], seed: int) -> Iterator[Step]:
    another = Mistake(
        lambda _: True,
        "the same call again gave another update: what was in the model or its gradients before "
        "goes in: set both first",
    )
    form = "the difference, one flat tensor"
    for (n, epochs, more), result in zip(LOCAL, results, strict=True):
        rate, batch = more or USUAL
        about = f"{n} samples, {epochs} epochs, batch {batch}"
        expected = twin(seed, n, epochs, rate, batch).tolist()
        mistakes = _wrong_updates(seed, n, epochs, rate, batch)
        first, again = result["delta"]
        yield communication(result["calls"], _silent)
        yield value(first, expected, mistakes, what=about, form=form, tolerance=1e-8)
        wrong = {
            "the argument weights was changed: load weights.clone()": result["changed"],
            "the update still has a graph: detach it": result["graph"],
        }
        yield facts_about(about, wrong)
        yield value(again, expected, [another], what=about, form=form, tolerance=1e-8)


def _silent(calls: Calls) -> str | None:
    """Return what is wrong with a client's training that communicates."""
    return f"calls {calls[0]['op']}: local training communicates nothing" if calls else None


def _wrong_updates(seed: int, n: int, epochs: int, rate: float, batch: int) -> Iterator[Mistake]:
    right = twin(seed, n, epochs, rate, batch)
    yield Mistake(
        [0.0] * len(right),
        "only zeros: the parameters are views of the vector that was loaded, so training changed "
        "it as well: load weights.clone()",
    )
    yield Mistake((-right).tolist(), "the sign: weights afterwards minus weights before")
    for how, text in WRONG_LOCAL.items():
        yield Mistake(twin(seed, n, epochs, rate, batch, how).tolist(), text)
    usual_rate, usual_batch = USUAL
    hard_coded = {
        "rate": (usual_rate, batch),
        "batch": (rate, usual_batch),
        "rate and batch": USUAL,
    }
    for name, used in hard_coded.items():
        text = f"this is what the usual {name} of the lab would give: use the argument {name}"
        yield Mistake(twin(seed, n, epochs, *used).tolist(), text)
    text = f"expected one flat tensor with {len(right)} numbers, one for each weight"
    yield Mistake(has_other_length(len(right)), text)


#: By client: samples, and the change of the weights.
Updates = dict[int, tuple[float, Tensor]]


def _updates(seed: int, counts: dict[int, float]) -> tuple[Tensor, Updates]:
    """Return weights, and an update of each client."""
    draw = seeded(seed)
    size = 5 + len(counts)
    weights = torch.randn(size, generator=draw)
    # The update of client 1 is zero; the client counts like the others.
    deltas = {c: torch.randn(size, generator=draw) * (c != 1) for c in counts}
    return weights, {c: (counts[c], delta) for c, delta in deltas.items()}


def _counts(seed: int) -> list[dict[int, float]]:
    """Return the samples of each client in each case."""
    draw = random.Random(seed)
    many = {client: draw.randrange(3, 90) for client in draw.sample(range(40), 6)}
    return [{3: 10, 17: 30, 8: 20}, {5: 40.0}, {0: 7.0, 1: 7.0}, many, {}]


def probe_mean(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return new weights of each case, and whether the arguments are as they were."""
    function = answer_named(user_ns, "fedavg")
    averages = []
    for counts in _counts(seed):
        weights, updates = _updates(seed, counts)
        kept, others = _updates(seed, counts)
        result = told(function(weights, updates))
        untouched = updates.keys() == others.keys() and all(
            torch.equal(updates[c][1], others[c][1]) for c in others
        )
        averages.append([result, torch.equal(weights, kept), untouched])
    return averages


@task("12.4", "federated averaging", points=2)
def fedavg(ranks: Ranks, report: Report) -> None:
    """Judge the weights and the mean of the updates, each as often as it has samples."""
    for answer in report.answers(ranks, probe_mean, seed=report.seed):
        report.follow(answer.rank, _all_averages(answer.value, report.seed))
    if "ZeroDivisionError" in report.kinds:
        report.problem("with no update at all the weights stay: the sum of all n is 0 then")


def _all_averages(results: list[list], seed: int) -> Iterator[Step]:
    for counts, (new_weights, same_weights, untouched) in zip(_counts(seed), results, strict=True):
        weights, updates = _updates(seed, counts)
        about = f"updates of clients {list(counts)} with n = {list(counts.values())}"
        expected = (weights + _mean(weights, updates)).tolist()
        mistakes = _wrong_averages(weights, updates)
        yield value(new_weights, expected, mistakes, what=about, form="the new weights")
        wrong = {
            "the argument weights was changed: begin with weights.clone()": not same_weights,
            "an update was changed in place": not untouched,
        }
        yield facts_about(about, wrong)


def _mean(weights: Tensor, updates: Updates) -> Tensor:
    """Return the mean of the updates, each as often as it has samples; zeros if there are none."""
    total = sum(n for n, _ in updates.values())
    return sum((n / total * delta for n, delta in updates.values()), torch.zeros_like(weights))


def _wrong_averages(weights: Tensor, updates: Updates) -> Iterator[Mistake]:
    """Yield what mistakes make of the weights; with no update at all, none is known."""
    if not updates:
        return
    counts, deltas = zip(*updates.values(), strict=True)
    n = torch.tensor(counts, dtype=torch.float32)
    numbers = torch.tensor(list(updates), dtype=torch.float32)
    changes = torch.stack(deltas)
    total = n.sum()
    mean = n / total @ changes
    learned = n[changes.any(1)].sum()
    yield from table({
        "this is the mean of the updates alone: add it to the weights": mean,
        "the weights are unchanged": weights,
        "a client whose update is zero has to count as well": (
            weights + total / learned.clamp(1) * mean
        ),
        "all clients count alike here: weight each update by its n": weights + changes.mean(0),
        "this is the sum of the updates: weight each by n / sum of all n": weights + changes.sum(0),
        "the factors n have to be divided by their sum": weights + total * mean,
        "divided by the number of clients as well: the factors sum to 1 already": (
            weights + mean / len(n)
        ),
        "the sign: updates are added": weights - mean,
        "only the last client's update": weights + changes[-1],
        "weighted by the numbers of the clients: these are the keys of the dict, and n is the "
        "first of each pair": weights + numbers / numbers.sum().clamp(1) @ changes,
        "each update was divided by the sum of those n that came before it: sum up all n first, "
        "then add the updates": weights + n / n.cumsum(0) @ changes,
        "all entries are nan: with no update at all the weights stay": float("nan") * weights,
    })
