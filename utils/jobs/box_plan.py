"""A plan for ranks that are processes whose messages the kernel carries: no MPI, no launcher."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from utils.jobs import NeedsProcesses, launch_variables, sandbox_command
from utils.jobs.start_plan import (
    MOST_RANKS,
    check_count,
    check_env,
    check_timeout,
)

#: Is set in the environment of such a rank.
MARK = "DDL_LABS_BOX"

#: The rank's number, for the sandbox that it starts in.
RANK = "DDL_LABS_RANK"

#: The files that ranks get from the kernel, as JSON: by the module of a probe, the names and files
#: of the modules that it needs. Grading sets it, because a sandbox holds no probe.
GIVEN = "DDL_LABS_GIVEN"


class BoxPlan:
    """A plan to start ranks as processes without MPI.

    Attributes:
        n, threads, timeout: the arguments of `cluster.start`.
        notes: sentences for the user.
    """

    def __init__(
        self,
        n: int,
        threads: int = 1,
        timeout: float = 20.0,
        env: dict[str, str] | None = None,
        fault_tolerant: bool = False,
        **mpi: Any,
    ):
        check_count("n", n, "the number of ranks", "start(2)")
        check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        check_timeout(timeout)
        check_env(env)
        if n > MOST_RANKS:
            raise ValueError(f"n={n}: at most {MOST_RANKS} ranks can run on one machine")
        if asked := sorted(name for name, value in mpi.items() if value):
            raise NeedsProcesses(
                f"{', '.join(asked)} needs ranks of MPI, and the kernel carries the messages of "
                'these ranks (where="boxes"). Leave it out, or leave out this cell.'
            )
        self.n, self.threads, self.timeout = n, threads, timeout
        self.fault_tolerant = False
        self.notes = [self.what()]
        if fault_tolerant:
            self.notes.append("If a rank dies, only fresh ranks can communicate again.")
        self._env = env or {}

    def greeting(self, fresh: bool = False) -> str:
        """Return what a notebook says when the ranks have started."""
        which = "fresh " * fresh
        begin = f"{self.n} {which}ranks have" if self.n > 1 else f"1 {which}rank has"
        return f"{begin} started. {' '.join(self.notes)}"

    def what(self) -> str:
        """Return a sentence on what these ranks are, and one on what they can't show."""
        they = "They are processes" if self.n > 1 else "It is a process"
        return (
            f"{they} without MPI, and this kernel carries every message (as you asked). So a "
            "message takes much longer than with MPI."
        )

    def command(self, *words: str) -> list[str]:
        """Return the command that runs Python with these words in a rank's process."""
        # -P: don't import from the current folder, where another program may write.
        safe = ["-P"] if sandbox_command.is_set() else []
        return sandbox_command.confined([sys.executable, *safe, *words])

    def given(self, module: str) -> dict[str, str]:
        """Return name and file of each module that ranks get when this one is asked."""
        files: dict[str, str] = json.loads(os.environ.get(GIVEN, "{}")).get(module, {})
        return files

    def variables(self) -> dict[str, str]:
        """Return all environment variables of the ranks."""
        threads = str(self.threads)
        left = set(launch_variables.present())
        kept = {name: value for name, value in os.environ.items() if name not in left}
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        return (
            kept | dict.fromkeys(names, threads) | {"KINETO_LOG_LEVEL": "6", MARK: "1"} | self._env
        )
