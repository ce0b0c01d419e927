"""Checks of lab 12: federated rounds, what gradients tell, and what hides it.

Most tasks are functions of tensors, tried on every rank with fresh inputs. The round is tried with
clients of the check's own, see :mod:`utils.labs.lab12.clients`.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from utils.checks.calls import Calls, only, some
from utils.checks.groups import enough
from utils.checks.mistakes import NO_NUMBER, Mistake, is_number, same, table
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
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks

from . import clients

WORLD = 4
#: Bits of a masked entry that are counted, and how far the counts may be from equal ones: chi²
#: with 15 degrees of freedom stays below in all but one of a million.
TOP_BITS, CHI2 = 4, 60.0
NOISE_TOLERANCE = 0.05


def seeded(seed: int) -> torch.Generator:
    """A generator."""
    return torch.Generator().manual_seed(seed)


# -- 12.1 -------------------------------------------------------------------------------------

#: Images, classes, clients, pieces for each; in all but the last no piece has two classes.
SHARDS = ((240, 10, 20, 2), (120, 6, 6, 1), (180, 5, 10, 3), (103, 7, 9, 2))


def _labels(seed: int, n: int, classes: int) -> torch.Tensor:
    return (torch.arange(n) % classes)[torch.randperm(n, generator=seeded(seed))]


def probe_shards(user_ns: dict, *, rank: int, seed: int, cases: list) -> list:
    """The shards of each case; again with the same draw, and with another one."""
    function, found = reading_answer(user_ns, "shards_by_class"), []
    for n, classes, count, each in cases:
        labels, results = _labels(seed, n, classes), []
        for own in (seed, seed, seed + 1):
            torch.manual_seed(len(results))
            draw = seeded(own)
            results.append(told(function(labels, count, each, draw)))
        used = not torch.equal(draw.get_state(), seeded(seed + 1).get_state())
        found.append([*results, used])
    return found


@task("12.1", "shards by class", points=2)
def shards_by_class(ranks: Ranks, report: Report) -> None:
    """Each image once, few classes for each client, dealt out by the draw."""
    asked = {"seed": report.seed, "cases": SHARDS}
    for answer in report.answers(ranks, probe_shards, **asked):
        for case, (first, again, other, used) in zip(SHARDS, answer.value, strict=True):
            labels = _labels(report.seed, *case[:2]).tolist()
            what = f"{case[0]} images of {case[1]} classes, {case[2]} clients, each = {case[3]}"
            if said := _wrong_shards(first, labels, case):
                report.problem(f"{what}: {said}", answer.rank)
                break
            as_sets = [[sorted(shard) for shard in one] for one in (first, again, other)]
            rules = {
                f"{what}: the same seed gave another result the second time: draw has to be the "
                "only source of randomness, generator=draw": as_sets[0] != as_sets[1],
                f"{what}: another seed gave the same shards: the pieces are not dealt out at "
                "random": case == SHARDS[0] and as_sets[0] == as_sets[2],
                f"{what}: every client has a class in common with what it has with another seed, "
                "or no client has two classes: deal out all pieces at random, not some of them":
                    case == SHARDS[0] and not _is_dealt_out(first, other, labels),
                f"{what}: draw itself was not used, so the next call with it deals out the same: "
                "do not make another generator": not used,
            }  # fmt: skip
            if not report.facts(answer.rank, rules):
                break


def _is_dealt_out(first: list, other: list, labels: list) -> bool:
    """Whether clients have pieces from anywhere, by two draws. By chance one in 10⁸ is told so."""
    kinds = [[{labels[k] for k in shard} for shard in shards] for shards in (first, other)]
    mixed = any(len(own) > 1 for own in kinds[0])
    return mixed and not all(a & b for a, b in zip(*kinds, strict=True))


def _wrong_shards(shards, labels: list, case) -> str | None:
    n, _, count, each = case
    if not isinstance(shards, list) or not all(isinstance(one, list) for one in shards):
        return "return a list with one tensor of indices for each client"
    if len(shards) != count:
        pieces = (
            " (these are the pieces: join each client's)" if len(shards) == count * each else ""
        )
        return f"{len(shards)} shards for {count} clients{pieces}"
    indices = [k for shard in shards for k in shard]
    if not all(isinstance(k, int) and 0 <= k < n for k in indices):
        return f"a shard has entries that are no index in range({n}): return indices of images"
    if len(set(indices)) != len(indices):
        if sorted(indices) == sorted(labels):
            return "these are labels: return the indices of the images"
        return "an image is in two shards: a piece may be dealt out only once (no replacement)"
    if len(indices) != n:
        return (
            f"{n - len(indices)} of {n} images have no client: also what is left over is dealt out"
        )
    least, most = each * (n // (count * each)), each * -(-n // (count * each))
    sizes = sorted(map(len, shards))
    if sizes[0] < least or sizes[-1] > most:
        return (
            f"clients have {sizes[0]} to {sizes[-1]} images, expected {least} to {most}: cut the "
            "images into pieces whose sizes differ by one at most, as .tensor_split(clients * each)"
            " does, and chunk() does not"
        )
    kinds = max(len({labels[k] for k in shard}) for shard in shards)
    if n % (count * each) == 0 and kinds > each:
        return (
            f"a client has {kinds} classes: the images have to be sorted by class before they are "
            "cut, and the pieces dealt out whole"
        )
    return None


# -- 12.2 -------------------------------------------------------------------------------------

CALLS = 120
SELECT = ((0.2, 30), (0.29, 100), (0.01, 20), (1.0, 7), (0.34, 5), (0.3, 11), (0.5, 5))


def probe_select(user_ns: dict, *, rank: int, seed: int) -> list:
    """Choices of each case: many from one draw, and the first again from another like it."""
    function, found = answer_named(user_ns, "select"), []
    for fraction, count in SELECT:
        draw = seeded(seed)
        torch.manual_seed(1)
        many = [function(fraction, count, draw) for _ in range(CALLS)]
        torch.manual_seed(2)
        kinds = sorted({kind_of(one) for one in many})
        found.append([told(many), told(function(fraction, count, seeded(seed))), kinds])
    return found


@task("12.2", "select clients", points=1)
def select_clients(ranks: Ranks, report: Report) -> None:
    """As many as asked for, all different, another choice each time, nobody left out."""
    for answer in report.answers(ranks, probe_select, seed=report.seed):
        for (fraction, n), (many, again, kinds) in zip(SELECT, answer.value, strict=True):
            wanted, first = max(1, round(fraction * n)), many[0]
            what = f"select({fraction}, {n}, draw)"
            if wrong := [kind for kind in kinds if kind not in ("list of int", "list of nothing")]:
                said = f"returned {wrong[0]}: return a list of numbers, of int"
            elif others := [len(one) for one in many if len(one) != wanted]:
                said = (
                    f"chose {others[0]} clients, expected {wanted}: round the share of the n that "
                    "was handed in as round() does, and take at least one"
                )
            elif any(len(set(one)) < len(one) for one in many):
                said = "chose a client twice: choose without replacement"
            elif not all(0 <= client < n for one in many for client in one):
                said = f"chose a number outside of 0 … {n - 1}"
            elif 1 < wanted < n and len({tuple(sorted(one)) for one in many}) == 1:
                said = "chose the same clients in each call: use draw, and make no new generator"
            elif first != again:
                said = "chose others with the same seed: draw has to be the only randomness"
            elif wanted > 1 and len({client for one in many for client in one}) < n:
                said = f"left some clients out in {CALLS} calls: all have to have the same chance"
            elif _neighbours(many, n) > 1.6 * CALLS * wanted * (wanted - 1) / max(n - 1, 1) > 0:
                said = (
                    "chooses neighbours together: all sets of clients have to have the same chance"
                )
            elif _pairs(many) < 0.8 * _expected_pairs(wanted, n):
                said = (
                    f"chose only {_pairs(many)} different pairs of clients in {CALLS} calls: all "
                    "sets of clients have to have the same chance"
                )
            else:
                continue
            report.problem(f"{what} {said}", answer.rank)
            break


def _pairs(many: list) -> int:
    """Return how many different pairs of clients were chosen together."""
    return len({pair for one in many for pair in itertools.combinations(sorted(one), 2)})


def _expected_pairs(wanted: int, n: int) -> float:
    """Return how many there are on average, if all sets have the same chance."""
    among = math.comb(n, 2)
    return among * (1 - (1 - math.comb(wanted, 2) / among) ** CALLS)


def _neighbours(many: list, n: int) -> int:
    """Return how often two clients with consecutive numbers were chosen together."""
    return sum((client + 1) % n in set(one) for one in many for client in one)


# -- 12.3 -------------------------------------------------------------------------------------

#: Samples, epochs, and further arguments: none, then by name, then by place.
LOCAL = ((50, 1, None), (23, 2, (0.3, 5)), (12, 3, (0.5, 4)), (150, 5, (0.2, 16)))


def probe_local(user_ns: dict, *, rank: int, seed: int) -> list:
    """Updates of small clients; each twice with the same model."""
    function, found = reading_answer(user_ns, "train_locally", changes=(1,)), []
    for n, epochs, more in LOCAL:
        weights, images, labels = clients.samples(seed, n)
        before, model, results = weights.clone(), clients.small_model(seed), []
        named = {} if more is None else {"rate": more[0], "batch": more[1]}
        for _ in range(2):
            given = (model, weights, images, labels, epochs, seeded(seed))
            for parameter in model.parameters():  # as after a backward of somebody else
                parameter.grad = torch.ones_like(parameter) if results else None
            result, calls = recorded(function, *given, **named)
            graph = isinstance(result, torch.Tensor) and result.requires_grad
            results.append(told(result.detach() if graph else result))
        changed = not torch.equal(weights, before)
        found.append({"delta": results, "changed": changed, "graph": graph, "calls": calls})
    return found


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
    right = clients.twin(seed, n, epochs, rate, batch)
    yield Mistake(
        [0.0] * len(right),
        "only zeros: the parameters are views of the vector that was loaded, so training changed "
        "it as well: load weights.clone()",
    )
    yield Mistake((-right).tolist(), "the sign: weights afterwards minus weights before")
    for how, said in WRONG_LOCAL.items():
        gives = clients.twin(seed, n, epochs, rate, batch, how)
        if not torch.equal(gives, right):
            yield Mistake(gives.tolist(), said)
    hard_coded = {
        "rate": (USUAL[0], batch),
        "batch": (rate, USUAL[1]),
        "rate and batch": USUAL,
    }
    for name, used in hard_coded.items():
        if used != (rate, batch):
            said = f"this is what the usual {name} of the lab would give: use the argument {name}"
            yield Mistake(clients.twin(seed, n, epochs, *used).tolist(), said)
    yield Mistake(
        lambda got: not isinstance(got, list) or len(got) != len(right),
        f"expected one flat tensor with {len(right)} numbers, one for each weight",
    )


@task("12.3", "local training", points=2)
def train_locally(ranks: Ranks, report: Report) -> None:
    """The twin's update, from weights that stay as they are, without a message."""
    for answer in report.answers(ranks, probe_local, seed=report.seed):
        for (n, epochs, more), value in zip(LOCAL, answer.value, strict=True):
            rate, batch = more or USUAL
            what = f"{n} samples, {epochs} epochs, batch {batch}"
            right = clients.twin(report.seed, n, epochs, rate, batch).tolist()
            wrong = list(_wrong_updates(report.seed, n, epochs, rate, batch))
            said = (
                "the same call again gave another update: what was in the model or its gradients "
                "before goes in: set both first"
            )
            twice = Mistake(lambda _: True, said)
            form = {"form": "the difference, one flat tensor", "tolerance": 1e-8}
            ok = (
                report.communication(answer.rank, value["calls"], _silent)
                and report.judge(answer.rank, value["delta"][0], right, wrong, what=what, **form)
                and report.facts(answer.rank, {
                    f"{what}: the argument weights was changed: load weights.clone()":
                        value["changed"],
                    f"{what}: the update still has a graph: detach it": value["graph"],
                })
                and report.judge(answer.rank, value["delta"][1], right, [twice], what=what, **form)
            )  # fmt: skip
            if not ok:
                break


