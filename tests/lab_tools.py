"""What the tests of labs share: a lab's cells, and ranks without processes for pure functions."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat

from utils import cluster
from utils.checks.task import CheckFailed
from utils.cluster.plain import plain

ROOT = Path(__file__).resolve().parents[1]


@functools.cache
def answers(name: str, folder: str = "solutions") -> dict[str, str]:
    """Code of a lab's answer cells by ``grade_id``, without the ``%%px`` line."""
    notebook = nbformat.read(ROOT / folder / name, as_version=4)
    return {
        cell.metadata.nbgrader.grade_id: cell.source.split("\n", 1)[1]
        for cell in notebook.cells
        if cell.cell_type == "code" and "nbgrader" in cell.metadata
    }


def verdict(check, ranks) -> tuple[bool, str]:
    """Whether the check passed, and what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            check(ranks)
        except CheckFailed:
            return False, printed.getvalue()
    return True, printed.getvalue()


def run_cell(ranks: cluster.Ranks | LocalRanks, code: str) -> None:
    """Run a cell on every rank; raises what it raises there."""
    if not isinstance(ranks, cluster.Ranks):
        ranks.run(code)
    else:
        ranks.view.execute(code, silent=True).get()


@contextlib.contextmanager
def solved(
    ranks: cluster.Ranks | LocalRanks, solutions: dict[str, str]
) -> Iterator[Callable[[str, str], None]]:
    """`answer(task, code)` replaces an answer; afterwards its solution is back.

    The ranks have all the solutions before: only what a test has changed is run again.
    """
    replaced = []

    def answer(task: str, code: str) -> None:
        replaced.append(task)
        run_cell(ranks, code)

    yield answer
    for task in replaced:
        run_cell(ranks, solutions[task])


def checks_of(module) -> dict[str, object]:
    """The checks of a module of ``utils.checks`` by task number."""
    found = [value for value in vars(module).values() if hasattr(value, "points")]
    return {check.number: check for check in found}


class LocalRanks:
    """Ranks without processes, for the checks of functions that communicate nothing.

    Has what checks use of `cluster.Ranks`: `n`, and `ask`, which calls the function for one rank
    after the other, in this process. Arguments and values pass through JSON as they do on the way
    to real ranks. An answer that wants to communicate gets an error, as there is no process group.
    """

    def __init__(self, n: int):
        self.n = n
        self.user_ns: list[dict[str, Any]] = [{"rank": r, "world_size": n} for r in range(n)]

    def run(self, code: str) -> None:
        """Run a cell on every rank."""
        for user_ns in self.user_ns:
            exec(compile(code, "cell", "exec"), user_ns)

    def ask(self, target: str, *, timeout: float = 60.0, **kwargs: Any) -> list[cluster.Reply]:
        """One `Reply` of each rank, as `cluster.Ranks.ask` gives it."""
        module, _, name = target.partition(":")
        function = getattr(importlib.import_module(module), name)
        return [self._reply(rank, function, json.dumps(kwargs)) for rank in range(self.n)]

    def _reply(self, rank: int, function, arguments: str) -> cluster.Reply:
        printed = io.StringIO()
        try:
            with contextlib.redirect_stdout(printed):
                value = function(self.user_ns[rank], rank=rank, **json.loads(arguments))
            value = json.loads(json.dumps(plain(value)))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return cluster.Reply(rank, "error", error=said, stdout=printed.getvalue())
        return cluster.Reply(rank, "ok", value, stdout=printed.getvalue())
