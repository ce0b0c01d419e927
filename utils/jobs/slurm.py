"""Questions to Slurm: what this process was given, what there is, how a job of ranks fares."""

from __future__ import annotations

import functools
import getpass
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from utils.jobs.errors import RanksError

# Where Slurm's commands look for their configuration, the last one where it came from slurmctld.
CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")

# Seconds for Slurm to answer a question.
PATIENCE = 20


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that this process is part of.

    nodes: as Slurm writes them, "node[1-2]". hosts: how many. cpus: on all of them.
    """

    job: str
    nodes: str
    hosts: int
    cpus: int

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """The allocation that the environment tells of."""
        if not env.get("SLURM_JOB_ID"):
            return None
        return cls(
            env["SLURM_JOB_ID"],
            env.get("SLURM_JOB_NODELIST", "?"),
            int(env.get("SLURM_JOB_NUM_NODES", 1)),
            per_node_sum(env.get("SLURM_JOB_CPUS_PER_NODE", "1")),
        )


def per_node_sum(text: str) -> int:
    """Slurm's "4(x2),2" as 10."""
    return sum(
        int(number) * int(times or 1) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    )


def has_slurm() -> bool:
    """Can jobs be submitted here? Slurm's commands may be there without a cluster."""
    configured = "SLURM_CONF" in os.environ or any(Path(conf).exists() for conf in CONFS)
    return configured and shutil.which("srun") is not None and bool(partitions())


def partitions() -> list[str]:
    """Names of the partitions, the default one first; empty where Slurm does not answer."""
    lines = _answer("sinfo", "--noheader", "--format=%P").split()
    return [line.rstrip("*") for line in sorted(lines, key=lambda line: not line.endswith("*"))]


@functools.cache
def mpi_plugins() -> list[str]:
    """The values that `srun --mpi` takes here."""
    said = _answer("srun", "--mpi=list")
    return [word for word in re.findall(r"^\s*(\w+)\s*$", said, re.MULTILINE) if word != "none"]


def srun_mpi(open_mpi: bool) -> str:
    """The value for `srun --mpi`. Raises RanksError where ranks would each be alone."""
    known = mpi_plugins()
    for plugin in ("pmix",) if open_mpi else ("pmix", "pmi2"):
        if plugin in known:
            return plugin
    raise RanksError(
        f"srun can't start MPI ranks here: `srun --mpi=list` names {', '.join(known) or 'nothing'},"
        " and Open MPI needs pmix. Each rank would be alone. Ask for Slurm's PMIx plugin, or start "
        'the notebook in a job with enough tasks and say start(…, launcher="mpiexec").'
    )


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


# --- the job of a set of ranks -----------------------------------------------------------------

# Seconds between two questions, so that many students don't keep Slurm busy.
PERIOD = 2.0
# Reasons of a job that waits for nothing that will come: `man squeue`, JOB REASON CODES.
NEVER = {
    "AccountNotAllowed": "this account may not use that partition",
    "BadConstraints": "no node is as the job wants it",
    "InvalidAccount": "Slurm does not know that account",
    "InvalidQOS": "Slurm does not know that quality of service",
    "PartitionConfig": "the partition has not so many nodes or CPUs",
    "PartitionNodeLimit": "the partition does not give so many nodes to a job",
    "PartitionTimeLimit": "the partition does not give so much time to a job",
    "AssocMaxCpuPerJobLimit": "your account does not get so many CPUs in a job",
    "AssocMaxNodePerJobLimit": "your account does not get so many nodes in a job",
    "AssocMaxWallDurationPerJobLimit": "your account does not get so much time in a job",
    "QOSMaxCpuPerJobLimit": "its quality of service does not give so many CPUs to a job",
    "QOSMaxNodePerJobLimit": "its quality of service does not give so many nodes to a job",
    "QOSMaxWallDurationPerJobLimit": "its quality of service does not give so much time to a job",
}
BEFORE_START = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}


class Job(NamedTuple):
    """id, state and reason as squeue writes them; nodes: "node[1-2]", or "" before the start."""

    id: str
    state: str
    reason: str
    nodes: str


def find(name: str) -> Job | None:
    """This user's job of that name; None where there is none, or Slurm does not answer."""
    mine = ("--user", getpass.getuser(), "--name", name)
    fields = _answer("squeue", "--noheader", *mine, "--format=%i|%T|%r|%N").strip().split("|")
    return Job(*fields) if len(fields) == 4 else None


def state(job: str) -> str:
    """Of a job that may be over: RUNNING, CANCELLED, TIMEOUT, …; "" where Slurm forgot it."""
    found = re.search(r"\bJobState=(\w+)", _answer("scontrol", "--oneliner", "show", "job", job))
    return found[1] if found else ""


class Waiting:
    """Shows on one line how a job of that name waits, until it runs."""

    def __init__(self, name: str):
        self._name = name
        self._since = time.monotonic()
        self._next = self._since + PERIOD / 2
        self._shown = 0
        self.job: Job | None = None

    def begun(self) -> bool:
        """Has the job begun, as far as is known? Asks Slurm every 2 s at most.

        Raises RanksError for a job that can never start.
        """
        if time.monotonic() < self._next:
            return self.job is not None and self.job.state not in BEFORE_START
        self._next = time.monotonic() + PERIOD
        self.job = find(self._name) or self.job
        if self.job is None:
            return False
        if self.job.state in BEFORE_START:
            self._raise_if_hopeless()
            waited = int(time.monotonic() - self._since)
            self._show(
                f"Slurm job {self.job.id} waits in the queue ({self.job.reason}), "
                f"{waited // 60}:{waited % 60:02d} so far. The stop button cancels it."
            )
            return False
        self.clear()
        return True

    def refused(self, said: str) -> RanksError | None:
        """The error for an srun that ended with these words before there was a job."""
        errors = re.findall(r"^srun: error: (?:Unable to allocate resources: )?(.+)$", said, re.M)
        if self.job is not None or not errors:
            return None
        return RanksError(
            f"Slurm refused the job of the ranks: {errors[-1].strip()}. Partitions here: "
            f"{', '.join(partitions()) or 'none that answer'}. Say partition=, time=, nodes= in "
            "start(), or ask for fewer ranks."
        )

    def cancelled(self) -> None:
        """Say that the job will not be."""
        self.clear()
        if self.job is not None:
            print(f"Slurm job {self.job.id} is cancelled.")

    def _raise_if_hopeless(self) -> None:
        if self.job.reason in NEVER:
            self.clear()
            raise RanksError(
                f"Slurm job {self.job.id} can never start: {NEVER[self.job.reason]} "
                f"({self.job.reason}). It was cancelled. Ask for less, or say partition=, time=, "
                "nodes= in start()."
            )

    def _show(self, text: str) -> None:
        print(f"\r{text:{self._shown}}", end="", flush=True)
        self._shown = len(text)

    def clear(self) -> None:
        """Take the line away."""
        if self._shown:
            print(f"\r{'':{self._shown}}\r", end="", flush=True)
        self._shown = 0
