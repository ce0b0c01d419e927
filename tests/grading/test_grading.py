"""Grading: what students would lose, what they could steal, and what an instructor gets.

Fast tests of the parts; then one small class graded in the sandbox. The whole matrix of attacks
and accidents, thirty submissions, takes minutes and runs on demand:

    GRADE_TABLE=table.md .venv/bin/python -m pytest -m matrix tests/grading/test_grading.py
"""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path

import grading_tools as toy
import nbformat
import psutil
import pytest
from mpi_jobs import run_tree
from nbformat.v4 import new_code_cell

from utils.checks.verdict import Verdict
from utils.course.execute import RUN_VARIABLE
from utils.course.notebook import SOLUTIONS, dumps, lab, notebooks, read
from utils.grading import gradebook, notebook_file, pages, statistics
from utils.grading.assembly import Answer, Assembled, assemble, choose, forced
from utils.grading.grader import grade
from utils.grading.pages import explain, feedback, summary, task_summary
from utils.grading.reference import LabError, Reference, references
from utils.grading.results import (
    Result,
    Shown,
    TaskResult,
    explicit_pass,
    load,
    save,
    shown,
    tidied,
    total,
)
from utils.grading.sandbox import FIRST_UID, LAST_UID, Box, Limits, SandboxError, require
from utils.grading.submissions import MB, File, Student, SubmissionsError, find, student_folders
from utils.grading.worklist import match, newest

ROOT = Path(__file__).resolve().parents[2]
#: Seconds for a cell and for a submission of the toy lab; for a class.
CELL, SUBMISSION, CLASS = 25, 600, 1800


def why_no_sandbox() -> str:
    """Why bubblewrap can't be used here; "" where it can."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        try:
            require(Box(), Path(folder))
        except SandboxError as error:
            return str(error).splitlines()[0]
    return ""


NO_SANDBOX = why_no_sandbox()
sandboxed = pytest.mark.skipif(bool(NO_SANDBOX), reason=NO_SANDBOX or "bubblewrap works")


def command(course: Path, submissions: Path, out: Path, *options: str) -> list[str]:
    """The command line that grades the toy lab."""
    return [
        *(sys.executable, "-m", "utils", "grade", str(submissions), "-o", str(out), "--quiet"),
        *("--solutions", str(course / "solutions"), "--path", str(course / "checks")),
        *("--cell-timeout", str(CELL), "--timeout", str(SUBMISSION), "--memory", "4", *options),
    ]


def run_grade(course: Path, submissions: Path, out: Path, *options: str, timeout: float = CLASS):
    """Grade; returns the finished process."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    line = command(course, submissions, out, *options)
    return run_tree(line, timeout=timeout, env=env, cwd=ROOT)


def stored(out: Path) -> dict[str, Result]:
    """The results in a folder, by student."""
    found = [load(path) for path in out.glob("students/*/*/result.json")]
    return {one.student: one for one in found}


