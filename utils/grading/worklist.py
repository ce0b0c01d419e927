"""The jobs of a class: for each student and lab the submission to grade, and its result.

:func:`plan` makes the jobs, :func:`work` grades several at a time, and :func:`stored_results`
returns the class's results from a results folder.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any

from tqdm import tqdm

import utils
from utils.course.files import folder_key, key, write_text
from utils.course.notebook import notebooks

from . import inspection
from .assembly import assemble
from .grader import InterruptedGradingError, grade
from .grading_options import GradingOptions, SandboxOptions
from .notebook_file import UnreadableError, read_cells
from .reference import LabError, Reference
from .results import FORMAT, Result, Status, TaskResult, file_key, load, save
from .sandbox import Box
from .submissions import MOST_FILE, File, Found, Student, student_folders

#: The error of a job that grading had not reached when it was interrupted.
NOT_YET = "The grading was interrupted before this submission. Continue with --resume."


@dataclass
class Job:
    """A submission to grade, with its student, its reference, and the folder for the result.

    Attributes:
        file: The file that counts; None if the student submitted nothing.
        error: Why it can't be graded, if that is known before the first run.
        instead: The names of files that the student submitted instead of a notebook.
        result: The result, after grading.
    """

    student: Student
    reference: Reference
    file: File | None
    folder: Path
    remarks: list[str] = field(default_factory=list)
    key: str = ""
    error: str = ""
    instead: list[str] = field(default_factory=list)
    result: Result | None = None

    def ungraded(self, why: str) -> Result:
        """Return a result without points for a job that could not be graded."""
        return stand_in(self.student, self.reference.lab, self.reference, error=why)


def plan(
    submissions: Found,
    refs: list[Reference],
    broken: dict[str, str],
    options: GradingOptions,
    out: Path,
    deadline: dict[str, datetime] | None = None,
) -> list[Job]:
    """Return a job for each student and lab, with one of the student's files for this lab.

    A lab that nobody has submitted is left out unless its deadline is over. Before the deadline of
    a lab, students without a submission have no job, so that the lab doesn't count for them.

    Raises:
        LabError: A student submitted a lab that can't be graded, or no file belongs to a known lab.
    """
    taken = _sort_files(submissions, refs, broken, _other_labs(options.solutions, refs))
    is_due = {lab: time < datetime.now() for lab, time in (deadline or {}).items()}
    if not options.only and len(refs) > 1:
        refs = _that_count(refs, {lab for _, lab in taken}, is_due, submissions)
    folders = student_folders(list(submissions.students), out)
    circumstances = _circumstances(options)
    jobs = []
    for student in submissions.students.values():
        for ref in refs:
            job = Job(student, ref, None, folders[student.name] / ref.lab)
            if files := taken.get((student.name, ref.lab), []):
                _take(job, files, circumstances)
            else:
                job.error = " ".join(submissions.closed.get(student.name, []))
                job.instead = submissions.others.get(student.name, [])
                if not (options.only or job.error or is_due.get(ref.lab, True)):
                    continue
            jobs.append(job)
    return jobs


def _that_count(
    refs: list[Reference], handed_in: set[str], is_due: dict[str, bool], submissions: Found
) -> list[Reference]:
    """Return the labs that somebody has submitted or that are due, and print the other ones.

    Raises:
        LabError: nobody has submitted a lab.
    """
    if not handed_in:
        raise LabError(_nothing_known(submissions))
    left_out = [ref.lab for ref in refs if not (ref.lab in handed_in or is_due.get(ref.lab))]
    _tell_left_out(left_out)
    return [ref for ref in refs if ref.lab not in left_out]


def _tell_left_out(labs: list[str]) -> None:
    if labs:
        names = ", ".join(lab.partition("_")[0] for lab in labs)
        print(f"Not counted, because nobody submitted it: lab {names}. To count one, use --only.")


def _nothing_known(submissions: Found) -> str:
    remarks = [text for texts in submissions.remarks.values() for text in texts]
    lines = "".join(f"\n  {text}" for text in remarks[:10])
    return f"No file belongs to a known lab. Name the lab with --only LAB.{lines}"


def _circumstances(options: SandboxOptions) -> tuple[str, str]:
    """Return what else a grade depends on: the code of the course, and the limits."""
    house = Path(utils.__file__).parent
    course = folder_key([*(house / room for room in ("checks", "labs")), *options.paths])
    return course, f"{options.cell_timeout:g} {options.timeout:g} {options.memory:g}"


def _sort_files(
    submissions: Found, refs: list[Reference], broken: dict[str, str], others: dict[str, set[str]]
) -> dict[tuple[str, str], list[File]]:
    """Return the files of each student and lab; a file of an unknown lab is set aside."""
    taken: dict[tuple[str, str], list[File]] = {}
    for file in submissions.files:
        lab = match(file, refs, others)
        if lab is None:
            _set_aside(submissions, file)
        elif lab in broken:
            raise LabError(f"{file.name} can't be graded: {broken[lab]}")
        elif lab not in others:
            taken.setdefault((file.student.name, lab), []).append(file)
    return taken


def _set_aside(submissions: Found, file: File) -> None:
    """Note a file of no known lab: NOT GRADED if it can't be read, and 0 points otherwise."""
    name = file.student.name
    unknown = f"The lab of {file.name} is unknown"
    submissions.remark(f"{unknown}, because it has no cell of a lab that is graded.", name)
    try:
        read_cells(file.path, [])
    except (OSError, UnreadableError) as error:
        submissions.close(f"{unknown}: {error}", name)
    else:
        submissions.others.setdefault(name, []).append(file.name)


