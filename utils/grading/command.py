"""``ddl-labs grade``: a class's submissions, several at a time, resumable."""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import filelock

import utils
from utils.course.notebook import NotebookError, notebooks

from .gradebook import read_explain
from .grading_options import GradingOptions
from .publication import Stamp, load_class, publish, save_class, stamp, stored_results
from .reference import LabError, references
from .results import Result
from .sandbox import make_box, require
from .submissions import find
from .worklist import NOT_YET, plan, work
from .zips import NO_ROOM, clean

INTERRUPTED = 130
#: Of a results folder: the lock, and who has it.
LOCK = ".lock"
HOLDER = ".holder.json"
#: Seconds between two looks at a folder. What differs in two of them is still being copied.
LOOK = 5.0


def main(options: GradingOptions) -> int:
    """Grade, write books and pages; 0: all were graded, 1: not all, 130: interrupted."""
    out = options.out.resolve()
    if options.merge:
        if not (out / "students").is_dir():
            raise LabError(f"{out}: there are no results to merge into")
        with held(out), Interrupts() as interrupts:
            interrupts.finish()
            return merge(out, options)
    submissions = options.submissions
    if submissions is None:
        raise LabError("which submissions? ddl-labs grade SUBMISSIONS -o RESULTS")
    if out.is_relative_to(submissions.resolve()):
        raise LabError(f"{options.out} lies in {submissions}: results would be submissions")
    try:
        with held(out), Interrupts() as interrupts:
            grade_now = partial(grade_class, submissions, out, options, interrupts)
            if options.watch:
                return watch(grade_now, submissions, out / "explain.csv", interrupts)
            return grade_now(None)
    except KeyboardInterrupt:
        before = any(out.glob("gradebook*.csv"))
        books = "the books are those of before" if before else "no books were written"
        print(f"\nstopped; {books}, --resume goes on", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise LabError(f"{error}: what was graded is kept, --resume goes on") from error


def grade_class(
    submissions: Path,
    out: Path,
    options: GradingOptions,
    interrupts: Interrupts,
    known: Stamp | None,
) -> int:
    """Grade with the results folder for itself. known: see `publication.publish`."""
    read_explain(out / "explain.csv")  # a mistake in it must not cost an hour
    refs, broken = references(options.solutions, options.only)
    box = make_box(options.sandbox)
    # A sandbox cannot keep what it compiles: each would compile the course in all its processes.
    compileall.compile_dir(Path(utils.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="grading-") as name:
        scratch = Path(name)
        require(box, scratch)
        # All labs that a file's name may mean, also those that are not graded now.
        labs = [path.stem for path in notebooks(options.solutions)]
        files = find(submissions, scratch, labs)
        jobs = plan(files, refs, broken, options, out)
        save_class(jobs, files.remarks, options.command, out)
        results, interrupted = work(jobs, box, options, interrupts.finish)
        shutil.rmtree(scratch / "unpacked", ignore_errors=True)
    if options.only:  # what was graded before in other labs stays in the books
        refs, _ = references(options.solutions)
    graded = {one.lab for one in results}
    results += [one for one in stored_results(out, refs) if one.lab not in graded]
    unwritten = publish(results, refs, out, files.remarks, options, known)
    return report(results, out, unwritten, interrupted)


def merge(out: Path, options: GradingOptions) -> int:
    """Write books and pages again, from stored results and the points in explain.csv."""
    refs, _ = references(options.solutions, options.only)
    results = stored_results(out, refs)
    if not results:
        raise LabError(f"{out}: there are no results to merge into")
    unwritten = publish(results, refs, out, load_class(out).remarks, options)
    return report(results, out, unwritten)


def report(
    results: list[Result], out: Path, unwritten: list[str], interrupted: bool = False
) -> int:
    """Print a line on the class, and one for each submission or book that failed.

    Returns:
        The exit status.
    """
    failed = [result for result in results if result.error]
    for result in failed:
        if not (interrupted and result.error == NOT_YET):
            why = clean(result.error)
            print(f"not graded: {result.student}, {result.lab}: {why}", file=sys.stderr)
    students = len({result.student for result in results})
    graded = sum(bool(result.file) and not result.error for result in results)
    line = f"{students} students, {graded} submissions graded"
    if failed:
        line += f", {len(failed)} NOT GRADED"
    if waiting := sum(len(result.open) for result in results):
        line += f", {waiting} written answers to be read (explain.html, explain.csv)"
    print(f"{line}: {out}")
    for text in unwritten:
        print(f"not written: {text}; --merge writes it again", file=sys.stderr)
    if unwritten:
        return 2
    if interrupted:
        return INTERRUPTED
    return 1 if failed else 0


# --- one grader at a time in a results folder ----------------------------------------------------


class HeldError(NotebookError):
    """Someone else grades into this folder, or nobody can; the message says who, or why."""


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Have the results folder for this process alone; makes it where there is none.

    The system gives the lock back when its holder dies, whatever lies in the folder then.

    Raises:
        HeldError: Somebody has the folder, with process, host and time; or it can't be written.
    """
    lock = filelock.FileLock(out / LOCK, timeout=0)
    me = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.acquire()
        (out / HOLDER).write_text(json.dumps(me))
    except filelock.Timeout:
        raise HeldError(
            f"{out}: {_holder(out)} grades into this folder: wait for its end"
        ) from None
    except OSError as error:
        lock.release()
        raise HeldError(f"{out}: can't be written: {error.strerror or error}") from error
    for left in out.glob(".*.tmp"):  # of one that was killed while it wrote
        left.unlink(missing_ok=True)
    try:
        yield
    finally:
        (out / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(out: Path) -> str:
    """Who holds the lock, in words."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((out / HOLDER).read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']},"
    return "another process"


# --- Ctrl-C that loses nothing, however often it comes -------------------------------------------


class Interrupts:
    """A context in which the first Ctrl-C (or SIGTERM) ends the work, and no other does harm.

    The books are written whatever comes after. `finish` says that there is no more work to end,
    `begin` that there is some again. stopped: has there been a first one?
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.finishing = False
        self.stopped = False
        self.before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self.before = {number: signal.signal(number, self._heard) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _heard(self, *_: object) -> None:
        if self.finishing:
            print("a moment: the books are being written", file=sys.stderr)
            return
        self.finishing = self.stopped = True
        raise KeyboardInterrupt

    def begin(self) -> None:
        """Let a Ctrl-C end what is done from now on."""
        self.finishing = False

    def finish(self) -> None:
        """Let a Ctrl-C wait from now on."""
        self.finishing = True


# --- --watch: a folder that fills up -------------------------------------------------------------


def watch(
    grade: Callable[[Stamp], int], submissions: Path, book: Path, interrupts: Interrupts
) -> int:
    """Grade now and after each change of the submissions or of the points by hand.

    Ctrl-C ends it, and the status is that of the last grading. What can't be graded at all (nobody
    has handed in, the book has a mistake) is told, and may come right with the next change. grade:
    gets the stamp of both from before, and notes there the book as it has written it.
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
