"""Checks of lab 10: stages, schedules as data, an executor, weight stashing.

Schedules are judged as data, by a planner of our own. What communicates is tried in pipelines of
1 to 4 stages in double precision, and compared with the model that was not split. The order of
work is seen in what the stages are called for, never in times.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.calls import Calls, Rule, blocking, in_words, inside, messages, only, waited
from utils.checks.deadline import NotEnded, ends_within
from utils.checks.functions import Case, judge_calls
from utils.checks.groups import (
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
)
from utils.checks.mistakes import Mistake, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, kind_of, number, reading_answer, recorded, told
from utils.checks.steps import Step, communication, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks, Reply
from utils.labs.shared.reference_pipeline import (
    FEATURES,
    IMAGES,
    Piece,
    Worker,
    drawn,
    gradient_of,
    losses_of,
    number_of,
    played,
    twin,
    weights_by,
    weights_of,
)
from utils.labs.shared.schedules import (
    Schedule,
    gpipe,
    held,
    idle,
    one_f_one_b,
    parse,
    planned,
    warmed,
)
from utils.labs.shared.schedules import look_at as look_at

from .schedule_rules import (
    as_lists,
    in_order,
    moved,
    shuffled,
    wrong_bubbles,
    wrong_gpipes,
    wrong_held,
    wrong_one_f_one_bs,
    wrong_plans,
)

PARTITIONS = ([[0, 1, 2], [3]], [[0, 2], [1, 3]], None)
#: What float64 may lose; a mistake is off by much more.
EXACT = 1e-10
BYTES = 8  # of a float64
#: Samples of a minibatch whose messages are too large to be sent before somebody receives them.
LARGE = 1500


# -- 10.1: naively ----------------------------------------------------------------------------


@in_group
def probe_naive(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, n: int, single: bool
) -> dict:
    """One minibatch of n samples through the stages. Each has layers of its own seed."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    piece = Piece(seed, place, p)
    x, labels = drawn(seed, n)
    if single:
        piece = piece.float()
        x = x.float()
    if place:  # only the first stage may use what is in x
        x = torch.full_like(x, float("nan"))
    function = reading_answer(user_ns, "train_naively")
    marks = answer_named(user_ns, "marks")
    marks.clear()
    loss, calls = recorded(function, piece, x, labels, **keywords(partition, group))
    return {
        "marks": told(marks),
        "times": piece.log.times,
        "loss": number(loss),
        "calls": calls,
        "gradient": gradient_of(piece),
        "events": piece.log.events,
    }


@task("10.1", "one minibatch through the stages", points=2)
def train_naively(ranks: Ranks, report: Report) -> None:
    """The twin's gradients, with four messages at most."""
    each = to_each(seed=report.seeds(WORLD))
    runs = zip(PARTITIONS, ((24, False), (17, False), (9, True)), strict=True)
    cases = [
        {"partition": partition, "each": each, "n": n, "single": single}
        for partition, (n, single) in runs
    ]
    judge_groups(ranks, report, probe_naive, cases, _minibatch)
    explained(report)


