"""Checks of lab 07: a parameter server, and what becomes of gradients that come late.

A server is replayed from the records of its rank: they tell which gradient came when, and to whom
weights were sent. The check's own workers compute a gradient that follows from the weights they
got, so the replay gives the weights, the staleness and the leads that the server must have had.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .calls import blocking, broken, only, waited
from .mistakes import Mistake, same
from .model import use_model as use_model
from .probe import answer_named, as_dict, integers, recorded, told
from .task import Report, task

# Ranks of the lab, the server among them.
WORLD = 6
SERVER = 0
# Numbers of a toy model; a header has one.
SIZE = 7
RATES = (0.5, 0.25, 0.125)
# Seconds between two looks of a slow worker.
LOOK = 0.0005

LEFT = (
    "they leave one after the other. Who has left gets no weights, is not waited for, and does not "
    "count among the slowest"
)


def toy_gradient(weights: torch.Tensor, worker: int, k: int) -> torch.Tensor:
    """What a worker hands in as its k-th gradient: tells from which weights, from whom, when."""
    return 0.5 * weights - (10.0 * worker + k)


def _enough(ranks, report: Report) -> bool:
    if ranks.n != WORLD:
        report.problem(f"the check needs {WORLD} ranks: ranks = cluster.start({WORLD}, timeout=60)")
    return ranks.n == WORLD


def _rate(seed: int) -> float:
    return RATES[seed % len(RATES)]


# -- what a server has done -------------------------------------------------------------------


def _toy_worker(worker: int, steps: int, looks: int) -> list[list[float]]:
    """Work for so many steps, then leave; returns the weights that came.

    A worker looks so many times for new weights before it hands in what it has: time in which
    others go on.
    """
    got, weights = [], torch.empty(SIZE)
    request = dist.irecv(weights, SERVER)
    for k in range(steps):
        request.wait()
        got.append(weights.tolist())
        gradient = toy_gradient(weights, worker, k)
        request = dist.irecv(weights := torch.empty(SIZE), SERVER)
        for _ in range(looks):
            request.is_completed()
            time.sleep(LOOK)
        dist.send(torch.ones(1), SERVER)
        dist.send(gradient, SERVER)
    request.wait()
    got.append(weights.tolist())
    dist.send(torch.zeros(1), SERVER)
    return got


def probe_server(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, rate: float, more: dict
) -> dict:
    """A server of the student's, with workers of the check's: ``jobs`` has (rank, steps, looks)."""
    mine = next((job for job in jobs if job[0] == rank), None)
    if rank == SERVER:
        weights, workers = integers(seed, SIZE), [worker for worker, *_ in jobs]
        bound = {"bound": math.inf if more["bound"] is None else more["bound"]} if more else {}
        function = answer_named(user_ns, name)
        result, calls = recorded(function, weights, workers, rate, *bound.values())
        return {"weights": weights, "result": told(result), "calls": calls}
    return {"got": _toy_worker(*mine)} if mine else {}


@dataclass
class Replay:
    """What a server has done, from its records, and what it had to make of it.

    Attributes:
        events: ("send", w), ("gradient", w) and ("leave", w) in their order.
        got: of each worker, the weights that it was sent.
        rate: the learning rate.
    """

    events: list[tuple[str, int]]
    got: dict[int, list[list[float]]]
    start: torch.Tensor
    rate: float
    workers: Sequence[int] = field(init=False)

    def __post_init__(self):
        self.workers = sorted(self.got)

    def gradients(self) -> Iterator[tuple[str, int, torch.Tensor | None]]:
        """The events, with the gradient that came."""
        count = dict.fromkeys(self.workers, 0)
        for kind, worker in self.events:
            gradient = None
            if kind == "gradient":
                k = count[worker]
                gradient = toy_gradient(torch.tensor(self.got[worker][k]), worker, k)
                count[worker] += 1
            yield kind, worker, gradient

    def one_by_one(self, factor: float = 1.0) -> list[float]:
        """The weights in the end, where each gradient is a step of its own."""
        weights = self.start.clone()
        for _, _, gradient in self.gradients():
            if gradient is not None:
                weights -= self.rate * factor * gradient
        return weights.tolist()

    def sent(self, factor: float = 1.0, before: bool = False) -> list[list]:
        """Of each sending: to whom, and the weights then; or those without its own gradient."""
        weights, old, found = self.start.clone(), {}, []
        for kind, worker, gradient in self.gradients():
            if gradient is not None:
                old[worker] = weights.clone()
                weights -= self.rate * factor * gradient
            elif kind == "send":
                found.append([worker, (old.get(worker, weights) if before else weights).tolist()])
        return found

    def rows(self, what: str = "staleness") -> list[list[int]]:
        """(worker, staleness) of each gradient, or a wrong idea of staleness."""
        found: list[list[int]] = []
        at: dict[int, int] = {}
        clock = dict.fromkeys(self.workers, 0)
        here = set(self.workers)
        for kind, worker in self.events:
            if kind == "send":
                at[worker] = len(found)
            elif kind == "leave":
                here.discard(worker)
            else:
                others = [w for w, _ in found[at[worker] :]]
                slowest = min(clock[w] for w in here)
                values = {
                    "staleness": len(others),
                    "with its own": len(others) + 1,
                    "versions": len(found),
                    "read": at[worker],
                    "ranks": len(set(others)),
                    "lead": clock[worker] - slowest,
                    "steps": clock[worker],
                    "zero": 0,
                }
                clock[worker] += 1
                found.append([worker, values[what]])
        return found

    def rounds(self) -> list[dict[int, torch.Tensor]]:
        """The gradients of each round: a round is over when weights are sent again."""
        found: list[dict[int, torch.Tensor]] = []
        fresh = True
        for kind, worker, gradient in self.gradients():
            if kind == "send":
                fresh = True
            elif gradient is not None:
                if fresh:
                    found.append({})
                fresh = False
                found[-1][worker] = gradient
        return found


def _events(calls: list[dict]) -> list[tuple[str, int]]:
    """What a server has sent and got, in the order in which it happened."""
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


def _served(
    ranks, report: Report, name: str, jobs: list, bound: dict | None = None, hint: str = ""
) -> tuple[dict, Replay] | None:
    """Ask a server; its answer and the replay, where it came to an end and broke no first rule."""
    rate = _rate(report.seed)
    given = {"name": name, "seed": report.seed, "jobs": jobs, "rate": rate, "more": bound or {}}
    answers = report.answers(ranks, __name__, "probe_server", **given)
    if not answers:
        if not report.open and any(kind == "error" for _, kind, _ in report.found):
            workers = [worker for worker, *_ in jobs]
            report.problem(f"(workers = {workers}: {LEFT}{hint})")
        return None
    server = answers[SERVER].value
    events = _events(server["calls"])
    workers = [worker for worker, *_ in jobs]
    rules = (only("send", "recv"), _inside(workers), waited)
    if report.found or not report.communication(SERVER, server["calls"], *rules):
        return None
    got = {worker: answers[worker].value["got"] for worker in workers}
    return server, Replay(events, got, integers(report.seed, SIZE), rate)


def _inside(workers: list[int]):
    """The rule that the server talks to its workers only."""

    def rule(calls: list[dict]) -> str | None:
        others = sorted({call["peer"] for call in calls} - set(workers))
        if not others:
            return None
        return f"it talks to rank {others[0]}, but the argument workers was {workers}"

    return rule


def _judge_sent(report: Report, server: dict, replay: Replay) -> bool:
    """Whether every worker got the weights as they were then, and what they are in the end."""
    places = dict.fromkeys(replay.workers, 0)
    got = []
    for kind, worker in replay.events:
        if kind == "send":
            got.append([worker, replay.got[worker][places[worker]]])
            places[worker] += 1
    start = replay.start.tolist()
    mistakes = [
        *_wrong_steps(replay, [[worker, start] for worker, _ in got], replay.sent),
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
    if not report.judge(SERVER, got, replay.sent(), mistakes, what=what):
        return False
    mistakes = _wrong_steps(replay, start, replay.one_by_one)
    expected, what = replay.one_by_one(), "the weights in the end"
    return report.judge(SERVER, server["weights"], expected, mistakes, what=what)


def _is_older(got: list, replay: Replay) -> bool:
    """Whether the first weights that are not as they should be once were those of the server."""
    wrong = next(one for one, right in zip(got, replay.sent(), strict=True) if not same(one, right))
    weights = replay.start.clone()
    versions = [weights.tolist()]
    for _, _, gradient in replay.gradients():
        if gradient is not None:
            weights -= replay.rate * gradient
            versions.append(weights.tolist())
    return any(same(wrong[1], version) for version in versions)


def _wrong_steps(replay: Replay, unchanged: list, after: Callable[[float], list]) -> list[Mistake]:
    """What else than w - lr · gradient may have been computed."""
    workers = len(replay.workers)
    wrong = {
        "these are the weights of the beginning: update the tensor weights in place, and send that "
        "one": unchanged,
        f"each gradient is a step of its own here: lr · gradient, not divided by {workers}":
            after(1 / workers),
        "uphill: subtract lr · gradient": after(-1.0),
        "the learning rate is missing": after(1 / replay.rate),
    }  # fmt: skip
    return [Mistake(gives, said) for said, gives in wrong.items() if not same(gives, after(1.0))]


def _judge_rows(report: Report, server: dict, replay: Replay) -> None:
    """What the server says of the staleness of each gradient."""
    wrong = {
        "staleness 0 everywhere: count the updates between the sending of the weights and the "
        "coming of the gradient, those of other workers": "zero",
        "one too many: the gradient's own update does not count. Note the staleness before the "
        "update, or subtract 1": "with its own",
        "this is the number of all updates so far: subtract what it was when this worker got its "
        "weights": "versions",
        "this is the version that the worker got its weights at: subtract it from the version "
        "now": "read",
        "this counts the ranks that have updated meanwhile; count their updates": "ranks",
        "this is how many steps the worker is ahead of the slowest, not how old its weights "
        "were": "lead",
        "this is how many gradients this worker has handed in before: count those of the others, "
        "since it got its weights": "steps",
    }  # fmt: skip
    expected, got = replay.rows(), server["result"]
    swapped = [[stale, worker] for worker, stale in expected]
    mistakes = [
        Mistake(lambda got: not isinstance(got, list), "serve returns a list, one pair a gradient"),
        Mistake([worker for worker, _ in expected], "only the ranks: the staleness is missing"),
        Mistake([stale for _, stale in expected], "only the staleness: pairs of (rank, staleness)"),
        Mistake(
            lambda got: len(got) != len(expected),
            f"expected {len(expected)} pairs, one for each gradient that was applied, got "
            f"{len(got) if isinstance(got, list) else 'none'}",
        ),
        Mistake(swapped, "the pairs are the other way round: (rank, staleness)"),
        *(
            Mistake(replay.rows(what), said)
            for said, what in wrong.items()
            if replay.rows(what) != expected
        ),
    ]
    form = "the list of pairs (rank, staleness)"
    report.judge(SERVER, got, expected, mistakes, what="the list", form=form)


# -- 7.1 --------------------------------------------------------------------------------------


class Counted:
    """Of a student's worker: how often it asked for more, and computed."""

    def __init__(self, worker: int, steps: int):
        self.worker, self.left, self.computed, self.seen = worker, steps, 0, []
        self.allowed = True

    def more(self) -> bool:
        """Whether there is another step to do."""
        self.allowed = self.left > 0
        self.left -= 1
        return self.allowed

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """The toy gradient of the next step."""
        if not self.allowed:
            raise RuntimeError(
                "compute(weights) was called after more() had said False: ask more() each time "
                "that weights have come, and leave if it says False"
            )
        self.seen.append(weights.tolist())
        self.computed += 1
        return toy_gradient(weights, self.worker, self.computed - 1)


