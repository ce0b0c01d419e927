"""Checks of lab 08: elastic averaging, round robin and asynchronous, local SGD, DiLoCo.

Every algorithm is run with a gradient that the check knows, and replayed: in the order that the
records of the master tell, where the order is the workers' own business. What likely mistakes lead
to is replayed as well.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.calls import Calls, Rule, inside, made, only, waited
from utils.checks.groups import (
    PARTITIONS,
    WORLD,
    Group,
    GroupAnswer,
    Partition,
    in_group,
    judge_groups,
    keywords,
    on,
    tried,
)
from utils.checks.mistakes import Mistake, is_number, same, short, table
from utils.checks.model import use_model as use_model
from utils.checks.probe import answer_named, recorded, told
from utils.checks.steps import Step, communication, each_of, facts, value
from utils.checks.task import Report, task, to_each
from utils.cluster.questions import Ranks

from .replays import (
    DILOCO_MISTAKES,
    LOCAL_MISTAKES,
    MOMENTUM_MISTAKES,
    OUTER_MISTAKES,
    ROUND_ROBIN_MISTAKES,
    SERVE_MISTAKES,
    WORK_MISTAKES,
    Replay,
    Replayed,
    Toy,
    asynchronous_replayed,
    local_replayed,
    moved_center,
    moved_outer,
    moved_worker,
    precision,
    rates,
    round_robin_replayed,
    rounds,
    start,
)

# A master needs a worker: no groups of one rank.
WITH_A_MASTER = [None, *PARTITIONS[:-1]]
# Of messages by which the check itself tells a worker to go on.
SIGNAL = 808
#: When the master, and when a worker, has to note the weights.
EVENTS = ("update of the centre", "step of this worker")


# -- what several tasks ask -------------------------------------------------------------------


def _cases(report: Report, name: str, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases of an answer from columns of arguments of :func:`probe_run`.

    Each case has seeds of its own: of the first weights, and of each rank's valley, for it alone.
    """
    return [
        {"name": name, **row, "seed": report.seed + k, "each": to_each(valley=report.seeds(WORLD))}
        for k, row in enumerate(to_each(**columns))
    ]


@in_group
def probe_run(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    valley: int,
    seed: int,
    name: str,
    steps: int,
    tau: int = 0,
    held: bool = False,
    **last: float,
) -> dict | None:
    """Call an answer from equal weights; on place 0 of an asynchronous one, `serve` or a right one.

    Args:
        valley: the seed of this rank's gradient.
        held: whether the first worker is the last to go on.
        last: the last arguments of the answer, in this order.

    Returns:
        See :func:`_called`; nothing on a rank that is alone where there has to be a master.
    """
    size, place = dist.get_world_size(group), dist.get_rank(group)
    together = name in ("local_sgd", "diloco")
    if size == 1 and not together:
        return None
    mine = start(seed)
    toy = Toy(valley, len(mine), _looks())
    gradient = _held(toy, place, steps, group) if held and size > 2 else toy
    moves = rates(seed)[:1] if together else rates(seed)
    arguments = (mine, gradient, steps, *([tau] if tau else []), *moves, *last.values())
    if place == 0 and name.startswith("work"):
        exchanges = (size - 1) * rounds(steps, tau)
        if name == "work_with_momentum":
            return {"order": _served(mine, exchanges, moves, group)}
        name = "serve"
        arguments = (mine, exchanges, *moves)
    return _called(user_ns, name, arguments, toy, keywords(partition, group))


