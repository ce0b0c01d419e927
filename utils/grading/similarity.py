"""Answers that are near-identical: the same program but for names, layout and comments.

Those of two students, and those of a student and the published solution.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field

from .reference import Reference
from .results import Result
from .source import body

#: Answers shorter than this, in nodes of their syntax tree, look alike by nature.
LEAST_NODES, LEAST_WORDS = 25, 12
#: Nodes beyond the stub's from which nobody comes upon the very program of the solution alone:
#: four lines or more. What is shorter, many find.
LEAST_OF_MODEL = 60


@dataclass
class Alike:
    """Students, and the tasks in which their answers are near-identical."""

    students: tuple[str, ...]
    tasks: list[str] = field(default_factory=list)


def groups(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Students who share answers that are not the model's, most shared tasks first."""
    models = {reference.lab: _models(reference) for reference in references}
    same: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for result in results:
        for task in result.tasks:
            shape = text_shape(task.code) if task.status == "by hand" else code_shape(task.code)
            if shape and shape not in models.get(result.lab, ()):
                same[result.lab, task.task, shape].add(result.student)
    found: dict[tuple[str, ...], Alike] = {}
    for (_, number, _), students in same.items():
        if len(students) > 1:
            key = tuple(sorted(students))
            found.setdefault(key, Alike(key)).tasks.append(number)
    return sorted(found.values(), key=lambda group: (-len(group.tasks), group.students))


def copies(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Students whose longer answers are the published solution's, most tasks first."""
    models = {reference.lab: _long_models(reference) for reference in references}
    found: dict[str, Alike] = {}
    for result in results:
        for task in result.tasks:
            shape = text_shape(task.code) if task.status == "by hand" else code_shape(task.code)
            if shape and shape == models.get(result.lab, {}).get(task.task):
                found.setdefault(result.student, Alike((result.student,))).tasks.append(task.task)
    return sorted(found.values(), key=lambda one: (-len(one.tasks), one.students))


def _long_models(reference: Reference) -> dict[str, str]:
    """The shape of the solution of each task in which it is no coincidence to have the same."""
    found = {}
    for task in reference.tasks.values():
        cells = [reference.answer_cells[grade_id] for grade_id in task.answers]
        if task.by_hand:
            found[task.number] = text_shape("\n\n".join(cell.source for cell in cells))
            continue
        model = "\n\n".join(body(cell.source) for cell in cells)
        stub = "\n\n".join(body(reference.stubs[cell.id]) for cell in cells)
        if _nodes(model) - _nodes(stub) >= LEAST_OF_MODEL:
            found[task.number] = code_shape(model)
    return {number: shape for number, shape in found.items() if shape}


def _nodes(source: str) -> int:
    """How large a program is; 0 for what is none."""
    try:
        return sum(1 for _ in ast.walk(ast.parse(re.sub(r"^[!%].*$", "", source, flags=re.M))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0


def _models(reference: Reference) -> set[str]:
    """Shapes of the model answers and of the stubs."""
    sources = [cell.source for cell in reference.answer_cells.values()]
    sources += [reference.stubs[cell.id] for cell in reference.answer_cells.values()]
    shapes = {code_shape(body(source)) for source in sources}
    return {*shapes, *(text_shape(source) for source in sources)} - {""}


class _Rename(ast.NodeTransformer):
    """Gives names and arguments numbers in the order of their appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"n{len(self.numbers)}")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._number(node.arg))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name, node.returns = self._number(node.name), None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        return node


def code_shape(source: str) -> str:
    """The same for programs that differ in names, layout and comments; "" for short ones."""
    try:
        tree = ast.parse(re.sub(r"^[!%].*$", "", source, flags=re.MULTILINE))
        if sum(1 for _ in ast.walk(tree)) < LEAST_NODES:
            return ""
        return ast.dump(_Rename().visit(tree))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        words = " ".join(re.sub(r"#.*", "", source).split())
        return words if len(words.split()) >= LEAST_WORDS else ""


def text_shape(text: str) -> str:
    """The words of a written answer; "" for short ones."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words) if len(words) >= LEAST_WORDS else ""
