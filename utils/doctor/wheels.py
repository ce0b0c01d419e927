"""Brings PyTorch to the Python that runs this: builds for CPUs, where the package index has CUDA.

On Linux the package index's PyTorch comes with 2.5 GB of CUDA, which no lab needs. PyTorch has an
index of its own with builds for CPUs; pyproject.toml names it. `make env` runs this before it
installs the course. Only the standard library is imported: nothing else is installed yet.
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


def cpu_index() -> str:
    """Return the URL of PyTorch's index of builds for CPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    urls = {index["name"]: index["url"] for index in project["tool"]["uv"]["index"]}
    return str(urls["pytorch-cpu"])


def pinned(name: str, constraints: Path) -> str:
    """Return the version of a package in a file of constraints."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").partition("#")[0].strip()
    raise SystemExit(f"{constraints} has no line '{name}==…'")


def install(index: str, constraints: Path, options: list[str]) -> str:
    """Install PyTorch and torchvision, or leave them to the package index.

    Args:
        index: "cpu", "pypi", or the URL of an index.
        options: The user's, for every call of pip.

    Returns:
        In words where PyTorch comes from.

    Raises:
        SystemExit: PyTorch could not be installed; the message says why and what to do.
    """
    version = pinned("torch", constraints)
    if index == PACKAGE_INDEX:
        return f"{version} from the package index, as TORCH_INDEX={PACKAGE_INDEX} asks for"
    if index == CPU and sys.platform != "linux":
        return f"{version} from the package index, which has no CUDA for {platform.system()}"
    wanted = _labelled(version, index)
    present = _installed("torch")
    is_present = present.partition("+")[0] == version.partition("+")[0]
    # Beside builds of an index belongs its torchvision; an interruption can leave it out.
    if is_present and ("+" not in present or _installed("torchvision")):
        return f"{present}, which is there already"
    torch = ["--no-deps", *PATIENCE, f"torch=={wanted}"]
    if index == CPU:
        # What is there must not hide whether pip, as it is configured, would find it.
        ask = ["--quiet", "--dry-run", "--ignore-installed"] if is_present else []
        if not _complaint_of_pip(*ask, *torch, *options):
            return f"{wanted}, a CPU build that pip finds as it is configured here"
        index = cpu_index()
    print(f"Asking {index} for PyTorch {wanted} …", flush=True)
    if complaint := _complaint_of_pip("--index-url", index, *torch, *options):
        raise SystemExit(_why_not(wanted, index, complaint))
    # Of the same index, or its compiled operators do not load; the rest as pip is configured.
    vision = ["torchvision", "-c", str(constraints), "--extra-index-url", index]
    if complaint := _complaint_of_pip(*vision, *options):
        raise SystemExit(f"torchvision for PyTorch {wanted} could not be had:\n{complaint}")
    return f"{wanted} from {index}"


def _labelled(version: str, index: str) -> str:
    """Return a version as an index calls its build of it, such as 2.13.0+cpu."""
    labels = ["cpu"] if index == CPU else LABELS.findall(index)
    return f"{version}+{labels[0]}" if labels and "+" not in version else version


def _installed(name: str) -> str:
    """Return the version of a package that is there; "" without one."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _complaint_of_pip(*arguments: str) -> str:
    """Install something; return what pip says if it did not find the version, else "".

    Raises:
        SystemExit: Every other failure.
    """
    call = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = subprocess.run(call, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode and "No matching distribution found" not in done.stderr:
        raise SystemExit(f"pip failed:\n{done.stderr.strip()}")
    return done.stderr.strip() if done.returncode else ""


def _why_not(wanted: str, index: str, complaint: str) -> str:
    """Say why an index did not give a wheel, and what else can be done."""
    where = f"for Python {platform.python_version()} on {platform.machine()}"
    versions = re.search(r"from versions: (.+)\)", complaint)
    if "after connection broken by" in complaint or "Could not fetch URL" in complaint:
        why = "it cannot be reached from here"
    elif versions and versions[1] != "none":
        why = f"{where} it has {versions[1]}"
    else:
        why = f"it has no PyTorch {where}, or is no package index"
    return f"""PyTorch {wanted} could not be had from {index}: {why}.
  behind a proxy:             export https_proxy=http://…, and again
  from a mirror:              make env TORCH_INDEX=https://…/whl/cpu
  from a folder of wheels:    make env PIP_ARGS='--find-links FOLDER'
  with CUDA, 2.8 GB in all:   make env TORCH_INDEX={PACKAGE_INDEX}
  for another Python:         make clean env PYTHON=python3.12"""


def main() -> None:
    """Run the command, see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--index", default=CPU, help=f'"{CPU}", "{PACKAGE_INDEX}", or a URL')
    parser.add_argument("--constraints", type=Path, default=ROOT / ".ci" / "constraints.txt")
    parser.add_argument("options", nargs="*", help="of pip, after --")
    arguments = parser.parse_args()
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(
            f"{sys.prefix} has no pip; uv makes such environments. Go on with uv (uv sync), or "
            "take it away: make clean"
        )
    source = install(arguments.index, arguments.constraints, arguments.options)
    print(f"PyTorch: {source}", flush=True)


if __name__ == "__main__":
    main()
