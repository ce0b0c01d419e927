"""What every figure has: words for those who don't see it; and predictions beside measurements."""

from __future__ import annotations

import types

import matplotlib.pyplot as plt
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

from utils import figures
from utils.figures import alt
from utils.figures.predict import NOTHING_YET, predict


def test_a_picture_in_words_has_titles_axes_and_values():
    figure, axes = plt.subplots()
    axes.plot([1, 2, 4], [1, 1.7, 2.5], label="measured")
    axes.plot(np.linspace(0, 1, 100), np.linspace(3, 1, 100), label="ideal")
    axes.plot([9], [9])
    axes.set_title("Speedup")
    axes.set_xlabel("ranks")
    axes.set_ylabel("T(1) / T(p)")
    assert alt.describe(figure) == (
        "Speedup. T(1) / T(p) against ranks. measured: 1 at 1, 1.7 at 2, 2.5 at 4. "
        "ideal: 3 at 0 to 1 at 1, lowest 1, highest 3."
    )


def test_bars_are_told_with_their_names_whatever_way_they_lie():
    figure, (upright, lying) = plt.subplots(2)
    upright.bar(["rank 0", "rank 1"], [3.0, 4.5], label="seconds")
    lying.barh(["a", "b"], [1.0, 2.0])
    said = alt.describe(figure)
    assert "seconds: 3 (rank 0), 4.5 (rank 1)" in said
    assert "bars: 1 (a), 2 (b)" in said


def test_error_bars_are_told_once_by_their_middle():
    figure, axes = plt.subplots()
    axes.errorbar([1, 2], [5.0, 6.0], yerr=[1, 1], label="with band")
    assert alt.describe(figure) == "with band: 5 at 1, 6 at 2."


def test_a_drawing_is_told_by_its_words():
    figure, axes = figures.canvas(4, 2)
    figures.box(axes, 0, 0, "rank 0")
    figures.box(axes, 2, 0, "rank 1")
    assert alt.describe(figure) == "Drawing with the words: rank 0; rank 1."


def test_long_descriptions_end_at_a_word():
    figure, axes = figures.canvas(4, 2)
    for k in range(400):
        axes.text(0, 0, f"word{k}")
    said = alt.describe(figure)
    assert len(said) <= alt.MOST + 2
    assert said.endswith(" …")


def test_a_notebook_gets_the_words_with_the_picture(monkeypatch):
    shell = types.SimpleNamespace(display_formatter=DisplayFormatter())
    monkeypatch.setattr(alt, "get_ipython", lambda: shell)
    alt.install()
    figure, axes = figures.canvas(4, 2)
    axes.text(0, 0, "hello")
    figures.use_style()
    data, metadata = shell.display_formatter.format(figure)
    assert data["text/plain"] == "Drawing with the words: hello."
    assert metadata["image/png"]["alt"] == data["text/plain"]


def test_a_prediction_that_was_not_made_stops_nothing(capsys):
    guess = predict("how long?", ..., unit="s")
    assert capsys.readouterr().out.strip() == NOTHING_YET
    assert "measured: 0 at 3" in alt.describe(guess.beside(3))


def test_a_prediction_stands_beside_the_measurement(capsys):
    guess = predict("how fast?", {"2 ranks": 1.9, "4 ranks": ...}, unit="×")
    assert capsys.readouterr().out == "Your prediction: 2 ranks: 1.9 ×\n"
    said = alt.describe(guess.beside({"2 ranks": 1.3, "4 ranks": 1.2}))
    assert "1.9 ×; 1.3 ×; 1.2 ×" in said
    with pytest.raises(ValueError, match="8 ranks"):
        guess.beside({"8 ranks": 1.2})


@pytest.mark.parametrize("bad", ["3 s", True, float("nan"), None])
def test_what_is_no_prediction_is_said(bad, capsys):
    assert predict("how long?", bad, unit="s").values == {"": None}
    assert "is no prediction here: expected a number" in capsys.readouterr().out


def test_a_choice_is_one_of_the_choices(capsys):
    which = ["rank 0", "rank 1"]
    assert predict("who?", "rank 2", choices=which).values == {"": None}
    assert "expected one of 'rank 0', 'rank 1'" in capsys.readouterr().out
    figure = predict("who?", "rank 0", choices=which).beside("rank 1")
    places = {float(line.get_xdata()[0]): line.get_ydata()[0] for line in figure.axes[0].lines}
    assert places == {0.0: 0, 1.0: 1}
