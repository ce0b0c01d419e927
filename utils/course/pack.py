"""The instructor's pages: one for each lab, and an index.

They say how long each section takes, what an instructor wrote (:mod:`.notes`), and what students
get wrong, from the tables that the checks are tested with. The minutes of the lab that are left
after reading and running go to its tasks, in proportion to their points.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from markupsafe import Markup
from nbformat import NotebookNode

from . import notes
from .about import About
from .files import write_text
from .notebook import ROOT, NotebookError, is_solution, lab
from .notes import Cut, rubric_cells
from .page_templates import environment, html_of
from .pictures import Picture, pictures_of, save, seconds

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
    """A section is what stands from a heading to the next.

    Attributes:
        tasks: The numbers of its tasks, in order, and what each weighs in the work.
        words: To be read, as are the lines; without hints, folded code, and what students write.
        seconds: That its cells ran.
        work: Minutes.
        needs: The earlier tasks whose names its cells use.
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
        """The minutes to read it."""
        return self.words / WORDS + self.lines / LINES

    @property
    def minutes(self) -> float:
        """The minutes of reading, running and work."""
        return self.reading + self.seconds / 60 + self.work

    def saved(self, left_out: set[str]) -> float:
        """Return the minutes saved by leaving out some of its tasks, or all of it by its title."""
        if self.title in left_out or (self.tasks and left_out.issuperset(self.tasks)):
            return self.minutes
        weight = sum(self.tasks[task] for task in left_out & set(self.tasks))
        return self.work * weight / self.weight if weight else 0.0


def sections(nb: NotebookNode, minutes: float) -> list[Section]:
    """Return the sections of an executed solution, in order; the title's is the first.

    Args:
        minutes: That the lab takes with *Go further*, as its metadata say.
    """
    result = [Section("Title")]
    owners: dict[str, str] = {}
    for cell in nb.cells:
        if notes.kind(cell):
            continue
        if cell.cell_type == "markdown" and (head := re.search(r"^## (.+)$", cell.source, re.M)):
            result.append(Section(head[1]))
        _count(result[-1], cell)
        if cell.cell_type == "code":
            _link(result[-1], cell, owners)
    left = minutes - sum(section.minutes for section in result)
    whole = sum(section.weight for section in result)
    for section in result:
        section.work = max(left, 0) * section.weight / whole if whole else 0
    return result


def a_point(parts: list[Section]) -> float:
    """Return the minutes that a student has for a point."""
    points = sum(section.weight for section in parts)
    return sum(section.work for section in parts) / points if points else 0.0


def _count(section: Section, cell: NotebookNode) -> None:
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
    elif not (
        cell.metadata.get("jupyter", {}).get("source_hidden") or cell.source.startswith("# Picture")
    ):
        section.lines += sum(bool(line.strip()) for line in cell.source.splitlines())
    section.weight += PREDICTION * bool(about.get("predict"))


def _link(section: Section, cell: NotebookNode, owners: dict[str, str]) -> None:
    """Note what a cell needs. `owners` has the task that defines a name, of all cells so far."""
    try:
        tree = ast.parse(re.sub(r"^[ \t]*[%!].*", "", cell.source, flags=re.MULTILINE))
    except SyntaxError:
        return
    for node in ast.walk(tree):
        task = owners.get(node.id) if isinstance(node, ast.Name) else None
        if task and task not in [*section.tasks, *section.needs]:
            section.needs.append(task)
    if is_solution(cell):
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        owners |= {function.name: lab(cell)["task"] for function in functions}


# --- what goes wrong ----------------------------------------------------------------------------

ANSWERS = ROOT / "tests/labs/answers"


#: A wrong answer: what a student did, and words of what the check says.
Wrong = tuple[str, str]


