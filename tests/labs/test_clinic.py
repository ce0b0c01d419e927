"""The thirty patients of lab 18: each one is sick, and its repairs help.

They run on ranks that are threads of this process, as the answers of the other labs do.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from local_ranks import LocalRanks

from utils.checks.task import Report
from utils.labs.lab18 import ward_checks
from utils.labs.lab18.ward import cases, program

CASES = cases.CASES
NAMES = sorted(CASES)
each_patient = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def ranks() -> Iterator[LocalRanks]:
    with LocalRanks(4) as ranks:
        ranks.run("import torch.distributed as dist\ndist.init_process_group('mpi')")
        yield ranks


def problems(ranks: LocalRanks, name: str, repair: dict, seed: int = 4) -> str:
    """What the check says of a repair; "" if it passes."""
    report = Report(seed)
    ranks.run(f"repair_1 = {repair!r}")
    ward_checks.judge_case(ranks, report, CASES[name], "repair_1")
    return "\n".join(problem.text for problem in report.problems)


@each_patient
def test_a_sick_program_does_not_pass_and_a_repaired_one_does(ranks, name):
    first = program.text_of(name).splitlines()[0]
    sick = problems(ranks, name, {1: first})
    print(name, "|", sick)
    assert sick, "nothing is wrong with the program"
    for repair in CASES[name].repairs:
        assert not problems(ranks, name, dict(repair))
