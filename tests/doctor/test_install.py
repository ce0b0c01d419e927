"""PyTorch's wheels: whom `make env` asks for which, and what it says where they can't be had.

Wheels are made up, and lie on indexes at the loopback address. Each test has a Python without
PyTorch, whose pip knows one package index and no setting of whoever runs the tests.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import tomllib
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest
from index_tools import Index, serving, wheel

from utils.doctor import wheels as install

ROOT = Path(__file__).resolve().parents[2]
TORCH = install.pinned("torch", ROOT / ".ci" / "constraints.txt")
VISION = install.pinned("torchvision", ROOT / ".ci" / "constraints.txt")

pytestmark = pytest.mark.quick
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only there PyTorch brings CUDA")


# --- indexes ------------------------------------------------------------------------------------


def pytorch(label: str = "", torch: str = TORCH) -> dict[str, bytes]:
    """PyTorch and torchvision as an index has them; without a label they want CUDA."""
    needs = () if label else ("nvidia-cudnn",)
    vision = wheel("torchvision", f"{VISION}{label}", f"torch=={torch}", "numpy")
    return wheel("torch", f"{torch}{label}", *needs) | vision


@pytest.fixture
def serve() -> Iterator[Callable[..., Index]]:
    """Serve files as a package index, until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda *given: stack.enter_context(serving(*given))


@pytest.fixture
def nobody() -> Iterator[str]:
    """The URL of an index that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}/whl/cpu"


@dataclass
class House:
    """The course's folder with nothing but what brings PyTorch, and a Python with only pip."""

    folder: Path
    registry: Index

    def name_cpu_index(self, url: str) -> None:
        """Have pyproject.toml name this one."""
        text = (ROOT / "pyproject.toml").read_text()
        assert text.count(install.cpu_index()) == 1, "it is named in one place"
        (self.folder / "pyproject.toml").write_text(text.replace(install.cpu_index(), url))

    def brings(self, *arguments: str) -> subprocess.CompletedProcess:
        """Run `python utils/doctor/wheels.py`."""
        hidden = ("PIP_", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "PYTHONPATH")
        env = {key: value for key, value in os.environ.items() if not key.startswith(hidden)}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": self.registry.url}
        env |= {"PIP_CACHE_DIR": str(self.folder / "cache"), "no_proxy": "127.0.0.1"}
        command = [
            self.folder / "env/bin/python",
            "-P",
            self.folder / "utils/doctor/wheels.py",
            *arguments,
        ]
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, timeout=100
        )

    def loses(self, package: str) -> None:
        """Take a package away, as if pip had been interrupted before it."""
        (info,) = self.folder.glob(f"env/lib/python*/site-packages/{package}-*.dist-info")
        shutil.rmtree(info)
        shutil.rmtree(info.parent / package)

    def installed(self) -> set[str]:
        """What lies in the environment: "torch-2.13.0+cpu"."""
        folders = self.folder.glob("env/lib/python*/site-packages/*.dist-info")
        return {folder.stem for folder in folders}


