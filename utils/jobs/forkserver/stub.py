"""The process that mpiexec starts for each forked rank. It is run as a file, `python -I -S`.

    stub.py SOCKET (SCRIPT | -c CODE | -m MODULE) [ARGUMENT …]

A rank's start includes the stub's imports, so the stub imports only built-in modules. It sends the
rank's properties to the server in one message, forwards signals, and ends in the same way as the
rank. If the server can't fork the rank, the stub runs the program itself.
"""

import _signal
import _socket
import marshal
import os
import sys

# Type checkers treat this name as true, so that `typing` isn't imported at runtime.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds that the server has to answer. On a very busy machine it may still be importing PyTorch.
PATIENCE = 45.0

# Says why a rank was started as an ordinary process although it was meant to be forked.
WHY_NOT_VARIABLE = "DDL_LABS_NOT_FORKED"

# `mpiexec --with-ft ulfm` sets it for each rank; then the other ranks survive when a rank dies.
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"

# Messages to the stub: a keeper is ready, the rank has ended (its wait status follows), and the
# server refuses (the reason follows). The stub answers the first with GO if it still waits.
READY = b"K"
ENDED = b"E"
REFUSED = b"R"
GO = b"G"
# The holder of a lease sends this to give the lease back.
BYE = b"bye"
NUMBER = 8  # bytes, big-endian

# Most descriptors of one message (SCM_MAX_FD of Linux).
MOST_DESCRIPTORS = 250

# Kinds of resource limits of Linux (RLIM_NLIMITS).
LIMITS = 16

_NOT_PASSED_ON = {_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD}


def request(arguments: list[str]) -> "dict[str, Any]":
    """Return everything that an ordinary process would inherit from mpiexec, for marshal."""
    import resource

    dispositions = {n: _signal.getsignal(n) for n in _signal.valid_signals()}
    return {
        "arguments": [os.fsencode(argument) for argument in arguments],
        "environment": dict(os.environb),
        "folder": os.getcwdb(),
        "umask": _umask(),
        "nice": os.nice(0),
        "affinity": sorted(os.sched_getaffinity(0)),
        "limits": [(n, *resource.getrlimit(n)) for n in range(LIMITS)],
        "ignored": [n for n, what in dispositions.items() if what == _signal.SIG_IGN],
        "blocked": [int(n) for n in _signal.pthread_sigmask(_signal.SIG_BLOCK, [])],
        "user": [list(os.getresuid()), list(os.getresgid()), sorted(os.getgroups())],
        "oom": _read("/proc/self/oom_score_adj"),
        "descriptors": _descriptors(),
        "stub": os.getpid(),
    }


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read().strip()
    except OSError:
        return b""


def _descriptors() -> list[int]:
    """Return the inheritable descriptors: 0 to 2, and descriptors from MPICH's mpiexec."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
        except OSError:
            pass  # the listing's own descriptor is closed by now
    return sorted(numbers)


def send(connection: _socket.socket, message: "dict[str, Any]") -> None:
    """Send a message, as its length and its marshal data."""
    body = marshal.dumps(message)
    connection.sendall(len(body).to_bytes(NUMBER, "big") + body)


def give(connection: _socket.socket, descriptors: list[int]) -> None:
    """Send GO with the descriptors of the rank."""
    packed = b"".join(n.to_bytes(4, sys.byteorder) for n in descriptors)
    connection.sendmsg([GO], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if packed else [])


def receive_exactly(connection: _socket.socket, number: int) -> bytes:
    """Return this number of bytes, or fewer if the other side has closed."""
    received = b""
    while len(received) < number and (part := connection.recv(number - len(received))):
        received += part
    return received


def start_plainly(arguments: list[str], reason: str) -> None:
    """Replace this process by the program, as if mpiexec had started Python itself."""
    os.environ[WHY_NOT_VARIABLE] = reason
    os.execv(sys.executable, [sys.executable, *arguments])


def end_as(status: int) -> None:
    """End like the rank, with the same exit status or by the same signal."""
    if status and FAULT_TOLERANT in os.environ:
        # If a process exits with a nonzero status, Open MPI doesn't notify the other ranks.
        status = int(_signal.SIGKILL)
    if not os.WIFSIGNALED(status):
        os._exit(os.waitstatus_to_exitcode(status))
    import resource

    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (_signal.SIGKILL, _signal.SIGSTOP):
        _signal.signal(number, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def ask(path: str, wanted: "dict[str, Any]") -> _socket.socket:
    """Send a request and return the connection. Raises OSError if there is no server."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(path)
    send(connection, wanted)
    return connection


def main(path: str, arguments: list[str]) -> None:
    """Stand in for the rank that the server forks, or run the program in this process."""
    wanted = request(arguments)
    if len(wanted["descriptors"]) > MOST_DESCRIPTORS:
        start_plainly(arguments, f"mpiexec passed it {len(wanted['descriptors'])} descriptors")
    try:
        connection = ask(path, wanted)
        kind = connection.recv(1)
    except OSError as error:  # there is no server, or it did not answer in time
        start_plainly(arguments, f"the fork server did not answer ({error})")
    if kind == REFUSED:
        connection.settimeout(None)
        reason = receive_exactly(connection, 4096).decode(errors="replace")
        start_plainly(arguments, reason)
    if kind != READY:
        start_plainly(arguments, "the fork server ended")
    give(connection, wanted["descriptors"])
    stand_for_the_rank(connection)


def stand_for_the_rank(connection: _socket.socket) -> None:
    """Forward signals until the rank has ended, and end in the same way."""

    def pass_on(number: int, frame: object) -> None:
        try:  # noqa: SIM105 - contextlib would cost a tenth of the start
            connection.send(bytes([number]))
        except OSError:
            pass  # the rank has just ended

    connection.settimeout(None)
    for number in _signal.valid_signals() - _NOT_PASSED_ON:
        _signal.signal(number, pass_on)
    # Close the rank's files here, because readers of its output wait until every copy is closed.
    for descriptor in _descriptors():
        os.close(descriptor)
    told = receive_exactly(connection, 1 + NUMBER)
    if told[:1] == ENDED:
        end_as(int.from_bytes(told[1:], "big"))
    # The keeper was killed, and the rank with it.
    end_as(int(_signal.SIGKILL))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
