"""Tables for instructors: course plans, a crosswalk to other courses, and rules for assistants.

``docs/course-plan.toml`` says which labs and tasks a meeting has, and ``docs/crosswalk.toml`` which
tasks belong to a chapter of another course. Minutes and points come from the labs, so they can't
differ from what students read.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nbformat import NotebookNode

from . import about, effort
from .about import About
from .notebook import ROOT, SOLUTIONS, NotebookError, is_solution, notebooks, read
from .notebook import lab as metadata
from .page_parts import Part

PLAN, ASSISTANTS = "docs/course-plan.md", "docs/assistants.md"
#: The ward: from this task of lab 18 on, each task is a patient.
WARD, FIRST_PATIENT = "18", 6
#: Minutes are rounded to whole five.
GRAIN = 5


@dataclass(frozen=True)
class TaskOfLab:
    """A task, for a plan.

    Attributes:
        number: As in the notebook, "6.1" or "6.A".
        points: That it gives.
        written: Whether a person grades it, by a rubric.
        further: Whether it is in *Go further*.
        section: The place of its section among the sections of its lab.
        work: Minutes to write it.
    """

    number: str
    points: float
    written: bool
    further: bool
    section: int
    work: float


@dataclass(frozen=True)
class LabOfPlan:
    """A lab with its tasks, and the minutes to read each of its sections."""

    about: About
    tasks: Mapping[str, TaskOfLab]
    reading: tuple[float, ...]

    def minutes(self, chosen: Iterable[str]) -> int:
        """Return the minutes for some tasks: their sections, and what opens the lab."""
        tasks = [self.tasks[number] for number in chosen]
        first = min((task.section for task in self.tasks.values()), default=0)
        sections = {*range(first), *(task.section for task in tasks)}
        needed = sum(self.reading[section] for section in sections)
        needed += sum(task.work for task in tasks)
        return GRAIN * int(needed / GRAIN + 0.5)


@functools.cache
def labs() -> dict[str, LabOfPlan]:
    """Return all labs, by number."""
    by_number = {lab.number: lab for lab in about.labs()}
    return {
        number: _lab(by_number[number], read(path))
        for path in notebooks(SOLUTIONS)
        for number in [about.number_of(path)]
    }


def _lab(lab: About, nb: NotebookNode) -> LabOfPlan:
    core, _ = about.in_parts(nb)
    reading, tasks = [0.0], {}
    for place, cell in enumerate(nb.cells):
        if cell.cell_type == "markdown" and re.search(r"^## ", cell.source, re.MULTILINE):
            reading.append(0.0)
        if is_solution(cell):
            number = str(metadata(cell)["task"])
            written, further = cell.cell_type == "markdown", place >= len(core)
            points = float(metadata(cell).get("points", 0))
            where = len(reading) - 1
            tasks[number] = TaskOfLab(number, points, written, further, where, effort.work(cell))
        else:
            reading[-1] += effort.of_cell(cell)
    return LabOfPlan(lab, tasks, tuple(reading))


def parts() -> list[Part]:
    """Return the parts of pages that this module writes.

    Raises:
        NotebookError: A table names a lab or a task that doesn't exist.
    """
    plans, crosswalk = _table("course-plan"), _table("crosswalk")
    readings = crosswalk["readings"]
    made = [
        Part(PLAN, plan["name"], _plan(plan["meeting"], plan.get("session"), readings))
        for plan in plans["plan"]
    ]
    made.append(Part(PLAN, "minutes", _minutes()))
    made.append(Part(PLAN, "crosswalk", "\n\n".join(map(_course, crosswalk["course"]))))
    made.append(Part(ASSISTANTS, "lights", _lights()))
    return made


def _table(name: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / "docs" / f"{name}.toml").read_text(encoding="utf-8"))


def _rows(head: list[str], rows: Iterable[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# --- plans ---------------------------------------------------------------------------------------


def _plan(meetings: list[dict[str, Any]], session: int | None, readings: Mapping[str, Any]) -> str:
    head = ["when", "labs and tasks", "lecture", "work", "points", "reading"]
    return _rows(head, (_meeting(one, session, readings) for one in meetings))


def _minutes() -> str:
    """Return the minutes of every task, a row for each lab."""
    return _rows(["lab", "minutes of each task"], (_task_minutes(lab) for lab in labs().values()))


def _task_minutes(lab: LabOfPlan) -> list[str]:
    opening = lab.minutes([])
    minutes = {task: max(GRAIN, lab.minutes([task]) - opening) for task in lab.tasks}
    each = (f"{task} {needed}" for task, needed in minutes.items() if not _is_patient(task))
    return [f"{lab.about.number} {lab.about.title}", " · ".join(each)]


def _meeting(
    meeting: dict[str, Any], session: int | None, readings: Mapping[str, Any]
) -> list[str]:
    """Return a row: whole core paths (`core`), tasks beside them (`tasks`), and the lecture.

    The lecture is all of each lab's slides, or what `talk` says.
    """
    chosen = {number: _core(number) for number in meeting.get("core", [])}
    words = [f"**{number}** {_labelled(number).about.title}" for number in chosen]
    minutes = sum(_labelled(number).about.minutes for number in chosen)
    beside = meeting.get("tasks", [])
    for number, tasks in _by_lab(beside).items():
        chosen.setdefault(number, []).extend(tasks)
        minutes += _labelled(number).minutes(task.number for task in tasks)
    if beside:
        words.append(", ".join(beside))
    points = sum(task.points for tasks in chosen.values() for task in tasks)
    read_first = [_reading(readings[number][0]) for number in chosen if readings.get(number)]
    talks = " · ".join(f"{number} ({lecture_minutes(number):g} min)" for number in chosen)
    talks = meeting.get("talk", talks)
    work = f"{minutes} min"
    if session is not None and minutes > session:
        work += f", {minutes - session} of them at home"
    row = [meeting["when"], "; ".join(words), talks, work, f"{points:g}"]
    return [*row, "; ".join(read_first)]


def lecture_minutes(number: str) -> float:
    """Return the minutes of a lab's lecture, from the notes of its slides."""
    (path,) = (ROOT / "docs/lectures").glob(f"{number}_*.md")
    return sum(map(float, re.findall(r"^```\{notes\} ([\d.]+)$", path.read_text("utf-8"), re.M)))