# -- 12.4 -------------------------------------------------------------------------------------


def _updates(seed: int, counts: dict[int, float]) -> tuple[torch.Tensor, dict]:
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
    function, found = answer_named(user_ns, "fedavg"), []
    for counts in _counts(seed):
        weights, updates = _updates(seed, counts)
        kept, others = _updates(seed, counts)
        result = told(function(weights, updates))
        untouched = updates.keys() == others.keys() and all(
            torch.equal(updates[c][1], others[c][1]) for c in others
        )
        found.append([result, torch.equal(weights, kept), untouched])
    return found


@task("12.4", "federated averaging", points=2)
def fedavg(ranks: Ranks, report: Report) -> None:
    """The weights and the mean of the updates, each as often as it has samples."""
    for answer in report.answers(ranks, probe_mean, seed=report.seed):
        cases = zip(_counts(report.seed), answer.value, strict=True)
        for counts, (got, same_weights, untouched) in cases:
            weights, updates = _updates(report.seed, counts)
            n, total = len(counts), sum(counts.values())
            each = list(updates.values())
            zero = torch.zeros_like(weights)
            mean = sum((k / total * delta for k, delta in each), zero)
            plain = sum((delta for _, delta in each), zero)
            learned = sum(k for k, delta in each if delta.any())
            wrong = table({
                "this is the mean of the updates alone: add it to the weights": mean,
                "the weights are unchanged": weights,
                "a client whose update is zero has to count as well":
                    weights + total / max(learned, 1) * mean,
                "all clients count alike here: weight each update by its n":
                    weights + plain / max(n, 1),
                "this is the sum of the updates: weight each by n / sum of all n": weights + plain,
                "the factors n have to be divided by their sum": weights + total * mean,
                "divided by the number of clients as well: the factors sum to 1 already":
                    weights + mean / max(n, 1),
                "the sign: updates are added": weights - mean,
                "only the last client's update": weights + (each[-1][1] if each else zero),
                "weighted by the numbers of the clients: these are the keys of the dict, and n is "
                "the first of each pair": weights + sum(
                    (c / max(sum(counts), 1) * delta for c, (_, delta) in updates.items()), zero),
                "each update was divided by the sum of those n that came before it: sum up all n "
                "first, then add the updates": weights + sum(
                    (k / so_far * delta for (k, delta), so_far
                     in zip(each, itertools.accumulate(counts.values()), strict=True)), zero),
                "all entries are nan: with no update at all the weights stay":
                    float("nan") * weights,
            } if n else {})  # fmt: skip
            what = f"updates of clients {list(counts)} with n = {list(counts.values())}"
            form = "the new weights"
            ok = report.judge(answer.rank, got, (weights + mean).tolist(), wrong,
                              what=what, form=form)  # fmt: skip
            rules = {
                f"{what}: the argument weights was changed: begin with weights.clone()":
                    not same_weights,
                f"{what}: an update was changed in place": not untouched,
            }  # fmt: skip
            if not (ok and report.facts(answer.rank, rules)):
                break
    if any("ZeroDivisionError" in text for text, *_ in report.found):
        report.problem("with no update at all the weights stay: the sum of all n is 0 then")


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
    each = to_each(seed=seeds)
    answers = report.answers(ranks, probe_round, first=first, each=each)
    if not answers:
        if not report.open:
            _explain_round(report)
        return
    for answer in answers[1:]:
        others = [
            f"round {t}: client {client} got other weights than the argument"
            for t, client, got in answer.value["got"]
            if got != fingerprint(clients.weights_of(t, seeds[clients.SERVER]))
        ]
        for said in [*answer.value["said"], *others]:
            report.problem(said, clients.SERVER, "communication")
        told = [(t, client) for t, client, _ in answer.value["got"]]
        if not report.found and sorted(told) != sorted(_given_to(answer.rank, first)):
            report.problem(f"rank {answer.rank} had weights for {told}", clients.SERVER)
    for t, (plan, value) in enumerate(zip(clients.ROUNDS, answers[0].value, strict=True), first):
        if report.found or not _judge_round(report, t, plan, value, seeds):
            return


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
    said = (
        "what a round needs: for each chosen client isend of torch.tensor([t, client]) with "
        "tag=NOTE, isend of weights with tag=tag_of(t, client), both to home(client); and an irecv "
        "of 1 + weights.numel() numbers from there with the same tag. All of it is started before "
        "anything is waited for, and a client that is slow is not waited for at all. What came of "
        "it is below"
    )
    report.found.insert(0, (said, "mistake", None))