def _called(
    user_ns: dict, name: str, arguments: tuple, toy: Toy, named: dict[str, Any]
) -> dict[str, Any]:
    """Call an answer, with right rules for moving; return what it gave, noted and communicated."""
    function = answer_named(user_ns, name)
    mine = arguments[0]
    before = mine.clone()
    notes = []

    def note(weights: Any) -> None:
        notes.append(told(weights.detach().clone() if isinstance(weights, Tensor) else weights))

    right = {"move_worker": moved_worker, "move_center": moved_center}
    with mock.patch.dict(user_ns, right if name != "diloco" else {"outer_step": moved_outer}):
        if name == "diloco":  # nothing of a call may be left for the next
            function(*copy.deepcopy(arguments), note=lambda _: None, **named)
        result, calls = recorded(function, *arguments, note=note, **named)
    return {
        "result": told(result),
        "notes": notes,
        "at": toy.at,
        "seen": toy.seen,
        "changed": not torch.equal(mine, before),
        "calls": [call for call in calls if call["tag"] != SIGNAL],
    }


def _held(toy: Toy, place: int, steps: int, group: Group) -> Callable[[Tensor], Tensor]:
    """Let worker 1 compute its first gradient until worker 2 has computed its last."""
    signal = torch.zeros(1)

    def gradient(w: Tensor) -> Tensor:
        slope = toy(w)
        if place == 1 and len(toy.at) == 1:
            dist.recv(signal, group_src=2, group=group, tag=SIGNAL)
        if place == 2 and len(toy.at) == steps:
            dist.send(signal, group_dst=1, group=group, tag=SIGNAL)
        return slope

    return gradient


def _served(center: Tensor, exchanges: int, moves: tuple[float, float], group: Group) -> list[int]:
    """Do what a right `serve` does; return the workers in the order in which they came."""
    w = torch.empty_like(center)
    order = []
    for _ in range(exchanges):
        who = dist.recv(w, group=group)
        dist.send(center, dst=who, group=group)
        center = moved_center(center, w, *moves)
        order.append(who)
    return order


def _looks() -> Callable[[], list]:
    """Return a function that tells how many sends and receives this rank has made since now."""
    from torch_mpi.record import log

    mark = log.mark()

    def look() -> list:
        calls = [call for call in log.since(mark) if call.tag != SIGNAL]
        return [sum(call.op == op for call in calls) for op in ("send", "recv")]

    return look


def _follow_all(
    report: Report,
    case: dict[str, Any],
    members: list[int],
    results: list[Any],
    judge: Callable[[GroupAnswer], Iterator[Step]],
) -> bool:
    """Judge the answers of a group; return whether all are right."""
    answers = [GroupAnswer(case, members, place, results) for place in range(len(members))]
    return all([report.follow(answer.rank, judge(answer)) for answer in answers])


def _replay(
    replayed: Callable[..., list[Replayed]], answer: GroupAnswer, *arguments: Any, **named: float
) -> Replay:
    """Return the replay of an answer's case by a function of :mod:`.replays`."""
    valleys = [answer.case["each"][rank]["valley"] for rank in answer.members]
    return functools.partial(replayed, answer.case["seed"], valleys, *arguments, **named)


def _weights(
    answer: GroupAnswer, replay: Replay, texts: dict[str, str], event: str = ""
) -> Iterator[Step]:
    """Yield what weights a rank has to note and to return.

    Args:
        texts: what to say of each variant of the replay.
        event: when it has to note the weights.
    """
    result = answer.value
    expected = replay()[answer.place]
    first, notes = expected.first, expected.notes
    wrong = _wrong_notes(replay, answer.place, texts, event or EVENTS[min(answer.place, 1)])
    yield value(
        result["notes"],
        notes,
        wrong,
        what=f"the weights that it has noted, with {expected.rates}",
        form="the weights",
        tolerance=expected.exact,
    )
    ends = [
        Mistake(first, "these are the weights of the start: return those of the end"),
        Mistake(notes.__contains__, "these are earlier weights: return the last ones"),
    ]
    end = notes[-1] if notes else first
    form = "the weights after the last step"
    yield value(result["result"], end, ends, what="the result", form=form, tolerance=expected.exact)
    text = (
        "the tensor w that it was given has changed: the next run would not begin where this one "
        "did. Make new tensors: w = w - …, or work on w.clone()"
    )
    yield facts({text: result["changed"]})


