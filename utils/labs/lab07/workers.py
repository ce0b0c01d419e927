"""Workers in checks: a student's worker, with a server of the check's own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from utils.checks.calls import only, some, waited
from utils.checks.mistakes import same
from utils.checks.probe import reading_answer, recorded
from utils.checks.steps import Step, all_came, communication, each_of, facts
from utils.checks.task import Report, to_each
from utils.cluster.questions import Ranks

from .servers import SERVER, WORLD, blank, enough, filled, hint_if_stuck, jobs_of, toy_gradient


class Counted:
    """Counts how often a student's worker asked for more, and computed."""

    def __init__(self, seed: int, steps: int, servers: int = 1):
        from torch_mpi.record import log

        self.seed = seed
        self.left = steps
        self.servers = servers
        self.seen: list[list[float]] = []
        self.allowed = True
        self.asked = 0
        self.early = False
        self.log = log
        self.mark = log.mark()

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
        return toy_gradient(weights, self.seed, len(self.seen) - 1)


def serve_toys(
    steps: dict[int, int], weights: Callable[[int, int], torch.Tensor]
) -> dict[str, list]:
    """Send each worker fresh weights until it leaves; return what each has handed in.

    Args:
        steps: how many gradients each worker hands in.
        weights: what is sent to a worker for its k-th gradient.
    """
    handed: dict[str, list] = {str(worker): [] for worker in steps}
    here = sorted(steps)
    for k in range(max(steps.values()) + 1):
        for worker in here:
            dist.send(weights(worker, k), worker)
        for worker in list(here):
            dist.recv(header := torch.empty(1), worker)
            if header.item() == 0:
                here.remove(worker)
            else:
                dist.recv(gradient := torch.empty_like(weights(worker, k)), worker)
                handed[str(worker)].append(gradient.tolist())
    return handed


def weights_for(seed: int, worker: int, k: int, like: int) -> torch.Tensor:
    """Return what the check's server sends for a k-th gradient; ``like`` as for `blank`."""
    return filled(seed + 100 * worker + k, like)


def probe_work(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, more: list, like: int
) -> dict:
    """Call a worker of the student's, with a server of the check's."""
    steps = {worker: count for worker, count, _ in jobs}
    if rank == SERVER:
        return {"handed": serve_toys(steps, functools.partial(weights_for, seed, like=like))}
    if rank not in steps:
        return {}
    counted = Counted(seed, steps[rank])
    weights = blank(like)
    function = reading_answer(user_ns, name, changes=(1,))
    _, calls = recorded(function, counted.compute, weights, counted.more, *more)
    return {"seen": counted.seen, "calls": calls, "early": counted.early, "last": weights}


@dataclass(frozen=True)
class Worked:
    """What a worker of the student's has done.

    Attributes:
        rank: of the worker.
        servers: their ranks.
        steps: how often more() said True.
        came: the weights that came for each gradient, and the last ones; the servers alone knew
            them before.
        seed: of the gradients of this worker.
        value: what the probe told on this rank.
        handed: the gradients that came to the server, or their parts by server.
    """

    rank: int
    servers: list[int]
    steps: int
    came: list[torch.Tensor]
    seed: int
    value: dict[str, Any]
    handed: list

    def computed(self, expected: int) -> Step:
        """Return the step that so many gradients were computed."""
        count = len(self.value["seen"])
        wrong = (
            f"compute was called {count} times, expected {expected}: one gradient is handed in "
            "each time, and when more() says False, nothing is to be computed any more"
        )
        return facts({wrong: count != expected})

    def in_place(self) -> Step:
        """Return the step that more() was asked when weights had come, into the argument."""
        early = "more() was asked before the weights had come: receive them first"
        elsewhere = (
            "the last weights that came are not in the argument weights: receive into it, also "
            "before more() says False"
        )
        last = self.came[-1].tolist()
        is_elsewhere = not same(self.value["last"], last)
        return facts({early: self.value["early"], elsewhere: is_elsewhere})


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
        like: how many workers the weights are for, see :func:`blank`.
        more: further arguments of the function.
    """
    if not enough(ranks, report):
        return False
    seeds = report.seeds(WORLD)
    jobs = jobs_of(report.seed, [1, 2, 3], 3)
    asked = {"name": name, "each": to_each(seed=seeds), "jobs": jobs, "more": list(more)}
    answers = report.answers(ranks, probe_work, like=like, **asked)
    _hint_of_work(report)
    if not all_came(answers):
        return False
    workers = []
    for rank, steps, _ in jobs:
        came = [weights_for(seeds[SERVER], rank, k, like) for k in range(steps + 1)]
        handed = answers[SERVER].value["handed"][str(rank)]
        reply = answers[rank].value
        workers.append(Worked(rank, [SERVER], steps, came, seeds[rank], reply, handed))
    well = [report.follow(worker.rank, _conduct(worker)) for worker in workers]
    return all(well) and all([report.follow(worker.rank, judge(worker)) for worker in workers])


def _conduct(worker: Worked) -> Iterator[Step]:
    """Yield the steps for any worker."""
    rules = some([SERVER, worker.rank]), only("send", "recv"), waited
    yield each_of([communication(worker.value["calls"], *rules)], [worker.in_place()])


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
