"""Checks of lab 06: all-reduce from messages.

Each all-reduce runs in groups of 1, 2, 3, 4 and 6 ranks, on short tensors and on one that is too
long to leave before anybody receives it. It runs twice, see :mod:`.group_sums`, and a third time on
a short tensor of whole numbers that are too large for any float. No verdict depends on times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from utils.checks.comparison import Calls, Rule, inside, only, some, waited
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, Wrong, communication, none_of, task, to_each, value
from utils.checks.trials import GroupAnswer, judge_groups, on
from utils.cluster.questions import Ranks

from .costs import cost as cost
from .costs import duration as duration
from .group_sums import (
    IN_FOURS,
    LONG,
    USUAL,
    WORLD,
    Answers,
    Sent,
    Traffic,
    all_right_so_far,
    bytes_to,
    judge_sums,
    listed,
    sends,
    short_and_long,
)
from .probes import (
    SHORT,
    chunk_lengths,
    large_numbers,
    peers_across,
    probe_all_reduce,
    probe_hierarchical,
    probe_whole,
    small_numbers,
)
from .reducers import reduction_server as reduction_server
from .ring import ring_all_gather as ring_all_gather
from .ring import ring_reduce_scatter as ring_reduce_scatter
from .uplinks import uplink_bytes as uplink_bytes


def _judge_all_reduce(
    ranks: Ranks, report: Report, name: str, sent: Sent, among: Sequence = USUAL
) -> None:
    """Judge the values, then what was sent, and finally sums of large whole numbers."""
    named = (case | {"name": name} for case in short_and_long(report, among))
    judge_sums(ranks, report, probe_all_reduce, named, sent)
    if all_right_so_far(report):
        case = {"partition": IN_FOURS, "name": name, "each": to_each(seed=report.seeds(WORLD))}
        hint = (
            "with tensors of int64 and bfloat16. Tensors of float32 and float64 passed, but x may "
            "have any dtype"
        )
        judge_groups(ranks, report, probe_whole, [case], _whole_sum, lambda _: hint, world=WORLD)


def _whole_sum(answer: GroupAnswer) -> Iterator[Step]:
    """Yield the steps that large whole numbers are added in their own dtype."""
    members = answer.members
    rules = only("send", "recv"), inside(members), waited, some(members)
    yield communication(answer.value["calls"], *rules)
    seeds = [answer.case["each"][rank]["seed"] for rank in members]
    true = sum(large_numbers(seed) for seed in seeds).tolist()
    words = (
        f"{on(members)}: With large whole numbers (int64), x is not the sum. float64 has 53 bits "
        "for digits and int64 has 63, so add in the dtype of x"
    )
    yield none_of([Wrong(words, answer.rank, "value")] if answer.value["sum"] != true else [])
    small = sum(small_numbers(seed) for seed in seeds).tolist()
    yield value(answer.value["small"], small, what=f"{on(members)}, with a tensor of bfloat16")


# From a run and a group rank: how many bytes that rank sends to each other group rank.
Plan = Callable[[Traffic, int], dict[int, int]]


def _by_plan(plan: Plan, why: str, rounds: int = 0) -> Sent:
    """Return a judge that accepts only the bytes of a plan.

    Args:
        plan: what each rank must send.
        why: what the algorithm does, in words; braces mark the first rank.
        rounds: the number of rounds in which a rank sends to all others, in turn from the next
            place on. Use 0 for an algorithm without such rounds: one message per rank is enough.
    """

    def judge(run: Traffic) -> Iterator[Step]:
        yield run.each(lambda place, calls: _off_plan(run, plan(run, place), calls, why, rounds))
        yield run.each(lambda place, calls: _out_of_turn(run, place, calls, rounds))

    return judge


def _off_plan(
    run: Traffic, plan: dict[int, int], calls: Calls, why: str, rounds: int
) -> str | None:
    """Return how a rank departs from the plan, or that it sends more messages than it needs."""
    wanted = {run.members[to]: nbytes for to, nbytes in plan.items()}
    sent = bytes_to(calls)
    count = len(sends(calls))
    if sent != wanted:
        why = why.format(run.members[0])
        return f"This rank should send {listed(wanted)}, but it sent {listed(sent)}. {why}"
    if count > len(wanted) and not rounds:
        return (
            f"This rank sent {count} messages, but {len(wanted)} are enough. Send one to each of "
            "these ranks, because every message costs a latency"
        )
    return None


def _out_of_turn(run: Traffic, place: int, calls: Calls, rounds: int) -> str | None:
    """Return a problem unless the k-th message of a round goes to place (r + k) mod p."""
    peers = [call["peer"] for call in sends(calls)]
    wanted = [run.members[(place + k) % run.size] for k in range(1, run.size)] * rounds
    if not rounds or peers == wanted:
        return None
    return (
        f"This rank sent to ranks {peers} in this order, but {wanted} was expected. Send the k-th "
        "message to place (r + k) mod p, so that the ranks don't all begin with the same place"
    )


def _crossbar_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends in a crossbar: the whole tensor to every other place."""
    return {other: run.nbytes for other in range(run.size) if other != place}