def _take(job: Job, files: list[File], circumstances: tuple[str, str]) -> None:
    """Choose the file that counts: the newest with an answer, or the newest if none has one."""
    answered = [file for file in files if len(files) == 1 or _is_begun(file, job.reference)]
    job.file = newest(answered or files, job.reference.lab)
    job.error = job.file.error
    if len(files) > 1:
        job.remarks.append(f"This lab has {len(files)} files, and {job.file.name} counts.")
    file = file_key(job.file.path, MOST_FILE)
    job.key = key(file, job.reference.fingerprint(), *circumstances, version=FORMAT)


def _is_begun(file: File, reference: Reference) -> bool:
    """Return whether a notebook has an answer or can't be read."""
    assembled = assemble(reference, file.path)
    return bool(file.error or assembled.error) or assembled.is_begun


def match(file: File, refs: list[Reference], others: dict[str, set[str]]) -> str | None:
    """Return the lab of a file: by its name, unless its cells clearly belong to another lab."""
    known = {ref.lab: ref.ids for ref in refs} | others
    named = next((lab for lab in known if lab.casefold() in file.name.casefold()), None)
    own_ids = _ids(file.path)
    shared = {lab: len(own_ids & ids) for lab, ids in known.items()}
    best = max(shared, key=lambda lab: shared[lab])
    if named and (shared[named] or not shared[best]):
        return named
    if shared[best]:
        return best
    return refs[0].lab if len(refs) == 1 else None


def _other_labs(folder: Path, refs: list[Reference]) -> dict[str, set[str]]:
    """Return the cell ids of labs that are not graded now, which identify files of these labs."""
    graded = {ref.lab for ref in refs}
    known = set[str]().union(*(ref.ids for ref in refs))
    paths = [path for path in notebooks(folder) if path.stem not in graded]
    return {path.stem: _ids(path) - known for path in paths}


def _ids(path: Path) -> set[str]:
    """Return the ids and grade_ids in a file; an empty set if it can't be read."""
    cells = None
    with contextlib.suppress(OSError, UnreadableError):
        cells = read_cells(path, [])
    return {one for cell in cells or [] for one in (cell["id"], cell["grade_id"]) if one}


def newest(files: list[File], lab: str) -> File:
    """Return the last attempt; among equals a file named like the lab, then the newest file."""

    def order(file: File) -> tuple[int, bool, float, str]:
        named = Path(file.name).stem.casefold() == lab.casefold()
        age = 0.0
        with contextlib.suppress(OSError):
            age = file.path.stat().st_mtime
        return file.attempt, named, age, file.name

    return max(files, key=order)


# --- the work ------------------------------------------------------------------------------------


def work(
    jobs: list[Job], box: Box, options: GradingOptions, finish: Callable[[], None]
) -> tuple[list[Result], bool]:
    """Grade all jobs; return a result for each of them, and whether the user interrupted.

    It calls `finish` when all work is over, so that a Ctrl-C can't interrupt anything.
    """
    stop = Event()
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(options.jobs):
        slots.put(slot)
    pool = ThreadPoolExecutor(options.jobs)
    interrupted = False
    try:
        waiting = [job for job in jobs if not _needs_no_run(job, options.resume)]
        futures = [pool.submit(do, job, box, slots, stop) for job in waiting]
        quiet = options.quiet or not futures
        ended = as_completed(futures)
        for future in tqdm(ended, total=len(futures), unit="submission", disable=quiet):
            future.result()
    except KeyboardInterrupt:
        interrupted = True
        print("\nStopped. No grade is lost: continue with --resume.", file=sys.stderr)
    finally:
        finish()
        stop.set()
        pool.shutdown(cancel_futures=True)
    return list(map(_outcome, jobs)), interrupted


def _outcome(job: Job) -> Result:
    """Return the job's result from now or before, or a result that says that it is missing."""
    return job.result or _usable(job) or job.ungraded(NOT_YET)


def _usable(job: Job) -> Result | None:
    """Return the result of an earlier run if grading would give the same now; None otherwise."""
    stored = load(job.folder / "result.json") if job.file and not job.error else None
    if stored is None or stored.error or stored.key != job.key:
        return None
    # Two students whose names are equal for the file system may have exchanged their folders.
    return stored if stored.student == job.student.name else None


def _needs_no_run(job: Job, resume: bool) -> bool:
    """Give a job its result if it needs no run; return whether it needs none."""
    if resume and (stored := _usable(job)):
        stored.lms = job.student.lms
        job.result = stored
    elif job.error:
        _keep(job.ungraded(job.error), job)
    elif job.file is None:
        _keep(_absent(job), job)
    return job.result is not None


