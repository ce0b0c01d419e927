"""What a check says of an answer: data, and the words that a student reads.

In a notebook a verdict is one output with three forms: :data:`MIME`, which grading, ``make run``
and statistics read, plain text, and HTML for the reader (``card.py``). If a check prints
``✓ Task 1.4 · …`` instead, :func:`read` takes the printed line.

All three depend on nothing but the verdict, because nbval and grading compare them. The score
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

#: Why there is nothing to judge in a task that was not begun.
STILL_OPEN = "still open"
MIME = "application/vnd.ddl-labs.verdict+json"
#: Problems that are told; of more, how many.
MOST_LINES = 6

_FIRST = re.compile(r"([✓✗]) Task (?:(\d+(?:\.\w+)*))?(.*)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        text: what, and what to try.
        ranks: those that have it; none of them where it is of all together.
        kind: "mistake" (one that is known), "value" (another result than expected),
            "communication", "error" (the answer raised), "interrupted" (it did not come to an
            end), "lost" (only fresh ranks help), "silent" (no answer in time), "unreceived" (a
            message that nobody has received), "open" (not begun), "forged" (a rank's reply or its
            records are not what the check's own code makes).
    """

    text: str
    ranks: tuple[int, ...] = ()
    kind: str = "value"

    def __str__(self) -> str:
        return f"{named(self.ranks)}: {self.text}" if self.ranks else self.text


@dataclass(frozen=True)
class Verdict:
    """Of one task.

    Attributes:
        task, title, points: such as "1.4", "all_reduce", 2; the points of a right answer.
        passed: whether it is right.
        open: why there is nothing to judge yet: "still open", or which task it needs.
        problems: what is wrong.
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

    def bundle(self, score: str = "", *, stops: bool = False) -> dict[str, Any]:
        """Return all forms by their MIME types; the arguments are those of :meth:`show`."""
        html = self._html(score, stops)
        return {"text/plain": str(self), "text/html": html, MIME: self.data()}

    def _html(self, score: str, stops: bool) -> str:
        task = f"Task {self.task}"
        if self.passed:
            points = [self._in_points()] if self.points else []
            return card(PASSED, task, " · ".join([self.title, *points]), notes=[score])
        if self.open:
            return card(OPEN, task, self.title, notes=[self._advice(stops), score])
        texts = [str(problem) for problem in self.problems[:MOST_LINES]]
        problems = [*texts, *self._rest()]
        return card(WRONG, task, self.title, problems=problems, notes=[score])

    def _in_points(self) -> str:
        return f"{self.points} point{'s' * (self.points != 1)}"

    def _advice(self, stops: bool) -> str:
        """Return what to do about an open task."""
        if self.open != STILL_OPEN:
            return f"This task {self.open}"
        end = " Run All stops here." if stops else ""
        return f"This task is still open: write it in the cell above.{end}"

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
        """Make a verdict of :meth:`data`. Raises TypeError or KeyError for anything else."""
        problems = tuple(
            replace(Problem(**problem), ranks=tuple(problem["ranks"]))
            for problem in data["problems"]
        )
        return cls(**{**data, "problems": problems})

    def show(self, score: str = "", *, stops: bool = False) -> None:
        """Print it; in a notebook, display all its forms.

        Args:
            score: what all checks so far have led to (``score.py``); left out where
                ``IPP_NONINTERACTIVE`` is set, so that it is in no stored output.
            stops: whether the cell of an open task raises, so that no later cell runs.
        """
        if get_ipython() is None:
            print(self)
            return
        shown = display(self.bundle(stops=stops), raw=True, display_id=True)
        if score and not os.environ.get("IPP_NONINTERACTIVE"):
            shown.update(self.bundle(score, stops=stops), raw=True)


def read(outputs: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts among a cell's outputs, which are in the form of nbformat."""
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
    """Return the verdict; data that is not a verdict may be a student's, and passes nothing."""
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
