"""The running ranks of a notebook: ipyparallel's controller, engines and client."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import ipyparallel as ipp
import psutil
from traitlets.config import Config
from traitlets.log import get_logger

from utils.cluster import rank_side, stacks
from utils.cluster.running import Running
from utils.jobs import RanksError, launch_variables, python_words, slurm, watchdog
from utils.jobs.mpi_job import ATTEMPTS, NOT_STARTED, Python
from utils.jobs.session import Session
from utils.jobs.site import settings
from utils.jobs.start_plan import Plan

# Seconds in which the ranks must have started, and in which stopped ranks must have deregistered.
START_DEADLINE = 60.0
GOODBYE_DEADLINE = 10.0
# Seconds that mpiexec gets to end after a rank has died; srun waits for the other ranks first.
LAST_WORDS = 10.0

# The controller asks every 0.1 s (default: 3 s) which engines are alive, because it admits a new
# engine only then. A rank counts as lost after 300 silent rounds, so that a laptop may be suspended
# for a while. On other hosts a rank dies together with the nanny that would report it: 50 rounds.
PERIOD = 100
MISSES = 300
MISSES_ELSEWHERE = 50

# ipyparallel's own log warns whenever an engine ends, so it gets a logger that prints nothing.
QUIET_LOG = logging.getLogger("ddl-labs.cluster")
QUIET_LOG.addHandler(logging.NullHandler())
QUIET_LOG.propagate = False

DEAD = "dead (call ranks.restart() for fresh ranks)"


class Processes(Running):
    """A running controller with n ranks and a client."""

    def __init__(self, plan: Plan, python: Python):
        super().__init__(plan.n, plan.fault_tolerant)
        self.plan = plan
        self._python = python
        self._job: slurm.Job | None = None  # the ranks' own Slurm job, once it is known
        self.client: ipp.Client = None  # until it is connected, which may fail
        self._session = Session(shared=plan.way.many_hosts, job=plan.way.own_job)
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
        mark = self._session.environment
        config = Config()
        controller = config.LocalControllerLauncher
        controller.controller_cmd = [*self._python.command, "-m", "ipyparallel.controller"]
        controller.environment = self._python.outside_mpiexec() | mark
        engines = config.MPIEngineSetLauncher
        engines.environment = self.plan.environment | mark
        engines.engine_cmd = self._engine_command()
        engines.mpi_cmd = self.plan.command
        engines.mpi_args = self._mpi_args()
        # Seconds for the controller's connection file to appear (default: 10, too few if busy).
        engines.engine_args = ["--IPEngine.wait_for_url_file=60"]
        return ipp.Cluster(
            engines="mpi",
            n=self.n,
            cluster_id=self._session.mark,
            profile_dir=str(self._session.folder / "profile"),
            config=config,
            load_profile=False,
            controller_args=self._controller_args(),
            delay=0,
            # Engines read the connection file themselves, so they may start before it exists.
            send_engines_connection_env=False,
            shutdown_atexit=False,
            log=QUIET_LOG,
        )

    def _engine_command(self) -> list[str]:
        engine = python_words("from utils.cluster.engine import main; main()")
        return [*self._python.command, *engine]

    @property
    def folder(self) -> Path:
        """Return the folder that the kernel and its ranks share."""
        return self._session.folder

    def notes(self) -> list[str]:
        """Return what `describe` says about this start: its separate Slurm job, the fork server."""
        reasons = {fact["not_forked"] for fact in self.facts if fact["not_forked"]}
        job = self._job
        place = [f"The ranks are Slurm job {job.id} on {job.nodes}."] if job else []
        return [*place, self._python.describe(reasons)]

    def _mpi_args(self) -> list[str]:
        # By its name, a job can be found and cancelled even if everything else about it is lost.
        own_job = self.plan.way.own_job
        return self.plan.mpi_args + ([f"--job-name={self._session.mark}"] if own_job else [])

    def _controller_args(self) -> list[str]:
        elsewhere = self.plan.way.many_hosts
        arguments = [
            f"--ping={PERIOD}",
            f"--HeartMonitor.max_heartmonitor_misses={MISSES_ELSEWHERE if elsewhere else MISSES}",
            # Encryption: other users of the host or the network can neither connect nor read.
            "--IPController.enable_curve=True",
        ]
        return arguments + ([f"--ip={reachable_address()}"] if elsewhere else [])

    def _name_roots(self) -> None:
        parts = (self._cluster.controller, self._cluster.engine_set)
        pids = [getattr(part, "pid", None) for part in parts]
        self._session.watch(pid for pid in pids if pid is not None)

    def _connect(self) -> ipp.Client:
        try:
            with _encrypted_anyway(), warnings.catch_warnings():
                # A host's name may have no address, for example in a sandbox, and needs none.
                warnings.filterwarnings("ignore", "IPython could not determine IPs", RuntimeWarning)
                return self._cluster.connect_client_sync()
        except (TimeoutError, RuntimeError, OSError) as error:
            raise RanksError(f"ipyparallel's controller did not start: {error}") from error

    def _wait_for_ranks(self) -> None:
        """Wait until the ranks have started; run mpiexec again if it started none of them."""
        for _ in range(ATTEMPTS - 1):
            try:
                return self._wait_for_these_ranks()
            except RanksError:
                if NOT_STARTED not in self._output_of_mpiexec():
                    raise
            self._cluster.stop_engines_sync()
            self._cluster.start_engines_sync(self.n)
            self._name_roots()
        return self._wait_for_these_ranks()

    def _wait_for_these_ranks(self) -> None:
        """Wait for the ranks; the time that their job spends in the queue does not count."""
        queue = slurm.Waiting(self._session.mark) if self.plan.way.own_job else None
        deadline = time.monotonic() + START_DEADLINE
        with queue or contextlib.nullcontext():
            while len(self.client.ids) < self.n:
                if self.over():
                    refused = queue.refused(self._output_of_mpiexec()) if queue else None
                    raise refused or self._failed("the command ended before they had started")
                if queue and not queue.begun():
                    deadline = time.monotonic() + START_DEADLINE
                if time.monotonic() > deadline:
                    up = len(self.client.ids)
                    raise self._failed(f"after {START_DEADLINE:.0f} s, {up} of them are running")
                time.sleep(0.01)

    def _failed(self, reason: str) -> RanksError:
        plan = self.plan
        command = " ".join(plan.command[-1:] + self._mpi_args())
        lines = [
            f"the {self.n} MPI ranks did not start: {reason}.",
            f"Command: {command} ({plan.way.reason}; MPI: {plan.launcher.version})",
        ]
        if doubt := plan.launcher.doubt():
            lines.append(doubt)
        if settings := launch_variables.settings():
            lines.append(
                f"Your environment configures MPI: {', '.join(settings)}. If that may be the "
                "reason, unset these variables where you start Jupyter, and restart the kernel."
            )
        lines.append("The last lines of its output:")
        output = self._output_of_mpiexec().splitlines()[-25:]
        lines += [f"    {line}" for line in output or ["(nothing)"]]
        job = plan.way.allocation
        if job is not None and not plan.way.own_job:
            lines.append(
                f"If a node of Slurm job {job.job} ({job.nodes}) has died, this job can't start "
                'ranks. Pass launcher="slurm" to start them as a separate job.'
            )
        return RanksError("\n".join(lines))

    def _output_of_mpiexec(self) -> str:
        # Not from the file, which the launcher removes when it notices that mpiexec has ended.
        with contextlib.suppress(OSError, AttributeError):
            return str(self._cluster.engine_set.get_output())
        return ""

    def living(self) -> list[int]:
        """Return the ranks' numbers at the start, without fault-tolerant ranks that have died."""
        return list(self.client.ids) if self.plan.fault_tolerant else list(range(self.n))

    def over(self) -> bool:
        """Return whether the command that started the ranks has ended, and every rank with it."""
        return not watchdog.alive(self._cluster.engine_set.process)

    def last_words(self) -> str:
        """Return what mpiexec says about a rank that died; it ends all other ranks before."""
        if self.plan.fault_tolerant and self.living():
            return self._output_of_mpiexec()
        deadline = time.monotonic() + LAST_WORDS
        while not self.over() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._output_of_mpiexec()

    def _get_acquainted(self) -> None:
        """Set up the ranks, and check that they are one MPI world where engine id equals rank."""
        for old in self.folder.glob("cells-*"):
            old.unlink()
        replies = self.ask(
            rank_side.prepare,
            timeout=START_DEADLINE,
            folder=str(self.folder),
            fault_tolerant=self.plan.fault_tolerant,
        )
        for reply in replies:
            if reply.status != "ok":
                raise self._failed(f"rank {reply.rank} replied: {reply.error or 'nothing'}")
        self.facts = [reply.value for reply in replies]
        self._check_world()
        if self.plan.way.own_job:
            self._job = slurm.find(self._session.mark) or self._job

    def _check_world(self) -> None:
        launcher = self.plan.launcher
        library = self.facts[0]["library"]
        if any(fact["size"] != self.n for fact in self.facts):
            sizes = sorted({fact["size"] for fact in self.facts})
            raise RanksError(
                f"{self.n} ranks were started, but they see {sizes} ranks, because the launcher "
                f"{launcher.path} ({launcher.version}) does not belong to the MPI library that "
                f"mpi4py loads ({library}). Put the mpiexec of this library first on PATH (on a "
                "cluster, `module load` the MPI that mpi4py was built with), or set MPI4PY_LIBMPI "
                "to the libmpi of this launcher."
            )
        ranks = [fact["rank"] for fact in self.facts]
        if ranks != list(range(self.n)):
            raise RanksError(
                f"ipyparallel's engines 0 to {self.n - 1} are the MPI ranks {ranks}, which is "
                "another order. Call start() again, and report this message if it comes back."
            )

    def replace_ranks(self) -> bool:
        """Stop the ranks and start new ranks; return False if the controller is unusable."""
        if not watchdog.alive(self._cluster.controller.process):
            return False
        self._kill_ranks()
        self._cluster.stop_engines_sync()
        # The new ranks get the old ranks' numbers only after the hub has removed the old ranks.
        deadline = time.monotonic() + GOODBYE_DEADLINE
        while self.client.ids:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        # An author may have changed the course by now, or the fork server may have been killed.
        before = self._python
        self._python = Python(self.plan)
        before.close()
        self._cluster.config.MPIEngineSetLauncher.engine_cmd = self._engine_command()
        self._cluster.start_engines_sync(self.n)
        self._name_roots()
        self._wait_for_ranks()
        self._get_acquainted()
        return True

    def _kill_ranks(self) -> None:
        """Kill this host's ranks at once, even if their mpiexec was killed, and nothing else."""
        for fact in self.facts:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(fact["pid"])
                if watchdog.carries(process, self._session.mark):
                    process.kill()

    def close(self) -> None:
        """End everything; ignore errors, because the watchdog finishes the work."""
        with contextlib.suppress(Exception):
            if self.client is not None:
                self.client.close(linger=0)
        self._kill_ranks()
        # The controller has nothing to save, so it is killed; mpiexec has files to remove.
        with contextlib.suppress(psutil.Error, AttributeError):
            self._cluster.controller.process.kill()
        with contextlib.suppress(psutil.Error, AttributeError):
            self._cluster.engine_set.process.terminate()
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        self._session.close()
        self._python.close()

    def send(self, cells: Mapping[int, str]) -> dict[int, ipp.AsyncResult]:
        """Send a silent cell to each of these ranks; the ranks that are gone have no result."""
        sent = {}
        for rank, cell in cells.items():
            with contextlib.suppress(IndexError, KeyError, ipp.error.IPythonError):
                sent[rank] = self.client[rank].execute(cell, silent=True, block=False)
        return sent

    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Send a signal to ranks through ipyparallel's nannies; dead ranks are left out."""
        alive = set(self.client.ids)
        targets = sorted(alive if targets is None else alive & set(targets))
        if not targets:
            return
        # If a rank dies at this moment, the request fails, but the others have got their signal.
        with contextlib.suppress(ipp.error.IPythonError, TimeoutError, OSError):
            self.client.send_signal(name, targets=targets, block=False).result(wait)

    def job_state(self) -> str:
        """Return the state of the ranks' own Slurm job, in Slurm's words; "" without a job."""
        return slurm.state(self._job.id) if self._job else ""

    def places(self, timeout: float) -> list[str]:
        """Return the place of each rank, in words."""
        looked = stacks.Look(self.folder, range(self.n))
        alive = set(self.client.ids)
        self.signal("SIGUSR1", wait=timeout)
        dumps = looked.dumps(alive, timeout)
        # A rank that wrote nothing may have died since.
        alive = {rank for rank in dumps if dumps[rank] or rank in self.client.ids}
        return [
            stacks.place(dumps[rank], self.folder / f"cells-{rank}") if rank in alive else DEAD
            for rank in range(self.n)
        ]


@contextlib.contextmanager
def _encrypted_anyway() -> Iterator[None]:
    """Drop jupyter_client's warning about unsigned messages, because CurveZMQ encrypts them."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Message signing is disabled")

    asked = get_logger()
    logger = asked.logger if isinstance(asked, logging.LoggerAdapter) else asked
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def reachable_address() -> str:
    """Return an address at which other nodes reach this host; "*" if none is known.

    Debian maps a host's own name to 127.0.1.1, an address that no other node can use.
    """
    if told := settings().controller_ip:
        return told
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    return "*"
