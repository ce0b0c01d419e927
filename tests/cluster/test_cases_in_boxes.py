"""The backend's own cases and random programs on ranks in boxes, as on processes.

`utils/mpi/tests/test_mpi_backend.py` plays the same cases on processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mpi_fuzz
import pytest
import test_cases_here
from mpi_fuzz import faults, jobs, program, text

from utils import cluster

pytestmark = pytest.mark.timeout(300)
#: The folder in which ranks find the package `mpi_fuzz`.
FUZZ = str(Path(mpi_fuzz.__file__).parents[1])
N = 3


class BoxRanks:
    """Ranks in boxes for the backend's cases, see `local_ranks.LocalRanks`."""

    def __init__(self, n: int):
        self.n = n

    def __enter__(self) -> BoxRanks:
        self._ranks = cluster.start(self.n, where="boxes")
        for path in (str(test_cases_here.CASES), FUZZ):
            self.run(f"import sys; sys.path.insert(0, {path!r})")
        return self

    def __exit__(self, *_: object) -> None:
        self._ranks.stop()

    def run(self, code: str) -> None:
        self._ranks.view.execute(code, block=True)

    def outcomes(self) -> list[dict[str, Any]]:
        return list(self._ranks.view.pull("outcome"))

    def meet_again(self) -> None:
        self._ranks.running().meet_again()


@pytest.fixture(scope="module")
def box_ranks(request: pytest.FixtureRequest) -> Iterator[BoxRanks]:
    with BoxRanks(request.param) as started:
        yield started


@pytest.mark.parametrize(
    ("box_ranks", "file", "name"),
    [one for one in test_cases_here.parameters() if one.values[0] == N],
    indirect=["box_ranks"],
    scope="module",
)
def test_a_call_means_the_same_in_boxes_as_on_processes(box_ranks, file, name):
    begin = f"getattr({file}, 'begin', bool)()\n"
    end = f"getattr({file}, 'end', bool)()\n"
    code = f"import run, {file}\n{begin}outcome = run.outcome({file}.case_{name})\n{end}"
    box_ranks.run(code)
    outcomes = box_ranks.outcomes()
    failed = [
        f"rank {r}:\n{o['detail']}" for r, o in enumerate(outcomes) if o["status"] == "failed"
    ]
    if failed:
        box_ranks.meet_again()
    assert not failed, "\n".join(failed)
    if all(outcome["status"] == "skipped" for outcome in outcomes):
        pytest.skip(outcomes[0]["detail"])


@pytest.mark.parametrize("box_ranks", [N], indirect=True, scope="module")
def test_random_programs_leave_on_every_rank_in_a_box_what_the_model_says(box_ranks):
    box_ranks.run("from mpi_fuzz.ranks import run")
    for seed in range(201, 213):
        drawn = program.draw(seed, N)
        box_ranks.run(f"outcome = run({text.python(drawn, jobs.TESTS)!r}, False)")
        told = [one | {"rank": rank} for rank, one in enumerate(box_ranks.outcomes())]
        wrong = [one for one in told if one["error"]]
        assert not faults.wrong(jobs.Outcome(drawn, wrong[:1] or told)), f"seed {seed}"
