"""Task 4.3: which share of the time when data moves is hidden behind backward."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from utils.checks.comparison import Mistake, is_number, short, table
from utils.checks.task import Report, Step, facts, task, value
from utils.checks.trials import WORLD, enough
from utils.cluster.questions import Ranks, Reply

from .probes import probe_hidden, probe_overlap


def _union(intervals: list) -> float:
    """Return the seconds that are in at least one interval."""
    total = 0.0
    until = -math.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _hidden(transfers: list, begin: float, end: float) -> float:
    """Return which share of the time when data moved is between begin and end."""
    moving = _union(transfers)
    return _union(_cut(transfers, begin, end)) / moving if moving else 0.0


def _cut(transfers: list, begin: float, end: float) -> list[list[float]]:
    """Return the parts of transfers between begin and end."""
    cut = [[max(s, begin), min(e, end)] for s, e in transfers]
    return [[s, e] for s, e in cut if e > s]


def _cases(seed: int) -> dict[str, list[list[float]]]:
    """Return the transfers of each case, by what is special; backward computes from 100 to 120 s.

    Cases that could hide another mistake come last.
    """
    draw = random.Random(seed)

    def spread(count: int) -> list[list[float]]:
        starts = [draw.uniform(90, 130) for _ in range(count)]
        return [[s, s + draw.uniform(0.5, 20)] for s in starts]

    unordered = [[121.0, 126.0], [103.0, 107.0], [105.0, 110.0]]
    return {
        "one transfer, half of it after backward": [[110.0, 130.0]],
        "two transfers, the second one exposed": [[105.0, 109.0], [121.0, 127.0]],
        "a transfer that starts before backward": [[98.0, 104.0]],
        "a transfer from before backward until after it": [[90.0, 130.0]],
        "two transfers at the same time": [[102.0, 110.0], [106.0, 118.0], [119.0, 125.0]],
        "a short transfer inside a long one": [[101.0, 130.0], [103.0, 105.0], [108.0, 112.0]],
        "two transfers that begin together": [[110.0, 128.0], [110.0, 112.0]],
        "transfers that are not in the order of their starts": unordered,
        "all transfers after backward": [[120.0, 130.0], [130.0, 140.0]],
        **{f"{count} random transfers": spread(count) for count in (3, 5, 9)},
        "40 short transfers": draw.sample([[90.0 + k, 90.5 + k] for k in range(40)], 40),
        "a transfer of no duration next to another": [[110.0, 110.0], [115.0, 125.0]],
        "no transfer at all": [],
        "a transfer of no duration": [[110.0, 110.0]],
    }


def _wrong_shares(transfers: list, result: object, begin: float, end: float) -> Iterator[Mistake]:
    yield Mistake(lambda _: not is_number(result), "Return a number from 0 to 1")
    share = _hidden(transfers, begin, end)
    moving = _union(transfers)
    lengths = sum(e - s for s, e in transfers)
    if not lengths:
        yield Mistake(lambda _: True, "Nothing moved. Return the share 0")
        return
    clipped = sum(e - s for s, e in _cut(transfers, begin, end))
    cut = "A transfer may be partly hidden. Cut it at the end of backward"
    of_backward = share * moving / (end - begin)
    begins, ends = zip(*transfers, strict=True)
    of_span = share * moving / (max(ends) - min(begins))
    total = "You counted moments with two transfers twice"
    yield from table({
        "You returned percent. Return a share": 100 * share,
        "You returned seconds. Divide them by all the time in which data moved": share * moving,
        "You divided by the length of backward. Divide by the time of all transfers": of_backward,
        "You returned the exposed share. Return the hidden one": 1 - share,
        f"{total}. Take the union": clipped / lengths,
        f"{total} in the hidden time. Take the union there, too": clipped / moving,
        f"{total} in the total time. Take the union there, too": share * moving / lengths,
        "You divided by the span from the first transfer to the last. Divide by the union of all "
        "transfers": of_span,
        cut: _union([[s, e] for s, e in transfers if s >= begin and e <= end]) / moving,
        "Cut a transfer at the beginning of backward, too": (
            _union(_cut(transfers, -math.inf, end)) / moving
        ),
        f"{cut}.": _union([[s, e] for s, e in transfers if s < end]) / moving,
        "Your share is negative. Count what comes after backward as 0": -abs(result),
    })


# Tolerance for the share, so that a numerical answer on a fine grid passes, too.
GRID = 3e-3


@task("4.3", "how much is hidden", points=3)
def hidden_share(ranks: Ranks, report: Report) -> None:
    """Check the share on made-up intervals, then on a step that the ranks really take."""
    cases = _cases(report.seed)
    right = [
        _shares_right(ranks, report, cases, begin=100.0, end=120.0),
        # The same cases in tenths of a microsecond, around 0.
        _shares_right(ranks, report, _moved(cases, 1e-7, 0.0), begin=-1e-6, end=1e-6),
        # The same cases on the clock of a machine that has run for days.
        _shares_right(ranks, report, _moved(cases, 1e-3, 3e5), begin=3e5 - 0.01, end=3e5 + 0.01),
    ]
    if all(right) and enough(ranks, report, WORLD):
        _judge_measured_step(ranks, report)


def _moved(cases: dict[str, list], unit: float, middle: float) -> dict[str, list]:
    """Return the cases in another unit of time, with the middle of backward at another time."""
    return {
        name: [[middle + unit * (t - 110) for t in transfer] for transfer in transfers]
        for name, transfers in cases.items()
    }


def _shares_right(
    ranks: Ranks, report: Report, cases: dict[str, list], *, begin: float, end: float
) -> bool:
    """Judge the shares of all cases, and the first one again; return whether all are right."""
    again = [*cases.items(), ("the first case again", next(iter(cases.values())))]

    def judge(_: dict[str, Any], answer: Reply) -> Iterator[Step]:
        form = "a number from 0 to 1"
        for (name, transfers), share in zip(again, answer.value, strict=True):
            expected = _hidden(transfers, begin, end)
            mistakes = _wrong_shares(transfers, share, begin, end)
            backward = f"backward from {begin:g} to {end:g}"
            case = f"{name}: transfers {short(transfers)}, {backward}"
            yield value(share, expected, mistakes, what=case, form=form, tolerance=GRID)

    given = {"cases": [transfers for _, transfers in again], "begin": begin, "end": end}
    return report.judge_cases(ranks, probe_hidden, [given], judge)


def _judge_measured_step(ranks: Ranks, report: Report) -> None:
    """Judge the share in a step that two ranks really take, which hides something."""
    answers = report.answers(ranks, probe_overlap)
    steps = [answer.value for answer in answers if answer.value]
    words = "hidden share of a measured step (times in seconds, milliseconds apart)"
    right = []
    hidden = []
    for rank, step in enumerate(steps):
        share = step.pop("share")
        hidden.append(_hidden(**step))
        share_is_right = value(share, hidden[-1], what=words, tolerance=GRID)
        right.append(report.follow(rank, [share_is_right]))
    if steps and all(right):
        nothing = "DDP hid nothing in a step on an emulated 1 Gbit/s network. Run the check again"
        report.follow(None, [facts({nothing: max(hidden) <= 0})])
