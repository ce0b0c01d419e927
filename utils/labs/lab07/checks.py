"""Checks of lab 07: a parameter server, and what becomes of gradients that come late."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checks.calls import TOGETHER, blocking, broken, only, some, waited
from utils.checks.mistakes import NO_NUMBER, Mistake, same
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, as_dict, number, numbers, reading_answer, recorded
from utils.checks.task import Report, task, to_each
from utils.checks.verdict import named
from utils.cluster.contracts import Ranks

from .servers import (
    SERVER,
    WORLD,
    Counted,
    Replay,
    ask_worker,
    enough,
    hint_if_stuck,
    jobs_of,
    judge_rows,
    judge_sent,
    judge_weights,
    rate_of,
    served,
    toy_gradient,
    weights_for,
)

# -- 7.1 --------------------------------------------------------------------------------------


@task("7.1", "the synchronous server", points=3)
def serve_in_rounds(ranks: Ranks, report: Report) -> None:
    """A worker that follows the protocol; a server that takes one step a round."""
    if not enough(ranks, report):
        return
    for like in (3, 1):  # with one worker the weights are others in length and type
        if not report.found:
            _judge_work(ranks, report, like)
    for workers, steps in (([1, 2, 3], 3), ([1, 2, 3, 4, 5], 4), ([2, 5], 12), ([4], 3)):
        if report.found:
            return
        jobs = jobs_of(report.seed, workers, steps, slow=workers[-1])
        found = served(ranks, report, "serve_in_rounds", jobs)
        if found is not None:
            _judge_rounds(report, *found)


def _judge_work(ranks: Ranks, report: Report, like: int) -> None:
    seeds = report.seeds(WORLD)
    jobs, answers = ask_worker(ranks, report, "work", seeds, like)
    for worker, steps, _ in jobs:
        handed = answers[SERVER].value["handed"][str(worker)]
        seen = answers[worker].value["seen"]
        came = [weights_for(seeds[SERVER], worker, k, like) for k in range(steps)]
        own = seeds[worker]
        expected = [toy_gradient(weights, own, k).tolist() for k, weights in enumerate(came)]
        stale = [toy_gradient(came[0], own, k).tolist() for k in range(steps)]
        wrong = {
            "every gradient was computed with the first weights that came": stale,
            "these are the weights: hand in compute(weights)": [one.tolist() for one in came],
        }
        count = f"{len(handed)} gradients came, {steps} were expected, as more() said True so often"
        mistakes = [Mistake(gives, said) for said, gives in wrong.items()]
        if len(handed) != steps:
            report.problem(f"work: {count}", worker)
        elif _right_count(report, worker, len(seen), steps):
            if not same(seen, [one.tolist() for one in came]):
                said = "compute got other weights than those that the server had sent"
                mistakes.append(Mistake(lambda _: True, said))
            what = "work: the gradients that it handed in"
            report.judge(worker, handed, expected, mistakes, what=what)


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
                report.problem(
                    f"rank {worker} got new weights while {named(outstanding)} had not answered: "
                    "the round is over when everybody has handed in, then there is one step, and "
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
                report.problem(
                    f"{named(here - outstanding)} had no weights of this round when the first "
                    "gradient was received: send to all, then collect, so that all gradients of a "
                    "round belong to the same weights",
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
def serve_anyone(ranks: Ranks, report: Report) -> None:
    """Whoever comes first is served first, alone, and at once."""
    if not enough(ranks, report):
        return
    for workers in ([1, 2, 3], [1, 2, 4, 5], [3]):
        jobs = jobs_of(report.seed, workers, 4, slow=workers[report.seed % len(workers)])
        hint = (
            "At the start each worker gets weights once. After that the server answers each "
            "gradient by one send, to the worker that has handed it in, and to nobody else. "
        )
        found = served(ranks, report, "serve_anyone", jobs, hint=hint)
        if found is not None:
            server, replay = found
            if (
                report.communication(SERVER, server["calls"], _from_anyone)
                and _answers_at_once(report, replay)
                and judge_sent(report, server, replay)
            ):
                judge_rows(report, server, replay)
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
def serve(ranks: Ranks, report: Report) -> None:
    """Nobody gets weights who is more than `bound` ahead; nobody waits who is not."""
    if not enough(ranks, report):
        return
    wide = 3 + report.seed % 4
    few = ([1, 2, 3], 2), ([1, 2, 4, 5], 0), ([2, 3], 1)
    for workers, bound in (*few, ([1, 3, 4], wide), ([1, 2, 3], None)):
        steps = 7 + (bound or 0) * 2
        jobs = jobs_of(report.seed, workers, steps, slow=workers[report.seed % len(workers)])
        hint = (
            f"bound = {'inf' if bound is None else bound}: it is for the lead, in clocks. Who "
            "had to wait must be thought of again when the slowest has moved on. "
        )
        found = served(ranks, report, "serve", jobs, {"bound": bound}, hint)
        if found is not None:
            server, replay = found
            if (
                report.communication(SERVER, server["calls"], _from_anyone)
                and _keeps_bound(report, replay, math.inf if bound is None else bound)
                and judge_sent(report, server, replay)
            ):
                judge_rows(report, server, replay)
        if report.found:
            return


def _keeps_bound(report: Report, replay: Replay, bound: float) -> bool:
    """Whether weights went to those, and to all those, who may go on."""
    clock = dict.fromkeys(replay.workers, 0)
    idle = set(replay.workers)
    last_sent = 0  # rank that got weights last, since the last receive
    for kind, worker in replay.events:
        slowest = min(clock.values()) if clock else 0
        if kind == "send" and worker < last_sent:
            report.problem(
                f"bound {bound}: rank {worker} got weights after rank {last_sent}, without a "
                "receive in between: send to those who may go on in the order of their ranks",
                SERVER,
                "communication",
            )
            return False
        last_sent = worker if kind == "send" else 0
        if kind == "send":
            lead = clock[worker] - slowest
            if lead > bound:
                report.problem(
                    f"bound {bound}: rank {worker} got weights when its clock was {lead} ahead of "
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
                f"bound {bound}: the clock of rank {held[0]} is {lead} ahead of the slowest, which "
                "is allowed, and the server received again before it sent weights: before each "
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
def work_locally(ranks: Ranks, report: Report) -> None:
    """`every` steps on one's own weights, then the sum of their gradients."""
    if not enough(ranks, report):
        return
    rate = rate_of(report.seed)
    for every in (3, 1, 7 + report.seed % 6):
        # more() is asked once an exchange, so compute is allowed `every` times then.
        seeds = report.seeds(WORLD)
        jobs, answers = ask_worker(ranks, report, "work_locally", seeds, every, [rate, every])
        for worker, steps, _ in jobs:
            got = answers[SERVER].value["handed"][str(worker)]
            gives = _local(seeds[SERVER], seeds[worker], worker, steps, rate, every)
            if _judge_local(report, worker, steps, got, gives, every):
                computed = len(answers[worker].value["seen"])
                _right_count(report, worker, computed, steps * every)
        if report.found:
            return