def _weights_for(seed: int, worker: int, k: int) -> torch.Tensor:
    return integers(seed + 100 * worker + k, SIZE)


def _toy_server(seed: int, jobs: list, most: int) -> dict[str, list]:
    """Send each worker fresh weights until it leaves; what each has handed in."""
    handed: dict[str, list] = {str(worker): [] for worker, *_ in jobs}
    here = [worker for worker, *_ in jobs]
    for k in range(most):
        for worker in here:
            dist.send(_weights_for(seed, worker, k), worker)
        for worker in list(here):
            dist.recv(header := torch.empty(1), worker)
            if header.item() == 0:
                here.remove(worker)
            else:
                dist.recv(gradient := torch.empty(SIZE), worker)
                handed[str(worker)].append(gradient.tolist())
    return handed


def probe_work(user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, more: list) -> dict:
    """A worker of the student's, with a server of the check's."""
    steps = {worker: count for worker, count, _ in jobs}
    if rank == SERVER:
        return {"handed": _toy_server(seed, jobs, max(steps.values()) + 1)}
    if rank not in steps:
        return {}
    counted = Counted(rank, steps[rank])
    function = answer_named(user_ns, name)
    _, calls = recorded(function, counted.compute, torch.empty(SIZE), counted.more, *more)
    return {"seen": counted.seen, "calls": calls}


