"""Checks of lab 10: stages, schedules as data, an executor, weight stashing.

Schedules are judged as data, by a planner of our own. What communicates is tried in pipelines of
1 to 4 stages in double precision, and compared with the model that was not split. The order of
work is seen in what the stages are called for, never in times.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.calls import (
    Calls,
    Rule,
    blocking,
    in_words,
    inside,
    messages,
    only,
    waited,
)
from utils.checks.deadline import ends_within
from utils.checks.functions import Case, judge_calls
from utils.checks.groups import WORLD, Group, in_group, keywords, on, tried
from utils.checks.mistakes import Mistake, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, kind_of, number, reading_answer, recorded, told
from utils.checks.task import Report, task, to_each
from utils.cluster.contracts import Ranks
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
    faults,
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
    malformed,
    moved,
    not_legal,
    shuffled,
    wrong_bubbles,
    wrong_held,
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
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, n: int, single: bool
) -> dict:
    """One minibatch of n samples through the stages. Each has layers of its own seed."""
    place, p = dist.get_rank(group), dist.get_world_size(group)
    piece, (x, labels) = Piece(seed, place, p), drawn(seed, n)
    if single:
        piece, x = piece.float(), x.float()
    if place:  # only the first stage may use what is in x
        x = torch.full_like(x, float("nan"))
    function, marks = reading_answer(user_ns, "train_naively"), answer_named(user_ns, "marks")
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


def _wrong_gradients(
    seeds: tuple[int, ...], place: int, m: int = 1, n: int = IMAGES
) -> Iterator[Mistake]:
    """What mistakes lead to, on one of the stages that have these seeds."""
    p = len(seeds)
    right, summed = (twin(seeds, way, n)[0][place] for way in ("mean", "sum"))
    yield Mistake([0.0] * len(right), "this stage has no gradient: backward did not come to it, or "
                  "the gradients were set to zero. Does the stage before run backward from the "
                  "gradient that it receives?")  # fmt: skip
    yield Mistake(summed, "this is the gradient of a sum over the samples; the loss is their mean")
    for factor, said in (
        (m, f"{m} times too large: worker.loss divides by the number of microbatches already, so "
         "that the losses add up. Is something else than worker.loss used, or something scaled?"),
        (1 / m, f"divided by {m} microbatches once too often: worker.loss does it"),
        (1 / p, f"divided by {p} stages: they share the layers, not the samples"),
        (-1, "the sign is wrong"),
        (2, "everything was counted twice"),
    ):  # fmt: skip
        if factor != 1:
            yield Mistake([factor * g for g in right], said)
    if place < p - 1:
        said = (
            "another gradient. Is each microbatch received into a tensor of its own? Backward of "
            "this stage has to start from the gradient that it received, that of the last stage "
            "from worker.loss, and each stage has to send the gradient of its input, x.grad"
        )
        yield Mistake(lambda v: isinstance(v, list) and len(v) == len(right), said)


def _seeds_of(case: dict, members: Sequence[int]) -> tuple[int, ...]:
    """The seeds that these ranks were told."""
    return tuple(case["each"][rank]["seed"] for rank in members)


def _sizes(
    members: Sequence[int], place: int, n: int, of_one: int = BYTES
) -> list[tuple[str, int, int]]:
    """Messages of one minibatch: operation, rank, bytes. ``of_one``: bytes of a number."""
    p, wanted = len(members), []
    width = [FEATURES[s * 4 // p] for s in range(p)]
    if place:
        wanted.append(("recv", members[place - 1], n * width[place] * of_one))
    if place < p - 1:
        there, nbytes = members[place + 1], n * width[place + 1] * of_one
        wanted += [("send", there, nbytes), ("recv", there, nbytes)]
    if place:
        wanted.append(("send", members[place - 1], n * width[place] * of_one))
    return wanted


def _bytes(wanted: list[tuple[str, int, int]]) -> Rule:
    def rule(calls: Calls) -> str | None:
        for call in calls:
            sizes = {n for op, peer, n in wanted if (op, peer) == (call["op"], call["peer"])}
            if sizes and call["nbytes"] not in sizes:
                return (
                    f"a {call['op']} of {call['nbytes']} bytes, expected {min(sizes)}: the "
                    "activations of the samples, [samples, features], or their gradient"
                )
        return None

    return rule


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
    said = next((s for part, s in ERRORS.items() if any(part in text for text in errors)), None)
    if said:
        report.problem(said)


@task("10.1", "one minibatch through the stages", points=2)
def train_naively(ranks: Ranks, report: Report) -> None:
    """The twin's gradients, with four messages at most."""
    each = to_each(seed=report.seeds(WORLD))
    cases = [{"partition": partition, "each": each, "n": n, "single": single}
             for partition, n, single in zip(PARTITIONS, (24, 17, 9), (False, False, True),
                                             strict=True)]  # fmt: skip
    for case, members, values in tried(ranks, report, probe_naive, cases):
        p, where, seeds = len(members), on(members), _seeds_of(case, members)
        n, exact = case["n"], 1e-4 if case["single"] else EXACT
        gradients, loss = twin(seeds, n=n)
        for place, rank in enumerate(members):
            value = values[place]
            wanted = _sizes(members, place, n, BYTES // 2 if case["single"] else BYTES)
            ok = report.communication(
                rank, value["calls"], only("send", "recv"), inside(members),
                messages(*[(op, peer) for op, peer, _ in wanted], in_order=False),
                _bytes(wanted), waited,
            )  # fmt: skip
            said = f"{where}: the stage was called for {_order(value['events'])}, expected one "
            ok = ok and report.facts(
                rank, {said + "forward, one backward": value["events"] != ["F", "B"]}
            )
            wrong = _wrong_gradients(seeds, place, n=n)
            how = {"what": f"gradients of stage {place} {where}", "tolerance": exact}
            ok = ok and report.judge(rank, value["gradient"], gradients[place], wrong, **how)
            if not ok:
                continue
            if place == p - 1:
                losses = table({
                    "this is the sum over the samples; cross_entropy has the mean":
                        loss * n,
                    f"divided by {p} stages": loss / p if p > 1 else None,
                })  # fmt: skip
                losses.append(Mistake(lambda v: isinstance(v, str | list),
                                      "return a number: loss.item()"))  # fmt: skip
                report.judge(rank, value["loss"], loss, losses, what=f"the loss {where}",
                             form="the loss on the last stage")  # fmt: skip
            else:
                said = f"stage {place} {where} returned {value['loss']!r}; only the last stage has "
                said += "a loss, the others return None"
                report.facts(rank, {said: value["loss"] is not None})
            if not report.of(rank):
                report.facts(rank, _marked([["F", 0], ["B", 0]], value))
    explained(report)


def _marked(order: list[list], value: dict) -> dict[str, bool]:
    """That marks are around all that is computed, in this order, and around no message."""
    marks = value["marks"]
    got = [mark[:2] for mark in marks]
    spans = [mark[2:] for mark in marks]
    if got == order and len(value["times"]) != len(order):
        raise ValueError(f"{len(value['times'])} events of a stage, and {len(order)} actions")
    pairs = list(zip(spans, value["times"], strict=got == order))
    return {
        f"the marks are {short(got, 80)}, expected {short(order, 80)}: put with mark(kind, k): "
        "around what is computed": got != order,
        "a stage computes outside of its mark: put the whole forward into with mark(\"F\", k): and "
        "the whole backward into with mark(\"B\", k):": any(
            not start <= time <= end for (start, end), time in pairs),
        "a message is inside of a mark: put only what is computed into it, so that the picture "
        "shows no waiting as work": any(
            start < call["start"] < end for start, end in spans for call in value["calls"]),
    }  # fmt: skip


def _order(events: Sequence[str]) -> str:
    return " ".join(events) or "nothing"


# -- 10.2 to 10.5: functions of data ----------------------------------------------------------


SIZES = ((4, 4), (1, 3), (4, 1), (2, 5), (3, 2), (7, 12))


@task("10.2", "the schedule of GPipe", points=1)
def gpipe_schedule(ranks: Ranks, report: Report) -> None:
    """All forwards, then all backwards in reverse."""
    cases = []
    for p, m in SIZES:
        forwards, backwards = ([[kind, k] for k in range(m)] for kind in "FB")
        alternating = [pair for two in zip(forwards, backwards, strict=True) for pair in two]
        wrong = malformed(p, m) + table({
            "the backwards are in the order of the forwards; GPipe takes the last microbatch "
            "first": [forwards + backwards] * p,
            "each microbatch is done backward before the next begins: that fills no pipeline. All "
            "forwards come first": [alternating] * p,
            "this is 1F1B: in GPipe all forwards come first": as_lists(one_f_one_b(p, m)),
            "the forwards have to be in order, microbatch 0 first":
                [forwards[::-1] + backwards] * p,
            "the forwards are reversed; the backwards should be":
                [forwards[::-1] + backwards[::-1]] * p,
        })  # fmt: skip
        wrong.append(Mistake(not_legal, "this schedule is not legal: stages wait for each other"))
        cases.append(Case("gpipe", [p, m], as_lists(gpipe(p, m)), wrong, "a list for each stage"))
    judge_calls(ranks, report, cases)


#: What is wrong with a plan that takes longer than so many seconds.
PLANNING, NEVER_PLANNED = (
    10.0,
    (
        "A schedule that is not legal is never planned completely, so a loop until all actions are "
        "planned does not end. Leave the loop when a round has planned nothing, and return None."
    ),
)


def probe_plans(user_ns: dict, *, rank: int, cases: list) -> list:
    """`plan` of schedules, and whether they are as they were."""
    found = []
    for schedule, times in cases:
        given = [[(kind, k) for kind, k in actions] for actions in schedule]
        before = copy.deepcopy(given)
        with ends_within(PLANNING, NEVER_PLANNED):
            spans = answer_named(user_ns, "plan")(given, *times)
        kind = kind_of(spans) if isinstance(spans, set | dict | tuple) else None
        found.append([kind or told(spans), given == before])
    return found


ILLEGAL = (
    [[("B", 0), ("F", 0)]],
    [[("F", 0), ("B", 0), ("F", 1), ("B", 1)], [("F", 1), ("F", 0), ("B", 1), ("B", 0)]],
    [[("F", 0), ("F", 1), ("B", 1), ("B", 0)], [("F", 0), ("B", 0), ("B", 1), ("F", 1)]],
    # One stage has more to do than the other.
    [[("F", 0), ("F", 1), ("B", 1), ("B", 0)], [("F", 0), ("B", 0)]],
    [[("F", 0), ("B", 0)], [("F", 0), ("F", 1), ("B", 1), ("B", 0)]],
)


#: An action that is ready, and not the next one of its list: B0 on stage 0, F0 on the last one.
IN_ORDER = (
    "F0 F1 B1 B0\nF0 B0 F1 B1\nF0 B0 F1 B1",
    "F0 F2 B2 F1 B1 B0\nF2 B2 F1 F0 B1 B0",
)


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
    _judge_plans(ranks, report, [[as_lists(s), times] for s, times in legal])
    if report.found:
        return
    _judge_plans(ranks, report, [[as_lists(s), ()] for s in ILLEGAL])
    if any(kind == "error" and NEVER_PLANNED not in text for text, kind, _ in report.found):
        report.problem("(a schedule that is not legal is not an error here: return None)")


def _judge_plans(ranks: Ranks, report: Report, asked: list[list]) -> None:
    """Plans of these schedules with these times."""
    for answer in report.answers(ranks, probe_plans, cases=asked):
        for (schedule, times), (got, same) in zip(asked, answer.value, strict=True):
            text = "; ".join(" ".join(f"{a}{k}" for a, k in actions) for actions in schedule)
            what = f"plan of [{text}]" + (f" with times {times}" if times else "")
            spans, done = planned(schedule, *(times or (1, 2)))
            right = in_order(spans) if sum(done) == sum(map(len, schedule)) else None
            ok = report.judge(
                answer.rank, in_order(got), right, wrong_plans(schedule, times, right), what=what,
            ) and report.facts(answer.rank, {
                f"{what}: the schedule itself was changed; it is run later: copy the lists before "
                "you take something out": not same})  # fmt: skip
            if not ok:
                break


#: More held than forwards one after the other.
WAVES = "F0 F1 B0 F2 F3 F4 B1 B2 B3 B4\nF0 B0 F1 F2 F3 B1 B2 F4 B3 B4"


def probe_counts(user_ns: dict, *, rank: int, calls: list) -> list:
    """What `bubble` and `most_held` return, for spans and actions that are tuples."""
    found = []
    for name, given in calls:
        spans = [tuple(one) for one in given]
        schedule = [[tuple(action) for action in one] for one in given if name == "most_held"]
        result = reading_answer(user_ns, name)(schedule or spans)
        found.append(told(result) if isinstance(result, list) else told(number(result)))
    return found


@task("10.4", "the bubble and the activations held", points=2)
def count(ranks: Ranks, report: Report) -> None:
    """Shares and counts of schedules, planned and measured."""
    draw, cases = random.Random(report.seed), []
    named = {"1F1B": one_f_one_b(4, 6), "GPipe": gpipe(2, 3), "one": gpipe(1, 2),
             "shuffled": shuffled(report.seed), "by waves": parse(WAVES),
             "long": gpipe(5, 16)}  # fmt: skip
    plans = [planned(schedule)[0] for schedule in named.values()]
    noisy = [[s, kind, k, a + draw.random() / 9, e + draw.random() / 9 + 0.2]
             for s, kind, k, a, e in planned(one_f_one_b(3, 4), 4, 8)[0]]  # fmt: skip
    backwards = sorted(plans[0], key=lambda span: -span[4])  # the first is the last to end
    # Stage 0 has slept before it began, so another stage is the first.
    late = [[s, kind, k, a + 50 * (s == 0), e + 50 * (s == 0)] for s, kind, k, a, e in plans[0]]
    others = [[s, {"F": "F", "B": "I"}[kind], k, a, e] for s, kind, k, a, e in plans[0]]
    hours = [[s, kind, k, 1e5 + a / 1e3, 1e5 + e / 1e3] for s, kind, k, a, e in plans[0]]
    for spans in [*plans, backwards, moved(plans[0], 1000), noisy, late, others, hours]:
        cases.append(Case("bubble", [spans], idle(spans), wrong_bubbles(spans), "a number"))
    cases += [
        Case("most_held", [as_lists(schedule)], held(schedule), wrong_held(schedule),
             "a list with a number for each stage")
        for schedule in named.values()
    ]  # fmt: skip
    calls = [[case.name, *case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_counts, calls=calls):
        for case, got in zip(cases, answer.value, strict=True):
            what = f"{case.name}({short(case.arguments[0], 60)})"
            about = {"what": what, "form": case.form}
            if not report.judge(answer.rank, got, case.right, case.mistakes, **about):
                break


@task("10.5", "the schedule of 1F1B", points=2)
def one_f_one_b_schedule(ranks: Ranks, report: Report) -> None:
    """Warm-up, one forward and one backward in turn, drain."""
    cases = []
    for p, m in ((4, 8), (4, 2), (3, 3), (1, 3), (2, 5), (7, 12)):
        right = one_f_one_b(p, m)
        most, best = held(right), idle(planned(right)[0])
        wrong = malformed(p, m) + table({
            "this is GPipe: the first backward has to come as early as it can":
                as_lists(gpipe(p, m)),
            "one forward too many in the warm-up: with the first of the pairs, stage s has p − s "
            "forwards in front, so the warm-up is p − 1 − s":
                as_lists(warmed(m, [p - s for s in range(p)])),
            "one forward too few in the warm-up, p − 1 − s are needed: the pipeline does not fill":
                as_lists(warmed(m, [p - 2 - s for s in range(p)])),
            "there is no warm-up: the last stage has none, stage s has p − 1 − s forwards":
                as_lists(warmed(m, [0] * p)),
            "all stages warm up alike: the further behind a stage is, the sooner its first "
            "gradient comes. Stage s needs p − 1 − s forwards": as_lists(warmed(m, [p - 1] * p)),
            "the stages are the wrong way round: the first one warms up longest, p − 1 − s":
                as_lists(warmed(m, range(p))),
        })  # fmt: skip
        wrong += [
            Mistake(lambda v: faults(v) is not None,
                    "this schedule is not legal: stages wait for each other"),
            Mistake(lambda v: any([k for kind, k in one if kind == "B"] != sorted(
                k for kind, k in one if kind == "B") for one in v),
                "the backwards go in the order 0, 1, 2, …; the oldest microbatch first"),
            Mistake(lambda v, most=most: any(a > b for a, b in zip(held(v), most, strict=True)),
                    "a stage holds more than min(m, p − s) microbatches: too many forwards before "
                    "a backward"),
            Mistake(lambda v, best=best: idle(planned(v)[0]) > best + 1e-9,
                    "the bubble is larger than that of 1F1B: too few forwards in front"),
        ]  # fmt: skip
        cases.append(Case("one_f_one_b", [p, m], as_lists(right), wrong, "a list for each stage"))
    judge_calls(ranks, report, cases)


# -- 10.6: the executor -----------------------------------------------------------------------


@in_group
def probe_run(
    user_ns: dict, *, rank: int, group: Group, partition, seed: int, schedules: list
) -> list:
    """Schedules for as many stages as this group has."""
    from torch_mpi.record import log

    place, p = dist.get_rank(group), dist.get_world_size(group)
    found = []
    for schedule, n in schedules[str(p)]:
        schedule = [[(kind, k) for kind, k in actions] for actions in schedule]
        m = len(schedule[0]) // 2
        worker, (x, labels) = Worker(Piece(seed, place, p), n), drawn(seed, n)
        inputs, targets = list(x.chunk(m)), list(labels.chunk(m))
        if place:
            inputs = [torch.full_like(one, float("nan")) for one in inputs]
        function, marks = answer_named(user_ns, "run_schedule"), answer_named(user_ns, "marks")
        marks.clear()
        mark = log.mark()
        losses, calls = recorded(
            function, worker, schedule, inputs, targets, **keywords(partition, group)
        )
        tensors = isinstance(losses, list) and any(isinstance(one, Tensor) for one in losses)
        found.append({
            "losses": ["<Tensor>"] if tensors else told(losses),
            "calls": calls,
            "gradient": gradient_of(worker.piece),
            "marks": told(marks),
            "times": worker.piece.log.times,
            "early": any(_is_early(call, worker.piece.log.times) for call in log.since(mark)),
            "asked": worker.asked,
            "most": worker.piece.log.most,
        })  # fmt: skip
    return found


def _is_early(call: Any, times: list[float]) -> bool:
    """Whether the stage was blocked on its send before it computed the next time."""
    following = next((time for time in times if time > call.start), 0)
    return call.op == "send" and any(begin < following for begin, _ in call.waits)


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


def _traffic(schedule: Schedule, members: Sequence[int], place: int) -> list[tuple[str, int, int]]:
    """Messages of a stage in any order: operation, rank, microbatch and direction as a tag."""
    p, wanted = len(members), []
    for kind, k in schedule[place]:
        tag = 2 * k + (kind == "B")
        before, behind = ("recv", "send") if kind == "F" else ("send", "recv")
        if place:
            wanted.append((before, members[place - 1], tag))
        if place < p - 1:
            wanted.append((behind, members[place + 1], tag))
    return wanted


def _as_wanted(wanted: list[tuple[str, int, int]]) -> list[Rule]:
    def who(calls: Calls) -> str | None:
        got = [(call["op"], call["peer"]) for call in calls]
        expected = [(op, peer) for op, peer, _ in wanted]
        for pair in sorted(set(got) | set(expected)):
            if got.count(pair) != expected.count(pair):
                return (
                    f"expected {expected.count(pair)} messages of the kind {in_words([pair])}, it "
                    f"made {got.count(pair)}"
                )
        return None

    def tags(calls: Calls) -> str | None:
        got = sorted((call["op"], call["peer"], call["tag"]) for call in calls)
        odd = next((one for one in got if one not in wanted), None)
        if got == sorted(wanted):
            return None
        op, peer, tag = odd or got[0]
        return (
            f"a {op} with tag {tag} {'to' if op == 'send' else 'from'} rank {peer}: the tag of an "
            "activation is forward_tag(k), that of a gradient backward_tag(k). Without tags the "
            "gradient of one microbatch meets the activations of another"
        )

    return [who, tags]


def _sends_do_not_block(calls: Calls) -> str | None:
    said = blocking(False)([call for call in calls if call["op"] == "send"])
    return said and f"{said}: a stage that waits until its message is received deadlocks in 1F1B"


@task("10.6", "an executor of schedules", points=4)
def execute(ranks: Ranks, report: Report) -> None:
    """Any legal schedule: its order, messages, memory; the twin's gradients."""
    plain = {
        p: [(gpipe(p, 4), IMAGES), (one_f_one_b(p, 8), IMAGES), (_crossed(p, 3), IMAGES),
            (warmed(6, [0] * p), IMAGES), (gpipe(p, 1), IMAGES)]
        for p in (1, 2, 3, 4)
    }  # fmt: skip
    odd = {4: [(_turned(4, 5), IMAGES), (one_f_one_b(4, 5), LARGE)]}
    # What goes wrong in the odd ones is an error, which would hide what is wrong in the others.
    for schedules, partitions, names in (
        (plain, PARTITIONS, ("GPipe", "1F1B", "stages with different orders",
                             "one after the other", "naive")),
        (odd, [None], ("unequal microbatches, the last one first on the last stage",
                       "1F1B with large messages")),
    ):  # fmt: skip
        cases = [{"partition": one, "each": to_each(seed=report.seeds(WORLD)),
                  "schedules": schedules} for one in partitions]  # fmt: skip
        for case, members, values in tried(ranks, report, probe_run, cases):
            seeds = _seeds_of(case, members)
            for place, rank in enumerate(members):
                all_asked = zip(names, schedules[len(members)], values[place], strict=True)
                for name, asked, value in all_asked:
                    where = f"{name}, {on(members)}"
                    told_all = members, seeds, *asked, value, where
                    if not _judge_run(report, rank, place, *told_all):
                        break
        if report.found:
            break
    explained(report)


def _judge_run(report: Report, rank, place, members, seeds, schedule, n, value, where) -> bool:
    p, m, calls = len(members), len(schedule[0]) // 2, value["calls"]
    wanted = _traffic(schedule, members, place)
    order = [list(action) for action in schedule[place]]
    forwards = [action for action in value["asked"] if action[0] == "F"]
    got = " ".join(f"{kind}{k}" for kind, k in value["asked"])
    told_as = {
        f"{where}: worker.done(k) was called before the backward of the microbatch": any(
            kind.startswith("done") for kind, _ in value["asked"]),
        f"{where}: worker.done was never called: call worker.done(k) after each backward":
            len(forwards) == len(value["asked"]),
        f"{where}: worked in the order {got}; this stage's list is "
        + " ".join(f"{kind}{k}" for kind, k in order)
        + ". (A backward counts when worker.done(k) is called: call it right after each backward)":
            value["asked"] != order,
    }  # fmt: skip
    counts = {len(one) for one in torch.arange(n).chunk(m)}
    sizes = [_bytes([size for count in counts for size in _sizes(members, place, count)]),
             _sends_do_not_block, waited]  # fmt: skip
    ok = report.communication(rank, calls, only("send", "recv"), inside(members))
    ok = ok and report.communication(rank, calls, *_as_wanted(wanted), *sizes)
    early = f"{where}: this stage waits for the request of isend before it goes on with its list, "
    early += "and computes nothing meanwhile. Put the request into the outbox, and wait at the end"
    ok = ok and report.facts(rank, {early: value["early"]})
    ok = ok and report.facts(rank, told_as)
    right = twin(seeds, n=n)[0][place]
    wrong = _wrong_gradients(seeds, place, m, n)
    how = {"what": f"{where}: gradients of stage {place}", "tolerance": EXACT}
    ok = ok and report.judge(rank, value["gradient"], right, wrong, **how)
    most = held([schedule[place]])[0]
    memory = f"{where}: activations of {value['most']} microbatches were held at once, {most} are "
    memory += "enough: forget those of a microbatch after its backward (held.pop(k))"
    ok = ok and report.facts(rank, {memory: value["most"] > most + 1})
    losses = losses_of(seeds, m, n) if place == p - 1 else []
    order = [k for kind, k in schedule[place] if kind == "F"]
    wrong = table({
        "the losses are undone: worker.loss divides by the number of microbatches, and so they "
        "add up": [m * loss for loss in losses],
        "this is their sum: a list with one for each microbatch": sum(losses),
        "only the last stage has losses; the others return []": [0.0] * m,
        "the losses are in the order of the work; return them in the order of k":
            [losses[k] for k in order] if losses else [],
    })  # fmt: skip
    wrong.append(Mistake(lambda v: any(isinstance(x, str | list) for x in v),
                         "numbers are asked for: loss.item()"))  # fmt: skip
    wrong.append(Mistake(lambda v: isinstance(v, list) and len(v) != len(losses),
                         f"expected {len(losses)} losses on stage {place} of {p}"))  # fmt: skip
    ok = ok and report.judge(rank, value["losses"], losses, wrong, what=f"{where}: losses",
                             form="the losses on the last stage, [] on the others")  # fmt: skip
    actions = [list(action) for action in schedule[place]]
    return ok and report.facts(rank, _marked(actions, value))


# -- 10.7: weight stashing --------------------------------------------------------------------


def probe_stash(user_ns: dict, *, rank: int, seed: int, p: int, n: int, reverse: bool) -> dict:
    """`Stashed` on all stages of a pipeline in this process."""
    kind, stages = answer_named(user_ns, "Stashed"), []
    most, kept, missing = [0] * p, [True] * p, [False] * p
    copies: list[list] = [[] for _ in range(p)]
    alive = [0] * p

    def made(piece: Piece, rate: float) -> Any:
        stages.append(piece)
        return kind(piece, rate)

    def look(s: int, action: str, k: int, worker: Any) -> None:
        most[s] = max(most[s], len(worker.stash))
        if action == "F" and not isinstance(worker.stash.get(k, {}), dict):
            got = type(worker.stash[k]).__name__
            raise TypeError(f"self.stash[{k}] is a {got}, expected a dict {{name: tensor}}")
        if action == "F" and k not in worker.stash:
            missing[s] = True
        elif action == "F":
            now = dict(stages[s].named_parameters())
            pairs = [(now[n], w) for n, w in worker.stash[k].items() if n in now]
            kept[s] &= bool(pairs) and all(q.data_ptr() != w.data_ptr() for q, w in pairs)
            copies[s].append([weakref.ref(w) for _, w in pairs])
            alive[s] = max(alive[s], sum(any(ref() is not None for ref in of) for of in copies[s]))

    workers, calls = recorded(played, made, seed, p, n, look, reverse=reverse)
    return {
        "weights": [weights_of(piece) for piece in stages],
        "used": [[told(worker.used.get(number_of(k))) for k in range(n)] for worker in workers],
        "versions": [told(worker.version) for worker in workers],
        "most": most,
        "left": [len(worker.stash) for worker in workers],
        "copies": kept,
        "missing": missing,
        "alive": alive,
        "calls": calls,
    }


#: What wrong ways give other weights: said, and the mode of :class:`Reference`.
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
        asked = {"seed": report.seed, "p": p, "n": n, "reverse": reverse}
        order = ", the last one's backward first" if reverse else ""
        for answer in report.answers(ranks, probe_stash, **asked):
            value, rank = answer.value, answer.rank
            if not report.communication(rank, value["calls"], only()):
                break
            for s in range(p):
                where = f"stage {s} of {p} after {n} microbatches{order}"
                used = [0 if reverse else max(0, k - (p - 1 - s)) for k in range(n)]
                enough = n if reverse else min(n, p - s)
                wrong = table({
                    "there is no version for a microbatch: self.used[k] = self.version in forward":
                        [None] * n,
                    "all have version 0: done counts self.version up": [0] * n,
                    "this is the number of the microbatch, not the version of the weights":
                        [number_of(k) for k in range(n)],
                    "this is the version at the backward; note it in forward":
                        list(range(1, n + 1)) if p == 1 else [k for k in range(n)],
                })  # fmt: skip
                wrong.append(
                    Mistake(
                        [k + 1 for k in range(n)],
                        "this is the version after the update: note it in forward",
                    )
                )
                modes = (
                    Mistake(weights_by(mode, report.seed, p, n, reverse)[s], said)
                    for said, mode in WRONG_STASHES.items()
                )  # fmt: skip
                rules = {
                    f"{where}: the stash holds the stage's own tensors, which are updated in "
                    "place: keep copies, detach().clone()": not value["copies"][s],
                    f"{where}: copies of {value['left'][s]} microbatches are still in the stash: "
                    "done(k) takes its own out, or memory grows for ever": value["left"][s],
                    f"{where}: {value['most'][s]} versions kept at once, {enough} are "
                    "enough": value["most"][s] > enough,
                    f"{where}: forward(k, x) has put nothing into self.stash[k]":
                        value["missing"][s],
                    f"{where}: copies of {value['alive'][s]} microbatches were in memory at once, "
                    f"{enough} are enough. Something besides self.stash keeps them: a list or dict "
                    "that is never emptied?": value["alive"][s] > enough + 1,
                }  # fmt: skip
                weights = weights_by("stash", report.seed, p, n, reverse)[s]
                ok = (
                    report.judge(rank, value["weights"][s], weights, modes,
                                 what=f"weights of {where}", tolerance=1e-12)
                    and report.judge(rank, value["used"][s], used, wrong,
                                     what=f"self.used of {where}")
                    and report.expect(rank, f"self.version of {where}", value["versions"][s], n)
                    and report.facts(rank, rules)
                )  # fmt: skip
                if not ok:
                    break
        if report.found:
            break
    explained(report)
