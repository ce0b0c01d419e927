"""The kernel of a graded notebook: an IPython kernel that submissions have no hold on.

Answers run on the ranks, in processes of the same user beside the kernel. What would let them
reach into it is taken away before the first cell: its connection file, its memory (ptrace and
/proc), the pickles by which a rank's reply could bring code along, and modules that an answer
leaves where the kernel would import them.

Jupyter runs ``kernel.py launch FILE COMMAND…`` outside of the kernel's sandbox. The file names the
kernel's ports and the key with which anyone could run code in it, so it is deleted at once; the
command gets its content on standard input. For that, this module is run as a file, with ``-I -S``,
and imports nothing of the course at its top. The command is, inside of the sandbox,
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

#: Of Linux's prctl.
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38

#: What a rank may send besides numbers, text, lists and dicts.
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
    """Become the command, with the file's content as standard input."""
    with open(path, "rb") as file:
        content = file.read()
    os.unlink(path)
    reading, writing = os.pipe()
    os.write(writing, content)  # a pipe takes 64 kB without a reader
    os.close(writing)
    os.dup2(reading, 0)
    os.execv(command[0], command)


# --- pickles -------------------------------------------------------------------------------------


class HarmlessUnpickler(pickle.Unpickler):
    """A reader of data, which refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class if it is harmless."""
        if name not in HARMLESS.get(module, ()):
            raise pickle.UnpicklingError(f"a rank sent {module}.{name}: refused while grading")
        return super().find_class(module, name)


class Refused:
    """A stand-in for what a rank sent and nobody reads: a tensor, mostly, for a picture.

    An error instead would be one of ipyparallel's thread, and the cell would wait for ever.
    """

    def __init__(self, why: Exception):
        self.why = str(why)

    def __repr__(self) -> str:
        return f"<{self.why}>"


class HarmlessPickle:
    """A stand-in for the module `pickle` where ipyparallel reads what ranks send."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    @staticmethod
    def loads(data: bytes | bytearray | memoryview, **_: object) -> Any:
        """Return what `pickle.loads` does, for data; `Refused` for all else, and for no pickle."""
        try:
            return HarmlessUnpickler(BytesIO(bytes(data))).load()
        except Exception as error:  # whatever a made-up pickle leads to
            return Refused(error)


def refuse_pickles() -> None:
    """Let nothing that a rank sends to this kernel run code here."""
    from ipyparallel.serialize import canning, serialize

    serialize.pickle = canning.pickle = HarmlessPickle()


# --- imports -------------------------------------------------------------------------------------
# IPython imports modules long after the first cell: at the first traceback, at the first table.
# Answers run beside it as the same user. A file `stack_data.py` that one of them puts into the
# current folder would be imported by the kernel, and all points would be its author's.


class Nothing:
    """A finder that finds no module, for a folder that an answer can write to."""

    def find_spec(self, *_: object) -> None:
        """Find nothing."""


def out_of_reach(path: str) -> bool:
    """Return whether nobody in the sandbox can change what lies there: a read-only mount.

    Permissions would not do: who owns a folder can open it again. A path that does not exist
    counts as the folder above it, where it may appear.
    """
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        return bool(path) and bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def refuse_writable(path: str) -> Nothing:
    """Raise ImportError if the next of `sys.path_hooks` shall decide."""
    if out_of_reach(path):
        raise ImportError(f"{path} is read in the usual way")
    return Nothing()


def only_out_of_reach() -> None:
    """Import from folders out of reach only from now on, whatever comes into `sys.path` later.

    Also from the folders of packages, which are looked up by the same hooks.
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
    """Be that user for good, without a capability left; None: stay who it is."""
    if uid is None:
        return
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl; other systems have none."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def settle(settings: dict[str, Any]) -> None:
    """Make the home folder; matplotlib's list of fonts takes seconds to make anew."""
    if not settings.get("home"):
        return
    fonts = Path(settings["home"], ".cache", "matplotlib")
    fonts.mkdir(parents=True)
    for path in settings.get("fonts", []):
        with contextlib.suppress(OSError):
            shutil.copy(path, fonts / Path(path).name)
    os.chdir(settings["home"])


def serve(options: str) -> None:
    """Read the connection, give up what isn't needed, serve.

    Args:
        options: JSON: the limits, the user, the home folder and others, see `Box.inner`.
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

    if settings.get("home"):  # in the sandbox, where all that answers can't change is read-only
        only_out_of_reach()
    from ipykernel.kernelapp import IPKernelApp

    refuse_pickles()
    with contextlib.suppress(ImportError):
        import matplotlib as _  # noqa: F401 - reads a matplotlibrc of the current folder
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
