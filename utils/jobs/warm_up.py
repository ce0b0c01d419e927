"""``python -m utils.jobs.warm_up``: have the fork server ready before a notebook wants ranks.

`make lab` starts it beside JupyterLab. It holds a lease while its parent lives, so that restarted
kernels find the server as well; the lease is lost with this process, and the server ends. Where
there can be no fork server, it ends without a word.
"""

import contextlib
import os
import time

from utils.jobs import RanksError
from utils.jobs.mpi_job import Python
from utils.jobs.start_plan import Plan

# Seconds between two looks at the parent.
LOOK = 2.0


def main() -> None:
    """Hold a lease until the parent has ended."""
    parent = os.getppid()
    with contextlib.suppress(RanksError, ValueError):
        python = Python(Plan(1))
        while not python.reason and os.getppid() == parent:
            time.sleep(LOOK)


if __name__ == "__main__":
    main()