def _ask_worker(ranks, report: Report, name: str, more: Sequence = ()) -> list | None:
    """The answers of :func:`probe_work`; `None` where something was wrong already."""
    jobs = _jobs(report.seed, [1, 2, 3], 3)
    given = {"name": name, "seed": report.seed, "jobs": jobs, "more": list(more)}
    answers = report.answers(ranks, __name__, "probe_work", **given)
    found = [kind for _, kind, _ in report.found]
    if "unreceived" in found:
        senders = {rank for _, kind, rank in report.found if kind == "unreceived"}
        report.problem(
            "(the last weights were sent, and not received: receive first, then ask more())"
            if senders == {SERVER}
            else "(each sending of weights has one answer: header and gradient, or a farewell)"
        )
    elif "error" in found and not report.open:
        report.problem(
            "(the protocol: receive weights, then ask more() once; if it says False, leave() and "
            "return; else hand_in what was computed, and receive again)"
        )
    if not answers or report.found:
        return None
    for worker, *_ in jobs:
        rules = (only("send", "recv"), waited)
        report.communication(worker, answers[worker].value["calls"], *rules)
    return None if report.found else [(jobs, answers)]


def _jobs(seed: int, workers: Sequence[int], steps: int, slow: int | None = None) -> list:
    """(rank, steps, looks): all workers leave after different numbers of steps."""
    turn = seed % len(workers)
    return [
        (worker, steps + (place + turn) % len(workers), 8 if worker == slow else place % 2)
        for place, worker in enumerate(workers)
    ]


@task("7.1", "the synchronous server", points=3)
def serve_in_rounds(ranks, report: Report) -> None:
    """A worker that follows the protocol; a server that takes one step a round."""
    if not _enough(ranks, report):
        return
    _judge_work(ranks, report)
    for workers in ([1, 2, 3], [2, 5], [4]):
        if report.found:
            return
        jobs = _jobs(report.seed, workers, 3, slow=workers[-1])
        served = _served(ranks, report, "serve_in_rounds", jobs)
        if served is not None:
            _judge_rounds(report, *served)


def _judge_work(ranks, report: Report) -> None:
    for jobs, answers in _ask_worker(ranks, report, "work") or ():
        handed = answers[SERVER].value["handed"]
        for worker, steps, _ in jobs:
            weights = [_weights_for(report.seed, worker, k) for k in range(steps + 1)]
            expected = [toy_gradient(weights[k], worker, k).tolist() for k in range(steps)]
            stale = [toy_gradient(weights[0], worker, k).tolist() for k in range(steps)]
            seen = answers[worker].value["seen"]
            mistakes = [
                Mistake(stale, "every gradient was computed with the first weights that came"),
                Mistake(
                    [one.tolist() for one in weights[:steps]],
                    "these are the weights: hand in compute(weights)",
                ),
                Mistake(
                    lambda got, n=steps: len(got) != n,
                    f"{len(handed[str(worker)])} gradients came, {steps} were expected, as "
                    f"more() said True {steps} times",
                ),
                Mistake(
                    lambda _, seen=seen, w=weights: not same(seen, [x.tolist() for x in w[:-1]]),
                    "compute got other weights than those that the server had sent",
                ),
            ]
            what = "work: the gradients that it handed in"
            if len(handed[str(worker)]) != steps or _right_count(report, worker, len(seen), steps):
                report.judge(worker, handed[str(worker)], expected, mistakes, what=what)


