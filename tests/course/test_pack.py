"""What instructors get: pictures for slides, and a page for each lab."""

from __future__ import annotations

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from utils.__main__ import main
from utils.course import notes, pack, pictures
from utils.course.about import labs
from utils.course.notebook import SOLUTIONS, NotebookError, dumps, is_solution, lab, notebooks, read
from utils.course.pack import a_point, sections
from utils.course.pictures import pictures_of, save
from utils.course.release import student_version
from utils.figures import forms
from utils.grading.pages import explain
from utils.grading.reference import Reference

DRAWS = """\
from utils import figures
figure, axes = figures.canvas(4, 2)
figures.box(axes, 0, 0, "rank 0 & <rank 1>")
"""


def solution(folder, *sources: str):
    cells = [new_markdown_cell("## A ring of ranks", id="ring-text")]
    cells += [new_code_cell(source, id=f"cell-{k}") for k, source in enumerate(sources)]
    path = folder / "01_toy.ipynb"
    path.write_text(dumps(new_notebook(cells=cells)))
    return path


def test_every_picture_of_a_lab_comes_as_svg_and_png_that_say_what_they_show(tmp_path, monkeypatch):
    nb = pictures.executed(
        solution(tmp_path, DRAWS, "import time; time.sleep(0.2)"), tmp_path / "runs"
    )
    assert 0.15 < pictures.seconds(nb.cells[2]) < 60  # clocks of messages, not of the sleep
    (found,) = pictures_of(nb)
    assert (found.name, found.section) == ("cell-0", "A ring of ranks")
    save([found], tmp_path / "out")
    said = "Drawing with the words: rank 0 & <rank 1>."
    assert (tmp_path / "out" / "cell-0.txt").read_text() == said + "\n"
    svg = (tmp_path / "out" / "cell-0.svg").read_text()
    inches = float(re.search(r'width="([\d.]+)pt"', svg)[1]) / 72
    with Image.open(tmp_path / "out" / "cell-0.png") as image:
        assert image.text["Description"] == said
        assert image.width == pytest.approx(inches * forms.SLIDE_DPI, rel=0.02)
    assert "<title>Drawing with the words: rank 0 &amp; &lt;rank 1&gt;.</title>" in svg
    assert '<svg role="img" aria-label="Drawing with the words: ' in svg

    monkeypatch.setattr(pictures, "run_cells", None)  # kept: not run again
    assert pictures.executed(tmp_path / "01_toy.ipynb", tmp_path / "runs") == nb
    with pytest.raises(TypeError):
        pictures.executed(solution(tmp_path, DRAWS, "1"), tmp_path / "runs")


def test_a_copy_that_was_kept_is_the_same_as_one_that_is_run_but_for_what_changed_since(
    tmp_path, monkeypatch
):
    ran = []

    def run_cells(nb, *_, **__):
        ran.append([cell.id for cell in nb.cells])
        nb.metadata["language_info"] = {"name": "python"}
        nb.cells[1].outputs = [new_output("display_data", {"text/plain": "drawn"})]
        nb.cells[1].metadata["execution"] = {"iopub.execute_input": "then"}

    monkeypatch.setattr(pictures, "run_cells", run_cells)
    monkeypatch.setattr(pictures, "require_kernel", lambda: None)
    path, kept = solution(tmp_path, DRAWS), tmp_path / "runs"
    first = pictures.executed(path, kept)
    assert first.cells[1].outputs[0].data == {"text/plain": "drawn"}
    assert pictures.executed(path, kept) == first
    nb = read(path)
    nb.cells[1].metadata["tags"] = ["hide-input"]
    path.write_text(dumps(nb))
    again = pictures.executed(path, kept)
    assert (len(ran), again.cells[1].outputs) == (1, first.cells[1].outputs)
    assert set(again.cells[1].metadata) == {"tags", "execution"}
    nb.cells[1].id = "ring-of-ranks"
    path.write_text(dumps(nb))
    assert pictures.executed(path, kept).cells[1].outputs == first.cells[1].outputs
    assert [ids[1] for ids in ran] == ["cell-0", "ring-of-ranks"]


def test_a_solution_that_fails_gives_no_pictures_and_says_in_which_cell(tmp_path):
    with pytest.raises(pictures.RunError, match=r"01_toy.ipynb: cell 'cell-0': ZeroDivisionError"):
        pictures.executed(solution(tmp_path, "1 / 0"), tmp_path / "runs")


def test_a_picture_without_words_is_refused_with_its_cell(tmp_path):
    nb = pictures.executed(solution(tmp_path, DRAWS), tmp_path / "runs")
    nb.cells[1].outputs[0].metadata = {}
    with pytest.raises(NotebookError, match="cell 'cell-0': a picture has no alternative text"):
        list(pictures_of(nb))


# --- notes and pages ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_every_lab_has_questions_cuts_and_a_rubric_whose_points_add_up(path):
    nb = read(path)
    found = notes.read(nb, path.name)
    written = [cell for cell in nb.cells if is_solution(cell) and cell.cell_type == "markdown"]
    assert set(found.rubrics) == {lab(cell)["task"] for cell in written}
    for cell in written:
        earned = sum(mark.points for mark in found.rubrics[lab(cell)["task"]].earns)
        assert earned == cell.metadata.nbgrader.points


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_the_minutes_of_the_sections_are_those_of_the_lab(path):
    nb = read(path)
    minutes = nb.metadata["lab"]["minutes"] + nb.metadata["lab"].get("further", 0)
    found = sections(nb, minutes)
    assert sum(one.minutes for one in found) == pytest.approx(minutes)
    assert a_point(found) > 1