def _minibatch(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a stage has to do with one minibatch."""
    members, place, result = answer.members, answer.place, answer.value
    n, single = answer.case["n"], answer.case["single"]
    where = on(members)
    traffic = _traffic([("F", 0), ("B", 0)], members, place)
    yield communication(
        result["calls"],
        only("send", "recv"),
        inside(members),
        messages(*((op, peer) for op, peer, *_ in traffic), in_order=False),
        _bytes(traffic, {n}, BYTES // 2 if single else BYTES),
        waited,
    )
    order = " ".join(result["events"]) or "nothing"
    text = f"{where}: the stage was called for {order}, expected one forward, one backward"
    yield facts({text: result["events"] != ["F", "B"]})
    seeds = _seeds_of(answer)
    gradients, loss = twin(seeds, n=n)
    yield value(
        result["gradient"],
        gradients[place],
        _wrong_gradients(seeds, place, n=n),
        what=f"gradients of stage {place} {where}",
        tolerance=1e-4 if single else EXACT,
    )
    if place == len(members) - 1:
        mistakes = _wrong_losses(loss, len(members), n)
        form = "the loss on the last stage"
        yield value(result["loss"], loss, mistakes, what=f"the loss {where}", form=form)
    else:
        text = (
            f"stage {place} {where} returned {result['loss']!r}; only the last stage has a loss, "
            "the others return None"
        )
        yield facts({text: result["loss"] is not None})
    yield facts(_marked([["F", 0], ["B", 0]], result))


def _seeds_of(answer: GroupAnswer) -> tuple[int, ...]:
    """Return the seeds that the ranks of a group were told."""
    return tuple(answer.case["each"][rank]["seed"] for rank in answer.members)


#: Messages of a stage: operation, rank, tag, and how many numbers of a sample.
Traffic = list[tuple[str, int, int, int]]


def _traffic(actions: Sequence[tuple[str, int]], members: Sequence[int], place: int) -> Traffic:
    """Return the messages of the stage at a place; tags tell microbatch and way."""
    p = len(members)
    ways = {
        "F": (("recv", place - 1), ("send", place + 1)),
        "B": (("recv", place + 1), ("send", place - 1)),
    }
    return [
        (op, members[other], 2 * k + (kind == "B"), FEATURES[max(place, other) * 4 // p])
        for kind, k in actions
        for op, other in ways[kind]
        if 0 <= other < p
    ]


def _bytes(traffic: Traffic, samples: set[int], of_one: int = BYTES) -> Rule:
    """Return the rule that each message is of as many samples as a microbatch may have.

    Args:
        of_one: bytes of a number.
    """

    def rule(calls: Calls) -> str | None:
        for call in calls:
            pair = (call["op"], call["peer"])
            widths = {width for op, peer, _, width in traffic if (op, peer) == pair}
            allowed = {n * width * of_one for n in samples for width in widths}
            if allowed and call["nbytes"] not in allowed:
                return (
                    f"a {call['op']} of {call['nbytes']} bytes, expected {min(allowed)}: the "
                    "activations of the samples, [samples, features], or their gradient"
                )
        return None

    return rule


def _wrong_gradients(
    seeds: tuple[int, ...], place: int, m: int = 1, n: int = IMAGES
) -> Iterator[Mistake]:
    p = len(seeds)
    right, summed = (twin(seeds, reduction, n)[0][place] for reduction in ("mean", "sum"))
    yield Mistake(
        [0.0] * len(right),
        "this stage has no gradient: backward did not come to it, or the gradients were set to "
        "zero. Does the stage before run backward from the gradient that it receives?",
    )
    yield Mistake(summed, "this is the gradient of a sum over the samples; the loss is their mean")
    factors = {
        f"{m} times too large: worker.loss divides by the number of microbatches already, so that "
        "the losses add up. Is something else than worker.loss used, or something scaled?": m,
        f"divided by {m} microbatches once too often: worker.loss does it": 1 / m,
        f"divided by {p} stages: they share the layers, not the samples": 1 / p,
        "the sign is wrong": -1,
        "everything was counted twice": 2,
    }
    for text, factor in factors.items():
        if factor != 1:
            yield Mistake([factor * g for g in right], text)
    if place < p - 1:
        yield Mistake(
            lambda gradient: isinstance(gradient, list) and len(gradient) == len(right),
            "another gradient. Is each microbatch received into a tensor of its own? Backward of "
            "this stage has to start from the gradient that it received, that of the last stage "
            "from worker.loss, and each stage has to send the gradient of its input, x.grad",
        )


def _wrong_losses(loss: float, p: int, n: int) -> list[Mistake]:
    by_mistake = {
        "this is the sum over the samples; cross_entropy has the mean": loss * n,
        f"divided by {p} stages": loss / p if p > 1 else None,
        "return a number: loss.item()": lambda result: isinstance(result, str | list),
    }
    return table(by_mistake)


def _marked(order: list[list], result: dict[str, Any]) -> dict[str, bool]:
    """Return what is wrong with marks: all that is computed is in one, in order, and no message."""
    marks = [mark[:2] for mark in result["marks"]]
    spans = [mark[2:] for mark in result["marks"]]
    times = result["times"]
    if marks == order and len(times) != len(order):
        raise ValueError(f"{len(times)} events of a stage, and {len(order)} actions")
    pairs = list(zip(spans, times, strict=marks == order))
    outside = any(not start <= time <= end for (start, end), time in pairs)
    starts = [call["start"] for call in result["calls"]]
    inside_of_one = any(start < time < end for start, end in spans for time in starts)
    return {
        f"the marks are {short(marks, 80)}, expected {short(order, 80)}: put with mark(kind, k): "
        "around what is computed": marks != order,
        'a stage computes outside of its mark: put the whole forward into with mark("F", k): and '
        'the whole backward into with mark("B", k):': outside,
        "a message is inside of a mark: put only what is computed into it, so that the picture "
        "shows no waiting as work": inside_of_one,
    }


#: Parts of errors that PyTorch raises here, and what is behind them.
ERRORS = {
    "implicitly created only for scalar": "a stage that is not the last has no loss: it starts "
    "backward from the gradient that it received, y.backward(gradient)",
    "does not require grad": "nothing in what backward starts from needs a gradient: was it "
    "detached, or computed under no_grad? Call requires_grad_() on a received input before forward",
    "'NoneType' object has no attribute": "something is None: the input's gradient is, if "
    "x.requires_grad_() was not called before forward; a copy's, if forward did not use it",
    "modified by an inplace operation": "a weight was changed in place after a forward used it, "
    "and backward needs it as it was: forward has to work on a copy of its own",
    "backward through the graph a second time": "backward ran twice for one microbatch, or two "
    "microbatches share a graph: received inputs have to be tensors of their own",
    "KeyError": "an entry is looked up that is not there: was it stored by its microbatch k, and "
    "taken out only once?",
    "unsupported operand type(s) for *": "a gradient is None: backward did not come to that "
    "tensor. Gradients are where forward computed: in the copy that it used, self.stash[k], not in "
    "that of another microbatch",
    "leaf Variable that requires grad": "a weight is updated with autograd watching: use "
    "`with torch.no_grad():`",
    "got <class 'NoneType'>": "what is sent is None: the gradient of the input, if "
    "x.requires_grad_() was not called before forward",
    "object is not callable": "functional_call(module, weights, (x,)) runs a module with other "
    "weights; a dict of weights can not be called",
    "waits in send(": "a large message waits until it is received. A stage that calls wait() right "
    "behind isend blocks like one that calls send: in 1F1B the next stage wants to send as well, "
    "and both wait. Keep the request, and wait at the end",
    "Deadlock: ": "a message is waited for that nobody sends. Do both calls of a pair pass "
    "group=group, have the same tag, and come before the next wait?",
}


def explained(report: Report) -> None:
    """Add to an error of PyTorch what is behind it."""
    errors = [text for text, kind, _ in report.found if kind == "error"]
    for part, explanation in ERRORS.items():
        if any(part in text for text in errors):
            report.problem(explanation)
            return


# -- 10.2 to 10.5: functions of data ----------------------------------------------------------


def _judge_schedules(
    ranks: Ranks,
    report: Report,
    sizes: Sequence[tuple[int, int]],
    right: Callable[[int, int], Schedule],
    wrong: Callable[[int, int], list[Mistake]],
) -> None:
    """Judge the student's function of the same name as ours, for p stages and m microbatches."""
    form = "a list for each stage"
    cases = [
        Case(right.__name__, [p, m], as_lists(right(p, m)), wrong(p, m), form) for p, m in sizes
    ]
    judge_calls(ranks, report, cases)


@task("10.2", "the schedule of GPipe", points=1)
def gpipe_schedule(ranks: Ranks, report: Report) -> None:
    """All forwards, then all backwards in reverse."""
    sizes = ((4, 4), (1, 3), (4, 1), (2, 5), (3, 2), (7, 12))
    _judge_schedules(ranks, report, sizes, gpipe, wrong_gpipes)


#: Seconds that a plan may take, and what is wrong with one that takes longer.
PLANNING = 10.0
NEVER_PLANNED = (
    "A schedule that is not legal is never planned completely, so a loop until all actions are "
    "planned does not end. Leave the loop when a round has planned nothing, and return None."
)


def probe_plans(user_ns: dict, *, rank: int, cases: list) -> list:
    """`plan` of schedules, and whether they are as they were."""
    plans = []
    for schedule, times in cases:
        pairs = [[(kind, k) for kind, k in actions] for actions in schedule]
        before = copy.deepcopy(pairs)
        with ends_within(PLANNING, NEVER_PLANNED):
            spans = answer_named(user_ns, "plan")(pairs, *times)
        shown = kind_of(spans) if isinstance(spans, set | dict | tuple) else told(spans)
        plans.append([shown, pairs == before])
    return plans


ILLEGAL = (
    "B0 F0",
    "F0 B0 F1 B1\nF1 F0 B1 B0",
    "F0 F1 B1 B0\nF0 B0 B1 F1",
    # One stage has more to do than the other.
    "F0 F1 B1 B0\nF0 B0",
    "F0 B0\nF0 F1 B1 B0",
)


#: An action that is ready, and not the next one of its list: B0 on stage 0, F0 on the last one.
IN_ORDER = ("F0 F1 B1 B0\nF0 B0 F1 B1\nF0 B0 F1 B1", "F0 F2 B2 F1 B1 B0\nF2 B2 F1 F0 B1 B0")


@task("10.3", "plan a schedule", points=3)
def plan_schedule(ranks: Ranks, report: Report) -> None:
    """Times by the two rules; None for what can never be completed."""
    legal = [
        (gpipe(3, 2), ()),
        (one_f_one_b(4, 5), (3, 4)),
        (shuffled(report.seed), (2, 1)),
        (gpipe(1, 2), ()),
        (gpipe(2, 2), (0.5, 1.5)),
        (one_f_one_b(6, 20), (0.37, 1.9)),
        (gpipe(2, 3), (0, 1)),
        (one_f_one_b(2, 40), (1, 2)),
        *((parse(text), (1, 3)) for text in IN_ORDER),
    ]
    if not _plans_are_right(ranks, report, [[as_lists(s), times] for s, times in legal]):
        return
    _plans_are_right(ranks, report, [[as_lists(parse(text)), ()] for text in ILLEGAL])
    if report.kinds - {NotEnded.__name__}:
        report.problem("(a schedule that is not legal is not an error here: return None)")


def _plans_are_right(ranks: Ranks, report: Report, asked: list[list]) -> bool:
    """Judge plans of schedules with times; return whether all ranks have answered, and rightly."""
    answers = report.answers(ranks, probe_plans, cases=asked)
    right = [report.follow(answer.rank, _plans(asked, answer.value)) for answer in answers]
    return bool(answers) and all(right)


def _plans(asked: list[list], plans: list[list]) -> Iterator[Step]:
    """Yield what `plan` has to return for these schedules with these times."""
    for (schedule, times), (spans, same) in zip(asked, plans, strict=True):
        call = f"plan of [{'; '.join(map(_in_words, schedule))}]"
        call += f" with times {times}" if times else ""
        all_spans, done = planned(schedule, *(times or (1, 2)))
        complete = sum(done) == sum(map(len, schedule))
        right = in_order(all_spans) if complete else None
        yield value(in_order(spans), right, wrong_plans(schedule, times, right), what=call)
        text = (
            f"{call}: the schedule itself was changed; it is run later: copy the lists before you "
            "take something out"
        )
        yield facts({text: not same})


def _in_words(actions: Sequence[Sequence]) -> str:
    """Return actions as a student writes them: ``F0 F1 B0``."""
    return " ".join(f"{kind}{k}" for kind, k in actions)


#: More held than forwards one after the other.
WAVES = "F0 F1 B0 F2 F3 F4 B1 B2 B3 B4\nF0 B0 F1 F2 F3 B1 B2 F4 B3 B4"


def probe_counts(user_ns: dict, *, rank: int, calls: list) -> list:
    """What `bubble` and `most_held` return, for spans and actions that are tuples."""
    results = []
    for name, rows in calls:
        if name == "most_held":
            rows = [[tuple(action) for action in actions] for actions in rows]
        else:
            rows = [tuple(span) for span in rows]
        result = reading_answer(user_ns, name)(rows)
        results.append(told(result) if isinstance(result, list) else told(number(result)))
    return results


@task("10.4", "the bubble and the activations held", points=2)
def count(ranks: Ranks, report: Report) -> None:
    """Shares and counts of schedules, planned and measured."""
    cases = _count_cases(report.seed)
    calls = [[case.name, *case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_counts, calls=calls):
        report.follow(answer.rank, _counts(cases, answer.value))


def _counts(cases: list[Case], results: list) -> Iterator[Step]:
    """Yield what each case has to result in."""
    for case, result in zip(cases, results, strict=True):
        call = f"{case.name}({short(case.arguments[0], 60)})"
        yield value(result, case.right, case.mistakes, what=call, form=case.form)


def _count_cases(seed: int) -> list[Case]:
    """Return calls of `bubble` for spans of many kinds, and of `most_held` for schedules."""
    draw = random.Random(seed)
    waves = parse(WAVES)
    schedules = [one_f_one_b(4, 6), gpipe(2, 3), gpipe(1, 2), shuffled(seed), waves, gpipe(5, 16)]
    plans = [planned(schedule)[0] for schedule in schedules]
    first = plans[0]
    noisy = [
        [s, kind, k, a + draw.random() / 9, e + draw.random() / 9 + 0.2]
        for s, kind, k, a, e in planned(one_f_one_b(3, 4), 4, 8)[0]
    ]
    backwards = sorted(first, key=lambda span: -span[4])  # the first is the last to end
    # Stage 0 has slept before it began, so another stage is the first.
    late = [moved([span], 50 * (span[0] == 0))[0] for span in first]
    other_kinds = [[s, {"F": "F", "B": "I"}[kind], k, a, e] for s, kind, k, a, e in first]
    hours = [[s, kind, k, 1e5 + a / 1e3, 1e5 + e / 1e3] for s, kind, k, a, e in first]
    of_spans = [*plans, backwards, moved(first, 1000), noisy, late, other_kinds, hours]
    cases = [
        Case("bubble", [spans], idle(spans), wrong_bubbles(spans), "a number") for spans in of_spans
    ]
    form = "a list with a number for each stage"
    for schedule in schedules:
        arguments = [as_lists(schedule)]
        cases.append(Case("most_held", arguments, held(schedule), wrong_held(schedule), form))
    return cases


@task("10.5", "the schedule of 1F1B", points=2)
def one_f_one_b_schedule(ranks: Ranks, report: Report) -> None:
    """Warm-up, one forward and one backward in turn, drain."""
    sizes = ((4, 8), (4, 2), (3, 3), (1, 3), (2, 5), (7, 12))
    _judge_schedules(ranks, report, sizes, one_f_one_b, wrong_one_f_one_bs)


# -- 10.6: the executor -----------------------------------------------------------------------


@in_group
def probe_run(
    user_ns: dict, *, rank: int, group: Group, partition: Partition, seed: int, schedules: dict
) -> list:
    """Schedules for as many stages as this group has."""
    from torch_mpi.record import log

    place, p = dist.get_rank(group), dist.get_world_size(group)
    function = answer_named(user_ns, "run_schedule")
    marks = answer_named(user_ns, "marks")
    results = []
    for lists, n in schedules[str(p)]:
        schedule = [[(kind, k) for kind, k in actions] for actions in lists]
        m = len(schedule[0]) // 2
        worker = Worker(Piece(seed, place, p), n)
        x, labels = drawn(seed, n)
        if place:  # only the first stage may use what is in x
            x = torch.full_like(x, float("nan"))
        marks.clear()
        mark = log.mark()
        arguments = (worker, schedule, list(x.chunk(m)), list(labels.chunk(m)))
        losses, calls = recorded(function, *arguments, **keywords(partition, group))
        tensors = isinstance(losses, list) and any(isinstance(loss, Tensor) for loss in losses)
        of_stage = worker.piece.log
        result = {
            "losses": ["<Tensor>"] if tensors else told(losses),
            "calls": calls,
            "gradient": gradient_of(worker.piece),
            "marks": told(marks),
            "times": of_stage.times,
            "early": any(_is_early(call, of_stage.times) for call in log.since(mark)),
            "asked": worker.asked,
            "most": of_stage.most,
        }
        results.append(result)
    return results


def _is_early(call: Any, times: list[float]) -> bool:
    """Return whether the stage was blocked on its send before it computed the next time."""
    following = next((time for time in times if time > call.start), 0)
    return call.op == "send" and any(begin < following for begin, _ in call.waits)


#: Schedules with numbers of samples, by the name that a student is told.
Runs = dict[str, tuple[Schedule, int]]


def _usual_runs(p: int) -> Runs:
    """Return schedules of p stages that an executor first has to get right."""
    return {
        "GPipe": (gpipe(p, 4), IMAGES),
        "1F1B": (one_f_one_b(p, 8), IMAGES),
        "stages with different orders": (_crossed(p, 3), IMAGES),
        "one after the other": (warmed(6, [0] * p), IMAGES),
        "naive": (gpipe(p, 1), IMAGES),
    }


def _odd_runs(p: int) -> Runs:
    """Return schedules where mistakes lead to errors, which would hide what is wrong in others."""
    return {
        "unequal microbatches, the last one first on the last stage": (_turned(p, 5), IMAGES),
        "1F1B with large messages": (one_f_one_b(p, 5), LARGE),
    }


def _crossed(p: int, m: int) -> Schedule:
    """Legal, though the stages have their backwards in different orders."""
    schedule = gpipe(p, m)
    schedule[-1] = schedule[-1][:m] + [("B", k) for k in range(m)]
    return schedule


def _turned(p: int, m: int) -> Schedule:
    """Legal, though the last stage has its forwards the other way round."""
    schedule = gpipe(p, m)
    schedule[-1] = [("F", k) for k in reversed(range(m))] + schedule[-1][m:]
    return schedule


@task("10.6", "an executor of schedules", points=4)
def execute(ranks: Ranks, report: Report) -> None:
    """Any legal schedule: its order, messages, memory; the twin's gradients."""
    usual = {p: _usual_runs(p) for p in (1, 2, 3, 4)}
    odd = {WORLD: _odd_runs(WORLD)}
    cases = [
        {
            "partition": partition,
            "each": to_each(seed=report.seeds(WORLD)),
            "schedules": {p: list(runs.values()) for p, runs in of_size.items()},
        }
        for partition, of_size in [*((one, usual) for one in PARTITIONS), (None, odd)]
    ]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        of_size = odd if answer.case is cases[-1] else usual
        return _runs(answer, of_size[len(answer.members)])

    judge_groups(ranks, report, probe_run, cases, judge)
    explained(report)


def _runs(answer: GroupAnswer, runs: Runs) -> Iterator[Step]:
    """Yield what a stage has to do in one run after the other."""
    for (name, (schedule, n)), result in zip(runs.items(), answer.value, strict=True):
        yield from _run(answer, f"{name}, {on(answer.members)}", schedule, n, result)


def _run(
    answer: GroupAnswer, where: str, schedule: Schedule, n: int, result: dict[str, Any]
) -> Iterator[Step]:
    """Yield what a stage has to do with n samples: messages, order, gradients, memory, losses."""
    members, place = answer.members, answer.place
    actions = schedule[place]
    m = len(schedule[0]) // 2
    seeds = _seeds_of(answer)
    traffic = _traffic(actions, members, place)
    yield communication(
        result["calls"],
        only("send", "recv"),
        inside(members),
        *_as_wanted([message[:3] for message in traffic]),
        _bytes(traffic, {len(chunk) for chunk in torch.arange(n).chunk(m)}),
        _sends_do_not_block,
        waited,
    )
    text = (
        f"{where}: this stage waits for the request of isend before it goes on with its list, and "
        "computes nothing meanwhile. Put the request into the outbox, and wait at the end"
    )
    yield facts({text: result["early"]})
    yield facts(_out_of_order(where, actions, result["asked"]))
    yield value(
        result["gradient"],
        twin(seeds, n=n)[0][place],
        _wrong_gradients(seeds, place, m, n),
        what=f"{where}: gradients of stage {place}",
        tolerance=EXACT,
    )
    enough = held([actions])[0]
    text = (
        f"{where}: activations of {result['most']} microbatches were held at once, {enough} are "
        "enough: forget those of a microbatch after its backward (held.pop(k))"
    )
    yield facts({text: result["most"] > enough + 1})
    losses = losses_of(seeds, m, n) if place == len(members) - 1 else []
    yield value(
        result["losses"],
        losses,
        _wrong_lists_of_losses(losses, answer, schedule),
        what=f"{where}: losses",
        form="the losses on the last stage, [] on the others",
    )
    yield facts(_marked([list(action) for action in actions], result))


def _as_wanted(traffic: list[tuple[str, int, int]]) -> list[Rule]:
    """Return the rules that these messages are made, as many of each kind, and with these tags."""

    def peers(calls: Calls) -> str | None:
        made = [(call["op"], call["peer"]) for call in calls]
        expected = [(op, peer) for op, peer, _ in traffic]
        for pair in sorted(set(made) | set(expected)):
            if made.count(pair) != expected.count(pair):
                return (
                    f"expected {expected.count(pair)} messages of the kind {in_words([pair])}, it "
                    f"made {made.count(pair)}"
                )
        return None

    def tags(calls: Calls) -> str | None:
        made = sorted((call["op"], call["peer"], call["tag"]) for call in calls)
        if made == sorted(traffic):
            return None
        op, peer, tag = next((message for message in made if message not in traffic), made[0])
        return (
            f"a {op} with tag {tag} {'to' if op == 'send' else 'from'} rank {peer}: the tag of an "
            "activation is forward_tag(k), that of a gradient backward_tag(k). Without tags the "
            "gradient of one microbatch meets the activations of another"
        )

    return [peers, tags]


def _sends_do_not_block(calls: Calls) -> str | None:
    """Say of a stage that sends by `send` what comes of it."""
    problem = blocking(False)([call for call in calls if call["op"] == "send"])
    if problem is None:
        return None
    return f"{problem}: a stage that waits until its message is received deadlocks in 1F1B"


def _out_of_order(where: str, actions: Sequence[tuple], asked: list[list]) -> dict[str, bool]:
    """Return what is wrong with what a worker was asked for, where it should be these actions."""
    early = any(kind.startswith("done") for kind, _ in asked)
    only_forwards = all(kind == "F" for kind, _ in asked)
    return {
        f"{where}: worker.done(k) was called before the backward of the microbatch": early,
        f"{where}: worker.done was never called: call worker.done(k) after each "
        "backward": only_forwards,
        f"{where}: worked in the order {_in_words(asked)}; this stage's list is "
        f"{_in_words(actions)}. (A backward counts when worker.done(k) is called: call it right "
        "after each backward)": asked != [list(action) for action in actions],
    }


def _wrong_lists_of_losses(
    losses: list[float], answer: GroupAnswer, schedule: Schedule
) -> list[Mistake]:
    m = len(schedule[0]) // 2
    place = answer.place
    order = [k for kind, k in schedule[place] if kind == "F"]
    by_mistake = {
        "the losses are undone: worker.loss divides by the number of microbatches, and so they "
        "add up": [m * loss for loss in losses],
        "this is their sum: a list with one for each microbatch": sum(losses),
        "only the last stage has losses; the others return []": [0.0] * m,
        "the losses are in the order of the work; return them in the order of k": [
            losses[k] for k in order
        ]
        if losses
        else [],
        "numbers are asked for: loss.item()": lambda result: any(
            isinstance(loss, str | list) for loss in result
        ),
        f"expected {len(losses)} losses on stage {place} of {len(answer.members)}": lambda result: (
            isinstance(result, list) and len(result) != len(losses)
        ),
    }
    return table(by_mistake)


# -- 10.7: weight stashing --------------------------------------------------------------------


@dataclass
class StashLog:
    """What was seen of the stash of one stage.

    Attributes:
        most: how many microbatches had weights in it at once.
        apart: whether these were copies, and not the stage's own tensors.
        missing: whether a forward has stored none.
        alive: of how many microbatches there were copies in memory at once.
    """

    most: int = 0
    apart: bool = True
    missing: bool = False
    alive: int = 0
    _copies: list[list[weakref.ref]] = field(default_factory=list)

    def look(self, stage: Piece, stash: dict, action: str, k: int) -> None:
        """Note how a stage's stash is after an action for microbatch k."""
        self.most = max(self.most, len(stash))
        if action == "B":
            return
        weights = stash.get(k, {})
        if not isinstance(weights, dict):
            kind = type(weights).__name__
            raise TypeError(f"self.stash[{k}] is a {kind}, expected a dict {{name: tensor}}")
        if k in stash:
            self._look_at_copies(stage, weights)
        else:
            self.missing = True

    def _look_at_copies(self, stage: Piece, weights: dict[str, Tensor]) -> None:
        parameters = dict(stage.named_parameters())
        pairs = [(parameters[name], w) for name, w in weights.items() if name in parameters]
        self.apart &= bool(pairs) and all(q.data_ptr() != w.data_ptr() for q, w in pairs)
        self._copies.append([weakref.ref(w) for _, w in pairs])
        alive = sum(any(ref() is not None for ref in refs) for refs in self._copies)
        self.alive = max(self.alive, alive)


def probe_stash(user_ns: dict, *, rank: int, seed: int, p: int, n: int, reverse: bool) -> dict:
    """`Stashed` on all stages of a pipeline in this process."""
    kind = answer_named(user_ns, "Stashed")
    stages: list[Piece] = []
    logs = [StashLog() for _ in range(p)]

    def made(piece: Piece, rate: float) -> Any:
        stages.append(piece)
        return kind(piece, rate)

    def look(s: int, action: str, k: int, worker: Any) -> None:
        logs[s].look(stages[s], worker.stash, action, k)

    workers, calls = recorded(played, made, seed, p, n, look, reverse=reverse)
    of_stages = [
        {
            "weights": weights_of(piece),
            "used": [told(worker.used.get(number_of(k))) for k in range(n)],
            "version": told(worker.version),
            "left": len(worker.stash),
            "most": log.most,
            "copies": log.apart,
            "missing": log.missing,
            "alive": log.alive,
        }
        for piece, worker, log in zip(stages, workers, logs, strict=True)
    ]
    return {"stages": of_stages, "calls": calls}


#: What wrong ways give other weights: what to say, and the mode of :class:`Reference`.
WRONG_STASHES = {
    "the weights were never changed: done(k) moves the stage's own parameters, in place": "still",
    "backward worked with other weights than forward did: a copy has to stay as it was (clone), "
    "and forward has to run on it, functional_call(self.stage, self.stash[k], (x,))": "newest",
    "each update starts from the old copy, and what other microbatches did meanwhile is lost: "
    "move the newest weights along the gradient of the copy": "from old",
    "two microbatches share a copy, and their gradients add up in it: make a copy for each "
    "microbatch": "shared",
    "gradients of earlier microbatches are still in it: take that of this copy only": "momentum",
    "the weights go up the slope: w ← w − rate · g": "up",
    "the rate is missing: w ← w − rate · g": "no rate",
}


@task("10.7", "weight stashing", points=4)
def stashing(ranks: Ranks, report: Report) -> None:
    """PipeDream: its weights, its versions, its memory."""
    for p, n, reverse in ((4, 7, False), (1, 3, False), (3, 5, False), (2, 1, False), (2, 4, True)):
        case = {"seed": report.seed, "p": p, "n": n, "reverse": reverse}
        answers = report.answers(ranks, probe_stash, **case)
        if not answers or not _stashes_are_right(report, case, answers):
            break
    explained(report)


def _stashes_are_right(report: Report, case: dict[str, Any], answers: list[Reply]) -> bool:
    """Judge all ranks' stashes; return whether they are right.

    Where one rank communicates, the others do, too: only one is told.
    """
    right = True
    for answer in answers:
        if not report.follow(answer.rank, [communication(answer.value["calls"], only())]):
            return False
        right &= report.follow(answer.rank, _stashes(case, answer.value))
    return right


def _stashes(case: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    """Yield what each stage has to have at the end, and held on the way."""
    seed, p, n, reverse = (case[name] for name in ("seed", "p", "n", "reverse"))
    order = ", the last one's backward first" if reverse else ""
    for s, stage in zip(range(p), result["stages"], strict=True):
        where = f"stage {s} of {p} after {n} microbatches{order}"
        used = [0 if reverse else max(0, k - (p - 1 - s)) for k in range(n)]
        mistakes = (
            Mistake(weights_by(mode, seed, p, n, reverse)[s], text)
            for text, mode in WRONG_STASHES.items()
        )
        right = weights_by("stash", seed, p, n, reverse)[s]
        text = f"weights of {where}"
        yield value(stage["weights"], right, mistakes, what=text, tolerance=1e-12)
        yield value(stage["used"], used, _wrong_versions(p, n), what=f"self.used of {where}")
        yield value(stage["version"], n, what=f"self.version of {where}")
        yield facts(_wasted(where, stage, n if reverse else min(n, p - s)))


def _wrong_versions(p: int, n: int) -> list[Mistake]:
    by_mistake = {
        "there is no version for a microbatch: self.used[k] = self.version in forward": [None] * n,
        "all have version 0: done counts self.version up": [0] * n,
        "this is the number of the microbatch, not the version of the weights": [
            number_of(k) for k in range(n)
        ],
        "this is the version at the backward; note it in forward": [k + (p == 1) for k in range(n)],
        "this is the version after the update: note it in forward": list(range(1, n + 1)),
    }
    return table(by_mistake)


def _wasted(where: str, stash: dict[str, Any], enough: int) -> dict[str, bool]:
    """Return what is wrong with what a stage has kept, where so many versions are enough."""
    wrong = {
        "the stash holds the stage's own tensors, which are updated in place: keep copies, "
        "detach().clone()": not stash["copies"],
        f"copies of {stash['left']} microbatches are still in the stash: done(k) takes its own "
        "out, or memory grows for ever": stash["left"],
        f"{stash['most']} versions kept at once, {enough} are enough": stash["most"] > enough,
        "forward(k, x) has put nothing into self.stash[k]": stash["missing"],
        f"copies of {stash['alive']} microbatches were in memory at once, {enough} are enough. "
        "Something besides self.stash keeps them: a list or dict that is never "
        "emptied?": stash["alive"] > enough + 1,
    }
    return {f"{where}: {text}": is_so for text, is_so in wrong.items()}
