"""A program that a notebook starts on ranks of its own."""

from __future__ import annotations

import pytest

from utils.jobs import RanksError
from utils.jobs.program import mpiexec

HELLO = """
import sys

import torch.distributed as dist

dist.init_process_group("mpi")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} was given {sys.argv[1]}", flush=True)
dist.barrier()
if sys.argv[1] == "zero":
    1 / (rank - 1)
dist.destroy_process_group()
"""


@pytest.fixture
def hello(tmp_path):
    script = tmp_path / "hello.py"
    script.write_text(HELLO)
    return script


def test_a_program_prints_the_command_to_type_and_what_its_ranks_say(hello, capsys, monkeypatch):
    for name in ("OMPI", "PRTE"):  # as on a machine where nobody has allowed root
        monkeypatch.delenv(f"{name}_ALLOW_RUN_AS_ROOT", raising=False)
        monkeypatch.delenv(f"{name}_ALLOW_RUN_AS_ROOT_CONFIRM", raising=False)
    mpiexec(2, hello, "one")
    command, *said = capsys.readouterr().out.splitlines()
    assert command.startswith("$ mpiexec -n 2 ")
    assert command.endswith(f"python {hello} one")
    assert sorted(said) == [f"rank {r} of 2 was given one" for r in range(2)]


def test_a_program_that_fails_shows_the_output_of_its_rank(hello, capsys):
    with pytest.raises(RanksError, match=r"(?s)ended with status .*ZeroDivisionError") as failed:
        mpiexec(2, hello, "zero")
    assert "rank 0 of 2 was given zero" in capsys.readouterr().out
    assert failed.value._render_traceback_()  # one message, no frames of ours


def test_the_error_about_a_missing_program_says_which_cell_to_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"(?i)run the cell that writes"):
        mpiexec(2, tmp_path / "hello.py")
