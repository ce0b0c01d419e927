"""Grading: what happens to machines, files and people must cost nobody points, nor go unsaid.

Runs of notebooks are pretended, so that a class takes a second; a few are real, without ranks.
"""

from __future__ import annotations

import ast
import csv
import errno
import io
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import grading_tools as toy
import psutil
import pytest
from grading_tools import NAMES
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from utils.__main__ import main
from utils.course.notebook import KERNELSPEC
from utils.course.release import student_version
from utils.grading import command, gradebook, grader, notebook_file, submissions, worklist
from utils.grading.assembly import assemble
from utils.grading.grader import grade
from utils.grading.notebook_run import Run, fault, run, use_more
from utils.grading.pages import feedback, summary, task_summary
from utils.grading.reference import MOST_SOURCE, Reference, _defined
from utils.grading.results import Result, TaskResult, label, load, save
from utils.grading.sandbox import Box, Limits
from utils.grading.submissions import SubmissionsError, find
from utils.grading.worklist import newest


def table(path: Path) -> dict[str, dict]:
    """A gradebook by student."""
    rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"))))
    return {row.get("student") or row.get("Full name") or row.get("Student"): row for row in rows}


def enter(out: Path, student: str, points: str, comment: str = "") -> None:
    """Points by hand for a written answer."""
    path = out / "explain.csv"
    line = f"{student},{toy.LAB},1.A,2,"
    text = path.read_text(encoding="utf-8")
    assert f"{line},," in text
    path.write_text(text.replace(f"{line},,", f"{line}{points},{comment},"), encoding="utf-8")


def by_hand(out: Path) -> dict[str, str]:
    """Points in explain.csv by student."""
    return {name: row["points"] for name, row in table(out / "explain.csv").items()}


# --- what the machine did is no grade -----------------------------------------------------------

CELLS = ["a", "b"]


def a_run(*cells: str, end: str | None = None) -> Run:
    records = [{"cell": cell, "end": None} for cell in cells]
    if records:
        records[-1]["end"] = end
    return Run(records, end=end, log="x\nlast words")


@pytest.mark.parametrize(
    ("done", "status", "killed", "words"),
    [
        (a_run("a", "b"), 0, 0, ""),
        (a_run("a", "b"), 1, 3, ""),
        (a_run("a", end="the ranks are gone"), 2, 0, ""),
        (a_run("a", end="out of time"), -9, 1, ""),
        (a_run("a", end="the kernel died"), 2, 1, "to free memory"),
        (a_run("a"), -9, 0, "SIGKILL"),
        (a_run("a", "b"), 137, 0, "SIGKILL"),
        (a_run("a", "b"), 3, 0, "status 3: last words"),
        (a_run(), 5, 0, "status 5"),
        (a_run("a"), 0, 0, "nothing about 1 of 2 cells"),
        (a_run(), 1, 0, "nothing about 2 of 2 cells"),
    ],
)
def test_only_a_complete_run_gives_points(done, status, killed, words):
    found = fault(done, CELLS, status, killed, 1 << 40)
    assert bool(found) == bool(words)
    assert words in found


def test_a_full_disk_is_not_the_students_fault():
    assert "full" in fault(a_run("a", "b"), CELLS, 1, 0, 1000)


class Faulty(toy.Pretended):
    """Runs of which the first so many are spoilt by the machine."""

    def __init__(self, reference, faults: int, error: OSError | None = None):
        super().__init__(reference, {})
        self.faults, self.error = faults, error

    def __call__(self, nb, box, job, **more):
        self.faults -= 1
        if self.faults < 0:
            return super().__call__(nb, box, job, **more)
        if self.error:
            raise self.error
        whole = super().__call__(nb, box, job, **more)
        return Run(whole.records[:4], 1.0, None, fault="pytest ended with SIGKILL")


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_a_run_that_the_machine_spoiled_is_repeated(reference, monkeypatch, tmp_path, error):
    monkeypatch.setattr(grader, "run", Faulty(reference, 2, error))
    result = grade(toy.hand_in(tmp_path, "ada", toy.filled()), reference, Box(), tmp_path / "out")
    assert (result.points, result.error, result.runs) == (8, "", 1)


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "No space left on device")])
def test_a_machine_that_fails_for_good_gives_no_points_and_no_zero(
    reference, monkeypatch, tmp_path, error
):
    monkeypatch.setattr(grader, "run", Faulty(reference, 99, error))
    result = grade(toy.hand_in(tmp_path, "ada", toy.filled()), reference, Box(), tmp_path / "out")
    assert ("No space" if error else "SIGKILL") in result.error
    assert [task.points for task in result.tasks] == [None] * 6
    assert {task.status for task in result.tasks} == {"not graded", "by hand"}
    assert result.open == ["1.A"]


def test_ranks_that_start_too_slowly_do_not_lead_to_a_zero(reference, monkeypatch, tmp_path):
    def slow(*_, **__) -> Run:
        why = "cell 'ranks-join' before the first task failed"
        return Run([{"cell": "ranks-join", "end": why}], 400.0, why)

    monkeypatch.setattr(grader, "run", slow)
    path = toy.hand_in(tmp_path, "ada", toy.filled())
    result = grade(path, reference, Box(limits=Limits(total=500)), tmp_path / "out")
    assert "could not be started" in result.error
    assert result.task("1.1").points is None


def two_cells() -> object:
    cells = [
        new_code_cell("import os", id="a"),
        new_code_cell("import time; time.sleep(99)", id="b"),
    ]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})


def test_pytest_killed_by_the_kernel_is_noticed(tmp_path):
    def kill() -> None:
        log = tmp_path / "job" / "cells.jsonl"
        while not log.exists() or not log.read_text():
            time.sleep(0.05)
        mine = psutil.Process().children(recursive=True)
        for process in mine:
            if "--nbval" in process.cmdline():
                process.kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    done = run(two_cells(), Box(walls=False), tmp_path / "job")
    thread.join(10)
    assert "SIGKILL" in done.fault
    assert [record["cell"] for record in done.records] == ["a"]


