"""Checks a student's worker against the check's own server, or several servers in task 7.7."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from utils.checks.comparison import Mistake, blocking, broken, only, same, some, table, waited
from utils.checks.task import Report, Step, communication, each_of, facts, task, value
from utils.cluster.questions import Ranks

from .probes import (
    SERVER,
    WORLD,
    numbered_gradient,
    probe_sharded,
    probe_work,
    sharded_weights,
    weights_for,
)
from .servers import answers_of, hint_if_stuck, jobs_of


@dataclass(frozen=True)
class Worked:
    """What the student's worker did.

    Attributes:
        steps: how often more() returned True.
        came: the weights for each gradient, and the last weights; before, only servers knew them.
        value: the probe's reply on this rank.
        handed: the gradients that the server received, or the parts that each server received.
    """

    rank: int
    servers: list[int]
    steps: int
    came: list[torch.Tensor]
    seed: int
    value: dict[str, Any]
    handed: list

    def computed(self, expected: int) -> Step:
        """Return the step that the worker computed this number of gradients."""
        count = len(self.value["seen"])
        wrong = (
            f"You called compute {count} times, but {expected} calls were expected. Push one "
            "gradient each time, and compute nothing after more() has returned False"
        )
        return facts({wrong: count != expected})

    def in_place(self) -> Step:
        """Return the step that the weights came into the argument before more() was asked."""
        early = "You asked more() before the weights had come. Receive them first"
        elsewhere = (
            "The last weights that came aren't in the argument weights. Receive into weights each "
            "time, even before more() returns False"
        )
        last = self.came[-1].tolist()
        is_elsewhere = not same(self.value["last"], last)
        return facts({early: self.value["early"], elsewhere: is_elsewhere})


def judge_worker(
    ranks: Ranks, report: Report, name: str, judge: Callable, like: int, more: Sequence = ()
) -> bool:
    """Run the student's worker on three ranks; return whether everything is right.

    Args:
        judge: returns the steps for one worker, if all workers kept the protocol.
        like: the number of workers that decides on the form of the weights, see `blank`.
    """
    seeds = report.seeds(WORLD)
    jobs = jobs_of(report.seed, [1, 2, 3], 3)
    asked = {"name": name, "jobs": jobs, "more": list(more), "like": like}
    answers = answers_of(ranks, report, probe_work, seeds, **asked)
    _hint_of_work(report)
    if not answers:
        return False
    workers = []
    for rank, steps, *_ in jobs:
        came = [weights_for(seeds[SERVER], rank, k, like) for k in range(steps + 1)]
        handed = answers[SERVER].value["handed"][str(rank)]
        reply = answers[rank].value
        workers.append(Worked(rank, [SERVER], steps, came, seeds[rank], reply, handed))
    well = [report.follow(worker.rank, _conduct(worker)) for worker in workers]
    return all(well) and all([report.follow(worker.rank, judge(worker)) for worker in workers])


def _conduct(worker: Worked) -> Iterator[Step]:
    rules = some([SERVER, worker.rank]), only("send", "recv"), waited
    yield each_of([communication(worker.value["calls"], *rules)], [worker.in_place()])


def _hint_of_work(report: Report) -> None:
    """Explain the protocol if messages are left over or ranks wait for each other."""
    senders = {rank for _, kind, rank in report.found if kind == "unreceived"}
    if senders == {SERVER}:
        report.problem("You didn't receive the last weights. Receive first, then ask more()")
    elif senders:
        report.problem(
            "Answer the server's weights exactly once: with a header and a gradient, or by leave()"
        )
    else:
        hint_if_stuck(
            report,
            "Receive weights, then ask more() once. If it returns False, call leave() and return, "
            "otherwise push the gradient with hand_in and receive again. What happened:",
        )


# -- several servers, each with a part of the weights: 7.7 -------------------------------------


@task("7.7", "several servers, each with a part", points=3)
def work_sharded(ranks: Ranks, report: Report) -> None:
    """Check that all parts travel at the same time, and to their places."""
    for servers, workers in (([5, 2], [1, 3, 4]), ([5, 0, 2], [4]), ([3], [1, 2])):
        jobs = jobs_of(report.seed, workers, 2)
        # Only the servers know the weights before they send them.
        seed, *seeds = report.seeds(1 + WORLD)
        for server in servers:
            seeds[server] = seed
        answers = answers_of(ranks, report, probe_sharded, seeds, servers=servers, jobs=jobs)
        hint_if_stuck(
            report,
            f"servers = {servers}: Cut weights with weights.tensor_split({len(servers)}). Receive "
            "a part from each server, and send each server a header and its part of the gradient, "
            "or leave(server). What happened:",
        )
        for rank, steps, *_ in jobs if answers else ():
            came = [sharded_weights(seed, rank, k, len(servers)) for k in range(steps + 1)]
            handed = [answers[server].value["handed"][str(rank)] for server in servers]
            worked = Worked(rank, servers, steps, came, seeds[rank], answers[rank].value, handed)
            report.follow(rank, _sharded(worked))
        if report.found:
            return


def _sharded(worked: Worked) -> Iterator[Step]:
    """Yield the steps that all parts travel at the same time, and to their places."""
    servers = worked.servers
    reply = worked.value
    apart = reply["apart"]
    rules = [some([worked.rank, *servers]), only("send", "recv"), waited]
    if len(servers) > 1:
        rules.append(_not_blocking)
    yield communication(reply["calls"], *rules)
    wrong = {
        "You left while an irecv was still open. Start the receives of the next weights after "
        "more() has returned True": reply["open"],
        f"You started the i{apart} for one server after you had waited for another server. Start "
        "all of them first, so that no server's link is idle": apart,
        "You started the irecv of the next weights after you had waited for a send, so all ranks "
        "may wait in a circle. Start isends and irecvs together, then wait for all of "
        "them": reply["late"] and len(servers) > 1,
    }
    yield facts(wrong, kind="communication")
    seen = [weights.tolist() for weights in worked.came[:-1]]
    what = f"servers {servers}, the weights that compute got"
    yield value(reply["seen"], seen, _wrong_weights(worked, seen), what=what)
    yield each_of([worked.in_place()], _parts(worked))


def _wrong_weights(worked: Worked, seen: list[list[float]]) -> list[Mistake]:
    """Return wrong weights for compute; `seen` are the right ones."""
    count = len(worked.value["seen"])
    steps = worked.steps
    parts = [torch.tensor(weights).tensor_split(len(worked.servers)) for weights in seen]
    elsewhere = [torch.cat(of_step[::-1]).tolist() for of_step in parts]
    return table({
        f"You called compute {count} times, but more() returned True {steps} times": (
            lambda weights: len(weights) != steps
        ),
        "The parts are in wrong places. Receive part k of weights from servers[k]": elsewhere,
        "The weights don't change from step to step. Receive all parts in each step, into "
        "weights": lambda weights: weights[0] in weights[1:],
    })


def _parts(worked: Worked) -> Iterator[Step]:
    """Yield a step for each server: the server got its part of the gradients."""
    servers = worked.servers
    gradients = [
        numbered_gradient(weights, worked.seed, k).tensor_split(len(servers))
        for k, weights in enumerate(worked.came[:-1])
    ]
    first = [part.tolist() for part in gradients[0]]
    elsewhere = Mistake(
        lambda got: any(same(got[0], part) for part in first),
        "You sent a part that belongs to another server. Send part k to servers[k]",
    )
    for place, server in enumerate(servers):
        expected = [parts[place].tolist() for parts in gradients]
        beginnings = [torch.cat(parts).tolist()[: len(parts[place])] for parts in gradients]
        said = "You sent each server the beginning of the gradient. Cut it like weights"
        mistakes = [Mistake(beginnings, said), elsewhere]
        what = f"the part of the gradient that server {server} got"
        yield value(worked.handed[place], expected, mistakes, what=what)


def _not_blocking(calls: list[dict]) -> str | None:
    """Return a problem if a message other than the farewell doesn't use `isend` or `irecv`."""
    last: dict[tuple, int] = {
        (call["op"], call["peer"]): k for k, call in enumerate(calls) if call["op"] == "send"
    }
    kept = [call for k, call in enumerate(calls) if k not in last.values()]
    return broken(kept, blocking(False))
