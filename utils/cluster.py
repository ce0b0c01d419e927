"""MPI ranks for a notebook: engines of ipyparallel that mpiexec starts.

    from utils import cluster
    ranks = cluster.start(4)        # now `%%px` runs a cell on four MPI ranks
    ranks.where()                   # which line is each rank on, even when it is stuck inside C?
    ranks.restart()                 # fresh ranks, also after a deadlock or a crash
    ranks.stop()

No rank outlives the kernel, whatever ends it: see `_watchdog`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import logging
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import ipyparallel as ipp
import psutil
from ipyparallel.client.client import ExecuteReply
from IPython import get_ipython
from tabulate import tabulate
from traitlets.config import Config

from utils import _watchdog, _where

# More ranks than this don't fit on one machine: each takes 100 MB before it imports torch.
MOST_RANKS = 64

# Seconds: until the ranks must be up; until a stopped set of ranks must have said goodbye.
START_DEADLINE = 60.0
GOODBYE_DEADLINE = 10.0

# Seconds that `ask` gives: to the other ranks once one has failed; to ranks it has interrupted.
AFTER_AN_ERROR = 3.0
AFTER_AN_INTERRUPT = 5.0

# The controller asks every 0.5 s whether engines live, as it admits a new one only then (default:
# 3 s). 60 silent rounds lose a rank: a laptop that was suspended for a while must not.
CONTROLLER_ARGS = ["--ping=500", "--HeartMonitor.max_heartmonitor_misses=60"]

_current: Ranks | None = None


class RanksError(RuntimeError):
    """The ranks can't be started or used; the message says why and what to do."""


def start(
    n: int,
    *,
    threads: int = 1,
    bind: bool | None = None,
    timeout: float = 20.0,
    env: dict[str, str] | None = None,
) -> Ranks:
    """Start `n` MPI ranks and make `%%px` run cells on them.

    Ranks that this kernel already has are stopped first: running the cell again gives fresh ones.

    threads: of each rank (OMP_NUM_THREADS and its like).
    bind: keep each rank on cores of its own; None: if there are enough, n * threads <= cores.
    timeout: seconds that a communication of the backend waits before it reports a deadlock.
    env: further environment variables of the ranks.

    Raises TypeError or ValueError for arguments that can't work, and RanksError where there is
    no usable mpiexec, on a rank, or when the ranks are not up within 60 s.
    """
    _refuse_on_a_rank()
    plan = _Plan.checked(n, threads, bind, timeout, env)
    if _current is not None:
        _current.stop()
    ranks = Ranks(plan)
    _say(f"{n} MPI ranks are up." if n > 1 else "1 MPI rank is up.")
    return ranks


class Ranks:
    """MPI ranks in use; a context manager that stops them. Made by `start`.

    n: how many. client, view: ipyparallel's `Client` and its `DirectView` of all ranks.
    notes: what a user should know about this start (root, more ranks than cores).
    """

    def __init__(self, plan: _Plan):
        global _current
        self.n = plan.n
        self.notes = plan.notes
        self._plan = plan
        self._owner = os.getpid()
        self._up: _Running | None = None
        self._bring_up()
        _current = self

    def _bring_up(self) -> None:
        self._up = _Running(self._plan)
        self.client: ipp.Client = self._up.client
        self.view: ipp.DirectView = self.client[:]
        self.view.block = True
        _prepare_notebook(self.view)

    def _running(self) -> _Running:
        if self._up is None:
            raise RanksError(
                f"these {self.n} ranks were stopped. Run `ranks = start({self.n})` again."
            )
        return self._up

    def restart(self) -> None:
        """Replace all ranks by fresh ones, also when they are dead or stuck inside MPI.

        The client, its views and `%%px` stay valid; what the ranks knew is gone, so rerun the
        cells that set them up. Raises RanksError if they don't come up.
        """
        up = self._running()
        if not up.replace_ranks():
            # The controller is gone, or did not notice that the ranks are.
            self._take_down()
            self._bring_up()
        _say(f"{self.n} fresh MPI ranks are up." if self.n > 1 else "A fresh MPI rank is up.")

    def stop(self) -> None:
        """End the ranks and everything that was started for them. Quiet; twice is once."""
        global _current
        if self._up is None or os.getpid() != self._owner:
            return
        self._take_down()
        _retire_magics(self.n)
        if _current is self:
            _current = None

    def _take_down(self) -> None:
        up, self._up = self._up, None
        up.close()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Ranks: {self.n} {'up' if self._up else 'stopped'}>"

    def interrupt(self) -> None:
        """Send SIGINT to every rank, as Ctrl-C would.

        A rank that waits inside C, in mpi4py's `Recv` say, does not notice: `restart` helps.
        """
        self._running().signal("SIGINT")

    def describe(self) -> Description:
        """Return a table: rank, host, cores, threads, MPI library, process id of each rank."""
        return Description(self._running().facts, self.notes)

    def where(self, timeout: float = 2.0) -> None:
        """Print for each rank the line it is on, even when it is stuck inside C.

        timeout: seconds to wait for a rank's stack.
        """
        for line in self._running().where(timeout):
            print(line)

    def ask(self, target: str, *, timeout: float = 60.0, **kwargs: Any) -> list[Reply]:
        """Run `target`, "package.module:function", on every rank; one Reply each, in rank order.

        The function is called as `function(user_ns, rank=…, **kwargs)` with the namespace of the
        rank's cells. Arguments and results travel as JSON text. An error on a rank is a Reply,
        never an exception here. When one rank has failed for 3 s, or after `timeout` seconds, the
        others are interrupted; with what they say then, it takes at most 10 s more.

        Raises ValueError for a target or arguments that can't be sent, RanksError after `stop`.
        """
        if target.count(":") != 1:
            raise ValueError(f'target must look like "package.module:function", not {target!r}')
        try:
            arguments = json.dumps(kwargs)
        except TypeError as error:
            raise ValueError(f"the arguments of {target} must be JSON values: {error}") from None
        return _Question(self._running(), target, arguments).answers(timeout)