def test_options_of_the_instructors_own_pytest_change_no_grade(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_at_all")
    monkeypatch.setenv("PYTEST_PLUGINS", "there_is_no_such_plugin")
    monkeypatch.setenv("PYTHONSTARTUP", "/nowhere")
    nb = two_cells()
    nb.cells[1].source = "assert 'PYTEST_ADDOPTS' not in os.environ"
    done = run(nb, Box(walls=False), tmp_path / "job")
    assert (done.fault, done.end) == ("", None), done.log
    assert [record["outcome"] for record in done.records] == ["passed", "passed"]


def test_a_submission_that_can_not_be_read_does_not_get_a_zero(
    class_, everyone, tmp_path, monkeypatch
):
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == "Bob.ipynb":
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert class_() == 1
    row = table(tmp_path / "out" / "gradebook.csv")["Bob"]
    assert (row["1.1"], row["total"]) == ("", "")
    assert "NOT GRADED: Bob.ipynb can't be read: Permission denied" in row["remarks"]


def test_a_notebook_that_vanishes_while_the_class_is_graded_does_not_get_a_zero(
    class_, everyone, tmp_path, monkeypatch
):
    plan = command.plan

    def planned(*arguments):
        jobs = plan(*arguments)
        (everyone / "Cleo.ipynb").unlink()
        return jobs

    monkeypatch.setattr(command, "plan", planned)
    assert class_() == 1
    books = table(tmp_path / "out" / "gradebook.csv")
    assert books["Cleo"]["total"] == ""
    assert books["Dora"]["total"] == "8"


# --- not graded is blank -------------------------------------------------------------------------


def a_result(name: str, points: float | None = 2.0, lab: str = toy.LAB, **more) -> Result:
    tasks = [
        TaskResult("1.1", "a", 2.0, points, "passed" if points else "wrong"),
        TaskResult("1.A", "why", 3.0, None, "by hand", code="Because."),
    ]
    return Result(name, lab, "key", "a.ipynb", tasks=tasks, **more)


LMS = {"system": "moodle", "id": "7", "folder": "Ada_7_assignsubmission_file_"}


def test_not_graded_is_blank_in_every_book(tmp_path):
    results = [
        *(a_result("Ada", 1.0, error="killed", lms=LMS), a_result("Ada", lab="02_other", lms=LMS)),
        *(a_result("Bob", 0.0), a_result("Bob", lab="02_other")),
    ]
    gradebook.write_books(results, tmp_path, ["moodle", "canvas"])
    ada, bob = (table(tmp_path / "gradebook.csv")[name] for name in ("Ada", "Bob"))
    columns = [f"{toy.LAB} 1.1", f"{toy.LAB} total", "02_other total", "total", "max"]
    assert [ada[name] for name in columns] == ["", "", "2", "", "10"]
    assert [bob[name] for name in columns] == ["0", "0", "2", "2", "10"]
    assert table(tmp_path / "gradebook-moodle.csv")["Ada"]["Grade"] == ""
    canvas = table(tmp_path / "gradebook-canvas.csv")
    assert (canvas["Ada"][toy.LAB], canvas["Ada"]["02_other"]) == ("", "2")
    assert canvas["Bob"][toy.LAB] == "0"


def test_the_summary_begins_with_the_students_who_were_not_graded_and_counts_the_others(reference):
    results = [a_result("Ada", 1.0, error="killed <b>"), a_result("Bob", 2.0)]
    page = summary(results, [reference], {}, {"Ada": "a", "Bob": "b"})
    top = page[: page.index("<h2>")]
    assert "1 NOT GRADED" in top
    assert "killed &lt;b&gt;" in top
    assert "on average 2 of 5 points" in top
    assert task_summary(results, toy.LAB, "1.1").mean == 2
    assert "NOT GRADED" not in summary(results[1:], [reference], {}, {"Bob": "b"})
    assert "none of them graded" in summary(results[:1], [reference], {}, {"Ada": "a"})


def test_a_student_who_was_not_graded_reads_no_points():
    page = feedback("Ada", [a_result("Ada", 1.0, error="killed")])
    assert "Not graded yet" in page
    assert "of 5 points" not in page
    assert "not yet right" not in page


# --- what was entered by hand --------------------------------------------------------------------


def test_points_by_hand_survive_other_runs_other_labs_and_withdrawn_students(
    class_, everyone, course, tmp_path, capsys
):
    assert class_() == 0
    out = tmp_path / "out"
    enter(out, "Ada", "2", "fine")
    enter(out, "Bob", "1")
    (everyone / "Bob.ipynb").unlink()
    assert class_() == 0
    assert "there is no student 'Bob'" in capsys.readouterr().err
    assert (by_hand(out)["Ada"], by_hand(out)["Bob"]) == ("2", "1")
    assert table(out / "gradebook.csv")["Ada"]["total"] == "10"
    assert class_("--only", toy.LAB) == 0
    assert class_("--merge") == 0
    assert (by_hand(out)["Ada"], by_hand(out)["Bob"]) == ("2", "1")
    copies = [path for path in out.glob("explain-*.csv")]
    assert any("Ada,01_toy,1.A,2,2,fine" in path.read_text() for path in copies)


def test_points_entered_while_the_class_is_graded_are_not_overwritten(class_, everyone, tmp_path):
    assert class_() == 0
    out = tmp_path / "out"
    run_ = grader.run

    def entering(*arguments, **more):
        if not by_hand(out)["Dora"]:
            enter(out, "Dora", "2")
        return run_(*arguments, **more)

    grader.run = entering
    try:
        assert class_() == 0
    finally:
        grader.run = run_
    assert by_hand(out)["Dora"] == "2"
    assert table(out / "gradebook.csv")["Dora"]["1.A"] == "2"


def test_a_mistake_made_in_explain_csv_during_the_grading_costs_no_points(
    class_, everyone, tmp_path, capsys
):
    assert class_() == 0
    path = tmp_path / "out" / "explain.csv"
    run_ = grader.run

    def spoil(*arguments, **more):
        path.write_text(path.read_text().replace("1.A,2,,", "1.A,2,2 or so,"))
        return run_(*arguments, **more)

    grader.run = spoil
    try:
        class_()
    finally:
        grader.run = run_
    assert "2 or so" in path.read_text(), "the file was left as it is"
    assert "line 2" in capsys.readouterr().err
    assert table(tmp_path / "out" / "gradebook.csv")["Ada"]["total"] == "8"


def test_only_one_lab_leaves_the_grades_of_the_others_in_the_books(class_, everyone, tmp_path):
    assert class_() == 0
    other = tmp_path / "out" / "students" / "Ada" / "02_other"
    save(a_result("Ada", 2.0, "02_other"), other / "result.json")
    assert class_("--only", toy.LAB) == 0
    assert table(tmp_path / "out" / "gradebook.csv")["Ada"]["total"] == "10"


@pytest.mark.quick
def test_rows_that_match_no_answer_are_reported_and_kept(tmp_path):
    path = tmp_path / "explain.csv"
    path.write_text(
        "student,lab,task,max,points,comment,read by\n"
        "Adda,01_toy,1.A,3,2,good,me\nAda,01_toy,1.Z,3,1,,\nAda,01_toy,1.1,2,0.5,,\n"
        "Ada,01_toy,1.A,3,,,you\n,,,,,,\nGone,01_toy,1.A,3,,,\n"
    )
    grades = gradebook.read_explain(path)
    said = gradebook.merge_explain([a_result("Ada")], grades)
    assert len(said) == 2, said
    assert "line 2: there is no student 'Adda'. Do you mean 'Ada'?" in said[0]
    assert "no task '1.Z'" in said[1]
    assert "'Gone'" not in "".join(said), "nothing was entered for Gone"
    gradebook.write_explain([a_result("Ada")], path, grades)
    kept = path.read_text(encoding="utf-8-sig").splitlines()
    assert kept == [
        "student,lab,task,max,points,comment,answer,read by",
        f"Ada,01_toy,1.1,2,0.5,,{gradebook.mark('')},",
        f"Ada,01_toy,1.A,3,,,{gradebook.mark('Because.')},you",
        *("Adda,01_toy,1.A,3,2,good,,me", "Ada,01_toy,1.Z,3,1,,,"),
    ]


@pytest.mark.quick
@pytest.mark.parametrize(("given", "counted"), [("0,5", 0.5), ("0", 0.0), ("2", 2.0), ("7", 2.0)])
def test_an_instructors_points_count_instead_of_those_of_a_check_also_after_a_regrade(
    tmp_path, given, counted
):
    path = tmp_path / "explain.csv"
    path.write_text(f'student,lab,task,max,points,comment\nAda,01_toy,1.1,,"{given}",copied\n')
    remarks = []
    for _ in range(3):  # graded, and graded again
        result = a_result("Ada")
        grades = gradebook.read_explain(path)
        remarks += gradebook.merge_explain([result], grades)
        gradebook.write_explain([result], path, grades)
        task = result.task("1.1")
        assert (task.points, task.note) == (counted, "copied")
        assert label(task) == "graded by hand"
    assert len(remarks) == (given == "7"), "more points than the task has"
    result.tasks[0].code = "another answer"
    (said,) = gradebook.merge_explain([result], gradebook.read_explain(path))[-1:]
    assert "has changed the answer to task 1.1" in said


@pytest.mark.quick
def test_a_comment_alone_leaves_the_points_of_a_check(tmp_path):
    path = tmp_path / "explain.csv"
    path.write_text("student,lab,task,max,points,comment\nAda,01_toy,1.1,,,Nice names!\n")
    result = a_result("Ada")
    assert not gradebook.merge_explain([result], gradebook.read_explain(path))
    task = result.task("1.1")
    assert (task.points, task.note, label(task)) == (2.0, "Nice names!", "passed")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
@pytest.mark.parametrize(
    ("delimiter", "end"), [(",", "\n"), (";", "\r\n"), ("\t", "\r\n"), (",", "\r")]
)
def test_files_that_spreadsheets_write_are_read(tmp_path, encoding, delimiter, end):
    rows = [gradebook.HEADER, ["Zoë Müller", "01_toy", "1.A", "3", "2", "gut – weiter", ""]]
    text = end.join(delimiter.join(row) for row in rows) + end
    (tmp_path / "explain.csv").write_bytes(text.encode(encoding))
    (grade_,) = gradebook.read_explain(tmp_path / "explain.csv").items()
    assert grade_[0] == ("Zoë Müller", "01_toy", "1.A")
    assert (grade_[1].points, grade_[1].comment) == (2.0, "gut – weiter")


def test_a_comment_of_several_lines_comes_back_whole_and_lines_are_counted_right(tmp_path):
    result = a_result("Ada")
    path = tmp_path / "explain.csv"
    path.write_text(
        'student,lab,task,max,points,comment\nAda,01_toy,1.A,3,2,"one\ntwo"\nX,1,1,3,9,\n'
    )
    assert "line 4" in gradebook.read_explain(path).bad[0]
    path.write_text(path.read_text().replace("X,1,1,3,9,", ""))
    grades = gradebook.read_explain(path)
    gradebook.merge_explain([result], grades)
    gradebook.write_explain([result], path, grades)
    assert gradebook.read_explain(path)["Ada", "01_toy", "1.A"].comment == "one\ntwo"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["Ada,01_toy,1.A,3,2,", "Ada ,01_toy,1.A,3,3,"], "lines 2 and 3"),
        (["Ada,01_toy,1.A,3,1,5,good,a,"], "line 2: more cells than columns"),
        (["Ada,01_toy,1.A,x,2,"], "line 2: '2' of 'x'"),
    ],
)
def test_ambiguous_rows_do_not_count_and_are_reported_with_their_lines(tmp_path, lines, words):
    path = tmp_path / "explain.csv"
    path.write_text("\n".join([",".join(gradebook.HEADER), *lines]))
    grades = gradebook.read_explain(path)
    assert grades == {}
    assert words in grades.bad[0]


