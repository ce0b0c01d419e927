"""Slurm's partitions: what each can give, what is free now, and whether a job fits into it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from job_queue import Poll

from utils.jobs.slurm import least, minutes

# --all also shows hidden partitions, and partitions that only students, not the hub, may use.
COMMAND = ("sinfo", "--all", "--noheader", "--exact", "--format=%P|%a|%l|%s|%t|%D|%c|%m|%C|%G")
#: Seconds between two calls of sinfo, and the highest age of the free nodes that a page shows.
PERIOD = 10.0


@dataclass
class Partition:
    """A partition of Slurm.

    minutes, most_nodes: a job's limits, math.inf if there is none; cores, memory (MB), gpus: of the
    largest node; free_*: what is free now.
    """

    name: str
    default: bool
    up: bool
    minutes: float
    most_nodes: float
    nodes: int = 0
    free_nodes: int = 0
    free_cores: int = 0
    cores: int = 0
    memory: int = 0
    gpus: int = 0


@dataclass(frozen=True)
class Size:
    """What a job asks for.

    The job asks for nodes, for minutes, and on each node for tasks, cores, memory and GPUs. The
    memory is in MB, and 0 if the job doesn't say it.
    """

    nodes: int
    tasks: int
    cores: int
    memory: int
    gpus: int
    minutes: float


def poll(command: tuple[str, ...] = COMMAND, period: float = PERIOD) -> Poll:
    """Return a poll that answers with all partitions, by their names."""
    return Poll(command, parsed, period)


def parsed(text: str) -> dict[str, Partition]:
    """Return the partitions in sinfo's output, which has a line for each group of equal nodes."""
    found: dict[str, Partition] = {}
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 10:
            continue
        name, up, limit, size, state, count, cores, memory, used, gres = fields
        known = found.setdefault(
            name.rstrip("*"),
            Partition(
                name=name.rstrip("*"),
                default=name.endswith("*"),
                up=up == "up",
                minutes=minutes(limit),
                most_nodes=_number(size.rpartition("-")[2]),
            ),
        )
        known.nodes += int(count)
        known.free_nodes += int(count) if state == "idle" else 0
        known.free_cores += int(used.split("/")[1])
        known.cores = max(known.cores, int(cores.rstrip("+")))
        known.memory = max(known.memory, int(memory.rstrip("+")))
        known.gpus = max(known.gpus, _gpus(gres))
    return found


def _number(text: str) -> float:
    return int(text) if text.isdigit() else math.inf


def _gpus(gres: str) -> int:
    """Return the number of GPUs: 4 for `gpu:a100:4(S:0-1),nvme:1`."""
    return sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres))


def size(options: list[str], time: str) -> Size:
    """Return what these options of sbatch ask for, where only --mem counts as memory."""
    told = dict(re.findall(r"--([a-z-]+)=(\S+)", "\n".join(options)))
    nodes = least(told.get("nodes", ""))
    tasks = least(told.get("ntasks-per-node", ""), math.ceil(least(told.get("ntasks", "")) / nodes))
    return Size(
        nodes=nodes,
        tasks=tasks,
        cores=tasks * least(told.get("cpus-per-task", "")),
        memory=megabytes(told.get("mem", "0")),
        gpus=_gpus(told.get("gres", "")) or least(told.get("gpus-per-node", ""), 0),
        minutes=minutes(time),
    )


def megabytes(text: str) -> int:
    """Return the megabytes of `--mem`, which may be 3000, 3000M, 3G or 1T; 0 for another text."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    units = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
    return math.ceil(int(found[1]) * units[found[2]]) if found else 0


def too_much(wanted: Size, partition: Partition) -> str:
    """Return in words what a partition can never give; "" if it can give everything."""
    name = partition.name
    said = [] if partition.up else [f"the partition '{name}' is closed"]
    if wanted.minutes > partition.minutes:
        said.append(
            f"'{name}' gives a job {clock(partition.minutes)} at most, not {clock(wanted.minutes)}"
        )
    job, all_of_it, node = f"'{name}' gives a job", f"'{name}' has", f"a node of '{name}' has"
    for asked, limit, where, one, many in (
        (wanted.nodes, partition.most_nodes, job, "node at most", "nodes at most"),
        (wanted.nodes, partition.nodes, all_of_it, "node in all", "nodes in all"),
        (wanted.cores, partition.cores, node, "core at most", "cores at most"),
        (wanted.memory, partition.memory, node, "MB of memory", "MB of memory"),
        (wanted.gpus, partition.gpus, node, "GPU at most", "GPUs at most"),
    ):
        if asked > limit:
            said.append(f"{where} {limit} {one if limit == 1 else many}, not {asked}")
    return "; ".join(said)


def clock(least: float) -> str:
    """Return minutes as h:min, or "any time" if there is no limit."""
    if math.isinf(least):
        return "any time"
    return f"{int(least) // 60}:{int(least) % 60:02d} h"
