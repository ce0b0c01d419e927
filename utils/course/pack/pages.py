"""The instructor's pages: one for each lab, and an index."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup
from nbformat import NotebookNode

from .. import notes
from ..about import About
from ..files import write_text
from ..markdown import html_of
from ..notebook import NotebookError, lab
from ..notes import Cut
from ..page_templates import environment
from .mistakes import Wrong, mistakes
from .pictures import Picture, pictures, save
from .sections import TIGHT, Section, a_point, needed_by, sections

TEMPLATES = Path(__file__).parent / "templates"


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
    """All that an instructor gets for a lab.

    Attributes:
        name: of its notebook, without the ending.
        titles: of its tasks, by number.
    """

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
        """Of a run of all cells."""
        return sum(one.seconds for one in self.sections)

    def saved(self, cut: Cut) -> float:
        """Minutes that are saved: of whole sections, or of single tasks in them."""
        return sum(one.saved(set(cut.what)) for one in self.sections)


def pack(path: Path, nb: NotebookNode, about: About) -> Pack:
    """Put a lab's pack together. nb: the solution, executed.

    Raises:
        NotebookError: something is missing; says what and where.
    """
    found = sections(nb, about.minutes)
    tasks = [cell for cell in nb.cells if lab(cell).get("title")]
    return Pack(
        name=path.stem,
        about=about,
        points=sum(one.points for one in found),
        sections=found,
        notes=notes.read(nb, path.name),
        titles={lab(cell)["task"]: lab(cell)["title"] for cell in tasks},
        mistakes=mistakes(about.number),
        written=written(nb),
        pictures=list(pictures(nb)),
    )


def written(nb: NotebookNode) -> list[Written]:
    """Every written answer, with the question from the last text above it that asks for it."""
    rubrics = notes.read(nb, "").rubrics
    found = []
    for answer, _ in notes.rubric_cells(nb):
        about = lab(answer)
        above = nb.cells[: nb.cells.index(answer)]
        asks = [one.source for one in above if f"**Explain {about['task']}.**" in one.source]
        if not asks:
            raise NotebookError(
                f"cell '{answer.id}': no text above it asks **Explain {about['task']}.**"
            )
        question = asks[-1][asks[-1].index("**Explain") :]
        found.append(
            Written(
                about["task"],
                about["title"],
                float(about.get("points", 0)),
                question,
                answer.source,
                rubrics[about["task"]],
            )
        )
    return found


def write(packs: list[Pack], folder: Path) -> None:
    """Write ``index.html``, a page for each lab, and their pictures."""
    for one in packs:
        save(one.pictures, folder / "figures" / one.name)
        write_text(folder / f"{one.name}.html", _render("lab.html.j2", pack=one))
    write_text(folder / "index.html", _render("index.html.j2", packs=packs))


def _render(template: str, **values: object) -> str:
    made = environment(TEMPLATES)
    made.filters["spoken"] = _inline
    made.globals |= {"a_point": a_point, "needed_by": needed_by, "TIGHT": TIGHT}
    return made.get_template(template).render(**values)


def _inline(text: str) -> Markup:
    """The same of one line, without a paragraph around it."""
    return Markup(re.sub(r"^<p>(.*)</p>$", r"\1", str(html_of(text)).strip(), flags=re.DOTALL))
