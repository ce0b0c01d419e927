"""What stands for `python` in the command of a job: the fork server's stub, or Python itself."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from utils.jobs.errors import RanksError
from utils.jobs.forkserver import client
from utils.jobs.site import settings
from utils.jobs.start_plan import Plan


@dataclass(frozen=True)
class OneProcess:
    """How to start a Python process that is no rank. environment: to be added to its own."""

    command: list[str]
    environment: dict[str, str]


class Python:
    """How the ranks of a plan are started, and the lease on the fork server for them.

    Attributes:
        command: what stands for `python`.
        reason: why it is not the fork server's; "" if it is.
    """

    def __init__(self, plan: Plan):
        self._plan = plan
        self._lease: client.Lease | None = None
        self.reason = ""
        self.renew()

    @property
    def command(self) -> list[str]:
        """Return what stands for `python`, as in `[*command, "train.py"]`."""
        return self._lease.python if self._lease else [sys.executable]

    def job(self, *words: str) -> list[str]:
        """Return the command that runs a program on all ranks, as `job("train.py", "-v")`."""
        plan = self._plan
        return [
            plan.launcher.path, "-n", str(plan.n), *plan.mpi_args, *self.command, *words
        ]  # fmt: skip

    def renew(self) -> None:
        """Take the server that fits now: another one after a change of the course."""
        old, self._lease = self._lease, None
        environment = os.environ | self._plan.environment
        self.reason = why_not(self._plan, environment)
        if not self.reason:
            try:
                self._lease = client.lease(environment, self._plan.launcher.path)
            except (OSError, RanksError) as error:
                self.reason = str(error)
        if old is not None:
            old.close()

    def for_one_process(self, environment: Mapping[str, str]) -> OneProcess:
        """Return how to start a process outside mpiexec, in this environment."""
        if self._lease is None:
            return OneProcess(self.command, {})
        threads = {"OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", "1")}
        return OneProcess(self.command, self._lease.settings | threads)

    def describe(self, told: Iterable[str] = ()) -> str:
        """Return a sentence for the user.

        Args:
            told: reasons that ranks gave for not being forked.
        """
        if reason := self.reason or "; ".join(sorted(told)):
            return f"Each rank is a Python process of its own: {reason}."
        return "The ranks were forked from a process that had imported PyTorch (the fork server)."

    def close(self, stay: bool = True) -> None:
        """Give the lease back; `stay` as of `client.Lease.close`."""
        if self._lease is not None:
            self._lease.close(stay)


def why_not(plan: Plan, environment: Mapping[str, str]) -> str:
    """Return why the ranks of this plan can't be forked; "" if they can."""
    if plan.way.launcher != "mpiexec":
        return f"{plan.way.launcher} starts them"
    if plan.way.many_hosts:
        return "they may be on several hosts"
    if not settings().fork_server:
        return "the site's settings say so"
    return client.why_not(environment)
