"""What the backend raises, and where in the user's code it happened."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TYPE_CHECKING

import torch
from torch.distributed import DistBackendError

from . import settings
from .lines import wrapped

if TYPE_CHECKING:
    from .protocol.status import Status
    from .record import Call

_LIBRARY_FOLDERS = (
    os.path.dirname(os.path.dirname(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
)
_is_library: dict[str, bool] = {}
_helpers: set[CodeType] = set()
# Installed packages; and what of them stands between any communication and this backend.
_PACKAGES = _LIBRARY_FOLDERS[0]
_PLUMBING = (
    _LIBRARY_FOLDERS[1],
    torch.distributed.distributed_c10d.__file__,
    torch.distributed.c10d_logger.__file__,
)


class CommunicationError(DistBackendError):
    """A communication went wrong: the message says which one, and between whom.

    Attributes:
        record: this rank's status when it happened, a dict: operation, peers, dtype, shape,
            bytes, tag, line, seconds waited (see
            :func:`torch_mpi.protocol.world.World.begin_incident`).
        call: the :class:`~torch_mpi.record.Call` it is about, or ``None``.
    """

    def __init__(self, message: str, call: Call | None = None, record: Status | None = None):
        super().__init__(message)
        self.call = call
        self.record: Status = record or {}

    @property
    def where(self) -> str:
        """Return the user's line, such as ``cell line 3 in ring()`` or ``train.py:12``."""
        return self.record.get("where", "")

    @property
    def waited(self) -> float:
        """Return the seconds from the call to the error."""
        return self.record.get("waited", 0.0)

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the message has the user's line, the rest is PyTorch's."""
        return wrapped(f"{type(self).__name__}: {self}")


class CommunicationTimeout(CommunicationError):
    """No partner came: within the group's timeout, or it is certain that none ever will."""


class CommunicationMismatch(CommunicationError):
    """Two ranks made calls that do not belong together."""


class CommunicationStopped(CommunicationError):
    """Another rank failed, so this one stopped waiting; the message names the first cause."""


def place_text(filename: str, line: int, function: str = "") -> str:
    """Return ``file.py:3`` for a file, ``package/module.py:3`` for one of an installed package.

    Where a tool has words of its own for its places (:mod:`torch_mpi.settings`), these.
    """
    words = settings.place(filename, line, function)
    if words is not None:
        return words
    if is_packaged(filename):
        return f"{filename.removeprefix(_PACKAGES)}:{line}"
    return f"{os.path.basename(filename)}:{line}"


def is_packaged(filename: str) -> bool:
    """Return whether a file is one of an installed package."""
    return filename.startswith(_PACKAGES)


def count_as_library(filename: str) -> None:
    """Take no line of this file for the user's: it is of a tool between the user and PyTorch."""
    _is_library[filename] = True


def helper(function: Callable) -> Callable:
    """Have errors name the line that calls this function, instead of a line inside it."""
    _helpers.add(function.__code__)
    return function


def _is_the_users(code: CodeType) -> bool:
    return code not in _helpers and not in_library(code.co_filename)


def in_library(filename: str) -> bool:
    """Return whether a file is Python's own, an installed package's or the backend's."""
    known = _is_library.get(filename)
    if known is None:
        known = filename.startswith((*_LIBRARY_FOLDERS, "<frozen"))
        _is_library[filename] = known
    return known


def users_place() -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost call that is the user's.

    On a thread of a package, none of whose code is the user's: that of the package's innermost.
    """
    frame: FrameType | None = sys._getframe(1)
    first = frame
    while frame is not None:
        if _is_the_users(frame.f_code):
            return frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    while first is not None:
        filename = first.f_code.co_filename
        if filename.startswith(_PACKAGES) and not filename.startswith(_PLUMBING):
            return filename, first.f_lineno, first.f_code.co_name
        first = first.f_back
    return None


def users_line() -> str:
    """Return :func:`users_place` as a text."""
    place = users_place()
    return place_text(*place) if place else "an unknown line"


def errors_line(error: BaseException) -> str:
    """Return the user's innermost line on the way to an error; empty when there is none."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_the_users(code):
            line = place_text(code.co_filename, number, code.co_name)
    return line
