"""Parameter servers in checks: workers and servers of the check's own, and the replay of a server.

A server is replayed from the records of its rank: they tell which gradient came when, and to whom
weights were sent. The check's own workers compute a gradient that follows from the weights they
got, so the replay gives the weights, the staleness and the leads that the server must have had.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.comparison import Mistake, only, same, table, waited
from utils.checks.probe import numbers, reading_answer, recorded, told
from utils.checks.task import Report, Step, all_came, communication, facts, to_each, value
from utils.cluster.questions import Ranks, Reply

# Ranks of lab 07, the server among them.
WORLD = 6
SERVER = 0
RATES = (0.5, 0.25, 0.125)
# Seconds between two looks of a slow worker.
LOOK = 0.0002

LEFT = (
    "They leave one after the other. Who has left gets no weights, is not waited for, and does not "
    "count among the slowest"
)


def blank(workers: int) -> torch.Tensor:
    """Return weights that nobody has set yet, of another length and type for fewer workers."""
    return torch.empty(4 + workers, dtype=torch.float64 if workers < 3 else torch.float32)


def filled(seed: int, workers: int) -> torch.Tensor:
    """Return weights of this seed."""
    return numbers(seed, len(blank(workers))).to(blank(workers).dtype)


def toy_gradient(weights: torch.Tensor, seed: int, k: int) -> torch.Tensor:
    """Return the k-th gradient of the worker with this seed, which no other rank is told."""
    return 0.5 * weights - numbers(seed + k, len(weights)).to(weights.dtype)


def enough(ranks: Ranks, report: Report) -> bool:
    """Return whether there are as many ranks as the lab has; if not, that is a problem."""
    if ranks.n != WORLD:
        report.problem(f"the check needs {WORLD} ranks: ranks = cluster.start({WORLD}, timeout=60)")
    return ranks.n == WORLD


def answers_of(
    ranks: Ranks, report: Report, probe: Callable, seeds: list[int], **asked: Any
) -> list[Reply]:
    """Ask a probe with a seed for each rank; return the answers if all came, otherwise none."""
    if not enough(ranks, report):
        return []
    answers = report.answers(ranks, probe, each=to_each(seed=seeds), **asked)
    return answers if all_came(answers) else []


def jobs_of(seed: int, workers: Sequence[int], steps: int, slow: int | None = None) -> list:
    """Return (rank, steps, looks) of workers, which leave after different numbers of steps."""
    turn = seed % len(workers)
    return [
        (worker, steps + (place + turn) % len(workers), 8 if worker == slow else place % 2)
        for place, worker in enumerate(workers)
    ]


def rate_of(seed: int) -> float:
    """Return the learning rate of a check with this seed."""
    return RATES[seed % len(RATES)]


def _toy_worker(seed: int, workers: int, steps: int, looks: int) -> list[list[float]]:
    """Work for so many steps, then leave; returns the weights that came.

    A worker looks so many times for new weights before it hands in what it has: time in which
    others go on.
    """
    came = []
    weights = blank(workers)
    request = dist.irecv(weights, SERVER)
    for k in range(steps):
        request.wait()
        came.append(weights.tolist())
        gradient = toy_gradient(weights, seed, k)
        request = dist.irecv(weights := blank(workers), SERVER)
        for _ in range(looks):
            request.is_completed()
            time.sleep(LOOK)
        dist.send(torch.ones(1), SERVER)
        dist.send(gradient, SERVER)
    request.wait()
    came.append(weights.tolist())
    dist.send(torch.zeros(1), SERVER)
    return came


def probe_server(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, rate: float, more: list
) -> dict:
    """Call a server of the student's, with workers of the check's.

    Args:
        seed: of the server's weights, or of this worker's gradients.
        more: further arguments; JSON has no infinity, which is `None` here.
    """
    mine = {worker: how for worker, *how in jobs}.get(rank)
    if rank == SERVER:
        weights = filled(seed, len(jobs))
        workers = [worker for worker, *_ in reversed(jobs)]
        memory = weights.data_ptr()
        bounds = [math.inf if bound is None else bound for bound in more]
        function = reading_answer(user_ns, name, changes=(0,))
        result, calls = recorded(function, weights, workers, rate, *bounds)
        moved = weights.data_ptr() != memory
        return {"weights": weights, "result": told(result), "calls": calls, "moved": moved}
    return {"got": _toy_worker(seed, len(jobs), *mine)} if mine else {}


@dataclass
class Replay:
    """What a server has done, from its records, and what it had to make of it.

    Attributes:
        events: ("send", w), ("gradient", w) and ("leave", w) in their order.
        got: of each worker, the weights that it was sent.
    """

    events: list[tuple[str, int]]
    got: dict[int, list[list[float]]]
    seeds: Sequence[int]
    rate: float
    workers: Sequence[int] = field(init=False)
    start: torch.Tensor = field(init=False)

    def __post_init__(self):
        self.workers = sorted(self.got)
        self.start = filled(self.seeds[SERVER], len(self.got))

    def gradients(self) -> Iterator[tuple[str, int, torch.Tensor | None]]:
        """Yield the events, with the gradient that came."""
        count = dict.fromkeys(self.workers, 0)
        for kind, worker in self.events:
            gradient = None
            if kind == "gradient":
                k = count[worker]
                at = torch.tensor(self.got[worker][k], dtype=self.start.dtype)
                gradient = toy_gradient(at, self.seeds[worker], k)
                count[worker] += 1
            yield kind, worker, gradient

    def versions(self, factor: float = 1.0) -> list[list[float]]:
        """Return the weights at the beginning, and after each gradient."""
        weights = self.start.clone()
        versions = [weights.tolist()]
        for _, _, gradient in self.gradients():
            if gradient is not None:
                weights -= self.rate * factor * gradient
                versions.append(weights.tolist())
        return versions

    def sent(self, factor: float = 1.0, before: bool = False) -> list[list]:
        """Return to whom weights were sent, and which; or those without its own gradient."""
        versions = self.versions(factor)
        count = 0
        old: dict[int, int] = {}
        sent = []
        for kind, worker in self.events:
            if kind == "gradient":
                old[worker] = count
                count += 1
            elif kind == "send":
                sent.append([worker, versions[old.get(worker, count) if before else count]])
        return sent

    def rows(self, idea: str = "staleness") -> list[list[int]]:
        """Return (worker, staleness) of each gradient, or a wrong idea of staleness."""
        rows: list[list[int]] = []
        at: dict[int, int] = {}
        clock = dict.fromkeys(self.workers, 0)
        here = set(self.workers)
        for kind, worker in self.events:
            if kind == "send":
                at[worker] = len(rows)
            elif kind == "leave":
                here.discard(worker)
            else:
                others = [w for w, _ in rows[at[worker] :]]
                slowest = min(clock[w] for w in here)
                values = {
                    "staleness": len(others),
                    "with its own": len(others) + 1,
                    "versions": len(rows),
                    "read": at[worker],
                    "ranks": len(set(others)),
                    "lead": clock[worker] - slowest,
                    "steps": clock[worker],
                    "zero": 0,
                }
                clock[worker] += 1
                rows.append([worker, values[idea]])
        return rows

    def rounds(self) -> list[dict[int, torch.Tensor]]:
        """Return the gradients of each round: it is over when weights are sent again."""
        rounds: list[dict[int, torch.Tensor]] = []
        fresh = True
        for kind, worker, gradient in self.gradients():
            if kind == "send":
                fresh = True
            elif gradient is not None:
                if fresh:
                    rounds.append({})
                fresh = False
                rounds[-1][worker] = gradient
        return rounds


def _events(calls: list[dict]) -> list[tuple[str, int]]:
    """Return what a server has sent and got, in the order in which it happened."""
    messages = [call for call in calls if call["op"] in ("send", "recv")]
    messages.sort(key=lambda call: call["start"] if call["op"] == "send" else call["end"])
    last = {call["peer"]: call for call in messages if call["op"] == "recv"}
    events = []
    for call in messages:
        if call["op"] == "send":
            events.append(("send", call["peer"]))
        elif call["nbytes"] > 4:
            events.append(("gradient", call["peer"]))
        elif last[call["peer"]] is call:
            events.append(("leave", call["peer"]))
    return events


def hint_if_stuck(report: Report, hint: str) -> None:
    """Say this first, where ranks wait for each other, or messages do not fit or are left over."""
    stuck = report.kinds & {"CommunicationTimeout", "CommunicationMismatch"}
    if stuck or any(problem.kind == "unreceived" for problem in report.problems):
        report.begin_with(hint)


def judge_server(
    ranks: Ranks,
    report: Report,
    name: str,
    jobs: list,
    judge: Callable[[dict[str, Any], Replay], Iterator[Step]],
    more: Sequence = (),
    hint: str = "",
) -> bool:
    """Ask a server of the student's; return whether it came to an end, and all is right.

    Args:
        judge: the steps for what the server told, and its replay.
        more: further arguments of the function.
        hint: what to say if ranks wait for each other.
    """
    rate = rate_of(report.seed)
    seeds = report.seeds(WORLD)
    asked = {"name": name, "jobs": jobs, "rate": rate, "more": list(more)}
    answers = answers_of(ranks, report, probe_server, seeds, **asked)
    workers = [worker for worker, *_ in jobs]
    hint_if_stuck(report, f"workers = {workers}. {hint}{LEFT}. What came of it:")
    if not answers:
        return False
    server = answers[SERVER].value
    got = {worker: answers[worker].value["got"] for worker in workers}
    replay = Replay(_events(server["calls"]), got, seeds, rate)
    return report.follow(SERVER, _served(server, workers, judge(server, replay)))


def _served(server: dict[str, Any], workers: list[int], more: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps for any server, and then more of them."""
    inside = functools.partial(_inside, workers)
    yield communication(server["calls"], only("send", "recv"), inside, waited)
    moved = "weights has other memory than before: update it in place, with -="
    yield facts({moved: server["moved"]})
    yield from more


