"""The fork server: a process with one thread that has imported PyTorch, and whose forks are ranks.

    python -m utils.jobs.forkserver.server LISTENER FOLDER

LISTENER is the number of a descriptor, a listening UNIX socket. FOLDER contains the socket's name.

Its clients are stubs, which request ranks, and lease holders, such as kernels and test sessions. It
ends when the last lease is lost because its holder died, or after five minutes without use.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import marshal
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from utils.jobs.forkserver import child, stub
from utils.jobs.forkserver.client import LATER_VARIABLE, THREADS, load_time
from utils.jobs.session import locked

# Seconds without leases and ranks after which the server ends.
IDLE = 300.0
# Seconds that a client has to send its request.
PATIENCE = 10.0

# Most bytes of a request; environment variables are the largest part.
MOST_OF_A_REQUEST = 2**24

# Seconds between two looks for ranks that have ended.
TICK = 1.0

# Modules that ranks import first. mpi4py.MPI is missing, because each rank must load MPI itself.
PRELOADED = (
    *("numpy", "numpy.random", "torch", "torch.distributed", "torch.nn.parallel"),
    *("mpi4py", "psutil", "torch_mpi.protocol.diagnosis", "torch_mpi.network"),
    *("ipyparallel.engine.app", "ipyparallel.engine.nanny", "ipyparallel.controller.app"),
    *("ipykernel.debugger", "IPython.core.completerlib", "IPython.extensions.storemagic"),
    *("tornado.gen", "tornado.platform.asyncio", "tornado.queues"),
    *("utils.cluster.rank_side", "utils.data", "utils.models"),
)
# Modules that PyTorch imports with the first optimizer, DDP or profiler, and torchvision, which the
# first data set needs (1.1 s of a core). The server imports them when it is idle, so that the first
# ranks don't wait for them; LATER_VARIABLE can change that.
PRELOADED_LATER = ("torch._dynamo", "utils.data.fashion")

_PR_SET_PDEATHSIG = 1


@dataclass
class Server:
    """The state of the fork server."""

    listener: socket.socket  # accepts new clients
    folder: Path  # of the socket
    settings: dict[str, str]  # environment variables that libraries have read
    leases: list[socket.socket] = field(default_factory=list)  # connections of the holders
    keepers: set[int] = field(default_factory=set)  # process ids of the ranks' parents
    lost: bool = False  # whether a lease holder has died
    later: tuple[str, ...] = PRELOADED_LATER  # modules to import when idle
    used: float = field(default_factory=time.monotonic)  # time of the last lease or rank

    def serve(self) -> tuple[dict[str, Any], socket.socket] | None:
        """Serve clients until nobody needs the server.

        Returns:
            None in the server, when it ends; in a fresh fork, the request of a rank and the
            connection to the rank's stub.
        """
        while True:
            ready, _, _ = select.select([self.listener, *self.leases], [], [], TICK)
            for lease in set(ready) - {self.listener}:
                self._hear(lease)
            if self.listener in ready and (rank := self._admit()):
                return rank
            self._bury()
            if not ready and self.later:
                preload(self.later)
                self.later = ()
            if self._useless() and self._close():
                return None

    # -- clients --------------------------------------------------------------------------------

    def _admit(self) -> tuple[dict[str, Any], socket.socket] | None:
        """Accept a client; in the fork that will be its rank, return the request and connection."""
        connection, _ = self.listener.accept()
        try:
            connection.settimeout(PATIENCE)
            if _user_of(connection) != os.geteuid():
                raise PermissionError("another user's process")
            wanted = _receive(connection)
            if "lease" in wanted:
                connection.settimeout(None)
                self.leases.append(connection)
                return None
            if self._fork(wanted, connection):
                return wanted, connection
        except Exception as error:  # a bad client must not stop the server
            print(f"The server refused a client: {error}", file=sys.stderr, flush=True)
        connection.close()
        return None

    def _fork(self, wanted: dict[str, Any], connection: socket.socket) -> bool:
        """Fork a keeper for this request; return True in the fork."""
        try:
            child.check(wanted, self.settings)
        except child.CannotForkError as reason:
            connection.sendall(stub.REFUSED + str(reason).encode())
            return False
        connection.settimeout(None)
        forked = os.fork()
        if forked == 0:
            return True
        self.keepers.add(forked)
        return False

    def _hear(self, lease: socket.socket) -> None:
        """Remove the lease of a holder that has given it back or died."""
        try:
            message = lease.recv(len(stub.BYE))
        except OSError:
            message = b""
        self.lost |= message != stub.BYE
        self.leases.remove(lease)
        lease.close()

    # -- its end --------------------------------------------------------------------------------

    def _bury(self) -> None:
        while self.keepers:
            ended, _ = os.waitpid(-1, os.WNOHANG)
            if ended == 0:
                break
            self.keepers.discard(ended)
        if self.leases or self.keepers:
            self.used = time.monotonic()
        if self.leases:
            self.lost = False

    def _useless(self) -> bool:
        if self.leases or self.keepers:
            return False
        # Without the folder, no client can find the server.
        return self.lost or time.monotonic() - self.used > IDLE or not self.folder.exists()

    def _close(self) -> bool:
        """Remove the socket's name under the clients' lock; return False if one has connected."""
        if not self.folder.exists():
            return True
        with locked(self.folder.parent / "lock"):
            if select.select([self.listener], [], [], 0)[0]:
                return False
            shutil.rmtree(self.folder, ignore_errors=True)
            self.listener.close()
        return True


def _user_of(connection: socket.socket) -> int:
    """Return the effective user id of the process at the other end, as the system reports it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 3 * 4)
    return int(struct.unpack("3i", credentials)[1])


