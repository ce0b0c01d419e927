"""Answers that are functions of numbers: they are called on every rank, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from utils.cluster.questions import Ranks

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
    arguments: list[Any]
    right: Any
    mistakes: Sequence[Mistake] = ()
    form: str = ""


def probe_calls(user_ns: dict[str, Any], *, rank: int, calls: list[Any]) -> list[Any]:
    """Return the results of functions, one call (name, arguments) after the other.

    Raises:
        ValueError: a function returned the very list or dict of another call.
    """
    returned = []
    results = Results()
    for name, arguments in calls:
        function = reading_answer(user_ns, name)
        result = function(*arguments)
        returned.append(told(result))
        if results.add(name, result):
            results.add(name, function(*arguments))
    return returned


class Results:
    """What functions have returned, so that nothing is returned a second time."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # alive, so ids differ

    def add(self, name: str, result: Any) -> list[list[Any] | dict[Any, Any]]:
        """Return what can be changed of a result: itself, or what is in it.

        Raises:
            ValueError: an earlier call has returned one of them.
        """
        parts = result if isinstance(result, list | tuple) else ()
        parts_made = [part for part in (result, *parts) if isinstance(part, list | dict)]
        shared = next((part for part in parts_made if id(part) in self._seen), None)
        if shared is not None:
            kind = type(shared).__name__
            raise ValueError(
                f"{name} returned the same {kind} in two calls: who changes one changes the other, "
                f"so make a new {kind} in each call"
            )
        self._seen |= {id(part): part for part in parts_made}
        return parts_made


def judge_calls(ranks: Ranks, report: Report, cases: Iterable[Case]) -> bool:
    """Compare the results of calls on every rank; the first wrong one of a rank is a problem.

    Returns:
        Whether all results are right.
    """
    before = len(report.found)
    cases = [Case(*case) for case in cases]
    calls = [[case.name, case.arguments] for case in cases]
    for answer in report.answers(ranks, probe_calls, calls=calls):
        for case, result in zip(cases, answer.value, strict=True):
            what = f"{case.name}({', '.join(short(a, 60) for a in case.arguments)})"
            if not report.judge(
                answer.rank, result, case.right, case.mistakes, what=what, form=case.form
            ):
                break
    return len(report.found) == before
