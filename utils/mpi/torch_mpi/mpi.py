"""``MPI``: the module of mpi4py, started by :mod:`torch_mpi.library`.

Imported by itself, mpi4py would choose its library and end MPI without regard to this backend.
"""

from .library import start_mpi

MPI = start_mpi()
