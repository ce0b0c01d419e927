"""The notebook to start with: its one check accepts the right answer and explains wrong ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab_tools import LocalRanks, answers, checks_of, run_cell, verdict

from utils import cluster
from utils.checks import lab00

CHECK = checks_of(lab00)["0.1"]
WRONG = [
    ("forgets the last rank", "lambda rank, world_size: rank + 1", "the last rank's"),
    ("hard-codes three ranks", "lambda rank, world_size: (rank + 1) % 3", "expected 0, got 1"),
    (
        "goes to the left",
        "lambda rank, world_size: (rank - 1) % world_size",
        "the neighbour to the left",
    ),
    (
        "prints instead of returning",
        "lambda rank, world_size: None",
        "returned None: return",
    ),
]


@pytest.fixture
def local_ranks() -> LocalRanks:
    return LocalRanks(2)


@pytest.fixture
def ranks() -> Iterator[cluster.Ranks]:
    with cluster.start(2, timeout=2) as up:
        yield up


def test_the_solution_passes_its_check_on_real_ranks(ranks):
    run_cell(ranks, answers("00_start_here.ipynb")["neighbour-answer"])
    passed, printed = verdict(CHECK, ranks)
    assert passed, printed
    assert printed == "✓ Task 0.1 · the neighbour on a ring · 0 points\n"


@pytest.mark.parametrize(("mistake", "code", "words"), WRONG, ids=[w[0] for w in WRONG])
def test_a_wrong_answer_is_told_what_it_got(local_ranks, mistake, code, words):
    run_cell(local_ranks, f"right_neighbour = {code}")
    passed, printed = verdict(CHECK, local_ranks)
    assert not passed
    assert words in printed, printed
    assert "  - ranks 0 and 1: right_neighbour(" in printed


def test_the_untouched_stub_is_named(local_ranks):
    run_cell(local_ranks, answers("00_start_here.ipynb", "labs")["neighbour-answer"])
    passed, printed = verdict(CHECK, local_ranks)
    assert not passed
    assert "Task 0.1" in printed
