"""A deck as PowerPoint (.pptx): text that can be edited, pictures with their words, and notes."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from pptx import Presentation
from pptx.dml.color import RGBColor
from pptx.enum.text import PP_ALIGN
from pptx.util import Inches, Pt

from .deck import Block, Code, Deck, Output, Picture, Prediction, Slide, Task, Text
from .tex import plain

#: Inches: a slide of 16:9, its margin, and where the blocks begin and end.
WIDTH, HEIGHT, MARGIN = 13.333, 7.5, 0.6
TOP, BOTTOM, GAP = 1.25, 7.1, 0.15
MONOSPACE = "Consolas"
#: Points of letters, of text and of code.
LETTERS, SMALL = 22, 15
#: Inches of a line, for each point of its letters; and the mean width of a letter.
LINE, LETTER, FIXED = 1.3 / 72, 0.52 / 72, 0.6 / 72
#: Colors of text, and of the line that names a task.
INK, MARK = "1B1B1B", "8A4500"


@dataclass(frozen=True)
class Column:
    """A column of blocks, in inches: its left edge, and its width."""

    left: float
    width: float


@dataclass(frozen=True)
class Run:
    """Some words of a line that look alike."""

    text: str
    bold: bool = False
    italic: bool = False
    code: bool = False


#: A paragraph, with the sign before it: "•", "1.", or "".
Paragraph = tuple[str, list[Run]]


def presentation(deck: Deck) -> bytes:
    """Return the PowerPoint file of a deck."""
    made = Presentation()
    made.slide_width, made.slide_height = Inches(WIDTH), Inches(HEIGHT)
    made.core_properties.title = deck.lab
    for place, slide in enumerate(deck.slides):
        _add_slide(made, slide, deck.lab if place == 0 else "")
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def _add_slide(made: Any, slide: Slide, lab: str) -> None:
    """Add a slide; `lab` is the line below the title of the first one."""
    added = made.slides.add_slide(made.slide_layouts[5])  # a title only
    _write_title(added.shapes.title, slide.title)
    column = Column(MARGIN, WIDTH - 2 * MARGIN)
    if shown := slide.beside:
        column = Column(MARGIN, (WIDTH - 3 * MARGIN) / 2)
        right = Column(column.left + column.width + MARGIN, column.width)
        _add_picture(added, shown, right, TOP, BOTTOM - TOP)
    blocks: list[Block] = [Text(f"*{lab}*")] if lab else []
    blocks += [block for block in slide.blocks if block is not shown]
    heights = [_height(block, column) for block in blocks]
    free = BOTTOM - TOP - sum(heights) - GAP * len(heights)
    room = max(free / max(heights.count(0.0), 1), 1.0)
    top = TOP
    for block, needed in zip(blocks, heights, strict=True):
        height = needed or room
        _add_block(added, block, column, top, height)
        top += height + GAP
    spoken = [Run(slide.time)], *(runs for _, runs in _paragraphs(slide.notes))
    text = "\n".join("".join(run.text for run in runs) for runs in spoken)
    added.notes_slide.notes_text_frame.text = text


def _write_title(title: Any, text: str) -> None:
    title.left, title.top, title.width = Inches(MARGIN), Inches(0.3), Inches(WIDTH - 2 * MARGIN)
    title.height = Inches(0.85)
    title.text = plain(text)
    title.text_frame.paragraphs[0].font.size = Pt(34)
    title.text_frame.paragraphs[0].alignment = PP_ALIGN.LEFT


def _add_block(added: Any, block: Block, column: Column, top: float, height: float) -> None:
    if isinstance(block, Picture):
        _add_picture(added, block, column, top, height)
        return
    box = added.shapes.add_textbox(
        Inches(column.left), Inches(top), Inches(column.width), Inches(height)
    )
    box.text_frame.word_wrap = True
    size = SMALL if isinstance(block, Code | Output) else LETTERS
    for place, (sign, runs) in enumerate(_lines(block)):
        frame = box.text_frame
        paragraph = frame.paragraphs[0] if place == 0 else frame.add_paragraph()
        for run in [Run(f"{sign} ") if sign else Run(""), *runs]:
            _add_run(paragraph, run, size, MARK if isinstance(block, Task) and place == 0 else INK)


def _add_run(paragraph: Any, run: Run, size: int, color: str) -> None:
    if not run.text:
        return
    added = paragraph.add_run()
    added.text = run.text
    added.font.size, added.font.bold, added.font.italic = Pt(size), run.bold, run.italic
    added.font.color.rgb = RGBColor.from_string(color)
    if run.code:
        added.font.name = MONOSPACE


def _add_picture(added: Any, shown: Picture, column: Column, top: float, height: float) -> None:
    """Add a picture as large as there is room, in the middle, with its words."""
    width = min(column.width, height * shown.shape)
    put = added.shapes.add_picture(
        io.BytesIO(shown.png),
        Inches(column.left + (column.width - width) / 2),
        Inches(top),
        Inches(width),
        Inches(width / shown.shape),
    )
    put._element.nvPicPr.cNvPr.set("descr", shown.words)


def _height(block: Block, column: Column) -> float:
    """Return the inches that a block needs; 0 for a picture, which takes what is left."""
    if isinstance(block, Picture):
        return 0.0
    fixed = isinstance(block, Code | Output)
    size, letter = (SMALL, FIXED) if fixed else (LETTERS, LETTER)
    fit = (column.width - 0.2) / (size * letter)
    lengths = (sum(len(run.text) for run in runs) + len(sign) for sign, runs in _lines(block))
    return sum(max(1, ceil(length / fit)) for length in lengths) * size * LINE + 0.1


def _lines(block: Block) -> list[Paragraph]:
    """Return the paragraphs of a block that isn't a picture."""
    match block:
        case Text(markdown):
            return list(_paragraphs(markdown))
        case Code(text) | Output(text):
            return [("", [Run(line, code=True)]) for line in text.splitlines()]
        case Prediction(asked, choices, parts, unit):
            first = Run(f"{asked} ({unit})" if unit else asked, bold=True)
            rest = [*(f"{part}: ?" for part in parts), *choices]
            return [("", [first]), *(("◇", [Run(text)]) for text in rest)]
        case Task(number, title, points, line):
            about = f"Task {number} · {title} · {points:g} point{'' if points == 1 else 's'}"
            return [("", [Run(about, bold=True)]), *_paragraphs(line)]
    raise TypeError(f"a {type(block).__name__} has no lines")


