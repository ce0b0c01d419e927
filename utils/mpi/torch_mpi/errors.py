"""The errors that the backend raises, and the search for the user's line that caused them."""

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
# By id, because the hash of a code is slow.
_helpers: dict[int, CodeType] = {}
# The folder of installed packages, and the files through which every communication passes.
_PACKAGES = _LIBRARY_FOLDERS[0]
_PLUMBING = (
    _LIBRARY_FOLDERS[1],
    torch.distributed.distributed_c10d.__file__,
    torch.distributed.c10d_logger.__file__,
)


class CommunicationError(DistBackendError):
    """The error of a failed communication; its message names the communication and the ranks.

    Attributes:
        record: this rank's status at the failure, a dict: operation, peers, dtype, shape,
            bytes, tag, line, seconds waited (see
            :func:`torch_mpi.protocol.world.World.begin_incident`).
        call: the :class:`~torch_mpi.record.Call` that failed, or ``None``.
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
        """Return the message alone for a notebook: only it has the user's line."""
        return wrapped(f"{type(self).__name__}: {self}")


class CommunicationTimeout(CommunicationError):
    """The error if a partner missed the group's timeout, or if it certainly never comes."""


class CommunicationMismatch(CommunicationError):
    """The error if two ranks made calls that do not match."""


class CommunicationStopped(CommunicationError):
    """The error if this rank stopped because another failed; its message names the first cause."""

    @property
    def because(self) -> str:
        """Return the first cause, in words."""
        return self.record.get("because", "")


class TensorSizeError(ValueError):
    """The error if the tensors that a rank passes to a collective don't fit each other."""


def error_of(status: Status) -> CommunicationError:
    """Return the error of a rank that an incident has stopped, by the kind of the incident."""
    kinds = {"mismatch": CommunicationMismatch}
    kinds |= dict.fromkeys(("deadlock", "timeout"), CommunicationTimeout)
    kind = kinds.get(status.get("kind", ""), CommunicationStopped)
    return kind(status.get("error", ""), None, status)


def place_text(filename: str, line: int, function: str = "") -> str:
    """Return ``file.py:3``, or ``package/module.py:3`` for a file of an installed package.

    If a tool names its own places (:func:`torch_mpi.settings.place`), its name comes first.
    """
    words = settings.place(filename, line, function)
    if words is not None:
        return words
    if is_packaged(filename):
        return f"{filename.removeprefix(_PACKAGES)}:{line}"
    return f"{os.path.basename(filename)}:{line}"


def is_packaged(filename: str) -> bool:
    """Return whether a file belongs to an installed package."""
    return filename.startswith(_PACKAGES)


def count_as_library(filename: str) -> None:
    """Never take a line of this file for the user's: a tool between user and PyTorch owns it."""
    _is_library[filename] = True


def helper(function: Callable) -> Callable:
    """Mark a function, so that errors name the line that calls it, and not a line inside it."""
    _helpers[id(function.__code__)] = function.__code__
    return function


def _is_the_users(code: CodeType) -> bool:
    """Return whether a line of this code may be shown as the user's."""
    return not in_library(code.co_filename) and id(code) not in _helpers


def in_library(filename: str) -> bool:
    """Return whether a file belongs to Python, to an installed package or to the backend."""
    known = _is_library.get(filename)
    if known is None:
        known = filename.startswith((*_LIBRARY_FOLDERS, "<frozen"))
        _is_library[filename] = known
    return known


def users_place() -> tuple[str, int, str] | None:
    """Return file, line and function of the innermost call in the user's code.

    A package's own thread runs no code of the user's: there the package's innermost call counts.
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
    """Return the user's innermost line in an error's traceback; empty if there is none."""
    line = ""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if _is_the_users(code):
            line = place_text(code.co_filename, number, code.co_name)
    return line
