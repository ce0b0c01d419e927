"""Ranks that are threads do what processes do: else what is tried on them would prove nothing."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from answer_tools import left_behind
from ipyparallel.error import RemoteError
from local_ranks import LocalRanks
from torch.distributed import distributed_c10d

import utils
from utils import cluster

JOIN = """
import time, torch, torch.distributed as dist
from unittest import mock
dist.init_process_group("mpi")
rank, p = dist.get_rank(), dist.get_world_size()
mine = torch.arange(3.0) + rank
"""


@pytest.fixture
def local_ranks() -> Iterator[LocalRanks]:
    with LocalRanks(3) as up:
        up.run(JOIN)
        yield up


def probe(user_ns: dict, *, rank: int, code: str) -> object:
    """The value of an expression on this rank."""
    return eval(code, user_ns)


def values(ranks: LocalRanks, expression: str) -> list:
    return [reply.value for reply in ranks.ask(f"{__name__}:probe", code=expression)]


@pytest.mark.parametrize(
    ("code", "expression", "expected"),
    [
        ("dist.all_reduce(mine)", "mine", [[3, 6, 9]] * 3),
        ("dist.all_reduce(mine, dist.ReduceOp.MAX)", "mine", [[2, 3, 4]] * 3),
        ("dist.broadcast(mine, 1)", "mine", [[1, 2, 3]] * 3),
        ("dist.reduce(mine, 2)", "mine", [[0, 1, 2], [1, 2, 3], [3, 6, 9]]),
        ("all = [torch.empty(3) for _ in range(p)]; dist.all_gather(all, mine)",
         "[one[0].item() for one in all]", [[0, 1, 2]] * 3),
        ("got = torch.empty(1); dist.reduce_scatter_tensor(got, mine)", "got", [[3], [6], [9]]),
        ("got = torch.empty(3); dist.all_to_all_single(got, mine)", "got",
         [[0, 1, 2], [1, 2, 3], [2, 3, 4]]),
        ("got = torch.empty(1); "
         "dist.scatter(got, list(mine.split(1)) if rank == 1 else None, src=1)", "got",
         [[1], [2], [3]]),
        ("got = [torch.empty(3) for _ in range(p)] if rank == 0 else None; "
         "dist.gather(mine, got)", "[one[0].item() for one in got or []]", [[0, 1, 2], [], []]),
        ("objects = [None] * p; dist.all_gather_object(objects, {'rank': rank})",
         "[one['rank'] for one in objects]", [[0, 1, 2]] * 3),
    ],
)  # fmt: skip
def test_collectives_give_what_their_definition_says(local_ranks, code, expression, expected):
    local_ranks.run(code)
    assert values(local_ranks, expression) == expected


def test_a_message_of_any_rank_is_taken_and_its_sender_known(local_ranks):
    local_ranks.run("sender = dist.recv(mine) if rank == 0 else rank == 2 and dist.send(mine, 0)")
    assert values(local_ranks, "(sender or 0, mine[0])")[0] == [2, 2.0]


def test_messages_that_come_in_another_order_than_asked_for_are_told_apart(local_ranks):
    local_ranks.run("""
got = [torch.empty(3) for _ in range(p)]
wanted = [dist.irecv(got[q], q) for q in reversed(range(p)) if q != rank]
sent = [dist.isend(mine, q) for q in range(p) if q != rank]
for request in wanted + sent:
    request.wait()
""")
    assert values(local_ranks, "[got[q][0] for q in range(p) if q != rank]") == [
        [1, 2],
        [0, 2],
        [0, 1],
    ]


def test_a_short_message_is_sent_before_anybody_receives_it_and_a_long_one_is_not(local_ranks):
    swap = """