@task("6.1", "crossbar", points=2)
def crossbar(ranks: Ranks, report: Report) -> None:
    """Check that each rank sends its whole tensor to each other rank, once."""
    why = "In a crossbar, each rank sends its tensor once to every other rank of the group"
    _judge_all_reduce(ranks, report, "crossbar", _by_plan(_crossbar_plan, why, rounds=1))


def _central_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends to place 0, or what place 0 sends to all other places."""
    return {0: run.nbytes} if place else _crossbar_plan(run, 0)


@task("6.2", "a central reducer", points=2)
def central(ranks: Ranks, report: Report) -> None:
    """Check that all tensors go to place 0, which sends the sum back."""
    why = "Each rank sends its tensor to the group's first rank ({}), which sends the sum back"
    _judge_all_reduce(ranks, report, "central", _by_plan(_central_plan, why))


def _direct_plan(run: Traffic, place: int) -> dict[int, int]:
    """Return what a place sends to each other place: the part of that place, then its own sum."""
    nbytes = [length * run.element for length in chunk_lengths(run.length, run.size)]
    return {other: part + nbytes[place] for other, part in enumerate(nbytes) if other != place}


@task("6.5", "the direct all-reduce", points=2)
def direct(ranks: Ranks, report: Report) -> None:
    """Check that part k goes straight to place k, and that its sum goes to all other places."""
    why = (
        "In the first round, send part k straight to place k of the group, and in the second "
        "round, send the sum of your part to every other place"
    )
    _judge_all_reduce(ranks, report, "direct", _by_plan(_direct_plan, why, rounds=2))


@task("6.9", "bonus: halving and doubling", points=2)
def halving_doubling(ranks: Ranks, report: Report) -> None:
    """Check that 2·log₂ p steps send the ring's bytes, in groups of a power of two."""
    among = [[0], [1, 2], [3], [4, 5]], IN_FOURS
    _judge_all_reduce(ranks, report, "halving_doubling", _halving, among)


def _halving(run: Traffic) -> Iterator[Step]:
    """Yield the steps that all ranks follow the algorithm, and that each sends 2(p − 1)/p of x."""
    yield run.each(lambda place, calls: _why_not_halving(run, place, calls))
    yield run.in_all_is(2 * (run.size - 1) * run.nbytes)


