"""PyTorch's own machinery on the backend."""

import copy
import itertools
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from helpers import everybody, of_rank, rank, refused, same, size
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from torch_mpi.record import log


def _mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 4)
    )


def _batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(12, 20, generator=generator), torch.randint(4, (12,), generator=generator))
        for _ in range(count)
    ]


def _train(model: nn.Module, shard: slice) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x, y in _batches(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[shard]), y[shard]).backward()
        optimizer.step()
    return model


def _alike(a: nn.Module, b: nn.Module) -> None:
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def case_ddp_trains_as_one_process_does():
    alone = _train(_mlp(), slice(None))
    model = _mlp()
    for p in model.parameters():
        p.data.add_(rank())  # DDP has to bring rank 0's weights to all
    shard = slice(rank(), None, size())
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    _alike(_train(ddp, shard).module, alone)


def case_ddp_adds_up_when_ranks_come_to_their_buckets_at_different_times():
    alone = _train(_mlp(), slice(None))
    model = _mlp()
    late = itertools.cycle(range(size() + 1))  # a rank, or none

    def compute(_gradient: torch.Tensor) -> None:
        until = time.perf_counter() + (0.01 if next(late) == rank() else 0)
        while time.perf_counter() < until:
            torch.randn(50, 50) @ torch.randn(50, 50)

    for p in model.parameters():
        p.register_hook(compute)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    _alike(_train(ddp, slice(rank(), None, size())).module, alone)


def case_the_wait_at_the_end_of_ddps_backward_is_on_record():
    ddp, mark = DistributedDataParallel(_mlp()), log.mark()
    x, y = _batches(1)[0]
    loss = nn.functional.cross_entropy(ddp(x), y)
    until = time.perf_counter() + (0.2 if rank() == 0 else 0)
    while time.perf_counter() < until:
        torch.randn(50, 50) @ torch.randn(50, 50)
    loss.backward()
    waited = [end - start for call in log.since(mark) for start, end in call.waits]
    assert rank() == 0 or sum(waited) > 0.05, waited


def case_ddps_builtin_communication_hooks_work():
    for kind in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        model = nn.Linear(4, 2)
        nn.init.constant_(model.weight, 0.5)
        ddp = DistributedDataParallel(model)
        ddp._register_builtin_comm_hook(kind)
        ddp(torch.full((1, 4), float(rank()))).sum().backward()
        same(model.weight.grad, torch.full((2, 4), (size() - 1) / 2), str(kind))


def case_ddp_with_a_python_communication_hook_works():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    ddp = DistributedDataParallel(_mlp())
    ddp.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    model = _train(ddp, slice(rank(), None, size())).module
    for p, q in zip(model.parameters(), _train(_mlp(), slice(None)).parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=2e-2)


def case_ddp_accumulates_without_communication_in_no_sync():
    from torch_mpi.record import log

    ddp = DistributedDataParallel(_mlp())
    (x, y), *_ = _batches(1)
    mark = log.mark()
    with ddp.no_sync():
        nn.functional.cross_entropy(ddp(x), y).backward()
    assert not [c for c in log.since(mark) if c.op == "all_reduce"]
    nn.functional.cross_entropy(ddp(x), y).backward()
    assert [c for c in log.since(mark) if c.op == "all_reduce"]


def case_ddp_with_buffers_and_unused_parameters_works():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.used(x))

    torch.manual_seed(rank())
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    for _ in range(2):
        ddp(torch.randn(6, 4)).sum().backward()
    gradient = ddp.module.used.weight.grad.clone()
    dist.broadcast(gradient, 0)
    torch.testing.assert_close(gradient, ddp.module.used.weight.grad)


def case_a_device_mesh_has_the_right_groups():
    if size() != 4:
        return "needs four ranks"
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    tensor = of_rank(rank())
    dist.all_reduce(tensor, group=mesh["data"].get_group())
    first = rank() - rank() % 2
    same(tensor, of_rank(first) + of_rank(first + 1))
    other = of_rank(rank())
    dist.all_reduce(other, group=mesh.get_group("pipeline"))
    same(other, of_rank(rank() % 2) + of_rank(rank() % 2 + 2))


def case_functional_collectives_work():
    mesh = init_device_mesh("cpu", (size(),))
    total = functional.all_reduce(of_rank(rank()), "sum", mesh)
    same(total + 0, sum(everybody()))
    gathered = functional.all_gather_tensor(of_rank(rank(), (2, 3)), 0, mesh)
    same(gathered + 0, torch.cat(everybody((2, 3))))
    part = functional.reduce_scatter_tensor(of_rank(rank(), (size(), 3)), "sum", 0, mesh)
    same(part + 0, sum(everybody((size(), 3)))[rank() : rank() + 1])
    swapped = functional.all_to_all_single(of_rank(rank(), (size(), 2)), None, None, mesh)
    same(swapped + 0, torch.stack([of_rank(r, (size(), 2))[rank()] for r in range(size())]))
    several = functional.all_reduce_coalesced([of_rank(rank()), of_rank(rank(), (2,))], "sum", mesh)
    same(several[1] + 0, sum(everybody((2,))))


