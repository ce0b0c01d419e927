"""The fast path gives what the long way gives, and leaves to the long way what it can't do."""

import contextlib
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers import FLOATS, INTEGERS, everybody, of_rank, rank, same, size

from torch_mpi import network
from torch_mpi.group.fast_path import FastPath
from torch_mpi.record import log

OPS = dist.ReduceOp
#: One of each size of elements, and each kind of reduction: MPI's own, and ours.
DTYPES = [*FLOATS, *INTEGERS, torch.bool]
LENGTHS = (1, 5, 70_000)
TIMES = 3  # the first call takes the long way


@contextlib.contextmanager
def counted():
    """A list, in which the block's calls of the fast path leave whether they began there."""
    real, began = FastPath.begin, []

    def begin(path: FastPath, known) -> bool:
        began.append(real(path, known))
        return began[-1]

    with mock.patch.object(FastPath, "begin", begin):
        yield began


def sums(shape, dtype) -> torch.Tensor:
    """What a sum of all ranks is, by torch itself, which can't add all dtypes."""
    return torch.stack([t.double() for t in everybody(shape, dtype)]).sum(0).to(dtype)


def everything(n: int, dtype: torch.dtype, group=None) -> None:
    """Each fast collective once, with new tensors, and a look at what it gives."""
    shape, mine = (n,), of_rank(rank(), (n,), dtype)
    total = mine.clone()
    dist.all_reduce(total)
    same(total, sums(shape, dtype), "all_reduce")
    largest = mine.clone()
    dist.all_reduce(largest, OPS.MAX)
    same(
        largest,
        torch.stack([t.to(torch.float64) for t in everybody(shape, dtype)]).amax(0).to(dtype),
    )
    for root in range(size()):
        copy = mine.clone()
        dist.broadcast(copy, root)
        same(copy, of_rank(root, shape, dtype), f"broadcast from {root}")
        total = mine.clone()
        dist.reduce(total, root)
        same(total, sums(shape, dtype) if rank() == root else mine, f"reduce to {root}")
    parts = [torch.empty(shape, dtype=dtype) for _ in range(size())]
    dist.all_gather(parts, mine)
    table = torch.empty(size() * n, dtype=dtype)
    dist.all_gather_into_tensor(table, mine)
    for part, row, expected in zip(
        parts, table.view(size(), n), everybody(shape, dtype), strict=True
    ):
        same(part, expected, "all_gather")
        same(row, expected, "all_gather_into_tensor")
    piece = torch.empty(shape, dtype=dtype)
    dist.reduce_scatter_tensor(piece, of_rank(0, (size() * n,), dtype))
    everywhere = of_rank(0, (size() * n,), dtype).view(size(), n)[rank()]
    same(piece, (size() * everywhere.double()).to(dtype), "reduce_scatter_tensor")
    dist.barrier()


def case_every_collective_gives_the_same_on_the_fast_path_for_all_dtypes_roots_and_sizes():
    for dtype in DTYPES:
        for n in LENGTHS:
            for _ in range(TIMES):
                with counted() as began:
                    everything(n, dtype)
            assert began, f"{dtype}, {n} elements: no call was fast"


def case_calls_of_different_kinds_follow_each_other():
    for turn in range(4 * size()):
        tensor = of_rank(rank(), (1 + turn % 2,))
        dist.broadcast(tensor, turn % size())
        same(tensor, of_rank(turn % size(), tensor.shape))
        dist.all_reduce(tensor, (OPS.SUM, OPS.MAX, OPS.MIN)[turn % 3])
        factor = 1 if turn % 3 else size()
        same(tensor, factor * of_rank(turn % size(), tensor.shape))


def case_a_group_of_some_ranks_has_a_fast_path_of_its_own():
    members = list(range(0, size(), 2))
    group = dist.new_group(members)
    for _ in range(TIMES):
        if rank() in members:
            tensor = of_rank(rank())
            dist.broadcast(tensor, members[-1], group=group)
            same(tensor, of_rank(members[-1]))
            parts = [torch.empty(5) for _ in members]
            dist.all_gather(parts, of_rank(rank()), group=group)
            for part, member in zip(parts, members, strict=True):
                same(part, of_rank(member))
        dist.barrier()


def case_all_gather_fills_parts_wherever_each_rank_has_them():
    """Some ranks have them in a row, others apart, strided, or twice: they make the same call."""
    shape, mine = (4, 3), of_rank(rank(), (4, 3))
    for _ in range(TIMES):
        for kind in range(4):
            table = torch.empty(size(), *shape)
            ways = [
                list(table),
                [torch.empty(shape) for _ in range(size())][::-1],
                [torch.empty(shape[::-1]).t() for _ in range(size())],
                list(table.flip(0)),
            ]
            parts = ways[(kind + rank()) % len(ways)]
            dist.all_gather(parts, mine)
            for part, expected in zip(parts, everybody(shape), strict=True):
                same(part.contiguous(), expected)


