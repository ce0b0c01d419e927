"""Answer ``torch.distributed.is_mpi_available()`` for this process."""

from __future__ import annotations

import torch

from . import compat, launcher, library, supported


def is_available() -> bool:
    """Return True if ``init_process_group("mpi")`` would work in this process.

    Neither mpi4py nor the MPI library is loaded here: a child process tries them, once.
    """
    if supported.minor(torch.__version__) < supported.FIRST:
        return False
    try:
        compat.check()
        launcher.check(compat.asked_of_pytorch())
    except (compat.IncompatiblePyTorch, launcher.LauncherError):
        return False
    vendor = library.vendor_that_loads()
    return vendor is not None and launcher.meets(vendor)
