"""A controller, the ranks and a client that are up, and the questions that ranks are asked."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import secrets
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
from traitlets.config import Config
from traitlets.log import get_logger

from utils.cluster import on_rank, stacks
from utils.cluster.arguments import target_of
from utils.cluster.failure import Outcome
from utils.cluster.reply import BALANCE, QUESTION, Reply
from utils.jobs import interpreter, slurm, watchdog
from utils.jobs.errors import RanksError
from utils.jobs.rank_python import Python
from utils.jobs.session import Session, Watchdog
from utils.jobs.site import settings
from utils.jobs.start_plan import ATTEMPTS, NOT_STARTED, Plan

# Seconds: until the ranks must be up; until a stopped set of ranks must have said goodbye.
START_DEADLINE = 60.0
GOODBYE_DEADLINE = 10.0

# Seconds that `ask` gives: to the other ranks once one has failed; to ranks it has interrupted.
AFTER_AN_ERROR = 3.0
AFTER_AN_INTERRUPT = 5.0

# Seconds that mpiexec gets to end after a rank has died.
LAST_WORDS_DEADLINE = 4.0
# And srun, which first gives the other ranks their time to end.
LAST_WORDS_OF_SRUN = 10.0

# Seconds for the ranks to say what happened and to meet again, after a cell that failed.
MEETING_DEADLINE = 20.0

# Seconds that a rank which moves gets for the way out of an interrupted cell, and between two looks
# at where it is: one that is at the same place twice is stuck.
SLOW, BETWEEN_LOOKS = 6.0, 0.5

# The controller asks every 0.1 s whether engines live, as it admits a new one only then (default:
# 3 s). 300 silent rounds lose a rank: a laptop that was suspended for a while must not. On other
# hosts a rank dies together with the nanny that would tell: 50 rounds.
PERIOD, MISSES, MISSES_ELSEWHERE = 100, 300, 50


class Running:
    """A controller, n ranks and a client that are up."""

    def __init__(self, plan: Plan, python: Python):
        self.plan = plan
        self._python = python
        self.n = plan.n
        self.facts: list[dict[str, Any]] = []
        self.place = ""
        self._job = ""
        self.client: ipp.Client = None  # until they are connected, which may fail
        self._session = Session(shared=plan.way.many_hosts, job=plan.way.own_job)
        self._watchdog = Watchdog(self._session)
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
        controller = self._python.for_one_process(os.environ)
        config.LocalControllerLauncher.environment = controller.environment | mark
        config.LocalControllerLauncher.controller_cmd = [
            *controller.command,
            *("-m", "ipyparallel.controller"),
        ]
        config.MPIEngineSetLauncher.environment = self.plan.environment | mark
        config.MPIEngineSetLauncher.engine_cmd = self._engine_command()
        config.MPIEngineSetLauncher.mpi_cmd = self.plan.command
        config.MPIEngineSetLauncher.mpi_args = self._mpi_args()
        # Seconds for the controller's connection file to appear (default 10: a busy laptop).
        config.MPIEngineSetLauncher.engine_args = ["--IPEngine.wait_for_url_file=60"]
        return ipp.Cluster(
            engines="mpi",
            n=self.n,
            cluster_id=self._session.mark,
            profile_dir=str(self._session.folder / "profile"),
            config=config,
            load_profile=False,
            controller_args=self._controller_args(),
            delay=0,
            # Engines read the connection file: they need not wait for it before they start.
            send_engines_connection_env=False,
            shutdown_atexit=False,
            log=_quiet_log(),
        )

    def _engine_command(self) -> list[str]:
        engine = interpreter.program("from utils.cluster.engine import main; main()")
        return [*self._python.command, *engine]

    def notes(self) -> list[str]:
        """Return what `describe` says of this start: the Slurm job of its own, the fork server."""
        reasons = {fact["not_forked"] for fact in self.facts if fact["not_forked"]}
        return [self.place] * bool(self.place) + [self._python.describe(reasons)]

    def _mpi_args(self) -> list[str]:
        # By its name a job can be found, and cancelled, when nothing else is left of it.
        own_job = self.plan.way.own_job
        return self.plan.mpi_args + ([f"--job-name={self._session.mark}"] if own_job else [])

    def _controller_args(self) -> list[str]:
        """Encryption: other users of a host, or of the network, can neither connect nor read."""
        elsewhere = self.plan.way.many_hosts
        arguments = [
            f"--ping={PERIOD}",
            f"--HeartMonitor.max_heartmonitor_misses={MISSES_ELSEWHERE if elsewhere else MISSES}",
            "--IPController.enable_curve=True",
        ]
        return arguments + ([f"--ip={reachable_address()}"] if elsewhere else [])

    def _name_roots(self) -> None:
        roots = []
        for part in (self._cluster.controller, self._cluster.engine_set):
            with contextlib.suppress(psutil.Error, AttributeError):
                roots.append((part.pid, psutil.Process(part.pid).create_time()))
        self._watchdog.tell(roots)

    def _connect(self) -> ipp.Client:
        try:
            with _encrypted_anyway(), warnings.catch_warnings():
                # Of a host whose name has no address, as in sandboxes: nobody asks for it.
                warnings.filterwarnings("ignore", "IPython could not determine IPs", RuntimeWarning)
                return self._cluster.connect_client_sync()
        except (TimeoutError, RuntimeError, OSError) as error:
            raise RanksError(f"ipyparallel's controller did not come up: {error}") from error

    def _wait_for_ranks(self) -> None:
        """Until they are there; mpiexec gets another chance where it did not start any."""
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
        queue = slurm.Waiting(self._session.mark) if self.plan.way.own_job else None
        deadline = time.monotonic() + START_DEADLINE
        try:
            while len(self.client.ids) < self.n:
                if self.over():
                    if queue is not None and (error := queue.refused(self._output_of_mpiexec())):
                        raise error
                    raise self._failed("the command ended before they were there")
                if queue is not None and not queue.begun():
                    deadline = time.monotonic() + START_DEADLINE
                if time.monotonic() > deadline:
                    up = len(self.client.ids)
                    raise self._failed(f"{up} of them are after {START_DEADLINE:.0f} s")
                time.sleep(0.01)
        except KeyboardInterrupt:
            if queue is not None:
                queue.cancelled()
            raise
        finally:
            if queue is not None:
                queue.clear()

    def _failed(self, reason: str) -> RanksError:
        plan = self.plan
        doubt = f"{said}\n" if (said := plan.launcher.doubt()) else ""
        tail = "\n".join(f"    {line}" for line in self._output_of_mpiexec().splitlines()[-25:])
        return RanksError(
            f"the {self.n} MPI ranks did not come up: {reason}.\n"
            f"Command: {' '.join(plan.command[-1:] + self._mpi_args())} ({plan.way.reason}; MPI: "
            f"{plan.launcher.version})\n"
            f"{doubt}The last lines of its output:\n{tail or '    (nothing)'}"
            f"{self._hint_for_a_job()}"
        )

    def _hint_for_a_job(self) -> str:
        job = self.plan.way.allocation
        if job is None or self.plan.way.own_job:
            return ""
        return (
            f"\nIf a node of Slurm job {job.job} ({job.nodes}) has died, it can start no ranks "
            'any more: launcher="slurm" gives them a job of their own.'
        )

    def _output_of_mpiexec(self) -> str:
        # Not from the file: the launcher removes that when it notices the end of mpiexec.
        with contextlib.suppress(OSError, AttributeError):
            return str(self._cluster.engine_set.get_output())
        return ""

    def living(self) -> list[int]:
        """Return the ranks by their numbers at the start; of fault-tolerant ranks, those alive."""
        return list(self.client.ids) if self.plan.fault_tolerant else list(range(self.n))

    def over(self) -> bool:
        """Return whether the command that started the ranks has ended, and every rank with it."""
        return not watchdog.alive(self._cluster.engine_set.process)

    def _last_words(self) -> str:
        """What mpiexec says of a rank that died, for which it ends all others first."""
        if self.plan.fault_tolerant and self.living():
            return self._output_of_mpiexec()
        by_mpiexec = self.plan.way.launcher == "mpiexec"
        wait = LAST_WORDS_DEADLINE if by_mpiexec else LAST_WORDS_OF_SRUN
        deadline = time.monotonic() + wait
        while not self.over() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self._output_of_mpiexec()

    def _get_acquainted(self) -> None:
        """Set the ranks up and check that they are one MPI world, in which engine id is rank."""
        told = json.dumps(
            {"folder": str(self._session.folder), "fault_tolerant": self.plan.fault_tolerant}
        )
        for old in self._session.folder.glob("cells-*"):
            old.unlink()
        question = Question(self, target_of(on_rank.prepare), [told] * self.n)
        replies = question.answers(START_DEADLINE)
        for reply in replies:
            if reply.status != "ok":
                raise self._failed(f"rank {reply.rank} says {reply.error or 'nothing'}")
        self.facts = [reply.value for reply in replies]
        self._check_world()
        if self.plan.way.own_job and (job := slurm.find(self._session.mark)):
            self._job = job.id
            self.place = f"They are Slurm job {job.id} on {job.nodes}."

    def _check_world(self) -> None:
        launcher = self.plan.launcher
        library = self.facts[0]["library"]
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
        if not watchdog.alive(self._cluster.controller.process):
            return False
        self._kill_ranks()
        self._cluster.stop_engines_sync()
        # Until the hub has struck the old ranks off, the new ones don't get their numbers.
        deadline = time.monotonic() + GOODBYE_DEADLINE
        while self.client.ids:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        # An author may have changed the course since, or the fork server may have been killed.
        self._python.renew()
        self._cluster.config.MPIEngineSetLauncher.engine_cmd = self._engine_command()
        self._cluster.start_engines_sync(self.n)
        self._name_roots()
        self._wait_for_ranks()
        self._get_acquainted()
        return True

    def _kill_ranks(self) -> None:
        """End the ranks of this host at once, also those whose mpiexec was killed; no one else."""
        for fact in self.facts:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(fact["pid"])
                if watchdog.carries(process, self._session.mark):
                    process.kill()

    def _end_launchers(self) -> None:
        """End the controller, which has nothing to save, and mpiexec, which has files to remove."""
        with contextlib.suppress(psutil.Error, AttributeError):
            self._cluster.controller.process.kill()
        with contextlib.suppress(psutil.Error, AttributeError):
            self._cluster.engine_set.process.terminate()

    def close(self) -> None:
        """End everything; errors on the way don't matter, the watchdog finishes the work."""
        with contextlib.suppress(Exception):
            if self.client is not None:
                self.client.close(linger=0)
        self._kill_ranks()
        self._end_launchers()
        with contextlib.suppress(Exception):
            self._cluster.stop_cluster_sync()
        self._watchdog.close()
        self._session.close()
        self._python.close()

    def signal(self, name: str, targets: list[int] | None = None, wait: float = 2.0) -> None:
        """Send a signal to ranks through ipyparallel's nannies; dead ranks are left out."""
        alive = set(self.client.ids)
        targets = sorted(alive if targets is None else alive & set(targets))
        if not targets:
            return
        # A rank that dies meanwhile makes the request fail; the others have got their signal.
        with contextlib.suppress(ipp.error.IPythonError, TimeoutError, OSError):
            self.client.send_signal(name, targets=targets, block=False).result(wait)

    def job_state(self) -> str:
        """Return the state of the ranks' own Slurm job, in Slurm's words; "" without a job."""
        return slurm.state(self._job) if self._job else ""

    def examine(self, outcome: Outcome, busy: set[int]) -> None:
        """Ask the ranks what happened in a cell that failed, and have them meet again.

        Args:
            outcome: of the cell; what the ranks say is added to it.
            busy: ranks that are not done, which cannot be asked.
        """
        dead = set(outcome.dead())
        before = sorted(dead | set(self.living()))
        if dead:
            outcome.output = self._last_words()
            outcome.over = self.over()
            outcome.job_state = self.job_state()
        if busy:
            outcome.busy = self._stuck(busy)
            busy = set(outcome.busy)
        idle = set(self.client.ids) - busy - dead
        meet = not busy and not dead
        for reply in self._ask(on_rank.after_a_failure, idle, meet=meet):
            if reply.status == "ok":
                outcome.statuses |= {s["rank"]: s for s in reply.value["statuses"]}
            outcome.fresh &= reply.status == "ok" and reply.value["fresh"]
        if self.plan.fault_tolerant:
            outcome.survivors = [rank for rank in before if rank not in dead]
        if outcome.statuses and len(outcome.statuses) == len(before) < self.n:
            # Ranks have died before, and the others have numbers from 0 on since.
            outcome.renumber({rank: number for number, rank in enumerate(before)})

    def _stuck(self, busy: set[int]) -> dict[int, str]:
        """Where those of the ranks are that do not move; who ends meanwhile was slow, not stuck.

        On a busy machine a rank may take seconds for the way out of a cell.
        """
        deadline = time.monotonic() + SLOW
        places = self._places(1.0)
        before: list[str] | None = None
        while any(places[rank] != "idle" for rank in busy) and time.monotonic() < deadline:
            now = [places[rank] for rank in sorted(busy)]
            if now == before:
                break
            before = now
            time.sleep(BETWEEN_LOOKS)
            places = self._places(1.0)
        return {rank: places[rank] for rank in busy if places[rank] != "idle"}

    def _ask(self, function: Callable[..., Any], ranks: set[int], **arguments: Any) -> list[Reply]:
        told = [json.dumps(arguments)] * self.n
        return Question(self, target_of(function), told, ranks).answers(MEETING_DEADLINE)

    def meet_again(self) -> None:
        """After an error in an answer: the ranks meet; the next answer finds no debris."""
        living = set(self.living())
        if living == set(self.client.ids):
            self._ask(on_rank.after_a_failure, living, meet=True)

    def unreceived(self, balances: list[int]) -> dict[int, tuple[str, ...]]:
        """Return the messages that no rank has received, by sender; the ranks forget them.

        Args:
            balances: of each rank that did something, how many more messages it has sent than
                received.
        """
        living = self.living()
        if len(balances) < len(living) or sum(balances) == 0:
            return {}
        replies = self._ask(on_rank.unreceived, set(living))
        return {
            living.index(reply.rank): tuple(_of_a_message(message) for message in reply.value)
            for reply in replies
            if reply.status == "ok" and reply.value
        }

    def where(self, timeout: float) -> list[str]:
        """Return a line per rank, once it stays the same, after `timeout` seconds at the latest.

        A cell that was sent a moment ago (`%%px --noblock`) may not have begun everywhere: while
        more cells are under way than ranks are busy, an idle one is looked at again.
        """
        deadline = time.monotonic() + timeout
        places = self._places(timeout)
        before: list[str] | None = None
        while time.monotonic() < deadline:
            busy = sum(place != "idle" for place in places)
            to_begin = busy < min(len(self.client.outstanding), self.n)
            if places == before and not to_begin:
                break
            time.sleep(0.02)
            before = places
            places = self._places(timeout)
        return [f"rank {rank}: {place}" for rank, place in enumerate(places)]

    def _places(self, timeout: float) -> list[str]:
        files = [self._session.folder / f"stack-{rank}" for rank in range(self.n)]
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
        frames = stacks.main_stack(dump)
        if not frames:
            return "no answer (stopped, or very busy)"
        return stacks.explain(frames, self._cells(rank))

    def _cells(self, rank: int) -> dict[str, str]:
        try:
            lines = (self._session.folder / f"cells-{rank}").read_text().splitlines()
        except OSError:
            return {}
        notes = [json.loads(line) for line in lines if line.endswith("}")]
        return {note["file"]: note["source"] for note in notes}


