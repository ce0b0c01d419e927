"""The verdict of a check on an answer: data, and the words that a student reads.

In a notebook, a verdict is one output in three forms: :data:`MIME`, which grading, ``make run`` and
statistics read; plain text; and HTML for the reader (``card.py``). If a check prints
``✓ Task 1.4 · …`` instead, :func:`read` uses the printed line.

All three forms depend only on the verdict, because nbval and grading compare them. The score
depends on earlier checks, so it comes as an update of the output, which nbval doesn't compare.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from IPython import get_ipython
from IPython.display import display

from .card import OPEN, PASSED, WRONG, card

#: The reason if there is nothing to judge because a task was not begun.
STILL_OPEN = "still open"
MIME = "application/vnd.ddl-labs.verdict+json"
#: Most problems that a verdict lists; for the rest, it only says how many there are.
MOST_LINES = 6

_FIRST = re.compile(r"([✓✗]) Task (?:(\d+(?:\.\w+)*))?(.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Problem:
    """One problem of an answer.

    Attributes:
        text: what is wrong, and what to try.
        ranks: the ranks that have the problem; empty if all ranks have it together.
        kind: "mistake" (a known one), "value" (another result than expected), "communication",
            "error" (the answer raised an error), "interrupted" (it did not end in time),
            "lost" (only fresh ranks help), "unreceived" (no rank received a message), "open" (the
            task was not begun), "forged" (the check's own code never makes such a reply or record).
    """

    text: str
    ranks: tuple[int, ...] = ()
    kind: str = "value"

    def __str__(self) -> str:
        return f"{named(self.ranks)}: {self.text}" if self.ranks else self.text


@dataclass(frozen=True)
class Verdict:
    """The verdict on one task.

    Attributes:
        task, title, points: such as "1.4", "all_reduce", and 2 points for a right answer.
        passed: whether the answer is right.
        open: why there is nothing to judge yet: "still open", or the task that it needs.
        problems: the problems that the check found.
    """

    task: str
    title: str
    points: int = 0
    passed: bool = True
    open: str = ""
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        name = f"Task {self.task} · {self.title}" if self.title else f"Task {self.task}"
        if self.passed:
            return f"✓ {name} · {self._in_points()}"
        if self.open:
            return f"✗ {name} · {self.open}"
        lines = [f"✗ {name}", *(f"  - {problem}" for problem in self.problems[:MOST_LINES])]
        return "\n".join([*lines, *(f"  {rest}" for rest in self._rest())])

    def bundle(self, score: str = "") -> dict[str, Any]:
        """Return all forms by their MIME types; the argument is the one of :meth:`show`."""
        html = self._html(score)
        return {"text/plain": str(self), "text/html": html, MIME: self.data()}

    def _html(self, score: str) -> str:
        task = f"Task {self.task}"
        if self.passed:
            points = [self._in_points()] if self.points else []
            return card(PASSED, task, " · ".join([self.title, *points]), notes=[score])
        if self.open:
            return card(OPEN, task, self.title, notes=[self._advice(), score])
        texts = [str(problem) for problem in self.problems[:MOST_LINES]]
        problems = [*texts, *self._rest()]
        return card(WRONG, task, self.title, problems=problems, notes=[score])

    def _in_points(self) -> str:
        return f"{self.points} point{'s' * (self.points != 1)}"

    def _advice(self) -> str:
        """Return what to do about an open task."""
        if self.open != STILL_OPEN:
            return f"This task {self.open}"
        return "This task is still open. Write it in the cell above."

    def _rest(self) -> list[str]:
        """Return how many problems are left out, if any are."""
        left_out = len(self.problems) - MOST_LINES
        return [f"… and {left_out} more"] if left_out > 0 else []

    def data(self) -> dict[str, Any]:
        """Return the verdict in the types of JSON."""
        fields = asdict(self)
        fields["problems"] = [
            {**problem, "ranks": list(problem["ranks"])} for problem in fields["problems"]
        ]
        return fields

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Verdict:
        """Return the verdict of :meth:`data`. Raises TypeError or KeyError for other data."""
        problems = tuple(
            replace(Problem(**problem), ranks=tuple(problem["ranks"]))
            for problem in data["problems"]
        )
        return cls(**{**data, "problems": problems})

    def show(self, score: str = "") -> None:
        """Print the verdict; in a notebook, display all its forms.

        Args:
            score: the score of all checks so far (``score.py``); left out if ``IPP_NONINTERACTIVE``
                is set, so that no stored output has it.
        """
        if get_ipython() is None:
            print(self)
            return
        shown = display(self.bundle(), raw=True, display_id=True)
        if score and not os.environ.get("IPP_NONINTERACTIVE"):
            shown.update(self.bundle(score), raw=True)


def read(outputs: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts among a cell's outputs, which have the form of nbformat."""
    outputs = list(outputs)
    verdicts = []
    for output in outputs:
        if output.get("output_type") in ("display_data", "execute_result"):
            data = output.get("data", {}).get(MIME)
            if data is not None:
                verdicts.append(_trusted(data))
    printed = "".join(
        output["text"]
        for output in outputs
        if output.get("output_type") == "stream" and output.get("name") == "stdout"
    )
    return verdicts or _printed(printed)


def _trusted(data: Any) -> Verdict:
    """Return the verdict; other data may come from a student, and makes a failed verdict."""
    try:
        return Verdict.from_data(data)
    except (TypeError, KeyError, ValueError):
        return Verdict("", "not a verdict", passed=False)


def _printed(text: str) -> list[Verdict]:
    """Return the verdicts that a check printed instead of displaying them."""
    verdicts: list[Verdict] = []
    for line in _COLOUR.sub("", text).splitlines():
        if first := _FIRST.match(line):
            title = first[3].removeprefix(" · ").strip()
            verdicts.append(Verdict(first[2] or "", title, passed=first[1] == "✓"))
        elif verdicts and line.startswith("  - "):
            problem = Problem(line.removeprefix("  - "))
            verdicts[-1] = replace(verdicts[-1], problems=(*verdicts[-1].problems, problem))
    return verdicts


def named(ranks: Iterable[int]) -> str:
    """Return ranks in words: "rank 1", "ranks 0 and 2", "ranks 0–3"."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}–{ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