def running() -> list[str]:
    """Processes of grading runs of this session that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            env = process.environ()
            ours = "grading" in " ".join(process.cmdline()) or RUN_VARIABLE in env
            if FIRST_UID <= process.uids().real < LAST_UID or (
                ours and env.get("DDL_LABS_TEST_SESSION") == os.environ["DDL_LABS_TEST_SESSION"]
            ):
                found.append(" ".join(process.cmdline())[:120])
        except (psutil.Error, OSError):
            pass
    return found


# --- whose notebooks there are -------------------------------------------------------------------


def names(folder: Path, tmp_path: Path) -> dict[str, list[str]]:
    """Student → names of files."""
    found = find(folder, tmp_path / "scratch", [toy.LAB])
    files: dict[str, list[str]] = {name: [] for name in found.students}
    for file in found.files:
        files[file.student.name].append(file.name)
    return files


def test_a_folder_of_notebooks_names_the_students(tmp_path):
    folder = tmp_path / "in"
    for name in ("Ada Lovelace", "Zoë Müller-Ångström", "01_toy_Bob", "李 小龙", "01_toy"):
        toy.hand_in(folder, name, "{}")
    assert set(names(folder, tmp_path)) == {
        *("Ada Lovelace", "Zoë Müller-Ångström", "Bob", "李 小龙", "01_toy")
    }


def test_a_decomposed_name_is_the_same_student(tmp_path):
    folder = tmp_path / "in"
    toy.hand_in(folder / "Zoe\u0308", "a", "{}")
    assert list(names(folder, tmp_path)) == ["Zoë"]


def test_a_folder_per_student_may_hold_several_labs_and_checkpoints(tmp_path):
    folder = tmp_path / "in"
    toy.hand_in(folder / "Ada" / "deep", "01_toy", "{}")
    toy.hand_in(folder / "Ada", "02_other", "{}")
    toy.hand_in(folder / "Ada" / ".ipynb_checkpoints", "01_toy-checkpoint", "{}")
    (folder / "Bob").mkdir()
    assert names(folder, tmp_path) == {"Ada": ["02_other.ipynb", "01_toy.ipynb"], "Bob": []}


def test_a_zip_of_moodle_gives_names_and_numbers(tmp_path):
    path = tmp_path / "moodle.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Ada Lovelace_123_assignsubmission_file_/my work.ipynb", "{}")
        archive.writestr("Zoë_Q_456_assignsubmission_file_/01_toy.ipynb", "{}")
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert set(found.students) == {"Ada Lovelace", "Zoë_Q"}
    assert found.students["Ada Lovelace"].lms == {
        "system": "moodle",
        "id": "123",
        "folder": "Ada Lovelace_123_assignsubmission_file_",
    }


def test_a_zip_of_canvas_gives_names_numbers_and_attempts(tmp_path):
    path = tmp_path / "canvas.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("lovelaceada_123_9001_01_toy-1.ipynb", "{}")
        archive.writestr("lovelaceada_123_9005_01_toy-2.ipynb", "{}")
        archive.writestr("babbage_LATE_456_9002_01_toy.ipynb", "{}")
    found = find(path, tmp_path / "scratch", [toy.LAB])
    assert {name: one.lms["id"] for name, one in found.students.items()} == {
        "lovelaceada": "123",
        "babbage": "456",
    }
    assert found.remarks == {"babbage": ["The submission was late."]}
    mine = [file for file in found.files if file.student.name == "lovelaceada"]
    assert newest(mine, toy.LAB).attempt == 9005


def test_two_students_with_the_same_name_stay_two(tmp_path):
    folder = tmp_path / "in"
    for number in (1, 2):
        toy.hand_in(folder / f"Jan Novak_{number}_assignsubmission_file_", "01_toy", "{}")
    assert names(folder, tmp_path) == {
        "Jan Novak": ["01_toy.ipynb"],
        "Jan Novak (2)": ["01_toy.ipynb"],
    }


def test_a_student_who_submits_a_zip_is_not_lost(tmp_path):
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("work/01_toy.ipynb", "{}")
    path = tmp_path / "in.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("Ada_1_assignsubmission_file_/work.zip", inner.getvalue())
        archive.writestr("Bob_2_assignsubmission_file_/01_toy.ipynb", "{}")
    assert names(path, tmp_path)["Ada"] == ["01_toy.ipynb"]


def test_a_zip_can_neither_write_outside_its_folder_nor_make_links(tmp_path):
    path = tmp_path / "evil.zip"
    link = zipfile.ZipInfo("Eve/link.ipynb")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../outside.ipynb", "{}")
        archive.writestr("/tmp/absolute-grading.ipynb", "{}")
        archive.writestr("C:\\windows.ipynb", "{}")
        archive.writestr(link, "/etc/passwd")
        archive.writestr("Ada/01_toy.ipynb", "{}")
        archive.writestr("Bob/01_toy.ipynb", "{}")
    found = find(path, tmp_path / "a" / "b" / "scratch", [toy.LAB])
    assert {file.student.name for file in found.files} == {"Ada", "Bob"}
    assert not list(tmp_path.rglob("outside.ipynb"))
    assert not Path("/tmp/absolute-grading.ipynb").exists()
    said = " ".join(found.remarks[""])
    assert said.count("points outside its folder") == 3
    assert "Eve/link.ipynb was left out, because it is a link" in said


@pytest.fixture
def at_one_mb(monkeypatch) -> None:
    """Notebooks are too large to be read at once from 1 MB on, not only from 25."""
    assert notebook_file.MOST_NOTEBOOK == 25 * MB
    monkeypatch.setattr(notebook_file, "MOST_NOTEBOOK", MB)


def large(source: str = "1") -> str:
    """A toy submission with outputs of 1.4 MB, 0.4 of them a text in one piece."""
    nb = json.loads(json.dumps(toy.filled()))
    outputs = [{"text": ["step\n"] * 100_000}, {"text": "x" * 400_000}]
    nb["cells"].append({"cell_type": "code", "outputs": outputs, "source": source})
    return json.dumps(nb)


@pytest.mark.usefixtures("at_one_mb")
def test_a_notebook_that_has_printed_too_much_is_graded_without_its_outputs(reference, tmp_path):
    path = toy.hand_in(tmp_path, "prints", large())
    assert path.stat().st_size > notebook_file.MOST_NOTEBOOK
    small = assemble(reference, toy.hand_in(tmp_path, "quiet", toy.filled()))
    done = assemble(reference, path)
    assert done.answers == small.answers
    assert not any("not a notebook" in remark for remark in done.remarks)


@pytest.mark.usefixtures("at_one_mb")
def test_the_first_part_of_a_notebook_that_is_too_large_is_graded(reference, tmp_path):
    long = large("x" * notebook_file.MOST_NOTEBOOK)
    done = assemble(reference, toy.hand_in(tmp_path, "types", long))
    assert done.error == ""
    assert "Only the first 1 MB, without outputs, were read." in done.remarks
    cut = toy.hand_in(tmp_path, "cut", large()[:-9])
    assert "Clearing its outputs may help" in assemble(reference, cut).error


def test_a_zip_bomb_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr("utils.grading.submissions.MOST_FILE", 200_000)
    monkeypatch.setattr("utils.grading.submissions.MOST_UNPACKED", 600_000)
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(9):
            archive.writestr(f"s{number}/a.ipynb", b"0" * 4_000_000)
    found = find(path, tmp_path / "scratch", [toy.LAB])
    size = sum(file.stat().st_size for file in (tmp_path / "scratch").rglob("*.ipynb"))
    assert size < 1_000_000
    assert "over the limit" in " ".join(found.remarks[""])


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x03\x04broken"])
def test_a_broken_zip_ends_with_a_message(tmp_path, content):
    path = tmp_path / "broken.zip"
    path.write_bytes(content)
    with pytest.raises(SubmissionsError, match="no notebook"):
        find(path, tmp_path / "scratch", [])


def test_links_in_a_folder_are_not_followed(tmp_path):
    folder = tmp_path / "in"
    toy.hand_in(folder / "Ada", "01_toy", "{}")
    secret = toy.hand_in(tmp_path, "secret", "{}")
    (folder / "Ada" / "link.ipynb").symlink_to(secret)
    (folder / "Eve.ipynb").symlink_to(secret)
    found = find(folder, tmp_path / "scratch", [])
    assert [file.name for file in found.files] == ["01_toy.ipynb"]
    assert "not followed" in found.remarks["Ada"][0]
    assert "not followed" in found.remarks[""][0]


def test_students_whose_names_differ_only_in_case_have_separate_folders(tmp_path):
    folders = student_folders(["ada", "Ada", "a/b", "a:b", ".."], tmp_path)
    assert len({str(one).casefold() for one in folders.values()}) == 5
    assert all(one.parent == tmp_path / "students" for one in folders.values())


# --- which lab a file is ------------------------------------------------------------------------


def a_file(tmp_path: Path, name: str, nb) -> File:
    return File(Student("Ada"), toy.hand_in(tmp_path, name, nb), f"{name}.ipynb")


def test_a_renamed_file_is_recognized_by_its_cells(tmp_path, reference):
    others = {"02_other": {"x-answer"}}
    assert match(a_file(tmp_path, "final FINAL (2)", toy.filled()), [reference], others) == toy.LAB
    assert match(a_file(tmp_path, "02_other", toy.filled()), [reference], others) == toy.LAB


def test_a_file_that_nobody_can_read_is_recognized_by_its_name(tmp_path, reference):
    others = {"02_other": {"x-answer"}}
    assert match(a_file(tmp_path, "ada_01_TOY", "{"), [reference], others) == toy.LAB
    assert match(a_file(tmp_path, "02_other", "{"), [reference], others) == "02_other"


# --- assembly ------------------------------------------------------------------------------------


def assembled(tmp_path: Path, reference: Reference, nb):
    return assemble(reference, toy.hand_in(tmp_path, "ada", nb))


def source_of(done, cell_id: str) -> str:
    return toy.cell(done.notebook(), cell_id).source


def test_only_a_students_answers_are_taken_from_the_file(tmp_path, reference):
    nb = toy.filled(twice="return number + number")
    for one in nb.cells:
        if not one.id.endswith("-answer"):
            one.source = "raise SystemExit"
    done = assembled(tmp_path, reference, nb)
    assert "number + number" in source_of(done, "twice-answer")
    for ours, theirs in zip(reference.nb.cells, done.notebook().cells, strict=True):
        if not ours.id.endswith("-answer"):
            assert ours.source == theirs.source
    assert done.remarks == []


def test_only_the_outputs_of_checks_are_compared(tmp_path, reference):
    nb = assembled(tmp_path, reference, toy.filled()).notebook()
    for one in nb.cells:
        if one.cell_type == "code":
            is_check = bool(lab(one).get("check"))
            assert (one.execution_count is not None) == is_check
            assert bool(one.outputs) == is_check


@pytest.mark.parametrize(
    "source",
    ["%%px --local\nf()", "\n\n%%bash\nf()", "%%px\n%%px --local\nf()", "f()", "  %%capture\nf()"],
)
def test_an_answer_can_not_leave_the_ranks(reference, source):
    cell = reference.answer_cells["twice-answer"]
    assert forced(source, cell) == "%%px\nf()"


def test_an_answer_that_a_lab_runs_in_the_kernel_too_is_graded_on_the_ranks_only():
    cell = new_code_cell("%%px --local\nf()")
    assert forced("%%px --local\ng()", cell) == "%%px\ng()"


def test_answers_are_found_without_any_metadata(tmp_path, reference):
    nb = toy.without_metadata(toy.filled(twice="return number + number"))
    done = assembled(tmp_path, reference, nb)
    assert "number + number" in source_of(done, "twice-answer")
    assert all(answer.changed for answer in done.answers.values())
    assert any("lost its id" in remark for remark in done.remarks)


def test_answers_are_found_in_any_order(tmp_path, reference):
    nb = toy.filled(twice="return number + number")
    nb.cells.reverse()
    assert "number + number" in source_of(assembled(tmp_path, reference, nb), "twice-answer")


STUB = "%%px\ndef f():\n    raise NotImplementedError"


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        ([STUB, "%%px\ndef f():\n    return 1"], "return 1"),
        (["%%px\ndef f():\n    return 1", STUB], "return 1"),
        (["%%px\ndef f():\n    return 1", "%%px\ndef f():\n    return 2"], "return 2"),
        (["%%px\ndef helper():\n    return 3", "%%px\ndef f():\n    return helper()"], "return 3"),
        (["%%px\ndef f():\n    x = 1", "    return x"], "x = 1\n    return x"),
    ],
    ids=["stub first", "stub last", "the last one", "helper beside", "split in the middle"],
)
def test_a_copied_or_split_cell_is_not_lost(copies, expected):
    source, remark = choose(copies, STUB)
    assert expected in source
    assert bool(remark) == (STUB not in copies)


@pytest.mark.parametrize(
    "name", [name for name, (_, points) in toy.accidents().items() if not points]
)
def test_a_damaged_notebook_leads_to_a_remark_and_not_to_a_crash(tmp_path, reference, name):
    done = assembled(tmp_path, reference, toy.accidents()[name][0])
    assert not any(answer.changed for answer in done.answers.values())
    assert done.remarks or done.error or name == "is as handed out"
    assert bool(done.error) == (toy.accidents()[name][1] is None)


def test_a_file_that_is_too_large_is_not_read(tmp_path, reference, monkeypatch):
    path = tmp_path / "large.ipynb"
    with path.open("wb") as file:
        file.truncate(3_000_000_000)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("was read"))
    done = assemble(reference, path)
    assert "the limit is 200 MB" in done.error


@pytest.mark.parametrize(
    "cells",
    ["[[[[", '"text"', '[{"cell_type": 3, "source": {"a": 1}, "metadata": []}]', "[null, 7]",
     '[{"cell_type": "code", "source": [1, null], "metadata": {"nbgrader": [1]}, "id": {}}]',
     "[" * 100_000],
)  # fmt: skip
def test_nonsense_in_json_does_not_crash_the_grader(tmp_path, reference, cells):
    assembled(tmp_path, reference, f'{{"cells": {cells}}}')


def test_lone_surrogates_and_null_characters_can_be_written(tmp_path, reference):
    nb = toy.filled(twice="return '\ud800\0'")
    done = assembled(tmp_path, reference, json.dumps(nb))
    assert dumps(done.notebook()).encode()


def test_an_extremely_long_answer_is_not_graded(tmp_path, reference):
    nb = toy.filled(twice="return 1 #" + "x" * 300_000)
    done = assembled(tmp_path, reference, nb)
    assert done.answers["twice-answer"].source is None
    assert "was not graded" in done.remarks[0]


def test_a_solution_whose_check_has_no_verdict_is_refused(tmp_path):
    nb = toy.reference()
    toy.cell(nb, "total-check").outputs = []
    path = tmp_path / f"{toy.LAB}.ipynb"
    path.write_text(dumps(nb), encoding="utf-8")
    with pytest.raises(LabError, match="cell 'total-check'"):
        Reference(path)


def test_the_error_names_an_unknown_lab(course):
    with pytest.raises(LabError, match="There is no lab 07"):
        references(course / "solutions", ["07"])


def test_a_lab_that_is_not_ready_does_not_stop_other_labs_from_being_graded(course, tmp_path):
    shutil.copytree(course / "solutions", tmp_path / "solutions")
    toy.hand_in(tmp_path / "solutions", "02_other", "{")
    found, broken = references(tmp_path / "solutions")
    assert [one.lab for one in found] == [toy.LAB]
    assert "not a notebook" in broken["02_other"]


# --- cells that no answer needs ------------------------------------------------------------------


def cells_run(folder: Path, name: str, *edits: tuple[str, str]) -> list[str]:
    """The ids of the code cells that grading runs of a lab's solution with some changes."""
    nb = nbformat.read(SOLUTIONS / f"{name}.ipynb", 4)
    for cell in nb.cells:
        for wanted, source in edits:
            cell.source = source if cell.id == wanted else cell.source
    reference = Reference(SOLUTIONS / f"{name}.ipynb")
    graded = assemble(reference, toy.hand_in(folder, "ada", nb)).notebook()
    return [cell.id for cell in graded.cells if cell.cell_type == "code"]


