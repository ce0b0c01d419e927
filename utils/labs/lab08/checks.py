"""Checks of lab 08: elastic averaging, round robin and asynchronous, local SGD, DiLoCo.

Each algorithm runs with a gradient that the check knows, and the check then replays it. If workers
come in any order, the replay follows the order in the master's records. The check also replays
likely mistakes, so it recognizes their results.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

from utils.checks.comparison import Calls, Mistake, Rule, inside, made, only, same, table, waited
from utils.checks.model import use_model as use_model
from utils.checks.task import Report, Step, communication, each_of, facts, task, to_each, value
from utils.checks.trials import PARTITIONS, GroupAnswer, judge_each_group, judge_groups, on
from utils.cluster.questions import Ranks

from . import replays
from .probes import SIGNAL, moved_outer, outer_cases, probe_outer, probe_run, rounds
from .recorded_runs import follow_all, replay_of, run_cases, sized, weight_steps
from .springs import moves as moves
from .springs import other_dtype

# A master needs a worker, so there are no groups of one rank.
WITH_A_MASTER = [None, *PARTITIONS[:-1]]


def _length(case: dict[str, Any]) -> str:
    return f"{case['steps']} steps with τ = {case['tau']}"


def _rounds(case: dict[str, Any]) -> int:
    return rounds(case["steps"], case["tau"])


def _calls(answer: GroupAnswer) -> Calls:
    """Return the calls of an answer, without the check's own messages."""
    return [call for call in answer.value["calls"] if call["tag"] != SIGNAL]


# -- 8.2: round robin -------------------------------------------------------------------------


def _in_a_group(case: dict[str, Any]) -> str:
    """Return the end of a hint for a case with groups."""
    return ". If it works without a group, pass group=group to every call" * bool(case["partition"])


def _round_robin_hint(case: dict[str, Any]) -> str:
    return (
        f"in {case['steps']} steps. In step t = 0, 1, …, only the master at place 0 and the worker "
        "at place 1 + t mod G take part" + _in_a_group(case)
    )


@task("8.2", "round robin, as printed", points=4)
def round_robin(ranks: Ranks, report: Report) -> None:
    """Check that the workers come in turn, and that the old W^j moves the center."""
    cases = run_cases(report, "round_robin", partition=WITH_A_MASTER, steps=(6, 7, 8, 25))
    right = True  # in all groups so far

    def judge(case: dict[str, Any], members: list[int], results: list[dict]) -> None:
        nonlocal right
        if len(members) > 1:
            group = (report, case, members, results)
            right &= follow_all(*group, _in_turn)
            right = right and follow_all(*group, _round_robin_weights)

    judge_each_group(ranks, report, probe_run, cases, judge, _round_robin_hint)


def _in_turn(answer: GroupAnswer) -> Iterator[Step]:
    members = answer.members
    turns = [1 + t % (len(members) - 1) for t in range(answer.case["steps"])]
    times = turns.count(answer.place)
    order = _turns(members, [0] * times if answer.place else turns)
    yield _messages(answer, order, _in_line(answer, times))


def _round_robin_weights(answer: GroupAnswer) -> Iterator[Step]:
    replay = replay_of(replays.round_robin_replayed, answer, answer.case["steps"])
    return weight_steps(answer, replay, replays.ROUND_ROBIN_MISTAKES)


def _turns(members: list[int], places: list[int]) -> Rule:
    """Return the rule that a rank talks to the ranks at these places, in this order."""
    wanted = [members[place] for place in places]

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "sent to ranks"), ("recv", "received from ranks")):
            peers = [call["peer"] for call in calls if call["op"] == op]
            if peers != wanted:
                rows = [", ".join(map(str, row)) or "none" for row in (peers, wanted)]
                return (
                    f"{on(members)}: This rank {word} {rows[0]}, expected {rows[1]}. Exchange one "
                    "message each way in the turn of the worker at place 1 + t mod G"
                )
        return None

    return rule


