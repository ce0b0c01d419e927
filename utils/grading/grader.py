"""Grades one submission: runs it, reruns it without what hung, and counts explicit passes only."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from threading import Event

from .assembly import OWN, Assembled, View, assemble
from .inspection import MOST_CODE
from .notebook_run import Run, run
from .reference import Reference, Task
from .results import (
    End,
    Record,
    Result,
    Status,
    TaskResult,
    explicit_pass,
    failure,
    name_of,
    problems_in,
    shown,
    words,
)
from .sandbox import Box

MOST_STARTS = 3
#: Seconds that must be left for another run to make sense.
LEAST = 15.0

#: For each end of a run: the status of the task at which the run ended, and its description.
WHY: dict[str, tuple[Status, str]] = {
    End.CELL_TIME: ("hung", "was still running after {cell:g} s and was stopped"),
    End.TOTAL_TIME: ("hung", "was still running when the time for the whole notebook was over"),
    End.MEMORY: ("lost", "used more than {memory:.1f} GB of memory and was stopped"),
    End.OUTPUT: ("lost", "printed more than grading can read"),
    End.MACHINE_MEMORY: ("lost", "used more memory than this machine has, in each of three runs"),
    End.KERNEL: ("lost", "ended the notebook's kernel"),
    End.RANKS: ("lost", "ended or blocked the ranks"),
}


class InterruptedGradingError(Exception):
    """The user has interrupted grading, so there is no result."""


class MachineError(Exception):
    """This machine failed several times, so the runs say nothing about the answers."""


def grade(
    file: Path,
    reference: Reference,
    box: Box,
    folder: Path,
    *,
    slot: int = 0,
    stop: Event | None = None,
) -> Result:
    """Grade one submission; the runs' notebooks and JUnit reports stay in `folder`.

    Raises:
        InterruptedGradingError: `stop` was set while the submission was graded.
    """
    grading = Grading(assemble(reference, file), box, folder, slot, stop)
    if grading.assembled.is_begun:
        try:
            grading.run_all()
        except MachineError as error:
            grading.error = str(error)
    return grading.result()


class Grading:
    """The runs of one submission, and the verdicts so far."""

    def __init__(self, assembled: Assembled, box: Box, folder: Path, slot: int, stop: Event | None):
        self.assembled = assembled
        self.reference = assembled.reference
        self.box = box
        self.folder = folder
        self.slot = slot
        self.stop = stop
        self.verdicts: dict[str, TaskResult] = {}
        self.blanked: set[str] = set()
        self.view = View(own=assembled.is_spread)
        self.ids: list[str] = []
        self.remarks = list(assembled.remarks)
        self.runs = 0
        self.seconds = 0.0
        self.error = assembled.error

    # -- runs -------------------------------------------------------------------------------------

    def run_all(self) -> None:
        """Judge every task in the student's notebook, and then each lost task by itself."""
        self._run_until_judged()
        self._judge_each_alone()

    def _run_until_judged(self) -> None:
        """Run until every task has a verdict, or further runs can't find out more."""
        failed_starts = 0
        while self._to_judge() and self.runs <= 2 * len(self.reference.tasks):
            done = self._run_once(replace(self.view, blanked=frozenset(self.blanked)))
            if done is None or done.end is None:
                return
            at = self._where(done)
            culprit = self.reference.owners.get(at)
            if culprit:
                self._blame(culprit, at, done)
            elif not self._leaves_own_cells_out(done):
                failed_starts += 1  # no answer has run yet, so the machine is probably busy
                self.seconds -= done.seconds
                if failed_starts == MOST_STARTS:
                    raise MachineError(f"The notebook could not be started ({done.end}).")

    def _judge_each_alone(self) -> None:
        """Judge each task that did not pass with the reference's answers to all other tasks.

        An earlier answer may have done lasting harm, such as a closed stdout or a lost group. Of
        the student's own cells, only those run whose names the answer needs. A personal answer that
        has passed stays, because it says what the other tasks are.
        """
        before = dict(self.verdicts)
        passed = self._passed_alone()
        self.verdicts = before | {task: self.verdicts[task] for task in passed}
        if passed:
            how = "with the reference's answers to all other tasks"
            self.remarks.append(f"Task {', '.join(passed)}: The check passed {how}.")

    def _passed_alone(self) -> list[str]:
        """Return the tasks that pass if each one runs alone, for as long as there is time."""
        tasks = self.reference.tasks.values()
        everything = frozenset(
            task.number for task in tasks if not (task.personal and self._passed(task.number))
        )
        first = next((n for n, task in self.reference.tasks.items() if self._is_answered(task)), "")
        passed = []
        for number in self._lost():
            if number == first and not self.assembled.is_spread:
                continue  # nothing ran before it that could have harmed it
            self.verdicts.pop(number, None)
            view = View(given=everything - {number}, own=self.view.own, only=number)
            if not self._begin_alone(view):
                break
            if self._passed(number):
                passed.append(number)
        return passed

    def _begin_alone(self, view: View) -> bool:
        """Run for one task, again if the ranks did not start; return False without time for it."""
        for _ in range(MOST_STARTS):
            done = self._run_once(view)
            if done is None:
                return False
            if done.end is None or self._is_the_students(self._where(done)):
                break
        return True

    def _lost(self) -> list[str]:
        """Return the tasks with an answer that did not pass."""
        return [
            task.number
            for task in self.reference.tasks.values()
            if not (task.by_hand or self._passed(task.number)) and self._is_answered(task)
        ]

    def _is_answered(self, task: Task) -> bool:
        return any(self.assembled.answers[grade_id].given for grade_id in task.answers)

    def _passed(self, number: str) -> bool:
        verdict = self.verdicts.get(number)
        return verdict is not None and verdict.status == "passed"

    def _leaves_own_cells_out(self, done: Run) -> bool:
        """Leave the student's own cells out of the next run; return False if they already are.

        Only without them is a run that ends before the first answer the machine's fault.
        """
        if not (self.view.own and self.assembled.own):
            return False
        at = self._where(done)
        if at.startswith(OWN):
            remark = f"A cell of the student {self._why(done)[1]}, so added cells were left out."
        else:
            remark = f"The run ended before the first task ({done.end}). Added cells were left out."
        self.view = replace(self.view, own=False)
        self.remarks.append(remark)
        return True

    def _run_once(self, view: View) -> Run | None:
        """Run once more in the time that is left; return None if too little is left.

        Raises MachineError if the machine spoiled this run and two repetitions.
        """
        left = self.box.limits.total - self.seconds
        if left < min(LEAST, self.box.limits.total / 2):
            self.remarks.append("The time for this submission ended before all tasks were judged.")
            return None
        self.runs += 1
        ended_at = set()
        for _ in range(MOST_STARTS):
            done = self._attempt(view, left)
            if not done.fault:
                break
            ended_at.add(self._where(done) if done.out_of_memory else "")
        else:
            at = ended_at.pop()
            if ended_at or not self._is_the_students(at):
                raise MachineError(f"The machine failed in {MOST_STARTS} runs: {done.fault}")
            done.end = End.MACHINE_MEMORY
        self.seconds += done.seconds
        self._read(done, view)
        return done

    def _is_the_students(self, cell: str) -> bool:
        """Return whether a cell belongs to a task or was added by the student."""
        return cell.startswith(OWN) or bool(self.reference.owners.get(cell))

    def _attempt(self, view: View, left: float) -> Run:
        """Run in an empty folder with fresh ranks; an OSError becomes the run's `fault`."""
        job = self.folder / f"run-{self.runs}"
        shutil.rmtree(job, ignore_errors=True)
        nb = self.assembled.notebook(view)
        self.ids = [cell.id for cell in nb.cells if cell.cell_type == "code"]
        limits = replace(self.box.limits, total=left)
        reference = self.reference
        shares, files, given = reference.shares_folder, reference.rank_files, reference.given
        box = replace(self.box, limits=limits, has_shared_folder=shares, files=files, given=given)
        try:
            done = run(nb, box, job, slot=self.slot, stop=self.stop)
        except OSError as error:
            return Run(fault=f"The run could not be started: {error}")
        if done.end == End.STOPPED:
            raise InterruptedGradingError
        return done

    def _where(self, done: Run) -> str:
        """Return the cell at which a run ended early; "" if no cell has run."""
        if not done.records:
            return ""
        if done.records[-1]["end"]:
            return str(done.records[-1]["cell"])
        return self.ids[min(len(done.records), len(self.ids) - 1)]

    def _why(self, done: Run) -> tuple[Status, str]:
        """Return the status of the task at which a run ended, and a description of the end."""
        end = done.end or ""
        limits = self.box.limits
        status, text = WHY.get(end, ("lost", end))
        return status, text.format(cell=limits.cell, memory=limits.memory / (1 << 30))

    def _blame(self, culprit: str, at: str, done: Run) -> None:
        """Note why the run ended at this task; the next run leaves an answer out."""
        status, text = self._why(done)
        name = name_of(at, self.reference)
        sentence = f"{name[0].upper()}{name[1:]} {text}."
        if culprit not in self.verdicts:
            task = self.reference.tasks[culprit]
            self.verdicts[culprit] = self._verdict(task, status, done)
        verdict = self.verdicts[culprit]
        if verdict.points == 0:
            verdict.note = verdict.note or sentence
            if verdict.status in {"wrong", "failed"}:
                verdict.status = status
        self.remarks.append(f"Task {culprit}: {sentence}")
        # If this answer was left out already, an earlier one still runs in the background.
        order = list(self.reference.tasks)
        above = order[: order.index(culprit) + 1]
        left = [number for number in above if number not in self.blanked]
        self.blanked |= set(left[-1:] or order)

    # -- verdicts ---------------------------------------------------------------------------------

    def _to_judge(self) -> list[Task]:
        tasks = [task for task in self.reference.tasks.values() if not task.by_hand]
        return [task for task in tasks if task.number not in self.verdicts]

    def _read(self, done: Run, view: View) -> None:
        """Store the verdicts of the tasks whose checks have all ended in this run."""
        records = {record["cell"]: record for record in done.records}
        for task in self._to_judge():
            checks = [records[cell] for cell in task.checks if cell in records]
            wanted = task.number not in view.blanked and view.only in (None, task.number)
            if wanted and len(checks) == len(task.checks):
                self.verdicts[task.number] = self._judged(task, checks, done)

    def _judged(self, task: Task, checks: list[Record], done: Run) -> TaskResult:
        limits = self.box.limits
        passes = [check for check in checks if explicit_pass(check, self.reference, limits)]
        if len(passes) == len(checks):
            return self._verdict(task, "passed", done, task.points)
        # If the checks of a task have separate points, they count one by one.
        points = sum(task.checks[check["cell"]] for check in passes)
        return self._verdict(task, failure(checks), done, points)

    def _verdict(self, task: Task, status: Status, done: Run, points: float = 0) -> TaskResult:
        result = self._blank_result(task, status)
        result.points = points
        owners = self.reference.owners
        records = [record for record in done.records if owners.get(record["cell"]) == task.number]
        checks = [record for record in records if record["cell"] in task.checks]
        result.said = "\n".join(words(record) for record in checks).strip()
        result.problems = problems_in(checks)
        if status != "passed":
            result.shown = shown(records, self.reference)
        return result

    def _blank_result(self, task: Task, status: Status) -> TaskResult:
        code = "\n\n".join(self.assembled.code_of(grade_id) for grade_id in task.answers)
        points = None if task.by_hand or status == "not graded" else 0.0
        result = TaskResult(task.number, task.title, task.points, points, status)
        result.code = code[:MOST_CODE]
        return result

    def result(self) -> Result:
        """Return the result. A task without a verdict gets 0 points, and after an error none."""
        remarks = list(dict.fromkeys(self.remarks))
        result = Result("", self.reference.lab, "", remarks=remarks, error=self.error)
        result.runs = self.runs
        result.seconds = round(self.seconds, 1)
        result.own = "\n\n".join(cell.source for cell in self.assembled.own)[:MOST_CODE]
        result.own_cells = len(self.assembled.own)
        for task in self.reference.tasks.values():
            if self.assembled.error or (self.error and not task.by_hand):
                result.tasks.append(self._blank_result(task, "not graded"))
            else:
                verdict = self.verdicts.get(task.number) or self._blank_result(task, "not reached")
                result.tasks.append(self._with_answer(task, verdict))
        return result

    def _with_answer(self, task: Task, verdict: TaskResult) -> TaskResult:
        """Return the verdict with its status set if the answer is missing, a stub or by hand."""
        answers = [self.assembled.answers[grade_id] for grade_id in task.answers]
        if all(one.source is None and not one.elsewhere for one in answers):
            verdict.status = "missing"
        elif not self._is_answered(task) and verdict.status != "passed":
            verdict.status = "unchanged"
        elif task.by_hand:
            verdict.status = "by hand"
        if verdict.status in {"missing", "unchanged"}:
            verdict.points = 0.0
            verdict.said = ""
            verdict.shown = []
            verdict.note = ""
        return verdict
