"""The check of a federated round, and the clients that take part in it.

The clients follow a plan that all ranks know: which clients are slow, and which rank is busy. No
other rank knows what the server sends, or what the clients of a rank send back. A slow client sends
its update in the next round, after the server has said that this round is over. So the order of
events is certain, however fast the machine is.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.comparison import Calls, is_number, only, same, some
from utils.checks.probe import fingerprint, numbers, reading_answer, recorded, told
from utils.checks.task import Report, Step, communication, facts, task, to_each
from utils.checks.trials import enough
from utils.cluster.questions import Ranks, Reply


def seeded(seed: int) -> torch.Generator:
    """Return a generator with this seed."""
    return torch.Generator().manual_seed(seed)


def facts_about(about: str, wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these is true; each message starts with `about`."""
    return facts({f"{about}: {text}": is_so for text, is_so in wrong.items()})


def has_other_length(n: int) -> Callable[[Any], bool]:
    """Return a function that recognizes anything but a list of n entries."""
    return lambda reply: not isinstance(reply, list) or len(reply) != n


def has_nan(reply: Any) -> bool:
    """Return whether this is a list with a number that is not finite."""
    entries = reply if isinstance(reply, list) else []
    return any(isinstance(entry, float) and not math.isfinite(entry) for entry in entries)


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


def _home(client: int) -> int:
    """Return the rank that a client is on."""
    return 1 + client % 3


def length_of(t: int) -> int:
    """Return how many weights a round has."""
    return WEIGHTS + 100 * (t % len(ROUNDS))


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
    rounds = []
    open_requests = []
    patience = math.inf
    for t, plan in enumerate(ROUNDS, first):
        start = time.perf_counter()
        allowed = min(plan.seconds, patience)
        with _counted_sleeps(user_ns) as sleeps:
            result, calls = recorded(run_round, t, weights_of(t, seed), list(plan.chosen), allowed)
        seconds = time.perf_counter() - start
        if seconds > max(allowed, 1.0):  # the verdict is certain, so the other rounds can be short
            patience = 0.2
        about, requests = _about(result)
        open_requests += requests
        rounds.append({
            **about,
            "open": sum(call["end"] == 0 for call in calls),
            "seconds": seconds,
            "slept": bool(sleeps),
            "calls": calls,
        })
        for rank in range(1, WORLD):
            dist.send(torch.ones(1), rank, tag=OVER + t)
    for request in open_requests:
        request.wait()
    return rounds


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
        return [told(n), len(delta), delta[0].item(), delta[-1].item()]
    return told(type(delta).__name__)


@task("12.5", "a round with a deadline", points=4)
def run_round(ranks: Ranks, report: Report) -> None:
    """Judge whether all updates in time are in, no other is, and no pending request is lost."""
    if not enough(ranks, report, WORLD):
        return
    first = report.seed % 50
    seeds = report.seeds(WORLD)
    answers = report.answers(ranks, probe_round, first=first, each=to_each(seed=seeds))
    if not answers:
        if not report.open:
            # This comes first, because a deadlock's advice may mislead here.
            report.begin_with(NEEDS)
        return
    if _all_arrived(report, answers, first, seeds):
        rounds = enumerate(zip(ROUNDS, answers[0].value, strict=True), first)
        steps = (_round(t, plan, result, seeds) for t, (plan, result) in rounds)
        report.follow(SERVER, itertools.chain.from_iterable(steps))


NEEDS = (
    "In a round, send each chosen client torch.tensor([t, client]) with tag=NOTE and the weights "
    "with tag=tag_of(t, client), both by isend to home(client), and call irecv for 1 + "
    "weights.numel() numbers from there with the same tag. Start everything before you wait, and "
    "don't wait for slow clients: below is what happened"
)


def _all_arrived(report: Report, answers: list[Reply], first: int, seeds: list[int]) -> bool:
    """Report to the server which weights the clients lack; return whether all arrived."""
    wanted = [(t, client) for t, plan in enumerate(ROUNDS, first) for client in plan.chosen]
    for answer in answers[1:]:
        for text in _wrong_notes(answer, seeds[SERVER]):
            report.problem(text, SERVER, "communication")
        pairs = [(t, client) for t, client, _ in answer.value["got"]]
        wanted_here = [(t, client) for t, client in wanted if _home(client) == answer.rank]
        if not report.found and sorted(pairs) != sorted(wanted_here):
            report.problem(f"You sent weights to rank {answer.rank} for {pairs}", SERVER)
    return not report.found


