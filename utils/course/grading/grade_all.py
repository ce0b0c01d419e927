"""``ddl-labs grade``: a class's submissions, several at a time, resumable."""

from __future__ import annotations

import argparse
import compileall
import contextlib
import json
import os
import queue
import shutil
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs
from tqdm import tqdm

import utils

from ..notebook import notebooks
from . import explain
from .assemble import read_cells
from .book import moodle_feedback, write_books
from .grade_one import InterruptedGradingError, grade
from .pages import write_pages
from .reference import LabError, Reference, references
from .results import Result, TaskResult, file_key, folder_key, key, load, save
from .run import Stop
from .sandbox import GB, Box, Limits, require
from .submissions import MOST_NOTEBOOK, File, Found, Student, clear, find, folder_name

INTERRUPTED = 130


@dataclass
class Job:
    """A submission to grade: whose, against what, where the result goes."""

    student: Student
    reference: Reference
    file: File | None
    folder: Path
    remarks: list[str] = field(default_factory=list)
    key: str = ""


def main(options: argparse.Namespace) -> int:
    """Grade, write books and pages; 0: all were graded, 1: not all, 130: interrupted."""
    out = options.out.resolve()
    if options.merge:
        return merge(out, options)
    if options.submissions is None:
        raise LabError("which submissions? ddl-labs grade SUBMISSIONS -o RESULTS")
    if out.is_relative_to(options.submissions.resolve()):
        raise LabError(f"{options.out} lies in {options.submissions}: results would be submissions")
    grades = explain.read(out / "explain.csv")  # a mistake in it must not cost an hour
    refs, broken = references(options.solutions, options.only)
    box = make_box(options)
    # A sandbox cannot keep what it compiles: each would compile the course in all its processes.
    compileall.compile_dir(Path(utils.__file__).parent, quiet=2)
    with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
        (Path(scratch) / "probe").mkdir()
        require(box, Path(scratch) / "probe")
        found = find(options.submissions, Path(scratch), labs(options.solutions))
        jobs = plan(found, refs, broken, options, out)
        results, interrupted = work(jobs, box, options)
        clear(Path(scratch) / "unpacked")
    explain.merge(results, grades)
    save_class(out, found.remarks)
    refs = [ref for ref in refs if any(one.lab == ref.lab for one in results)]
    report(results, refs, out, found.remarks, options.format)
    return say(results, jobs, out, interrupted)


def merge(out: Path, options: argparse.Namespace) -> int:
    """Books and pages again, from stored results and the points in explain.csv."""
    results = [one for path in sorted(out.glob("students/*/*/result.json")) if (one := load(path))]
    if not results:
        raise LabError(f"{out}: there are no results to merge into")
    refs, _ = references(options.solutions, options.only)
    refs = [ref for ref in refs if any(one.lab == ref.lab for one in results)]
    explain.merge(results, explain.read(out / "explain.csv"))
    report(results, refs, out, load_class(out), options.format)
    return say(results, [], out, False)


def make_box(options: argparse.Namespace) -> Box:
    """The sandbox that the options ask for."""
    limits = Limits(
        cell=options.cell_timeout, total=options.timeout, memory=int(options.memory * GB)
    )
    data = os.environ.get("FASHION_MNIST_ROOT") or platformdirs.user_cache_path("ddl-labs")
    data = Path(data).resolve()
    return Box(
        walls=not options.no_sandbox,
        limits=limits,
        paths=tuple(path.resolve() for path in options.path),
        data=data if data.is_dir() else None,
    )


# --- what there is to do -------------------------------------------------------------------------


def labs(folder: Path) -> list[str]:
    """All labs that a file's name may mean, also those that are not graded now."""
    return [path.stem for path in notebooks(folder)]


