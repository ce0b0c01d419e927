"""Give the stock PyTorch wheel an "mpi" backend.

PyTorch's wheels are built without MPI, so ``init_process_group("mpi")`` raises there.
PyTorch calls :func:`install` at the end of every ``import torch`` through the entry-point
group ``torch.backends`` (see "Autoload Mechanism" in its documentation). It puts two names
in place; the backend, mpi4py and the MPI library are loaded when the first process group
is made, not before.
"""


class LazyProcessGroupMPI:
    """Stands where a PyTorch built with MPI has its own ``ProcessGroupMPI``."""

    @staticmethod
    def create(ranks: list[int]):
        """Make the process group of ``ranks`` (global ranks; empty: all of them).

        Returns:
            The group, or ``None`` on a rank that is not part of it.

        Raises:
            ImportError: no MPI library.
            LauncherError: a launcher of another MPI has started this rank, which is alone.
        """
        from . import launcher

        launcher.name_library()
        try:
            from mpi4py import MPI  # starts MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(
                f"the mpi backend found no MPI library ({error}). Load your site's MPI, or "
                f"install one beside PyTorch: pip install 'ddl-labs[mpi]'"
            ) from error
        name, version = MPI.get_vendor()
        library = f"{name} {'.'.join(map(str, version))}"
        launcher.refuse_to_be_alone(MPI.COMM_WORLD.size, library)
        from .process_group import create

        return create(ranks)


def install() -> None:
    """Put the backend in place, unless this PyTorch was built with MPI or has no distributed."""
    import torch.distributed as dist

    if not dist.is_available() or dist.is_mpi_available():
        return
    from torch.distributed import distributed_c10d

    distributed_c10d.ProcessGroupMPI = LazyProcessGroupMPI
    distributed_c10d._MPI_AVAILABLE = True
