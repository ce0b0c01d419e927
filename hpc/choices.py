"""Turn a student's choices into a job, and refuse everything that the site doesn't offer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from partitions import Partition, Size, megabytes, size, too_much
from settings import Profile, Site

#: What a student can choose in addition to the profile, with the label of each field.
LABELS = {
    "partition": "Partition",
    "nodes": "Nodes",
    "ranks": "Ranks on each node",
    "time": "Time",
    "gpus": "GPUs on each node",
    "account": "Account",
    "reservation": "Reservation",
}
#: Options of sbatch that a choice of nodes and ranks replaces.
SIZES = ("--nodes=", "--ntasks=", "--ntasks-per-node=")
#: Choices that separate jobs of ranks inherit, because sbatch reads them from variables.
FOLLOWED = {"partition": "PARTITION", "account": "ACCOUNT", "reservation": "RESERVATION"}


class Refused(ValueError):
    """A choice that the site doesn't offer. The text says which one."""


@dataclass(frozen=True)
class Request:
    """A job to submit. options: of sbatch; exports: variables for the jobs that it submits."""

    partition: str
    account: str
    time: str
    options: list[str]
    exports: dict[str, str]

    @property
    def size(self) -> Size:
        """Return in numbers what the job asks for."""
        return size(self.options, self.time)

    def impossible(self, known: dict[str, Partition]) -> str:
        """Return in words what Slurm can never give, or "". known: see partitions.parsed.

        If a request names several partitions (`lab,gpu`), Slurm chooses one that can run the job.
        If the hub's user doesn't see one of them, only sbatch, which runs as the student, can tell.
        """
        names = set(filter(None, self.partition.split(",")))
        mine = [p for p in known.values() if (p.name in names if names else p.default)]
        said = [too_much(self.size, partition) for partition in mine]
        return "; ".join(said) if len(mine) >= len(names) and all(said) else ""


def offered(site: Site) -> dict[str, list[str]]:
    """Return the choices of each field, without fields that have none."""
    form = site.form
    lists: dict[str, Iterable[Any]] = {
        "partition": form.partitions,
        "nodes": form.nodes,
        "ranks": form.ranks,
        "time": form.times,
        "gpus": form.gpus,
        "account": form.accounts,
        "reservation": form.reservations,
    }
    return {name: list(map(str, values)) for name, values in lists.items() if values}


def checked(site: Site, options: dict[str, Any]) -> dict[str, str]:
    """Return the choices in these options, with the first profile as the default.

    The options may come from the REST API, and batchspawner would write them into the batch script.

    Raises:
        Refused: an option isn't one of the site's choices.
    """
    profiles = [profile.name for profile in site.profiles]
    known = {"profile": profiles} | offered(site)
    if strange := options.keys() - known.keys():
        raise Refused(f"Only {_listed(known)} can be chosen, not {_listed(strange)}.")
    chosen = {}
    for name, value in options.items():
        if value == "":
            continue
        if type(value) not in (str, int) or str(value) not in known[name]:
            raise Refused(f"There is no {name} {value!r}: choose one of {_listed(known[name])}.")
        chosen[name] = str(value)
    return {"profile": profiles[0]} | chosen


def request(site: Site, chosen: dict[str, str]) -> Request:
    """Return the job for choices that `checked` has returned."""
    profile = next(each for each in site.profiles if each.name == chosen["profile"])
    options = [*site.slurm.options, *profile.options]
    if "nodes" in chosen or "ranks" in chosen:
        options = _resized(site, profile, chosen)
    if gpus := chosen.get("gpus"):
        options = [each for each in options if not each.startswith("--gres=")]
        options.append(f"--gres=gpu:{gpus}")
    if reservation := chosen.get("reservation"):
        options.append(f"--reservation={reservation}")
    return Request(
        partition=chosen.get("partition") or profile.partition or site.slurm.partition,
        account=chosen.get("account") or site.slurm.account,
        time=chosen.get("time") or profile.time,
        options=options,
        exports={
            f"SBATCH_{variable}": chosen[name]
            for name, variable in FOLLOWED.items()
            if name in chosen
        },
    )


def _resized(site: Site, profile: Profile, chosen: dict[str, str]) -> list[str]:
    """Return the job's options for another number of nodes and ranks.

    The memory changes by `memory_per_rank` for each rank more or less, and is enough for one rank
    at least. `--mem=0`, which means all of a node, stays.
    """
    given = [*site.slurm.options, *profile.options]
    before, rank = size(given, profile.time), megabytes(site.form.memory_per_rank)
    nodes = int(chosen.get("nodes", before.nodes))
    ranks = int(chosen.get("ranks", before.tasks))
    replaced = (*SIZES, "--mem=") if before.memory else SIZES
    options = [each for each in given if not each.startswith(replaced)]
    options += [f"--nodes={nodes}", f"--ntasks={nodes * ranks}", f"--ntasks-per-node={ranks}"]
    if before.memory:
        memory = max(before.memory + (ranks - before.tasks) * rank, rank)
        options.append(f"--mem={memory}M")
    return options


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(repr(name) for name in sorted(map(str, names)))