@pytest.fixture
def at_hand(tmp_path) -> Path:
    """A folder that has PyTorch's build for CPUs, and nothing else."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for name, content in wheel("torch", f"{TORCH}+cpu").items():
        (folder / name).write_bytes(content)
    return folder


def build_house(folder: Path, serve: Callable[..., Index]) -> House:
    venv.create(folder / "env", with_pip=False, symlinks=True)
    (packages,) = folder.glob("env/lib/python*/site-packages")
    # Not imported: that would keep setuptools, and so nbgrader, from being imported after it.
    (packages / "pip").symlink_to(Path(find_spec("pip").origin).parent)
    (folder / "utils/doctor").mkdir(parents=True)
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/constraints.txt", folder / ".ci/constraints.txt")
    text = (ROOT / "utils/doctor/wheels.py").read_text()
    patience = '"--timeout", "15"'
    assert patience in text
    (folder / "utils/doctor/wheels.py").write_text(text.replace(patience, '"--timeout", "1"'))
    numpy = install.pinned("numpy", ROOT / ".ci/constraints.txt")
    return House(folder, serve(pytorch() | wheel("numpy", numpy) | wheel("nvidia_cudnn", "9")))


@pytest.fixture
def house(tmp_path, serve) -> House:
    return build_house(tmp_path, serve)


@dataclass
class Laptop:
    """A house that has got its builds from an index, and what was said and asked for then."""

    house: House
    index: Index
    done: subprocess.CompletedProcess
    asked_of_registry: list[str]


@pytest.fixture(scope="module")
def laptop(tmp_path_factory) -> Iterator[Laptop]:
    """A test that removes one of its packages has it installed again."""
    with contextlib.ExitStack() as stack:

        def serve(*given) -> Index:
            return stack.enter_context(serving(*given))

        house = build_house(tmp_path_factory.mktemp("laptop"), serve)
        index = serve(pytorch("+cpu"), "whl/cpu")
        house.name_cpu_index(index.url)
        yield Laptop(house, index, house.brings(), [*house.registry.asked])


CPU_BUILDS = {f"torch-{TORCH}+cpu", f"torchvision-{VISION}+cpu"}


# --- CPU builds, by default ----------------------------------------------------------------------


@on_linux
def test_a_laptop_on_linux_gets_builds_for_cpus_and_no_cuda(laptop):
    house, index, done = laptop.house, laptop.index, laptop.done
    assert done.returncode == 0, done.stderr
    assert house.installed() >= CPU_BUILDS
    assert not {name for name in house.installed() if name.startswith("nvidia")}
    assert f"PyTorch: {TORCH}+cpu from {index.url}" in done.stdout
    assert not [path for path in laptop.asked_of_registry if path.startswith("/files/torch")]
    index.asked.clear()
    house.registry.asked.clear()
    assert f"PyTorch: {TORCH}+cpu, which is there already" in house.brings().stdout
    assert not index.asked + house.registry.asked


@on_linux
def test_after_an_interruption_torchvision_comes_from_the_index_of_pytorch(laptop):
    house, index = laptop.house, laptop.index
    assert laptop.done.returncode == 0
    house.loses("torchvision")
    index.asked.clear()
    done = house.brings()
    assert done.returncode == 0, done.stderr
    assert house.installed() >= CPU_BUILDS, "not the package index's, which wants CUDA"
    assert f"/files/torch-{TORCH}+cpu-py3-none-any.whl" not in map(unquote, index.asked)


@on_linux
def test_offline_a_cpu_build_at_hand_is_taken_and_nobody_is_asked_nor_after_an_interruption(
    house, nobody, at_hand
):
    """At the second time PyTorch is there, and torchvision isn't."""
    house.name_cpu_index(nobody)
    for _ in range(2):
        begin = time.monotonic()
        done = house.brings("--", "--find-links", str(at_hand))
        assert time.monotonic() - begin < 20
        assert done.returncode == 0, done.stderr
        assert "that pip finds as it is configured here" in done.stdout, done.stderr
        assert f"torch-{TORCH}+cpu" in house.installed()


@on_linux
def test_another_pytorch_gets_the_torchvision_that_belongs_to_it(house, serve, tmp_path):
    index = serve(
        pytorch("+cpu") | wheel("torch", "2.99.0+cpu")
        | wheel("torchvision", "0.99.0+cpu", "torch==2.99.0"),
        "whl/cpu",
    )  # fmt: skip
    house.name_cpu_index(index.url)
    asked = tmp_path / "constraints.txt"
    asked.write_text("torch==2.99.0\n")
    assert house.brings("--constraints", str(asked)).returncode == 0
    assert house.installed() >= {"torch-2.99.0+cpu", "torchvision-0.99.0+cpu"}
    assert house.brings().returncode == 0
    assert house.installed() >= CPU_BUILDS, "and back"


# --- where they can't be had ---------------------------------------------------------------------


