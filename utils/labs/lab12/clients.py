"""Checks of a client's training and of a federated round; and the round's clients.

In a check of a round the clients follow a plan that all ranks know: who is slow, and which rank is
busy. What the server hands out, and what the clients of a rank hand in, no other rank is told. A
slow client's update is sent in the next round only, after the server has said that this one is
over. So the order of events is certain, whatever the machine does meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from utils.checks.calls import Calls, only, some
from utils.checks.groups import enough
from utils.checks.mistakes import Mistake, is_number, same
from utils.checks.probe import as_dict, fingerprint, numbers, reading_answer, recorded, told
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks
from utils.cluster.reply import Reply


def seeded(seed: int) -> torch.Generator:
    """Return a generator."""
    return torch.Generator().manual_seed(seed)


def facts_about(about: str, wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these is so; what they are about is told first."""
    return facts({f"{about}: {text}": is_so for text, is_so in wrong.items()})


def has_other_length(n: int) -> Callable[[Any], bool]:
    """Return what recognises anything but a list of n entries."""
    return lambda reply: not isinstance(reply, list) or len(reply) != n


# -- 12.3: a client's training ----------------------------------------------------------------

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
    first = parameters_to_vector(model.parameters()).detach().clone()
    reduction = "sum" if how in ("sum", "sum / batch") else "mean"
    step = {"no rate": 1.0, "sum / batch": rate / batch}.get(how, rate)
    for part in _minibatches(seed, n, epochs, batch, how):
        if how != "adds up":
            model.zero_grad()
        functional.cross_entropy(model(images[part]), labels[part], reduction=reduction).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= step * parameter.grad
    after = parameters_to_vector(model.parameters()).detach()
    return after if how == "weights" else after - (weights if how == "not loaded" else first)


def _minibatches(seed: int, n: int, epochs: int, batch: int, how: str) -> Iterator[Tensor]:
    """Yield the samples of each step."""
    draw = seeded(seed)
    for epoch in range(1 if how == "one epoch" else epochs):
        if how == "no shuffle":
            order = torch.arange(n)
        elif epoch == 0 or how != "same order":
            order = torch.randperm(n, generator=draw)
        for part in order.split(n if how == "one batch" else batch):
            if how != "drop last" or len(part) == batch:
                yield part


