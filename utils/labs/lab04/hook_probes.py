"""The probe of task 4.4, and what it notes inside the student's communication hook."""

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

from utils.checks.groups import Group, in_group
from utils.checks.probe import also_calls, answer_named, as_dict
from utils.labs.shared import small_models

from .probes import of_gradients

if TYPE_CHECKING:
    from torch_mpi.record import Call


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

    def call(state, bucket):  # DDP refuses annotations that are text
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

    def noted(bucket: dist.GradBucket, future: torch.futures.Future) -> torch.Tensor:
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


HOOK_NET = (6, 24, 24, 24, 24, 4)  # two of its buckets have the same length

SLOW = (4e-3, 1e9)  # a network with latency, so that no all_reduce ends immediately


#: The step whose gradients are compared.
LATER = 2


@also_calls("all_gather", "all_reduce", "broadcast", "recv", "send")
@in_group
def probe_hook(
    user_ns: dict, *, rank: int, group: Group, data_seed: int, seed: int, large: float
) -> dict:
    """Use `fp16_hook` in DDP; return the third step's gradients and calls, and large gradients.

    Args:
        data_seed: draws this rank's images; the third step's with :data:`LATER` more, and those
            with late ranks with one more again.
        seed: draws the model, and the images for the large gradients.
    """
    from torch_mpi.record import log

    small = {"process_group": group, "bucket_cap_mb": 800 / 2**20}
    model = DistributedDataParallel(small_models.net(seed, HOOK_NET), **small)
    answer: dict = {"buckets": 0, "waits": 0, "value": None, "late": False}
    model.register_comm_hook(group, noted_hook(answer_named(user_ns, "fp16_hook"), answer, group))
    for step in range(LATER + 1):  # from the second step on there are several buckets
        images, labels = small_models.samples(data_seed + step, 8)
        model.zero_grad()
        answer["buckets"] = 0
        mark = log.mark()
        with small_models.network(*SLOW):
            functional.cross_entropy(model(images), labels).backward()
        calls = [as_dict(call) | {"dtype": call.dtype} for call in log.since(mark)]
    counted = answer | {
        "gradient": small_models.gradient_of(model.module),
        "nbytes": sum(p.nbytes for p in model.parameters()),
        "calls": of_gradients(calls),
    }
    model.zero_grad()
    blocks = answer["waits"] > 0 or any(call["blocking"] for call in counted["calls"])
    if can_be_late(group, blocks):
        answer["late"] = True
        images, labels = small_models.samples(data_seed + LATER + 1, 8)
        functional.cross_entropy(model(images), labels).backward()
        answer["late"] = False
        counted["gradient where others are late"] = small_models.gradient_of(model.module)
        model.zero_grad()
    with small_models.network(*SLOW):
        images, labels = small_models.samples(seed, 8)
        (large * functional.cross_entropy(model(images), labels)).backward()
    return counted | {
        "overflows": not bool(small_models.gradient_of(model.module).isfinite().all())
    }