def case_dtensor_tensor_parallel_equals_the_unsplit_layer():
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.manual_seed(1)
    whole = nn.Sequential(nn.Linear(8, 12 * 4), nn.ReLU(), nn.Linear(12 * 4, 6))
    split = parallelize_module(
        copy.deepcopy(whole),
        init_device_mesh("cpu", (size(),)),
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    x = torch.randn(5, 8)
    torch.testing.assert_close(split(x), whole(x))
    split(x).sum().backward()
    whole(x).sum().backward()
    gradient = split[0].weight.grad.full_tensor()
    torch.testing.assert_close(gradient, whole[0].weight.grad)


def case_the_result_of_a_functional_collective_can_be_communicated_further():
    mesh = init_device_mesh("cpu", (size(),))
    total, count = sum(everybody()), float(size())
    result = functional.all_reduce(of_rank(rank()), "sum", mesh)
    dist.all_reduce(result)
    same(result + 0, total * count)
    gathered = [torch.zeros(5) for _ in range(size())]
    dist.all_gather(gathered, functional.all_reduce(of_rank(rank()), "sum", mesh))
    for part in gathered:
        same(part, total)
    whole = torch.zeros(5 * size())
    dist.all_gather_into_tensor(whole, functional.all_reduce(of_rank(rank()), "sum", mesh))
    same(whole, total.repeat(size()))


def case_a_dtensor_in_a_plain_collective_is_refused_before_anything_is_sent():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    rows = distribute_tensor(torch.arange(4.0 * size()).reshape(-1, 2), mesh, [Shard(0)])
    with refused(TypeError, "all_reduce: a DTensor has no memory", ".to_local()"):
        dist.all_reduce(rows)
    with refused(TypeError, "nested", ".unbind()"):
        dist.all_reduce(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]))
    with refused(TypeError, "all_gather: a DTensor", ".to_local()"):
        dist.all_gather([rows] * size(), rows.to_local())
    local = rows.to_local().clone()
    dist.all_reduce(local)
    same(local, torch.arange(4.0 * size()).reshape(size(), 2, 2).sum(0))


def case_a_backward_pass_through_an_all_reduce_in_place_is_warned_of_at_its_line():
    dist.all_reduce(torch.ones(3))  # from here on the short way is open
    leaf = torch.ones(3, requires_grad=True)
    tensor = leaf * 2
    dist.all_reduce(tensor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tensor.sum().backward()
    (warning,) = caught
    assert "all_reduce has written into" in str(warning.message)
    assert warning.filename == __file__


def case_dtensor_moves_between_placements():
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (size(),))
    full = torch.arange(5.0 * 4).reshape(5, 4)
    rows = distribute_tensor(full, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    same(columns.redistribute(mesh, [Replicate()]).to_local(), full)
    same(rows.full_tensor(), full)


def case_the_profiler_names_the_operations():
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(1000))
        dist.all_reduce(torch.ones(1000), async_op=True).wait()
        dist.barrier()
        if size() > 1 and rank() < 2:
            work = dist.isend if rank() == 0 else dist.irecv
            work(torch.ones(3), 1 - rank()).wait()
    names = {event.key: event.count for event in profile.key_averages()}
    assert names.get("mpi:all_reduce") == 2, names
    assert names.get("mpi:barrier") == 1, names
    if size() > 1 and rank() == 0:
        assert names.get("mpi:send") == 1, names


def case_join_handles_uneven_inputs():
    model = DistributedDataParallel(_mlp())
    with model.join():
        for x, y in _batches(2 + rank()):
            nn.functional.cross_entropy(model(x), y).backward()


def case_join_with_unused_parameters_works():
    model = DistributedDataParallel(_mlp(), find_unused_parameters=True)
    with model.join():
        for x, y in _batches(1 + rank()):
            nn.functional.cross_entropy(model(x), y).backward()


def case_powersgd_trains():
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    ddp = DistributedDataParallel(_mlp())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _train(ddp, slice(rank(), None, size()))


def case_fsdp2_shards_and_trains():
    from torch.distributed.fsdp import fully_shard

    whole = _train(_mlp(), slice(None))
    model = _mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (size(),)))
    _train(model, slice(rank(), None, size()))
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, rtol=1e-4, atol=1e-6)


def case_fsdp2_divides_gradients_by_the_factor_that_was_set():
    from torch.distributed.fsdp import fully_shard

    gradients = []
    for factor in (size(), 4.0 * size()):
        model = _mlp()
        fully_shard(model, mesh=init_device_mesh("cpu", (size(),)))
        model.set_gradient_divide_factor(factor)
        x, y = _batches(1)[0]
        nn.functional.cross_entropy(model(x[rank() :: size()]), y[rank() :: size()]).backward()
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    for usual, smaller in zip(*gradients, strict=True):
        torch.testing.assert_close(usual, 4.0 * smaller)


def case_a_rank_missing_in_ddp_is_an_error_not_a_hang():
    from datetime import timedelta

    if size() < 2:
        return "needs two ranks"
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))
    if rank() < 2:
        ddp = DistributedDataParallel(_mlp(), process_group=group)
        (x, y), *_ = _batches(1)
    if rank() == 0:
        with pytest.raises(RuntimeError, match=r"rank 0 waits in all_reduce(.|\n)*rank 1 "):
            nn.functional.cross_entropy(ddp(x), y).backward()
    else:
        with pytest.raises(RuntimeError, match="rank 0 waits in all_reduce"):
            dist.barrier()
    dist.barrier()
