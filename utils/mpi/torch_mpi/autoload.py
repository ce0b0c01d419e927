"""Give the stock PyTorch wheel an "mpi" backend; README.md says what the backend changes.

PyTorch calls :func:`install` at the end of every ``import torch`` (see "Autoload Mechanism" in its
documentation). The backend, mpi4py and the MPI library load only when a program asks for "mpi".

If an entry point raises, PyTorch fails ``import torch`` for every program in the environment. So
this module imports only the standard library, and :func:`install` warns instead of raising.
"""

import sys
import warnings


class LazyProcessGroupMPI:
    """A stand-in for the ``ProcessGroupMPI`` that a PyTorch built with MPI has."""

    @staticmethod
    def create(ranks: list[int]):
        """Make the process group of ``ranks`` (global ranks; empty: all); ``None`` on other ranks.

        Raises:
            UnsupportedPyTorch: PyTorch is too old.
            ValueError: the program asked for a group such as ``cpu:mpi,cuda:nccl``.
            IncompatiblePyTorch: PyTorch lacks something that the backend uses.
            ImportError: there is no MPI library.
            LauncherError: the launcher announced a different rank for this process than MPI gave.
        """
        import torch

        from . import compat, launcher, library

        compat.check_version(torch.__version__)
        compat.check()
        compat.check_request()
        asked = compat.asked_of_pytorch()
        launcher.check(asked)
        launcher.claim_rank()
        MPI = library.start_mpi()
        name, version = MPI.get_vendor()
        world = MPI.COMM_WORLD
        library.refuse_to_be_alone(world.size, f"{name} {'.'.join(map(str, version))}")
        launcher.check(asked, launcher.Announcement("MPI", world.size, world.rank))
        from .group.process_group import create

        return create(ranks)


def is_mpi_available() -> bool:
    """Return True if ``init_process_group("mpi")`` would work in this process.

    This process loads nothing: a child process tries, once. When PyTorch 2.13 asks before it makes
    a group, the answer is True, because :meth:`LazyProcessGroupMPI.create` explains a missing MPI.
    """
    if sys._getframe(1).f_code.co_name == "_new_process_group_helper":
        return True
    import torch

    from . import compat, launcher, library

    if compat.minor(torch.__version__) < compat.FIRST:
        return False
    try:
        compat.check()
        launcher.check(compat.asked_of_pytorch())
    except (compat.IncompatiblePyTorch, launcher.LauncherError):
        return False
    vendor = library.vendor_that_loads()
    return vendor is not None and launcher.meets(vendor)


def install() -> None:
    """Register the backend, and warn if this fails. The function never raises an ``Exception``."""
    try:
        register()
    except Exception as error:
        _warn(
            f'init_process_group("mpi") will not work, because torch_mpi could not register its '
            f"backend: {type(error).__name__}: {error}"
        )


def register() -> None:
    """Register the backend with PyTorch, unless PyTorch has its own or has no process groups.

    PyTorch 2.14 and later call this function for "mpi" if ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``.
    """
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    if c10d._MPI_AVAILABLE:
        return
    backend = c10d.Backend
    if hasattr(backend, "_ensure_backend_registered"):
        # PyTorch 2.14 and later.
        backend.register_backend(
            "mpi",
            lambda options, _: LazyProcessGroupMPI.create(options.global_ranks_in_group),
            extended_api=True,
            devices=["cpu", "cuda"],
            _backend_type=backend.backend_type_map["mpi"],
        )
    else:
        c10d.ProcessGroupMPI = LazyProcessGroupMPI
        c10d._MPI_AVAILABLE = True
    dist.is_mpi_available = c10d.is_mpi_available = is_mpi_available
    explain_missing_store(c10d)

    import atexit

    # `atexit` calls the last registration first. This one is early, so it runs after the program's.
    atexit.register(_at_exit)


def explain_missing_store(c10d) -> None:
    """Let what asks for a store in a world of MPI, such as "gloo", get an error that helps."""
    make = c10d._new_process_group_helper
    if hasattr(make, "__wrapped__"):
        return

    def with_store(
        size: int, rank: int, ranks: list[int], backend: str, store: object, *more, **options
    ):
        if type(store) is c10d.Store:  # the empty one that PyTorch puts into a world of MPI
            from .compat import no_store

            store = no_store
        return make(size, rank, ranks, backend, store, *more, **options)

    with_store.__name__, with_store.__wrapped__ = make.__name__, make
    c10d._new_process_group_helper = with_store


def _at_exit() -> None:
    if library := sys.modules.get("torch_mpi.library"):
        library.end_mpi()


def _warn(text: str) -> None:
    """Warn; if Python turns warnings into errors (``-W error``), print a line on stderr."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except Warning as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
