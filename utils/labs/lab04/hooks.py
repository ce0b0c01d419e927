"""Task 4.4: records of what DDP does on a rank, and of the hook that compresses gradients."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from utils.checks.comparison import Calls, inside, only, table
from utils.checks.probe import answer_named, as_dict
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import PARTITIONS, WORLD, Group, GroupAnswer, in_group, judge_groups, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas
from utils.labs.shared.replicas import Twin

if TYPE_CHECKING:
    from torch_mpi.record import Call

# In addition to gradients, DDP communicates once the order in which they became ready.
HOUSEKEEPING = {"broadcast", "all_gather"}


def of_gradients(calls: Calls) -> Calls:
    """Return the calls without DDP's housekeeping."""
    return [call for call in calls if call["op"] not in HOUSEKEEPING]


def reduced_bytes(calls: Calls) -> int:
    """Return how many bytes were reduced."""
    return sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")


def noted_calls(model: DistributedDataParallel) -> list[bool]:
    """Return a list that records for each call of the DDP model whether backward communicates."""
    calls = []
    forward = model.forward

    def call(*args, **kwargs):
        calls.append(model.require_backward_grad_sync)
        return forward(*args, **kwargs)

    model.forward = call
    return calls


# What to do if the hook returned something else than a future.
RETURN = {
    "NoneType": "Write return before work.get_future().then(…)",
    **dict.fromkeys(("MPIWork", "Work"), "Return work.get_future().then(…), not the work"),
    "Tensor": "The sum hasn't arrived yet, so return work.get_future().then(…)",
}


def can_be_late(group: Group, blocks: bool) -> bool:
    """Return whether other ranks can wait until the hook of the group's first rank has returned.

    They can't if a rank is known to block in the hook, or if its futures complete immediately.
    """
    unable = torch.zeros(1)
    work = dist.all_reduce(unable, group=group, async_op=True)
    work.wait()
    unable += blocks or not _finishes_later(work)
    dist.all_reduce(unable, group=group)
    return not unable.item() and dist.get_world_size(group) > 1


def _finishes_later(work: dist.Work) -> bool:
    """Return whether the future of such a work can be incomplete."""
    kind = _late_works()
    return kind is not None and isinstance(work, kind)


def _late_works() -> type[dist.Work] | None:
    return dist.group.WORLD.late_works


# The tag of messages with which the check itself lets a rank continue.
SIGNAL = 404
WAITS = (
    "The hook waits for its all_reduce, so backward waits, too. Return the future, and let "
    "then() do the rest"
)


def noted_hook(hook: Callable, answer: dict, group: Group) -> Callable:
    """Return a hook that counts its calls, and the waits inside it for unfinished works.

    If the other ranks are `late`, they start when the hook of the group's first rank has returned,
    so no all_reduce can finish before.
    """
    from torch_mpi.record import log

    first = dist.get_rank(group) == 0
    signal = torch.zeros(1)
    others = range(1, dist.get_world_size(group)) if first else ()

    def call(state, bucket):
        answer["buckets"] += 1
        if answer["late"] and not first:
            dist.recv(signal, group_src=0, group=group, tag=SIGNAL)
        mark = log.mark()
        with _waits_counted(answer, first):
            future = hook(state, bucket)
        if _late_works() is None:
            answer["waits"] += any(map(_was_waited_for, log.since(mark)))
        if answer["late"]:
            for place in others:
                dist.send(signal, group_dst=place, group=group, tag=SIGNAL)
        if not isinstance(future, torch._C.Future):
            kind = type(future).__name__
            raise TypeError(
                f"fp16_hook returned {kind} instead of a future. {RETURN.get(kind, '')}"
            )
        return future.then(functools.partial(noted, bucket))

    def noted(bucket, future):
        value = future.value()
        kind = getattr(value, "dtype", type(value).__name__)
        answer["value"] = str(kind).removeprefix("torch.")
        return value if isinstance(value, torch.Tensor) else bucket.buffer()

    return call


def _was_waited_for(call: Call) -> bool:
    """Return whether a rank has waited for this call to end, or has asked for it.

    If futures are complete at once, the record shows it, because a future leaves no note in it.
    """
    waited = any(begin < call.end for begin, _ in call.waits)
    return waited or (call.waited and not call.blocking)


class _Inside(threading.local):
    """A rank's hook, in the thread that runs it; ranks can be threads of one process.

    Attributes:
        note: is called at a wait, with how many such calls are allowed; ``None`` outside a hook.
    """

    note: Callable[[int], None] | None = None