def _wrong_notes(
    replay: Replay, place: int, texts: dict[str, str], event: str
) -> Iterator[Mistake]:
    right = replay()[place]
    count = len(right.notes)
    for variant, text in texts.items():
        wrong_notes = replay(variant=variant)[place].notes
        if wrong_notes != right.notes:  # what looks like the right thing is no mistake
            yield Mistake(wrong_notes, text)
    yield Mistake(
        lambda notes: len(notes) != count,
        f"expected {count} notes, one for each {event}: call note(…) there",
    )
    yield Mistake(
        lambda notes: same(notes, [right.first, *right.notes[:-1]]),
        f"note(…) comes before the weights have changed; call it after each {event}",
    )


def _sized(case: dict[str, Any]) -> Rule:
    """Return the rule that each message is the whole of the weights."""
    nbytes = start(case["seed"]).nbytes

    def rule(calls: Calls) -> str | None:
        odd = next((call["nbytes"] for call in calls if call["nbytes"] != nbytes), None)
        return odd and f"a message of {odd} bytes; expected the weights, {nbytes} bytes"

    return rule


# -- 8.1: the rules ---------------------------------------------------------------------------


def probe_moves(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Both functions: the step by hand, random weights, and random ones without a gradient."""
    worker, center = (answer_named(user_ns, name) for name in ("move_worker", "move_center"))
    results: dict = {}
    for case, arguments in _move_cases(seed).items():
        moved = []
        changed = set()
        for function, names in ((worker, ["w", "center", "gradient"]), (center, ["center", "w"])):
            copies = {name: arguments[name].clone() for name in names}
            moved.append(told(function(*copies.values(), arguments["eta"], arguments["rho"])))
            changed |= {name for name in names if not torch.equal(copies[name], arguments[name])}
        results[case] = {"moved": moved, "changed": sorted(changed)}
    return results


def _move_cases(seed: int) -> dict[str, dict[str, Any]]:
    """Return arguments of the rules, by what is told of them."""
    by_hand = {"w": 5.0, "center": 1.0, "gradient": 3.0}
    fresh: dict[str, Any] = {
        name: start(seed + 7 * k, like=seed) for k, name in enumerate(by_hand, 1)
    }
    chance = random.Random(seed)
    fresh["eta"] = eta = chance.uniform(0.02, 0.22)
    fresh["rho"] = chance.uniform(0.5, 2.5)
    of_one = {name: torch.tensor([number]) for name, number in by_hand.items()}
    return {
        "the step by hand": {**of_one, "eta": 0.1, "rho": 2.0},
        "no gradient": fresh | {"gradient": torch.zeros_like(fresh["w"])},
        "random weights": fresh,
        "α = 0.8": fresh | {"rho": 0.8 / eta},
        "α = 1.3": fresh | {"rho": 1.3 / eta},
    }


def _wrong_workers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    descended = w - eta * gradient
    late = w - moved_center(center, w, eta, rho)
    return {
        "nothing pulls the worker to the centre: the term ρ(W − W̄) is missing": descended,
        "the pull has the wrong sign, and drives the worker away from the centre: it moves by "
        "−ηρ(W − W̄)": descended + pull,
        "ρ(W − W̄) is not multiplied by η: both terms are in the bracket": descended
        - rho * distance,
        "the pull is multiplied by η twice: α = ηρ": descended - eta * pull,
        "the pull goes to the centre after it has moved; equation (1) has the old W̄": descended
        - eta * rho * late,
        "the gradient has the wrong sign: the worker climbs": w + eta * gradient - pull,
        "the gradient is missing: only the spring acts": w - pull,
        "the gradient is not multiplied by η": w - gradient - pull,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the worker; return the new weights": -eta * gradient - pull,
    }


def _wrong_centers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    late = moved_worker(w, center, gradient, eta, rho) - center
    return {
        "nothing pulls the centre": center,
        "the centre moves away from the worker: the sign is +ηρ(W − W̄)": center - pull,
        "ρ(W − W̄) is not multiplied by η": center + rho * distance,
        "multiplied by η twice: α = ηρ": center + eta * pull,
        "multiplied by η alone: ρ is missing": center + eta * distance,
        "this follows from the worker's new weights; equation (2) has the old ones, W": center
        + eta * rho * late,
        "the centre descends along the gradient, too. "
        "It has no gradient: only the springs move it": center - eta * gradient + pull,
        "divided by the number of workers: the sum over the workers is no mean": center + pull / 3,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the centre; return the new centre": pull,
    }


@task("8.1", "the two rules", points=2)
def moves(ranks: Ranks, report: Report) -> None:
    """A step by hand; W + W̄ conserved without a gradient; then random weights."""
    seeds = [report.seed + rank for rank in range(ranks.n)]  # so weights of each length and type
    for answer in report.answers(ranks, probe_moves, each=to_each(seed=seeds)):
        report.follow(answer.rank, _moves(_move_cases(seeds[answer.rank]), answer.value))


def _moves(cases: dict[str, dict[str, Any]], results: dict[str, Any]) -> Iterator[Step]:
    """Yield the step by hand and the sum, as each sees what the other does not; then the rest."""
    by_hand, still, *fresh = cases
    yield each_of(
        _moved(by_hand, cases[by_hand], results[by_hand]), _conserved(cases[still], results[still])
    )
    for case in fresh:
        yield from _moved(case, cases[case], results[case])


def _unchanged(result: dict[str, Any]) -> Step:
    """Return the step that the arguments are as they were."""
    changed = result["changed"]
    text = f"{', '.join(changed)} has changed: return a new tensor, leave arguments alone"
    return facts({text: changed})


def _conserved(arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    """Yield that without a gradient the sum of the weights stays."""
    yield _unchanged(result)
    before = (arguments["w"] + arguments["center"]).tolist()
    after = _sum_of(*result["moved"])
    text = (
        "without a gradient W + W̄ must stay, as what pulls the one pulls the other. It was "
        f"{short(before)}, and is {short(after)}"
    )
    # Where nothing was returned, the step by hand has said so.
    yield facts({text: after is not None and not same(after, before)})


def _moved(case: str, arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    """Yield where both ends of the spring have to move."""
    yield _unchanged(result)
    w, center, eta, rho = (arguments[name] for name in ("w", "center", "eta", "rho"))
    new_w, new_center = result["moved"]
    descended = w - eta * arguments["gradient"]
    wrong_workers = _wrong_workers(**arguments)
    wrong_workers |= _other_share(new_w, descended, center - w, eta * rho)
    wrong_centers = _wrong_centers(**arguments)
    wrong_centers |= _other_share(new_center, center, w - center, eta * rho)
    right_center = moved_center(center, w, eta, rho)
    yield each_of(
        [_end(f"move_worker, {case}", new_w, moved_worker(**arguments), wrong_workers)],
        [_end(f"move_center, {case}", new_center, right_center, wrong_centers)],
    )


def _end(name: str, moved: Any, expected: Tensor, by_mistake: dict[str, Tensor]) -> Step:
    """Return the step that an end of the spring has moved as it should."""
    single = Mistake(is_number, "this is a single number: return a tensor of the shape of w")
    mistakes = [single, *table(by_mistake)]
    exact = precision(expected)
    form = "the new weights"
    return value(moved, expected.tolist(), mistakes, what=name, form=form, tolerance=exact)


def _other_share(moved: Any, end: Tensor, distance: Tensor, alpha: float) -> dict[str, Tensor]:
    """Return the mistake that an end of the spring moves by another share of the distance."""
    numeric = isinstance(moved, list) and all(map(is_number, moved))
    # Of one number alone, every result is some share.
    if not numeric or not len(moved) == len(end) > 1:
        return {}
    end = end.double()
    distance = distance.double()
    share = (torch.tensor(moved, dtype=torch.float64) - end) @ distance / (distance @ distance)
    text = f"it moves by the share {share:.4g} of the distance, expected α = ηρ = {alpha:.4g}: α "
    return {text + "has no limit, and no value of its own": end + share * distance}


def _sum_of(worker: Any, center: Any) -> list[float] | None:
    """Return the sum of both ends; `None` if they are no lists of the same length."""
    if isinstance(worker, list) and isinstance(center, list) and len(worker) == len(center):
        return [w + c for w, c in zip(worker, center, strict=True)]
    return None


# -- 8.2: round robin -------------------------------------------------------------------------


def _round_robin_hint(case: dict[str, Any]) -> str:
    """Return what to say where the answer raised an error or did not come."""
    return (
        f"in {case['steps']} steps; in step t = 0, 1, … the worker's place is 1 + t mod G, and "
        "place 0 is the master. A worker takes part in its own steps only" + _in_a_group(case)
    )


def _in_a_group(case: dict[str, Any]) -> str:
    """Return the end of a hint for a case with groups."""
    return (
        ". If it works without a group: every call needs group=group" if case["partition"] else ""
    )


@task("8.2", "round robin, as printed", points=4)
def round_robin(ranks: Ranks, report: Report) -> None:
    """One worker at a time, in turn; the old W^j moves the centre."""
    cases = _cases(report, "round_robin", partition=WITH_A_MASTER, steps=(6, 7, 8, 25))
    right = True
    for case, members, results in tried(ranks, report, probe_run, cases, _round_robin_hint):
        if len(members) > 1:
            group = (report, case, members, results)
            right &= _follow_all(*group, _in_turn)
            if right:  # in this group, and in those before
                right = _follow_all(*group, _round_robin_weights)


def _in_turn(answer: GroupAnswer) -> Iterator[Step]:
    """Yield that a rank has the messages of its turns."""
    members = answer.members
    turns = [1 + t % (len(members) - 1) for t in range(answer.case["steps"])]
    times = turns.count(answer.place)
    yield communication(
        answer.value["calls"],
        only("send", "recv"),
        inside(members),
        _turns(members, [0] * times if answer.place else turns),
        _sized(answer.case),
        waited,
        _in_line(answer, times),
    )


def _round_robin_weights(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what weights a rank has to have."""
    replay = _replay(round_robin_replayed, answer, answer.case["steps"])
    return _weights(answer, replay, ROUND_ROBIN_MISTAKES)


def _turns(members: list[int], places: list[int]) -> Rule:
    """Return the rule that sends and receives are with the ranks at these places, in order."""
    wanted = [members[place] for place in places]

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "sent to"), ("recv", "received from")):
            peers = [call["peer"] for call in calls if call["op"] == op]
            if peers != wanted:
                rows = [", ".join(map(str, row)) or "none" for row in (peers, wanted)]
                return (
                    f"{on(members)}: {word} the ranks {rows[0]}, expected {rows[1]}: one message "
                    "each way in every step of the worker 1 + t mod G"
                )
        return None

    return rule


