"""A run of nbval in which a student tries each task before it is solved.

    python tests/labs/stub_walk.py labs/01_c10d.ipynb --nbval solutions/01_c10d.ipynb

The arguments after the first are pytest's. nbval runs the solution; before each answer cell this
plugin runs the student's version of it, and on to the cell at which the student's notebook stops.
That must be an error that names the task. Then nbval goes on with the answer. So one run proves
that the stored outputs are right and that every stub is met.

Cells that measure or train for long run in a shorter form (`SHORTER`). If nbval compares their
output, it must still be the stored output. The other run of nbval in test_solutions.py runs every
cell as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_output, output_from_msg

from utils.course.notebook import lab, read

ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Errors of the kernel that show those of the ranks.
OF_RANKS = {"CellFailed", "RanksLostError"}
#: Seconds for a cell.
CELL = 300
#: In the junit report, at the cell that answers: the task that stopped the student.
MET = "stopped by the stub of"

#: By notebook and cell: what a cell's code says, and what it says in this run.
SHORTER = {
    "01_c10d": {
        "eager-times": [("range(20)", "range(2)")],
        "pingpong-run": [("200 if", "20 if")],
    },
    "03_data_parallel": {
        "data-load": [
            (
                "data.fashion_mnist(train=True)",
                "torch.utils.data.Subset(data.fashion_mnist(train=True), range(12_800))",
            ),
        ],
        "twin-train": [("epochs=3", "epochs=1")],
        "run-run": [("epochs=3", "epochs=1")],
        "practice-ddp": [("range(100)", "range(10)")],
        "bug-run": [
            ("range(8)", "range(1)"),
            (
                "InMemoryLoader(test_data, 1000)",
                "InMemoryLoader(Subset(test_data, range(1000)), 1000)",
            ),
        ],
        "speed-run": [("rounds=7, steps=8", "rounds=2, steps=4")],
    },
    "04_ddp": {
        "slow-measure": [("range(10)][2:]", "range(5)][2:]")],
        "hook-practice": [("range(40)", "range(8)")],
        "practice-script": [("range(6400)", "range(640)")],
        "sweep-steps": [("[0.001, 1, 2, 4, 16]", "[0.001, 1, 4, 16]")],
    },
    "05_scaling": {
        "script-run": [
            (
                '"images.pt")',
                '"images.pt", "--rounds", 2, "--steps", 1, "--target", 0.5, "--seeds", 1)',
            ),
        ],
        "script-run-two": [
            ("2**10, 2**13, 2**16, 2**18, 2**20, 2**21", "2**10, 2**13, 2**18, 2**21"),
            ("SMALL, 2 * SMALL, LARGE)", 'SMALL, 2 * SMALL, LARGE, "--rounds", 3, "--steps", 1)'),
        ],
        "script-run-four": [(', "--rounds", 4, "--steps", 2', "")],
        "matrix-threads": [(', "--rounds", 4', "")],
    },
    "06_allreduce": {
        "count-record": [("range(7)", "range(2)")],
        "time-measure": [
            (
                "{4: 4, 40_000: 6, 100_000: 4, 400_000: 2, 1_000_000: 2}",
                "dict.fromkeys((4, 40_000, 100_000, 400_000, 1_000_000), 1)",
            ),
        ],
    },
    "07_parameter_server": {
        "delay-run": [("range(300)", "range(60)"), (">= 220", ">= 20")],
        "race-functions": [("SECONDS = 1.6", "SECONDS = 0.4")],
        "cap-run": [("lasting(0.6)", "lasting(0.2)")],
    },
    "08_elastic_averaging": {
        "time-run": [
            (
                "eta, rho = 0.1, 3.0\n",
                "eta, rho = 0.1, 3.0\nplan = {name: n // 5 for name, n in plan.items()}\n",
            ),
        ],
    },
    "10_pipeline": {
        "measured-run": [("8: 2}", "8: 1}")],
        "practice-define": [("seconds=0.03", "seconds=0.01"), ("times=2", "times=1")],
    },
    "11_hybrid": {
        "data-load": [
            (
                "data.fashion_mnist(train=True)",
                "torch.utils.data.Subset(data.fashion_mnist(train=True), range(240))",
            ),
        ],
    },
    "13_faults": {"schemes-define": [("[1, 2, 3], 1.0, 0.35", "[1, 2, 3], 0.5, 0.2")]},
    "12_federated": {
        "choose-run": [("(rank, rank + 4)", "(rank,)")],
        "cost-run": [("rounds=8", "rounds=3"), ('"rounds": 4', '"rounds": 1')],
        "late-run": [
            ("by_pair, rounds=4, fraction=1.0)", "by_pair, rounds=2, fraction=1.0)"),
            ("rounds=4, fraction=1.0, seconds", "rounds=2, fraction=1.0, seconds"),
        ],
    },
    "15_memory_and_precision": {
        "masters-run": [("steps=40", "steps=8")],
        "top-run": [
            ('"all entries", 100', '"all entries", 20'),
            ('with memory", 200', 'with memory", 20'),
            ('forgetful", 200', 'forgetful", 20'),
        ],
        "minute-run": [("SECONDS = 4", "SECONDS = 1")],
    },
    "17_serving": {
        "roof-run": [("repeats=4", "repeats=1")],
        "serve-measure": [("times=2", "times=1")],
    },
}


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    """The cells that nbval runs."""
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def markers(cell: NotebookNode) -> set[str]:
    """What a cell tells nbval, by tag or by comment, in small letters."""
    comments = (line.strip() for line in cell.source.splitlines())
    said = {line.lstrip("#").strip() for line in comments if line.startswith("#")}
    return {word.lower() for word in [*cell.metadata.get("tags", []), *said]}


def answer_id(cell: NotebookNode) -> str | None:
    """The name by which solution and lab know an answer cell; None for all other cells."""
    told = cell.metadata.get("nbgrader", {})
    return told.get("grade_id") if told.get("solution") and cell.cell_type == "code" else None


def task_of(cell: NotebookNode) -> str:
    """What the stub of an answer cell calls its task."""
    return f"Task {lab(cell)['task']}: {lab(cell)['title']}"


def tasks(nb: NotebookNode) -> list[str]:
    """The tasks that have an answer cell, in order."""
    return [task_of(cell) for cell in nb.cells if answer_id(cell)]


def stopped(cell: NotebookNode) -> bool:
    """Did the cell fail? A script that a cell starts tells so by its output only."""
    if "raises-exception" in markers(cell):
        return False
    failed = any(output.output_type == "error" for output in cell.outputs)
    return failed or "NotImplementedError" in said(cell)


def said(cell: NotebookNode) -> str:
    """What the cell printed and displayed, and the errors it ended with."""
    texts = [
        output.get("text") or output.get("data", {}).get("text/plain") or _error(output)
        for output in cell.outputs
    ]
    return ANSI.sub("", "\n".join(texts))


def _error(output: NotebookNode) -> str:
    """The error with its name: that of the ranks, where it was a `%%px` cell."""
    if output.output_type != "error":
        return ""
    of_ranks = output.ename in OF_RANKS
    return output.evalue if of_ranks else f"{output.ename}: {output.evalue}"


def errors(cell: NotebookNode) -> set[str]:
    """The kinds of errors: those of the ranks, where it was a `%%px` cell."""
    kinds = set()
    for output in cell.outputs:
        if output.output_type == "error":
            # `NameError: …` of the rank that is shown, `rank 2: NameError: …` of others.
            shown = r"^(?:rank \d+: )?(\w+Error|KeyboardInterrupt)\b"
            ranks = re.findall(shown, ANSI.sub("", output.evalue), re.MULTILINE)
            kinds |= set(ranks if output.ename in OF_RANKS else [output.ename])
    return kinds


def stub_problem(
    student: NotebookNode, answer: NotebookNode, execute: Callable[[NotebookNode], None]
) -> str | None:
    """Run the student's notebook from a stub on, until it stops; returns what is wrong with that.

    `answer` is the cell of the solution; `execute(cell)` runs a cell and fills its outputs.
    """
    places = {answer_id(cell): index for index, cell in enumerate(student.cells)}
    if answer_id(answer) not in places:
        return f"the lab lacks the answer cell '{answer.id}'"
    begin, task = places[answer_id(answer)], task_of(answer)
    for cell in student.cells[begin:]:
        if cell.cell_type == "code":
            execute(cell)
            if stopped(cell):
                return stop_problem(cell, task)
    return f"nothing stops at the stub of {task}"


def stop_problem(cell: NotebookNode, task: str) -> str | None:
    """What is wrong with the cell at which the student's notebook stops; None if nothing is."""
    number, _, title = task.partition(": ")
    told = (f"NotImplementedError: {task}", f"✗ {number} · {title} · still open")
    if not any(words in said(cell) for words in told):
        return f"cell '{cell.id}' stops, but not for {task}: {said(cell)}"
    if not errors(cell) <= {"NotImplementedError", "CheckFailed"}:
        return f"cell '{cell.id}' stops at {task} with {errors(cell)}: {said(cell)}"
    return None