# --- Markdown as paragraphs ---------------------------------------------------------------------


def _paragraphs(markdown: str) -> Iterator[Paragraph]:
    """Yield the paragraphs of a text; each row of a table is one."""
    tree = SyntaxTreeNode(MarkdownIt().enable("table").parse(plain(markdown)))
    for node in tree.children:
        yield from _of_node(node, "")


def _of_node(node: SyntaxTreeNode, sign: str) -> Iterator[Paragraph]:
    if node.type == "inline":
        yield sign, list(_runs(node))
    elif node.type in ("bullet_list", "ordered_list"):
        first = int(node.attrs.get("start", 1))
        for place, item in enumerate(node.children, start=first):
            yield from _of_node(item, f"{place}." if node.type == "ordered_list" else "•")
    elif node.type == "tr":
        cells = ["".join(run.text for run in _runs(cell.children[0])) for cell in node.children]
        yield sign, [Run(" | ".join(cells))]
    elif node.type in ("fence", "code_block"):
        yield from (("", [Run(line, code=True)]) for line in node.content.splitlines())
    else:
        for child in node.children:
            yield from _of_node(child, sign)


def _runs(node: SyntaxTreeNode, bold: bool = False, italic: bool = False) -> Iterator[Run]:
    for child in node.children:
        if child.children:
            strong, slanted = bold or child.type == "strong", italic or child.type == "em"
            yield from _runs(child, strong, slanted)
        elif child.type in ("softbreak", "hardbreak"):
            yield Run(" ")
        else:
            yield Run(child.content, bold, italic, child.type == "code_inline")
