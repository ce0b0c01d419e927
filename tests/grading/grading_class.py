"""A class of thirty submissions to labs 01 to 05: right, half, wrong, forged, harmful and broken.

Six students hand in every lab. What each of them must get is known task by task.
"""

from __future__ import annotations

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from answer_tools import LABS, right_answers, solutions_of, wrong_answers
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell
from test_forged_answers import FORGED, FORGER

from utils.course.notebook import LABS as RELEASED
from utils.course.notebook import SOLUTIONS, lab, notebooks, read
from utils.grading.reference import Reference, Task, body

#: By student: what is handed in for labs 01 to 05.
CLASS = {
    "Ada": ("right", "right otherwise", "right", "right otherwise", "right"),
    "Ben": ("half", "empty", "half", "half", "empty"),
    "Cleo": ("helpers", "half", "helpers", "right", "helpers"),
    "Dan": ("careless",) * 5,
    "Eve": ("forging",) * 5,
    "Finn": ("hanging", "killing", "broken", "hanging", "killing"),
}
#: Where an answer to one task hangs, or ends its rank.
HARMED = {"01": "1.4", "02": "2.6", "03": "3.2", "04": "4.5", "05": "5.1"}
#: What shows a pass without an answer, for labs of which no forged record is known.
SHOWN = 'from utils.checks.verdict import Verdict\nVerdict("{0}", "{1}", {2:g}).show()'


@dataclass
class Work:
    """A submission: its file, and the points that it must get by task; flagged: tasks named.

    None for what can't be graded.
    """

    text: str
    points: dict[str, float | None]
    flagged: set[str] = field(default_factory=set)


def references() -> dict[str, Reference]:
    """Labs 01 to 05 by number."""
    found = [path for path in notebooks(SOLUTIONS) if "01" <= path.stem[:2] <= "05"]
    return {path.stem[:2]: Reference(path) for path in found}


def the_class() -> dict[tuple[str, str], Work]:
    """Every submission, by student and lab's number."""
    refs = references()
    return {
        (name, number): WAYS[way](Maker(refs[number]))
        for name, ways in CLASS.items()
        for number, way in zip(refs, ways, strict=True)
    }


def hand_in(folder: Path) -> dict[tuple[str, str], Work]:
    """Write the class into a folder of folders; returns what was handed in."""
    works = the_class()
    refs = references()
    for (name, number), work in works.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / f"{refs[number].lab}.ipynb").write_text(work.text, encoding="utf-8")
    return works


class Maker:
    """Fills in one lab as it was handed out."""

    def __init__(self, reference: Reference):
        self.reference = reference
        self.number = reference.lab[:2]
        self.nb = read(RELEASED / reference.path.name)
        self.tasks = [task for task in reference.tasks.values() if not task.by_hand]
        self.points = {task.number: 0.0 for task in self.tasks}
        self.flagged: set[str] = set()

    def cell(self, task: Task) -> NotebookNode:
        """The student's cell of a task."""
        wanted = self.reference.answer_cells[task.answers[0]].id
        return next(one for one in self.nb.cells if one.id == wanted)

    def model(self, task: Task) -> str:
        """The solution's code."""
        code = body(self.reference.answer_cells[task.answers[0]].source)
        return "\n".join(line for line in code.split("\n") if "### " not in line)

    def answer(self, task: Task, code: str, points: float) -> None:
        """Put code below the cell's first line."""
        cell = self.cell(task)
        cell.source = f"{cell.source.partition(chr(10))[0]}\n{textwrap.dedent(code).strip()}"
        self.points[task.number] = points

    def solve(self, *but: str) -> None:
        """Answer all tasks rightly but for these."""
        for task in self.tasks:
            if task.number not in but:
                self.answer(task, self.model(task), task.points)

    def explain(self) -> None:
        """Answer in words."""
        for cell in self.nb.cells:
            if cell.cell_type == "markdown" and cell.metadata.get("nbgrader", {}).get("solution"):
                cell.source = f"What I think of {lab(cell)['task']}: it depends."

    def done(self) -> Work:
        """The submission."""
        return Work(json.dumps(self.nb), self.points, self.flagged)


# --- ways to hand in -----------------------------------------------------------------------------


def right(maker: Maker) -> Work:
    """The solution, and texts."""
    maker.solve()
    maker.explain()
    return maker.done()


def right_otherwise(maker: Maker) -> Work:
    """Right answers that look different."""
    maker.solve()
    name = f"lab{maker.number}"
    ways = {task: code for task, _, code in right_answers(LABS[name], solutions_of(name))}
    for task in maker.tasks:
        maker.answer(task, ways[task.number], task.points)
    return maker.done()


def empty(maker: Maker) -> Work:
    """As it was handed out."""
    return maker.done()


def half(maker: Maker) -> Work:
    """Every second task, the first among them."""
    maker.solve(*[task.number for task in maker.tasks[1::2]])
    maker.explain()
    return maker.done()


def helpers(maker: Maker) -> Work:
    """Every second answer stands in a cell of the student's own, above that which was for it."""
    maker.solve()
    for task in maker.tasks[1::2]:
        cell = maker.cell(task)
        own = new_code_cell(cell.source, id=f"mine-{cell.id}")
        cell.source = "%%px\n# see above"
        maker.nb.cells.insert(maker.nb.cells.index(cell), own)
    return maker.done()


def careless(maker: Maker) -> Work:
    """Every second answer is one that students get wrong."""
    maker.solve()
    name = f"lab{maker.number}"
    wrong: dict[str, str] = {}
    for task, _, code, _ in wrong_answers(LABS[name], solutions_of(name)):
        wrong.setdefault(task, code)
    for task in maker.tasks[1::2]:
        maker.answer(task, wrong[task.number], 0.0)
    return maker.done()


def forging(maker: Maker) -> Work:
    """Every second answer forges what its check looks at."""
    maker.solve()
    for task in maker.tasks[1::2]:
        shown = SHOWN.format(task.number, task.title, task.points)
        forged = FORGER + textwrap.dedent(FORGED.get(task.number, shown))
        maker.answer(task, forged, 0.0)
        maker.flagged.add(task.number)
    return maker.done()


def harmful(statement: str):
    """One answer does this instead of its work."""

    def made(maker: Maker) -> Work:
        maker.solve()
        (task,) = [one for one in maker.tasks if one.number == HARMED[maker.number]]
        first, rest = maker.model(task).split("def ", 1)
        head = rest.partition("\n")[0]
        maker.answer(task, f"{first}def {head}\n    {statement}", 0.0)
        return maker.done()

    return made


def broken(maker: Maker) -> Work:
    """The right file, of which the end is missing: an upload broke off. That is no grade."""
    work = right(maker)
    return Work(work.text[: len(work.text) // 2], dict.fromkeys(work.points))


WAYS = {
    "right": right,
    "right otherwise": right_otherwise,
    "empty": empty,
    "half": half,
    "helpers": helpers,
    "careless": careless,
    "forging": forging,
    "hanging": harmful("while True: pass"),
    "killing": harmful("__import__('os')._exit(1)"),
    "broken": broken,
}
