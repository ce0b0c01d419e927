"""How many minutes a student needs for some cells: a rule that fits what readers expect.

A reader worked through labs 15 to 17 as a student and estimated the minutes of 21 tasks, from 10 to
45, with two mistakes a task and without the last hint. The rule counts what a task makes a student
read, and what its solution makes them write. It differs from the estimates by 4.5 minutes a task in
the mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from nbformat import NotebookNode

from . import notes
from .notebook import is_solution, lab

#: Words of text that a student reads, tries out and understands in a minute.
WORDS = 70
#: Minutes for a line of a solution, and for a point of an explanation.
LINE, POINT = 1.5, 6.0
#: The longest session, in minutes; a part with more is announced as several sessions.
SESSION = 100
_NUMBERS = {2: "two sessions", 3: "three sessions"}
_SOLUTION = re.compile(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", re.DOTALL)


def minutes(cells: Iterable[NotebookNode]) -> float:
    """Return the minutes that a student needs for cells of a solution's notebook."""
    return sum(map(of_cell, cells))


def of_cell(cell: NotebookNode) -> float:
    """Return the minutes of one cell: to read a text, or to answer; other code takes none."""
    if notes.kind(cell):
        return 0.0
    if is_solution(cell):
        return work(cell)
    return words(cell) / WORDS


def words(cell: NotebookNode) -> int:
    """Return how many words a student reads in a cell, without what is folded."""
    if cell.cell_type != "markdown":
        return 0
    return len(re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL).split())


def work(cell: NotebookNode) -> float:
    """Return the minutes that an answer takes, from its solution."""
    if cell.cell_type == "markdown":
        return POINT * float(lab(cell).get("points", 0))
    lines = "\n".join(_SOLUTION.findall(cell.source)).splitlines()
    return LINE * sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def in_sessions(total: int) -> str:
    """Return minutes as a lab announces them: "75 minutes", or "two sessions of 80 minutes"."""
    count = math.ceil(total / SESSION)
    if count == 1:
        return f"{total} minutes"
    return f"{_NUMBERS.get(count, f'{count} sessions')} of {math.ceil(total / count)} minutes"


def announced(needed: float) -> int:
    """Return minutes to announce: sessions of whole five minutes."""
    count = max(1, math.ceil(needed / SESSION))
    return count * 5 * math.ceil(needed / count / 5)
