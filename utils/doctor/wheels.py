"""Brings PyTorch to the Python that runs this: builds for CPUs, where the package index has CUDA.

On Linux the package index's PyTorch comes with 2.5 GB of CUDA, which no lab needs. PyTorch has an
index of its own with builds for CPUs; pyproject.toml names it. `make env` runs this before it
installs the course, which then finds its PyTorch there.

Only the standard library is imported: nothing else is installed yet.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# What one may ask for beside the URL of an index.
CPU, PACKAGE_INDEX = "cpu", "pypi"
# PyTorch's indexes end in the label that their builds have: …/whl/cu130 has torch 2.13.0+cu130.
LABELS = re.compile(r"/(cpu|cu\d+|rocm[\d.]+|xpu)/*$")

# An index that does not answer costs half a minute, not the minutes of pip's five tries.
PATIENCE = ["--retries", "1", "--timeout", "15"]


class InstallError(Exception):
    """PyTorch could not be installed; the message says why and what to do."""


def cpu_index() -> str:
    """The URL of PyTorch's index of builds for CPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    named = {one["name"]: one["url"] for one in project["tool"]["uv"]["index"]}
    return str(named["pytorch-cpu"])


def pinned(name: str, constraints: Path) -> str:
    """The version of a package in a file of constraints."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").partition("#")[0].strip()
    raise InstallError(f"{constraints} has no line '{name}==…'")


def install(index: str, constraints: Path, pip: Pip) -> str:
    """Install PyTorch and torchvision, or leave them to the package index.

    index: "cpu", "pypi", or the URL of an index.

    Returns in words where PyTorch comes from. Raises InstallError.
    """
    version = pinned("torch", constraints)
    if index == PACKAGE_INDEX:
        return f"{version} from the package index, as TORCH_INDEX={PACKAGE_INDEX} asks for"
    if index == CPU and sys.platform != "linux":
        return f"{version} from the package index, which has no CUDA for {platform.system()}"
    wanted = _labelled(version, *(["cpu"] if index == CPU else LABELS.findall(index)))
    there = _installed("torch")
    interrupted = False
    if there.partition("+")[0] == version.partition("+")[0]:
        # Beside builds of an index belongs its torchvision; an interruption can leave it out.
        interrupted = "+" in there and not _installed("torchvision")
        if not interrupted:
            return f"{there}, which is there already"
    if index == CPU:
        # What is there must not hide whether pip, as it is configured, would find it.
        ask = ["--quiet", "--dry-run", "--ignore-installed"] if interrupted else []
        if pip.brings(*ask, "--no-deps", *PATIENCE, f"torch=={wanted}"):
            return f"{wanted}, a CPU build that pip finds as it is configured here"
        index = cpu_index()
    print(f"Asking {index} for PyTorch {wanted} …", flush=True)
    if not pip.brings("--no-deps", *PATIENCE, "--index-url", index, f"torch=={wanted}"):
        raise InstallError(_not_there(wanted, index, pip.said))
    # Of the same index, or its compiled operators do not load; the rest as pip is configured.
    if not pip.brings("torchvision", "-c", str(constraints), "--extra-index-url", index):
        raise InstallError(f"torchvision for PyTorch {wanted} could not be had:\n{pip.said}")
    return f"{wanted} from {index}"


def _installed(name: str) -> str:
    """The version of a package that is there; "" without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _labelled(version: str, *label: str) -> str:
    """2.13.0 as 2.13.0+cpu; as it is, where there is no label or it has one."""
    return version if "+" in version or not label else f"{version}+{label[0]}"


class Pip:
    """pip of this Python, with the user's options in every call."""

    def __init__(self, options: list[str]):
        self.options = options
        self.said = ""

    def brings(self, *what: str) -> bool:
        """Was it installed? If the version was not found, `said` is pip's complaint.

        Raises InstallError for every other failure.
        """
        call = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
        done = subprocess.run(
            [*call, *what, *self.options], stderr=subprocess.PIPE, text=True, check=False
        )
        self.said = done.stderr.strip()
        if done.returncode and "No matching distribution found" not in self.said:
            raise InstallError(f"pip failed:\n{self.said}")
        return done.returncode == 0


def _not_there(wanted: str, index: str, said: str) -> str:
    """Why an index did not give a wheel, and what else can be done."""
    asked = f"PyTorch {wanted} could not be had from {index}"
    has = re.search(r"from versions: (.+)\)", said)
    if "after connection broken by" in said or "Could not fetch URL" in said:
        why = "it cannot be reached from here"
    elif has and has[1] != "none":
        why = f"for Python {platform.python_version()} on {platform.machine()} it has {has[1]}"
    else:
        why = (
            f"it has no PyTorch for Python {platform.python_version()} on {platform.machine()}, or "
            "is no package index"
        )
    return f"""{asked}: {why}.
  behind a proxy:             export https_proxy=http://…, and again
  from a mirror:              make env TORCH_INDEX=https://…/whl/cpu
  from a folder of wheels:    make env PIP_ARGS='--find-links FOLDER'
  with CUDA, 2.8 GB in all:   make env TORCH_INDEX={PACKAGE_INDEX}
  for another Python:         make clean env PYTHON=python3.12"""


def main() -> int:
    """The command; returns its exit status. See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--index", default=CPU, help=f'"{CPU}", "{PACKAGE_INDEX}", or a URL')
    parser.add_argument("--constraints", type=Path, default=ROOT / ".ci" / "constraints.txt")
    parser.add_argument("options", nargs="*", help="of pip, after --")
    given = parser.parse_args()
    try:
        if importlib.util.find_spec("pip") is None:
            raise InstallError(
                f"{sys.prefix} has no pip; uv makes such environments. Go on with uv (uv sync), or "
                "take it away: make clean"
            )
        source = install(given.index, given.constraints, Pip(given.options))
    except InstallError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"PyTorch: {source}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
