"""One submission: run it, again without what hung, and give points for explicit passes only."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

from utils.verdict import Verdict

from ..notebook import lab
from .assemble import Assembled, assemble, body
from .reference import Reference, Task
from .results import Result, Shown, Status, TaskResult
from .run import Run, Stop, run
from .sandbox import Box, Limits

MOST_SHOWN, MOST_CODE = 3, 20_000
MOST_STARTS = 3
#: A check interrupts ranks that do not answer.
STILL_RUNNING = "did not come to an end and was interrupted "
#: Seconds that must be left for another run to make sense.
LEAST = 15.0

WHY: dict[str, tuple[Status, str]] = {
    "out of time": ("hung", "was still running after {cell:g} s and was ended"),
    "out of time in all": ("hung", "was running when the time for the whole notebook was up"),
    "too much memory": ("lost", "used more than {memory:.1f} GB of memory and was ended"),
    "too much output": ("lost", "printed more than can be read"),
    "the kernel died": ("lost", "ended the notebook's kernel"),
    "the ranks are gone": ("lost", "ended or blocked the ranks"),
}


class InterruptedGradingError(Exception):
    """The user gave up; there is no result."""


class MachineError(Exception):
    """What this machine did, again and again, says nothing of the answers."""


def grade(
    file: Path, reference: Reference, box: Box, folder: Path, *, slot: int = 0, stop: Stop = None
) -> Result:
    """Grade one submission; the runs' notebooks and JUnit reports stay in `folder`.

    Raises InterruptedGradingError when `stop` was set meanwhile.
    """
    grading = Grading(assemble(reference, file), box, folder, slot, stop)
    if any(answer.changed for answer in grading.assembled.answers.values()):
        try:
            grading.run_all()
        except MachineError as error:
            grading.error = str(error)
    return grading.result()


class Grading:
    """The runs of one submission, and the verdicts so far."""

    def __init__(self, assembled: Assembled, box: Box, folder: Path, slot: int, stop: Stop | None):
        self.assembled, self.reference = assembled, assembled.reference
        self.box, self.folder, self.slot, self.stop = box, folder, slot, stop
        self.verdicts: dict[str, TaskResult] = {}
        self.blanked: set[str] = set()
        self.given: set[str] = set()
        self.remarks = list(assembled.remarks)
        self.runs, self.seconds, self.error = 0, 0.0, assembled.error

    # -- runs -------------------------------------------------------------------------------------

    def run_all(self) -> None:
        """Run, and again for what stands on a foundation task that is wrong."""
        self._run_until_judged()
        answered = self.assembled.answers
        lost = {
            task.number
            for task in self.reference.tasks.values()
            if not (task.by_hand or task.foundation or self._passed(task.number))
            and any(answered[grade_id].changed for grade_id in task.answers)
        }
        self.given = {
            task.number
            for task in self.reference.tasks.values()
            if task.foundation and not self._passed(task.number)
        }
        if lost and self.given:
            self._judge_again(lost)

    def _judge_again(self, lost: set[str]) -> None:
        """Give tasks a run with the reference's answers to the foundation tasks."""
        before = dict(self.verdicts)
        for task in lost:
            self.verdicts.pop(task, None)
        self._run_until_judged()
        passed = [task for task in self.reference.tasks if task in lost and self._passed(task)]
        self.verdicts = before | {task: self.verdicts[task] for task in passed}
        if passed:
            self.remarks.append(
                f"Task {', '.join(passed)}: judged with the reference's answer to task "
                f"{', '.join(sorted(self.given))}"
            )

    def _passed(self, number: str) -> bool:
        verdict = self.verdicts.get(number)
        return verdict is not None and verdict.status == "passed"

    def _run_until_judged(self) -> None:
        """Run until every task has a verdict, or nothing more can be found out."""
        failed_starts = 0
        while self._to_judge() and self.runs <= 2 * len(self.reference.tasks):
            done = self._run_once(self.blanked)
            if done is None or done.end is None:
                return
            at, culprit = self._where(done), self._owner_of_end(done)
            if culprit is None:
                failed_starts += 1  # no answer has run yet: a busy machine, most likely
                self.seconds -= done.seconds
                if failed_starts == MOST_STARTS:
                    raise MachineError(f"the notebook could not be started: {done.end}")
            elif not self._passes_without_suspects(culprit, done):
                self._blame(culprit, at, done)

    def _run_once(self, blanked: set[str]) -> Run | None:
        """One more run, in the time that is left; None if that is too little.

        Raises MachineError when the machine spoilt it, and two repetitions as well.
        """
        left = self.box.limits.total - self.seconds
        if left < min(LEAST, self.box.limits.total / 2):
            self.remarks.append("the time for this submission was up")
            return None
        self.runs += 1
        for _ in range(MOST_STARTS):
            done = self._attempt(blanked, left)
            if not done.fault:
                self.seconds += done.seconds
                self._read(done, blanked)
                return done
        raise MachineError(f"tried {MOST_STARTS} times: {done.fault}")

    def _attempt(self, blanked: set[str], left: float) -> Run:
        """A run in an empty folder, with fresh ranks; the system's refusals are its `fault`."""
        job = self.folder / f"run-{self.runs}"
        shutil.rmtree(job, ignore_errors=True)
        nb = self.assembled.notebook(blanked, self.given)
        try:
            done = run(nb, _with_total(self.box, left), job, slot=self.slot, stop=self.stop)
        except OSError as error:
            return Run(fault=f"the run could not be made: {error}")
        if done.end == "interrupted":
            raise InterruptedGradingError
        return done

    def _passes_without_suspects(self, culprit: str, done: Run) -> bool:
        """Give a task that lost its ranks a run without the answers above that have failed.

        One of them may have done the harm: a full disk, a thread that goes on.
        """
        order = list(self.reference.tasks)
        suspects = {
            task
            for task in order[: order.index(culprit)]
            if task in self.verdicts and self.verdicts[task].status != "passed"
        } - self.blanked
        if not suspects or culprit in self.blanked or WHY.get(done.end, ("lost",))[0] != "lost":
            return False
        before = dict(self.verdicts)
        self.verdicts.pop(culprit, None)
        for _ in range(MOST_STARTS):
            again = self._run_once(self.blanked | suspects)
            if again is None or again.end is None or self._owner_of_end(again):
                break
        else:
            raise MachineError(f"the notebook could not be started: {again.end}")
        verdict = self.verdicts.get(culprit)
        if verdict is not None and verdict.status == "passed":
            self.blanked |= suspects
            self.remarks.append(f"Task {culprit} passes only without task {', '.join(suspects)}")
            return True
        # What others lacked in this run is not their fault.
        passed = {task: one for task, one in self.verdicts.items() if one.status == "passed"}
        self.verdicts = before | passed
        return False

    def _owner_of_end(self, done: Run) -> str | None:
        """The task at which a run ended early; None: before the first."""
        at = self._where(done)
        return self.reference.owners.get(at) if at else None

    def _where(self, done: Run) -> str | None:
        """The cell at which a run ended early."""
        ids = [cell.id for cell in self.reference.nb.cells if cell.cell_type == "code"]
        if done.records and done.records[-1]["end"]:
            return done.records[-1]["cell"]
        return ids[min(len(done.records), len(ids) - 1)] if done.records else None

    def _blame(self, culprit: str, at: str, done: Run) -> None:
        """Note what happened; the next run goes without that answer."""
        status, text = WHY.get(done.end, ("lost", done.end))
        limits = self.box.limits
        text = text.format(cell=limits.cell, memory=limits.memory / (1 << 30))
        if culprit not in self.verdicts:
            self.verdicts[culprit] = self._verdict(culprit, status, done)
        if self.verdicts[culprit].points == 0:
            verdict = self.verdicts[culprit]
            name = _name(at, self.reference)
            verdict.note = verdict.note or f"{name[0].upper()}{name[1:]} {text}."
            if verdict.status in {"wrong", "failed"}:
                verdict.status = status
        self.remarks.append(f"Task {culprit}: {_name(at, self.reference)} {text}")
        # Already without it: then an earlier answer still does something in the background.
        order = list(self.reference.tasks)
        for task in reversed(order[: order.index(culprit) + 1]):
            if task not in self.blanked:
                self.blanked.add(task)
                return
        self.blanked |= set(order)

    # -- verdicts ---------------------------------------------------------------------------------

    def _to_judge(self) -> list[Task]:
        """Tasks that have an answer and no verdict."""
        return [
            task
            for task in self.reference.tasks.values()
            if not task.by_hand and task.number not in self.verdicts
        ]

    def _read(self, done: Run, blanked: set[str]) -> None:
        """Verdicts of the tasks whose checks have all come to an end in this run."""
        records = {record["cell"]: record for record in done.records}
        for task in self._to_judge():
            checks = [records.get(cell) for cell in task.checks]
            if all(checks) and task.number not in blanked:
                passed = {
                    record["cell"]
                    for record in checks
                    if explicit_pass(record, self.reference, self.box.limits)
                }
                status = "passed" if len(passed) == len(checks) else _failure(checks)
                self.verdicts[task.number] = self._verdict(task.number, status, done, passed)

    def _verdict(self, number: str, status: Status, done: Run, passed=frozenset()) -> TaskResult:
        task = self.reference.task(number)
        result = self._blank_result(task, status)
        if status == "passed":
            result.points = task.points
        else:  # checks with points of their own count one by one
            result.points = sum(points for cell, points in task.checks.items() if cell in passed)
        records = [r for r in done.records if self.reference.owners.get(r["cell"]) == number]
        result.said = "\n".join(_words(r) for r in records if r["cell"] in task.checks).strip()
        if status != "passed":
            result.shown = shown(records, self.reference)
        return result

    def _blank_result(self, task: Task, status: Status) -> TaskResult:
        answers = [self.assembled.answers[grade_id] for grade_id in task.answers]
        code = "\n\n".join(body(one.source) for one in answers if one.source is not None)
        points = None if task.by_hand or status == "not graded" else 0.0
        result = TaskResult(task.number, task.title, task.points, points, status)
        result.code = code[:MOST_CODE]
        return result

    def result(self) -> Result:
        """What is known at the end; no verdict, no points; after an error not even that."""
        found = Result("", self.reference.lab, "", remarks=list(dict.fromkeys(self.remarks)))
        found.runs, found.seconds, found.error = self.runs, round(self.seconds, 1), self.error
        for task in self.reference.tasks.values():
            if self.assembled.error or (self.error and not task.by_hand):
                found.tasks.append(self._blank_result(task, "not graded"))
                continue
            verdict = self.verdicts.get(task.number) or self._blank_result(task, "not reached")
            found.tasks.append(self._with_answer(task, verdict))
        return found

    def _with_answer(self, task: Task, verdict: TaskResult) -> TaskResult:
        """Say of an answer that isn't there that it isn't."""
        answers = [self.assembled.answers[grade_id] for grade_id in task.answers]
        if all(one.source is None for one in answers):
            verdict.status, verdict.points = "missing", 0.0
        elif not any(one.changed for one in answers) and verdict.status != "passed":
            verdict.status, verdict.points = "unchanged", 0.0
        elif task.by_hand:
            verdict.status = "by hand"
        if verdict.status in {"missing", "unchanged"}:
            verdict.said, verdict.shown, verdict.note = "", [], ""
        return verdict


