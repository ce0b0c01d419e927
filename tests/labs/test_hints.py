"""Hint 3 of each task, typed in, is right: a student who copies it gets the points.

Its pieces of code stand in one answer that passes: the model's, or a right one of ``answers/``
(``test_answers.py`` plays all of these).
"""

from __future__ import annotations

import ast
import re
import textwrap

import nbformat
import pytest
from answer_tools import LABS, right_answers, solutions_of
from lab_tools import ROOT

TASKS = [
    (name, task)
    for name, tables in LABS.items()
    for task in tables.CELLS
    if task not in getattr(tables, "HINTED_BY_THE_ROOM", set())
]
HINT = re.compile(r"<summary>Hint 3.*?</summary>(.*?)</details>", re.DOTALL)
#: What stands for something that the hint leaves out.
LEFT_OUT = "___"


@pytest.mark.parametrize(("name", "task"), TASKS, ids=[task for _, task in TASKS])
def test_hint_3_typed_in_is_a_right_answer(name, task):
    pieces = re.findall(r"`([^`]+)`", hint_3(name, task))
    assert pieces, "hint 3 has no code"
    solutions = solutions_of(name)
    of_task = [code for one, _, code in right_answers(LABS[name], solutions) if one == task]
    lacking = [
        [piece for piece in pieces if not stands_in(piece, textwrap.dedent(code))]
        for code in (solutions[task], *of_task)
    ]
    assert [] in lacking, f"in no right answer: {min(lacking, key=len)}"


def test_no_cell_of_the_first_lab_gives_its_answer_away_before_a_student_asks():
    """The last hint may."""
    nb = nbformat.read(ROOT / "labs" / "00_start_here.ipynb", as_version=4)
    students = [cell for cell in nb.cells if cell.id != "neighbour-hints"]
    assert len(students) == len(nb.cells) - 1
    telling = [cell.id for cell in students if re.search(r"% ?world_size|modulo", cell.source)]
    assert not telling


def hint_3(name: str, task: str) -> str:
    """The last hint that comes after a task's answer cell."""
    cells = nbformat.read(ROOT / "solutions" / LABS[name].NOTEBOOK, as_version=4).cells
    its_own = [cell.metadata.get("nbgrader", {}).get("grade_id") for cell in cells]
    after = cells[its_own.index(LABS[name].CELLS[task]) :]
    return next(found[1] for cell in after if (found := HINT.search(cell.source)))


def stands_in(piece: str, code: str) -> bool:
    """Whether the answer has these statements, or this expression; ``…`` is anything."""
    if "".join(piece.split()) in "".join(code.split()):
        return True
    wanted = parsed(piece.replace("…", LEFT_OUT).replace("...", LEFT_OUT))
    return bool(wanted) and all(
        any(alike(one, node) for node in ast.walk(ast.parse(code))) for one in wanted
    )


def parsed(piece: str) -> list[ast.AST]:
    """The statements of a piece of code, or its expression; a header has no body."""
    piece = re.sub(r"^(else:|try:|el(?=if ))\s*", "", piece.strip())
    for text in (piece, f"{piece} {LEFT_OUT}", f"try: pass\n{piece} {LEFT_OUT}", f"{{{piece}}}"):
        try:
            statements = ast.parse(text).body
        except SyntaxError:
            continue
        return [one.value if isinstance(one, ast.Expr) else one for one in statements]
    return []


def alike(wanted: object, got: object) -> bool:
    """Whether two trees are equal; what was left out is equal to anything.

    A block may have more statements, and a condition another branch.
    """
    if is_left_out(wanted):
        return True
    if isinstance(wanted, list):
        return isinstance(got, list) and lists_alike(wanted, got)
    if not isinstance(wanted, ast.AST):
        return wanted == got
    if isinstance(wanted, ast.expr_context):
        return True
    if type(wanted) is not type(got):
        return False
    fields = dict(ast.iter_fields(wanted))
    if isinstance(wanted, ast.Call) and any(map(is_left_out, wanted.args)):
        del fields["keywords"]
    if isinstance(wanted, ast.If | ast.For | ast.While) and not wanted.orelse:
        del fields["orelse"]
    if isinstance(wanted, ast.If | ast.For | ast.While | ast.With):
        rest = iter(got.body)
        if not all(any(alike(one, other) for other in rest) for one in fields.pop("body")):
            return False
    return all(alike(value, getattr(got, field)) for field, value in fields.items())


def lists_alike(wanted: list, got: list) -> bool:
    """Compare from both ends what stands on the two sides of what was left out."""
    gap = next((k for k, one in enumerate(wanted) if is_left_out(one)), None)
    if gap is None:
        return len(wanted) == len(got) and all(map(alike, wanted, got))
    after = wanted[gap + 1 :]
    return (
        len(got) >= len(wanted) - 1
        and all(map(alike, wanted[:gap], got))
        and all(map(alike, after, got[len(got) - len(after) :]))
    )


def is_left_out(node: object) -> bool:
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Name) and node.id == LEFT_OUT
