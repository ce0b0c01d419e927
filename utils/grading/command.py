"""``ddl-labs grade``: a class's submissions, several at a time, resumable; books and pages."""

from __future__ import annotations

import compileall
import contextlib
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
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

from .gradebook import (
    FORMATS,
    ExplainError,
    Grades,
    merge_explain,
    moodle_feedback,
    open_elsewhere,
    read_explain,
    write_books,
    write_explain,
)
from .grading_options import GradingOptions
from .pages import append_for_github, write_pages
from .reference import LabError, Reference, references
from .results import Result
from .sandbox import make_box, require
from .submissions import NO_ROOM, clean, find
from .worklist import NOT_YET, folders, load_class, plan, save_class, stored_results, work

INTERRUPTED = 130
#: Of a results folder: the lock, and who has it.
LOCK = ".lock"
HOLDER = ".holder.json"
#: Seconds between two looks at a folder. What differs in two of them is still being copied.
LOOK = 5.0
GIT_SECONDS = 10

#: Size and time of each file.
Stamp = dict[Path, tuple[int, int]]


def main(options: GradingOptions) -> int:
    """Grade, write books and pages; 0: all were graded, 1: not all, 130: interrupted."""
    out = options.out.resolve()
    if options.merge:
        return merge(out, options)
    submissions = _submissions(options)
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


def _submissions(options: GradingOptions) -> Path:
    if options.submissions is None:
        raise LabError("which submissions? ddl-labs grade SUBMISSIONS -o RESULTS")
    if options.out.resolve().is_relative_to(options.submissions.resolve()):
        name = options.submissions
        raise LabError(f"{options.out} lies in {name}: results would be submissions")
    return options.submissions


def grade_class(
    submissions: Path,
    out: Path,
    options: GradingOptions,
    interrupts: Interrupts,
    known: Stamp | None,
) -> int:
    """Grade with the results folder for itself. known: see `publish`."""
    read_explain(out / "explain.csv")  # a mistake in it must not cost an hour
    refs, broken = references(options.solutions, options.only)
    box = make_box(options)
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
    nothing = LabError(f"{out}: there are no results to merge into")
    if not (out / "students").is_dir():
        raise nothing
    with held(out), Interrupts() as interrupts:
        interrupts.finish()
        refs, _ = references(options.solutions, options.only)
        results = stored_results(out, refs)
        if not results:
            raise nothing
        unwritten = publish(results, refs, out, load_class(out).remarks, options)
        return report(results, out, unwritten)


def report(
    results: list[Result], out: Path, unwritten: list[str], interrupted: bool = False
) -> int:
    """Print what became of the class, of each failed submission and book; return the status."""
    failed = [result for result in results if result.error]
    for result in failed:
        if not (interrupted and result.error == NOT_YET):
            why = clean(result.error)
            print(f"not graded: {result.student}, {result.lab}: {why}", file=sys.stderr)
    print(f"{_counts(results, len(failed))}: {out}")
    for text in unwritten:
        print(f"not written: {text}; --merge writes it again", file=sys.stderr)
    if unwritten:
        return 2
    if interrupted:
        return INTERRUPTED
    return 1 if failed else 0


def _counts(results: list[Result], failed: int) -> str:
    students = len({result.student for result in results})
    graded = sum(bool(result.file) and not result.error for result in results)
    line = f"{students} students, {graded} submissions graded"
    if failed:
        line += f", {failed} NOT GRADED"
    if waiting := sum(len(result.open) for result in results):
        line += f", {waiting} written answers to be read (explain.html, explain.csv)"
    return line


# --- books and pages ------------------------------------------------------------------------------


def publish(
    results: list[Result],
    refs: list[Reference],
    out: Path,
    remarks: dict[str, list[str]],
    options: GradingOptions,
    known: Stamp | None = None,
) -> list[str]:
    """Write all that instructor and students read; return what could not be written, and why.

    Points by hand are read now: some may have been entered while the class was graded. known: gets
    the stamp of explain.csv as it was written: what is saved there from then on is news.
    """
    path = out / "explain.csv"
    grades, new_remarks, unmended = _hand_points(results, path)
    remarks = {**remarks, "": [*remarks.get("", []), *new_remarks]}
    labs = {result.lab for result in results}
    refs = [ref for ref in refs if ref.lab in labs]
    formats = [name for name in FORMATS if _is_wanted(name, options, out)]
    provenance = provenance_now(options.command, load_class(out).command)
    unwritten: list[str] = []
    pages: dict[str, Path] = {}
    if unmended:
        unwritten.append(unmended)
    else:
        with _noting(unwritten, "explain.csv"):
            _write_explain(results, path, grades, known)
    with _noting(unwritten, "gradebook"):
        write_books(results, out, formats, remarks)
    with _noting(unwritten, "pages"):
        pages = write_pages(results, refs, out, folders(results, out), remarks, provenance)
    if "moodle" in formats:
        with _noting(unwritten, "feedback"):
            moodle_feedback(results, pages, out / "feedback-moodle.zip")
    if "github" in options.formats:
        with _noting(unwritten, "summary on GitHub"):
            append_for_github(results)
    return unwritten


