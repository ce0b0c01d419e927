"""This machine, and what its checks ask it for, found out once, in processes with a deadline."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import secrets
import signal
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from utils.doctor.finding import Finding, error, gist, install_command, not_tested
from utils.doctor.probes import MARK, PROBES
from utils.jobs import python_command

if TYPE_CHECKING:
    from utils.jobs.start_plan import Plan

Facts = dict[str, Any]
#: Parts of probes with the variables that the course sets for its ranks.
OF_A_RANK = ("library", "all_reduce")


class Outcome(NamedTuple):
    """An outcome is what a probe told, and how it ended; `status` is None past the deadline."""

    told: list[Facts]
    errors: str
    status: int | None
    seconds: float


class Probe:
    """A process that tells facts by `probes.tell`, in a session of its own, until its deadline."""

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
        """Wait for its end, at most until the deadline; nothing of it runs afterwards."""
        left = self._deadline - (time.monotonic() - self._started)
        status = None
        output = errors = ""
        try:
            output, errors = self._process.communicate(timeout=max(left, 0.1))
            status = self._process.returncode
        except subprocess.TimeoutExpired:
            self.end()
            # A process that escaped keeps the pipes open.
            with contextlib.suppress(subprocess.TimeoutExpired):
                output, errors = self._process.communicate(timeout=2)
        facts = []
        for text in re.findall(f"{MARK}(.*?)\x03", output):
            with contextlib.suppress(ValueError):
                facts.append(json.loads(text))
        return Outcome(facts, errors, status, time.monotonic() - self._started)

    def facts(self, part: str) -> Facts:
        """Return what it told about a part; if nothing, "error" says why."""
        for facts in reversed(self.outcome.told):
            if part in facts:
                return dict(facts[part])
        if self.outcome.status is None:
            return {"error": f"no answer within {self._deadline:g} s"}
        status = self.outcome.status
        return {"error": f"ended with status {status}: {gist(self.outcome.errors)}"}

    def end(self) -> None:
        """End the process, its session and all that descend from it."""
        if self._process.poll() is not None:
            return
        family: list[Any] = []
        with contextlib.suppress(ImportError):  # the doctor also runs where psutil is missing
            import psutil  # noqa: F401 - the first thing that the other module needs

            from utils.jobs import watchdog

            family = watchdog.family(self._process.pid)
        # Asked politely, Open MPI removes its files from /dev/shm and the temporary folder.
        os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        for member in family:
            with contextlib.suppress(Exception):  # it has ended
                member.kill()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)


def probe_command(function: str, *arguments: str) -> list[str]:
    """Return the command that runs a function of `utils.doctor.probes` in a fresh Python."""
    code = f"from utils.doctor import probes; probes.{function}(*sys.argv[1:])"
    return python_command(code, *arguments)


class Machine:
    """This machine; a context manager that ends the probes.

    Attributes:
        probes: Those that `probe` has started, by part.

    Args:
        timeout: Seconds that each probe gets; PyTorch on a network drive can take half a minute.
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = timeout
        self._mark = f"doctor{os.getpid()}-{secrets.token_hex(4)}"
        self.probes: dict[str, Probe] = {}
        self._started: list[Probe] = []

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        for probe in self._started:
            probe.end()
        if "ranks" in vars(self):
            from utils.jobs import watchdog

            # Ranks that left the launcher's session still carry the mark.
            watchdog.end_all(self._mark)

    def start(
        self, command: list[str], deadline: float | None = None, env: dict[str, str] | None = None
    ) -> Probe:
        """Start a probe that does not outlive this object; `env` adds to the variables here."""
        probe = Probe(command, deadline or self.timeout, os.environ | (env or {}))
        self._started.append(probe)
        return probe

    def ask(self, *parts: str, env: dict[str, str] | None = None) -> Probe:
        """Start a probe that tells about these parts, see `probes.PROBES`."""
        return self.start(probe_command("tell_about", *parts), env=env)

    def probe(self, part: str) -> Probe:
        """Return the probe that tells about a part; the first call starts it."""
        if part not in self.probes:
            (parts,) = [parts for parts in PROBES if part in parts]
            env = self.rank_environment if part in OF_A_RANK else None
            self.probes |= dict.fromkeys(parts, self.ask(*parts, env=env))
        return self.probes[part]

    def facts(self, part: str) -> Facts:
        """Return what is known about a part; if nothing, "error" says why."""
        return self.probe(part).facts(part)

    @functools.cached_property
    def plan(self) -> Plan | Finding:
        """The course's plan for two ranks, or the finding that there is none."""
        from utils.jobs import RanksError
        from utils.jobs.start_plan import Plan, refuse_on_a_rank

        try:
            refuse_on_a_rank()
        except RanksError:
            fact = "the doctor itself runs on an MPI rank"
            return error(fact, "Run it without mpiexec or srun")
        try:
            return Plan(2, launcher="mpiexec")
        except RanksError as failure:
            # The messages of the course: what is wrong. What to do.
            fact, _, remedy = str(failure).partition(". ")
            return error(fact, remedy)

    @property
    def rank_environment(self) -> dict[str, str]:
        """What the course sets for its ranks; nothing where that fails (see "launcher")."""
        with contextlib.suppress(Exception):
            if not isinstance(self.plan, Finding):
                return self.plan.environment
        return {}

    @property
    def has_launcher(self) -> bool:
        """Can ranks be started, and is this not a rank itself? If not, see "launcher"."""
        with contextlib.suppress(Exception):
            return not isinstance(self.plan, Finding)
        return False

    @functools.cached_property
    def ranks(self) -> Outcome:
        """Two ranks, started as the labs do; needs a plan."""
        from utils.jobs import watchdog

        plan = self.plan
        if isinstance(plan, Finding):
            raise plan
        command = [plan.launcher.path, "-n", "2", *plan.mpi_args, *probe_command("tell_on_rank")]
        return self.start(command, env=plan.environment | {watchdog.VARIABLE: self._mark}).outcome

    def told_by_ranks(self, part: str) -> list[Facts]:
        """Return what each rank told about "world" or "all_reduce"; nothing if none can start."""
        if isinstance(self.plan, Finding) or "error" in self.facts("library"):
            return []
        return [facts[part] for facts in self.ranks.told if part in facts]

    def sizes(self) -> list[int]:
        """Return how many ranks each of the two sees; [2, 2] if all is well."""
        return [world["size"] for world in self.told_by_ranks("world")]


def facts_of(machine: Machine, part: str, extra: str = "") -> Facts:
    """Return what is known about a part. Without that, the finding is: install it."""
    facts = machine.facts(part)
    if "error" in facts:
        raise error(facts["error"], install_command(extra))
    return facts


def needs_pytorch(machine: Machine) -> Facts:
    """Return what is known about PyTorch. Without that, the finding is: not tested."""
    facts = machine.facts("torch")
    if "error" in facts:
        raise not_tested("PyTorch")
    return facts
