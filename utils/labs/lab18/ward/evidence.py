"""Read the recorded evidence of the patients: `recorded/NAME.json`, which `recording.py` writes.

A file has "digest" (of the program that was recorded) and one entry for each instrument:

- "log": list of [seconds, rank, line]
- "stacks": by rank, list of [file, line, function], the innermost frame first
- "flight": list of [rank, number, group, operation, shape], the last calls of each rank
- "report", "traceback": text
- "curves": by name, a list of losses
- "timeline": the reports of the ranks, as :class:`utils.timeline.Timeline` reads them
- "traffic", "work", "returned", "profile", "probe": a table, {"head": […], "rows": [[…], …]}
- "memory": {"curves": {rank: [bytes, …]}, "rank": …, "sizes": [[count, bytes, line], …]}
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from .cases import CASES

FOLDER = Path(__file__).with_name("recorded")


def digest_of(text: str) -> str:
    """Return a digest of a program's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@functools.cache
def evidence(name: str) -> dict[str, Any]:
    """Return what was recorded of a patient.

    Raises:
        ValueError: the evidence was recorded from another text of the program.
    """
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    if found["digest"] != digest_of(CASES[name].text):
        raise ValueError(
            f"The evidence of {name} belongs to another text of its program. Record it again: "
            f"python -m utils.labs.lab18.ward.recording {name}"
        )
    return found


def waiting_lines(name: str) -> set[int]:
    """Return the lines of a program at which ranks wait in the recorded stacks."""
    stacks = evidence(name).get("stacks", {})
    innermost = (
        [line for file, line, _ in frames if file == f"{name}.py"] for frames in stacks.values()
    )
    return {lines[0] for lines in innermost if lines}