def case_parts_of_different_sizes_are_gathered_into_their_tensors():
    counts = [2 * r for r in range(size())]
    for _ in range(TIMES):
        parts = [torch.empty(n, dtype=torch.float64) for n in counts]
        dist.all_gather(parts, of_rank(rank(), (counts[rank()],), torch.float64))
        for r, (part, n) in enumerate(zip(parts, counts, strict=True)):
            same(part, of_rank(r, (n,), torch.float64))


def case_tensors_that_share_memory_take_the_long_way():
    for _ in range(TIMES):
        parts = [torch.zeros(3) for _ in range(size())]
        dist.all_gather(parts, of_rank(rank(), (3,)))  # the fast path knows such parts from now on
        parts[rank()].copy_(of_rank(rank(), (3,)))
        with counted() as began:
            dist.all_gather(parts, parts[rank()])
        assert not began
        for part, expected in zip(parts, everybody((3,)), strict=True):
            same(part, expected)
        table = torch.zeros(3 * size())
        dist.all_gather_into_tensor(table, of_rank(rank(), (3,)))
        own = table[3 * rank() : 3 * rank() + 3]
        dist.all_gather_into_tensor(table, own)
        same(table.view(size(), 3)[rank()], of_rank(rank(), (3,)))


def case_unusual_tensors_take_the_long_way():
    for _ in range(2):
        dist.broadcast(of_rank(rank(), (2, 2)), 0)
    leaf = of_rank(rank(), (2, 2)).requires_grad_()
    unusual = [
        of_rank(rank(), (2, 2)).t(),
        torch.nn.Parameter(of_rank(rank(), (2, 2))),
        torch._neg_view(-of_rank(rank(), (2, 2))),
        leaf * 1,
    ]
    for tensor in unusual:
        with counted() as began:
            dist.broadcast(tensor, 0)
        assert not began
        expected = of_rank(0, (2, 2))
        same(tensor.detach().resolve_neg(), expected.t() if tensor is unusual[0] else expected)
    with pytest.raises(TypeError, match="dense tensors"):
        dist.broadcast(torch.eye(2).to_sparse(), 0)
    with torch.inference_mode():
        tensor = of_rank(rank(), (2, 2))
        dist.broadcast(tensor, 0)
        same(tensor, of_rank(0, (2, 2)))


def case_a_slow_network_a_profile_and_async_calls_have_no_fast_path():
    tensor = of_rank(rank())
    for _ in range(2):
        dist.broadcast(tensor, 0)
    with counted() as began:
        dist.broadcast(tensor, 0, async_op=True).wait()
        with torch.profiler.profile() as profile:
            dist.broadcast(tensor, 0)
        network.link.set(network.Network(latency=1e-4))
        dist.broadcast(tensor, 0)
        network.link.set(None)
    assert not began
    assert any(event.key == "mpi:broadcast" for event in profile.key_averages())
    same(tensor, of_rank(0))


def case_each_fast_call_is_on_record_with_its_times():
    parts = [torch.empty(5) for _ in range(size())]
    for _ in range(2):
        dist.all_gather(parts, of_rank(rank()))
    mark = log.mark()
    dist.all_gather(parts, of_rank(rank()))
    dist.barrier()
    gathered, barrier = log.since(mark)
    assert (gathered.op, gathered.sent, gathered.received) == ("all_gather", 20, 20 * size())
    assert barrier.sequence == gathered.sequence + 1
    assert 0 < gathered.start <= gathered.matched <= gathered.end <= barrier.start
    assert gathered.place[2] == "case_each_fast_call_is_on_record_with_its_times"
    assert gathered.blocking
    ((begin, end),) = gathered.waits  # a call without its partner still takes the long way
    assert gathered.start <= begin <= end


def case_the_fast_path_keeps_no_tensor():
    tensors = [torch.ones(7) for _ in range(size() + 1)]
    for _ in range(2):
        dist.all_gather(tensors[:-1], tensors[-1])
        dist.broadcast(tensors[-1], 0)
        dist.reduce(tensors[-1], 0)
        dist.all_reduce(tensors[-1])
    kept = [weakref.ref(tensor) for tensor in tensors]
    del tensors
    assert [ref() for ref in kept] == [None] * len(kept)