def test_one_bad_row_costs_no_other_student_points_and_is_kept_until_it_is_fixed(
    class_, everyone, tmp_path, capsys
):
    assert class_() == 0
    out = tmp_path / "out"
    enter(out, "Ada", "2")
    enter(out, "Bob", "99")
    before = (out / "explain.csv").read_text()
    assert class_("--merge") == 2
    said = capsys.readouterr().err
    assert "99 points are not between 0 and 2. The row doesn't count until" in said
    assert "1 rows in it are wrong" in said
    books = table(out / "gradebook.csv")
    assert (books["Ada"]["1.A"], books["Bob"]["1.A"]) == ("2", "")
    assert (out / "explain.csv").read_text() == before
    (out / "explain.csv").write_text(before.replace(",99,", ",1,"))
    assert class_("--merge") == 0
    assert table(out / "gradebook.csv")["Bob"]["1.A"] == "1"


def test_an_empty_explain_csv_does_not_erase_points(tmp_path):
    path = tmp_path / "explain.csv"
    path.write_text("\n")
    with pytest.raises(gradebook.ExplainError, match="is empty"):
        gradebook.read_explain(path)
    path.write_text(",".join(gradebook.HEADER))
    assert gradebook.read_explain(path) == {}


def test_the_same_file_is_not_copied_again_and_again(tmp_path):
    path = tmp_path / "explain.csv"
    for _ in range(3):
        gradebook.write_explain([a_result("Ada")], path, gradebook.read_explain(path))
    assert [one.name for one in tmp_path.iterdir()] == ["explain.csv"]
    gradebook.write_explain([a_result("Bob")], path)
    gradebook.write_explain([a_result("Cleo")], path)
    assert len(list(tmp_path.glob("explain-*.csv"))) == 2, "two in one second are two copies"


def test_a_file_that_is_open_in_a_spreadsheet_is_reported(class_, everyone, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".~lock.explain.csv#").touch()
    assert class_() == 0
    assert "open in a spreadsheet" in capsys.readouterr().err


def test_points_for_an_answer_that_has_changed_are_reported(class_, everyone, tmp_path, capsys):
    assert class_() == 0
    out = tmp_path / "out"
    enter(out, "Ada", "2")
    enter(out, "Bob", "2")
    assert class_("--merge") == 0
    toy.hand_in(everyone, "Ada", toy.filled(explain="I have thought about it once more."))
    for _ in range(2):
        capsys.readouterr()
        assert class_("--resume") == 0
        said = capsys.readouterr().err
        assert "Ada has changed the answer to task 1.A since" in said
        assert "Bob" not in said
        assert by_hand(out)["Ada"] == "2"
    path = out / "explain.csv"
    mark = table(path)["Ada"]["answer"]
    path.write_text(path.read_text().replace(mark, "", 1))
    assert class_("--merge") == 0
    assert "has changed" not in capsys.readouterr().err


# --- merge ---------------------------------------------------------------------------------------


def test_merge_writes_the_files_of_the_lms_again(class_, everyone, tmp_path):
    assert class_("--format", "moodle", "--format", "canvas") == 0
    out = tmp_path / "out"
    assert table(out / "gradebook-moodle.csv")["Ada"]["Grade"] == "8"
    enter(out, "Ada", "2")
    assert class_("--merge") == 0
    assert table(out / "gradebook-moodle.csv")["Ada"]["Grade"] == "10"
    assert table(out / "gradebook-canvas.csv")["Ada"][toy.LAB] == "10"


@pytest.mark.parametrize(
    "content", ["", '{"student": "Ada", "ta', "[1, 2]", '"text"', '{"tasks": [], "new": 1}', None]
)
def test_a_student_whose_result_is_broken_stays_in_the_books(class_, everyone, tmp_path, content):
    assert class_() == 0
    path = tmp_path / "out" / "students" / "Ada" / toy.LAB / "result.json"
    path.unlink() if content is None else path.write_text(content)
    assert class_("--merge") == 1
    row = table(tmp_path / "out" / "gradebook.csv")["Ada"]
    assert (row["total"], row["max"], row["1.1"]) == ("", "10", "")
    assert "NOT GRADED" in row["remarks"]
    assert class_("--resume") == 0
    assert table(tmp_path / "out" / "gradebook.csv")["Ada"]["total"] == "8"


