"""Steps of checks that tell more than one thing; for the others see `utils.checks.steps`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from utils.checks.steps import Step
from utils.checks.task import Report
from utils.cluster.reply import Reply


class Wrong(NamedTuple):
    """A problem of a rank (`None`: of all together); `kind` as in `Report.problem`."""

    text: str
    rank: int | None
    kind: str = "mistake"


def none_of(problems: Iterable[Wrong]) -> Step:
    """Return the step that there are no such problems; all of them are told."""

    def step(report: Report, _: int | None) -> bool:
        found = list(problems)
        for wrong in found:
            report.problem(*wrong)
        return not found

    return step


def each_of(*parts: Iterable[Step]) -> Step:
    """Return the step that takes all parts; each of them tells its own first problem."""
    return lambda report, rank: all([report.follow(rank, steps) for steps in parts])


def passed(
    report: Report, answers: Sequence[Reply], judge: Callable[[Reply], Iterable[Step]]
) -> bool:
    """Judge the answers of all ranks; return whether all have come and are right."""
    right = [report.follow(answer.rank, judge(answer)) for answer in answers]
    return all_came(answers) and all(right)


def all_came(answers: Sequence[Reply]) -> bool:
    """Return whether all ranks answered, and no message is left over."""
    return bool(answers) and not any(answer.unreceived for answer in answers)


def conduct(wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these facts about communication is so; the first one is told."""

    def step(report: Report, rank: int | None) -> bool:
        text = next((text for text, is_so in wrong.items() if is_so), None)
        if text:
            report.problem(text, rank, "communication")
        return text is None

    return step
