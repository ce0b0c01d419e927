"""Clients of the check's own, for a server of the student's; and the twin of a local training.

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from utils.checks.probe import as_dict, fingerprint, numbers, reading_answer, told

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

    def in_time(self, home) -> list[int]:
        """The clients whose updates come before the deadline."""
        return sorted(c for c in self.chosen if c not in self.slow and home(c) != self.busy)


#: The three rounds of the check; client c lives on rank 1 + c % 3.
ROUNDS = (
    Round([7, 2, 0, 20, 10], 2.5),
    Round([4, 1, 8, 3, 6], 0.8, slow=[1, 6], busy=3),
    Round([1, 5, 6, 0], 2.5),
)


def length_of(t: int) -> int:
    """How many weights there are in a round."""
    return WEIGHTS + 100 * (t % len(ROUNDS))


def update_of(t: int, client: int, seed: int) -> tuple[float, torch.Tensor]:
    """What a client hands in: tells from whom and of which round; the last number follows from the
    seed of its rank.
    """
    delta = torch.arange(length_of(t)) / WEIGHTS + (100.0 * t + client)
    delta[-1:] = numbers(seed + 100 * t + client, 1)
    return 10.0 + client, delta


def weights_of(t: int, seed: int) -> torch.Tensor:
    """What the server with this seed hands out in a round."""
    return numbers(seed + t, length_of(t))


def play_clients(user_ns: dict, rank: int, first: int, seed: int) -> dict:
    """All rounds on a rank of clients; what came wrong, in words, and (t, client, weights)."""
    home, tag_of = user_ns["home"], user_ns["tag_of"]
    held: list[tuple[int, torch.Tensor]] = []
    said: list[str] = []
    got: list[tuple[int, int, str]] = []
    for t, plan in enumerate(ROUNDS, first):
        over = dist.irecv(torch.empty(1), SERVER, tag=OVER + t)
        if plan.busy == rank:
            _wait_for(over)
        expected = [client for client in plan.chosen if home(client) == rank]
        messages = []
        for _ in expected:
            dist.recv(note := torch.empty(2, dtype=torch.int64), SERVER, tag=NOTE)
            if note[0] != t or note[1] not in expected:
                said.append(f"a note of round {t} was {note.tolist()}, expected [{t}, client]")
            weights = torch.empty(length_of(t))
            dist.recv(weights, SERVER, tag=tag_of(t, int(note[1])))
            got.append((t, int(note[1]), fingerprint(weights)))
        for client in expected:
            n, delta = update_of(t, client, seed)
            messages.append((client, torch.cat([torch.tensor([n]), delta])))
        sends = [dist.isend(message, SERVER, tag=tag) for tag, message in held]
        held = [(tag_of(t, c), m) for c, m in messages if c in plan.slow]
        sends += [
            dist.isend(m, SERVER, tag=tag_of(t, c)) for c, m in messages if c not in plan.slow
        ]
        _wait_for(over)
        if not over.is_completed():  # the server waits for the straggler: let it go on
            sends += [dist.isend(message, SERVER, tag=tag) for tag, message in held]
            held = []
            over.wait()
        for send in sends:
            send.wait()
    for tag, message in held:
        dist.send(message, SERVER, tag=tag)
    return {"said": said, "got": got}


def _wait_for(request: dist.Work) -> None:
    """Wait until a request is completed, but not longer than the limit."""
    end = time.perf_counter() + LIMIT
    while not request.is_completed() and time.perf_counter() < end:
        time.sleep(0.002)


def play_server(user_ns: dict, first: int, seed: int) -> list[dict]:
    """All rounds by the student's function; what it returned in each, and communicated."""
    from torch_mpi.record import log

    run_round, found, open_requests = reading_answer(user_ns, "run_round"), [], []
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
        found.append(
            {
                "kind": type(result).__name__ if not pair else type(updates).__name__,
                "updates": _summed_up(updates),
                "late": len(late) if requests else None,
                "open": sum(call["end"] == 0 for call in calls),
                "seconds": seconds,
                "slept": bool(sleeps),
                "calls": calls,
            }
        )
        for rank in (1, 2, 3):
            dist.send(torch.ones(1), rank, tag=OVER + t)
    for request in open_requests:
        request.wait()
    return found


@contextlib.contextmanager
def _counted_sleeps(user_ns: dict) -> Iterator[list[float]]:
    """List the seconds of each sleep of this thread, by the lab's name or by time's."""
    sleep, mine, sleeps = time.sleep, threading.get_ident(), []

    def counted(seconds: float) -> None:
        if threading.get_ident() == mine:
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


def _summed_up(updates) -> dict | None:
    """Of each client n, and three numbers of its update: enough to tell which it was."""
    if not isinstance(updates, dict):
        return None
    found = {}
    for client, value in updates.items():
        if not (isinstance(value, tuple | list) and len(value) == 2):
            found[str(int(client))] = told(type(value).__name__)
            continue
        n, delta = value
        if torch.is_tensor(n) and n.numel() > 1 and not (torch.is_tensor(delta) and delta.ndim):
            found[str(int(client))] = "swapped"
        elif torch.is_tensor(delta) and delta.ndim == 1:
            ends = [delta[0].item(), delta[-1].item()]
            found[str(int(client))] = [told(n), len(delta), *ends]
        else:
            found[str(int(client))] = told(type(delta).__name__)
    return found


# -- local training ---------------------------------------------------------------------------


def small_model(seed: int) -> nn.Module:
    """6 features, 3 classes, in double precision."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def samples(seed: int, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, images and labels of a client."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.randn(53, generator=draw, dtype=torch.float64)
    images = torch.randn(n, 6, generator=draw, dtype=torch.float64)
    return weights, images, torch.randint(0, 3, (n,), generator=draw)


@functools.cache
def twin(seed: int, n: int, epochs: int, rate: float, batch: int, how: str = "") -> torch.Tensor:
    """What a client's training gives; ``how`` names a mistake."""
    weights, images, labels = samples(seed, n)
    model, draw = small_model(seed), torch.Generator().manual_seed(seed)
    if how not in ("not loaded", "own start"):
        vector_to_parameters(weights.clone(), model.parameters())
    first = parameters_to_vector(model.parameters()).detach().clone()
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    for _ in range(1 if how == "one epoch" else epochs):
        if how != "same order":
            order = torch.arange(n) if how == "no shuffle" else torch.randperm(n, generator=draw)
        for part in order.split(n if how == "one batch" else batch):
            if how == "drop last" and len(part) < batch:
                continue
            if how != "adds up":
                model.zero_grad()
            reduction = "sum" if how in ("sum", "sum / batch") else "mean"
            loss = functional.cross_entropy(model(images[part]), labels[part], reduction=reduction)
            (loss / batch if how == "sum / batch" else loss).backward()
            _descend(model, 1.0 if how == "no rate" else rate)
    after = parameters_to_vector(model.parameters()).detach()
    return after if how == "weights" else after - (weights if how == "not loaded" else first)


@torch.no_grad()
def _descend(model: nn.Module, rate: float) -> None:
    """Take a step of SGD."""
    for parameter in model.parameters():
        parameter -= rate * parameter.grad
