"""The labelled set on a backend: `LABELLED_BACKEND=gloo pytest -m often` tries another one."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from labelled import PAIRS
from labelled.judge import NAME, Trial, judged
from labelled.programs import BY_LUCK, Pair
from labelled.proof import proven, script

BACKEND = os.environ.get("LABELLED_BACKEND", "mpi")
PROVEN = [pair for pair in PAIRS if pair.proof]
PATIENCE = 10  # seconds that a wait may last
# Of each class the first one; the others on demand.
FIRST = {pair.kind: pair for pair in reversed(PAIRS)}.values()


def names(pair: Pair) -> str:
    return pair.name.replace(" ", "-")


def tried(pair: Pair, mpiexec, folder) -> Iterator[Trial]:
    """Run the wrong program and the right one; yield what was reported of each."""
    for right in (False, True):
        program = folder / str(right) / NAME
        program.parent.mkdir()
        program.write_text(pair.text(right))
        environment = {
            "LABELLED_BACKEND": BACKEND,
            "LABELLED_TIMEOUT": str(PATIENCE),
            "LABELLED_STORE": str(program.parent / "store"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if pair.kind in BY_LUCK else "OFF",
        }
        begin = time.monotonic()
        done = mpiexec(pair.ranks, program, timeout=60, check=False, env=environment)
        seconds = time.monotonic() - begin
        yield judged(pair, right, done.returncode, done.stderr, seconds)


@pytest.mark.parametrize("pair", FIRST, ids=names)
def test_a_wrong_program_is_reported_with_rank_and_line_and_its_right_twin_is_not(
    pair, mpiexec, tmp_path
):
    for trial in tried(pair, mpiexec, tmp_path):
        assert trial.is_as_labelled, trial.text or "nothing was said"


@pytest.mark.often
@pytest.mark.parametrize("pair", PAIRS, ids=names)
def test_every_program_of_the_set_is_told_apart(pair, mpiexec, tmp_path):
    """PyTorch itself warns of one program, without a line, so this test asks for any report."""
    wrong, right = tried(pair, mpiexec, tmp_path)
    assert wrong.reported != bool(pair.instead), wrong.text or "nothing was said"
    assert not right.reported, right.text


def test_a_wrong_program_without_wrong_calls_misbehaves_and_its_right_twin_does_not(
    mpiexec, tmp_path
):
    environment = {"LABELLED_BACKEND": BACKEND, "LABELLED_STORE": str(tmp_path / "store")}
    done = mpiexec(2, script(PROVEN), timeout=60, env=environment)
    assert proven(PROVEN, done.stdout) == {pair.name: True for pair in PROVEN}
