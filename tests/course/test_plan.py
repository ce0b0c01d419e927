"""The tables for instructors follow from the labs."""

from __future__ import annotations

import tomllib

import pytest

from utils.course import plan
from utils.course.notebook import ROOT, NotebookError

CROSSWALK = tomllib.loads((ROOT / "docs/crosswalk.toml").read_text(encoding="utf-8"))


def test_a_meeting_has_the_minutes_and_points_of_its_labs():
    lab = plan.labs()["06"]
    core = [task for task in lab.tasks.values() if not task.further]
    row = plan._meeting({"when": "6", "core": ["06"]}, 120, CROSSWALK["readings"])
    assert row[:2] == ["6", "**06** All-reduce from scratch"]
    work = f"{lab.about.minutes} min, {lab.about.minutes - 120} of them at home"
    assert row[3:5] == [work, f"{sum(task.points for task in core):g}"]
    assert row[5].startswith("[")


def test_some_tasks_of_a_lab_take_less_time_than_its_core_path():
    lab = plan.labs()["06"]
    assert 0 < lab.minutes(["6.1"]) < lab.minutes(["6.1", "6.3"]) < lab.about.minutes


@pytest.mark.parametrize(
    ("meeting", "said"),
    [({"core": ["99"]}, "lab 99"), ({"tasks": ["6.99"]}, "task 6.99"), ({"tasks": ["99.1"]}, "99")],
)
def test_a_plan_that_names_what_is_not_there_is_refused(meeting, said):
    with pytest.raises(NotebookError, match=said):
        plan._meeting({"when": "1", **meeting}, None, {})


def test_every_lab_has_a_reading_and_a_chapter_without_tasks_says_what_is_lacking():
    assert set(CROSSWALK["readings"]) == set(plan.labs())
    chapters = [one for course in CROSSWALK["course"] for one in course["chapter"]]
    assert not [one["title"] for one in chapters if not one["tasks"] and not one["lacks"]]


def test_the_traffic_light_of_every_task_is_in_one_column():
    for lab in plan.labs().values():
        written = [task for task in lab.tasks.values() if task.written]
        assert {plan.light(task) for task in written} <= {"red"}
        row = plan._lab_lights(lab)
        assert len(row) == 3
    clinic = plan.labs()["18"].tasks
    assert [plan.light(clinic[number]) for number in ("18.5", "18.6")] == ["yellow", "red"]
    assert plan._runs(["6.1", "6.2", "6.3", "6.A", "6.5"]) == "6.1 to 6.3, 6.A, 6.5"
