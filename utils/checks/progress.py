"""How far a student has come on a lab's core path, for the line below a verdict.

``make release`` writes a file for each lab, see :func:`utils.course.about.core_path`.
"""

from __future__ import annotations

import json

from . import model

#: The name of a lab's file in the folder of the model answers.
FILE = "minutes_{}.json"
#: Minutes are rounded to so many.
STEP = 5


def in_words(task: str) -> str:
    """Return "task 3 of 6 · about 40 minutes of the core path left"; "" if nobody knows.

    Args:
        task: the number of the task, such as "4.1".
    """
    try:
        file = model.folder() / FILE.format(task.partition(".")[0].zfill(2))
        left: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if task not in left:
        return ""
    place = f"task {list(left).index(task) + 1} of {len(left)}"
    minutes = STEP * round(left[task] / STEP)
    rest = (
        f"about {minutes} minutes of the core path left"
        if minutes
        else "the last task of the core path"
    )
    return f"{place} · {rest}"