def explicit_pass(record: dict, reference: Reference, limits: Limits) -> bool:
    """Did nbval pass this check cell, with the verdict of the reference and no other, in time?"""
    return (
        record["outcome"] == "passed"
        and record["end"] is None
        and record["seconds"] < limits.cell
        and record["verdicts"] == reference.expected[record["cell"]]
    )


def shown(records: list[dict], reference: Reference) -> list[Shown]:
    """Errors of a task's cells for the feedback: never the source of a check."""
    found = []
    for record in records:
        errors = [o for o in record["outputs"] if o["type"] == "error"]
        if not errors or record["cell"] in reference.task(_owner(record, reference)).checks:
            continue
        png = next((o["png"] for o in record["outputs"] if o.get("png")), "")
        error = errors[0]
        text = error["evalue"]
        if error["ename"] != "CellFailed":
            text = f"{error['ename']}: {text}"
        title = _name(record["cell"], reference)
        found.append(Shown(title[0].upper() + title[1:], tidied(text), png))
        if title == "the answer":
            break  # what comes after it can't work
    if not found:
        found = [
            Shown("The check", o["text"].strip()[:2000] or o["type"], o.get("png", ""))
            for record in records
            for o in record["outputs"]
            if o.get("png") and record["cell"] in reference.expected
        ]
    return found[:MOST_SHOWN]


