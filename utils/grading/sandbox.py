"""The sandboxes of a graded notebook, built by bubblewrap.

The outer box contains pytest and the notebook's kernel. It has separate processes and a network
with only loopback; when it ends, everything in it ends. No student's code runs there.

Each rank has its own box, which contains the student's code. The rank can read Python, what
the course runs on ranks, and the data sets, and write to a scratch folder of limited size. It has
one socket, to the kernel. It can't see the kernel, other ranks, solutions, submissions or results,
and Linux refuses the system calls by which it could leave something for them (`confinement.py`).

A container that root runs may be unable to build boxes. There, each rank can be another user
(:attr:`Box.by_user`): it can't read what only root may read, and it has no network. Such ranks see
each other's processes, and share folders for temporary files, so a container grades one submission.
"""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import platformdirs
import psutil

import utils
from utils.course.notebook import NotebookError
from utils.jobs.box_plan import RANK
from utils.jobs.sandbox_command import with_parents

from .grading_options import SandboxOptions

GB = 1 << 30
HOME = "/tmp/home"
#: The kernel's folder in the folder of a run. Ranks can read it.
WORK = "work"
#: The folder for the temporary files of all ranks, for a lab in which they share memory.
SHARED_FILES = "shared"
#: The copies of the course's files for ranks that are other users, in their folder.
SIDE = "course"
#: The last family of sockets without a network.
AF_UNIX = 1
#: Limits of a rank: processes, open files (each socket may hold 200 KB of the system's memory), and
#: bytes in its scratch folder and shared memory.
PROCESSES = 200
OPEN_FILES = 128
SCRATCH = GB // 4
SHARED = GB // 4
#: Parts of /etc that programs need and that reveal nothing about this machine's users.
ETC = (
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "fonts", "localtime"),
    *("mime.types", "openmpi", "openmpi-mca-params.conf", "prte.conf", "pmix-mca-params.conf"),
)
#: Variables that a notebook gets from the instructor's environment.
KEPT = ("LANG", "TZ", "LD_LIBRARY_PATH", "OPAL_PREFIX", "MPI4PY_LIBMPI")
KEPT_PREFIXES = ("LC_", "OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_", "UCX_")
#: Variables of the kernel that name its folders, where ranks can't write.
OF_THE_KERNEL = (
    *("IPYTHONDIR", "JUPYTER_PATH", "JUPYTER_RUNTIME_DIR", "MPLCONFIGDIR"),
    *("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_btl_sm_backing_directory"),
)
#: Prefixes of variables, such as PYTEST_ADDOPTS, that could change every grade.
CHANGING_PREFIXES = ("PYTEST_", "PYTHON", "IPYTHON", "JUPYTER_", "NBVAL_", "COV_", "COVERAGE_")
#: User ids for runs that root starts: one for each rank, because Linux counts some things by user,
#: and doesn't limit root's processes.
FIRST_UID = 61_000
LAST_UID = 64_900
UIDS = 16


class SandboxError(NotebookError):
    """This machine can't build a sandbox; the message says what to do."""


@dataclass(frozen=True)
class Limits:
    """The limits of one submission.

    Attributes:
        cell: Seconds for one cell.
        total: Seconds for one run of the notebook.
        memory: Bytes of memory for all processes together.
    """

    cell: float = 120.0
    total: float = 900.0
    memory: int = 6 * GB