other = (rank + 1) % p
dist.send(torch.ones({n}), other)
dist.recv(torch.empty({n}), (rank - 1) % p)
"""
    local_ranks.run(swap.format(n=8))
    with pytest.raises(RemoteError, match="all send first, and a large message waits"):
        local_ranks.run(swap.format(n=10_000))
    local_ranks.run(swap.format(n=8))


def test_calls_that_do_not_belong_together_are_an_error_on_both_sides(local_ranks):
    with pytest.raises(RemoteError, match="CommunicationMismatch: rank 0 calls broadcast"):
        local_ranks.run("dist.broadcast(mine, 0) if rank == 0 else dist.all_reduce(mine)")
    local_ranks.run("dist.all_reduce(mine)")


def test_who_waits_for_a_rank_that_failed_is_told_of_it(local_ranks):
    replies = local_ranks.ask(f"{__name__}:fail_on_rank_1")
    assert replies[1].error == "ZeroDivisionError: division by zero"
    assert "rank 1 raised ZeroDivisionError" in replies[0].error
    local_ranks.run("dist.barrier()")


def fail_on_rank_1(user_ns: dict, *, rank: int) -> None:
    """A collective that one rank never comes to."""
    if rank == 1:
        raise ZeroDivisionError("division by zero")
    dist.barrier()


def given(user_ns: dict, *, rank: int, **arguments: int) -> dict:
    """What a question tells this rank."""
    return arguments


def test_a_rank_is_told_its_own_arguments_and_no_other_ones(local_ranks):
    replies = local_ranks.ask(f"{__name__}:given", common=1, each=[{"own": r} for r in range(3)])
    assert [reply.value for reply in replies] == [{"common": 1, "own": r} for r in range(3)]
    with pytest.raises(ValueError, match="each must be a list of 3 dicts"):
        local_ranks.ask(f"{__name__}:given", each=[{}])
    with pytest.raises(ValueError, match="own is given to all ranks and in each"):
        local_ranks.ask(f"{__name__}:given", own=1, each=[{"own": 2}] * 3)


@pytest.mark.parametrize("call", ["isend(mine, group_dst=3)", "irecv(mine, group_src=3)"])
def test_a_place_that_the_group_does_not_have_is_refused_as_by_the_backend(local_ranks, call):
    with pytest.raises(RemoteError, match=r"ValueError: .*the group has ranks 0 to 2"):
        local_ranks.run(f"dist.{call}")
    local_ranks.run("dist.barrier()")


@pytest.mark.parametrize("tag", ["-1", "2**31", "None", "1.5"])
def test_a_tag_that_mpi_does_not_have_is_refused_as_by_the_backend(local_ranks, tag):
    for call in (f"isend(mine, group_dst=1, tag={tag})", f"irecv(mine, group_src=1, tag={tag})"):
        with pytest.raises(RemoteError, match=r"ValueError: .*choose a tag from 0 to 2147483647"):
            local_ranks.run(f"dist.{call}")
    local_ranks.run("dist.barrier()")


def test_random_numbers_clocks_and_patches_belong_to_each_rank(local_ranks):
    local_ranks.run("""
torch.manual_seed(rank)
before = torch.rand(1).item()
with mock.patch.object(time, "time", lambda: rank):
    dist.barrier()
    seen = time.time()
    dist.barrier()
torch.manual_seed(rank)
dist.barrier()
again = torch.rand(1).item()
""")
    assert values(local_ranks, "seen") == [0, 1, 2]
    assert values(local_ranks, "before == again") == [True] * 3


def test_a_patch_of_a_module_that_a_cell_has_imported_belongs_to_each_rank(
    local_ranks, monkeypatch
):
    monkeypatch.delitem(sys.modules, "utils.data", raising=False)
    monkeypatch.delattr(utils, "data", raising=False)
    with LocalRanks(2) as up:
        up.run(JOIN + "from utils import data\nusual = data.fashion_mnist")
        up.run("""
with mock.patch.object(data, "fashion_mnist", lambda: rank):
    dist.barrier()
    seen = data.fashion_mnist()
    dist.barrier()
""")
        assert values(up, "seen") == [0, 1]
        assert values(up, "data.fashion_mnist is usual") == [True, True]


def test_ddp_sends_a_bucket_while_backward_computes_the_next_one(local_ranks):
    local_ranks.run("""
from torch_mpi.network import Network, link
from torch_mpi.record import log
if rank == 0:
    link.set(Network(bandwidth=1e4))
model = torch.nn.Sequential(*(torch.nn.Linear(50, 50, bias=False) for _ in range(3)))
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.005)
for _ in range(2):
    mark = log.mark()
    ddp(torch.ones(1, 50)).sum().backward()
    over = time.perf_counter()
reduced = [call for call in log.since(mark) if call.op == "all_reduce"]
last = reduced[-1]
link.set(None)
""")
    # One all_reduce takes 1.3 s, so the last one has begun while the first one moved.
    assert values(local_ranks, "len(reduced)") == [3, 3, 3]
    assert values(local_ranks, "last.start < reduced[0].end") == [True] * 3
    assert values(local_ranks, "reduced[0].end + 2 < last.end <= over") == [True] * 3


def test_a_profile_of_one_rank_names_its_communication_and_prints_nothing_else(local_ranks, capfd):
    local_ranks.run("""
