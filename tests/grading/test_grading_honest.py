"""Honest work counts: helpers, imports and answers that stand in cells of a student's own."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import grading_tools as toy
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from utils.grading.assembly import MOST_OWN_CELLS, WHOLE, Assembled, View, assemble
from utils.grading.grader import grade
from utils.grading.inspection import look
from utils.grading.reference import MOST_SOURCE, Reference, imports
from utils.grading.sandbox import Box

ALONE = View(own=False)


def put(nb: NotebookNode, source: str, *, behind: str) -> NotebookNode:
    """A student's own cell behind another one."""
    at = nb.cells.index(toy.cell(nb, behind)) + 1
    nb.cells.insert(at, new_code_cell(source, id=f"mine-{at}"))
    return nb


def assembled(folder: Path, reference: Reference, nb: NotebookNode) -> Assembled:
    return assemble(reference, toy.hand_in(folder, "ada", nb))


def sources(done: Assembled, view: View = WHOLE) -> list[str]:
    return [cell.source for cell in done.notebook(view).cells if cell.cell_type == "code"]


def names(done: Assembled, view: View = WHOLE) -> dict:
    """What a rank has defined when the notebook's answers and own cells have been run."""
    found: dict = {}
    for cell in done.notebook(view).cells:
        wanted = cell.id.endswith("-answer") or cell.metadata.get("own")
        if cell.cell_type == "code" and wanted:
            exec(cell.source.removeprefix("%%px"), found)
    return found


HELPER = "%%px\ndef double(number):\n    return 2 * number"


def test_a_helper_function_in_a_separate_cell_is_kept(tmp_path, reference):
    nb = put(toy.filled(twice="return double(number)"), HELPER, behind="twice-task")
    done = assembled(tmp_path, reference, nb)
    assert names(done)["twice"](4) == 8
    assert HELPER not in sources(done, ALONE)
    assert (len(done.own), done.remarks) == (1, []), "a helper is no reason for a remark"


@pytest.mark.parametrize(
    "first", ["%%px --targets 0", "%%px --noblock", "%%bash", "%%writefile x", ""]
)
def test_only_cells_for_all_ranks_are_kept(tmp_path, reference, first):
    nb = put(toy.filled(), f"{first}\nx = 1", behind="twice-task")
    assert assembled(tmp_path, reference, nb).own == []


def test_a_helper_that_the_kernel_ran_too_is_kept_on_the_ranks_only(tmp_path, reference):
    local = HELPER.replace("%%px", "%%px --local")
    nb = put(toy.filled(twice="return double(number)"), local, behind="twice-task")
    done = assembled(tmp_path, reference, nb)
    assert names(done)["twice"](4) == 8
    assert "--local" not in "".join(sources(done))


def test_added_cells_that_are_not_run_are_reported(tmp_path, reference):
    nb = toy.filled()
    for number in range(MOST_OWN_CELLS + 1):
        nb = put(nb, f"%%px\nx{number} = 1", behind="twice-task")
    nb = put(nb, f"%%px\n{HELPER}{'#' * MOST_SOURCE}", behind="twice-task")
    done = assembled(tmp_path, reference, nb)
    assert len(done.own) == MOST_OWN_CELLS
    said = " ".join(done.remarks)
    assert "Only the first 100 of 101 of the student's own cells were run." in said
    assert re.search(r"A cell of the student has \d+ characters and was not run", said)


def test_only_imports_are_kept_from_a_cell_of_the_lab_that_was_changed(tmp_path, reference):
    nb = toy.filled(twice="return math.trunc(2 * number)")
    toy.cell(nb, "ranks-join").source += "\nimport math\nrank = 7"
    done = assembled(tmp_path, reference, nb)
    assert names(done)["twice"](4) == 8
    assert sources(done)[1] == toy.SETUP
    assert "rank = 7" not in "".join(sources(done))


def test_an_answer_in_two_cells_is_one_answer(tmp_path, reference):
    nb = toy.filled(twice="\n%%px\nFACTOR = 2")
    nb = put(nb, "%%px\ndef twice(number):\n    return FACTOR * number", behind="twice-answer")
    done = assembled(tmp_path, reference, nb)
    assert names(done)["twice"](4) == 8


def test_two_answers_in_one_cell_are_two_answers(tmp_path, reference):
    both = "\n%%px\ndef twice(number):\n    return 2 * number\n"
    both += "def square(number):\n    return number**2"
    done = assembled(tmp_path, reference, toy.filled(twice=both, square=None))
    assert done.answers["square-answer"].elsewhere
    assert names(done)["square"](3) == 9


def test_an_answer_whose_cell_was_deleted_counts_in_another_cell(tmp_path, reference):
    nb = toy.filled()
    nb.cells.remove(toy.cell(nb, "square-answer"))
    nb = put(nb, "%%px\ndef square(number):\n    return number**2", behind="twice-task")
    done = assembled(tmp_path, reference, nb)
    assert names(done)["square"](3) == 9


def test_a_later_cell_that_redefines_an_answer_counts_at_its_check(tmp_path, reference):
    nb = toy.filled(twice="return 3 * number")
    nb = put(nb, "%%px\ndef twice(number):\n    return 2 * number", behind="mean-check")
    done = assembled(tmp_path, reference, nb)
    assert names(done)["twice"](4) == 8
    order = [cell.id for cell in done.notebook().cells]
    assert order.index("own-0") == order.index("twice-answer") + 1