def mistakes(number: str) -> dict[str, list[Wrong]]:
    """Return a lab's wrong answers by task, as the tables in ``tests/labs/answers`` have them.

    Raises:
        NotebookError: These are not there, as in a bundle for students.
    """
    if not ANSWERS.is_dir():
        raise NotebookError(f"there is no {ANSWERS}: the pack is made in a clone of the course")
    path = ANSWERS / f"lab{number}.py"
    if not path.is_file():
        return {}
    beside = str(ANSWERS.parent)  # the tables import modules that are there
    sys.path.insert(0, beside)
    try:
        tables = runpy.run_path(str(path))
    finally:
        sys.path.remove(beside)
    by_task: defaultdict[str, list[Wrong]] = defaultdict(list)
    for task, deed, *_, words in [*tables["WRONG"], *tables.get("CHANGES", ())]:
        by_task[task].append((deed, words))
    return {task: by_task[task] for task in tables["CELLS"]}


# --- pages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """A written answer: the question, the model's answer, and the rubric."""

    task: str
    title: str
    points: float
    question: str
    model: str
    rubric: notes.Rubric


@dataclass(frozen=True)
class Pack:
    """All that an instructor gets for a lab; its name is its notebook's, without the ending."""

    name: str
    about: About
    points: float
    sections: list[Section]
    notes: notes.Notes
    titles: dict[str, str]
    mistakes: dict[str, list[Wrong]]
    written: list[Written]
    pictures: list[Picture]

    @property
    def seconds(self) -> float:
        """How long all cells ran."""
        return sum(section.seconds for section in self.sections)

    def saved(self, cut: Cut) -> float:
        """Return the minutes that a cut saves, of whole sections or of single tasks in them."""
        return sum(section.saved(set(cut.what)) for section in self.sections)


def pack(path: Path, nb: NotebookNode, about: About) -> Pack:
    """Put a lab's pack together, from its executed solution.

    Raises:
        NotebookError: Something is missing; says what and where.
    """
    parts = sections(nb, about.total)
    noted = notes.read(nb, path.name)
    tasks = [cell for cell in nb.cells if lab(cell).get("title")]
    return Pack(
        name=path.stem,
        about=about,
        points=sum(section.points for section in parts),
        sections=parts,
        notes=noted,
        titles={lab(cell)["task"]: lab(cell)["title"] for cell in tasks},
        mistakes=mistakes(about.number),
        written=written(nb, noted.rubrics),
        pictures=list(pictures_of(nb)),
    )


def written(nb: NotebookNode, rubrics: dict[str, notes.Rubric]) -> list[Written]:
    """Return every written answer, with the question from the last text above it that asks it."""
    answers = []
    for answer, _ in rubric_cells(nb):
        about = lab(answer)
        above = nb.cells[: nb.cells.index(answer)]
        asks = [cell.source for cell in above if f"**Explain {about['task']}.**" in cell.source]
        if not asks:
            raise NotebookError(
                f"cell '{answer.id}': no text above it asks **Explain {about['task']}.**"
            )
        answers.append(
            Written(
                task=about["task"],
                title=about["title"],
                points=float(about.get("points", 0)),
                question=asks[-1][asks[-1].index("**Explain") :],
                model=answer.source,
                rubric=rubrics[about["task"]],
            )
        )
    return answers


def write(packs: list[Pack], folder: Path) -> None:
    """Write ``index.html``, a page for each lab, and their pictures."""
    templates = environment()
    templates.filters["spoken"] = _inline
    templates.globals |= {"a_point": a_point, "TIGHT": TIGHT}
    for entry in packs:
        save(entry.pictures, folder / "figures" / entry.name)
        page = templates.get_template("pack_lab.html.j2").render(pack=entry)
        write_text(folder / f"{entry.name}.html", page)
    page = templates.get_template("pack_index.html.j2").render(packs=packs)
    write_text(folder / "index.html", page)


def _inline(text: str) -> Markup:
    """Return the HTML of one line, without a paragraph around it."""
    return Markup(re.sub(r"^<p>(.*)</p>$", r"\1", str(html_of(text)).strip(), flags=re.DOTALL))