from contextlib import nullcontext
from torch.profiler import profile
profiler = profile() if rank == 0 else None
with profiler or nullcontext():
    dist.barrier()
    dist.all_reduce(mine)
names = [event.key for event in profiler.key_averages()] if rank == 0 else []
""")
    (names, *_) = values(local_ranks, "[name for name in names if name.startswith('mpi:')]")
    assert sorted(names) == ["mpi:all_reduce", "mpi:barrier"]
    assert capfd.readouterr().err == ""


def test_messages_of_several_ranks_arrive_one_after_the_other(local_ranks):
    local_ranks.run("""
from torch_mpi.network import Network, link
if rank == 0:
    link.set(Network(bandwidth=8e4))
long = torch.ones(20_000)  # one second
dist.barrier()
start = time.perf_counter()
if rank == 0:
    got = [torch.empty_like(long) for _ in range(2)]
    for request in [dist.irecv(part, q) for q, part in enumerate(got, 1)]:
        request.wait()
    for request in [dist.isend(long, q) for q in (1, 2)]:
        request.wait()
else:
    dist.send(long, 0)
    dist.recv(long, 0)
spent = time.perf_counter() - start
dist.barrier()
link.set(None)
""")
    assert [round(spent, 1) for spent in values(local_ranks, "spent")] == [4.0, 3.0, 4.0]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system can't fork")
def test_a_process_that_a_rank_has_forked_can_end_and_the_rank_cannot_end_all(local_ranks):
    local_ranks.run("""
import os
if (child := os.fork()) == 0:
    os._exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
""")
    assert values(local_ranks, "status") == [3, 3, 3]
    with pytest.raises(RemoteError, match="would end this kernel"):
        local_ranks.run("os._exit(3)")


def test_afterwards_the_process_is_as_before():
    def present() -> tuple:
        # PyTorch 2.14 and later have no such class.
        group = getattr(distributed_c10d, "ProcessGroupMPI", None)
        return distributed_c10d._world, group, time.time

    before = present()
    with LocalRanks(2) as up:
        up.run(JOIN)
    assert present() == before
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("answer", "leaves"),
    [
        ("def answer(): return 2", False),
        ("helper = None", True),
        ("del helper", True),
        ("def answer(): raise ValueError", True),
        ("def answer(): dist.barrier() if rank else None", True),
        ("def answer(): dist.send(torch.ones(1), 1) if rank == 0 else None", True),
    ],
)
def test_what_an_answer_leaves_behind_is_noticed_so_that_it_cannot_spoil_the_next(
    local_ranks, answer, leaves
):
    solution = "def answer(): return 1"
    local_ranks.run(f"{solution}\ndef helper(): return 3")
    before = local_ranks.traces()
    local_ranks.run(answer)
    values(local_ranks, "answer()")
    answered = local_ranks.traces()
    local_ranks.run(solution)
    assert left_behind(before, answered, local_ranks.traces()) is leaves


def test_the_collectives_of_dtensor_give_what_their_definition_says(local_ranks):
    local_ranks.run("""
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
group = (init_device_mesh("cpu", (3,)), 0)
gathered = functional.all_gather_tensor(mine[:1], 0, group) + 0
part = functional.reduce_scatter_tensor(mine, "sum", 0, group) + 0
""")
    assert values(local_ranks, "gathered.tolist()") == [[0, 1, 2]] * 3
    assert values(local_ranks, "part.tolist()") == [[3], [6], [9]]


def test_a_receive_with_a_timeout_gives_up_and_a_later_one_gets_the_message(local_ranks):
    local_ranks.run("""
from datetime import timedelta
told, got = "", torch.zeros(1)
if rank == 2:
    time.sleep(0.8)
    dist.send(torch.ones(1), dst=0)
elif rank == 0:
    begin, request = time.perf_counter(), dist.irecv(got, src=2)
    try:
        request.wait(timedelta(seconds=0.3))
    except dist.DistError as error:
        told = str(error)
    waited = time.perf_counter() - begin
    dist.recv(got, src=2)
    in_time = dist.irecv(torch.empty(1), src=1)
    in_time.wait(timedelta(seconds=0.3))
