"""What editors, git and clicks do to a notebook costs no points and gets an advice that works."""

from __future__ import annotations

import json
from pathlib import Path

import grading_tools as toy
import pytest
from nbformat import NotebookNode
from test_grading_accidents import table

from utils.grading.assembly import Assembled, assemble
from utils.grading.reference import Reference

pytestmark = pytest.mark.quick


def assembled(folder: Path, reference: Reference, nb: NotebookNode | str) -> Assembled:
    return assemble(reference, toy.hand_in(folder, "ada", nb))


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
