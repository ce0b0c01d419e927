"""Checks of lab 12: federated rounds, what gradients tell, and what hides it.

Most tasks are functions of tensors, tried on every rank with fresh inputs. The round is tried with
clients of the check's own, see :mod:`utils.labs.lab12.clients`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from utils.checks.calls import Calls, Rule, only, some
from utils.checks.groups import enough
from utils.checks.mistakes import NO_NUMBER, Mistake, is_number, one_of, same, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import (
    answer_named,
    fingerprint,
    kind_of,
    number,
    reading_answer,
    recorded,
    told,
)
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply

from . import clients

WORLD = 4
#: Bits of a masked entry that are counted, and how far the counts may be from equal ones: chi²
#: with 15 degrees of freedom stays below in all but one of a million.
TOP_BITS, CHI2 = 4, 60.0
NOISE_TOLERANCE = 0.05


def seeded(seed: int) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def facts_about(about: str, wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these is so; what they are about is told first."""
    return facts({f"{about}: {text}": is_so for text, is_so in wrong.items()})


# -- 12.1 -------------------------------------------------------------------------------------

#: Images, classes, clients, pieces for each; in all but the last no piece has two classes.
SHARDS = ((240, 10, 20, 2), (120, 6, 6, 1), (180, 5, 10, 3), (103, 7, 9, 2))


def _labels(seed: int, n: int, classes: int) -> torch.Tensor:
    """Return labels of n images in any order, of all classes alike."""
    return (torch.arange(n) % classes)[torch.randperm(n, generator=seeded(seed))]


def probe_shards(user_ns: dict, *, rank: int, seed: int, cases: list) -> list:
    """The shards of each case; again with the same draw, and with another one."""
    function, by_case = reading_answer(user_ns, "shards_by_class"), []
    for n, classes, count, each in cases:
        labels, results = _labels(seed, n, classes), []
        for draw_seed in (seed, seed, seed + 1):
            torch.manual_seed(len(results))
            draw = seeded(draw_seed)
            results.append(told(function(labels, count, each, draw)))
        used = not torch.equal(draw.get_state(), seeded(seed + 1).get_state())
        by_case.append([*results, used])
    return by_case


@task("12.1", "shards by class", points=2)
def shards_by_class(ranks: Ranks, report: Report) -> None:
    """Each image once, few classes for each client, dealt out by the draw."""
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
        yield facts_about(about, {
            "the same seed gave another result the second time: draw has to be the only source of "
            "randomness, generator=draw": as_sets[0] != as_sets[1],
            "another seed gave the same shards: the pieces are not dealt out at random":
                case == SHARDS[0] and as_sets[0] == as_sets[2],
            "every client has a class in common with what it has with another seed, or no client "
            "has two classes: deal out all pieces at random, not some of them":
                case == SHARDS[0] and not _is_dealt_out(first, other, labels),
            "draw itself was not used, so the next call with it deals out the same: do not make "
            "another generator": not used,
        })  # fmt: skip


def _is_dealt_out(first: list, other: list, labels: list[int]) -> bool:
    """Return whether clients have pieces from anywhere, by two draws.

    By chance one in 10⁸ right answers is told that they do not.
    """
    kinds = [[{labels[k] for k in shard} for shard in shards] for shards in (first, other)]
    mixed = any(len(own) > 1 for own in kinds[0])
    return mixed and not all(a & b for a, b in zip(*kinds, strict=True))


