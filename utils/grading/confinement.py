"""The first program in a sandbox: it gives up privileges, sets limits, and becomes a program.

The command is ``python -P -m utils.grading.confinement '{"uid": 61000, "processes": 512, …}'
PROGRAM ARGUMENT…``. This module imports nothing of the course, because the sandbox has little of
it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

#: An option of Linux's prctl.
PR_SET_NO_NEW_PRIVS = 38
#: System calls with which ranks could leave something for others outside their folders, learn what
#: others do with a file that all can read, keep memory that no limit counts, or change the process
#: of bubblewrap, which has fewer limits.
REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "kcmp"),
    *("add_key", "keyctl", "request_key", "memfd_create", "memfd_secret"),
    *("inotify_init", "inotify_init1", "fanotify_init", "io_uring_setup", "io_setup"),
    *("preadv2", "pwritev2", "mincore", "cachestat", "fadvise64", "readahead", "process_madvise"),
)
#: The same with locks, which ranks need if they share a folder.
LOCKS = ("flock",)
#: Commands of fcntl, by Linux's numbers: F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW, F_SETLEASE
#: and F_NOTIFY. Other systems, which have no such sandbox, lack some of the names.
LOCKING = (6, 7, 37, 38, 1024, 1026)
#: Sockets of families up to this one stay in the sandbox. Those of others, as AF_VSOCK, may not.
LAST_FAMILY = 16  # AF_NETLINK
#: Numbers of libseccomp: actions, and comparisons. Linux ignores the upper half of fcntl's command,
#: so the lower half is compared.
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
GREATER, MASKED_EQUAL, LOWER = 6, 7, 0xFFFFFFFF
LIMITS = {
    "RLIMIT_NPROC": "processes",
    "RLIMIT_AS": "address_space",
    "RLIMIT_CPU": "cpu_seconds",
    "RLIMIT_FSIZE": "file_size",
    "RLIMIT_NOFILE": "open_files",
}


def limit(settings: dict[str, Any]) -> None:
    """Set the limits of this process and of all that it starts."""
    for name, key in LIMITS.items():
        if settings.get(key):
            most = resource.getrlimit(getattr(resource, name))[1]
            value = settings[key] if most < 0 else min(settings[key], most)
            resource.setrlimit(getattr(resource, name), (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def become(uid: int | None) -> None:
    """Become this user permanently, without any capability; None: stay the same user."""
    if uid is None:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


class Comparison(ctypes.Structure):
    """Libseccomp's ``struct scmp_arg_cmp``: how an argument of a system call compares."""

    _fields_ = (
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("first", ctypes.c_uint64),  # the mask, or the only value
        ("second", ctypes.c_uint64),
    )


def rank_here(variable: str) -> int:
    """Return the number of the rank that this process becomes; 0 if it becomes something else."""
    text = os.environ.get(variable, "0")
    return int(text) if text.isdecimal() else 0


def refuse(may_lock: bool, last_family: int = LAST_FAMILY) -> None:
    """Refuse system calls permanently, for this process and all that it starts.

    Args:
        may_lock: whether locks on files are allowed.
        last_family: sockets of families beyond this one are refused.

    Raises:
        OSError: this machine has no libseccomp, or its Linux can't do it.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(ALLOW)))

    def rule(name: str, *compared: Comparison) -> None:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # this kind of machine has such a call
            array = (Comparison * len(compared))(*compared)
            action = ctypes.c_uint32(REFUSE)
            _succeed(library.seccomp_rule_add_array(rules, action, number, len(compared), array))

    for name in (*REFUSED, *(() if may_lock else LOCKS)):
        rule(name)
    rule("socket", Comparison(0, GREATER, last_family, 0))
    for command in () if may_lock else LOCKING:
        rule("fcntl", Comparison(1, MASKED_EQUAL, LOWER, command))
    _succeed(library.seccomp_load(rules))


def _succeed(status: int) -> None:
    if status < 0:
        raise OSError(-status, f"libseccomp: {os.strerror(-status)}")


def main(options: str, *program: str) -> None:
    """Become a program.

    Args:
        options: JSON with the user's number, the home folder and the limits, see `Box.inner`.
    """
    settings = json.loads(options)
    limit(settings)
    uid = settings.get("uid")
    become(uid + rank_here(settings["rank"]) if uid and "rank" in settings else uid)
    if "may_lock" in settings:
        refuse(settings["may_lock"], settings.get("last_family", LAST_FAMILY))
    if home := settings.get("home"):
        Path(home).mkdir(parents=True, exist_ok=True)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(*sys.argv[1:])
