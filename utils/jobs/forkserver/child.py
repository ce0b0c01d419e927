"""Turns a forked process into a rank: it adopts the state of its stub, and runs the program.

An ordinary process would get this state from mpiexec, or create it when it starts. A program should
not be able to see whether it was forked (tests/jobs/test_forkserver.py compares both).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib.machinery
import io
import math
import os
import random
import re
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from torch_mpi import library
from utils.jobs.forkserver.client import THREADS, load_time

# PyTorch reads this variable when it is imported.
DEBUG = b"TORCH_DISTRIBUTED_DEBUG"
DEBUG_LEVELS = (b"OFF", b"INFO", b"DETAIL")
# The number of arg_start in `man proc_pid_stat`; then come arg_end, env_start and env_end.
FIRST_FIELD = 48


class CannotForkError(Exception):
    """This rank can't be forked and must be an ordinary process; the message says why."""


# --- before the fork ---------------------------------------------------------------------------


def check(wanted: dict[str, Any], settings: Mapping[str, str]) -> None:
    """Raise CannotForkError if a fork of this process can't become the requested rank.

    Args:
        settings: the environment variables that libraries have read in this process.
    """
    _check_environment(wanted["environment"], settings)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:
        raise CannotForkError(f"a library has started {threads - 1} threads in the fork server")
    program = os.fsdecode(wanted["arguments"][0])
    path = os.path.join(os.fsdecode(wanted["folder"]), program)
    if program not in ("-c", "-m") and not os.path.isfile(path):
        raise CannotForkError(f"{program} is an option of Python, or not a file")
    for number, _, hard in wanted["limits"]:
        if _as_number(hard) > _as_number(resource.getrlimit(number)[1]):
            raise CannotForkError(f"its resource limit {number} is above the fork server's")
    if wanted["nice"] < os.nice(0):
        raise CannotForkError("its priority is above the fork server's")
    if wanted["user"] != [list(os.getresuid()), list(os.getresgid()), sorted(os.getgroups())]:
        raise CannotForkError("it runs as another user or group")
    if hidden := shadowed(wanted):
        raise CannotForkError(f"{hidden} hides a module that the fork server has imported")


def _check_environment(environment: dict[bytes, bytes], settings: Mapping[str, str]) -> None:
    theirs = load_time({os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()})
    for name in sorted(theirs.keys() | settings.keys()):
        if theirs.get(name) != settings.get(name):
            raise CannotForkError(f"the variable {name} differs from the fork server's")
    _threads(environment)
    if environment.get(DEBUG, b"OFF").upper() not in DEBUG_LEVELS:
        raise CannotForkError(f"PyTorch refuses the value of {DEBUG.decode()}")


def _as_number(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def shadowed(wanted: dict[str, Any]) -> str:
    """Return a file in the program's folder that hides an imported module; "" if there is none."""
    first = _first_folder(wanted["arguments"])
    folder = os.path.join(os.fsdecode(wanted["folder"]), first)
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            stem = name.partition(".")[0]
            module = sys.modules.get(stem)
            importable = name == stem or name.endswith((".py", ".so"))
            if module is not None and importable and not _lies_in(module, folder):
                return os.path.join(folder, name)
    return ""


def _first_folder(arguments: list[bytes]) -> str:
    """Return the first folder on Python's path: the script's folder, or "" for the current one."""
    if sys.flags.safe_path:
        return os.devnull
    if arguments[0] in (b"-c", b"-m"):
        return ""
    return os.path.dirname(os.path.realpath(os.fsdecode(arguments[0])))


def _lies_in(module: ModuleType, folder: str) -> bool:
    file = getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", [])), "")
    return isinstance(file, str) and file.startswith(os.path.join(os.path.realpath(folder), ""))


def _threads(environment: dict[bytes, bytes]) -> dict[str, int]:
    """Return how many threads of PyTorch and of NumPy this environment requests.

    PyTorch asks MKL, which prefers MKL_NUM_THREADS to OMP_NUM_THREADS, and NumPy's OpenBLAS prefers
    OPENBLAS_NUM_THREADS. Without a number each library counts the cores when it is loaded.

    Raises:
        CannotForkError: the environment requests no number of threads.
    """
    asked = {name: environment.get(name.encode(), b"").decode() for name in THREADS}
    if not asked["OMP_NUM_THREADS"]:
        raise CannotForkError("OMP_NUM_THREADS is not set, so each library counts the cores itself")
    if not all(re.fullmatch("[0-9]*", value) for value in asked.values()):
        raise CannotForkError(f"a number of threads is not a single number: {asked}")
    omp = int(asked["OMP_NUM_THREADS"])
    return {
        "torch": int(asked["MKL_NUM_THREADS"] or omp),
        "numpy": int(asked["OPENBLAS_NUM_THREADS"] or omp),
    }


# --- after the fork ----------------------------------------------------------------------------


def become(wanted: dict[str, Any], descriptors: list[int]) -> None:
    """Adopt the state of the stub: everything in its request, and its file descriptors."""
    library.stand_in = wanted["stub"]
    _take_signals(wanted)
    _take_limits(wanted)
    _take_descriptors(wanted["descriptors"], descriptors)
    os.umask(wanted["umask"])
    os.chdir(wanted["folder"])
    os.environb.clear()
    os.environb.update(wanted["environment"])
    time.tzset()
    _renew_streams()
    _renew_random_numbers()
    set_threads(wanted["environment"])
    if distributed := sys.modules.get("torch.distributed"):
        distributed.set_debug_level_from_env()
    tempfile.tempdir = None
    command = [os.fsencode(sys.executable), *wanted["arguments"]]
    show_title(command, wanted["environment"])
    gc.enable()


def _take_signals(wanted: dict[str, Any]) -> None:
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        usual: Any = signal.SIG_DFL
        if number == signal.SIGINT:
            usual = signal.default_int_handler
        elif number in (signal.SIGPIPE, signal.SIGXFSZ):
            usual = signal.SIG_IGN
        signal.signal(number, signal.SIG_IGN if number in wanted["ignored"] else usual)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, wanted["blocked"])


