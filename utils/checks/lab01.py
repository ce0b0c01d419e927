"""Checks of lab 01: tensors between ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist

from .task import (
    Report,
    all_waited,
    answer_named,
    integers,
    no_collectives,
    recorded,
    task,
)

# Long enough that MPI does not send it before the receiver is ready (rendezvous).
LONG = 1_000_000


# -- 1.1 --------------------------------------------------------------------------------------


def probe_hello(user_ns: dict, *, rank: int) -> dict:
    """What the student found out about this rank."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call dist.init_process_group")
    return {
        "backend": dist.get_backend(),
        "rank": answer_named(user_ns, "rank"),
        "world_size": answer_named(user_ns, "world_size"),
    }


@task("1.1", "hello from every rank", points=1)
def hello(ranks, report: Report) -> None:
    """Backend, rank and world size."""
    for answer in report.answers(ranks, __name__, "probe_hello"):
        report.expect(answer.rank, "the backend", answer.value["backend"], "mpi")
        report.expect(answer.rank, "the variable rank", answer.value["rank"], answer.rank)
        report.expect(answer.rank, "the variable world_size", answer.value["world_size"], ranks.n)


# -- 1.2 and 1.3 ------------------------------------------------------------------------------


def probe_transfer(user_ns: dict, *, rank: int, seed: int) -> dict:
    """``transfer`` on a fresh tensor."""
    tensor = integers(seed + rank, 3, 4)
    _, calls = recorded(answer_named(user_ns, "transfer"), tensor, rank)
    return {"tensor": tensor.tolist(), "calls": calls}


@task("1.2", "blocking send and recv", points=2)
def transfer(ranks, report: Report) -> None:
    """Rank 1 ends with rank 0's tensor, the others with their own."""
    for answer in report.answers(ranks, __name__, "probe_transfer", seed=report.seed):
        _judge_transfer(report, answer.rank, answer.value, blocking=True)


def probe_transfer_overlapped(user_ns: dict, *, rank: int, seed: int) -> dict:
    """``transfer_overlapped`` with a work that looks at what is under way when it is called."""
    from torch_mpi.record import log

    tensor = integers(seed + rank, LONG)
    mark = log.mark()
    seen = []

    def work() -> int:
        seen.append([{"op": c.op, "waited": c.waited} for c in log.since(mark)])
        return seed + rank

    result, calls = recorded(answer_named(user_ns, "transfer_overlapped"), tensor, rank, work)
    expected = integers(seed if rank == 1 else seed + rank, LONG)
    return {
        "tensor": tensor[:6].tolist(),
        "wrong": int((tensor != expected).sum()),
        "calls": calls,
        "result": result,
        "seen": seen,
    }


@task("1.3", "isend and irecv around work", points=3)
def transfer_overlapped(ranks, report: Report) -> None:
    """As 1.2, non-blocking, with the work between start and wait."""
    for answer in report.answers(ranks, __name__, "probe_transfer_overlapped", seed=report.seed):
        rank, value = answer.rank, answer.value
        _judge_calls(report, rank, value["calls"], blocking=False)
        all_waited(report, rank, value["calls"])
        if value["wrong"]:
            whose = "rank 0's tensor" if rank == 1 else "its own tensor, unchanged"
            report.problem(f"{value['wrong']} of {LONG} elements are wrong; expected {whose}", rank)
        if len(value["seen"]) != 1:
            report.problem(
                f"work() must be called once, was called {len(value['seen'])} times", rank
            )
            continue
        report.expect(
            rank, "the value returned (that of work())", value["result"], report.seed + rank
        )
        _judge_overlap(report, rank, value["seen"][0])


def _judge_overlap(report: Report, rank: int, under_way: list[dict]) -> None:
    if rank > 1:
        return
    op = "isend" if rank == 0 else "irecv"
    if not under_way:
        report.problem(f"{op} comes after work(): start the communication first", rank)
    elif any(call["waited"] for call in under_way):
        report.problem("wait() comes before work(): nothing overlaps, wait after it", rank)


def _judge_transfer(report: Report, rank: int, value: dict, *, blocking: bool) -> None:
    source = 0 if rank == 1 else rank
    expected = integers(report.seed + source, 3, 4).tolist()
    report.expect(rank, "the tensor afterwards", value["tensor"], expected)
    _judge_calls(report, rank, value["calls"], blocking=blocking)


def _judge_calls(report: Report, rank: int, calls: list[dict], *, blocking: bool) -> None:
    """One message from rank 0 to rank 1, nothing else."""
    no_collectives(report, rank, calls)
    wanted = {0: ("send", 1), 1: ("recv", 0)}.get(rank)
    messages = [(c["op"], c["peer"]) for c in calls if c["op"] in ("send", "recv")]
    expected = [wanted] if wanted else []
    if messages != expected:
        report.problem(f"expected {_messages(expected)}, it made {_messages(messages)}", rank)
    for call in calls:
        if call["op"] in ("send", "recv") and call["blocking"] != blocking:
            used, asked = call["op"], f"i{call['op']}"
            if blocking:
                used, asked = asked, used
            report.problem(f"uses dist.{used}; this task asks for dist.{asked}", rank)