def _local(
    seed: int, own: int, worker: int, steps: int, rate: float, every: int
) -> dict[str, list]:
    """What is handed in, and what mistakes would give; by the seeds of server and worker."""
    found: dict[str, list] = {}
    k, life = 0, 0
    for exchange in range(steps):
        first = weights = weights_for(seed, worker, exchange, every)
        steps_, still = [], []
        for _ in range(every):
            steps_.append(toy_gradient(weights, own, k))
            still.append(toy_gradient(first, own, k))
            weights = weights - rate * steps_[-1]
            k += 1
        total = sum(steps_)
        life = life + total
        sums = {}
        for count in (every - 1, every + 1):
            at, sums[count] = first, 0 * total
            for step in range(count):
                slope = toy_gradient(at, own, exchange * count + step)
                at, sums[count] = at - rate * slope, sums[count] + slope
        for name, value in {
            "right": total,
            "last": steps_[-1],
            "mean": total / every,
            "still": sum(still),
            "sign": -total,
            "change": rate * total,
            "minus change": -rate * total,
            "weights": weights,
            "zero": 0 * total,
            "first": steps_[0],
            "life": life,
            "fewer": sums[every - 1],
            "further": sums[every + 1],
        }.items():
            found.setdefault(name, []).append(value.tolist())
    return found


def _judge_local(
    report: Report, worker: int, steps: int, got: list, gives: dict, every: int
) -> bool:
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
        "fewer": f"this is the sum of {every - 1} gradients, one step too few: take {every} steps "
        "between two exchanges",
        "further": f"this is the sum of {every + 1} gradients, one step too many: take {every} "
        "steps between two exchanges",
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
    # A difference of weights that is divided by lr has lost digits of float32.
    return report.judge(worker, got, gives["right"], mistakes, what=what, tolerance=1e-3)


# -- 7.5 --------------------------------------------------------------------------------------


class Others:
    """Gradients on shared weights, which other ranks change meanwhile."""

    def __init__(self, shared: torch.Tensor, seed: int, steps: int):
        self.shared, self.seed, self.left = shared, seed, steps
        self.computed, self.late, self.moved = 0, 0, False

    def more(self) -> bool:
        """Whether there is another step to do; if so, others have added to the weights."""
        self.left -= 1
        if self.left >= 0:
            self.shared += _of_others(self.seed + 400, self.computed, len(self.shared))
        return self.left >= 0

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """The gradient at the weights; before it is there, others have added to them."""
        self.late += int(not torch.equal(weights, self.shared))
        gradient = toy_gradient(weights.clone(), self.seed, self.computed)
        self.shared += _of_others(self.seed, self.computed, len(weights))
        self.computed += 1
        return gradient


