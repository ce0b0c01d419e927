"""Stands below mpiexec for a rank that the fork server makes. Run as a file, `python -I -S`.

    stub.py SOCKET (SCRIPT | -c CODE | -m MODULE) [ARGUMENT …]

Its own imports are the time that a rank takes to start, so they are built-in modules only. What
the rank shall be like goes to the server as one message. Then signals are passed on, and the stub
ends as the rank did. Where the server can't make the rank, the stub becomes it the ordinary way.
"""

import _signal
import _socket
import marshal
import os
import sys

# Type checkers take it for true, and `typing` is not imported.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

# Seconds for the server to answer; it may still be importing PyTorch on a very busy machine.
PATIENCE = 45.0

# Why a rank was started the ordinary way although it was meant to be forked.
WHY_NOT_VARIABLE = "DDL_LABS_NOT_FORKED"

# Set for each rank by `mpiexec --with-ft ulfm`: the other ranks live on when one dies.
FAULT_TOLERANT = "OMPI_MCA_mpi_ft_enable"

# What server and keeper tell: there is a keeper; the rank's wait status follows; why there is no
# rank. And what the stub answers to the first: it has waited, and wants the rank.
READY = b"K"
ENDED = b"E"
REFUSED = b"R"
GO = b"G"
# What the holder of a lease says when it gives the lease back.
BYE = b"bye"
NUMBER = 8  # bytes, big-endian

# Most descriptors of one message (SCM_MAX_FD of Linux).
MOST_DESCRIPTORS = 250

# Kinds of resource limits of Linux (RLIM_NLIMITS).
LIMITS = 16

_NOT_PASSED_ON = {_signal.SIGKILL, _signal.SIGSTOP, _signal.SIGCHLD}


def request(arguments: list[str]) -> "dict[str, Any]":
    """Return all that a process of its own would have got from mpiexec, as values for marshal."""
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
    """Return those that are inherited: 0 to 2, and what MPICH's mpiexec gives its ranks."""
    numbers = []
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.get_inheritable(int(name)):
                numbers.append(int(name))
        except OSError:
            pass  # the descriptor of the listing itself
    return sorted(numbers)


def send(connection: _socket.socket, message: "dict[str, Any]") -> None:
    """Write a message: its length, and what marshal makes of it."""
    body = marshal.dumps(message)
    connection.sendall(len(body).to_bytes(NUMBER, "big") + body)


def give(connection: _socket.socket, descriptors: list[int]) -> None:
    """Say that the rank is wanted, and pass on its descriptors."""
    packed = b"".join(n.to_bytes(4, sys.byteorder) for n in descriptors)
    connection.sendmsg([GO], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, packed)] if packed else [])


def receive_exactly(connection: _socket.socket, number: int) -> bytes:
    """Return so many bytes; fewer if the other side has closed."""
    received = b""
    while len(received) < number and (part := connection.recv(number - len(received))):
        received += part
    return received


def start_plainly(arguments: list[str], reason: str) -> None:
    """Become the program, as if mpiexec had started Python itself."""
    os.environ[WHY_NOT_VARIABLE] = reason
    os.execv(sys.executable, [sys.executable, *arguments])


def end_as(status: int) -> None:
    """End as the rank did: by the same exit status, or by the same signal."""
    if status and FAULT_TOLERANT in os.environ:
        # Open MPI tells the other ranks of no process that ends by itself with another status.
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
    """Return a connection on which the server has this request. Raise OSError without a server."""
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    connection.settimeout(PATIENCE)
    connection.connect(path)
    send(connection, wanted)
    return connection


def main(path: str, arguments: list[str]) -> None:
    """Be the rank, by way of the server or by becoming the program."""
    wanted = request(arguments)
    if len(wanted["descriptors"]) > MOST_DESCRIPTORS:
        start_plainly(arguments, f"mpiexec gave it {len(wanted['descriptors'])} descriptors")
    try:
        connection = ask(path, wanted)
        kind = connection.recv(1)
    except OSError as error:  # also: no answer in time
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
    """Pass signals on until the rank has ended, and end like it."""

    def pass_on(number: int, frame: object) -> None:
        try:  # noqa: SIM105 - contextlib would cost a tenth of the start
            connection.send(bytes([number]))
        except OSError:
            pass  # the rank has ended just now

    connection.settimeout(None)
    for number in _signal.valid_signals() - _NOT_PASSED_ON:
        _signal.signal(number, pass_on)
    # What the rank holds open, this process must not: a reader waits for the end of its output.
    for descriptor in _descriptors():
        os.close(descriptor)
    told = receive_exactly(connection, 1 + NUMBER)
    if told[:1] == ENDED:
        end_as(int.from_bytes(told[1:], "big"))
    # The keeper was killed, and the rank with it.
    end_as(int(_signal.SIGKILL))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
