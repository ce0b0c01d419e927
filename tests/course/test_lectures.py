"""The lectures: what their slides show of a lab, and what they look like in a browser."""

from __future__ import annotations

import base64
import io
import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image
from pptx import Presentation
from test_stored_numbers import NUMBER, ROUNDED, stored

from utils.course.lectures import page, presentation, reading
from utils.course.lectures.deck import Text
from utils.course.lectures.tex import plain
from utils.course.notebook import SOLUTIONS, NotebookError, is_solution, notebooks, read
from utils.course.release import student_version
from utils.figures import forms

PATHS = notebooks(SOLUTIONS)
each_lab = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
#: A line of an answer that is at least so long belongs to nothing else.
LONG = 30
#: How far an element may be outside of a slide, in pixels of CSS.
TOLERANCE = 1
#: The height of a slide above its last line, in pixels of CSS.
ROOM = page.HEIGHT - 44
PNG = io.BytesIO()
Image.new("RGB", (4, 3), "red").save(PNG, "png")
PIXEL = base64.b64encode(PNG.getvalue()).decode()


def deck_of(path):
    return reading.read(reading.LECTURES / f"{path.stem}.md", read(path))


def test_every_lab_has_a_lecture():
    assert [path.stem for path in reading.lectures()] == [path.stem for path in PATHS]


@each_lab
def test_a_lecture_has_minutes_and_a_number_in_it_is_one_of_the_lab(path):
    """Otherwise a slide says something else than the notebook that the class runs."""
    deck, nb = deck_of(path), read(path)
    numbers = (
        number.replace(",", "") for cell in nb.cells for number in NUMBER.findall(cell.source)
    )
    there = stored(nb) | {float(number) for number in numbers if number.count(".") <= 1}
    there |= {100 * number for number in there}
    said = [
        (slide.title, float(number.replace(",", "")))
        for slide in deck.slides
        for text in (
            slide.title,
            slide.notes,
            *(b.markdown for b in slide.blocks if isinstance(b, Text)),
        )
        for number in re.findall(r"(\d+(?:[.,]\d+)*) (?:%|ms|s|µs|kB|MB|GB)(?![\w/])", text)
    ]
    near = [any(abs(number - one) <= ROUNDED * number for one in there) for _, number in said]
    assert not [about for about, found in zip(said, near, strict=True) if not found]
    assert 20 <= deck.minutes <= 75


@each_lab
def test_no_slide_shows_an_answer(path):
    nb = read(path)
    answers = "\n".join(
        region
        for cell in nb.cells
        if is_solution(cell)
        for region in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", cell.source, re.S)
    )
    given = "\n".join(cell.source for cell in student_version(nb, path.name).cells)
    lines = {line.strip() for line in answers.splitlines()}
    secret = {line for line in lines if len(line) >= LONG and line not in given}
    shown = "\n".join(str(block) for slide in deck_of(path).slides for block in slide.blocks)
    assert not [line for line in secret if line in shown]


# --- what a lecture may say --------------------------------------------------------------------


def toy():
    """A lab with a picture, an answer, and a prediction."""
    drawn = new_output(
        "display_data", {forms.PNG: PIXEL}, metadata={forms.PNG: {"alt": "a red dot"}}
    )
    guess = 'CHOICES = ["yes", "no"]\nguess = predict("Does it work?", "no", choices=CHOICES)'
    answer = {"lab": {"task": "1.1", "title": "a sum", "points": 2}, "nbgrader": {"solution": True}}
    questions = "".join(f"{k}. **What is {k}?** It is {k}.\n" for k in range(1, 5))
    about = [
        {"lab": {"instructor": kind}, "tags": ["remove-cell"]} for kind in ("questions", "shorter")
    ]
    return new_notebook(
        cells=[
            new_markdown_cell("# 01 · Toy", id="title"),
            new_code_cell("x = 1\ny = 2", id="draw", outputs=[drawn]),
            new_code_cell("if x:\n    b = 2\n    c = 3", id="run"),
            new_code_cell(guess, id="guess"),
            new_code_cell("secret = 1", id="answer", metadata=answer),
            new_markdown_cell(questions, id="asked", metadata=about[0]),
            new_markdown_cell("- **1.1**: too long", id="less", metadata=about[1]),
        ]
    )


def lecture(tmp_path, body: str):
    """The deck of a text with enough slides; `body` is the first slide."""
    more = "".join(f"\n## Slide {k}\n\n```{{notes}} 2\nSay it.\n```\n" for k in range(12))
    path = tmp_path / "01_toy.md"
    path.write_text(f"# Toy\n\n{body}\n\n```{{notes}} 3\nBegin.\n```\n{more}", encoding="utf-8")
    return reading.read(path, toy())


def fence(directive: str, text: str = "") -> str:
    return f"```{directive}\n{text}\n```"


def test_what_a_slide_shows_comes_from_the_lab(tmp_path):
    blocks = "\n\n".join([
        *(fence("{picture} draw"), fence("{code} run 2-3"), fence("{prediction} guess")),
        *(fence("{task} 1.1", "Add *two* numbers."), fence("{questions} 2")),
    ])
    deck = lecture(tmp_path, blocks)
    first = deck.slides[0]
    picture, code, prediction, task, question = first.blocks
    assert (picture.words, code.source) == ("a red dot", "b = 2\nc = 3")
    assert (prediction.asked, prediction.choices) == ("Does it work?", ("yes", "no"))
    assert (task.number, task.points, question.markdown) == ("1.1", 2.0, "1. What is 2?")
    assert "It is 2." in first.notes, "the class doesn't see the answer"
    assert deck.minutes == 27
    html = page.page(deck)
    assert 'alt="a red dot"' in html
    assert "<em>two</em>" in html