RUBRIC = "**Rubric**\n\n- **1** one\n- **1** two\n\n**Answers that come often**\n\n- **0** none"
QUESTIONS = "\n".join(f"{k}. **Who waits?** Rank {k}, for\n   rank 0." for k in range(1, 5))


def note(kind: str, source: str, **metadata):
    about = {"lab": {"instructor": kind}, "tags": [notes.TAG]} | metadata
    return new_markdown_cell(source, id=f"{kind}-note", metadata=about)


def noted(rubric=RUBRIC, questions=QUESTIONS, shorter="- **1.A; In practice**: known", **metadata):
    """A lab with one written answer of two points, and an instructor's notes."""
    graded = {"schema_version": 3, "grade_id": "why", "solution": True, "grade": True, "points": 2}
    answer = {"nbgrader": graded | {"locked": False, "task": False}}
    answer["lab"] = {"task": "1.A", "title": "explain: why", "points": 2}
    cells = [
        new_markdown_cell("## In practice\n\n**Explain 1.A.** Why?", id="asks"),
        new_markdown_cell("Because.", id="why-answer", metadata=answer),
        *([note("rubric", rubric, **metadata)] if rubric else []),
        note("questions", questions),
        note("shorter", shorter),
    ]
    return new_notebook(cells=cells, metadata={"lab": {}})


def test_notes_are_read_as_they_are_written():
    found = notes.read(noted(), "01_toy")
    assert found.questions[0] == notes.Question("Who waits?", "Rank 1, for rank 0.")
    assert found.shorter == (notes.Cut(("1.A", "In practice"), "known"),)
    assert found.rubrics["1.A"].earns == (notes.Mark(1, "one"), notes.Mark(1, "two"))
    assert found.rubrics["1.A"].often == (notes.Mark(0, "none"),)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"rubric": RUBRIC.replace("- **1** two", "")}, "add up to 1, but the answer 'why-answer'"),
        ({"rubric": RUBRIC.replace("**0**", "**3**")}, "more than the 2 points"),
        ({"rubric": RUBRIC.partition("**Answers")[0]}, "must say both"),
        ({"rubric": ""}, "cell 'why-answer': has no rubric below it"),
        ({"tags": []}, "with the tag 'remove-cell'"),
        ({"lab": {"instructor": "hints"}}, "instructor is 'hints': use one of rubric"),
        ({"questions": QUESTIONS.replace("1. ", "- ")}, "3 questions"),
        ({"questions": QUESTIONS.replace("waits?", "waits.")}, "is not a question"),
        ({"shorter": "nothing"}, "leaves nothing out"),
        ({"shorter": "- **1.9**: why"}, "'1.9' is neither a task nor a heading"),
    ],
)
def test_what_is_missing_in_the_notes_is_said_with_its_cell(changed, said):
    with pytest.raises(NotebookError, match=re.escape(said)):
        notes.read(noted(**changed), "01_toy")


def test_no_student_gets_an_instructors_notes(tmp_path):
    nb = noted()
    student = student_version(nb, "01_toy")
    assert [cell.id for cell in student.cells] == ["asks", "why-answer"]
    assert len(nb.cells) == 5
    path = tmp_path / "01_toy.ipynb"
    path.write_text(dumps(nb))
    reference = Reference(path)
    assert [cell.id for cell in reference.nb.cells] == ["asks", "why-answer"]
    assert "<summary>Rubric</summary>" in explain([], [reference])


def test_the_page_of_a_lab_has_all_that_an_instructor_needs(tmp_path):
    path = SOLUTIONS / "01_c10d.ipynb"
    nb = read(path)
    for output in (one for cell in nb.cells for one in cell.get("outputs", [])):
        if "image/png" in output.get("data", {}):
            output.data["image/svg+xml"] = "<svg width='1pt'></svg>"
    (about,) = (one for one in labs() if one.number == "01")
    made = pack.pack(path, nb, about)
    pack.write([made], tmp_path)
    page = (tmp_path / "01_c10d.html").read_text()
    assert f"{len(made.mistakes['1.2'])}</summary>" in page
    assert "A message arrived, but your tensor is unchanged" in page
    assert "150 minutes, 4 ranks, 21 points; after 00" in page
    assert page.count("<h4>Rubric</h4>") == 2
    assert page.count("<img ") == page.count('.svg" alt="') == len(made.pictures)
    assert "$" not in re.sub(r"<code>.*?</code>", "", page.partition('id="written"')[2])
    assert '<a href="01_c10d.html">01 · c10d</a>' in (tmp_path / "index.html").read_text()
    assert (tmp_path / "figures" / "01_c10d" / "two-worlds.svg").is_file()
    cut = notes.Cut(("1.7",), "")
    whole = next(one for one in made.sections if "1.7" in one.tasks)
    assert whole.work <= made.saved(cut) <= whole.minutes


def test_a_lab_that_does_not_run_takes_no_other_with_it(tmp_path, monkeypatch, capsys):
    nb = noted()

    def executed(path):
        if path.stem == "01_toy":
            raise pictures.RunError("01_toy.ipynb: cell 'boom': ZeroDivisionError")
        return nb

    monkeypatch.setattr(pictures, "executed", executed)
    for name in ("01_toy.ipynb", "02_toy.ipynb"):
        (tmp_path / name).write_text(dumps(nb))
    paths = [str(path) for path in notebooks(tmp_path)]
    assert main(["figures", *paths, "-o", str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "01_toy.ipynb: cell 'boom'" in said.err
    assert "02_toy: 0 pictures" in said.out
