"""Parameter servers in checks: workers and servers of the check's own, and the replay of a server.

A server is replayed from the records of its rank: they tell which gradient came when, and to whom
weights were sent. The check's own workers compute a gradient that follows from the weights they
got, so the replay gives the weights, the staleness and the leads that the server must have had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.calls import Rule, only, some, waited
from utils.checks.mistakes import Mistake, same
from utils.checks.probe import numbers, reading_answer, recorded, told
from utils.checks.steps import Step, all_came, communication, each_of, facts, value
from utils.checks.task import Report, to_each
from utils.cluster.questions import Ranks

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


def rate_of(seed: int) -> float:
    """Return the learning rate of a check with this seed."""
    return RATES[seed % len(RATES)]


def _toy_worker(seed: int, workers: int, steps: int, looks: int) -> list[list[float]]:
    """Work for so many steps, then leave; returns the weights that came.

    A worker looks so many times for new weights before it hands in what it has: time in which
    others go on.
    """
    got, weights = [], blank(workers)
    request = dist.irecv(weights, SERVER)
    for k in range(steps):
        request.wait()
        got.append(weights.tolist())
        gradient = toy_gradient(weights, seed, k)
        request = dist.irecv(weights := blank(workers), SERVER)
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
    """A server of the student's, with workers of the check's: ``jobs`` has (rank, steps, looks).

    seed: of the server's weights, or of this worker's gradients.
    """
    mine = next((job for job in jobs if job[0] == rank), None)
    if rank == SERVER:
        weights, workers = filled(seed, len(jobs)), [worker for worker, *_ in reversed(jobs)]
        memory = weights.data_ptr()
        bound = {"bound": math.inf if more["bound"] is None else more["bound"]} if more else {}
        function = reading_answer(user_ns, name, changes=(0,))
        result, calls = recorded(function, weights, workers, rate, *bound.values())
        moved = weights.data_ptr() != memory
        return {"weights": weights, "result": told(result), "calls": calls, "moved": moved}
    return {"got": _toy_worker(seed, len(jobs), *mine[1:])} if mine else {}


@dataclass
class Replay:
    """What a server has done, from its records, and what it had to make of it.

    Attributes:
        events: ("send", w), ("gradient", w) and ("leave", w) in their order.
        got: of each worker, the weights that it was sent.
        seeds: of each rank.
        rate: the learning rate.
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

    def one_by_one(self, factor: float = 1.0) -> list[float]:
        """Return the weights in the end, if each gradient is a step of its own."""
        weights = self.start.clone()
        for _, _, gradient in self.gradients():
            if gradient is not None:
                weights -= self.rate * factor * gradient
        return weights.tolist()

    def sent(self, factor: float = 1.0, before: bool = False) -> list[list]:
        """Return to whom weights were sent, and which; or those without its own gradient."""
        weights, old, found = self.start.clone(), {}, []
        for kind, worker, gradient in self.gradients():
            if gradient is not None:
                old[worker] = weights.clone()
                weights -= self.rate * factor * gradient
            elif kind == "send":
                found.append([worker, (old.get(worker, weights) if before else weights).tolist()])
        return found

    def rows(self, what: str = "staleness") -> list[list[int]]:
        """Return (worker, staleness) of each gradient, or a wrong idea of staleness."""
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
        """Return the gradients of each round: it is over when weights are sent again."""
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


Judge = Callable[[dict[str, Any], Replay], Iterator[Step]]


def judge_server(
    ranks: Ranks,
    report: Report,
    name: str,
    jobs: list,
    judge: Judge,
    bound: dict[str, Any] | None = None,
    hint: str = "",
) -> bool:
    """Ask a server of the student's; return whether it came to an end, and all is right.

    Args:
        name: of the student's function.
        jobs: of the workers, see :func:`jobs_of`.
        judge: the steps for what the server told, and its replay.
        bound: an argument of the function, if it has one.
        hint: what to say if ranks wait for each other.
    """
    rate, seeds = rate_of(report.seed), report.seeds(ranks.n)
    asked = {"name": name, "each": to_each(seed=seeds), "jobs": jobs, "rate": rate}
    answers = report.answers(ranks, probe_server, more=bound or {}, **asked)
    workers = [worker for worker, *_ in jobs]
    hint_if_stuck(report, f"workers = {workers}. {hint}{LEFT}. What came of it:")
    if not all_came(answers):
        return False
    server = answers[SERVER].value
    got = {worker: answers[worker].value["got"] for worker in workers}
    replay = Replay(_events(server["calls"]), got, seeds, rate)
    return report.follow(SERVER, _served(server, workers, judge(server, replay)))


