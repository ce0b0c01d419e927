"""What the system shows of a process that was forked: /proc/PID/cmdline and environ.

Linux reads both from the memory of the process, where they lie since its program was loaded: a
fork shows the server's. So the rank's are written over them. `ps` then shows the rank, and whoever
looks for the processes of a session finds it (`utils.jobs.watchdog`). The server makes room when it
is started (`client`). The method is that of `setproctitle`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

# Of `man proc_pid_stat`, counted from 1: arg_start, arg_end, env_start, env_end.
_FIRST_FIELD = 48


def show(command: list[bytes], environment: Mapping[bytes, bytes] | None = None) -> None:
    """Have /proc show this command, and this environment if one is given; what fits of them."""
    with open("/proc/self/stat", "rb") as file:
        # The name, in parentheses, may hold spaces; field 3 comes after it.
        fields = file.read().rpartition(b")")[2].split()
    first = _FIRST_FIELD - 3
    start, after, env_start, env_after = map(int, fields[first : first + 4])
    if not 0 < start < after <= env_start:
        return
    room = after - start
    text = b" ".join(command).replace(b"\0", b" ")[: room - 2]
    # A last byte that is not 0 tells Linux that the text ends at its first 0.
    ctypes.memmove(start, text.ljust(room - 1, b"\0") + b"\1", room)
    if environment is not None:
        ctypes.memmove(env_start, _block(environment, env_after - env_start), env_after - env_start)


def _block(environment: Mapping[bytes, bytes], room: int) -> bytes:
    """The variables as Linux lays them, whole ones only, filled up with 0."""
    block = b""
    for name, value in environment.items():
        entry = name + b"=" + value + b"\0"
        if len(block) + len(entry) < room:
            block += entry
    return block.ljust(room, b"\0")
