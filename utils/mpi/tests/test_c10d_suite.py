"""What a user of the mpi backend can rely on, by PyTorch's own tests of its backends.

A selection of those that pass; `python tests/c10d_suite.py -n 2` runs all of them. Importing
the suite takes each rank several seconds, so `make test` runs only one of the three jobs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
from c10d_suite import Outcome, run
from mpi_jobs import find_mpiexec

ON_TWO_RANKS = {
    "ranks_know_who_they_are": "test_get_rank test_get_backend test_Backend_enum_class",
    "send_and_recv": "test_send_recv test_send_recv_with_tag",
    "isend_and_irecv": "test_isend test_irecv",
    "a_message_from_any_rank": "test_send_recv_any_source",
    "several_messages_in_one_call": "test_batch_isend_irecv_gloo test_batch_isend_irecv_gloo_tags",
    "broadcast": "test_broadcast test_broadcast_full_group",
    "reduce": "test_reduce_sum test_reduce_product test_reduce_min test_reduce_max",
    "all_reduce": (
        "test_all_reduce_sum test_all_reduce_product test_all_reduce_min test_all_reduce_max"
    ),
    "all_reduce_of_complex_numbers": "test_all_reduce_sum_complex",
    "all_reduce_in_the_background": "test_all_reduce_sum_async",
    "all_reduce_of_several_tensors": (
        "test_all_reduce_coalesced_sum test_all_reduce_coalesced_full_group_max"
    ),
    "scatter": "test_scatter test_scatter_complex test_scatter_full_group",
    "gather": "test_gather test_gather_full_group",
    "all_gather": "test_all_gather test_all_gather_complex test_all_gather_full_group",
    "all_gather_of_several_tensors": (
        "test_all_gather_coalesced_simple test_all_gather_coalesced_with_empty"
    ),
    "all_to_all": "test_all_to_all test_all_to_all_complex",
    "all_to_all_single": (
        "test_all_to_all_single_equal_split test_all_to_all_single_unequal_split"
        " test_all_to_all_single_unequal_split_full_group"
    ),
    "barrier": "test_barrier test_barrier_full_group",
    "collectives_of_python_objects": (
        "test_all_gather_object_default_pg test_all_gather_object_subgroup test_scatter_object_list"
    ),
    "futures": "test_get_future",
    "a_profile_with_messages_and_shapes": (
        "test_send_recv_torch_profiler test_isend_torch_profiler"
        " test_send_recv_any_source_torch_profiler"
    ),
    "DDP_trains_as_one_process_does": (
        "test_DistributedDataParallelCPU test_DistributedDataParallelCPU_grad_is_view"
    ),
    "DDP_without_synchronization": "test_accumulate_gradients_no_sync",
    "DDP_with_buffers_and_hooks": (
        "test_ddp_broadcast_buffer test_ddp_buffer_hook_allreduce test_ddp_hook_parity_allreduce"
    ),
    "DDP_with_uneven_inputs": "test_ddp_grad_div_uneven_inputs test_ddp_uneven_input_exception",
}
# A separate job on two ranks, because it loads PyTorch's compiler.
COMPILED = {"DDP_under_torch_compile": "test_ddp_compile_static_graph"}
ON_THREE_RANKS = {
    "groups_of_some_ranks": (
        "test_broadcast_group test_all_reduce_group_sum test_reduce_group_max test_barrier_group"
        " test_all_gather_group test_scatter_group test_gather_group test_all_to_all_group"
    ),
}
JOBS = {"basics": (2, ON_TWO_RANKS), "compiled": (2, COMPILED), "groups": (3, ON_THREE_RANKS)}
#: groups: mpi_cases/groups.py runs such groups on 2 to 4 ranks in any case.
EXTENDED = ("compiled", "groups")

pytestmark = pytest.mark.timeout(1500)  # the first test waits for the job with all of them


@functools.cache
def outcomes(job: str) -> dict[str, Outcome]:
    """Return the outcome of each test of a job. The ranks of a job start once."""
    n, features = JOBS[job]
    return run(" ".join(features.values()).split(), n)


def parameters() -> Iterator:
    for job, (n, features) in JOBS.items():
        marks = [pytest.mark.extended] if job in EXTENDED else []
        for title, names in features.items():
            yield pytest.param(job, names, id=f"{title}-{n}", marks=marks)


@pytest.mark.parametrize(("job", "names"), list(parameters()))
def test_a_user_can_rely_on(job, names):
    if find_mpiexec() is None:
        pytest.skip("no mpiexec: install the extra `mpi`, or a system MPI")
    bad = [o for name in names.split() if (o := outcomes(job)[name]).status != "pass"]
    assert not bad, "\n".join(f"{o.test}: {o.status}: {o.reason}\n{o.detail}" for o in bad)
