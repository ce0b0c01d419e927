"""Checks a student's parameter server: the check has its own workers, and replays the server.

The replay uses the records of the server's rank, which show when each gradient arrived and to which
worker the server sent weights. The gradients of the check's workers follow from the weights that
they got. So the replay gives the weights, staleness and leads that the server must have had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from utils.checks.comparison import Mistake, only, same, table, waited
from utils.checks.task import Report, Step, all_came, communication, facts, to_each, value
from utils.cluster.questions import Ranks, Reply

from .probes import SERVER, WORLD, filled, probe_server, toy_gradient

RATES = (0.5, 0.25, 0.125)

LEFT = (
    "Workers leave one after the other. Don't send to a worker that has left, don't wait for it, "
    "and don't count it as the slowest"
)


def enough(ranks: Ranks, report: Report) -> bool:
    """Return whether the world has the lab's size, and report a problem otherwise."""
    if ranks.n != WORLD:
        report.problem(f"Start {WORLD} ranks first: ranks = cluster.start({WORLD}, timeout=60)")
    return ranks.n == WORLD


def answers_of(
    ranks: Ranks, report: Report, probe: Callable, seeds: list[int], **asked: Any
) -> list[Reply]:
    """Ask a probe with a seed for each rank; return all answers, or none if one is missing."""
    if not enough(ranks, report):
        return []
    answers = report.answers(ranks, probe, each=to_each(seed=seeds), **asked)
    return answers if all_came(answers) else []


def jobs_of(
    seed: int,
    workers: Sequence[int],
    steps: int,
    slow: int | None = None,
    ahead: int = 0,
    pairs: bool = False,
) -> list:
    """Return the jobs of workers that leave after different numbers of steps, see `Job`.

    Args:
        slow: a worker that takes longer for each step.
        ahead: how many gradients another worker has pushed before the slow one pushes its first.
        pairs: whether two workers leave in the same round.
    """
    turn = seed % len(workers)
    fast = next((worker for worker in workers if ahead and worker != slow), None)
    return [
        (
            worker,
            steps + (place + turn) % len(workers) // (1 + pairs),
            8 if worker == slow else place % 2,
            (slow, ahead) if worker == fast else (),
            fast if worker == slow else None,
        )
        for place, worker in enumerate(workers)
    ]


def rate_of(seed: int) -> float:
    """Return the learning rate of a check with this seed."""
    return RATES[seed % len(RATES)]


@dataclass
class Replay:
    """What a server did, from its records, and which weights this should give.

    Attributes:
        events: ("send", w), ("gradient", w) and ("leave", w) in order.
        got: the weights that each worker received.
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
        """Yield each event with its gradient, if one came."""
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
        """Return the weights at the start and after each gradient."""
        weights = self.start.clone()
        versions = [weights.tolist()]
        for _, _, gradient in self.gradients():
            if gradient is not None:
                weights -= self.rate * factor * gradient
                versions.append(weights.tolist())
        return versions

    def sent(self, factor: float = 1.0, before: bool = False) -> list[list]:
        """Return (worker, weights) of each send; with `before`, without its own gradient."""
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
        """Return (worker, staleness) of each gradient, or what a wrong idea of it gives."""
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
        """Return the gradients of each round; a round ends when the server sends weights again."""
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
    """Return what a server sent and received, in the order in which it happened."""
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
    """Begin the report with a hint if ranks deadlock, or if messages don't fit or are left over."""
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
    """Run the student's server; return whether it finished and everything is right.

    Args:
        judge: returns the steps for the server's reply and its replay.
        more: further arguments of the function.
        hint: the advice if ranks wait for each other.
    """
    rate = rate_of(report.seed)
    seeds = report.seeds(WORLD)
    asked = {"name": name, "jobs": jobs, "rate": rate, "more": list(more)}
    answers = answers_of(ranks, report, probe_server, seeds, **asked)
    workers = [worker for worker, *_ in jobs]
    hint_if_stuck(report, f"workers = {workers}. {hint}{LEFT}. What happened:")
    if not answers:
        return False
    server = answers[SERVER].value
    got = {worker: answers[worker].value["got"] for worker in workers}
    replay = Replay(_events(server["calls"]), got, seeds, rate)
    return report.follow(SERVER, _served(server, workers, judge(server, replay)))


