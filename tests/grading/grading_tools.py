"""A small lab to grade, and a class that hands it in: right, half right, wrong, and hostile.

The lab has two ranks, five tasks of 1 to 2 points, and a written answer. Its checks are a module
of their own in a folder that the sandbox is told of.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from utils.checks.verdict import MIME, Verdict
from utils.course.notebook import KERNELSPEC, dumps, lab
from utils.course.release import student_version
from utils.grading.notebook_run import Run
from utils.grading.reference import Reference

LAB = "01_toy"
#: A class of five, see the fixture `everyone`.
NAMES = ("Ada", "Bob", "Cleo", "Dora", "Emil")

CHECKS = '''
"""Checks of the toy lab."""
from utils.checks.probe import answer_named
from utils.checks.task import task, value

PATIENCE = 6.0

def probe(user_ns, *, rank, name, value):
    return answer_named(user_ns, name)(value + rank)

def probe_tensor(user_ns, *, rank, name, value):
    import torch
    tensor = torch.full((3,), float(value + rank))
    return answer_named(user_ns, name)(tensor, rank).tolist()

def judge(report, ranks, which, name, expected):
    given = report.seed % 1000
    for reply in report.answers(ranks, which, name=name, value=given, patience=PATIENCE):
        right = expected(given, reply.rank)
        report.follow(reply.rank, [value(reply.value, right, what="the result")])

@task("1.1", "twice", points=1)
def twice(ranks, report):
    judge(report, ranks, probe, "twice", lambda v, r: 2 * (v + r))

@task("1.2", "swap", points=2)
def swap(ranks, report):
    judge(report, ranks, probe_tensor, "swap", lambda v, r: [float(v + 1 - r)] * 3)

@task("1.3", "total", points=2)
def total(ranks, report):
    judge(report, ranks, probe_tensor, "total", lambda v, r: [float(2 * v + 1)] * 3)

@task("1.4", "square", points=1)
def square(ranks, report):
    judge(report, ranks, probe, "square", lambda v, r: (v + r) ** 2)

@task("1.5", "mean", points=2)
def mean(ranks, report):
    judge(report, ranks, probe_tensor, "mean", lambda v, r: [v + 0.5] * 3)
'''

#: Answers by grade_id: task, title, points, code.
ANSWERS = {
    "twice": ("1.1", "twice", 1, "def twice(number):\n    {}\n", "return 2 * number"),
    "swap": (
        *("1.2", "swap", 2, "def swap(mine, rank):\n    {}\n"),
        "theirs = torch.empty_like(mine)\n"
        "request = dist.isend(mine, 1 - rank)\n"
        "dist.recv(theirs, 1 - rank)\n"
        "request.wait()\n"
        "return theirs",
    ),
    "total": (
        *("1.3", "total", 2, "def total(tensor, rank):\n    {}\n"),
        "dist.all_reduce(tensor)\nreturn tensor",
    ),
    "square": ("1.4", "square", 1, "def square(number):\n    {}\n", "return number**2"),
    "mean": (
        *("1.5", "mean", 2, "def mean(tensor, rank):\n    {}\n"),
        "dist.all_reduce(tensor)\nreturn tensor / dist.get_world_size()",
    ),
}
RUNS = {
    "twice": "print(twice(rank))",
    "swap": "print(swap(torch.full((3,), float(rank)), rank))",
    "total": "print(total(torch.ones(3), rank))",
}
MOST = 8
WRITTEN = 2
MODEL_TEXT = "Because a message that nobody receives blocks its sender for ever, on each rank."

SETUP = """%%px
import torch
import torch.distributed as dist

dist.init_process_group("mpi")
rank = dist.get_rank()"""
START = """from utils import cluster, figures
import toy_checks