def _why_not_halving(run: Traffic, place: int, calls: Calls) -> str | None:
    """Return why this isn't 2·log₂ p messages to partners at distances 1, 2, 4 …"""
    depth = run.size.bit_length() - 1
    sent = bytes_to(calls)
    nbytes = sum(sent.values())
    peers = [call["peer"] for call in sends(calls)]
    partners = [run.members[place ^ (1 << k)] for k in range(depth)]
    if set(sent) != set(partners):
        return (
            f"This rank sent to ranks {sorted(sent)}, but its partners are {sorted(partners)}. "
            "Send only to the places at distances 1, 2, 4, …"
        )
    if len(peers) != 2 * depth:
        return (
            f"This rank sent {len(peers)} messages, but {2 * depth} were expected. Send one to "
            "each partner while the parts get smaller, and one to each partner on the way back"
        )
    if partners and peers[0] != partners[-1]:
        return (
            f"The first message of this rank goes to rank {peers[0]}. Begin with the partner at "
            f"distance p/2, here rank {partners[-1]}"
        )
    if nbytes > 2 * run.element * sum(-(-run.length // 2**k) for k in range(1, depth + 1)):
        return (
            f"This rank sent {nbytes} bytes, which is too much. Halve what travels in each step, "
            "and send only the half that the partner continues with"
        )
    return None


# Three ways to divide the ranks among machines.
MACHINES = ([[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 2, 4], [1, 3, 5]])
ONE_EACH = [[rank] for rank in range(WORLD)]


@task("6.10", "bonus: two levels", points=2)
def hierarchical(ranks: Ranks, report: Report) -> None:
    """Check that ranks add within a machine first, and send only a share to other machines."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [
        {"partition": None, "machines": machines, "lengths": lengths, "each": each}
        for machines, lengths in (
            *((m, SHORT) for m in MACHINES),
            (MACHINES[0], [LONG]),
            (ONE_EACH, [12]),
        )
    ]
    more = {"rules": _on_levels, "hint": _on_machines, "where": _on_machines}
    judge_sums(ranks, report, probe_hierarchical, cases, _between_machines, **more)


def _on_machines(case: dict, _: Sequence[int] = ()) -> str:
    return f"on the machines {' and '.join(map(str, case['machines']))}"


def _on_levels(answers: Answers, rank: int) -> list[Rule]:
    """Return the rules that a rank uses only messages, in its two groups, and waits for them."""
    machines = answers.case["machines"]
    groups = [*machines, *peers_across(machines)]
    node, across = (members for members in groups if rank in members)

    def on_levels(calls: Calls) -> str | None:
        strange = [call["group"] for call in calls if call["group"] not in (node, across)]
        if not strange:
            return None
        return (
            f"This rank has a message in the group of ranks {strange[0]}. Use only the groups node "
            f"(ranks {node}) and across (ranks {across})"
        )

    return [only("send", "recv"), waited, on_levels]


def _between_machines(run: Traffic) -> Iterator[Step]:
    """Yield the steps that a rank sends 2(m − 1)/m of its part away, and all ranks 2(m − 1)n."""
    machines = run.case["machines"]
    many = len(machines)
    size = len(machines[0])
    part = -(-run.length // size)
    most = 2 * (many - 1) * -(-part // many) * run.element
    home = {rank: machine for machine in machines for rank in machine}
    away = [
        sum(nbytes for to, nbytes in bytes_to(calls).items() if home[to] != home[rank])
        for _, rank, calls in run.of_ranks()
    ]

    def too_far(place: int, _: Calls) -> str | None:
        if away[place] <= most:
            return None
        return (
            f"This rank sent {away[place]} bytes to other machines, but at most {most} are needed. "
            f"After the reduce-scatter on its machine, let it sum one of {size} parts with the "
            "ranks at the same place on the other machines"
        )

    yield run.each(too_far)
    between = sum(away)
    expected = 2 * (many - 1) * run.nbytes
    too_many_between = (
        f"{between} bytes went from machine to machine, but {expected} were expected. Use the ring "
        "or the direct all-reduce between the machines: both send fewer bytes than a crossbar"
    )
    yield run.of_all(too_many_between, between != expected)
    within = run.in_all - between
    needed = 2 * many * (size - 1) * run.nbytes
    too_many_within = (
        f"{within} bytes traveled within the machines, but {needed} are enough. Use a "
        "reduce-scatter before the messages to other machines, and an all-gather after them"
    )
    yield run.of_all(too_many_within, within > needed)
