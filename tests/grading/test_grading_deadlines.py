"""Late days and penalties follow the course's rule, and labs that aren't due cost nobody points."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import grading_tools as toy
import pytest
from nbformat import NotebookNode
from test_grading_accidents import a_result, enter, table

from utils.grading.deadlines import Rule, read_rule, take_off
from utils.grading.reference import LabError

pytestmark = pytest.mark.quick

LAB = toy.LAB
RULE = """late_days = 1
penalty_per_day = 0.25

[deadline]
01 = "2026-11-02 23:59"

[times]
01 = "times.csv"
"""
#: In time, 1 day late (free), 3 days late (2 cost 25 % each); nobody knows of Dora and Emil.
TIMES = """student,submitted
Ada,2026-11-02 23:59:59
Bob,2026-11-03 00:01
Cleo,2026-11-05 08:00
Dora,-
"""
WORKSHEET = """Identifier,"Full name",Grade,"Last modified (submission)","Last modified (grade)"
"Participant 7",Ada,,"Thursday, 5 November 2026, 08:00 AM",-
"Participant 8",Bob,,-,-
"""


@pytest.fixture
def out(tmp_path) -> Path:
    """A results folder with a rule."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "deadlines.toml").write_text(RULE)
    (folder / "times.csv").write_text(TIMES)
    return folder


def rule_in(folder: Path, text: str):
    (folder / "deadlines.toml").write_text(text)
    return read_rule(folder / "deadlines.toml", [Path(f"{LAB}.ipynb")])


# --- penalties -----------------------------------------------------------------------------------


def test_the_gradebook_has_the_points_before_and_after_the_penalty(class_, everyone, out):
    assert class_("--format", "canvas") == 0
    books = table(out / "gradebook.csv")
    late, before = f"{LAB} days late", f"{LAB} before penalty"
    found = {name: (row[late], row[before], row["total"]) for name, row in books.items()}
    assert found == {
        "Ada": ("0", "8", "8"),
        "Bob": ("1", "8", "8"),
        "Cleo": ("3", "8", "4"),
        "Dora": ("", "", "8"),
        "Emil": ("", "", "8"),
    }
    assert "Days late: 3, of them 1 free. 4 points instead of 8" in books["Cleo"]["remarks"]
    assert table(out / "gradebook-canvas.csv")["Cleo"][LAB] == "4"
    page = (out / "students" / "Cleo" / "feedback.html").read_text(encoding="utf-8")
    assert "4 of 10 points" in page
    assert "4 points instead of 8" in page


def test_a_submission_without_a_time_loses_nothing_and_is_remarked_on(class_, everyone, out):
    assert class_() == 0
    assert "time of the submission is unknown" in table(out / "gradebook.csv")["Dora"]["remarks"]
    assert "unknown" not in table(out / "gradebook.csv")["Ada"]["remarks"]


def test_an_instructors_word_in_explain_csv_wins_over_the_penalty(class_, everyone, out, capsys):
    assert class_() == 0
    book = out / "explain.csv"
    rows = [f"Cleo,{LAB},late,,1,ill", f"Emil,{LAB},late,,2,by e-mail", f"Bob,{LAB},1.3,,1,"]
    book.write_text(book.read_text(encoding="utf-8") + "\n".join(rows) + "\n", encoding="utf-8")
    for _ in range(2):  # the rows are kept
        capsys.readouterr()
        assert class_("--merge") == 0
        assert "doesn't count" not in capsys.readouterr().err
        books = table(out / "gradebook.csv")
        assert [books[name]["total"] for name in ("Bob", "Cleo", "Emil")] == ["7", "8", "6"]
    (out / "deadlines.toml").write_text(RULE.replace("late_days = 1", "late_days = 0"))
    assert class_("--merge") == 0
    bob = table(out / "gradebook.csv")["Bob"]["total"]
    assert float(bob) == 1 + 0.75 * 6, "the point that a person has given isn't reduced"


def test_written_answers_count_before_the_penalty_is_taken_off(class_, everyone, out):
    assert class_() == 0
    enter(out, "Cleo", "2")
    assert class_("--merge") == 0
    row = table(out / "gradebook.csv")["Cleo"]
    assert (row[f"{LAB} before penalty"], row["total"]) == ("10", "5")


def test_without_a_rule_the_books_are_as_before(class_, everyone, tmp_path):
    assert class_() == 0
    row = table(tmp_path / "out" / "gradebook.csv")["Ada"]
    assert not [name for name in row if "late" in name or "penalty" in name]
    assert row["remarks"] == ""


def test_late_days_are_used_in_the_order_of_the_deadlines(tmp_path):
    first, second = a_result("Ada", 2.0, "01_toy"), a_result("Ada", 2.0, "02_other")
    times = {"ada": datetime(2026, 11, 12)}
    rule = Rule(late_days=2, penalty_per_day=0.5)
    rule.deadline = {"01_toy": datetime(2026, 11, 11), "02_other": datetime(2026, 11, 10)}
    rule.times = {"01_toy": times, "02_other": times}
    take_off([first, second], rule)
    assert (first.points, second.points) == (1, 2)
    many = Rule(deadline={"01_toy": datetime(2026, 1, 1)}, times=rule.times, penalty_per_day=0.5)
    third = a_result("Ada", 2.0, "01_toy")
    take_off([third], many)
    assert third.points == 0, "never below 0"


