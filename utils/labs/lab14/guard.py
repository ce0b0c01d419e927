"""The guard refuses gradients of an entry's own, files, and connections to other processes.

The clock of the played machine counts gradients and messages. An entry that computes gradients in
another way, or exchanges weights through a file, would do both in no time. The guard stops what is
easily written by accident or on purpose; a person who is determined to cheat can get around it, so
the judge also compares the weights with the number of images (:mod:`.entry_judge`).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

import utils

#: Events of Python's audit hooks (PEP 578) by which a process reaches anything outside of itself.
OUTSIDE = ("open", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "ctypes.dlopen")
OUTSIDE += ("socket.connect", "socket.bind", "mmap.__new__", "os.rename", "os.link", "os.listdir")


class Guard:
    """Refuses to an entry what the clock does not count.

    Args:
        entry: the entry's file.
    """

    def __init__(self, entry: str):
        self._entry = entry
        self._allowed = False
        # What Python and its packages load themselves, such as a module that is imported late.
        folders = {sys.prefix, sys.base_prefix, str(Path(torch.__file__).parents[1])}
        folders |= {str(Path(utils.__file__).resolve().parents[1]), str(Path(os.__file__).parent)}
        self._libraries = tuple(folder + os.sep for folder in folders)

    def watch(self) -> None:
        """Begin; there is no way back in this process."""
        engine = torch.autograd.graph._engine_run_backward

        def run_backward(*arguments, **named):
            if not self._allowed:
                raise PermissionError(
                    "this gradient would take no time on the played machine: all gradients are "
                    "computed by job.gradient(model, indices)"
                )
            return engine(*arguments, **named)

        torch.autograd.graph._engine_run_backward = run_backward
        torch.autograd._engine_run_backward = run_backward
        torch.autograd.forward_ad.enter_dual_level = run_backward
        sys.addaudithook(self._audit)

    @contextlib.contextmanager
    def gradient(self) -> Iterator[None]:
        """Allow the backward pass of the block."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def _audit(self, event: str, arguments: tuple) -> None:
        if event not in OUTSIDE or not self._is_the_entrys():
            return
        path = arguments[0] if event == "open" and arguments else None
        if isinstance(path, str | bytes) and self._is_read_from_a_library(path, *arguments[1:]):
            return
        raise PermissionError(
            f"{event}: an entry uses no files, processes or connections of its own. Ranks exchange "
            "what they know by messages of torch.distributed, which the harness counts"
        )

    def _is_read_from_a_library(self, path: str | bytes, mode: str | None, flags: int) -> bool:
        writes = set(mode) & set("wax+") if mode else flags & (os.O_WRONLY | os.O_RDWR)
        return not writes and os.path.realpath(os.fsdecode(path)).startswith(self._libraries)

    def _is_the_entrys(self) -> bool:
        """Return True if the entry asks, and neither the harness nor the backend in its place."""
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if name == self._entry:
                return True
            if f"{os.sep}torch_mpi{os.sep}" in name or f"{os.sep}lab14{os.sep}job.py" in name:
                return False
            frame = frame.f_back
        return False
