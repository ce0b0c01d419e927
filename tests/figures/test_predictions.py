"""Predictions: typed or clicked before a run, and beside what the run gave after it."""

from __future__ import annotations

import os

import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from utils.figures import alt
from utils.figures.predict import predict
from utils.figures.prediction_form import Form
from utils.figures.prediction_result import Result
from utils.figures.prediction_words import NOTHING_YET

WIDGET = "application/vnd.jupyter.widget-view+json"


def result(guess, measured, unit="", choices=(), source="the run") -> Result:
    """What `beside` shows of one prediction."""
    named = isinstance(measured, dict)
    guesses = guess if named else {"": guess}
    return Result("what?", guesses, measured if named else {"": measured}, unit, choices, source)


def test_a_prediction_that_was_not_made_stops_nothing(capsys):
    guess = predict("how long?", ..., unit="s")
    assert capsys.readouterr().out.strip() == NOTHING_YET
    guess.beside(3)
    assert capsys.readouterr().out == "how long?\nYou made no prediction. The run gave 3 s.\n"


def test_one_line_says_what_you_predicted_and_what_the_run_gave(capsys):
    guess = predict("how fast?", {"2 ranks": 1.9, "4 ranks": ...}, unit="×")
    assert capsys.readouterr().out == "You predict: 2 ranks: 1.9 ×\n"
    guess.beside({"2 ranks": 1.3, "4 ranks": 1.2})
    assert capsys.readouterr().out.splitlines() == [
        "how fast?",
        "2 ranks: you predicted 1.9 ×, the run gave 1.3 ×.",
        "4 ranks: you made no prediction, the run gave 1.2 ×.",
    ]
    with pytest.raises(ValueError, match="8 ranks"):
        guess.beside({"8 ranks": 1.2})
    assert result(1.9, 1.4, "×").sentences() == ["You predicted 1.9 ×. The run gave 1.4 ×."]
    model = result(1.9, 1.4, "×", source="the model").sentences()
    assert model == ["You predicted 1.9 ×. The model gave 1.4 ×."]


def test_several_numbers_get_a_picture_whose_words_are_the_same():
    of_two = result({"a": 1, "b": 2}, {"a": 3, "b": 2})
    assert alt.describe(of_two.picture()) == (
        "what? a: you predicted 1, the run gave 3. b: you predicted 2, the run gave 2."
    )


@pytest.mark.parametrize("guess", [0, 0.8, 100])
def test_no_prediction_is_cut_by_the_axis(guess):
    axes = result({"a": guess, "b": 0.7}, {"a": 0.75, "b": 0.6}).picture().axes[0]
    (left, right), places = axes.get_xlim(), [float(line.get_xdata()[0]) for line in axes.lines]
    assert left < min(places)
    assert right > 1.02 * max(places)


@pytest.mark.parametrize("bad", ["3 s", True, float("nan"), None])
def test_what_is_no_prediction_is_said(bad, capsys):
    assert predict("how long?", bad, unit="s").values == {"": None}
    assert "is not a prediction for this question. Give a number" in capsys.readouterr().out


def test_a_choice_is_one_of_the_choices(capsys):
    which = ["rank 0", "rank 1"]
    assert predict("who?", "rank 2", choices=which).values == {"": None}
    assert "Give one of 'rank 0', 'rank 1'" in capsys.readouterr().out
    with pytest.raises(ValueError, match="'rank 2' is not among the choices"):
        predict("who?", "rank 0", choices=which).beside("rank 2")


def test_choices_have_the_marks_of_you_and_of_the_run_in_words_and_on_the_page():
    differ = result("a < b", "a > b", choices=["a < b", "a > b", "neither"])
    assert differ.words() == (
        "what?\n  a < b  ◇ you\n  a > b  ● the run\n  neither\n"
        "You predicted “a < b”. The run showed “a > b”."
    )
    page = differ.page()
    assert "a &lt; b <b>◇ you</b>" in page
    assert "a &gt; b <b>● the run</b>" in page
    assert "color:" not in page, "a color of one theme can't be read in the other"
    same = result("it waits", "it waits", choices=["it waits", "it goes on"])
    assert "it waits  ◇ you  ● the run\n" in same.words()
    assert same.sentences() == ["You predicted “it waits”. The run showed the same."]


def test_a_click_is_a_prediction_that_can_be_changed():
    values = {"": None}
    form = Form("who?", values, "", ["rank 0", "rank 1"], [""])
    _, row, line = form.box.children
    assert line.value == ""
    for button in row.children:
        button.click()
        assert values == {"": button.description}
        assert f"You predict: {button.description}<" in line.value
    assert [button.icon for button in row.children] == ["", "check"]


@pytest.mark.parametrize(
    ("typed", "number"),
    [("1.9", 1.9), ("1,9", 1.9), ("1,000,000 bytes", 1e6), ("2e3", 2e3), ("", None)],
)
def test_a_number_is_typed_as_people_write_it(typed, number):
    values = {"here": None, "there": 2.0}
    form = Form("how many?", values, "bytes", [], ["here"])
    _, row, line = form.box.children
    row.children[0].value = "many"
    assert values["here"] is None
    assert "“many” is not a number" in line.value
    row.children[0].value = typed
    assert values == {"here": number, "there": 2.0}
    assert "is not a number" not in line.value


PREDICTED = [
    "from utils.figures.predict import predict\n"
    "guess = predict('who?', ..., choices=['rank 0', 'rank 1'])",
    "guess.form.box.children[1].children[1].click()",
    "guess.beside('rank 0')",
]


def test_a_program_that_executes_a_notebook_gets_text_and_no_buttons(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "IPP_NONINTERACTIVE"}
    book = new_notebook(cells=[new_code_cell(PREDICTED[0]), new_code_cell(PREDICTED[2])])
    NotebookClient(book, timeout=100).execute(env=environment)
    first, second = (cell.outputs for cell in book.cells)
    assert [output.text for output in first] == [f"{NOTHING_YET}\n"]
    assert [set(output.data) for output in second] == [{"text/html", "text/plain"}]


def test_whoever_opens_a_notebook_can_click_and_keeps_no_dead_button_afterwards(monkeypatch):
    monkeypatch.delenv("IPP_NONINTERACTIVE", raising=False)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.blocking_client()
    shown = []
    try:
        client.start_channels()
        client.wait_for_ready(timeout=100)
        for cell in PREDICTED:
            client.execute_interactive(cell, timeout=100, output_hook=shown.append)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    views = [m for m in shown if WIDGET in m["content"].get("data", {})]
    assert [view["content"]["data"]["text/plain"] for view in views] == [NOTHING_YET]
    (update,) = (m["content"] for m in shown if m["msg_type"] == "update_display_data")
    assert update["data"] == {"text/plain": "You predict: rank 1"}
    assert update["transient"] == views[0]["content"]["transient"]
    *_, last = (m["content"]["data"] for m in shown if m["msg_type"] == "display_data")
    said = last["text/plain"]
    assert said.endswith("You predicted “rank 1”. The run showed “rank 0”.")