def plan(
    found: Found, refs: list[Reference], broken: dict[str, str], options, out: Path
) -> list[Job]:
    """One job for each student and lab; of several files for one lab, one is taken.

    Raises LabError when something was handed in for a lab that can't be graded.
    """
    others = other_labs(options.solutions, refs)
    taken: dict[tuple[str, str], list[File]] = {}
    for file in found.files:
        lab = match(file, refs, others)
        if lab is None:
            found.remark(f"{file.name}: which lab is this? Not graded", file.student.name)
        elif lab in broken:
            raise LabError(f"{file.name} can't be graded: {broken[lab]}")
        elif lab not in others:
            taken.setdefault((file.student.name, lab), []).append(file)
    handed_in = {lab for _, lab in taken}
    folders = student_folders(list(found.students), out)
    course = folder_key([Path(utils.__file__).parent / "checks", *options.path])
    jobs = []
    for student in found.students.values():
        for ref in refs:
            if ref.lab not in handed_in and not options.only:
                continue
            files = taken.get((student.name, ref.lab), [])
            job = Job(student, ref, None, folders[student.name] / ref.lab)
            if files:
                job.file = newest(files, ref.lab)
                if len(files) > 1:
                    job.remarks.append(f"{len(files)} files for this lab; {job.file.name} counts")
                job.key = key(
                    *(file_key(job.file.path, MOST_NOTEBOOK), ref.fingerprint(), course),
                    f"{options.cell_timeout:g} {options.timeout:g} {options.memory:g}",
                )
            jobs.append(job)
    return jobs


def match(file: File, refs: list[Reference], others: dict[str, set[str]]) -> str | None:
    """The lab of a file: by its name, unless its cells are clearly those of another."""
    known = {ref.lab: ref.ids for ref in refs} | others
    by_name = [lab for lab in known if lab.casefold() in file.name.casefold()]
    cells = read_cells(file.path, []) or []
    own = {str(one) for cell in cells for one in (cell["id"], cell["grade_id"]) if one}
    shared = {lab: len(own & ids) for lab, ids in known.items()}
    best = max(shared, key=shared.get)
    if by_name and (shared[by_name[0]] or not shared[best]):
        return by_name[0]
    if shared[best]:
        return best
    return refs[0].lab if len(refs) == 1 and not by_name else None


def other_labs(folder: Path, refs: list[Reference]) -> dict[str, set[str]]:
    """Ids of the labs that are not graded now, so that their files are told apart."""
    graded = {ref.lab for ref in refs}
    found = {}
    for path in notebooks(folder):
        if path.stem not in graded:
            cells = read_cells(path, []) or []
            ids = {str(one) for cell in cells for one in (cell["id"], cell["grade_id"]) if one}
            found[path.stem] = ids - {one for ref in refs for one in ref.ids}
    return found


def newest(files: list[File], lab: str) -> File:
    """The last attempt; among equals the one that is named as the lab is, then the youngest."""

    def order(file: File) -> tuple:
        named = Path(file.name).stem.casefold() == lab.casefold()
        return file.attempt, named, file.path.stat().st_mtime, file.name

    return max(files, key=order)


def student_folders(names: list[str], out: Path) -> dict[str, Path]:
    """A folder for each student, also where two names differ in nothing that a file system sees."""
    folders, used = {}, set()
    for name in names:
        wanted = folder = folder_name(name)
        count = 1
        while folder.casefold() in used:
            count += 1
            folder = f"{wanted} ({count})"
        used.add(folder.casefold())
        folders[name] = out / "students" / folder
    return folders


# --- the work ------------------------------------------------------------------------------------


def work(jobs: list[Job], box: Box, options) -> tuple[list[Result], bool]:
    """Grade what has to be graded; whether the user stopped it."""
    results, waiting = [], []
    for job in jobs:
        stored = load(job.folder / "result.json") if options.resume and job.file else None
        if stored and stored.key == job.key and not stored.error:
            results.append(stored)
        elif job.file is None:
            results.append(keep(absent(job), job))
        else:
            waiting.append(job)
    stop, slots = Stop(), queue.SimpleQueue()
    for slot in range(options.jobs):
        slots.put(slot)
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(do, job, box, slots, stop) for job in waiting]
        try:
            for future in progress(futures, options.quiet):
                results.append(future.result())
        except KeyboardInterrupt:
            stop.set()
            for future in futures:
                future.cancel()
            print("\nstopped; what was graded is kept, --resume goes on from there",
                  file=sys.stderr)  # fmt: skip
            return [*results, *_ended(futures, results)], True
    return results, False