def test_a_folder_of_checkpoints_among_the_results_is_not_a_lab(class_, everyone, tmp_path):
    assert class_() == 0
    (tmp_path / "out" / "students" / "Ada" / ".ipynb_checkpoints").mkdir()
    (tmp_path / "out" / "students" / ".DS_Store").touch()
    assert class_("--merge") == 0


def test_merge_works_after_the_solutions_have_changed(class_, everyone, tmp_path):
    assert class_() == 0
    path = tmp_path / "out" / "students" / "Ada" / toy.LAB / "result.json"
    result = load(path)
    result.tasks[0].task = "1.0"
    save(result, path)
    assert class_("--merge") == 0
    assert table(tmp_path / "out" / "gradebook.csv")["Ada"]["1.0"] == "1"


# --- one grader at a time ------------------------------------------------------------------------


def _hold(out: Path, ready, stay) -> None:
    with command.held(out):
        ready.set()
        stay.wait(60)


def test_a_second_grader_reads_which_process_has_the_folder(class_, everyone, tmp_path, capsys):
    context = multiprocessing.get_context("fork")
    ready, stay = context.Event(), context.Event()
    out = tmp_path / "out"
    holder = context.Process(target=_hold, args=(out, ready, stay))
    holder.start()
    try:
        assert ready.wait(30)
        assert class_() == 2
        said = capsys.readouterr().err
        assert f"process {holder.pid} on {socket.gethostname()} has been grading since 20" in said
        (out / "students").mkdir()
        assert class_("--merge") == 2
        holder.kill()
        holder.join(30)
        assert (out / command.HOLDER).exists(), "it had no time to clean up"
        assert class_() == 0, "the lock of a dead process keeps nobody out"
    finally:
        holder.kill()
        holder.join(30)


def test_a_folder_that_can_not_be_written_is_reported_before_the_work(
    class_, everyone, tmp_path, capsys, monkeypatch, runs
):
    (tmp_path / "out").write_text("a file")
    assert class_() == 2
    assert "can't be written" in capsys.readouterr().err
    (tmp_path / "out").unlink()

    def full(path: Path, text: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(worklist, "write_text", full)
    assert class_() == 2
    assert "Read-only" in capsys.readouterr().err
    assert runs.runs == 0


def test_a_disk_that_is_full_at_the_end_leaves_the_old_books_and_says_so(
    class_, everyone, tmp_path, capsys, monkeypatch
):
    assert class_() == 0
    out = tmp_path / "out"
    enter(out, "Ada", "2")
    before = {path: path.read_bytes() for path in (out / "explain.csv", out / "gradebook.csv")}
    fsync = os.fsync
    full = [True]

    def no_room(number: int) -> None:
        path = os.readlink(f"/proc/self/fd/{number}")
        if full[0] and ".csv" in path:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(number)

    monkeypatch.setattr(os, "fsync", no_room)
    assert class_("--merge") == 2
    assert "NOT WRITTEN: explain.csv: [Errno 28] No space left" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in before}
    full[0] = False
    assert class_("--merge") == 0
    assert table(out / "gradebook.csv")["Ada"]["total"] == "10"


def test_a_result_that_can_not_be_stored_is_not_graded(class_, everyone, tmp_path, monkeypatch):
    def store(result: Result, path: Path) -> None:
        if result.student == "Bob":
            raise OSError(errno.ENOSPC, "No space left on device")
        save(result, path)

    monkeypatch.setattr(worklist, "save", store)
    assert class_() == 1
    books = table(tmp_path / "out" / "gradebook.csv")
    assert (books["Bob"]["total"], books["Cleo"]["total"]) == ("", "8")
    assert "can't be stored" in books["Bob"]["remarks"]


@pytest.mark.parametrize("number", command.Interrupts.SIGNALS)
def test_ctrl_c_twice_still_writes_the_books(
    class_, everyone, tmp_path, monkeypatch, capsys, number
):
    run_ = grader.run

    def stopping(*arguments, **more):
        if "Cleo" in str(arguments[2]):
            os.kill(os.getpid(), number)
            time.sleep(0.3)
            os.kill(os.getpid(), number)
            time.sleep(0.3)
            return Run(end="interrupted")
        return run_(*arguments, **more)

    monkeypatch.setattr(grader, "run", stopping)
    write_books = command.write_books

    def third(*arguments, **more):
        os.kill(os.getpid(), number)
        return write_books(*arguments, **more)

    monkeypatch.setattr(command, "write_books", third)
    assert class_() == 130
    books = table(tmp_path / "out" / "gradebook.csv")
    assert list(books) == list(NAMES)
    assert [books[name]["total"] for name in NAMES] == ["8", "8", "", "", ""]
    assert "NOT GRADED: The grading was interrupted" in books["Dora"]["remarks"]
    assert capsys.readouterr().err.count("the pages are being written") == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_the_books_are_written_does_not_leave_half_of_them(
    class_, everyone, tmp_path, monkeypatch
):
    write_books = command.write_books

    def stopped(*arguments, **more):
        os.kill(os.getpid(), signal.SIGINT)
        return write_books(*arguments, **more)

    monkeypatch.setattr(command, "write_books", stopped)
    assert class_() == 0
    assert list(table(tmp_path / "out" / "gradebook.csv")) == list(NAMES)
    assert (tmp_path / "out" / "summary.html").exists()


# --- killed, and resumed -------------------------------------------------------------------------


@pytest.mark.quick
def test_resume_grades_only_what_is_missing(class_, everyone, tmp_path, runs):
    assert class_() == 0
    assert runs.runs == len(NAMES)
    (tmp_path / "out" / "students" / "Bob" / toy.LAB / "result.json").unlink()
    toy.hand_in(everyone, "Dora", toy.filled(total=None))
    assert class_("--resume") == 0
    assert runs.runs == len(NAMES) + 2
    books = table(tmp_path / "out" / "gradebook.csv")
    assert [books[name]["total"] for name in NAMES] == ["8", "8", "8", "6", "8"]


def test_a_class_that_is_killed_three_times_has_the_same_books_in_the_end(
    class_, tmp_path, monkeypatch, runs
):
    draw = random.Random(20)
    for number in range(30):
        wrong = {name: None for name in toy.ANSWERS if draw.random() < 0.4}
        toy.hand_in(tmp_path / "in", f"student {number:02}", toy.filled(**wrong))
    run_ = grader.run

    def slowly(*arguments, **more):
        time.sleep(0.02)
        return run_(*arguments, **more)

    monkeypatch.setattr(grader, "run", slowly)
    out = tmp_path / "out"
    kills = []
    for _ in range(3):
        process = multiprocessing.get_context("fork").Process(
            target=class_, args=("--resume", "--format", "moodle")
        )
        process.start()
        done = len(list(out.glob("students/*/*/result.json")))
        until = done + draw.randint(1, 7)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if len(list(out.glob("students/*/*/result.json"))) >= until:
                break
            time.sleep(draw.random() / 100)
        process.kill()
        process.join(30)
        kills.append(process.exitcode)
    assert kills == [-signal.SIGKILL] * 3
    left = 30 - len(list(out.glob("students/*/*/result.json")))
    runs.runs = 0
    assert class_("--resume", "--format", "moodle") == 0
    assert 0 < left == runs.runs, "what was graded before is not graded again"
    resumed = everything(out)
    shutil.rmtree(out)
    assert class_("--format", "moodle") == 0
    assert everything(out) == resumed


