"""The code that the lab notebooks share: MPI ranks, the data, the models, the checks.

This module imports nothing slow, because each notebook imports what it needs. The backend is a
separate package, `torch_mpi`, because a program may have another package called `utils`.
"""
