"""Checks of lab 01: tensors between ranks."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils.checks.comparison import (
    EXACT,
    TOLERANCE,
    Calls,
    Mistake,
    Rule,
    blocking,
    made,
    messages,
    only,
    same,
    table,
    waited,
)
from utils.checks.model import use_model as use_model
from utils.checks.probe import fingerprint
from utils.checks.task import Report, Step, communication, each_of, facts, task, to_each, value
from utils.cluster.questions import Ranks, Reply

from .latency import ping_pong as ping_pong
from .probes import (
    drawn_tensor,
    probe_exchange,
    probe_hello,
    probe_sum,
    probe_transfer,
    probe_transfer_overlapped,
    work_of,
)
from .subgroups import sum_over_even_ranks as sum_over_even_ranks

# So many elements that MPI waits for the receiver before it sends them (rendezvous).
LONG = 250_000
Kind = tuple[tuple[int, ...], str]  # a tensor's shape and dtype


def _kinds(seed: int) -> tuple[Kind, ...]:
    """Return unlike kinds of tensors, so that an answer can't fit only the first kind."""
    kinds = ((3, 4), "float32"), ((2, 5, 1), "float64"), ((13 + seed % 200,), "int64")
    return *kinds, ((3, 4), "float64")


def _whole(case: dict[str, Any]) -> Rule:
    """Return the rule that each call sends as many bytes as the case's tensor has."""
    shape, dtype = case["shape"], case["dtype"]
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["nbytes"] != nbytes:
                return (
                    f"The call {call['op']} has a tensor of {call['nbytes']} bytes, but the "
                    f"tensor, {dtype}{list(shape)}, has {nbytes}. Pass a tensor of the same "
                    "dtype and length"
                )
        return None

    return rule


