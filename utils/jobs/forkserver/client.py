"""Finds the fork server that fits, or starts one, and holds a lease on it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import utils
from utils.jobs.forkserver import identity, stub
from utils.jobs.session import base_folder, locked, not_in_forked_children

# "off" starts ranks as processes of their own.
VARIABLE = "DDL_LABS_FORK_SERVER"

# The server's program, for Python.
SERVER = ("-m", "utils.jobs.forkserver.server")

# In the server's folder: the variables that its libraries have read.
SETTINGS = "settings.json"

# Seconds for mpiexec to start one process.
PATIENCE = 30.0

# Longest name that a UNIX socket may have, in bytes, with the final 0.
LONGEST = 107

# A forked rank's environment and command line are written over the server's: room for them.
PADDING_VARIABLE = "DDL_LABS_FORK_SERVER_PADDING"
ROOM_FOR_ENVIRONMENT, ROOM_FOR_COMMAND = 65_536, 4_096


@dataclass
class Lease:
    """A fork server in use; it is told when the holder ends, however that happens.

    Attributes:
        path: of its socket.
        connection: to the server.
        settings: the variables that libraries read when they are loaded, as they are in its ranks.
    """

    path: Path
    connection: socket.socket
    settings: dict[str, str]

    @property
    def python(self) -> list[str]:
        """Return what stands for `python` in the command of a rank."""
        return [sys.executable, "-I", "-S", stub.__file__, str(self.path)]

    def close(self, stay: bool = True) -> None:
        """Give the lease back. A second call changes nothing.

        Args:
            stay: the server stays for some minutes; otherwise it ends, unless somebody else uses
                it.
        """
        try:
            self.connection.sendall(stub.BYE if stay else b"")
        except OSError:  # it was killed, or this is the second time
            with contextlib.suppress(OSError), locked(base_folder() / "lock"):
                _remove_if_dead(self.path.parent)
        self.connection.close()


def why_not(environment: Mapping[str, str]) -> str:
    """Return why ranks of this environment can't be forked here; "" if they can."""
    if environment.get(VARIABLE, "").lower() in ("off", "0", "no"):
        return f"{VARIABLE} is {environment[VARIABLE]}"
    return identity.unsupported()


def lease(environment: Mapping[str, str], mpiexec: str) -> Lease:
    """Lease the server for ranks that this mpiexec starts; start the server if there is none.

    Nobody waits for it here: stubs wait until it has imported what it needs.

    Raises:
        OSError: no server can be had; says why.
    """
    folder = base_folder() / f"fork-{identity.key(environment, mpiexec)}"
    path = folder / "socket"
    if len(os.fsencode(path)) > LONGEST:
        raise OSError(f"the name of its socket would be too long: {path}")
    with locked(base_folder() / "lock"):
        for other in base_folder().glob("fork-*"):
            _remove_if_dead(other)
        connection = _connect(path)
        if connection is None:
            _start(folder, path, environment, mpiexec)
            connection = _connect(path)
    if connection is None:
        raise OSError(f"the fork server did not start; see {folder / 'log'}")
    stub.send(connection, {"lease": os.getpid()})
    not_in_forked_children(connection)
    return Lease(path, connection, json.loads((folder / SETTINGS).read_text()))


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    return connection


def _remove_if_dead(folder: Path) -> None:
    """Remove what a server has left that was killed; under the lock."""
    connection = _connect(folder / "socket")
    if connection is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        connection.close()


def _start(folder: Path, path: Path, environment: Mapping[str, str], mpiexec: str) -> None:
    """Start a server; its socket is made here, so that clients can already line up."""
    folder.mkdir(mode=0o700, exist_ok=True)
    settings = _below(mpiexec, environment)
    (folder / SETTINGS).write_text(json.dumps(settings))
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(1024)
        command = [sys.executable, *SERVER]
        command += [str(listener.fileno()), str(folder), " " * ROOM_FOR_COMMAND]
        with (folder / "log").open("w") as log:
            subprocess.Popen(
                command,
                env=_environment(environment, settings),
                cwd=Path(utils.__file__).parents[1],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[listener.fileno()],
                start_new_session=True,
            )


def _below(mpiexec: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that libraries read, as a rank sees them: Open MPI's sets LD_LIBRARY_PATH."""
    show = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        [mpiexec, "-n", "1", sys.executable, "-I", "-S", "-c", show],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    try:
        return identity.load_time(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError):
        raise OSError(f"{mpiexec} could not start a process: {done.stderr[-500:]}") from None


def _environment(environment: Mapping[str, str], settings: dict[str, str]) -> dict[str, str]:
    """Of the server: what libraries read when they are loaded, one thread, nothing of a job."""
    # Nor of a run: who ends what a run has started would end it for others, too.
    gone = ("DDL_LABS_RANKS", "DDL_LABS_RUN", "SLURM_", "OMPI_", "PMIX_", "PRTE_", "MPI4PY_")
    own = {name: value for name, value in environment.items() if not name.startswith(gone)}
    own |= settings | dict.fromkeys(identity.THREADS, "1")
    return own | {PADDING_VARIABLE: "x" * ROOM_FOR_ENVIRONMENT}
