"""Predictions on a lab's page: the reader chooses before the page shows the result.

A cell with ``predict(…)`` asks, and a later cell with ``….beside(…)`` shows the result. Below the
first cell, the page has a form. The outputs from there to the second cell are folded, and
predictions.js opens them after the reader's choice. Without scripts the page has no form, and the
reader opens the folds.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from nbformat import NotebookNode

from .address import ROOT


@dataclass(frozen=True)
class Question:
    """One call of ``predict``.

    Attributes:
        text: the question.
        names: the names of the numbers to predict; "" if there is only one number.
        unit: the unit of the numbers.
        choices: the choices that a reader has; empty if the question asks for numbers.
        variable: the name that the cell gives to the prediction.
    """

    text: str
    names: Sequence[str]
    unit: str
    choices: Sequence[str]
    variable: str


def questions(source: str) -> list[Question]:
    """Read the predictions that a cell asks for.

    Raises:
        ValueError: the question or a choice is computed, so that the page can't show it.
    """
    tree = ast.parse(source)
    known = _constants(tree)
    found = []
    for node in tree.body:
        if isinstance(node, ast.Assign) and _calls_predict(node.value):
            found.append(_question(node, known))
    return found


def covers(cells: Sequence[NotebookNode]) -> dict[str, list[str]]:
    """Return, by the id of each cell whose output is covered, the ids of the cells that ask."""
    found: dict[str, list[str]] = defaultdict(list)
    for k, cell in enumerate(cells):
        if not is_prediction(cell):
            continue
        last = k
        for question in questions(cell.source):
            shows = re.compile(rf"\b{question.variable}\.beside\(")
            at = (j for j in range(k + 1, len(cells)) if shows.search(cells[j].source))
            last = max(last, next(at, k))
        for covered in cells[k + 1 : last + 1]:
            if covered.cell_type == "code":
                found[covered.id].append(cell.id)
    return found


def is_prediction(cell: NotebookNode) -> bool:
    """Return whether a cell calls ``predict``, which a cell with a table to fill in doesn't."""
    marked = cell.cell_type == "code" and cell.metadata.get("lab", {}).get("predict")
    return bool(marked and questions(cell.source))


def form(cell_id: str, asked: Sequence[Question]) -> str:
    """Return a cell's form in HTML, without empty lines, because Markdown ends HTML at them."""
    sets = "".join(_fieldset(f"{cell_id}-{k}", question) for k, question in enumerate(asked))
    numbers = any(not question.choices for question in asked)
    commit = '<button type="submit">Commit my prediction</button>' if numbers else ""
    return (
        f'<form class="prediction" id="{escape(cell_id)}" hidden>{sets}'
        f'<div class="ways">{commit}<button type="button" class="show">Show me</button>'
        '<button type="button" class="again" hidden>Hide the result again</button></div>'
        '<p class="chosen" role="status"></p></form>'
    )


def _fieldset(prefix: str, question: Question) -> str:
    ask = f"<fieldset><legend>{escape(question.text)}</legend>"
    if not question.choices:
        fields = (_field(f"{prefix}-{k}", question, name) for k, name in enumerate(question.names))
        return f"{ask}{''.join(fields)}</fieldset>"
    rows = (
        f'<fieldset class="choices"><legend>{escape(name)}</legend>{_ways(question)}</fieldset>'
        if name
        else f'<div class="choices">{_ways(question)}</div>'
        for name in question.names
    )
    return f"{ask}{''.join(rows)}</fieldset>"


def _ways(question: Question) -> str:
    buttons = "".join(
        f'<button type="button" class="choice" aria-pressed="false">{escape(choice)}</button>'
        for choice in question.choices
    )
    return f'<div class="ways">{buttons}</div>'


def _field(name_of_field: str, question: Question, name: str) -> str:
    unit = f' <span class="unit">{escape(question.unit)}</span>' if question.unit else ""
    return (
        f'<label for="{name_of_field}">{escape(name) or "Your prediction"}'
        f'<span><input type="number" step="any" required id="{name_of_field}" '
        f'data-name="{escape(name)}" data-unit="{escape(question.unit)}">{unit}</span></label>'
    )


# --- reading a cell ------------------------------------------------------------------------------


def _calls_predict(node: ast.AST) -> bool:
    called = node.func if isinstance(node, ast.Call) else None
    return getattr(called, "id", getattr(called, "attr", "")) == "predict"


def _question(node: ast.Assign, known: Mapping[str, Any]) -> Question:
    call = node.value
    given = dict(zip(("question", "answer"), call.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in call.keywords}
    answer = given.get("answer")
    names = [""]
    if isinstance(answer, ast.Dict):
        names = [_value(key, known) for key in answer.keys]
    elif isinstance(answer, ast.Name) and isinstance(known.get(answer.id), Mapping):
        names = list(known[answer.id])
    return Question(
        text=_value(given["question"], known),
        names=names,
        unit=_value(given["unit"], known) if "unit" in given else "",
        choices=_value(given["choices"], known) if "choices" in given else (),
        variable=node.targets[0].id,
    )


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Return the constants of a cell or a module, and of the modules that it imports."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found[node.targets[0].id] = _value(node.value, found)
            except ValueError:
                continue
        elif isinstance(node, ast.ImportFrom) and not node.level:
            for alias in node.names:
                path = ROOT / node.module.replace(".", "/") / f"{alias.name}.py"
                if path.is_file():
                    module = _constants(ast.parse(path.read_text("utf-8")))
                    found |= {f"{alias.name}.{name}": value for name, value in module.items()}
    return found


def _value(node: ast.expr, known: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Tuple | ast.List):
        return tuple(_value(item, known) for item in node.elts)
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {_value(key, known): _value(value, known) for key, value in pairs}
    if isinstance(node, ast.Constant):
        return node.value
    if ast.unparse(node) in known:
        return known[ast.unparse(node)]
    raise ValueError(
        f"the site can't read {ast.unparse(node)!r} of a prediction: write the question and the "
        "choices as texts in the cell, or as a constant of a module"
    )