_inside = _Inside()
# One entry for each rank of this process that runs its hook.
_running: list[bool] = []


@functools.cache
def _waiting() -> dict[tuple[type, str], tuple[Callable, Callable]]:
    """Return the waiting methods of works and futures, each with what says if it is done.

    The cache keeps the methods from before a check replaces them.
    """
    future = torch._C.Future  # then() returns one, too
    done = future.done
    kind = _late_works()
    over = {future: lambda one: kind is not None and done(one)}
    names = [(future, "done"), (future, "wait")]
    if kind is not None:
        over[kind] = kind.is_completed
        names += [(kind, "is_completed"), (kind, "wait")]
    return {(kind, name): (getattr(kind, name), over[kind]) for kind, name in names}


@contextlib.contextmanager
def _waits_counted(answer: dict, first: bool) -> Iterator[None]:
    """Count waits for unfinished works, and repeated questions whether a work is done.

    If the other ranks are late, no work can finish, and a wait would never end. So a wait is an
    error on the group's first rank.
    """
    asked: list[bool] = []

    def note(most: int) -> None:
        asked.append(True)
        if len(asked) > most:
            answer["waits"] += 1
            if answer["late"] and first:
                raise RuntimeError(WAITS)

    with _methods_replaced():
        _inside.note = note
        try:
            yield
        finally:
            _inside.note = None


@contextlib.contextmanager
def _methods_replaced() -> Iterator[None]:
    """Let waiting methods call a hook's note, as long as a rank of this process runs its hook."""
    _running.append(True)
    if len(_running) == 1:
        for (kind, name), (method, is_over) in _waiting().items():
            setattr(kind, name, _noted_wait(method, is_over, most=int(name != "wait")))
    try:
        yield
    finally:
        _running.pop()
        if not _running:
            for (kind, name), (method, _) in _waiting().items():
                setattr(kind, name, method)


def _noted_wait(method: Callable, is_over: Callable, most: int) -> Callable:
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        if _inside.note is not None and not is_over(self):
            _inside.note(most)
        return method(self, *args, **kwargs)

    return call


_HOOK_NET = (6, 24, 24, 24, 24, 4)  # two of its buckets have the same length
FLOAT16 = 6e-3  # tolerance for a gradient that was reduced in half precision
SLOW = (4e-3, 1e9)  # a network with latency, so that no all_reduce ends immediately


@in_group
def probe_hook(
    user_ns: dict, *, rank: int, group: Group, data_seed: int, seed: int, large: float
) -> dict:
    """Use `fp16_hook` in DDP; return the third step's gradients and calls, and large gradients.

    Args:
        data_seed: draws this rank's images.
        seed: draws the model, and the images for the large gradients.
    """
    from torch_mpi.record import log

    small = {"process_group": group, "bucket_cap_mb": 800 / 2**20}
    model = DistributedDataParallel(replicas.net(seed, _HOOK_NET), **small)
    answer: dict = {"buckets": 0, "waits": 0, "value": None, "late": False}
    model.register_comm_hook(group, noted_hook(answer_named(user_ns, "fp16_hook"), answer, group))
    images, labels = replicas.samples(data_seed, 8)
    for _ in range(3):  # from the second step on there are several buckets
        model.zero_grad()
        answer["buckets"] = 0
        mark = log.mark()
        with replicas.network(*SLOW):
            functional.cross_entropy(model(images), labels).backward()
        calls = [as_dict(call) | {"dtype": call.dtype} for call in log.since(mark)]
    counted = answer | {
        "gradient": replicas.gradient_of(model.module),
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "calls": of_gradients(calls),
    }
    model.zero_grad()
    blocks = answer["waits"] > 0 or any(call["blocking"] for call in counted["calls"])
    if can_be_late(group, blocks):
        answer["late"] = True
        functional.cross_entropy(model(images), labels).backward()
        answer["late"] = False
        counted["gradient where others are late"] = replicas.gradient_of(model.module)
        model.zero_grad()
    with replicas.network(*SLOW):
        images, labels = replicas.samples(seed, 8)
        (large * functional.cross_entropy(model(images), labels)).backward()
    return counted | {"overflows": not bool(replicas.gradient_of(model.module).isfinite().all())}


VALUES = {
    "The value of the future is a list, as all_reduce leaves it. Return "
    "work.get_future().then(decompress)": "list",
    "The function that you pass to then() returns nothing. Return the averaged bucket": "NoneType",
    "The value of the future is float16. Copy it into bucket.buffer(), and return that "
    "float32 buffer": "float16",
}


