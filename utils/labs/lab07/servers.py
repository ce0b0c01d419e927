"""Parameter servers in checks: workers and servers of the check's own, and the replay of a server.

A server is replayed from the records of its rank: they tell which gradient came when, and to whom
weights were sent. The check's own workers compute a gradient that follows from the weights they
got, so the replay gives the weights, the staleness and the leads that the server must have had.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from utils.checks.calls import only, some, waited
from utils.checks.mistakes import Mistake, same
from utils.checks.probe import numbers, reading_answer, recorded, told
from utils.checks.task import Report, to_each
from utils.cluster.contracts import Ranks

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
    """Weights that nobody has set yet, of another length and type where there are fewer workers."""
    return torch.empty(4 + workers, dtype=torch.float64 if workers < 3 else torch.float32)


def filled(seed: int, workers: int) -> torch.Tensor:
    """Weights of this seed."""
    return numbers(seed, len(blank(workers))).to(blank(workers).dtype)


def toy_gradient(weights: torch.Tensor, seed: int, k: int) -> torch.Tensor:
    """The k-th gradient of the worker with this seed, which no other rank is told."""
    return 0.5 * weights - numbers(seed + k, len(weights)).to(weights.dtype)


def enough(ranks: Ranks, report: Report) -> bool:
    """Whether there are as many ranks as the lab has; else a problem."""
    if ranks.n != WORLD:
        report.problem(f"the check needs {WORLD} ranks: ranks = cluster.start({WORLD}, timeout=60)")
    return ranks.n == WORLD


def rate_of(seed: int) -> float:
    """The learning rate of a check with this seed."""
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
        """The events, with the gradient that came."""
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


def hint_if_stuck(report: Report, hint: str) -> None:
    """Say this first, where ranks wait for each other, or messages do not fit or are left over."""
    stuck = ("CommunicationTimeout", "CommunicationMismatch")
    if any(text.startswith(stuck) or kind == "unreceived" for text, kind, _ in report.found):
        report.found.insert(0, (hint, "mistake", None))


def served(
    ranks: Ranks, report: Report, name: str, jobs: list, bound: dict | None = None, hint: str = ""
) -> tuple[dict, Replay] | None:
    """Ask a server; its answer and the replay, where it came to an end and broke no first rule."""
    rate = rate_of(report.seed)
    seeds = report.seeds(ranks.n)
    given = {"name": name, "each": to_each(seed=seeds), "jobs": jobs, "rate": rate}
    given["more"] = bound or {}
    answers = report.answers(ranks, probe_server, **given)
    workers = [worker for worker, *_ in jobs]
    hint_if_stuck(report, f"workers = {workers}. {hint}{LEFT}. What came of it:")
    if not answers:
        return None
    server = answers[SERVER].value
    events = _events(server["calls"])
    rules = [only("send", "recv"), _inside(workers), waited]
    if server["moved"]:
        rules.append(lambda _: "weights has other memory than before: update it in place, with -=")
    if report.found or not report.communication(SERVER, server["calls"], *rules):
        return None
    got = {worker: answers[worker].value["got"] for worker in workers}
    return server, Replay(events, got, seeds, rate)


def _inside(workers: list[int]):
    """The rule that the server talks to its workers only."""

    def rule(calls: list[dict]) -> str | None:
        others = sorted({call["peer"] for call in calls} - set(workers))
        if not others:
            return None
        return f"it talks to rank {others[0]}, but the argument workers was {workers}"

    return rule


def judge_sent(report: Report, server: dict, replay: Replay) -> bool:
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


def judge_rows(report: Report, server: dict, replay: Replay) -> None:
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
        Mistake(
            lambda got: any(isinstance(p, list) and len(p) == 2 and p[1] < 0 for p in got),
            "less than 0 updates late: of the number of updates when its weights were sent, too "
            "many were noted",
        ),
        *(
            Mistake(replay.rows(what), said)
            for said, what in wrong.items()
            if replay.rows(what) != expected
        ),
    ]
    form = "the list of pairs (rank, staleness)"
    report.judge(SERVER, got, expected, mistakes, what="the list", form=form)


# -- workers that are checked ---------------------------------------------------------------------


class Counted:
    """Of a student's worker: how often it asked for more, and computed."""

    def __init__(self, seed: int, steps: int, servers: int = 1):
        from torch_mpi.record import log

        self.seed, self.left, self.computed, self.seen = seed, steps, 0, []
        self.allowed, self.servers = True, servers
        self.log, self.mark, self.asked, self.early = log, log.mark(), 0, False

    def more(self) -> bool:
        """Whether there is another step to do; it is asked when all weights have come."""
        self.asked += 1
        came = sum(call.op == "recv" and call.end > 0 for call in self.log.since(self.mark))
        self.early = self.early or came < self.asked * self.servers
        self.allowed = self.left > 0
        self.left -= 1
        return self.allowed

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """The toy gradient of the next step."""
        if not self.allowed:
            raise RuntimeError(
                "compute(weights) was called after more() had said False: ask more() once each "
                "time that weights have come, before anything is computed; leave if it says False"
            )
        self.seen.append(weights.tolist())
        self.computed += 1
        return toy_gradient(weights, self.seed, self.computed - 1)