def _in_line(answer: GroupAnswer, times: int) -> Rule:
    """Return the rule that a worker computes ``times`` gradients, between lines 10 and 12."""
    seen = answer.value["seen"]

    def rule(_: Calls) -> str | None:
        if answer.place and len(seen) != times:
            return f"this worker computed {len(seen)} gradients, and has {times} turns"
        if seen and answer.place == 0:
            return "the master computes a gradient: it has no images, only the workers compute"
        for k, (sends, receives) in enumerate(seen):
            if sends > k:
                return (
                    "W^j is sent before the gradient is computed. That would be faster, but is not "
                    "the algorithm as printed: line 12 comes after line 11"
                )
            if receives <= k:
                return (
                    "the gradient is computed before the centre has come. Line 11 comes after line "
                    "10: a worker begins when it is its turn"
                )
        return None

    return rule


# -- 8.3: asynchronous ------------------------------------------------------------------------


def _asynchronous_hint(case: dict[str, Any]) -> str:
    """Return what to say where the answer raised an error or did not come."""
    steps, tau = case["steps"], case["tau"]
    text = f"{steps} steps with τ = {tau}: {rounds(steps, tau)} exchanges of each worker"
    if case.get("held"):
        text += (
            ". The first worker computed for long, and the others went on: the master takes "
            "whatever comes first, dist.recv without a source"
        )
    return text + _in_a_group(case)


