"""Real ranks say what ranks in one process say: of a wrong answer of each task, and of deadlocks.

All answers of ``tests/answers`` are tried in ``test_answers.py``, without processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from answer_tools import LABS, Lab, ranks_of, wrong_answers
from lab_tools import answers

from utils import cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions; one at a time, as tests of a lab come together."""
    # 3 s: a deadlock of a wrong answer is reported soon.
    with cluster.start(ranks_of(request.param), timeout=3) as ranks:
        yield Lab(request.param, ranks)


def cases() -> Iterator:
    """Of each task the first wrong answer, and those that a lab names in ``ON_RANKS``."""
    for name, tables in LABS.items():
        cells = answers(tables.NOTEBOOK)
        solutions = {task: cells[cell] for task, cell in tables.CELLS.items()}
        seen = set()
        for task, what, code, words in wrong_answers(tables, solutions):
            if task not in seen or what in getattr(tables, "ON_RANKS", ()):
                seen.add(task)
                case = f"{task}-{what.replace(' ', '-')}"
                yield pytest.param(name, task, code, words, id=case)


@pytest.mark.parametrize(
    ("lab", "task", "code", "words"), list(cases()), indirect=["lab"], scope="module"
)
def test_on_real_ranks_a_wrong_answer_is_told_its_mistake_and_the_next_passes(
    lab, task, code, words
):
    passed, printed = lab.try_out(task, code)
    assert not passed, printed
    assert words in printed
