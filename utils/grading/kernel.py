"""The kernel of a graded notebook: an IPython kernel that submissions can't control.

Answers run on the ranks, which are processes of the kernel's user. Before the first cell, the
kernel closes every way by which an answer could reach it: its connection file, its memory (ptrace
and /proc), pickles, with which a rank's reply could bring code along, and modules that an answer
writes where the kernel would import them.

Jupyter runs ``kernel.py launch FILE COMMAND…`` outside the kernel's sandbox. The file contains the
kernel's ports and the key with which anyone could run code in it. So the file is deleted at once,
and the command reads its content from standard input. This module is run as a file with ``-I -S``,
so it imports nothing of the course at its top. The command in the sandbox is
``python -P -m utils.grading.kernel serve '{"uid": 61000, "processes": 512, …}'``.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import shutil
import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any

#: Options of Linux's prctl.
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

#: Types that a rank may send in addition to numbers, text, lists and dicts.
HARMLESS = {
    "builtins": ("complex", "set", "frozenset", "range", "slice", "bytearray"),
    "collections": ("OrderedDict",),
    "ipyparallel.serialize.canning": ("CannedArray",),
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
}


def launch(path: str, *command: str) -> None:
    """Replace this process by the command, with the file's content as standard input."""
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    reading, writing = os.pipe()
    os.write(writing, content)  # a pipe holds 64 kB without a reader
    os.close(writing)
    os.dup2(reading, 0)
    os.execv(command[0], command)


# --- pickles -------------------------------------------------------------------------------------


class HarmlessUnpickler(pickle.Unpickler):
    """An unpickler for plain data that refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is harmless. Raises UnpicklingError otherwise."""
        if name not in HARMLESS.get(module, ()):
            raise pickle.UnpicklingError(f"A rank sent {module}.{name}, which grading refuses.")
        return super().find_class(module, name)


class Refused:
    """A stand-in for a refused object, usually a tensor for a picture that grading doesn't need.

    An error would be raised in ipyparallel's thread, and the cell would wait forever.
    """

    def __init__(self, why: Exception):
        self.why = str(why)

    def __repr__(self) -> str:
        return f"<{self.why}>"


class HarmlessPickle:
    """A replacement for the module `pickle` with which ipyparallel reads what ranks send."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    @staticmethod
    def loads(data: bytes | bytearray | memoryview, **_: object) -> Any:
        """Return the object in a pickle; a `Refused` if it isn't plain data or not a pickle."""
        try:
            return HarmlessUnpickler(BytesIO(bytes(data))).load()
        except Exception as error:  # a forged pickle can raise any exception
            return Refused(error)


def refuse_pickles() -> None:
    """Prevent messages from ranks from running code in this kernel."""
    from ipyparallel.serialize import canning, serialize

    serialize.pickle = canning.pickle = HarmlessPickle()


# --- imports -------------------------------------------------------------------------------------
# IPython imports some modules long after the first cell, for example at the first traceback. An
# answer runs as the same user, so it could write `stack_data.py` into the current folder. The
# kernel would import that file, and its author could give themselves all points.


class Nothing:
    """A finder that finds no module, for a folder that an answer can write to."""

    def find_spec(self, *_: object) -> None:
        """Return None: no module is found."""


def out_of_reach(path: str) -> bool:
    """Return whether nobody in the sandbox can change this path, because its mount is read-only.

    Checking permissions isn't enough, because the owner of a folder can change them. A path that
    doesn't exist counts as the folder above it, because it may appear there.
    """
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        return bool(path) and bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def refuse_writable(path: str) -> Nothing:
    """Return a finder that finds nothing if answers can write to this path.

    Raises:
        ImportError: They can't, so the next of `sys.path_hooks` shall decide.
    """
    if out_of_reach(path):
        raise ImportError(f"{path} is read in the usual way")
    return Nothing()


def only_out_of_reach() -> None:
    """Import only from read-only folders from now on, whatever is added to `sys.path` later.

    The folders of packages are restricted, too, because the same hooks look them up.
    """
    sys.path_hooks.insert(0, refuse_writable)
    sys.path_importer_cache.clear()
    sys.path[:] = [path for path in sys.path if path and out_of_reach(path)]


# --- the process ---------------------------------------------------------------------------------


def limit(settings: dict[str, Any]) -> None:
    """Set the limits that every process of the notebook inherits."""
    for name, key in (
        ("RLIMIT_NPROC", "processes"),
        ("RLIMIT_AS", "address_space"),
        ("RLIMIT_CPU", "cpu_seconds"),
        ("RLIMIT_FSIZE", "file_size"),
    ):
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


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; do nothing on other systems."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def settle(settings: dict[str, Any]) -> None:
    """Make the home folder, with matplotlib's font lists, which would take seconds to rebuild."""
    if not settings.get("home"):
        return
    fonts = Path(settings["home"], ".cache", "matplotlib")
    fonts.mkdir(parents=True)
    for path in settings.get("fonts", []):
        with contextlib.suppress(OSError):
            shutil.copy(path, fonts / Path(path).name)
    os.chdir(settings["home"])


def serve(options: str) -> None:
    """Read the connection file's content, drop privileges, and run the kernel.

    Args:
        options: JSON with the limits, the user, the home folder and more, see `Box.inner`.
    """
    from utils.jobs.forkserver.client import LATER_VARIABLE

    settings = json.loads(options)
    connection = sys.stdin.buffer.read()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    limit(settings)
    become(settings.get("uid"))
    if settings.get("uid") is not None:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    settle(settings)
    if later := settings.get("later"):
        os.environ[LATER_VARIABLE] = later

    if settings.get("home"):  # only in the sandbox are the folders of the course read-only
        only_out_of_reach()
    from ipykernel.kernelapp import IPKernelApp

    refuse_pickles()
    with contextlib.suppress(ImportError):
        import matplotlib as _  # noqa: F401 - reads a matplotlibrc before answers can write one
    handle, path = tempfile.mkstemp(suffix=".json")
    with open(handle, "wb") as file:
        file.write(connection)
    app = IPKernelApp.instance(ignore_cwd=True)
    app.initialize(["-f", path])
    os.unlink(path)
    prctl(PR_SET_DUMPABLE, 0)
    app.start()


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(*sys.argv[2:])
    else:
        serve(sys.argv[2])
