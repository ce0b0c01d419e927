"""The notebooks as users run them: `make test` has one run of nbval over each solution.

This run meets every stub, on ranks inside the kernel and without MPI and `fork`, as on Windows. A
notebook shows the stored outputs there, too: those of ranks that are processes. `make test-all` has
another run of each solution on processes, by nbval alone, with all cells as they are.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
import uuid
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil
import pytest
import without_mpi
from lab_tools import LONG
from mpi_jobs import run_tree
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook, new_output
from stub_walk import CELL, MET, SHORTER, code_cells, markers, stub_problem, tasks

from utils.checks import verdict
from utils.course.notebook import KERNELSPEC, LABS, SOLUTIONS, dumps, lab, notebooks, read

#: Seconds for a notebook under nbval, after which its whole tree is killed.
NOTEBOOK = 900
#: Seconds for processes of a notebook to end by themselves after pytest has ended.
GRACE = 15
MARK = "DDL_LABS_RUN_OF_NBVAL"
STUB_WALK = str(Path(__file__).with_name("stub_walk.py"))
#: Markers of cells that nbval doesn't run, and of cells whose output it doesn't compare.
SKIPS = {"nbval-skip", "nbval_skip"}
IGNORES = {"nbval-ignore-output", "nbval_ignore_output", "pytest_validate_ignore_output"}

pytestmark = pytest.mark.timeout(NOTEBOOK + 60)
#: Labs whose notebooks need processes to show the stored outputs: labs 13 and 14 kill ranks, lab 18
#: reads what PyTorch records in a process, and in lab 09 each rank catches its own warnings.
PROCESSES = {"09_tensor_parallel", "13_faults", "14_capstone", "18_the_clinic"}
#: What `cluster.start` says is the only difference of ranks inside the kernel.
SANITIZE = r"""
[processes]
regex: (\d+) MPI (ranks? ha(ve|s) started\.)
replace: \1 \2

