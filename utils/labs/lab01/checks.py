"""Checks of lab 01: tensors between ranks."""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from utils.checks.calls import Calls, Rule, blocking, in_words, inside, made, messages, only, waited
from utils.checks.clock import moved_clocks
from utils.checks.mistakes import EXACT, TOLERANCE, Mistake, is_number, same, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, fingerprint, kept, numbers, reading_answer, recorded
from utils.checks.steps import Step, communication, each_of, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply

# Long enough that MPI does not send it before the receiver is ready (rendezvous).
LONG = 250_000
Kind = tuple[tuple[int, ...], str]  # of a tensor: shape and type


def _kinds(seed: int) -> tuple[Kind, ...]:
    """Kinds of tensors: others where an answer could be made for the first."""
    return ((3, 4), "float32"), ((2, 5, 1), "float64"), ((13 + seed % 200,), "int64")


def _tensor(seed: int, shape: Sequence[int], dtype: str) -> torch.Tensor:
    """Return numbers of which a narrower type loses digits."""
    row = numbers(seed, *shape, double=dtype != "float32")
    return (row * 2**50).long() + 1 if dtype == "int64" else row


def _whole(case: dict[str, Any]) -> Rule:
    """Return the rule that each call has as many bytes as the tensor of the case."""
    shape, dtype = case["shape"], case["dtype"]
    nbytes = math.prod(shape) * getattr(torch, dtype).itemsize

    def rule(calls: Calls) -> str | None:
        for call in calls:
            if call["nbytes"] != nbytes:
                return (
                    f"{call['op']} of {call['nbytes']} bytes; the tensor, {dtype}{list(shape)}, "
                    f"has {nbytes}: give the call a tensor of the same type and length"
                )
        return None

    return rule


def _cases(ranks: Ranks, report: Report, kinds: Sequence[Kind]) -> Iterator[dict[str, Any]]:
    """Yield the arguments of a probe for a tensor of each kind; each rank has a fresh seed."""
    for shape, dtype in kinds:
        seeds = report.seeds(ranks.n)
        yield {"each": to_each(seed=seeds), "shape": shape, "dtype": dtype}


def _tensor_of(case: dict[str, Any], rank: int) -> torch.Tensor:
    """Return the tensor that a rank is given in a case."""
    return _tensor(case["each"][rank]["seed"], case["shape"], case["dtype"])


def _compared(what: str, case: dict[str, Any]) -> dict[str, Any]:
    """Return what is compared, in words, with the kind of tensor if unusual; and how exactly."""
    dtype = case["dtype"]
    kind = "" if dtype == "float32" else f", {dtype}{list(case['shape'])}"
    tolerance = {"float32": TOLERANCE, "float64": EXACT, "int64": 0.0}[dtype]
    return {"what": what + kind, "tolerance": tolerance}


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
def hello(ranks: Ranks, report: Report) -> None:
    """Backend, rank and world size."""
    for answer in report.answers(ranks, probe_hello):
        rank, variables = answer.rank, answer.value
        report.expect(rank, "the backend", variables["backend"], "mpi")
        number_mistakes = [
            Mistake(ranks.n, "that is the number of ranks; this rank's number is dist.get_rank()"),
            Mistake(rank + 1, "ranks are counted from 0"),
        ]
        report.judge(rank, variables["rank"], rank, number_mistakes, what="the variable rank")
        last = "that is the last rank; counted from 0, there is one more"
        size_mistakes = [Mistake(ranks.n - 1, last)]
        size = variables["world_size"]
        report.judge(rank, size, ranks.n, size_mistakes, what="the variable world_size")


# -- 1.2 and 1.3 ------------------------------------------------------------------------------

NOT_FILLED = (
    "the tensor is still this rank's own, although a message came: recv fills the tensor that it "
    "is given, so give it `tensor`, the argument"
)