class Overwritten(TorchDispatchMode):
    """Notes whether a tensor is copied into some memory, over whatever stands there."""

    def __init__(self, pointer: int):
        super().__init__()
        self.pointer, self.found = pointer, False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            into, source = args[0].data_ptr(), args[1].data_ptr()
            self.found = self.found or (into == self.pointer != source)
        return function(*args, **kwargs or {})


def _of_others(seed: int, k: int, size: int) -> torch.Tensor:
    """What others have added to the weights by the end of step k."""
    return numbers(seed + 100 + k, size)


def probe_hogwild(user_ns: dict, *, rank: int, seed: int, rate: float, steps: int) -> dict:
    """`hogwild` on memory that others write to."""
    shared = numbers(seed, 3 + steps)
    others, pointer = Others(shared, seed, steps), shared.data_ptr()
    function = answer_named(user_ns, "hogwild")
    with Overwritten(pointer) as overwritten:
        _, calls = recorded(function, shared, others.compute, rate, others.more)
    return {
        "overwritten": overwritten.found,
        "weights": shared,
        "moved": shared.data_ptr() != pointer,
        "computed": others.computed,
        "late": others.late,
        "calls": calls,
    }


@task("7.5", "Hogwild", points=2)
def hogwild(ranks: Ranks, report: Report) -> None:
    """Each step is added to what stands in the memory then, and nothing is sent."""
    for steps in (4, 6):
        _judge_hogwild(ranks, report, steps)
        if report.found:
            return


def _judge_hogwild(ranks: Ranks, report: Report, steps: int) -> None:
    """So many steps, on weights of another length each time."""
    rate = rate_of(report.seed)
    given = {"seed": report.seed, "rate": rate, "steps": steps}
    for answer in report.answers(ranks, probe_hogwild, **given):
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
        gives = _hogwild(numbers(report.seed, 3 + steps), report.seed, rate, steps)
        said = {
            "early": "the weights were read before more() was asked, and others have changed them "
            "since: ask, then read",
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
        right = report.judge(rank, value["weights"], gives["right"], mistakes, what=what)
        if right and value["overwritten"]:
            report.problem(said["back"], rank, "mistake")


def _hogwild(start: torch.Tensor, seed: int, rate: float, steps: int) -> dict[str, list[float]]:
    """What the memory holds in the end: if all is right, and after mistakes."""

    def after(
        factor=1.0, back=False, first=False, taken=steps, late=False, early=False
    ) -> list[float]:
        shared, sum_of = start.clone(), 0
        for k in range(steps):
            shared += _of_others(seed + 400, k, len(start))
            read = shared.clone()
            asked = shared - early * _of_others(seed + 400, k, len(start))
            at = start if first else asked
            gradient = toy_gradient(at, seed, k)
            shared += _of_others(seed, k, len(start))
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
        "early": after(early=True),
    }


# -- 7.6 --------------------------------------------------------------------------------------


def _counters(times: int) -> int:
    """How many there are: another number for each number of updates."""
    return 5 * (times + 1)