def test_grading_does_not_wait_for_examples_and_pictures_that_no_answer_needs(tmp_path):
    cells = cells_run(tmp_path, "03_data_parallel")
    assert {"speed-run", "bug-run", "average-picture"}.isdisjoint(cells)
    assert {"ranks-up", "ranks-join", "step-answer", "step-check", "run-run"} <= set(cells)


def test_an_answer_that_uses_a_name_of_an_example_finds_it(tmp_path):
    before = set(cells_run(tmp_path, "06_allreduce"))
    answer = "%%px\nfrom math import pi\n\ndef central(x, group=None):\n    tree(x, group)\n"
    after = set(cells_run(tmp_path, "06_allreduce", ("central-answer", answer)))
    assert after - before == {"tree-define"}


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_no_check_of_a_real_lab_is_left_out(path):
    reference = Reference(path)
    graded = Assembled(reference, {name: Answer(None) for name in reference.answer_cells})
    ids = {cell.id for cell in graded.notebook().cells}
    assert {cell.id for cell in reference.nb.cells if lab(cell).get("check")} <= ids
    assert "ranks-up" in ids
    assert not reference.unprotected


# --- points --------------------------------------------------------------------------------------


def check_record(reference: Reference, **changes) -> dict:
    record = {"cell": "total-check", "outcome": "passed", "seconds": 1.0, "end": None}
    record |= {"outputs": [], "verdicts": reference.expected["total-check"]}
    return record | changes


