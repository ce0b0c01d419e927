"""The tables in ``answers/``, and a lab whose solutions stand on ranks to try them out."""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
import re
import secrets
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from lab_tools import answers, checks_of, run_cell, verdict
from local_ranks import LocalRanks, Traces

from utils import cluster

LABS = {
    path.stem: importlib.import_module(f"answers.{path.stem}")
    for path in sorted((Path(__file__).parent / "answers").glob("lab*.py"))
}


def wrong_answers(tables: ModuleType, solutions: dict[str, str]) -> Iterator[tuple]:
    """Of a lab: task, what the student did, code, words."""
    yield from tables.WRONG
    for task, what, old, new, words in getattr(tables, "CHANGES", ()):
        assert old in solutions[task], f"{old!r} is not in the solution of {task}"
        yield task, what, solutions[task].replace(old, new), words


def right_answers(tables: ModuleType, solutions: dict[str, str]) -> Iterator[tuple]:
    """Of a lab: task, what is different, code."""
    yield from tables.RIGHT
    for task, what, old, new in getattr(tables, "CHANGES_THAT_ARE_RIGHT", ()):
        assert old in solutions[task], f"{old!r} is not in the solution of {task}"
        yield task, what, solutions[task].replace(old, new)


def solutions_of(name: str) -> dict[str, str]:
    """The code of a lab's solutions, by task."""
    cells = answers(LABS[name].NOTEBOOK)
    return {task: cells[cell] for task, cell in LABS[name].CELLS.items()}


#: What the first optimizer imports. On a busy machine it can take longer than a timeout, and an
#: interrupt in the middle leaves half a package.
SLOW_IMPORTS = "import torch._dynamo"


def ranks_of(name: str) -> int:
    """How many ranks the lab has."""
    return getattr(LABS[name], "RANKS", 4)


@contextlib.contextmanager
def seeded(seed: str) -> Iterator[None]:
    """Let checks draw the same numbers whenever they run with this seed."""
    with mock.patch.object(secrets, "randbelow", random.Random(seed).randrange):
        yield


def tasks_of_ranks_here() -> list:
    """Every task that ranks in this process suffice for, for pytest."""
    return [
        pytest.param(name, task, id=task)
        for name, tables in LABS.items()
        for task in tables.CELLS
        if task not in getattr(tables, "REAL", ())
    ]


class Lab:
    """A lab whose solutions stand on the ranks."""

    def __init__(self, name: str, ranks: cluster.Ranks | LocalRanks):
        self.name, self.tables, self.ranks = name, LABS[name], ranks
        tables = self.tables
        self.checks = checks_of(importlib.import_module(f"utils.labs.{name}.checks"))
        self.solutions = solutions_of(name)
        self.after = getattr(tables, "AFTER", {})
        self.run(SLOW_IMPORTS)
        self.run(getattr(tables, "BEFORE", ""))
        for code in self.solutions.values():
            self.run(code)
        for code in self.after.values():
            self.run(code)
        self._known = {name for names in self._namespaces() for name in names}

    def _namespaces(self) -> list[dict[str, Any]]:
        """The names on each rank; none where ranks are processes."""
        return self.ranks.user_ns if isinstance(self.ranks, LocalRanks) else []

    def forget(self) -> None:
        """Remove the names that an answer has added: the next answer may call another thing so."""
        for names in self._namespaces():
            for name in names.keys() - self._known:
                if not name.startswith("_"):
                    del names[name]

    def run(self, code: str) -> None:
        """Run a cell on every rank; raises what it raises there."""
        run_cell(self.ranks, textwrap.dedent(code))

    def stub(self, task: str) -> str:
        """What stands in the student's notebook."""
        return answers(self.tables.NOTEBOOK, "labs")[self.tables.CELLS[task]]

    def is_function(self, task: str) -> bool:
        """Whether the stub is inside of what it defines, so that its cell runs."""
        lines = self.stub(task).splitlines()
        return all(line.startswith(" ") for line in lines if "NotImplementedError" in line)

    def solve(self, task: str, answer: str = "") -> None:
        """Put the solution back; where the ranks join the world anew, all of them.

        An answer may define functions of other tasks, too. Their solutions come back as well.
        """
        anew = "init_process_group" in self.solutions[task]
        changed = defined(answer)
        cells = [
            solution
            for other, solution in self.solutions.items()
            if anew or other == task or changed & defined(solution)
        ]
        for cell in filter(None, [*cells, self.after.get(task)]):
            self.run(cell)

    def try_out(self, task: str, code: str, again: bool | None = True) -> tuple[bool, str]:
        """What the check says of an answer. Afterwards the solution is back, and passes.

        Args:
            again: try that; ``None``: where the answer left something behind, which takes ranks
                in this process to see.
        """
        before = again is None and self.ranks.traces()
        self.run(code)
        told = verdict(self.checks[task], self.ranks)
        answered = again is None and self.ranks.traces()
        self.solve(task, code)
        if again is None:
            again = left_behind(before, answered, self.ranks.traces())
        if again:
            passed, printed = verdict(self.checks[task], self.ranks)
            assert passed, f"after that answer the solution does not pass any more: {printed}"
        self.forget()
        return told


@functools.cache
def defined(code: str) -> frozenset[str]:
    """Return the names of the functions and classes that a cell defines."""
    return frozenset(re.findall(r"^(?:def|class) (\w+)", textwrap.dedent(code), re.MULTILINE))


def left_behind(before: Traces, answered: Traces, solved: Traces) -> bool:
    """Whether an answer had an accident, or changed names that the solution does not set again."""
    accidents = before[0] != answered[0]
    return accidents or bool(_changed(before[1], answered[1]) - _changed(answered[1], solved[1]))


def _changed(earlier: list[dict], later: list[dict]) -> set[tuple[int, str]]:
    """Names that are new, gone, or stand for another object: (rank, name)."""
    return {
        (rank, name)
        for rank, (one, other) in enumerate(zip(earlier, later, strict=True))
        for name in one.keys() | other.keys()
        if name not in one or name not in other or one[name] is not other[name]
    }