def everything(out: Path) -> dict[str, bytes]:
    """All books and pages, without the line that says when and how the page was made."""
    paths = [*out.glob("*.csv"), *out.glob("*.html"), *out.glob("students/*/feedback.html")]
    assert len(paths) > 30
    made = re.compile(rb'<p class="made.*</p>')
    return {path.relative_to(out).as_posix(): made.sub(b"", path.read_bytes()) for path in paths}


def test_two_students_whose_folders_change_places_do_not_change_grades(class_, tmp_path):
    toy.hand_in(tmp_path / "in" / "a:b", "01_toy", toy.filled())
    assert class_() == 0
    (tmp_path / "in" / "a:b").rename(tmp_path / "in" / "a?b")
    assert class_("--resume") == 0
    assert list(table(tmp_path / "out" / "gradebook.csv")) == ["a?b"]


def test_a_student_whose_folder_has_changed_counts_once(class_, tmp_path):
    for name in ("a?b", "a:b"):
        toy.hand_in(tmp_path / "in" / name, "01_toy", toy.filled())
    assert class_() == 0
    shutil.rmtree(tmp_path / "in" / "a:b")
    assert class_("--resume") == 0
    assert len(list((tmp_path / "out").glob("students/*"))) == 2
    assert class_("--merge") == 0
    assert table(tmp_path / "out" / "gradebook.csv")["a?b"]["total"] == "8"


def test_a_student_with_a_very_long_name_has_a_folder(class_, tmp_path):
    name = "\U0001f600" * 60
    toy.hand_in(tmp_path / "in", name, toy.filled())
    assert class_() == 0
    assert table(tmp_path / "out" / "gradebook.csv")[name]["total"] == "8"


@pytest.mark.quick
def test_a_stopped_run_without_resume_keeps_the_grades_that_still_hold(
    class_, everyone, tmp_path, monkeypatch
):
    assert class_() == 0

    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return Run(end="interrupted")

    monkeypatch.setattr(grader, "run", stop)
    assert class_() == 130
    books = table(tmp_path / "out" / "gradebook.csv")
    assert [books[name]["total"] for name in NAMES] == ["", "8", "8", "8", "8"]


def test_a_progress_bar_says_how_many_are_graded_and_how_long_the_rest_will_take(
    course, runs, everyone, tmp_path, capsys
):
    line = ["grade", str(everyone), "--no-sandbox", "-o", str(tmp_path / "out")]
    assert main([*line, "--solutions", str(course / "solutions")]) == 0
    assert re.search(r"5/5 \[\d\d:\d\d<\d\d:\d\d, .*submission", capsys.readouterr().err)


# --- a folder that fills up ----------------------------------------------------------------------


def test_watch_grades_every_submission_once_when_it_arrives(
    class_, tmp_path, monkeypatch, runs, capsys
):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    text = json.dumps(toy.filled())
    seen = []

    def look(_: float) -> None:
        seen.append(runs.runs)
        steps.pop(0)()

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGINT)

    def nothing() -> None: ...

    steps = [
        nothing,
        lambda: (folder / "Ada.ipynb").write_text(text[:100]),  # half of it, as it is copied
        lambda: (folder / "Ada.ipynb").write_text(text),
        nothing,
        lambda: toy.hand_in(folder, "Bob", toy.filled(total=None)),
        nothing,
        lambda: enter(out, "Ada", "2"),
        nothing,
        stop,
    ]
    monkeypatch.setattr(command, "sleep", look)
    assert class_("--watch") == 0
    assert seen == [0, 0, 0, 0, 1, 1, 2, 2, 2], "graded what is whole, and only what is new"
    books = table(out / "gradebook.csv")
    assert {name: row["total"] for name, row in books.items()} == {"Ada": "10", "Bob": "6"}
    assert "There is no notebook" in capsys.readouterr().err
    assert not (out / command.HOLDER).exists()


def test_ctrl_c_while_a_watched_class_is_graded_ends_it_with_books(
    class_, everyone, tmp_path, monkeypatch
):
    def stop(*_, **__):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        return Run(end="interrupted")

    monkeypatch.setattr(grader, "run", stop)
    assert class_("--watch") == 130
    assert list(table(tmp_path / "out" / "gradebook.csv")) == list(NAMES)


# --- whatever was handed in ----------------------------------------------------------------------


def moodle_zip(path: Path, **files: bytes | str) -> Path:
    """A zip as Moodle gives it: a folder for each student."""
    with zipfile.ZipFile(path, "w") as archive:
        for number, (name, content) in enumerate(files.items()):
            student, _, file = name.partition("__")
            archive.writestr(f"{student}_{number}_assignsubmission_file_/{file}", content)
    return path


def zipped(name: str, content: bytes | str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr(name, content)
    return data.getvalue()


def encrypted(path: Path, name: str) -> None:
    """Set the mark by which a zip says that an entry is encrypted."""
    data = bytearray(path.read_bytes())
    for mark, flag, at in ((b"PK\x03\x04", 6, 30), (b"PK\x01\x02", 8, 46)):
        start = 0
        while (start := data.find(mark, start)) >= 0:
            if data[start + at :].startswith(name.encode()):
                data[start + flag] |= 1
            start += 4
    path.write_bytes(data)


def test_every_kind_of_submission_has_a_row_that_describes_it(class_, tmp_path):
    good = json.dumps(toy.filled())
    path = moodle_zip(
        tmp_path / "in.zip",
        **{
            "Ada__01_toy.ipynb": good,
            "Bob__work.rar": b"Rar!",
            "Cleo__page.html": "<html>",
            "Dora__report.pdf": b"%PDF",
            "Emil__work.zip": zipped("deep.zip", zipped("01_toy.ipynb", good)),
            "Fred__01_toy.ipynb": "no notebook",
            "Gina__work.zip": b"PK broken",
            "Hugo__": b"",
            "Iris__01_toy.ipynb": good,
            "Jack__work.zip": zipped("readme.txt", "see my repository"),
        },
    )
    encrypted(path, "Iris")
    assert class_(source=path) == 1
    rows = table(tmp_path / "out" / "gradebook.csv")
    totals = {name: row["total"] for name, row in rows.items()}
    assert totals == {
        **{"Ada": "8", "Bob": "", "Cleo": "0", "Dora": "0", "Emil": "8", "Fred": ""},
        **{"Gina": "", "Hugo": "0", "Iris": "", "Jack": "0"},
    }
    for name, words in {
        "Bob": "NOT GRADED: work.rar is a .rar archive, which grading can't open. Unpack it",
        "Cleo": "No notebook was submitted, but page.html",
        "Dora": "report.pdf",
        "Fred": "NOT GRADED: 01_toy.ipynb can't be read",
        "Gina": "NOT GRADED: work.zip is a zip that can't be read",
        "Hugo": "Nothing was submitted",
        "Iris": "encrypted",
        "Jack": "readme.txt",
    }.items():
        assert words in rows[name]["remarks"], (name, rows[name]["remarks"])


def test_moodles_flat_files_give_name_and_number(class_, tmp_path):
    path = tmp_path / "flat.zip"
    mark = "_assignsubmission_file_"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"Zoë van der Q_123{mark}01_toy.ipynb", json.dumps(toy.filled()))
        archive.writestr(f"Bob_Jr_45{mark}work.pdf", b"")
        archive.writestr(f"Long_6{mark}{'x' * 300}.ipynb", json.dumps(toy.filled()))
    assert class_("--format", "moodle", source=path) == 0
    rows = table(tmp_path / "out" / "gradebook-moodle.csv")
    assert {name: (row["Identifier"], row["Grade"]) for name, row in rows.items()} == {
        "Zoë van der Q": ("Participant 123", "8"),
        "Bob_Jr": ("Participant 45", "0"),
        "Long": ("Participant 6", "8"),
    }
    names = zipfile.ZipFile(tmp_path / "out" / "feedback-moodle.zip").namelist()
    assert f"Zoë van der Q_123{mark}feedback.html" in names