def _right_count(report: Report, worker: int, computed: int, expected: int) -> bool:
    if computed != expected:
        report.problem(
            f"compute was called {computed} times, expected {expected}: one gradient is handed in "
            "each time, and when more() says False, nothing is to be computed any more",
            worker,
        )
    return computed == expected


def _judge_rounds(report: Report, server: dict, replay: Replay) -> None:
    outstanding: set[int] = set()
    answered: set[int] = set()
    here = set(replay.workers)
    for kind, worker in replay.events:
        if kind == "send":
            if outstanding and answered:
                missing = ", ".join(map(str, sorted(outstanding)))
                report.problem(
                    f"rank {worker} got new weights while rank {missing} had not answered: the "
                    "round is over when everybody has handed in, then there is one step, and "
                    "then all get the new weights",
                    SERVER,
                    "communication",
                )
                return
            if not outstanding:
                answered = set()
            outstanding.add(worker)
        else:
            if outstanding | answered != here and not answered:
                forgotten = sorted(here - outstanding)
                report.problem(
                    f"rank {forgotten[0]} is still there, and got no weights in this round",
                    SERVER,
                    "communication",
                )
                return
            outstanding.discard(worker)
            answered.add(worker)
            if kind == "leave":
                here.discard(worker)
                answered.discard(worker)
    _judge_steps(report, server, replay)


def _judge_steps(report: Report, server: dict, replay: Replay) -> None:
    rounds, workers = replay.rounds(), len(replay.workers)

    def after(divisor, rate=replay.rate, last=False) -> list[float]:
        weights = replay.start.clone()
        for gradients in filter(None, rounds):
            each = list(gradients.values())
            total = len(each) * each[-1] if last else sum(each)
            weights -= rate * total / divisor(gradients)
        return weights.tolist()

    mistakes = [
        Mistake(replay.start.tolist(), "the weights are unchanged: update the argument in place"),
        Mistake(after(lambda _: 1), "this is the sum of the round's gradients: take the mean"),
        Mistake(
            after(lambda _: workers),
            f"it always divides by {workers}: of a round that a worker has left in, the mean is "
            "over the gradients that came",
        ),
        Mistake(after(len, -replay.rate), "uphill: subtract lr · mean"),
        Mistake(after(len, 1.0), "the learning rate is missing"),
        Mistake(
            after(lambda gradients: len(gradients) ** 2), "divided twice: sum / number is the mean"
        ),
        Mistake(
            after(len, last=True),
            "this is the last worker's gradient, once for each worker: receive fills the same "
            "tensor each time, so add it up at once, or keep a copy",
        ),
    ]
    what = f"{workers} workers: the weights in the end"
    if not report.judge(SERVER, server["weights"], after(len), mistakes, what=what):
        return
    total = sum(map(len, rounds))
    expected = sum(bool(gradients) for gradients in rounds)
    mistakes = [
        Mistake(expected + 1, "a round in which all leave and nobody hands in is none"),
        Mistake(total, "this counts gradients; count rounds"),
    ]
    what = f"{workers} workers: the number of rounds"
    form = "the number of rounds"
    report.judge(SERVER, server["result"], expected, mistakes, what=what, form=form)


# -- 7.2 --------------------------------------------------------------------------------------


@task("7.2", "the asynchronous server, and staleness", points=3)
def serve_anyone(ranks, report: Report) -> None:
    """Whoever comes first is served first, alone, and at once."""
    if not _enough(ranks, report):
        return
    for workers in ([1, 2, 3], [1, 2, 4, 5], [3]):
        jobs = _jobs(report.seed, workers, 4, slow=workers[report.seed % len(workers)])
        served = _served(ranks, report, "serve_anyone", jobs)
        if served is not None:
            server, replay = served
            if (
                report.communication(SERVER, server["calls"], _from_anyone)
                and _answers_at_once(report, replay)
                and _judge_sent(report, server, replay)
            ):
                _judge_rows(report, server, replay)
        if report.found:
            return


def _from_anyone(calls: list[dict]) -> str | None:
    """The rule that no worker is waited for by name."""
    headers = [call for call in calls if call["op"] == "recv" and call["nbytes"] == 4]
    named = [call["peer"] for call in headers if not call["any_source"]]
    workers = {call["peer"] for call in headers}
    if not named or len(workers) == 1:
        return None
    return (
        f"waits for rank {named[0]} by name, while others may have come: receive(gradient) "
        "without a source takes whoever comes first"
    )


def _answers_at_once(report: Report, replay: Replay) -> bool:
    """Whether each gradient is answered before the next message is received."""
    owed: int | None = None
    for kind, worker in replay.events:
        if owed is not None and (kind, worker) != ("send", owed):
            report.problem(
                f"rank {owed} handed in a gradient, and got no weights before the server turned "
                "to somebody else: answer at once, or it is no asynchronous server",
                SERVER,
                "communication",
            )
            return False
        owed = worker if kind == "gradient" else None
    return True


# -- 7.3 --------------------------------------------------------------------------------------