def tidied(text: str) -> str:
    """An error without the frames of libraries and the rule above them."""
    blocks = re.sub(r"^-{20,}\n", "", text.strip()).split("\n\n")
    kept = [block for block in blocks if not block.lstrip().startswith("File /")]
    return "\n\n".join(kept).strip()


def _failure(checks: list[dict]) -> Status:
    """A check that shows a verdict has judged; one that shows none has not."""
    if any("KeyboardInterrupt" in _said(record) for record in checks):
        return "hung"
    return "wrong" if all(record["verdicts"] for record in checks) else "failed"


def _owner(record: dict, reference: Reference) -> str:
    return reference.owners[record["cell"]]


def _said(record: dict) -> str:
    """What a check's verdicts say; where it has none, what it printed."""
    if record["verdicts"]:
        return "\n".join(str(Verdict.from_data(data)) for data in record["verdicts"])
    return "".join(o["text"] for o in record["outputs"] if o.get("name") == "stdout").strip()


def _words(record: dict) -> str:
    """What a check said; without its traceback, which shows its source."""
    errors = [o for o in record["outputs"] if o["type"] == "error"]
    if _said(record) or not errors:
        return re.sub(r"KeyboardInterrupt: *", STILL_RUNNING, _said(record))
    first = (errors[0]["evalue"].strip().splitlines() or [""])[0]
    return f"The check ended with {errors[0]['ename']}: {first}"[:500]


def _name(cell_id: str, reference: Reference) -> str:
    cell = next(one for one in reference.nb.cells if one.id == cell_id)
    if lab(cell).get("check"):
        return "the check"
    return "the answer" if lab(cell) else "the cell that runs it"


def _with_total(box: Box, total: float) -> Box:
    return replace(box, limits=replace(box.limits, total=total))
