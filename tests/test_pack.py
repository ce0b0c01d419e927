"""What instructors get: pictures for slides."""

from __future__ import annotations

import re

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from PIL import Image

from utils.course.notebook import NotebookError, dumps
from utils.course.pack import runs
from utils.course.pack.pictures import pictures, save
from utils.figures import forms

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
    nb = runs.executed(solution(tmp_path, DRAWS, "import time; time.sleep(0.2)"), tmp_path / "runs")
    assert runs.seconds(nb.cells[2]) >= 0.2
    (found,) = pictures(nb)
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

    monkeypatch.setattr(runs, "run_cells", None)  # kept: not run again
    assert runs.executed(tmp_path / "01_toy.ipynb", tmp_path / "runs") == nb
    with pytest.raises(TypeError):
        runs.executed(solution(tmp_path, DRAWS, "1"), tmp_path / "runs")


def test_a_solution_that_fails_gives_no_pictures_and_says_in_which_cell(tmp_path):
    with pytest.raises(runs.RunError, match=r"01_toy.ipynb: cell 'cell-0': ZeroDivisionError"):
        runs.executed(solution(tmp_path, "1 / 0"), tmp_path / "runs")


def test_a_picture_without_words_is_refused_with_its_cell(tmp_path):
    nb = runs.executed(solution(tmp_path, DRAWS), tmp_path / "runs")
    nb.cells[1].outputs[0].metadata = {}
    with pytest.raises(NotebookError, match="cell 'cell-0': a picture without alternative text"):
        list(pictures(nb))
