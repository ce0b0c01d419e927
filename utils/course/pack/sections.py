"""How long each section of a lab takes: reading from its text, running from a run, work by points.

The minutes of the lab that are left after reading and running go to its tasks, in proportion to
their points.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from nbformat import NotebookNode

from .. import notes
from ..notebook import lab
from ..release import is_solution
from .runs import seconds

#: Words of text and lines of code that are read in a minute. Silent reading of English non-fiction
#: is 238 words a minute in the mean of 190 studies (Brysbaert, Journal of Memory and Language 109,
#: 2019); text with symbols takes longer.
WORDS, LINES = 200, 40
#: What a prediction weighs beside the points of tasks; and a task without points.
PREDICTION, WITHOUT_POINTS = 0.5, 4.0
#: Minutes a point; below this a lab promises more than most students can do.
TIGHT = 1.5


@dataclass
class Section:
    """From a heading to the next.

    Attributes:
        title: the heading.
        tasks: numbers of its tasks, in order, and what each weighs in the work.
        points: of them all.
        words, lines: to be read; without hints, folded code, and what students write.
        seconds: that its cells ran.
        weight: its part in the work.
        work: minutes.
        needs: of earlier tasks: those whose names its cells use.
    """

    title: str
    tasks: dict[str, float] = field(default_factory=dict)
    points: float = 0
    words: int = 0
    lines: int = 0
    seconds: float = 0
    weight: float = 0
    work: float = 0
    needs: list[str] = field(default_factory=list)

    @property
    def reading(self) -> float:
        """Minutes."""
        return self.words / WORDS + self.lines / LINES

    @property
    def minutes(self) -> float:
        """Reading, running and work."""
        return self.reading + self.seconds / 60 + self.work

    def saved(self, left_out: set[str]) -> float:
        """Minutes that are saved by leaving out some of its tasks, or all of it by its title."""
        if self.title in left_out or (self.tasks and left_out.issuperset(self.tasks)):
            return self.minutes
        weight = sum(self.tasks[task] for task in left_out & set(self.tasks))
        return self.work * weight / self.weight if weight else 0.0


def sections(nb: NotebookNode, minutes: float) -> list[Section]:
    """The sections of an executed solution, in order; the title's is the first.

    minutes: that the lab takes, as its metadata say.
    """
    found = [Section("Title")]
    owners: dict[str, str] = {}
    for cell in nb.cells:
        if notes.kind(cell):
            continue
        if cell.cell_type == "markdown" and (head := re.search(r"^## (.+)$", cell.source, re.M)):
            found.append(Section(head[1]))
        _add(found[-1], cell, owners)
    left = minutes - sum(one.minutes for one in found)
    whole = sum(one.weight for one in found)
    for one in found:
        one.work = max(left, 0) * one.weight / whole if whole else 0
    return found


def a_point(found: list[Section]) -> float:
    """Minutes that a student has for a point."""
    points = sum(one.weight for one in found)
    return sum(one.work for one in found) / points if points else 0.0


def needed_by(found: list[Section], task: str) -> list[str]:
    """Titles of the later sections that use what a task defines."""
    return [one.title for one in found if task in one.needs]


def _add(section: Section, cell: NotebookNode, owners: dict[str, str]) -> None:
    """Count a cell in. owners: the task that defines a name, of all cells so far."""
    about = lab(cell)
    section.seconds += seconds(cell)
    if is_solution(cell):
        points = float(about.get("points", 0))
        section.tasks[about["task"]] = points or WITHOUT_POINTS
        section.points += points
        section.weight += points or WITHOUT_POINTS
    elif cell.cell_type == "markdown":
        text = re.sub(r"<details>.*?</details>", "", cell.source, flags=re.DOTALL)
        section.words += len(text.split())
    elif not _is_folded(cell):
        section.lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    section.weight += PREDICTION * bool(about.get("predict"))
    if cell.cell_type == "code":
        for task in _used(cell.source, owners):
            if task not in {*section.needs, *section.tasks}:
                section.needs.append(task)
        if is_solution(cell):
            owners |= dict.fromkeys(_defined(cell.source), about["task"])


def _is_folded(cell: NotebookNode) -> bool:
    hidden = cell.metadata.get("jupyter", {}).get("source_hidden")
    return bool(hidden) or cell.source.startswith("# Picture")


def _tree(source: str) -> ast.Module:
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!"))]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return ast.Module([], [])


def _defined(source: str) -> Iterator[str]:
    """Names of functions and classes: what other cells call."""
    for node in _tree(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name


def _used(source: str, owners: dict[str, str]) -> Iterator[str]:
    for node in ast.walk(_tree(source)):
        if isinstance(node, ast.Name) and node.id in owners:
            yield owners[node.id]