@dataclass(frozen=True)
class Box:
    """The settings with which notebooks are run, with or without a sandbox.

    Attributes:
        walls: Whether there is a sandbox.
        by_user: Whether each rank is another user instead, for a container of one submission.
        paths: Folders that notebooks may read; they are on PYTHONPATH, too.
        data: The data sets' folder, or None.
        has_shared_folder: Whether the ranks have one folder for temporary files, for a lab in which
            they share memory. Otherwise each rank has its own.
        files: The files of `utils` that ranks can read; None for all.
        given: By the module of each probe, the files that ranks get when the kernel asks it.
    """

    walls: bool = True
    by_user: bool = False
    limits: Limits = field(default_factory=Limits)
    paths: tuple[Path, ...] = ()
    data: Path | None = None
    has_shared_folder: bool = False
    files: tuple[Path, ...] | None = None
    given: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def outer(self, job: Path, command: list[str]) -> list[str]:
        """Return the command that runs `command` in the outer box, where only `job` is writable."""
        if not self.walls:
            return command
        return [
            *(bwrap(), "--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
            *("--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"),
            *("--bind", str(job), str(job), "--chdir", str(job)),
            *("--perms", "1777", "--size", str(SCRATCH), "--tmpfs", str(job / SHARED_FILES)),
            *("--", *command),
        ]

    def inner(self, job: Path, slot: int) -> list[str]:
        """Return the command that runs a program in the box of a rank; the program follows it.

        The folder `job/work` of the kernel is there, too, and can only be read.

        Args:
            job: The folder of the run.
            slot: The number of this run among all runs at the same time.
        """
        python = [sys.executable, "-P", "-m", "utils.grading.confinement"]
        if self.by_user:
            return self._as_other_user(python, slot)
        if not self.walls:
            return [*python, json.dumps(self._settings())]
        uid = job_uid(slot) if os.geteuid() == 0 else None
        settings = self._settings(uid) | {"home": HOME}
        work = str(job / WORK)
        mounts = [*self._read_only(), *self._course(), *self._etc(job, uid)]
        mounts += ["--ro-bind", work, work]
        temporary = "/tmp"
        if self.has_shared_folder:
            temporary = str(job / SHARED_FILES)
            mounts += ["--bind", temporary, temporary]
        return [
            *(bwrap(), "--die-with-parent", "--unshare-pid", "--unshare-net", "--unshare-ipc"),
            *("--unshare-uts", "--hostname", "grading"),
            *self._privileges(),
            *("--perms", "1777", "--size", str(SCRATCH), "--tmpfs", "/tmp"),
            *("--proc", "/proc", *_hidden("/proc/sys", "/proc/1"), "--dev", "/dev"),
            *("--perms", "1777", "--size", str(SHARED), "--tmpfs", "/dev/shm"),
            *self._system(),
            *with_parents(mounts),
            *("--remount-ro", "/", "--remount-ro", "/dev", "--chdir", work),
            *("--setenv", "HOME", HOME, "--setenv", "TMPDIR", temporary),
            *(word for name in OF_THE_KERNEL for word in ("--unsetenv", name)),
            *("--", *python, json.dumps(settings)),
        ]

    def _as_other_user(self, python: list[str], slot: int) -> list[str]:
        """Return the command that runs a program as another user, with copies of its side's files.

        The folder of the run isn't readable for others, so ranks have a folder elsewhere.
        """
        own = self.folder_of_ranks(slot)
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        own.chmod(0o1777)
        course, backend = self._shown()
        for path in self.files or course.rglob("*.py"):
            _copy_readable(path, own / SIDE / path.relative_to(course.parent))
        for path in backend.rglob("*.py"):
            _copy_readable(path, own / SIDE / path.relative_to(backend.parent))
        settings = self._settings(job_uid(slot)) | {"last_family": AF_UNIX}
        unset = [word for name in OF_THE_KERNEL for word in ("-u", name)]
        variables = {"HOME": own, "TMPDIR": own, "PYTHONPATH": own / SIDE}
        given = [f"{name}={value}" for name, value in variables.items()]
        return ["env", "-C", str(own), *unset, *given, *python, json.dumps(settings)]

    def folder_of_ranks(self, slot: int) -> Path:
        """Return the folder of ranks that are other users."""
        return Path(tempfile.gettempdir(), f"ranks-{job_uid(slot)}")

    def environment(self) -> dict[str, str]:
        """Return the variables of pytest if there is no sandbox.

        Variables that change the behavior of pytest, Python or Jupyter are left out.
        """
        kept = {
            name: value
            for name, value in os.environ.items()
            if name == "PYTHONPATH" or not name.startswith(CHANGING_PREFIXES)
        }
        return {**kept, **self.variables(), "HOME": str(Path.home())}

    def _settings(self, uid: int | None = None) -> dict[str, Any]:
        limits = self.limits
        settings: dict[str, Any] = {
            "uid": uid,
            # PyTorch maps more memory than it uses.
            "address_space": limits.memory + 4 * GB,
            "cpu_seconds": int(limits.total * 2),
        }
        if self.walls or self.by_user:
            running = 0 if uid is not None else _threads_of_user()
            settings |= {"processes": PROCESSES + running, "file_size": SCRATCH}
            settings |= {"open_files": OPEN_FILES, "may_lock": self.has_shared_folder}
            if not self.has_shared_folder:  # otherwise they write to each other's files
                settings["rank"] = RANK
        return settings

    def _privileges(self) -> list[str]:
        """Return options that allow root's process only to change its user, and others nothing."""
        if os.geteuid() == 0:
            return ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
        return ["--unshare-user", *(["--disable-userns"] if _knows("--disable-userns") else [])]

    def _system(self) -> list[str]:
        """Return the options for the system's programs, and for the number of cores."""
        options: list[str] = []
        for name in ("usr", "lib", "lib32", "lib64", "bin", "sbin"):
            path = Path("/", name)
            if path.is_symlink():
                options += ["--symlink", os.readlink(path), str(path)]
            elif path.is_dir():
                options += ["--ro-bind", str(path), str(path)]
        for folder in ("/sys/devices/system", "/sys/fs/cgroup"):  # the number of cores, and sockets
            options += ["--ro-bind-try", folder, folder]
        return options

    def _read_only(self) -> list[str]:
        """Return the mounts for Python, MPI and the data, without folders inside other ones."""
        wanted = {Path(sys.prefix), Path(sys.base_prefix).resolve(), Path(sys.base_prefix)}
        if mpiexec := shutil.which("mpiexec"):
            wanted |= {Path(mpiexec).parents[1], Path(mpiexec).resolve().parents[1]}
        wanted |= {*self.paths, *filter(None, [self.data])}
        kept: list[Path] = []
        for path in sorted(wanted, key=lambda path: len(path.parts)):
            inside = [Path("/usr"), *kept]
            if len(path.parts) > 1 and not any(path.is_relative_to(other) for other in inside):
                kept.append(path)
        return [word for path in kept for word in ("--ro-bind", str(path), str(path))]

    def _course(self) -> list[str]:
        """Return the mounts for the course: the files of a rank's side, and the whole backend."""
        course, backend = self._shown()
        shown = [course] if self.files is None else [*self.files, backend]
        mounts = ["--tmpfs", "", str(course)]
        return mounts + [word for path in shown for word in ("--ro-bind", str(path), str(path))]

    def _shown(self) -> tuple[Path, Path]:
        """Return the folders of the course and of its backend."""
        found = find_spec("torch_mpi")
        assert found is not None
        assert found.origin
        return Path(utils.__file__).parent, Path(found.origin).parent

    def _etc(self, job: Path, uid: int | None) -> list[str]:
        """Write a small /etc, in which each rank's user has one name, and return its mounts."""
        number = os.geteuid() if uid is None else uid
        numbers = [number] if uid is None else range(number, number + UIDS)
        texts = {
            "passwd": "".join(f"student:x:{one}:{one}::{HOME}:/bin/sh\n" for one in numbers),
            "group": "".join(f"student:x:{one}:\n" for one in numbers),
            "hosts": "127.0.0.1 localhost grading\n::1 localhost\n",
        }
        options = []
        for name, text in texts.items():
            (job / "etc").mkdir(exist_ok=True)
            (job / "etc" / name).write_text(text, encoding="utf-8")
            options += ["--ro-bind", str(job / "etc" / name), f"/etc/{name}"]
        for name in ETC:
            options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        return options

    def variables(self) -> dict[str, str]:
        """Return the variables of the kernel and its ranks, without the home folder."""
        kept = {
            name: value
            for name, value in os.environ.items()
            if name in KEPT or name.startswith(KEPT_PREFIXES)
        }
        if self.data:
            kept["FASHION_MNIST_ROOT"] = str(self.data)
        if self.paths:
            kept["PYTHONPATH"] = os.pathsep.join(map(str, self.paths))
        # First the site's MPI, then the environment's programs, then the system's programs.
        programs = [str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]
        if mpiexec := shutil.which("mpiexec"):
            programs.insert(0, str(Path(mpiexec).parent))
        return {
            "LANG": "C.UTF-8",
            **kept,
            "USER": "student",
            "LOGNAME": "student",
            "PATH": os.pathsep.join(programs),
            "IPP_NONINTERACTIVE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }


def _copy_readable(path: Path, target: Path) -> None:
    """Copy a file so that everybody can read the copy."""
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def make_box(options: SandboxOptions) -> Box:
    """Return the sandbox with the limits in the options."""
    limits = Limits(
        cell=options.cell_timeout, total=options.timeout, memory=int(options.memory * GB)
    )
    data = os.environ.get("FASHION_MNIST_ROOT") or platformdirs.user_cache_path("ddl-labs")
    data = Path(data).resolve()
    return Box(
        walls=options.walls and not options.by_user,
        by_user=options.by_user,
        limits=limits,
        paths=tuple(path.resolve() for path in options.paths),
        data=data if data.is_dir() else None,
    )


def bwrap() -> str:
    """Return the path of bubblewrap. Raises SandboxError if it isn't installed."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxError(
            "bubblewrap is not installed, so submissions could read and change everything that you "
            "can. Install it (Debian, Ubuntu: apt-get install bubblewrap), or use --no-sandbox if "
            "you trust every submission."
        )
    return path


def prepare(job: Path) -> None:
    """Make the folders that the boxes of a run need."""
    for name in (WORK, SHARED_FILES):
        (job / name).mkdir(exist_ok=True)


def require(box: Box, folder: Path) -> None:
    """Raise SandboxError unless a command runs in both boxes."""
    if box.by_user and os.geteuid() != 0:
        raise SandboxError("--by-user needs root, which becomes another user for each rank")
    if not (box.walls or box.by_user):
        return
    prepare(folder)
    command = box.outer(folder, [*box.inner(folder, 0), sys.executable, "-c", "import utils"])
    done = subprocess.run(command, capture_output=True, timeout=60, check=False, encoding="utf-8")
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["it printed no reason"])[-1]
        raise SandboxError(
            f"Grading can't build a sandbox on this machine: {reason}\nIf libseccomp.so.2 is "
            "missing, install it (Debian, Ubuntu: apt-get install libseccomp2). Otherwise ask an "
            "administrator to allow user namespaces. Or use --no-sandbox if you trust every "
            "submission."
        )


def job_uid(slot: int) -> int:
    """Return the first of the user ids of a run that root starts, which nobody else has."""
    rows = (LAST_UID - FIRST_UID) // UIDS
    taken = {entry.pw_uid for entry in pwd.getpwall()}
    for shift in range(rows):
        uid = FIRST_UID + (os.getpid() * 16 + slot + shift) % rows * UIDS
        if taken.isdisjoint(range(uid, uid + UIDS)):
            return uid
    raise SandboxError(f"There are no free user ids between {FIRST_UID} and {LAST_UID}.")


def font_lists() -> Iterator[Path]:
    """Yield the files in which matplotlib has listed this machine's fonts."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("MPLCONFIGDIR") or Path(cache, "matplotlib"))
    yield from sorted(folder.glob("fontlist-v*.json"))


def _knows(option: str) -> bool:
    text = subprocess.run([bwrap(), "--help"], capture_output=True, check=False, encoding="utf-8")
    return option in text.stdout + text.stderr


def _hidden(*folders: str) -> list[str]:
    """Return the options that put an empty folder above each of these."""
    return [
        word
        for folder in folders
        for word in ("--size", "4096", "--tmpfs", folder, "--remount-ro", folder)
    ]


def _threads_of_user() -> int:
    """Return how many threads this user has: older kernels count all for RLIMIT_NPROC."""
    about = [process.info for process in psutil.process_iter(["uids", "num_threads"])]
    return sum(
        info["num_threads"] or 0
        for info in about
        if info["uids"] and info["uids"].real == os.getuid()
    )