@pytest.mark.parametrize("first", ["eve_2_3_", "Eve_2_assignsubmission_file_"])
def test_no_file_name_can_submit_for_another_student(tmp_path, first):
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{first}x_1000_assignsubmission_file_01_toy.ipynb", "{}")
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert {one.lms["id"] for one in found.students.values()} == {"2"}
    assert list(map(str.casefold, found.students)) == ["eve"]


def test_the_newest_of_several_files_in_a_zip_counts(tmp_path, course):
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name, year in (("better", 2026), ("draft", 2025)):
            entry = zipfile.ZipInfo(f"Ada/{name}.ipynb", (year, 1, 1, 12, 0, 0))
            archive.writestr(entry, json.dumps(toy.filled()))
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert newest(found.files, toy.LAB).name == "better.ipynb"


def test_a_whole_project_that_was_zipped_with_the_notebook_costs_nothing(tmp_path):
    project = io.BytesIO()
    with zipfile.ZipFile(project, "w") as archive:
        for number in range(2 * submissions.MOST_FILES_OF_ONE):
            archive.writestr(f"work/.git/objects/{number}/", b"")
            archive.writestr(f"work/.git/objects/{number}/{number}", b"")
        archive.writestr("work/01_toy.ipynb", "{}")
    (tmp_path / "in" / "Ada").mkdir(parents=True)
    (tmp_path / "in" / "Ada" / "work.zip").write_bytes(project.getvalue())
    (tmp_path / "scratch").mkdir()
    found = find(tmp_path / "in", tmp_path / "scratch", [toy.LAB])
    assert [(file.name, file.error) for file in found.files] == [("01_toy.ipynb", "")]


def test_an_empty_handout_next_to_the_work_does_not_count(class_, tmp_path):
    toy.hand_in(tmp_path / "in" / "Ada", "final", toy.filled())
    toy.hand_in(tmp_path / "in" / "Ada", toy.LAB, student_version(toy.reference(), toy.LAB))
    toy.hand_in(tmp_path / "in" / "Bob", toy.LAB, toy.filled())
    assert class_() == 0
    row = table(tmp_path / "out" / "gradebook.csv")["Ada"]
    assert row["total"] == "8"
    assert "This lab has 2 files, and final.ipynb counts" in row["remarks"]


def test_one_students_zip_bomb_leaves_room_for_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_OF_ONE", 3_000_000)
    monkeypatch.setattr(submissions, "MOST_FILES_OF_ONE", 200)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"{number}.ipynb", b"0" * 1_000_000)
        for number in range(900):
            archive.writestr(f"d{number}/" + "x/" * 50, b"")
            archive.writestr(f"f{number}/{number}.txt", b"")
    for name, content in (("Ada/01_toy.ipynb", b"{}"), ("Eve/a.zip", bomb.getvalue())):
        (tmp_path / "in" / name).parent.mkdir(parents=True)
        (tmp_path / "in" / name).write_bytes(content)
    (tmp_path / "in" / "Eve" / "b.zip").write_bytes(bomb.getvalue())
    (tmp_path / "scratch").mkdir()
    found = find(tmp_path / "in", tmp_path / "scratch", [toy.LAB])
    assert [bool(f.error) for f in found.files if f.student.name == "Ada"] == [False]
    there = list((tmp_path / "scratch").rglob("*"))
    assert sum(one.stat().st_size for one in there if one.is_file()) < 5_000_000
    assert sum(one.is_dir() for one in there) < 1000


def test_a_notebook_that_takes_gigabytes_to_parse_is_not_parsed(reference, tmp_path, monkeypatch):
    nb = toy.filled()
    for one in nb.cells[2:6]:
        one.source = "%%px\n" + "1;" * 2_000_000
        one.metadata, one.id = {}, "x"
    lines = toy.cell(nb, "mean-answer")
    lines.source = "\n" * 3_000_000 + lines.source
    parse, longest = ast.parse, []

    def parsed(source, *more, **others):
        longest.append(len(source))
        return parse(source, *more, **others)

    monkeypatch.setattr(ast, "parse", parsed)
    _defined.cache_clear()  # what other tests have read is parsed again
    begin = time.process_time()
    assemble(reference, toy.hand_in(tmp_path, "eve", nb))
    assert max(longest) <= MOST_SOURCE
    assert time.process_time() - begin < 20


def test_a_notebook_of_a_million_cells_is_graded_as_far_as_it_is_read(
    reference, tmp_path, monkeypatch
):
    monkeypatch.setattr(notebook_file, "MOST_CELLS", 100)
    nb = json.dumps({"cells": [{}] * 101})
    done = assemble(reference, toy.hand_in(tmp_path, "eve", nb))
    assert done.error == ""
    assert "Only the first 100 of 101 cells were read." in done.remarks


@pytest.mark.parametrize("where", ["metadata", "outputs"])
def test_a_notebook_that_is_nested_too_deep_for_json_is_graded(reference, tmp_path, where):
    nb = json.loads(json.dumps(toy.filled()))
    nb["cells"][0][where] = "DEEP"
    text = json.dumps(nb).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)
    done = assemble(reference, toy.hand_in(tmp_path, "eve", text))
    assert done.error == ""
    assert all(answer.changed for answer in done.answers.values())


def test_a_notebook_of_thousands_of_cells_does_not_delay_the_class(
    reference, tmp_path, monkeypatch
):
    nb = toy.without_metadata(toy.filled())
    nb.cells += [new_code_cell(f"%%px\ndef f{k}():\n    pass", id=f"x{k}") for k in range(300)]
    for cell in nb.cells:
        cell.source = cell.source.replace("def t", "def another_t").replace(
            "def s", "def another_s"
        )
    parse, parsed = ast.parse, []
    monkeypatch.setattr(ast, "parse", lambda *a, **more: parsed.append(a) or parse(*a, **more))
    assemble(reference, toy.hand_in(tmp_path, "eve", nb))
    assert len(parsed) < 3 * 300


#: What a student can put into a readable notebook as often as the student likes.
AT_WILL = {
    "many lines for the shell": "!a\n" * 501,
    "a deep expression": f"x = {'-' * 9_000}1",
    "deep brackets": f"x = {'(' * 9_000}{')' * 9_000}",
    "a long string": f"x = '{'y' * 190_000}'",
    "a number of many digits": f"x = 1{'0' * 9_000}",
    "half characters": "x = '\ud800'",
}