def _messages(pairs: list) -> str:
    words = [f"{op} {'to' if op == 'send' else 'from'} rank {peer}" for op, peer in pairs]
    return ", ".join(words) or "no message"


# -- 1.4 --------------------------------------------------------------------------------------


def probe_sum(user_ns: dict, *, rank: int, seed: int) -> dict:
    """``sum_over_ranks`` on a fresh tensor."""
    tensor = integers(seed + rank, 3, 4)
    result, calls = recorded(answer_named(user_ns, "sum_over_ranks"), tensor)
    return {"result": _listed(result), "calls": calls}


@task("1.4", "all_reduce", points=2)
def sum_over_ranks(ranks, report: Report) -> None:
    """Every rank has the sum, by one all_reduce."""
    expected = sum(integers(report.seed + r, 3, 4) for r in range(ranks.n)).tolist()
    for answer in report.answers(ranks, __name__, "probe_sum", seed=report.seed):
        report.expect(answer.rank, "the sum", answer.value["result"], expected)
        ops = [call["op"] for call in answer.value["calls"]]
        report.expect(answer.rank, "the communication", ops, ["all_reduce"])


# -- 1.5 --------------------------------------------------------------------------------------


def probe_exchange(user_ns: dict, *, rank: int, seed: int, length: int) -> dict:
    """``exchange`` of a short or a long tensor."""
    mine = integers(seed + rank, length)
    result, calls = recorded(answer_named(user_ns, "exchange"), mine.clone(), rank)
    partner = {0: 1, 1: 0}.get(rank, rank)
    right = isinstance(result, torch.Tensor) and torch.equal(
        result, integers(seed + partner, length)
    )
    return {"right": right, "calls": calls, "none": result is None}


@task("1.5", "an exchange without deadlock", points=3)
def exchange(ranks, report: Report) -> None:
    """Ranks 0 and 1 swap tensors, short ones and such that do not fit in a buffer."""
    for length in (4, LONG):
        answers = report.answers(ranks, __name__, "probe_exchange", seed=report.seed, length=length)
        for answer in answers:
            rank, value = answer.rank, answer.value
            no_collectives(report, rank, value["calls"])
            all_waited(report, rank, value["calls"])
            if value["none"]:
                report.problem("exchange returned None: return the tensor that arrived", rank)
            elif not value["right"]:
                whose = {0: "rank 1's tensor", 1: "rank 0's tensor"}.get(rank, "its own")
                report.problem(f"of {length} elements: the result is not {whose}", rank)
            if rank < 2:
                got = sorted((c["op"], c["peer"]) for c in value["calls"])
                expected = [("recv", 1 - rank), ("send", 1 - rank)]
                if got != expected:
                    report.problem(
                        f"expected {_messages(expected)}, it made {_messages(got)}", rank
                    )
        if report.problems:
            return


# -- 1.6 --------------------------------------------------------------------------------------


def probe_even_sum(user_ns: dict, *, rank: int, seed: int) -> dict:
    """``sum_over_even_ranks`` on a fresh tensor."""
    tensor = integers(seed + rank, 5)
    group = answer_named(user_ns, "even_ranks")
    _, calls = recorded(answer_named(user_ns, "sum_over_even_ranks"), tensor, group)
    return {"tensor": tensor.tolist(), "calls": calls}


@task("1.6", "a collective on a subgroup", points=2)
def sum_over_even_ranks(ranks, report: Report) -> None:
    """The even ranks have their sum, the odd ones their own tensor."""
    evens = list(range(0, ranks.n, 2))
    total = sum(integers(report.seed + r, 5) for r in evens)
    for answer in report.answers(ranks, __name__, "probe_even_sum", seed=report.seed):
        rank = answer.rank
        expected = total if rank in evens else integers(report.seed + rank, 5)
        report.expect(rank, "the tensor afterwards", answer.value["tensor"], expected.tolist())
        made = [[c["op"], c["group"]] for c in answer.value["calls"]]
        wanted = [["all_reduce", evens]] if rank in evens else []
        report.expect(rank, "the communication (operation, ranks of the group)", made, wanted)


# -- 1.7 --------------------------------------------------------------------------------------


def probe_ping_pong(
    user_ns: dict, *, rank: int, nbytes: int, repeats: int, latency: float, bandwidth: float
) -> dict:
    """``ping_pong`` on a wire that takes ``latency`` + bytes / ``bandwidth`` seconds a message."""
    with _slow_wire(user_ns, latency, bandwidth):
        seconds, calls = recorded(answer_named(user_ns, "ping_pong"), nbytes, repeats, rank)
    return {"seconds": seconds, "calls": calls}


