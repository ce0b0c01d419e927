"""Modules that ranks in boxes get from the kernel: the rules of a check are none of their files."""

from __future__ import annotations

import json
from pathlib import Path

import call_tools
import pytest

from utils import cluster
from utils.jobs.box_plan import GIVEN

pytestmark = pytest.mark.timeout(300)


def test_a_rank_gets_a_module_of_the_kernels_only_with_the_question_that_needs_it(
    tmp_path, monkeypatch
):
    (tmp_path / "rule.py").write_text("ANSWER = 42\n", encoding="utf-8")
    needed = {"call_tools": {"utils.rule_of_a_later_task": str(tmp_path / "rule.py")}}
    monkeypatch.setenv(GIVEN, json.dumps(needed))
    ask = "try:\n    import utils.rule_of_a_later_task as m\n    said = m.ANSWER\n"
    ask += "except ModuleNotFoundError:\n    said = 'not there'\n"
    with cluster.start(1, where="boxes", env={"PYTHONPATH": str(Path(__file__).parent)}) as ranks:
        ranks.view.execute(ask, block=True)
        assert ranks.view.pull("said") == ["not there"]
        ranks.ask(call_tools.hide)
        ranks.view.execute(ask, block=True)
        assert ranks.view.pull("said") == [42]