def _receive(connection: socket.socket) -> dict[str, Any]:
    """Return a message. Raises ValueError or EOFError if the bytes aren't a message."""
    size = int.from_bytes(stub.receive_exactly(connection, stub.NUMBER), "big")
    if not 0 < size < MOST_OF_A_REQUEST:
        raise ValueError(f"a request of {size} bytes")
    message: dict[str, Any] = marshal.loads(stub.receive_exactly(connection, size))
    return message


# --- the keeper of a rank -----------------------------------------------------------------------
#
# A rank's parent, its keeper, forwards signals, reports how the rank ended, and ends the rank when
# the stub is gone. Each rank has its keeper, so that ranks keep running when the server dies.


def fork_rank(connection: socket.socket) -> list[int]:
    """Fork the rank in a fresh fork of the server, which becomes its keeper and never returns.

    In the rank, return its descriptors in the order of the request.
    """
    os.setsid()
    child.close_all_but({connection.fileno()})
    descriptors = _receive_descriptors(connection)
    if descriptors is None:
        os._exit(0)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    keeper = os.getpid()
    rank = os.fork()
    if rank == 0:
        _die_with(keeper)
        # A separate process group, as below mpiexec, so that a signal to it reaches only this rank.
        os.setpgid(0, 0)
        for descriptor in (wake, woken):
            os.close(descriptor)
        connection.close()
        return descriptors
    try:
        for descriptor in descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        _keep(rank, connection, wake)
    finally:
        os._exit(0)


def _receive_descriptors(connection: socket.socket) -> list[int] | None:
    """Return the descriptors from the stub; None if it stopped waiting and became the program."""
    try:
        connection.sendall(stub.READY)
        answer, descriptors, _, _ = socket.recv_fds(connection, 1, stub.MOST_DESCRIPTORS)
    except OSError:
        return None
    return descriptors if answer == stub.GO else None


def _die_with(parent: int) -> None:
    """Make the system kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)


def _keep(rank: int, connection: socket.socket, wake: int) -> None:
    """Wait until the rank has ended, and forward signals until then."""
    watched = select.poll()
    watched.register(connection, select.POLLIN)
    watched.register(wake, select.POLLIN)
    while True:
        ended, status = os.waitpid(rank, os.WNOHANG)
        if ended:
            break
        for descriptor, _ in watched.poll():
            if descriptor == wake:
                os.read(wake, 64)
            elif not _pass_on(connection, rank):
                watched.unregister(connection)
    with contextlib.suppress(OSError):
        connection.sendall(stub.ENDED + status.to_bytes(stub.NUMBER, "big"))


def _pass_on(connection: socket.socket, rank: int) -> bool:
    """Forward signals from the stub. If the stub has ended, kill the rank and return False."""
    try:
        numbers = connection.recv(64)
    except OSError:
        numbers = b""
    # The rank isn't reaped yet, so no other process can have its id.
    for number in numbers or (signal.SIGKILL,):
        os.kill(rank, number)
    return bool(numbers)


# --- the server's process -----------------------------------------------------------------------


def preload(names: tuple[str, ...]) -> None:
    """Import modules for the ranks; a failure is logged, and each rank imports that module."""
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            print(f"{name} is not preloaded: {type(error).__name__}: {error}", file=sys.stderr)
    gc.collect()
    # The garbage collector must not touch these objects again, because forks share their memory.
    gc.freeze()


def main() -> None:
    """Run the server. In a fork, become the rank and run its program."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listener = socket.socket(fileno=int(sys.argv[1]))
    folder = Path(sys.argv[2])
    settings = load_time(os.environ)
    # Leave out the spaces that make room for a rank's command.
    child.show_title([
        os.fsencode(word) for word in [sys.executable, *sys.orig_argv[1:]] if word.strip()
    ])
    when = os.environ.get(LATER_VARIABLE)
    preload(PRELOADED + (PRELOADED_LATER if when == "first" else ()))
    later = () if when in ("first", "never") else PRELOADED_LATER
    assert all(os.environ[name] == "1" for name in THREADS)
    rank = Server(listener, folder, settings, later=later).serve()
    if rank is None:
        return
    wanted, connection = rank
    child.become(wanted, fork_rank(connection))
    child.run_program(wanted["arguments"])


if __name__ == "__main__":
    main()
