"""The map of the course follows from what the labs say about themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from utils.course import about, map, page_parts, plan
from utils.course.about import PARTS, About
from utils.course.notebook import ROOT, SOLUTIONS, NotebookError, notebooks, read
from utils.course.page_parts import Part

FIRST_LAB = SOLUTIONS / "00_start_here.ipynb"
LABS = [
    About("00", "Start here", PARTS[0], 15, 3, ()),
    About("01", "c10d", PARTS[0], 75, 4, ("00",)),
    About("02", "Samplers", PARTS[1], 30, 4, ("01",)),
    About("03", "By another way", PARTS[1], 30, 4, ("01",)),
    About("04", "Both", PARTS[1], 30, 2, ("02", "03")),
    About("05", "All of it", PARTS[-1], 120, 4, ("01", "04")),
]


@pytest.fixture
def one_path(monkeypatch):
    monkeypatch.setattr(map, "PATHS", {"An evening": ("a taste", [["00"], ["01", "04"]])})


def test_this_repositorys_pages_follow_from_its_labs():
    parts = [Part("README.md", "map", map.written(about.labs())), *plan.parts()]
    assert page_parts.drift(parts) == []


def test_each_path_is_in_readme():
    labs = about.labs()
    readme = (ROOT / "README.md").read_text("utf-8")
    for route in map.paths(labs):
        assert f"| {route.name} |" in readme
    assert map.in_words(labs) in readme


def test_lab_00_sends_a_student_to_every_lab_and_says_how_long_it_takes():
    lines = {cell.id: cell.source for cell in read(FIRST_LAB).cells}["next-text"].splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| [")]
    paths = {about.number_of(path): path.name for path in notebooks(SOLUTIONS)}
    assert [(link, minutes) for link, _, minutes in rows] == [
        (f"[{lab.number} · {lab.title}]({paths[lab.number]})", str(lab.minutes))
        for lab in about.labs()
    ]
    assert all(words.endswith(".") for _, words, _ in rows), "a sentence for each"


def test_the_flowchart_has_a_box_for_each_lab_and_an_arrow_from_what_it_builds_on():
    lines = map.flowchart(LABS).splitlines()
    assert lines[0] == "```mermaid"
    for lab in LABS:
        title = f"{lab.number} · {lab.title}<br/>{lab.minutes} min · {lab.ranks} ranks"
        (at,) = [k for k, line in enumerate(lines) if line == f'    lab{lab.number}["{title}"]']
        heads = [line for line in lines[:at] if line.startswith("  subgraph")]
        assert heads[-1].endswith(f'["{lab.part}"]'), "a lab is in the box of its part"
    arrows = [line.split(" --> ") for line in lines if "-->" in line]
    assert len(arrows) == sum(len(lab.builds_on) for lab in LABS)
    for lab in LABS:
        assert all([f"  lab{other}", f"lab{lab.number}"] in arrows for other in lab.builds_on)


def test_the_flowchart_says_in_words_what_it_shows():
    assert f"\n  accDescr: {map.in_words(LABS)}\n" in map.flowchart(LABS)
    assert "04 Both (after 02 and 03)" in map.in_words(LABS)


def test_the_paths_take_the_minutes_of_their_labs(one_path):
    evening, whole = map.paths(LABS)
    assert (evening.minutes, evening.labs) == (120, "00 · 01, 04")
    assert (whole.minutes, whole.numbers) == (300, ("00", "01", "02", "03", "04", "05"))
    assert "| An evening | a taste | 00 · 01, 04 | 2 |" in map.written(LABS)


@pytest.mark.parametrize(("minutes", "said"), [(180, "3"), (150, "2½"), (30, "½"), (100, "1½")])
def test_hours_are_said_in_halves(minutes, said):
    assert map.hours(minutes) == said


def test_a_path_to_a_lab_that_is_not_there_is_refused(one_path):
    with pytest.raises(NotebookError, match="'An evening' names lab 04, which does not exist"):
        map.paths(LABS[:4])


BEGIN, END = "<!-- map: `make release` writes this -->", "<!-- end of the map -->"


def test_drift_of_a_page_is_told_and_repaired(tmp_path: Path):
    readme, parts = tmp_path / "README.md", [Part("README.md", "map", "new")]
    readme.write_text(f"# Course\n{BEGIN}\nold\n{END}\nThe rest.\n", encoding="utf-8")
    assert [line.partition(":")[0] for line in page_parts.drift(parts, tmp_path)] == ["README.md"]
    assert page_parts.write(parts, tmp_path) == ["map in README.md"]
    text = readme.read_text("utf-8")
    assert text == f"# Course\n{BEGIN}\n\nnew\n\n{END}\nThe rest.\n"
    assert page_parts.write(parts, tmp_path) == []
    assert page_parts.drift(parts, tmp_path) == []
    assert len(page_parts.drift([Part("README.md", "map", "newer")], tmp_path)) == 1


def test_a_page_without_a_place_for_a_part_is_refused():
    with pytest.raises(NotebookError, match=r"README\.md needs a line"):
        Part("README.md", "map", "new").put_into("# Course")


def test_labs_that_say_nothing_are_named(tmp_path: Path):
    (tmp_path / "03_toy.ipynb").write_text(
        '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}', encoding="utf-8"
    )
    with pytest.raises(NotebookError, match=r"03_toy\.ipynb: the notebook's metadata don't say"):
        about.labs(tmp_path)
