"""The kernel of a graded notebook: an IPython kernel that submissions have no hold on.

Answers run on the ranks, in processes of the same user beside the kernel. What would let them
reach into it is taken away before the first cell: its connection file, its memory (ptrace and
/proc), the pickles by which a rank's reply could bring code along, and modules that an answer
leaves where the kernel would import them.

``python -P -m utils.grading.kernel '{"uid": 61000, "processes": 512, …}' < connection.json``
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

from utils.jobs.forkserver.client import LATER_VARIABLE

from .import_guard import only_out_of_reach

PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 4, 38

#: What a rank may send besides numbers, text, lists and dicts.
HARMLESS = {
    ("builtins", "complex"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
    ("builtins", "range"),
    ("builtins", "slice"),
    ("builtins", "bytearray"),
    ("collections", "OrderedDict"),
    ("ipyparallel.serialize.canning", "CannedArray"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "scalar"),
    ("numpy._core.numeric", "_frombuffer"),
}


class HarmlessUnpickler(pickle.Unpickler):
    """Reads data; refuses everything that could run code."""

    def find_class(self, module: str, name: str) -> Any:
        """The class, if it is one of those."""
        if (module, name) not in HARMLESS:
            raise pickle.UnpicklingError(f"a rank sent {module}.{name}: refused while grading")
        return super().find_class(module, name)


class Refused:
    """In place of what a rank sent and nobody reads: a tensor, mostly, that a picture would show.

    An error instead would be one of ipyparallel's thread, and the cell would wait for ever.
    """

    def __init__(self, why: Exception):
        self.why = str(why)

    def __repr__(self) -> str:
        return f"<{self.why}>"


class HarmlessPickle:
    """Stands in for the module `pickle` where ipyparallel reads what ranks send."""

    def __getattr__(self, name: str) -> Any:
        return getattr(pickle, name)

    @staticmethod
    def loads(data: bytes | bytearray | memoryview, **_: object) -> Any:
        """As `pickle.loads`, for data; `Refused` for all else, and for what is no pickle."""
        try:
            return HarmlessUnpickler(BytesIO(bytes(data))).load()
        except Exception as error:  # whatever a made-up pickle leads to
            return Refused(error)


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
    """Linux's prctl; other systems have none."""
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


def refuse_pickles() -> None:
    """Nothing that a rank sends to this kernel runs code here."""
    from ipyparallel.serialize import canning, serialize

    serialize.pickle = canning.pickle = HarmlessPickle()


def main() -> None:
    """Read the connection, give up what isn't needed, serve."""
    settings = json.loads(sys.argv[1])
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
    main()
