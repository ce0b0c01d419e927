"""Finds near-identical answers, by the share of their parts that two answers have in common.

The parts of code are its subtrees, so a renamed variable, one more `pass` or a line that was split
changes few of them. The parts of a text are its pairs of words.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import compress

from .reference import Reference, body, parsed
from .results import Result

#: Near-identical answers differ in at most this share of the longer one's parts, or in so few
#: parts. We tried 671 pairs of right answers: none does. Of 420 copies with a split line, 99 % do.
OTHER = 0.12
FEW_OTHER = 4
#: Parts (about nine lines) that a solution adds to its stub, from which a similar answer is
#: probably a copy. Many students find a shorter solution themselves.
LEAST_OF_MODEL = 30
#: Answers with fewer parts are similar without copying.
LEAST = 12
#: Nodes of a subtree that counts; smaller subtrees are in every program.
LEAST_NODES = 3
#: Fields that change nothing in a program, or hold a name that its author has chosen.
IGNORED = {"annotation", "returns", "name", "type_comment", "kind"}
#: Words in a part of a text.
WORDS = 2
#: The task under which a student's own cells are named.
OWN_CELLS = "own cells"

#: How often an answer has each part.
Parts = Counter[int]


@dataclass
class Alike:
    """Students, and the tasks in which their answers are near-identical."""

    students: tuple[str, ...]
    tasks: list[str]


def groups(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Return students who share answers that differ from the model, most shared tasks first."""
    models = {reference.lab: list(_models(reference)) for reference in references}
    answers: dict[tuple[str, str], list[tuple[str, Parts]]] = defaultdict(list)
    for student, lab, task, parts in _answers(results):
        if not any(near(parts, model) for model in models.get(lab, ())):
            answers[lab, task].append((student, parts))
    pairs = [(group, task) for (_, task), found in answers.items() for group in _grouped(found)]
    return _alike(pairs)


def copies(results: list[Result], references: list[Reference]) -> list[Alike]:
    """Return students whose longer answers are near the published solution, most tasks first."""
    models = {(ref.lab, task): parts for ref in references for task, parts in _long_models(ref)}
    return _alike(
        ((student,), task)
        for student, lab, task, parts in _answers(results)
        if (lab, task) in models and near(parts, models[lab, task])
    )


def _alike(pairs: Iterable[tuple[tuple[str, ...], str]]) -> list[Alike]:
    """Return the tasks of each group of students: most tasks first, and then small groups."""
    tasks: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for students, task in pairs:
        tasks[students].append(task)
    return [Alike(*pair) for pair in sorted(tasks.items(), key=_order)]


def _order(pair: tuple[tuple[str, ...], list[str]]) -> tuple[object, ...]:
    return -len(pair[1]), len(pair[0]), pair


def _grouped(answers: list[tuple[str, Parts]]) -> Iterator[tuple[str, ...]]:
    """Yield the groups of students in which each answer is near another one."""
    left = list(answers)
    while left:
        group = [left.pop()]
        for _, parts in group:  # which grows
            close = [near(parts, other) for _, other in left]
            group += compress(left, close)
            left = [one for one, is_close in zip(left, close, strict=True) if not is_close]
        names = {student for student, _ in group}
        if len(names) > 1:
            yield tuple(sorted(names))


def _answers(results: list[Result]) -> Iterator[tuple[str, str, str, Parts]]:
    """Yield student, lab, task and parts of each answer that is long enough to be compared."""
    for result in results:
        found = [
            (task.task, (text_parts if task.status == "by hand" else code_parts)(task.code))
            for task in result.tasks
        ]
        own = parsed(result.own)
        found += [(OWN_CELLS, _parts_of(node)) for node in (own.body if own else ())]
        for task, parts in found:
            if parts.total() >= LEAST:
                yield result.student, result.lab, task, parts


def _long_models(reference: Reference) -> Iterator[tuple[str, Parts]]:
    """Yield the solutions that nobody finds by coincidence."""
    for task in reference.tasks.values():
        if task.by_hand:
            parts, least = text_parts(task.model), LEAST
        else:
            parts = code_parts(task.model)
            least = LEAST_OF_MODEL + code_parts(task.stub).total()
        if parts.total() >= least:
            yield task.number, parts


def _models(reference: Reference) -> Iterator[Parts]:
    """Yield the parts of the model answers and of the stubs."""
    for cell in reference.answer_cells.values():
        for source in (cell.source, reference.stubs[cell.id]):
            yield (code_parts if cell.cell_type == "code" else text_parts)(body(source))


def near(one: Parts, other: Parts) -> bool:
    """Return whether two answers are near-identical."""
    longer = max(one.total(), other.total())
    most = max(FEW_OTHER, OTHER * longer)
    return (
        longer - min(one.total(), other.total()) <= most and longer - (one & other).total() <= most
    )


def text_parts(text: str) -> Parts:
    """Return the sequences of words of a written answer."""
    return _sequences(re.findall(r"\w+", text.casefold()))


def _sequences(words: list[str]) -> Parts:
    return Counter(hash(tuple(words[k : k + WORDS])) for k in range(len(words) - WORDS + 1))


def code_parts(source: str) -> Parts:
    """Return the subtrees of a program; its sequences of words if it is no Python."""
    tree = parsed(source)
    return _parts_of(tree) if tree else _sequences(re.findall(r"\w+", re.sub("#.*", "", source)))


def _parts_of(tree: ast.AST) -> Parts:
    """Return the subtrees without docstrings, and without names that the author has chosen."""
    nodes = list(ast.walk(tree))
    names = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    names |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    parts: Parts = Counter()
    with contextlib.suppress(RecursionError):
        _count(tree, names, parts)
    return parts


def _count(node: ast.AST, chosen: set[str], parts: Parts) -> tuple[int, int]:
    """Count a subtree and all subtrees in it; return its hash and its number of nodes."""
    shape: list[object] = [type(node).__name__]
    nodes = 1
    for field, value in ast.iter_fields(node):
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST) and not _is_ignored(one, field):
                inner, count = _count(one, chosen, parts)
                # An edit changes only its own statement, and not each loop around it.
                if not isinstance(one, ast.stmt):
                    shape.append(inner)
                    nodes += count
            elif not (isinstance(one, ast.AST) or field in IGNORED or one in chosen):
                shape.append((field, repr(one)))
    key = hash(tuple(shape))
    if nodes >= LEAST_NODES:
        parts[key] += 1
    return key, nodes


def _is_ignored(node: ast.AST, field: str) -> bool:
    """Return whether a node changes nothing: a docstring, an annotation, `pass`."""
    is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_docstring or isinstance(node, ast.Pass | ast.expr_context) or field in IGNORED
