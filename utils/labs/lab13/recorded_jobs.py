"""Logs of `train.py --die 2:7` from another machine, for a machine that can't start such jobs.

Both were recorded with Open MPI 5 on Linux; the paths are shortened.
"""

from __future__ import annotations

from utils.jobs.mpi_job import Ended

_OUT = "life 0: 4 ranks go on from step 0\n"
_OF_THE_LAUNCHER = """\
--------------------------------------------------------------------------
prterun noticed that process rank 2 with PID 5407 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------

"""
_OF_A_SURVIVOR = """\
  File "faults/train.py", line 70, in <module>
    dist.all_reduce(asked)
  File "torch/distributed/c10d_logger.py", line 83, in wrapper
    return func(*args, **kwargs)
           ^^^^^^^^^^^^^^^^^^^^^
  File "torch/distributed/distributed_c10d.py", line 3252, in all_reduce
    work.wait()

rank 2 died: its process 5443 is gone.
  ranks 0, 1, 3 wait in all_reduce(SUM) at train.py:70
  rank 2 died: its process 5443 is gone

"""
#: By whether the other ranks survive.
WHEN_RANK_2_DIES = {
    False: Ended(137, _OUT, _OF_THE_LAUNCHER, 0.9),
    True: Ended(0, _OUT, _OF_A_SURVIVOR, 1.3),
}
