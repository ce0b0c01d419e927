"""With ranks inside the kernel, a cell that needs processes says so, and Run All goes on."""

from __future__ import annotations

import os
import re

import nbformat
import pytest
from nbclient import NotebookClient
from places import ROOT

from utils.cluster import left_out
from utils.jobs import NeedsProcesses, thread_plan

CELLS = [
    'from utils import cluster\nranks = cluster.start(2, where="here")',
    "%%px\nimport os\nimport torch.distributed as dist\ndist.init_process_group('mpi')\nbefore = 1",
    "ranks = cluster.start(2, where='here', fault_tolerant=True)",
    "%%px\nafter = 2\nif dist.get_rank():\n    os.kill(os.getpid(), 9)\ndist.barrier()\nlost = 3",
    "%%px\nprint(before, lost)",
    "mine = ranks.client[0]['lost']",
    "print(mine)",
    "%%px\ndist.barrier()\nprint(before + after)",
    "print(never)",
]
AMBER = "○ This cell needs {}. Go on with the next one."


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What each of the cells shows, the name of an error among it."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    for cell in notebook.cells[-1:]:
        cell.metadata["tags"] = ["raises-exception"]
    resources = {"metadata": {"path": str(ROOT)}}
    client = NotebookClient(notebook, timeout=60, kernel_name="python3", resources=resources)
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT), "IPP_NONINTERACTIVE": ""})
    return [
        re.sub(r"\x1b\[[\d;]*m", "", "".join(map(text_of, cell.outputs))) for cell in notebook.cells
    ]


def text_of(output: nbformat.NotebookNode) -> str:
    plain = output.get("data", {}).get("text/plain", "")
    return output.get("text", "") or output.get("ename", "") or plain


def test_a_cell_of_the_kernel_and_one_of_the_ranks_say_that_they_need_processes(printed):
    for k, reason in ((2, "fault_tolerant needs ranks"), (3, "os.kill() would end this kernel")):
        assert AMBER.format("ranks that are processes") in printed[k]
        assert reason in " ".join(printed[k].split())


def test_a_cell_that_needs_a_result_of_one_that_was_left_out_is_left_out_too(printed):
    of = "`{}` from a cell above that was left out"
    assert AMBER.format(of.format("lost")) in printed[4]
    assert AMBER.format(of.format("lost")) in printed[5]
    assert AMBER.format(of.format("mine")) in printed[6]


def test_the_other_cells_run_and_other_errors_are_shown(printed):
    assert "[stdout:0] 3" in printed[7]
    assert printed[8] == "NameError"


def test_what_needs_processes_runs_where_they_can_be_started(monkeypatch):
    monkeypatch.setattr(thread_plan, "missing", lambda: "")
    left_out.need_processes("A job needs processes.")
    monkeypatch.setattr(thread_plan, "missing", lambda: "there is no MPI")
    with pytest.raises(NeedsProcesses, match=r"A job needs processes. \(There is no MPI.\)"):
        left_out.need_processes("A job needs processes.")