@contextlib.contextmanager
def _encrypted_anyway() -> Iterator[None]:
    """Without jupyter_client's warning of unsigned messages: CurveZMQ signs and encrypts these."""

    def other(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("Message signing is disabled")

    asked = get_logger()
    logger = asked.logger if isinstance(asked, logging.LoggerAdapter) else asked
    logger.addFilter(other)
    try:
        yield
    finally:
        logger.removeFilter(other)


def _of_a_message(message: dict[str, Any]) -> str:
    where = f" at {message['where']}" if message["where"] else ""
    return (
        f"sent {message['what']} to rank {message['to']}{where}, and no rank has received it: a "
        f"recv is missing, or has another tag. The message was thrown away."
    )


def _new_text(files: dict[int, tuple[Path, int]], timeout: float) -> dict[int, str]:
    """What was appended to each file after its known size, once all are quiet for 60 ms."""
    deadline = time.monotonic() + timeout
    quiet_since = time.monotonic()
    texts = dict.fromkeys(files, "")
    while time.monotonic() < deadline:
        now = {}
        for rank, (path, seen) in files.items():
            with path.open(errors="replace") as file:
                file.seek(seen)
                now[rank] = file.read()
        if now != texts:
            quiet_since = time.monotonic()
            texts = now
        if all(texts.values()) and time.monotonic() - quiet_since > 0.06:
            break
        time.sleep(0.01)
    return texts


def reachable_address() -> str:
    """Return an address at which other nodes reach this host; "*" if none is known.

    Debian gives a host's own name the address 127.0.1.1, which means something else elsewhere.
    """
    if told := settings().controller_ip:
        return told
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            return address
    return "*"


@functools.cache
def _quiet_log() -> logging.Logger:
    """ipyparallel logs the end of every engine as a warning, into the notebook."""
    log = logging.getLogger("ddl-labs.cluster")
    log.setLevel(logging.ERROR)
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


# --- questions to the ranks -------------------------------------------------------------------


class Question:
    """One call on every rank, and the JSON lines that come back.

    Args:
        up: the ranks.
        target: "package.module:function".
        arguments: JSON text for each rank, by its number at the start. A rank is sent only its own.
        ranks: the ranks to ask, by default all that live.
        of_ours: whether the function runs no code of the student.
    """

    def __init__(
        self,
        up: Running,
        target: str,
        arguments: Sequence[str],
        ranks: Iterable[int] | None = None,
        of_ours: bool = True,
    ):
        self._up = up
        self._ranks = sorted(up.living() if ranks is None else ranks)
        # A student's code can print anything but this.
        self._token = f"<{secrets.token_hex(16)}>"
        self._replies: dict[int, Reply] = {}
        self._results: dict[int, ipp.AsyncResult] = {}
        self._interrupted = False
        for rank in self._ranks:
            try:
                self._results[rank] = up.client[rank].execute(
                    f"{QUESTION}{target!r}, {arguments[rank]!r}, {rank}, {self._token!r}, "
                    f"{of_ours})",
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
        return [self._replies[rank] for rank in self._ranks]

    def _waiting(self) -> list[int]:
        return [rank for rank in self._ranks if rank not in self._replies]

    def _interrupt(self) -> None:
        self._interrupted = True
        self._up.signal("SIGINT", self._waiting())

    def _collect(self, timeout: float, until_error: bool = False) -> None:
        deadline = time.monotonic() + timeout
        while self._waiting() and time.monotonic() < deadline:
            over = self._up.over()
            for rank in self._waiting():
                if self._results[rank].ready():
                    self._replies[rank] = self._read(rank)
                    if until_error and self._replies[rank].status == "error":
                        deadline = min(deadline, time.monotonic() + AFTER_AN_ERROR)
                elif over:
                    self._replies[rank] = _dead(rank)
            time.sleep(0.005)

    def _read(self, rank: int) -> Reply:
        result = self._results[rank]
        # The result may arrive before the output does.
        result.wait_for_output(5)
        text = result.stdout if isinstance(result.stdout, str) else "".join(result.stdout)
        before, mark, after = text.partition(f"\n{self._token}")
        if not mark or not result.successful():
            return self._without_answer(rank, result)
        try:
            told = json.loads(after.partition("\n")[0])
            status = told["status"]
            kind = told.pop("kind", None)
            before += told["stdout"]
        except (ValueError, TypeError, KeyError):  # what an answer printed, not on_rank
            return Reply(rank, "error", error="its answer was cut off")
        if self._interrupted and kind == "KeyboardInterrupt":
            status = "silent"
        forged = ""
        if self._token in after or self._token in before:
            # The token is used once; whoever knows it has read the question.
            forged = "two replies came instead of one"
        elif told.get("late"):
            forged = "the rank communicated while its result was read"
        return Reply(
            rank,
            status,
            told.get("value"),
            told.get("error"),
            told.get("line"),
            before,
            balance=told.get(BALANCE, 0),
            forged=forged,
            kind=kind or "",
            open=told.get("open") and tuple(told["open"]),
            missing=told.get("missing", ""),
            lost=told.get("lost", False),
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
    said = "the rank is dead (killed, os._exit, a crash inside C, out of memory): ranks.restart()"
    return Reply(rank, "error", error=said, lost=True)