def probe_transfer(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """``transfer`` on a fresh tensor."""
    tensor = _tensor(seed, shape, dtype)
    _, calls = recorded(answer_named(user_ns, "transfer"), tensor, rank)
    return {"tensor": tensor, "calls": calls}


@task("1.2", "blocking send and recv", points=2)
def transfer(ranks: Ranks, report: Report) -> None:
    """Rank 1 ends with rank 0's tensor, the others with their own."""
    cases = _cases(ranks, report, _kinds(report.seed))
    report.judge_cases(ranks, probe_transfer, cases, _transfer_steps)


def _transfer_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what a rank's `transfer` has to do with one tensor."""
    rank, calls = answer.rank, answer.value["calls"]
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


def probe_transfer_overlapped(
    user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str
) -> dict:
    """``transfer_overlapped`` with a work that looks at what is under way when it is called."""
    from torch_mpi.record import log

    tensor = _tensor(seed, shape, dtype)
    mark, seen, slept = log.mark(), [], []

    def work() -> list[int]:
        seen.append([{"op": c.op, "waited": c.waited} for c in log.since(mark)])
        return [seed]

    function = answer_named(user_ns, "transfer_overlapped")
    answering, sleep = threading.get_ident(), time.sleep

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


@task("1.3", "isend and irecv around work", points=3)
def transfer_overlapped(ranks: Ranks, report: Report) -> None:
    """As 1.2, non-blocking, with the work between start and wait."""
    length = LONG + report.seed % 1000
    kinds = ((length,), "float32"), ((2, length // 2 + 1), "float64"), ((3, 4), "float32")
    cases = _cases(ranks, report, kinds)
    report.judge_cases(ranks, probe_transfer_overlapped, cases, _overlapped_steps)


def _overlapped_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what a rank's `transfer_overlapped` has to do with one tensor and with work()."""
    yield each_of(_overlapped_transfer(case, answer), _work_done(case, answer))


def _overlapped_transfer(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what the message has to be, and that work() is done while it is pending."""
    rank, calls, tensor = answer.rank, answer.value["calls"], answer.value["tensor"]
    yield communication(calls, *_one_message(rank), blocking(False), waited)
    right = tensor == fingerprint(_tensor_of(case, 0 if rank == 1 else rank))
    whose = "rank 0’s" if rank == 1 else "its own"
    yield facts({
        NOT_FILLED: not right and tensor == fingerprint(_tensor_of(case, rank)),
        f"the {math.prod(case['shape'])} elements are not {whose} ones": not right,
    })  # fmt: skip
    yield communication(calls, _whole(case))
    if rank < 2 and len(answer.value["seen"]) == 1:
        yield facts(_nothing_overlaps(rank, answer.value["seen"][0], answer.value["slept"]))


def _nothing_overlaps(rank: int, pending: list[dict[str, Any]], slept: bool) -> dict[str, bool]:
    """Return why the message and work() do not overlap, by what was pending when it began."""
    op = "isend" if rank == 0 else "irecv"
    is_over = any(call["waited"] for call in pending)
    return {
        f"{op} comes after work(): start the communication first": not pending,
        "wait() comes before work(): nothing overlaps, wait after it": is_over,
        "it sleeps before work(), and the message is over by then: call work() at once after "
        f"{op}": slept,
    }


def _work_done(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield that work() is called, and that its result is returned."""
    times = len(answer.value["seen"])
    yield facts({f"work() must be called once, was called {times} times": times != 1})
    expected = [case["each"][answer.rank]["seed"]]
    what = "the value returned (that of work())"
    form = "what work() returned"
    yield value(answer.value["result"], expected, what=what, form=form)


# -- 1.4 --------------------------------------------------------------------------------------


def probe_sum(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """``sum_over_ranks`` on a fresh tensor, and on another one."""
    function = answer_named(user_ns, "sum_over_ranks")
    result, calls = recorded(function, _tensor(seed, shape, dtype))
    other = _tensor(seed + 1, shape, dtype)
    _, again = kept("sum_over_ranks", result, lambda: recorded(function, other))
    # A class of the student's own could still communicate while it is told.
    plain = type(result) is torch.Tensor or not isinstance(result, torch.Tensor)
    told = {"result": result if plain else f"<{type(result).__name__}>"}
    return told | {"calls": calls, "calls again": again}


@task("1.4", "all_reduce", points=2)
def sum_over_ranks(ranks: Ranks, report: Report) -> None:
    """Every rank has the sum, by one all_reduce."""
    cases = _cases(ranks, report, _kinds(report.seed))
    report.judge_cases(ranks, probe_sum, cases, _sum_steps)


def _sum_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what `sum_over_ranks` has to communicate and to return."""
    rules = (only("all_reduce"), made("all_reduce", 1), waited)
    yield communication(answer.value["calls"], *rules)
    yield communication(answer.value["calls again"], *rules)
    tensors = torch.stack([_tensor_of(case, rank) for rank in range(len(case["each"]))])
    form = "the tensor; all_reduce writes into it, and has no result of its own"
    mistakes = _wrong_sums(tensors, answer.rank)
    how = _compared("the sum", case)
    yield value(answer.value["result"], tensors.sum(0).tolist(), mistakes, form=form, **how)
    yield communication(answer.value["calls"], _whole(case))


def _wrong_sums(tensors: torch.Tensor, rank: int) -> list[Mistake]:
    """Return what likely mistakes give, of the tensors of all ranks."""
    n, whole, total = len(tensors), tensors.dtype == torch.int64, tensors.sum(0).tolist()
    return table({
        "whole numbers have lost digits: neither a mean (op=AVG) nor a narrower type keeps them. "
        "op=dist.ReduceOp.SUM": lambda got: whole and same(got, total),
        "this is the mean over the ranks: the task asks for the sum": tensors.double().mean(0),
        "this is the largest element of all ranks: op=dist.ReduceOp.SUM": tensors.amax(0),
        "this is the smallest element of all ranks: op=dist.ReduceOp.SUM": tensors.amin(0),
        "this is the product over the ranks: op=dist.ReduceOp.SUM": tensors.prod(0),
        "this is the rank's own tensor, unchanged: all_reduce writes into the tensor that it is "
        "given, so return that one": tensors[rank],
        f"this is {n} times the rank's own tensor, which is the sum only where all ranks hold the "
        "same": tensors[rank] * n,
    })  # fmt: skip


# -- 1.5 --------------------------------------------------------------------------------------


def probe_exchange(user_ns: dict, *, rank: int, seed: int, shape: list, dtype: str) -> dict:
    """``exchange`` of a short or a long tensor, and of another one."""
    function, given = answer_named(user_ns, "exchange"), _tensor(seed, shape, dtype)
    with _noted_memory() as used:
        result, calls = recorded(function, given, rank)
    shared, result_told = bool(set(used["send"]) & set(used["recv"])), fingerprint(result)
    other = _tensor(seed + 1, shape, dtype)
    _, again = kept("exchange", result, lambda: recorded(function, other, rank))
    return {"result": result_told, "shared": shared, "calls": calls, "calls again": again}


@contextlib.contextmanager
def _noted_memory() -> Iterator[dict[str, list[int]]]:
    """Note where the tensors begin that are sent, and those that are received into."""
    group, used = dist.group.WORLD, {"send": [], "recv": []}

    def noting(name: str, call: Callable) -> Callable:
        def note(tensors, *args):
            used[name].append(tensors[0].data_ptr())
            return call(tensors, *args)

        return note

    with contextlib.ExitStack() as patches:
        for name in used:
            noted = noting(name, getattr(group, name))
            patches.enter_context(mock.patch.object(group, name, noted))
        yield used


@task("1.5", "an exchange without deadlock", points=3)
def exchange(ranks: Ranks, report: Report) -> None:
    """Ranks 0 and 1 swap tensors, short ones and such that do not fit in a buffer."""
    seed = report.seed
    sends_first: dict[int, list[bool]] = {0: [], 1: []}
    kinds = [((4,), "float32"), ((10**6 + seed % 1000,), "float32"), ((2, 3), "float64")]
    kinds.append(((100 + seed % 400,), "int64"))

    def judge(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
        yield from _exchange_steps(case, answer)
        if answer.rank < 2:
            first = answer.value["calls"][0]
            sends_first[answer.rank].append(first["op"] == "send" and first["blocking"])

    cases = _cases(ranks, report, kinds)
    if not report.judge_cases(ranks, probe_exchange, cases, judge):
        return
    both = zip(kinds, sends_first[0], sends_first[1], strict=True)
    lengths = [math.prod(shape) for (shape, _), of_0, of_1 in both if of_0 and of_1]
    if lengths:
        report.problem(
            f"of {lengths[0]} elements: both ranks send first, by send. That works because MPI "
            "copies a short message (eager), up to a size that no program knows: let one receive "
            "first, or use isend",
            kind="communication",
        )


def _exchange_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what a rank's `exchange` has to do with one tensor."""
    rank, calls = answer.rank, answer.value["calls"]
    wanted = [("recv", 1 - rank), ("send", 1 - rank)] if rank < 2 else []
    rules = (only("send", "recv"), messages(*wanted, in_order=False), waited)
    yield communication(calls, *rules)
    yield facts(_wrong_exchanges(case, answer))
    yield communication(calls, _whole(case))
    yield communication(answer.value["calls again"], *rules, _whole(case))


def _wrong_exchanges(case: dict[str, Any], answer: Reply) -> dict[str, bool]:
    """Return what is wrong with the tensor that a rank has received."""
    rank, result = answer.rank, answer.value["result"]
    arrives = "the tensor that arrived" if rank < 2 else "mine, as nothing arrives here"
    whose = {0: "rank 1's tensor", 1: "rank 0's tensor"}.get(rank, "its own")
    right = fingerprint(_tensor_of(case, 1 - rank if rank < 2 else rank))
    is_own = result == fingerprint(_tensor_of(case, rank)) != right
    is_mixed = answer.value["shared"] and _is_sent_while_received(answer.value["calls"])
    return {
        "it receives into the tensor that is still being sent: the message may be a mixture of "
        "both. Receive into a tensor of its own, torch.empty_like(mine)": is_mixed,
        f"exchange returned None: return {arrives}": result == "<NoneType>",
        "the result is the rank's own tensor: return the one that arrived": is_own,
        f"of {math.prod(case['shape'])} elements: the result is not {whose}": result != right,
    }


def _is_sent_while_received(calls: Calls) -> bool:
    """Return whether a tensor is received while another one is being sent."""
    sends = [call for call in calls if call["op"] == "send" and not call["blocking"]]
    receives = [call for call in calls if call["op"] == "recv"]
    return any(r["start"] < s["end"] and s["start"] < r["end"] for s in sends for r in receives)


# -- 1.6 --------------------------------------------------------------------------------------


def probe_even_group(user_ns: dict, *, rank: int) -> dict:
    """What ``even_ranks`` is on this rank."""
    group = answer_named(user_ns, "even_ranks")
    world = dist.distributed_c10d._world
    # A group gets its name by counting: two groups of one name were made in one call.
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
                "even_ranks was made before the ranks joined the world again: run its cell again"
            ) from None
    elif group is dist.GroupMember.NON_GROUP_MEMBER:
        outcome["ranks"] = []
    return outcome


def probe_forget(user_ns: dict, *, rank: int, count: int) -> None:
    """Let all ranks count the next group alike; its cell has to be run again."""
    user_ns.pop("even_ranks", None)
    dist.distributed_c10d._world.group_count = count


def probe_even_sum(user_ns: dict, *, rank: int, seed: int, evens: list[int]) -> dict:
    """``sum_over_even_ranks`` on a fresh tensor: in the student's group, and in a new one."""
    function = answer_named(user_ns, "sum_over_even_ranks")
    tensor, other = numbers(seed, 5), numbers(seed, 2, 3, double=True)
    another = dist.new_group(evens)  # before the answer, which may raise an error on some ranks
    try:
        return _even_sums(user_ns, function, tensor, other, another, rank in evens)
    finally:
        if rank in evens:
            dist.destroy_process_group(another)


def _even_sums(
    user_ns: dict,
    function: Callable,
    tensor: torch.Tensor,
    other: torch.Tensor,
    another: Any,
    is_member: bool,
) -> dict:
    """Call the function with a tensor in the student's group, then with the other in another."""
    with _noted_groups() as made_inside, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _, calls = recorded(function, tensor, answer_named(user_ns, "even_ranks"))
    outcome = {
        "tensor": tensor,
        "calls": calls,
        "made inside": len(made_inside),
        "warned": any("does not belong to the given group" in str(w.message) for w in warned),
    }
    if made_inside:
        return outcome
    outcome["used"], outcome["calls again"] = recorded(_uses, function, other, another, is_member)
    return outcome | {"other": fingerprint(other)}


@contextlib.contextmanager
def _noted_groups() -> Iterator[list]:
    """A list that gets an entry for each new group."""
    noted, original = [], dist.new_group

    def noting(*args, **kwargs):
        noted.append(True)
        return original(*args, **kwargs)

    with mock.patch.object(dist, "new_group", noting):
        yield noted


def _uses(function: Callable, tensor: torch.Tensor, group: Any, is_member: bool) -> bool:
    """Whether a member communicates in the group that it is given."""
    if not is_member:
        function(tensor, group)
        return True
    with mock.patch.object(group, "allreduce", wraps=group.allreduce) as called:
        function(tensor, group)
    return called.called


@task("1.6", "a collective on a subgroup", points=2)
def sum_over_even_ranks(ranks: Ranks, report: Report) -> None:
    """The even ranks have their sum, the odd ones their own tensor."""
    evens = list(range(0, ranks.n, 2))
    if _has_groups(ranks, report, evens):
        case = {"each": to_each(seed=report.seeds(ranks.n)), "evens": evens}
        report.judge_cases(ranks, probe_even_sum, [case], _even_sum_steps)


def _has_groups(ranks: Ranks, report: Report, evens: list[int]) -> bool:
    """Judge the group that each rank has made; return whether all made the right one together."""
    answers = report.answers(ranks, probe_even_group)
    groups = [answer.value for answer in answers]
    right = [
        report.facts(answer.rank, _wrong_group(answer.rank, answer.value, evens))
        for answer in answers
    ]
    counts = [group["count"] for group in groups]
    if len(set(counts)) > 1:
        report.problem(
            f"the ranks have not called dist.new_group equally often: ranks 0 to {ranks.n - 1} "
            f"count {counts}. All ranks have to call it, members or not, for each group. The check "
            "has set the counts to the same number and deleted even_ranks: correct its cell, and "
            "run it again"
        )
        report.answers(ranks, probe_forget, count=max(counts))
        return False
    return bool(answers) and all(right) and report.facts(None, _groups_of_one_call(groups))


def _wrong_group(rank: int, group: dict[str, Any], evens: list[int]) -> dict[str, bool]:
    """Return what is wrong with the group that this rank has made."""
    members, kind = group["ranks"], group["kind"]
    expected = evens if rank in evens else []
    is_now = "nothing" if kind == "NoneType" else f"a {kind}"
    consists_of = f"the ranks {members}" if members else "other ranks than this one"
    return {
        f"even_ranks is {is_now} on this rank. Every rank has to call dist.new_group({evens}), "
        "those outside of the group, too: it is all ranks that make a group": members is None,
        f"even_ranks consists of {consists_of}: dist.new_group({evens})": members != expected,
    }


def _groups_of_one_call(groups: list[dict[str, Any]]) -> dict[str, bool]:
    """Return whether ranks gave other members in the call that made even_ranks."""
    names = {group["name"] for group in groups if group["ranks"]}
    made_by_rank = [group["groups"] for group in groups]
    if not all(names) or not all(known and all(known.values()) for known in made_by_rank):
        raise ValueError("a group without a name or a member, or a rank without a group")
    of_one_call = {tuple(known[name]) for known in made_by_rank for name in names if name in known}
    different = len(of_one_call) > 1
    groups_made = " and ".join(map(str, sorted(of_one_call)))
    return {
        f"in one call of dist.new_group the ranks have made different groups, {groups_made}. All "
        "ranks have to call it for each group, members or not, with the same ranks": different,
    }


def _even_sum_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what `sum_over_even_ranks` has to do, in the student's group and in a new one."""
    rank, evens, outcome = answer.rank, case["evens"], answer.value
    is_member, calls = rank in evens, outcome["calls"]
    yield facts({
        "it calls a collective of a group that it does not belong to: PyTorch warns and does "
        "nothing. Only members call it": outcome["warned"],
        "the function makes a group at each call: make it once, outside, and use the argument "
        "group": outcome["made inside"],
        "the argument group is not used: all_reduce(tensor, group=group)": not outcome.get("used"),
    })  # fmt: skip
    if is_member:
        yield communication(calls, inside(evens), only("all_reduce"), made("all_reduce", 1))
    else:
        yield facts({f"makes {call['op']}, but is no member of the group": True for call in calls})
    seeds = [given["seed"] for given in case["each"]]
    yield _right_sum([numbers(seed, 5) for seed in seeds], answer, evens)
    others = [numbers(seed, 2, 3, double=True) for seed in seeds]
    right = sum(others[r] for r in evens) if is_member else others[rank]
    of_float32 = "right for float32[5], and wrong for float64[2, 3]"
    wrong_kind = f"{of_float32}: keep the tensor's type and shape"
    yield facts({wrong_kind: outcome["other"] != fingerprint(right)})
    times = made("all_reduce", int(is_member), " in another group of these ranks")
    yield communication(outcome["calls again"], only("all_reduce"), times)


def _right_sum(tensors: list[torch.Tensor], answer: Reply, evens: list[int]) -> Step:
    """Return the step that the tensor is the right one: the even ranks' sum, or unchanged."""
    unchanged = tensors[answer.rank]
    expected = sum(tensors[r] for r in evens) if answer.rank in evens else unchanged
    mistakes = table({
        "the tensor is unchanged: all_reduce writes into it": unchanged,
        "this is the sum over all ranks: pass group=group": sum(tensors),
    })  # fmt: skip
    what = "the tensor afterwards"
    return value(answer.value["tensor"], expected.tolist(), mistakes, what=what)


# -- 1.7 --------------------------------------------------------------------------------------

# Rounds of a check. How much longer each of five in a row takes than the wire, in random order: one
# of them is the median, and no two are alike. The very first round warms up.
REPEATS = 5
# Bytes and rounds: also more rounds, the same bytes again, and bytes that no float32 tensor has.
PLAYS = ((8, REPEATS), (200_001, REPEATS), (8, 2 * REPEATS), (800_003, REPEATS))
# A mean of some of them is far from 1 as well.
FACTORS, WARM_UP = (0.7, 0.9, 1.0, 3.0, 6.0), 9.0


def _disturbances(seed: int) -> list[float]:
    """Return the factors of rounds 0, 5, 10, … to 4, 9, 14, …; the first is above the median."""
    dice = random.Random(seed)
    order = dice.sample(FACTORS, len(FACTORS))
    above = next(k for k, factor in enumerate(order) if factor > 1)
    return order[above:] + order[:above]


def _disturbance(factors: Sequence[float], k: int) -> float:
    """Return how much longer the k-th round takes. Of any five in a row the median is 1."""
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
    """``ping_pong`` on a wire that takes ``latency`` + bytes / ``bandwidth`` seconds a message.

    wire: latency, bandwidth, and the share of a round trip that passes in its send. stamp: what the
    wire writes into all that this rank sends; which ones came is told. factors: see
    :func:`_disturbance`.
    """
    function, came = answer_named(user_ns, "ping_pong"), []
    with moved_clocks(user_ns) as clock, _slow_wire(clock, *wire, factors, stamp, came):
        seconds, calls = recorded(function, nbytes, repeats, rank)
    return {"seconds": seconds, "calls": calls, "stamps": came}


@contextlib.contextmanager
def _slow_wire(
    clock,
    latency: float,
    bandwidth: float,
    share: float,
    factors: list[float],
    stamp: int,
    came: list[int],
) -> Iterator[None]:
    """Let each message of this rank take that long, and some rounds longer; stamp what it sends.

    A send ends early, as MPI copies what it sends: nearly all of a round trip passes in the recv.
    """
    group, passed, received = dist.group.WORLD, [0], []

    def look() -> None:
        came.extend(_stamp_of(ball).item() for ball in received)

    def slow(name: str, call: Callable) -> Callable:
        def with_delay(tensors, *args):
            factor = _disturbance(factors, passed[0] // 2)
            passed[0] += 1
            part = 2 * (share if name == "send" else 1 - share)
            clock.advance(part * factor * (latency + tensors[0].nbytes / bandwidth))
            look()
            if name == "send":
                _stamp_of(tensors[0]).fill_(stamp)
            else:
                received[:] = tensors
            return call(tensors, *args)

        return with_delay

    with contextlib.ExitStack() as patches:
        for name in ("send", "recv", "recv_anysource"):
            slowed = slow(name, getattr(group, name))
            patches.enter_context(mock.patch.object(group, name, slowed))
        yield
        look()


def _stamp_of(ball: torch.Tensor) -> torch.Tensor:
    """Its first eight bytes as a number, a view; of a shorter one some number."""
    row = ball.detach().reshape(-1).view(torch.uint8)
    return row[:8].view(torch.int64) if len(row) >= 8 else torch.zeros(1, dtype=torch.int64)


def probe_fit(user_ns: dict, *, rank: int, sizes: list, times: list) -> object:
    """``fit`` on rank 0."""
    return reading_answer(user_ns, "fit")(sizes, times) if rank == 0 else None


@task("1.7", "ping-pong: latency and bandwidth", points=4)
def ping_pong(ranks: Ranks, report: Report) -> None:
    """The median time of a message, then the latency and bandwidth that noisy times follow."""
    if report.judge_cases(ranks, probe_ping_pong, _plays(ranks, report), _ping_pong_steps):
        _judge_fit(ranks, report)


def _plays(ranks: Ranks, report: Report) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `probe_ping_pong`, each on another wire."""
    # Far above what the machine itself needs, which then does not count.
    start = 20.0 + report.seed % 1000 / 50
    bandwidth = 20e3 + report.seed // 1000 % 1000 * 30
    share = 0.1 + report.seed % 30 / 1000
    for k, (nbytes, repeats) in enumerate(PLAYS):
        latency = start * (len(PLAYS) - k)  # what was measured before is wrong now
        yield {
            "nbytes": nbytes,
            "repeats": repeats,
            "wire": [latency, bandwidth, share],
            "factors": _disturbances(report.seed + nbytes),
            "each": to_each(stamp=report.seeds(ranks.n)),
        }


def _ping_pong_steps(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
    """Yield what a rank has to play, and how long a message has taken."""
    yield communication(answer.value["calls"], only("send", "recv", "barrier"))
    yield facts(_wrong_plays(case, answer))
    if answer.rank == 0:
        latency, bandwidth, share = case["wire"]
        expected = latency + case["nbytes"] / bandwidth
        rounds = sum(call["op"] == "send" for call in answer.value["calls"])
        mistakes = _wrong_times(expected, case["factors"], share, rounds, case["repeats"])
        what = f"ping_pong({case['nbytes']}, {case['repeats']}), seconds on the emulated wire"
        seconds = answer.value["seconds"]
        yield value(seconds, expected, mistakes, what=what, form="seconds", tolerance=0.05)


def _wrong_plays(case: dict[str, Any], answer: Reply) -> dict[str, object]:
    """Return what is wrong with the messages of a play."""
    rank, nbytes, repeats = answer.rank, case["nbytes"], case["repeats"]
    play, takes_part = f"ping_pong({nbytes}, {repeats})", rank < 2
    plays = [call for call in answer.value["calls"] if call["op"] != "barrier"]
    sends = sum(call["op"] == "send" for call in plays)
    sizes = sorted({call["nbytes"] for call in plays} - {nbytes})
    messages_made = in_words((call["op"], call["peer"]) for call in plays)
    is_short = sends < repeats or 2 * sends != len(plays)
    measures = rank == 1 and answer.value["seconds"] is not None
    is_strange = takes_part and case["each"][1 - rank]["stamp"] not in answer.value["stamps"]
    return {
        f"only ranks 0 and 1 play; it made {messages_made}": plays and not takes_part,
        f"{play}: expected {repeats} sends and {repeats} recvs (a few more to warm up are fine), "
        f"it made {sends} and {len(plays) - sends}": takes_part and is_short,
        f"{play} sent messages of {sizes} bytes: {nbytes} elements of dtype torch.uint8": sizes,
        "only rank 0 measures: return None on the others": measures,
        f"rank {1 - rank} has sent a ball, and another one is in the tensor of recv": is_strange,
    }


def _wrong_times(
    true: float, factors: Sequence[float], share: float, rounds: int, repeats: int
) -> list[Mistake]:
    """Return what likely mistakes give, of so many rounds on a wire."""
    took = [_disturbance(factors, k) for k in range(rounds)]
    counted = took[-repeats:]
    mean, fewer = statistics.mean(counted), statistics.mean(sorted(counted)[:-1])
    median = "take the median, so that one disturbed round does not count"
    back = "stop the clock when the ball is back, and take half"
    measured = {
        "that is the whole round trip: divide by 2": 2.0,
        "halved once too often: a message takes half of the round trip": 0.5,
        f"that is the time of send alone, which ends before the message arrives: {back}": 2 * share,
        f"that is half of the time of send alone: {back}": share,
        f"that is half of the time of recv alone: {back}": 1 - share,
        f"that is the time of recv alone: {back}": 2 - 2 * share,
        f"that is the mean of the rounds: {median}": mean,
        f"that is a mean without the slowest round: {median}": fewer,
        f"that is the harmonic mean of the rounds: {median}": statistics.harmonic_mean(counted),
        f"that is the mean of the round trips: halve it, and {median}": 2 * mean,
        f"that is the whole time divided by the rounds: {median}": sum(took) / repeats,
        f"that is the fastest round: {median}": min(counted),
        f"that is the slowest round: {median}": max(counted),
        f"that is the sum of the rounds: {median}": sum(counted),
    }
    no_number = Mistake(lambda got: not is_number(got), "expected seconds: a number")
    return [no_number, *table({said: factor * true for said, factor in measured.items()})]


def _judge_fit(ranks: Ranks, report: Report) -> None:
    """Times of short to long messages, then of such that latency and bytes take equally long."""
    chance = np.random.default_rng(report.seed)
    latency, bandwidth = chance.uniform(20e-6, 60e-6), chance.uniform(1e9, 4e9)
    middle = latency * bandwidth * np.geomspace(0.2, 5, 24)
    cases = [
        # Every point alone is off by a fifth or a quarter, in turn: only all together tell.
        _noisy_line(report.seed, latency, bandwidth, [2**k for k in range(3, 26)], (0.8, 1.25)),
        _noisy_line(report.seed, latency, bandwidth, middle.astype(int).tolist(), (0.9, 1.1)),
    ]

    def judge(case: dict[str, Any], answer: Reply) -> Iterator[Step]:
        if answer.rank == 0:
            yield from _fit_steps(case, answer.value, latency, bandwidth)

    report.judge_cases(ranks, probe_fit, cases, judge)


def _noisy_line(
    seed: int, latency: float, bandwidth: float, sizes: list[int], off: Sequence[float]
) -> dict[str, list]:
    """Return sizes of messages, and times that are off by these factors, in turn."""
    chance = np.random.default_rng(seed + len(sizes))
    signs = np.resize(chance.permutation(off), len(sizes))
    noise = signs * chance.uniform(0.98, 1.02, len(sizes))
    times = [(latency + n / bandwidth) * e for n, e in zip(sizes, noise, strict=True)]
    return {"sizes": sizes, "times": times}


def _fit_steps(case: dict[str, Any], got: Any, latency: float, bandwidth: float) -> Iterator[Step]:
    """Yield that `fit` has found the latency and bandwidth that the times follow."""
    pair = isinstance(got, list) and len(got) == 2 and all(map(is_number, got))
    form = "numbers that are not nan" if isinstance(got, list) else "a pair of numbers"
    yield facts({f"fit returned {got}, expected (latency, bandwidth): {form}": not pair})
    hint = _why_fit(got, latency, bandwidth, case["sizes"], case["times"])
    far_off = (
        f"fit: {hint}the wire had {latency:.3g} s and {bandwidth:.3g} bytes/s, fit found "
        f"{got[0]:.3g} and {got[1]:.3g} (more than 15 % off)"
    )
    yield facts({far_off: not (_near(got[0], latency) and _near(got[1], bandwidth))})


def _near(a: float, b: float, most: float = 0.15) -> bool:
    """Return whether two numbers are nearly equal."""
    return math.isfinite(a) and abs(a / b - 1) <= most


def _why_fit(
    got: list[float], latency: float, bandwidth: float, sizes: list[int], times: list[float]
) -> str:
    """Return what leads to these two numbers, or nothing."""
    slope, start = np.polyfit(sizes, times, 1)
    secant = (times[-1] - times[0]) / (sizes[-1] - sizes[0])
    by_ends = _near(got[1], 1 / secant, 1e-3)
    hints = {
        "the two are swapped; ": _near(got[0], bandwidth) and _near(got[1], latency),
        "bandwidth is 1 / slope; ": _near(got[0], latency) and _near(got[1], 1 / bandwidth),
        "all points count alike, so the noise of the long messages drowns the latency: weight each "
        "by 1/t; ": _near(got[0], start, 1e-3) and _near(got[1], 1 / slope, 1e-3),
        "that is the line through the first and the last point: let all of them count; ": by_ends,
        "the shortest time is one measurement: fit a line; ": _near(got[0], min(times), 1e-3),
        "the latency is a mean of short messages, whose bytes take time, too: fit a line; ": any(
            _near(got[0], mean(times[:k]), 1e-3)
            for k in range(2, len(times))
            for mean in (np.mean, np.median)
        ),
    }
    return next((said for said, applies in hints.items() if applies), "")
