"""PyTorch's "mpi" backend on mpi4py: see :mod:`torch_mpi.autoload`. This file imports nothing."""