@on_linux
def test_an_index_that_is_not_reached_ends_in_what_to_do_instead_of_a_long_wait(house, nobody):
    house.name_cpu_index(nobody)
    begin = time.monotonic()
    done = house.brings()
    assert time.monotonic() - begin < 20
    assert done.returncode == 1
    assert f"{TORCH}+cpu can't be installed from {nobody}: it cannot be reached" in done.stderr
    for remedy in ("https_proxy", "TORCH_INDEX=https://", "--find-links", "TORCH_INDEX=pypi"):
        assert remedy in done.stderr
    assert "Traceback" not in done.stderr
    assert not house.installed(), "2.5 GB of CUDA are not what was asked for"


@on_linux
def test_an_index_without_that_version_is_named_with_what_it_has(house, serve):
    index = serve(pytorch("+cpu", torch="2.0.0"), "whl/cpu")
    house.name_cpu_index(index.url)
    done = house.brings()
    assert done.returncode == 1
    assert f"from {index.url}: for Python 3." in done.stderr
    assert "it only has 2.0.0+cpu" in done.stderr
    assert not house.installed()


@on_linux
def test_an_address_that_is_no_index_is_named(house, serve):
    index = serve({}, "whl/cpu")
    house.name_cpu_index(index.url)
    done = house.brings()
    assert done.returncode == 1
    assert "or isn't a package index" in done.stderr


@on_linux
def test_a_failure_of_pip_is_not_taken_for_a_missing_wheel(house, nobody):
    house.name_cpu_index(nobody)
    done = house.brings("--", "--no-such-option")
    assert done.returncode == 1
    assert "pip failed:" in done.stderr
    assert "no such option: --no-such-option" in done.stderr
    assert "cannot be reached" not in done.stderr


# --- what one asks for ---------------------------------------------------------------------------


@pytest.mark.parametrize("label", ["cpu", "cu130", ""])
def test_who_names_an_index_gets_its_builds_and_pytorchs_own_is_not_asked(
    house, serve, nobody, label
):
    house.name_cpu_index(nobody)
    mirror = serve(pytorch(f"+{label}" if label else "+site.1"), f"whl/{label or 'ours'}")
    done = house.brings("--index", mirror.url)
    assert done.returncode == 0, done.stderr
    assert house.installed() >= {f"torch-{TORCH}+{label or 'site.1'}"}
    assert f"from {mirror.url}" in done.stdout


def test_who_asks_for_the_package_index_gets_it_from_there_with_the_rest(house, nobody):
    house.name_cpu_index(nobody)
    done = house.brings("--index", "pypi")
    assert done.returncode == 0
    assert f"PyTorch: {TORCH} from the package index, as TORCH_INDEX=pypi asks for" in done.stdout
    assert not house.installed()


def test_a_mac_takes_the_package_indexs_wheels_which_have_no_cuda(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    said = install.install("cpu", ROOT / ".ci/constraints.txt", [])
    assert "from the package index, which has no CUDA" in said


def test_an_environment_of_uv_is_named_instead_of_a_traceback(house, tmp_path):
    house.name_cpu_index("http://127.0.0.1:9/whl/cpu")
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    (packages / "pip").unlink()
    done = house.brings()
    assert done.returncode == 1
    assert "has no pip, because uv made it" in done.stderr


# --- one place -----------------------------------------------------------------------------------


def test_pip_uv_make_and_conda_ask_the_same_index_for_the_same_pytorch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    for name in ("torch", "torchvision"):
        source = project["tool"]["uv"]["sources"][name]
        assert source == {"index": "pytorch-cpu", "marker": "sys_platform == 'linux'"}
    assert install.cpu_index() == "https://download.pytorch.org/whl/cpu", "PyTorch's own"
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert f"--extra-index-url {install.cpu_index()}" in lines
    assert f'torch=={TORCH}+cpu; sys_platform == "linux"' in lines
    assert "-c .ci/constraints.txt" in lines
    assert "-e ." in lines
