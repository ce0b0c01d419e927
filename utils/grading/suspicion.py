"""Answers that a person should look at, although no check has refused them.

An answer shares its process with the probe of its check, so it can deceive the check. A remark
costs no points; the instructor reads it in the summary and in the gradebook.
"""

import contextlib
import json
import subprocess
from typing import Any

from utils.jobs import python_command

from .grader import MOST_CODE
from .reference import Reference
from .results import Result
from .source import body

#: How a remark on an answer begins, where it does not stand under such a heading.
LOOK = "look at this answer: "
#: Kinds of results without an answer that a program could read.
UNREAD = {"by hand", "missing", "unchanged", "not graded"}
#: Seconds until an inspection is ended. It takes less than one; a busy machine may need more.
DEADLINE = 90.0
INSPECT = "from utils.grading.inspection import main\nmain()"


def look(result: Result, reference: Reference) -> list[str]:
    """Return what a person should look at in a result, one line for each remark."""
    found = [
        f"Task {task.task}: {LOOK}its check found a forgery: {problem['text']}"
        for task in result.tasks
        for problem in task.problems
        if problem.get("kind") == "forged"
    ]
    codes = {task.task: task.code for task in result.tasks if task.status not in UNREAD}
    if not any(result.task(number).points for number in codes):
        return found
    heads = {number: f"Task {number}: {LOOK}" for number in codes}
    codes["own"], heads["own"] = result.own, "look at the student's own cells: "
    for part, code in codes.items():
        if len(code) >= MOST_CODE:
            found.append(f"{heads[part]}only its first {MOST_CODE} characters are kept")
    remarks = inspected(codes, result, reference)
    if remarks is None:
        return [*found, "look at this submission: its code is too long or too nested to inspect"]
    return found + [f"{heads[part]}{text}" for part, texts in remarks.items() for text in texts]


def inspected(
    codes: dict[str, str], result: Result, reference: Reference
) -> dict[str, list[str]] | None:
    """Return what the inspection says of each part of a submission; None if it came to no end.

    It runs in a process of its own with limits of time and memory, because a student's code may be
    as long and as nested as the student likes.
    """
    own = {"code": codes["own"], "passed": False, "stub": "", "model": ""}
    answers: dict[str, dict[str, Any]] = {"own": own}
    for number in (number for number, task in reference.tasks.items() if not task.by_hand):
        answers[number] = {
            "code": codes.get(number, ""),
            "passed": number in codes and bool(result.task(number).points),
            "stub": joined(reference, number, reference.stubs),
            "model": joined(reference, number, {}),
        }
    cells = [one for one in reference.nb.cells if one.cell_type == "code"]
    cells = [one for one in cells if one not in reference.answer_cells.values()]
    given = [body(one.source) for one in cells if one.source.startswith("%%px")]
    asked = {"parts": list(codes), "lab": {"answers": answers, "given": given}}
    with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
        command, text = python_command(INSPECT), json.dumps(asked)
        done = subprocess.run(
            command, input=text, timeout=DEADLINE, text=True, capture_output=True, check=True
        )
        remarks: dict[str, list[str]] = json.loads(done.stdout)
        return remarks
    return None


def joined(reference: Reference, number: str, stubs: dict[str, str]) -> str:
    """Return a task's solution, or its stub if there are stubs, as one text."""
    cells = [reference.answer_cells[grade_id] for grade_id in reference.task(number).answers]
    return "\n\n".join(body(stubs.get(cell.id, cell.source)) for cell in cells)
