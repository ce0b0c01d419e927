"""Notes of what DDP does on a rank: its calls, its hook's, and waits inside of the hook."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from utils.checks.calls import Calls
from utils.checks.groups import Group

# What DDP communicates beside gradients: the order in which they were ready, once.
HOUSEKEEPING = {"broadcast", "all_gather"}


def of_gradients(calls: Calls) -> Calls:
    """Return the calls without what DDP does for itself."""
    return [call for call in calls if call["op"] not in HOUSEKEEPING]


def reduced_bytes(calls: Calls) -> int:
    """Return how many bytes were reduced."""
    return sum(call["nbytes"] for call in calls if call["op"] == "all_reduce")


def noted_calls(model: DistributedDataParallel) -> list[bool]:
    """Return a list that notes for each call of the DDP model whether its backward communicates."""
    calls = []
    forward = model.forward

    def call(*args, **kwargs):
        calls.append(model.require_backward_grad_sync)
        return forward(*args, **kwargs)

    model.forward = call
    return calls


# What to do where something else than a future is returned.
RETURN = {
    "NoneType": "return work.get_future().then(…), with the word return before it",
    "MPIWork": "that is the work; return work.get_future().then(…)",
    "Tensor": "the sum has not come yet; return work.get_future().then(…)",
}


def can_be_late(group: Group, blocks: bool) -> bool:
    """Return whether others can wait until the hook of the group's first rank has returned.

    Not where a rank is known to block in it, and not on ranks whose futures complete at once.
    """
    from torch_mpi.group.work import MPIWork
    from torch_mpi.protocol.progress import progress

    unable = torch.zeros(1)
    work = dist.all_reduce(unable, group=group, async_op=True)
    work.wait()
    unable += blocks or not isinstance(work, MPIWork) or not progress.available
    dist.all_reduce(unable, group=group)
    return not unable.item() and dist.get_world_size(group) > 1


# Of messages by which the check itself tells a rank to go on.
SIGNAL = 404
WAITS = (
    "the hook waits for its all_reduce, and backward with it: return the future and let then() do "
    "the rest"
)


def noted_hook(hook: Callable, answer: dict, group: Group) -> Callable:
    """Return a hook that counts its calls, and the waits inside of it for what is not over.

    Where the other ranks are `late`, they begin when the hook of the group's first has returned:
    there no all_reduce can be over before.
    """
    first = dist.get_rank(group) == 0
    signal = torch.zeros(1)
    others = range(1, dist.get_world_size(group)) if first else ()

    def call(state, bucket):
        answer["buckets"] += 1
        if answer["late"] and not first:
            dist.recv(signal, group_src=0, group=group, tag=SIGNAL)
        with _waits_counted(answer, first):
            future = hook(state, bucket)
        if answer["late"]:
            for place in others:
                dist.send(signal, group_dst=place, group=group, tag=SIGNAL)
        if not isinstance(future, torch._C.Future):
            kind = type(future).__name__
            raise TypeError(f"fp16_hook returned {kind}, expected a future: {RETURN.get(kind, '')}")
        return future.then(functools.partial(noted, bucket))

    def noted(bucket, future):
        value = future.value()
        kind = getattr(value, "dtype", type(value).__name__)
        answer["value"] = str(kind).removeprefix("torch.")
        return value if isinstance(value, torch.Tensor) else bucket.buffer()

    return call


@functools.cache
def _waiting() -> dict[tuple[type, str], tuple[Callable, Callable]]:
    """Return methods of works and futures by which one waits; and what tells whether it is over.

    As they are before a check has replaced any.
    """
    from torch_mpi.group.work import MPIWork

    future = torch._C.Future  # what then() gives is one
    over = {MPIWork: MPIWork.is_completed, future: future.done}
    names = [(MPIWork, "is_completed"), (future, "done"), (MPIWork, "wait"), (future, "wait")]
    return {(kind, name): (getattr(kind, name), over[kind]) for kind, name in names}


@contextlib.contextmanager
def _waits_counted(answer: dict, first: bool) -> Iterator[None]:
    """Count waits for what is not over; and what is asked for again and again, whether it is over.

    Where nothing can be over, as the others are late, such a wait would have no end: it is an error
    on the group's first rank.
    """
    asked: list[bool] = []

    def counted(method: Callable, is_over: Callable, most: int) -> Callable:
        def call(self, *args, **kwargs):
            if not is_over(self):
                asked.append(True)
                if len(asked) > most:
                    answer["waits"] += 1
                    if answer["late"] and first:
                        raise RuntimeError(WAITS)
            return method(self, *args, **kwargs)

        return call

    with contextlib.ExitStack() as patches:
        for (kind, name), (method, is_over) in _waiting().items():
            method = counted(method, is_over, int(name != "wait"))
            patches.enter_context(mock.patch.object(kind, name, method))
        yield
