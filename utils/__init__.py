"""What the lab notebooks share: MPI ranks, the data, the models, the checks.

Nothing is imported here: each notebook takes what it needs. The backend is a package of its own,
`torch_mpi`, as a program may have a `utils` of its own.
"""