@dataclass(frozen=True)
class Reply:
    """What one rank answered.

    status: "ok"; "error" (the function raised, or the rank died); "silent" (no answer in time).
    value: the function's result. error: such as "ZeroDivisionError: division by zero".
    line: such as "cell line 3", the innermost line of a notebook cell on the way to the error.
    stdout: what was printed meanwhile. A rank that was silent and could be interrupted tells by
    `error` and `line` where it was.
    """

    rank: int
    status: str
    value: Any = None
    error: str | None = None
    line: str | None = None
    stdout: str = ""


class Description:
    """A table of the ranks, as text and HTML; `records` has one dict per rank."""

    def __init__(self, facts: list[dict], notes: list[str]):
        self.notes = notes
        self.records = [
            {
                "rank": fact["rank"],
                "host": fact["host"],
                "cores": _ranges(fact["cores"]),
                "threads": fact["threads"],
                "MPI library": fact["library"],
                "pid": fact["pid"],
            }
            for fact in facts
        ]

    def __repr__(self) -> str:
        return "\n".join([tabulate(self.records, headers="keys", tablefmt="simple"), *self.notes])

    def _repr_html_(self) -> str:
        table = tabulate(self.records, headers="keys", tablefmt="html")
        return table + "".join(f"<p>{note}</p>" for note in self.notes)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "0-2,5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


# --- what was asked for -----------------------------------------------------------------------


@dataclass
class _Plan:
    """How the ranks are to be started: checked arguments, launcher, environment."""

    n: int
    threads: int
    bind: bool
    launcher: Launcher
    environment: dict[str, str]
    notes: list[str] = field(default_factory=list)

    @classmethod
    def checked(cls, n, threads, bind, timeout, env) -> _Plan:
        _check_count("n", n, "the number of ranks", f"start({2})")
        _check_count("threads", threads, "the threads of each rank", "start(2, threads=1)")
        if n > MOST_RANKS:
            raise ValueError(
                f"n={n}: this machine gets at most {MOST_RANKS} ranks (it has {usable_cores()} "
                "cores). More belong in a batch job on a cluster, see hpc/."
            )
        _check_timeout(timeout)
        cores = usable_cores()
        if bind and n * threads > cores:
            raise ValueError(
                f"bind=True: {n} ranks of {threads} threads need {n * threads} cores, and this "
                f"machine has {cores}. Start fewer ranks, or leave `bind` out."
            )
        fits = n * threads <= cores
        launcher = find_launcher()
        environment = _environment(threads, timeout, launcher) | _checked_env(env)
        plan = cls(n, threads, fits if bind is None else bool(bind), launcher, environment)
        plan.notes = plan._notes(cores)
        return plan

    def _notes(self, cores: int) -> list[str]:
        notes = []
        if self.n * self.threads > cores:
            notes.append(
                f"{self.n} ranks of {self.threads} thread(s) share {cores} cores: "
                "fine for learning, not for measuring."
            )
        if _is_root():
            notes.append("Running as root: Open MPI is told to allow it.")
        return notes

    @property
    def mpi_args(self) -> list[str]:
        """Options of mpiexec; that ranks may outnumber cores is said in the environment."""
        if not self.bind:
            return ["--bind-to", "none"]
        if self.launcher.is_open_mpi:
            return ["--map-by", f"slot:PE={self.threads}:OVERSUBSCRIBE", "--bind-to", "core"]
        return ["--bind-to", "core" if self.threads == 1 else f"core:{self.threads}"]