def _absent(job: Job) -> Result:
    """Return a result with 0 points for a student who submitted nothing for this lab."""
    others = ", ".join(job.instead[:8])
    remark = "Nothing was submitted."
    if others:
        remark = f"No notebook was submitted, but {others}."
    return stand_in(job.student, job.reference.lab, job.reference, remarks=[remark])


def do(job: Job, box: Box, slots: queue.SimpleQueue[int], stop: Event) -> Result:
    """Grade a submission. An error here makes only this submission NOT GRADED."""
    slot = slots.get()
    try:
        if stop.is_set():
            raise InterruptedGradingError
        if job.file is None:
            raise ValueError("nothing was submitted")
        shutil.rmtree(job.folder, ignore_errors=True)
        result = grade(job.file.path, job.reference, box, job.folder, slot=slot, stop=stop)
        result.look = inspection.look(result, job.reference)
    except InterruptedGradingError:
        raise
    except Exception as error:
        result = job.ungraded(f"{type(error).__name__}: {error}")
    finally:
        slots.put(slot)
    return _keep(result, job)


def _keep(result: Result, job: Job) -> Result:
    """Complete a result and store it; if that fails, the submission is NOT GRADED."""
    result.student = job.student.name
    result.lab = job.reference.lab
    result.key = job.key
    result.file = job.file.name if job.file else ""
    result.lms = job.student.lms
    result.remarks = [*job.remarks, *result.remarks]
    try:
        save(result, job.folder / "result.json")
    except OSError as error:
        result = job.ungraded(f"The result can't be stored: {error}")
    job.result = result
    return result


def stand_in(student: Student, lab: str, reference: Reference | None, **about: Any) -> Result:
    """Return a result without answers, with zeros or, after an error, without points."""
    status: Status = "not graded" if "error" in about else "missing"
    points = None if status == "not graded" else 0.0
    tasks = reference.tasks.values() if reference else ()
    nothing = [TaskResult(one.number, one.title, one.points, points, status) for one in tasks]
    return Result(student.name, lab, "", lms=student.lms, tasks=nothing, **about)


# --- the class -----------------------------------------------------------------------------------


@dataclass
class Class:
    """The students and labs of a class, so that a missing or damaged result is noticed.

    Attributes:
        students: For each name the folder, and the student's data in the LMS.
        remarks: Remarks by the student's name.
        command: The command line by which the class was graded.
    """

    students: dict[str, dict[str, Any]] = field(default_factory=dict)
    labs: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""


def save_class(jobs: list[Job], remarks: dict[str, list[str]], command: str, out: Path) -> None:
    """Store the students and labs that will be graded. Raises LabError if that fails."""
    students: dict[str, dict[str, Any]] = {}
    for job in jobs:
        about = {"folder": job.folder.parent.name, "lms": job.student.lms, "labs": []}
        students.setdefault(job.student.name, about)["labs"].append(job.reference.lab)
    labs = list(dict.fromkeys(job.reference.lab for job in jobs))
    about = asdict(Class(students, labs, remarks, command))
    try:
        write_text(out / "class.json", json.dumps(about, ensure_ascii=False, indent=1))
    except OSError as error:
        raise LabError(f"{out} can't be written: {error}") from error


def load_class(out: Path) -> Class:
    """Return the class that `save_class` wrote; an empty one if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Class(**json.loads((out / "class.json").read_text(encoding="utf-8")))
    return Class()


def stored_results(out: Path, refs: list[Reference]) -> list[Result]:
    """Return all results in the folder, and an error for each that is missing or damaged.

    Even if a student's folder has changed, there is only one result for each lab.
    """
    about = load_class(out)
    known = {ref.lab: ref for ref in refs}
    names = {entry["folder"]: name for name, entry in about.students.items()}
    expected = {
        (one["folder"], lab)
        for one in about.students.values()
        for lab in one.get("labs", about.labs)
    }
    results: dict[tuple[str, str], Result] = {}
    for folder, lab in sorted(expected | _stored_places(out, known)):
        path = out / "students" / folder / lab / "result.json"
        if stored := load(path):
            results.setdefault((stored.student, lab), stored)
            continue
        name = names.get(folder, folder)
        student = Student(name, about.students.get(name, {}).get("lms", {}))
        broken = "The file result.json can't be read. Grade the submission again with --resume."
        why = broken if path.exists() else NOT_YET
        results.setdefault((name, lab), stand_in(student, lab, known.get(lab), error=why))
    return list(results.values())


def _stored_places(out: Path, known: Collection[str]) -> set[tuple[str, str]]:
    paths = out.glob("students/*/*")
    paths_of_labs = (p for p in paths if p.name in known or (p / "result.json").exists())
    return {(path.parent.name, path.name) for path in paths_of_labs}


def folders(results: list[Result], out: Path) -> dict[str, Path]:
    """Return the folder of each student's page."""
    about = load_class(out).students
    places: dict[str, Path] = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            places.setdefault(stored.student, path.parents[1])
    for result in results:
        name = about.get(result.student, {}).get("folder", result.student)
        places.setdefault(result.student, out / "students" / name)
    return places
