"""A pytest plugin for nbval that records each cell's outcome and ends a session that is lost.

nbval alone doesn't report what the cells printed, passes a cell that was interrupted, and continues
even if no later cell can work. The plugin is loaded with ``-p``, outside the kernel's sandbox.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator
from queue import Empty
from typing import Any

import pytest
from nbformat import NotebookNode
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell

from utils.checks import verdict
from utils.course.notebook import NEEDED

from .results import End, Record

#: The outputs of a cell that are kept, and the characters of a text and of a picture.
MOST_OUTPUTS = 50
MOST_TEXT = 20_000
MOST_PICTURE = 400_000
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: Seconds between two looks at whether the kernel is alive.
LOOK = 0.5
#: Seconds for each cell before the first task. No student wrote these cells, and they start ranks,
#: which need at most `utils.cluster.boxes.box_ranks.START`.
START = 240.0
#: A cell of the lab that trains may take so many times as long as another one.
LONG = 3
#: Names of the errors after which only fresh ranks help: from a %%px cell, and from a question.
LOST = {"RanksLostError", "DeadRankError"}
#: The part of a verdict for readers. It isn't compared, so a reference may have an older design.
HTML = "text/html"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with the file for the records."""
    parser.addoption("--grading-log", help="one line of JSON for each cell")


class KernelDiedError(RuntimeError):
    """The kernel is dead; without this error nbval would wait until the cell's time is over."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    """Make nbval notice a dead kernel within a second, and give the start of the ranks its time."""
    if not isinstance(item, IPyNbCell):
        return
    if not hasattr(item.parent.kernel, "watched"):
        _watch(item.parent.kernel)
    option = item.config.option
    if not hasattr(item.parent, "given"):
        item.parent.given = option.nbval_cell_timeout
        option.nbval_cell_timeout = max(option.nbval_cell_timeout, START)
    if "lab" in item.cell.metadata:
        item.parent.tasks_begun = True
    if hasattr(item.parent, "tasks_begun"):
        is_long = NEEDED in item.cell.metadata.get("tags", ())
        option.nbval_cell_timeout = item.parent.given * (LONG if is_long else 1)
    never_compared = [kind for kind in item.parent.skip_compare if kind != HTML]
    item.parent.skip_compare = (*never_compared, *[HTML] * _is_check(item))


def _watch(kernel: RunningKernel) -> None:
    get_message = kernel.get_message

    def watched(stream: str, timeout: float | None = None) -> Any:
        deadline = time.monotonic() + (3600 if timeout is None else timeout)
        while True:
            left = deadline - time.monotonic()
            try:
                return get_message(stream, timeout=max(0, min(LOOK, left)))
            except Empty:
                if not kernel.is_alive():
                    raise KernelDiedError(End.KERNEL) from None
                if left <= LOOK:
                    raise

    kernel.get_message = watched
    kernel.watched = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Record the cell, and end the session if no later cell can be judged."""
    report = yield
    if isinstance(item, IPyNbCell) and (call.when == "call" or (call.excinfo and call.when)):
        why = _end(item, call)
        _note(item, report, call, why)
        if why:
            item.session.shouldstop = why
    return report


def _end(item: IPyNbCell, call: pytest.CallInfo[None]) -> str | None:
    """Return why no later cell can be judged in this run; None if they can."""
    if call.when == "setup":
        return "the kernel did not start"
    error = _error(call)
    if isinstance(error, pytest.skip.Exception):
        return None
    if isinstance(error, MemoryError):
        return End.OUTPUT
    if item.parent.timed_out:
        return End.CELL_TIME
    if not item.parent.kernel.is_alive():
        return End.KERNEL
    if _ranks_are_lost(item):
        return End.RANKS
    # An error in a student's own cell is not the machine's fault.
    begun = item.cell.metadata.get("own") or getattr(item.parent, "tasks_begun", False)
    if error and not begun:
        return f"cell '{item.cell.get('id')}' before the first task failed"
    return None


def _error(call: pytest.CallInfo[None]) -> BaseException | None:
    return call.excinfo.value if call.excinfo else None


def _ranks_are_lost(item: IPyNbCell) -> bool:
    """Return whether the kernel reports that no later cell can work; a rank can't fake that."""
    # A cell of lab 13 kills a rank to show what happens, and the next cell restarts the ranks.
    metadata = item.cell.metadata
    if "raises-exception" in metadata.get("tags", []) and not metadata.get("own"):
        return False
    outputs = item.test_outputs or []
    kinds = {output.get("ename") for output in outputs if output.output_type == "error"}
    problems = [problem for shown in _verdicts(item) for problem in shown.problems]
    return any(problem.kind == "lost" for problem in problems) or not kinds.isdisjoint(LOST)


def _verdicts(item: IPyNbCell) -> list[verdict.Verdict]:
    """Return a check's verdicts; in any other cell a verdict may be a student's forgery."""
    return verdict.read(item.test_outputs or []) if _is_check(item) else []


def _is_check(item: IPyNbCell) -> bool:
    return bool(item.cell.metadata.get("lab", {}).get("check"))


def _note(
    item: IPyNbCell, report: pytest.TestReport, call: pytest.CallInfo[None], why: str | None
) -> None:
    outputs = item.test_outputs or []
    error = _error(call)
    record: Record = {
        "cell": item.cell.get("id", ""),
        "outcome": report.outcome,
        "seconds": round(call.duration, 3),
        "end": why,
        "outputs": [_cut(output) for output in outputs[:MOST_OUTPUTS]],
        "verdicts": [one.data() for one in _verdicts(item)],
        "message": "" if error is None else str(error)[:MOST_TEXT],
    }
    item.test_outputs = None  # so that not all outputs of a notebook stay in memory
    with open(item.config.getoption("--grading-log"), "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def _cut(output: NotebookNode) -> dict[str, str]:
    """Return an output, shortened and without ANSI colors; pictures only as PNG."""
    kept = {"type": output.output_type}
    if output.output_type == "stream":
        kept |= {"name": output.name, "text": _short(output.text)}
    elif output.output_type == "error":
        kept |= {"ename": _short(output.ename), "evalue": _short(output.evalue)}
        kept["text"] = _short("\n".join(map(str, output.traceback)))
    else:
        data = output.get("data", {})
        kept["text"] = _short(str(data.get("text/plain", "")))
        picture = data.get("image/png", "")
        if isinstance(picture, str) and len(picture) < MOST_PICTURE:
            kept["png"] = picture.strip()
    return kept


def _short(text: str) -> str:
    text = ANSI.sub("", str(text))
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + "\n[… and more]"