def _home(client: int) -> int:
    return 1 + client % 3


def _judge_round(report: Report, t: int, plan: clients.Round, value: dict, seeds: list) -> bool:
    """One round of the server's; False where something is wrong."""
    where = f"round {t}, clients {list(plan.chosen)}, {plan.seconds:g} s"
    expected = plan.in_time(_home)

    def wrong(said: str, kind: str = "mistake") -> bool:
        report.problem(f"{where}: {said}", clients.SERVER, kind)
        return False

    rules = only("send", "recv"), some(range(WORLD)), _large
    if not report.communication(clients.SERVER, value["calls"], *rules):
        return False
    updates = value["updates"]
    if updates is None:
        return wrong(f"returned {value['kind']}: return (updates, late), updates a dict "
                     "{client: (n, delta)}")  # fmt: skip
    got = sorted(map(int, updates))
    if late := sorted(set(got) - set(expected)):
        return wrong(f"the update of client {late[0]} is among the updates, but it came after the "
                     f"deadline: the server took {value['seconds']:.1f} s")  # fmt: skip
    if missing := sorted(set(expected) - set(got)):
        return wrong(f"the update of client {missing[0]} came in time and is not among the updates."
                     " Is all handed out before anything is waited for?")  # fmt: skip
    for client in expected:
        n, delta = clients.update_of(t, client, seeds[_home(client)])
        right = [n, len(delta), delta[0].item(), delta[-1].item()]
        if said := _wrong_update(updates[str(client)], right, t):
            return wrong(f"client {client}: {said}")
    everybody = len(expected) == len(plan.chosen)
    if not everybody and value["seconds"] < plan.seconds - 0.02:
        return wrong(f"returned after {value['seconds']:.2f} s, and updates were missing: wait for "
                     f"them until the deadline, {plan.seconds:g} s from the call")  # fmt: skip
    if everybody and value["seconds"] > plan.seconds - 0.5:
        return wrong(f"all updates were there, and it returned after {value['seconds']:.1f} s "
                     "only: return at once when nothing is missing")  # fmt: skip
    if not everybody and value["seconds"] > plan.seconds + 1:
        return wrong(f"returned after {value['seconds']:.1f} s: the deadline is {plan.seconds:g} s "
                     "from the call, for all clients together")  # fmt: skip
    if not (everybody or value["slept"]):
        return wrong("the server kept a processor busy while it waited: sleep(0.002) between two "
                     "looks")  # fmt: skip
    # One or two may have been completed since the server looked.
    if everybody and value["late"] is not None and value["late"] > value["open"] + 2:
        return wrong(f"late has {value['late']} requests, and all updates of this round have come: "
                     "only requests of this round that are not completed belong there")  # fmt: skip
    if value["late"] is None:
        return wrong("late has to be a list of requests, as isend and irecv return them")
    if value["late"] < value["open"]:
        return wrong(f"{value['open']} requests are not completed yet, and late has "
                     f"{value['late']}: put the late receives and the open sends into it, or "
                     "nobody ever completes them", "communication")  # fmt: skip
    return True