def _cases(ranks: Ranks, report: Report, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a probe for a tensor of each kind; each rank has a fresh seed."""
    for shape, dtype in kinds:
        seeds = report.seeds(ranks.n)
        yield {"each": to_each(seed=seeds), "shape": shape, "dtype": dtype}


def _tensor_of(case: dict[str, Any], rank: int) -> torch.Tensor:
    """Return the tensor that a rank gets in a case."""
    return drawn_tensor(case["each"][rank]["seed"], case["shape"], case["dtype"])


def _compared(what: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return in words what is compared, with the tensor's kind if unusual, and the tolerance."""
    dtype = case["dtype"]
    kind = "" if dtype == "float32" else f", {dtype}{list(case['shape'])}"
    tolerance = {"float32": TOLERANCE, "float64": EXACT, "int64": 0.0}[dtype]
    return {"what": what + kind, "tolerance": tolerance}


# -- 1.1 --------------------------------------------------------------------------------------


@task("1.1", "hello from every rank", points=1, after="1.1")
def hello(ranks: Ranks, report: Report) -> None:
    """Check backend, rank and world size."""
    last = "You used the number of the last rank. Add 1, because ranks are counted from 0"
    size_mistakes = [Mistake(ranks.n - 1, last)]
    for answer in report.answers(ranks, probe_hello):
        rank = answer.rank
        variables = answer.value
        number_mistakes = [
            Mistake(ranks.n, "You used the number of ranks. Use dist.get_rank()"),
            Mistake(rank + 1, "You counted the ranks from 1. Count them from 0"),
        ]
        size = variables["world_size"]
        parts = (
            value(variables["backend"], "mpi", what="the backend"),
            value(variables["rank"], rank, number_mistakes, what="the variable rank"),
            value(size, ranks.n, size_mistakes, what="the variable world_size"),
        )
        report.follow(rank, [each_of(*([part] for part in parts))])


# -- 1.2 and 1.3 ------------------------------------------------------------------------------

NOT_FILLED = (
    "A message arrived, but your tensor is unchanged. Pass the argument `tensor` to recv, which "
    "fills it"
)


@task("1.2", "blocking send and recv", points=2, after="1.1")
def transfer(ranks: Ranks, report: Report) -> None:
    """Check that rank 1 ends with rank 0's tensor, and each other rank with its own."""
    cases = _cases(ranks, report, _kinds(report.seed))
    report.judge_cases(ranks, probe_transfer, cases, _transfer_steps)


def _transfer_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge a rank's `transfer` of one tensor."""
    rank = answer.rank
    calls = answer.value["calls"]
    yield communication(calls, *_one_message(rank), blocking(True))
    expected = _tensor_of(case, 0 if rank == 1 else rank)
    mistakes = [Mistake(_tensor_of(case, rank).tolist(), NOT_FILLED)]
    how = _compared("the tensor afterwards", case)
    yield value(answer.value["tensor"], expected.tolist(), mistakes, **how)
    yield communication(calls, _whole(case))


def _one_message(rank: int) -> list[Rule]:
    """Return the rules of one message from rank 0 to rank 1, and nothing else."""
    wanted = {0: [("send", 1)], 1: [("recv", 0)]}.get(rank, [])
    return [only("send", "recv"), messages(*wanted)]


@task("1.3", "isend and irecv around work", points=3, after="1.1")
def transfer_overlapped(ranks: Ranks, report: Report) -> None:
    """Check a non-blocking transfer that calls work() between start and wait."""
    length = LONG + report.seed % 1000
    kinds = ((length,), "float32"), ((2, length // 2 + 1), "float64"), ((3, 4), "float32")
    cases = _cases(ranks, report, kinds)
    report.judge_cases(ranks, probe_transfer_overlapped, cases, _overlapped_steps)


def _overlapped_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge a rank's `transfer_overlapped` of one tensor, and its work()."""
    times = len(answer.value["seen"])
    expected = work_of(case["each"][answer.rank]["seed"])
    words = "the returned value"
    work_done = [
        facts({f"You called work() {times} times. Call it once": times != 1}),
        value(answer.value["result"], expected, what=words, form="what work() returned"),
    ]
    yield each_of(_overlapped_transfer(case, answer), work_done)


def _overlapped_transfer(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge the message, and whether it is pending while work() runs."""
    rank = answer.rank
    calls = answer.value["calls"]
    tensor = answer.value["tensor"]
    yield communication(calls, *_one_message(rank), blocking(False), waited)
    right = tensor == fingerprint(_tensor_of(case, 0 if rank == 1 else rank))
    whose = "rank 0’s" if rank == 1 else "its own"
    yield facts({
        NOT_FILLED: not right and tensor == fingerprint(_tensor_of(case, rank)),
        f"the {math.prod(case['shape'])} elements are not {whose} ones": not right,
    })
    yield communication(calls, _whole(case))
    if rank < 2 and len(answer.value["seen"]) == 1:
        yield facts(_nothing_overlaps(rank, answer.value["seen"][0], answer.value["slept"]))


def _nothing_overlaps(rank: int, waited_for: list[bool], slept: bool) -> dict[str, bool]:
    """Return why message and work() don't overlap; `waited_for` has the calls before work()."""
    op = "isend" if rank == 0 else "irecv"
    return {
        f"You call {op} after work(). Start the communication first": not waited_for,
        "You call wait() before work(), so nothing overlaps. Wait after work()": any(waited_for),
        f"You sleep before work(), so the message is over. Call work() right after {op}": slept,
    }


# -- 1.4 --------------------------------------------------------------------------------------


@task("1.4", "all_reduce", points=2, after="1.1")
def sum_over_ranks(ranks: Ranks, report: Report) -> None:
    """Check that every rank has the sum, by one all_reduce."""
    cases = _cases(ranks, report, _kinds(report.seed))
    report.judge_cases(ranks, probe_sum, cases, _sum_steps)


def _sum_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge the communication and the result of `sum_over_ranks`."""
    rules = (only("all_reduce"), made("all_reduce", 1), waited)
    yield communication(answer.value["calls"], *rules)
    yield communication(answer.value["calls again"], *rules)
    tensors = torch.stack([_tensor_of(case, rank) for rank in range(len(case["each"]))])
    form = "the tensor into which all_reduce writes"
    mistakes = _wrong_sums(tensors, answer.rank)
    how = _compared("the sum", case)
    yield value(answer.value["result"], tensors.sum(0).tolist(), mistakes, form=form, **how)
    yield communication(answer.value["calls"], _whole(case))


def _wrong_sums(tensors: torch.Tensor, rank: int) -> list[Mistake]:
    """Return what likely mistakes make of the tensors of all ranks."""
    n = len(tensors)
    whole = tensors.dtype == torch.int64
    total = tensors.sum(0).tolist()
    return table({
        "Your whole numbers lost digits, as after a mean (op=AVG) or in a narrower dtype. Use "
        "op=dist.ReduceOp.SUM": lambda got: whole and same(got, total),
        "You returned the mean over the ranks. Return the sum": tensors.double().mean(0),
        "You returned the largest element of all ranks. Use op=dist.ReduceOp.SUM": tensors.amax(0),
        "You returned the smallest element of all ranks. Use op=dist.ReduceOp.SUM": tensors.amin(0),
        "You returned the product over the ranks. Use op=dist.ReduceOp.SUM": tensors.prod(0),
        "You returned this rank's tensor unchanged. Return the tensor that you pass to "
        "all_reduce, which writes into it": tensors[rank],
        f"You returned {n} times this rank's tensor, which is the sum only if all ranks have the "
        "same tensor. Call all_reduce": tensors[rank] * n,
    })


# -- 1.5 --------------------------------------------------------------------------------------


@task("1.5", "an exchange without deadlock", points=3, after="1.1")
def exchange(ranks: Ranks, report: Report) -> None:
    """Check that ranks 0 and 1 swap tensors, even tensors that don't fit into a buffer."""
    seed = report.seed
    begin_with_send: Counter[int] = Counter()  # how many ranks, by the tensor's length
    kinds = [((4,), "float32"), ((10**6 + seed % 1000,), "float32"), ((2, 3), "float64")]
    kinds.append(((100 + seed % 400,), "int64"))

    def judge(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
        yield from _exchange_steps(case, answer)
        if answer.rank < 2:
            first = answer.value["calls"][0]
            length = math.prod(case["shape"])
            begin_with_send[length] += first["op"] == "send" and first["blocking"]

    cases = _cases(ranks, report, kinds)
    if not report.judge_cases(ranks, probe_exchange, cases, judge):
        return
    lengths = [length for length, count in begin_with_send.items() if count == 2]
    if lengths:
        report.problem(
            f"With {lengths[0]} elements, both ranks call send first. MPI copies such a short "
            "message (eager), but your program can't know up to which size: let one rank receive "
            "first, or use isend",
            kind="communication",
        )


def _exchange_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield steps that judge a rank's `exchange` of one tensor."""
    rank = answer.rank
    calls = answer.value["calls"]
    wanted = [("recv", 1 - rank), ("send", 1 - rank)] if rank < 2 else []
    rules = (only("send", "recv"), messages(*wanted, in_order=False), waited)
    yield communication(calls, *rules)
    yield facts(_wrong_exchanges(case, answer))
    yield communication(calls, _whole(case))
    yield communication(answer.value["calls again"], *rules, _whole(case))


def _wrong_exchanges(case: dict[str, Any], answer: Reply) -> dict[str, bool]:
    """Return what is wrong with the tensor that a rank has received."""
    rank = answer.rank
    result = answer.value["result"]
    arrives = "the tensor that arrived" if rank < 2 else "mine, because nothing arrives here"
    whose = {0: "rank 1's tensor", 1: "rank 0's tensor"}.get(rank, "this rank's tensor")
    right = fingerprint(_tensor_of(case, 1 - rank if rank < 2 else rank))
    is_own = result == fingerprint(_tensor_of(case, rank)) != right
    is_mixed = answer.value["shared"] and _is_sent_while_received(answer.value["calls"])
    return {
        "You receive into the tensor that is still being sent, so the message may be a mixture. "
        "Receive into another tensor: torch.empty_like(mine)": is_mixed,
        f"exchange returned None. Return {arrives}": result == "<NoneType>",
        "You returned this rank's tensor. Return the tensor that arrived": is_own,
        f"With {math.prod(case['shape'])} elements, the result is not {whose}": result != right,
    }


def _is_sent_while_received(calls: Calls) -> bool:
    sends = [call for call in calls if call["op"] == "send" and not call["blocking"]]
    receives = [call for call in calls if call["op"] == "recv"]
    pairs = itertools.product(sends, receives)
    return any(r["start"] < s["end"] and s["start"] < r["end"] for s, r in pairs)
