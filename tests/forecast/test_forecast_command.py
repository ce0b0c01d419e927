"""`ddl-labs forecast`: the command for visitors."""

from __future__ import annotations

import re

import pytest
from places import ROOT

from utils.__main__ import main
from utils.forecast import catalog
from utils.forecast.command import EXAMPLE

pytestmark = pytest.mark.quick


def forecast(*words: object) -> int:
    return main(["forecast", *map(str, words)])


def test_a_visitor_without_a_run_gets_a_curve_the_error_and_the_cost(capsys):
    assert forecast("--ranks", 1024, "--steps", 1000) == 0
    out = capsys.readouterr().out
    ranks = re.findall(r"^ *([\d,]+) +[\d.,]+ +[\d.,]+ to [\d.,]+ +\d+%", out, re.M)
    assert ranks == ["2", "8", "32", "128", "512", "1,024"]
    assert "expected: " in out
    assert re.search(r"1,000 steps take .* hours with .* kWh and \$", out)


def test_the_catalog_is_listed(capsys):
    assert forecast("--machine", "list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == list(catalog())


def test_a_machine_of_the_users_own_is_taken_from_a_file(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    text = (ROOT / "utils" / "forecast" / "machines.toml").read_text()
    path.write_text(text.replace("[machines.nvl72]", "[machines.mine]"))
    assert forecast(EXAMPLE, "--machines", path, "--machine", "mine", "--ranks", 64) == 0
    assert "mine: 72 × GB200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--machine", "frontier"], "There is no machine 'frontier'. Choose one of: laptop"),
        (["--ranks", 5000], "has 1,024 devices, and you asked for 5,000 ranks"),
        (["--grow", "0,9"], "No collective uses the group (0, 9)"),
        (["--grow", "a"], "--grow a: name the ranks of a group, such as --grow 0,2"),
        (["nowhere.json"], "nowhere.json holds no recorded run"),
        (["--machines", "nowhere.toml"], "nowhere.toml"),
    ],
)
def test_a_question_without_an_answer_ends_with_one_sentence_and_status_2(words, message, capsys):
    assert forecast(*words) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out
    assert "Traceback" not in printed.err
