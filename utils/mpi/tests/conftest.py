"""The fixture of the backend's tests."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable

import pytest
from mpi_jobs import PYTHON_OF_RANKS, find_mpiexec, run_ranks


@pytest.fixture(scope="session")
def mpiexec(request: pytest.FixtureRequest) -> Callable[..., subprocess.CompletedProcess]:
    """`mpiexec(n, code_or_path, *args, …)` runs Python on `n` ranks: see `mpi_jobs.run_ranks`."""
    launcher = find_mpiexec()
    if launcher is None:
        pytest.skip("no mpiexec: pip install 'torch-mpi[mpi]', or a system's MPI")
    python = request.config.stash.get(PYTHON_OF_RANKS, lambda launcher: [sys.executable])
    return functools.partial(run_ranks, launcher, python(launcher))
