"""The probes of lab 01, which run on the ranks beside the student's answers."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from torch_mpi.errors import helper
from utils.checks.clock import Clock, moved_clocks
from utils.checks.draws import across
from utils.checks.probe import answer_named, fingerprint, kept, numbers, reading_answer, recorded

# -- messages and sums -----------------------------------------------------------------------------


def drawn_tensor(seed: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return numbers that lose digits in a narrower dtype; in double, they aren't contiguous."""
    row = numbers(seed, *shape, double=dtype != "float32")
    if dtype == "float64":
        return across(row)
    return (row * 2**50).long() + 1 if dtype == "int64" else row


def probe_hello(user_ns: dict, *, rank: int) -> dict:
    """Return what the student's variables say about this rank."""
    if not dist.is_initialized():
        raise RuntimeError(
            'dist.init_process_group failed, or your cell doesn\'t call it. Call it with "mpi". '
            'Another backend, such as "gloo", needs an address that these ranks don\'t have'
        )
    return {
        "backend": dist.get_backend(),
        "rank": answer_named(user_ns, "rank"),
        "world_size": answer_named(user_ns, "world_size"),
    }


def probe_transfer(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """Return what `transfer` does with a fresh tensor."""
    tensor = drawn_tensor(seed, shape, dtype)
    _, calls = recorded(answer_named(user_ns, "transfer"), tensor, rank)
    return {"tensor": tensor, "calls": calls}


def work_of(seed: int) -> list[int]:
    """Return what `work()` returns on the rank with this seed; nothing for an even one."""
    return [seed] * (seed % 2)


def probe_transfer_overlapped(
    user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str
) -> dict:
    """Return what `transfer_overlapped` does. Its `work` notes which calls were waited for."""
    from torch_mpi.record import log

    tensor = drawn_tensor(seed, shape, dtype)
    mark = log.mark()
    seen = []
    slept = []

    def work() -> list[int]:
        seen.append([call.waited for call in log.since(mark)])
        return work_of(seed)

    function = answer_named(user_ns, "transfer_overlapped")
    answering = threading.get_ident()
    sleep = time.sleep

    def noting(seconds: float) -> None:
        by = sys._getframe(1).f_globals.get("__name__", "")  # the backend pauses, too
        if threading.get_ident() == answering and not seen and not by.startswith("torch_mpi"):
            slept.append(seconds)
        sleep(seconds)

    renamed = {name: noting for name, it in user_ns.items() if it is sleep}
    with mock.patch.object(time, "sleep", noting), mock.patch.dict(user_ns, renamed):
        result, calls = recorded(function, tensor, rank, work)
    return {
        "tensor": fingerprint(tensor),
        "calls": calls,
        "result": result,
        "seen": seen,
        "slept": bool(slept),
    }


def probe_sum(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """Return what `sum_over_ranks` does with a fresh tensor, and with another one."""
    function = answer_named(user_ns, "sum_over_ranks")
    result, calls = recorded(function, drawn_tensor(seed, shape, dtype))
    other = drawn_tensor(seed + 1, shape, dtype)
    _, again = kept("sum_over_ranks", result, lambda: recorded(function, other))
    # An object of a student's class could still communicate while it is converted.
    plain = type(result) is torch.Tensor or not isinstance(result, torch.Tensor)
    told = {"result": result if plain else f"<{type(result).__name__}>"}
    return told | {"calls": calls, "calls again": again}


def probe_exchange(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """Return what `exchange` does with a tensor, and with another one."""
    function = answer_named(user_ns, "exchange")
    given = drawn_tensor(seed, shape, dtype)
    with _noted_memory() as used:
        result, calls = recorded(function, given, rank)
    shared = bool(set(used["send"]) & set(used["recv"]))
    result_told = fingerprint(result)
    other = drawn_tensor(seed + 1, shape, dtype)
    _, again = kept("exchange", result, lambda: recorded(function, other, rank))
    return {"result": result_told, "shared": shared, "calls": calls, "calls again": again}


@contextlib.contextmanager
def _noted_memory() -> Iterator[dict[str, list[int]]]:
    """Record the addresses of the tensors that are sent, and of those that receive."""
    group = dist.group.WORLD
    used = {"send": [], "recv": []}

    def noting(name: str, call: Callable) -> Callable:
        @helper
        def note(tensors: list[torch.Tensor], *args: Any) -> Any:
            used[name].append(tensors[0].data_ptr())
            return call(tensors, *args)

        return note

    noted = {name: noting(name, getattr(group, name)) for name in used}
    with mock.patch.multiple(group, **noted):
        yield used


# -- time of messages ------------------------------------------------------------------------------


WARM_UP = 9.0


def disturbance(factors: Sequence[float], k: int) -> float:
    """Return how much longer the k-th round takes. Any five in a row have the median 1."""
    return factors[k % len(factors)] if k else WARM_UP


def probe_ping_pong(
    user_ns: dict,
    *,
    rank: int,
    nbytes: int,
    stamp: int,
    repeats: int,
    wire: list[float],
    factors: list[float],
) -> dict:
    """Return what `ping_pong` measures on a wire: latency + bytes / bandwidth per message.

    Args:
        wire: latency, bandwidth, and the share of a round trip that passes in send.
        stamp: a number that the wire writes into each ball of this rank; the result has the stamps
            that arrived.
        factors: see :func:`disturbance`.
    """
    function = answer_named(user_ns, "ping_pong")
    came = []
    with moved_clocks(user_ns) as clock, _slow_wire(clock, wire, factors, stamp, came):
        seconds, calls = recorded(function, nbytes, repeats, rank)
    return {"seconds": seconds, "calls": calls, "stamps": came}


@contextlib.contextmanager
def _slow_wire(
    clock: Clock, wire: list[float], factors: list[float], stamp: int, came: list[int]
) -> Iterator[None]:
    """Let each message of this rank take the wire's time, and stamp the balls that it sends.

    A send ends early, because MPI copies the ball, so most of a round trip passes in recv.
    """
    latency, bandwidth, share = wire
    group = dist.group.WORLD
    passed = [0]
    received = []

    def look() -> None:
        came.extend(_stamp_of(ball).item() for ball in received)

    def slow(name: str, call: Callable) -> Callable:
        def with_delay(tensors: list[torch.Tensor], *args: Any) -> Any:
            factor = disturbance(factors, passed[0] // 2)
            passed[0] += 1
            part = 2 * (share if name == "send" else 1 - share)
            clock.advance(part * factor * (latency + tensors[0].nbytes / bandwidth))
            look()
            if name == "send":
                row = _first_bytes(tensors[0])
                row.copy_(torch.tensor([stamp]).view(torch.uint8)[: len(row)])
            else:
                received[:] = tensors
            return call(tensors, *args)

        return with_delay

    names = ("send", "recv", "recv_anysource")
    with mock.patch.multiple(group, **{name: slow(name, getattr(group, name)) for name in names}):
        yield
        look()


def _stamp_of(ball: torch.Tensor) -> torch.Tensor:
    """Return the first eight bytes as a number; 0 for a shorter ball."""
    row = _first_bytes(ball)
    return row.clone().view(torch.int64) if len(row) == 8 else torch.zeros(1, dtype=torch.int64)


def _first_bytes(ball: torch.Tensor) -> torch.Tensor:
    """Return a view of the first eight bytes, uint8 [8] or shorter."""
    return ball.detach().reshape(-1).view(torch.uint8)[:8]


def probe_fit(user_ns: dict, *, rank: int, sizes: list, times: list) -> object:
    """Return what `fit` finds on rank 0."""
    return reading_answer(user_ns, "fit")(sizes, times) if rank == 0 else None


# -- a group of ranks ------------------------------------------------------------------------------


def probe_even_group(user_ns: dict, *, rank: int) -> dict:
    """Return facts about `even_ranks` on this rank."""
    group = answer_named(user_ns, "even_ranks")
    world = dist.distributed_c10d._world
    # A group's name is a count, so two groups with the same name were made in the same call.
    named = {name: sorted(world.pg_group_ranks[one]) for one, name in world.pg_names.items()}
    outcome: dict[str, Any] = {
        "kind": type(group).__name__,
        "ranks": None,
        "count": world.group_count,
        "groups": named,
        "name": world.pg_names.get(group),
    }
    if isinstance(group, dist.ProcessGroup):
        try:
            outcome["ranks"] = dist.get_process_group_ranks(group)
        except (KeyError, ValueError):
            raise RuntimeError(
                "You made even_ranks before the ranks joined the world again. Run its cell again"
            ) from None
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        outcome["ranks"] = []
    return outcome


def probe_forget(user_ns: dict, *, rank: int, count: int) -> None:
    """Delete `even_ranks`, and let all ranks give the next group the same number."""
    user_ns.pop("even_ranks", None)
    dist.distributed_c10d._world.group_count = count


def probe_even_sum(user_ns: dict, *, rank: int, seed: int, evens: list[int]) -> dict:
    """Return what `sum_over_even_ranks` does in the student's group and in a new one."""
    function = answer_named(user_ns, "sum_over_even_ranks")
    tensor = numbers(seed, 5)
    other = numbers(seed, 2, 3, double=True)
    another = dist.new_group(evens)  # made before the answer, which may raise an error
    made_inside = mock.patch.object(dist, "new_group", wraps=dist.new_group)
    try:
        with made_inside as new_group, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            _, calls = recorded(function, tensor, answer_named(user_ns, "even_ranks"))
        outcome = {
            "tensor": tensor,
            "calls": calls,
            "made inside": new_group.called,
            "warned": any("does not belong to the given group" in str(w.message) for w in warned),
        }
        if new_group.called:
            return outcome
        used, again = recorded(_uses, function, other, another, rank in evens)
        return outcome | {"used": used, "calls again": again, "other": fingerprint(other)}
    finally:
        if rank in evens:
            dist.destroy_process_group(another)


def _uses(function: Callable, tensor: torch.Tensor, group: Any, is_member: bool) -> bool:
    """Return whether a member communicates in the group that it gets."""
    if not is_member:
        function(tensor, group)
        return True
    with mock.patch.object(group, "allreduce", wraps=group.allreduce) as called:
        function(tensor, group)
    return called.called