def _shards(
    shards: Any, labels: list[int], case: tuple[int, int, int, int], about: str
) -> Iterator[Step]:
    """Judge whether shards have each image once, of few classes, in pieces of the right size."""
    n, _, count, each = case
    are_lists = isinstance(shards, list) and all(isinstance(shard, list) for shard in shards)
    yield facts_about(about, {
        "return a list with one tensor of indices for each client": not are_lists,
    })  # fmt: skip
    are_pieces = len(shards) == count * each
    join = " (these are the pieces: join each client's)" if are_pieces else ""
    indices = [k for shard in shards for k in shard]
    yield facts_about(about, {
        f"{len(shards)} shards for {count} clients{join}": len(shards) != count,
        f"a shard has entries that are no index in range({n}): return indices of images":
            not all(isinstance(k, int) and 0 <= k < n for k in indices),
    })  # fmt: skip
    repeats = len(set(indices)) != len(indices)
    yield facts_about(about, {
        "these are labels: return the indices of the images":
            repeats and sorted(indices) == sorted(labels),
        "an image is in two shards: a piece may be dealt out only once (no replacement)": repeats,
        f"{n - len(indices)} of {n} images have no client: also what is left over is dealt out":
            len(indices) != n,
    })  # fmt: skip
    least, most = each * (n // (count * each)), each * -(-n // (count * each))
    sizes = sorted(map(len, shards))
    kinds = max(len({labels[k] for k in shard}) for shard in shards)
    yield facts_about(about, {
        f"clients have {sizes[0]} to {sizes[-1]} images, expected {least} to {most}: cut the "
        "images into pieces whose sizes differ by one at most, as .tensor_split(clients * each) "
        "does, and chunk() does not": sizes[0] < least or sizes[-1] > most,
        f"a client has {kinds} classes: the images have to be sorted by class before they are cut, "
        "and the pieces dealt out whole": n % (count * each) == 0 and kinds > each,
    })  # fmt: skip


# -- 12.2 -------------------------------------------------------------------------------------

CALLS = 120
SELECT = ((0.2, 30), (0.29, 100), (0.01, 20), (1.0, 7), (0.34, 5), (0.3, 11), (0.5, 5))


def probe_select(user_ns: dict, *, rank: int, seed: int) -> list:
    """Choices of each case: many from one draw, and the first again from another like it."""
    function, choices = answer_named(user_ns, "select"), []
    for fraction, count in SELECT:
        draw = seeded(seed)
        torch.manual_seed(1)
        many = [function(fraction, count, draw) for _ in range(CALLS)]
        torch.manual_seed(2)
        kinds = sorted({kind_of(one) for one in many})
        choices.append([told(many), told(function(fraction, count, seeded(seed))), kinds])
    return choices


@task("12.2", "select clients", points=1)
def select_clients(ranks: Ranks, report: Report) -> None:
    """As many as asked for, all different, another choice each time, nobody left out."""
    for answer in report.answers(ranks, probe_select, seed=report.seed):
        report.follow(answer.rank, _all_choices(answer.value))


def _all_choices(results: list[list]) -> Iterator[Step]:
    """Judge each case's choices: many of one draw, the first again, and the types of them all."""
    for (fraction, n), (many, again, kinds) in zip(SELECT, results, strict=True):
        call, wanted = f"select({fraction}, {n}, draw)", max(1, round(fraction * n))
        others = [kind for kind in kinds if kind not in ("list of int", "list of nothing")]
        yield facts(
            {f"{call} returned {kind}: return a list of numbers, of int": True for kind in others}
        )
        lengths = [len(choice) for choice in many if len(choice) != wanted]
        clients_chosen = {client for choice in many for client in choice}
        pairs = _pairs(many)
        yield facts({
            f"{call} chose {(lengths or [wanted])[0]} clients, expected {wanted}: round the share "
            "of the n that was handed in as round() does, and take at least one": lengths,
            f"{call} chose a client twice: choose without replacement":
                any(len(set(choice)) < len(choice) for choice in many),
            f"{call} chose a number outside of 0 … {n - 1}":
                not all(0 <= client < n for client in clients_chosen),
            f"{call} chose the same clients in each call: use draw, and make no new generator":
                1 < wanted < n and len({tuple(sorted(choice)) for choice in many}) == 1,
            f"{call} chose others with the same seed: draw has to be the only randomness":
                many[0] != again,
            f"{call} left some clients out in {CALLS} calls: all have to have the same chance":
                wanted > 1 and len(clients_chosen) < n,
            f"{call} chooses neighbours together: all sets of clients have to have the same chance":
                wanted > 1 and _neighbours(many, n) > 1.6 * _expected_neighbours(wanted, n),
            f"{call} chose only {pairs} different pairs of clients in {CALLS} calls: all sets of "
            "clients have to have the same chance": pairs < 0.8 * _expected_pairs(wanted, n),
        })  # fmt: skip


def _pairs(many: list) -> int:
    """Return how many different pairs of clients were chosen together."""
    return len({pair for one in many for pair in itertools.combinations(sorted(one), 2)})


def _expected_pairs(wanted: int, n: int) -> float:
    """Return how many there are on average, if all sets have the same chance."""
    among = math.comb(n, 2)
    return among * (1 - (1 - math.comb(wanted, 2) / among) ** CALLS)


def _neighbours(many: list, n: int) -> int:
    """Return how often two clients with consecutive numbers were chosen together."""
    return sum((client + 1) % n in set(choice) for choice in many for client in choice)


def _expected_neighbours(wanted: int, n: int) -> float:
    """Return how often that is on average, if all sets have the same chance."""
    return CALLS * wanted * (wanted - 1) / max(n - 1, 1)


# -- 12.3 -------------------------------------------------------------------------------------

#: Samples, epochs, and further arguments: none, then by name, then by place.
LOCAL = ((50, 1, None), (23, 2, (0.3, 5)), (12, 3, (0.5, 4)), (150, 5, (0.2, 16)))


def probe_local(user_ns: dict, *, rank: int, seed: int) -> list:
    """Updates of small clients; each twice with the same model."""
    function, updates = reading_answer(user_ns, "train_locally", changes=(1,)), []
    for n, epochs, more in LOCAL:
        weights, images, labels = clients.samples(seed, n)
        before, model, results = weights.clone(), clients.small_model(seed), []
        named = {} if more is None else {"rate": more[0], "batch": more[1]}
        for _ in range(2):
            arguments = (model, weights, images, labels, epochs, seeded(seed))
            for parameter in model.parameters():  # as after a backward of somebody else
                parameter.grad = torch.ones_like(parameter) if results else None
            result, calls = recorded(function, *arguments, **named)
            graph = isinstance(result, torch.Tensor) and result.requires_grad
            results.append(told(result.detach() if graph else result))
        changed = not torch.equal(weights, before)
        updates.append({"delta": results, "changed": changed, "graph": graph, "calls": calls})
    return updates


def _silent(calls: Calls) -> str | None:
    """The rule that a client's training communicates nothing."""
    if not calls:
        return None
    return f"calls {calls[0]['op']}: local training communicates nothing"


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
#: What the arguments rate and batch are, if nobody hands them in.
USUAL = (0.1, 20)


def _wrong_updates(seed: int, n: int, epochs: int, rate: float, batch: int) -> Iterator[Mistake]:
    """Yield which updates mistakes lead to."""
    right = clients.twin(seed, n, epochs, rate, batch)
    yield Mistake(
        [0.0] * len(right),
        "only zeros: the parameters are views of the vector that was loaded, so training changed "
        "it as well: load weights.clone()",
    )
    yield Mistake((-right).tolist(), "the sign: weights afterwards minus weights before")
    for how, text in WRONG_LOCAL.items():
        update = clients.twin(seed, n, epochs, rate, batch, how)
        if not torch.equal(update, right):
            yield Mistake(update.tolist(), text)
    hard_coded = {
        "rate": (USUAL[0], batch),
        "batch": (rate, USUAL[1]),
        "rate and batch": USUAL,
    }
    for name, used in hard_coded.items():
        if used != (rate, batch):
            yield Mistake(
                clients.twin(seed, n, epochs, *used).tolist(),
                f"this is what the usual {name} of the lab would give: use the argument {name}",
            )
    yield Mistake(
        functools.partial(_other_length, len(right)),
        f"expected one flat tensor with {len(right)} numbers, one for each weight",
    )


@task("12.3", "local training", points=2)
def train_locally(ranks: Ranks, report: Report) -> None:
    """The twin's update, from weights that stay as they are, without a message."""
    for answer in report.answers(ranks, probe_local, seed=report.seed):
        report.follow(answer.rank, _all_updates(answer.value, report.seed))


def _all_updates(results: list[dict[str, Any]], seed: int) -> Iterator[Step]:
    """Judge each case's training: a client's update, and the update of the same call again."""
    another = Mistake(
        lambda _: True,
        "the same call again gave another update: what was in the model or its gradients before "
        "goes in: set both first",
    )
    form = "the difference, one flat tensor"
    for (n, epochs, more), result in zip(LOCAL, results, strict=True):
        rate, batch = more or USUAL
        about = f"{n} samples, {epochs} epochs, batch {batch}"
        expected = clients.twin(seed, n, epochs, rate, batch).tolist()
        wrong_updates = _wrong_updates(seed, n, epochs, rate, batch)
        first, again = result["delta"]
        yield communication(result["calls"], _silent)
        yield value(first, expected, wrong_updates, what=about, form=form, tolerance=1e-8)
        yield facts_about(about, {
            "the argument weights was changed: load weights.clone()": result["changed"],
            "the update still has a graph: detach it": result["graph"],
        })  # fmt: skip
        yield value(again, expected, [another], what=about, form=form, tolerance=1e-8)


# -- 12.4 -------------------------------------------------------------------------------------


#: By client: samples, and the change of the weights.
Updates = dict[int, tuple[float, torch.Tensor]]


def _updates(seed: int, counts: dict[int, float]) -> tuple[torch.Tensor, Updates]:
    """Return weights, and an update of each client."""
    draw, size = seeded(seed), 5 + len(counts)
    weights = torch.randn(size, generator=draw)
    # The update of client 1 is zero; the client counts like the others.
    return weights, {
        c: (n, torch.randn(size, generator=draw) * (c != 1)) for c, n in counts.items()
    }


def _counts(seed: int) -> list[dict[int, float]]:
    """Of each case: samples by client."""
    draw = random.Random(seed)
    many = {client: draw.randrange(3, 90) for client in draw.sample(range(40), 6)}
    return [{3: 10, 17: 30, 8: 20}, {5: 40.0}, {0: 7.0, 1: 7.0}, many, {}]


def probe_mean(user_ns: dict, *, rank: int, seed: int) -> list:
    """New weights of each case, and whether the arguments are as they were."""
    function, averages = answer_named(user_ns, "fedavg"), []
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
    """The weights and the mean of the updates, each as often as it has samples."""
    for answer in report.answers(ranks, probe_mean, seed=report.seed):
        report.follow(answer.rank, _all_averages(answer.value, report.seed))
    if "ZeroDivisionError" in report.kinds:
        report.problem("with no update at all the weights stay: the sum of all n is 0 then")


def _all_averages(results: list[list], seed: int) -> Iterator[Step]:
    """Judge each case's new weights, and whether the arguments are as they were."""
    cases = zip(_counts(seed), results, strict=True)
    for counts, (weights_got, same_weights, untouched) in cases:
        weights, updates = _updates(seed, counts)
        about = f"updates of clients {list(counts)} with n = {list(counts.values())}"
        expected = (weights + _mean(weights, updates)).tolist()
        mistakes = _wrong_averages(weights, updates)
        yield value(weights_got, expected, mistakes, what=about, form="the new weights")
        yield facts_about(about, {
            "the argument weights was changed: begin with weights.clone()": not same_weights,
            "an update was changed in place": not untouched,
        })  # fmt: skip


def _mean(weights: torch.Tensor, updates: Updates) -> torch.Tensor:
    """Return the mean of the updates, each as often as it has samples; zeros if there are none."""
    total = sum(n for n, _ in updates.values())
    return sum((n / total * delta for n, delta in updates.values()), torch.zeros_like(weights))


def _wrong_averages(weights: torch.Tensor, updates: Updates) -> Iterator[Mistake]:
    """Yield what mistakes make of the weights; with no update at all, none is known."""
    if not updates:
        return
    pairs, zero, mean = list(updates.values()), torch.zeros_like(weights), _mean(weights, updates)
    counts, deltas = [n for n, _ in pairs], [delta for _, delta in pairs]
    total, plain = sum(counts), sum(deltas, zero)
    learned = sum(n for n, delta in pairs if delta.any())
    sum_of_numbers = max(sum(updates), 1)
    by_number = [client / sum_of_numbers * delta for client, (_, delta) in updates.items()]
    sums_so_far = itertools.accumulate(counts)
    by_sum_so_far = [n / s * delta for (n, delta), s in zip(pairs, sums_so_far, strict=True)]
    yield from table({
        "this is the mean of the updates alone: add it to the weights": mean,
        "the weights are unchanged": weights,
        "a client whose update is zero has to count as well":
            weights + total / max(learned, 1) * mean,
        "all clients count alike here: weight each update by its n": weights + plain / len(pairs),
        "this is the sum of the updates: weight each by n / sum of all n": weights + plain,
        "the factors n have to be divided by their sum": weights + total * mean,
        "divided by the number of clients as well: the factors sum to 1 already":
            weights + mean / len(pairs),
        "the sign: updates are added": weights - mean,
        "only the last client's update": weights + deltas[-1],
        "weighted by the numbers of the clients: these are the keys of the dict, and n is the "
        "first of each pair": weights + sum(by_number, zero),
        "each update was divided by the sum of those n that came before it: sum up all n first, "
        "then add the updates": weights + sum(by_sum_so_far, zero),
        "all entries are nan: with no update at all the weights stay": float("nan") * weights,
    })  # fmt: skip


# -- 12.5 -------------------------------------------------------------------------------------


def probe_round(user_ns: dict, *, rank: int, first: int, seed: int) -> list | dict:
    """Three rounds: the student's server, the check's clients."""
    if rank == clients.SERVER:
        return clients.play_server(user_ns, first, seed)
    return clients.play_clients(user_ns, rank, first, seed)


@task("12.5", "a round with a deadline", points=4)
def run_round(ranks: Ranks, report: Report) -> None:
    """Everybody in time is in, nobody else is, and nothing that is open is forgotten."""
    if not enough(ranks, report, WORLD):
        return
    first, seeds = report.seed % 50, report.seeds(WORLD)
    answers = report.answers(ranks, probe_round, first=first, each=to_each(seed=seeds))
    if not answers:
        if not report.open:
            _explain_round(report)
        return
    if not _all_is_handed_out(report, answers, first, seeds):
        return
    for t, (plan, result) in enumerate(zip(clients.ROUNDS, answers[0].value, strict=True), first):
        if not report.follow(clients.SERVER, _round(t, plan, result, seeds)):
            return


def _all_is_handed_out(report: Report, answers: list[Reply], first: int, seeds: list[int]) -> bool:
    """Tell the server which weights the ranks of clients lack; return whether all came."""
    problems: list[tuple[str, str]] = []
    unreceived = any(answer.unreceived for answer in answers)
    for answer in answers[1:]:
        weights_got = answer.value["got"]
        others = [
            f"round {t}: client {client} got other weights than the argument"
            for t, client, weights in weights_got
            if weights != fingerprint(clients.weights_of(t, seeds[clients.SERVER]))
        ]
        problems += [(text, "communication") for text in (*answer.value["said"], *others)]
        pairs = [(t, client) for t, client, _ in weights_got]
        if not (problems or unreceived) and sorted(pairs) != sorted(_given_to(answer.rank, first)):
            problems.append((f"rank {answer.rank} had weights for {pairs}", "mistake"))
    for text, kind in problems:
        report.problem(text, clients.SERVER, kind)
    return not (problems or unreceived)


def _given_to(rank: int, first: int) -> list[tuple[int, int]]:
    """Return round and client of all weights that a rank gets."""
    return [
        (t, client)
        for t, plan in enumerate(clients.ROUNDS, first)
        for client in plan.chosen
        if _home(client) == rank
    ]


def _explain_round(report: Report) -> None:
    """Say what a round needs, before what came of it: advice of a deadlock may mislead here."""
    needs = (
        "what a round needs: for each chosen client isend of torch.tensor([t, client]) with "
        "tag=NOTE, isend of weights with tag=tag_of(t, client), both to home(client); and an irecv "
        "of 1 + weights.numel() numbers from there with the same tag. All of it is started before "
        "anything is waited for, and a client that is slow is not waited for at all. What came of "
        "it is below"
    )
    report.begin_with(needs)


def _home(client: int) -> int:
    """Return the rank that a client is on."""
    return 1 + client % 3


def _round(t: int, plan: clients.Round, result: dict[str, Any], seeds: list[int]) -> Iterator[Step]:
    """Judge one round of the server's: whose updates it has, when it returns, and what is late."""
    about = f"round {t}, clients {list(plan.chosen)}, {plan.seconds:g} s"
    yield communication(result["calls"], only("send", "recv"), some(range(WORLD)), _large)
    updates, seconds = result["updates"], result["seconds"]
    yield facts_about(about, {
        f"returned {result['kind']}: return (updates, late), updates a dict {{client: (n, delta)}}":
            updates is None,
    })  # fmt: skip
    in_time = plan.in_time(_home)
    returned = {int(client) for client in updates}
    yield facts_about(about, {
        f"the update of client {client} is among the updates, but it came after the deadline: the "
        f"server took {seconds:.1f} s": True
        for client in sorted(returned - set(in_time))
    })  # fmt: skip
    yield facts_about(about, {
        f"the update of client {client} came in time and is not among the updates. Is all handed "
        "out before anything is waited for?": True
        for client in sorted(set(in_time) - returned)
    })  # fmt: skip
    for client in in_time:
        n, delta = clients.update_of(t, client, seeds[_home(client)])
        expected = [n, len(delta), delta[0].item(), delta[-1].item()]
        yield from _update(updates[str(client)], expected, t, f"{about}: client {client}")
    all_came = len(in_time) == len(plan.chosen)
    yield facts_about(about, _wrong_seconds(plan.seconds, seconds, all_came))
    yield facts_about(about, {
        "the server kept a processor busy while it waited: sleep(0.002) between two looks":
            not (all_came or result["slept"]),
    })  # fmt: skip
    yield from _late(result, all_came, about)


def _wrong_seconds(deadline: float, seconds: float, all_came: bool) -> dict[str, bool]:
    """Return what is wrong with the seconds that a round took."""
    return {
        f"returned after {seconds:.2f} s, and updates were missing: wait for them until the "
        f"deadline, {deadline:g} s from the call": not all_came and seconds < deadline - 0.02,
        f"all updates were there, and it returned after {seconds:.1f} s only: return at once when "
        "nothing is missing": all_came and seconds > deadline - 0.5,
        f"returned after {seconds:.1f} s: the deadline is {deadline:g} s from the call, for all "
        "clients together": not all_came and seconds > deadline + 1,
    }


def _late(result: dict[str, Any], all_came: bool, about: str) -> Iterator[Step]:
    """Judge whether `late` has the requests that are not completed, and no others."""
    late, still_open = result["late"], result["open"]
    yield facts_about(about, {
        # One or two may have been completed since the server looked.
        f"late has {late} requests, and all updates of this round have come: only requests of this "
        "round that are not completed belong there":
            all_came and late is not None and late > still_open + 2,
        "late has to be a list of requests, as isend and irecv return them": late is None,
    })  # fmt: skip
    yield communication(result["calls"], _nothing_forgotten(late, still_open, about))


def _nothing_forgotten(late: int, still_open: int, about: str) -> Rule:
    """Return the rule that all requests that are not completed are in `late`."""

    def rule(_: Calls) -> str | None:
        if late >= still_open:
            return None
        return (
            f"{about}: {still_open} requests are not completed yet, and late has {late}: put the "
            "late receives and the open sends into it, or nobody ever completes them"
        )

    return rule


def _large(calls: Calls) -> str | None:
    """The rule that no blocking call is about weights or an update."""
    large = next((call for call in calls if call["blocking"] and call["nbytes"] > 16), None)
    if large is None:
        return None
    return (
        f"dist.{large['op']} of weights or updates waits for rank {large['peer']}, which may be "
        f"slow: use dist.i{large['op']}"
    )


def _update(update: Any, expected: list[float], t: int, about: str) -> Iterator[Step]:
    """Judge an update that the server has returned: n, its length, its first and last number."""
    if same(update, expected):
        return
    swapped = "it is (delta, n)" if update == "swapped" else f"{update}"
    yield facts_about(about, {
        f"each value is a pair (n, delta), here {swapped}": not isinstance(update, list),
    })  # fmt: skip
    n, length, first = update[:3]
    yield facts_about(about, {
        "n has to be a number: the first entry of the message": not is_number(n),
        "the update has one entry too many: the first number of the message is n":
            length == expected[1] + 1,
        f"the update has {length} entries, expected {expected[1]}": length != expected[1],
    })  # fmt: skip
    off = abs(first - expected[2])
    yield facts_about(about, {
        f"this is an update of another round than {t}: each round has tags of its own": off >= 99,
        "this is another client's update: each receive needs a tensor of its own": off > 0.5,
        f"expected n = {expected[0]:g} and an update from {expected[2]:g}, got {n:g} and "
        f"{first:g}": True,
    })  # fmt: skip


# -- 12.6 -------------------------------------------------------------------------------------

#: The second hidden layer of the second one has tanh, and negative outputs: only the gradient of
#: the last bias tells the label then, not that of the last weights.
MLPS = ((12, 7, 4), (20, 9, 5, 6), (8, 16, 3), (9, 12, 2))
#: What is added to the seed, and the layers, of each sample that is read.
VICTIMS = tuple(itertools.product(range(4), MLPS))


def _victim(seed: int, sizes: tuple) -> tuple[list, torch.Tensor, int]:
    """Gradients of one sample at an MLP, most of whose first neurons are dead; sample and label."""
    draw = seeded(seed)
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow).double(), nn.ReLU()]
    if deep := len(sizes) > 3:
        layers[3] = nn.Tanh()
    net = nn.Sequential(*layers[:-1])
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) / 4)
        for layer in net[:-1:2]:  # so that most neurons are alive
            layer.bias.fill_(3.0)
        if deep:
            net[2].bias.fill_(-3.0)
        alive = torch.randperm(sizes[1], generator=draw)[: sizes[1] // 3]
        dead = [k for k in range(sizes[1]) if k not in alive]
        net[0].weight[dead], net[0].bias[dead] = 0, -1
    image = torch.randn(sizes[0], generator=draw, dtype=torch.float64)
    image *= sizes != MLPS[0]  # a black one
    label = int(torch.randint(sizes[-1], (1,), generator=draw))
    loss = functional.cross_entropy(net(image[None]), torch.tensor([label]))
    gradients = list(torch.autograd.grad(loss, list(net.parameters())))
    # A little noise: every neuron tells another image.
    noise = torch.randn(gradients[0].shape, generator=draw, dtype=torch.float64)
    gradients[0] += 1e-3 * gradients[1].abs().max() * noise
    best = gradients[1].abs().argmax()
    return gradients, gradients[0][best] / gradients[1][best], label


def probe_read(user_ns: dict, *, rank: int, seed: int) -> list:
    """What is read from the gradients of several samples."""
    function, readings = reading_answer(user_ns, "read_image"), []
    for k, sizes in VICTIMS:
        read = function(_victim(seed + k, sizes)[0])
        pair = isinstance(read, tuple | list) and len(read) == 2
        readings.append([told(number(read[0])), told(read[1])] if pair else told(read))
    return readings


@task("12.6", "read one gradient", points=2)
def read_image(ranks: Ranks, report: Report) -> None:
    """The label and the pixels."""
    for answer in report.answers(ranks, probe_read, seed=report.seed):
        report.follow(answer.rank, _all_readings(answer.value, report.seed))


def _all_readings(results: list, seed: int) -> Iterator[Step]:
    """Judge what was read from the gradients of each sample."""
    for (k, sizes), reading in zip(VICTIMS, results, strict=True):
        gradients, image, label = _victim(seed + k, sizes)
        about = f"an MLP {'-'.join(map(str, sizes))}"
        is_pair = isinstance(reading, list) and len(reading) == 2
        yield facts_about(about, {"return a pair (label, image)": not is_pair})
        yield value(reading[0], label, _wrong_labels(gradients), what=about)
        mistakes = _wrong_images(gradients, image)
        yield value(reading[1], image.tolist(), mistakes, what=about, form="the image")


def _wrong_labels(gradients: list[torch.Tensor]) -> Iterator[Mistake]:
    """Yield which labels mistakes read from the gradients."""
    last = gradients[-1]
    yield from table({
        "label: this is told by the gradient of the last weights, whose sign depends on the "
        "outputs of the layer before, negative ones with tanh. Take the gradient of the last bias, "
        "gradients[-1]": gradients[-2].sum(1).argmin(),
        "label: argmin, not argmax: the entry of the true class is p - 1, the only negative one":
            last.argmax(),
        "label: the last layer's gradients are at the end of the list": gradients[1].argmin(),
        "label: the entry of largest size may be another class's": last.abs().argmax(),
    })  # fmt: skip
    yield NO_NUMBER


def _wrong_images(gradients: list[torch.Tensor], image: torch.Tensor) -> Iterator[Mistake]:
    """Yield which images mistakes read from the gradients."""
    weight, bias = gradients[:2]
    best = bias.abs().argmax()
    yield from table({
        "image: upside down: weight gradient divided by bias gradient": bias[best] / weight[best],
        "image: this is the gradient of a row of weights: divide it by the neuron's bias gradient":
            weight[best],
        "image: the sign": -image,
        "image: divided by all the bias gradients together": weight[best] / bias.sum(),
        "image: its values were cut to 0 … 1. The pixels are normalized, so negative ones are "
        "right: leave them as they are": image.clamp(0, 1),
    })  # fmt: skip
    neurons = [row / slope for row, slope in zip(weight, bias, strict=True) if slope]
    neurons.append(torch.stack(neurons).mean(0))
    yield Mistake(
        one_of(*(neuron.tolist() for neuron in neurons)),
        "image: this is what another neuron tells, or several: take the one whose bias gradient "
        "has the largest size",
    )
    yield Mistake(
        _has_nan,
        "image: divided by 0: a neuron behind a ReLU may have no gradient at all. Take that with "
        "the largest bias gradient",
    )
    yield Mistake(
        functools.partial(_other_length, len(image)),
        f"image: expected {len(image)} pixels, one row of the weights",
    )


def _other_length(n: int, got: Any) -> bool:
    """Return whether this is anything but a list of n entries."""
    return not isinstance(got, list) or len(got) != n


def _has_nan(got: Any) -> bool:
    """Return whether this is a list with a number that is not finite."""
    entries = got if isinstance(got, list) else []
    return any(isinstance(entry, float) and not math.isfinite(entry) for entry in entries)


# -- 12.7 -------------------------------------------------------------------------------------


def _attack(seed: int, wide: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor, list]:
    """A small network, a guess, a label, and gradients of another image, wide × wide.

    The larger network gets a minibatch of three images.
    """
    draw, layers = seeded(seed), [nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.Flatten()]
    layers.append(nn.Linear(2 * (wide - 2) ** 2, 4))
    n = 1 if wide == 5 else 3
    if n > 1:
        layers += [nn.Sigmoid(), nn.Linear(4, 4), nn.Sigmoid(), nn.Linear(4, 4)]
    net = nn.Sequential(*layers).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    image, guess = torch.randn(2, n, 1, wide, wide, generator=draw, dtype=torch.float64)
    label = torch.randint(4, (n,), generator=draw)
    return net, guess, label, _gradient(net, image, label)


def _gradient(net: nn.Module, x: torch.Tensor, label: torch.Tensor, graph: bool = False) -> list:
    """Return the gradients of all parameters; graph: they can be differentiated again."""
    loss = functional.cross_entropy(net(x), label)
    return list(torch.autograd.grad(loss, list(net.parameters()), create_graph=graph))


def probe_mismatch(user_ns: dict, *, rank: int, seed: int, wide: int) -> dict:
    """The distance, its derivative by the guess, and what is left in the parameters."""
    net, guess, label, seen = _attack(seed, wide)
    guess.requires_grad_()
    function = reading_answer(user_ns, "mismatch")
    function(net, guess, label, [torch.zeros_like(one) for one in seen])  # of another victim
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    value = function(net, guess, label, seen)
    left = any(p.grad is not None and not bool((p.grad == 1).all()) for p in net.parameters())
    modes = all(module.training for module in net.modules())
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return {"value": told(value), "slope": None, "left": left, "tensor": False, "modes": modes}
    slope = None
    if value.requires_grad:
        (slope,) = torch.autograd.grad(value.sum(), guess, allow_unused=True)
    derivative = None if slope is None else told(slope.flatten())
    return {
        "value": value.item(),
        "slope": derivative or None,
        "left": left,
        "tensor": True,
        "modes": modes,
    }


@task("12.7", "gradient inversion", points=2)
def mismatch(ranks: Ranks, report: Report) -> None:
    """The sum of squares, and a derivative that leads to the image."""
    # Another image, and a network of more layers.
    cases = [{"seed": report.seed, "wide": wide} for wide in (5, 6)]
    report.judge_cases(ranks, probe_mismatch, cases, _mismatch)
    # The words of PyTorch's errors, of tensors of two types: several classes of errors have them.
    if any("should be the same" in text or "same dtype" in text for text, *_ in report.found):
        report.problem(
            "the check hands in net, guess and seen in float64: use these arguments, not what "
            "has the same name in the lab, and keep their type"
        )


def _mismatch(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Judge a distance and its derivative, and whether the network is as it was."""
    result = answer.value
    distance, slope, mistakes = _distance(**case)
    form = "the sum, a tensor with one number"
    yield value(result["value"], distance, mistakes, form=form)
    yield facts({
        "return a tensor, not a number: item() cuts the graph off": not result["tensor"],
        "something was added to .grad of the parameters: use torch.autograd.grad, which "
        "returns gradients, and not backward": result["left"],
        "the net was in training mode before, and is not now: leave its mode as it is":
            not result["modes"],
        "the result can't be differentiated with respect to guess: create_graph=True, and no "
        "detach": result["slope"] is None,
    })  # fmt: skip
    another = Mistake(
        lambda _: True,
        "the derivative with respect to guess is another one: is a part of it detached?",
    )
    yield value(result["slope"], slope, [another], tolerance=1e-8)


@functools.lru_cache(maxsize=2)
def _distance(seed: int, wide: int) -> tuple[float, list[float], list[Mistake]]:
    """Return the sum of squares, its derivative by the guess, and what mistakes make of the sum."""
    net, guess, label, seen = _attack(seed, wide)
    guess.requires_grad_()
    gradients = _gradient(net, guess, label, graph=True)
    gaps = [a - b for a, b in zip(gradients, seen, strict=True)]
    parts = [gap.square().sum() for gap in gaps]
    (slope,) = torch.autograd.grad(sum(parts), guess)
    distance = sum(parts).item()
    mistakes = table({
        "this is the mean over each tensor: take the sum over all its entries":
            sum(gap.square().mean() for gap in gaps).item(),
        "this is the mean over all entries: take the sum":
            distance / sum(gap.numel() for gap in gaps),
        "these are absolute values: take squares": sum(gap.abs().sum() for gap in gaps).item(),
        "this is the length: without the square root": math.sqrt(distance),
        "these are the lengths of the tensors' differences: take squares, no root":
            sum(gap.norm() for gap in gaps).item(),
        "only the first parameter was compared: sum over all of them": parts[0].item(),
        "only the last parameter was compared: sum over all of them": parts[-1].item(),
        "the gradient of the guess is not compared with anything":
            sum(gradient.square().sum() for gradient in gradients).item(),
    })  # fmt: skip
    return distance, slope.flatten().tolist(), mistakes


# -- 12.8 -------------------------------------------------------------------------------------

MANY = 40_000
#: Clients, bound, noise multiplier: all wrong formulas differ with these.
NOISE = (5, 0.5, 3.0)
#: The bound of a mean without noise.
QUIET = 0.75


def _deltas(seed: int) -> list[torch.Tensor]:
    """Updates longer and shorter than 1; one is zero."""
    draw = seeded(seed)
    lengths = (0.5, 40.0, 0.0, 1.5)
    drawn = [torch.randn(6, generator=draw, dtype=torch.float64) for _ in lengths]
    return [length * one / one.norm() for length, one in zip(lengths, drawn, strict=True)]


def probe_private(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Clipped updates, a mean without noise, and noise on nothing."""
    clip, mean = (reading_answer(user_ns, name) for name in ("clipped", "private_mean"))
    deltas = _deltas(seed)
    clips = [told(clip(delta, 1.0)) for delta in deltas]
    quiet = told(mean(_deltas(seed), QUIET, 0.0, seeded(seed)))
    few = mean([torch.zeros(7)], 1.0, 1.0, seeded(seed))
    m, bound, z = NOISE
    noises = []
    for draw_seed in (seed, seed, seed + 1):
        torch.manual_seed(len(noises))
        noises.append(mean([torch.zeros(MANY) for _ in range(m)], bound, z, seeded(draw_seed)))
    draw = seeded(seed)
    alone, following = (mean([torch.zeros(MANY)], bound, z, draw) for _ in range(2))
    first = noises[0].double()
    spread = first.std().item()
    return {
        "clips": clips,
        "quiet": quiet,
        "few": len(few),
        "noise": {
            "std": spread,
            "mean": first.mean().item(),
            "size": len(first),
            "alike": _likeness(first),
            "different": len(first.unique()),
            "largest": first.abs().max().item(),
            "fourth": ((first - first.mean()) / max(spread, 1e-30)).pow(4).mean().item(),
        },
        "again": torch.equal(noises[0], noises[1]),
        "other": torch.equal(noises[0], noises[2]),
        "next": torch.equal(alone, following),
        "one draw": torch.allclose(m * noises[0], alone, rtol=1e-4),
    }


def _likeness(noise: torch.Tensor) -> float:
    """Return the largest correlation of one half of the noise with the other, in some orders."""
    half = len(noise) // 2
    first, second = noise[:half], noise[half : 2 * half]
    pairs = ((first, second), (first, second.flip(0)), (noise[: 2 * half : 2], noise[1::2][:half]))
    return max(abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) for pair in pairs)


@task("12.8", "clip and add noise", points=3)
def private_mean(ranks: Ranks, report: Report) -> None:
    """Lengths of the bound at most; the mean of them; noise of the right scale, once."""
    for answer in report.answers(ranks, probe_private, seed=report.seed):
        report.follow(answer.rank, _private(answer.value, _deltas(report.seed)))


def _private(result: dict[str, Any], deltas: list[torch.Tensor]) -> Iterator[Step]:
    """Judge clipped updates, their mean without noise, and the noise."""
    clips = [_shortened(delta, 1.0) for delta in deltas]
    for got, delta, clip in zip(result["clips"], deltas, clips, strict=True):
        about = f"clipped, length {delta.norm().item():.2g}, bound 1"
        form = "the clipped update"
        yield value(got, clip.tolist(), _wrong_clips(delta), what=about, form=form)
    total, m = sum(_shortened(delta, QUIET) for delta in deltas), len(deltas)
    plain = sum(deltas) / m
    mistakes = table({
        "the updates are not clipped": plain,
        "this is clipped after averaging: clip each update first": _shortened(plain, QUIET),
        "this is the sum: divide by the number of updates": total,
        "the bound is the argument bound, not 1": sum(clips) / m,
    })  # fmt: skip
    about = f"private_mean with z = 0, bound {QUIET}"
    yield value(result["quiet"], (total / m).tolist(), mistakes, what=about, form="the mean")
    yield from _noise(result)


def _shortened(delta: torch.Tensor, bound: float) -> torch.Tensor:
    """Return an update whose length is the bound at most."""
    return delta * min(1.0, bound / max(delta.norm().item(), 1e-12))


def _wrong_clips(delta: torch.Tensor) -> Iterator[Mistake]:
    """Yield what mistakes make of an update that is clipped to length 1."""
    length = max(delta.norm().item(), 1e-30)
    yield from table({
        "it is longer than the bound and unchanged": delta,
        "each entry was cut for itself: scale the whole update by one factor, so that it keeps "
        "its direction": delta.clamp(-1, 1),
        "scaled up to the bound: shorter ones stay as they are": delta / length,
        "divided by the square of its length": delta / length**2,
        "scaled by the largest entry: its length is the root of the sum of all squares, "
        "delta.norm()": delta * min(1.0, 1 / max(delta.abs().max().item(), 1e-30)),
    })  # fmt: skip
    yield Mistake(_has_nan, "an update of length 0 is divided by 0: it stays as it is")


def _noise(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the scale of the noise, its distribution, and what it follows from."""
    m, bound, z = NOISE
    noise, expected = result["noise"], z * bound / m
    about = f"{m} updates, S = {bound:g}, z = {z:g}"
    yield facts({
        f"an update of 7 weights gave a mean of {result['few']}": result["few"] != 7,
        f"{about}: expected {MANY} entries, got {noise['size']}": noise["size"] != MANY,
    })  # fmt: skip
    yield facts_about(about, {
        f"the noise has a standard deviation of {noise['std']:.3g}, expected {expected:.3g}"
        f"{_why_so_much(noise)}":
            not abs(noise["std"] - expected) <= NOISE_TOLERANCE * expected,  # so nan is wrong
        f"the noise has a mean of {noise['mean']:.3g}, expected 0":
            not abs(noise["mean"]) <= expected / 20,
        "the noise is not Gaussian: torch.randn": not abs(noise["fourth"] - 3) <= 0.4,
        "large numbers are missing in the noise: torch.randn as it is":
            not noise["largest"] >= 3.2 * expected,  # 55 of 40,000 numbers are beyond that
        f"the noise has {noise['different']} different numbers in {MANY} entries: draw one for "
        "each weight": noise["different"] < 0.9 * MANY,
        "numbers of the noise follow from each other: draw each anew":
            not noise["alike"] <= 0.05,  # 20,000 pairs of independent numbers stay below 0.03
    })  # fmt: skip
    yield facts({
        "the same seed gave other noise: draw is the generator, generator=draw":
            not result["again"],
        "another seed gave the same noise: use draw as it comes": result["other"],
        "the next call with the same draw gave the same noise: make no generator of your own":
            result["next"],
        f"{about}: more numbers were drawn than there are weights: one draw for the mean, whatever "
        "the number of updates": not result["one draw"],
    })  # fmt: skip


def _why_so_much(noise: dict[str, float]) -> str:
    """Return, after a colon, which mistake leads to this noise; empty if none is known."""
    m, bound, z = NOISE
    expected = z * bound / m
    if noise["std"] < 1e-6 and abs(noise["mean"]) > 1e-6:
        return ": every weight has got the same noise: draw a number for each weight"
    deviations = {
        "there is no noise": 0.0,
        "that is the noise of the sum, z S: divide by the number of updates": z * bound,
        "that is what remains if each of the updates gets noise of z S: add it once, to the mean, "
        "with z S / m": z * bound / math.sqrt(m),
        "S is missing": z / m,
        "z is missing": bound / m,
        "that is the variance: randn takes the standard deviation as a factor": expected**2,
        "that is the square root: z S / m is the standard deviation already": math.sqrt(expected),
        "z S / m² : divided twice": expected / m,
        "the noise was clipped with the update: add it afterwards": bound / math.sqrt(MANY),
    }
    for text, std in deviations.items():
        if abs(noise["std"] - std) <= NOISE_TOLERANCE * std + 1e-9:
            return f": {text}"
    return ""


# -- 12.9 -------------------------------------------------------------------------------------

LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]


def _plain(seed: int) -> list[torch.Tensor]:
    """Return the updates of all clients that take part."""
    draw = seeded(seed)
    return [0.02 * torch.randn(LENGTH, generator=draw) for _ in TAKING_PART]


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Masked updates of four clients, what their sum is, and how they are spread."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me, scale, pair_mask = TAKING_PART[0], user_ns["SCALE"], user_ns["pair_mask"]
    t, updates = seed % 1000, _plain(seed)
    by_client = list(zip(TAKING_PART, updates, strict=True))
    hidden = [mask(update.clone(), client, list(TAKING_PART), t) for client, update in by_client]
    kinds = [_kind(message) for message in hidden]
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    bare = [(update * scale).round().to(torch.int32) for update in updates]
    few = mask(updates[0][:50].clone(), me, list(TAKING_PART), t)
    alone = mask(updates[0].clone(), me, [me], t)
    again = mask(updates[0].clone(), me, list(TAKING_PART), t + 1)
    total = hidden[0] + hidden[1] + hidden[2] + hidden[3]
    result = back(total.clone())
    gap = (result - sum(updates)).abs() if isinstance(result, torch.Tensor) else None
    expected = [
        _masked(*of_client, t, pair_mask) for of_client in zip(TAKING_PART, bare, strict=True)
    ]
    return {
        "kinds": kinds,
        "back": told(back(torch.tensor([scale, -3 * scale // 2, 0], dtype=torch.int32))),
        "float": str(result.dtype) if gap is not None else None,
        "worst": gap.max().item() if gap is not None else None,
        "chi2": [_chi2(message) for message in hidden],
        "pairs": _chi2_of_pairs(hidden),
        "bare": [k for k, update in enumerate(bare) if torch.equal(hidden[k], update)],
        "alone": (alone - bare[0]).abs().max().item() if alone.dtype == torch.int32 else None,
        "few": list(few.shape),
        "renewed": not torch.equal(again, hidden[0]),
        "as told": [torch.equal(*pair) for pair in zip(hidden, expected, strict=True)],
    }


def _kind(message: Any) -> str:
    """Return the dtype of a tensor, or the type of anything else."""
    if isinstance(message, torch.Tensor):
        return str(message.dtype).removeprefix("torch.")
    return type(message).__name__


def _chi2_of_pairs(messages: list[torch.Tensor]) -> list[float]:
    """Return how far the differences and the sums of any two messages are from uniform."""
    return [
        _chi2(both)
        for first, second in itertools.combinations(messages, 2)
        for both in (first - second, first + second)
    ]


def _masked(me: int, update: torch.Tensor, t: int, pair_mask: Callable) -> torch.Tensor:
    """An update with the masks of all pairs that this client is in."""
    for other in TAKING_PART:
        if other != me:
            mask = pair_mask(min(me, other), max(me, other), t, update.numel())
            update = update + mask if me < other else update - mask
    return update


def _chi2(hidden: torch.Tensor) -> float:
    """How far the highest bits are from equally frequent."""
    bins = 2**TOP_BITS
    top = (hidden.to(torch.int64) + 2**31) >> (32 - TOP_BITS)
    counts = torch.bincount(top, minlength=bins).double()
    expected = hidden.numel() / bins
    return ((counts - expected).square() / expected).sum().item()


@task("12.9", "secure aggregation", points=3)
def masked_sum(ranks: Ranks, report: Report) -> None:
    """A single message is uniform, and the sum is that of the updates."""
    for answer in report.answers(ranks, probe_masked, seed=report.seed):
        report.follow(answer.rank, _masks(answer.value))


def _masks(result: dict[str, Any]) -> Iterator[Step]:
    """Judge the messages of all clients, and what their sum is."""
    yield from _int32(result["kinds"])
    yield from _unmasked(result["back"])
    if not len(result["kinds"]) == len(result["chi2"]) == len(TAKING_PART):
        raise ValueError(f"{len(result['chi2'])} masked updates of {len(TAKING_PART)} clients")
    yield facts({
        f"the message of client {TAKING_PART[k]} is its update without any mask: one for each "
        "other": True
        for k in result["bare"]
    })  # fmt: skip
    alone = result["alone"]
    yield facts({
        f"the message of an update of 50 numbers has the shape {result['few']}":
            result["few"] != [50],
        "a client that takes part alone has no partner, and so no mask: leave `me` out of the "
        "loop. `me` and `clients` are numbers of clients, not places in a list":
            alone is None or alone > 1,
    })  # fmt: skip
    yield from _sum(result["worst"])
    yield facts({
        "two messages together are not uniform: they share a mask. Each pair of clients has a "
        "mask of its own, pair_mask(i, j, t, size)":
            max(result["pairs"], default=math.inf) > CHI2,
        "a masked update is not uniform: some values are more frequent than others, and tell "
        "something. Add the masks as they are, all 32 bits of them": max(result["chi2"]) > CHI2,
        f"unmasked returned {result['float']}, expected a float32 tensor, as the updates are":
            result["float"] != "torch.float32",
        "the masks are those of another round as well: pass t to pair_mask": not result["renewed"],
        "a client does not have a mask with each of the others, so a few of them could find "
        "out its update together: it adds pair_mask(i, j, t, size) for each other client with "
        "a larger number, and subtracts it for each with a smaller one":
            not all(result["as told"]) or len(result["as told"]) != len(TAKING_PART),
    })  # fmt: skip


def _int32(kinds: list[str]) -> Iterator[Step]:
    """Judge the types of the masked updates."""
    yield facts({
        f"masked returned {kind}, expected an int32 tensor: int32 wraps around modulo 2**32, as "
        "the masks do; longer numbers and floats do not": True
        for kind in kinds
        if kind != "int32"
    })  # fmt: skip


def _unmasked(numbers: Any) -> Iterator[Step]:
    """Judge what is made of the numbers of a sum; they are not rounded to anything."""
    if same(numbers, [1.0, -1.5, 0.0]):
        return
    mistakes = table({
        "unmasked did not divide by SCALE": [2.0**20, -1.5 * 2**20, 0.0],
        "unmasked multiplied by SCALE: divide": [2.0**40, -1.5 * 2**40, 0.0],
        "unmasked cut off what is behind the point: use float, and /": [1.0, -2.0, 0.0],
    })  # fmt: skip
    known = next((mistake.said for mistake in mistakes if mistake.fits(numbers)), "")
    yield facts(
        {f"unmasked of [SCALE, -1.5 SCALE, 0]: {known or numbers}, expected [1, -1.5, 0]": True}
    )


def _sum(worst: Any) -> Iterator[Step]:
    """Judge how far the sum of the messages is from that of the updates; `None`: no sum came."""
    quantum = 2.0**-20
    half = len(TAKING_PART) * quantum / 2
    yield facts({
        f"the sum is off by {worst or 0:.3g}: the masks do not vanish in it. Of each pair the one "
        "with the smaller number adds the mask, the other subtracts it; `me` has no mask with "
        "itself; and masks are whole numbers, as floats lose the low digits":
            worst is None or not worst <= 1000 * half,  # so nan is wrong
    })  # fmt: skip
    yield facts({
        f"the sum is off by {worst / quantum:.1f} / SCALE, and with rounding by at most "
        f"{half / quantum:g}: .to(torch.int32) cuts digits off, round() first":
            worst > 1.02 * half,
    })  # fmt: skip