def weights_for(seed: int, worker: int, k: int, like: int) -> torch.Tensor:
    """What the check's server sends a worker for its k-th gradient; ``like`` as for `blank`."""
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


def ask_worker(
    ranks: Ranks, report: Report, name: str, seeds: Sequence[int], like: int, more: Sequence = ()
) -> tuple[list, list]:
    """The jobs and the answers of :func:`probe_work`; none where something is wrong already.

    seeds: of each rank. The server alone knows the weights before it sends them.
    """
    jobs = jobs_of(report.seed, [1, 2, 3], 3)
    given = {"name": name, "each": to_each(seed=seeds), "jobs": jobs, "more": list(more)}
    given["like"] = like
    answers = report.answers(ranks, probe_work, **given)
    found = [kind for _, kind, _ in report.found]
    if "unreceived" in found:
        senders = {rank for _, kind, rank in report.found if kind == "unreceived"}
        report.problem(
            "(the last weights were sent, and not received: receive first, then ask more())"
            if senders == {SERVER}
            else "(each sending of weights has one answer: header and gradient, or a farewell)"
        )
    else:
        hint_if_stuck(
            report,
            "the protocol: receive weights, then ask more() once; if it says False, leave() and "
            "return; else hand_in what was computed, and receive again. What came of it:",
        )
    if not answers or report.found:
        return [], []
    steps = {worker: count for worker, count, _ in jobs}
    for worker in steps:
        rules = (some([SERVER, worker]), only("send", "recv"), waited)
        report.communication(worker, answers[worker].value["calls"], *rules)
        last = weights_for(seeds[SERVER], worker, steps[worker], like)
        judge_weights(report, worker, answers[worker].value, last)
    return ([], []) if report.found else (jobs, answers)


def judge_weights(report: Report, worker: int, value: dict, last: torch.Tensor) -> None:
    """Whether a worker asked more() when weights had come, into the tensor that it was given."""
    if value["early"]:
        report.problem("more() was asked before the weights had come: receive them first", worker)
    elif not same(value["last"], last.tolist()):
        report.problem(
            "the last weights that came are not in the argument weights: receive into it, also "
            "before more() says False",
            worker,
        )


def jobs_of(seed: int, workers: Sequence[int], steps: int, slow: int | None = None) -> list:
    """(rank, steps, looks): all workers leave after different numbers of steps."""
    turn = seed % len(workers)
    return [
        (worker, steps + (place + turn) % len(workers), 8 if worker == slow else place % 2)
        for place, worker in enumerate(workers)
    ]
