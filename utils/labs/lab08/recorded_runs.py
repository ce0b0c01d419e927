"""Compares the runs of an answer on groups of ranks with a replay."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from utils.checks.comparison import Calls, Mistake, Rule, same
from utils.checks.task import Report, Step, facts, to_each, value
from utils.checks.trials import WORLD, GroupAnswer

from .probes import start
from .replays import Replay

#: The events after which the master and a worker must note the weights.
EVENTS = ("update of the center", "step of this worker")


def run_cases(report: Report, name: str, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    """Return cases of an answer from columns of arguments of :func:`.probes.probe_run`.

    Each case has its own seeds, for the first weights and for the gradient of each rank.
    """
    return [
        {"name": name, **row, "seed": report.seed + k, "each": to_each(valley=report.seeds(WORLD))}
        for k, row in enumerate(to_each(**columns))
    ]


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
    nbytes = start(case["seed"]).nbytes

    def rule(calls: Calls) -> str | None:
        odd = next((call["nbytes"] for call in calls if call["nbytes"] != nbytes), None)
        return odd and f"You sent {odd} bytes in a message. Send all weights, {nbytes} bytes"

    return rule
