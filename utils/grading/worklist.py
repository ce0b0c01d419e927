"""What there is to grade: a job for each student and lab, and what stands in for one."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import utils
from utils.course.files import folder_key, key
from utils.course.notebook import notebooks

from .assembly import assemble
from .cells import Cell, UnreadableError, read_cells
from .options import GradingOptions
from .reference import LabError, Reference
from .results import FORMAT, Result, TaskResult, file_key
from .submissions import File, Found, Student, folder_name
from .zips import MOST_FILE

#: Why there is no result of a job that a stopped run did not come to.
NOT_YET = "not graded yet: --resume goes on"


@dataclass
class Job:
    """A submission to grade: whose, against what, where the result goes.

    error: why it can't be graded, which is known before. found: what was handed in instead.
    """

    student: Student
    reference: Reference
    file: File | None
    folder: Path
    remarks: list[str] = field(default_factory=list)
    key: str = ""
    error: str = ""
    found: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        """Where the file is that counts. Raises ValueError if nothing was handed in."""
        if self.file is None:
            raise ValueError("nothing was handed in")
        return self.file.path


def labs(folder: Path) -> list[str]:
    """All labs that a file's name may mean, also those that are not graded now."""
    return [path.stem for path in notebooks(folder)]


def plan(
    found: Found,
    refs: list[Reference],
    broken: dict[str, str],
    options: GradingOptions,
    out: Path,
) -> list[Job]:
    """One job for each student and lab; of several files for one lab, one is taken.

    Raises LabError when something was handed in for a lab that can't be graded, and when no file
    tells which lab it is of.
    """
    taken = sort_files(found, refs, broken, other_labs(options.solutions, refs))
    handed_in = {lab for _, lab in taken}
    wanted = [ref for ref in refs if ref.lab in handed_in or options.only or len(refs) == 1]
    if not wanted:
        said = [text for texts in found.remarks.values() for text in texts][:10]
        lines = "".join(f"\n  {text}" for text in said)
        raise LabError(f"no file is known for a lab's; --only LAB says which is graded{lines}")
    folders = student_folders(list(found.students), out)
    house = Path(utils.__file__).parent
    course = folder_key([*(house / room for room in ("checks", "labs")), *options.sandbox.paths])
    box = options.sandbox
    limits = f"{box.cell_timeout:g} {box.timeout:g} {box.memory:g}"
    jobs = []
    for student in found.students.values():
        for ref in wanted:
            job = Job(student, ref, None, folders[student.name] / ref.lab)
            if files := taken.get((student.name, ref.lab), []):
                _take(job, files, course, limits)
            else:
                job.error = "; ".join(found.closed.get(student.name, []))
                job.found = found.others.get(student.name, [])
            jobs.append(job)
    return jobs


def sort_files(
    found: Found, refs: list[Reference], broken: dict[str, str], others: dict[str, set[str]]
) -> dict[tuple[str, str], list[File]]:
    """The files of each student and lab; what can't be told is closed, not a zero."""
    taken: dict[tuple[str, str], list[File]] = {}
    for file in found.files:
        lab = match(file, refs, others)
        if lab is None:
            _set_aside(found, file)
        elif lab in broken:
            raise LabError(f"{file.name} can't be graded: {broken[lab]}")
        elif lab not in others:
            taken.setdefault((file.student.name, lab), []).append(file)
    return taken


def _set_aside(found: Found, file: File) -> None:
    """Note a file of no known lab. It is not graded if it can't be read; otherwise it is a 0."""
    name = file.student.name
    found.remark(f"{file.name}: which lab is this? It has no cell of a lab that is graded", name)
    try:
        read_cells(file.path, [])
    except (OSError, UnreadableError) as error:
        found.close(f"{file.name}: which lab is this? {error}", name)
    else:
        found.others.setdefault(name, []).append(file.name)


def _take(job: Job, files: list[File], course: str, limits: str) -> None:
    """Choose the file that counts: one with an answer, if there is any, for it lies with others."""
    answered = [file for file in files if len(files) == 1 or _is_begun(file, job.reference)]
    job.file = newest(answered or files, job.reference.lab)
    job.error = job.file.error
    if len(files) > 1:
        job.remarks.append(f"{len(files)} files for this lab; {job.file.name} counts")
    file = file_key(job.file.path, MOST_FILE)
    job.key = key(file, job.reference.fingerprint(), course, limits, version=FORMAT)


def _is_begun(file: File, reference: Reference) -> bool:
    """Whether there is more in it than was handed out, or nobody knows: it can't be read."""
    done = assemble(reference, file.path)
    return bool(file.error or done.error) or any(one.given for one in done.answers.values())


def match(file: File, refs: list[Reference], others: dict[str, set[str]]) -> str | None:
    """The lab of a file: by its name, unless its cells are clearly those of another."""
    known = {ref.lab: ref.ids for ref in refs} | others
    by_name = [lab for lab in known if lab.casefold() in file.name.casefold()]
    cells = _cells(file.path)
    own = {str(one) for cell in cells for one in (cell["id"], cell["grade_id"]) if one}
    shared = {lab: len(own & ids) for lab, ids in known.items()}
    best = max(shared, key=lambda lab: shared[lab])
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
            cells = _cells(path)
            ids = {str(one) for cell in cells for one in (cell["id"], cell["grade_id"]) if one}
            found[path.stem] = ids - {one for ref in refs for one in ref.ids}
    return found


def _cells(path: Path) -> list[Cell]:
    """A file's cells; none where it can't be read: whoever grades it says so."""
    with contextlib.suppress(OSError, UnreadableError):
        return read_cells(path, []) or []
    return []


def _age(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def newest(files: list[File], lab: str) -> File:
    """The last attempt; among equals the one that is named as the lab is, then the youngest."""

    def order(file: File) -> tuple[int, bool, float, str]:
        named = Path(file.name).stem.casefold() == lab.casefold()
        return file.attempt, named, _age(file.path), file.name

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


# --- in place of a result ------------------------------------------------------------------------


def absent(job: Job) -> Result:
    """Nothing was handed in for this lab: no points for it."""
    result = Result(job.student.name, job.reference.lab, "")
    result.remarks.append("nothing was handed in")
    if job.found:
        result.remarks.append(f"no notebook was handed in, but {', '.join(job.found[:8])}")
        result.remarks.pop(0)
    for task in job.reference.tasks.values():
        result.tasks.append(TaskResult(task.number, task.title, task.points, 0.0, "missing"))
    return result


def ungraded(student: Student, lab: str, reference: Reference | None, why: str) -> Result:
    """Grading failed: neither points nor a zero. Without a reference nobody knows the tasks."""
    result = Result(student.name, lab, "", lms=student.lms, error=why)
    for task in reference.tasks.values() if reference else ():
        result.tasks.append(TaskResult(task.number, task.title, task.points, None, "not graded"))
    return result
