"""The submissions of a class, several graded at a time."""

from __future__ import annotations

import queue
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

from tqdm import tqdm

from . import suspicion
from .grader import InterruptedGradingError, grade
from .interrupts import Interrupts
from .notebook_run import Stop
from .options import GradingOptions
from .results import Result, load, save
from .sandbox import Box
from .worklist import NOT_YET, Job, absent, ungraded


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