def _inside(workers: list[int], calls: list[dict]) -> str | None:
    """Say whether the server talks to others than its workers: a rule."""
    others = sorted({call["peer"] for call in calls} - set(workers))
    if not others:
        return None
    return f"it talks to rank {others[0]}, but the argument workers was {workers}"


def protocol(said: str | None) -> Step:
    """Return the step that a server keeps its protocol; `said` is what it has broken."""
    return facts({said or "": said}, kind="communication")


def stepwise(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps that each gradient is a step of its own, with the right staleness."""
    yield _sent_weights(replay)
    mistakes = _wrong_steps(
        replay, replay.start.tolist(), lambda factor: replay.versions(factor)[-1]
    )
    end = replay.versions()[-1]
    yield value(server["weights"], end, mistakes, what="the weights in the end")
    rows = server["result"]
    form = "the list of pairs (rank, staleness)"
    yield value(rows, replay.rows(), _wrong_rows(replay, rows), what="the list", form=form)


def _sent_weights(replay: Replay) -> Step:
    """Return the step that every worker got the weights as they were then."""
    places = dict.fromkeys(replay.workers, 0)
    sent = []
    for kind, worker in replay.events:
        if kind == "send":
            sent.append([worker, replay.got[worker][places[worker]]])
            places[worker] += 1
    start = replay.start.tolist()
    mistakes = [
        *_wrong_steps(replay, [[worker, start] for worker, _ in sent], replay.sent),
        Mistake(
            replay.sent(before=True),
            "these are the weights before its own gradient was applied: apply first, then send",
        ),
        Mistake(
            lambda got: _is_older(got, replay),
            "these are weights from before some gradients that have come: apply each when it comes",
        ),
    ]
    what = "the weights that it sent, as (rank, weights)"
    return value(sent, replay.sent(), mistakes, what=what)


def _is_older(got: list, replay: Replay) -> bool:
    """Return whether the first wrong weights once were those of the server."""
    pairs = zip(got, replay.sent(), strict=True)
    _, first_wrong = next(pair for pair, right in pairs if not same(pair, right))
    return any(same(first_wrong, version) for version in replay.versions())


def _wrong_steps(replay: Replay, unchanged: list, after: Callable[[float], list]) -> list[Mistake]:
    """Return what else than w - lr · gradient may have been computed."""
    workers = len(replay.workers)
    mean = after(1 / workers)
    return table({
        "these are the weights of the beginning: update the tensor weights in place, and send that "
        "one": unchanged,
        f"each gradient is a step of its own here: lr · gradient, not divided by {workers}": mean,
        "uphill: subtract lr · gradient": after(-1.0),
        "the learning rate is missing": after(1 / replay.rate),
    })


def _wrong_rows(replay: Replay, rows: Any) -> list[Mistake]:
    """Return what else a server may say of the staleness of each gradient; rows: what it said."""
    expected = replay.rows()
    came = len(rows) if isinstance(rows, list) else "none"

    def is_negative(pairs: list) -> bool:
        return any(isinstance(p, list) and len(p) == 2 and p[1] < 0 for p in pairs)

    return table({
        "serve returns a list, one pair a gradient": lambda pairs: not isinstance(pairs, list),
        "only the ranks: the staleness is missing": [worker for worker, _ in expected],
        "only the staleness: pairs of (rank, staleness)": [stale for _, stale in expected],
        f"expected {len(expected)} pairs, one for each gradient that was applied, got "
        f"{came}": lambda pairs: len(pairs) != len(expected),
        "the pairs are the other way round: (rank, staleness)": [row[::-1] for row in expected],
        "less than 0 updates late: of the number of updates when its weights were sent, too many "
        "were noted": is_negative,
        "staleness 0 everywhere: count the updates between the sending of the weights and the "
        "coming of the gradient, those of other workers": replay.rows("zero"),
        "one too many: the gradient's own update does not count. Note the staleness before the "
        "update, or subtract 1": replay.rows("with its own"),
        "this is the number of all updates so far: subtract what it was when this worker got its "
        "weights": replay.rows("versions"),
        "this is the version that the worker got its weights at: subtract it from the version "
        "now": replay.rows("read"),
        "this counts the ranks that have updated meanwhile; count their updates": (
            replay.rows("ranks")
        ),
        "this is how many steps the worker is ahead of the slowest, not how old its weights "
        "were": replay.rows("lead"),
        "this is how many gradients this worker has handed in before: count those of the others, "
        "since it got its weights": replay.rows("steps"),
    })
