"""What a run's records say of a task: did it pass, what was said, which errors are shown."""

from __future__ import annotations

import re

from utils.checks.verdict import Verdict
from utils.course.notebook import lab

from .records import Record
from .reference import Reference
from .results import Shown, Status
from .sandbox import Limits

#: Begins the advice in a report of a deadlock.
ADVICE = "What to try"
MOST_SHOWN = 3
#: Errors of the kernel that explain what went wrong on the ranks.
OF_RANKS = {"CellFailed", "RanksLostError"}
#: A check interrupts ranks that do not answer.
STILL_RUNNING = "did not come to an end and was interrupted "


def explicit_pass(record: Record, reference: Reference, limits: Limits) -> bool:
    """Did nbval pass this check cell, with the verdict of the reference and no other, in time?"""
    return (
        record["outcome"] == "passed"
        and record["end"] is None
        and record["seconds"] < limits.cell
        and record["verdicts"] == reference.expected[record["cell"]]
    )


def shown(records: list[Record], reference: Reference) -> list[Shown]:
    """Errors of a task's cells for the feedback: never the source of a check."""
    found = []
    for record in records:
        errors = [o for o in record["outputs"] if o["type"] == "error"]
        owner = reference.owners[record["cell"]]
        known = reference.task(owner).checks if owner else {}
        if not errors or record["cell"] in known or record["cell"] in reference.deliberate:
            continue
        png = next((o["png"] for o in record["outputs"] if o.get("png")), "")
        error = errors[0]
        text = error["evalue"]
        if error["ename"] not in OF_RANKS:
            text = f"{error['ename']}: {text}"
        title = name_of(record["cell"], reference)
        found.append(Shown(title[0].upper() + title[1:], tidied(text), png))
        if title == "the answer":
            break  # what comes after it can't work
    if not found:
        found = [
            Shown("The check", shortened(o["text"].strip()) or o["type"], o.get("png", ""))
            for record in records
            for o in record["outputs"]
            if o.get("png") and record["cell"] in reference.expected
        ]
    return found[:MOST_SHOWN]


def tidied(text: str) -> str:
    """An error without the frames of libraries, the rule above them, and numbers of cells.

    The numbers are those of the run, which a student has never seen.
    """
    text = re.sub(r"Cell (?:\x1b\[[\d;]*m)*In\s?\[\d+\](?:\x1b\[[\d;]*m)*", "the cell", text)
    blocks = re.sub(r"^-{20,}\n", "", text.strip()).split("\n\n")
    kept = [block for block in blocks if not block.lstrip().startswith("File /")]
    return "\n\n".join(kept).strip()


def shortened(text: str, most: int = 2000) -> str:
    """Return the beginning of a text, and all of its advice."""
    if len(text) <= most:
        return text
    at = text.find(ADVICE)
    if at < 0:
        return f"{text[:most]}\n…"
    return f"{text[:most]}\n…\n{text[at:]}" if at > most else text


def failure(checks: list[Record]) -> Status:
    """A check that shows a verdict has judged; one that shows none has not."""
    verdicts = [data for record in checks for data in record["verdicts"]]
    if any(one["kind"] == "interrupted" for data in verdicts for one in data["problems"]):
        return "hung"
    return "wrong" if all(record["verdicts"] for record in checks) else "failed"


def _said(record: Record) -> str:
    """What a check's verdicts say; where it has none, what it printed."""
    if record["verdicts"]:
        return "\n".join(str(Verdict.from_data(data)) for data in record["verdicts"])
    return "".join(o["text"] for o in record["outputs"] if o.get("name") == "stdout").strip()


def words(record: Record) -> str:
    """What a check said; without its traceback, which shows its source."""
    errors = [o for o in record["outputs"] if o["type"] == "error"]
    if _said(record) or not errors:
        return re.sub(r"KeyboardInterrupt: *", STILL_RUNNING, _said(record))
    first = (errors[0]["evalue"].strip().splitlines() or [""])[0]
    return shortened(f"The check ended with {errors[0]['ename']}: {first}", 500)


def name_of(cell_id: str, reference: Reference) -> str:
    """What a cell is to its task, in words."""
    cell = next(one for one in reference.nb.cells if one.id == cell_id)
    if lab(cell).get("check"):
        return "the check"
    return "the answer" if lab(cell) else "the cell that runs it"
