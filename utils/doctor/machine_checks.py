"""Checks of the machine: cores, memory, folders, and connections to itself."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from utils.doctor.finding import Finding, error, gigabytes, ok, one_line, warning
from utils.doctor.machine import Machine
from utils.jobs import POSIX, RanksError

RANKS_OF_A_LAB = 4
# Four ranks with PyTorch and the data, the notebook's kernel and JupyterLab.
MEMORY_OF_A_LAB = 2e9
# Open MPI makes a file of this size for each rank. If it doesn't fit, Open MPI may abort.
SEGMENT = 16 * 2**20
ROOM_TO_WRITE = 200e6


def check_cores(machine: Machine) -> Finding:
    """Check that there are enough cores for the four ranks of a lab, with one thread each."""
    from utils.jobs.start_plan import usable_cores

    cores = min([usable_cores(), *cpu_quotas()])
    present = os.cpu_count() or 1
    fact = f"{cores:g} for the {RANKS_OF_A_LAB} ranks of a lab"
    if cores >= RANKS_OF_A_LAB:
        return ok(f"{fact}, 1 thread each")
    remedy = f"the machine has {present}: ask for 4, such as srun -c 4 or docker run --cpus 4"
    if present // 2 < RANKS_OF_A_LAB:
        remedy = "this is fine for learning, but measure speedups on 4 cores or more"
    return warning(f"{fact}, which take turns", remedy)


def _own_cgroup(file: str) -> Iterator[str]:
    """Yield the text of this file in the control group of this process, and in its parents."""
    top = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError):
        text = Path("/proc/self/cgroup").read_text(encoding="utf-8")
        for name in re.findall(r"^0::/(.*)$", text, re.MULTILINE):
            group = top / name
            for folder in (group, *group.parents):
                if folder.is_relative_to(top) and (folder / file).is_file():
                    yield (folder / file).read_text(encoding="utf-8")


def cpu_quotas() -> list[float]:
    """Return the limits in cores that containers or the batch system set (cgroup 2)."""
    pairs = [text.split() for text in _own_cgroup("cpu.max")]
    return [int(quota) / int(period) for quota, period in pairs if quota != "max"]


def check_memory(machine: Machine) -> Finding:
    """Check that there is enough memory for four ranks, the kernel and JupyterLab."""
    import psutil

    limits = {"free": psutil.virtual_memory().available}
    for text in _own_cgroup("memory.max"):
        if text.strip() != "max":
            limits["the limit of this container or job"] = int(text)
    if POSIX:
        import resource

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            limits["the limit of each process (ulimit -v)"] = most
    name, size = min(limits.items(), key=operator.itemgetter(1))
    fact = f"{gigabytes(size)} {name}; a lab needs {gigabytes(MEMORY_OF_A_LAB)}"
    remedy = "close other programs, or ask for more (srun --mem 4G, docker run -m 4g)"
    if size < MEMORY_OF_A_LAB / 2:
        return error(fact, remedy)
    return ok(fact) if size >= MEMORY_OF_A_LAB else warning(fact, remedy)


def check_shared_memory(machine: Machine) -> Finding:
    """Check the room in /dev/shm, where the ranks of one machine exchange their messages."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return ok("no /dev/shm on this system: the temporary folder is used")
    if not os.access(folder, os.W_OK):
        return error("/dev/shm is not writable", "ask the admin to run:\nchmod 1777 /dev/shm")
    free = shutil.disk_usage(folder).free
    fact = f"{gigabytes(free)} free in /dev/shm"
    if free >= RANKS_OF_A_LAB * SEGMENT:
        return ok(fact)
    needs = f"{fact}; 4 ranks need {gigabytes(RANKS_OF_A_LAB * SEGMENT)}"
    remedy = "docker run --shm-size=256m"
    if any(folder.glob("sm_segment.*")):
        remedy = f"rm {folder}/sm_segment.* (files of killed ranks; first stop all ranks)\n{remedy}"
    return (error if free < SEGMENT else warning)(needs, remedy)


def check_temp_folder(machine: Machine) -> Finding:
    """Check that ranks can write their connection files and logs to the temporary folder."""
    remedy = "mkdir -p ~/tmp && export TMPDIR=~/tmp"
    try:
        folder = Path(tempfile.gettempdir())
        write_a_megabyte(folder)
        if POSIX:
            from utils.jobs.session import base_folder

            base_folder()
    except OSError as failure:
        return error(one_line(failure), remedy)
    except RanksError as failure:
        return error(str(failure), remedy)
    return _room_in(folder, remedy)


def check_home(machine: Machine) -> Finding:
    """Check that Jupyter can write to the home folder; only writing shows a full quota."""
    home = Path(os.path.expanduser("~"))
    folders = [home]
    with contextlib.suppress(ImportError):
        from jupyter_core.paths import jupyter_runtime_dir

        folders.append(Path(jupyter_runtime_dir()))
    for folder in folders:
        try:
            write_a_megabyte(existing(folder))
        except OSError as failure:
            remedy = "free some space (quota?), or use another folder:\nexport HOME=FOLDER"
            return error(f"{folder} is not writable: {failure.strerror or failure}", remedy)
    return _room_in(home, "free some space: du -sh ~/.cache/* shows what is large")


def existing(folder: Path) -> Path:
    """Return the folder, or its nearest parent that already exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def write_a_megabyte(folder: Path) -> None:
    """Write and remove a file. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(10**6))
        file.flush()
        os.fsync(file.fileno())


def _room_in(folder: Path, remedy: str) -> Finding:
    free = shutil.disk_usage(existing(folder)).free
    fact = f"{gigabytes(free)} free in {folder}"
    return ok(fact) if free >= ROOM_TO_WRITE else warning(fact, remedy)


def check_ports(machine: Machine) -> Finding:
    """Check that this machine can connect to itself, as Jupyter and ipyparallel do."""
    remedy = "ask the admin about the firewall, or switch loopback on:\nip link set lo up"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
        socket.getaddrinfo("localhost", port)
    except socket.gaierror as failure:
        remedy = "add to /etc/hosts:\n127.0.0.1 localhost"
        return error(f"localhost has no address: {failure}", remedy)
    except OSError as failure:
        return error(f"no connection to 127.0.0.1: {failure}", remedy)
    return ok("connections on 127.0.0.1 work")
