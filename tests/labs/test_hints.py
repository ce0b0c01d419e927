"""Hint 3 of each task shows the shape of a right answer, and leaves a decision to the student.

One answer that passes has its code: the model's, or a right one of ``answers/``
(``test_answers.py`` plays all of these). A ``…`` is code that the hint leaves out.
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
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
#: What stands for something that the hint leaves out.
LEFT_OUT = "___"


@pytest.mark.parametrize(("name", "task"), TASKS, ids=[task for _, task in TASKS])
def test_hint_3_has_the_shape_of_a_right_answer(name, task):
    blocks, pieces = code_of(hint_3(name, task))
    assert blocks or pieces, "hint 3 has no code"
    solutions = solutions_of(name)
    of_task = [code for one, _, code in right_answers(LABS[name], solutions) if one == task]
    lacking = [
        [
            *(one for block in blocks for one in statements_not_in(block, textwrap.dedent(code))),
            *(piece for piece in pieces if not stands_in(piece, textwrap.dedent(code))),
        ]
        for code in (solutions[task], *of_task)
    ]
    assert [] in lacking, f"in no right answer: {min(lacking, key=len)}"


@pytest.mark.parametrize(("name", "task"), TASKS, ids=[task for _, task in TASKS])
def test_hint_3_leaves_a_decision_to_the_student(name, task):
    for block in code_of(hint_3(name, task))[0]:
        assert LEFT_OUT in ast.unparse(tree(block)), "the block leaves nothing out"


ANSWER = """
def peak(layers, every):
    peaks = []
    for i, first in enumerate(range(0, layers, every)):
        size = min(every, layers - first)
        peaks.append(i + size)
    return max(peaks)
"""


@pytest.mark.parametrize(
    ("block", "lacking"),
    [
        ("peaks = []\nreturn …", []),
        ("for i, first in …:\n    size = …  # layers\n    peaks.append(…)", []),
        ("for i, first in …:\n    size = min(every, …)\n    …", []),
        ("def peak(layers, every):\n    …\n    return …(peaks)", []),
        ("peaks = …\nreturn min(peaks)", ["return min(peaks)"]),
        ("for i, first in …:\n    size = …", ["for i, first in …:\n    size = …"]),
        ("for i, first in …:\n    …\n    size = …", ["for i, first in …:\n    …\n    size = …"]),
        ("return …\npeaks = []", ["peaks = []"]),
    ],
)
def test_a_block_has_to_have_the_statements_of_the_answer_in_their_order(block, lacking):
    assert statements_not_in(block, ANSWER) == lacking


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


def code_of(hint: str) -> tuple[list[str], list[str]]:
    """The fenced blocks of a hint, and the pieces of code in its sentences."""
    return BLOCK.findall(hint), re.findall(r"`([^`]+)`", BLOCK.sub("", hint))


def tree(text: str) -> ast.Module:
    """The statements of a hint or an answer."""
    return ast.parse(text.replace("…", LEFT_OUT))


def statements_not_in(block: str, code: str) -> list[str]:
    """The statements of a block that an answer lacks, or has in another order.

    ``…`` is anything, and a line of only ``…`` any statements. A body is complete without it.
    """
    of_answer = [node for node in ast.walk(tree(code)) if isinstance(node, ast.stmt)]
    end, lacking = (0, 0), []
    for one in tree(block).body:
        if is_left_out(one):
            continue
        ends = [
            (node.end_lineno, node.end_col_offset)
            for node in of_answer
            if (node.lineno, node.col_offset) >= end and alike(one, node)
        ]
        if ends:
            end = min(ends)
        else:
            lacking.append(ast.unparse(one).replace(LEFT_OUT, "…"))
    return lacking


def stands_in(piece: str, code: str) -> bool:
    """Whether the answer has these statements, or this expression; ``…`` is anything.

    A block may have more statements, and a condition another branch.
    """
    if "".join(piece.split()) in "".join(code.split()):
        return True
    text = piece.replace("…", LEFT_OUT).replace("...", LEFT_OUT)
    wanted = [with_gaps(one) for one in parsed(text)]
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


def with_gaps(wanted: ast.AST) -> ast.AST:
    """The same, where a block may have more statements, and a condition another branch."""
    for node in ast.walk(wanted):
        if isinstance(node, ast.If | ast.For | ast.While | ast.With):
            node.body = [gap(), *(one for each in node.body for one in (each, gap()))]
        if isinstance(node, ast.If | ast.For | ast.While) and not node.orelse:
            node.orelse = [gap()]
    return wanted


def gap() -> ast.Expr:
    return ast.Expr(ast.Name(LEFT_OUT, ast.Load()))


def alike(wanted: object, got: object) -> bool:
    """Whether two trees are equal; what was left out is equal to anything."""
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
        named = fields.pop("keywords")
        if not all(any(alike(one, other) for other in got.keywords) for one in named):
            return False
    return all(alike(value, getattr(got, field)) for field, value in fields.items())


def lists_alike(wanted: list, got: list) -> bool:
    """What was left out is any number of elements."""
    if not wanted:
        return not got
    first, *rest = wanted
    if is_left_out(first):
        return any(lists_alike(rest, got[k:]) for k in range(len(got) + 1))
    return bool(got) and alike(first, got[0]) and lists_alike(rest, got[1:])


def is_left_out(node: object) -> bool:
    """Whether a node is ``…``: an expression, a line, a parameter, an attribute's name."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.arg):
        node = node.arg
    return node == LEFT_OUT or (isinstance(node, ast.Name) and node.id == LEFT_OUT)