else:
    dist.send(torch.ones(1), dst=0)
""")
    told, got = values(local_ranks, "told")[0], values(local_ranks, "got.item()")[0]
    assert "the matching send of rank 2 did not come within the timeout of 0.3 s." in told
    assert got == 1
    assert values(local_ranks, "rank or 0.3 <= waited < 0.5")[0]


def test_a_thread_that_a_rank_starts_cannot_communicate_as_another_rank(local_ranks):
    local_ranks.run("""
from concurrent.futures import ThreadPoolExecutor
error = ThreadPoolExecutor(1).submit(dist.is_initialized).exception()
""")
    assert values(local_ranks, "type(error).__name__") == ["NeedsProcesses"] * 3
    assert values(local_ranks, "dist.is_initialized()") == [True] * 3


def test_an_expression_of_a_rank_can_be_read_as_from_a_process():
    with cluster.start(2, where="here") as ranks:
        ranks.view.execute("found = [(1, [2, 3])]", block=True)
        assert ranks.client[0]["found[0][1]"] == [2, 3]
        with pytest.raises(RemoteError, match="name 'missing' is not defined"):
            ranks.client[0]["missing"]


def test_a_message_travels_while_its_receiver_does_something_else(local_ranks):
    local_ranks.run("""
from torch_mpi.network import Network, link
link.set(Network(latency=0.0, bandwidth=1e6))
big, begin = torch.zeros(25_000), time.perf_counter()  # 0.1 s on this network
if rank == 1:
    dist.send(big, dst=0)
elif rank == 0:
    time.sleep(0.1)
    dist.recv(big, src=1)
passed = time.perf_counter() - begin
""")
    assert 0.1 <= values(local_ranks, "passed")[0] < 0.15


@pytest.mark.parametrize(
    "call",
    [
        "dist.all_gather([torch.empty(1 + rank % 2) for _ in range(p)], torch.ones(1 + rank % 2))",
        "dist.all_gather_into_tensor(torch.empty(p + p * (rank % 2)), torch.ones(1 + rank % 2))",
        "dist.reduce(torch.ones(1 + rank % 2), 0)",
        "dist.gather(torch.ones(1 + rank), [torch.empty(1)] * p if rank == 0 else None)",
    ],
)
def test_parts_of_unequal_sizes_are_told_as_by_processes(local_ranks, call):
    with pytest.raises(RemoteError, match="CommunicationMismatch: rank 0 calls"):
        local_ranks.run(call)


def test_a_message_of_another_type_is_an_error_of_its_receiver_and_stops_the_others(local_ranks):
    local_ranks.run("""
caught = ""
try:
    if rank == 0:
        dist.send(torch.zeros(2000), dst=1)
    elif rank == 1:
        dist.recv(torch.zeros(2000, dtype=torch.float64), src=0)
    else:
        dist.recv(torch.zeros(1), src=1)
except dist.DistError as error:
    caught = type(error).__name__
""")
    stopped = "CommunicationStopped"
    assert values(local_ranks, "caught") == [stopped, "CommunicationMismatch", stopped]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("dist.all_to_all([torch.empty(1)] * 2, [torch.empty(1)] * 3)",
         "ValueError: all_to_all: 2 tensors in the list, expected one per rank: 3"),
        ("dist.all_gather([torch.empty(1)] * 3, torch.empty(2))",
         "ValueError: all_gather: your input has shape"),
        ("dist.all_to_all([torch.empty(1 + (k < rank)) for k in range(3)], [torch.empty(1)] * 3)",
         r"rank 0 sent 4 bytes, rank 1 expects 8"),
        ("dist.all_to_all([torch.empty(2)] * 3, [torch.empty(1)] * 3)",
         r"ValueError: all_to_all: your input \d \(this rank's\) has shape \[1\]"),
    ],
)  # fmt: skip
def test_arguments_that_cannot_work_are_refused_as_by_processes(local_ranks, call, words):
    with pytest.raises(RemoteError, match=words):
        local_ranks.run(call)


def test_a_report_names_the_line_of_isend_and_not_of_its_wait(local_ranks):
    with pytest.raises(
        RemoteError, match=r"rank 0 waits in send\(dst=1, tag=0\) .* at cell line 1,"
    ):
        local_ranks.run("""
work = dist.isend(torch.zeros(2000), dst=1) if rank == 0 else None
if work:
    work.wait()
""")
