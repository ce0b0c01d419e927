"""Random programs leave on ranks inside the kernel what the exact model says, as on processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ranks import LocalRanks
from mpi_fuzz import faults, jobs, program, text

#: Programs of each number of ranks. Not those of `tests/mpi/test_fuzz.py`: each room tries its own.
SEEDS = range(101, 113)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalRanks]:
    with LocalRanks(request.param) as started:
        started.run("from mpi_fuzz.ranks import run")
        yield started


def played(ranks: LocalRanks, drawn: dict) -> jobs.Outcome:
    """What came of a program on these ranks."""
    for namespace in ranks.user_ns:
        namespace["code"] = text.python(drawn, jobs.TESTS)
    ranks.run(f"outcome = run(code, {'fault' in drawn})")
    told = [namespace["outcome"] for namespace in ranks.user_ns]
    if any(one["error"] for one in told):
        ranks.meet_again()
    if "fault" not in drawn:
        # As in a job: the first rank that went wrong, and not one that was stopped by it.
        wrong = [one | {"rank": rank} for rank, one in enumerate(told) if one["error"]]
        wrong.sort(key=lambda one: one["error"] == "CommunicationStopped")
        told = wrong[:1] or told
    return jobs.Outcome(drawn, told)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4], indirect=True, scope="module")
def test_random_programs_leave_on_every_rank_what_the_model_says(ranks):
    for seed in SEEDS:
        assert not faults.wrong(played(ranks, program.draw(seed, ranks.n))), f"seed {seed}"


@pytest.mark.parametrize("ranks", [3], indirect=True, scope="module")
def test_every_planted_fault_is_told_on_every_rank_and_the_next_program_runs(ranks):
    for seed, kind in enumerate(faults.KINDS):
        assert not faults.wrong(played(ranks, faults.draw(seed, 3, kind))), kind
        assert not faults.wrong(played(ranks, program.draw(seed, 3, strands=1))), f"after {kind}"
