"""Predictions: typed or clicked before a run, and beside what the run gave after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

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
    assert "You predict: there: 2 bytes. Still open: here<" in line.value
    row.children[0].value = "many"
    assert values["here"] is None
    assert "“many” is not a number in bytes" in line.value
    row.children[0].value = typed
    assert values == {"here": number, "there": 2.0}
    assert "is not a number" not in line.value


PREDICT = (
    "from utils.figures.predict import predict\n"
    "guess = predict('who?', ..., choices=['rank 0', 'rank 1'])"
)
CLICK = "guess.form.box.children[1].children[1].click()"
RESULT = "guess.beside('rank 0')"
OTHER = PREDICT.replace("who?", "and who next?")


def test_a_program_that_executes_a_notebook_gets_text_and_no_buttons(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "IPP_NONINTERACTIVE"}
    book = new_notebook(cells=[new_code_cell(PREDICT), new_code_cell(RESULT)])
    NotebookClient(book, timeout=100).execute(env=environment)
    first, second = (cell.outputs for cell in book.cells)
    assert [output.text for output in first] == [f"{NOTHING_YET}\n"]
    assert [set(output.data) for output in second] == [{"text/html", "text/plain"}]


@pytest.fixture(scope="module")
def at_a_notebook() -> Iterator[Callable[[str], list[tuple[str, dict]]]]:
    """Run a cell as somebody at a notebook does; what it shows, as (kind, data)."""
    manager = KernelManager(kernel_name="python3")
    environment = {key: value for key, value in os.environ.items() if key != "IPP_NONINTERACTIVE"}
    manager.start_kernel(env=environment)
    client = manager.blocking_client()

    def run(cell: str) -> list[tuple[str, dict]]:
        messages: list[dict] = []
        client.execute_interactive(cell, timeout=100, output_hook=messages.append)
        shown = [(m["msg_type"], m["content"]) for m in messages if "data" in m["content"]]
        printed = [("stream", m["content"]) for m in messages if m["msg_type"] == "stream"]
        return [*shown, *printed]

    try:
        client.start_channels()
        client.wait_for_ready(timeout=100)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def texts(shown: list[tuple[str, dict]], kind: str) -> list[str]:
    """What was shown in this way, without the scripts, which have no text."""
    data = [content["data"]["text/plain"] for each, content in shown if each == kind]
    return [text for text in data if text]


def has_buttons(shown: list[tuple[str, dict]]) -> bool:
    return any(WIDGET in content.get("data", {}) for _, content in shown)


def test_a_prediction_that_was_made_keeps_no_dead_button_and_cannot_be_changed_later(at_a_notebook):
    asked = at_a_notebook(PREDICT)
    assert has_buttons(asked)
    assert texts(asked, "display_data") == [NOTHING_YET]
    at_a_notebook(CLICK)
    shown = at_a_notebook(RESULT)
    assert texts(shown, "update_display_data") == ["You predict: rank 1"]
    (result_of_run,) = texts(shown, "display_data")
    assert result_of_run.endswith("You predicted “rank 1”. The run showed “rank 0”.")
    again = at_a_notebook(PREDICT)
    assert not has_buttons(again)
    assert again == [("stream", {"name": "stdout", "text": "You predict: rank 1\n"})]


def test_a_student_who_skipped_the_prediction_is_asked_once_before_the_result(at_a_notebook):
    at_a_notebook(OTHER)
    asked = at_a_notebook(RESULT)
    assert has_buttons(asked)
    assert "rank 0”" not in str(asked), "the result came before the prediction"
    shown = at_a_notebook(CLICK)
    earlier, result_of_run = texts(shown, "update_display_data")
    assert earlier == "You predict: rank 1"
    assert result_of_run.endswith("You predicted “rank 1”. The run showed “rank 0”.")


def test_a_student_who_wants_no_prediction_gets_the_result_at_the_second_time(at_a_notebook):
    at_a_notebook(PREDICT.replace("who?", "and who last?"))
    assert has_buttons(at_a_notebook(RESULT))
    (result_of_run,) = texts(at_a_notebook(RESULT), "display_data")
    assert result_of_run.endswith("You made no prediction. The run showed “rank 0”.")
