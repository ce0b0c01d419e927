"""Install PyTorch for the running Python, as a build for CPUs if the package index has CUDA.

On Linux, the package index's PyTorch comes with 2.5 GB of CUDA, which no lab needs. PyTorch's own
index has builds for CPUs; pyproject.toml names it. `make env` runs this module before it installs
the course. It uses only the standard library, because nothing else is installed at this time.
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

# The names that you can give instead of the URL of an index.
CPU, PACKAGE_INDEX = "cpu", "pypi"
# PyTorch's indexes end in the label of their builds: …/whl/cu130 has torch 2.13.0+cu130.
LABELS = re.compile(r"/(cpu|cu\d+|rocm[\d.]+|xpu)/*$")
# With these options, a silent index costs half a minute, not the minutes of pip's five tries.
PATIENCE = ["--retries", "1", "--timeout", "15"]


def cpu_index() -> str:
    """Return the URL of PyTorch's index of builds for CPUs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    urls = {index["name"]: index["url"] for index in project["tool"]["uv"]["index"]}
    return str(urls["pytorch-cpu"])


def pinned(name: str, constraints: Path) -> str:
    """Return the version of a package in a constraints file."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}=="):
            return line.removeprefix(f"{name}==").partition("#")[0].strip()
    raise SystemExit(f"{constraints} has no line '{name}==…'")


def install(index: str, constraints: Path, options: list[str]) -> str:
    """Install PyTorch and torchvision, or leave them to the package index.

    Args:
        index: "cpu", "pypi", or the URL of an index.
        options: The user's options for every call of pip.

    Returns:
        Words that say where PyTorch comes from.

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
    # A build of an index needs torchvision of the same index; an interruption can leave it out.
    if is_present and ("+" not in present or _installed("torchvision")):
        return f"{present}, which is there already"
    torch = ["--no-deps", *PATIENCE, f"torch=={wanted}"]
    if index == CPU:
        # An installed PyTorch must not hide whether pip would find one with its configuration.
        ask = ["--quiet", "--dry-run", "--ignore-installed"] if is_present else []
        if not _complaint_of_pip(*ask, *torch, *options):
            return f"{wanted}, a CPU build that pip finds as it is configured here"
        index = cpu_index()
    print(f"Asking {index} for PyTorch {wanted} …", flush=True)
    if complaint := _complaint_of_pip("--index-url", index, *torch, *options):
        raise SystemExit(_why_not(wanted, index, complaint))
    # From another index, torchvision's compiled operators would not load.
    vision = ["torchvision", "-c", str(constraints), "--extra-index-url", index]
    if complaint := _complaint_of_pip(*vision, *options):
        raise SystemExit(f"pip found no torchvision for PyTorch {wanted}:\n{complaint}")
    return f"{wanted} from {index}"


def _labelled(version: str, index: str) -> str:
    """Return a version with the label of an index's builds, such as 2.13.0+cpu."""
    labels = ["cpu"] if index == CPU else LABELS.findall(index)
    return f"{version}+{labels[0]}" if labels and "+" not in version else version


def _installed(name: str) -> str:
    """Return the version of an installed package; "" if it isn't installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _complaint_of_pip(*arguments: str) -> str:
    """Install something; return pip's complaint if it did not find the version, else "".

    Raises:
        SystemExit: Pip failed for another reason.
    """
    call = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    done = subprocess.run(call, stderr=subprocess.PIPE, check=False, encoding="utf-8")
    if done.returncode and "No matching distribution found" not in done.stderr:
        raise SystemExit(f"pip failed:\n{done.stderr.strip()}")
    return done.stderr.strip() if done.returncode else ""


def _why_not(wanted: str, index: str, complaint: str) -> str:
    """Return why an index gave no wheel, and what else you can do."""
    where = f"for Python {platform.python_version()} on {platform.machine()}"
    versions = re.search(r"from versions: (.+)\)", complaint)
    if "after connection broken by" in complaint or "Could not fetch URL" in complaint:
        why = "it cannot be reached from here"
    elif versions and versions[1] != "none":
        why = f"{where}, it only has {versions[1]}"
    else:
        why = f"it has no PyTorch {where}, or isn't a package index"
    return f"""PyTorch {wanted} can't be installed from {index}: {why}.
  behind a proxy:             export https_proxy=http://…, and again
  from a mirror:              make env TORCH_INDEX=https://…/whl/cpu
  from a folder of wheels:    make env PIP_ARGS='--find-links FOLDER'
  with CUDA, 2.8 GB in all:   make env TORCH_INDEX={PACKAGE_INDEX}
  for another Python:         make clean env PYTHON=python3.12"""


def main() -> None:
    """Run the command that the module's docstring describes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--index", default=CPU, help=f'"{CPU}", "{PACKAGE_INDEX}", or a URL')
    parser.add_argument("--constraints", type=Path, default=ROOT / ".ci" / "constraints.txt")
    parser.add_argument("options", nargs="*", help="of pip, after --")
    arguments = parser.parse_args()
    if importlib.util.find_spec("pip") is None:
        raise SystemExit(
            f"{sys.prefix} has no pip, because uv made it. Continue with uv (uv sync), or remove "
            "it (make clean)"
        )
    source = install(arguments.index, arguments.constraints, arguments.options)
    print(f"PyTorch: {source}", flush=True)


if __name__ == "__main__":
    main()