def _check_count(name: str, value: object, what: str, example: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"{name}={value!r}: {what} must be a whole number, as in {example}, "
            f"not {type(value).__name__}"
        )
    if value < 1:
        raise ValueError(f"{name}={value}: {what} must be at least 1, as in {example}")


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        raise TypeError(f"timeout={timeout!r}: must be a number of seconds, such as 20.0")
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout={timeout}: must be more than 0 seconds, and finite")


def _checked_env(env: dict[str, str] | None) -> dict[str, str]:
    for name, value in (env or {}).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"env: names and values must be text, not {name!r}: {value!r}")
    return dict(env or {})


def _environment(threads: int, timeout: float, launcher: Launcher) -> dict[str, str]:
    """Variables for the ranks; what the user has set for MPI in the own environment stays."""
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "MPI_BACKEND_TIMEOUT": f"{timeout:g}",
        # JupyterLab starts kernels without it on PATH; scripts that ranks start need it.
        "PATH": f"{Path(launcher.path).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
    }
    unless_set = {
        # Open MPI's OFI transport costs 1 s of every MPI_Init; ranks here talk by memory.
        "OMPI_MCA_btl": "^ofi",
        # More ranks than cores are allowed: Open MPI 5, then 4. `slot`: in a batch job on several
        # machines the ranks must not all land on the first one.
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        # PyTorch's profiler would print two lines of its own per rank at every use.
        "KINETO_LOG_LEVEL": "6",
    }
    if launcher.library:
        unless_set["MPI4PY_LIBMPI"] = launcher.library
    if _is_root():
        for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
            fixed[name] = fixed[f"{name}_CONFIRM"] = "1"
    return fixed | {k: v for k, v in unless_set.items() if k not in os.environ}


def _is_root() -> bool:
    return os.geteuid() == 0


def _refuse_on_a_rank() -> None:
    on_rank = _watchdog.VARIABLE in os.environ or any(
        os.environ.get(name, "1") not in ("", "0", "1")
        for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    )
    if on_rank:
        raise RanksError(
            "this code already runs on an MPI rank, and ranks can't start ranks. Call start() "
            "in an ordinary cell, without %%px."
        )


def usable_cores() -> int:
    """How many cores this process may use: its affinity, without hyper-threads, and its quota."""
    if not hasattr(os, "sched_getaffinity"):
        return psutil.cpu_count(logical=False) or os.cpu_count() or 1
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            cores.add(str(cpu))
    return max(1, min(len(cores), _quota()))


def _quota() -> int:
    """A container's limit in cores (cgroup 2), or very many."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return sys.maxsize


# --- mpiexec ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launcher:
    """An mpiexec. `library`: the MPI library that mpi4py must be told to load beside it."""

    path: str
    version: str
    library: str | None = None

    @property
    def is_open_mpi(self) -> bool:
        """Does it take Open MPI's options?"""
        return "open mpi" in self.version.lower() or "openrte" in self.version.lower()


def find_launcher() -> Launcher:
    """The site's mpiexec if there is one on PATH, else the one in this Python environment.

    Raises RanksError where there is none.
    """
    own = Path(sys.prefix) / "bin" / "mpiexec"
    site = _mpiexec_of_the_site(own)
    if site is not None:
        library = _library_beside(site) if _library_beside(str(own)) else None
        return Launcher(site, _version(site), library)
    if own.exists():
        return Launcher(str(own), _version(str(own)))
    raise RanksError(
        f"there is no mpiexec, neither on PATH nor in {own.parent}. Install an MPI library "
        "beside the course: pip install 'ddl-labs[mpi]'. On a cluster, load the site's MPI "
        "(such as `module load openmpi`) before the notebook starts."
    )


