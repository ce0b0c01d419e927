"""The notebooks as users run them: nbval over the solutions, and the labs stub by stub."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from conftest import run_tree
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output

from utils.course.execute import stdout_lines
from utils.course.notebook import KERNELSPEC, LABS, SOLUTIONS, dumps, lab, notebooks, read

ANSI = re.compile(r"\x1b\[[0-9;]*m")
#: Seconds: for a cell; for a notebook under nbval, after which its whole tree is killed.
CELL, NOTEBOOK = 300, 900
#: Seconds for processes of a notebook to end by themselves after pytest has ended.
GRACE = 15
MARK = "DDL_LABS_NBVAL_RUN"
#: Markers of cells that nbval doesn't run, and of cells whose output it doesn't compare.
SKIPS = {"nbval-skip", "nbval_skip"}
IGNORES = {"nbval-ignore-output", "nbval_ignore_output", "pytest_validate_ignore_output"}

pytestmark = pytest.mark.timeout(NOTEBOOK + 60)
each_solution = pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)


def code_cells(nb: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in nb.cells if cell.cell_type == "code"]


def markers(cell: NotebookNode) -> set[str]:
    """What a cell tells nbval, by tag or by comment, in small letters."""
    comments = (line.strip() for line in cell.source.splitlines())
    said = {line.lstrip("#").strip() for line in comments if line.startswith("#")}
    return {word.lower() for word in [*cell.metadata.get("tags", []), *said]}


# --- (a) nbval -----------------------------------------------------------------------------------


def holes(nb: NotebookNode) -> list[str]:
    """Where nbval would pass this notebook without having compared what matters."""
    found = []
    for cell in code_cells(nb):
        if cell.execution_count is None:
            found.append(f"cell '{cell.id}' was never executed: nothing is compared")
        if markers(cell) & SKIPS:
            found.append(f"cell '{cell.id}' is skipped")
        if not lab(cell).get("check"):
            continue
        printed = stdout_lines(new_notebook(cells=[cell]))
        if not (printed and printed[0].startswith(f"✓ Task {lab(cell)['task']} ")):
            found.append(f"check '{cell.id}' has no ✓ to compare with: {printed[:1]}")
        if markers(cell) & IGNORES:
            found.append(f"the output of check '{cell.id}' is not compared")
    return found


def nbval(path: Path, report: Path, *, cell: float = CELL, notebook: float = NOTEBOOK) -> list[str]:
    """Run nbval as an instructor does; return what is wrong with the notebook, or with the run."""
    mark = uuid.uuid4().hex
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env |= {"IPP_NONINTERACTIVE": "1", MARK: mark, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, f"--rootdir={path.parent}"]
    command += ["-p", "no:cacheprovider", "--color=no", f"--junitxml={report}"]
    # After a cell that ran out of time, nbval expects the rest to fail. Not expected here.
    command += ["-o", "xfail_strict=true"]
    command += ["--nbval", f"--nbval-cell-timeout={cell}", str(path)]
    try:
        done = run_tree(command, timeout=notebook, env=env, cwd=path.parent)
    except subprocess.TimeoutExpired as late:
        end(processes(mark))
        return [f"not done after {notebook} s\n{late.output}\n{late.stderr}"]
    found = [f"left {name} behind" for name in end(wait_for_the_end(mark))]
    if not report.exists():
        return [*found, f"no report\n{done.stdout}\n{done.stderr}"]
    found += verdicts(report, read(path), cell)
    if done.returncode and not found:
        found.append(f"pytest ended with status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return found


def verdicts(report: Path, nb: NotebookNode, limit: float) -> list[str]:
    """What a junit report of nbval says against the notebook: every cell must have passed."""
    found, cells = [], code_cells(nb)
    names = [f"Cell {number}" for number in range(len(cells))]
    cases = {case.get("name"): case for case in ElementTree.parse(report).iter("testcase")}
    if list(cases) != names:
        found.append(f"{len(cases)} cells were run, the notebook has {len(names)}")
    for name, cell in zip(names, cells, strict=True):
        for verdict in cases.get(name, ()):
            if verdict.tag in {"failure", "error", "skipped"}:
                text = verdict.text or verdict.get("message")
                found.append(f"cell '{cell.id}', {verdict.tag}: {text}")
        if name in cases and float(cases[name].get("time")) >= limit:
            # nbval interrupts a `%%px` that hangs, and takes its end for a pass.
            found.append(f"cell '{cell.id}' took all of its {limit} s")
    return found


def processes(mark: str) -> list[psutil.Process]:
    """The processes of one nbval run."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for_the_end(mark: str) -> list[psutil.Process]:
    """What still runs of an nbval run after a while of grace."""
    deadline = time.monotonic() + GRACE
    while (left := processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def end(left: list[psutil.Process]) -> list[str]:
    names = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            names.append(" ".join(process.cmdline())[:100])
            process.kill()
    psutil.wait_procs(left, timeout=5)
    return names


@each_solution
def test_the_stored_outputs_leave_nbval_no_hole(path: Path):
    assert not holes(read(path)), f"run: make solutions ARGS=solutions/{path.name}"


@each_solution
def test_nbval_reproduces_every_stored_output_of_a_solution(path: Path, tmp_path: Path):
    found = nbval(path, tmp_path / "report.xml")
    assert not found, "\n".join(found)


# --- (b) the stubs -------------------------------------------------------------------------------


class Student:
    """A kernel in which a student works through a lab."""

    def __init__(self, nb: NotebookNode, folder: Path):
        self.nb = nb
        self.client = NotebookClient(
            nb,
            timeout=CELL,
            kernel_name=KERNELSPEC["name"],
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        )

    def runs(self, begin: int) -> int | None:
        """Run all cells from here; the index of the one at which the notebook stops, or None."""
        for index in range(begin, len(self.nb.cells)):
            cell = self.nb.cells[index]
            if cell.cell_type == "code":
                cell.outputs = []
                self.client.execute_cell(cell, index)
                if stopped(cell):
                    return index
        return None


def stopped(cell: NotebookNode) -> bool:
    """Did the cell fail? A script that a cell starts tells so by its output only."""
    if "raises-exception" in markers(cell):
        return False
    failed = any(output.output_type == "error" for output in cell.outputs)
    return failed or "NotImplementedError" in said(cell)


def said(cell: NotebookNode) -> str:
    """What the cell printed, and the errors it ended with."""
    texts = [output.get("text") or _error(output) for output in cell.outputs]
    return ANSI.sub("", "\n".join(texts))


def _error(output: NotebookNode) -> str:
    """The error with its name: that of the ranks, where it was a `%%px` cell."""
    if output.output_type != "error":
        return ""
    of_ranks = output.ename == "CellFailed"
    return output.evalue if of_ranks else f"{output.ename}: {output.evalue}"


def errors(cell: NotebookNode) -> set[str]:
    """The kinds of errors: those of the ranks, where it was a `%%px` cell."""
    kinds = set()
    for output in cell.outputs:
        if output.output_type == "error":
            # `NameError: …` of the rank that is shown, `rank 2: NameError: …` of others.
            shown = r"^(?:rank \d+: )?(\w+Error|KeyboardInterrupt)\b"
            ranks = re.findall(shown, ANSI.sub("", output.evalue), re.MULTILINE)
            kinds |= set(ranks if output.ename == "CellFailed" else [output.ename])
    return kinds


def stub_problems(student: Student, solution: NotebookNode) -> list[str]:
    """Solve one answer cell after the other, running on until the next stub each time."""
    answers = {
        cell.metadata.nbgrader.grade_id: cell.source
        for cell in code_cells(solution)
        if cell.metadata.get("nbgrader", {}).get("solution")
    }
    open_cells = [
        index
        for index, cell in enumerate(student.nb.cells)
        if cell.metadata.get("nbgrader", {}).get("grade_id") in answers
    ]
    assert len(open_cells) == len(answers), "the lab lacks an answer cell of its solution"
    found, begin = [], 0
    for index in open_cells:
        cell = student.nb.cells[index]
        task = f"Task {lab(cell)['task']}: {lab(cell)['title']}"
        stop = student.runs(begin)
        if stop is None:
            return [*found, f"nothing stops at the stub of {task}"]
        at = student.nb.cells[stop]
        if stop < index:
            return [*found, f"cell '{at.id}' fails before {task}, all answers given: {said(at)}"]
        if f"NotImplementedError: {task}" not in said(at):
            found.append(f"cell '{at.id}' stops, but not for {task}: {said(at)}")
        elif not errors(at) <= {"NotImplementedError", "CheckFailed"}:
            found.append(f"cell '{at.id}' stops at {task} with {errors(at)}: {said(at)}")
        cell.source = answers[cell.metadata.nbgrader.grade_id]
        begin = index
    return found


@each_solution
def test_a_student_is_stopped_at_each_stub_by_an_error_that_names_the_task(
    path: Path, tmp_path: Path
):
    folder = tmp_path / "labs"
    shutil.copytree(LABS, folder, ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    student = Student(read(folder / path.name), folder)
    # As in JupyterLab, save that the ranks' errors come together.
    with student.client.setup_kernel(env={**os.environ, "IPP_NONINTERACTIVE": "1"}):
        found = stub_problems(student, read(path))
    assert not found, "\n".join(found)


# --- (c) can these tests fail? -------------------------------------------------------------------


def executed(source: str, printed: str = "", **metadata: object) -> NotebookNode:
    """A cell of a reference: with what it printed, allegedly."""
    outputs = [new_output("stream", name="stdout", text=printed)] if printed else []
    cell_id = re.sub(r"\W+", "-", source)[:24]
    cell = new_code_cell(source, id=cell_id, metadata=metadata, outputs=outputs)
    cell.execution_count = 1
    return cell


CHECK = {"lab": {"task": "1.4", "check": True}}
RIGHT = "✓ Task 1.4 · all_reduce · 2 points\n"


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., list[str]]:
    """`judge(*cells, **limits)`: what nbval and our guards say about a notebook of these."""

    def run(*cells: NotebookNode, **limits: float) -> list[str]:
        path = tmp_path / "toy.ipynb"
        nb = new_notebook(cells=list(cells), metadata={"kernelspec": KERNELSPEC})
        path.write_text(dumps(nb), encoding="utf-8")
        return nbval(path, tmp_path / "report.xml", notebook=60, **limits)

    return run


def test_an_altered_stored_output_is_found(judge):
    found = judge(executed("print(1)", "1\n"), executed("print(2)", "3\n"))
    assert len(found) == 1, found
    assert "cell 'print-2-', failure" in found[0]


def test_a_cell_that_hangs_and_takes_the_interrupt_is_found(judge):
    # What `%%px` does: nbval alone calls it, and all that comes after, passed.
    hang = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pass"
    found = judge(executed(hang), executed("print(2)", "2\n"), cell=2)
    assert any("took all of its 2 s" in line for line in found), found
    assert any("cell 'print-2-', failure" in line for line in found), found


def test_a_wrong_answer_is_found_by_its_check_on_the_ranks(judge):
    wrong = "%%px\ndef sum_over_ranks(tensor):\n    dist.all_reduce(tensor)\n    return tensor + 1"
    found = judge(
        executed(
            "from utils import cluster\nfrom utils.checks import lab01\nranks = cluster.start(2)",
            "2 MPI ranks are up.\n",
        ),
        executed('%%px\nimport torch.distributed as dist\ndist.init_process_group("mpi")'),
        executed(wrong),
        executed("lab01.sum_over_ranks(ranks)", RIGHT, **CHECK),
        executed("ranks.stop()"),
    )
    assert len(found) == 1, "\n".join(found)
    assert "cell 'lab01-sum_over_ranks-ran', failure" in found[0]
    assert "CheckFailed" in found[0]


def test_ranks_that_a_notebook_leaves_behind_are_gone_all_the_same(judge):
    begin = "from utils import cluster\nranks = cluster.start(2)"
    assert judge(executed(begin, "2 MPI ranks are up.\n")) == []


@pytest.mark.parametrize(
    ("cell", "hole"),
    [
        (new_code_cell("1", id="new"), "never executed"),
        (executed("# NBVAL_SKIP\n1"), "is skipped"),
        (executed("1", tags=["nbval-skip"]), "is skipped"),
        (executed("check()", "✗ Task 1.4 · all_reduce\n", **CHECK), "has no ✓"),
        (executed("check()", **CHECK), "has no ✓"),
        (executed("# NBVAL_IGNORE_OUTPUT\ncheck()", RIGHT, **CHECK), "is not compared"),
    ],
    ids=["unexecuted", "skipped", "skipped by tag", "failed check", "silent check", "ignored"],
)
def test_a_hole_in_a_reference_is_found(cell: NotebookNode, hole: str):
    assert [hole in line for line in holes(new_notebook(cells=[cell]))] == [True]
    assert holes(new_notebook(cells=[executed("check()", RIGHT, **CHECK)])) == []


def test_a_cell_that_nbval_did_not_run_is_found(tmp_path: Path):
    report = tmp_path / "report.xml"
    report.write_text('<testsuite><testcase name="Cell 0" time="0.1"/></testsuite>')
    nb = new_notebook(cells=[executed("1"), executed("2")])
    assert verdicts(report, nb, CELL) == ["1 cells were run, the notebook has 2"]
    report.write_text(
        '<testsuite><testcase name="Cell 0" time="0.1"><skipped message="xfail"/></testcase>'
        '<testcase name="Cell 1" time="0.1"/></testsuite>'
    )
    assert verdicts(report, nb, CELL) == ["cell '1', skipped: xfail"]


def test_a_stub_that_stops_for_another_reason_is_found():
    lab_cell = executed("f()", **{"nbgrader": {"grade_id": "f", "solution": True}})
    lab_cell.metadata.lab = {"task": "1.4", "title": "all_reduce"}
    lab_cell.outputs = [new_output("error", ename="NameError", evalue="f", traceback=[])]
    nb = new_notebook(cells=[lab_cell])
    student = Student(nbformat.from_dict(nb), Path())
    student.runs = lambda begin: 0
    assert "stops, but not for Task 1.4" in stub_problems(student, nb)[0]
    student.runs = lambda begin: None
    assert "nothing stops at the stub of Task 1.4" in stub_problems(student, nb)[0]