@task("7.3", "one server, three consistency models", points=4)
def serve(ranks, report: Report) -> None:
    """Nobody gets weights who is more than `bound` ahead; nobody waits who is not."""
    if not _enough(ranks, report):
        return
    for workers, bound in (([1, 2, 3], 2), ([1, 2, 4, 5], 0), ([2, 3], 1), ([1, 2, 3], None)):
        jobs = _jobs(report.seed, workers, 7, slow=workers[report.seed % len(workers)])
        hint = f". bound = {'inf' if bound is None else bound}: who had to wait must be thought of "
        hint += "again when the slowest has moved on"
        served = _served(ranks, report, "serve", jobs, {"bound": bound}, hint)
        if served is not None:
            server, replay = served
            if (
                report.communication(SERVER, server["calls"], _from_anyone)
                and _keeps_bound(report, replay, math.inf if bound is None else bound)
                and _judge_sent(report, server, replay)
            ):
                _judge_rows(report, server, replay)
        if report.found:
            return


def _keeps_bound(report: Report, replay: Replay, bound: float) -> bool:
    """Whether weights went to those, and to all those, who may go on."""
    clock = dict.fromkeys(replay.workers, 0)
    idle = set(replay.workers)
    for kind, worker in replay.events:
        slowest = min(clock.values()) if clock else 0
        if kind == "send":
            lead = clock[worker] - slowest
            if lead > bound:
                report.problem(
                    f"bound {bound}: rank {worker} got weights when it was {lead} clocks ahead of "
                    "the slowest: it may go on if clock[w] - min(clock.values()) <= bound",
                    SERVER,
                    "communication",
                )
                return False
            idle.discard(worker)
            continue
        held = [w for w in sorted(idle) if clock[w] - slowest <= bound]
        if held:
            lead = clock[held[0]] - slowest
            report.problem(
                f"bound {bound}: rank {held[0]} is {lead} clocks ahead of the slowest, which is "
                "allowed, and the server received again before it sent weights: before each "
                "receive look at all who wait",
                SERVER,
                "communication",
            )
            return False
        if kind == "gradient":
            clock[worker] += 1
            idle.add(worker)
        else:
            del clock[worker]
    return True


# -- 7.4 --------------------------------------------------------------------------------------


@task("7.4", "weak consistency: several steps alone", points=2)
def work_locally(ranks, report: Report) -> None:
    """`every` steps on one's own weights, then the sum of their gradients."""
    if not _enough(ranks, report):
        return
    rate = _rate(report.seed)
    for every in (3, 1, 4):
        # more() is asked once an exchange, so compute is allowed `every` times then.
        asked = _ask_worker(ranks, report, "work_locally", [rate, every])
        for jobs, answers in asked or ():
            handed = answers[SERVER].value["handed"]
            for worker, steps, _ in jobs:
                got = handed[str(worker)]
                if _judge_local(report, worker, steps, got, rate, every):
                    computed = len(answers[worker].value["seen"])
                    _right_count(report, worker, computed, steps * every)
        if report.found:
            return


def _local(seed: int, worker: int, steps: int, rate: float, every: int) -> dict[str, list]:
    """What is handed in, and what mistakes would give."""
    found: dict[str, list] = {}
    k, life = 0, torch.zeros(SIZE)
    for exchange in range(steps):
        first = weights = _weights_for(seed, worker, exchange)
        own, still = [], []
        for _ in range(every):
            own.append(toy_gradient(weights, worker, k))
            still.append(toy_gradient(first, worker, k))
            weights = weights - rate * own[-1]
            k += 1
        total = sum(own)
        life = life + total
        for name, value in {
            "right": total,
            "last": own[-1],
            "mean": total / every,
            "still": sum(still),
            "sign": -total,
            "change": rate * total,
            "minus change": -rate * total,
            "weights": weights,
            "zero": 0 * total,
            "first": own[0],
            "life": life,
        }.items():
            found.setdefault(name, []).append(value.tolist())
    return found


def _judge_local(report: Report, worker: int, steps: int, got: list, rate, every: int) -> bool:
    gives = _local(report.seed, worker, steps, rate, every)
    said = {
        "last": f"only the last of the {every} gradients: hand in their sum",
        "first": f"only the first of the {every} gradients: hand in their sum",
        "mean": f"the mean of the {every} gradients: hand in their sum, it is {every} steps",
        "still": "all gradients were computed with the weights that came: take a step, weights "
        "-= lr · gradient, after each",
        "sign": "the sign: what came minus what is there now, divided by lr",
        "change": "this is by how much the weights have changed: divide by lr, the server "
        "multiplies by it",
        "minus change": "this is by how much the weights have changed: what came minus what is "
        "there now, divided by lr",
        "weights": "these are the weights: hand in the sum of the gradients",
        "life": "the gradients of the exchanges before are still in it: the sum begins at zero in "
        "each exchange",
        "zero": "only zeros: did you keep a copy of the weights that came? start = weights is no "
        "copy, start = weights.clone() is",
    }
    mistakes = [
        Mistake(gives[name], text)
        for name, text in said.items()
        if not same(gives[name], gives["right"])
    ]
    mistakes.insert(
        0,
        Mistake(
            lambda got: len(got) != steps,
            f"{len(got)} times something came, {steps} were expected: more() is asked once an "
            "exchange, and said True so many times",
        ),
    )
    what = f"every={every}: what was handed in"
    return report.judge(worker, got, gives["right"], mistakes, what=what)