def test_points_need_an_explicit_pass(reference):
    right, other = reference.expected["total-check"], Verdict("1.4", "square", 1).data()
    limits = Limits(cell=10)
    assert explicit_pass(check_record(reference), reference, limits)
    for changes in (
        *({"outcome": "failed"}, {"outcome": "skipped"}, {"end": "out of time"}),
        *({"seconds": 10.5}, {"verdicts": []}, {"verdicts": [other]}, {"verdicts": right * 2}),
    ):
        assert not explicit_pass(check_record(reference, **changes), reference, limits)


@pytest.fixture
def pretend(tmp_path, reference, monkeypatch):
    """`pretend(ends, …)`: the result of a submission whose runs go so, and how many."""

    def go(ends: dict, *about) -> tuple[Result, int]:
        runs = toy.Pretended(reference, ends, *about)
        monkeypatch.setattr("utils.grading.grader.run", runs)
        path = toy.hand_in(tmp_path, "ada", toy.filled())
        return grade(path, reference, Box(), tmp_path / "out"), runs.runs

    return go


def points(result: Result) -> list[float]:
    return [task.points for task in result.tasks if task.status != "by hand"]


def test_a_good_submission_is_run_once(pretend):
    result, runs = pretend({})
    assert (points(result), runs) == ([1, 2, 2, 1, 2], 1)


def test_what_hangs_costs_its_own_task_only(pretend):
    result, runs = pretend({"total-run": ("out of time", ["1.3"])})
    assert (points(result), runs) == ([1, 2, 0, 1, 2], 3), "with it, without it, it alone"
    assert result.task("1.3").status == "hung"


def test_a_task_is_not_blamed_for_the_full_disk_of_another(pretend):
    result, _ = pretend({"mean-check": ("the ranks are gone", ["1.3"])}, ("1.3",))
    assert points(result) == [1, 2, 0, 1, 2]
    said = "Task 1.5: The check passed with the reference's answers to all other tasks."
    assert said in result.remarks


def test_an_answer_that_runs_in_the_background_is_stopped_eventually(pretend):
    result, runs = pretend({"square-check": ("the ranks are gone", ["1.1"])})
    assert points(result) == [1, 2, 2, 1, 2], "alone, 1.4 has the reference's 1.1"
    assert runs <= 3 * 5


