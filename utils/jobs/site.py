"""Where ranks are brought up: what the site's administrator, Slurm and the user say of it.

On a laptop mpiexec starts the ranks. In a Slurm job with room for them mpiexec spreads them over
its nodes. From a login node, or a small job that only holds JupyterLab, they get a Slurm job of
their own. :func:`decide` chooses, and says why.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass
from pathlib import Path

from IPython.core.application import ENV_CONFIG_DIRS, SYSTEM_CONFIG_DIRS
from traitlets import Bool, Enum, Int, List, Unicode
from traitlets.config import Config, Configurable
from traitlets.config.loader import PyFileConfigLoader

from utils.jobs.errors import RanksError
from utils.jobs.slurm import Allocation, has_slurm

CONFIG_FILE = "ipcluster_config.py"
LAUNCHERS = ("auto", "mpiexec", "srun", "slurm")


class DDLLabs(Configurable):
    """What an administrator sets for all users, as ``c.DDLLabs.…`` in ipcluster_config.py.

    The file lies in /etc/ipython, or in etc/ipython of the Python environment, which wins.
    """

    launcher = Enum(LAUNCHERS, "auto", help="as of cluster.start").tag(config=True)
    fork_server = Bool(True, help="may ranks be forked from a process of the user?").tag(
        config=True
    )
    partition = Unicode(help="of the ranks' own jobs; empty: Slurm's default").tag(config=True)
    time = Unicode("60", help="limit of the ranks' own jobs, as sbatch takes it").tag(config=True)
    account = Unicode(help="that the ranks' own jobs are charged to").tag(config=True)
    ranks_per_node = Int(0, help="of the ranks' own jobs; 0: as Slurm likes").tag(config=True)
    options = List(Unicode(), help="further options of srun for those jobs").tag(config=True)
    srun_mpi = Unicode(help="for srun's --mpi; empty: pmix where there is one").tag(config=True)
    shared_folder = Unicode(
        help="seen by all nodes, for connection files; empty: the user's cache folder"
    ).tag(config=True)
    controller_ip = Unicode(
        help="address of this node that ranks on other nodes reach; empty: the host name's"
    ).tag(config=True)


@functools.cache
def settings() -> DDLLabs:
    """Return the site's settings.

    Raises:
        RanksError: a file can't be read; names it.
    """
    config = Config()
    for folder in dict.fromkeys([*reversed(SYSTEM_CONFIG_DIRS), *reversed(ENV_CONFIG_DIRS)]):
        if (Path(folder) / CONFIG_FILE).is_file():
            try:
                config.merge(PyFileConfigLoader(CONFIG_FILE, path=folder).load_config())
            except Exception as error:  # any code may stand there
                raise RanksError(
                    f"{Path(folder) / CONFIG_FILE}: {type(error).__name__}: {error}"
                ) from error
    return DDLLabs(config=Config({"DDLLabs": config.DDLLabs}))


# --- the choice -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How ranks are started.

    Attributes:
        launcher: "mpiexec"; "srun", within the present job; "slurm", as a job of their own.
        reason: a sentence for the user.
        allocation: the present job, if there is one.
    """

    launcher: str
    reason: str
    allocation: Allocation | None = None

    @property
    def own_job(self) -> bool:
        """Return whether the ranks get a Slurm job of their own."""
        return self.launcher == "slurm"

    @property
    def many_hosts(self) -> bool:
        """Return whether ranks may be on other hosts than this process."""
        return self.own_job or (self.allocation is not None and self.allocation.hosts > 1)


def decide(cpus: int, asked: str | None, site: DDLLabs) -> Way:
    """Return how to start ranks that need so many CPUs in all.

    Args:
        cpus: number of CPUs.
        asked: a launcher by the user; None or "auto": by the site, DDL_LABS_LAUNCHER, or the place.
        site: its settings.

    Raises:
        ValueError: there is no such launcher.
        RanksError: the launcher can't work here.
    """
    allocation = Allocation.of(os.environ)
    for source, name in (
        (f'launcher="{asked}"', asked),
        ("DDL_LABS_LAUNCHER", os.environ.get("DDL_LABS_LAUNCHER")),
        ("the site's settings", site.launcher),
    ):
        if name and name != "auto":
            return Way(_possible(name, source, allocation), f"by {source}", allocation)
    if allocation is None:
        if has_slurm():
            return Way("slurm", "a job of their own, as this host is not part of one")
        return Way("mpiexec", "on this machine, as there is no Slurm")
    where = f"Slurm job {allocation.job} on {allocation.nodes}"
    if allocation.cpus >= cpus:
        return Way("mpiexec", f"{where} has {allocation.cpus} CPUs, which is enough", allocation)
    if has_slurm():
        reason = f"a job of their own, as {where} has {allocation.cpus} CPUs of the {cpus} needed"
        return Way("slurm", reason, allocation)
    return Way("mpiexec", f"{where} is small, but no other can be had", allocation)


def _possible(name: str, source: str, allocation: Allocation | None) -> str:
    if name not in LAUNCHERS:
        raise ValueError(f"{source}: expected one of {', '.join(LAUNCHERS)}, not {name!r}")
    if name == "srun" and allocation is None:
        raise RanksError(
            f'{source}: srun works within a Slurm job, and this is none. "slurm" gives the ranks a '
            "job of their own."
        )
    if name == "slurm" and not has_slurm():
        raise RanksError(
            f"{source}: Slurm does not answer here (`sinfo` names no partition), so no job can be "
            'submitted. launcher="mpiexec" starts the ranks on this machine.'
        )
    return name
