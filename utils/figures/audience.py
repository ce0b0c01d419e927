"""Is somebody present at the notebook, who can press a button or read a line that changes?"""

from __future__ import annotations

import os

from IPython import get_ipython


def is_present() -> bool:
    """Return whether somebody at a browser or an editor has started the cell that runs now.

    Tests, grading, and `make solutions` set IPP_NONINTERACTIVE. Every other program that executes
    notebooks tells the kernel that it can't answer `input`, so nobody could press a button either.
    """
    if os.environ.get("IPP_NONINTERACTIVE"):
        return False
    kernel = getattr(get_ipython(), "kernel", None)
    return kernel is not None and bool(getattr(kernel, "_allow_stdin", True))