def _mpiexec_of_the_site(own: Path) -> str | None:
    for folder in os.get_exec_path():
        found = shutil.which("mpiexec", path=folder)
        if found and not (own.exists() and os.path.samefile(found, own)):
            return found
    return None


def _library_beside(mpiexec: str) -> str | None:
    """The libmpi of the installation that this mpiexec belongs to, if it lies beside it."""
    for bin_folder in (Path(mpiexec).parent, Path(mpiexec).resolve().parent):
        for folder in ("lib", "lib64"):
            for library in sorted((bin_folder.parent / folder).glob("libmpi.so*")):
                return str(library)
    return None


@functools.cache
def _version(mpiexec: str) -> str:
    try:
        done = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
        text = (done.stdout or done.stderr).strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise RanksError(
            f"{mpiexec} does not run: {error}. Install an MPI library with "
            "pip install 'ddl-labs[mpi]', or take this one off PATH."
        ) from None
    return text.splitlines()[0] if text else "unknown version"


# --- the folder of a kernel's ranks -----------------------------------------------------------


class _Room:
    """A private folder for connection files, logs and stacks, locked while the kernel lives.

    The system drops the lock when the kernel dies, so a free lock means left-overs.
    """

    def __init__(self):
        base = _base_folder()
        with _locked(base / "lock"):
            _clear_left_overs(base)
            self.mark = f"kernel{os.getpid()}-{secrets.token_hex(4)}"
            self.folder = base / self.mark
            self.folder.mkdir(mode=0o700)
            self._lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held until close()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        _not_in_forked_children(self._lock)

    def close(self) -> None:
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _base_folder() -> Path:
    base = Path(tempfile.gettempdir()) / f"ddl-labs-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if base.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RanksError(f"{base} must be a folder that only you can open; remove it.")
    return base


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear_left_overs(base: Path) -> None:
    """End ranks whose kernel is dead, where even the watchdog was killed; no one else's."""
    for folder in base.glob("kernel*"):
        with contextlib.suppress(OSError), (folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _watchdog.end_all(folder.name)
            shutil.rmtree(folder, ignore_errors=True)


def _not_in_forked_children(file: IO) -> None:
    """A child forked by the student's code must not keep the pipe or the lock open."""
    number = file.fileno()

    def close() -> None:
        with contextlib.suppress(OSError, ValueError):
            if not file.closed and file.fileno() == number:
                file.close()

    os.register_at_fork(after_in_child=close)


class _Watchdog:
    """The process that ends the ranks when this kernel is gone."""

    def __init__(self, room: _Room):
        command = [sys.executable, "-I", _watchdog.__file__, room.mark, str(room.folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        _not_in_forked_children(self._process.stdin)

    def tell(self, roots: list[_watchdog.Root]) -> None:
        """Name the processes that ranks descend from."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(roots) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it end what is left, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)


# --- a running cluster ------------------------------------------------------------------------


class _Running:
    """A controller, n ranks and a client that are up."""

    def __init__(self, plan: _Plan):
        self.plan = plan
        self.n = plan.n
        self.facts: list[dict] = []
        self.client: ipp.Client | None = None
        self._room = _Room()
        self._watchdog = _Watchdog(self._room)
        self._cluster = self._new_cluster()
        try:
            self._cluster.start_cluster_sync()
            self._name_roots()
            self.client = self._connect()
            self._wait_for_ranks()
            self._get_acquainted()
        except BaseException:
            self.close()
            raise

    def _new_cluster(self) -> ipp.Cluster:
        mark = {_watchdog.VARIABLE: self._room.mark}
        config = Config()
        config.LocalControllerLauncher.environment = mark
        config.MPIEngineSetLauncher.environment = self.plan.environment | mark
        config.MPIEngineSetLauncher.engine_cmd = [sys.executable, "-m", "utils._engine"]
        config.MPIEngineSetLauncher.mpi_cmd = [self.plan.launcher.path]
        config.MPIEngineSetLauncher.mpi_args = self.plan.mpi_args
        # Seconds for the controller's connection file to appear (default 10: a busy laptop).
        config.MPIEngineSetLauncher.engine_args = ["--IPEngine.wait_for_url_file=60"]
        return ipp.Cluster(
            engines="mpi",
            n=self.n,
            cluster_id=self._room.mark,
            profile_dir=str(self._room.folder / "profile"),
            config=config,
            load_profile=False,
            controller_args=CONTROLLER_ARGS,
            delay=0,
            # Engines read the connection file: they need not wait for it before they start.
            send_engines_connection_env=False,
            shutdown_atexit=False,
            log=_quiet_log(),
        )

    def _name_roots(self) -> None:
        roots = []
        for part in (self._cluster.controller, self._cluster.engine_set):
            with contextlib.suppress(psutil.Error, AttributeError):
                roots.append((part.pid, psutil.Process(part.pid).create_time()))
        self._watchdog.tell(roots)

    def _connect(self) -> ipp.Client:
        try:
            return self._cluster.connect_client_sync()
        except (TimeoutError, RuntimeError, OSError) as error:
            raise RanksError(f"ipyparallel's controller did not come up: {error}") from error

    def _wait_for_ranks(self) -> None:
        mpiexec = self._cluster.engine_set.process
        deadline = time.monotonic() + START_DEADLINE
        while len(self.client.ids) < self.n:
            if not _watchdog.alive(mpiexec):
                raise self._failed("mpiexec ended before they were there")
            if time.monotonic() > deadline:
                up = len(self.client.ids)
                raise self._failed(f"{up} of them are after {START_DEADLINE:.0f} s")
            time.sleep(0.01)

    def _failed(self, reason: str) -> RanksError:
        launcher = self.plan.launcher
        tail = "\n".join(f"    {line}" for line in self._output_of_mpiexec().splitlines()[-25:])
        return RanksError(
            f"the {self.n} MPI ranks did not come up: {reason}.\n"
            f"Launcher: {launcher.path} ({launcher.version})\n"
            f"The last lines of its output:\n{tail or '    (nothing)'}"
        )

    def _output_of_mpiexec(self) -> str:
        # Not from the file: the launcher removes that when it notices the end of mpiexec.
        with contextlib.suppress(OSError, AttributeError):
            return self._cluster.engine_set.get_output()
        return ""

    def _get_acquainted(self) -> None:
        """Set the ranks up and check that they are one MPI world, in which engine id is rank."""
        folder = json.dumps({"folder": str(self._room.folder)})
        for old in self._room.folder.glob("cells-*"):
            old.unlink()
        replies = _Question(self, "utils._rank:prepare", folder).answers(START_DEADLINE)
        for reply in replies:
            if reply.status != "ok":
                raise self._failed(f"rank {reply.rank} says {reply.error or 'nothing'}")
        self.facts = [reply.value for reply in replies]
        self._check_world()

    def _check_world(self) -> None:
        launcher, library = self.plan.launcher, self.facts[0]["library"]
        if any(fact["size"] != self.n for fact in self.facts):
            sizes = sorted({fact["size"] for fact in self.facts})
            raise RanksError(
                f"{self.n} ranks were started, but they see {sizes} ranks: the launcher "
                f"{launcher.path} ({launcher.version}) does not belong to the MPI library that "
                f"mpi4py loads ({library}), so each rank is alone. Put the mpiexec of that library "
                "first on PATH (on a cluster: `module load` the MPI that mpi4py was built with), "
                "or set MPI4PY_LIBMPI to the libmpi of this launcher."
            )
        ranks = [fact["rank"] for fact in self.facts]
        if ranks != list(range(self.n)):
            raise RanksError(
                f"engines 0 to {self.n - 1} of ipyparallel are the MPI ranks {ranks}, in another "
                "order: call start() again, and report it if that does not help."
            )

    def replace_ranks(self) -> bool:
        """Stop the ranks and start new ones; False when the controller is of no use any more."""
        if not _watchdog.alive(self._cluster.controller.process):
            return False
        self._cluster.stop_engines_sync()
        self._end_stragglers()
        # Until the hub has struck the old ranks off, the new ones don't get their numbers.
        deadline = time.monotonic() + GOODBYE_DEADLINE
        while self.client.ids:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        self._cluster.start_engines_sync(self.n)
        self._name_roots()
        self._wait_for_ranks()
        self._get_acquainted()
        return True

    def _end_stragglers(self) -> None:
        """End ranks that mpiexec did not, as it was killed itself."""
        for fact in self.facts:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(fact["pid"])
                if _watchdog.carries(process, self._room.mark):
                    process.kill()

    def close(self) -> None:
        """End everything; errors on the way don't matter, the watchdog finishes the work."""
        with contextlib.suppress(Exception):
            if self.client is not None:
                self.client.close(linger=0)
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        self._watchdog.close()
        self._room.close()

    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Send a signal to ranks through ipyparallel's nannies; dead ranks are left out."""
        alive = set(self.client.ids)
        targets = sorted(alive if targets is None else alive & set(targets))
        if not targets:
            return
        # A rank that dies meanwhile makes the request fail; the others have got their signal.
        with contextlib.suppress(ipp.error.IPythonError, TimeoutError, OSError):
            self.client.send_signal(name, targets=targets, block=False).result(wait)

    def where(self, timeout: float) -> list[str]:
        """One line for each rank, once it stays the same; at the latest after `timeout` seconds.

        A cell that was sent a moment ago (`%%px --noblock`) may not have begun everywhere: while
        more cells are under way than ranks are busy, an idle one is looked at again.
        """
        deadline = time.monotonic() + timeout
        places, before = self._places(timeout), None
        while time.monotonic() < deadline:
            busy = sum(place != "idle" for place in places)
            to_begin = busy < min(len(self.client.outstanding), self.n)
            if places == before and not to_begin:
                break
            time.sleep(0.02)
            places, before = self._places(timeout), places
        return [f"rank {rank}: {place}" for rank, place in enumerate(places)]

    def _places(self, timeout: float) -> list[str]:
        files = [self._room.folder / f"stack-{rank}" for rank in range(self.n)]
        seen = [file.stat().st_size if file.exists() else 0 for file in files]
        alive = set(self.client.ids)
        self.signal("SIGUSR1", wait=timeout)
        dumps = _new_text(
            {rank: (files[rank], seen[rank]) for rank in alive if rank < self.n}, timeout
        )
        return [self._place(rank, dumps.get(rank)) for rank in range(self.n)]

    def _place(self, rank: int, dump: str | None) -> str:
        if dump is None or (not dump and rank not in self.client.ids):
            return "dead (ranks.restart() gives fresh ranks)"
        if not dump:
            return "no answer (stopped, or very busy)"
        frames = _where.main_stack(dump, self.facts[rank]["main_thread"])
        return _where.explain(frames, self._cells(rank))

    def _cells(self, rank: int) -> dict[str, str]:
        try:
            lines = (self._room.folder / f"cells-{rank}").read_text().splitlines()
        except OSError:
            return {}
        notes = [json.loads(line) for line in lines if line.endswith("}")]
        return {note["file"]: note["source"] for note in notes}


def _new_text(files: dict[int, tuple[Path, int]], timeout: float) -> dict[int, str]:
    """What was appended to each file after its known size, once all are quiet for 60 ms."""
    deadline = time.monotonic() + timeout
    quiet_since, texts = time.monotonic(), dict.fromkeys(files, "")
    while time.monotonic() < deadline:
        now = {}
        for rank, (path, seen) in files.items():
            with path.open(errors="replace") as file:
                file.seek(seen)
                now[rank] = file.read()
        if now != texts:
            quiet_since, texts = time.monotonic(), now
        if all(texts.values()) and time.monotonic() - quiet_since > 0.06:
            break
        time.sleep(0.01)
    return texts


@functools.cache
def _quiet_log() -> logging.Logger:
    """ipyparallel logs the end of every engine as a warning, into the notebook."""
    log = logging.getLogger("ddl-labs.cluster")
    log.setLevel(logging.ERROR)
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


# --- questions to the ranks -------------------------------------------------------------------


class _Question:
    """One call on every rank, and the JSON lines that come back."""

    def __init__(self, up: _Running, target: str, arguments: str):
        self._up = up
        # A student's code can print anything but this.
        self._token = f"<{secrets.token_hex(16)}>"
        self._replies: dict[int, Reply] = {}
        self._results: dict[int, ipp.AsyncResult] = {}
        self._interrupted = False
        for rank in range(up.n):
            try:
                self._results[rank] = up.client[rank].execute(
                    "__import__('utils._rank', fromlist=['answer'])"
                    f".answer({target!r}, {arguments!r}, {rank}, {self._token!r})",
                    # Silent: the count in `Out[0:3]` stays the student's own.
                    silent=True,
                    block=False,
                )
            except (IndexError, KeyError, ipp.error.IPythonError):
                self._replies[rank] = _dead(rank)

    def answers(self, timeout: float) -> list[Reply]:
        """Wait as `Ranks.ask` promises."""
        try:
            self._collect(timeout, until_error=True)
            if self._waiting():
                self._interrupt()
                self._collect(AFTER_AN_INTERRUPT)
        except KeyboardInterrupt:
            # The notebook's stop button: the ranks must not go on either.
            self._interrupt()
            raise
        for rank in self._waiting():
            self._replies[rank] = Reply(rank, "silent", error=f"no answer within {timeout:g} s")
        return [self._replies[rank] for rank in range(self._up.n)]

    def _waiting(self) -> list[int]:
        return [rank for rank in range(self._up.n) if rank not in self._replies]

    def _interrupt(self) -> None:
        self._interrupted = True
        self._up.signal("SIGINT", self._waiting())

    def _collect(self, timeout: float, until_error: bool = False) -> None:
        deadline = time.monotonic() + timeout
        while self._waiting() and time.monotonic() < deadline:
            for rank in self._waiting():
                if self._results[rank].ready():
                    self._replies[rank] = self._read(rank)
                    if until_error and self._replies[rank].status == "error":
                        deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR)
            time.sleep(0.005)

    def _read(self, rank: int) -> Reply:
        result = self._results[rank]
        # The result may arrive before the output does.
        result.wait_for_output(5)
        text = result.stdout if isinstance(result.stdout, str) else "".join(result.stdout)
        before, mark, after = text.partition(f"\n{self._token}")
        if not mark:
            return self._without_answer(rank, result)
        try:
            told = json.loads(after.partition("\n")[0])
        except ValueError:
            return Reply(rank, "error", error="its answer was cut off")
        status, kind = told["status"], told.pop("kind", None)
        if self._interrupted and kind == "KeyboardInterrupt":
            status = "silent"
        return Reply(
            rank,
            status,
            told.get("value"),
            told.get("error"),
            told.get("line"),
            before + told["stdout"],
        )

    def _without_answer(self, rank: int, result: ipp.AsyncResult) -> Reply:
        error = result.exception()
        if isinstance(error, ipp.error.EngineError) or rank not in self._up.client.ids:
            return _dead(rank)
        if isinstance(error, ipp.error.RemoteError):
            if self._interrupted and error.ename == "KeyboardInterrupt":
                return Reply(rank, "silent", error="interrupted before it could answer")
            return Reply(rank, "error", error=f"{error.ename}: {error.evalue}")
        return Reply(rank, "error", error=f"no answer was printed ({error or 'no error either'})")


def _dead(rank: int) -> Reply:
    said = "the rank is dead (os._exit, a crash inside C, out of memory): ranks.restart()"
    return Reply(rank, "error", error=said)


# --- the notebook -----------------------------------------------------------------------------


def _say(text: str) -> None:
    if get_ipython() is not None:
        print(text)


def _prepare_notebook(view: ipp.DirectView) -> None:
    """Point `%%px` at these ranks, and make what it shows the same in every run."""
    shell = get_ipython()
    if shell is None:
        return
    view.activate()
    shell.run_line_magic("pxconfig", "--progress-after=-1")
    shell.run_line_magic("colors", "nocolor")
    shell.display_formatter.mimebundle_formatter.for_type(ExecuteReply, _reproducible)


def _reproducible(reply: ExecuteReply, **kwargs: object) -> tuple[dict, dict]:
    """The reply's data without its times, ids and source, which change from run to run."""
    plain: Callable[[], str] = getattr(reply, "_plaintext", lambda: repr(reply))
    return {**reply.data, "text/plain": plain()}, {}


def _retire_magics(n: int) -> None:
    """After a stop `%%px` would talk to a closed client; let it say what to do instead."""
    shell = get_ipython()
    if shell is None:
        return

    def px(line: str, cell: str | None = None) -> None:
        raise RanksError(f"the ranks were stopped. Run `ranks = start({n})` again.")

    shell.register_magic_function(px, "line_cell", "px")


@atexit.register
def _stop_at_exit() -> None:
    if _current is not None:
        # The interpreter is going down; what can't be stopped cleanly is the watchdog's.
        with contextlib.suppress(Exception):
            _current.stop()


# Signals are sent by name, as ranks may run on another system than the kernel; the name must exist.
assert hasattr(signal, "SIGUSR1"), "the course needs Linux or macOS (on Windows: WSL)"
