"""A job for each student and lab of a class: what is to be graded, and its result.

:func:`plan` makes the jobs of submissions, :func:`work` grades several at a time, and
:func:`stored_results` returns what a results folder holds of the class.
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
from pathlib import Path
from threading import Event
from typing import Any

from tqdm import tqdm

import utils
from utils.course.files import folder_key, key, write_text
from utils.course.notebook import notebooks

from . import inspection
from .assembly import UnreadableError, assemble, read_cells
from .grader import InterruptedGradingError, grade
from .grading_options import GradingOptions, SandboxOptions
from .reference import LabError, Reference
from .results import FORMAT, Result, Status, TaskResult, file_key, load, save
from .sandbox import Box
from .submissions import MOST_FILE, File, Found, Student, student_folders

#: Why there is no result of a job that a stopped run did not come to.
NOT_YET = "not graded yet: --resume goes on"


@dataclass
class Job:
    """A submission to grade: whose, against what, where the result goes.

    Attributes:
        file: The file that counts; None if nothing was handed in.
        error: Why it can't be graded, which is known before.
        instead: What was handed in instead of a notebook.
        result: What grading gave, once there is something.
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
        """Return what stands in for a result where grading has failed."""
        return stand_in(self.student, self.reference.lab, self.reference, error=why)


def plan(
    submissions: Found,
    refs: list[Reference],
    broken: dict[str, str],
    options: GradingOptions,
    out: Path,
) -> list[Job]:
    """Return a job for each student and lab; of several files for one lab, one is taken.

    Raises:
        LabError: Something was handed in for a lab that can't be graded, or no file tells which
            lab it is of.
    """
    taken = _sort_files(submissions, refs, broken, _other_labs(options.solutions, refs))
    if not options.only and len(refs) > 1:
        handed_in = {lab for _, lab in taken}
        refs = [ref for ref in refs if ref.lab in handed_in]
    if not refs:
        raise LabError(_nothing_known(submissions))
    folders = student_folders(list(submissions.students), out)
    circumstances = _circumstances(options)
    jobs = []
    for student in submissions.students.values():
        for ref in refs:
            job = Job(student, ref, None, folders[student.name] / ref.lab)
            if files := taken.get((student.name, ref.lab), []):
                _take(job, files, circumstances)
            else:
                job.error = "; ".join(submissions.closed.get(student.name, []))
                job.instead = submissions.others.get(student.name, [])
            jobs.append(job)
    return jobs


def _nothing_known(submissions: Found) -> str:
    remarks = [text for texts in submissions.remarks.values() for text in texts]
    lines = "".join(f"\n  {text}" for text in remarks[:10])
    return f"no file is known for a lab's; --only LAB says which is graded{lines}"


def _circumstances(options: SandboxOptions) -> tuple[str, str]:
    """Return what else a grade depends on: the course's code, and the limits."""
    house = Path(utils.__file__).parent
    course = folder_key([*(house / room for room in ("checks", "labs")), *options.paths])
    return course, f"{options.cell_timeout:g} {options.timeout:g} {options.memory:g}"


def _sort_files(
    submissions: Found, refs: list[Reference], broken: dict[str, str], others: dict[str, set[str]]
) -> dict[tuple[str, str], list[File]]:
    """Return the files of each student and lab; what can't be told is closed, not a zero."""
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
    """Note a file of no known lab. It is not graded if it can't be read; otherwise it is a 0."""
    name = file.student.name
    question = f"{file.name}: which lab is this?"
    submissions.remark(f"{question} It has no cell of a lab that is graded", name)
    try:
        read_cells(file.path, [])
    except (OSError, UnreadableError) as error:
        submissions.close(f"{question} {error}", name)
    else:
        submissions.others.setdefault(name, []).append(file.name)


def _take(job: Job, files: list[File], circumstances: tuple[str, str]) -> None:
    """Choose the file that counts: one with an answer, if there is any, for it lies with others."""
    answered = [file for file in files if len(files) == 1 or _is_begun(file, job.reference)]
    job.file = newest(answered or files, job.reference.lab)
    job.error = job.file.error
    if len(files) > 1:
        job.remarks.append(f"{len(files)} files for this lab; {job.file.name} counts")
    file = file_key(job.file.path, MOST_FILE)
    job.key = key(file, job.reference.fingerprint(), *circumstances, version=FORMAT)


def _is_begun(file: File, reference: Reference) -> bool:
    """Return whether a notebook has more in it than the handout, or can't be read."""
    assembled = assemble(reference, file.path)
    return bool(file.error or assembled.error) or assembled.is_begun


def match(file: File, refs: list[Reference], others: dict[str, set[str]]) -> str | None:
    """Return the lab of a file: by its name, unless its cells are clearly those of another."""
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
    """Return the ids of the labs that are not graded now, so that their files are told apart."""
    graded = {ref.lab for ref in refs}
    known = set[str]().union(*(ref.ids for ref in refs))
    paths = [path for path in notebooks(folder) if path.stem not in graded]
    return {path.stem: _ids(path) - known for path in paths}


def _ids(path: Path) -> set[str]:
    """Return the ids and grade_ids in a file; none if it can't be read, which grading says."""
    cells = None
    with contextlib.suppress(OSError, UnreadableError):
        cells = read_cells(path, [])
    return {one for cell in cells or [] for one in (cell["id"], cell["grade_id"]) if one}