def _take_limits(wanted: dict[str, Any]) -> None:
    for number, soft, hard in wanted["limits"]:
        if resource.getrlimit(number) != (soft, hard):
            resource.setrlimit(number, (soft, hard))
    os.nice(wanted["nice"] - os.nice(0))
    os.sched_setaffinity(0, wanted["affinity"])
    if wanted["oom"]:
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
            file.write(wanted["oom"])


def _take_descriptors(numbers: list[int], descriptors: list[int]) -> None:
    """Give each descriptor its number from the stub, and close all other descriptors."""
    above = max([*numbers, *descriptors]) + 1
    moved = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in descriptors]
    close_all_but(set(moved))
    for number, descriptor in zip(numbers, moved, strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)


def close_all_but(kept: set[int]) -> None:
    """Close every other descriptor, such as sockets of the server and of other sessions."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))


def _renew_streams() -> None:
    """Make text streams for descriptors 0 to 2, as Python does when it starts."""
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, f"__{name}__")
        try:
            os.fstat(number)
        except OSError:
            new = None  # Python has no stream for a closed descriptor
        else:
            new = _stream(number, old, unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _stream(number: int, old: io.TextIOWrapper | None, unbuffered: bool) -> io.TextIOWrapper:
    """Return a stream like `create_stdio` in CPython's pylifecycle.c."""
    mode = "w" if number else "r"
    through = unbuffered and number > 0
    buffering = 0 if through else -1
    buffer: Any = open(number, f"{mode}b", buffering, closefd=False)  # noqa: SIM115 - stays open
    raw = getattr(buffer, "raw", buffer)
    raw.name = ("<stdin>", "<stdout>", "<stderr>")[number]
    stream = io.TextIOWrapper(
        buffer,
        encoding=getattr(old, "encoding", "utf-8"),
        errors="backslashreplace" if number == 2 else getattr(old, "errors", "strict"),
        newline="\n" if number > 0 else None,
        line_buffering=not through and (number == 2 or raw.isatty()),
        write_through=unbuffered,
    )
    stream.mode = mode  # type: ignore[misc]  # CPython sets it as well
    return stream


def _renew_random_numbers() -> None:
    """Seed each random number generator from the system, as in a fresh process."""
    random.seed()
    if numpy := sys.modules.get("numpy.random"):
        numpy.seed()
    if torch := sys.modules.get("torch"):
        torch.default_generator.seed()
    if multiprocessing := sys.modules.get("multiprocessing.process"):
        multiprocessing.current_process().authkey = os.urandom(32)


def set_threads(environment: dict[bytes, bytes]) -> None:
    """Give thread pools the size that the environment requests; in the server they have size 1."""
    asked = _threads(environment)
    if asked["torch"] != 1 and (torch := sys.modules.get("torch")):
        torch.set_num_threads(asked["torch"])
    if asked["numpy"] != 1 and (setter := _setter_of_openblas()):
        setter(asked["numpy"])