def probe_local(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return updates of small clients; each is asked for twice with the same model."""
    function, updates = reading_answer(user_ns, "train_locally", changes=(1,)), []
    for n, epochs, more in LOCAL:
        weights, images, labels = samples(seed, n)
        before, model, results = weights.clone(), small_model(seed), []
        named = {} if more is None else {"rate": more[0], "batch": more[1]}
        for _ in range(2):
            arguments = (model, weights, images, labels, epochs, seeded(seed))
            for parameter in model.parameters():  # as after a backward of somebody else
                parameter.grad = torch.ones_like(parameter) if results else None
            result, calls = recorded(function, *arguments, **named)
            graph = isinstance(result, Tensor) and result.requires_grad
            results.append(told(result.detach() if graph else result))
        changed = not torch.equal(weights, before)
        updates.append({"delta": results, "changed": changed, "graph": graph, "calls": calls})
    return updates


@task("12.3", "local training", points=2)
def train_locally(ranks: Ranks, report: Report) -> None:
    """Judge the update by the twin's, from weights that stay as they are, without a message."""
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
    """Yield which updates mistakes lead to."""
    right = twin(seed, n, epochs, rate, batch)
    yield Mistake(
        [0.0] * len(right),
        "only zeros: the parameters are views of the vector that was loaded, so training changed "
        "it as well: load weights.clone()",
    )
    yield Mistake((-right).tolist(), "the sign: weights afterwards minus weights before")
    for how, text in WRONG_LOCAL.items():
        update = twin(seed, n, epochs, rate, batch, how)
        if not torch.equal(update, right):
            yield Mistake(update.tolist(), text)
    usual_rate, usual_batch = USUAL
    hard_coded = {
        "rate": (usual_rate, batch),
        "batch": (rate, usual_batch),
        "rate and batch": USUAL,
    }
    for name, used in hard_coded.items():
        if used != (rate, batch):
            said = f"this is what the usual {name} of the lab would give: use the argument {name}"
            yield Mistake(twin(seed, n, epochs, *used).tolist(), said)
    said = f"expected one flat tensor with {len(right)} numbers, one for each weight"
    yield Mistake(has_other_length(len(right)), said)


# -- 12.5: a round ----------------------------------------------------------------------------

WORLD = 4
SERVER, NOTE, OVER = 0, 0, 900_000
WEIGHTS = 20_000
#: Seconds that a slow client, or a busy rank, waits for the end of a round before it goes on.
LIMIT = 2.5


@dataclass(frozen=True)
class Round:
    """A round: who is chosen, who is late, which rank is busy until the round is over."""

    chosen: Sequence[int]
    seconds: float
    slow: Sequence[int] = ()
    busy: int = -1

    def in_time(self, home: Callable[[int], int]) -> list[int]:
        """Return the clients whose updates come before the deadline."""
        return sorted(c for c in self.chosen if c not in self.slow and home(c) != self.busy)


#: The three rounds of the check; client c lives on rank 1 + c % 3.
ROUNDS = (
    Round([7, 2, 0, 20, 10], 2.5),
    Round([4, 1, 8, 3, 6], 0.8, slow=[1, 6], busy=3),
    Round([1, 5, 6, 0], 2.5),
)


def _home(client: int) -> int:
    """Return the rank that a client is on."""
    return 1 + client % 3


def length_of(t: int) -> int:
    """Return how many weights there are in a round."""
    return WEIGHTS + 100 * (t % len(ROUNDS))


def update_of(t: int, client: int, seed: int) -> tuple[float, Tensor]:
    """Return what a client hands in, which tells from whom it is, and of which round.

    The last number follows from the seed of its rank.
    """
    delta = torch.arange(length_of(t)) / WEIGHTS + (100.0 * t + client)
    delta[-1:] = numbers(seed + 100 * t + client, 1)
    return 10.0 + client, delta


def weights_of(t: int, seed: int) -> Tensor:
    """Return what the server with this seed hands out in a round."""
    return numbers(seed + t, length_of(t))


def probe_round(user_ns: dict, *, rank: int, first: int, seed: int) -> list | dict:
    """Play three rounds with the student's server, and the check's clients."""
    if rank == SERVER:
        return play_server(user_ns, first, seed)
    return play_clients(user_ns, rank, first, seed)


def play_clients(user_ns: dict, rank: int, first: int, seed: int) -> dict:
    """Play all rounds on a rank of clients.

    Returns:
        "said": what came wrong, in words; "got": (t, client, fingerprint of the weights).
    """
    home, tag_of = user_ns["home"], user_ns["tag_of"]
    late: list[tuple[Tensor, int]] = []  # messages of the round before, and their tags
    said: list[str] = []
    received: list[tuple[int, int, str]] = []
    for t, plan in enumerate(ROUNDS, first):
        over = dist.irecv(torch.empty(1), SERVER, tag=OVER + t)
        if plan.busy == rank:
            _wait_for(over)
        expected = [client for client in plan.chosen if home(client) == rank]
        for _ in expected:
            dist.recv(note := torch.empty(2, dtype=torch.int64), SERVER, tag=NOTE)
            if note[0] != t or note[1] not in expected:
                said.append(f"a note of round {t} was {note.tolist()}, expected [{t}, client]")
            weights = torch.empty(length_of(t))
            dist.recv(weights, SERVER, tag=tag_of(t, int(note[1])))
            received.append((t, int(note[1]), fingerprint(weights)))
        now, later = late, []
        for client in expected:
            n, delta = update_of(t, client, seed)
            message = torch.cat([torch.tensor([n]), delta]), tag_of(t, client)
            (later if client in plan.slow else now).append(message)
        sends = [dist.isend(message, SERVER, tag=tag) for message, tag in now]
        _wait_for(over)
        if not over.is_completed():  # the server waits for the straggler: let it go on
            sends += [dist.isend(message, SERVER, tag=tag) for message, tag in later]
            later = []
            over.wait()
        for send in sends:
            send.wait()
        late = later
    for message, tag in late:
        dist.send(message, SERVER, tag=tag)
    return {"said": said, "got": received}


def _wait_for(request: dist.Work) -> None:
    """Wait until a request is completed, but not longer than the limit."""
    end = time.perf_counter() + LIMIT
    while not request.is_completed() and time.perf_counter() < end:
        time.sleep(0.002)


def play_server(user_ns: dict, first: int, seed: int) -> list[dict]:
    """Play all rounds by the student's function; return what came of each."""
    from torch_mpi.record import log

    run_round, rounds, open_requests = reading_answer(user_ns, "run_round"), [], []
    patience = math.inf
    for t, plan in enumerate(ROUNDS, first):
        mark, start = log.mark(), time.perf_counter()
        allowed = min(plan.seconds, patience)
        with _counted_sleeps(user_ns) as sleeps:
            result = run_round(t, weights_of(t, seed), list(plan.chosen), allowed)
        seconds = time.perf_counter() - start
        if seconds > max(allowed, 1.0):  # the verdict is certain: the others need not last
            patience = 0.2
        calls = [as_dict(call) for call in log.since(mark)]
        pair = isinstance(result, tuple | list) and len(result) == 2
        updates, late = result if pair else (None, None)
        requests = isinstance(late, list | tuple | set) and all(hasattr(r, "wait") for r in late)
        open_requests += late if requests else ()
        rounds.append(
            {
                "kind": type(updates if pair else result).__name__,
                "updates": _summed_up(updates),
                "late": len(late) if requests else None,
                "open": sum(call["end"] == 0 for call in calls),
                "seconds": seconds,
                "slept": bool(sleeps),
                "calls": calls,
            }
        )
        for rank in range(1, WORLD):
            dist.send(torch.ones(1), rank, tag=OVER + t)
    for request in open_requests:
        request.wait()
    return rounds


@contextlib.contextmanager
def _counted_sleeps(user_ns: dict) -> Iterator[list[float]]:
    """List the seconds of each sleep of this thread, by the lab's name or by time's."""
    sleep, here, sleeps = time.sleep, threading.get_ident(), []

    def counted(seconds: float) -> None:
        if threading.get_ident() == here:
            sleeps.append(seconds)
        sleep(seconds)

    named = {"sleep": user_ns["sleep"]} if user_ns.get("sleep") is sleep else {}
    time.sleep = counted
    user_ns.update(dict.fromkeys(named, counted))
    try:
        yield sleeps
    finally:
        time.sleep = sleep
        user_ns.update(named)


def _summed_up(updates: Any) -> dict | None:
    """Return of each client n, and three numbers of its update: enough to tell which it was."""
    if not isinstance(updates, dict):
        return None
    return {str(int(client)): _as_numbers(update) for client, update in updates.items()}


def _as_numbers(update: Any) -> Any:
    """Return n, and length, first and last number of an update; for anything else, its type."""
    if not (isinstance(update, tuple | list) and len(update) == 2):
        return told(type(update).__name__)
    n, delta = update
    if torch.is_tensor(n) and n.numel() > 1 and not (torch.is_tensor(delta) and delta.ndim):
        return "swapped"
    if torch.is_tensor(delta) and delta.ndim == 1:
        return [told(n), len(delta), delta[0].item(), delta[-1].item()]
    return told(type(delta).__name__)


@task("12.5", "a round with a deadline", points=4)
def run_round(ranks: Ranks, report: Report) -> None:
    """Judge whether everybody in time is in, nobody else is, and nothing open is forgotten."""
    if not enough(ranks, report, WORLD):
        return
    first, seeds = report.seed % 50, report.seeds(WORLD)
    answers = report.answers(ranks, probe_round, first=first, each=to_each(seed=seeds))
    if not answers:
        if not report.open:
            # Before what came of it: advice of a deadlock may mislead here.
            report.begin_with(NEEDS)
        return
    if not _all_is_handed_out(report, answers, first, seeds):
        return
    for t, (plan, result) in enumerate(zip(ROUNDS, answers[0].value, strict=True), first):
        if not report.follow(SERVER, _round(t, plan, result, seeds)):
            return


NEEDS = (
    "what a round needs: for each chosen client isend of torch.tensor([t, client]) with "
    "tag=NOTE, isend of weights with tag=tag_of(t, client), both to home(client); and an irecv "
    "of 1 + weights.numel() numbers from there with the same tag. All of it is started before "
    "anything is waited for, and a client that is slow is not waited for at all. What came of "
    "it is below"
)


def _all_is_handed_out(report: Report, answers: list[Reply], first: int, seeds: list[int]) -> bool:
    """Tell the server which weights the ranks of clients lack; return whether all came."""
    problems: list[tuple[str, str]] = []
    unreceived = any(answer.unreceived for answer in answers)
    for answer in answers[1:]:
        received = answer.value["got"]
        others = [
            f"round {t}: client {client} got other weights than the argument"
            for t, client, weights in received
            if weights != fingerprint(weights_of(t, seeds[SERVER]))
        ]
        problems += [(text, "communication") for text in (*answer.value["said"], *others)]
        pairs = [(t, client) for t, client, _ in received]
        wanted = [
            (t, client)
            for t, plan in enumerate(ROUNDS, first)
            for client in plan.chosen
            if _home(client) == answer.rank
        ]
        if not (problems or unreceived) and sorted(pairs) != sorted(wanted):
            problems.append((f"rank {answer.rank} had weights for {pairs}", "mistake"))
    for text, kind in problems:
        report.problem(text, SERVER, kind)
    return not (problems or unreceived)


def _round(t: int, plan: Round, result: dict[str, Any], seeds: list[int]) -> Iterator[Step]:
    """Judge one round of the server's: whose updates it has, when it returns, and what is late."""
    about = f"round {t}, clients {list(plan.chosen)}, {plan.seconds:g} s"
    yield communication(result["calls"], only("send", "recv"), some(range(WORLD)), _large)
    updates, seconds = result["updates"], result["seconds"]
    no_pair = f"returned {result['kind']}: return (updates, late), updates a dict "
    yield facts_about(about, {no_pair + "{client: (n, delta)}": updates is None})
    in_time = plan.in_time(_home)
    returned = {int(client) for client in updates}
    for client in sorted(returned - set(in_time)):
        said = (
            f"the update of client {client} is among the updates, but it came after the deadline: "
            f"the server took {seconds:.1f} s"
        )
        yield facts_about(about, {said: True})
    for client in sorted(set(in_time) - returned):
        said = (
            f"the update of client {client} came in time and is not among the updates. Is all "
            "handed out before anything is waited for?"
        )
        yield facts_about(about, {said: True})
    for client in in_time:
        n, delta = update_of(t, client, seeds[_home(client)])
        expected = [n, len(delta), delta[0].item(), delta[-1].item()]
        yield from _update(updates[str(client)], expected, t, f"{about}: client {client}")
    yield from _end(plan, result, len(in_time) == len(plan.chosen), about)


def _end(plan: Round, result: dict[str, Any], all_came: bool, about: str) -> Iterator[Step]:
    """Judge when a round ends, and whether `late` has what is open then, and nothing else."""
    seconds, late, still_open = result["seconds"], result["late"], result["open"]
    wrong = {
        f"returned after {seconds:.2f} s, and updates were missing: wait for them until the "
        f"deadline, {plan.seconds:g} s from the call": (
            not all_came and seconds < plan.seconds - 0.02
        ),
        f"all updates were there, and it returned after {seconds:.1f} s only: return at once when "
        "nothing is missing": all_came and seconds > plan.seconds - 0.5,
        f"returned after {seconds:.1f} s: the deadline is {plan.seconds:g} s from the call, for "
        "all clients together": not all_came and seconds > plan.seconds + 1,
        "the server kept a processor busy while it waited: sleep(0.002) between two looks": (
            not (all_came or result["slept"])
        ),
        # One or two may have been completed since the server looked.
        f"late has {late} requests, and all updates of this round have come: only requests of this "
        "round that are not completed belong there": (
            all_came and late is not None and late > still_open + 2
        ),
        "late has to be a list of requests, as isend and irecv return them": late is None,
    }
    yield facts_about(about, wrong)
    forgotten = (
        f"{about}: {still_open} requests are not completed yet, and late has {late}: put the "
        "late receives and the open sends into it, or nobody ever completes them"
    )
    yield facts({forgotten: late < still_open}, kind="communication")


def _large(calls: Calls) -> str | None:
    """Return which blocking call is about weights or an update."""
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
    no_pair = f"each value is a pair (n, delta), here {swapped}"
    yield facts_about(about, {no_pair: not isinstance(update, list)})
    n, length, first = update[:3]
    wrong = {
        "n has to be a number: the first entry of the message": not is_number(n),
        "the update has one entry too many: the first number of the message is n": (
            length == expected[1] + 1
        ),
        f"the update has {length} entries, expected {expected[1]}": length != expected[1],
    }
    yield facts_about(about, wrong)
    off = abs(first - expected[2])
    wrong = {
        f"this is an update of another round than {t}: each round has tags of its own": off >= 99,
        "this is another client's update: each receive needs a tensor of its own": off > 0.5,
        f"expected n = {expected[0]:g} and an update from {expected[2]:g}, got {n:g} and "
        f"{first:g}": True,
    }
    yield facts_about(about, wrong)