ranks = cluster.start(2, timeout=8)"""
DRAWING = 'figure, axes = figures.canvas(4, 2)\nfigures.box(axes, 0, 0, "drawn")'


def _solution(name: str) -> str:
    _, _, _, frame, code = ANSWERS[name]
    return indented(frame, f"### BEGIN SOLUTION\n{code}\n### END SOLUTION").rstrip()


def indented(frame: str, code: str) -> str:
    """A function with this body."""
    return frame.format(code.replace("\n", "\n    "))


def _answer_cells(name: str) -> list[NotebookNode]:
    number, title, points, _, _ = ANSWERS[name]
    graded = {"schema_version": 3, "grade_id": f"{name}-answer", "solution": True}
    graded |= {"grade": False, "locked": False, "task": False}
    about = {"task": number, "title": title, "points": points}
    said = Verdict(number, title, points)
    cells = [
        new_markdown_cell(f"## Task {number}: {title}", id=f"{name}-task"),
        new_code_cell(
            f"%%px\n{_solution(name)}",
            id=f"{name}-answer",
            metadata={"nbgrader": graded, "lab": about},
        ),
        new_code_cell(
            f"toy_checks.{name}(ranks)",
            id=f"{name}-check",
            metadata={"lab": {"task": number, "check": True}},
            outputs=[new_output("display_data", data=said.bundle())],
            execution_count=1,
        ),
    ]
    if name in RUNS:
        cells.insert(2, new_code_cell(f"%%px\n{RUNS[name]}", id=f"{name}-run"))
    return cells


def reference() -> NotebookNode:
    """The lab's solution, with the outputs that matter."""
    graded = {"schema_version": 3, "grade_id": "explain-answer", "solution": True, "grade": True}
    graded |= {"points": WRITTEN, "locked": False, "task": False}
    about = {"task": "1.A", "title": "explain", "points": WRITTEN}
    cells = [new_code_cell(START, id="ranks-up"), new_code_cell(SETUP, id="ranks-join")]
    for name in ANSWERS:
        cells += _answer_cells(name)
    cells += [
        new_markdown_cell("Why does it hang?", id="explain-task"),
        new_markdown_cell(
            MODEL_TEXT, id="explain-answer", metadata={"nbgrader": graded, "lab": about}
        ),
        new_code_cell(DRAWING, id="end-figure"),
        new_code_cell("ranks.stop()", id="ranks-down"),
    ]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})


def make_course(folder: Path) -> tuple[Path, Path]:
    """Write the reference and its checks; returns the folders of both."""
    solutions, checks = folder / "solutions", folder / "checks"
    solutions.mkdir(parents=True)
    checks.mkdir()
    (solutions / f"{LAB}.ipynb").write_text(dumps(reference()), encoding="utf-8")
    (checks / "toy_checks.py").write_text(CHECKS, encoding="utf-8")
    return solutions, checks


def cell(nb: NotebookNode, cell_id: str) -> NotebookNode:
    """A notebook's cell."""
    return next(one for one in nb.cells if one.id == cell_id)


def filled(**answers: str | None) -> NotebookNode:
    """A student's notebook: every task solved, but for those given otherwise.

    Values are the body of the function; a value that begins with %% or a line break is the whole
    cell; None leaves the stub.
    """
    nb = student_version(reference(), LAB)
    for name, (_, _, _, frame, code) in ANSWERS.items():
        given = answers.pop(name, code)
        if given is None:
            continue
        whole = given.startswith(("%%", "\n"))
        cell(nb, f"{name}-answer").source = (
            given.lstrip("\n") if whole else "%%px\n" + indented(frame, given)
        )
    written = answers.pop("explain", "Both wait for a message that is never sent by the other.")
    if written is not None:
        cell(nb, "explain-answer").source = written
    assert not answers, answers
    return nb


def hand_in(folder: Path, name: str, nb: NotebookNode | str | int) -> Path:
    """Put a submission into a folder of notebooks: a notebook, a text, or so many bytes."""
    path = folder / f"{name}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(nb, int):
        with path.open("wb") as file:
            file.truncate(nb)
        return path
    path.write_text(nb if isinstance(nb, str) else json.dumps(nb), encoding="utf-8")
    return path