def _setter_of_openblas() -> Callable[[int], object] | None:
    """Return OpenBLAS's function that sets the number of threads; None for another library."""
    with open("/proc/self/maps", encoding="utf-8") as file:
        paths = {line.split()[-1] for line in file if "openblas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in ("scipy_openblas_set_num_threads64_", "scipy_openblas_set_num_threads"):
            setter: Callable[[int], object] | None = getattr(library, name, None)
            if setter:
                return setter
    return None


def show_title(command: list[bytes], environment: Mapping[bytes, bytes] | None = None) -> None:
    """Make /proc/PID/cmdline and /proc/PID/environ show this command and environment.

    Linux reads both from the memory of the process, so a fork shows the server's. We overwrite that
    memory, as far as there is room. Then `ps` shows the rank's command, and `utils.jobs.watchdog`
    finds the rank by its environment. The server gets extra room when it is started (see `client`).
    The method comes from `setproctitle`.
    """
    with open("/proc/self/stat", "rb") as file:
        # The name in parentheses may contain spaces, and field 3 comes after it.
        fields = file.read().rpartition(b")")[2].split()
    first = FIRST_FIELD - 3
    start, after, env_start, env_after = map(int, fields[first : first + 4])
    if not 0 < start < after <= env_start:
        return
    room = after - start
    text = b" ".join(command).replace(b"\0", b" ")[: room - 2]
    # If the last byte is not 0, Linux ends the text at its first 0.
    ctypes.memmove(start, text.ljust(room - 1, b"\0") + b"\1", room)
    if environment is not None:
        ctypes.memmove(env_start, _block(environment, env_after - env_start), env_after - env_start)


def _block(environment: Mapping[bytes, bytes], room: int) -> bytes:
    """Return as many whole variables as fit, in Linux's format, padded with 0."""
    block = b""
    for name, value in environment.items():
        entry = name + b"=" + value + b"\0"
        if len(block) + len(entry) < room:
            block += entry
    return block.ljust(room, b"\0")


# --- the program -------------------------------------------------------------------------------


def run_program(arguments: list[bytes]) -> NoReturn:
    """Run `SCRIPT …`, `-c CODE …` or `-m MODULE …` as Python would, and exit like Python."""
    loaded = set(sys.modules)
    words = [os.fsdecode(word) for word in arguments]
    sys.orig_argv = [sys.executable, *words]
    # For `-m`, Python has "-m" there until it has found the module's file.
    sys.argv = [words[0], *words[2:]] if words[0] in ("-m", "-c") else words
    _put_first(arguments)
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = sys.modules["builtins"]
    main.__annotations__ = {}
    main.__loader__ = importlib.machinery.BuiltinImporter
    status = 0
    interrupted = False
    rank = os.getpid()
    try:
        _run(words, main)
    except SystemExit as asked:
        status = _status(asked.code)
    except BaseException as error:
        status = 1
        interrupted = isinstance(error, KeyboardInterrupt)
        error.__traceback__ = _own_part(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
    fresh = [module for name, module in sys.modules.items() if name not in loaded]
    modules = [main, *(module for module in fresh if _is_beside(module))]
    _end(status, interrupted, modules, ends_mpi=os.getpid() == rank)


def _is_beside(module: ModuleType) -> bool:
    """Return whether the module's file is directly in the program's folder."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and os.path.dirname(file) == os.path.realpath(sys.path[0])


def _run(words: list[str], main: ModuleType) -> None:
    if words[0] == "-m":
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]  # as `python -m` does
    elif words[0] == "-c":
        exec(compile(words[1], "<string>", "exec"), vars(main))
    else:
        _run_script(words[0], main)


def _put_first(arguments: list[bytes]) -> None:
    """Replace the server's folder on `sys.path` by the program's."""
    if not sys.flags.safe_path:
        # `-m` puts the full path of the current folder there, and `-c` an empty string.
        sys.path[0] = os.getcwd() if arguments[0] == b"-m" else _first_folder(arguments)


def _run_script(path: str, main: ModuleType) -> None:
    main.__file__ = os.path.abspath(path)
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
    vars(main)["__cached__"] = None
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        full_path = os.path.abspath(path)
        print(f"{sys.executable}: can't open file {full_path!r}: {reason}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(compile(source, main.__file__, "exec"), vars(main))


def _status(code: object) -> int:
    """Return the exit status for `sys.exit(code)`, like `handle_system_exit` in pythonrun.c."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(status: int, interrupted: bool, modules: list[ModuleType], ends_mpi: bool) -> NoReturn:
    """End as `Py_FinalizeEx` does for the program, but keep the modules that the server loaded.

    Clearing PyTorch's modules would copy most of the shared memory, which costs 0.3 s in each rank.

    Args:
        interrupted: whether a KeyboardInterrupt ended the program.
        modules: the program, and modules in its folder.
        ends_mpi: false in a child that the program has forked, which has none of MPI's threads.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as `Py_FinalizeEx` does
    atexit._run_exitfuncs()
    # Daemon threads would fail on cleared names.
    if threading.active_count() == 1:
        _clear(modules)
    if ends_mpi:
        _end_mpi()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader is gone
            stream.flush()
    ctypes.CDLL(None).fflush(None)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _clear(modules: list[ModuleType]) -> None:
    """Clear a program's names, so that the destructors of its objects run."""
    for module in modules:
        # Like CPython, clear names with an underscore first.
        names = [name for name in vars(module) if not name.startswith("__")]
        for name in sorted(names, key=lambda name: not name.startswith("_")):
            vars(module)[name] = None
    gc.collect()


def _end_mpi() -> None:
    """Finalize MPI, as mpi4py does when the interpreter ends."""
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is None or sys.modules["mpi4py"].rc.finalize is False:
        return
    if MPI.Is_initialized() and not MPI.Is_finalized():
        MPI.Finalize()


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
