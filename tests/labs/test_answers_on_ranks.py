"""Real ranks say what ranks in one process say: of a wrong answer of each task, and of deadlocks.

Right answers are tried here only where they need real ranks. Grading uses processes without MPI, on
which the solution of each task has to pass as well.

All answers of ``tests/labs/answers`` are tried in ``test_answers.py``, without processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from answer_tools import (
    LABS,
    Lab,
    ranks_of,
    right_answers,
    solutions_of,
    wrong_answers,
)
from lab_tools import verdict

from utils import cluster

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions; one at a time, as tests of a lab come together."""
    # 3 s: a deadlock of a wrong answer is reported soon.
    with cluster.start(ranks_of(request.param), timeout=3) as ranks:
        yield Lab(request.param, ranks)


def rights() -> Iterator:
    """What can't be tried elsewhere."""
    for name, tables in LABS.items():
        for task, what, code in right_answers(tables, solutions_of(name)):
            if task in getattr(tables, "REAL", ()) or what in getattr(tables, "ONLY_ON_RANKS", ()):
                yield pytest.param(name, task, code, id=f"{task}-{what.replace(' ', '-')}")


def cases() -> Iterator:
    """Of each task the first wrong answer, and those that a lab names in ``ON_RANKS``."""
    for name, tables in LABS.items():
        solutions, seen = solutions_of(name), set()
        for task, what, code, words in wrong_answers(tables, solutions):
            named = {*getattr(tables, "ON_RANKS", ()), *getattr(tables, "ONLY_ON_RANKS", ())}
            if task not in seen or what in named:
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


@pytest.mark.parametrize(("lab", "task", "code"), list(rights()), indirect=["lab"], scope="module")
def test_on_real_ranks_another_right_answer_passes(lab, task, code):
    lab.run(code)
    passed, printed = verdict(lab.checks[task], lab.ranks)
    lab.solve(task)
    assert passed, printed


GRADED = [name for name, tables in LABS.items() if tables.CELLS]


@pytest.mark.parametrize("name", GRADED)
def test_as_in_grading_the_solution_passes_and_a_wrong_answer_is_told_its_mistake(name):
    """A probe that leaves calls out would fail right answers, and call wrong ones a forgery."""
    tables, solutions = LABS[name], solutions_of(name)
    first: dict[str, tuple[str, str]] = {}
    for task, what, code, words in wrong_answers(tables, solutions):
        if what not in getattr(tables, "ONLY_ON_RANKS", ()):
            first.setdefault(task, (code, words))
    with cluster.start(ranks_of(name), timeout=3, where="boxes") as ranks:
        lab = Lab(name, ranks)
        for task in tables.CELLS:
            passed, printed = verdict(lab.checks[task], ranks)
            assert passed, printed
            code, words = first[task]
            passed, printed = lab.try_out(task, code, again=False)
            assert not passed, printed
            assert words in printed, printed


def test_checks_that_use_a_network_leave_it_as_it_was():
    with cluster.start(4, timeout=30) as ranks:
        lab = Lab("lab04", ranks)
        ranks.network(latency=0.001, bandwidth=5e8)
        for task in ("4.4", "4.3"):
            passed, printed = verdict(lab.checks[task], ranks)
            assert passed, printed
        ranks.view.execute("from torch_mpi.network import link; kept = str(link.network)")
        assert set(ranks.view["kept"]) == {"4 Gbit/s, 1 ms"}
