"""The probes of lab 07, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from utils.checks.probe import (
    TOGETHER,
    also_calls,
    answer_named,
    as_dict,
    number,
    numbers,
    plays_a_part,
    reading_answer,
    recorded,
    told,
)

# -- servers ---------------------------------------------------------------------------------------


# The world size of lab 07, including the server.
WORLD = 6
SERVER = 0

# Seconds between two looks of a slow worker, and its most looks for another worker's signal.
LOOK = 0.0002
MOST_LOOKS = 5000
# The tag of messages by which the check's workers themselves set their order.
SIGNAL = 707


def blank(workers: int) -> torch.Tensor:
    """Return uninitialized weights, whose length and dtype depend on the number of workers."""
    return torch.empty(4 + workers, dtype=torch.float64 if workers < 3 else torch.float32)


def filled(seed: int, workers: int) -> torch.Tensor:
    """Return the weights that follow from this seed."""
    return numbers(seed, len(blank(workers))).to(blank(workers).dtype)


def toy_gradient(weights: torch.Tensor, seed: int, k: int) -> torch.Tensor:
    """Return the k-th gradient of the worker with this seed, which no other rank knows."""
    return 0.5 * weights - numbers(seed + k, len(weights)).to(weights.dtype)


@dataclass(frozen=True)
class Job:
    """What a worker of the check does, which reaches its rank as JSON.

    Attributes:
        worker: the rank.
        steps: how many gradients it pushes before it leaves.
        looks: how often it looks for new weights before it pushes a gradient. This takes time, in
            which other workers continue.
        tells: a rank and a number: after so many gradients, it sends this rank a signal.
        awaits: a rank: before this rank's signal it pushes no gradient, and doesn't leave, unless
            the signal never comes.
    """

    worker: int
    steps: int
    looks: int
    tells: Sequence[int] = ()
    awaits: int | None = None


def _toy_worker(seed: int, workers: int, job: Job) -> list[list[float]]:
    """Work for this number of steps, then leave; return the weights that came."""
    came = []
    weights = blank(workers)
    request = dist.irecv(weights, SERVER)
    signal = None if job.awaits is None else dist.irecv(torch.empty(1), job.awaits, tag=SIGNAL)
    for k in range(job.steps):
        request.wait()
        came.append(weights.tolist())
        gradient = toy_gradient(weights, seed, k)
        request = dist.irecv(weights := blank(workers), SERVER)
        _look(request, job.looks)
        if k == 0 and signal is not None:
            _look(signal, MOST_LOOKS)
        dist.send(torch.ones(1), SERVER)
        dist.send(gradient, SERVER)
        if job.tells and job.tells[1] == k + 1:
            dist.send(torch.ones(1), job.tells[0], tag=SIGNAL)
    request.wait()
    came.append(weights.tolist())
    if not job.steps and signal is not None:
        _look(signal, MOST_LOOKS)
    dist.send(torch.zeros(1), SERVER)
    if signal is not None:
        signal.wait()
    return came


def _look(request: dist.Work, times: int) -> None:
    """Wait for a communication in the background, at most for so many looks."""
    for _ in range(times):
        if request.is_completed():
            return
        time.sleep(LOOK)


@plays_a_part("recv", "send")
def probe_server(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, rate: float, more: list
) -> dict:
    """Call the student's server on one rank, and the check's workers on the others.

    Args:
        seed: the seed of the server's weights, or of this worker's gradients.
        more: further arguments, with `None` for infinity, which JSON doesn't have.
    """
    mine = next((job for job in (Job(*about) for about in jobs) if job.worker == rank), None)
    if rank == SERVER:
        weights = filled(seed, len(jobs))
        workers = [worker for worker, *_ in reversed(jobs)]
        memory = weights.data_ptr()
        bounds = [math.inf if bound is None else bound for bound in more]
        function = reading_answer(user_ns, name, changes=(0,))
        result, calls = recorded(function, weights, workers, rate, *bounds)
        moved = weights.data_ptr() != memory
        return {"weights": weights, "result": told(result), "calls": calls, "moved": moved}
    return {"got": _toy_worker(seed, len(jobs), mine)} if mine else {}


# -- workers ---------------------------------------------------------------------------------------


class Counted:
    """Counts how often a student's worker called ``more`` and ``compute``."""

    def __init__(self, seed: int, steps: int, servers: int = 1, gradient: Callable = toy_gradient):
        from torch_mpi.record import log

        self.seed = seed
        self.left = steps
        self.servers = servers
        self.gradient = gradient
        self.seen: list[list[float]] = []
        self.allowed = True
        self.asked = 0
        self.early = False
        self.log = log
        self.mark = log.mark()

    def more(self) -> bool:
        """Return whether there is another step; a worker asks when all weights have come."""
        self.asked += 1
        came = sum(call.op == "recv" and call.end > 0 for call in self.log.since(self.mark))
        self.early = self.early or came < self.asked * self.servers
        self.allowed = self.left > 0
        self.left -= 1
        return self.allowed

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the next step."""
        if not self.allowed:
            raise RuntimeError(
                "compute(weights) was called after more() had returned False. Ask more() once each "
                "time that weights have come, before you compute, and leave if it returns False"
            )
        self.seen.append(weights.tolist())
        return self.gradient(weights, self.seed, len(self.seen) - 1)


def serve_toys(
    steps: dict[int, int], weights: Callable[[int, int], torch.Tensor]
) -> dict[str, list]:
    """Send each worker fresh weights until it leaves; return what each worker pushed.

    Args:
        steps: how many gradients each worker pushes.
        weights: returns the weights for a worker's k-th gradient.
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
    """Return the weights that the check's server sends for a k-th gradient; see `blank`."""
    return filled(seed + 100 * worker + k, like)