def test_a_wrong_first_task_does_not_cost_the_tasks_that_need_it(pretend, reference):
    wrong = ("1.1", "1.2", "1.5")
    result, runs = pretend({}, wrong, "1.1")
    assert (points(result), runs) == ([0, 2, 2, 1, 2], 3), "1.2 and 1.5 have a run each"
    said = "Task 1.2, 1.5: The check passed with the reference's answers to all other tasks."
    assert said in result.remarks


def test_no_student_is_judged_by_the_questions_of_another(pretend, reference, monkeypatch):
    wrong = ("1.2", "1.5")
    result, _ = pretend({}, wrong, "1.1")
    assert points(result) == [1, 2, 2, 1, 2], "alone, they have the reference's 1.1"
    monkeypatch.setattr(reference.tasks["1.1"], "personal", True)
    result, _ = pretend({}, wrong, "1.1")
    assert points(result) == [1, 0, 2, 1, 0], "a name, say, that draws what 1.2 and 1.5 ask"


def test_ranks_that_never_start_are_not_the_students_fault(pretend):
    result, runs = pretend({"ranks-join": ("cell 'ranks-join' before the first task failed", ())})
    assert "could not be started" in result.error
    assert runs == 3


def test_a_traceback_for_students_names_no_folder_of_the_grader():
    text = "-" * 75 + "\nTraceback\n\n  File /a/b.py:1 in f\n    x\n\n  Cell In[4]\nError"
    assert tidied(text) == "Traceback\n\n  the cell\nError"
    assert tidied("rank 0 raised KeyError at Cell In[12], line 3") == (
        "rank 0 raised KeyError at the cell, line 3"
    )
    assert tidied("rank 0 waits in send at In[12], line 3, in ring()") == (
        "rank 0 waits in send at the cell, line 3, in ring()"
    )


def test_an_error_that_the_lab_shows_on_purpose_is_not_shown_as_the_students(tmp_path):
    nb = toy.reference()
    toy.cell(nb, "swap-run").metadata["tags"] = ["raises-exception"]
    path = tmp_path / f"{toy.LAB}.ipynb"
    path.write_text(dumps(nb), encoding="utf-8")
    error = {"type": "error", "ename": "CellFailed", "evalue": "no", "text": "no"}
    said = [{"cell": cell, "outputs": [error]} for cell in ("swap-run", "total-run")]
    assert [one.title for one in shown(said, Reference(path))] == ["The cell that runs it"]


# --- books and pages -----------------------------------------------------------------------------


def a_result(name: str, points: float = 2.0, file: str = "a.ipynb", **changes) -> Result:
    status = "passed" if points else "wrong"
    said = "" if points else "✗ Task 1.1 · a\n  - rank 0: the sum: expected 5, got 7"
    tasks = [
        TaskResult("1.1", "a", 2.0, points, status, said, code="def f():\n    return 1"),
        TaskResult("1.A", "why", 3.0, None, "by hand", code="Because."),
    ]
    return Result(name, toy.LAB, "key", file, tasks=tasks, **changes)


def rows(text: str) -> list[dict]:
    return list(csv.DictReader(io.StringIO(text)))


def test_the_gradebook_has_a_row_per_student_and_a_column_per_task():
    (ada, bob) = rows(gradebook.gradebook([a_result("Bob", 0.0), a_result("Ada")]))
    assert ada == {
        **{"student": "Ada", "1.1": "2", "1.A": "", "total": "2", "max": "5"},
        **{"to grade by hand": "1.A", "remarks": ""},
    }
    assert bob["total"] == "0"


def test_a_student_who_could_not_be_graded_does_not_get_a_zero():
    (row,) = rows(gradebook.gradebook([a_result("Ada", error="no kernel")]))
    assert "NOT GRADED: no kernel" in row["remarks"]


def test_no_name_or_remark_is_a_formula():
    text = gradebook.gradebook([a_result("=cmd|' /C calc'!A0", remarks=["x"])])
    assert rows(text)[0]["student"].startswith("'=")


def test_moodle_and_canvas_recognize_their_students(tmp_path):
    lms = {"system": "moodle", "id": "123", "folder": "Ada_123_assignsubmission_file_"}
    result = a_result("Ada", lms=lms)
    (row,) = rows(gradebook.moodle([result]))
    assert (row["Identifier"], row["Grade"], row["Maximum grade"]) == ("Participant 123", "2", "5")
    possible, row = rows(gradebook.canvas([result]))
    assert (possible[toy.LAB], row["ID"], row[toy.LAB]) == ("5", "123", "2")
    page = tmp_path / "feedback.html"
    page.write_text("hello")
    gradebook.moodle_feedback([result], {"Ada": page}, tmp_path / "f.zip")
    assert zipfile.ZipFile(tmp_path / "f.zip").namelist() == [f"{lms['folder']}/feedback.html"]


@pytest.mark.quick
def test_canvas_gets_back_its_own_file_names_with_each_students_points_and_problems(tmp_path):
    names = {"ada": "ada_LATE_7_34_01_toy-1.ipynb", "bob": "bob_8_35_notes.zip", "cleo": ""}
    results = [a_result(name, lms={"id": "7", "file": file}) for name, file in names.items()]
    results[0].tasks.append(
        TaskResult("1.2", "b", 1.0, 0.0, "wrong", problems=[{"text": "a *sum*, not a mean"}])
    )
    pages.canvas_feedback(results, tmp_path / "f.zip")
    with zipfile.ZipFile(tmp_path / "f.zip") as archive:
        assert archive.namelist() == [names["ada"]], "Canvas would show a page as bob's zip"
        (tmp_path / "f.ipynb").write_bytes(archive.read(names["ada"]))
    points, problem = [cell.source for cell in read(tmp_path / "f.ipynb").cells]
    assert "## ada: 2 of 6 points" in points
    assert problem == "## Task 1.2\n- a &#42;sum&#42;, not a mean"


