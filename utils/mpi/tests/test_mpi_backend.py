"""The "mpi" backend on real MPI ranks: each case of tests/mpi_cases at 1 to 4 ranks.

One mpiexec job runs the files of cases one after the other, so that ranks start once per size.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "mpi_cases"
# Sizes, and the files that run in one job; a board of messages is chosen when a process begins.
JOBS = [
    (1, ("point_to_point", "collectives", "fast_path", "groups", "pytorch", "chunks")),
    (2, ("point_to_point", "collectives", "groups", "pytorch", "slow_network", "recovery")),
    (3, ("collectives", "groups", "chunks", "slow_network", "recovery")),
    (4, ("point_to_point", "collectives", "groups", "pytorch", "slow_network")),
    (2, ("fast_path",)),
    (3, ("fast_path",)),
    (2, ("message_board",)),
    (3, ("message_board",)),
    (2, ("large",)),
]
MARKS = {"large": [pytest.mark.large]}
# What another PyTorch is tried with: DDP, FSDP2, DTensor, groups.
SMOKE = {(2, "pytorch"), (2, "groups")}
DEADLINE = 400
_done: dict[tuple, dict[str, list[dict]]] = {}


def names_of(file: str) -> list[str]:
    text = (CASES / f"{file}.py").read_text()
    names = re.findall(r"^(?:def |    )(case_\w+)", text, re.MULTILINE)
    for other in re.findall(r"^from (\w+) import \*", text, re.MULTILINE):
        names += names_of(other)
    return names


@pytest.fixture
def outcomes(request, mpiexec):
    """What came of every case of a job: ``{"file case": [outcome of each rank]}``."""
    n, files = request.param
    if request.param not in _done:
        paths = [CASES / f"{file}.py" for file in files]
        done = mpiexec(n, CASES / "run.py", *paths, timeout=DEADLINE, check=False)
        lines = re.findall(r"^CASE (.*)$", done.stdout, re.MULTILINE)
        _done[request.param] = {r["name"]: r["outcomes"] for r in map(json.loads, lines)}
        _done[request.param]["output"] = f"status {done.returncode}\n{done.stdout}{done.stderr}"
    return _done[request.param]


def parameters():
    for n, files in JOBS:
        for file in files:
            marks = [*MARKS.get(file, ())]
            if (n, file) in SMOKE:
                marks.append(pytest.mark.smoke)
            for case in names_of(file):
                name = f"{file}-{n}-{case.removeprefix('case_')}"
                yield pytest.param((n, files), f"{file} {case}", id=name, marks=marks)


@pytest.mark.timeout(DEADLINE + 30)
@pytest.mark.parametrize(("outcomes", "case"), list(parameters()), indirect=["outcomes"])
def test_backend(outcomes, case):
    if case not in outcomes:
        pytest.fail(f"the job ended before {case}:\n{outcomes['output'][-4000:]}")
    failures = [
        f"rank {r}:\n{o['detail']}" for r, o in enumerate(outcomes[case]) if o["status"] == "failed"
    ]
    assert not failures, "\n".join(failures)
    if all(o["status"] == "skipped" for o in outcomes[case]):
        pytest.skip(outcomes[case][0]["detail"])


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def asked() -> list[str]:
    """What a Python says that imports PyTorch and then asks for MPI; importing takes seconds."""
    return run(
        "import sys, torch\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('torch_mpi', 'mpi4py'))))\n"
        "import torch.distributed as dist\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "print(dist.is_mpi_available(), c10d.is_mpi_available(), 'mpi4py.MPI' in sys.modules)"
    ).splitlines()


@pytest.mark.smoke
def test_importing_torch_neither_imports_mpi4py_nor_starts_mpi(asked):
    assert asked[0].split() == ["torch_mpi", "torch_mpi.autoload"]


@pytest.mark.smoke
def test_asking_whether_mpi_is_available_does_not_load_it(asked):
    assert asked[1].split() == ["True", "True", "False"]


def test_a_machine_without_mpi_has_no_mpi_available():
    out = run(
        "import torch.distributed as dist; print(dist.is_mpi_available())",
        MPI4PY_LIBMPI="/nowhere/libmpi.so",
    )
    assert out.split() == ["False"]


def test_a_pytorch_with_its_own_mpi_is_left_alone():
    out = run(
        "import torch\n"
        "from torch.distributed import distributed_c10d as c10d\n"
        "own = type('ProcessGroupMPI', (), {})\n"
        "c10d._MPI_AVAILABLE, c10d.ProcessGroupMPI = True, own\n"
        "from torch_mpi.autoload import install\n"
        "install()\n"
        "print(c10d.ProcessGroupMPI is own)",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert out.split() == ["True"]


@pytest.mark.smoke
def test_init_process_group_needs_no_import_of_ours_and_no_master_address(mpiexec):
    done = mpiexec(
        3,
        "import torch.distributed as d; d.init_process_group('mpi'); "
        "print(d.get_rank(), d.get_world_size())",
        env={"MASTER_ADDR": None, "MASTER_PORT": None},
    )
    assert sorted(done.stdout.splitlines()) == ["0 3", "1 3", "2 3"]


@pytest.mark.smoke
def test_a_single_process_without_mpiexec_is_a_world_of_one():
    out = run(
        "import torch, torch.distributed as d\n"
        "d.init_process_group('mpi')\n"
        "t = torch.ones(2); d.all_reduce(t); print(d.get_world_size(), t.tolist())",
        OMPI_MCA_btl="^ofi",
    )
    assert out.split(maxsplit=1) == ["1", "[1.0, 1.0]\n"]


@pytest.mark.smoke
def test_calls_that_do_not_belong_together_are_told_of_every_rank(mpiexec):
    done = mpiexec(
        2,
        "import torch, torch.distributed as d; d.init_process_group('mpi'); t = torch.ones(3)\n"
        "if d.get_rank() == 0:\n    d.all_reduce(t)\n"
        "else:\n    d.broadcast(t, 0)",
        check=False,
    )
    assert done.returncode
    report = [line for line in done.stderr.splitlines() if line.startswith(("rank", "  rank"))]
    assert "rank 0 calls all_reduce(SUM) of float32[3]" in report[0]
    assert "but rank 1 calls broadcast(root=0) of float32[3]" in report[0]
    assert [line.partition(" at ")[0] for line in report[1:]] == [
        "  rank 0 was stopped in all_reduce(SUM)",
        "  rank 1 was stopped in broadcast(root=0)",
    ]


def test_a_missing_mpi4py_is_named_with_the_remedy():
    out = run(
        "import sys\n"
        "sys.modules['mpi4py'] = None\n"
        "import torch.distributed as d\n"
        "try:\n    d.init_process_group('mpi')\n"
        "except ImportError as error:\n    print(error)"
    )
    assert "pip install mpi4py" in out


def test_a_rank_that_ends_with_a_message_under_way_still_delivers_it(mpiexec):
    done = mpiexec(
        2,
        "import torch, torch.distributed as d; d.init_process_group('mpi')\n"
        "t = torch.ones(5_000_000)\n"
        "if d.get_rank() == 0:\n    d.isend(t, 1)\n"
        "else:\n    t.zero_(); d.recv(t, 0); print(t.sum().item())",
    )
    assert done.stdout.split() == ["5000000.0"]
