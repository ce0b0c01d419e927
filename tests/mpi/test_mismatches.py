"""Calls that don't match end with a report of both sides, and the next call is right.

`mismatch_program.py` tries as many others as there is time for, also with checks of memory:

    LD_PRELOAD=libc_malloc_debug.so.0 MALLOC_CHECK_=3 PYTHONMALLOC=debug \
        mpiexec -n 4 python tests/mpi/mismatch_program.py 1 500
"""

from __future__ import annotations

import json
from pathlib import Path

import mismatch_program
import pytest
from local_ranks import LocalRanks

pytestmark = pytest.mark.timeout(150)
PROGRAM = Path(mismatch_program.__file__)
SEEDS = range(1, 31)


def test_ranks_that_are_processes_survive_calls_that_do_not_match(mpiexec):
    done = mpiexec(4, PROGRAM, SEEDS.start, len(SEEDS), timeout=120)
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [one["seed"] for one in told] == list(SEEDS)
    assert not [one for one in told if one["wrong"]]


def test_ranks_inside_the_kernel_survive_calls_that_do_not_match():
    with pytest.MonkeyPatch.context() as patch, LocalRanks(4) as ranks:
        patch.syspath_prepend(str(PROGRAM.parent))
        ranks.run("from mismatch_program import play\nimport torch.distributed as dist")
        ranks.run("dist.init_process_group('mpi')")
        for seed in SEEDS:
            ranks.run(f"told = play({seed})")
            told = [namespace["told"] for namespace in ranks.user_ns]
            plan = mismatch_program.drawn(seed, 4)
            assert not list(mismatch_program.wrong(told)), f"{seed}: {plan}"
