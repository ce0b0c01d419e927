"""``ddl-labs grade``: a class's submissions, several at a time, resumable."""

from __future__ import annotations

import compileall
import contextlib
import json
import queue
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

import utils
from utils.course.files import write_text

from . import explain, github, suspicion
from .book import FORMATS, moodle_feedback, write_books
from .grade_one import InterruptedGradingError, grade
from .hold import Interrupts, held
from .made import made_now
from .options import GradingOptions
from .pages import write_pages
from .plan import Job, absent, labs, plan, ungraded
from .reference import LabError, Reference, references
from .results import Result, load, save
from .run import Stop
from .sandbox import Box, make_box, require
from .submissions import Student, clear, find
from .watch import Stamp, stamp, watch
from .zips import NO_ROOM, clean

INTERRUPTED = 130
NOT_YET = "not graded yet: --resume goes on"


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
    """`main`, with the results folder for itself. known: see `report`."""
    explain.read(out / "explain.csv")  # a mistake in it must not cost an hour
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
    unwritten = report(results, refs, out, found.remarks, options, known)
    return say(results, out, unwritten, interrupted)


def merge(out: Path, options: GradingOptions) -> int:
    """Books and pages again, from stored results and the points in explain.csv."""
    refs, _ = references(options.solutions, options.only)
    results = stored_results(out, refs)
    if not results:
        raise LabError(f"{out}: there are no results to merge into")
    unwritten = report(results, refs, out, load_class(out).remarks, options)
    return say(results, out, unwritten)


# --- the work ------------------------------------------------------------------------------------


def work(
    jobs: list[Job], box: Box, options: GradingOptions, interrupts: Interrupts
) -> tuple[list[Result], bool]:
    """Grade what has to be graded, a result for every job; whether the user stopped it."""
    results: dict[int, Result] = {}
    futures: dict[Future[Result], int] = {}
    stop = Stop()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(options.jobs):
        slots.put(slot)
    pool = ThreadPoolExecutor(options.jobs)
    interrupted = False
    try:
        for number, job in enumerate(jobs):
            if known := without_a_run(job, options.resume):
                results[number] = known
            else:
                futures[pool.submit(do, job, box, slots, stop)] = number
        for future in progress(list(futures), options.quiet):
            results[futures[future]] = future.result()
    except KeyboardInterrupt:
        interrupted = True
        print("\nstopped; what was graded is kept, --resume goes on from there", file=sys.stderr)
    finally:
        interrupts.finish()
        stop.set()
        pool.shutdown(cancel_futures=True)
    for future, number in futures.items():
        if number not in results and not future.cancelled() and not future.exception():
            results[number] = future.result()
    return [results.get(number) or unfinished(job) for number, job in enumerate(jobs)], interrupted


def progress(futures: list[Future[Result]], quiet: bool) -> Iterator[Future[Result]]:
    """The futures as they end, with a bar that says how long it will take."""
    bar = tqdm(
        as_completed(futures), total=len(futures), unit="submission", disable=quiet or not futures
    )
    return iter(bar)


def usable(job: Job) -> Result | None:
    """The result of an earlier run, if it would come out the same now."""
    stored = load(job.folder / "result.json") if job.file and not job.error else None
    if stored is None or stored.error or stored.key != job.key:
        return None
    # Two students whose names a file system does not tell apart may have changed places.
    return stored if stored.student == job.student.name else None


def without_a_run(job: Job, resume: bool) -> Result | None:
    """The result of a job that takes no run: known, hopeless, or nothing handed in."""
    if resume and (stored := usable(job)):
        stored.lms = job.student.lms
        return stored
    if job.error:
        return keep(ungraded(job.student, job.reference.lab, job.reference, job.error), job)
    return keep(absent(job), job) if job.file is None else None


def unfinished(job: Job) -> Result:
    """In place of what a stopped run did not come to."""
    return usable(job) or ungraded(job.student, job.reference.lab, job.reference, NOT_YET)


def do(job: Job, box: Box, slots: queue.SimpleQueue[int], stop: Stop) -> Result:
    """One submission. What goes wrong here is this submission's result, not the class's end."""
    slot = slots.get()
    try:
        if stop.is_set():
            raise InterruptedGradingError
        shutil.rmtree(job.folder, ignore_errors=True)
        result = grade(job.path, job.reference, box, job.folder, slot=slot, stop=stop)
        result.look = suspicion.look(result, job.reference)
    except InterruptedGradingError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        result = ungraded(job.student, job.reference.lab, job.reference, why)
    finally:
        slots.put(slot)
    return keep(result, job)


def keep(result: Result, job: Job) -> Result:
    """Complete a result and store it; one that can't be stored is none."""
    result.student, result.lab, result.key = job.student.name, job.reference.lab, job.key
    result.file = job.file.name if job.file else ""
    result.lms = job.student.lms
    result.remarks = [*job.remarks, *result.remarks]
    try:
        save(result, job.folder / "result.json")
    except OSError as error:
        why = f"its result can't be stored: {error}"
        return ungraded(job.student, job.reference.lab, job.reference, why)
    return result


# --- the results ---------------------------------------------------------------------------------


