"""Several hosts on this machine, for tests: a network of a known speed, mpiexec across it."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mpi_jobs import find_mpiexec, mpi_environment, run_tree

HERE = Path(__file__).parent
RATE = 100e6  # bits per second
LATENCY = 2e-3  # seconds, one way

TOOLS = {"ip": "iproute2", "hostname": "hostname"}
TOOLS |= dict.fromkeys(("unshare", "nsenter", "taskset"), "util-linux")

# Nothing outlives them; loopback, ports, names, mounts and process ids are their own.
_NAMESPACES = ("--net", "--mount", "--uts", "--ipc", "--pid")
_SANDBOX = ("unshare", *_NAMESPACES, "--fork", "--kill-child", "--mount-proc")


def on_hosts(
    hosts: int,
    *command: object,
    slots: int = 1,
    rate: float = RATE,
    latency: float = LATENCY,
    timeout: float = 180,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess:
    """Run a command on `node1` of `node1`, `node2`, …; `mpiexec -n` in it means all of them.

    slots: ranks for each host. rate: bits per second of each host's link, each direction.
    latency: seconds, one way. At the deadline (seconds) all of it dies.

    Raises subprocess.TimeoutExpired.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    shape = ("--hosts", hosts, "--slots", slots, "--rate", rate, "--latency", latency)
    environment = mpi_environment() | {"PATH": _path()}
    # The root of a user namespace counts as root, too.
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT"):
        environment[name] = environment[f"{name}_CONFIRM"] = "1"
    # Each host gets its slots full before the next one, and no more.
    environment.pop("PRTE_MCA_rmaps_default_mapping_policy", None)
    with tempfile.TemporaryDirectory(prefix="hosts-") as room:
        sandbox = [sys.executable, HERE / "hosts_sandbox.py", *shape, "--room", room, "--"]
        return run_tree(
            [*_SANDBOX[:1], *user, *_SANDBOX[1:], *map(str, sandbox), *map(str, command)],
            timeout=timeout,
            env=environment | (env or {}),
            cwd=cwd,
        )


def _path() -> str:
    mpiexec = find_mpiexec()
    return os.pathsep.join([*([str(Path(mpiexec).parent)] if mpiexec else []), os.environ["PATH"]])


def _mpiexec_version() -> str:
    if (mpiexec := find_mpiexec()) is None:
        return ""
    done = subprocess.run([mpiexec, "--version"], capture_output=True, text=True, timeout=60)
    return done.stdout.partition("\n")[0]


@functools.cache
def reason_against() -> str | None:
    """Why there can be no hosts here; None where there can."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"there is no `{tool}` (Debian's package {package})"
    if not (version := _mpiexec_version()).startswith("mpiexec (Open MPI) 5"):
        return f"the way to other hosts is that of Open MPI 5; mpiexec is: {version or 'none'}"
    try:
        done = on_hosts(1, "true", timeout=60)
    except subprocess.TimeoutExpired:
        return "namespaces did not come up within 60 s"
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        return f"this user may not make namespaces and network devices (root may): {last}"
    return None
