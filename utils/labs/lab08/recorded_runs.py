"""Runs an answer on groups of ranks, and compares it with a replay."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from utils.checks.comparison import Calls, Mistake, Rule, same
from utils.checks.probe import answer_named, recorded, told
from utils.checks.task import Report, Step, facts, to_each, value
from utils.checks.trials import WORLD, Group, GroupAnswer, Partition, in_group, keywords

from . import replays
from .replays import Replay, Toy

# The tag of messages by which the check itself lets a worker continue.
SIGNAL = 808
#: The events after which the master and a worker must note the weights.
EVENTS = ("update of the center", "step of this worker")


def run_cases(report: Report, name: str, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases of an answer from columns of arguments of :func:`probe_run`.

    Each case has its own seeds, for the first weights and for the gradient of each rank.
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
    """Call an answer from equal weights; if it is a worker, place 0 runs `serve` or the check's.

    Args:
        valley: the seed of this rank's gradient.
        held: whether worker 1's first gradient waits for the last gradient of worker 2.
        last: the last arguments of the answer, in this order.

    Returns:
        See :func:`_called`; None on a rank that is alone if the algorithm needs a master.
    """
    size = dist.get_world_size(group)
    place = dist.get_rank(group)
    together = name in ("local_sgd", "diloco")
    if size == 1 and not together:
        return None
    mine = replays.start(seed)
    toy = Toy(valley, len(mine), _looks())
    gradient = _held(toy, place, steps, group) if held and size > 2 else toy
    moves = replays.rates(seed)[:1] if together else replays.rates(seed)
    arguments = (mine, gradient, steps, *([tau] if tau else []), *moves, *last.values())
    if place == 0 and name.startswith("work"):
        exchanges = (size - 1) * replays.rounds(steps, tau)
        if name == "work_with_momentum":
            return {"order": _served(mine, exchanges, moves, group)}
        name = "serve"
        arguments = (mine, exchanges, *moves)
    return _called(user_ns, name, arguments, toy, keywords(partition, group))


def _called(
    user_ns: dict, name: str, arguments: tuple, toy: Toy, named: dict[str, Any]
) -> dict[str, Any]:
    """Call an answer with right update rules; return its result, notes and communication."""
    function = answer_named(user_ns, name)
    mine = arguments[0]
    before = mine.clone()
    notes = []

    def note(weights: Any) -> None:
        notes.append(told(weights.detach().clone() if isinstance(weights, Tensor) else weights))

    right = {"move_worker": replays.moved_worker, "move_center": replays.moved_center}
    if name == "diloco":
        right = {"outer_step": replays.moved_outer}
    with mock.patch.dict(user_ns, right):
        if name == "diloco":  # a first call must not leave anything for the next one
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
    """Serve as a right `serve` does; return the workers in the order in which they came."""
    w = torch.empty_like(center)
    order = []
    for _ in range(exchanges):
        who = dist.recv(w, group=group)
        dist.send(center, dst=who, group=group)
        center = replays.moved_center(center, w, *moves)
        order.append(who)
    return order


def _looks() -> Callable[[], list]:
    """Return a function that counts the sends and receives of this rank from now on."""
    from torch_mpi.record import log

    mark = log.mark()

    def look() -> list:
        calls = [call for call in log.since(mark) if call.tag != SIGNAL]
        return [sum(call.op == op for call in calls) for op in ("send", "recv")]

    return look


def follow_all(
    report: Report,
    case: dict[str, Any],
    members: list[int],
    results: list[Any],
    judge: Callable[[GroupAnswer], Iterator[Step]],
) -> bool:
    """Judge the answers of a group; return whether all are right."""
    answers = [GroupAnswer(case, members, place, results) for place in range(len(members))]
    return all([report.follow(answer.rank, judge(answer)) for answer in answers])


def replay_of(replayed: Replay, answer: GroupAnswer, *arguments: Any, **named: float) -> Replay:
    """Return the replay of an answer's case by a function of :mod:`.replays`."""
    valleys = [answer.case["each"][rank]["valley"] for rank in answer.members]
    return functools.partial(replayed, answer.case["seed"], valleys, *arguments, **named)


def weight_steps(
    answer: GroupAnswer, replay: Replay, texts: dict[str, str], event: str = ""
) -> Iterator[Step]:
    """Yield the steps that a rank notes and returns the right weights.

    Args:
        texts: the message for each wrong variant of the replay.
        event: the event after which the rank must note the weights.
    """
    result = answer.value
    expected = replay()[answer.place]
    notes = expected.notes
    mistakes = _wrong_notes(replay, answer.place, texts, event or EVENTS[min(answer.place, 1)])
    name = f"the weights that you noted, with {expected.rates}"
    exact = expected.exact
    form = "the weights"
    yield value(result["notes"], notes, mistakes, what=name, form=form, tolerance=exact)
    ends = [
        Mistake(expected.first, "You returned the first weights. Return the last ones"),
        Mistake(notes.__contains__, "You returned earlier weights. Return the last ones"),
    ]
    end = notes[-1] if notes else expected.first
    form = "the weights after the last step"
    yield value(result["result"], end, ends, what="the result", form=form, tolerance=exact)
    yield facts({
        "You changed the given tensor w, so the next run would begin somewhere else. Make new "
        "tensors with w = w - …, or work on w.clone()": result["changed"]
    })


def _wrong_notes(
    replay: Replay, place: int, texts: dict[str, str], event: str
) -> Iterator[Mistake]:
    right = replay()[place]
    count = len(right.notes)
    for variant, text in texts.items():
        wrong_notes = replay(variant=variant)[place].notes
        if wrong_notes != right.notes:  # a variant with the right result isn't a mistake
            yield Mistake(wrong_notes, text)
    text = f"Call note(…) {count} times, once after each {event}"
    yield Mistake(lambda notes: len(notes) != count, text)
    text = f"You called note(…) before the weights changed. Call it after each {event}"
    yield Mistake(lambda notes: same(notes, [right.first, *right.notes[:-1]]), text)


def sized(case: dict[str, Any]) -> Rule:
    """Return the rule that each message contains all weights."""
    nbytes = replays.start(case["seed"]).nbytes

    def rule(calls: Calls) -> str | None:
        odd = next((call["nbytes"] for call in calls if call["nbytes"] != nbytes), None)
        return odd and f"You sent {odd} bytes in a message. Send all weights, {nbytes} bytes"

    return rule
