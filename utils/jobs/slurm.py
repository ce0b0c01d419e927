"""Asks Slurm about this process's allocation, the site's partitions, and the ranks' job."""

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

from utils.jobs import RanksError

# Slurm's commands look for their configuration here; slurmctld provides the last file.
CONFS = ("/etc/slurm/slurm.conf", "/etc/slurm-llnl/slurm.conf", "/run/slurm/conf/slurm.conf")

# Seconds that Slurm has to answer a question.
PATIENCE = 20


@dataclass(frozen=True)
class Allocation:
    """The Slurm job that this process is part of."""

    job: str  # its id
    nodes: str  # as Slurm writes them, "node[1-2]"
    hosts: int  # number of nodes
    cpus: int  # on all nodes
    cpus_here: int = 0  # on this node, 0 if Slurm does not say

    @classmethod
    def of(cls, env: Mapping[str, str]) -> Allocation | None:
        """Return the allocation that the environment describes; None outside a job."""
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
    """Return the sum of Slurm's numbers per node, such as 10 for "4(x2),2"."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return sum(int(number) * int(times or 1) for number, times in parts)


def has_slurm() -> bool:
    """Return whether jobs can be submitted; Slurm's commands may exist without a cluster."""
    configured = "SLURM_CONF" in os.environ or any(Path(conf).exists() for conf in CONFS)
    return configured and shutil.which("srun") is not None and bool(partitions())


def partitions() -> list[str]:
    """Return the names of the partitions, the default first; [] if Slurm does not answer."""
    lines = _answer("sinfo", "--noheader", "--format=%P").split()
    return [line.rstrip("*") for line in sorted(lines, key=lambda line: not line.endswith("*"))]


def shortfall(asked: Mapping[str, str]) -> str:
    """Return why a batch script's request exceeds its partition, even if the partition is empty.

    The text is "" if the request fits, or if Slurm does not answer. If the script names several
    partitions, the request must fit one of them. Nodes that are down count, because they will
    return.

    Args:
        asked: values of --partition, --nodes, --cpus-per-task, --ntasks-per-node and --time, as
            `utils.labs.shared.slurm_script.request` reads them.
    """
    # Jobs may be submitted to hidden partitions, so these are included.
    lines = _answer("sinfo", "--all", "--noheader", "--format=%P|%D|%c|%l").split()
    rows: dict[str, list[list[str]]] = {}
    default = ""
    for line in lines:
        name, *row = line.split("|")
        rows.setdefault(name.rstrip("*"), []).append(row)
        if name.endswith("*") and not default:
            default = name.rstrip("*")
    wanted = asked.get("--partition") or default
    if not rows or not wanted:
        return ""
    lacks = [_lack(name, rows, asked) for name in wanted.split(",")]
    return "; ".join(lacks) if all(lacks) else ""


def _lack(name: str, rows: Mapping[str, list[list[str]]], asked: Mapping[str, str]) -> str:
    """Return why a request exceeds the partition of this name; "" if it fits.

    Args:
        rows: for each partition, rows of sinfo with nodes, CPUs per node, and time limit.
    """
    if name not in rows:
        return f"there is no partition {name!r}, only {', '.join(rows)}"
    has_nodes = sum(int(row[0]) for row in rows[name])
    has_cpus = max(int(row[1].rstrip("+")) for row in rows[name])
    limits = [row[2] for row in rows[name]]
    nodes = least(asked.get("--nodes", ""))
    cpus = least(asked.get("--ntasks-per-node", "")) * least(asked.get("--cpus-per-task", ""))
    there = f"but partition {name} has"
    if nodes > has_nodes:
        return f"--nodes={nodes}, {there} only {has_nodes}"
    if cpus > has_cpus:
        return f"{cpus} CPUs on a node (tasks × CPUs of each), {there} only {has_cpus} on each"
    if minutes(asked.get("--time", "0")) > max(map(minutes, limits)):
        return f"--time={asked['--time']}, {there} a limit of {limits[0]}"
    return ""


def least(text: str, default: int = 1) -> int:
    """Return the smaller number of "2-4"; the default if there is no number."""
    number = re.match(r"\d+", text)
    return int(number[0]) if number else default


