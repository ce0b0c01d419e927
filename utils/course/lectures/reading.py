"""Read a lecture: a Markdown file in ``docs/lectures``, which names cells of the lab's solution.

A heading begins a slide, and the first heading has one ``#``. In addition to text, a slide can have
code fences with a directive in braces, which takes something from the solution::

    ## Four ranks, one sum

    ```{picture} what-picture
    ```

    ```{notes} 3
    Ask which rank would have to work most.
    ```

| directive | what the slide shows |
|---|---|
| ``{code} CELL 2-5,8`` | lines 2 to 5 and 8 of a given cell; without numbers, all lines |
| ``{output} CELL 1-4`` | what the cell printed, or these lines of it |
| ``{picture} CELL`` | what the cell drew; ``CELL-2`` is its second picture |
| ``{prediction} CELL`` | the question of a prediction |
| ``{task} 6.1`` | number, title and points of a task, and the fence's text |
| ``{questions} 1 3`` | the first and the third question for the class; the notes get the answers |
| ``{notes} MINUTES`` | the minutes of the slide, and what the lecturer says |

Whatever a slide shows of a lab is in the notebook, so a lecture can't say something else than its
lab. The text of an answer can't be shown.
"""

from __future__ import annotations

import ast
import base64
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from nbformat import NotebookNode

from utils.course import notebook, notes
from utils.course.notebook import ROOT, NotebookError

from .deck import Block, Code, Deck, Output, Picture, Prediction, Slide, Task, Text

#: The folder of the lectures' texts.
LECTURES = ROOT / "docs" / "lectures"
#: How many slides a deck has, at least and at most.
FEWEST, MOST = 12, 18
#: The MIME type of a picture.
PNG = "image/png"
_DIRECTIVE = re.compile(r"\{(\w+)\}\s*(.*)")
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


class LectureError(NotebookError):
    """A lecture that can't be read; the message says where and why."""


@dataclass
class _Draft:
    """A slide that is being read."""

    title: str
    blocks: list[Block]
    notes: list[str]
    minutes: float = 0

    def finished(self) -> Slide:
        """Return the slide, once all of its text has been read."""
        if not self.minutes:
            raise LectureError(f"slide {self.title!r} has no notes: add a block ```{{notes}} 3")
        text = "\n\n".join(part for part in self.notes if part.strip())
        return Slide(self.title, tuple(self.blocks), text, self.minutes)


def lectures() -> list[Path]:
    """Return the files of all lectures, by number."""
    return sorted(LECTURES.glob("[0-9][0-9]_*.md"))


def read(path: Path, solution: NotebookNode) -> Deck:
    """Return the deck of a lecture.

    Args:
        path: The lecture's Markdown file.
        solution: The lab's solution with its outputs.

    Raises:
        LectureError: A directive that doesn't exist or names nothing, a slide without notes, or a
            deck with too few or too many slides.
    """
    try:
        slides = tuple(_slides(path.read_text(encoding="utf-8"), _Lab(solution)))
        if not FEWEST <= len(slides) <= MOST:
            raise LectureError(f"it has {len(slides)} slides: write {FEWEST} to {MOST}")
    except NotebookError as error:
        raise LectureError(f"{path.name}: {error}") from None
    title = solution.cells[0].source.partition("\n")[0].removeprefix("# ")
    return Deck(path.stem, title, slides)


def _slides(text: str, lab: _Lab) -> Iterator[Slide]:
    """Yield the slides of a text, in order."""
    lines, draft = text.splitlines(), None
    for node in SyntaxTreeNode(MarkdownIt().enable("table").parse(text)).children:
        if node.type == "heading" and node.tag in ("h1", "h2"):
            if draft:
                yield draft.finished()
            draft = _Draft(node.children[0].content, [], [])
        elif draft is None:
            raise LectureError("it doesn't begin with a heading: write '# Title' first")
        else:
            _add(draft, node, lines, lab)
    if draft:
        yield draft.finished()


def _add(draft: _Draft, node: SyntaxTreeNode, lines: list[str], lab: _Lab) -> None:
    """Add a block of the text to a slide."""
    directive = _DIRECTIVE.match(node.info) if node.type == "fence" else None
    if directive is None:
        begin, end = node.map or (0, 0)
        _add_text(draft, "\n".join(lines[begin:end]))
        return
    name, words = directive[1], directive[2].split()
    if name == "notes":
        draft.minutes += _minutes(words)
        draft.notes.append(node.content)
    elif name == "questions":
        asked = lab.questions(words)
        _add_text(draft, "\n".join(f"1. {question.text}" for question in asked))
        draft.notes += [f"**{question.text}** {question.answer}" for question in asked]
    elif name in DIRECTIVES:
        draft.blocks.append(DIRECTIVES[name](lab, words, node.content.strip()))
    else:
        known = ", ".join(sorted([*DIRECTIVES, "notes", "questions"]))
        raise LectureError(f"there is no directive {{{name}}}: use one of {known}")


def _add_text(draft: _Draft, text: str) -> None:
    """Add text to a slide, and join it with the text directly above."""
    if draft.blocks and isinstance(last := draft.blocks[-1], Text):
        draft.blocks[-1] = Text(f"{last.markdown}\n\n{text}")
    else:
        draft.blocks.append(Text(text))


def _minutes(words: list[str]) -> float:
    try:
        (text,) = words
        return float(text)
    except ValueError:
        raise LectureError(f"{{notes}} has {words} for its minutes: write one number") from None


# --- what a lab has -------------------------------------------------------------------------------


