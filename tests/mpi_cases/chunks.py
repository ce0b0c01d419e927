"""The cases of collectives.py with MPI's largest count set to 2: what tensors over 2 GiB use."""

from torch_mpi import buffers

buffers.MAX_COUNT = 2

import collectives  # noqa: E402

collectives.LENGTHS, collectives.LONG = (0, 1, 2, 3, 7, 1000), 701

from collectives import *  # noqa: E402, F403  (the cases)
