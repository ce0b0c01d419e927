"""PyTorch's "mpi" backend on mpi4py, for the stock PyTorch wheel.

Nothing is imported here: see :mod:`torch_mpi.autoload`.
"""