def minutes(text: str) -> float:
    """Return Slurm's "90", "1:30:00" or "2-12:00:00" in minutes; infinity for other text."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        return math.inf
    days, *parts = match.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days is not None:  # days-hours:minutes:seconds
        return 1440 * int(days) + 60 * first + second + third / 60
    if parts[2] is not None:  # hours:minutes:seconds
        return 60 * first + second + third / 60
    return first + second / 60  # minutes:seconds


@functools.cache
def mpi_plugins() -> list[str]:
    """Return the values that `srun --mpi` accepts here."""
    words = re.findall(r"^\s*(\w+)\s*$", _answer("srun", "--mpi=list"), re.MULTILINE)
    return [word for word in words if word != "none"]


def srun_mpi(open_mpi: bool) -> str:
    """Return the value for `srun --mpi`.

    Raises:
        RanksError: there is no suitable plugin, so each rank would be alone.
    """
    known = mpi_plugins()
    for plugin in ("pmix",) if open_mpi else ("pmix", "pmi2"):
        if plugin in known:
            return plugin
    raise RanksError(
        f"srun can't start MPI ranks here: `srun --mpi=list` names {', '.join(known) or 'nothing'},"
        " but Open MPI needs pmix. Ask an administrator for Slurm's PMIx plugin, or start the "
        'notebook in a job with enough tasks and call start(…, launcher="mpiexec").'
    )


def _answer(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PATIENCE, check=False, encoding="utf-8"
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout + done.stderr if done.returncode == 0 else ""


# --- the job of a set of ranks -----------------------------------------------------------------

# Seconds between two questions, so that many students don't keep Slurm busy.
PERIOD = 2.0
# Reasons for which a job can never start, from `man squeue`, JOB REASON CODES. PartitionConfig is
# left out, because Slurm gives this reason for nodes that are down, too. The hub uses this table.
NEVER = {
    "AccountNotAllowed": "this account may not use that partition",
    "BadConstraints": "no node satisfies the constraints of the job",
    "InvalidAccount": "Slurm does not know that account",
    "InvalidQOS": "Slurm does not know that quality of service",
    "PartitionNodeLimit": "the partition doesn't allow so many nodes for a job",
    "PartitionTimeLimit": "the partition doesn't allow so much time for a job",
    "AssocMaxCpuPerJobLimit": "your account may not use so many CPUs in a job",
    "AssocMaxNodePerJobLimit": "your account may not use so many nodes in a job",
    "AssocMaxWallDurationPerJobLimit": "your account may not use so much time for a job",
    "QOSMaxCpuPerJobLimit": "its quality of service doesn't allow so many CPUs in a job",
    "QOSMaxNodePerJobLimit": "its quality of service doesn't allow so many nodes for a job",
    "QOSMaxWallDurationPerJobLimit": "its quality of service doesn't allow so much time for a job",
}
BEFORE_START = {"PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED"}


class Job(NamedTuple):
    """A job as squeue prints it; nodes: "node[1-2]", or "" before the start."""

    id: str
    state: str
    reason: str
    nodes: str


def find(name: str) -> Job | None:
    """Return this user's job with this name; None if there is none, or Slurm does not answer."""
    mine = ("--user", getpass.getuser(), "--name", name)
    fields = _answer("squeue", "--noheader", *mine, "--format=%i|%T|%r|%N").strip().split("|")
    return Job(*fields) if len(fields) == 4 else None


def state(job: str) -> str:
    """Return the state of a job, such as RUNNING or TIMEOUT; "" if Slurm has forgotten the job."""
    match = re.search(r"\bJobState=(\w+)", _answer("scontrol", "--oneliner", "show", "job", job))
    return match[1] if match else ""


def why_never(job: str) -> str:
    """Return why a job that was just submitted can never start; "" if it may start.

    It waits up to 5 s, because Slurm has no reason until it has looked at the job.
    """
    late = time.monotonic() + 5
    while time.monotonic() < late:
        answer = _answer("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r").strip()
        state, _, reason = answer.partition("|")
        if reason in NEVER:
            return f"{NEVER[reason]} ({reason})"
        if state != "PENDING" or reason != "None":
            return ""
        time.sleep(0.5)
    return ""


class Waiting:
    """A context that shows a line about a waiting job, until the job runs or the context ends."""

    def __init__(self, name: str):
        self._name = name
        self._since = time.monotonic()
        self._next = self._since + PERIOD / 2
        self._shown = 0
        self.job: Job | None = None

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.clear()
        if kind is KeyboardInterrupt and self.job is not None:
            print(f"You stopped the start, so Slurm job {self.job.id} is canceled.")

    def begun(self) -> bool:
        """Return whether the job has begun, as far as we know; ask Slurm at most every 2 s.

        Raises:
            RanksError: the job can never start.
        """
        if time.monotonic() < self._next:
            return self.job is not None and self.job.state not in BEFORE_START
        self._next = time.monotonic() + PERIOD
        self.job = find(self._name) or self.job
        if self.job is None:
            return False
        if self.job.state not in BEFORE_START:
            self.clear()
            return True
        if self.job.reason in NEVER:
            self.clear()
            raise RanksError(
                f"Slurm job {self.job.id} was canceled, because it could never start: "
                f"{NEVER[self.job.reason]} ({self.job.reason}). Ask for less, or set partition=, "
                "time= or nodes= in start()."
            )
        waited = int(time.monotonic() - self._since)
        self._show(
            f"Slurm job {self.job.id} has been waiting in the queue ({self.job.reason}) for "
            f"{waited // 60}:{waited % 60:02d}. Press the stop button to cancel it."
        )
        return False

    def refused(self, output: str) -> RanksError | None:
        """Return the error for an srun that ended with this output before it had a job."""
        errors = re.findall(r"^srun: error: (?:Unable to allocate resources: )?(.+)$", output, re.M)
        if self.job is not None or not errors:
            return None
        text = (
            f"Slurm refused the job of the ranks: {errors[-1].strip()}. Ask for fewer ranks, or "
            "set partition=, time= or nodes= in start() (partitions: "
            f"{', '.join(partitions()) or 'none that answer'})."
        )
        if Allocation.of(os.environ):
            text += (
                f" This is {socket.gethostname()}, a compute node, and some sites allow no job to "
                "be submitted from there. If so, start your server in a job that is large enough "
                "for the ranks."
            )
        return RanksError(text)

    def _show(self, text: str) -> None:
        print(f"\r{text:{self._shown}}", end="", flush=True)
        self._shown = len(text)

    def clear(self) -> None:
        """Remove the line."""
        if self._shown:
            print(f"\r{'':{self._shown}}\r", end="", flush=True)
        self._shown = 0