def _in_line(answer: GroupAnswer, times: int) -> Rule:
    """Return the rule that a worker computes ``times`` gradients, each between lines 10 and 12."""
    seen = answer.value["seen"]

    def rule(_: Calls) -> str | None:
        if answer.place and len(seen) != times:
            return (
                f"This worker computed {len(seen)} gradients. Compute one in each of {times} turns"
            )
        if seen and answer.place == 0:
            return "The master computes a gradient without images. Compute only on the workers"
        for k, (sends, receives) in enumerate(seen):
            if sends > k:
                return (
                    "You sent W^j before you computed the gradient. This would be faster, but keep "
                    "the printed order: line 12 comes after line 11"
                )
            if receives <= k:
                return (
                    "You computed the gradient before the center had come. Line 11 comes after "
                    "line 10, so begin when it is the worker's turn"
                )
        return None

    return rule


# -- 8.3: asynchronous ------------------------------------------------------------------------


def _asynchronous_hint(case: dict[str, Any]) -> str:
    text = f"{_length(case)}: {_rounds(case)} exchanges of each worker"
    held = (
        ". The first worker computed for long, and the others continued. Let the master take what "
        "comes first, by dist.recv without a source"
    )
    return text + held * case.get("held", False) + _in_a_group(case)


@task("8.3", "asynchronous, every τ steps", points=4)
def asynchronous(ranks: Ranks, report: Report) -> None:
    """Check that the master serves any worker that comes, and ⌈steps/τ⌉ exchanges per worker."""
    cases = run_cases(
        report,
        "work",
        partition=[*WITH_A_MASTER, WITH_A_MASTER[0], WITH_A_MASTER[2]],
        steps=(6, 4, 7, 5, 4, 31),
        tau=(2, 1, 3, 2, 9, 13),
        held=(False, True, False, True, False, False),
    )

    def judge(case: dict[str, Any], members: list[int], results: list[dict]) -> None:
        group = (report, case, members, results)
        if len(members) > 1 and follow_all(*group, _exchanged):
            follow_all(*group, _asynchronous_weights)

    judge_each_group(ranks, report, probe_run, cases, judge, _asynchronous_hint)


def _exchanged(answer: GroupAnswer) -> Iterator[Step]:
    if answer.place:
        yield each_of([_exchanges(answer)], [_gradients(answer)])
    else:
        workers = answer.members[1:]
        counts = _counts(dict.fromkeys(workers, _rounds(answer.case)))
        yield _messages(answer, counts, _any_first(len(workers)))


def _asynchronous_weights(answer: GroupAnswer) -> Iterator[Step]:
    served = answer.values[0]["calls"]  # by the master, which gets no message of the check
    order = [call["peer"] for call in _of(served, "send")]
    texts = ({} if answer.place else replays.SERVE_MISTAKES) | replays.WORK_MISTAKES
    return weight_steps(answer, _replay_in_order(answer, order), texts)


def _replay_in_order(answer: GroupAnswer, order: list[int], **momentum: float) -> replays.Replay:
    """Return the replay of a case in which the workers come in this order."""
    places = [answer.members.index(rank) for rank in order]
    rounds = (answer.case["steps"], answer.case["tau"])
    return replay_of(replays.asynchronous_replayed, answer, places, *rounds, **momentum)


def _messages(answer: GroupAnswer, *rules: Rule) -> Step:
    """Return the step that a rank exchanges whole weights in its group, and keeps the rules."""
    always = (only("send", "recv"), inside(answer.members), sized(answer.case), waited)
    first = communication(answer.value["calls of a first time"], *always)
    return each_of([first, communication(_calls(answer), *always, *rules)])


def _exchanges(answer: GroupAnswer) -> Step:
    """Return the step that a worker has one exchange with the master in every τ steps."""
    wanted = {answer.members[0]: _rounds(answer.case)}
    return _messages(answer, _counts(wanted, f" in {_length(answer.case)}"))


