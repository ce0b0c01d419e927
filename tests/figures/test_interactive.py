"""Pictures that answer, as data: what a notebook and a page get of them."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest

from utils import figures
from utils.figures import forms, palette
from utils.figures.interactive import HTML, Interactive

WORDS = 'Four ranks in a ring, called "ring". Rank 0 sends first.'


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "picture.js"
    path.write_text("// Shows the words.\n  root.append(data.words);\n")
    return path


def made(script: Path, data: dict | None = None, **options) -> Interactive:
    figure, axes = figures.chart(4, 2)
    axes.plot([1, 2])
    return Interactive(script, data or {"words": "here"}, figure, WORDS, **options)


def test_a_notebook_gets_the_piece_the_still_picture_and_the_words(script):
    data, metadata = made(script)._repr_mimebundle_()
    assert set(data) == {HTML, forms.PNG, "text/plain"}
    assert base64.b64decode(data[forms.PNG]).startswith(b"\x89PNG")
    assert metadata[forms.PNG]["alt"] == data["text/plain"] == WORDS


def test_a_terminal_gets_the_callers_text(script):
    piece = made(script, text="a table")
    assert repr(piece) == piece._repr_mimebundle_()[0]["text/plain"] == "a table"


def test_where_scripts_are_taken_away_the_still_picture_is_left_with_its_words(script):
    piece = made(script)
    without = re.sub(r"<(script|style)>.*?</\1>", "", piece.piece(), flags=re.DOTALL)
    assert "root" not in without
    words = "Four ranks in a ring, called &quot;ring&quot;. Rank 0 sends first."
    image = piece._repr_mimebundle_()[0][forms.PNG].replace("\n", "")
    assert f'<img alt="{words}" src="data:image/png;base64,{image}">' in without
    assert f'role="group" aria-label="{words}"' in without


def test_no_data_ends_the_script_element(script):
    piece = made(script, {"words": "</script><b>"}).piece()
    assert piece.count("</script>") == 1
    assert "\\u003c/script>\\u003cb>" in piece


def test_a_piece_loads_nothing_from_elsewhere(script):
    text = made(script).html()
    addresses = set(re.findall(r"https?://[^\"' ]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which no browser loads
    assert not re.search(r"\b(import|fetch|link)\b", text)


def test_the_same_picture_is_the_same_piece_and_another_one_is_not(script):
    assert made(script).piece() == made(script).piece()
    names = {
        re.search(r'id="(ddl-[0-9a-f]+)"', made(script, {"words": w}).piece())[1] for w in "ab"
    }
    assert len(names) == 2


def test_scripts_have_the_colors_of_the_palette(script):
    piece = made(script).piece()
    assert f'"waiting":"{palette.WAITING}"' in piece
    assert f'"ranks":{str(list(palette.RANKS)).replace(chr(39), chr(34)).replace(" ", "")}' in piece


def test_a_number_that_json_cannot_hold_is_refused(script):
    with pytest.raises(ValueError, match="JSON"):
        made(script, {"words": float("nan")})


def test_a_cell_shows_the_still_picture_only_inside_the_piece(script):
    before = set(plt.get_fignums())
    made(script)
    assert set(plt.get_fignums()) == before


def test_a_saved_picture_is_a_page_with_language_title_and_heading(script, tmp_path):
    made(script).save(tmp_path / "ring.html")
    page = (tmp_path / "ring.html").read_text()
    assert page.startswith('<!doctype html>\n<html lang="en">')
    title = "Four ranks in a ring, called &quot;ring&quot;"
    assert f"<title>{title}</title>" in page
    assert f"<h1>{title}</h1>" in page


def test_the_scripts_are_in_the_package_that_students_install():
    folder = Path(figures.__file__).with_name("scripts")
    assert {"base.js", "base.css"} <= {path.name for path in folder.iterdir()}