def test_points_given_by_hand_are_read_again(tmp_path):
    path = tmp_path / "explain.csv"
    results = [a_result("Ada"), a_result("=Bob")]
    gradebook.write_explain(results, path)
    text = path.read_text().replace("1.A,3,,", '1.A,3,"1,5",good')
    path.write_text("\ufeff" + text.replace(',"1,5",', ",1.5,"), encoding="utf-8")
    gradebook.merge_explain(results, gradebook.read_explain(path))
    assert [one.task("1.A").points for one in results] == [1.5, 1.5]
    assert results[0].task("1.A").note == "good"
    assert results[0].open == []
    gradebook.write_explain(results, path)
    assert [row["points"] for row in rows(path.read_text())] == ["1.5", "1.5"]


def test_a_spreadsheet_with_semicolons_and_commas_is_read(tmp_path):
    path = tmp_path / "explain.csv"
    path.write_text("student;lab;task;max;points;comment\nAda;01_toy;1.A;3;2,5;\n")
    assert gradebook.read_explain(path)["Ada", "01_toy", "1.A"].points == 2.5


@pytest.mark.parametrize("points", ["4", "-1", "good", "nan", "inf"])
def test_impossible_points_are_reported_with_their_line_and_do_not_count(tmp_path, points):
    path = tmp_path / "explain.csv"
    rows_ = f"Ada,01_toy,1.A,3,{points},\nBob,01_toy,1.A,3,2,\n"
    path.write_text(f"student,lab,task,max,points,comment\n{rows_}")
    grades = gradebook.read_explain(path)
    assert [text.partition(":")[0] for text in grades.bad] == ["explain.csv, line 2"]
    assert {name: grade_.points for (name, _, _), grade_ in grades.items()} == {"Bob": 2}


def test_a_result_file_is_complete_or_missing(tmp_path):
    result = a_result("Ada")
    result.tasks[0].shown = [Shown("t", "x", "png")]
    save(result, tmp_path / "r.json")
    assert load(tmp_path / "r.json") == result
    (tmp_path / "r.json").write_text((tmp_path / "r.json").read_text()[:-20])
    assert load(tmp_path / "r.json") is None


def test_pages_show_what_students_wrote_and_run_none_of_it(reference):
    evil = "<script>alert(1)</script>"
    result = a_result(evil, 0.0)
    result.tasks[0].code = result.tasks[0].said = result.tasks[1].code = evil
    result.tasks[0].shown = [Shown(evil, evil, '"><script>alert(1)</script>')]
    result.remarks = [evil]
    for page in (
        feedback(evil, [result]),
        summary([result], [reference], {}, {evil: "a"}),
        explain([result], [reference]),
    ):
        assert "<script" not in page
        assert "&lt;script&gt;" in page


def test_a_student_without_a_submission_reads_only_that():
    page = feedback("Ada", [a_result("Ada", file="", remarks=["Nothing was submitted."])])
    assert "Nothing was submitted." in page
    assert "<section" not in page


def test_the_summary_counts_problems_that_differ_in_numbers_only_together():
    results = [a_result("Ada", 0.0), a_result("Bob", 0.0), a_result("Cleo")]
    results[1].tasks[0].said = "✗ Task 1.1 · a\n  - rank 1: the sum: expected 9, got 1"
    found = task_summary(results, toy.LAB, "1.1")
    assert found.failures[0][1] == 2
    assert found.counts == {"bad": 2, "good": 1}
    assert found.mean == pytest.approx(2 / 3)
    assert task_summary(results, toy.LAB, "1.A").mean is None


def test_a_missing_sandbox_is_reported_with_a_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SandboxError, match="--no-sandbox"):
        require(Box(), tmp_path)
    require(Box(walls=False), tmp_path)


def test_the_graders_modules_import_no_pytorch():
    code = "import sys, utils.grading.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- a class, graded -----------------------------------------------------------------------------

PATCHES = toy.HOSTILE["patches torch.allclose, the checks module, builtins"]
PATCHES = PATCHES.replace("toy_checks.total", "toy_checks.swap").replace("tensor * 0", "mine * 0")
#: What the quiet cheat of the small class hands in.
QUIET = {
    "twice": None,
    "swap": f"print('✓ Task 1.2 · swap · 2 points', flush=True)\n{PATCHES}",
    "mean": toy.HOSTILE["opens a socket out"],
}


def small_class(folder: Path, port: int) -> dict[str, list[float]]:
    """Hand in for everyone; returns the points that they must get.

    Grading runs a submission again for each wrong answer, but not for the first of its answers:
    one that hangs or ends the run stands there where it can.
    """
    quiet = QUIET | {"mean": QUIET["mean"].replace("PORT", str(port))}
    loud = {
        "twice": toy.HOSTILE["kills all that it can"],
        # A loop without end, which lets others have the cores: that of the matrix doesn't.
        "square": "import time\nwhile rank:\n    time.sleep(0.001)\ntime.sleep(10_000)",
        # Processes without end, which let others have the cores: those of the matrix don't.
        "mean": toy.HOSTILE["is a fork bomb that ignores errors"].replace(
            "pass", "__import__('time').sleep(1)"
        ),
    }
    deadlock = toy.HOSTILE["deadlocks"].replace("tensor", "mine")
    accidents = toy.accidents()
    everyone = {
        "Ada Lovelace": (with_helpers(), [1, 2, 2, 1, 2]),
        "Zoë half right": (toy.filled(twice=None, swap=deadlock), [0, 0, 2, 1, 2]),
        "quiet cheat": (toy.filled(**quiet), [0, 0, 2, 1, 0]),
        "loud": (toy.filled(**loud), [0, 2, 2, 0, 0]),
        "is not a notebook": (accidents["is not a notebook"][0], [0, 0, 0, 0, 0]),
        "is cut short": (json.dumps(toy.filled())[:-9], [None] * 5),
    }
    for name, (nb, _) in everyone.items():
        toy.hand_in(folder, name, nb)
    return {name: points for name, (_, points) in everyone.items()}