def _served(server: dict[str, Any], workers: list[int], more: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps for any server, and then further ones."""
    inside = functools.partial(_inside, workers)
    yield communication(server["calls"], only("send", "recv"), inside, waited)
    moved = "You gave weights new memory. Update it in place, with -="
    yield facts({moved: server["moved"]})
    yield from more


def _inside(workers: list[int], calls: list[dict]) -> str | None:
    """Return a problem if the server talks to a rank that isn't one of its workers."""
    others = sorted({call["peer"] for call in calls} - set(workers))
    if not others:
        return None
    return f"The server talks to rank {others[0]}. Talk only to the workers {workers}"


def protocol(said: str | None) -> Step:
    """Return the step that a server keeps its protocol; `said` describes what it broke."""
    return facts({said or "": said}, kind="communication")


def stepwise(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps that each gradient is a separate step, with the right staleness."""
    yield _sent_weights(replay)
    mistakes = _wrong_steps(
        replay, replay.start.tolist(), lambda factor: replay.versions(factor)[-1]
    )
    end = replay.versions()[-1]
    yield value(server["weights"], end, mistakes, what="the final weights")
    rows = server["result"]
    form = "the list of pairs (rank, staleness)"
    yield value(rows, replay.rows(), _wrong_rows(replay, rows), what="your list", form=form)


def _sent_weights(replay: Replay) -> Step:
    """Return the step that every worker got the weights of that moment."""
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
            "You sent a worker the weights without its own gradient. Apply first, then send",
        ),
        Mistake(
            lambda got: _is_older(got, replay),
            "You sent weights that lack gradients. Apply each gradient when it comes",
        ),
    ]
    what = "the weights that the server sent, as (rank, weights)"
    return value(sent, replay.sent(), mistakes, what=what)


def _is_older(got: list, replay: Replay) -> bool:
    """Return whether the first wrong weights are an earlier version of the server's weights."""
    pairs = zip(got, replay.sent(), strict=True)
    _, first_wrong = next(pair for pair, right in pairs if not same(pair, right))
    return any(same(first_wrong, version) for version in replay.versions())


def _wrong_steps(replay: Replay, unchanged: list, after: Callable[[float], list]) -> list[Mistake]:
    """Return the mistakes that students make instead of w - lr · gradient."""
    workers = len(replay.workers)
    mean = after(1 / workers)
    return table({
        "The weights never changed. Update the tensor weights in place, and send it": unchanged,
        f"You divided by {workers}. Each gradient is a separate step here, lr · gradient": mean,
        "You went uphill. Subtract lr · gradient": after(-1.0),
        "The learning rate is missing": after(1 / replay.rate),
    })


def _wrong_rows(replay: Replay, rows: Any) -> list[Mistake]:
    """Return mistakes in the staleness of the gradients; `rows` is what the server returned."""
    expected = replay.rows()
    came = len(rows) if isinstance(rows, list) else "none"

    def is_negative(pairs: list) -> bool:
        return any(isinstance(p, list) and len(p) == 2 and p[1] < 0 for p in pairs)

    return table({
        "Return a list with one pair for each gradient": lambda pairs: not isinstance(pairs, list),
        "You returned only the ranks. Add the staleness": [worker for worker, _ in expected],
        "You returned only staleness. Return (rank, staleness)": [stale for _, stale in expected],
        f"You returned {came} pairs. Return {len(expected)}, one for each gradient that you "
        "applied": lambda pairs: len(pairs) != len(expected),
        "You exchanged the two. Return (rank, staleness)": [row[::-1] for row in expected],
        "A staleness is below 0, because you noted too many updates. Note their number when you "
        "send weights": is_negative,
        "The staleness is 0 everywhere. Count the updates of other workers after the server sent "
        "the weights and before the gradient came": replay.rows("zero"),
        "The staleness is one too large. Don't count the gradient's own update: note the "
        "staleness before it": replay.rows("with its own"),
        "You returned the number of all updates so far. Subtract their number when this worker "
        "got its weights": replay.rows("versions"),
        "You returned the version at which the worker got its weights. Subtract it from the "
        "current version": replay.rows("read"),
        "You counted the ranks that have updated since then. Count their updates": (
            replay.rows("ranks")
        ),
        "You returned how far the worker is ahead of the slowest. Return how old its weights "
        "were": replay.rows("lead"),
        "You counted this worker's own gradients. Count the updates of other workers since it got "
        "its weights": replay.rows("steps"),
    })
