"""The facts about this machine, each found out only once, in a process with a deadline."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.doctor.finding import Finding, SettledError, error, gist, install_command, not_tested
from utils.doctor.probes import MARK, PROBES
from utils.jobs import POSIX, python_command

if TYPE_CHECKING:
    from utils.jobs.start_plan import Plan

Facts = dict[str, Any]
#: The parts whose probes get the variables that the course sets for its ranks.
OF_A_RANK = ("library", "all_reduce")


class Outcome(NamedTuple):
    """The facts that a probe printed, and how it ended; `status` is None after the deadline."""

    told: list[Facts]
    errors: str
    status: int | None
    seconds: float


class Probe:
    """A process in a separate session that prints facts (`probes.tell`) until its deadline."""

    def __init__(self, command: list[str], deadline: float, env: dict[str, str]):
        self._deadline = deadline
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )

    @functools.cached_property
    def outcome(self) -> Outcome:
        """Wait until the process ends, and end it at the deadline; return its outcome."""
        left = self._deadline - (time.monotonic() - self._started)
        status = None
        output = errors = ""
        try:
            output, errors = self._process.communicate(timeout=max(left, 0.1))
            status = self._process.returncode
        except subprocess.TimeoutExpired:
            self.end()
            # A process that escaped from the session keeps the pipes open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = self._process.communicate(timeout=2)
        facts = []
        for text in re.findall(f"{MARK}(.*?)\x03", output):
            with contextlib.suppress(ValueError):
                facts.append(json.loads(text))
        return Outcome(facts, errors, status, time.monotonic() - self._started)

    def facts(self, part: str) -> Facts:
        """Return the probe's facts about a part; if there are none, "error" says why."""
        for facts in reversed(self.outcome.told):
            if part in facts:
                return dict(facts[part])
        if self.outcome.status is None:
            return {"error": f"no answer within {self._deadline:g} s"}
        status = self.outcome.status
        return {"error": f"ended with status {status}: {gist(self.outcome.errors)}"}

    def end(self) -> None:
        """End the process, its session, and all its descendants."""
        if self._process.poll() is not None:
            return
        family: list[Any] = []
        with contextlib.suppress(ImportError):  # the doctor must run even if psutil is missing
            import psutil  # noqa: F401 - watchdog imports it first

            from utils.jobs import watchdog

            family = watchdog.family(self._process.pid)
        # At a SIGTERM, Open MPI removes its files from /dev/shm and the temporary folder.
        os.killpg(self._process.pid, signal.SIGTERM) if POSIX else self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        for member in family:
            with contextlib.suppress(Exception):  # the process has ended
                member.kill()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL) if POSIX else self._process.kill()
        self._process.wait(5)


def probe_command(function: str, *arguments: str) -> list[str]:
    """Return the command that runs a function of `utils.doctor.probes` in a fresh Python."""
    code = f"from utils.doctor import probes; probes.{function}(*sys.argv[1:])"
    return python_command(code, *arguments)


class Machine:
    """This machine; a context manager that ends the probes.

    Attributes:
        probes: The probes that `probe` has started, by part.

    Args:
        timeout: Seconds for each probe; importing PyTorch from a network drive can take 30 s.
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = timeout
        self._mark = f"doctor{os.getpid()}-{secrets.token_hex(4)}"
        self.probes: dict[str, Probe] = {}
        self._started: list[Probe] = []
        self._may_have_ranks = False

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        for probe in self._started:
            probe.end()
        if self._may_have_ranks:
            from utils.jobs import watchdog

            # Even ranks that left the launcher's session have the mark in their environment.
            watchdog.end_all(self._mark)

    def start(
        self, command: list[str], deadline: float | None = None, env: dict[str, str] | None = None
    ) -> Probe:
        """Start a probe that ends with this object; `env` adds variables to this environment."""
        probe = Probe(command, deadline or self.timeout, os.environ | (env or {}))
        self._started.append(probe)
        return probe

    def ask(self, *parts: str, env: dict[str, str] | None = None) -> Probe:
        """Start a probe that reports about these parts, see `probes.PROBES`."""
        return self.start(probe_command("tell_about", *parts), env=env)

    def probe(self, part: str) -> Probe:
        """Return the probe that reports about a part; the first call starts it."""
        if part not in self.probes:
            (parts,) = [parts for parts in PROBES if part in parts]
            env = self.rank_environment if part in OF_A_RANK else None
            self.probes |= dict.fromkeys(parts, self.ask(*parts, env=env))
        return self.probes[part]

    def facts(self, part: str) -> Facts:
        """Return the known facts about a part; if there are none, "error" says why."""
        return self.probe(part).facts(part)

    @functools.cached_property
    def without_mpi(self) -> bool:
        """Return whether ranks run inside the kernel, because they can't be processes here."""
        return not POSIX or importlib.util.find_spec("mpi4py") is None

    @functools.cached_property
    def plan(self) -> Plan | Finding:
        """Return the course's plan for two ranks, or the finding that there is no plan."""
        from utils.jobs import RanksError
        from utils.jobs.start_plan import Plan, refuse_on_a_rank

        try:
            refuse_on_a_rank()
        except RanksError:
            fact = "the doctor itself runs on an MPI rank"
            return error(fact, "run the doctor without mpiexec or srun")
        try:
            return Plan(2, launcher="mpiexec")
        except RanksError as failure:
            # The course's messages first say what is wrong, and in a second sentence what to do.
            fact, _, remedy = str(failure).partition(". ")
            return error(fact, remedy)

    @property
    def rank_environment(self) -> dict[str, str]:
        """Return the variables that the course sets for its ranks; {} if it can't start ranks."""
        with contextlib.suppress(Exception):
            if not isinstance(self.plan, Finding):
                return self.plan.environment
        return {}

    @property
    def has_launcher(self) -> bool:
        """Return whether ranks can be started here; if not, the line "launcher" says why."""
        with contextlib.suppress(Exception):
            return not isinstance(self.plan, Finding)
        return False

    @functools.cached_property
    def ranks(self) -> Outcome:
        """Return the outcome of two ranks, started as in labs; raise SettledError if impossible."""
        from utils.jobs import watchdog

        plan = self.plan
        if isinstance(plan, Finding):
            raise SettledError(plan)
        command = [plan.launcher.path, "-n", "2", *plan.mpi_args, *probe_command("tell_on_rank")]
        # Before the start: a SIGTERM during it would leave a launcher that nothing else knows.
        self._may_have_ranks = True
        return self.start(command, env=plan.environment | {watchdog.VARIABLE: self._mark}).outcome

    def told_by_ranks(self, part: str) -> list[Facts]:
        """Return each rank's facts about "world" or "all_reduce"; [] if no rank can start."""
        if isinstance(self.plan, Finding) or "error" in self.facts("library"):
            return []
        return [facts[part] for facts in self.ranks.told if part in facts]

    def sizes(self) -> list[int]:
        """Return how many ranks each of the two ranks sees: [2, 2] without a problem."""
        return [world["size"] for world in self.told_by_ranks("world")]


def facts_of(machine: Machine, part: str, extra: str = "") -> Facts:
    """Return the known facts about a part, or raise the finding that it must be installed."""
    facts = machine.facts(part)
    if "error" in facts:
        raise SettledError(error(facts["error"], install_command(extra)))
    return facts


def needs_pytorch(machine: Machine) -> Facts:
    """Return the known facts about PyTorch, or raise the finding that it wasn't tested."""
    facts = machine.facts("torch")
    if "error" in facts:
        raise SettledError(not_tested("PyTorch"))
    return facts