def progress(futures: list[Future], quiet: bool) -> Iterator[Future]:
    """The futures as they end, with a bar that says how long it will take."""
    bar = tqdm(
        as_completed(futures), total=len(futures), unit="submission", disable=quiet or not futures
    )
    return iter(bar)


def _ended(futures: list[Future], seen: list[Result]) -> list[Result]:
    ended = [one.result() for one in futures
             if one.done() and not one.cancelled() and one.exception() is None]  # fmt: skip
    return [one for one in ended if all(one is not other for other in seen)]


def do(job: Job, box: Box, slots: queue.SimpleQueue, stop: Stop) -> Result:
    """One submission. What goes wrong here is this submission's result, not the class's end."""
    slot = slots.get()
    try:
        if stop.is_set():
            raise InterruptedGradingError
        shutil.rmtree(job.folder, ignore_errors=True)
        result = grade(job.file.path, job.reference, box, job.folder, slot=slot, stop=stop)
    except InterruptedGradingError:
        raise
    except Exception as error:
        result = absent(job)
        result.error = f"{type(error).__name__}: {error}"
    finally:
        slots.put(slot)
    return keep(result, job)


def keep(result: Result, job: Job) -> Result:
    """Complete a result and store it."""
    result.student, result.lab, result.key = job.student.name, job.reference.lab, job.key
    result.file = job.file.name if job.file else ""
    result.lms = job.student.lms
    result.remarks = [*job.remarks, *result.remarks]
    save(result, job.folder / "result.json")
    return result


def absent(job: Job) -> Result:
    """Nothing was handed in for this lab."""
    result = Result(job.student.name, job.reference.lab, "")
    if job.file is None:
        result.remarks.append("nothing was handed in")
    for task in job.reference.tasks.values():
        result.tasks.append(TaskResult(task.number, task.title, task.points, 0.0, "missing"))
    return result


# --- the results ---------------------------------------------------------------------------------


def report(results: list[Result], refs: list[Reference], out: Path, remarks, formats) -> None:
    """Everything that instructor and students read."""
    folders = {}
    for path in sorted(out.glob("students/*/*/result.json")):
        if stored := load(path):
            folders.setdefault(stored.student, path.parents[1])
    write_books(results, out, formats, remarks)
    pages = write_pages(results, refs, out, folders, remarks)
    if any(explain.written(one) for one in results) or (out / "explain.csv").exists():
        explain.write(results, out / "explain.csv")
    if "moodle" in formats:
        moodle_feedback(results, pages, out / "feedback-moodle.zip")


def save_class(out: Path, remarks: dict[str, list[str]]) -> None:
    """Remarks that belong to no single notebook, for --merge."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "remarks.json").write_text(json.dumps(remarks, ensure_ascii=False), encoding="utf-8")


def load_class(out: Path) -> dict[str, list[str]]:
    """What `save_class` wrote."""
    with contextlib.suppress(OSError, ValueError):
        return json.loads((out / "remarks.json").read_text(encoding="utf-8"))
    return {}


def say(results: list[Result], jobs: list[Job], out: Path, interrupted: bool) -> int:
    """One line on the class, one for each submission that could not be graded."""
    failed = [one for one in results if one.error]
    for one in failed:
        print(f"not graded: {one.student}, {one.lab}: {one.error}", file=sys.stderr)
    open_ = sum(len(one.open) for one in results)
    by_hand = f", {open_} written answers to be read (explain.html, explain.csv)" if open_ else ""
    students = len({one.student for one in results})
    graded = sum(1 for one in results if one.file and not one.error)
    print(f"{students} students, {graded} submissions graded{by_hand}: {out}")
    if interrupted:
        return INTERRUPTED
    return 1 if failed else 0
