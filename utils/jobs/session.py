"""The private folder of a job's ranks, and the process that watches over them."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import platformdirs
import psutil

from utils.jobs import RanksError, watchdog
from utils.jobs.site import settings


class Session:
    """A private folder for connection files, logs and stacks, and the watchdog over its processes.

    The folder is locked while the kernel is alive. The system releases the lock when the kernel
    dies, so a folder with a free lock is left over. Every process of the session has the session's
    name, the mark, in its environment.

    Args:
        shared: whether ranks on other hosts must see the folder.
        job: whether the ranks have a Slurm job, which has the same name as the session.
    """

    def __init__(self, shared: bool = False, job: bool = False):
        self._shared = shared
        base = base_folder(shared)
        with locked(base / "lock"):
            _clear_left_overs(base)
            self.mark = f"{_own_sessions()}{os.getpid()}-{secrets.token_hex(4)}"
            self.folder = base / self.mark
            self.folder.mkdir(mode=0o700)
            if job:
                (self.folder / watchdog.JOB).touch()
            self._lock = open(self.folder / "lock", "w", encoding="utf-8")  # noqa: SIM115 - held until close()
            _flock(self._lock)
        not_in_forked_children(self._lock)
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", watchdog.__file__, self.mark, str(self.folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            encoding="utf-8",
        )
        assert self._watchdog.stdin is not None, "it was started with a pipe"
        self._pipe = self._watchdog.stdin
        not_in_forked_children(self._pipe)

    @property
    def environment(self) -> dict[str, str]:
        """Return variables for every process of this session: its mark, and MPI's folders.

        MPI's files are put there because a killed process can't remove them. Ranks on other hosts
        don't get these folders.
        """
        mark = {watchdog.VARIABLE: self.mark}
        if self._shared:
            return mark
        folders = {"PRTE_MCA_prte_tmpdir_base": str(self.folder)}
        memory = Path(watchdog.shared_memory(self.mark))
        with contextlib.suppress(OSError):
            memory.mkdir(mode=0o700, exist_ok=True)
            folders["OMPI_MCA_btl_sm_backing_directory"] = str(memory)
        return mark | {name: value for name, value in folders.items() if name not in os.environ}

    def watch(self, pids: Iterable[int]) -> None:
        """Send the watchdog the ancestors of the ranks, some of which may have ended already."""
        roots = []
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                roots.append((pid, psutil.Process(pid).create_time()))
        with contextlib.suppress(BrokenPipeError):
            self._pipe.write(json.dumps(roots) + "\n")
            self._pipe.flush()

    def close(self) -> None:
        """End all processes that are left, by the watchdog if it works; then remove the files."""
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._watchdog.wait(20):
                watchdog.end_all(self.mark)
        self._lock.close()
        watchdog.remove(self.mark, self.folder)


def base_folder(shared: bool = False) -> Path:
    """Return this user's folder for all sessions.

    Args:
        shared: return a folder that every node of the cluster sees, not one on this host.

    Raises:
        RanksError: the folder can't be made, or other users can open it.
    """
    name = f"ddl-labs-{os.getuid()}"
    base = Path(tempfile.gettempdir()) / name
    if shared:
        site = settings().shared_folder
        base = Path(site) / name if site else platformdirs.user_cache_path("ddl-labs") / "ranks"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RanksError(
            f"The folder {base} for the ranks' connection files can't be made: {error}"
        ) from None
    status = base.lstat()
    if base.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RanksError(f"{base} must be a folder that only you can open. Remove it.")
    return base


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file, which all processes of this user share."""
    with path.open("w", encoding="utf-8") as file:
        _flock(file)
        yield


def _flock(file: IO[str]) -> None:
    """Lock a file if its file system can: Lustre may be mounted without locks, NFS without lockd.

    Without locks, notebooks that start together don't wait for each other, and left-overs stay.
    """
    import fcntl  # here, because Windows has none, and no sessions

    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _own_sessions() -> str:
    """Return the prefix of this host's sessions; locks of other hosts may be invisible here."""
    return f"kernel-{socket.gethostname()}-"


def _clear_left_overs(base: Path) -> None:
    """End ranks of dead kernels whose watchdog was killed, too, and remove their folders."""
    import fcntl

    for folder in base.glob(f"{_own_sessions()}*"):
        with contextlib.suppress(OSError), (folder / "lock").open("a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            watchdog.end_all(folder.name)
            watchdog.cancel_job(folder.name, folder)
            watchdog.remove(folder.name, folder)


def not_in_forked_children(file: IO[Any] | socket.socket) -> None:
    """Close this pipe, lock or socket in every child that the student's code forks."""
    number = file.fileno()

    def close() -> None:
        with contextlib.suppress(OSError, ValueError):
            if file.fileno() == number:
                file.close()

    os.register_at_fork(after_in_child=close)