@plays_a_part("recv", "send")
def probe_work(
    user_ns: dict, *, rank: int, name: str, seed: int, jobs: list, more: list, like: int
) -> dict:
    """Call the student's worker on three ranks, and the check's server on another."""
    steps = {worker: count for worker, count, *_ in jobs}
    if rank == SERVER:
        return {"handed": serve_toys(steps, functools.partial(weights_for, seed, like=like))}
    if rank not in steps:
        return {}
    counted = Counted(seed, steps[rank])
    weights = blank(like)
    function = reading_answer(user_ns, name, changes=(1,))
    _, calls = recorded(function, counted.compute, weights, counted.more, *more)
    return {"seen": counted.seen, "calls": calls, "early": counted.early, "last": weights}


# The number of weights for each number of servers. With two servers, all parts have the same size.
LENGTHS = {2: 12, 3: 10, 1: 11}


def sharded_weights(seed: int, worker: int, k: int, servers: int) -> torch.Tensor:
    """Return the weights that a worker receives for its k-th gradient."""
    return numbers(seed + worker + 31 * k, LENGTHS[servers])


@plays_a_part("recv", "send")
def probe_sharded(
    user_ns: dict, *, rank: int, seed: int, servers: list[int], jobs: list
) -> dict | None:
    """Call `work_sharded`; `seed` is for a server's weights or for this worker's gradients."""
    steps = {worker: count for worker, count, *_ in jobs}
    if rank in servers:
        return {"handed": serve_toys(steps, functools.partial(_part, seed, servers, rank))}
    if rank not in steps:
        return None
    counted = Counted(seed, steps[rank], len(servers), numbered_gradient)
    empty = torch.empty(LENGTHS[len(servers)])
    function = reading_answer(user_ns, "work_sharded", changes=(1,))
    function(counted.compute, empty, list(servers), counted.more)
    calls = counted.log.since(counted.mark)
    return {
        "early": counted.early,
        "last": empty,
        "open": any(call.op == "recv" and not call.end for call in calls),
        "seen": counted.seen,
        "calls": [as_dict(call) for call in calls],
        "apart": _one_after_the_other(calls),
        "late": _received_late(calls),
    }


def _part(seed: int, servers: list[int], server: int, worker: int, k: int) -> torch.Tensor:
    """Return a server's part of a worker's k-th weights."""
    parts = sharded_weights(seed, worker, k, len(servers)).tensor_split(len(servers))
    return parts[servers.index(server)].clone()


def numbered_gradient(weights: torch.Tensor, seed: int, k: int) -> torch.Tensor:
    """Return the k-th gradient of the worker with this seed; each number shows its position."""
    return numbers(seed + k, len(weights)) + 1000 * torch.arange(float(len(weights)))


def _one_after_the_other(calls: list) -> str:
    """Return the kind of messages that began only after a wait for a different server."""
    farewells = {call.peer: call for call in calls if call.op == "send"}.values()
    for op in ("recv", "send"):
        if _begun_late([call for call in calls if call.op == op and call not in farewells]):
            return op
    return ""


def _begun_late(calls: list) -> bool:
    """Return whether a server's first message began after a wait for a different server."""
    group: dict[tuple, float] = {}  # when the wait for each message of a round begins
    for call in calls:
        if (call.peer, call.nbytes) in group:
            group = {}
        first = min(group.values(), default=math.inf)
        if call.start > first and all(peer != call.peer for peer, _ in group):
            return True
        group[call.peer, call.nbytes] = _waited_for(call)
    return False


def _waited_for(call: Any) -> float:
    """Return when a rank began to wait for a message; infinity if it never did."""
    return min((begin for begin, _ in call.waits), default=math.inf)