@pytest.mark.parametrize("place", ["an answer", "a cell of the student's own"])
@pytest.mark.parametrize("what", AT_WILL)
def test_no_cell_can_make_a_submission_not_graded(what, place, class_, runs, tmp_path, capsys):
    source = f"%%px\n{AT_WILL[what]}"
    nb = toy.filled(twice=source if place == "an answer" else None, swap=None)
    if place != "an answer":
        nb.cells.insert(2, new_code_cell(source, id="mine"))
    toy.hand_in(tmp_path / "in", "Eve", nb)
    assert class_() == 0
    row = table(tmp_path / "out" / "gradebook.csv")["Eve"]
    assert float(row["total"]) >= 5, capsys.readouterr()
    assert "NOT GRADED" not in row["remarks"]


def test_an_own_cell_that_ends_every_run_before_the_first_task_costs_no_grade(
    reference, tmp_path, monkeypatch
):
    class Harmed(toy.Pretended):
        def __call__(self, nb, *args, **more):
            own = any(cell.metadata.get("own") for cell in nb.cells)
            why = "cell 'ranks-join' before the first task failed"
            self.ends = {"ranks-join": (why, ())} if own else {}
            return super().__call__(nb, *args, **more)

    nb = toy.filled()
    nb.cells.insert(1, new_code_cell("%%px\ndist = None", id="mine"))
    monkeypatch.setattr(grader, "run", Harmed(reference, {}))
    result = grade(toy.hand_in(tmp_path, "eve", nb), reference, Box(), tmp_path / "out")
    assert (result.points, result.error) == (8, "")
    assert any("Added cells were left out" in remark for remark in result.remarks)


MANY_SOCKETS = """
import socket
pairs = [socket.socketpair() for _ in range(400)]
print("open", flush=True)
input()
"""


def test_memory_that_linux_holds_for_many_sockets_counts():
    command = [sys.executable, "-c", MANY_SOCKETS]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout.readline() == "open\n"
        found = [psutil.Process(process.pid)]
        assert use_more(found, 10**9)
        assert not use_more(found, 2 * 10**9)
        process.communicate("")


@pytest.mark.parametrize(("where", "points"), [("swap-check", 6), ("ranks-join", None)])
def test_an_answer_that_uses_all_memory_of_a_small_machine_is_still_graded(
    reference, tmp_path, monkeypatch, where, points
):
    class Hungry(toy.Pretended):
        def __call__(self, nb, *args, **more):
            done = super().__call__(nb, *args, **more)
            if done.end:
                done.fault, done.out_of_memory = "the system ended a process", True
            return done

    hungry = Hungry(reference, {where: ("the ranks are gone", ("1.2",))})
    monkeypatch.setattr(grader, "run", hungry)
    result = grade(toy.hand_in(tmp_path, "eve", toy.filled()), reference, Box(), tmp_path / "out")
    assert (bool(result.error), result.task("1.2").points) == (points is None, points and 0)
    assert result.points == (points or 0)


def test_a_notebook_that_belongs_to_no_lab_gets_a_zero_with_a_remark(
    class_, everyone, course, tmp_path
):
    shutil.copytree(course / "solutions", tmp_path / "solutions")
    other = new_notebook(cells=[new_markdown_cell("nothing of a lab")])
    toy.hand_in(tmp_path / "solutions", "02_other", toy.reference())
    toy.hand_in(tmp_path / "in", "Fay", json.dumps(other))
    assert class_("--solutions", str(tmp_path / "solutions")) == 0
    row = table(tmp_path / "out" / "gradebook.csv")["Fay"]
    assert row["total"] == "0"
    assert "The lab of Fay.ipynb is unknown" in row["remarks"]


def test_no_file_name_is_interpreted_by_a_terminal_or_a_spreadsheet(
    class_, everyone, tmp_path, capsys, monkeypatch
):
    name = "\x1b]0;owned\x07;=1+1.ipynb"
    (everyone / "Eve").mkdir()
    (everyone / "Eve" / name).write_text("{")
    (everyone / "Ada.ipynb").rename(everyone / "x\udcff.ipynb")
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert class_() == 1
    said = "".join(capsys.readouterr())
    assert "NOT GRADED: Eve" in said
    assert "\x1b" not in said
    text = (tmp_path / "out" / "gradebook.csv").read_text()
    assert "\x1b" not in text
    assert ";=" not in text


@pytest.mark.parametrize("first", "=+-@\t\r＝＋－＠")
def test_a_formula_in_any_script_is_text(first):
    assert gradebook.harmless(f"{first}1+1").startswith("'")


def test_a_folder_of_files_has_a_row_for_each_student(tmp_path):
    folder = tmp_path / "in"
    toy.hand_in(folder, "Ada", "{}")
    (folder / "Bob.rar").touch()
    (folder / "Cleo.zip").write_bytes(zipped("01_toy.ipynb", "{}"))
    (folder / "roster.csv").touch()
    (folder / ".DS_Store").touch()
    found = find(folder, tmp_path, [toy.LAB])
    assert set(found.students) == {"Ada", "Bob", "Cleo"}
    assert {file.student.name for file in found.files} == {"Ada", "Cleo"}
    assert "roster.csv" in " ".join(found.remarks[""])
    (folder / "Dora").mkdir()
    assert "Bob" not in find(folder, tmp_path, []).students, "beside folders a file is nobody's"


def test_a_notebook_with_a_second_suffix_is_graded(class_, tmp_path):
    folder = tmp_path / "in"
    for name in ("Ada", "Bob_LATE_12_34_01_toy-1", "Cleo_1_assignsubmission_file_01_toy"):
        toy.hand_in(folder, name, toy.filled())
        (folder / f"{name}.ipynb").rename(folder / f"{name}.ipynb.txt")
    assert class_() == 0
    rows = table(tmp_path / "out" / "gradebook.csv")
    assert {name: row["total"] for name, row in rows.items()} == dict.fromkeys(NAMES[:3], "8")


def test_two_folders_whose_names_look_alike_are_two_students(tmp_path):
    folder = tmp_path / "in"
    for name in ("Ada Lovelace", "Ada  Lovelace"):
        toy.hand_in(folder / name, "01_toy", "{}")
    found = find(folder, tmp_path, [])
    assert {file.student.name for file in found.files} == {"Ada Lovelace", "Ada Lovelace (2)"}
    assert "folders have this name" in found.remarks["Ada Lovelace (2)"][0]


def test_a_folder_or_a_pipe_named_like_a_notebook_does_not_stop_grading(tmp_path):
    folder = tmp_path / "in"
    (folder / "Eve.ipynb").mkdir(parents=True)
    (folder / "Ada" / "01_toy.ipynb").mkdir(parents=True)
    os.mkfifo(folder / "pipe.ipynb")
    toy.hand_in(folder / "Bob", "01_toy", "{}")
    found = find(folder, tmp_path, [])
    assert set(found.students) == {"Ada", "Bob", "Eve.ipynb"}
    assert [file.student.name for file in found.files] == ["Bob"]
    assert "pipe.ipynb" in found.remarks[""][0]


