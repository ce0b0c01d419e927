"""The backend's own cases on ranks inside the kernel: a call means the same on both kinds of ranks.

`utils/mpi/tests/test_mpi_backend.py` plays the same cases on processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ranks import LocalRanks
from places import ROOT

CASES = ROOT / "utils" / "mpi" / "tests" / "mpi_cases"
FILES = ("collectives", "groups", "point_to_point", "pytorch", "slow_network")
#: Cases about what ranks inside the kernel don't have.
MPIS_OWN = "asks the MPI library"
NO_TIMEOUT = "ranks inside the kernel report a wait that never ends at once, without a timeout"
PROCESSES = {
    "rank_and_size_are_those_of_mpi": MPIS_OWN,
    "an_mpi_library_with_few_tags_takes_every_message": MPIS_OWN,
    "groups_that_ranks_destroy_at_different_times_leave_no_communicator_behind": MPIS_OWN,
    "a_group_destroyed_under_a_receive_that_never_comes_does_not_wait": MPIS_OWN,
    "a_small_isend_may_have_to_wait_for_its_receive_on_request": MPIS_OWN,
    "two_small_sends_first_are_a_deadlock_when_every_send_waits": MPIS_OWN,
    "the_timeout_of_the_group_is_the_one_that_was_asked_for": NO_TIMEOUT,
    "a_rank_missing_from_a_collective_is_named_and_the_group_works_afterwards": NO_TIMEOUT,
    "the_profiler_names_the_operations": "PyTorch profiles one thread of a process at a time",
}


def names_of(file: str) -> list[str]:
    lines = (CASES / f"{file}.py").read_text(encoding="utf-8").splitlines()
    return [line[9 : line.index("(")] for line in lines if line.startswith("def case_")]


def parameters() -> Iterator:
    for n in (2, 3):
        for file in FILES:
            for name in names_of(file):
                if name not in PROCESSES:
                    yield pytest.param(n, file, name, id=f"{file}-{n}-{name}")


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> Iterator[LocalRanks]:
    with pytest.MonkeyPatch.context() as patch, LocalRanks(request.param) as started:
        patch.syspath_prepend(str(CASES))
        yield started


@pytest.mark.parametrize(
    ("ranks", "file", "name"), list(parameters()), indirect=["ranks"], scope="module"
)
def test_a_call_means_the_same_inside_the_kernel_as_on_processes(ranks, file, name):
    begin = f"getattr({file}, 'begin', bool)()\n"
    end = f"getattr({file}, 'end', bool)()\n"
    ranks.run(f"import run, {file}\n{begin}outcome = run.outcome({file}.case_{name})\n{end}")
    outcomes = [namespace["outcome"] for namespace in ranks.user_ns]
    failed = [
        f"rank {r}:\n{o['detail']}" for r, o in enumerate(outcomes) if o["status"] == "failed"
    ]
    if failed:
        ranks.meet_again()
    assert not failed, "\n".join(failed)
    if all(outcome["status"] == "skipped" for outcome in outcomes):
        pytest.skip(outcomes[0]["detail"])


def test_each_case_that_needs_processes_is_one_of_the_cases():
    assert PROCESSES.keys() <= {name for file in FILES for name in names_of(file)}