def _large(calls: Calls) -> str | None:
    """The rule that no blocking call is about weights or an update."""
    one = next((c for c in calls if c["blocking"] and c["nbytes"] > 16), None)
    if one is None:
        return None
    return (
        f"dist.{one['op']} of weights or updates waits for rank {one['peer']}, which may be slow: "
        f"use dist.i{one['op']}"
    )


def _wrong_update(got, right: list, t: int) -> str | None:
    if same(got, right):
        return None
    if not isinstance(got, list):
        swapped = "it is (delta, n)" if got == "swapped" else f"{got}"
        return f"each value is a pair (n, delta), here {swapped}"
    n, length, first = got[:3]
    if not is_number(n):
        return "n has to be a number: the first entry of the message"
    if length == right[1] + 1:
        return "the update has one entry too many: the first number of the message is n"
    if length != right[1]:
        return f"the update has {length} entries, expected {right[1]}"
    if abs(first - right[2]) >= 99:
        return f"this is an update of another round than {t}: each round has tags of its own"
    if abs(first - right[2]) > 0.5:
        return "this is another client's update: each receive needs a tensor of its own"
    return f"expected n = {right[0]:g} and an update from {right[2]:g}, got {n:g} and {first:g}"


# -- 12.6 -------------------------------------------------------------------------------------