@contextlib.contextmanager
def _shared_counters(count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Zeros that all ranks share, and a file to lock them by; all ranks do this."""
    path = [None]
    if dist.get_rank() == SERVER:
        file, path[0] = tempfile.mkstemp(prefix="lost-updates-")
        os.ftruncate(file, 4 * count)
        os.close(file)
    dist.broadcast_object_list(path, src=SERVER)
    counters = torch.from_file(path[0], shared=True, size=count)
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
    keep = _kept(seed, rank, times)  # what is lost of the others' is their secret
    made: list[int] = []
    together: list[bool] = []  # at each update: whether the ranks have met

    with _shared_counters(_counters(times)) as (counters, lock):

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
            together.append(any(c.op in TOGETHER and c.end for c in log.since(mark)))
            made.append(log.mark() - mark)

        mark = log.mark()
        result, calls = recorded(function, counters, update, times)
        dist.barrier()
    return {
        "result": number(result),
        "made": len(made),
        "before": bool(together and together[0]),
        "after": len(calls) - made[-1] if made else 0,
        "calls": calls,
    }


def _kept(seed: int, rank: int, times: int) -> torch.Tensor:
    """Which updates of a rank arrive: 1, and 0 for those that are lost. The first all do."""
    draw = torch.Generator().manual_seed(seed)
    kept = (torch.rand(times, _counters(times), generator=draw) > 0.1 + 0.1 * rank).float()
    kept[0] = 1
    kept[:, 0] = 1
    return kept


@task("7.6", "lost updates, counted", points=2)
def count_lost(ranks: Ranks, report: Report) -> None:
    """All begin together, nobody reads before all are done; the share that is missing."""
    if not enough(ranks, report):
        return
    for times in (7, 3):
        seeds = report.seeds(WORLD)
        given = {"each": to_each(seed=seeds), "times": times, "patience": 20.0}
        answers = report.answers(ranks, probe_count, **given)
        kept = torch.stack([_kept(seed, r, times) for r, seed in enumerate(seeds)])
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
    if not report.communication(rank, value["calls"], some(range(WORLD))):
        return
    counters = kept.sum((0, 1))
    share = 1 - counters.mean().item() / (WORLD * times)
    mistakes = [
        NO_NUMBER,
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
    ]
    what, form = f"times={times}: the lost share", "the share of updates that are lost"
    report.judge(rank, value["result"], share, mistakes, what=what, form=form, tolerance=1e-4)


# -- 7.7 --------------------------------------------------------------------------------------

# How many weights there are for so many servers: first such that all parts are of the same size.
LENGTHS = {2: 12, 3: 10, 1: 11}


def _part(seed: int, k: int, place: int, servers: int) -> torch.Tensor:
    return numbers(seed + 31 * k, LENGTHS[servers]).tensor_split(servers)[place].clone()


def probe_sharded(
    user_ns: dict, *, rank: int, seed: int, servers: list[int], jobs: list
) -> dict | None:
    """`work_sharded` with servers of the check's, each of a part of the weights.

    seed: of the weights, or of this worker's gradients.
    """
    from torch_mpi.record import log

    steps = {worker: count for worker, count, _ in jobs}
    if rank in servers:
        return _toy_part(seed, servers.index(rank), servers, steps)
    if rank not in steps:
        return None
    counted = Counted(seed, steps[rank], len(servers))

    def compute(weights: torch.Tensor) -> torch.Tensor:
        counted.compute(weights)
        return _whole(len(weights), seed, counted.computed - 1)

    mark, empty = log.mark(), torch.empty(LENGTHS[len(servers)])
    function = reading_answer(user_ns, "work_sharded", changes=(1,))
    function(compute, empty, list(servers), counted.more)
    calls = log.since(mark)
    return {
        "early": counted.early,
        "last": empty,
        "open": any(call.op == "recv" and not call.end for call in calls),
        "seen": counted.seen,
        "calls": [as_dict(call) for call in calls],
        "apart": _one_after_the_other(calls),
        "late": _received_late(calls),
    }


def _whole(length: int, seed: int, k: int) -> torch.Tensor:
    """The k-th gradient of the worker with this seed; each number tells its place."""
    return numbers(seed + k, length) + 1000 * torch.arange(float(length))


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
def work_sharded(ranks: Ranks, report: Report) -> None:
    """All parts come and go at once, and in their places."""
    if not enough(ranks, report):
        return
    for servers, workers in (([0, 1], [2, 3, 5]), ([0, 1, 2], [4]), ([3], [1, 2])):
        jobs = jobs_of(report.seed, workers, 2)
        # The servers alone know the weights before they send them.
        seed, *seeds = report.seeds(1 + WORLD)
        own = [seed if rank in servers else seeds[rank] for rank in range(WORLD)]
        given = {"each": to_each(seed=own), "servers": servers, "jobs": jobs}
        answers = report.answers(ranks, probe_sharded, **given)
        hint_if_stuck(
            report,
            f"servers = {servers}: the parts are those of weights.tensor_split({len(servers)}). "
            "From each a part comes; to each goes a header and its part of the gradient; leave() "
            "says goodbye to each. What came of it:",
        )
        if not answers or report.found:
            return
        for worker, steps, _ in jobs:
            handed = [answers[server].value["handed"][str(worker)] for server in servers]
            told_all = answers[worker].value, handed, steps, servers, seed, seeds[worker]
            _judge_sharded(report, worker, *told_all)
        if report.found:
            return


def _judge_sharded(
    report: Report, worker: int, value, handed: list, steps: int, servers, seed, own
):
    length = LENGTHS[len(servers)]
    seen = [numbers(seed + worker + 31 * k, length).tolist() for k in range(steps)]
    alone = len(servers) == 1
    rules = (some([worker, *servers]), only("send", "recv"), waited)
    rules += () if alone else (_not_blocking,)
    if not report.communication(worker, value["calls"], *rules):
        return
    if value["open"]:
        report.problem("an irecv is still open when the worker has left: start those of the next "
                       "weights after more() has said True", worker, "communication")  # fmt: skip
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
    judge_weights(report, worker, value, numbers(seed + worker + 31 * steps, length))
    wholes = [_whole(length, own, k).tensor_split(len(servers)) for k in range(steps)]
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
