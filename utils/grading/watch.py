"""``--watch``: a folder that fills up, graded again whenever something was handed in."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from time import sleep

from utils.course.notebook import NotebookError

from .interrupts import Interrupts

#: Seconds between two looks. What differs in two of them is still being copied.
LOOK = 5.0

Stamp = dict[Path, tuple[int, int]]


def stamp(*places: Path) -> Stamp:
    """Size and time of each file in some folders, or of files."""
    found = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            with contextlib.suppress(OSError):  # it vanishes meanwhile
                about = path.stat()
                found[path] = (about.st_size, about.st_mtime_ns)
    return found


def watch(
    grade: Callable[[Stamp], int], submissions: Path, book: Path, interrupts: Interrupts
) -> int:
    """Grade now and after each change of the submissions or of the points by hand.

    grade: gets the stamp of both from before, and notes there the book as it has written it.
    Ctrl-C ends it, and the status is that of the last grading. What can't be graded at all (nobody
    has handed in, the book has a mistake) is told, and may come right with the next change.
    """
    while True:
        before = stamp(submissions, book)
        try:
            status = grade(before)
        except NotebookError as error:
            print(error, file=sys.stderr)
            status = 2
        if interrupts.stopped:
            return status
        interrupts.begin()
        print(f"waiting for changes in {submissions}; Ctrl-C ends it", flush=True)
        try:
            _until_changed(before, submissions, book)
        except KeyboardInterrupt:
            return status


def _until_changed(before: Stamp, *places: Path) -> None:
    """Wait until there is something else than before, and the same at two looks."""
    last = before
    while True:
        sleep(LOOK)
        now = stamp(*places)
        if now == last != before:
            return
        last = now
