"""Compare the rank and the world size that a launcher announced with MPI's.

README.md says why, and what is compared. This module imports the standard library only, because
PyTorch can ask before mpi4py is installed.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import shlex
import socket
import sys
from dataclasses import dataclass


class LauncherError(RuntimeError):
    """The error if the launcher of this process doesn't fit MPI; it names a command that does."""


@dataclass(frozen=True)
class Announcement:
    """The rank and the world size that one source gives this process; ``None`` if it doesn't.

    Attributes:
        source: the launcher, as the subject of a sentence.
    """

    source: str
    size: int | None = None
    rank: int | None = None

    def fits(self, world: Announcement) -> bool:
        """Return True if no number of this announcement differs from one of ``world``."""
        pairs = ((self.size, world.size), (self.rank, world.rank))
        return all(None in pair or pair[0] == pair[1] for pair in pairs)

    def __str__(self) -> str:
        rank = "a rank" if self.rank is None else f"rank {self.rank}"
        return rank if self.size is None else f"{rank} of {self.size}"


# Each launcher of MPI puts the number of ranks and the rank into a rank's environment.
# The first size that is set counts, because an mpiexec can run inside a step of Slurm.
OPEN_MPI = "Open MPI's mpiexec"
HYDRA = "mpiexec"
SLURM = "srun"
PMIX = "A PMIx launcher"
_MPI_VARIABLES = (
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    (HYDRA, "PMI_SIZE", "PMI_RANK"),
    (HYDRA, "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    (SLURM, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)


def mpi_launcher() -> Announcement | None:
    """Return what the MPI launcher of this process announced; ``None`` if there is none."""
    for source, size, rank in _MPI_VARIABLES:
        if (number := _number(size)) is not None:
            return Announcement(source, number, _number(rank))
    if (rank := _number("PMIX_RANK")) is not None:
        return Announcement(PMIX, None, rank)
    return None


def ranks_launched() -> int:
    """Return how many ranks the MPI launcher announced; 1 if there is no launcher."""
    launcher = mpi_launcher()
    return launcher.size or 1 if launcher else 1


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


def _environment() -> Announcement | None:
    """Return what torchrun, Accelerate or a script wrote into RANK and WORLD_SIZE."""
    size = _number("WORLD_SIZE")
    rank = _number("RANK")
    if size is None and rank is None:
        return None
    if _is_child():
        source = "multiprocessing"
    elif "TORCHELASTIC_RUN_ID" not in os.environ:
        source = "The environment (RANK, WORLD_SIZE)"
    elif any(name.startswith("ACCELERATE_") for name in os.environ):
        source = "accelerate launch"
    else:
        source = "torchrun"
    return Announcement(source, size, rank)


def _is_child() -> bool:
    return multiprocessing.parent_process() is not None


def check(asked: Announcement | None, world: Announcement | None = None) -> None:
    """Raise LauncherError if the program's arguments or its environment don't fit MPI's world.

    Without ``world``, the function predicts the world that MPI will have.
    """
    predicted = world or mpi_launcher() or Announcement("MPI", 1, 0)
    for announced in (asked, _environment()):
        if announced and not announced.fits(predicted):
            raise LauncherError(_advice(announced, predicted))
    if _is_child() and predicted.size == 1 and (asked is None or asked.size is None):
        raise LauncherError(_advice(Announcement("multiprocessing"), predicted))


def _advice(announced: Announcement, world: Announcement) -> str:
    """Return a message that says what doesn't fit, and which command works."""
    several = world.size != 1
    size = world.size if several else announced.size
    command = f"mpiexec -n {size or 2} {_program()}"
    says = f"{announced.source} says that this process is {announced}"
    if several:
        if announced == _environment():
            remedy = f"Run `env -u RANK -u WORLD_SIZE {command}`, which leaves the ranks to MPI."
        else:
            remedy = f'Call init_process_group("mpi") without rank and world_size in `{command}`.'
        return f"{says}, but {world.source} made it {world}. {remedy}"
    if announced.size is None and announced.rank is None:
        says = f"{announced.source} started this process"
    instead = "Start no processes yourself and run" if _is_child() else "Run"
    return (
        f"{says}, but MPI would make it rank 0 of 1, because mpiexec did not start the ranks. "
        f'{instead} `{command}`, or call init_process_group("gloo") to keep your processes.'
    )


def _program() -> str:
    """Return the command of this program for a shell, such as ``python train.py --lr 0.1``."""
    name = sys.argv[0] if sys.argv else ""
    return f"python {shlex.join(sys.argv)}" if name.endswith(".py") else "python your_program.py"


# The socket by which this process claims to be the child that communicates for its MPI rank.
_claim: socket.socket | None = None


def claim_rank() -> None:
    """Raise LauncherError if a sibling already communicates as the MPI rank that started both.

    A rank may leave MPI to one child of ``multiprocessing``. The first child binds an abstract
    socket (Linux only), which vanishes with its process.
    """
    global _claim
    parent = multiprocessing.parent_process()
    launcher = mpi_launcher()
    if parent is None or launcher is None or _claim is not None or sys.platform != "linux":
        return
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind(f"\0torch-mpi-{parent.pid}-{launcher}")
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            return
        raise LauncherError(
            f"Another child of {launcher} already communicates as this rank, but MPI knows only "
            f"one process per rank. Start no processes yourself and run `mpiexec -n "
            f"{launcher.size or 2} {_program()}`."
        ) from None
    _claim = claim


def meets(vendor: str) -> bool:
    """Return True if ranks of the MPI launcher find each other with this vendor's library."""
    launcher = mpi_launcher()
    if launcher is None or launcher.size == 1 or launcher.source == PMIX:
        return True
    if launcher.source == SLURM:
        return "PMIX_RANK" in os.environ
    return (vendor == "Open MPI") == (launcher.source == OPEN_MPI)