@pytest.mark.parametrize(
    ("directive", "said"),
    [
        ("{picture} nothing", "no code cell 'nothing'"),
        ("{picture} run", "'run' has 0 pictures"),
        ("{picture} draw-2", "'draw' has 1 pictures, so there is no 'draw-2'"),
        ("{code} answer", "'answer' is an answer: show its task"),
        ("{code} run 7", "no lines 7, only 3"),
        ("{code} run x", "'x' doesn't name lines"),
        ("{output} run", "'run' printed nothing"),
        ("{task} 1.9", "no task '1.9'"),
        ("{task} 1.1", "has no text"),
        ("{questions} 9", "questions 1 to 4"),
        ("{prediction} run", "not a prediction"),
        ("{notes} soon", "write one number"),
        ("{film} run", "there is no directive {film}: use one of code"),
    ],
)
def test_a_mistake_in_a_lecture_is_told_with_its_file(tmp_path, directive, said):
    with pytest.raises(NotebookError, match=re.escape(said)) as failure:
        lecture(tmp_path, fence(directive))
    assert str(failure.value).startswith("01_toy.md: ")


def test_a_slide_without_notes_and_a_deck_without_slides_are_refused(tmp_path):
    path = tmp_path / "01_toy.md"
    path.write_text("# Toy\n\nText.\n", encoding="utf-8")
    with pytest.raises(NotebookError, match="'Toy' has no notes"):
        reading.read(path, toy())
    path.write_text(f"# Toy\n\n{fence('{notes} 3', 'Begin.')}\n", encoding="utf-8")
    with pytest.raises(NotebookError, match="has 1 slides: write 12 to 18"):
        reading.read(path, toy())


def test_powerpoint_has_text_to_edit_pictures_with_words_and_notes(tmp_path):
    blocks = ["- one **bold** word\n- $2\\frac{p-1}{p}n$ bytes", fence("{picture} draw")]
    made = presentation.presentation(lecture(tmp_path, "\n\n".join(blocks)))
    slides = Presentation(io.BytesIO(made)).slides
    texts = [shape.text_frame.text for shape in slides[0].shapes if shape.has_text_frame]
    assert texts[0] == "Toy"
    assert "• one bold word\n• 2(p-1)/(p)n bytes" in texts
    bold = [
        run.text
        for shape in slides[0].shapes
        if shape.has_text_frame
        for line in shape.text_frame.paragraphs
        for run in line.runs
        if run.font.bold
    ]
    assert bold == ["bold"]
    (picture,) = (shape for shape in slides[0].shapes if shape.shape_type == 13)
    assert picture._element.nvPicPr.cNvPr.get("descr") == "a red dot"
    assert slides[0].notes_slide.notes_text_frame.text == "3 minutes\nBegin."


@each_lab
def test_no_text_or_picture_of_powerpoint_is_outside_its_slide(path):
    made = Presentation(io.BytesIO(presentation.presentation(deck_of(path))))
    assert not [
        f"slide {number}: {shape.name}"
        for number, slide in enumerate(made.slides, start=1)
        for shape in slide.shapes
        if min(shape.left, shape.top) < 0
        or shape.left + shape.width > made.slide_width
        or shape.top + shape.height > made.slide_height
    ]


@pytest.mark.parametrize(
    ("formula", "said"),
    [(r"$\alpha + n\beta$", "α+ nβ"), (r"$x_{r+1} \bmod p$", "x_(r+1)  mod p"), ("5 %", "5 %")],
)
def test_a_formula_can_be_read_as_plain_text(formula, said):
    assert plain(formula) == said


# --- in a browser ------------------------------------------------------------------------------

#: Returns by how much the slide's elements are outside of it, and which is the worst.
OUTSIDE = """() => {
  const slide = Reveal.getCurrentSlide(), scale = Reveal.getScale();
  const frame = slide.getBoundingClientRect();
  let worst = [0, ""];
  for (const element of slide.querySelectorAll("*")) {
    if (element.closest("aside, .foot, details:not([open])")) continue;
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height) continue;
    const below = box.bottom - (frame.top + ROOM * scale), right = box.right - frame.right;
    const out = Math.max(below, right, frame.left - box.left) / scale;
    if (out > worst[0]) worst = [out, element.outerHTML.slice(0, 80)];
  }
  return worst;
}""".replace("ROOM", str(ROOM))


def test_each_deck_can_be_presented_offline_and_no_slide_overflows(chromium, tmp_path):
    tab = chromium.new_page(viewport={"width": page.WIDTH, "height": page.HEIGHT})
    asked, errors, outside = [], [], {}
    tab.on("request", lambda request: asked.append(request.url))
    tab.on("pageerror", lambda error: errors.append(str(error)))
    for path in PATHS:
        file = tmp_path / f"{path.stem}.html"
        deck = deck_of(path)
        file.write_text(page.page(deck), encoding="utf-8")
        tab.goto(file.as_uri())
        tab.wait_for_function("Reveal.isReady()")
        for number, _ in enumerate(deck.slides, start=1):
            out, element = tab.evaluate(OUTSIDE)
            if out > TOLERANCE:
                outside[f"{path.stem}, slide {number}"] = (round(out), element)
            pictures = tab.locator("section.present img, section.present [role=group]").all()
            assert all(
                one.get_attribute("alt") or one.get_attribute("aria-label") for one in pictures
            )
            if number < len(deck.slides):
                tab.keyboard.press("ArrowRight")
        assert tab.evaluate("Reveal.isLastSlide()"), path.stem
    tab.close()
    assert (outside, errors) == ({}, [])
    assert not [url for url in asked if not url.startswith(("file:", "data:", "about:", "blob:"))]
