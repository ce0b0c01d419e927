"""Debian's Open MPI and MPICH as a site's modules: unpacked into a folder, installed nowhere.

Another mpiexec on the system would change what other tests find. So the packages are downloaded
and unpacked, and a "loaded module" is a set of environment variables, as a modulefile sets them.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from mpi_jobs import mpi_environment

# Downloaded even where they are installed; what else they need only where it is not.
PACKAGES = {
    "openmpi": ["openmpi-bin", "openmpi-common", "libopenmpi3", "libpmix2"],
    "mpich": ["mpich", "libmpich12"],
}
# Of other modules, and of whoever runs the tests.
_FROM_OUTSIDE = ("MPI4PY_", "OMPI_MCA_", "PRTE_MCA_", "OPAL_", "PMIX_", "LOADEDMODULES", "LD_LIB")
_APT_DEADLINE = 150  # seconds


@dataclass(frozen=True)
class Module:
    """An MPI that a site has outside of the system's folders, and what its modulefile sets."""

    bin: Path
    library: Path
    folders: list[Path]
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def mpiexec(self) -> str:
        return str(self.bin / "mpiexec")

    def loaded(self, *before: Path, **more: str) -> dict[str, str]:
        """The whole environment, once it is loaded; the folders `before` come first on PATH."""
        plain = mpi_environment()
        plain = {k: v for k, v in plain.items() if not k.startswith(_FROM_OUTSIDE)}
        plain["PATH"] = os.pathsep.join(map(str, [*before, self.bin, plain["PATH"]]))
        plain["LD_LIBRARY_PATH"] = os.pathsep.join(map(str, self.folders))
        return plain | self.variables | more


def openmpi(folder: Path) -> Module:
    """Debian's Open MPI; skips the test where it can't be had."""
    tree = _unpacked("openmpi", folder)
    libraries = tree / "usr" / _multiarch()
    _link(tree / "usr/bin/mpiexec", "orterun")
    variables = {
        # It was configured for /usr.
        "OPAL_PREFIX": str(tree / "usr"),
        "OPAL_LIBDIR": str(libraries),
        "OPAL_PKGLIBDIR": str(next(libraries.glob("openmpi/lib/openmpi*"))),
        "OPAL_DATADIR": str(tree / "usr/share"),
        "PMIX_INSTALL_PREFIX": str(libraries / "pmix2"),
        # For parts that want fabrics which are not here.
        "OMPI_MCA_mca_base_component_show_load_errors": "0",
    }
    folders = [libraries, libraries / "pmix2/lib", tree / _multiarch()]
    return Module(tree / "usr/bin", libraries / "libmpi.so.40", folders, variables)


def mpich(folder: Path) -> Module:
    """Debian's MPICH with the library's name that MPICH has everywhere else."""
    debian = debians_mpich(folder)
    site = folder / "mpich/site"
    for path, target in (
        (site / "bin/mpiexec", debian.bin / "mpiexec.hydra"),
        (site / "bin/hydra_pmi_proxy", debian.bin / "hydra_pmi_proxy"),
        (site / "lib/libmpi.so.12", debian.library),
    ):
        _link(path, target)
    return Module(site / "bin", site / "lib/libmpi.so.12", [site / "lib", *debian.folders])


def debians_mpich(folder: Path) -> Module:
    """Debian's MPICH as it is; skips the test where it can't be had."""
    tree = _unpacked("mpich", folder)
    libraries = tree / "usr" / _multiarch()
    _link(tree / "usr/bin/mpiexec", "mpiexec.hydra")
    folders = [libraries, tree / _multiarch()]
    return Module(tree / "usr/bin", libraries / "libmpich.so.12", folders)


def python_without_mpi(folder: Path) -> Path:
    """The Python of an environment with all packages of this one, but no MPI library."""
    venv.create(folder, with_pip=False, symlinks=True)
    own = {name: Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}
    there = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # Not only the folders: .pth files in them lead to a course that is installed as a clone.
    lines = [f"import site; site.addsitedir({str(path)!r})\n" for path in set(own.values())]
    Path(there, "everything.pth").write_text("".join(lines), encoding="utf-8")
    return folder / "bin" / Path(sys.executable).name


def _multiarch() -> str:
    return f"lib/{sysconfig.get_config_var('MULTIARCH') or ''}"


def _link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_symlink():
        path.symlink_to(target)


def _unpacked(name: str, folder: Path) -> Path:
    """The folder with a package and what it needs; skips where apt-get can't bring them."""
    if reason := _fetch(name, folder):
        pytest.skip(f"Debian's {name} can't be had: {reason}")
    return folder / name


@functools.cache
def _fetch(name: str, folder: Path) -> str:
    """Download and unpack, once in a session; what went wrong, in a line."""
    archives = folder / "archives" / name
    (archives / "partial").mkdir(parents=True)
    try:
        _download(PACKAGES[name], archives)
        for archive in archives.glob("*.deb"):
            _run("dpkg", "-x", str(archive), str(folder / name))
    except (OSError, subprocess.SubprocessError) as error:
        return _in_a_line(error)
    return ""


def _in_a_line(error: Exception) -> str:
    """What apt-get said first; before it, what it had said with the system's lists."""
    said = str(getattr(error, "stderr", None) or error).splitlines()
    first = next((line for line in said if line.startswith("E:")), said[0])
    before = error.__context__
    return f"{_in_a_line(before)}; with fresh lists: {first}" if before else first


def _download(packages: list[str], archives: Path) -> None:
    """With the system's lists of packages, or where they are missing or old, with fresh ones."""
    apart = ["-o", "Debug::NoLocking=1", "-o", f"Dir::Cache={archives}"]
    apart += ["-o", f"Dir::Cache::archives={archives}", "-o", "APT::Sandbox::User=root"]
    install = ["install", "--yes", "--download-only", "--reinstall", "--no-install-recommends"]
    try:
        _run("apt-get", *apart, *install, *packages)
    except subprocess.CalledProcessError:
        lists = archives.parent / "lists"
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        apart += ["-o", f"Dir::State::lists={lists}"]
        _run("apt-get", *apart, "update")
        _run("apt-get", *apart, *install, *packages)


def _run(*command: str) -> None:
    subprocess.run(
        command,
        check=True,
        capture_output=True,
        text=True,
        timeout=_APT_DEADLINE,
        env=os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
    )
