"""What editors, git and clicks do to a notebook costs no points and gets an advice that works."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import grading_tools as toy
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output
from test_grading_accidents import table

from utils.checks.verdict import Verdict
from utils.grading.assembly import Assembled, assemble
from utils.grading.reference import Reference

pytestmark = pytest.mark.quick


def assembled(folder: Path, reference: Reference, nb: NotebookNode | str) -> Assembled:
    return assemble(reference, toy.hand_in(folder, "ada", nb))


# --- what a submission's outputs show ------------------------------------------------------------


def test_an_instructor_hears_of_a_finding_that_took_many_tries(tmp_path, reference):
    nb = toy.filled()
    for name, words in (("18.7", "try 41 · 3 of 37 points"), ("18.9", "try 2"), ("18.11", "")):
        data = Verdict(name, "what it has", 1).bundle(words)
        nb.cells.append(new_code_cell("lab18.x(ranks)", outputs=[new_output("display_data", data)]))
    assert assembled(tmp_path, reference, nb).remarks == [
        "The submission shows many tries at tasks 18.7 (41)."
    ]


# --- an answer whose cell has another type -------------------------------------------------------


@pytest.mark.parametrize("kind", ["markdown", "raw"])
@pytest.mark.parametrize("fence", ["", "```"])
def test_an_answer_in_a_cell_that_became_markdown_or_raw_keeps_its_points(
    tmp_path, reference, kind, fence
):
    nb = toy.filled()
    cell = toy.cell(nb, "total-answer")
    cell.cell_type = kind
    if fence:
        cell.source = f"```python\n{cell.source}\n```"
    done = assembled(tmp_path, reference, nb)
    assert done.answers["total-answer"].changed
    graded, written = (toy.cell(one, "total-answer") for one in (done.notebook(), toy.filled()))
    assert (graded.cell_type, graded.source.strip()) == ("code", written.source.strip())
    (remark,) = done.remarks
    assert remark.startswith(f"Task 1.3: The answer's cell has another type now, '{kind}'.")


@pytest.mark.parametrize("kind", ["code", "raw"])
def test_a_written_answer_in_a_cell_that_became_code_or_raw_is_read(tmp_path, reference, kind):
    nb = toy.filled(explain="Because nobody receives it.")
    toy.cell(nb, "explain-answer").cell_type = kind
    done = assembled(tmp_path, reference, nb)
    assert done.answers["explain-answer"].source == "Because nobody receives it."
    assert "another type" in done.remarks[0]


def test_an_old_answer_kept_as_markdown_does_not_replace_the_new_answer(tmp_path, reference):
    nb = toy.filled()
    cell = toy.cell(nb, "twice-answer")
    new = copy.deepcopy(cell)
    cell.cell_type, cell.source = "markdown", "My first try was wrong, see below."
    new.id, new.metadata = "mine", NotebookNode()
    nb.cells.insert(nb.cells.index(cell) + 1, new)
    done = assembled(tmp_path, reference, nb)
    assert done.answers["twice-answer"].source == new.source


def test_an_answer_without_any_mark_is_found_in_a_markdown_cell(tmp_path, reference):
    nb = toy.without_metadata(toy.filled())
    cell = next(one for one in nb.cells if "def total" in one.source)
    cell.cell_type = "markdown"
    done = assembled(tmp_path, reference, nb)
    assert done.answers["total-answer"].source == cell.source


def test_a_markdown_cell_is_never_run_as_a_cell_of_the_students_own(tmp_path, reference):
    nb = toy.filled()
    mine = new_code_cell("%%px\nx = 1", id="mine")
    mine.cell_type = "markdown"
    nb.cells.insert(2, mine)
    assert assembled(tmp_path, reference, nb).own == []


# --- a file that JupyterLab can't open -----------------------------------------------------------

WHOLE = json.dumps(json.loads(json.dumps(toy.filled())), indent=1)
LINES = WHOLE.splitlines()
CONFLICT = ["<<<<<<< HEAD", LINES[40], "=======", LINES[40], ">>>>>>> theirs"]
EDITED = {
    "has the marks of a merge": ("\n".join([*LINES[:40], *CONFLICT, *LINES[41:]]), "line 41"),
    "has text behind its end": (f"{WHOLE}\n\nmy notes", f"from line {len(LINES) + 2}, column 1"),
    "was written twice": (WHOLE + WHOLE, f"from line {len(LINES)}, column 2"),
}


@pytest.mark.parametrize("what", EDITED)
def test_a_file_that_was_merged_or_lengthened_is_not_graded_and_the_advice_names_the_line(
    what, class_, tmp_path, capsys
):
    text, where = EDITED[what]
    toy.hand_in(tmp_path / "in", "Ada", text)
    assert class_() == 1
    row = table(tmp_path / "out" / "gradebook.csv")["Ada"]
    assert (row["total"], where in row["remarks"]) == ("", True), row
    page = (tmp_path / "out" / "students" / "Ada" / "feedback.html").read_text(encoding="utf-8")
    assert "open it in a text editor" in page
    assert where in capsys.readouterr().err


def test_a_file_repaired_as_the_advice_says_is_graded(tmp_path, reference):
    text, _ = EDITED["has the marks of a merge"]
    kept = [line for line in text.splitlines() if line[:7] not in {"<<<<<<<", "=======", ">>>>>>>"}]
    kept.remove(LINES[40])
    assert assembled(tmp_path, reference, "\n".join(kept)).error == ""
    text, _ = EDITED["has text behind its end"]
    assert assembled(tmp_path, reference, "\n".join(text.splitlines()[: len(LINES)])).error == ""


def test_a_file_that_is_cut_short_still_says_so(tmp_path, reference):
    done = assembled(tmp_path, reference, WHOLE[:-9])
    assert "cut short or damaged" in done.error
    assert "If JupyterLab opens your notebook" in done.remarks[0]
