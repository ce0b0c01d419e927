"""The table of the five metrics: what students wrote in one lab is there in the next."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from utils.labs.shared import five_metrics
from utils.labs.shared.five_metrics import FILE, METRICS, SCHEMES


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> Path:
    """The notebook's folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(five_metrics, "_unwritten", {})
    return tmp_path


def row(scheme: str) -> list[str]:
    return next(row[1:] for row in five_metrics.table().rows() if row[0] == scheme)


def in_the_way(folder: Path) -> None:
    """Nothing can be written, whoever runs the tests (root may write everywhere)."""
    (folder / f".{FILE}.{os.getpid()}.tmp").mkdir()


def test_the_next_lab_shows_what_was_noted_in_this_one():
    code = (
        "from utils.labs.shared import five_metrics; "
        "five_metrics.fill('Hogwild', ease='a lock less')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    five_metrics.fill("ring all-reduce", bandwidth="1.50 n")
    assert row("Hogwild") == ["", "", "", "", "a lock less"]
    assert row("ring all-reduce") == ["1.50 n", "", "", "", ""]


def test_a_second_note_of_a_scheme_takes_none_of_the_first_away(capsys):
    five_metrics.fill("Hogwild", ease="one", faults="two\n  lines")
    five_metrics.fill("Hogwild", ease="another")
    assert row("Hogwild") == ["", "two lines", "", "", "another"]
    five_metrics.fill("Hogwild", ease="")
    assert row("Hogwild") == ["", "two lines", "", "", ""]
    assert capsys.readouterr().out.startswith("Hogwild: noted ease, faults.\n")


def test_a_scheme_that_nobody_has_looked_at_names_the_lab_that_does():
    five_metrics.fill("ring all-reduce", ease="18 lines")
    empty = {r[0]: r[1] for r in five_metrics.table().rows() if r[1].startswith("lab")}
    assert empty == {name: f"lab {lab}" for name, lab in SCHEMES.items() if name[:4] != "ring"}
    assert list(SCHEMES) == [r[0] for r in five_metrics.table().rows()]


def test_what_is_not_written_yet_is_said_and_costs_no_earlier_text(capsys):
    five_metrics.fill("elastic averaging", faults="slow rank: nothing", ease="short")
    capsys.readouterr()
    five_metrics.fill("elastic averaging", bandwidth="n / τ", faults=..., convergence=...)
    assert capsys.readouterr().out == (
        "elastic averaging: noted bandwidth.\n"
        "elastic averaging: no text yet for faults, convergence. Replace ... and run this cell "
        "again. Texts from before: faults.\n"
    )
    assert row("elastic averaging") == ["n / τ", "slow rank: nothing", "", "", "short"]


def test_a_lab_opened_for_the_first_time_writes_nothing_before_there_is_a_text(folder):
    five_metrics.fill("Hogwild", **dict.fromkeys(METRICS, ...))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"mine": 1}', "\udcff"])
def test_a_file_that_somebody_needs_is_never_overwritten(folder, capsys, content):
    before = content.encode("utf-8", "surrogateescape")
    (folder / FILE).write_bytes(before)
    assert FILE in repr(five_metrics.table())
    assert f"<p>{FILE}" in five_metrics.table()._repr_html_()
    assert (folder / FILE).read_bytes() == before
    five_metrics.fill("Hogwild", ease="still noted")
    assert "kept as five_metrics.kept-1.json" in capsys.readouterr().out
    assert (folder / "five_metrics.kept-1.json").read_bytes() == before
    assert row("Hogwild")[-1] == "still noted"
    (folder / FILE).write_bytes(before)
    five_metrics.fill("Hogwild", ease="again")
    assert (folder / "five_metrics.kept-2.json").read_bytes() == before


def test_schemes_of_a_later_version_of_the_course_are_not_lost(folder):
    five_metrics.fill("Hogwild", ease="a")
    content = json.loads((folder / FILE).read_text())
    content["schemes"]["gossip"] = {"privacy": "none"}
    (folder / FILE).write_text(json.dumps(content))
    five_metrics.fill("Hogwild", ease="b")
    assert json.loads((folder / FILE).read_text())["schemes"] == {
        "Hogwild": {"ease": "b"},
        "gossip": {"privacy": "none"},
    }