def with_helpers():
    """Right, with a function, an import and an answer in other cells, and without metadata."""
    nb = toy.filled(twice="return math.trunc(double(number))", square=None)
    for behind, source in (
        ("twice-task", "def double(number):\n    return 2 * number"),
        ("mean-check", "def square(number):\n    return number**2"),
    ):
        at = nb.cells.index(toy.cell(nb, behind)) + 1
        nb.cells.insert(at, new_code_cell(f"%%px\n{source}"))
    at = nb.cells.index(toy.cell(nb, "ranks-join"))
    nb = toy.without_metadata(nb)
    nb.cells[at].id = "ranks-join"  # by this alone is it known for the lab's cell: its text changes
    nb.cells[at].source += "\nimport math"
    return nb


@pytest.fixture(scope="module")
def server():
    """A port of this machine's loopback, and the connections that came."""
    came = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            while True:
                try:
                    came.append(listening.accept())
                except OSError:
                    return

        threading.Thread(target=listen, daemon=True).start()
        yield listening.getsockname()[1], came


@pytest.fixture(scope="module")
def graded(course: Path, server, tmp_path_factory):
    """The small class, graded in the sandbox: process, results folder, expected points."""
    if NO_SANDBOX:
        pytest.skip(NO_SANDBOX)
    folder = tmp_path_factory.mktemp("class")
    expected = small_class(folder / "in", server[0])
    done = run_grade(course, folder / "in", folder / "out", "-j", "3", "--cell-timeout", "15")
    return done, folder / "out", expected


CUT = "NOT GRADED: is cut short.ipynb can't be read, because it is cut short or damaged"
CLASS_NAMES = [
    *("Ada Lovelace", "Zoë half right", "quiet cheat", "loud"),
    *("is not a notebook", "is cut short"),
]


@sandboxed
@pytest.mark.timeout(CLASS + 60)
@pytest.mark.parametrize("name", CLASS_NAMES)
def test_everyone_gets_the_points_that_they_have_earned(graded, name):
    done, out, expected = graded
    assert done.returncode == 1, done.stdout + done.stderr
    result = stored(out)[name]
    points = [task.points for task in result.tasks if task.task != "1.A"]
    details = [(task.task, task.status, task.note, task.said) for task in result.tasks]
    assert points == expected[name], (details, result.remarks, result.error)


@sandboxed
def test_no_submission_left_the_sandbox_and_no_process_is_left_running(graded, server):
    assert server[1] == []
    # What was killed needs a moment to be gone: some hundred processes of a fork bomb.
    deadline = time.monotonic() + 20
    while running() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running() == []


@sandboxed
def test_a_student_reads_why_an_answer_is_wrong_but_not_how_it_was_checked(graded):
    _, out, _ = graded
    page = (out / "students" / "Zoë half right" / "feedback.html").read_text(encoding="utf-8")
    assert "Deadlock: these ranks wait for each other" in page
    assert "data:image/png;base64," in page  # who waits for whom
    assert "toy_checks" not in page
    assert str(ROOT) not in page
    assert "still holds only the stub" in page
    assert "BEGIN SOLUTION" not in page
    page = (out / "students" / "quiet cheat" / "feedback.html").read_text(encoding="utf-8")
    assert "expected" in page
    assert "BEGIN SOLUTION" not in page


@sandboxed
def test_the_instructor_gets_gradebook_summary_and_written_answers(graded):
    _, out, expected = graded
    table = {row["student"]: row for row in rows((out / "gradebook.csv").read_text())}
    assert table["is cut short"]["total"] == ""
    assert {name: float(row["total"] or 0) for name, row in table.items()} == {
        name: sum(filter(None, points)) for name, points in expected.items()
    }
    assert table["Ada Lovelace"]["to grade by hand"] == "1.A"
    assert CUT in table["is cut short"]["remarks"]
    summary = (out / "summary.html").read_text(encoding="utf-8")
    assert "Zoë half right" in summary
    assert toy.MODEL_TEXT in (out / "explain.html").read_text(encoding="utf-8")
    assert len(rows((out / "explain.csv").read_text())) == 4


@sandboxed
def test_the_statistics_of_a_graded_class_know_what_the_checks_said(graded):
    _, out, expected = graded
    found = statistics.read(out)
    assert found.students + found.left_out <= len(expected)
    tasks = {one.number: one for one in found.tasks(toy.LAB)}
    assert tasks["1.1"].states["good"] > 0
    told = [one for task in tasks for one in found.mistakes(toy.LAB, task)]
    assert "value" in {one.kind for one in told}
    assert all(0 < one.share <= 1 and one.text for one in told)


@pytest.mark.extended
def test_nbval_by_hand_gives_the_same_verdicts_even_if_no_output_is_stored(
    graded, course, tmp_path
):
    _, out, _ = graded
    job = out / "students" / "Zoë half right" / toy.LAB / "run-1"
    assert {path.name for path in job.iterdir()} == {"notebook.ipynb", "report.xml"}
    nb = read(job / "notebook.ipynb")
    for cell in nb.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    (tmp_path / "by-hand.ipynb").write_text(dumps(nb), encoding="utf-8")
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(course / "checks"), "IPP_NONINTERACTIVE": "1"}
    report = tmp_path / "report.xml"
    line = [sys.executable, "-m", "pytest", "-c", os.devnull, "-p", "no:cacheprovider"]
    line += [f"--rootdir={tmp_path}", "--nbval", f"--junitxml={report}", "by-hand.ipynb"]
    run_tree(line, timeout=200, env=env, cwd=tmp_path)
    assert outcomes(report) == outcomes(job / "report.xml")