def without_metadata(nb: NotebookNode) -> NotebookNode:
    """As it comes out of an editor that keeps neither ids nor metadata."""
    nb = copy.deepcopy(nb)
    for number, one in enumerate(nb.cells):
        one.metadata, one.id = NotebookNode(), f"made-up-{number}"
    return nb


# --- attacks and accidents -----------------------------------------------------------------------

WRONG = "return tensor * 0"
PASS_LINE = "✓ Task 1.3 · total · 2 points"

#: Finds the kernel.
KERNEL = """import os
from IPython.display import display
for kernel in map(int, filter(str.isdigit, os.listdir('/proc'))):
    if b'ipykernel' in open(f'/proc/{kernel}/cmdline', 'rb').read():
        break"""
VERDICT = Verdict("1.3", "total", 2).data()

#: Code for task 1.3 (2 of 8 points) that would like to have them without an answer, or does harm.
HOSTILE = {
    "prints the expected output": f"print({PASS_LINE!r}, flush=True)\n{WRONG}",
    "displays the expected verdict": (
        f'from utils.checks.verdict import Verdict\nVerdict("1.3", "total", 2).show()\n{WRONG}'
    ),
    "displays what is no verdict": (
        "from IPython.display import display\n"
        f"display({{{MIME!r}: [1], 'text/plain': {PASS_LINE!r}}}, raw=True)\n{WRONG}"
    ),
    "patches torch.allclose, the checks module, builtins": (
        "import builtins, sys, toy_checks\n"
        "import utils.checks.task as task\n"
        "yes = lambda *a, **k: True\n"
        "torch.allclose = torch.equal = builtins.all = task.same = yes\n"
        f"toy_checks.judge = toy_checks.total = lambda *a, **k: print({PASS_LINE!r})\n"
        f"{WRONG}"
    ),
    "returns an object that equals everything": (
        "class Yes(list):\n    def __eq__(self, other):\n        return True\n"
        "class Tensor:\n    def tolist(self):\n        return Yes([0.0])\n"
        "return Tensor()"
    ),
    "moves its cell to the kernel": (
        "\n%%px --local\nimport toy_checks\n"
        f"toy_checks.total = lambda ranks: print({PASS_LINE!r})\n"
    ),
    "leaves %%px out": (
        f"\nimport toy_checks\ntoy_checks.total = lambda ranks: print({PASS_LINE!r})\n"
    ),
    "writes the score file": (
        "import os\n"
        "for folder, _, names in os.walk('/'):\n"
        "    if folder.startswith(('/proc', '/sys', '/usr')):\n        continue\n"
        "    for name in names:\n"
        "        if name in ('result.json', 'report.xml', 'cells.jsonl', 'gradebook.csv'):\n"
        "            path = os.path.join(folder, name)\n"
        "            open(path, 'a').write('{\"points\": 8}')\n"
        f"{WRONG}"
    ),
    "reads the reference": (
        "import os\n"
        "mark = 'BEGIN ' + 'SOLUTION'\n"
        "for folder, _, names in os.walk('/'):\n"
        "    if folder.startswith(('/proc', '/sys', '/usr')) or 'packages' in folder:\n"
        "        continue\n"
        "    for name in names:\n"
        "        path = os.path.join(folder, name)\n"
        "        if name.endswith('.ipynb') and mark in open(path).read():\n"
        "            dist.all_reduce(tensor)\n"
        "            return tensor\n"
        f"{WRONG}"
    ),
    "opens a socket out": (
        "import socket\n"
        "try:\n"
        "    socket.create_connection(('127.0.0.1', PORT), 2).close()\n"
        "except OSError:\n"
        f"    {WRONG}\n"
        "dist.all_reduce(tensor)\nreturn tensor"
    ),
    "speaks to the kernel": (
        "import glob, json, os\n"
        "for path in glob.glob('/tmp/**/*.json', recursive=True):\n"
        "    try:\n        info = json.load(open(path))\n"
        "    except (OSError, ValueError):\n        continue\n"
        "    if 'shell_port' in info:\n"
        "        from jupyter_client import BlockingKernelClient\n"
        "        client = BlockingKernelClient(connection_file=path)\n"
        "        client.load_connection_file()\n        client.start_channels()\n"
        "        client.execute('import toy_checks; toy_checks.total = lambda ranks: '\n"
        f'                       "print({PASS_LINE!r})")\n'
        f"{WRONG}"
    ),
    "reads the kernel's memory": (
        "import os\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    try:\n"
        "        if b'ipykernel' in open(f'/proc/{pid}/cmdline', 'rb').read():\n"
        "            open(f'/proc/{pid}/mem', 'rb')\n"
        "            dist.all_reduce(tensor)\n"
        "            return tensor\n"
        "    except OSError:\n        pass\n"
        f"{WRONG}"
    ),
    "ends its rank": "import os\nos._exit(0)",
    "kills its parents": (
        "import os, psutil\n"
        "for process in psutil.process_iter():\n"
        "    try:\n"
        "        line = ' '.join(process.cmdline())\n"
        "        if process.pid == os.getppid() or 'mpiexec' in line or 'prterun' in line:\n"
        "            process.kill()\n"
        "    except psutil.Error:\n        pass\n"
        f"{WRONG}"
    ),
    "kills all that it can": "import os\nos.kill(-1, 9)",
    "crashes inside C": "import ctypes\nctypes.string_at(0)",
    "is a fork bomb": "import os\nwhile True:\n    os.fork()",
    "is a fork bomb that ignores errors": (
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    ),
    "prints for ever": "while True:\n    print('x' * 1000)",
    "prints for ever round the limit": (
        "import sys\nwrite = type(sys.stdout).write\n"
        "while True:\n    write(sys.stdout, 'x' * 100_000)\n    sys.stdout.flush()"
    ),
    "loops for ever": "while True:\n    pass",
    "sleeps past the limit": "import time\ntime.sleep(10_000)",
    "ignores the interrupt": (
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True:\n    pass"
    ),
    "fills the disk": (
        "from pathlib import Path\n"
        "for folder in ('/tmp', '/dev/shm'):\n"
        "    with open(f'{folder}/full-{rank}', 'wb') as file:\n"
        "        try:\n"
        "            while True:\n                file.write(b'x' * 10_000_000)\n"
        "        except OSError:\n            pass\n"
        f"{WRONG}"
    ),
    "fills the memory": "hoard = []\nwhile True:\n    hoard.append(bytearray(50_000_000))",
    "interrupts the kernel in its check": (
        f"{KERNEL}\n"
        "import signal, threading\n"
        "for wait in (0.01, 0.1, 0.3, 1, 2):\n"
        "    threading.Timer(wait, os.kill, (kernel, signal.SIGINT)).start()\n"
        f"display({{{MIME!r}: {VERDICT}}}, raw=True)\n{WRONG}"
    ),
    "takes the kernel's files away": (
        f"{KERNEL}\n"
        "import resource\n"
        "resource.prlimit(kernel, resource.RLIMIT_NOFILE, (3, 3))\n"
        f"{WRONG}"
    ),
    "shows the expected verdict all the time": (
        "import threading, time\n"
        "from IPython import get_ipython\n"
        "publish = get_ipython().display_pub.publish\n"
        "def show():\n"
        "    for _ in range(100):\n"
        f"        publish({{{MIME!r}: {VERDICT}}})\n"
        "        time.sleep(0.05)\n"
        f"threading.Thread(target=show, daemon=True).start()\n{WRONG}"
    ),
    "raises the words of lost ranks": "raise RuntimeError('give it ranks.restart()')",
    "returns a number of 5000 digits": (
        "class T:\n    def tolist(self):\n        return [10**5000] * 3\nreturn T()"
    ),
    "leaves a child that rewrites every file": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    for _ in range(20):\n"
        "        for folder, _, names in os.walk('/tmp'):\n"
        "            for name in names:\n"
        "                try:\n"
        "                    open(os.path.join(folder, name), 'a').write('x')\n"
        "                except OSError:\n                    pass\n"
        "        time.sleep(1)\n"
        "    os._exit(0)\n"
        f"{WRONG}"
    ),
    "deadlocks": "dist.recv(tensor, 1 - rank)\ndist.send(tensor, 1 - rank)\nreturn tensor",
    "raises on one rank": "if rank:\n    raise ValueError('no')\ndist.all_reduce(tensor)",
}

