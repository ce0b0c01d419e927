"""A deck: slides made of blocks. A block is something that a slide shows below its title."""

from __future__ import annotations

import io
from dataclasses import dataclass, field

from PIL import Image


@dataclass(frozen=True)
class Text:
    """Markdown: paragraphs, lists and formulas."""

    markdown: str


@dataclass(frozen=True)
class Code:
    """Lines of a given cell of the lab, which the lecturer can run in class."""

    source: str


@dataclass(frozen=True)
class Output:
    """What a cell of the solution printed."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A picture that a cell of the solution drew.

    Attributes:
        png: The picture as PNG.
        words: Its description, for people who can't see it.
        html: The interactive form, if the picture has one; "" otherwise.
    """

    png: bytes
    words: str
    html: str = ""

    @property
    def shape(self) -> float:
        """The width, in heights."""
        with Image.open(io.BytesIO(self.png)) as image:
            return image.width / image.height


@dataclass(frozen=True)
class Prediction:
    """A prediction of the lab, as a question to the class.

    Attributes:
        asked: What to predict.
        choices: The answers to choose from; empty if the answer is a number.
        parts: What the class predicts one by one; empty for one answer.
        unit: The unit of the number; "" if there is none.
    """

    asked: str
    choices: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class Task:
    """A task of the lab, in one line.

    Attributes:
        number: As in the notebook, "6.1".
        title: As in the notebook.
        points: That its check gives.
        line: What to write, in Markdown.
    """

    number: str
    title: str
    points: float
    line: str


Block = Text | Code | Output | Picture | Prediction | Task


#: A picture is set beside the text if it is narrower than this, in widths of its height.
NARROW = 1.35


@dataclass(frozen=True)
class Slide:
    """One slide.

    Attributes:
        title: Without Markdown.
        blocks: What it shows, from top to bottom.
        notes: What the lecturer says, in Markdown; the class doesn't see it.
        minutes: How long the slide takes.
    """

    title: str
    blocks: tuple[Block, ...]
    notes: str
    minutes: float

    @property
    def time(self) -> str:
        """The minutes in words."""
        return f"{self.minutes:g} minute{'' if self.minutes == 1 else 's'}"

    @property
    def beside(self) -> Picture | None:
        """The still, narrow picture that is set beside all other blocks; None if there is none."""
        pictures = [block for block in self.blocks if isinstance(block, Picture)]
        if len(pictures) != 1 or len(self.blocks) == 1 or pictures[0].html:
            return None
        return pictures[0] if pictures[0].shape < NARROW else None


@dataclass(frozen=True)
class Deck:
    """The slides of a lab. The first slide has the lab's title.

    Attributes:
        name: The name of the lab's files, without an ending.
        lab: The lab's title, with its number.
        slides: In order.
    """

    name: str
    lab: str
    slides: tuple[Slide, ...] = field(default=())

    @property
    def minutes(self) -> float:
        """The minutes of all slides."""
        return sum(slide.minutes for slide in self.slides)
