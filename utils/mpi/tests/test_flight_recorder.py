"""What a user finds with ``torchfrtrace`` in the dumps of mpi groups, and what PyTorch can't do."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPORT = Path(__file__).parents[3] / "docs" / "pytorch_backend.py"
START = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.ones(6)
"""
EVERYTHING = """
def parts(): return [torch.ones(2) for _ in range(size)]
for _ in range(3):
    dist.all_reduce(x)
dist.broadcast(x, 1), dist.reduce(x, 0), dist.barrier()
dist.all_gather(parts(), torch.ones(2))
dist.all_gather_into_tensor(torch.ones(2 * size), torch.ones(2))
dist.reduce_scatter_tensor(torch.ones(2), torch.ones(2 * size))
dist.reduce_scatter(torch.ones(2), parts())
dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size))
dist.all_to_all(parts(), parts())
dist.gather(torch.ones(2), parts() if rank == 0 else None, 0)
dist.scatter(torch.ones(2), parts() if rank == 0 else None, 0)
dist.all_reduce(torch.ones(2, dtype=torch.float64), async_op=True).wait()
dist.all_gather_object([None] * size, {"rank": rank})
both = dist.new_group([0, 1])
if rank < 2:
    dist.all_reduce(x, group=both)
"""
MESSAGES = """
if rank == 0:
    dist.send(x, 1)
    dist.recv(x)
else:
    dist.recv(x, 0)
    dist.send(x, 0)
"""
WRONG = {
    "missing": ("if rank: dist.all_reduce(x)", "missing ranks: {0}"),
    "size": ("dist.all_reduce(torch.ones(3 + rank))", "Culprit rank 1"),
    "deadlock": (
        "y = torch.ones(1_000_000)\ndist.send(y, 1 - rank)\ndist.recv(y, 1 - rank)",
        "collective state: scheduled",
    ),
}


@pytest.fixture
def analyzed(mpiexec, tmp_path):
    """Run a program on ranks that write dumps, and return what ``torchfrtrace`` prints."""

    def run(n: int, program: str) -> str:
        prefix = tmp_path / "dumps" / "rank_"
        mpiexec(n, START + program, env={"TORCH_FR_DUMP_TEMP_FILE": str(prefix)}, check=False)
        assert len(list(prefix.parent.iterdir())) == n
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.flight_recorder.fr_trace",
             str(prefix.parent), "-p", "rank_"],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.smoke
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_the_analyzer_matches_every_call_of_a_right_program(analyzed, n):
    said = analyzed(n, EVERYTHING + (MESSAGES if n == 2 else ""))
    assert "has errors" not in said
    assert "missing ranks" not in said


@pytest.mark.smoke
@pytest.mark.parametrize(
    "what",
    [
        "missing",
        *(pytest.param(what, marks=pytest.mark.extended) for what in WRONG if what != "missing"),
    ],
)
def test_the_analyzer_finds_what_is_wrong_and_the_line(analyzed, what):
    program, words = WRONG[what]
    said = analyzed(2, program)
    assert words in said
    assert "<module> at <string>:" in said


@pytest.mark.extended
def test_a_dump_says_when_calls_began_and_how_far_they_are(mpiexec, tmp_path):
    prefix = tmp_path / "rank_"
    program = START + "dist.all_reduce(x)\nif rank: dist.broadcast(x, 1)"
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(prefix), "TORCH_FR_BUFFER_SIZE": "5"}
    mpiexec(2, program, env=env, check=False)
    first, second = pickle.loads(Path(f"{prefix}1").read_bytes())["entries"][-2:]
    assert [entry["state"] for entry in (first, second)] == ["completed", "scheduled"]
    assert 0 < first["time_created_ns"] <= first["time_discovered_completed_ns"]
    assert first["time_discovered_completed_ns"] <= second["time_created_ns"]
    assert [first["collective_seq_id"], second["collective_seq_id"]] == [1, 2]


@pytest.mark.extended
@pytest.mark.parametrize("size", ["5", "many"])
def test_a_dump_that_cannot_be_written_does_not_hide_the_error(mpiexec, tmp_path, size):
    occupied = tmp_path / "file"
    occupied.write_text("")
    program = START + "if rank: dist.all_reduce(x)"
    file = tmp_path / "rank_" if size == "many" else occupied / "rank_"
    env = {"TORCH_FR_DUMP_TEMP_FILE": str(file), "TORCH_FR_BUFFER_SIZE": size}
    done = mpiexec(2, program, env=env, check=False)
    assert "could not write the dump" in done.stderr
    assert "all_reduce" in done.stderr


@pytest.mark.parametrize(
    "asked", ["cpu:mpi,cuda:gloo", pytest.param("cuda:gloo,cpu:mpi", marks=pytest.mark.extended)]
)
def test_a_mixed_group_is_refused_instead_of_losing_a_backend(mpiexec, asked):
    program = (
        "import os, torch.distributed as dist\n"
        "os.environ.update(MASTER_ADDR='127.0.0.1', RANK='0', WORLD_SIZE='1')\n"
        "store = dist.HashStore()\n"
        f"try: dist.init_process_group({asked!r}, store=store, rank=0, world_size=1)\n"
        "except ValueError as error: print(error)"
    )
    assert "mpi can't share a process group with gloo" in mpiexec(1, program).stdout


def test_a_nan_check_that_has_no_effect_is_not_passed_over_in_silence(mpiexec):
    done = mpiexec(1, START, env={"TORCH_DIST_NAN_CHECK": "1"})
    assert "TORCH_DIST_NAN_CHECK=1 has no effect" in done.stderr


@pytest.mark.smoke
@pytest.mark.skipif(not REPORT.exists(), reason="the course's docs are not here")
def test_pytorch_still_has_the_gaps_that_we_report(tmp_path):
    """If this fails, PyTorch has closed a gap: update docs/pytorch-backend.md."""
    if not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"):
        pytest.skip("PyTorch 2.14 and older have no Backend in Python")
    done = subprocess.run(
        [sys.executable, str(REPORT)], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert all(json.loads(done.stdout)["gaps"].values()), done.stdout
