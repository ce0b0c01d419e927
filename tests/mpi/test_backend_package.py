"""The backend as a package of its own: what `make backend` builds, and whether it stands alone."""

from __future__ import annotations

import ast
import configparser
import email
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from mpi_jobs import find_mpiexec, mpi_environment, run_tree
from packaging.requirements import Requirement
from places import ROOT

from benchmarks.labelled import PAIRS

BACKEND = ROOT / "utils" / "mpi"
PROJECT = tomllib.loads((BACKEND / "pyproject.toml").read_text())["project"]
COURSE = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the source distribution."""
    folder = tmp_path_factory.mktemp("backend")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = run_tree(command, timeout=100, env=dict(os.environ), cwd=BACKEND)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built) -> zipfile.ZipFile:
    (path,) = built.glob("torch_mpi-*-py3-none-any.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def source(built, tmp_path_factory) -> Path:
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("source")
    (path,) = built.glob("torch_mpi-*.tar.gz")
    with tarfile.open(path) as file:
        file.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def of_wheel(wheel: zipfile.ZipFile, name: str) -> str:
    (path,) = (one for one in wheel.namelist() if one.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


@pytest.mark.quick
def test_who_installs_the_wheel_has_all_modules_and_nothing_else(wheel):
    own = {str(path.relative_to(BACKEND)) for path in BACKEND.glob("torch_mpi/**/*.py")}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == own
    assert of_wheel(wheel, "licenses/LICENSE") == (ROOT / "LICENSE").read_text()


@pytest.mark.quick
def test_pytorch_finds_the_backend_of_the_wheel_by_its_entry_point(wheel):
    points = configparser.ConfigParser()
    points.read_string(of_wheel(wheel, "entry_points.txt"))
    assert dict(points["torch.backends"]) == {"mpi": "torch_mpi.autoload:install"}
    assert dict(points["torch.distributed.backends"]) == {"mpi": "torch_mpi.autoload:register"}
    assert COURSE["entry-points"] == PROJECT["entry-points"]


@pytest.mark.quick
def test_the_page_of_the_package_begins_with_the_command_that_runs(wheel):
    about = email.message_from_string(of_wheel(wheel, "METADATA"))
    assert (about["Name"], about["Version"]) == ("torch-mpi", COURSE["version"])
    assert about["Description-Content-Type"] == "text/markdown"
    first = about.get_payload().partition("\n## ")[0]
    assert "mpiexec -n 4 python train.py" in first
    assert 'init_process_group("mpi")' in first
    assert f"{len(PAIRS)} wrong programs" in about.get_payload()
    links = re.findall(r"\]\((?!https://|#)([^)]*)\)", about.get_payload())
    assert not links, "a link to a file of the repository leads nowhere on a package index"


@pytest.mark.quick
def test_the_backend_and_the_course_agree_on_what_they_need():
    """Else one of them would take what the other has not been tried with."""
    ours = {r.name: r.specifier for r in map(Requirement, COURSE["dependencies"])}
    theirs = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["mpi"]]
    for requirement in map(Requirement, theirs):
        if requirement.name == "torch":
            # The backend alone also works with newer versions; it warns about them.
            assert set(requirement.specifier) < set(ours["torch"])
        else:
            assert ours[requirement.name] == requirement.specifier


@pytest.mark.quick
def test_the_tests_in_the_source_distribution_need_nothing_of_the_course(source):
    files = [*source.rglob("*.py")]
    assert {"test_backend_core.py", "test_mpi_backend.py", "test_protocol.py", "programs.py"} <= {
        path.name for path in files
    }
    here = {path.stem for path in files} | {
        path.name for path in source.rglob("*") if path.is_dir()
    }
    course = {path.stem for path in (ROOT / "tests").rglob("*.py")} - here
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            bad = {name for name in names if name.split(".")[0] in {"utils", *course}}
            assert not bad, f"{path.name} imports {bad}"
    for name in ("README.md", "PROTOCOL.md", "LICENSE", "examples/train.py"):
        assert (source / name).is_file(), name


def test_the_example_trains_on_four_ranks(mpiexec):
    lines = mpiexec(4, BACKEND / "examples" / "train.py").stdout.splitlines()
    assert len(lines) == 4
    accuracy = float(re.fullmatch(r"epoch 4: accuracy (\S+) on 4 ranks", lines[-1])[1])
    assert accuracy > 0.9


@pytest.mark.often
@pytest.mark.timeout(900)
def test_the_wheel_alone_trains_on_four_ranks_and_passes_its_tests(built, source, tmp_path):
    """In an environment that has this one's packages, but not the course."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True, symlinks=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=100)
    # Listed as a folder, so that its .pth files, of which one leads to the course, are not read.
    base = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    folder = Path(sysconfig.get_path("purelib", vars=base))
    (folder / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("torch_mpi", "utils"):
        code = f"import importlib.util as u; s = u.find_spec({name!r}); print(s and s.origin)"
        found = run_tree(
            [python, "-c", code], timeout=60, env=dict(os.environ), cwd=tmp_path
        ).stdout
        assert found.startswith(str(folder)) if name == "torch_mpi" else found == "None\n"
    env = mpi_environment()
    env["PATH"] = os.pathsep.join([str(Path(find_mpiexec()).parent), env["PATH"]])
    # mpi4py looks beside its own Python. The longest name has the version.
    if libraries := [str(path) for path in Path(sys.prefix, "lib").glob("libmpi.*")]:
        env["MPI4PY_LIBMPI"] = max(libraries, key=len)
    ranks = ["mpiexec", "-n", "4", python, str(source / "examples" / "train.py")]
    done = run_tree(ranks, timeout=100, env=env, cwd=tmp_path)
    assert "on 4 ranks" in done.stdout, done.stderr
    for path in (source / "torch_mpi").rglob("*.py"):
        path.unlink()
    done = run_tree([python, "-m", "pytest", "-q"], timeout=800, env=env, cwd=source)
    assert done.returncode == 0, done.stdout[-4000:]
