"""Late days and penalties, by the rule that an instructor writes into deadlines.toml.

The zips of Moodle and Canvas don't say when a student has submitted: their files have the time of
the download. So the times come from Moodle's grading worksheet or from nbgrader's folders.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from glob import escape, glob
from pathlib import Path
from typing import Any

from utils.course.notebook import is_named
from utils.course.page_templates import number

from .gradebook import numbered_rows
from .reference import LabError
from .results import Result, by_student
from .submissions import clean

#: The file with the rule, in the results folder.
NAME = "deadlines.toml"
#: Columns of a table of times: those that name a student, and those that hold the time.
WHO = {"identifier", "full name", "student", "id"}
WHEN = {"last modified (submission)", "submitted"}
NEEDED = "'Identifier' and 'Last modified (submission)', or 'student' and 'submitted'"
#: How Moodle writes a time in English; other times are as in ISO 8601.
MOODLE_TIMES = ("%A, %d %B %Y, %I:%M %p", "%A, %d %B %Y, %H:%M")
NO_TIME = "The time of the submission is unknown, so nothing is taken off for lateness."

Times = dict[str, datetime]


@dataclass
class Rule:
    """The rule of a course; an empty rule takes nothing off.

    Attributes:
        deadline: By lab, in this machine's time zone.
        times: By lab, when each student has submitted, by name and by the number in the LMS.
        late_days: Days that a student may be late without a penalty, in all labs together.
        penalty_per_day: The share of a lab's points that each further day costs.
    """

    deadline: Times = field(default_factory=dict)
    times: dict[str, Times] = field(default_factory=dict)
    late_days: float = 0.0
    penalty_per_day: float = 0.0


def read_rule(path: Path, labs: list[Path]) -> Rule:
    """Return the rule in a file; an empty rule if there is no file.

    Raises:
        LabError: The file holds something else; the message names the entry.
    """
    rule = Rule()
    if not path.exists():
        return rule
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LabError(f"{path} can't be read as TOML: {error}") from error
    known = [one.name for one in fields(Rule)]
    for name, value in data.items():
        if name not in known:
            raise LabError(f"{path}: {name!r} is unknown. Use {', '.join(known)}.")
        if name in {"deadline", "times"}:
            read = _time if name == "deadline" else _times
            setattr(rule, name, dict(_of_labs(value, read, path, name, labs)))
        else:
            most = math.inf if name == "late_days" else 1
            if not (isinstance(value, int | float) and 0 <= value <= most):
                raise LabError(f"{path}: {name} = {value!r} is not a number from 0 to {most:g}.")
            setattr(rule, name, float(value))
    return rule


def _of_labs(
    table: Any, read: Callable[[str, Path], Any], path: Path, name: str, labs: list[Path]
) -> Iterator[tuple[str, Any]]:
    """Yield the name of each lab in a table of the file, and what it says about the lab."""
    if not isinstance(table, dict):
        raise LabError(f'{path}: {name} is not a table. Write [{name}], and below it 03 = "…".')
    for key, value in table.items():
        lab = next((one.stem for one in labs if is_named(key, one)), None)
        if lab is None:
            raise LabError(f"{path}: {name} names a lab {key!r}, but there is none.")
        yield lab, read(str(value), path)


def _time(text: str, path: Path) -> datetime:
    """Return a time in this machine's time zone, in whole minutes."""
    iso = text.replace(" UTC", "+00:00")
    for form in ("", *MOODLE_TIMES):
        with contextlib.suppress(ValueError):
            time = datetime.strptime(text, form) if form else datetime.fromisoformat(iso)
            if ":" in text:  # a date alone could mean its beginning or its end
                return time.astimezone().replace(tzinfo=None, second=0, microsecond=0)
    example = "2026-11-02 23:59, or as Moodle in English: Monday, 2 November 2026, 11:59 PM"
    raise LabError(f"{path}: {text!r} is not a time. Write {example}.")


def _times(pattern: str, path: Path) -> Times:
    """Return the times in Moodle's worksheet, or in nbgrader's files timestamp.txt."""
    times: Times = {}
    places = sorted(glob(os.path.join(escape(str(path.parent)), pattern)))
    if not places:
        raise LabError(f"{path}: there is no file {path.parent / pattern} with times.")
    for place in map(Path, places):
        if place.name == "timestamp.txt":
            times[_key(place.parts[-3])] = _time(place.read_text(encoding="utf-8").strip(), place)
        else:
            times |= _times_in_worksheet(place)
    return times


def _times_in_worksheet(place: Path) -> Times:
    times: Times = {}
    names, *rows = [cells for _, cells in numbered_rows(place)] or [[]]
    who, when = _columns([name.strip().casefold() for name in names])
    if not who or not when:
        raise LabError(f"{place} lacks columns of times: {NEEDED}.")
    for cells in rows:
        if len(cells) > max(*who, *when) and cells[when[0]].strip() not in {"", "-"}:
            times |= dict.fromkeys((_key(cells[i]) for i in who), _time(cells[when[0]], place))
    return times


def _columns(names: list[str]) -> tuple[list[int], list[int]]:
    """Return the columns that say whose time it is, and the columns of times."""
    who, when = ([i for i, name in enumerate(names) if name in some] for some in (WHO, WHEN))
    return who, when


def _key(name: str) -> str:
    """Return a student's name in lower case, or the number in Moodle's "Participant 7"."""
    return re.sub(r"^participant (?=\d+$)", "", clean(name).casefold())


def take_off(results: list[Result], rule: Rule) -> None:
    """Take the penalties off, and add a remark to each result that is late or has no time.

    A student's late days are used in the order of the deadlines. Points that a person has given
    instead of a check stay, and so does the number of days in a row `late` of explain.csv.
    """
    for own in by_student(results).values():
        left = rule.late_days
        due = [one for one in own if one.lab in rule.deadline and one.file and not one.error]
        for result in sorted(due, key=lambda one: rule.deadline[one.lab]):
            if result.days_late is None:
                result.days_late = _days_late(result, rule)
            if result.days_late is None:
                result.remarks.append(NO_TIME)
                continue
            free = min(left, result.days_late)
            left -= free
            _take_off_one(result, result.days_late, free, rule)


def _take_off_one(result: Result, days_late: float, free: float, rule: Rule) -> None:
    """Take the penalty off one result, of whose late days some are free."""
    share = min(1.0, (days_late - free) * rule.penalty_per_day)
    before = result.points
    fixed = sum(task.points or 0 for task in result.tasks if task.by_person)
    result.penalty = round(share * (before - fixed), 2)
    if days_late:
        late = f"Days late: {number(days_late)}, of them {number(free)} free"
        after = f"{number(result.points)} points instead of {number(before)}"
        if result.points == before:
            after = "Nothing is taken off"
        result.remarks.append(f"{late}. {after}.")


def _days_late(result: Result, rule: Rule) -> float | None:
    """Return how many days have begun after the deadline; None if the time is unknown."""
    times = rule.times.get(result.lab, {})
    time = times.get(result.lms.get("id", "")) or times.get(_key(result.student))
    if time is None:
        return None
    return max(0, math.ceil((time - rule.deadline[result.lab]) / timedelta(days=1)))
