"""What the lab notebooks share: MPI ranks, the data, the models, the checks.

Nothing slow is imported here: each notebook imports what it needs. The backend is a package of its
own, `torch_mpi`, because a program may have a `utils` of its own.
"""

from utils.labs import old_names

old_names.install()
