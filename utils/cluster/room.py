"""The private folder of a kernel's ranks, and the process that watches over them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from utils.cluster import watchdog
from utils.cluster.launch import RanksError


class Room:
    """A private folder for connection files, logs and stacks, locked while the kernel lives.

    The system drops the lock when the kernel dies, so a free lock means left-overs.
    """

    def __init__(self):
        base = base_folder()
        with _locked(base / "lock"):
            _clear_left_overs(base)
            self.mark = f"kernel{os.getpid()}-{secrets.token_hex(4)}"
            self.folder = base / self.mark
            self.folder.mkdir(mode=0o700)
            self._lock = open(self.folder / "lock", "w")  # noqa: SIM115 - held until close()
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        _not_in_forked_children(self._lock)

    def close(self) -> None:
        """Give the lock back and remove the folder."""
        self._lock.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def base_folder() -> Path:
    """This user's folder for all rooms. Raises RanksError if others can open it."""
    base = Path(tempfile.gettempdir()) / f"ddl-labs-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    status = base.lstat()
    if base.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise RanksError(f"{base} must be a folder that only you can open; remove it.")
    return base


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _clear_left_overs(base: Path) -> None:
    """End ranks whose kernel is dead, where even the watchdog was killed; no one else's."""
    for folder in base.glob("kernel*"):
        with contextlib.suppress(OSError), (folder / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            watchdog.end_all(folder.name)
            shutil.rmtree(folder, ignore_errors=True)


def _not_in_forked_children(file: IO) -> None:
    """A child forked by the student's code must not keep the pipe or the lock open."""
    number = file.fileno()

    def close() -> None:
        with contextlib.suppress(OSError, ValueError):
            if not file.closed and file.fileno() == number:
                file.close()

    os.register_at_fork(after_in_child=close)


class Watchdog:
    """The process that ends the ranks when this kernel is gone."""

    def __init__(self, room: Room):
        command = [sys.executable, "-I", watchdog.__file__, room.mark, str(room.folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            text=True,
        )
        _not_in_forked_children(self._process.stdin)

    def tell(self, roots: list[watchdog.Root]) -> None:
        """Name the processes that ranks descend from."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(roots) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """Let it end what is left, and wait for it."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
