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

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

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
    got: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    what: str = "",
    form: str = "",
    tolerance: float = TOLERANCE,
) -> Step:
    """Return the step that a JSON value is the expected one; see `Report.judge`."""
    return lambda report, rank: report.judge(
        rank, got, expected, mistakes, what=what, form=form, tolerance=tolerance
    )


def facts(wrong: Mapping[str, object]) -> Step:
    """Return the step that none of these is so: by the text that a student is told."""
    return lambda report, rank: report.facts(rank, wrong)
