"""The probes of clients and rounds. :mod:`.privacy_probes` has the others.

The clients follow a plan that all ranks know: which clients are slow, and which rank is busy. No
other rank knows what the server sends, or what the clients of a rank send back. A slow client sends
its update in the next round, after the server has said that this round is over. So the order of
events is certain, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from utils.checks.draws import seeded
from utils.checks.probe import (
    answer_named,
    fingerprint,
    kind_of,
    numbers,
    plays_a_part,
    reading_answer,
    recorded,
    told,
    values_of,
)

# -- rounds with a deadline ------------------------------------------------------------------------


WORLD = 4
SERVER = 0
NOTE = 0
OVER = 900_000
WEIGHTS = 20_000
#: A client's message, and its tag.
Message = tuple[Tensor, int]
#: Seconds that a slow client, or a busy rank, waits at most for the end of a round.
LIMIT = 2.5


@dataclass(frozen=True)
class Round:
    """A round: chosen clients, late clients, and a rank that is busy until the round is over."""

    chosen: Sequence[int]
    seconds: float
    slow: Sequence[int] = ()
    busy: int = -1

    def in_time(self, home: Callable[[int], int]) -> list[int]:
        """Return the clients whose updates come before the deadline."""
        return sorted(c for c in self.chosen if c not in self.slow and home(c) != self.busy)


#: The three rounds of the check; client c is on rank 1 + c % 3.
ROUNDS = (
    Round([7, 2, 0, 20, 10], 2.5),
    Round([4, 1, 8, 3, 6], 0.8, slow=[1, 6], busy=3),
    Round([1, 5, 6, 0], 2.5),
)


def length_of(t: int) -> int:
    """Return how many weights a round has."""
    return WEIGHTS + 100 * (t % 2)


def update_of(t: int, client: int, seed: int) -> tuple[float, Tensor]:
    """Return a client's update, which shows its client and its round.

    The last number follows from the seed of its rank.
    """
    delta = torch.arange(length_of(t)) / WEIGHTS + (100.0 * t + client)
    delta[-1:] = numbers(seed + 100 * t + client, 1)
    return 10.0 + client, delta


def weights_of(t: int, seed: int) -> Tensor:
    """Return the weights that the server with this seed sends in a round."""
    return numbers(seed + t, length_of(t))


@plays_a_part("recv", "send")
def probe_round(user_ns: dict, *, rank: int, first: int, seed: int) -> list | dict:
    """Play three rounds with the student's server, and the check's clients."""
    if rank == SERVER:
        return play_server(user_ns, first, seed)
    return play_clients(user_ns, rank, first, seed)


def play_clients(user_ns: dict, rank: int, first: int, seed: int) -> dict:
    """Play all rounds on a rank of clients.

    Returns:
        "said": wrong messages, in words; "got": (t, client, fingerprint of the weights).
    """
    tag_of = user_ns["tag_of"]
    late: list[Message] = []  # from the previous round
    wrong: list[str] = []
    received: list[tuple[int, int, str]] = []
    for t, plan in enumerate(ROUNDS, first):
        over = dist.irecv(torch.empty(1), SERVER, tag=OVER + t)
        if plan.busy == rank:
            _wait_for(over)
        clients = [client for client in plan.chosen if user_ns["home"](client) == rank]
        for _ in clients:
            note, weights = _receive(t, tag_of)
            if note[0] != t or note[1] not in clients:
                wrong.append(f"You sent {note} as a note in round {t}. Send [{t}, client]")
            received.append((t, note[1], fingerprint(weights)))
        now = late
        later: list[Message] = []
        for client in clients:
            n, delta = update_of(t, client, seed)
            message = torch.cat([torch.tensor([n]), delta]), tag_of(t, client)
            (later if client in plan.slow else now).append(message)
        late = _send_updates(now, later, over)
    for message, tag in late:
        dist.send(message, SERVER, tag=tag)
    return {"said": wrong, "got": received}


def _send_updates(now: list[Message], later: list[Message], over: dist.Work) -> list[Message]:
    """Send messages in a round; return the messages for the time after it."""
    sends = [dist.isend(message, SERVER, tag=tag) for message, tag in now]
    _wait_for(over)
    if not over.is_completed():  # the server waits for the straggler: let it continue
        sends += [dist.isend(message, SERVER, tag=tag) for message, tag in later]
        later = []
        over.wait()
    for send in sends:
        send.wait()
    return later


def _receive(t: int, tag_of: Callable[[int, int], int]) -> tuple[list[int], Tensor]:
    """Return the server's note, which is [round, client], and its weights."""
    note = torch.empty(2, dtype=torch.int64)
    dist.recv(note, SERVER, tag=NOTE)
    weights = torch.empty(length_of(t))
    dist.recv(weights, SERVER, tag=tag_of(t, int(note[1])))
    return note.tolist(), weights


