"""One program of the set on ranks."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from utils.jobs import mpi_job
from utils.jobs.rank_python import Python
from utils.jobs.start_plan import Plan, Request
from utils.mpi.labelled.judge import NAME, Trial, judged
from utils.mpi.labelled.programs import BY_LUCK, Pair

#: Seconds that a wait may last: what takes as long was found by nothing but the clock.
PATIENCE = 10.0
#: Seconds after which a job that does not end by itself is ended.
DEADLINE = 60.0


@contextlib.contextmanager
def stage(backend: str) -> Iterator[Stage]:
    """Yield a place where programs run on a backend."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Stage(backend, folder)) as made,
    ):
        yield made


class Stage:
    """Runs programs on a backend, in a folder of its own."""

    def __init__(self, backend: str, folder: str):
        self.backend = backend
        self.folder = Path(folder)
        self._count = 0
        # Of each number of ranks. Held to the end: the fork server stays.
        self._pythons: dict[int, tuple[Plan, Python]] = {}

    def close(self) -> None:
        """Let the fork server go."""
        for _, python in self._pythons.values():
            python.close()

    def _python(self, n: int) -> tuple[Plan, Python]:
        if n not in self._pythons:
            plan = Plan.checked(Request(n, timeout=PATIENCE, launcher="mpiexec"))
            self._pythons[n] = plan, Python(plan)
        return self._pythons[n]

    def run(self, pair: Pair, right: bool) -> Trial:
        """Run one of the two programs.

        Raises:
            ValueError, RanksError: no ranks can be started here.
        """
        self._count += 1
        place = self.folder / str(self._count)
        place.mkdir()
        text = pair.text(right)
        (place / NAME).write_text(text)
        environment = {
            "LABELLED_BACKEND": self.backend,
            "LABELLED_TIMEOUT": str(PATIENCE),
            "LABELLED_STORE": str(place / "store"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if pair.kind in BY_LUCK else "OFF",
        }
        plan, python = self._python(pair.ranks)
        command = python.job(str(place / NAME))
        ended = mpi_job.run(command, os.environ | plan.environment | environment, DEADLINE)
        return judged(pair, right, ended.status, ended.err, ended.seconds)