def _served(server: dict[str, Any], workers: list[int], more: Iterable[Step]) -> Iterator[Step]:
    """Yield the steps for any server, and then more of them."""
    yield communication(server["calls"], only("send", "recv"), _inside(workers), waited)
    moved = "weights has other memory than before: update it in place, with -="
    yield facts({moved: server["moved"]})
    yield from more


def _inside(workers: list[int]) -> Rule:
    """Return the rule that the server talks to its workers only."""

    def rule(calls: list[dict]) -> str | None:
        others = sorted({call["peer"] for call in calls} - set(workers))
        if not others:
            return None
        return f"it talks to rank {others[0]}, but the argument workers was {workers}"

    return rule


def protocol(said: str | None) -> Step:
    """Return the step that a server keeps its protocol; `said` is what it has broken."""
    return facts({said: True} if said else {}, kind="communication")


def stepwise(server: dict[str, Any], replay: Replay) -> Iterator[Step]:
    """Yield the steps that each gradient is a step of its own, with the right staleness."""
    yield _sent_weights(replay)
    mistakes = _wrong_steps(replay, replay.start.tolist(), replay.one_by_one)
    what = "the weights in the end"
    yield value(server["weights"], replay.one_by_one(), mistakes, what=what)
    rows, form = server["result"], "the list of pairs (rank, staleness)"
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
    weights = replay.start.clone()
    versions = [weights.tolist()]
    for _, _, gradient in replay.gradients():
        if gradient is not None:
            weights -= replay.rate * gradient
            versions.append(weights.tolist())
    return any(same(first_wrong, version) for version in versions)


def _wrong_steps(replay: Replay, unchanged: list, after: Callable[[float], list]) -> list[Mistake]:
    """Return what else than w - lr · gradient may have been computed."""
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


def _wrong_rows(replay: Replay, rows: Any) -> list[Mistake]:
    """Return what else a server may say of the staleness of each gradient; rows: what it said."""
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
    expected = replay.rows()
    swapped = [[stale, worker] for worker, stale in expected]
    return [
        Mistake(lambda got: not isinstance(got, list), "serve returns a list, one pair a gradient"),
        Mistake([worker for worker, _ in expected], "only the ranks: the staleness is missing"),
        Mistake([stale for _, stale in expected], "only the staleness: pairs of (rank, staleness)"),
        Mistake(
            lambda got: len(got) != len(expected),
            f"expected {len(expected)} pairs, one for each gradient that was applied, got "
            f"{len(rows) if isinstance(rows, list) else 'none'}",
        ),
        Mistake(swapped, "the pairs are the other way round: (rank, staleness)"),
        Mistake(
            lambda got: any(isinstance(p, list) and len(p) == 2 and p[1] < 0 for p in got),
            "less than 0 updates late: of the number of updates when its weights were sent, too "
            "many were noted",
        ),
        *(
            Mistake(replay.rows(idea), said)
            for said, idea in wrong.items()
            if replay.rows(idea) != expected
        ),
    ]


# -- workers that are checked ---------------------------------------------------------------------


class Counted:
    """Of a student's worker: how often it asked for more, and computed."""

    def __init__(self, seed: int, steps: int, servers: int = 1):
        from torch_mpi.record import log

        self.seed, self.left, self.computed, self.seen = seed, steps, 0, []
        self.allowed, self.servers = True, servers
        self.log, self.mark, self.asked, self.early = log, log.mark(), 0, False

    def more(self) -> bool:
        """Return whether there is another step to do; it is asked when all weights have come."""
        self.asked += 1
        came = sum(call.op == "recv" and call.end > 0 for call in self.log.since(self.mark))
        self.early = self.early or came < self.asked * self.servers
        self.allowed = self.left > 0
        self.left -= 1
        return self.allowed

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the toy gradient of the next step."""
        if not self.allowed:
            raise RuntimeError(
                "compute(weights) was called after more() had said False: ask more() once each "
                "time that weights have come, before anything is computed; leave if it says False"
            )
        self.seen.append(weights.tolist())
        self.computed += 1
        return toy_gradient(weights, self.seed, self.computed - 1)


def weights_for(seed: int, worker: int, k: int, like: int) -> torch.Tensor:
    """Return what the check's server sends for a k-th gradient; ``like`` as for `blank`."""
    return filled(seed + 100 * worker + k, like)


def _toy_server(seed: int, jobs: list, most: int, like: int) -> dict[str, list]:
    """Send each worker fresh weights until it leaves; what each has handed in."""
    handed: dict[str, list] = {str(worker): [] for worker, *_ in jobs}
    here = [worker for worker, *_ in jobs]
    for k in range(most):
        for worker in here:
            dist.send(weights_for(seed, worker, k, like), worker)
        for worker in list(here):
            dist.recv(header := torch.empty(1), worker)
            if header.item() == 0:
                here.remove(worker)
            else:
                dist.recv(gradient := blank(like), worker)
                handed[str(worker)].append(gradient.tolist())
    return handed