def _is_wanted(name: str, options: GradingOptions, out: Path) -> bool:
    """Return whether a book is asked for, now or when the class was graded before."""
    return name in options.formats or (out / f"gradebook-{name}.csv").exists()


@contextlib.contextmanager
def _noting(unwritten: list[str], name: str) -> Iterator[None]:
    """Go on if something can't be written, and note what and why."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        unwritten.append(f"{name}: {error}")


def _write_explain(results: list[Result], path: Path, grades: Grades, known: Stamp | None) -> None:
    """Write the table of written answers where there are any; `known` gets its stamp."""
    if path.exists() or any(result.written for result in results):
        write_explain(results, path, grades)
        if known is not None:
            known.update(stamp(path))


def _hand_points(results: list[Result], path: Path) -> tuple[Grades, list[str], str]:
    """Put the grades of explain.csv into the results, and print what is wrong with them.

    Returns the grades, remarks, and why the file must stay as it is ("" if it is written anew): a
    row that was skipped is in no other place.
    """
    skipped = ""
    try:
        grades = read_explain(path)
    except ExplainError as error:
        grades = Grades()
        remarks = [f"{error}\nits points are in no book; mend it, then --merge"]
        skipped = f"{path.name} can't be read"
    else:
        remarks = [f"{text}; this row counts for nobody" for text in grades.bad]
        remarks += merge_explain(results, grades)
        if open_elsewhere(path):
            remarks.append("explain.csv is open in a spreadsheet: close it there without saving")
        if grades.bad:
            skipped = f"{path.name} keeps {len(grades.bad)} bad rows: mend them"
    for text in remarks:
        print(text, file=sys.stderr)
    return grades, remarks, skipped


def provenance_now(command: str, graded_by: str = "") -> dict[str, str]:
    """Return local time, version, the command that writes the pages, and the one that graded.

    Without the version nobody can tell later by which checks points were given.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "version": _version(),
        "command": command,
        "graded_by": "" if graded_by == command else graded_by,
    }


def _version() -> str:
    """Return the version, and the commit where this is a clone: "0.1.0 (v0.1.0-3-gabc1234)"."""
    version = "?"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("ddl-labs")
    commit = described(Path(utils.__file__).parents[1])
    return f"{version} ({commit})" if commit else version


def described(folder: Path) -> str:
    """Return `git describe` of a clone; "" if it is none, or git is not there."""
    if not (folder / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
        return done.stdout.strip()
    return ""


# --- one grader at a time in a results folder -----------------------------------------------------


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Have the results folder for this process alone; makes it where there is none.

    The system gives the lock back when its holder dies, whatever lies in the folder then.

    Raises:
        NotebookError: Somebody has the folder, with process, host and time; or it can't be written.
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
        raise NotebookError(
            f"{out}: {_holder(out)} grades into this folder: wait for its end"
        ) from None
    except OSError as error:
        lock.release()
        raise NotebookError(f"{out}: can't be written: {error.strerror or error}") from error
    for left in out.glob(".*.tmp"):  # of one that was killed while it wrote
        left.unlink(missing_ok=True)
    try:
        yield
    finally:
        (out / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(out: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((out / HOLDER).read_text())
        return f"process {about['pid']} on {about['host']}, since {about['since']},"
    return "another process"


# --- Ctrl-C that loses nothing, however often it comes --------------------------------------------


class Interrupts:
    """A context in which the first Ctrl-C (or SIGTERM) ends the work, and no other does harm.

    The books are written whatever comes after. finishing: is there no more work to end? stopped:
    has there been a first one?
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

    def finish(self) -> None:
        """Let a Ctrl-C wait from now on."""
        self.finishing = True


# --- --watch: a folder that fills up --------------------------------------------------------------


def stamp(*places: Path) -> Stamp:
    """Return size and time of each file in some folders, or of files."""
    files = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            with contextlib.suppress(OSError):  # it vanishes meanwhile
                about = path.stat()
                files[path] = (about.st_size, about.st_mtime_ns)
    return files


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
        interrupts.finishing = False
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
