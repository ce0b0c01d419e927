"""Programs on ranks inside the kernel, for users who have no MPI and can't fork.

test_solutions.py runs the notebooks on such ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from utils.jobs import RanksError
from utils.jobs.program import mpiexec


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`program(code, deadline=60)` runs a program on two ranks, as lab 01 does."""
    monkeypatch.setenv("DDL_LABS_WHERE", "here")
    monkeypatch.chdir(tmp_path)

    def run(code: str, deadline: float = 60) -> None:
        Path("program.py").write_text(JOIN + code, encoding="utf-8")
        mpiexec(2, "program.py", "an argument", deadline=deadline)

    return run


JOIN = """
import sys
import torch.distributed as dist
dist.init_process_group("mpi")
rank = dist.get_rank()
"""


def test_without_mpi_a_program_runs_on_threads_and_says_so(program, capfd):
    program("print(rank, sys.argv, __name__, flush=True)")
    first, *lines = capfd.readouterr().out.splitlines()
    assert first.startswith("As 2 threads of one process, instead of: mpiexec -n 2 python program")
    assert lines == [f"{rank} ['program.py', 'an argument'] __main__" for rank in range(2)]


def test_without_mpi_an_error_of_one_rank_ends_a_program_and_is_shown(program):
    said = r"(?s)ended with status 1.*ZeroDivisionError.*The error occurred on rank 0\."
    with pytest.raises(RanksError, match=said) as caught:
        program("1 / rank\ndist.barrier()")
    assert "utils/cluster" not in str(caught.value)  # only the student's lines


def test_without_mpi_a_program_that_one_rank_leaves_is_not_called_a_cell(program):
    with pytest.raises(RanksError, match="rank 0, which has left the program"):
        program("import torch\nif rank: dist.recv(torch.ones(1), 0)")


def test_without_mpi_a_rank_may_exit_from_a_program(program, capfd):
    program("if rank == 0: exit()\nprint(rank)")
    assert capfd.readouterr().out.splitlines()[1:] == ["1"]


def test_without_mpi_a_deadlock_of_a_program_is_explained(program):
    with pytest.raises(RanksError, match="these ranks wait for each other"):
        program("import torch\ndist.recv(torch.ones(1), 1 - rank)")


def test_without_mpi_a_program_that_never_ends_is_stopped(program):
    with pytest.raises(RanksError, match="was stopped after 3 s"):
        program("while True: pass", deadline=3)