def _received_late(calls: list) -> bool:
    """Return whether the receives of the next weights begin only after a wait for a send."""
    count: dict[tuple, int] = {}
    begun: list[tuple[int, float]] = []
    first: dict[int, float] = {}
    for call in calls:
        k = count[call.op, call.peer] = count.get((call.op, call.peer), -1) + 1
        if call.op == "recv":
            begun.append((k, call.start))
        else:  # a header and a part in each round
            first[k // 2] = min(first.get(k // 2, math.inf), _waited_for(call))
    return any(k > 0 and start > first.get(k - 1, math.inf) for k, start in begun)


# -- weights in shared memory ----------------------------------------------------------------------


class Others:
    """Gradients on shared weights, which other ranks change while one is computed."""

    def __init__(self, shared: torch.Tensor, seed: int, steps: int):
        self.shared = shared
        self.seed = seed
        self.left = steps
        self.computed = 0
        self.seen: list[list[float]] = []

    def more(self) -> bool:
        """Return whether there is another step; if so, other ranks first add to the weights."""
        self.seen.append(self.shared.tolist())
        self.left -= 1
        if self.left >= 0:
            self.shared += of_others(self.seed + 400, self.computed, len(self.shared))
        return self.left >= 0

    def compute(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the gradient at the weights; other ranks add to them before it is ready."""
        gradient = toy_gradient(weights.clone(), self.seed, self.computed)
        self.shared += of_others(self.seed, self.computed, len(weights))
        self.computed += 1
        return gradient


class Overwritten(TorchDispatchMode):
    """Notes whether another tensor is copied into this memory."""

    def __init__(self, pointer: int):
        super().__init__()
        self.pointer = pointer
        self.found = False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.copy_.default:
            into, source = (tensor.data_ptr() for tensor in args[:2])
            self.found = self.found or (into == self.pointer != source)
        return function(*args, **kwargs or {})


def of_others(seed: int, k: int, size: int) -> torch.Tensor:
    """Return what the other ranks add to the weights in step k."""
    return numbers(seed + 100 + k, size)


@also_calls("broadcast")
def probe_hogwild(user_ns: dict, *, rank: int, seed: int, rate: float, steps: int) -> dict:
    """Call `hogwild` on memory to which others write as well."""
    shared = numbers(seed, 3 + steps)
    others = Others(shared, seed, steps)
    memory = shared.data_ptr()
    function = answer_named(user_ns, "hogwild")
    with Overwritten(memory) as overwritten:
        _, calls = recorded(function, shared, others.compute, rate, others.more)
    return {
        "overwritten": overwritten.found,
        "moved": shared.data_ptr() != memory,
        "seen": others.seen,
        "weights": shared,
        "computed": others.computed,
        "calls": calls,
    }


@contextlib.contextmanager
def _shared_counters(count: int) -> Iterator[tuple[torch.Tensor, filelock.FileLock]]:
    """Share zeros among all ranks, with a lock; all ranks call this."""
    with contextlib.ExitStack() as stack:
        folder = [None]
        if dist.get_rank() == SERVER:
            # Windows removes no file that a rank still maps; the system does it later.
            own = tempfile.TemporaryDirectory(prefix="lost-updates-", ignore_cleanup_errors=True)
            folder[0] = stack.enter_context(own)
            Path(folder[0], "counters").write_bytes(bytes(4 * count))
        dist.broadcast_object_list(folder, src=SERVER)
        file = Path(folder[0], "counters")
        counters = torch.from_file(str(file), shared=True, size=count)
        dist.barrier()
        yield counters, filelock.FileLock(file.with_name("lock"))


@also_calls("broadcast")
def probe_count(user_ns: dict, *, rank: int, seed: int, times: int) -> dict:
    """Call `count_lost` with updates of which a known share gets lost."""
    from torch_mpi.record import log

    function = answer_named(user_ns, "count_lost")
    keep = kept_updates(seed, rank, times)  # this rank knows only its own lost updates
    made: list[int] = []
    together: list[bool] = []  # for each update, whether a collective came before it

    with _shared_counters(keep.shape[1]) as (counters, lock):

        def update(tensor: torch.Tensor) -> None:
            if len(made) == times:
                raise RuntimeError(f"update was called more than {times} times on a rank")
            if tensor.data_ptr() != counters.data_ptr():
                raise ValueError(
                    "update got a tensor whose memory the ranks don't share. Call update(counters)"
                )
            if rank == WORLD - 1:
                time.sleep(0.002)
            with lock:
                counters.add_(keep[len(made)])
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


def kept_updates(seed: int, rank: int, times: int) -> torch.Tensor:
    """Return 1 for each update of a rank that arrives, and 0 for lost ones; the first arrives."""
    draw = torch.Generator().manual_seed(seed)
    counters = 5 * (times + 1)  # a different number for each number of updates
    kept = (torch.rand(times, counters, generator=draw) > 0.1 + 0.1 * rank).float()
    kept[0] = 1
    kept[:, 0] = 1
    return kept
