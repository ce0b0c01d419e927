"""Grading where instructors are: GitHub Classroom, with an example workflow; nbgrader."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import grading_tools as toy
import pytest
import yaml
from test_grading_accidents import table
from test_grading_pages import result, task

from utils.__main__ import parser
from utils.course.notebook import SOLUTIONS, is_named, notebooks
from utils.grading import pages

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / "docs" / "classroom.yml"


@pytest.fixture
def graded(class_, everyone, monkeypatch, tmp_path):
    """`graded()`: what a job's summary says after a class was graded in it."""
    path = tmp_path / "step-summary"
    path.write_text("# from another step\n")
    monkeypatch.setenv(pages.GITHUB_VARIABLE, str(path))

    def go() -> str:
        assert class_("--format", "github") == 0
        return path.read_text(encoding="utf-8")

    return go


def test_points_are_appended_to_the_summary_of_the_job(graded):
    text = graded()
    assert text.startswith("# from another step\n")
    assert "## Ada: 8 of 10 points" in text
    assert "| 1.2 | swap | 2 / 2 | ✓ passed |" in text
    assert "| 1.A | explain | – / 2 | … awaits grading |" in text


def test_outside_github_the_table_is_printed(class_, everyone, monkeypatch, capsys):
    monkeypatch.delenv(pages.GITHUB_VARIABLE, raising=False)
    assert class_("--format", "github") == 0
    assert "## Ada: 8 of 10 points" in capsys.readouterr().out


def test_a_summary_that_can_not_be_written_costs_no_gradebook(
    class_,
    everyone,
    monkeypatch,
    tmp_path,
    capsys,
):
    monkeypatch.setenv(pages.GITHUB_VARIABLE, str(tmp_path / "not-there" / "summary"))
    assert class_("--format", "github") == 2
    assert "NOT WRITTEN: summary on GitHub" in capsys.readouterr().err
    assert (tmp_path / "out" / "gradebook.csv").exists()
    assert (tmp_path / "out" / "summary.html").exists()


def test_a_students_text_makes_no_link_picture_column_or_tag_in_the_summary():
    evil = "<img src=x> | [a](http://b) ![c](d) `e` @f #1 *g*\n\n## 100 points"
    wrong = task("1.1", "wrong", said=f"✗ Task 1.1\n  - rank 0: {evil}")
    text = pages.markdown([result(wrong, student=evil, remarks=[evil])])
    shown = text.replace("<pre>", "").replace("</pre>", "")
    assert not re.search(r"[<>`@*\[]", shown)
    assert len(re.findall("^## ", text, re.MULTILINE)) == 1
    assert all(line.count("|") == 5 for line in text.splitlines() if line.startswith("|"))


def test_a_student_who_could_not_be_graded_has_no_points_in_the_summary():
    text = pages.markdown([result(task("1.1", "not graded", None), error="no kernel")])
    assert "## Ada: not graded" in text
    assert "no kernel" in text


@pytest.mark.parametrize("names", [("ada", "bob"), ("ada",)])
def test_a_folder_that_nbgrader_has_collected_is_graded_unchanged(class_, tmp_path, names):
    for name in names:
        folder = tmp_path / "submitted" / name / "lab01"
        toy.hand_in(folder, toy.LAB, toy.filled())
        (folder / "timestamp.txt").write_text("2026-01-01 10:00:00 UTC")
        (folder / "submission_secret.txt").write_text("x")
    assert class_(source=tmp_path / "submitted") == 0
    books = table(tmp_path / "out" / "gradebook.csv")
    assert {name: row["total"] for name, row in books.items()} == dict.fromkeys(names, "8")


# --- the example ---------------------------------------------------------------------------------


def steps() -> list[dict]:
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["grade"]["steps"]


def test_the_example_for_classroom_is_a_workflow_and_does_not_run_here():
    read = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert {"name", True, "permissions", "jobs"} == set(read), "YAML reads the key 'on' as true"
    assert read["permissions"] == {"contents": "read"}
    assert all(("run" in step) != ("uses" in step) for step in steps())
    ours = (ROOT / ".github" / "workflows").glob("*.yml")
    assert read["name"] not in [yaml.safe_load(path.read_text())["name"] for path in ours]


def test_the_example_uses_only_options_that_make_and_grade_have():
    (run,) = [step["run"] for step in steps() if step.get("name") == "Grade"]
    make, folder, where, target, *given = shlex.split(run)
    assert (make, folder, where, target) == ("make", "-C", "course", "grade")
    values = dict(one.split("=", 1) for one in given)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"$({name})" in makefile for name in values)
    lab = yaml.safe_load(WORKFLOW.read_text())["jobs"]["grade"]["env"]["LAB"]
    more = shlex.split(values["ARGS"].replace("$LAB", lab))
    options = parser().parse_args(["grade", values["SUBMISSIONS"], "-o", "out", *more])
    assert options.formats == ["github"]
    assert any(is_named(options.only[0], path) for path in notebooks(SOLUTIONS))


def test_the_example_gives_no_student_the_solution():
    """The notebooks that were run are the solution with the student's answers in it."""
    (upload,) = [step for step in steps() if "upload-artifact" in step.get("uses", "")]
    assert upload["with"]["path"].endswith("/results/students/*/feedback.html")
