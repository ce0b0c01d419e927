"""The patient: this machine, and what several checks ask for, found out once."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from typing import TYPE_CHECKING, Any

from utils.doctor.probes import Outcome, Probe, python_probe

if TYPE_CHECKING:
    from utils.jobs.start_plan import Plan


class Machine:
    """What several checks ask for, found out once; a context manager that ends the probes.

    timeout: seconds that each probe gets; PyTorch on a network drive can take half a minute.
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = timeout
        self._mark = f"doctor{os.getpid()}-{secrets.token_hex(4)}"
        self._probes: list[Probe] = []

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        for probe in self._probes:
            probe.end()
        if "ranks" in vars(self):
            from utils.jobs import watchdog

            # Ranks that left the launcher's session still carry the mark.
            watchdog.end_all(self._mark)

    def start(
        self, command: list[str], deadline: float | None = None, env: dict[str, Any] | None = None
    ) -> Probe:
        """Start a probe that does not outlive this object."""
        probe = Probe(command, deadline or self.timeout, env)
        self._probes.append(probe)
        return probe

    @functools.cached_property
    def pytorch(self) -> Probe:
        """Tells about "torch", "torchvision" and "data"."""
        return self.start(python_probe("probe_pytorch"))

    @functools.cached_property
    def jupyter(self) -> Probe:
        """Tells about "jupyterlab", "ipyparallel" and "nbval"."""
        return self.start(python_probe("probe_jupyter"))

    @functools.cached_property
    def backend(self) -> Probe:
        """Tells about "all_reduce" in a process group of one rank."""
        return self.start(python_probe("probe_backend"), env=os.environ | self.rank_environment)

    @property
    def group_of_one(self) -> dict[str, Any]:
        """What came of that all_reduce, or "error"."""
        return self.backend.facts("all_reduce")

    @functools.cached_property
    def mpi(self) -> Probe:
        """Tells about the "library" that a rank loads."""
        return self.start(python_probe("probe_library"), env=os.environ | self.rank_environment)

    @functools.cached_property
    def library_of_scripts(self) -> dict[str, Any]:
        """The same of a process for which the course sets nothing."""
        return self.start(python_probe("probe_library")).facts("library")

    @property
    def library(self) -> dict[str, Any]:
        """Name and path of the MPI library that a rank loads, or "error"."""
        return self.mpi.facts("library")

    @property
    def rank_environment(self) -> dict[str, str]:
        """What the course sets for its ranks; nothing where that fails (see "launcher")."""
        with contextlib.suppress(Exception):
            plan, _ = self.plan
            return plan.environment if plan else {}
        return {}

    @functools.cached_property
    def plan(self) -> tuple[Plan | None, str]:
        """The course's plan for two ranks, and "" (None, and why there is none)."""
        from utils.jobs import RanksError
        from utils.jobs.start_plan import Plan, refuse_on_a_rank

        try:
            refuse_on_a_rank()
        except RanksError:
            return None, "the doctor itself runs on an MPI rank. Run it without mpiexec or srun"
        try:
            return Plan(2, launcher="mpiexec"), ""
        except RanksError as failure:
            return None, str(failure)

    @property
    def has_launcher(self) -> bool:
        """Can ranks be started, and is this not a rank itself? If not, see "launcher"."""
        with contextlib.suppress(Exception):
            return self.plan[0] is not None
        return False

    @functools.cached_property
    def ranks(self) -> Outcome:
        """Two ranks, started as the labs do; needs a plan."""
        from utils.jobs import watchdog

        plan, why = self.plan
        if plan is None:
            raise RuntimeError(why)
        command = [plan.launcher.path, "-n", "2", *plan.mpi_args, *python_probe("probe_rank")]
        env = os.environ | plan.environment | {watchdog.VARIABLE: self._mark}
        return self.start(command, env=env).outcome

    def told_by_ranks(self, part: str) -> list[dict[str, Any]]:
        """What each rank told about "world" or "all_reduce"; nothing where none can start."""
        plan, _ = self.plan
        if plan is None or "error" in self.library:
            return []
        return [told[part] for told in self.ranks.told if part in told]

    def sizes(self) -> list[int]:
        """How many ranks each of the two sees; [2, 2] if all is well."""
        return [world["size"] for world in self.told_by_ranks("world")]
