"""No launcher makes a program with our backend installed train alone, without an error.

Every launcher starts `launcher_program.py`, with the tested PyTorch and with 2.15.
`LAUNCHER_TABLE=file` has what came of it written to a file as a Markdown table.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
import tomllib
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import launcher_program
import pytest
import slurm_tools
from launcher_program import REQUESTS
from mpi_jobs import find_mpiexec, mpi_environment, run_tree
from places import ROOT

from torch_mpi import launcher
from torch_mpi.compat import minor
from torch_mpi.launcher import Announcement, LauncherError
from utils.doctor import wheels as install

pytestmark = pytest.mark.timeout(300)

COURSE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OTHER = "2.15"
PROGRAM = Path(launcher_program.__file__)
# Seconds for one launcher, and for an error to come.
DEADLINE, SOON = 120, 2

# What comes of each request: processes that communicate by a backend, "alone" if they rightly or
# by Accelerate's own choice make no group, or the kind of the error.
REFUSED = ("LauncherError", "gloo", "gloo", "gloo")
NO_RANK = "ValueError"  # PyTorch says that RANK is missing
EXPECTED = {
    "python": ("mpi", NO_RANK, NO_RANK, "alone"),
    "mpiexec": ("mpi", NO_RANK, NO_RANK, "mpi"),
    "srun --mpi=pmix": ("mpi", NO_RANK, NO_RANK, "alone"),
    "srun --mpi=none": ("LauncherError", NO_RANK, NO_RANK, "alone"),
    "torchrun": REFUSED,
    "accelerate launch": REFUSED,
    "mp.spawn": REFUSED,
    "debug_launcher": REFUSED,
}


# --- two versions of PyTorch --------------------------------------------------------------------


@pytest.fixture(scope="module", params=["tested", OTHER])
def python(request, tmp_path_factory) -> Iterator[str]:
    """A Python with the backend, Accelerate, and a version of PyTorch."""
    if request.param == "tested":
        yield sys.executable
        return
    folder = tmp_path_factory.mktemp("pytorch") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    # PyTorch's own index first: its builds come without CUDA and need nothing else.
    env = os.environ | {"UV_HTTP_RETRIES": "0", "UV_HTTP_TIMEOUT": "60"}
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--python", str(python)]
    for options in (["--no-deps", "--index-url", install.cpu_index()], []):
        words = [*command, f"torch=={OTHER}.*", *options]
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=140)
        if done.returncode == 0:
            break
    else:
        pytest.skip(f"no index has PyTorch {OTHER}: {done.stderr.strip()[-300:]}")
    base = {"base": str(folder), "platbase": str(folder)}
    paths = [sysconfig.get_path("purelib"), ROOT / "utils" / "mpi"]
    others = Path(sysconfig.get_path("purelib", vars=base), "others.pth")
    others.write_text("".join(f"{path}\n" for path in paths), encoding="utf-8")
    yield str(python)
    shutil.rmtree(folder)  # 5 GB where only builds with CUDA were found


def variables() -> dict[str, str]:
    """The environment of the launchers. mpi4py looks for its library beside its own Python."""
    env = mpi_environment() | {"PYTHONWARNINGS": "ignore"}
    env["PATH"] = os.pathsep.join([str(Path(find_mpiexec()).parent), env["PATH"]])
    if libraries := [str(path) for path in Path(sys.prefix, "lib").glob("libmpi.*")]:
        env["MPI4PY_LIBMPI"] = max(libraries, key=len)
    return env


def free_ports() -> str:
    """A free port for each request."""
    sockets = [socket.socket() for _ in REQUESTS]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    numbers = [str(one.getsockname()[1]) for one in sockets]
    for one in sockets:
        one.close()
    return ",".join(numbers)


# --- the table ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(request) -> Iterator[list[str]]:
    """Collects the rows; shown after the last one."""
    rows: list[str] = []
    yield rows
    head = ["launcher", "PyTorch", *REQUESTS, "is_mpi_available"]
    text = "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows, ""])
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n\n{text}")
    if path := os.environ.get("LAUNCHER_TABLE"):
        Path(path).write_text(text, encoding="utf-8")


def commands(python: str) -> dict[str, list[str]]:
    """What starts the program, without the program and its arguments."""
    port = free_ports().split(",")[0]
    accelerate = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    return {
        "python": [python],
        "mpiexec": [find_mpiexec(), "-n", "2", "--bind-to", "none", python],
        "torchrun": [python, "-m", "torch.distributed.run", "--nproc_per_node=2",
                     f"--master_port={port}"],
        "accelerate launch": [python, "-m", "accelerate.commands.launch", *accelerate,
                              "--dynamo_backend=no", f"--main_process_port={port}"],
        "mp.spawn": [python],
        "debug_launcher": [python],
    }  # fmt: skip


WAYS = {"mp.spawn": ["spawn"], "debug_launcher": ["debug_launcher"]}


@pytest.mark.parametrize("name", [name for name in EXPECTED if not name.startswith("srun")])
def test_no_launcher_makes_processes_that_train_alone_without_an_error(
    python, name, table, tmp_path
):
    if find_mpiexec() is None:
        pytest.skip("no mpiexec")
    command = [*commands(python)[name], PROGRAM, tmp_path, free_ports(), *WAYS.get(name, [])]
    done = run_tree([*map(str, command)], timeout=DEADLINE, env=variables(), cwd=tmp_path)
    processes = [json.loads(path.read_text()) for path in tmp_path.glob("*.json")]
    assert processes, done.stderr
    judge(name, processes, table)


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("srun")])
def test_srun_makes_no_ranks_that_train_alone_without_an_error(python, name, table, slurm_cluster):
    # The nodes see the state's folder only, so PyTorch is linked into it.
    folder = slurm_cluster.state / f"{name.split('=')[1]}-{time.monotonic_ns()}"
    folder.mkdir()
    seen = slurm_tools.STATE / folder.name
    if python != sys.executable:
        tree = Path(python).parents[1]
        subprocess.run(["cp", "-al", str(tree), str(folder / "venv")], check=True, timeout=60)
        python = seen / "venv" / "bin" / "python"
    env = {key: value for key, value in variables().items() if key.startswith(("OMP", "MPI", "PY"))}
    slurm_cluster.run(
        *name.split(), "-n2", python, PROGRAM, seen, free_ports(), timeout=DEADLINE, env=env
    )
    judge(name, [json.loads(path.read_text()) for path in folder.glob("*.json")], table)


def judge(name: str, processes: list[dict], table: list[str]) -> None:
    """Add a row to the table, and compare it with what is expected."""
    assert len(processes) == (1 if name == "python" else launcher_program.SIZE)
    cells = [outcome([one[request] for one in processes]) for request in REQUESTS]
    available = {one["available"] for one in processes}
    version = processes[0]["torch"].partition("+")[0]
    said = [name, version, *(text for _, text in cells), "/".join(map(str, available))]
    table.append(f"| {' | '.join(said)} |")
    assert tuple(kind for kind, _ in cells) == EXPECTED[name], processes
    assert available == {EXPECTED[name][0] == "mpi"}
    for one in processes:
        if one["mpi"].get("error"):
            assert re.search(r"mpiexec|--mpi=pmix", one["mpi"]["said"])


def outcome(found: list[dict]) -> tuple[str, str]:
    """What came of a request in all processes: its kind, and in words."""
    errors = {one.get("error") for one in found}
    if errors != {None}:
        assert len(errors) == 1, found
        seconds = max(one["seconds"] for one in found)
        assert seconds < SOON, found
        return errors.pop(), f"{found[0]['error']} after {seconds:.2f} s"
    (backend,) = {one["backend"] for one in found}
    if backend is None:
        return "alone", "no process group"
    # Every process is a rank of its own, and the sum is that of all of them.
    assert sorted(one["rank"] for one in found) == list(range(len(found))), found
    assert {(one["size"], one["sum"]) for one in found} == {(len(found), len(found))}, found
    return backend, f"{backend}, ranks of {len(found)}"


# --- the command in the error works ---------------------------------------------------------------

TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("mpi")
print(f"rank {dist.get_rank()} of {dist.get_world_size()}")
"""