def outcomes(report: Path) -> dict[str, str]:
    cases = ElementTree.parse(report).iter("testcase")
    return {case.get("name"): next((one.tag for one in case), "passed") for case in cases}


# --- stop, resume, merge, no sandbox -------------------------------------------------------------


@sandboxed
@pytest.mark.extended
def test_a_stopped_run_loses_nothing_and_is_resumed(course, tmp_path):
    for name in ("Ada", "Bob", "Cleo"):
        toy.hand_in(tmp_path / "in", name, toy.filled())
    out = tmp_path / "out"
    process = subprocess.Popen(
        command(course, tmp_path / "in", out), cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 200
    while not list(out.glob("students/*/*/result.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "--resume" in said
    assert running() == []
    before = {path: path.stat().st_mtime_ns for path in out.glob("students/*/*/result.json")}
    assert 1 <= len(before) < 3
    assert rows((out / "gradebook.csv").read_text())[0]["student"] == "Ada"
    done = run_grade(course, tmp_path / "in", out, "--resume")
    assert done.returncode == 0, done.stderr
    assert {name: one.points for name, one in stored(out).items()} == dict.fromkeys(
        ("Ada", "Bob", "Cleo"), 8.0
    )
    assert before == {path: path.stat().st_mtime_ns for path in before}


@sandboxed
def test_points_by_hand_are_merged_and_survive_another_run(graded, course, tmp_path):
    _, graded_out, _ = graded
    out = tmp_path / "out"
    shutil.copytree(graded_out, out)
    path = out / "explain.csv"
    row = "Ada Lovelace,01_toy,1.A,2,"
    path.write_text(path.read_text().replace(f"{row},", f"{row}2,"))
    options = ["--merge", "-o", str(out), "--solutions", str(course / "solutions")]
    done = run_tree(
        [sys.executable, "-m", "utils", "grade", *options], timeout=100, env=dict(os.environ)
    )
    assert done.returncode == 1, done.stderr  # one submission has no grade
    table = {row["student"]: row for row in rows((out / "gradebook.csv").read_text())}
    assert (table["Ada Lovelace"]["1.A"], table["Ada Lovelace"]["total"]) == ("2", "10")
    assert CUT in table["is cut short"]["remarks"]


@pytest.mark.extended
def test_without_a_sandbox_the_deadlines_hold_and_no_process_is_left(course, tmp_path):
    twice = "import time\nwhile rank:\n    pass\ntime.sleep(10_000)"
    nb = toy.filled(twice=twice, mean=toy.HOSTILE["ends its rank"])
    toy.hand_in(tmp_path / "in", "Eve", nb)
    options = ["--no-sandbox", "--cell-timeout", "8"]
    done = run_grade(course, tmp_path / "in", tmp_path / "out", *options)
    assert done.returncode == 0, done.stderr
    result = stored(tmp_path / "out")["Eve"]
    assert [task.points for task in result.tasks] == [0, 2, 2, 1, 0, None]
    assert result.tasks[0].status == "hung"
    assert running() == []


@pytest.mark.bare
def test_missing_submissions_and_a_wrong_folder_are_reported_before_the_work(course, tmp_path):
    (tmp_path / "empty").mkdir()
    # Without the sandbox: it is asked for first, and not every machine has one.
    done = run_grade(course, tmp_path / "empty", tmp_path / "out", "--no-sandbox")
    assert done.returncode == 2
    assert "no notebook" in done.stderr
    assert "Traceback" not in done.stderr
    done = run_grade(course, tmp_path, tmp_path / "out", "--no-sandbox")
    assert done.returncode == 2
    assert "would be graded as submissions" in done.stderr


# --- the matrix ----------------------------------------------------------------------------------


@pytest.mark.matrix
@sandboxed
@pytest.mark.timeout(3600)
def test_every_kind_of_submission_gets_the_expected_points(course, server, tmp_path):
    """Thirty and more submissions in one go; GRADE_TABLE=file has a table of them written."""
    expected = {"does everything right": 8.0}
    toy.hand_in(tmp_path / "in", "does everything right", toy.filled())
    for name in toy.HOSTILE:
        toy.hand_in(tmp_path / "in", name, toy.attack(name, server[0]))
        expected[name] = 6.0
    for name, code in toy.SPOILING.items():
        toy.hand_in(tmp_path / "in", name, toy.filled(total=code))
        expected[name] = 8.0
    for name, (nb, points) in toy.accidents().items():
        toy.hand_in(tmp_path / "in", name, nb)
        expected[name] = points if points is None else float(points)
    start = time.monotonic()
    done = run_grade(course, tmp_path / "in", tmp_path / "out", "-j", "2", timeout=3000)
    seconds = time.monotonic() - start
    results = stored(tmp_path / "out")
    lines = ["| submission | points of 8 | runs | seconds | what stops it, or the remark |"]
    lines += ["|---|---|---|---|---|"]
    for name in expected:
        one = results[name]
        remark = toy.STOPPED_BY.get(name) or "; ".join([one.error, *one.remarks]).lstrip("; ")
        points = "not graded" if one.error else f"{one.points:g}"
        lines.append(f"| {name} | {points} | {one.runs} | {one.seconds:.0f} | {remark} |")
    lines.append(f"\n{len(expected)} submissions in {seconds:.0f} s with -j 2")
    print("\n".join(lines))
    if path := os.environ.get("GRADE_TABLE"):
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert done.returncode == 1, done.stderr
    assert {name: total([one]) for name, one in results.items()} == expected
    assert server[1] == []
    assert running() == []