[threads]
regex: (started\.) They are threads of this kernel.*
replace: \1
"""


def solutions(of_long: Sequence[pytest.MarkDecorator] = ()) -> list:
    """All solutions, for pytest, with these marks for the long ones."""
    return [
        pytest.param(path, id=path.stem, marks=of_long if path.stem in LONG else ())
        for path in notebooks(SOLUTIONS)
    ]


each_solution = pytest.mark.parametrize("path", solutions())


# --- the notebooks -------------------------------------------------------------------------------


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
        shown = verdict.read(cell.outputs)
        if [(one.task, one.passed) for one in shown] != [(lab(cell)["task"], True)]:
            found.append(f"check '{cell.id}' has no ✓ to compare with: {shown}")
        if markers(cell) & IGNORES:
            found.append(f"the output of check '{cell.id}' is not compared")
    return found


def nbval(
    path: Path,
    report: Path,
    *,
    student: Path | None = None,
    cell: float = CELL,
    notebook: float = NOTEBOOK,
    environment: Mapping[str, str] = os.environ,
    options: Sequence[str] = (),
) -> list[str]:
    """Run nbval as an instructor does; return what is wrong with the notebook, or with the run.

    With the student's notebook, each of its stubs is tried before the answer (`stub_walk`).
    `options` are more options of pytest.
    """
    mark = uuid.uuid4().hex
    env = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    env |= {"IPP_NONINTERACTIVE": "1", MARK: mark, "NO_COLOR": "1"}
    program = ["-m", "pytest"] if student is None else [STUB_WALK, str(student)]
    command = [sys.executable, *program, "-c", os.devnull, f"--rootdir={path.parent}"]
    # utils.course spares nbval 2 s of nbformat's import.
    command += ["-p", "utils.course", "-p", "no:cacheprovider"]
    command += ["--color=no", f"--junitxml={report}"]
    # After a cell that ran out of time, nbval expects the rest to fail. Not expected here.
    command += ["-o", "xfail_strict=true"]
    command += ["--nbval", f"--nbval-cell-timeout={cell}", *options, str(path)]
    try:
        done = run_tree(command, timeout=notebook, env=env, cwd=path.parent)
    except subprocess.TimeoutExpired as late:
        end(processes(mark))
        return [f"not done after {notebook} s\n{late.output}\n{late.stderr}"]
    found = [f"left {name} behind" for name in end(wait_for_the_end(mark))]
    if not report.exists():
        return [*found, f"no report\n{done.stdout}\n{done.stderr}"]
    found += verdicts(report, read(path), cell)
    if student is not None and (met := stubs_met(report)) != tasks(read(path)):
        found.append(f"the stubs that were met: {met}, those of the solution: {tasks(read(path))}")
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
        for case in cases.get(name, ()):
            if case.tag in {"failure", "error", "skipped"}:
                text = case.text or case.get("message")
                found.append(f"cell '{cell.id}', {case.tag}: {text}")
        if name in cases and float(cases[name].get("time")) >= limit:
            # nbval interrupts a `%%px` that hangs, and takes its end for a pass.
            found.append(f"cell '{cell.id}' took all of its {limit} s")
    return found


def stubs_met(report: Path) -> list[str]:
    """The tasks whose stubs stopped the student where they should, by a junit report."""
    properties = ElementTree.parse(report).iter("property")
    return [p.get("value") for p in properties if p.get("name") == MET and p.get("value")]


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


def without_processes(folder: Path) -> dict:
    """What `nbval` is told for ranks inside the kernel, on a machine without MPI and `fork`."""
    (folder / "sanitize.cfg").write_text(SANITIZE)
    return {
        "environment": without_mpi.environment() | {"DDL_LABS_WHERE": "here"},
        "options": ["--nbval-sanitize-with", str(folder / "sanitize.cfg")],
    }


@pytest.mark.parametrize("path", solutions(of_long=[pytest.mark.extended, pytest.mark.rest]))
def test_nbval_reproduces_a_solution_and_a_student_is_stopped_at_each_stub_by_its_task(
    path: Path, tmp_path: Path
):
    where = {} if path.stem in PROCESSES else without_processes(tmp_path)
    found = nbval(path, tmp_path / "report.xml", student=LABS / path.name, **where)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", SHORTER)
def test_a_cell_that_runs_in_a_shorter_form_still_says_what_is_shortened(name: str):
    cells = {cell.id: cell for cell in code_cells(read(SOLUTIONS / f"{name}.ipynb"))}
    for cell_id, changes in SHORTER[name].items():
        for long, _ in changes:
            assert cells[cell_id].source.count(long) == 1, f"{cell_id}: {long}"


@pytest.mark.extended
@each_solution
def test_nbval_alone_reproduces_each_stored_output_on_processes_without_data_and_network(
    path: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    """The outputs were stored with the real data, and must be the same with the stand-in."""
    environment = {k: v for k, v in os.environ.items() if k != "FASHION_MNIST_ROOT"}
    cache = tmp_path_factory.getbasetemp() / "cache"
    environment |= {"XDG_CACHE_HOME": str(cache), "no_proxy": "localhost,127.0.0.1"}
    environment |= dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")  # nobody
    found = nbval(path, tmp_path / "report.xml", environment=environment)
    assert not found, "\n".join(found)


# --- can these tests fail? -------------------------------------------------------------------


def executed(source: str, shown: str | verdict.Verdict = "", **metadata: object) -> NotebookNode:
    """A cell of a reference: with what it printed or found, allegedly."""
    if isinstance(shown, verdict.Verdict):
        outputs = [new_output("display_data", data=shown.bundle())]
    else:
        outputs = [new_output("stream", name="stdout", text=shown)] if shown else []
    cell_id = re.sub(r"\W+", "-", source)[:24]
    cell = new_code_cell(source, id=cell_id, metadata=metadata, outputs=outputs)
    cell.execution_count = 1
    return cell


CHECK = {"lab": {"task": "1.4", "check": True}}
RIGHT = verdict.Verdict("1.4", "all_reduce", 2)


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., list[str]]:
    """`judge(*cells, **limits)`: what nbval and our guards say about a notebook of these."""

    def toy(name: str, cells: tuple[NotebookNode, ...]) -> Path:
        nb = new_notebook(cells=list(cells), metadata={"kernelspec": KERNELSPEC})
        (tmp_path / name).write_text(dumps(nb), encoding="utf-8")
        return tmp_path / name

    def run(
        *cells: NotebookNode, student: tuple[NotebookNode, ...] = (), **limits: float
    ) -> list[str]:
        lab_of = toy("lab.ipynb", student) if student else None
        solution = toy("toy.ipynb", cells)
        return nbval(solution, tmp_path / "report.xml", student=lab_of, notebook=60, **limits)

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
            "from utils import cluster\nfrom utils.labs import lab01\nranks = cluster.start(2)",
            "2 MPI ranks have started.\n",
        ),
        executed('%%px\nimport torch.distributed as dist\ndist.init_process_group("mpi")'),
        executed(wrong),
        executed("lab01.sum_over_ranks(ranks)", RIGHT, **CHECK),
        executed("ranks.stop()"),
    )
    assert len(found) == 1, "\n".join(found)
    assert "cell 'lab01-sum_over_ranks-ran', failure" in found[0]
    assert "CheckFailed: Task 1.4" in found[0]


def test_ranks_that_a_notebook_leaves_behind_are_gone_all_the_same(judge):
    begin = "from utils import cluster\nranks = cluster.start(2)"
    assert judge(executed(begin, "2 MPI ranks have started.\n")) == []


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


# --- and the stubs -------------------------------------------------------------------------------

STUB = "raise NotImplementedError('Task 1.4: all_reduce')"


def answer(source: str, printed: str = "") -> NotebookNode:
    """An answer cell of task 1.4, of the solution or of the lab."""
    nbgrader = {"grade_id": "reduce", "solution": True}
    return executed(source, printed, nbgrader=nbgrader, lab={"task": "1.4", "title": "all_reduce"})


def test_each_stub_is_met_before_nbval_runs_the_answer(judge):
    after = executed("print(x)", "1\n")
    assert judge(answer("x = 1"), after, student=(answer(STUB), after)) == []
    # The stub may stop a later cell: a program that a cell starts, say.
    later = (
        executed("print('NotImplementedError: Task 1.4: all_reduce')"),
        executed("raise SystemError('must not be run')"),
    )
    assert judge(answer("x = 1"), after, student=(answer("y = 1"), *later)) == []


def test_a_student_whom_nothing_stops_is_found_and_the_stored_outputs_are_still_compared(judge):
    wrong = executed("print(x)", "2\n")
    found = judge(answer("x = 1"), wrong, student=(answer("x = 3"), wrong))
    assert len(found) == 3, "\n".join(found)
    assert "nothing stops at the stub of Task 1.4: all_reduce" in found[0]
    assert "cell 'print-x-', failure" in found[1]
    assert "the stubs that were met: []" in found[2]


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        ([("NotImplementedError", "Task 1.4: all_reduce")], None),
        ([("NameError", "f")], "stops, but not for Task 1.4"),
        ([("NotImplementedError", "Task 1.5: exchange")], "stops, but not for Task 1.4"),
        (
            [("CellFailed", "NotImplementedError: Task 1.4: all_reduce\nrank 2: TypeError: f")],
            "stops at Task 1.4: all_reduce with {",
        ),
        ([], "nothing stops at the stub of Task 1.4"),
    ],
    ids=["right", "another error", "another task", "an error of one rank", "no error"],
)
def test_a_stub_that_stops_for_another_reason_is_found(outputs, problem):
    student = new_notebook(cells=[answer(STUB)])

    def execute(cell: NotebookNode) -> None:
        cell.outputs = [
            new_output("error", ename=name, evalue=text, traceback=[]) for name, text in outputs
        ]

    found = stub_problem(student, answer("x = 1"), execute)
    assert found is None if problem is None else problem in found
    assert "lacks the answer cell" in stub_problem(new_notebook(), answer("x = 1"), execute)
