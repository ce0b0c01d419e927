"""``ddl-labs grade``: a class's submissions, several at a time, resumable."""

from __future__ import annotations

import compileall
import sys
import tempfile
from functools import partial
from pathlib import Path

import utils

from . import written_answers
from .interrupts import Interrupts
from .lock import held
from .options import GradingOptions
from .pool import work
from .publication import publish
from .reference import LabError, references
from .results import Result
from .roster import Class, load_class, save_class, stored_results
from .sandbox import make_box, require
from .submissions import clear, find
from .watch import Stamp, watch
from .worklist import NOT_YET, labs, plan
from .zips import NO_ROOM, clean

INTERRUPTED = 130


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
            if not options.watch:
                return grade_class(submissions, out, options, interrupts)
            grade_now = partial(grade_class, submissions, out, options, interrupts)
            return watch(grade_now, submissions, out / "explain.csv", interrupts)
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
    known: Stamp | None = None,
) -> int:
    """`main`, with the results folder for itself. known: see `publication.publish`."""
    written_answers.read(out / "explain.csv")  # a mistake in it must not cost an hour
    refs, broken = references(options.solutions, options.only)
    box = make_box(options.sandbox)
    # A sandbox cannot keep what it compiles: each would compile the course in all its processes.
    compileall.compile_dir(Path(utils.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
        (Path(scratch) / "probe").mkdir()
        require(box, Path(scratch) / "probe")
        found = find(submissions, Path(scratch), labs(options.solutions))
        jobs = plan(found, refs, broken, options, out)
        save_class(Class.of(jobs, found.remarks, options.command), out)
        results, interrupted = work(jobs, box, options, interrupts)
        clear(Path(scratch) / "unpacked")
    if options.only:  # what was graded before in other labs stays in the books
        refs, _ = references(options.solutions)
    graded = {one.lab for one in results}
    results += [one for one in stored_results(out, refs) if one.lab not in graded]
    unwritten = publish(results, refs, out, found.remarks, options, known)
    return say(results, out, unwritten, interrupted)


def merge(out: Path, options: GradingOptions) -> int:
    """Books and pages again, from stored results and the points in explain.csv."""
    refs, _ = references(options.solutions, options.only)
    results = stored_results(out, refs)
    if not results:
        raise LabError(f"{out}: there are no results to merge into")
    unwritten = publish(results, refs, out, load_class(out).remarks, options)
    return say(results, out, unwritten)


def say(results: list[Result], out: Path, unwritten: list[str], interrupted: bool = False) -> int:
    """One line on the class, one for each submission or book that failed; the exit status."""
    failed = [one for one in results if one.error]
    for one in failed:
        if not (interrupted and one.error == NOT_YET):
            print(f"not graded: {one.student}, {one.lab}: {clean(one.error)}", file=sys.stderr)
    open_ = sum(len(one.open) for one in results)
    by_hand = f", {open_} written answers to be read (explain.html, explain.csv)" if open_ else ""
    students = len({one.student for one in results})
    graded = sum(1 for one in results if one.file and not one.error)
    lacking = f", {len(failed)} NOT GRADED" if failed else ""
    print(f"{students} students, {graded} submissions graded{lacking}{by_hand}: {out}")
    for text in unwritten:
        print(f"not written: {text}; --merge writes it again", file=sys.stderr)
    if unwritten:
        return 2
    if interrupted:
        return INTERRUPTED
    return 1 if failed else 0
