"""Every mistake that a check knows can be told: its wrong value differs from the right one.

If a mistake gives the expected value for all numbers that a check draws, its text never appears,
and an answer with this mistake passes. Here each check runs on the solution, and we look at the
values that it would recognize. (If two mistakes give the same value, the text names both, see
``test_checks.py``.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from answer_tools import Lab, ranks_of, seeded, tasks_of_ranks_here
from lab_tools import verdict
from local_ranks import LocalRanks

from utils.checks.comparison import TOLERANCE, same
from utils.checks.task import Report

#: Texts of mistakes that are computed from a result: a right one gives the right value.
OF_THE_RESULT = {
    "Every gradient is N times what it should be. Check the divisor",
    "You moved by a share of N.N of the distance. Use α = ηρ, here N.N",
}


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions."""
    with LocalRanks(ranks_of(request.param)) as ranks:
        yield Lab(request.param, ranks)


@pytest.mark.parametrize(("lab", "task"), tasks_of_ranks_here(), indirect=["lab"], scope="module")
def test_each_mistake_that_a_check_knows_has_another_value_than_a_right_answer(
    lab, task, monkeypatch
):
    judge = Report.judge
    known, shown = set(), set()

    def watching(report, rank, result, expected, mistakes=(), *, tolerance=TOLERANCE, **about):
        mistakes = list(mistakes)
        for mistake in mistakes:
            if callable(mistake.gives):
                continue
            text = re.sub(r"\d+", "N", mistake.said)  # such as the number of ranks in a group
            known.add(text)
            if not same(mistake.gives, expected, tolerance):
                shown.add(text)
        return judge(report, rank, result, expected, mistakes, tolerance=tolerance, **about)

    monkeypatch.setattr(Report, "judge", watching)
    with seeded(task):
        assert verdict(lab.checks[task], lab.ranks)[0]
    assert known - shown <= OF_THE_RESULT
