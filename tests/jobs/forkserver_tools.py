"""What the tests of the fork server share: a portrait of a process, and stubs as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

# Prints what a program can see of itself, as one JSON object, the same however it was started.
PORTRAIT = r"""
import json, os, sys
import faulthandler, random, resource, signal, time
def status():
    found = dict(line.split(":\t", 1) for line in open("/proc/self/status").read().splitlines())
    keys = "Umask Uid Gid Groups SigBlk SigIgn SigCgt CapEff NoNewPrivs Seccomp Cpus_allowed_list"
    return {key: found.get(key) for key in keys.split()}
def descriptors():
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if not target.startswith("/proc/"):
            offset = os.lseek(0, 0, 1) if name == "0" and os.path.isfile(target) else None
            found[name] = [target.partition(":[")[0], os.get_inheritable(int(name)), offset]
    return found
def stream(s):
    if s is None:
        return None
    names = "name mode encoding errors line_buffering write_through newlines closed"
    return [str(getattr(s, n)) for n in names.split()] + [type(s.buffer).__name__, s.fileno()]
main = sys.modules["__main__"]
mine = dict(status=status(), descriptors=descriptors())
import numpy, torch
portrait = mine | dict(
    environment={k: v for k, v in os.environ.items()},
    bytes=sorted(k.decode("latin-1") for k in os.environb),
    folder=os.getcwd(),
    arguments=sys.argv, original=sys.orig_argv, path=sys.path, flags=str(sys.flags),
    executable=sys.executable, prefix=sys.prefix, hook=sys.excepthook is sys.__excepthook__,
    main={k: str(v).split(" at 0x")[0] for k, v in vars(main).items()
          if k.startswith("__") and k != "__warningregistry__"},
    main_is_this=vars(main) is globals(),
    streams=[stream(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
    same_streams=[sys.stdout is sys.__stdout__, sys.stdin is sys.__stdin__],
    limits=[resource.getrlimit(n) for n in range(16)],
    nice=os.nice(0), affinity=sorted(os.sched_getaffinity(0)), cores=os.cpu_count(),
    oom=open("/proc/self/oom_score_adj").read(), timezone=time.tzname,
    handlers={int(n): str(signal.getsignal(n)) .split(" at 0x")[0] for n in signal.valid_signals()},
    group_leader=os.getpgid(0) == os.getpid(), wakeup=signal.set_wakeup_fd(-1),
    os_threads=len(os.listdir("/proc/self/task")) if torch.get_num_threads() == 1 else None,
    torch_threads=[torch.get_num_threads(), torch.get_num_interop_threads()],
    recursion=sys.getrecursionlimit(), faulthandler=faulthandler.is_enabled(),
    warnings=[str(f) for f in sys.warnoptions], default_dtype=str(torch.get_default_dtype()),
    grad=torch.is_grad_enabled(), shown=open("/proc/self/cmdline").read().replace("\0", " ").strip()
    if len(sys.orig_argv[-1]) < 200 else None,
    shown_environment=sorted(open("/proc/self/environ", "rb").read().decode("latin-1")
                             .strip("\0").split("\0")),
    cuda=torch.cuda.is_initialized(),
    mpi="mpi4py.MPI" in sys.modules,
)
print(json.dumps(portrait))
"""


def stub_command(lease, *words: str | os.PathLike) -> list[str]:
    """A program by the fork server."""
    return [*lease.python, *map(str, words)]


def plain_command(*words: str | os.PathLike) -> list[str]:
    """The same as a process of its own."""
    return [sys.executable, *map(str, words)]


def portrait(command: list[str], **options) -> dict:
    """What a portrait program printed; it must end well."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def wait_until(condition, what: str, seconds: float = 30.0) -> None:
    """Until it holds; fails with these words at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.01)


def server_of(lease) -> psutil.Process:
    """The server's process: it has its folder on its command line, which it rewrites once."""
    found: list[psutil.Process] = []
    wait_until(lambda: found.extend(_servers_in(Path(lease.path).parent)) or found, "the server")
    return found[0]


def _servers_in(path: Path) -> Iterator[psutil.Process]:
    folder = str(path)
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        # Keepers look the same; the server is nobody's fork.
        if folder in words and not any(folder in w for w in _cmdline_of_parent(process)):
            yield process


def _cmdline_of_parent(process: psutil.Process) -> list[str]:
    try:
        parent = process.parent()
        return parent.cmdline() if parent else []
    except psutil.Error:
        return []


def is_gone(pid: int) -> bool:
    """Has this process ended?"""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
