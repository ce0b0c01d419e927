"""docs/ranks-here.md says of every task whether ranks inside the kernel are enough for it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import ranks_here
import without_mpi
from places import ROOT

#: So many tasks must pass without MPI, or the page promises too much.
FEWEST = 140


@pytest.mark.quick
def test_the_page_of_ranks_inside_the_kernel_lists_every_task():
    page = ranks_here.PAGE.read_text(encoding="utf-8")
    assert page == ranks_here.with_table(page), "run python tests/labs/ranks_here.py"


@pytest.mark.quick
def test_the_page_gives_a_reason_for_each_task_that_needs_processes():
    numbers = {number for of_lab in ranks_here.tasks().values() for number in of_lab}
    assert ranks_here.NEEDS_PROCESSES.keys() <= numbers
    assert all(map(str.strip, ranks_here.NEEDS_PROCESSES.values()))
    assert len(numbers - ranks_here.NEEDS_PROCESSES.keys()) >= FEWEST


@pytest.mark.extended
@pytest.mark.parametrize("lab", ranks_here.LABS)
def test_without_mpi_the_solutions_pass_that_the_page_says_pass_and_no_rank_opens_a_socket(
    lab, tmp_path
):
    output = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, ROOT / "tests/labs/ranks_here.py", lab, "-o", output],
        env=without_mpi.environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        encoding="utf-8",
        check=False,
    )
    assert output.is_file(), done.stdout + done.stderr
    found = json.loads(output.read_text(encoding="utf-8"))
    promised = set(ranks_here.tasks()[lab]) - ranks_here.NEEDS_PROCESSES.keys()
    assert not found["mpi"]
    assert not found["sockets"]
    assert set(found["passed"]) >= promised, found["failed"]
