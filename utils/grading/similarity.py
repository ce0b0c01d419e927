"""Answers that are near-identical: the same program but for names, layout and comments.

Those of two students, and those of a student and the published solution.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from .cells import body
from .reference import Reference
from .results import Result

#: Answers shorter than this, in nodes of their syntax tree, look alike by nature.
LEAST_NODES = 25
LEAST_WORDS = 12
#: Nodes beyond the stub's from which nobody comes upon the very program of the solution alone:
#: four lines or more. What is shorter, many find.
LEAST_OF_MODEL = 60


@dataclass
class Alike:
    """Students, and the tasks in which their answers are near-identical."""

    students: tuple[str, ...]
    tasks: list[str] = field(default_factory=list)


def groups(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Return students who share answers that are not the model's, most shared tasks first."""
    models = {reference.lab: _models(reference) for reference in references}
    same: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    for student, lab, task, shape in _shapes(results):
        if shape not in models.get(lab, ()):
            same[lab, task, shape].add(student)
    alike: dict[tuple[str, ...], Alike] = {}
    for (_, task, _), students in same.items():
        if len(students) > 1:
            key = tuple(sorted(students))
            alike.setdefault(key, Alike(key)).tasks.append(task)
    return _ranked(alike.values())


def copies(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Return students whose longer answers are the published solution's, most tasks first."""
    models = {reference.lab: _long_models(reference) for reference in references}
    alike: dict[str, Alike] = {}
    for student, lab, task, shape in _shapes(results):
        if shape == models.get(lab, {}).get(task):
            alike.setdefault(student, Alike((student,))).tasks.append(task)
    return _ranked(alike.values())


def _ranked(alike: Iterable[Alike]) -> list[Alike]:
    return sorted(alike, key=lambda group: (-len(group.tasks), group.students))


def _shapes(results: list[Result]) -> Iterator[tuple[str, str, str, str]]:
    """Yield student, lab, task and shape of each answer that is long enough to have one."""
    for result in results:
        for task in result.tasks:
            shape = text_shape(task.code) if task.status == "by hand" else code_shape(task.code)
            if shape:
                yield result.student, result.lab, task.task, shape


def _long_models(reference: Reference) -> dict[str, str]:
    """The shape of the solution of each task in which it is no coincidence to have the same."""
    shapes = {}
    for task in reference.tasks.values():
        model = reference.model_of(task)
        if task.by_hand:
            shapes[task.number] = text_shape(model)
        elif _size(model) - _size(reference.stub_of(task)) >= LEAST_OF_MODEL:
            shapes[task.number] = code_shape(model)
    return {number: shape for number, shape in shapes.items() if shape}


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
        node.name = self._number(node.name)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        return node


def _tree(source: str) -> ast.Module | None:
    """The program without the lines for the shell and IPython; None for what is none."""
    try:
        return ast.parse(re.sub(r"^[!%].*$", "", source, flags=re.MULTILINE))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _size(source: str) -> int:
    """How many nodes a program has; 0 for what is none."""
    tree = _tree(source)
    return len(list(ast.walk(tree))) if tree else 0


def code_shape(source: str) -> str:
    """Return the same for programs that differ in names, layout and comments; "" if short."""
    if tree := _tree(source):
        if len(list(ast.walk(tree))) < LEAST_NODES:
            return ""
        with contextlib.suppress(RecursionError, MemoryError):
            return ast.dump(_Rename().visit(tree))
    words = re.sub(r"#.*", "", source).split()
    return " ".join(words) if len(words) >= LEAST_WORDS else ""


def text_shape(text: str) -> str:
    """Return the words of a written answer; "" for short ones."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words) if len(words) >= LEAST_WORDS else ""
