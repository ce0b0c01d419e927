"""Checks of lab 08: elastic averaging, round robin and asynchronous, local SGD, DiLoCo.

Every algorithm is run with a gradient that the check knows, and replayed: in the order that the
records of the master tell, where the order is the workers' own business. What likely mistakes lead
to is replayed as well.
"""

from __future__ import annotations

import copy
import functools
import itertools
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
from utils.labs.shared.replicas import Seeds

from .replays import (
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


# -- what several tasks ask -------------------------------------------------------------------


def _seeds(report: Report, k: int) -> dict[str, Any]:
    """Return the seeds of case k: of the first weights, and of each rank's valley, for it alone."""
    return {"seed": report.seed + k, "each": to_each(own=report.seeds(WORLD))}


def _seeds_of(case: dict[str, Any], members: Sequence[int]) -> Seeds:
    """Return the seeds of a group."""
    return Seeds(case["seed"], tuple(case["each"][rank]["own"] for rank in members))


def _called(
    user_ns: dict, name: str, arguments: tuple, toy: Toy, mine: Tensor, **named: Any
) -> dict[str, Any]:
    """Call an answer, with right rules for moving; return what it gave, noted and communicated."""
    function, notes, before = answer_named(user_ns, name), [], mine.clone()

    def note(weights: Any) -> None:
        notes.append(told(weights.detach().clone() if isinstance(weights, Tensor) else weights))

    right = {"move_worker": moved_worker, "move_center": moved_center}
    with mock.patch.dict(user_ns, right if name != "diloco" else {"outer_step": moved_outer}):
        if name == "diloco":  # nothing of a call may be left for the next
            first = [copy.deepcopy(one) if one is toy or one is mine else one for one in arguments]
            function(*first, note=lambda _: None, **named)
        result, calls = recorded(function, *arguments, note=note, **named)
    return {
        "result": told(result),
        "notes": notes,
        "at": toy.at,
        "seen": toy.seen,
        "changed": not torch.equal(mine, before),
        "calls": [call for call in calls if call["tag"] != SIGNAL],
    }


def _looks() -> Callable[[], list]:
    """Return a function that tells how many sends and receives this rank has made since now."""
    from torch_mpi.record import log

    mark = log.mark()

    def look() -> list:
        calls = [call for call in log.since(mark) if call.tag != SIGNAL]
        return [sum(call.op == op for call in calls) for op in ("send", "recv")]

    return look


def _weights(
    result: dict[str, Any], place: int, replay: Replay, texts: dict[str, str], event: str
) -> Iterator[Step]:
    """Yield what weights the rank at a place has to note and to return.

    Args:
        texts: what to say of each variant of the replay.
        event: when it has to note the weights.
    """
    expected = replay()[place]
    first, notes = expected.first, expected.notes
    yield value(
        result["notes"],
        notes,
        _wrong_notes(expected, place, replay, texts, event),
        what=f"the weights that it has noted, with {expected.rates}",
        form="the weights",
        tolerance=expected.exact,
    )
    ends = [
        Mistake(first, "these are the weights of the start: return those of the end"),
        Mistake(lambda got: got in notes, "these are earlier weights: return the last ones"),
    ]
    yield value(
        result["result"],
        notes[-1] if notes else first,
        ends,
        what="the result",
        form="the weights after the last step",
        tolerance=expected.exact,
    )
    yield facts({
        "the tensor w that it was given has changed: the next run would not begin where this one "
        "did. Make new tensors: w = w - …, or work on w.clone()": result["changed"],
    })  # fmt: skip


def _wrong_notes(
    expected: Replayed, place: int, replay: Replay, texts: dict[str, str], event: str
) -> Iterator[Mistake]:
    """Yield what mistakes lead to; then what goes wrong with notes, rather than with weights."""
    notes, count = expected.notes, len(expected.notes)
    for variant, text in texts.items():
        wrong_notes = replay(variant)[place].notes
        if wrong_notes != notes:  # what looks like the right thing is no mistake
            yield Mistake(wrong_notes, text)
    yield Mistake(
        lambda got: len(got) != count,
        f"expected {count} notes, one for each {event}: call note(…) there",
    )
    yield Mistake(
        lambda got: same(got, [expected.first, *notes[:-1]]),
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

HAND = {"w": 5.0, "center": 1.0, "gradient": 3.0, "eta": 0.1, "rho": 2.0}


def probe_moves(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Both functions: the step by hand, random weights, and random ones without a gradient."""
    worker, center = (answer_named(user_ns, name) for name in ("move_worker", "move_center"))
    results: dict = {}
    for case, arguments in _move_cases(seed).items():
        moved, changed = [], set()
        for function, names in (
            (worker, ("w", "center", "gradient")),
            (center, ("center", "w")),
        ):
            copies = {name: arguments[name].clone() for name in names}
            moved.append(told(function(*copies.values(), arguments["eta"], arguments["rho"])))
            changed |= {name for name in names if not torch.equal(copies[name], arguments[name])}
        results[case] = {"moved": moved, "changed": sorted(changed)}
    return results


def _move_cases(seed: int) -> dict[str, dict[str, Any]]:
    """Return arguments of the rules, by what is told of them."""
    names = ("w", "center", "gradient")
    by_hand = {name: torch.tensor([HAND[name]]) for name in names}
    fresh = {name: start(seed + 7 * k, like=seed) for k, name in enumerate(names, 1)}
    chance = random.Random(seed)
    eta = chance.uniform(0.02, 0.22)
    moves = {"eta": eta, "rho": chance.uniform(0.5, 2.5)}

    def copies() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in fresh.items()}

    return {
        "the step by hand": by_hand | {"eta": HAND["eta"], "rho": HAND["rho"]},
        "no gradient": copies() | {"gradient": torch.zeros_like(fresh["w"])} | moves,
        "random weights": copies() | moves,
        "α = 0.8": copies() | {"eta": eta, "rho": 0.8 / eta},
        "α = 1.3": copies() | {"eta": eta, "rho": 1.3 / eta},
    }


def _wrong_workers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    """Return what mistakes in `move_worker` lead to."""
    new_center, pull = moved_center(center, w, eta, rho), w - center
    return {
        "nothing pulls the worker to the centre: the term ρ(W − W̄) is missing": w - eta * gradient,
        "the pull has the wrong sign, and drives the worker away from the centre: it moves by "
        "−ηρ(W − W̄)": w - eta * (gradient - rho * pull),
        "ρ(W − W̄) is not multiplied by η: both terms are in the bracket":
            w - eta * gradient - rho * pull,
        "the pull is multiplied by η twice: α = ηρ": w - eta * gradient - eta * eta * rho * pull,
        "the pull goes to the centre after it has moved; equation (1) has the old W̄":
            w - eta * (gradient + rho * (w - new_center)),
        "the gradient has the wrong sign: the worker climbs": w - eta * (-gradient + rho * pull),
        "the gradient is missing: only the spring acts": w - eta * rho * pull,
        "the gradient is not multiplied by η": w - gradient - eta * rho * pull,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the worker; return the new weights":
            -eta * (gradient + rho * pull),
    }  # fmt: skip


def _wrong_centers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    """Return what mistakes in `move_center` lead to."""
    pull, new = w - center, moved_worker(w, center, gradient, eta, rho)
    return {
        "nothing pulls the centre": center,
        "the centre moves away from the worker: the sign is +ηρ(W − W̄)": center - eta * rho * pull,
        "ρ(W − W̄) is not multiplied by η": center + rho * pull,
        "multiplied by η twice: α = ηρ": center + eta * eta * rho * pull,
        "multiplied by η alone: ρ is missing": center + eta * pull,
        "this follows from the worker's new weights; equation (2) has the old ones, W":
            center + eta * rho * (new - center),
        "the centre descends along the gradient, too. It has no gradient: only the springs move it":
            center - eta * gradient + eta * rho * pull,
        "divided by the number of workers: the sum over the workers is no mean":
            center + eta * rho * pull / 3,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the centre; return the new centre": eta * rho * pull,
    }  # fmt: skip


@task("8.1", "the two rules", points=2)
def moves(ranks: Ranks, report: Report) -> None:
    """A step by hand; W + W̄ conserved without a gradient; then random weights."""
    seeds = [report.seed + rank for rank in range(ranks.n)]  # so weights of each length and type
    for answer in report.answers(ranks, probe_moves, each=to_each(seed=seeds)):
        _judge_moves(report, answer.rank, _move_cases(seeds[answer.rank]), answer.value)


def _judge_moves(
    report: Report, rank: int, cases: dict[str, dict[str, Any]], results: dict[str, Any]
) -> None:
    """Judge the step by hand and the sum, as each sees what the other does not; then the rest."""
    by_hand, still, *fresh = cases
    right = [
        report.follow(rank, _moved(by_hand, cases[by_hand], results[by_hand])),
        report.follow(rank, _conserved(cases[still], results[still])),
    ]
    if all(right):
        steps = (_moved(case, cases[case], results[case]) for case in fresh)
        report.follow(rank, itertools.chain.from_iterable(steps))


def _unchanged(result: dict[str, Any]) -> Step:
    """Return the step that the arguments are as they were."""
    changed = result["changed"]
    text = f"{', '.join(changed)} has changed: return a new tensor, leave arguments alone"
    return facts({text: changed})


def _conserved(arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    """Yield that without a gradient the sum of the weights stays."""
    yield _unchanged(result)
    before, after = (arguments["w"] + arguments["center"]).tolist(), _sum_of(*result["moved"])
    # Where nothing was returned, the step by hand has said so.
    lost = after is not None and not same(after, before)
    yield facts({
        "without a gradient W + W̄ must stay, as what pulls the one pulls the other. It was "
        f"{short(before)}, and is {short(after)}": lost,
    })  # fmt: skip


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


def _end(what: str, got: Any, expected: Tensor, by_mistake: dict[str, Tensor]) -> Step:
    """Return the step that an end of the spring has moved as it should."""
    single = Mistake(is_number, "this is a single number: return a tensor of the shape of w")
    return value(
        got,
        expected.tolist(),
        [single, *table(by_mistake)],
        what=what,
        form="the new weights",
        tolerance=precision(expected),
    )


def _other_share(moved: Any, end: Tensor, distance: Tensor, alpha: float) -> dict[str, Tensor]:
    """Return the mistake that an end of the spring moves by another share of the distance."""
    end, distance = end.double(), distance.double()
    numeric = isinstance(moved, list) and all(map(is_number, moved))
    # Of one number alone, every result is some share.
    if not numeric or not len(moved) == len(end) > 1:
        return {}
    share = (torch.tensor(moved, dtype=torch.float64) - end) @ distance / (distance @ distance)
    text = f"it moves by the share {share:.4g} of the distance, expected α = ηρ = {alpha:.4g}: α "
    return {text + "has no limit, and no value of its own": end + share * distance}


def _sum_of(worker: Any, center: Any) -> list[float] | None:
    """Return the sum of both ends; `None` if they are no lists of the same length."""
    rows = (worker, center)
    if not all(isinstance(row, list) for row in rows) or len(worker) != len(center):
        return None
    return [w + c for w, c in zip(*rows, strict=True)]


# -- 8.2: round robin -------------------------------------------------------------------------


@in_group
def probe_round_robin(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    steps: int,
) -> dict | None:
    """`round_robin` from equal weights; nothing on a rank that is alone."""
    if dist.get_world_size(group) == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    named = keywords(partition, group)
    return _called(user_ns, "round_robin", (mine, toy, steps, *rates(seed)), toy, mine, **named)


_FIXED = {"fixed rate": "the gradient is multiplied by 0.1, whatever η is: use the argument eta"}
_BOTH_FIXED = _FIXED | {
    "fixed rates": "these are the weights with η = 0.1 and ρ = 3, the numbers of the notebook: use "
    "the arguments eta and rho"
}
_ROUND_ROBIN_MISTAKES = _BOTH_FIXED | {
    "new": "the centre was moved by the worker's new weights. Line 14 has W^j as it was before "
    "line 13: send the old ones",
    "at center": "the gradient is taken at the centre's weights. Line 11 computes it at the "
    "worker's own, W^j",
    "center as worker": "the worker goes on with the centre's weights. It keeps its own: only the "
    "spring pulls it",
}


#: When the master, and when a worker, has to note the weights.
_EVENTS = ("update of the centre", "step of this worker")


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
    runs = zip(WITH_A_MASTER, (6, 7, 8, 25), strict=True)
    cases = [{"partition": p, "steps": s} | _seeds(report, k) for k, (p, s) in enumerate(runs)]
    right = True
    for case, members, results in tried(ranks, report, probe_round_robin, cases, _round_robin_hint):
        if len(members) > 1:
            right &= _in_turn(report, case, members, results)
            if right:  # in this group, and in those before
                right = _round_robin_weights(report, case, members, results)


def _in_turn(report: Report, case: dict[str, Any], members: list[int], results: list[dict]) -> bool:
    """Judge the messages of a group; return whether they are right."""
    workers = len(members) - 1
    turns = [1 + t % workers for t in range(case["steps"])]
    right = []
    for place, (rank, result) in enumerate(zip(members, results, strict=True)):
        times = turns.count(place)
        messages = communication(
            result["calls"],
            only("send", "recv"),
            inside(members),
            _turns(members, turns if place == 0 else [0] * times),
            _sized(case),
            waited,
            _in_line(place, result, times),
        )
        right.append(report.follow(rank, [messages]))
    return all(right)


def _round_robin_weights(
    report: Report, case: dict[str, Any], members: list[int], results: list[dict]
) -> bool:
    """Judge the weights of a group; return whether they are right."""
    seeds, workers = _seeds_of(case, members), len(members) - 1
    replay = functools.partial(round_robin_replayed, seeds, workers, case["steps"])
    right = [
        report.follow(
            rank,
            _weights(result, place, replay, _ROUND_ROBIN_MISTAKES, _EVENTS[min(place, 1)]),
        )
        for place, (rank, result) in enumerate(zip(members, results, strict=True))
    ]
    return all(right)


def _turns(members: list[int], places: list[int]) -> Rule:
    """Return the rule that sends and receives are with the ranks at these places, in order."""
    wanted = [members[place] for place in places]

    def rule(calls: Calls) -> str | None:
        for op, word in (("send", "sent to"), ("recv", "received from")):
            peers = [call["peer"] for call in calls if call["op"] == op]
            if peers != wanted:
                return (
                    f"{on(members)}: {word} the ranks {_row(peers)}, expected {_row(wanted)}: one "
                    "message each way in every step of the worker 1 + t mod G"
                )
        return None

    return rule


def _row(numbers: Sequence[int]) -> str:
    """Return numbers of ranks in words."""
    return ", ".join(map(str, numbers)) or "none"


def _in_line(place: int, result: dict[str, Any], times: int) -> Rule:
    """Return the rule that a worker computes ``times`` gradients, between lines 10 and 12."""

    def rule(_: Calls) -> str | None:
        if place and len(result["seen"]) != times:
            return f"this worker computed {len(result['seen'])} gradients, and has {times} turns"
        if place == 0 and result["at"]:
            return "the master computes a gradient: it has no images, only the workers compute"
        for k, (sends, receives) in enumerate(result["seen"]):
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


@in_group
def probe_asynchronous(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
    held: bool,
) -> dict | None:
    """`serve` on place 0, `work` on the others; `held`: the first worker is the last to go on."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    named = keywords(partition, group)
    if place == 0:
        exchanges = (size - 1) * rounds(steps, tau)
        return _called(user_ns, "serve", (mine, exchanges, *rates(seed)), toy, mine, **named)
    gradient = _held(toy, place, steps, group) if held and size > 2 else toy
    given = (mine, gradient, steps, tau, *rates(seed))
    return _called(user_ns, "work", given, toy, mine, **named)


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


_SERVE_MISTAKES = _BOTH_FIXED | {
    "new": "the worker sends its weights after its step; the rule has W as it was before",
}
_WORK_MISTAKES = _BOTH_FIXED | {
    "new center": "the pull goes to a centre that this worker has moved already: the master "
    "answers first, and moves the centre afterwards",
    "no pull": "nothing pulls the worker when it has the centre: move_worker",
    "every step": "the worker is pulled in every step, by a centre that it got earlier; between "
    "two exchanges it descends only",
    "pull only": "in the step with an exchange the gradient is missing: every step descends",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …: "
    "k % tau == 0",
    "replaced": "the worker takes over the centre's weights. It keeps its own: the spring pulls it",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs",
}


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


def _asynchronous_cases(report: Report) -> list[dict[str, Any]]:
    """Return cases of groups, steps and τ; in some the first worker is held up."""
    runs = [(0, 6, 2, False), (1, 4, 1, True), (2, 7, 3, False), (3, 5, 2, True)]
    runs += [(0, 4, 9, False), (2, 31, 13, False)]
    return [
        {"partition": WITH_A_MASTER[p], "steps": steps, "tau": tau, "held": held}
        | _seeds(report, k)
        for k, (p, steps, tau, held) in enumerate(runs)
    ]


@task("8.3", "asynchronous, every τ steps", points=4)
def asynchronous(ranks: Ranks, report: Report) -> None:
    """The master serves whoever comes; a worker has ⌈steps/τ⌉ exchanges."""
    cases = _asynchronous_cases(report)
    for case, members, results in tried(
        ranks, report, probe_asynchronous, cases, _asynchronous_hint
    ):
        if len(members) > 1 and _exchanges_are_right(report, case, members, results):
            _judge_asynchronous(report, case, members, results)


def _exchanges_are_right(
    report: Report, case: dict[str, Any], members: list[int], results: list[dict]
) -> bool:
    """Judge messages and gradients of a group; return whether they are right."""
    master, *workers = members
    count = rounds(case["steps"], case["tau"])
    rules = (only("send", "recv"), inside(members), _sized(case), waited)
    of_master = _counts(dict.fromkeys(workers, count)), _any_first(len(workers))
    right = [report.follow(master, [communication(results[0]["calls"], *rules, *of_master)])]
    for rank, result in zip(workers, results[1:], strict=True):
        messages = communication(result["calls"], *rules, _exchanges(case, master))
        step = each_of([messages], [_gradients(result, case["steps"])])
        right.append(report.follow(rank, [step]))
    return all(right)


def _exchanges(case: dict[str, Any], master: int) -> Rule:
    """Return the rule that a worker has one exchange with the master in every τ steps."""
    steps, tau = case["steps"], case["tau"]
    return _counts({master: rounds(steps, tau)}, f" in {steps} steps with τ = {tau}")


def _judge_asynchronous(
    report: Report, case: dict[str, Any], members: list[int], results: list[dict]
) -> None:
    """Judge the weights of a group, in the order in which the master has served."""
    order = [members.index(call["peer"]) for call in _of(results[0]["calls"], "send")]
    replay = _replay_of(case, members, order)
    for place, (rank, result) in enumerate(zip(members, results, strict=True)):
        texts = _WORK_MISTAKES if place else _SERVE_MISTAKES | _WORK_MISTAKES
        report.follow(rank, _weights(result, place, replay, texts, _EVENTS[min(place, 1)]))


def _replay_of(
    case: dict[str, Any], members: list[int], order: list[int], **momentum: float
) -> Replay:
    """Return the replay of a case in which workers come in this order of places."""
    seeds, workers = _seeds_of(case, members), len(members) - 1
    given = (seeds, order, workers, case["steps"], case["tau"])
    return functools.partial(asynchronous_replayed, *given, **momentum)


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


def _gradients(result: dict[str, Any], steps: int) -> Step:
    """Return the step that one gradient was computed in each of so many steps."""
    count = len(result["at"])
    text = f"computed {count} gradients in {steps} steps: one in each, gradient(w)"
    return facts({text: count != steps})


# -- 8.4: momentum ----------------------------------------------------------------------------


@in_group
def probe_momentum(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
    delta: float,
) -> dict | None:
    """`work_with_momentum` beside a right master."""
    size, place = dist.get_world_size(group), dist.get_rank(group)
    if size == 1:
        return None
    mine, toy = start(seed), Toy(own, len(start(seed)), _looks())
    if place == 0:
        exchanges = (size - 1) * rounds(steps, tau)
        return {"order": _served(mine, exchanges, rates(seed), group)}
    named = keywords(partition, group)
    given = (mine, toy, steps, tau, *rates(seed), delta)
    return _called(user_ns, "work_with_momentum", given, toy, mine, **named)


def _served(center: Tensor, exchanges: int, moves: tuple[float, float], group: Group) -> list[int]:
    """Do what a right `serve` does; return the workers in the order in which they came."""
    w, order = torch.empty_like(center), []
    for _ in range(exchanges):
        who = dist.recv(w, group=group)
        dist.send(center, dst=who, group=group)
        center = moved_center(center, w, *moves)
        order.append(who)
    return order


_MOMENTUM_MISTAKES = _BOTH_FIXED | {
    "no look-ahead": "the gradient is taken at w. Nesterov's momentum takes it ahead, at w + δv",
    "pull in v": "the spring is part of v, which keeps it for the next steps. It pulls w only, "
    "once: w ← w + v − α(w − W̄)",
    "pull ahead": "the spring is measured from w + δv; it is measured from w, which was sent",
    "forgets v": "v is 0 again in every step: keep it from step to step",
    "undamped": "v has all of its old value and the gradient: multiply the old v by δ",
    "far ahead": "the gradient is taken at w + v, expected at w + δv",
    "sends ahead": "the worker sends w + δv; the master needs w",
    "kept pull": "the pull of the last exchange acts in the steps after it, too: between two "
    "exchanges there is no spring",
    "whole": "the pull is the whole distance; it is the share α = ηρ of it",
    "climbs": "the gradient has the wrong sign: the worker climbs. v ← δv − η ΔW",
    "no pull": "nothing pulls the worker when it has the centre",
    "every step": "the worker is pulled in every step; between two exchanges there is no spring",
    "late": "the exchange comes in the last of τ steps. It belongs into step 0, τ, 2τ, …",
    "new": "the worker sends its weights after its step; send them before",
    "replaced": "the worker takes over the centre's weights; it keeps its own",
}


@task("8.4", "EAMSGD: with momentum", points=2)
def momentum(ranks: Ranks, report: Report) -> None:
    """Nesterov's momentum in the worker; the spring stays out of it."""
    draw = random.Random(report.seed).uniform
    runs = [(0, 6, 2, draw(0.4, 0.6)), (2, 5, 1, draw(0.9, 0.95)), (3, 7, 3, draw(0.1, 0.3))]
    runs += [(1, 31, 13, draw(0.6, 0.8))]
    cases = [
        {"partition": WITH_A_MASTER[p], "steps": steps, "tau": tau, "delta": delta}
        | _seeds(report, k)
        for k, (p, steps, tau, delta) in enumerate(runs)
    ]
    judge_groups(ranks, report, probe_momentum, cases, _with_momentum, _asynchronous_hint)


def _with_momentum(answer: GroupAnswer) -> Iterator[Step]:
    """Yield what a worker has to do beside a right master, which is not judged."""
    if answer.place == 0:
        return
    case, members, result = answer.case, answer.members, answer.value
    yield communication(
        result["calls"],
        only("send", "recv"),
        inside(members),
        _sized(case),
        waited,
        _exchanges(case, members[0]),
    )
    yield _gradients(result, case["steps"])
    order = [members.index(rank) for rank in answer.values[0]["order"]]
    replay = _replay_of(case, members, order, delta=case["delta"])
    yield from _weights(result, answer.place, replay, _MOMENTUM_MISTAKES, _EVENTS[1])


# -- 8.5: local SGD ---------------------------------------------------------------------------


@in_group
def probe_local(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
) -> dict:
    """`local_sgd` on all ranks of a group."""
    mine, toy = start(seed), Toy(own, len(start(seed)))
    named = keywords(partition, group)
    return _called(
        user_ns, "local_sgd", (mine, toy, steps, tau, rates(seed)[0]), toy, mine, **named
    )


_LOCAL_MISTAKES = _FIXED | {
    "over the world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "gradients": "a gradient is averaged in the last step of a round, and not the weights: they "
    "differ between the ranks. all_reduce the weights, after the step",
    "sum of weights": "these are sums over the ranks: divide by the size of the group",
    "own": "these are this rank's own weights: all_reduce writes into the tensor that it is given, "
    "so go on with that one",
    "not reset": "the average was made, but the rank goes on from its own weights: go on from the "
    "average",
    "early": "the weights are averaged after the first of τ steps: count the steps from 1, "
    "k % tau == 0",
    "forgets the rest": "the last round is missing: where τ does not divide the steps, it is "
    "shorter",
    "whole last round": "the last round has τ steps, and there are more than `steps` of them: it "
    "has what is left",
}


#: Steps and τ of each case: first without a group, then in groups of 4, 2, 3 and 1.
_RUNS = ((6, 2), (7, 3), (31, 13), (5, 1), (3, 5))


def _round_cases(
    report: Report, outer: Sequence[dict[str, float]] | None = None
) -> list[dict[str, Any]]:
    """Return cases of groups, steps and τ, each with its arguments of the outer step."""
    cases = zip((None, *PARTITIONS), _RUNS, outer or [{} for _ in _RUNS], strict=True)
    return [
        {"partition": partition, "steps": steps, "tau": tau} | arguments | _seeds(report, k)
        for k, (partition, (steps, tau), arguments) in enumerate(cases)
    ]


def _rounds_hint(case: dict[str, Any]) -> str:
    """Return what to say where the answer raised an error or did not come."""
    steps, tau = case["steps"], case["tau"]
    return f"{steps} steps with τ = {tau}: {rounds(steps, tau)} all_reduces"


def _in_rounds(answer: GroupAnswer, texts: dict[str, str], **outer: float) -> Iterator[Step]:
    """Yield what each round has to be: τ steps, one all_reduce of the weights; and its weights."""
    case, members, result = answer.case, answer.members, answer.value
    steps, tau = case["steps"], case["tau"]
    why = f" in {steps} steps with τ = {tau}: one after every τ steps, and one at the end"
    yield communication(
        result["calls"],
        only("all_reduce"),
        inside(members),
        made("all_reduce", rounds(steps, tau), why),
        _sized(case),
        waited,
    )
    yield _gradients(result, steps)
    given = (_seeds_of(case, members), len(members), steps, tau)
    replay = functools.partial(local_replayed, *given, **outer)
    yield from _weights(result, answer.place, replay, texts, "all_reduce")


@task("8.5", "local SGD", points=2)
def local_sgd(ranks: Ranks, report: Report) -> None:
    """τ steps of its own on each rank, then the mean of the weights."""

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        return _in_rounds(answer, _LOCAL_MISTAKES)

    judge_groups(ranks, report, probe_local, _round_cases(report), judge, _rounds_hint)


# -- 8.6: DiLoCo ------------------------------------------------------------------------------


def probe_outer(user_ns: dict, *, rank: int, seed: int) -> dict:
    """`outer_step` with rates and momenta of three kinds."""
    function, results, changed = answer_named(user_ns, "outer_step"), [], False
    for center, gradient, velocity, *settings in _outer_cases(seed):
        before = center.clone(), gradient.clone(), velocity.clone()
        moved = function(center, gradient, velocity, *settings)
        if not isinstance(moved, tuple | list) or len(moved) != 2:
            return {"form": type(moved).__name__}
        results.append([told(tensor) for tensor in moved])
        now = (center, gradient, velocity)
        changed |= not all(torch.equal(a, b) for a, b in zip(before, now, strict=True))
    return {"moved": results, "changed": changed}


def _outer_cases(seed: int) -> list[tuple]:
    """Return arguments of `outer_step`: centre, pseudo-gradient, velocity, rate, momentum."""
    center, gradient, velocity = (start(seed + k, like=seed) for k in (1, 2, 3))
    draw = random.Random(seed).uniform
    zero = torch.zeros_like(center)
    return [
        (center, gradient, zero, 1.0, 0.0),
        (center, gradient, velocity, draw(0.3, 0.6), draw(0.9, 0.97)),
        (center, gradient, velocity.clone(), draw(1.0, 1.5), draw(0.1, 0.5)),
    ]


@in_group
def probe_diloco(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    partition: Partition,
    own: int,
    seed: int,
    steps: int,
    tau: int,
    rate: float,
    mom: float,
) -> dict:
    """`diloco` on all ranks of a group, with a right outer step."""
    mine, toy = start(seed), Toy(own, len(start(seed)))
    named = keywords(partition, group)
    given = (mine, toy, steps, tau, rates(seed)[0], rate, mom)
    return _called(user_ns, "diloco", given, toy, mine, **named)


_OUTER_MISTAKES = {
    "heavy ball": "this is heavy-ball momentum: Nesterov's step is along g + μv, with the new v; "
    "first v ← μv + g",
    "forgets v": "the old velocity is not used: v ← μv + g",
    "averages": "the outer rate and the momentum are not used",
}
_DILOCO_MISTAKES = {
    "sign": "the centre moves away from the workers. The pseudo-gradient is W̄ − Wⁱ, and the outer "
    "step descends along it",
    "sum": "the pseudo-gradients were summed; DiLoCo takes their mean: divide by the size of the "
    "group",
    "world": f"divided by {WORLD}, the size of the world: dist.get_world_size(group)",
    "own": "each rank has used its own pseudo-gradient: all_reduce writes into the tensor that it "
    "is given, so use that one",
    "not reset": "the ranks go on from their own weights after an outer step. In DiLoCo they go on "
    "from the centre",
    "over tau": "divided by τ: the pseudo-gradient is what τ steps have changed, as it is",
    "inner rate": "multiplied by η: the outer step has a rate of its own",
    "summed weights": "W was summed over the ranks before it was taken from the centre: sum the "
    "differences W̄ − Wⁱ, and divide by the size of the group",
    "aliased": "the pseudo-gradients are zero: w is the same tensor as the centre, and w -= … "
    "changes both. w = w - … makes a new one",
    "notes local": "these are the weights of this rank before the outer step: note the centre",
    "fixed outer": "these are the weights with rate 0.7 and momentum 0.9, the numbers of the "
    "notebook: use the arguments rate and momentum",
    "averages": "the outer step is a plain average: use outer_step with rate and momentum",
    "forgets v": "the velocity is 0 again in each round: keep it from round to round",
} | {name: _LOCAL_MISTAKES[name] for name in ("forgets the rest", "whole last round", "fixed rate")}


@task("8.6", "DiLoCo", points=4)
def diloco(ranks: Ranks, report: Report) -> None:
    """Nesterov's outer step, and rounds of local steps from the centre."""
    if not _outer_steps_are_right(ranks, report):
        return
    draw = random.Random(report.seed).uniform
    small, large = ((0.3, 0.6), (0.1, 0.4)), ((0.75, 1.2), (0.7, 0.97))
    kinds = (large, small, (small[0], large[1]), (large[0], small[1]), large)
    outer = [{"rate": draw(*rate), "mom": draw(*mom)} for rate, mom in kinds]

    def judge(answer: GroupAnswer) -> Iterator[Step]:
        rate, mom = answer.case["rate"], answer.case["mom"]
        return _in_rounds(answer, _DILOCO_MISTAKES, rate=rate, mom=mom)

    judge_groups(ranks, report, probe_diloco, _round_cases(report, outer), judge, _rounds_hint)


def _outer_steps_are_right(ranks: Ranks, report: Report) -> bool:
    """Judge `outer_step`; return whether all ranks have answered, and rightly."""
    seeds = [report.seed + rank for rank in range(ranks.n)]
    answers = report.answers(ranks, probe_outer, each=to_each(seed=seeds))
    right = [
        report.follow(answer.rank, _outer_steps(answer.value, _outer_cases(seeds[answer.rank])))
        for answer in answers
    ]
    return bool(answers) and all(right)


def _outer_steps(result: dict[str, Any], cases: list[tuple]) -> Iterator[Step]:
    """Yield what `outer_step` has to return, and to leave alone."""
    form = result.get("form")
    yield facts({
        f"outer_step returned {form}, expected two tensors: return center, velocity": form,
    })  # fmt: skip
    for case, moved in zip(cases, result["moved"], strict=True):
        center, _, _, rate, mom = case
        expected = _lists(moved_outer(*case))
        yield value(
            moved,
            expected,
            _wrong_outer_steps(case, expected),
            what=f"outer_step, rate {rate:.3g}, momentum {mom:.3g}",
            form="two tensors",
            tolerance=precision(center),
        )
    text = "outer_step changes a tensor that it was given: make new ones"
    yield facts({text: result["changed"]})


def _lists(tensors: Sequence[Tensor]) -> list[list[float]]:
    """Return tensors as JSON has them."""
    return [tensor.tolist() for tensor in tensors]


def _wrong_outer_steps(case: tuple, expected: list[list[float]]) -> list[Mistake]:
    """Return what mistakes in `outer_step` lead to, where that is not the right thing."""
    center, gradient, velocity, rate, mom = case
    new_center, new_velocity = expected
    by_mistake = {
        text: _lists(moved_outer(*case, variant)) for variant, text in _OUTER_MISTAKES.items()
    } | {
        "the step goes the wrong way: center − rate · (…)":
            [(2 * center - torch.tensor(new_center)).tolist(), new_velocity],
        "the outer rate is part of the velocity: v ← μv + g, without it":
            [new_center, (mom * velocity + rate * gradient).tolist()],
        "these are velocity and centre: return center, velocity": [new_velocity, new_center],
        "the velocity comes back unchanged: return the new one": [new_center, velocity.tolist()],
    }  # fmt: skip
    return table({
        text: wrong for text, wrong in by_mistake.items() if not same(wrong, expected)
    })  # fmt: skip