def _wait_for(request: dist.Work) -> None:
    """Wait until a request is completed, but not longer than the limit."""
    end = time.perf_counter() + LIMIT
    while not request.is_completed() and time.perf_counter() < end:
        time.sleep(0.002)


def play_server(user_ns: dict, first: int, seed: int) -> list[dict]:
    """Play all rounds with the student's function; return the result of each."""
    run_round = reading_answer(user_ns, "run_round")
    results, rounds = [], []
    patience = math.inf
    for t, plan in enumerate(ROUNDS, first):
        start = time.perf_counter()
        allowed = min(plan.seconds, patience)
        with _counted_sleeps(user_ns) as sleeps:
            result, calls = recorded(run_round, t, weights_of(t, seed), list(plan.chosen), allowed)
        seconds = time.perf_counter() - start
        if seconds > max(allowed, 1.0):  # the verdict is certain, so the other rounds can be short
            patience = 0.2
        _, signals = recorded(_tell_clients, t)
        results.append(result)
        rounds.append({
            "open": sum(call["end"] == 0 for call in calls),
            "seconds": seconds,
            "slept": max(sleeps, default=0.0),
            "calls": calls + signals,
        })
    # Only now, because no round may change what an earlier one has returned.
    for of_round, (about, requests) in zip(rounds, map(_about, results), strict=True):
        of_round |= about
        for request in requests:
            request.wait()
    return rounds


def _tell_clients(t: int) -> None:
    """Tell every rank of clients that round t is over."""
    for rank in range(1, WORLD):
        dist.send(torch.ones(1), rank, tag=OVER + t)


@contextlib.contextmanager
def _counted_sleeps(user_ns: dict) -> Iterator[list[float]]:
    """List the seconds of each sleep of this thread, under the lab's name or time's."""
    sleep = time.sleep
    here = threading.get_ident()
    sleeps = []

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


def _about(result: Any) -> tuple[dict[str, Any], list[dist.Work]]:
    """Return a description of a round's result, and the requests in it."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2
    updates, late = result if is_pair else (result, None)
    numbers_of = None
    if is_pair and isinstance(updates, dict):
        numbers_of = {str(int(client)): _as_numbers(update) for client, update in updates.items()}
    are_requests = isinstance(late, list | tuple | set) and all(hasattr(r, "wait") for r in late)
    about = {
        "kind": type(updates).__name__,
        "updates": numbers_of,
        "late": len(late) if are_requests else None,
    }
    return about, list(late) if are_requests else []


def _as_numbers(update: Any) -> Any:
    """Return n, and length, first and last number of an update; for anything else, its type."""
    if not (isinstance(update, tuple | list) and len(update) == 2):
        return told(type(update).__name__)
    n, delta = update
    if torch.is_tensor(n) and n.numel() > 1 and not (torch.is_tensor(delta) and delta.ndim):
        return "swapped"
    if torch.is_tensor(delta) and delta.ndim == 1:
        return [told(n), len(row := values_of(delta)), row[0], row[-1]]
    return told(type(delta).__name__)


# -- shards, clients, updates and their mean -------------------------------------------------------


def drawn_labels(seed: int, n: int, classes: int) -> Tensor:
    """Return shuffled labels of n images, with equally many of each class."""
    return (torch.arange(n) % classes)[torch.randperm(n, generator=seeded(seed))]


def probe_shards(user_ns: dict, *, rank: int, seed: int, cases: list) -> list:
    """Return each case's shards: from a draw, from the same draw again, and from another one."""
    function = reading_answer(user_ns, "shards_by_class")
    by_case = []
    for n, classes, count, each in cases:
        labels = drawn_labels(seed, n, classes)
        results = []
        for draw_seed in (seed, seed, seed + 1):
            torch.default_generator.manual_seed(len(results))
            draw = seeded(draw_seed)
            shards = function(labels, count, each, draw)
            results.append(told(shards))
        used = not torch.equal(draw.get_state(), seeded(seed + 1).get_state())
        by_case.append([*results, used, kind_of(shards)])
    return by_case