def _reading(one: Mapping[str, str]) -> str:
    where = f", {one['where']}" if one.get("where") else ""
    return f"[{one['title']}]({one['address']}){where}"


def _labelled(number: str) -> LabOfPlan:
    try:
        return labs()[number]
    except KeyError:
        raise NotebookError(f"a plan names lab {number}, which doesn't exist") from None


def _core(number: str) -> list[TaskOfLab]:
    """Return the tasks of a lab's core path."""
    return [task for task in _labelled(number).tasks.values() if not task.further]


def _by_lab(tasks: Iterable[str]) -> dict[str, list[TaskOfLab]]:
    """Return tasks by the number of their lab, in order.

    Raises:
        NotebookError: A task doesn't exist.
    """
    found: dict[str, list[TaskOfLab]] = {}
    for task in tasks:
        number = task.partition(".")[0].zfill(2)
        if task not in _labelled(number).tasks:
            raise NotebookError(f"a table in docs/ names task {task}, which doesn't exist")
        found.setdefault(number, []).append(_labelled(number).tasks[task])
    return found


# --- the crosswalk -------------------------------------------------------------------------------


def _course(course: Mapping[str, Any]) -> str:
    """Return a table for another course: its chapters, and what belongs to them here."""
    by = f"\n{course['by']}" if course["by"] else ""
    name = f"[{course['name']}]({course['address']})" if course["address"] else course["name"]
    rows = ([one["title"], _places(one["tasks"]), one["lacks"]] for one in course["chapter"])
    return f"**{name}**{by}\n\n{_rows(['chapter', 'labs and tasks', 'not in the labs'], rows)}"


def _places(tasks: list[str]) -> str:
    return "; ".join(
        f"**{number}**: {', '.join(task.number for task in of_lab)}"
        for number, of_lab in _by_lab(tasks).items()
    )


# --- rules for assistants ------------------------------------------------------------------------


def _lights() -> str:
    """Return the traffic light of every task, a row for each lab."""
    head = ["lab", "yellow: as a tutor", "red: not at all"]
    return _rows(head, (_lab_lights(lab) for lab in labs().values()))


def _lab_lights(lab: LabOfPlan) -> list[str]:
    lights: dict[str, list[str]] = {"yellow": [], "red": []}
    for task in lab.tasks.values():
        lights[light(task)].append(task.number)
    return [f"{lab.about.number} {lab.about.title}", *(_runs(tasks) for tasks in lights.values())]


def light(task: TaskOfLab) -> str:
    """Return how a student may use an assistant for a task: "yellow", as a tutor, or "red".

    Red is what shows that a student has understood a run: explanations, and the patients of the
    ward. Green is everything that is not a task.
    """
    return "red" if task.written or _is_patient(task.number) else "yellow"


def _is_patient(number: str) -> bool:
    """Return whether a task is a patient of the ward."""
    lab, _, task = number.partition(".")
    return lab == WARD and task.isdigit() and int(task) >= FIRST_PATIENT


def _runs(numbers: list[str]) -> str:
    """Return numbers of tasks as a person would write them: "6.1 to 6.5, 6.A"."""
    return ", ".join(
        f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(run)
        for run in _consecutive(numbers)
    )


def _consecutive(numbers: list[str]) -> Iterator[list[str]]:
    run: list[str] = []
    for number in numbers:
        if run and not _follows(run[-1], number):
            yield run
            run = []
        run.append(number)
    if run:
        yield run


def _follows(one: str, other: str) -> bool:
    (lab, a), (same, b) = one.split("."), other.split(".")
    return lab == same and a.isdigit() and b.isdigit() and int(b) == int(a) + 1