def _of(calls: Calls, op: str) -> Calls:
    return sorted((call for call in calls if call["op"] == op), key=lambda call: call["start"])


def _counts(wanted: dict[int, int], words: str = "") -> Rule:
    """Return the rule that this number of messages went to each rank, and came from it."""

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "to"), ("recv", "from")):
            peers = [call["peer"] for call in calls if call["op"] == op]
            odd = next((rank for rank in wanted if peers.count(rank) != wanted[rank]), None)
            if odd is not None:
                return (
                    f"This rank has {peers.count(odd)} {op}s {word} rank {odd}{words}, expected "
                    f"{wanted[odd]}. In an exchange, send W to the master, and W̄ back"
                )
            others = set(peers) - set(wanted)
            if others:
                return f"This rank has a {op} {word} rank {min(others)}. Talk only to the master"
        return None

    return rule


def _any_first(workers: int) -> Rule:
    """Return the rule that the master doesn't wait for one particular worker."""

    def rule(calls: Calls) -> str | None:
        fixed = [c for c in _of(calls, "recv") if c["blocking"] and not c["any_source"]]
        if workers < 2 or not fixed:
            return None
        return (
            f"The master waits for rank {fixed[0]['peer']}, although others may be ready. Leave "
            "out the source: who = dist.recv(w, group=group) takes what comes first"
        )

    return rule


def _gradients(answer: GroupAnswer) -> Step:
    steps = answer.case["steps"]
    count = len(answer.value["at"])
    return facts({
        f"You computed {count} gradients. Compute gradient(w) once in each of {steps} steps": (
            count != steps
        )
    })


# -- 8.4: momentum ----------------------------------------------------------------------------


@task("8.4", "EAMSGD: with momentum", points=2)
def momentum(ranks: Ranks, report: Report) -> None:
    """Check that a worker uses Nesterov's momentum, without the spring's pull in the velocity."""
    draw = random.Random(report.seed).uniform
    bounds = ((0.4, 0.6), (0.9, 0.95), (0.1, 0.3), (0.6, 0.8))
    cases = run_cases(
        report,
        "work_with_momentum",
        partition=[WITH_A_MASTER[k] for k in (0, 2, 3, 1)],
        steps=(6, 5, 7, 31),
        tau=(2, 1, 3, 13),
        delta=[draw(*bound) for bound in bounds],
    )
    judge_groups(ranks, report, probe_run, cases, _with_momentum, _asynchronous_hint)


def _with_momentum(answer: GroupAnswer) -> Iterator[Step]:
    if answer.place == 0:
        return
    yield _exchanges(answer)
    yield _gradients(answer)
    replay = _replay_in_order(answer, answer.values[0]["order"], delta=answer.case["delta"])
    yield from weight_steps(answer, replay, replays.MOMENTUM_MISTAKES)


# -- 8.5: local SGD ---------------------------------------------------------------------------

#: Partition, steps and τ of each case of the algorithms with rounds.
_ROUNDS = {"partition": (None, *PARTITIONS), "steps": (6, 7, 31, 5, 3), "tau": (2, 3, 13, 1, 5)}


def _rounds_hint(case: dict[str, Any]) -> str:
    return f"{_length(case)}: {_rounds(case)} all_reduces"


def _in_rounds(answer: GroupAnswer, texts: dict[str, str], **outer: float) -> Iterator[Step]:
    """Yield the steps that each round has τ steps and one all_reduce, and gives right weights."""
    case = answer.case
    why = f" in {_length(case)} (one after every τ steps, and one at the end)"
    always = (only("all_reduce"), inside(answer.members))
    count = made("all_reduce", _rounds(case), why)
    for calls in (answer.value["calls of a first time"], _calls(answer)):
        yield communication(calls, *always, count, sized(case), waited)
    yield _gradients(answer)
    replay = replay_of(replays.local_replayed, answer, case["steps"], case["tau"], **outer)
    yield from weight_steps(answer, replay, texts, "all_reduce")


