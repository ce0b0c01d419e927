"""Give the stock PyTorch wheel an "mpi" backend.

PyTorch's wheels are built without MPI, so ``init_process_group("mpi")`` raises there.
PyTorch calls :func:`install` at the end of every ``import torch`` through the entry-point
group ``torch.backends`` (see "Autoload Mechanism" in its documentation). It puts two names
in place; the backend, mpi4py and the MPI library are loaded when the first process group
is made, not before.

PyTorch makes an error of whatever an entry point raises, and ``import torch`` fails for every
program in the environment. So nothing but ``warnings`` is imported on top, and :func:`install`
does not raise: what is wrong is said in a warning, and again by ``init_process_group("mpi")``.
"""

import warnings


class LazyProcessGroupMPI:
    """Stands where a PyTorch built with MPI has its own ``ProcessGroupMPI``."""

    @staticmethod
    def create(ranks: list[int]):
        """Make the process group of ``ranks`` (global ranks; empty: all of them).

        Returns:
            The group, or ``None`` on a rank that is not part of it.

        Raises:
            UnsupportedPyTorch: a version that the backend was not tested with.
            ImportError: no MPI library.
            LauncherError: a launcher of another MPI has started this rank, which is alone.
        """
        import torch

        from . import library as libraries
        from .supported import refuse_other_pytorch

        refuse_other_pytorch(torch.__version__)
        MPI = libraries.start_mpi()
        name, version = MPI.get_vendor()
        library = f"{name} {'.'.join(map(str, version))}"
        libraries.refuse_to_be_alone(MPI.COMM_WORLD.size, library)
        from .group.create import create

        return create(ranks)


def install() -> None:
    """Put the backend in place; where that fails, warn. Never raises an ``Exception``.

    Nothing is done for a PyTorch that was built with MPI, or without ``torch.distributed``.
    """
    try:
        _put_in_place()
    except Exception as error:
        _warn(
            f'init_process_group("mpi") will not work, as the backend torch_mpi could not be put '
            f"in place: {type(error).__name__}: {error}"
        )


def _put_in_place() -> None:
    import torch.distributed as dist

    if not dist.is_available() or dist.is_mpi_available():
        return
    from torch.distributed import distributed_c10d

    distributed_c10d.ProcessGroupMPI = LazyProcessGroupMPI
    distributed_c10d._MPI_AVAILABLE = True

    import atexit

    # So early that it comes after what a program does at its end.
    atexit.register(_at_exit)


def _at_exit() -> None:
    import sys

    if library := sys.modules.get("torch_mpi.library"):
        library.end_mpi()


def _warn(text: str) -> None:
    """A warning; where Python makes errors of warnings (``-W error``), a line on stderr."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Warning as error:
        import sys

        print(f"{type(error).__name__}: {error}", file=sys.stderr)