def run(*command: object, cwd: Path, **more: str) -> subprocess.CompletedProcess:
    words = [*map(str, command)]
    return run_tree(words, timeout=DEADLINE, env=variables() | more, cwd=cwd)


def command_in(text: str) -> list[str]:
    """The command that an error of a rank names, with this Python."""
    (words,) = set(re.findall(r"`([^`]*)`", text))
    return [sys.executable if word == "python" else word for word in words.split()]


def test_the_command_in_the_error_gives_the_ranks_that_torchrun_announced(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    torchrun = [*commands(sys.executable)["torchrun"], "train.py"]
    refused = run(*torchrun, cwd=tmp_path)
    assert refused.returncode
    error = re.findall(r"LauncherError: (.*)", refused.stderr)[0]
    assert "torchrun says that this process is rank" in error
    assert sorted(run(*command_in(error), cwd=tmp_path).stdout.splitlines()) == [
        "rank 0 of 2",
        "rank 1 of 2",
    ]


def test_mpiexec_inside_a_torchrun_child_is_refused_with_a_command_that_works(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    mpiexec = [find_mpiexec(), "-n", "2", "--bind-to", "none", sys.executable, "train.py"]
    child = {"RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}
    refused = run(*mpiexec, cwd=tmp_path, **child)
    assert refused.returncode
    error = re.findall(r"LauncherError: (.*)", refused.stderr)[0]
    assert "torchrun says that this process is rank 1 of 4" in error
    again = run(*command_in(error), cwd=tmp_path, **child)
    assert sorted(again.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


# --- what an import runs --------------------------------------------------------------------------

OURS = "print(*sorted(name for name in sys.modules if name.startswith(('torch_mpi', 'mpi4py'))))"


def test_importing_pytorch_runs_one_small_module_of_ours_and_no_mpi(python, tmp_path):
    done = run(python, "-c", f"import sys, torch; {OURS}", cwd=tmp_path)
    assert done.stdout.split() == ["torch_mpi", "torch_mpi.autoload"], done.stderr


def test_pytorch_finds_the_backend_when_a_program_asks_for_it_without_autoload(python, tmp_path):
    """By the entry point of PyTorch 2.14; PyTorch takes the first one that is named "mpi"."""
    code = f"import sys, torch; print(torch.__version__); {OURS}\n{TRAIN}"
    points = COURSE["entry-points"]["torch.distributed.backends"]
    info = tmp_path / "torch_mpi-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-mpi\nVersion: 0\n")
    lines = [f"{name} = {function}" for name, function in points.items()]
    text = "\n".join(["[torch.distributed.backends]", *lines, ""])
    (info / "entry_points.txt").write_text(text)
    more = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "PYTHONPATH": str(tmp_path)}
    done = run(python, "-c", code, cwd=tmp_path, **more)
    if minor(done.stdout.split()[0]) < (2, 14):
        pytest.skip("PyTorch 2.13 has no such entry points")
    assert done.stdout.splitlines()[1:] == ["", "rank 0 of 1"], done.stderr


# --- below mpiexec --------------------------------------------------------------------------------


def test_a_wrapper_below_mpiexec_may_export_rank_and_world_size_of_mpi(mpiexec, tmp_path):
    code = "import os; os.environ |= {'RANK': os.environ['OMPI_COMM_WORLD_RANK'], "
    done = mpiexec(2, code + f"'WORLD_SIZE': '2'}}\n{TRAIN}")
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]


def test_numbers_that_pytorch_ignores_are_an_error_if_they_are_not_those_of_mpi(mpiexec):
    # Wrong on both: prterun 4 may hang if one rank ends and the other is in MPI_Init.
    code = TRAIN.replace('"mpi"', '"mpi", rank=0, world_size=3')
    done = mpiexec(2, code, check=False)
    assert done.returncode
    assert "Your call of init_process_group says that this process is rank 0 of 3" in done.stderr


SPAWN = """
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp

def child(index):
    dist.init_process_group("mpi")
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}\\n", end="", flush=True)

if __name__ == "__main__":
    mp.start_processes(child, nprocs=int(sys.argv[1]), start_method=sys.argv[2])
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_rank_may_leave_mpi_to_one_child_but_not_to_two(mpiexec, tmp_path, method):
    path = tmp_path / "train.py"
    path.write_text(SPAWN)
    # A forked child leaves without MPI_Finalize, which mpiexec reports at the end.
    one = mpiexec(2, path, 1, method, check=method == "spawn")
    assert sorted(one.stdout.splitlines()) == ["rank 0 of 2", "rank 1 of 2"]
    if sys.platform == "linux":
        two = mpiexec(2, path, 2, method, check=False)
        assert two.returncode
        assert "already communicates as this rank" in two.stderr
        assert "Segmentation" not in two.stderr


# --- what launchers put into the environment ------------------------------------------------------

ALONE = {}
BATCH = {"SLURM_JOB_ID": "3", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
STEP = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}
STEP_OF_ONE = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
OMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}
PMI = {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2"}
TORCHRUN = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "none"}
LAUNCHED = (
    *("OMPI_COMM_WORLD_", "PMI_", "PMIX_", "MV2_", "SLURM_", "RANK", "WORLD_SIZE"),
    *("TORCHELASTIC", "ACCELERATE_"),
)


@pytest.fixture
def environment(monkeypatch) -> Callable[[dict[str, str]], None]:
    """Replaces the variables of launchers by others."""

    def replace(names: dict[str, str]) -> None:
        for name in [name for name in os.environ if name.startswith(LAUNCHED)]:
            monkeypatch.delenv(name)
        for name, value in names.items():
            monkeypatch.setenv(name, value)

    return replace


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "announced"),
    [
        (ALONE, None),
        (BATCH, None),
        (TORCHRUN, None),
        (STEP, Announcement(launcher.SLURM, 4, 3)),
        (STEP | OMPI, Announcement(launcher.OPEN_MPI, 2, 1)),
        (STEP | PMI, Announcement(launcher.HYDRA, 2, 1)),
        (TORCHRUN | OMPI, Announcement(launcher.OPEN_MPI, 2, 1)),
        ({"PMIX_RANK": "1"}, Announcement(launcher.PMIX, None, 1)),
    ],
)
def test_the_mpi_launcher_nearest_to_a_rank_says_which_one_it_is(environment, names, announced):
    environment(names)
    assert launcher.mpi_launcher() == announced


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (ALONE, None),
        (BATCH, None),
        (ALONE, Announcement("The call", 1, 0)),
        ({"WORLD_SIZE": "1", "RANK": "0"}, None),
        (OMPI, None),
        (PMI, None),
        (OMPI | {"WORLD_SIZE": "2", "RANK": "1"}, None),
        (OMPI | {"WORLD_SIZE": "2"}, Announcement("The call", 2, 1)),
        (STEP | {"WORLD_SIZE": "4"}, None),
        (TORCHRUN | OMPI, None),
        ({"RANK": "not a number"}, None),
    ],
)
def test_a_program_whose_ranks_are_those_of_mpi_goes_on(environment, names, asked):
    environment(names)
    launcher.check(asked)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "asked", "says"),
    [
        (TORCHRUN, None, "torchrun says that this process is rank 1 of 2, but MPI would make it"),
        (TORCHRUN | {"ACCELERATE_MIXED_PRECISION": "no"}, None, "accelerate launch says"),
        ({"WORLD_SIZE": "4"}, None, "The environment (RANK, WORLD_SIZE) says"),
        (ALONE, Announcement("The call", 2, 0), "The call says that this process is rank 0 of 2"),
        (BATCH | TORCHRUN, None, "torchrun says that this process is rank 1 of 2"),
        (STEP_OF_ONE | TORCHRUN, None, "rank 0 of 1, because mpiexec did not start the ranks. Run"),
        (STEP | TORCHRUN, None, "rank 1 of 2, but srun made it rank 3 of 4. Run `env -u RANK"),
        (OMPI | {"WORLD_SIZE": "2", "RANK": "0"}, None, "Open MPI's mpiexec made it rank 1 of 2"),
        (OMPI, Announcement("The call", 2, 0), "without rank and world_size"),
    ],
)
def test_a_program_that_would_be_another_rank_reads_who_said_so(environment, names, asked, says):
    environment(names)
    with pytest.raises(LauncherError) as error:
        launcher.check(asked)
    assert says in str(error.value)
    assert re.search(r"mpiexec -n \d", str(error.value))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("names", "vendor", "meet"),
    [
        (ALONE, "MPICH", True),
        (OMPI, "Open MPI", True),
        (OMPI, "MPICH", False),
        (PMI, "Intel MPI", True),
        (PMI, "Open MPI", False),
        (STEP, "Open MPI", False),
        (STEP | {"PMIX_RANK": "3"}, "Open MPI", True),
    ],
)
def test_pytorch_is_told_of_mpi_only_if_the_ranks_would_meet(environment, names, vendor, meet):
    environment(names)
    assert launcher.meets(vendor) is meet