def test_a_folder_that_cannot_be_written_stops_no_notebook(folder, capsys):
    five_metrics.fill("Hogwild", ease="kept")
    in_the_way(folder)
    capsys.readouterr()
    five_metrics.fill("Hogwild", faults="only here")
    five_metrics.fill("ring all-reduce", faults="only here, too")
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    assert said[1].startswith("The table can't be kept")
    assert row("Hogwild") == ["", "only here", "", "", "kept"]
    assert row("ring all-reduce")[1] == "only here, too"


def test_what_could_not_be_kept_is_kept_as_soon_as_it_can(folder, monkeypatch):
    in_the_way(folder)
    five_metrics.fill("Hogwild", faults="first")
    next(folder.glob(".*.tmp")).rmdir()
    five_metrics.fill("Hogwild", ease="second")
    monkeypatch.setattr(five_metrics, "_unwritten", {})
    assert row("Hogwild") == ["", "first", "", "", "second"]


def test_a_folder_that_refuses_new_names_loses_no_foreign_file(folder, monkeypatch, capsys):
    (folder / FILE).write_text("mine")
    monkeypatch.setattr(Path, "rename", lambda *_: (_ for _ in ()).throw(PermissionError(13, "no")))
    five_metrics.fill("Hogwild", ease="a")
    assert (folder / FILE).read_text() == "mine"
    assert "could not be renamed" in capsys.readouterr().out
    assert row("Hogwild")[-1] == "a"


def test_two_notebooks_at_once_lose_none_of_their_texts(folder):
    code = """
import sys
from utils.labs.shared import five_metrics
for k in range(40):
    five_metrics.fill(sys.argv[1], ease=str(k))
    five_metrics.fill(sys.argv[1], faults=str(k))
"""
    names = ["Hogwild", "ring all-reduce", "elastic averaging"]
    both = [subprocess.Popen([sys.executable, "-c", code, name], stdout=-3) for name in names]
    assert [process.wait(60) for process in both] == [0, 0, 0]
    assert all(row(name) == ["", "39", "", "", "39"] for name in names)
    assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"scheme": "ring"}, "No scheme is called 'ring'. Choose one of 'central all-reduce'"),
        ({"scheme": "Hogwild", "speed": "x"}, "No metric is called 'speed'. Choose one of band"),
        ({"scheme": "Hogwild", "ease": 3}, "ease must be a text, not int"),
    ],
)
def test_a_misspelt_name_is_an_error_that_lists_the_right_ones(folder, arguments, said):
    with pytest.raises(ValueError, match=said):
        five_metrics.fill(**arguments)
    assert list(folder.iterdir()) == []


def test_a_text_with_signs_of_html_is_shown_as_it_was_written():
    five_metrics.fill("Hogwild", ease="a <b> & </td>")
    assert "a &lt;b&gt; &amp; &lt;/td&gt;" in five_metrics.table()._repr_html_()
    assert "a <b> & </td>" in repr(five_metrics.table())


def test_a_number_is_shown_as_it_was_written():
    five_metrics.fill("Hogwild", ease="1.50", faults="007")
    assert ">1.50<" in five_metrics.table()._repr_html_()
    assert ">007<" in five_metrics.table()._repr_html_()


def test_a_reader_who_hears_the_table_hears_the_names_of_rows_and_columns():
    five_metrics.fill("Hogwild", faults="a dead rank stops nobody")
    shown = five_metrics.table()._repr_html_()
    heads = re.findall(r'<th scope="(col|row)"[^>]*>(?:<b>)?([^<]+)', shown)
    assert [name for scope, name in heads if scope == "col"] == ["scheme", *METRICS]
    assert [name for scope, name in heads if scope == "row"] == list(SCHEMES)
    assert f">{five_metrics.CAPTION}</caption>" in shown
    assert "a dead rank stops nobody" in shown


def test_a_narrow_page_scrolls_the_table_and_not_itself():
    shown = five_metrics.table()._repr_html_()
    box = re.match(r"<div [^>]*>", shown).group()
    assert "overflow-x: auto" in box
    assert 'tabindex="0"' in box, "the keyboard scrolls it, too"
    assert "aria-label=" in box