@task("8.5", "local SGD", points=2)
def local_sgd(ranks: Ranks, report: Report) -> None:
    """Check that each rank takes τ steps alone, and that the weights then become their mean."""
    cases = run_cases(report, "local_sgd", **_ROUNDS)
    judge = functools.partial(_in_rounds, texts=replays.LOCAL_MISTAKES)
    judge_groups(ranks, report, probe_run, cases, judge, _rounds_hint)


# -- 8.6: DiLoCo ------------------------------------------------------------------------------


@task("8.6", "DiLoCo", points=4)
def diloco(ranks: Ranks, report: Report) -> None:
    """Check Nesterov's outer step, and then rounds of local steps from the center."""
    seeds = [report.seed + rank for rank in range(ranks.n)]
    answers = report.answers(ranks, probe_outer, each=to_each(seed=seeds))
    right = [
        report.follow(answer.rank, _outer_steps(answer.value, outer_cases(seeds[answer.rank])))
        for answer in answers
    ]
    if not answers or not all(right):
        return
    draw = random.Random(report.seed).uniform
    small = ((0.3, 0.6), (0.1, 0.4))
    large = ((0.75, 1.2), (0.7, 0.97))
    kinds = (large, small, (small[0], large[1]), (large[0], small[1]), large)
    rate, mom = zip(*((draw(*rate), draw(*mom)) for rate, mom in kinds), strict=True)
    cases = run_cases(report, "diloco", **_ROUNDS, rate=rate, mom=mom)

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        outer = {name: answer.case[name] for name in ("rate", "mom")}
        return _in_rounds(answer, replays.DILOCO_MISTAKES, **outer)

    judge_groups(ranks, report, probe_run, cases, judge, _rounds_hint)


def _outer_steps(result: dict[str, Any], cases: list[tuple]) -> Iterator[Step]:
    form = result.get("form")
    yield facts({f"outer_step returned a {form}. Return two tensors: center, velocity": form})
    for case, moved in zip(cases, result["moved"], strict=True):
        center, _, _, rate, mom = case
        right = [tensor.tolist() for tensor in moved_outer(*case)]
        name = f"outer_step, rate {rate:.3g}, momentum {mom:.3g}"
        exact = replays.precision(center)
        mistakes = _wrong_outer_steps(case)
        yield value(moved, right, mistakes, what=name, form="two tensors", tolerance=exact)
    for case, kinds in zip(cases, result["kinds"], strict=True):
        yield other_dtype(kinds, case[0].dtype)
    yield facts({
        "outer_step changed one of its arguments. Make new tensors": result["changed"],
        "outer_step returned one of its arguments. Return new tensors": result["old"],
    })


def _wrong_outer_steps(case: tuple) -> list[Mistake]:
    center, gradient, velocity, rate, mom = case
    new_center, new_velocity = right = moved_outer(*case)
    variants = replays.OUTER_MISTAKES.items()
    by_mistake = {text: replays.outer_by(variant, *case) for variant, text in variants}
    by_mistake |= {
        "The step goes the wrong way. Use center − rate · (…)": (
            2 * center - new_center,
            new_velocity,
        ),
        "You used the outer rate in the velocity. Leave it out: v ← μv + g": (
            new_center,
            mom * velocity + rate * gradient,
        ),
        "You returned velocity, center. Return center, velocity": (new_velocity, new_center),
        "You returned the old velocity. Return the new one": (new_center, velocity),
    }
    rows = {text: [tensor.tolist() for tensor in pair] for text, pair in by_mistake.items()}
    right_rows = [tensor.tolist() for tensor in right]
    return table({text: wrong for text, wrong in rows.items() if not same(wrong, right_rows)})
