"""Compares the name by which a lab draws a student's tasks with the student's name in the class.

A student who writes a friend's name into lab 18 gets the friend's ward, and could copy its answers.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator

from .reference import Reference, parsed
from .results import Result
from .submissions import clean

#: Letters that Unicode doesn't decompose, and vowels that some people write as two letters.
PLAIN = str.maketrans({"ø": "o", "ł": "l", "đ": "d", "ı": "i", "æ": "a", "œ": "o"})
#: Without an answer there is no name.
NO_NAME = {"unchanged", "missing", "not graded"}
MOST_NAME = 100
UMLAUT = re.compile(r"([aou])e")


def ward_remarks(results: list[Result], references: list[Reference]) -> dict[str, list[str]]:
    """Return for each student the remarks on a name of somebody else, and on equal wards."""
    remarks: dict[str, list[str]] = defaultdict(list)
    wards: dict[tuple[str, str], list[str]] = defaultdict(list)
    tasks = [(ref.lab, task) for ref in references for task in ref.tasks.values()]
    personal = {(lab, task.number) for lab, task in tasks if task.personal}
    for result in results:
        for task in result.tasks:
            if (result.lab, task.task) not in personal or task.status in NO_NAME:
                continue
            name = clean(_written(task.code))
            wards[result.lab, name.casefold()].append(result.student)
            if not agree(result.student, name):
                text = f"the name is {name!r}, not the student's"
                remarks[result.student].append(f"{result.lab}, task {task.task}: {text}.")
    for (lab, name), students in wards.items():
        for student, text in _equal_wards(name, students):
            remarks[student].append(f"{lab}: {text}.")
    return dict(remarks)


def _equal_wards(name: str, students: list[str]) -> Iterator[tuple[str, str]]:
    """Yield each student who wrote the same name as somebody else, and what is said of it."""
    for student in students if len(students) > 1 else []:
        others = ", ".join(other for other in students if other != student)
        yield student, f"{others} wrote the same name {name!r}, so their tasks are equal"


def _written(code: str) -> str:
    """Return the text or number that the answer's last assignment writes down, or its code."""
    tree = parsed(code)
    nodes = tree.body if tree else []
    values = [node.value for node in nodes if isinstance(node, ast.Assign | ast.AnnAssign)]
    value = values[-1] if values else None
    text = str(value.value) if isinstance(value, ast.Constant) else code
    return text[:MOST_NAME]


def agree(student: str, name: str) -> bool:
    """Return whether one name has all words of the other, in any order and spelling.

    Canvas joins the words of a name. A number alone can't be compared, so it agrees.
    """
    words, others = _words(student), _words(name)
    joined, others_joined = "".join(words), "".join(others)
    return all(word in others_joined for word in words) or all(word in joined for word in others)


def _words(name: str) -> list[str]:
    """Return the words of a name without case, accents, numbers and initials."""
    letters = unicodedata.normalize("NFKD", name.casefold().translate(PLAIN))
    plain = "".join(letter for letter in letters if not unicodedata.combining(letter))
    words = re.findall(r"[^\W\d_]+", UMLAUT.sub(r"\1", plain))
    return [word for word in words if len(word) > 1 or not word.isascii()]
