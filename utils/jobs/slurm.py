"""Questions to Slurm: what this process was given, what there is, how a job of ranks fares."""

from __future__ import annotations

import functools
import getpass
import math
import os
import re
import shutil
import socket
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

    Attributes:
        job: its id.
        nodes: as Slurm writes them, "node[1-2]".
        hosts: number of nodes.
        cpus: on all nodes.
        cpus_here: on this node, 0 if Slurm does not say.
    """

    job: str
    nodes: str
    hosts: int
    cpus: int
    cpus_here: int = 0

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation that the environment tells of."""
        if not env.get("SLURM_JOB_ID"):
            return None
        return cls(
            env["SLURM_JOB_ID"],
            env.get("SLURM_JOB_NODELIST", "?"),
            int(env.get("SLURM_JOB_NUM_NODES", 1)),
            per_node_sum(env.get("SLURM_JOB_CPUS_PER_NODE", "1")),
            int(env.get("SLURM_CPUS_ON_NODE", 0)),
        )


def per_node_sum(text: str) -> int:
    """Slurm's "4(x2),2" as 10."""
    return sum(
        int(number) * int(times or 1) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    )


def has_slurm() -> bool:
    """Return whether jobs can be submitted: Slurm's commands may be there without a cluster."""
    configured = "SLURM_CONF" in os.environ or any(Path(conf).exists() for conf in CONFS)
    return configured and shutil.which("srun") is not None and bool(partitions())


def partitions() -> list[str]:
    """Names of the partitions, the default one first; empty where Slurm does not answer."""
    lines = _answer("sinfo", "--noheader", "--format=%P").split()
    return [line.rstrip("*") for line in sorted(lines, key=lambda line: not line.endswith("*"))]


def shortfall(asked: Mapping[str, str]) -> str:
    """Return what of a batch script's request its partition lacks, even when it is empty.

    The text is "" if nothing is lacking, or if Slurm does not tell. Of several partitions, one
    that has all is enough. Nodes that are down count: they will come back.

    Args:
        asked: values of --partition, --nodes, --cpus-per-task, --ntasks-per-node and --time, as
            `utils.labs.shared.slurm_script.request` reads them.
    """
    # Hidden partitions too: to give jobs to them is allowed.
    lines = _answer("sinfo", "--all", "--noheader", "--format=%P|%D|%c|%l").split()
    rows = [line.split("|") for line in lines]
    known: dict[str, list[list[str]]] = {}
    for row in rows:
        known.setdefault(row[0].rstrip("*"), []).append(row)
    default = next((row[0].rstrip("*") for row in rows if row[0].endswith("*")), "")
    wanted = asked.get("--partition") or default
    if not known or not wanted:
        return ""
    lacks = [_lack(name, known, asked) for name in wanted.split(",")]
    return "; ".join(lacks) if all(lacks) else ""


def _lack(name: str, known: Mapping[str, list[list[str]]], asked: Mapping[str, str]) -> str:
    """What of a request the partition of that name does not have; known: sinfo's rows of each."""
    if name not in known:
        return f"there is no partition {name!r} here, only {', '.join(known)}"
    mine = known[name]
    has_nodes = sum(int(row[1]) for row in mine)
    has_cpus = max(int(row[2].rstrip("+")) for row in mine)
    nodes = least(asked.get("--nodes", ""))
    cpus = least(asked.get("--ntasks-per-node", "")) * least(asked.get("--cpus-per-task", ""))
    there = f"partition {name} has"
    if nodes > has_nodes:
        return f"--nodes={nodes}, and {there} {has_nodes}"
    if cpus > has_cpus:
        return f"{cpus} CPUs on a node (tasks × CPUs of each), and {there} {has_cpus} on each"
    limit = max(minutes(row[3]) for row in mine)
    if minutes(asked.get("--time", "0")) > limit:
        return f"--time={asked['--time']}, and {there} a limit of {mine[0][3]}"
    return ""


def least(text: str, default: int = 1) -> int:
    """Return the smaller number of "2-4", the default for no number."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else default


def minutes(text: str) -> float:
    """Slurm's "90", "1:30:00" or "2-12:00:00" in minutes; infinite for what is no such time."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not found:
        return math.inf
    days, first, second, third = (int(part) if part else None for part in found.groups())
    assert first is not None, "the pattern demands the first number"
    if days is not None:  # days-hours:minutes:seconds
        return 1440 * days + 60 * first + (second or 0) + (third or 0) / 60
    if third is not None:  # hours:minutes:seconds
        return 60 * first + (second or 0) + third / 60
    return first + (second or 0) / 60  # minutes:seconds