# -- 7.5 --------------------------------------------------------------------------------------


class Others:
    """Gradients on shared weights, which other ranks change meanwhile."""

    def __init__(self, shared: torch.Tensor, seed: int, steps: int):
        self.shared, self.seed, self.left = shared, seed, steps
        self.computed, self.late, self.moved = 0, 0, False

    def more(self) -> bool:
        """Whether there is another step to do."""
        self.left -= 1
        return self.left >= 0

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """The gradient at the weights; before it is there, others have added to them."""
        self.late += int(not torch.equal(weights, self.shared))
        gradient = toy_gradient(weights.clone(), 1, self.computed)
        self.shared += integers(self.seed + self.computed, SIZE)
        self.computed += 1
        return gradient


def probe_hogwild(user_ns: dict, *, rank: int, seed: int, rate: float, steps: int) -> dict:
    """`hogwild` on memory that others write to."""
    shared = integers(seed + rank, SIZE)
    others, pointer = Others(shared, seed, steps), shared.data_ptr()
    function = answer_named(user_ns, "hogwild")
    _, calls = recorded(function, shared, others.compute, rate, others.more)
    return {
        "weights": shared,
        "moved": shared.data_ptr() != pointer,
        "computed": others.computed,
        "late": others.late,
        "calls": calls,
    }


@task("7.5", "Hogwild", points=2)
def hogwild(ranks, report: Report) -> None:
    """Each step is added to what stands in the memory then, and nothing is sent."""
    rate, steps = _rate(report.seed), 4
    given = {"seed": report.seed, "rate": rate, "steps": steps}
    for answer in report.answers(ranks, __name__, "probe_hogwild", **given):
        rank, value = answer.rank, answer.value
        if value["calls"]:
            report.problem(
                f"it calls {value['calls'][0]['op']}: with Hogwild nothing is communicated, the "
                "memory is shared",
                rank,
                "communication",
            )
            continue
        if value["computed"] != steps:
            report.problem(
                f"compute was called {value['computed']} times, more() said True {steps} times: "
                "ask more() before each step, and take as many steps",
                rank,
            )
            continue
        gives = _hogwild(integers(report.seed + rank, SIZE), report.seed, rate, steps)
        said = {
            "back": "the updates of other ranks were overwritten: between reading and writing "
            "others have added to the weights. Do not write back a copy: change shared in place, "
            "shared -= lr · gradient",
            "never": "only the other ranks have changed shared: shared = shared - … makes a new "
            "tensor, in memory of its own. Change it in place: shared -= lr · gradient",
            "first": "all gradients were computed with the weights of the beginning: read shared "
            "anew for each",
            "sign": "uphill: subtract lr · gradient",
            "rate": "the learning rate is missing",
            "ranks": f"divided by the {WORLD} ranks: nothing is averaged here, each gradient is a "
            "step",
            "once": "only one step was taken",
            "added up": "the gradients were added up, and applied at the end: each has to be in "
            "the memory when the next is computed",
        }
        mistakes = [Mistake(gives[name], text) for name, text in said.items()]
        what = "the shared weights in the end"
        report.judge(rank, value["weights"], gives["right"], mistakes, what=what)


def _hogwild(start: torch.Tensor, seed: int, rate: float, steps: int) -> dict[str, list[float]]:
    """What the memory holds in the end: if all is right, and after mistakes."""

    def after(factor=1.0, back=False, first=False, taken=steps, late=False) -> list[float]:
        shared, sum_of = start.clone(), 0
        for k in range(steps):
            read = shared.clone()
            at = start if first else read
            gradient = toy_gradient(at, 1, k)
            shared += integers(seed + k, SIZE)
            if late:
                sum_of = sum_of + rate * gradient
            elif k < taken:
                shared = (read if back else shared) - factor * rate * gradient
        return (shared - sum_of).tolist()

    return {
        "right": after(),
        "back": after(back=True),
        "never": after(factor=0.0),
        "first": after(first=True),
        "sign": after(factor=-1.0),
        "rate": after(factor=1 / rate),
        "ranks": after(factor=1 / WORLD),
        "once": after(taken=1),
        "added up": after(late=True),
    }


# -- 7.6 --------------------------------------------------------------------------------------

COUNTERS = 40


@contextlib.contextmanager
def _shared_counters() -> Iterator[tuple[torch.Tensor, int]]:
    """Zeros that all ranks share, and a file to lock them by; all ranks do this."""
    path = [None]
    if dist.get_rank() == SERVER:
        file, path[0] = tempfile.mkstemp(prefix="lost-updates-")
        os.ftruncate(file, 4 * COUNTERS)
        os.close(file)
    dist.broadcast_object_list(path, src=SERVER)
    counters = torch.from_file(path[0], shared=True, size=COUNTERS)
    lock = os.open(path[0], os.O_RDWR)
    dist.barrier()
    try:
        if dist.get_rank() == SERVER:
            os.unlink(path[0])
        yield counters, lock
    finally:
        os.close(lock)