def test_imports_of_a_blanked_answer_are_kept_for_later_answers(tmp_path, reference):
    nb = toy.filled(twice="\n%%px\nimport math\ndef twice(number):\n    while True: pass")
    done = assembled(tmp_path, reference, nb)
    for view in (View(blanked=frozenset({"1.1"})), View(given=frozenset({"1.1"}))):
        (source,) = [s for s in sources(done, view) if "def twice" in s]
        assert source.startswith("%%px\nimport math\n")
        assert "while True" not in source


def test_a_task_that_is_judged_alone_has_its_own_check_and_nothing_after_it(tmp_path, reference):
    done = assembled(tmp_path, reference, toy.filled())
    cells = done.notebook(View(only="1.3")).cells
    assert cells[-1].id == "total-check"
    checks = [cell for cell in cells if cell.metadata.get("lab", {}).get("check")]
    skipped = [cell.id for cell in checks if "nbval-skip" in cell.metadata.get("tags", [])]
    assert skipped == ["twice-check", "swap-check"]


def test_the_labs_cells_do_not_count_as_added_cells_even_without_ids(tmp_path, reference):
    done = assembled(tmp_path, reference, toy.without_metadata(toy.filled()))
    assert done.own == []


def test_an_added_cell_that_hangs_costs_no_point(tmp_path, reference, monkeypatch):
    nb = put(toy.filled(), "%%px\nwhile True: pass", behind="ranks-join")
    runs = toy.Pretended(reference, {"own-0": ("out of time", ())})
    monkeypatch.setattr("utils.grading.grader.run", runs)
    result = grade(toy.hand_in(tmp_path, "ada", nb), reference, Box(), tmp_path / "out")
    assert sum(task.points or 0 for task in result.tasks) == toy.MOST
    assert result.error == ""
    assert any("A cell of the student was still running" in one for one in result.remarks)


def test_an_added_cell_that_spoils_an_answer_costs_no_point(tmp_path, reference, monkeypatch):
    class Spoilt(toy.Pretended):
        def __call__(self, nb, *args, **more):
            own = any(cell.metadata.get("own") for cell in nb.cells)
            self.wrong = ("1.3",) if own else ()
            return super().__call__(nb, *args, **more)

    nb = put(toy.filled(), "%%px\ntorch.allclose = print\nhelper = 7", behind="swap-check")
    monkeypatch.setattr("utils.grading.grader.run", Spoilt(reference, {}))
    result = grade(toy.hand_in(tmp_path, "ada", nb), reference, Box(), tmp_path / "out")
    assert sum(task.points or 0 for task in result.tasks) == toy.MOST
    said = "Task 1.3: The check passed with the reference's answers to all other tasks."
    assert said in result.remarks


def test_a_wrong_answer_is_wrong_however_often_it_is_judged(tmp_path, reference, monkeypatch):
    nb = put(copy.deepcopy(toy.filled()), HELPER, behind="twice-task")
    monkeypatch.setattr("utils.grading.grader.run", toy.Pretended(reference, {}, ("1.3",)))
    result = grade(toy.hand_in(tmp_path, "ada", nb), reference, Box(), tmp_path / "out")
    assert result.task("1.3").points == 0
    assert result.task("1.3").status == "wrong"


def test_an_answer_above_its_empty_cell_is_found_and_shown(tmp_path, reference, monkeypatch):
    nb = toy.filled(square="\n%%px\n# see above")
    nb = put(nb, "%%px\ndef square(n):\n    return n * n", behind="square-task")
    monkeypatch.setattr("utils.grading.grader.run", toy.Pretended(reference, {}))
    result = grade(toy.hand_in(tmp_path, "ada", nb), reference, Box(), tmp_path / "out")
    assert "return n * n" in result.task("1.4").code
    assert look(result, reference) == []


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_notebook_of_another_format_is_graded(tmp_path, reference, version):
    nb = json.loads(json.dumps(toy.filled()))
    nb["nbformat"] = version
    if version == 3:  # no ids, and other names
        for one in nb["cells"]:
            del one["id"]
            if one["cell_type"] == "code":
                one["input"] = one.pop("source")
        nb["worksheets"] = [{"cells": nb.pop("cells"), "metadata": {}}]
    done = assembled(tmp_path, reference, json.dumps(nb))
    assert all(answer.changed for answer in done.answers.values())


def test_imports_are_read_from_python_only():
    assert imports("import a\nfrom b import c as d\nx = 1") == "import a\nfrom b import c as d"
    assert imports("!pip install x\nimport a") == "import a"
    assert imports("import (") == ""


def test_the_code_that_is_shown_is_the_code_that_was_judged(tmp_path, reference, monkeypatch):
    nb = put(toy.filled(square=None), "%%px\ndef square(n):\n    return n * n", behind="mean-check")
    monkeypatch.setattr("utils.grading.grader.run", toy.Pretended(reference, {}))
    result = grade(toy.hand_in(tmp_path, "ada", nb), reference, Box(), tmp_path / "out")
    assert result.task("1.4").code == "def square(n):\n    return n * n"
    assert look(result, reference) == []