# --- where times come from -----------------------------------------------------------------------


def test_the_times_of_moodles_worksheet_belong_to_the_participants_numbers(tmp_path):
    (tmp_path / "times.csv").write_text(WORKSHEET, encoding="utf-8-sig")
    times = rule_in(tmp_path, RULE).times[LAB]
    assert times == dict.fromkeys(("7", "ada"), datetime(2026, 11, 5, 8, 0))


def test_the_times_of_nbgraders_folders_are_read(tmp_path, monkeypatch):
    stamp = tmp_path / "submitted" / "Ada" / "01" / "timestamp.txt"
    stamp.parent.mkdir(parents=True)
    stamp.write_text("2026-11-05 08:00:01.123456 UTC")
    text = RULE.replace("times.csv", "submitted/*/01/timestamp.txt")
    monkeypatch.setenv("TZ", "UTC")
    assert rule_in(tmp_path, text).times[LAB]["ada"].hour in range(24)
    assert list(rule_in(tmp_path, text).times[LAB]) == ["ada"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("late_days = ", "can't be read as TOML"),
        ("late_dayz = 3", "'late_dayz' is unknown. Use deadline, times, late_days"),
        ("late_days = -1", "late_days = -1 is not a number from 0"),
        ("penalty_per_day = 10", "penalty_per_day = 10 is not a number from 0 to 1"),
        ('deadline = "2026-11-02 23:59"', "deadline is not a table"),
        ('deadline = {07 = "2026-11-02 23:59"}', "names a lab '07', but there is none"),
        ('deadline = {01 = "2 Nov"}', "'2 Nov' is not a time. Write 2026-11-02 23:59"),
        ("deadline = {01 = 2026-11-02}", "'2026-11-02' is not a time"),
        ('times = {01 = "nothing.csv"}', "there is no file"),
        ('times = {01 = "deadlines.toml"}', "lacks columns of times: 'Identifier'"),
    ],
)
def test_a_rule_that_makes_no_sense_is_reported_before_anything_is_graded(
    class_, everyone, out, capsys, runs, text, words
):
    with pytest.raises(LabError) as error:
        rule_in(out, text)
    assert words in str(error.value)
    assert class_() == 2
    assert words in capsys.readouterr().err
    assert runs.runs == 0


# --- labs that are not due -----------------------------------------------------------------------


def other(nb: NotebookNode) -> NotebookNode:
    """The notebook as one of another lab."""
    for cell in nb.cells:
        cell.id = f"other-{cell.id}"
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.grade_id = f"other-{cell.metadata.nbgrader.grade_id}"
    return nb


@pytest.fixture
def two_labs(tmp_path) -> list[str]:
    """Options of a course with a second lab, which neither Ada nor Bob has submitted."""
    toy.hand_in(tmp_path / "solutions", LAB, toy.reference())
    toy.hand_in(tmp_path / "solutions", "02_other", other(toy.reference()))
    for name in ("Ada", "Bob"):
        toy.hand_in(tmp_path / "in" / name, LAB, toy.filled())
    return ["--solutions", str(tmp_path / "solutions")]


def row_of_ada(tmp_path: Path) -> tuple[str, str]:
    row = table(tmp_path / "out" / "gradebook.csv")["Ada"]
    return row["total"], row["max"]


def test_a_lab_that_nobody_submitted_is_left_out_and_the_command_says_so(
    class_, two_labs, tmp_path, capsys
):
    assert class_(*two_labs) == 0
    assert row_of_ada(tmp_path) == ("8", "10")
    assert "Not counted, because nobody submitted it: lab 02." in capsys.readouterr().out
    assert class_(*two_labs, "--only", "01", "--only", "02") == 0
    assert row_of_ada(tmp_path) == ("8", "20"), "--only names it"
    assert "Not counted" not in capsys.readouterr().out


@pytest.mark.parametrize(("year", "most"), [("2020", "20"), ("2999", "10")])
def test_a_lab_that_nobody_submitted_counts_once_its_deadline_is_over(
    class_, two_labs, tmp_path, year, most
):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deadlines.toml").write_text(f'[deadline]\n02 = "{year}-01-01 12:00"\n')
    assert class_(*two_labs) == 0
    assert row_of_ada(tmp_path) == ("8", most)


def test_one_early_submission_makes_no_zero_for_the_others(class_, two_labs, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "deadlines.toml").write_text('[deadline]\n02 = "2999-01-01 12:00"\n')
    (tmp_path / "in" / "Bob" / f"{LAB}.ipynb").unlink()
    toy.hand_in(tmp_path / "in" / "Bob", "02_other", other(toy.filled()))
    for options in ([], ["--merge"]):
        assert class_(*two_labs, *options) == 0
        assert row_of_ada(tmp_path) == ("8", "10")
