"""The minutes that a lab announces: what a student reads and writes, in sessions."""

from __future__ import annotations

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell

from utils.course import effort, notes
from utils.course.about import in_parts
from utils.course.notebook import SOLUTIONS, is_solution, notebooks, read

pytestmark = pytest.mark.quick


def test_a_student_has_time_to_read_to_write_and_to_explain():
    solution = {"nbgrader": {"solution": True}}
    code = "%%px\n### BEGIN SOLUTION\n# Why.\nx = 1\n\ny = 2\n### END SOLUTION\n"
    cells = [
        new_markdown_cell("word " * 140 + "<details>" + "hint " * 500 + "</details>"),
        new_code_cell("given = 1\n" * 40),
        new_code_cell(code, metadata=solution),
        new_markdown_cell("answer", metadata=solution | {"lab": {"points": 2}}),
        new_markdown_cell("for instructors " * 99, metadata={"lab": {"instructor": "rubric"}}),
    ]
    assert effort.minutes(cells) == pytest.approx(140 / 70 + 2 * 1.5 + 2 * 6)


@pytest.mark.parametrize(
    ("minutes", "said"),
    [(75, "75 minutes"), (160, "two sessions of 80 minutes"), (301, "4 sessions of 76 minutes")],
)
def test_a_long_lab_is_announced_as_sessions(minutes, said):
    assert effort.in_sessions(minutes) == said


@pytest.mark.parametrize(("needed", "minutes"), [(71.2, 75), (142, 150), (192, 200)])
def test_announced_sessions_are_whole_five_minutes(needed, minutes):
    assert effort.announced(needed) == minutes


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_the_core_path_of_a_lab_has_at_most_3500_words(path):
    """A longer text is not read, whatever its title announces."""
    core, _ = in_parts(read(path))
    read_by_students = [cell for cell in core if not (notes.kind(cell) or is_solution(cell))]
    assert sum(map(effort.words, read_by_students)) <= 3500
