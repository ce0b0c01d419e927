"""A question has a limit of memory: an answer that builds GPT-3 fails, and the machine goes on."""

from __future__ import annotations

import sys

import pytest
import torch
from local_ranks import LocalRanks

from utils import cluster
from utils.cluster.memory_limit import MOST_BYTES

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits addresses"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA reserves addresses"),
]
PROBE = "utils.checks.probe:probe_calls"
CALLS = {"calls": [["build", []]]}
BUILD = f"""
import torch
def build(numbers={MOST_BYTES // 4 + 10**8}):
    return len(torch.empty(numbers))
"""


@pytest.mark.quick
def test_ranks_inside_the_kernel_survive_an_answer_that_needs_too_much_memory():
    with LocalRanks(2) as ranks:
        ranks.run(BUILD)
        for reply in ranks.ask(PROBE, **CALLS):
            assert reply.kind == "MemoryError"
            assert "Compute the result without building such large tensors" in reply.error
            assert "build()" in reply.line
        ranks.run("build.__defaults__ = (3,)")
        assert [reply.value for reply in ranks.ask(PROBE, **CALLS)] == [[3], [3]]


def test_a_rank_survives_an_answer_that_needs_too_much_memory():
    with cluster.start(2) as ranks:
        ranks.view.execute(BUILD, block=True)
        assert {reply.kind for reply in ranks.ask(PROBE, **CALLS)} == {"MemoryError"}
        ranks.view.execute("build.__defaults__ = (3,)", block=True)
        assert [reply.value for reply in ranks.ask(PROBE, **CALLS)] == [[3], [3]]