RIGHT = "dist.all_reduce(tensor)\nreturn tensor"
#: Right answers to task 1.3 that harm what comes after them: nobody loses a point by that.
SPOILING = {
    "removes all files": (
        "import shutil\nfor path in ('/tmp/home', '/tmp', '/dev/shm'):\n"
        f"    shutil.rmtree(path, ignore_errors=True)\n{RIGHT}"
    ),
    "ends its rank after the check": (
        f"import os, threading\nthreading.Timer(3, os._exit, (1,)).start()\n{RIGHT}"
    ),
    "leaves processes that take all cores": (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n"
        "        end = time.time() + 60\n        while time.time() < end:\n            pass\n"
        f"        os._exit(0)\n{RIGHT}"
    ),
    "changes what PyTorch and Python do by default": (
        "import os, warnings\ntorch.set_default_dtype(torch.float64)\n"
        "torch.set_grad_enabled(False)\nwarnings.simplefilter('error')\nos.chdir('/')\n"
        f"os.environ.clear()\n{RIGHT}"
    ),
}

#: What keeps each from gaining or harming; printed in the table of the matrix.
STOPPED_BY = {
    "prints the expected output": "what ranks print is not what the check prints",
    "displays the expected verdict": "what ranks display is not what the check displays",
    "displays what is no verdict": "what ranks display is not what the check displays",
    "patches torch.allclose, the checks module, builtins": "checks run in the kernel",
    "returns an object that equals everything": "JSON text between ranks and kernel",
    "moves its cell to the kernel": "the reference's first line is forced",
    "leaves %%px out": "the reference's first line is forced",
    "writes the score file": "not in the sandbox",
    "reads the reference": "not in the sandbox",
    "opens a socket out": "a network of its own",
    "speaks to the kernel": "connection file deleted before the first cell",
    "reads the kernel's memory": "the kernel is not dumpable",
    "ends its rank": "blanked, the rest again",
    "kills its parents": "the ranks go on without their launcher",
    "kills all that it can": "PID namespace; blanked, the rest again",
    "crashes inside C": "blanked, the rest again",
    "is a fork bomb": "limits of processes and memory; blanked, the rest again",
    "is a fork bomb that ignores errors": "limits of processes and memory; blanked, the rest again",
    "prints for ever": "1 MB per cell and rank, time limit; blanked, the rest again",
    "prints for ever round the limit": "memory or time limit; blanked, the rest again",
    "loops for ever": "time limit; blanked, the rest again",
    "sleeps past the limit": "time limit; blanked, the rest again",
    "ignores the interrupt": "time limit; blanked, the rest again",
    "fills the disk": "scratch of limited size; a task that suffers is run again without it",
    "fills the memory": "memory limit; blanked, the rest again",
    "edits the check": "the reference's check is run",
    "deletes the checks": "the reference's checks are run",
    "interrupts the kernel in its check": "a check that is stopped says so, and gives no points",
    "takes the kernel's files away": "blanked, the rest again",
    "shows the expected verdict all the time": "what ranks display is no output of the check",
    "raises the words of lost ranks": "the kind of an error counts, not its words",
    "returns a number of 5000 digits": "no number of JSON",
    "leaves a child that rewrites every file": "it sees the scratch folder alone",
    "deadlocks": "the backend says so; the ranks live on",
    "raises on one rank": "the backend tells the others; the ranks live on",
}


