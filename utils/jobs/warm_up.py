"""``python -m utils.jobs.warm_up``: starts the fork server before a notebook needs ranks.

`make lab` starts this process together with JupyterLab. It holds a lease while its parent is alive,
so that restarted kernels find the server, too. When this process ends, the lease is lost and the
server ends. If there can be no fork server here, it ends without a message.
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