class _Lab:
    """The cells of a solution, by what a directive calls them."""

    def __init__(self, nb: NotebookNode) -> None:
        self.nb = nb
        self.cells: dict[str, NotebookNode] = {cell.id: cell for cell in nb.cells}
        self.answers: dict[str, NotebookNode] = {
            notebook.lab(cell)["task"]: cell for cell in nb.cells if notebook.is_solution(cell)
        }

    def cell(self, name: str) -> NotebookNode:
        """Return a code cell that is not an answer.

        Raises:
            LectureError: There is no such cell, or it is an answer.
        """
        cell = self.cells.get(name)
        if cell is None or cell.cell_type != "code":
            raise LectureError(f"the lab has no code cell {name!r}")
        if notebook.is_solution(cell):
            raise LectureError(f"cell {name!r} is an answer: show its task instead")
        return cell

    def answer(self, task: str) -> NotebookNode:
        """Return the cell with the answer to a task.

        Raises:
            LectureError: The lab has no such task.
        """
        try:
            return self.answers[task]
        except KeyError:
            raise LectureError(f"the lab has no task {task!r}") from None

    def questions(self, numbers: list[str]) -> list[notes.Question]:
        """Return the questions for the class with these numbers.

        Raises:
            LectureError: There is no question with one of the numbers.
        """
        asked = notes.read(self.nb, "questions").questions
        try:
            return [asked[int(number) - 1] for number in numbers]
        except (ValueError, IndexError):
            wrong = f"{{questions}} {' '.join(numbers)}"
            raise LectureError(f"{wrong}: the lab has questions 1 to {len(asked)}") from None


def _first(words: list[str], directive: str, most: int = 2) -> str:
    """Return the first word of a directive, which has at most `most` words."""
    if not 1 <= len(words) <= most:
        raise LectureError(f"{{{directive}}} has the words {words}: write the name of a cell")
    return words[0]


def _some(text: str, words: list[str]) -> str:
    """Return the lines of a text that `words` ask for, ["1-3,5"] for example; all for []."""
    if not words:
        return text
    lines, chosen = text.splitlines(), []
    for part in words[0].split(","):
        begin, _, end = part.partition("-")
        try:
            found = lines[int(begin) - 1 : int(end or begin)]
        except ValueError:
            raise LectureError(f"{words[0]!r} doesn't name lines: write 3 or 2-5,8") from None
        if not found:
            raise LectureError(f"there are no lines {part}, only {len(lines)} lines")
        chosen += found
    return textwrap.dedent("\n".join(chosen))


def _code(lab: _Lab, words: list[str], text: str) -> Code:
    return Code(_some(lab.cell(_first(words, "code")).source, words[1:]))


def _output(lab: _Lab, words: list[str], text: str) -> Output:
    name = _first(words, "output")
    printed = "".join(_printed(lab.cell(name))).strip("\n")
    if not printed:
        raise LectureError(f"cell {name!r} printed nothing")
    return Output(_some(_COLORS.sub("", printed), words[1:]))


def _printed(cell: NotebookNode) -> Iterator[str]:
    """Yield what a cell printed: streams, the words of an error, and results that are texts."""
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "stream":
            yield output.text
        elif output.output_type == "error":
            yield "\n".join(output.traceback)
        elif PNG not in data:
            yield data.get("text/plain", "")


def _picture(lab: _Lab, words: list[str], text: str) -> Picture:
    """Return the picture of a cell. `CELL-2` is its second, unless a cell has this name."""
    name, place = _first(words, "picture", 1), 1
    if name not in lab.cells and (second := re.fullmatch(r"(.+)-(\d+)", name)):
        name, place = second[1], int(second[2])
    drawn = [output for output in lab.cell(name).outputs if PNG in output.get("data", {})]
    if len(drawn) < place:
        raise LectureError(f"cell {name!r} has {len(drawn)} pictures, so there is no {words[0]!r}")
    output = drawn[place - 1]
    described = output.metadata.get(PNG, {}).get("alt", "")
    if not described:
        raise LectureError(f"the picture {words[0]!r} has no description")
    png = base64.b64decode(output.data[PNG])
    return Picture(png, described, output.data.get("text/html", ""))


def _prediction(lab: _Lab, words: list[str], text: str) -> Prediction:
    cell = lab.cell(_first(words, "prediction", 1))
    tree = ast.parse(cell.source)
    named = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }

    def value(node: ast.expr | None) -> Any:
        """Return the value of a literal, or of a name that the cell gives to a literal."""
        found = named.get(node.id) if isinstance(node, ast.Name) else node
        try:
            return found and ast.literal_eval(found)
        except ValueError:
            unknown = ast.unparse(found) if found else "nothing"
            raise LectureError(f"only a run knows {unknown}: say the question in words") from None

    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "predict":
            options = {str(word.arg): word.value for word in node.keywords}
            guess = node.args[1]
            return Prediction(
                asked=str(value(node.args[0])),
                choices=tuple(map(str, value(options.get("choices")) or ())),
                parts=tuple(map(str, map(value, guess.keys)))
                if isinstance(guess, ast.Dict)
                else (),
                unit=str(value(options.get("unit")) or ""),
            )
    raise LectureError(f"cell {cell.id!r} is not a prediction")


def _task(lab: _Lab, words: list[str], text: str) -> Task:
    number = _first(words, "task", 1)
    about = notebook.lab(lab.answer(number))
    if not text:
        raise LectureError(f"{{task}} {number} has no text: say in one line what to write")
    return Task(number, about["title"], float(about.get("points", 0)), text)


#: What each directive makes of its words and of the fence's text.
DIRECTIVES: dict[str, Callable[[_Lab, list[str], str], Block]] = {
    "code": _code,
    "output": _output,
    "picture": _picture,
    "prediction": _prediction,
    "task": _task,
}
