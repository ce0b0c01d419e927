"""What a check says of one rank's answer, as steps: the first step that fails is what it is told.

A judge is a generator of steps, so a step that follows a failed one is never even computed:

    def _sum(answer: Reply) -> Iterator[Step]:
        yield communication(answer.value["calls"], only("all_reduce"), made("all_reduce", 1))
        yield value(answer.value["result"], expected, mistakes, form="the tensor")
        yield facts({"an argument was changed: work on a copy": answer.value["changed"]})

`Report.follow` takes the steps. The three verbs say what was communicated, what came out, and what
is simply so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.cluster.questions import Reply

from .calls import Calls, Rule
from .mistakes import TOLERANCE, Mistake

if TYPE_CHECKING:
    from .task import Report

#: Looks at one thing, adds a problem of a rank (`None`: of all together) to the report if there is
#: one, and returns whether all is right.
Step = Callable[["Report", "int | None"], bool]


def communication(calls: Calls, *rules: Rule) -> Step:
    """Return the step that these calls keep all rules; the first broken one is the problem."""
    return lambda report, rank: report.communication(rank, calls, *rules)


def value(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    what: str = "",
    form: str = "",
    tolerance: float = TOLERANCE,
) -> Step:
    """Return the step that a JSON value is the expected one; see `Report.judge`."""
    return lambda report, rank: report.judge(
        rank, result, expected, mistakes, what=what, form=form, tolerance=tolerance
    )


def facts(wrong: Mapping[str, object], kind: str = "mistake") -> Step:
    """Return the step that none of these is so, by the text that a student is told."""
    return lambda report, rank: report.facts(rank, wrong, kind)


class Wrong(NamedTuple):
    """A problem of a rank (`None`: of all together); `kind` as in `Report.problem`."""

    text: str
    rank: int | None
    kind: str = "mistake"


def none_of(problems: Iterable[Wrong]) -> Step:
    """Return the step that there are no such problems; all of them are told."""

    def step(report: Report, _: int | None) -> bool:
        listed = list(problems)
        for wrong in listed:
            report.problem(*wrong)
        return not listed

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