#: The second hidden layer of the second one has tanh, and negative outputs: only the gradient of
#: the last bias tells the label then, not that of the last weights.
MLPS = ((12, 7, 4), (20, 9, 5, 6), (8, 16, 3), (9, 12, 2))


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
    function, found = reading_answer(user_ns, "read_image"), []
    for k, sizes in itertools.product(range(4), MLPS):
        read = function(_victim(seed + k, sizes)[0])
        pair = isinstance(read, tuple | list) and len(read) == 2
        found.append([told(number(read[0])), told(read[1])] if pair else told(read))
    return found


@task("12.6", "read one gradient", points=2)
def read_image(ranks: Ranks, report: Report) -> None:
    """The label and the pixels."""
    for answer in report.answers(ranks, probe_read, seed=report.seed):
        tried = [(k, sizes) for k in range(4) for sizes in MLPS]
        for (k, sizes), got in zip(tried, answer.value, strict=True):
            gradients, image, label = _victim(report.seed + k, sizes)
            what = f"an MLP {'-'.join(map(str, sizes))}"
            if not isinstance(got, list) or len(got) != 2:
                report.problem(f"{what}: return a pair (label, image)", answer.rank)
                break
            last, (weight, bias) = gradients[-1], gradients[:2]
            labels = table({
                "label: this is told by the gradient of the last weights, whose sign depends on "
                "the outputs of the layer before, negative ones with tanh. Take the gradient of "
                "the last bias, gradients[-1]": gradients[-2].sum(1).argmin(),
                "label: argmin, not argmax: the entry of the true class is p - 1, the only "
                "negative one": last.argmax(),
                "label: the last layer's gradients are at the end of the list":
                    gradients[1].argmin(),
                "label: the entry of largest size may be another class's": last.abs().argmax(),
            })  # fmt: skip
            labels.append(NO_NUMBER)
            nearest = [row / one for row, one in zip(weight, bias, strict=True) if one]
            nearest.append(torch.stack(nearest).mean(0))
            best = bias.abs().argmax()
            images = table({
                "image: upside down: weight gradient divided by bias gradient": bias[best]
                / weight[best],
                "image: this is the gradient of a row of weights: divide it by the neuron's bias "
                "gradient": weight[best],
                "image: the sign": -image,
                "image: divided by all the bias gradients together": weight[best] / bias.sum(),
                "image: its values were cut to 0 … 1. The pixels are normalized, so negative ones "
                "are right: leave them as they are": image.clamp(0, 1),
            })  # fmt: skip
            images += [
                Mistake(
                    lambda got, others=nearest: any(same(got, one.tolist()) for one in others),
                    "image: this is what another neuron tells, or several: take the one whose bias "
                    "gradient has the largest size",
                ),
                Mistake(
                    _has_nan,
                    "image: divided by 0: a neuron behind a ReLU may have no gradient at all. Take "
                    "that with the largest bias gradient",
                ),
                Mistake(
                    functools.partial(_other_length, sizes[0]),
                    f"image: expected {sizes[0]} pixels, one row of the weights",
                ),
            ]
            told_as = {"what": what}
            if not report.judge(answer.rank, got[0], label, labels, **told_as) or not report.judge(
                answer.rank, got[1], image.tolist(), images, form="the image", **told_as
            ):
                break


def _other_length(n: int, value) -> bool:
    return not isinstance(value, list) or len(value) != n


def _has_nan(value) -> bool:
    return isinstance(value, list) and any(
        isinstance(one, float) and not math.isfinite(one) for one in value
    )


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


def _gradient(net: nn.Module, x: torch.Tensor, label: torch.Tensor, graph=False) -> list:
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
    distance, derivative = value.item(), slope is not None and told(slope.flatten())
    return {"value": distance, "slope": derivative or None, "left": left, "tensor": True,
            "modes": modes}  # fmt: skip


@task("12.7", "gradient inversion", points=2)
def mismatch(ranks: Ranks, report: Report) -> None:
    """The sum of squares, and a derivative that leads to the image."""
    for wide in (5, 6):  # another image, and a network of more layers
        _judge_mismatch(ranks, report, wide)
        if any("should be the same" in text or "same dtype" in text for text, *_ in report.found):
            report.problem(
                "the check hands in net, guess and seen in float64: use these arguments, not what "
                "has the same name in the lab, and keep their type"
            )
        if report.found:
            return