def probe_work(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, more: list, like: int
) -> dict:
    """A worker of the student's, with a server of the check's; seeds as for `probe_server`."""
    steps = {worker: count for worker, count, _ in jobs}
    if rank == SERVER:
        return {"handed": _toy_server(seed, jobs, max(steps.values()) + 1, like)}
    if rank not in steps:
        return {}
    counted, weights = Counted(seed, steps[rank]), blank(like)
    function = reading_answer(user_ns, name, changes=(1,))
    _, calls = recorded(function, counted.compute, weights, counted.more, *more)
    return {"seen": counted.seen, "calls": calls, "early": counted.early, "last": weights}


@dataclass(frozen=True)
class Worked:
    """What a worker of the student's has done.

    Attributes:
        rank: of the worker.
        steps: how often more() said True.
        seed: of the weights, which the server alone knew before it sent them.
        own_seed: of the gradients of this worker.
        like: how many workers the weights are for, see :func:`blank`.
        value: what the probe told on this rank.
        handed: the gradients that came to the server.
    """

    rank: int
    steps: int
    seed: int
    own_seed: int
    like: int
    value: dict[str, Any]
    handed: list[list[float]]

    def weights(self, k: int) -> torch.Tensor:
        """Return the weights that the worker got for its k-th gradient."""
        return weights_for(self.seed, self.rank, k, self.like)

    def conduct(self) -> Iterator[Step]:
        """Yield the steps for any worker."""
        rules = some([SERVER, self.rank]), only("send", "recv"), waited
        last = last_weights(self.value, self.weights(self.steps))
        yield each_of([communication(self.value["calls"], *rules)], [last])

    def computed(self, expected: int) -> Step:
        """Return the step that so many gradients were computed."""
        count = len(self.value["seen"])
        said = (
            f"compute was called {count} times, expected {expected}: one gradient is handed in "
            "each time, and when more() says False, nothing is to be computed any more"
        )
        return facts({said: count != expected})


def judge_worker(
    ranks: Ranks,
    report: Report,
    name: str,
    judge: Callable[[Worked], Iterator[Step]],
    like: int,
    more: Sequence = (),
) -> bool:
    """Ask a worker of the student's on three ranks; return whether all is right.

    Args:
        name: of the student's function.
        judge: the steps for one worker, if all of them kept the protocol.
        like: as in :class:`Worked`.
        more: further arguments of the function.
    """
    seeds, jobs = report.seeds(WORLD), jobs_of(report.seed, [1, 2, 3], 3)
    asked = {"name": name, "each": to_each(seed=seeds), "jobs": jobs, "more": list(more)}
    answers = report.answers(ranks, probe_work, like=like, **asked)
    _hint_of_work(report)
    if not all_came(answers):
        return False
    handed = answers[SERVER].value["handed"]
    workers = [
        Worked(rank, steps, seeds[SERVER], seeds[rank], like, answers[rank].value,
               handed[str(rank)])
        for rank, steps, _ in jobs
    ]  # fmt: skip
    well = [report.follow(worker.rank, worker.conduct()) for worker in workers]
    return all(well) and all([report.follow(worker.rank, judge(worker)) for worker in workers])


def _hint_of_work(report: Report) -> None:
    """Say what the protocol is, if messages are left over or ranks wait for each other."""
    left_over = [problem for problem in report.problems if problem.kind == "unreceived"]
    senders = {rank for problem in left_over for rank in problem.ranks}
    if senders == {SERVER}:
        report.problem(
            "(the last weights were sent, and not received: receive first, then ask more())"
        )
    elif senders:
        report.problem(
            "(each sending of weights has one answer: header and gradient, or a farewell)"
        )
    else:
        hint_if_stuck(
            report,
            "the protocol: receive weights, then ask more() once; if it says False, leave() and "
            "return; else hand_in what was computed, and receive again. What came of it:",
        )


def last_weights(told_by_worker: dict[str, Any], last: torch.Tensor) -> Step:
    """Return the step that a worker asked more() when weights had come, into its argument."""
    return facts({
        "more() was asked before the weights had come: receive them first": told_by_worker["early"],
        "the last weights that came are not in the argument weights: receive into it, also before "
        "more() says False": not same(told_by_worker["last"], last.tolist()),
    })  # fmt: skip


def jobs_of(seed: int, workers: Sequence[int], steps: int, slow: int | None = None) -> list:
    """Return (rank, steps, looks): all workers leave after different numbers of steps."""
    turn = seed % len(workers)
    return [
        (worker, steps + (place + turn) % len(workers), 8 if worker == slow else place % 2)
        for place, worker in enumerate(workers)
    ]