def probe_count(user_ns: dict, *, rank: int, seed: int, times: int) -> dict:
    """`count_lost` with updates of which a known part is lost."""
    from torch_mpi.record import log

    function = answer_named(user_ns, "count_lost")
    keep = _kept(seed, rank, times)
    made: list[int] = []

    with _shared_counters() as (counters, lock):

        def update(tensor: torch.Tensor) -> None:
            if len(made) == times:
                raise RuntimeError(f"update was called more than {times} times on a rank")
            if tensor.data_ptr() != counters.data_ptr():
                raise ValueError(
                    "update got another tensor than counters: its memory is not shared with the "
                    "other ranks"
                )
            if rank == WORLD - 1:
                time.sleep(0.002)
            fcntl.flock(lock, fcntl.LOCK_EX)
            counters.add_(keep[len(made)])
            fcntl.flock(lock, fcntl.LOCK_UN)
            made.append(log.mark() - mark)

        mark = log.mark()
        result, calls = recorded(function, counters, update, times)
        dist.barrier()
    return {
        "result": told(result),
        "made": len(made),
        "before": made[0] if made else 0,
        "after": len(calls) - made[-1] if made else 0,
        "calls": calls,
    }


def _kept(seed: int, rank: int, times: int) -> torch.Tensor:
    """Which updates of a rank arrive: 1, and 0 for those that are lost. The first all do."""
    draw = torch.Generator().manual_seed(seed + rank)
    kept = (torch.rand(times, COUNTERS, generator=draw) > 0.1 + 0.1 * rank).float()
    kept[0] = 1
    kept[:, 0] = 1
    return kept


@task("7.6", "lost updates, counted", points=2)
def count_lost(ranks, report: Report) -> None:
    """All begin together, nobody reads before all are done; the share that is missing."""
    if not _enough(ranks, report):
        return
    for times in (7, 3):
        answers = report.answers(
            ranks, __name__, "probe_count", seed=report.seed, times=times, patience=20.0
        )
        kept = torch.stack([_kept(report.seed, r, times) for r in range(WORLD)])
        for answer in answers:
            _judge_count(report, answer.rank, answer.value, kept, times)
        if report.found:
            return


def _judge_count(report: Report, rank: int, value: dict, kept: torch.Tensor, times: int) -> None:
    if value["made"] != times:
        said = f"update(counters) was called {value['made']} times, expected {times}, on each rank"
        report.problem(said, rank)
        return
    if not value["before"]:
        report.problem(
            "begins without the others: who is first may be done before the next one starts, and "
            "nothing collides. dist.barrier() before the first update",
            rank,
            "communication",
        )
        return
    if not value["after"]:
        report.problem(
            "reads the counters when its own updates are done; those of others may still come, "
            "and would be counted as lost. dist.barrier() after the last update",
            rank,
            "communication",
        )
        return
    counters = kept.sum((0, 1))
    share = 1 - counters.mean().item() / (WORLD * times)
    mistakes = [
        Mistake(1 - share, "this is the share that arrived: the lost one is 1 minus it"),
        Mistake(100 * share, "a share from 0 to 1, not percent"),
        Mistake(
            share * WORLD * times, "this is how many are lost: divide by the number of all updates"
        ),
        Mistake(
            1 - counters.mean().item() / times,
            f"all {WORLD} ranks update: {WORLD} · times updates were made",
        ),
        Mistake(0, "the first counter lost nothing, or the largest: take the mean of all"),
        Mistake(
            1 - counters.min().item() / (WORLD * times),
            "this is the counter that lost most: take the mean of all",
        ),
        Mistake(
            1 - counters.sum().item() / (WORLD * times),
            "sum over the counters, but one counter's updates: take the mean of the counters",
        ),
        Mistake(-share, "the sign: missing / made"),
        Mistake(
            1 - kept[rank].sum(0).mean().item() / times,
            "these are this rank's own updates: read all of counters",
        ),
        Mistake(lambda got: isinstance(got, list), "one number: the mean over the counters"),
    ]
    what, form = f"times={times}: the lost share", "the share of updates that are lost"
    report.judge(rank, value["result"], share, mistakes, what=what, form=form, tolerance=1e-4)


# -- 7.7 --------------------------------------------------------------------------------------

# Parts of unequal size.
LONG = 10


def _part(seed: int, k: int, place: int, servers: int) -> torch.Tensor:
    return integers(seed + 31 * k, LONG).tensor_split(servers)[place].clone()


def probe_sharded(
    user_ns: dict, *, rank: int, seed: int, servers: list[int], jobs: list
) -> dict | None:
    """`work_sharded` with servers of the check's, each of a part of the weights."""
    from torch_mpi.record import log

    steps = {worker: count for worker, count, _ in jobs}
    if rank in servers:
        return _toy_part(seed, servers.index(rank), servers, steps)
    if rank not in steps:
        return None
    counted = Counted(rank, steps[rank])

    def compute(weights: torch.Tensor) -> torch.Tensor:
        counted.compute(weights)
        return _whole(weights, rank, counted.computed - 1)

    mark = log.mark()
    answer_named(user_ns, "work_sharded")(compute, torch.empty(LONG), servers, counted.more)
    calls = log.since(mark)
    return {
        "seen": counted.seen,
        "calls": [as_dict(call) for call in calls],
        "apart": _one_after_the_other(calls),
        "late": _received_late(calls),
    }


def _whole(weights: torch.Tensor, worker: int, k: int) -> torch.Tensor:
    """A gradient in which each number tells its place."""
    return 1000.0 * worker + 100.0 * k + torch.arange(float(len(weights)))