def test_a_students_folder_that_can_not_be_opened_does_not_lead_to_a_zero(
    class_, tmp_path, monkeypatch
):
    for name in ("Ada", "Bob"):
        toy.hand_in(tmp_path / "in" / name, "01_toy", toy.filled())
    iterdir = Path.iterdir

    def refuse(path: Path):
        if path.name == "Bob":
            raise PermissionError(errno.EACCES, "Permission denied")
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert class_() == 1
    row = table(tmp_path / "out" / "gradebook.csv")["Bob"]
    assert row["total"] == ""
    assert "Bob can't be read: Permission denied" in row["remarks"]


def test_an_entry_that_is_damaged_costs_no_other_student(tmp_path):
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("Ada", "Bob"):
            archive.writestr(f"{name}/01_toy.ipynb", json.dumps(toy.filled()))
        archive.writestr("Cleo", "a file")
        archive.writestr("Cleo/01_toy.ipynb", "and a folder of the same name")
        archive.writestr("Dora/01_toy.ipynb", "{}")
    data = bytearray(path.read_bytes())
    at = data.index(b"Ada/01_toy.ipynb") + len("Ada/01_toy.ipynb")
    data[at : at + 50] = b"\xff" * 50
    path.write_bytes(data)
    found = find(path, tmp_path / "scratch", [])
    errors = {file.student.name: bool(file.error) for file in found.files}
    assert errors == {"Ada": True, "Bob": False, "Dora": False}
    assert "Cleo/01_toy.ipynb can't be unpacked" in " ".join(found.remarks[""])


def test_no_room_to_unpack_a_zip_is_not_the_students_fault(tmp_path, monkeypatch):
    path = moodle_zip(tmp_path / "in.zip", **{"Ada__01_toy.ipynb": "{}"})
    open_ = Path.open

    def full(self: Path, mode: str = "r", *arguments, **more):
        if mode == "wb":
            raise OSError(errno.ENOSPC, "No space left on device")
        return open_(self, mode, *arguments, **more)

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(SubmissionsError, match="no room to unpack"):
        find(path, tmp_path / "scratch", [])


def test_a_student_beyond_the_limit_of_a_zip_has_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr(submissions, "MOST_FILES", 2)
    path = moodle_zip(tmp_path / "in.zip", **{f"{name}__01_toy.ipynb": "{}" for name in NAMES})
    found = find(path, tmp_path / "scratch", [])
    assert list(found.students) == list(NAMES)
    assert [bool(file.error) for file in found.files] == [False, False, True, True, True]


def test_an_unreadable_notebook_of_an_unknown_lab_does_not_get_a_zero(class_, course, tmp_path):
    shutil.copytree(course / "solutions", tmp_path / "solutions")
    nb = toy.reference()
    for cell in nb.cells:
        cell.id = f"other-{cell.id}"
        if "nbgrader" in cell.metadata:
            cell.metadata.nbgrader.grade_id = f"other-{cell.metadata.nbgrader.grade_id}"
    toy.hand_in(tmp_path / "solutions", "02_other", nb)
    toy.hand_in(tmp_path / "in" / "Ada", "01_toy", toy.filled())
    toy.hand_in(tmp_path / "in" / "Bob", "final", "{")
    options = ["--solutions", str(tmp_path / "solutions")]
    assert class_(*options) == 1
    row = table(tmp_path / "out" / "gradebook.csv")["Bob"]
    assert row["total"] == ""
    assert "The lab of final.ipynb is unknown" in row["remarks"]
    shutil.rmtree(tmp_path / "in" / "Ada")
    assert class_(*options) == 2, "nobody's lab is known: no book of zeros"


@pytest.mark.parametrize("entries", ["folders", "files alone"])
def test_in_a_zipped_folder_every_student_has_a_row_and_every_archive_is_reported(
    tmp_path, entries
):
    """Ten notebooks with a picture each, then one who has packed it, and one with a PDF only."""
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(12):
            folder = f"submissions/S{number:02}"
            if entries == "folders":
                archive.writestr(f"{folder}/", "")
            files = {10: ["answers.rar"], 11: ["answers.pdf"]}
            for name in files.get(number, ["01_toy.ipynb", "screen.png"]):
                archive.writestr(f"{folder}/{name}", "{}")
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert list(found.students) == [f"S{number:02}" for number in range(12)]
    assert "Unpack it." in " ".join(found.closed["S10"])
    assert found.others["S11"] == ["answers.pdf"]


def test_an_archive_after_many_pictures_does_not_lead_to_a_zero(tmp_path):
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Bob/01_toy.ipynb", "{}")
        for number in range(2 * submissions.MOST_LISTED):
            archive.writestr(f"Ada/pictures/{number}.png", "")
        archive.writestr("Ada/pictures/work.7z", "")
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert list(found.closed) == ["Ada"]
    assert len(found.others["Ada"]) == submissions.MOST_LISTED


def test_an_older_attempt_does_not_replace_an_unreadable_attempt(class_, tmp_path):
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for attempt, name in ((1, "01_toy"), (2, "01_toy-1")):
            archive.writestr(f"ada_7_{attempt}_{name}.ipynb", json.dumps(toy.filled(total=None)))
        archive.writestr("bob_8_3_01_toy.ipynb", json.dumps(toy.filled()))
    encrypted(path, "ada_7_2")
    assert class_(source=path) == 1
    rows = table(tmp_path / "out" / "gradebook.csv")
    assert {name: row["total"] for name, row in rows.items()} == {"ada": "", "bob": "8"}
    assert "NOT GRADED" in rows["ada"]["remarks"]


def test_a_fixed_rubric_regrades_no_student_and_a_changed_check_regrades_all(tmp_path):
    nb = toy.reference()
    at = nb.cells.index(toy.cell(nb, "explain-answer")) + 1
    about = {"lab": {"instructor": "rubric"}, "tags": ["remove-cell"]}
    nb.cells.insert(at, new_markdown_cell("**Rubric** is to bee mended", metadata=about))
    prints = [Reference(toy.hand_in(tmp_path, toy.LAB, nb)).fingerprint()]
    for cell, source in ((nb.cells[at], "**Rubric**"), (toy.cell(nb, "swap-check"), "1")):
        cell.source = source
        prints.append(Reference(toy.hand_in(tmp_path, toy.LAB, nb)).fingerprint())
    assert prints[0] == prints[1] != prints[2]


def test_points_that_are_saved_while_pages_are_written_count_in_the_next_round(
    class_, tmp_path, monkeypatch
):
    toy.hand_in(tmp_path / "in", "Ada", toy.filled())
    out, write, looks = tmp_path / "out", command.write_pages, []

    def pages_and_points(*arguments):
        if not looks:
            enter(out, "Ada", "2")
        return write(*arguments)

    def look(_: float) -> None:
        looks.append(1)
        if len(looks) == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command, "write_pages", pages_and_points)
    monkeypatch.setattr(command, "sleep", look)
    assert class_("--watch") == 0
    assert table(out / "gradebook.csv")["Ada"]["total"] == "10"


def test_ctrl_c_in_a_later_round_mentions_the_books_that_exist(
    class_, everyone, monkeypatch, capsys
):
    rounds, seek = [], command.find

    def found(*arguments):
        rounds.append(1)
        if len(rounds) > 1:
            signal.raise_signal(signal.SIGINT)
        return seek(*arguments)

    monkeypatch.setattr(command, "find", found)
    monkeypatch.setattr(command, "_until_changed", lambda *_: None)
    assert class_("--watch") == 130
    assert (
        "The gradebook is still the earlier one; continue with --resume." in capsys.readouterr().err
    )
