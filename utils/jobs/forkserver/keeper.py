"""The parent of a rank: passes signals on, tells how the rank ended, ends it with its stub.

One keeper for each rank, so that the ranks live on when the server dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket

from utils.jobs.forkserver import stub

_PR_SET_PDEATHSIG = 1


def close_all_but(kept: set[int]) -> None:
    """Close every other descriptor: of the server's sockets, and of other sessions'."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def fork_rank(connection: socket.socket) -> list[int]:
    """Fork the rank in a fresh fork of the server, and keep it. Return in the rank only.

    Args:
        connection: to the stub.

    Returns:
        The rank's descriptors, in the order of the request.
    """
    os.setsid()
    close_all_but({connection.fileno()})
    descriptors = _descriptors(connection)
    if descriptors is None:
        os._exit(0)
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    keeper = os.getpid()
    rank = os.fork()
    if rank == 0:
        _die_with(keeper)
        # A group of its own, as below mpiexec: a signal to it is for this rank only.
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


def _descriptors(connection: socket.socket) -> list[int] | None:
    """What the stub gives its rank; None from one that lost patience: it is the program itself."""
    try:
        connection.sendall(stub.READY)
        said, descriptors, _, _ = socket.recv_fds(connection, 1, stub.MOST_DESCRIPTORS)
    except OSError:
        return None
    return descriptors if said == stub.GO else None


def _die_with(parent: int) -> None:
    """Have the system kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it has ended already
        os._exit(1)


def _keep(rank: int, connection: socket.socket, wake: int) -> None:
    """Until the rank has ended."""
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
    """Signals from the stub; False when it has ended, and the rank is killed for it."""
    try:
        numbers = connection.recv(64)
    except OSError:
        numbers = b""
    # The rank is not reaped yet: its number can't be another process's.
    for number in numbers or (signal.SIGKILL,):
        os.kill(rank, number)
    return bool(numbers)
