"""What the kernel of a graded notebook imports comes from where no answer can write.

IPython imports modules long after the first cell: at the first traceback, at the first table.
Answers run beside it as the same user. A file `stack_data.py` that one of them puts into the
current folder would be imported by the kernel, and all points would be its author's.
"""

from __future__ import annotations

import contextlib
import os
import sys


class Nothing:
    """Finds no module: in place of the finder of a folder that an answer can write to."""

    def find_spec(self, *_: object) -> None:
        """Not here."""


def out_of_reach(path: str) -> bool:
    """Whether nobody in the sandbox can change what lies there: it is mounted for reading only.

    Permissions would not do: who owns a folder can open it again. A path that does not exist
    counts as the folder above it, where it may appear.
    """
    while path and not os.path.exists(path):
        path = os.path.dirname(path)
    with contextlib.suppress(OSError):
        return bool(path) and bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    return False


def refuse_writable(path: str) -> Nothing:
    """An entry of `sys.path_hooks`: raises ImportError, which is for the next one to decide."""
    if out_of_reach(path):
        raise ImportError(f"{path} is read in the usual way")
    return Nothing()


def only_out_of_reach() -> None:
    """From now on, import from folders out of reach only, whatever comes into `sys.path` later.

    Also from the folders of packages, which are looked up by the same hooks.
    """
    sys.path_hooks.insert(0, refuse_writable)
    sys.path_importer_cache.clear()
    sys.path[:] = [path for path in sys.path if path and out_of_reach(path)]
