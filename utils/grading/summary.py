"""What an instructor reads of a class: points, tasks, problems, and what to look at."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote

from utils.course.pages import number

from .answer_states import kind
from .gradebook import by_student, tasks
from .page_rendering import render
from .problems import Common, common
from .provenance import Provenance
from .reference import Reference
from .results import Result, TaskResult, total
from .similarity import copies, groups
from .suspicion import LOOK

#: Bars of the picture of points.
BINS = 10


@dataclass
class TaskSummary:
    """How a class did in one task."""

    lab: str
    task: str
    title: str
    most: float
    mean: float | None
    counts: dict[str, int]
    failures: list[Common]


@dataclass(frozen=True)
class Points:
    """What a class has reached.

    Attributes:
        each: Points of each student; None if a part could not be graded.
        most: Points that could be reached.
    """

    each: dict[str, float | None]
    most: float

    @classmethod
    def of(cls, students: dict[str, list[Result]]) -> Points:
        """Return the points of these students."""
        each = {name: total(own) for name, own in students.items()}
        most = max((sum(one.most for one in own) for own in students.values()), default=0)
        return cls(each, most)

    @property
    def known(self) -> list[float]:
        """Return the points of all who could be graded."""
        return [points for points in self.each.values() if points is not None]

    @property
    def mean(self) -> float | None:
        """Return the mean of those; None if nobody could be graded."""
        return sum(self.known) / len(self.known) if self.known else None

    @property
    def bins(self) -> list[tuple[str, int, float]]:
        """Return the bars of a picture of those."""
        return histogram(self.known, self.most)


def summary(
    results: list[Result],
    references: list[Reference],
    remarks: dict[str, list[str]],
    links: dict[str, str],
    provenance: Provenance | None = None,
) -> str:
    """Return the page with what the instructor wants to know of the class."""
    students = by_student(results)
    points = Points.of(students)
    columns = tasks(results)
    summaries = [task_summary(results, lab, task) for lab, task in columns]
    return render(
        "summary.html.j2",
        provenance=provenance,
        columns=[(lab, [t for one, t in columns if one == lab]) for lab in dict(columns)],
        students=[(name, points.each[name], own, tasks_of(own)) for name, own in students.items()],
        links={name: quote(link) for name, link in links.items()},
        failed=[one for own in students.values() for one in own if one.error],
        points=points,
        tasks=summaries,
        problems=commonest(summaries),
        looks=to_look_at(students),
        groups=groups(results, references),
        copies=copies(results, references),
        remarks=all_remarks(students, remarks),
        open=sum(len(one.open) for one in results),
        seconds=sum(one.seconds for one in results),
        unprotected=[(ref.lab, task) for ref in references for task in ref.unprotected],
    )


def commonest(summaries: list[TaskSummary]) -> list[tuple[TaskSummary, Common]]:
    """Return the problems of all tasks, those of most students first."""
    found = [(task, problem) for task in summaries for problem in task.failures]
    return sorted(found, key=lambda one: -one[1][1])


def to_look_at(students: dict[str, list[Result]]) -> dict[str, list[str]]:
    """Return by student what a person should look at; nobody of whom there is nothing."""
    found = {
        name: lines((one.lab, text.replace(LOOK, "", 1)) for one in own for text in one.look)
        for name, own in students.items()
    }
    return {name: texts for name, texts in found.items() if texts}


def all_remarks(
    students: dict[str, list[Result]], remarks: dict[str, list[str]]
) -> dict[str, list[str]]:
    """Return by student the remarks on the class and on each result; nobody without any."""
    said = {name: list(dict.fromkeys(texts)) for name, texts in remarks.items() if texts}
    for name, own in students.items():
        of_results = lines((one.lab, text) for one in own for text in one.remarks)
        said.setdefault(name, []).extend(of_results)
    return {name: texts for name, texts in sorted(said.items()) if texts}


def lines(remarks: Iterable[tuple[str, str]]) -> list[str]:
    """Remarks of (lab, text), each told once: with all tasks that it is of, else with the lab."""
    said: dict[tuple[str, str], list[str]] = defaultdict(list)
    for lab, text in remarks:
        if found := re.fullmatch(r"Task (\S+): (.*)", text, re.DOTALL):
            said["", found[2]].append(found[1])
        else:
            said[lab, text] = [lab]
    return [
        f"{'' if lab else 'Tasks ' if len(of) > 1 else 'Task '}{', '.join(of)}: {text}"
        for (lab, text), of in said.items()
    ]


def tasks_of(own: list[Result]) -> dict[tuple[str, str], TaskResult]:
    """A student's tasks by (lab, task)."""
    return {(one.lab, task.task): task for one in own for task in one.tasks}


def histogram(totals: list[float], most: float) -> list[tuple[str, int, float]]:
    """Label, number of students and height (0 to 1) of each bar."""
    counts = [0] * BINS
    for points in totals:
        counts[min(BINS - 1, int(BINS * points / most)) if most else 0] += 1
    highest = max(counts) or 1
    width = most / BINS
    return [
        (f"{number(i * width)}–{number((i + 1) * width)}", count, count / highest)
        for i, count in enumerate(counts)
    ]


def task_summary(results: list[Result], lab: str, number_: str) -> TaskSummary:
    """Counts and the commonest problems of one task, of those who could be graded."""
    every = [(one, task) for one in results if one.lab == lab for task in one.tasks]
    every = [(one, task) for one, task in every if task.task == number_]
    own = [(one.student, task) for one, task in every if not one.error]
    points = [task.points for _, task in own]
    counts = Counter(kind(task) for _, task in own)
    first = every[0][1]
    known = [one for one in points if one is not None]
    mean = sum(known) / len(known) if known and len(known) == len(points) else None
    return TaskSummary(lab, number_, first.title, first.most, mean, counts, common(own))