def _judge_mismatch(ranks: Ranks, report: Report, wide: int) -> None:
    net, guess, label, seen = _attack(report.seed, wide)
    guess.requires_grad_()
    own = _gradient(net, guess, label, graph=True)
    parts = [(a - b).square().sum() for a, b in zip(own, seen, strict=True)]
    (slope,) = torch.autograd.grad(sum(parts), guess)
    right, gaps = sum(parts).item(), [a - b for a, b in zip(own, seen, strict=True)]
    wrong = table({
        "this is the mean over each tensor: take the sum over all its entries":
            sum(gap.square().mean() for gap in gaps).item(),
        "this is the mean over all entries: take the sum":
            right / sum(gap.numel() for gap in gaps),
        "these are absolute values: take squares": sum(gap.abs().sum() for gap in gaps).item(),
        "this is the length: without the square root": math.sqrt(right),
        "these are the lengths of the tensors' differences: take squares, no root":
            sum(gap.norm() for gap in gaps).item(),
        "only the first parameter was compared: sum over all of them": parts[0].item(),
        "only the last parameter was compared: sum over all of them": parts[-1].item(),
        "the gradient of the guess is not compared with anything": sum(
            one.square().sum() for one in own).item(),
    })  # fmt: skip
    given = {"seed": report.seed, "wide": wide}
    for answer in report.answers(ranks, probe_mismatch, **given):
        value = answer.value
        form = {"form": "the sum, a tensor with one number"}
        ok = report.judge(answer.rank, value["value"], right, wrong, **form)
        rules = {
            "return a tensor, not a number: item() cuts the graph off": not value["tensor"],
            "something was added to .grad of the parameters: use torch.autograd.grad, which "
            "returns gradients, and not backward": value["left"],
            "the net was in training mode before, and is not now: leave its mode as it is":
                not value["modes"],
            "the result can't be differentiated with respect to guess: create_graph=True, and no "
            "detach": value["slope"] is None,
        }  # fmt: skip
        if ok and report.facts(answer.rank, rules):
            said = "the derivative with respect to guess is another one: is a part of it detached?"
            report.judge(answer.rank, value["slope"], slope.flatten().tolist(),
                         [Mistake(lambda _: True, said)], tolerance=1e-8)  # fmt: skip


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
    for own in (seed, seed, seed + 1):
        torch.manual_seed(len(noises))
        noises.append(mean([torch.zeros(MANY) for _ in range(m)], bound, z, seeded(own)))
    draw = seeded(seed)
    one, following = (mean([torch.zeros(MANY)], bound, z, draw) for _ in range(2))
    first = noises[0].double()
    spread = first.std().item()
    return {
        "clips": clips,
        "quiet": quiet,
        "few": len(few),
        "noise": {"std": spread, "mean": first.mean().item(), "size": len(first),
                  "alike": _likeness(first), "different": len(first.unique()),
                  "largest": first.abs().max().item(),
                  "fourth": ((first - first.mean()) / max(spread, 1e-30)).pow(4).mean().item()},
        "again": torch.equal(noises[0], noises[1]),
        "other": torch.equal(noises[0], noises[2]),
        "next": torch.equal(one, following),
        "one draw": torch.allclose(m * noises[0], one, rtol=1e-4),
    }  # fmt: skip


def _likeness(noise: torch.Tensor) -> float:
    """Return the largest correlation of one half of the noise with the other, in some orders."""
    half = len(noise) // 2
    first, second = noise[:half], noise[half : 2 * half]
    pairs = ((first, second), (first, second.flip(0)), (noise[: 2 * half : 2], noise[1::2][:half]))
    return max(abs(torch.corrcoef(torch.stack(pair))[0, 1].item()) for pair in pairs)


@task("12.8", "clip and add noise", points=3)
def private_mean(ranks: Ranks, report: Report) -> None:
    """Lengths of the bound at most; the mean of them; noise of the right scale, once."""
    deltas = _deltas(report.seed)
    right = [delta * min(1.0, 1 / max(delta.norm().item(), 1e-12)) for delta in deltas]
    for answer in report.answers(ranks, probe_private, seed=report.seed):
        value, rank = answer.value, answer.rank
        ok = all(
            _judge_clip(report, rank, *one)
            for one in zip(value["clips"], deltas, right, strict=True)
        )
        short = [QUIET * delta / max(delta.norm().item(), QUIET) for delta in deltas]
        mean, plain = sum(short) / len(short), sum(deltas) / len(deltas)
        wrong = table({
            "the updates are not clipped": plain,
            "this is clipped after averaging: clip each update first":
                plain * min(1.0, QUIET / plain.norm().item()),
            "this is the sum: divide by the number of updates": sum(short),
            "the bound is the argument bound, not 1": sum(right) / len(right),
        })  # fmt: skip
        what = {"what": f"private_mean with z = 0, bound {QUIET}", "form": "the mean"}
        if ok and report.judge(rank, value["quiet"], mean.tolist(), wrong, **what):
            _judge_noise(report, rank, value)