@contextlib.contextmanager
def _slow_wire(user_ns: dict, latency: float, bandwidth: float) -> Iterator[None]:
    """Let each message of this rank take that long, on clocks that run ahead.

    Nobody sleeps: the clocks of :mod:`time` are moved on, so that the result does not depend
    on how busy the machine is.
    """
    group, ahead = dist.group.WORLD, [0.0]

    def slow(call: Callable) -> Callable:
        def with_delay(tensors, *args):
            ahead[0] += latency + tensors[0].nbytes / bandwidth
            return call(tensors, *args)

        return with_delay

    def early(clock: Callable, unit: float) -> Callable:
        return lambda: clock() + type(clock())(ahead[0] * unit)

    names = [("perf_counter", 1), ("monotonic", 1), ("time", 1)]
    names += [(f"{name}_ns", 1e9) for name, _ in names]
    with contextlib.ExitStack() as patches:
        for name, unit in names:
            original = getattr(time, name)
            clock = early(original, unit)
            patches.enter_context(mock.patch.object(time, name, clock))
            # Also where a cell said: from time import perf_counter
            own = {key: clock for key, value in user_ns.items() if value is original}
            patches.enter_context(mock.patch.dict(user_ns, own))
        for name in ("send", "recv", "recv_anysource"):
            patches.enter_context(mock.patch.object(group, name, slow(getattr(group, name))))
        yield


def probe_fit(user_ns: dict, *, rank: int, sizes: list, times: list) -> list | None:
    """``fit`` on rank 0."""
    if rank != 0:
        return None
    latency, bandwidth = answer_named(user_ns, "fit")(sizes, times)
    return [float(latency), float(bandwidth)]


@task("1.7", "ping-pong: latency and bandwidth", points=4)
def ping_pong(ranks, report: Report) -> None:
    """Both functions together recover the latency and bandwidth of an emulated wire."""
    # Far above what the machine itself needs, which then does not count.
    latency = 20.0 + report.seed % 1000 / 50
    bandwidth = 20e3 + report.seed // 1000 % 1000 * 30
    sizes, times, repeats = [8, 200_000, 400_000, 800_000], [], 5
    for nbytes in sizes:
        answers = report.answers(
            ranks, __name__, "probe_ping_pong", nbytes=nbytes, repeats=repeats,
            latency=latency, bandwidth=bandwidth,
        )  # fmt: skip
        for answer in answers:
            _judge_ping_pong(report, answer.rank, answer.value["calls"], nbytes, repeats)
        if report.problems:
            return
        seconds = answers[0].value["seconds"]
        if not isinstance(seconds, float | int) or seconds <= 0:
            report.problem(f"ping_pong returned {seconds!r}, expected seconds, more than 0", 0)
            return
        times.append(seconds)
    _judge_times(report, sizes, times, latency, bandwidth)
    for answer in report.answers(ranks, __name__, "probe_fit", sizes=sizes, times=times):
        if answer.rank == 0 and not report.problems:
            for what, unit, got, true in zip(
                ("latency", "bandwidth"), ("s", "bytes/s"), answer.value, (latency, bandwidth),
                strict=True,
            ):  # fmt: skip
                if abs(got / true - 1) > 0.15:
                    report.problem(
                        f"fit: the wire's {what} was {true:.4g} {unit}, fit found {got:.4g} "
                        f"(more than 15 % off)", 0,
                    )  # fmt: skip


def _judge_ping_pong(report: Report, rank: int, calls: list, nbytes: int, repeats: int) -> None:
    no_collectives(report, rank, calls)
    if rank > 1:
        report.expect(rank, "messages of a rank that does not take part", len(calls), 0)
        return
    sends = [c for c in calls if c["op"] == "send"]
    if len(sends) < repeats or len(sends) != len(calls) - len(sends):
        report.problem(
            f"ping_pong({nbytes}, {repeats}): expected {repeats} sends and {repeats} recvs (a few "
            f"more to warm up are fine), it made {len(sends)} and {len(calls) - len(sends)}", rank,
        )  # fmt: skip
    wrong = sorted({c["nbytes"] for c in calls} - {nbytes})
    if wrong:
        report.problem(f"ping_pong({nbytes}, …) sent messages of {wrong} bytes", rank)


def _judge_times(report: Report, sizes, times, latency: float, bandwidth: float) -> None:
    for nbytes, seconds in zip(sizes, times, strict=True):
        true = latency + nbytes / bandwidth
        ratio = seconds / true
        if abs(ratio - 1) > 0.15:
            twice = " That is the whole round trip: divide by 2." if 1.7 < ratio < 2.4 else ""
            report.problem(
                f"ping_pong({nbytes}, …): a message took {true:.4g} s on the emulated wire, "
                f"ping_pong returned {seconds:.4g} s.{twice}", 0,
            )  # fmt: skip


def _listed(value) -> object:
    return value.tolist() if isinstance(value, torch.Tensor) else repr(value)