def _one_after_the_other(calls: list) -> str:
    """Which messages, to different servers, were begun only when another had been waited for."""
    farewells = {call.peer: call for call in calls if call.op == "send"}.values()
    for op in ("recv", "send"):
        group: list = []
        for call in [c for c in calls if c.op == op and c not in farewells]:
            if any(one.peer == call.peer and one.nbytes == call.nbytes for one in group):
                group = []
            first = min((one.waits[0][0] for one in group if one.waits), default=math.inf)
            if call.start > first and all(one.peer != call.peer for one in group):
                return op
            group.append(call)
    return ""


def _received_late(calls: list) -> bool:
    """Whether receiving the next weights begins only when a send of the round was waited for."""
    count: dict[tuple, int] = {}
    begun: list[tuple[int, float]] = []
    first: dict[int, float] = {}
    for call in calls:
        k = count[call.op, call.peer] = count.get((call.op, call.peer), -1) + 1
        if call.op == "recv":
            begun.append((k, call.start))
        else:  # a header and a part in each round
            waited_for = min((wait[0] for wait in call.waits), default=math.inf)
            first[k // 2] = min(first.get(k // 2, math.inf), waited_for)
    return any(k > 0 and start > first.get(k - 1, math.inf) for k, start in begun)


def _toy_part(seed: int, place: int, servers: list[int], steps: dict[int, int]) -> dict:
    handed: dict[str, list] = {str(worker): [] for worker in steps}
    here = sorted(steps)
    for k in range(max(steps.values()) + 1):
        for worker in here:
            dist.send(_part(seed + worker, k, place, len(servers)), worker)
        for worker in list(here):
            dist.recv(header := torch.empty(1), worker)
            if header.item() == 0:
                here.remove(worker)
            else:
                dist.recv(gradient := _part(seed, k, place, len(servers)), worker)
                handed[str(worker)].append(gradient.tolist())
    return {"handed": handed}


@task("7.7", "several servers, each with a part", points=3)
def work_sharded(ranks, report: Report) -> None:
    """All parts come and go at once, and in their places."""
    if not _enough(ranks, report):
        return
    for servers, workers in (([0, 1], [2, 3, 5]), ([0, 1, 2], [4]), ([3], [1, 2])):
        jobs = _jobs(report.seed, workers, 2)
        given = {"seed": report.seed, "servers": servers, "jobs": jobs}
        answers = report.answers(ranks, __name__, "probe_sharded", **given)
        if not answers and not report.open:
            report.problem(
                f"(servers = {servers}: the parts are those of weights.tensor_split("
                f"{len(servers)}). From each a part comes; to each goes a header and its part of "
                "the gradient; leave() says goodbye to each)"
            )
        if not answers or report.found:
            return
        for worker, steps, _ in jobs:
            handed = [answers[server].value["handed"][str(worker)] for server in servers]
            _judge_sharded(report, worker, answers[worker].value, handed, steps, servers)
        if report.found:
            return


def _judge_sharded(report, worker: int, value: dict, handed: list, steps: int, servers) -> None:
    seen = [integers(report.seed + worker + 31 * k, LONG).tolist() for k in range(steps)]
    alone = len(servers) == 1
    rules = (only("send", "recv"), waited, *([] if alone else [_not_blocking]))
    if not report.communication(worker, value["calls"], *rules):
        return
    if value["apart"]:
        name = f"i{value['apart']}"
        report.problem(
            f"the {name} for one server begins only after the wait for another: start them all, "
            "then wait for all. While one server is busy, the other one's link would idle",
            worker,
            "communication",
        )
        return
    if value["late"] and not alone:
        report.problem(
            "the irecv of the next weights begins when the sends have been waited for: a server "
            "that sends to this worker waits meanwhile, and so may everybody in a circle. Start "
            "isends and irecvs together, then wait for all of them",
            worker,
            "communication",
        )
        return
    turned = [
        torch.cat(torch.tensor(whole).tensor_split(len(servers))[::-1]).tolist() for whole in seen
    ]
    mistakes = [
        Mistake(
            lambda got: len(got) != steps,
            f"compute was called {len(value['seen'])} times, more() said True {steps} times",
        ),
        Mistake(turned, "the parts are in wrong places: part k of weights is that of servers[k]"),
        Mistake(
            lambda got: any(got[k] == got[0] for k in range(1, len(got))),
            "the weights do not change from step to step: receive all parts anew, into weights",
        ),
    ]
    what = f"servers {servers}: the weights that compute got"
    if not report.judge(worker, value["seen"], seen, mistakes, what=what):
        return
    wholes = [_whole(torch.empty(LONG), worker, k).tensor_split(len(servers)) for k in range(steps)]
    for place, server in enumerate(servers):
        expected = [parts[place].tolist() for parts in wholes]
        beginnings = [torch.cat(parts).tolist()[: len(parts[place])] for parts in wholes]
        mistakes = [
            Mistake(
                beginnings, "every server got the beginning of the gradient: cut it like weights"
            ),
            Mistake(
                lambda got, parts=wholes[0]: any(same(got[0], part.tolist()) for part in parts),
                "this part belongs to another server: part k goes to servers[k]",
            ),
        ]
        what = f"the part of the gradient that server {server} got"
        if not report.judge(worker, handed[place], expected, mistakes[place == 0 :], what=what):
            return


def _not_blocking(calls: list[dict]) -> str | None:
    """All but the farewell goes by `isend` and `irecv`."""
    last: dict[tuple, int] = {
        (call["op"], call["peer"]): k for k, call in enumerate(calls) if call["op"] == "send"
    }
    kept = [call for k, call in enumerate(calls) if k not in last.values()]
    return broken(kept, blocking(False))
