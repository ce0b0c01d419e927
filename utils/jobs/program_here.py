"""Runs a program on ranks that are threads of one new process, where mpiexec can't start ranks."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence

from utils.jobs import python_command
from utils.jobs.mpi_job import LATE, Ended

MAIN = "import sys; from utils.cluster.here import program; program.main(*sys.argv[1:])"


def run(
    n: int,
    words: Sequence[str],
    deadline: float,
    *,
    threads: int = 1,
    watch: Callable[[str], object] | None = None,
) -> Ended:
    """Run a program on n ranks of one process, at most for `deadline` seconds.

    The process ends with the one that calls this, because it reads a pipe from there.

    Args:
        words: the words after `python` on a command line, such as `["train.py", "-v"]`.
        threads: number of threads of each rank.
        watch: called after each line on standard error with all lines so far.
    """
    start = time.monotonic()
    late = threading.Event()
    lines: list[str] = []
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as out,
        subprocess.Popen(
            python_command(MAIN, str(n), str(threads), *words),
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONIOENCODING": "utf-8"},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
        ) as process,
    ):

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(deadline, end)
        timer.start()
        try:
            for line in process.stderr or ():
                lines.append(line)
                if watch:
                    watch("".join(lines))
            status = process.wait()
        finally:
            timer.cancel()
            process.kill()
        out.seek(0)
        status = LATE if late.is_set() else status
        return Ended(status, out.read(), "".join(lines), time.monotonic() - start)