def newest(files: list[File], lab: str) -> File:
    """Return the last attempt; among equals the one named as the lab is, then the youngest."""

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
    """Grade what has to be graded; return a result for every job, and whether the user stopped it.

    It calls `finish` when there is no more work that a Ctrl-C could end.
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
        print("\nstopped; what was graded is kept, --resume goes on from there", file=sys.stderr)
    finally:
        finish()
        stop.set()
        pool.shutdown(cancel_futures=True)
    return list(map(_outcome, jobs)), interrupted


def _outcome(job: Job) -> Result:
    """Return what grading gave, now or before; else that it has not come to this job."""
    return job.result or _usable(job) or job.ungraded(NOT_YET)


def _usable(job: Job) -> Result | None:
    """Return the result of an earlier run, if it would come out the same now."""
    stored = load(job.folder / "result.json") if job.file and not job.error else None
    if stored is None or stored.error or stored.key != job.key:
        return None
    # Two students whose names a file system does not tell apart may have changed places.
    return stored if stored.student == job.student.name else None


def _needs_no_run(job: Job, resume: bool) -> bool:
    """Give a job its result if it takes no run: known, hopeless, or nothing handed in."""
    if resume and (stored := _usable(job)):
        stored.lms = job.student.lms
        job.result = stored
    elif job.error:
        _keep(job.ungraded(job.error), job)
    elif job.file is None:
        _keep(_absent(job), job)
    return job.result is not None


def _absent(job: Job) -> Result:
    """Return what stands in for a result if nothing was handed in for this lab: no points."""
    others = ", ".join(job.instead[:8])
    remark = f"no notebook was handed in, but {others}" if others else "nothing was handed in"
    return stand_in(job.student, job.reference.lab, job.reference, remarks=[remark])


def do(job: Job, box: Box, slots: queue.SimpleQueue[int], stop: Event) -> Result:
    """Grade a submission. What goes wrong here is this submission's result, not the class's end."""
    slot = slots.get()
    try:
        if stop.is_set():
            raise InterruptedGradingError
        if job.file is None:
            raise ValueError("nothing was handed in")
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
    """Complete a result and store it; one that can't be stored is none."""
    result.student = job.student.name
    result.lab = job.reference.lab
    result.key = job.key
    result.file = job.file.name if job.file else ""
    result.lms = job.student.lms
    result.remarks = [*job.remarks, *result.remarks]
    try:
        save(result, job.folder / "result.json")
    except OSError as error:
        result = job.ungraded(f"its result can't be stored: {error}")
    job.result = result
    return result


def stand_in(student: Student, lab: str, reference: Reference | None, **about: Any) -> Result:
    """Return a result without answers: zeros, or after an error neither points nor a zero."""
    status: Status = "not graded" if "error" in about else "missing"
    points = None if status == "not graded" else 0.0
    tasks = reference.tasks.values() if reference else ()
    nothing = [TaskResult(one.number, one.title, one.points, points, status) for one in tasks]
    return Result(student.name, lab, "", lms=student.lms, tasks=nothing, **about)


# --- the class -----------------------------------------------------------------------------------


@dataclass
class Class:
    """Who was to be graded in what: a run that was killed, or a result that is broken, shows.

    Attributes:
        students: Name → folder and what the LMS knows them by.
        remarks: By student's name.
        command: The line by which they were graded.
    """

    students: dict[str, dict[str, Any]] = field(default_factory=dict)
    labs: list[str] = field(default_factory=list)
    remarks: dict[str, list[str]] = field(default_factory=dict)
    command: str = ""


def save_class(jobs: list[Job], remarks: dict[str, list[str]], command: str, out: Path) -> None:
    """Store who is to be graded. Raises LabError if nothing can be written."""
    students = {
        job.student.name: {"folder": job.folder.parent.name, "lms": job.student.lms} for job in jobs
    }
    labs = list(dict.fromkeys(job.reference.lab for job in jobs))
    about = asdict(Class(students, labs, remarks, command))
    try:
        write_text(out / "class.json", json.dumps(about, ensure_ascii=False, indent=1))
    except OSError as error:
        raise LabError(f"{out}: can't be written: {error}") from error


def load_class(out: Path) -> Class:
    """Return what `save_class` wrote."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Class(**json.loads((out / "class.json").read_text(encoding="utf-8")))
    return Class()


def stored_results(out: Path, refs: list[Reference]) -> list[Result]:
    """Return all results in the folder; in place of one that is missing or broken, what it lacks.

    A student whose folder was another one before has one result for a lab all the same.
    """
    about = load_class(out)
    known = {ref.lab: ref for ref in refs}
    names = {entry["folder"]: name for name, entry in about.students.items()}
    expected = {(folder, lab) for folder in names for lab in about.labs}
    results: dict[tuple[str, str], Result] = {}
    for folder, lab in sorted(expected | _stored_places(out, known)):
        path = out / "students" / folder / lab / "result.json"
        if stored := load(path):
            results.setdefault((stored.student, lab), stored)
            continue
        name = names.get(folder, folder)
        student = Student(name, about.students.get(name, {}).get("lms", {}))
        broken = "its result.json can't be read: --resume grades it again"
        why = broken if path.exists() else NOT_YET
        results.setdefault((name, lab), stand_in(student, lab, known.get(lab), error=why))
    return list(results.values())


def _stored_places(out: Path, known: Collection[str]) -> set[tuple[str, str]]:
    paths = out.glob("students/*/*")
    paths_of_labs = (p for p in paths if p.name in known or (p / "result.json").exists())
    return {(path.parent.name, path.name) for path in paths_of_labs}


def folders(results: list[Result], out: Path) -> dict[str, Path]:
    """Return where each student's page goes."""
    about = load_class(out).students
    places: dict[str, Path] = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            places.setdefault(stored.student, path.parents[1])
    for result in results:
        name = about.get(result.student, {}).get("folder", result.student)
        places.setdefault(result.student, out / "students" / name)
    return places