@task("8.3", "asynchronous, every τ steps", points=4)
def asynchronous(ranks: Ranks, report: Report) -> None:
    """The master serves whoever comes; a worker has ⌈steps/τ⌉ exchanges."""
    cases = _cases(
        report,
        "work",
        partition=[*WITH_A_MASTER, WITH_A_MASTER[0], WITH_A_MASTER[2]],
        steps=(6, 4, 7, 5, 4, 31),
        tau=(2, 1, 3, 2, 9, 13),
        held=(False, True, False, True, False, False),
    )
    for case, members, results in tried(ranks, report, probe_run, cases, _asynchronous_hint):
        group = (report, case, members, results)
        if len(members) > 1 and _follow_all(*group, _exchanged):
            _follow_all(*group, _asynchronous_weights)


def _exchanged(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what messages a rank has to exchange, and how many gradients a worker computes."""
    if answer.place:
        yield each_of([_exchanges(answer)], [_gradients(answer)])
    else:
        case = answer.case
        workers = answer.members[1:]
        counts = _counts(dict.fromkeys(workers, rounds(case["steps"], case["tau"])))
        yield _messages(answer, counts, _any_first(len(workers)))


def _asynchronous_weights(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what weights a rank has to have, in the order in which the master has served."""
    order = [call["peer"] for call in _of(answer.values[0]["calls"], "send")]
    texts = WORK_MISTAKES if answer.place else SERVE_MISTAKES | WORK_MISTAKES
    return _weights(answer, _replay_in_order(answer, order), texts)


def _replay_in_order(answer: GroupAnswer, order: list[int], **momentum: float) -> Replay:
    """Return the replay of a case in which workers come in this order of ranks."""
    places = [answer.members.index(rank) for rank in order]
    steps, tau = answer.case["steps"], answer.case["tau"]
    return _replay(asynchronous_replayed, answer, places, steps, tau, **momentum)


def _messages(answer: GroupAnswer, *rules: Rule) -> Step:
    """Return the step that a rank has sent and received whole weights in its group, by rules."""
    always = (only("send", "recv"), inside(answer.members), _sized(answer.case), waited)
    return communication(answer.value["calls"], *always, *rules)


def _exchanges(answer: GroupAnswer) -> Step:
    """Return the step that a worker has one exchange with the master in every τ steps."""
    steps, tau = answer.case["steps"], answer.case["tau"]
    words = f" in {steps} steps with τ = {tau}"
    return _messages(answer, _counts({answer.members[0]: rounds(steps, tau)}, words))


def _of(calls: Calls, op: str) -> Calls:
    """Return the calls of an operation in the order in which they began."""
    return sorted((call for call in calls if call["op"] == op), key=lambda call: call["start"])


def _counts(wanted: dict[int, int], words: str = "") -> Rule:
    """Return the rule that so many messages went to each rank, and came from it."""

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "to"), ("recv", "from")):
            peers = [call["peer"] for call in calls if call["op"] == op]
            odd = next((rank for rank in wanted if peers.count(rank) != wanted[rank]), None)
            if odd is not None:
                return (
                    f"{peers.count(odd)} {op}s {word} rank {odd}{words}, expected {wanted[odd]}: "
                    "an exchange is a message with W to the master, and one with W̄ back"
                )
            others = set(peers) - set(wanted)
            if others:
                return f"{op} {word} rank {min(others)}: only master and workers exchange messages"
        return None

    return rule


