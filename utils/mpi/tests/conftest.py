"""The fixture of the backend's tests, where they are run without the course."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable

import pytest
from mpi_jobs import find_mpiexec, run_ranks


@pytest.fixture(scope="session")
def mpiexec() -> Callable[..., subprocess.CompletedProcess]:
    """`mpiexec(n, code_or_path, *args, …)` runs Python on `n` ranks: see `mpi_jobs.run_ranks`."""
    launcher = find_mpiexec()
    if launcher is None:
        pytest.skip("no mpiexec: pip install 'torch-mpi[mpi]', or a system's MPI")
    return functools.partial(run_ranks, launcher, [sys.executable])
