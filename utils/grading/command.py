"""``ddl-labs grade``: grades a class, several submissions at a time, and writes books and pages."""

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

from . import deadlines
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
from .pages import append_for_github, canvas_feedback, write_pages
from .reference import LabError, Reference, references
from .results import Result
from .sandbox import make_box, require
from .submissions import NO_ROOM, clean, find
from .wards import ward_remarks
from .worklist import NOT_YET, folders, load_class, plan, save_class, stored_results, work

INTERRUPTED = 130
#: In a results folder: the lock, and the file that says which process holds it.
LOCK = ".lock"
HOLDER = ".holder.json"
#: Seconds between two looks at a folder. A file that differs between two looks is being copied.
LOOK = 5.0
GIT_SECONDS = 10

#: The size and the modification time of each file.
Stamp = dict[Path, tuple[int, int]]


def main(options: GradingOptions) -> int:
    """Grade a class, write books and pages, and return the exit status.

    0: all were graded; 1: not all; 2: a book or page wasn't written; 130: interrupted.
    """
    out = options.out.resolve()
    if options.merge:
        return merge(out, options)
    submissions = _submissions(options)
    try:
        with held(out), Interrupts() as interrupts:
            grade_now = partial(grade_class, submissions, out, options, interrupts)
            if options.watch:
                edited = (out / "explain.csv", out / deadlines.NAME)
                return watch(grade_now, submissions, edited, interrupts)
            return grade_now(None)
    except KeyboardInterrupt:
        before = any(out.glob("gradebook*.csv"))
        books = "The gradebook is still the earlier one" if before else "There is no gradebook yet"
        print(f"\nStopped. {books}; continue with --resume.", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise LabError(f"{error}. No grade is lost: make room, then run --resume.") from error


def _submissions(options: GradingOptions) -> Path:
    if options.submissions is None:
        raise LabError("Name the submissions: ddl-labs grade SUBMISSIONS -o RESULTS")
    if options.out.resolve().is_relative_to(options.submissions.resolve()):
        raise LabError(
            f"The results folder {options.out} is inside the submissions {options.submissions}, so "
            "results would be graded as submissions. Choose a folder outside."
        )
    return options.submissions


def grade_class(
    submissions: Path,
    out: Path,
    options: GradingOptions,
    interrupts: Interrupts,
    known: Stamp | None,
) -> int:
    """Grade the class; the caller holds the results folder. known: see `publish`."""
    read_explain(out / "explain.csv")  # so that a mistake in it shows before an hour of work
    rule = _rule(out, options)
    refs, broken = references(options.solutions, options.only)
    box = make_box(options)
    # A sandbox can't store compiled files, so each process in it would compile the course again.
    compileall.compile_dir(Path(utils.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="grading-") as name:
        scratch = Path(name)
        require(box, scratch)
        # The name of a file may contain any lab, including labs that are not graded now.
        labs = [path.stem for path in notebooks(options.solutions)]
        files = find(submissions, scratch, labs)
        jobs = plan(files, refs, broken, options, out, rule.deadline)
        save_class(jobs, files.remarks, options.command, out)
        results, interrupted = work(jobs, box, options, interrupts.finish)
        shutil.rmtree(scratch / "unpacked", ignore_errors=True)
    if options.only:  # keep earlier grades in other labs in the books
        refs, _ = references(options.solutions)
    graded = {one.lab for one in results}
    results += [one for one in stored_results(out, refs) if one.lab not in graded]
    unwritten = publish(results, refs, out, files.remarks, options, rule, known)
    return report(results, out, unwritten, interrupted)


def _rule(out: Path, options: GradingOptions) -> deadlines.Rule:
    return deadlines.read_rule(out / deadlines.NAME, notebooks(options.solutions))


def merge(out: Path, options: GradingOptions) -> int:
    """Write books and pages again, from stored results and the points in explain.csv."""
    nothing = LabError(f"There are no results in {out} yet. Grade first, without --merge.")
    if not (out / "students").is_dir():
        raise nothing
    with held(out), Interrupts() as interrupts:
        interrupts.finish()
        refs, _ = references(options.solutions, options.only)
        results = stored_results(out, refs)
        if not results:
            raise nothing
        rule = _rule(out, options)
        unwritten = publish(results, refs, out, load_class(out).remarks, options, rule)
        return report(results, out, unwritten)


def report(
    results: list[Result], out: Path, unwritten: list[str], interrupted: bool = False
) -> int:
    """Print a summary, and each submission or book that failed; return the exit status."""
    failed = [result for result in results if result.error]
    for result in failed:
        if not (interrupted and result.error == NOT_YET):
            why = clean(result.error)
            print(f"NOT GRADED: {result.student}, {result.lab}: {why}", file=sys.stderr)
    print(f"{_counts(results, len(failed))}: {out}")
    for text in unwritten:
        print(f"NOT WRITTEN: {text}. Fix the cause, then run --merge.", file=sys.stderr)
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
        line += f", {waiting} written answers to grade by hand (explain.html, explain.csv)"
    return line


# --- books and pages ------------------------------------------------------------------------------


def publish(
    results: list[Result],
    refs: list[Reference],
    out: Path,
    remarks: dict[str, list[str]],
    options: GradingOptions,
    rule: deadlines.Rule,
    known: Stamp | None = None,
) -> list[str]:
    """Write all books and pages; return which could not be written, and why.

    Points given by hand are read now, because a person may have entered some during the grading.
    known: gets the stamp of explain.csv as written here, so that --watch notices later changes.
    """
    path = out / "explain.csv"
    grades, new_remarks, unmended = _hand_points(results, path)
    deadlines.take_off(results, rule)
    labs = {result.lab for result in results}
    refs = [ref for ref in refs if ref.lab in labs]
    more = {"": new_remarks, **ward_remarks(results, refs)}
    remarks = {
        name: [*remarks.get(name, []), *more.get(name, [])]
        for name in dict.fromkeys([*remarks, *more])
    }
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
    if "canvas" in formats:
        with _noting(unwritten, "feedback"):
            canvas_feedback(results, out / "feedback-canvas.zip")
    if "github" in options.formats:
        with _noting(unwritten, "summary on GitHub"):
            append_for_github(results)
    return unwritten


def _is_wanted(name: str, options: GradingOptions, out: Path) -> bool:
    """Return whether a book is requested now, or was written when the class was graded before."""
    return name in options.formats or (out / f"gradebook-{name}.csv").exists()


@contextlib.contextmanager
def _noting(unwritten: list[str], name: str) -> Iterator[None]:
    """Note which file can't be written, and why, instead of raising the error."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        unwritten.append(f"{name}: {error}")


def _write_explain(results: list[Result], path: Path, grades: Grades, known: Stamp | None) -> None:
    """Write the table of written answers if there are any; `known` gets its stamp."""
    if path.exists() or any(result.written for result in results):
        write_explain(results, path, grades)
        if known is not None:
            known.update(stamp(path))


def _hand_points(results: list[Result], path: Path) -> tuple[Grades, list[str], str]:
    """Put the grades in explain.csv into the results, and print what is wrong with them.

    Returns the grades, the remarks, and why the file must not be overwritten ("" if it may): a row
    that was skipped is stored nowhere else.
    """
    skipped = ""
    try:
        grades = read_explain(path)
    except ExplainError as error:
        grades = Grades()
        remarks = [f"{error}\nThe points in it don't count yet. Fix the file, then run --merge."]
        skipped = f"{path.name}, which can't be read"
    else:
        remarks = [f"{text} The row doesn't count until you fix it." for text in grades.bad]
        remarks += merge_explain(results, grades)
        if open_elsewhere(path):
            remarks.append("explain.csv is open in a spreadsheet. Close it there without saving.")
        if grades.bad:
            skipped = f"{path.name}, because {len(grades.bad)} rows in it are wrong"
    for text in remarks:
        print(text, file=sys.stderr)
    return grades, remarks, skipped


def provenance_now(command: str, graded_by: str = "") -> dict[str, str]:
    """Return the local time, the version, and the commands that wrote the pages and graded.

    The version says later by which checks the points were given.
    """
    return {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "version": _version(),
        "command": command,
        "graded_by": "" if graded_by == command else graded_by,
    }


def _version() -> str:
    """Return the version, and in a clone the commit, as in "0.1.0 (v0.1.0-3-gabc1234)"."""
    version = "?"
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version("ddl-labs")
    commit = described(Path(utils.__file__).parents[1])
    return f"{version} ({commit})" if commit else version


def described(folder: Path) -> str:
    """Return `git describe` of a folder; "" if it isn't a clone or git isn't installed."""
    if not (folder / ".git").exists():
        return ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "describe", "--always", "--tags", "--dirty"]
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            timeout=GIT_SECONDS,
            check=True,
            encoding="utf-8",
        )
        return done.stdout.strip()
    return ""


# --- one grader at a time in a results folder -----------------------------------------------------


@contextlib.contextmanager
def held(out: Path) -> Iterator[None]:
    """Lock the results folder for this process, and create the folder if necessary.

    The system releases the lock when its holder dies, whatever files are left in the folder.

    Raises:
        NotebookError: The folder can't be written, or the named process already holds it.
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
        (out / HOLDER).write_text(json.dumps(me), encoding="utf-8")
    except filelock.Timeout:
        raise NotebookError(
            f"The results folder {out} is in use: {_holder(out)}. Wait until it has finished."
        ) from None
    except OSError as error:
        lock.release()
        raise NotebookError(f"{out} can't be written: {error.strerror or error}") from error
    for left in out.glob(".*.tmp"):  # from a grader that was killed while writing
        left.unlink(missing_ok=True)
    try:
        yield
    finally:
        (out / HOLDER).unlink(missing_ok=True)
        lock.release()


def _holder(out: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        about = json.loads((out / HOLDER).read_text(encoding="utf-8"))
        return f"process {about['pid']} on {about['host']} has been grading since {about['since']}"
    return "another process is grading"


# --- Ctrl-C without a loss, however often the user presses it -------------------------------------


class Interrupts:
    """A context in which the first Ctrl-C (or SIGTERM) ends the work, and later ones are ignored.

    The books are always written. finishing: whether a Ctrl-C is ignored, because the work is over.
    stopped: whether a Ctrl-C has ended the work.
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
            print("Please wait: the gradebook and the pages are being written.", file=sys.stderr)
            return
        self.finishing = self.stopped = True
        raise KeyboardInterrupt

    def finish(self) -> None:
        """Ignore Ctrl-C from now on."""
        self.finishing = True


# --- --watch: grading submissions as they arrive --------------------------------------------------


def stamp(*places: Path) -> Stamp:
    """Return the size and the modification time of each file in or at these paths."""
    files = {}
    for place in places:
        for path in [place, *place.rglob("*")]:
            with contextlib.suppress(OSError):  # the file has just been removed
                about = path.stat()
                files[path] = (about.st_size, about.st_mtime_ns)
    return files


def watch(
    grade: Callable[[Stamp], int],
    submissions: Path,
    books: tuple[Path, ...],
    interrupts: Interrupts,
) -> int:
    """Grade now, and after each change of the submissions or of what a person writes into books.

    Ctrl-C ends it, and the exit status comes from the last grading. If the class can't be graded at
    all, for example without a submission, the reason is printed, and the next change may fix it.
    grade: gets the stamp of all these files, and updates it when it writes explain.csv.
    """
    while True:
        before = stamp(submissions, *books)
        try:
            status = grade(before)
        except NotebookError as error:
            print(error, file=sys.stderr)
            status = 2
        if interrupts.stopped:
            return status
        interrupts.finishing = False
        print(f"Waiting for changes in {submissions}. Press Ctrl-C to end.", flush=True)
        try:
            _until_changed(before, submissions, *books)
        except KeyboardInterrupt:
            return status


def _until_changed(before: Stamp, *places: Path) -> None:
    """Wait until the files differ from `before` and have stayed the same for two looks."""
    last = before
    while True:
        sleep(LOOK)
        now = stamp(*places)
        if now == last != before:
            return
        last = now
