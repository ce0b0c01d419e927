"""The mistakes that a lab's checks can name, and how many students of a class met each of them.

``ddl-labs statistics RESULTS --mistakes`` prints them. A mistake that no class ever meets costs a
check and its tests some 17 lines, so the list says what can go.

A check names a mistake by a sentence in its source, so this module reads the sentences there: a new
mistake needs no entry in a list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from utils.course.imports import closure

from .results import answers_to
from .statistics import ClassResults, problems_of

ROOT = Path(__file__).resolve().parents[2]
#: Fewest words of a sentence; names and parts of sentences are shorter.
WORDS = 5
#: Fewest letters of a sentence beside its placeholders, so that it doesn't match everything.
LETTERS = 20


class Sentence(NamedTuple):
    """A sentence for students in a check's source.

    Attributes:
        text: the sentence, with … for each value that is put in.
        place: file and line, such as "utils/labs/lab06/checks.py:61".
    """

    text: str
    place: str

    def is_in(self, message: str) -> bool:
        """Return whether a message has this sentence, with any values in it."""
        pattern = ".*?".join(map(re.escape, self.text.split("…")))
        return re.search(pattern, message, re.DOTALL) is not None


class Met(NamedTuple):
    """A sentence, the task at which it was met, and how many students met it there."""

    students: int
    task: str
    sentence: Sentence


def sentences(lab: str) -> list[Sentence]:
    """Return the sentences for students in the modules that the checks of a lab import.

    Only the rooms of the labs are read. What the machinery of all checks says is not among them.

    Args:
        lab: such as "06_allreduce_from_scratch".
    """
    checks = f"utils.labs.lab{lab[:2]}.checks"
    files = closure([checks], ROOT)
    modules = {name: file for name, file in files.items() if name.startswith("utils.labs.")}
    return [each for file in modules.values() for each in sentences_of(file)]


def sentences_of(file: Path) -> Iterator[Sentence]:
    """Yield the sentences in a module, without its docstrings."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    place = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    for node in ast.walk(tree):
        text = "" if id(node) in docstrings | parts else _text_of(node)
        letters = sum(map(str.isalpha, text))
        begins = text[:1].isupper() or text.startswith("…")
        if begins and letters >= LETTERS and len(text.split()) >= WORDS:
            yield Sentence(text, f"{place.as_posix()}:{getattr(node, 'lineno', 0)}")


def _text_of(node: ast.AST) -> str:
    """Return the text of a string with … for each value that is put in; "" for other code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            _text_of(part) if isinstance(part, ast.Constant) else "…" for part in node.values
        )
    return ""


def met(found: ClassResults, lab: str) -> tuple[list[Met], list[Sentence]]:
    """Return the sentences that students met, commonest first, and those that no student met."""
    known = sentences(lab)
    often: list[Met] = []
    for task in found.tasks(lab):
        messages = [
            [problem.text for problem in problems_of(answer)]
            for _, answer in answers_to(found.results, lab, task.number)
        ]
        for sentence in known:
            students = sum(any(map(sentence.is_in, texts)) for texts in messages)
            if students:
                often.append(Met(students, task.number, sentence))
    often.sort(key=lambda each: (-each.students, each.task, each.sentence))
    seen = {each.sentence for each in often}
    return often, [sentence for sentence in known if sentence not in seen]


def table(found: ClassResults, labs: Iterable[str]) -> str:
    """Return the list for labs as text: what was met, how often, and what was never met."""
    from tabulate import tabulate

    lines = []
    for lab in labs:
        often, never = met(found, lab)
        lines += [f"{lab}: {len(often)} named mistakes were met, {len(never)} never", ""]
        rows = [(n, task, sentence.text, sentence.place) for n, task, sentence in often]
        rows += [(0, "", sentence.text, sentence.place) for sentence in never]
        heads = ("students", "task", "mistake", "place")
        lines += [tabulate(rows, heads, maxcolwidths=[None, None, 60, None]), ""]
    return "\n".join(lines).rstrip()