class StubError(AssertionError):
    """The student was not stopped, or not by the task."""


class StubWalk:
    """The plugin: tries each stub before nbval runs the answer."""

    def __init__(self, student: NotebookNode, shorter: dict[str, list[tuple[str, str]]]):
        self.student = student
        self.shorter = shorter

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """Try the stub, run nbval's cell in any case, and tell both."""
        cell, problem = item.cell, None
        if answer_id(cell):
            kernel = item.parent.kernel.kc
            problem = stub_problem(self.student, cell, lambda tried: execute(kernel, tried))
            item.user_properties.append((MET, "" if problem else task_of(cell)))
        for long, short in self.shorter.get(cell.id, ()):
            cell.source = cell.source.replace(long, short)
        result = yield
        if problem:
            raise StubError(problem)
        return result


def execute(kernel, cell: NotebookNode) -> None:
    """Run a cell in nbval's kernel and keep its outputs."""
    cell.outputs = []

    def keep(message: dict) -> None:
        if message["msg_type"] in {"stream", "error", "display_data", "execute_result"}:
            new = output_from_msg(message)
            last = cell.outputs[-1] if cell.outputs else None
            # A text may come in pieces, which end anywhere.
            if last and new.output_type == "stream" and new.get("name") == last.get("name"):
                last.text += new.text
            else:
                cell.outputs.append(new)

    options = {"store_history": False, "allow_stdin": False, "stop_on_error": False}
    reply = kernel.execute_interactive(cell.source, output_hook=keep, timeout=CELL, **options)
    ended = reply["content"]
    # A check that failed has said why, and shows no traceback.
    if ended["status"] == "error" and not stopped(cell):
        told = {"ename": ended["ename"], "evalue": ended["evalue"], "traceback": []}
        cell.outputs.append(new_output("error", **told))


if __name__ == "__main__":
    lab_path = Path(sys.argv[1])
    walk = StubWalk(read(lab_path), SHORTER.get(lab_path.stem, {}))
    sys.exit(pytest.main(sys.argv[2:], plugins=[walk]))