def _wrong_notes(answer: Reply, seed: int) -> Iterator[str]:
    """Yield what a rank of clients received wrongly from the server with this seed."""
    yield from answer.value["said"]
    for t, client, weights in answer.value["got"]:
        if weights != fingerprint(weights_of(t, seed)):
            yield f"You sent client {client} other weights than the argument in round {t}"


def _round(t: int, plan: Round, result: dict[str, Any], seeds: list[int]) -> Iterator[Step]:
    about = f"round {t}, clients {list(plan.chosen)}, {plan.seconds:g} s"
    yield communication(result["calls"], only("send", "recv"), some(range(WORLD)), _large)
    updates = result["updates"]
    seconds = result["seconds"]
    no_pair = f"You returned {result['kind']}. Return (updates, late), with updates as a dict "
    yield facts_about(about, {no_pair + "{client: (n, delta)}": updates is None})
    in_time = plan.in_time(_home)
    returned = {int(client) for client in updates}
    for client in sorted(returned - set(in_time)):
        too_late = (
            f"You returned the update of client {client}, which came after the deadline: the "
            f"server took {seconds:.1f} s. Leave it out"
        )
        yield facts_about(about, {too_late: True})
    for client in sorted(set(in_time) - returned):
        forgotten = (
            f"You left out the update of client {client}, which came in time. Start all sends and "
            "receives before you wait for any"
        )
        yield facts_about(about, {forgotten: True})
    for client in in_time:
        n, delta = update_of(t, client, seeds[_home(client)])
        expected = [n, len(delta), delta[0].item(), delta[-1].item()]
        yield from _update(updates[str(client)], expected, t, f"{about}: client {client}")
    yield from _end(plan, result, len(in_time) == len(plan.chosen), about)


def _end(plan: Round, result: dict[str, Any], all_came: bool, about: str) -> Iterator[Step]:
    """Judge when a round ends, and whether `late` has exactly the pending requests."""
    seconds = result["seconds"]
    late = result["late"]
    still_open = result["open"]
    wrong = {
        f"You returned after {seconds:.2f} s, and updates were missing. Wait for them until the "
        f"deadline, {plan.seconds:g} s from the call": (
            not all_came and seconds < plan.seconds - 0.02
        ),
        f"You returned only after {seconds:.1f} s, but all updates were there. Return as soon as "
        "nothing is missing": all_came and seconds > plan.seconds - 0.5,
        f"You returned after {seconds:.1f} s. The deadline is {plan.seconds:g} s from the call, "
        "for all clients together": not all_came and seconds > plan.seconds + 1,
        "You kept a processor busy while you waited. Call sleep(0.002) between two looks": (
            not (all_came or result["slept"])
        ),
        # One or two may have completed since the server looked.
        f"You put {late} requests into late, but all updates of this round have come. Put only "
        "pending requests of this round there": (
            all_came and late is not None and late > still_open + 2
        ),
        "Return late as a list of requests from isend and irecv": late is None,
    }
    yield facts_about(about, wrong)
    forgotten = (
        f"{about}: {still_open} requests are pending, but late has {late}. Put the late receives "
        "and the pending sends into it, or nobody ever completes them"
    )
    yield facts({forgotten: late < still_open}, kind="communication")


def _large(calls: Calls) -> str | None:
    large = next((call for call in calls if call["blocking"] and call["nbytes"] > 16), None)
    if large is None:
        return None
    return (
        f"You called dist.{large['op']} for weights or updates, but rank {large['peer']} may be "
        f"slow. Use dist.i{large['op']}"
    )


def _update(update: Any, expected: list[float], t: int, about: str) -> Iterator[Step]:
    """Judge an update that the server returned: n, its length, its first and last number."""
    if same(update, expected):
        return
    swapped = "(delta, n)" if update == "swapped" else f"{update}"
    no_pair = f"Make each value a pair (n, delta), not {swapped}"
    yield facts_about(about, {no_pair: not isinstance(update, list)})
    n, length, first = update[:3]
    wrong = {
        "Return n as a number, the first entry of the message": not is_number(n),
        "Your update has one entry too many. The first number of the message is n": (
            length == expected[1] + 1
        ),
        f"Your update has {length} entries, expected {expected[1]}": length != expected[1],
    }
    yield facts_about(about, wrong)
    off = abs(first - expected[2])
    wrong = {
        f"You returned another round's update. Use tags that belong to round {t}": off >= 99,
        "You returned another client's update. Receive each into a new tensor": off > 0.5,
        f"You returned n = {n:g} and an update from {first:g}, expected {expected[0]:g} and "
        f"{expected[2]:g}": True,
    }
    yield facts_about(about, wrong)