def _judge_clip(report: Report, rank: int, got, delta: torch.Tensor, right: torch.Tensor) -> bool:
    length = delta.norm().item()
    wrong = table({
        "it is longer than the bound and unchanged": delta,
        "each entry was cut for itself: scale the whole update by one factor, so that it keeps "
        "its direction": delta.clamp(-1, 1),
        "scaled up to the bound: shorter ones stay as they are": delta / max(length, 1e-30),
        "divided by the square of its length": delta / max(length, 1e-30) ** 2,
        "scaled by the largest entry: its length is the root of the sum of all squares, "
        "delta.norm()": delta * min(1.0, 1 / max(delta.abs().max().item(), 1e-30)),
    })  # fmt: skip
    wrong.append(Mistake(_has_nan, "an update of length 0 is divided by 0: it stays as it is"))
    what = f"clipped, length {length:.2g}, bound 1"
    return report.judge(rank, got, right.tolist(), wrong, what=what, form="the clipped update")


def _judge_noise(report: Report, rank: int, value: dict) -> None:
    m, bound, z = NOISE
    right, noise = z * bound / m, value["noise"]
    std = noise["std"]
    factors = {
        "there is no noise": 0.0,
        "that is the noise of the sum, z S: divide by the number of updates": z * bound,
        "that is what remains if each of the updates gets noise of z S: add it once, to the mean, "
        "with z S / m": z * bound / math.sqrt(m),
        "S is missing": z / m,
        "z is missing": bound / m,
        "that is the variance: randn takes the standard deviation as a factor": right**2,
        "that is the square root: z S / m is the standard deviation already": math.sqrt(right),
        "z S / m² : divided twice": right / m,
        "the noise was clipped with the update: add it afterwards": bound / math.sqrt(MANY),
    }
    where = f"{m} updates, S = {bound:g}, z = {z:g}: "
    found = f"the noise has a standard deviation of {std:.3g}, expected {right:.3g}"
    if value["few"] != 7:
        report.problem(f"an update of 7 weights gave a mean of {value['few']}", rank)
    elif noise["size"] != MANY:
        report.problem(f"{where}expected {MANY} entries, got {noise['size']}", rank)
    elif not abs(std - right) <= NOISE_TOLERANCE * right:  # so nan is wrong
        near = (s for s, f in factors.items() if abs(std - f) <= NOISE_TOLERANCE * f + 1e-9)
        said = next(near, "")
        if std < 1e-6 and abs(noise["mean"]) > 1e-6:
            said = "every weight has got the same noise: draw a number for each weight"
        report.problem(f"{where}{found}{': ' + said if said else ''}", rank)
    elif not abs(noise["mean"]) <= right / 20:
        report.problem(f"{where}the noise has a mean of {noise['mean']:.3g}, expected 0", rank)
    elif not abs(noise["fourth"] - 3) <= 0.4:
        report.problem(f"{where}the noise is not Gaussian: torch.randn", rank)
    elif not noise["largest"] >= 3.2 * right:  # 55 of 40,000 numbers are beyond that
        report.problem(f"{where}large numbers are missing in the noise: torch.randn as it is", rank)
    elif noise["different"] < 0.9 * MANY:
        report.problem(
            f"{where}the noise has {noise['different']} different numbers in {MANY} entries: draw "
            "one for each weight",
            rank,
        )
    elif not noise["alike"] <= 0.05:  # 20,000 pairs of independent numbers stay below 0.03
        report.problem(f"{where}numbers of the noise follow from each other: draw each anew", rank)
    elif not value["again"]:
        report.problem("the same seed gave other noise: draw is the generator, generator=draw",
                       rank)  # fmt: skip
    elif value["other"]:
        report.problem("another seed gave the same noise: use draw as it comes", rank)
    elif value["next"]:
        report.problem("the next call with the same draw gave the same noise: make no generator of "
                       "your own", rank)  # fmt: skip
    elif not value["one draw"]:
        report.problem(f"{where}more numbers were drawn than there are weights: one draw for the "
                       "mean, whatever the number of updates", rank)  # fmt: skip


# -- 12.9 -------------------------------------------------------------------------------------

LENGTH = 20_000
TAKING_PART = [5, 2, 11, 9]


def _plain(seed: int) -> list[torch.Tensor]:
    draw = seeded(seed)
    return [0.02 * torch.randn(LENGTH, generator=draw) for _ in TAKING_PART]