@task("4.4", "a hook that compresses", points=4)
def fp16_hook(ranks: Ranks, report: Report) -> None:
    """Check mean gradients in half precision, with half of the bytes and no wait in the hook."""
    twin = Twin(replicas.net(report.seed, _HOOK_NET), 1.0)
    # With a loss so many times as large, the mean gradient fits into float16, but no sum does.
    large = 40_000 / twin.gradient(*replicas.samples(report.seed, 8)).abs().max().item()
    seeds = report.seeds(WORLD)
    gradients = [twin.gradient(*replicas.samples(seed, 8)) for seed in seeds]
    given = {"seed": report.seed, "large": large, "each": to_each(data_seed=seeds)}
    cases = [{"partition": partition} | given for partition in PARTITIONS]
    judge_groups(ranks, report, probe_hook, cases, functools.partial(_hook_steps, gradients))


def _hook_steps(gradients: list[torch.Tensor], answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge the communication of a rank's hook, and the gradients after it.

    Args:
        gradients: each rank's gradient from its samples.
    """
    members = answer.members
    outcome = answer.value
    where = on(members)
    yield communication(outcome["calls"], only("all_reduce"), inside(members))
    yield facts(_not_halved(outcome, where))
    yield value(outcome["value"], "float32", table(VALUES))
    mean = sum(gradients[r] for r in members) / len(members)
    in_units = functools.partial(replicas.scaled, like=mean)
    wrong = _wrong_gradients(gradients, members, answer.rank)
    mistakes = table({text: in_units(row) for text, row in wrong.items()})

    def is_mean(row: list[float], words: str) -> Step:
        got = in_units(torch.tensor(row))
        return value(got, in_units(mean), mistakes, what=words, tolerance=FLOAT16)

    units = "gradients in units of the largest"
    yield is_mean(outcome["gradient"], f"{where}: {units}")
    yield facts(_wrong_hook(outcome, where, len(members)))
    late = outcome.get("gradient where others are late")
    if late is not None:
        words = (
            f"{where}, when the other ranks are late: {units}. Don't use the sum before its "
            "future is complete"
        )
        yield is_mean(late, words)


def _wrong_gradients(
    gradients: list[torch.Tensor], members: list[int], rank: int
) -> dict[str, torch.Tensor]:
    p = len(members)
    summed = sum(gradients[r] for r in members)
    mine = gradients[rank]
    world = summed / WORLD
    late = mine / p
    return {
        "The gradients are sums. Divide by the size of the group": summed,
        f"You divided the sum by {WORLD}, the size of the world. "
        "Use dist.get_world_size(group)": world,
        "You divided the gradients by the number of ranks twice. Remove one division": (
            summed / p**2
        ),
        "The gradients are this rank's own. Return the reduced ones": mine,
        "The gradients are this rank's own, divided: the sum is missing, or it comes too late. "
        "Divide in then()": late,
    }


def _not_halved(outcome: dict[str, Any], where: str) -> dict[str, object]:
    """Return what is wrong if something else was reduced than half-precision gradients."""
    calls = outcome["calls"]
    nbytes = outcome["nbytes"]
    reduced = reduced_bytes(calls)
    half = nbytes // 2
    kinds = {call["dtype"] for call in calls} - {"float16"}
    return {
        "You don't call all_reduce for the bucket. Call it with async_op=True": not calls,
        f"{where}: You reduce {reduced} bytes for {nbytes} bytes of gradients. Reduce half "
        f"of them, {half}, as a float16 tensor": reduced != half,
        f"{where}: You reduce {', '.join(sorted(kinds))}. Reduce float16": kinds,
    }


def _wrong_hook(outcome: dict[str, Any], where: str, p: int) -> dict[str, object]:
    """Return what is wrong with a hook whose gradients are right."""
    calls = outcome["calls"]
    buckets = outcome["buckets"]
    blocks = any(call["blocking"] for call in calls)
    return {
        f"{where}: You call all_reduce {len(calls)} times for {buckets} buckets. Call it "
        "once for each bucket": len(calls) != buckets,
        f"{where}: With large gradients you get inf, because the sum of {p} of them passes "
        "65,504, the largest float16. Divide before the sum": outcome["overflows"],
        f"{where}: all_reduce blocks inside the hook, so backward waits. Use async_op=True": blocks,
        f"{where}: {WAITS}": outcome["waits"],
    }