def attack(name: str, port: int = 9) -> NotebookNode:
    """A notebook with everything right but for task 1.3."""
    return filled(total=HOSTILE[name].replace("PORT", str(port)))


def accidents() -> dict[str, tuple[NotebookNode | str | int, int | None]]:
    """Notebooks that editors and students have harmed, and their points of the 8 for code.

    None for what nobody can read: it is no grade.
    """
    edited = filled(total=WRONG)
    cell(edited, "total-check").source = f"print({PASS_LINE!r})"
    deleted = filled()
    deleted.cells = [one for one in deleted.cells if not one.id.endswith("-check")]
    missing = filled()
    missing.cells = [one for one in missing.cells if one.id != "total-answer"]
    copied = filled(total=WRONG)
    again = copy.deepcopy(cell(copied, "total-answer"))
    again.id, again.source = "a-copy", "%%px\n" + indented(*ANSWERS["total"][3:])
    copied.cells.insert(copied.cells.index(cell(copied, "total-answer")) + 1, again)
    return {
        "edits the check": (edited, 6),
        "deletes the checks": (deleted, 8),
        "misses a cell": (missing, 6),
        "copied a cell": (copied, 8),
        "lost all metadata": (without_metadata(filled()), 8),
        "is not JSON": ('{"cells": [', None),
        "is not a notebook": ("[1, 2]", 0),
        "is empty": ("", None),
        "has 300 MB": (300_000_000, None),
        "is as handed out": (filled(**dict.fromkeys(ANSWERS), explain=None), 0),
    }


