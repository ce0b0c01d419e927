"""What the backend raises, and where in the user's code it happened."""

from __future__ import annotations

import os
import sys
import textwrap
from types import FrameType

import torch
from torch.distributed import DistBackendError

_LIBRARY_FOLDERS = (
    os.path.dirname(os.path.dirname(torch.__file__)) + os.sep,
    os.path.dirname(os.path.abspath(__file__)) + os.sep,
    os.path.dirname(os.__file__) + os.sep,
)


class CommunicationError(DistBackendError):
    """A communication went wrong: the message says which one, and between whom."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the message has the user's line, the rest is PyTorch's."""
        return textwrap.wrap(f"{type(self).__name__}: {self}", width=96)


class CommunicationTimeout(CommunicationError):
    """No partner within the timeout of the process group: a deadlock, or a rank that is late.

    Attributes:
        call: the :class:`~utils.mpi.record.Call` that waited.
        where: the user's line, such as ``cell line 3`` or ``train.py:12``.
        waited: seconds.
    """

    def __init__(self, message: str, call=None, where: str = "", waited: float = 0.0):
        super().__init__(message)
        self.call, self.where, self.waited = call, where, waited


def place_of(filename: str, line: int) -> str:
    """``cell line 3`` for code of a notebook cell, ``file.py:3`` for a file."""
    if "ipykernel_" in filename or filename.startswith("<ipython-input"):
        return f"cell line {line}"
    return f"{os.path.basename(filename)}:{line}"


def users_line(frame: FrameType | None = None) -> str:
    """The innermost line of the stack that is neither PyTorch's nor this package's."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not filename.startswith(_LIBRARY_FOLDERS) and not filename.startswith("<frozen"):
            return place_of(filename, frame.f_lineno)
        frame = frame.f_back
    return "an unknown line"