@functools.cache
def mpi_plugins() -> list[str]:
    """Return the values that `srun --mpi` takes here."""
    said = _answer("srun", "--mpi=list")
    return [word for word in re.findall(r"^\s*(\w+)\s*$", said, re.MULTILINE) if word != "none"]


def srun_mpi(open_mpi: bool) -> str:
    """Return the value for `srun --mpi`.

    Raises:
        RanksError: ranks would each be alone.
    """
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
# Reasons of a job that waits for nothing that will come: `man squeue`, JOB REASON CODES. Not among
# them is PartitionConfig: with nodes that are down it says that they are missing now. The hub has
# the same, hpc/spawner.py.
NEVER = {
    "AccountNotAllowed": "this account may not use that partition",
    "BadConstraints": "no node is as the job wants it",
    "InvalidAccount": "Slurm does not know that account",
    "InvalidQOS": "Slurm does not know that quality of service",
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


# What helps where nodes may not submit jobs.
_FROM_A_NODE = (
    "It was asked for on {host}, a compute node. Some sites let no job be submitted there: then "
    "start a server with room for the ranks in its own job, and they need no other one."
)


class Job(NamedTuple):
    """id, state and reason as squeue writes them; nodes: "node[1-2]", or "" before the start."""

    id: str
    state: str
    reason: str
    nodes: str


def find(name: str) -> Job | None:
    """Return this user's job of that name; None if there is none, or Slurm does not answer."""
    mine = ("--user", getpass.getuser(), "--name", name)
    fields = _answer("squeue", "--noheader", *mine, "--format=%i|%T|%r|%N").strip().split("|")
    return Job(*fields) if len(fields) == 4 else None


def state(job: str) -> str:
    """Return the state of a job that may be over: RUNNING, TIMEOUT, …; "" if Slurm forgot it."""
    found = re.search(r"\bJobState=(\w+)", _answer("scontrol", "--oneliner", "show", "job", job))
    return found[1] if found else ""


def why_never(job: str, seconds: float = 5.0) -> str:
    """Return why a job that was just submitted can't start; "" as soon as nothing says so.

    It takes at most so long: Slurm has no reason until it has looked at the job.
    """
    late = time.monotonic() + seconds
    while time.monotonic() < late:
        told = _answer("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r").strip()
        state, _, reason = told.partition("|")
        if reason in NEVER:
            return f"{NEVER[reason]} ({reason})"
        if state != "PENDING" or reason != "None":
            return ""
        time.sleep(0.5)
    return ""


class Waiting:
    """Shows on one line how a job of that name waits, until it runs."""

    def __init__(self, name: str):
        self._name = name
        self._since = time.monotonic()
        self._next = self._since + PERIOD / 2
        self._shown = 0
        self.job: Job | None = None

    def begun(self) -> bool:
        """Return whether the job has begun, as far as is known. Ask Slurm every 2 s at most.

        Raises:
            RanksError: the job can never start.
        """
        if time.monotonic() < self._next:
            return self.job is not None and self.job.state not in BEFORE_START
        self._next = time.monotonic() + PERIOD
        self.job = find(self._name) or self.job
        if self.job is None:
            return False
        if self.job.state in BEFORE_START:
            self._raise_if_hopeless(self.job)
            waited = int(time.monotonic() - self._since)
            self._show(
                f"Slurm job {self.job.id} waits in the queue ({self.job.reason}), "
                f"{waited // 60}:{waited % 60:02d} so far. The stop button cancels it."
            )
            return False
        self.clear()
        return True

    def refused(self, said: str) -> RanksError | None:
        """Return the error for an srun that ended with these words before there was a job."""
        errors = re.findall(r"^srun: error: (?:Unable to allocate resources: )?(.+)$", said, re.M)
        if self.job is not None or not errors:
            return None
        inside = Allocation.of(os.environ)
        return RanksError(
            f"Slurm refused the job of the ranks: {errors[-1].strip()}. Partitions here: "
            f"{', '.join(partitions()) or 'none that answer'}. Say partition=, time=, nodes= in "
            "start(), or ask for fewer ranks."
            + (f" {_FROM_A_NODE.format(host=socket.gethostname())}" if inside else "")
        )

    def cancelled(self) -> None:
        """Say that the job will not be."""
        self.clear()
        if self.job is not None:
            print(f"Slurm job {self.job.id} is cancelled.")

    def _raise_if_hopeless(self, job: Job) -> None:
        if job.reason in NEVER:
            self.clear()
            raise RanksError(
                f"Slurm job {job.id} can never start: {NEVER[job.reason]} "
                f"({job.reason}). It was cancelled. Ask for less, or say partition=, time=, "
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