# --- runs that are pretended ----------------------------------------------------------------------


class Pretended:
    """Stands in for a run of nbval: ends at a cell for as long as some answers are not blanked.

    ends: cell → (why, tasks of which one must still be there for it to happen). wrong: tasks whose
    answers are; with `base`, only for as long as that task's answer is the student's.
    """

    def __init__(self, reference: Reference, ends: dict, wrong: tuple = (), base: str = ""):
        self.reference, self.ends, self.wrong, self.base = reference, ends, wrong, base
        self.runs = 0

    def __call__(self, nb, box, job, **_) -> Run:
        self.runs += 1
        there = {
            lab(cell)["task"]
            for cell in nb.cells
            if lab(cell).get("points") and "NotImplementedError" not in cell.source
        }
        if any(lab(c).get("task") == self.base and "BEGIN SOLUTION" in c.source for c in nb.cells):
            self.wrong = ()
        students = {
            lab(cell)["task"]
            for cell in nb.cells
            if lab(cell).get("points")
            and lab(cell)["task"] in there
            and "BEGIN SOLUTION" not in cell.source
        }
        records = []
        for cell in nb.cells:
            if cell.cell_type == "code":
                why, causes = self.ends.get(cell.id, (None, ()))
                happens = why is not None and (not causes or bool(set(causes) & students))
                records.append(self._record(cell, there, why if happens else None))
                if happens:
                    break
        return Run(records, 1.0, records[-1]["end"])

    def _record(self, cell, there: set, why: str | None) -> dict:
        task = lab(cell).get("task")
        good = why is None and (task is None or (task in there and task not in self.wrong))
        said = (
            self.reference.expected.get(cell.id, [])
            if good
            else [Verdict("1.1", "wrong", passed=False).data()]
        )
        record = {"cell": cell.id, "outcome": "passed" if good else "failed", "seconds": 1.0}
        return record | {"end": why, "outputs": [], "verdicts": said}