@dataclass
class Class:
    """Who was to be graded in what: a run that was killed, or a result that is broken, shows.

    students: name → folder and what the LMS knows them by. remarks: by student's name.
    command: the line by which they were graded.
    """

    students: dict[str, dict[str, Any]] = field(default_factory=dict)
    labs: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""

    @classmethod
    def of(cls, jobs: list[Job], remarks: dict[str, list[str]], command: str = "") -> Class:
        """The class of these jobs."""
        students = {
            job.student.name: {"folder": job.folder.parent.name, "lms": job.student.lms}
            for job in jobs
        }
        return cls(
            students, list(dict.fromkeys(job.reference.lab for job in jobs)), remarks, command
        )


def save_class(about: Class, out: Path) -> None:
    """Store it in the results folder. Raises LabError where nothing can be written."""
    try:
        write_text(out / "class.json", json.dumps(asdict(about), ensure_ascii=False, indent=1))
    except OSError as error:
        raise LabError(f"{out}: can't be written: {error}") from error


def load_class(out: Path) -> Class:
    """What `save_class` wrote."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Class(**json.loads((out / "class.json").read_text(encoding="utf-8")))
    return Class()


def stored_results(out: Path, refs: list[Reference]) -> list[Result]:
    """All results in the folder; in place of one that is missing or broken, what it lacks.

    A student whose folder was another one before has one result for a lab all the same.
    """
    about, known = load_class(out), {ref.lab: ref for ref in refs}
    names = {one["folder"]: name for name, one in about.students.items()}
    expected = {(one["folder"], lab) for one in about.students.values() for lab in about.labs}
    there = {
        path.parts[-2:]
        for path in out.glob("students/*/*")
        if path.name in known or (path / "result.json").exists()
    }
    found: dict[tuple[str, str], Result] = {}
    for folder, lab in sorted(expected | there):
        path = out / "students" / folder / lab / "result.json"
        if stored := load(path):
            found.setdefault((stored.student, lab), stored)
            continue
        name = names.get(folder, folder)
        student = Student(name, about.students.get(name, {}).get("lms", {}))
        why = "its result.json can't be read: --resume grades it again"
        why = why if path.exists() else NOT_YET
        found.setdefault((name, lab), ungraded(student, lab, known.get(lab), why))
    return list(found.values())


def report(
    results: list[Result],
    refs: list[Reference],
    out: Path,
    remarks: dict[str, list[str]],
    options: GradingOptions,
    known: Stamp | None = None,
) -> list[str]:
    """Write all that instructor and students read; returns what could not be written, and why.

    Points by hand are read now: some may have been entered while the class was graded. known: gets
    the stamp of explain.csv as it was written: what is saved there from then on is news.
    """
    path, remarks = out / "explain.csv", {name: list(said) for name, said in remarks.items()}
    grades, said, unmended = hand_points(results, path)
    remarks.setdefault("", []).extend(said)
    for text in said:
        print(text, file=sys.stderr)
    refs = [ref for ref in refs if any(one.lab == ref.lab for one in results)]
    formats = [
        one for one in FORMATS if one in options.formats or (out / f"gradebook-{one}.csv").exists()
    ]
    made = made_now(options.command, load_class(out).command)
    pages: dict[str, Path] = {}
    steps: dict[str, Callable[[], object]] = {}
    if not unmended and (path.exists() or any(explain.written(one) for one in results)):
        steps["explain.csv"] = partial(write_explain, results, path, grades, known)
    steps["gradebook"] = lambda: write_books(results, out, formats, remarks)
    steps["pages"] = lambda: pages.update(
        write_pages(results, refs, out, folders(results, out), remarks, made)
    )
    if "moodle" in formats:
        steps["feedback"] = lambda: moodle_feedback(results, pages, out / "feedback-moodle.zip")
    if "github" in options.formats:
        steps["summary on GitHub"] = lambda: github.append(results)
    unwritten = [unmended] if unmended else []
    for name, step in steps.items():
        try:
            step()
        except (OSError, UnicodeError) as error:
            unwritten.append(f"{name}: {error}")
    return unwritten


def write_explain(
    results: list[Result], path: Path, grades: explain.Grades, known: Stamp | None
) -> None:
    """The table of written answers; `known` gets its stamp."""
    explain.write(results, path, grades)
    if known is not None:
        known |= stamp(path)


def hand_points(results: list[Result], path: Path) -> tuple[explain.Grades, list[str], str]:
    """Put the grades of explain.csv into the results.

    Returns the grades, remarks, and why the file must stay as it is ("" if it is written anew): a
    row that was skipped is in no other place.
    """
    try:
        grades = explain.read(path)
    except explain.ExplainError as error:
        said = [f"{error}\nits points are in no book; mend it, then --merge"]
        return explain.Grades(), said, f"{path.name} can't be read"
    said = [f"{text}; this row counts for nobody" for text in grades.bad]
    said += explain.merge(results, grades)
    if explain.open_elsewhere(path):
        said.append("explain.csv is open in a spreadsheet: close it there without saving")
    skipped = f"{path.name} keeps {len(grades.bad)} bad rows: mend them" if grades.bad else ""
    return grades, said, skipped


def folders(results: list[Result], out: Path) -> dict[str, Path]:
    """Where each student's page goes."""
    about = load_class(out).students
    found: dict[str, Path] = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            found.setdefault(stored.student, path.parents[1])
    for result in results:
        name = about.get(result.student, {}).get("folder", result.student)
        found.setdefault(result.student, out / "students" / name)
    return found


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