CALLS = 120
SELECT = ((0.2, 30), (0.29, 100), (0.01, 20), (1.0, 7), (0.34, 5), (0.3, 11), (0.5, 5))


def probe_select(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return choices of each case: many from one draw, and the first again from an equal draw."""
    function = answer_named(user_ns, "select")
    choices = []
    for fraction, count in SELECT:
        draw = seeded(seed)
        torch.default_generator.manual_seed(1)
        many = [function(fraction, count, draw) for _ in range(CALLS)]
        torch.default_generator.manual_seed(2)
        kinds = sorted({kind_of(choice) for choice in many})
        choices.append([told(many), told(function(fraction, count, seeded(seed))), kinds])
    return choices


#: Samples, epochs, and further arguments: none, then by name, then by position.
LOCAL = ((50, 1, None), (21, 2, (0.3, 5)), (12, 3, (0.5, 4)), (150, 5, (0.2, 16)))


def small_model(seed: int) -> nn.Module:
    """Return a model of 6 features and 3 classes in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(seed: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights, images and labels of a client."""
    draw = seeded(seed)
    weights = torch.randn(53, generator=draw, dtype=torch.float64)
    images = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    return weights, images, torch.randint(0, 3, (n,), generator=draw)


def probe_local(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return updates of small clients; each is asked for twice with the same model."""
    function = reading_answer(user_ns, "train_locally", changes=(1,))
    updates = []
    for n, epochs, more in LOCAL:
        weights, images, labels = samples(seed, n)
        before = weights.clone()
        model = small_model(seed)
        results: list = []
        calls: list = []
        named = {} if more is None else {"rate": more[0], "batch": more[1]}
        for _ in range(2):
            arguments = (model, weights, images, labels, epochs, seeded(seed))
            for parameter in model.parameters():  # as if somebody had called backward before
                parameter.grad = torch.ones_like(parameter) if results else None
            result, called = recorded(function, *arguments, **named)
            calls += called
            graph = isinstance(result, Tensor) and result.requires_grad
            results.append(told(result))
        changed = not torch.equal(weights, before)
        updates.append({"delta": results, "changed": changed, "graph": graph, "calls": calls})
    return updates


#: Clients of the largest case.
MANY_CLIENTS = 6
#: Client → its number of samples, and the change of the weights.
Updates = dict[int, tuple[float, Tensor]]


def drawn_updates(seed: int, counts: dict[int, float]) -> tuple[Tensor, Updates]:
    """Return weights, and an update of each client, in double precision for six clients."""
    draw = seeded(seed)
    size = 5 + len(counts)
    dtype = torch.float64 if len(counts) == MANY_CLIENTS else torch.float32
    weights = torch.randn(size, generator=draw, dtype=dtype)
    # Client 1 has a zero update, but it counts like the others.
    deltas = {c: torch.randn(size, generator=draw, dtype=dtype) * (c != 1) for c in counts}
    return weights, {c: (counts[c], delta) for c, delta in deltas.items()}


def drawn_counts(seed: int) -> list[dict[int, float]]:
    """Return the samples of each client in each case."""
    draw = random.Random(seed)
    many = {client: draw.randrange(3, 90) for client in draw.sample(range(40), MANY_CLIENTS)}
    return [{3: 10, 17: 30, 8: 20}, {5: 40.0}, {0: 7.0, 1: 7.0}, many, {}]


def probe_mean(user_ns: dict, *, rank: int, seed: int) -> list:
    """Return each case's new weights, whether the arguments stayed the same, and whether it is new.

    A call with other updates of the same clients comes first.
    """
    function = answer_named(user_ns, "fedavg")
    averages = []
    for counts in drawn_counts(seed):
        function(*drawn_updates(seed + 1, counts))
        weights, updates = drawn_updates(seed, counts)
        kept, others = drawn_updates(seed, counts)
        new_weights = function(weights, updates)
        result = told(new_weights)
        new = not isinstance(new_weights, Tensor) or new_weights.data_ptr() != weights.data_ptr()
        untouched = updates.keys() == others.keys() and all(
            torch.equal(updates[c][1], others[c][1]) for c in others
        )
        averages.append([result, torch.equal(weights, kept), untouched, new])
    return averages
