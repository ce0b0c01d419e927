"""Answers that are functions of numbers: they are called on every rank, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from .mistakes import Mistake, short
from .probe import reading_answer, told
from .task import Report


class Case(NamedTuple):
    """One call of a student's function.

    Attributes:
        name: of the function.
        arguments: values of JSON.
        right: what it has to return.
        mistakes: what it may return instead, and what to say then.
        form: what it returns, in words.
    """

    name: str
    arguments: list
    right: Any
    mistakes: Sequence[Mistake] = ()
    form: str = ""


def probe_calls(user_ns: dict, *, rank: int, calls: list) -> list:
    """What functions return, one call after the other: (name, arguments).

    Raises:
        ValueError: a function returned the very list of another call.
    """
    found, lists = [], {}
    for name, arguments in calls:
        function = reading_answer(user_ns, name)
        result = function(*arguments)
        again = function(*arguments) if isinstance(result, list) else None
        own = [result, *result] if isinstance(result, list) else []
        lists |= {id(one): one for one in own if isinstance(one, list)}  # alive, so ids differ
        if again and any(id(one) in lists for one in (again, *again)):
            raise ValueError(
                f"{name} returned the same list in two calls: who changes one changes the other, "
                "so make new lists in each call"
            )
        found.append(told(result))
    return found


def judge_calls(ranks, report: Report, cases: Iterable[Case]) -> None:
    """Compare the results of calls on every rank; the first wrong one of a rank is a problem."""
    cases = [Case(*case) for case in cases]
    calls = [[case.name, case.arguments] for case in cases]
    for answer in report.answers(ranks, __name__, "probe_calls", calls=calls):
        for case, got in zip(cases, answer.value, strict=True):
            what = f"{case.name}({', '.join(short(a, 60) for a in case.arguments)})"
            told_as = {"what": what, "form": case.form}
            if not report.judge(answer.rank, got, case.right, case.mistakes, **told_as):
                break