def probe_masked(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Masked updates of four clients, what their sum is, and how they are spread."""
    mask, back = (reading_answer(user_ns, name) for name in ("masked", "unmasked"))
    me = TAKING_PART[0]
    t, updates = seed % 1000, _plain(seed)
    hidden = [
        mask(one.clone(), client, list(TAKING_PART), t)
        for client, one in zip(TAKING_PART, updates, strict=True)
    ]
    kinds = [str(one.dtype).removeprefix("torch.") if isinstance(one, torch.Tensor)
             else type(one).__name__ for one in hidden]  # fmt: skip
    if set(kinds) != {"int32"}:
        return {"kinds": kinds}
    own = [(one * user_ns["SCALE"]).round().to(torch.int32) for one in updates]
    few = mask(updates[0][:50].clone(), me, list(TAKING_PART), t)
    alone = mask(updates[0].clone(), me, [me], t)
    again = mask(updates[0].clone(), me, list(TAKING_PART), t + 1)
    total = hidden[0] + hidden[1] + hidden[2] + hidden[3]
    result = back(total.clone())
    gap = (result - sum(updates)).abs() if isinstance(result, torch.Tensor) else None
    return {
        "kinds": kinds,
        "back": told(back(torch.tensor([user_ns["SCALE"], -3 * user_ns["SCALE"] // 2, 0],
                                       dtype=torch.int32))),
        "float": str(result.dtype) if gap is not None else None,
        "worst": gap.max().item() if gap is not None else None,
        "chi2": [_chi2(one) for one in hidden],
        "pairs": [_chi2(both) for one, other in itertools.combinations(hidden, 2)
                  for both in (one - other, one + other)],
        "bare": [k for k, (h, o) in enumerate(zip(hidden, own, strict=True)) if torch.equal(h, o)],
        "alone": (alone - own[0]).abs().max().item() if alone.dtype == torch.int32 else None,
        "few": list(few.shape),
        "renewed": not torch.equal(again, hidden[0]),
        "as told": [torch.equal(one, _masked(me, bare, t, user_ns["pair_mask"]))
                    for me, bare, one in zip(TAKING_PART, own, hidden, strict=True)],
    }  # fmt: skip


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
        if said := _wrong_masks(answer.value):
            report.problem(said, answer.rank)


def _wrong_masks(value: dict) -> str | None:
    if (kind := value["kinds"][0]) != "int32" or len(set(value["kinds"])) > 1:
        others = [one for one in value["kinds"] if one != "int32"]
        return (
            f"masked returned {others[0]}, expected an int32 tensor: int32 wraps around modulo "
            "2**32, as the masks do; longer numbers and floats do not"
            if others
            else f"masked returned {kind}"
        )
    wrong = table({
        "unmasked did not divide by SCALE": [2.0**20, -1.5 * 2**20, 0.0],
        "unmasked multiplied by SCALE: divide": [2.0**40, -1.5 * 2**40, 0.0],
        "unmasked cut off what is behind the point: use float, and /": [1.0, -2.0, 0.0],
    })  # fmt: skip
    if not same(value["back"], [1.0, -1.5, 0.0]):
        fits = next((one.said for one in wrong if one.fits(value["back"])), "")
        return f"unmasked of [SCALE, -1.5 SCALE, 0]: {fits or value['back']}, expected [1, -1.5, 0]"
    if len(value["kinds"]) != len(TAKING_PART) or len(value["chi2"]) != len(TAKING_PART):
        raise ValueError(f"{len(value['chi2'])} masked updates of {len(TAKING_PART)} clients")
    if value["bare"]:
        who = TAKING_PART[value["bare"][0]]
        return f"the message of client {who} is its update without any mask: one for each other"
    if value["few"] != [50]:
        return f"the message of an update of 50 numbers has the shape {value['few']}"
    quantum = 2.0**-20
    if value["alone"] is None or value["alone"] > 1:
        return (
            "a client that takes part alone has no partner, and so no mask: leave `me` out of the "
            "loop. `me` and `clients` are numbers of clients, not places in a list"
        )
    half = len(TAKING_PART) * quantum / 2
    if value["worst"] is None or not value["worst"] <= 1000 * half:  # so nan is wrong
        return (
            f"the sum is off by {value['worst'] or 0:.3g}: the masks do not vanish in it. Of each "
            "pair the one with the smaller number adds the mask, the other subtracts it; `me` has "
            "no mask with itself; and masks are whole numbers, as floats lose the low digits"
        )
    if value["worst"] > 1.02 * half:
        return (
            f"the sum is off by {value['worst'] / quantum:.1f} / SCALE, and with rounding by at "
            f"most {half / quantum:g}: .to(torch.int32) cuts digits off, round() first"
        )
    if max(value["pairs"], default=0.0) > CHI2 or not value["pairs"]:
        return (
            "two messages together are not uniform: they share a mask. Each pair of clients has a "
            "mask of its own, pair_mask(i, j, t, size)"
        )
    if max(value["chi2"]) > CHI2:
        return (
            "a masked update is not uniform: some values are more frequent than others, and tell "
            "something. Add the masks as they are, all 32 bits of them"
        )
    if value["float"] != "torch.float32":
        return f"unmasked returned {value['float']}, expected a float32 tensor, as the updates are"
    if not value["renewed"]:
        return "the masks are those of another round as well: pass t to pair_mask"
    if not all(value["as told"]) or len(value["as told"]) != len(TAKING_PART):
        return (
            "a client does not have a mask with each of the others, so a few of them could find "
            "out its update together: it adds pair_mask(i, j, t, size) for each other client with "
            "a larger number, and subtracts it for each with a smaller one"
        )
    return None