def _any_first(workers: int) -> Rule:
    """Return the rule that the master waits for no worker in particular."""

    def rule(calls: Calls) -> str | None:
        fixed = [c for c in _of(calls, "recv") if c["blocking"] and not c["any_source"]]
        if workers < 2 or not fixed:
            return None
        return (
            f"the master waits for rank {fixed[0]['peer']}, while others may be ready: leave out "
            "the source, who = dist.recv(w, group=group) takes what comes first"
        )

    return rule


def _gradients(answer: GroupAnswer) -> Step:
    """Return the step that a rank has computed one gradient in each step."""
    steps = answer.case["steps"]
    count = len(answer.value["at"])
    text = f"computed {count} gradients in {steps} steps: one in each, gradient(w)"
    return facts({text: count != steps})


# -- 8.4: momentum ----------------------------------------------------------------------------


@task("8.4", "EAMSGD: with momentum", points=2)
def momentum(ranks: Ranks, report: Report) -> None:
    """Nesterov's momentum in the worker; the spring stays out of it."""
    draw = random.Random(report.seed).uniform
    bounds = ((0.4, 0.6), (0.9, 0.95), (0.1, 0.3), (0.6, 0.8))
    cases = _cases(
        report,
        "work_with_momentum",
        partition=[WITH_A_MASTER[k] for k in (0, 2, 3, 1)],
        steps=(6, 5, 7, 31),
        tau=(2, 1, 3, 13),
        delta=[draw(*bound) for bound in bounds],
    )
    judge_groups(ranks, report, probe_run, cases, _with_momentum, _asynchronous_hint)


