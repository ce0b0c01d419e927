"""The variables by which a launcher tells a process its rank, and those that one has left behind.

A shell may keep such variables, for example of an interactive MPI session or of a script for
torchrun. Then a notebook that is started from this shell has them, too.
"""

from __future__ import annotations

import os

import psutil

#: Names and beginnings of names.
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUNS_OWN = ("TORCHELASTIC_", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_")
MPIS = ("OMPI_COMM_WORLD_", "PMI_", "PMIX_")
#: Beginnings of names by which a user configures Open MPI, MPICH, Intel MPI, UCX and libfabric.
SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "MPICH_", "HYDRA_", "I_MPI_", "UCX_", "FI_")
#: What a rank has among its parents.
LAUNCHERS = {
    *("mpiexec", "mpirun", "prterun", "prte", "prted", "orterun", "orted"),
    *("mpiexec.hydra", "hydra_pmi_proxy", "slurmstepd", "srun", "torchrun"),
}


def is_below_a_launcher() -> bool:
    """Return whether an MPI launcher has started this process, or one of its parents."""
    try:
        return any(parent.name() in LAUNCHERS for parent in psutil.Process().parents())
    except psutil.Error:
        return True  # then the variables are all that is known


def settings() -> list[str]:
    """Return the variables with which this process configures MPI: ``OMPI_MCA_pml=ucx``, ..."""
    return sorted(
        f"{name}={value}" for name, value in os.environ.items() if name.startswith(SETTINGS)
    )


def present() -> list[str]:
    """Return the names of the variables of launchers that this process has, in order."""
    beginnings = (*TORCHRUNS_OWN, *MPIS)
    return sorted(name for name in os.environ if name in TORCHRUNS or name.startswith(beginnings))