def _with_momentum(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a worker has to do beside a right master, which is not judged."""
    if answer.place == 0:
        return
    yield _exchanges(answer)
    yield _gradients(answer)
    order = answer.values[0]["order"]
    replay = _replay_in_order(answer, order, delta=answer.case["delta"])
    yield from _weights(answer, replay, MOMENTUM_MISTAKES)


# -- 8.5: local SGD ---------------------------------------------------------------------------

#: Partition, steps and τ of each case of what has rounds.
_ROUNDS = {"partition": (None, *PARTITIONS), "steps": (6, 7, 31, 5, 3), "tau": (2, 3, 13, 1, 5)}


def _rounds_hint(case: dict[str, Any]) -> str:
    """Return what to say where the answer raised an error or did not come."""
    steps, tau = case["steps"], case["tau"]
    return f"{steps} steps with τ = {tau}: {rounds(steps, tau)} all_reduces"


def _in_rounds(answer: GroupAnswer, texts: dict[str, str], **outer: float) -> Iterator[Step]:
    """Yield what each round has to be: τ steps, one all_reduce of the weights; and its weights."""
    steps, tau = answer.case["steps"], answer.case["tau"]
    why = f" in {steps} steps with τ = {tau}: one after every τ steps, and one at the end"
    yield communication(
        answer.value["calls"],
        only("all_reduce"),
        inside(answer.members),
        made("all_reduce", rounds(steps, tau), why),
        _sized(answer.case),
        waited,
    )
    yield _gradients(answer)
    replay = _replay(local_replayed, answer, steps, tau, **outer)
    yield from _weights(answer, replay, texts, "all_reduce")


@task("8.5", "local SGD", points=2)
def local_sgd(ranks: Ranks, report: Report) -> None:
    """τ steps of its own on each rank, then the mean of the weights."""
    cases = _cases(report, "local_sgd", **_ROUNDS)
    judge = functools.partial(_in_rounds, texts=LOCAL_MISTAKES)
    judge_groups(ranks, report, probe_run, cases, judge, _rounds_hint)


# -- 8.6: DiLoCo ------------------------------------------------------------------------------


def probe_outer(user_ns: dict, *, rank: int, seed: int) -> dict:
    """`outer_step` with rates and momenta of three kinds."""
    function = answer_named(user_ns, "outer_step")
    results = []
    changed = False
    for *tensors, rate, mom in _outer_cases(seed):
        before = [tensor.clone() for tensor in tensors]
        moved = function(*tensors, rate, mom)
        if not isinstance(moved, tuple | list) or len(moved) != 2:
            return {"form": type(moved).__name__}
        results.append([told(tensor) for tensor in moved])
        changed |= not all(map(torch.equal, before, tensors))
    return {"moved": results, "changed": changed}


def _outer_cases(seed: int) -> list[tuple]:
    """Return arguments of `outer_step`: centre, pseudo-gradient, velocity, rate, momentum."""
    center, gradient, velocity = (start(seed + k, like=seed) for k in (1, 2, 3))
    draw = random.Random(seed).uniform
    return [
        (center, gradient, torch.zeros_like(center), 1.0, 0.0),
        (center, gradient, velocity, draw(0.3, 0.6), draw(0.9, 0.97)),
        (center, gradient, velocity.clone(), draw(1.0, 1.5), draw(0.1, 0.5)),
    ]


@task("8.6", "DiLoCo", points=4)
def diloco(ranks: Ranks, report: Report) -> None:
    """Nesterov's outer step, and rounds of local steps from the centre."""
    seeds = [report.seed + rank for rank in range(ranks.n)]
    answers = report.answers(ranks, probe_outer, each=to_each(seed=seeds))
    right = [
        report.follow(answer.rank, _outer_steps(answer.value, _outer_cases(seeds[answer.rank])))
        for answer in answers
    ]
    if not answers or not all(right):
        return
    draw = random.Random(report.seed).uniform
    small = ((0.3, 0.6), (0.1, 0.4))
    large = ((0.75, 1.2), (0.7, 0.97))
    kinds = (large, small, (small[0], large[1]), (large[0], small[1]), large)
    rate, mom = zip(*((draw(*rate), draw(*mom)) for rate, mom in kinds), strict=True)
    cases = _cases(report, "diloco", **_ROUNDS, rate=rate, mom=mom)

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        outer = {name: answer.case[name] for name in ("rate", "mom")}
        return _in_rounds(answer, DILOCO_MISTAKES, **outer)

    judge_groups(ranks, report, probe_run, cases, judge, _rounds_hint)


def _outer_steps(result: dict[str, Any], cases: list[tuple]) -> Iterator[Step]:
    """Yield what `outer_step` has to return, and to leave alone."""
    form = result.get("form")
    yield facts({
        f"outer_step returned {form}, expected two tensors: return center, velocity": form
    })
    for case, moved in zip(cases, result["moved"], strict=True):
        center, _, _, rate, mom = case
        yield value(
            moved,
            [tensor.tolist() for tensor in moved_outer(*case)],
            _wrong_outer_steps(case),
            what=f"outer_step, rate {rate:.3g}, momentum {mom:.3g}",
            form="two tensors",
            tolerance=precision(center),
        )
    text = "outer_step changes a tensor that it was given: make new ones"
    yield facts({text: result["changed"]})


def _wrong_outer_steps(case: tuple) -> list[Mistake]:
    center, gradient, velocity, rate, mom = case
    new_center, new_velocity = right = moved_outer(*case)
    by_mistake = {text: moved_outer(*case, variant) for variant, text in OUTER_MISTAKES.items()}
    by_mistake |= {
        "the step goes the wrong way: center − rate · (…)": (2 * center - new_center, new_velocity),
        "the outer rate is part of the velocity: v ← μv + g, without it": (
            new_center,
            mom * velocity + rate * gradient,
        ),
        "these are velocity and centre: return center, velocity": (new_velocity, new_center),
        "the velocity comes back unchanged: return the new one": (new_center, velocity),
    }
    rows = {text: [tensor.tolist() for tensor in pair] for text, pair in by_mistake.items()}
    right_rows = [tensor.tolist() for tensor in right]
    return table({text: wrong for text, wrong in rows.items() if not same(wrong, right_rows)})
