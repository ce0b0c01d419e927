"""Collectives: values, dtypes, layouts, refusals."""

import gc
import time
import weakref

import torch
import torch.distributed as dist
from helpers import ALL, COMPLEX, FLOATS, INTEGERS, everybody, of_rank, rank, refused, same, size

from torch_mpi import present

OPS = dist.ReduceOp
LONG = 70_000
LENGTHS = (0, 1, 2, 3, 7, 1000, 65_537, 1_000_003)


def _reduced(op, tensors: list[torch.Tensor]) -> torch.Tensor:
    """The reduction, by torch itself."""
    dtype = tensors[0].dtype
    wide = torch.stack([t.double() if t.is_floating_point() else t.long() for t in tensors])
    result = {
        OPS.SUM: lambda: wide.sum(0),
        OPS.AVG: lambda: wide.mean(0),
        OPS.PRODUCT: lambda: wide.prod(0),
        OPS.MIN: lambda: wide.amin(0),
        OPS.MAX: lambda: wide.amax(0),
        OPS.BAND: lambda: _fold(torch.bitwise_and, wide),
        OPS.BOR: lambda: _fold(torch.bitwise_or, wide),
        OPS.BXOR: lambda: _fold(torch.bitwise_xor, wide),
    }[op]()
    return result.to(dtype)


def _fold(function, rows: torch.Tensor) -> torch.Tensor:
    result = rows[0]
    for row in rows[1:]:
        result = function(result, row)
    return result


def case_all_reduce_is_right_for_floats():
    for dtype in FLOATS:
        for op in (OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX):
            tensor = of_rank(rank(), (5,), dtype)
            dist.all_reduce(tensor, op)
            same(tensor, _reduced(op, everybody((5,), dtype)), f"{dtype} {op}")
        tensor = of_rank(rank(), (5,), dtype)
        dist.all_reduce(tensor, OPS.AVG)
        expected = _reduced(OPS.SUM, everybody((5,), dtype)).div_(size())
        same(tensor, expected, f"{dtype} AVG")


def case_all_reduce_is_right_for_integers_and_their_bits():
    for dtype in INTEGERS:
        for op in (OPS.SUM, OPS.PRODUCT, OPS.MIN, OPS.MAX, OPS.BAND, OPS.BOR, OPS.BXOR):
            tensor = of_rank(rank(), (5,), dtype)
            dist.all_reduce(tensor, op)
            same(tensor, _reduced(op, everybody((5,), dtype)), f"{dtype} {op}")


def _wraps(dtype: torch.dtype, got: torch.Tensor, value: int, what: str) -> None:
    bound = 2 ** (8 * dtype.itemsize)
    seen = {x % bound for x in got.tolist()}
    assert seen == {value % bound}, f"{what}: {seen}, expected {value % bound}"


def case_sums_and_products_of_integers_wrap_around_on_every_path():
    for dtype in INTEGERS:
        big = torch.iinfo(dtype).max // 4 * 3
        for name, value in (("SUM", size() * big), ("PRODUCT", big ** size())):
            op, what = getattr(OPS, name), f"{dtype} {name}"
            tensors = [torch.full((70 * size(),), big, dtype=dtype) for _ in range(4)]
            dist.all_reduce(tensors[0], op)
            dist.all_reduce(tensors[1], op, async_op=True).wait()
            dist.reduce(tensors[2], 0, op)
            parts = [torch.zeros(70, dtype=dtype) for _ in range(2)]
            dist.reduce_scatter_tensor(parts[0], tensors[3], op)
            dist.reduce_scatter_tensor(parts[1], tensors[3], op, async_op=True).wait()
            for got in (tensors[0], tensors[1], *parts, *([tensors[2]] if rank() == 0 else [])):
                _wraps(dtype, got, value, what)


def case_an_empty_part_of_a_reduce_scatter_is_no_error_for_any_dtype():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.int8):
        inputs = [of_rank(rank() + r, (r,), dtype) for r in range(size())]
        output = torch.zeros(rank(), dtype=dtype)
        dist.reduce_scatter(output, inputs)
        same(
            output,
            _reduced(OPS.SUM, [of_rank(s + rank(), (rank(),), dtype) for s in range(size())]),
        )


def case_all_reduce_is_right_for_truth_values():
    rows = torch.stack(everybody((5,), torch.bool))
    for op, expected in (
        (OPS.SUM, rows.any(0)), (OPS.MAX, rows.any(0)), (OPS.BOR, rows.any(0)),
        (OPS.PRODUCT, rows.all(0)), (OPS.MIN, rows.all(0)), (OPS.BAND, rows.all(0)),
        (OPS.BXOR, rows.sum(0) % 2 == 1),
    ):  # fmt: skip
        tensor = of_rank(rank(), (5,), torch.bool)
        dist.all_reduce(tensor, op)
        same(tensor, expected, f"bool {op}")


def case_all_reduce_is_right_for_complex_numbers():
    for dtype in COMPLEX:
        tensor = of_rank(rank(), (5,), dtype) * (1 + 2j)
        dist.all_reduce(tensor)
        same(tensor, sum(everybody((5,), dtype)) * (1 + 2j), str(dtype))
        product = of_rank(rank(), (3,), dtype)
        opts = dist.AllreduceOptions()
        opts.reduceOp = OPS.PRODUCT
        dist.group.WORLD.allreduce([product], opts).wait()
        same(product, torch.stack(everybody((3,), dtype)).prod(0), f"{dtype} product")


def case_all_reduce_of_halves_travels_as_two_bytes():
    from torch_mpi.record import log

    mark = log.mark()
    dist.all_reduce(torch.ones(100, dtype=torch.bfloat16))
    assert [call.nbytes for call in log.since(mark)] == [200]


def case_all_reduce_of_odd_and_large_lengths_is_right():
    for length in LENGTHS:
        tensor = of_rank(rank(), (length,))
        dist.all_reduce(tensor)
        same(tensor, sum(everybody((length,))), f"length {length}")


def case_all_reduce_of_a_strided_and_of_a_conjugated_tensor_is_right():
    home = torch.zeros(4, 6)
    view = home[:, 1:4]
    view.copy_(of_rank(rank(), (4, 3)))
    dist.all_reduce(view)
    same(home[:, 1:4].contiguous(), sum(everybody((4, 3))))
    assert home[:, [0, 4, 5]].abs().sum() == 0
    if size() > 1:
        if rank() == 0:
            dist.group.WORLD.send([torch.tensor([1 + 2j, 1 + 3j]).conj()], 1, 0).wait()
        if rank() == 1:
            got = torch.zeros(2, dtype=torch.complex64)
            dist.group.WORLD.recv([got], 0, 0).wait()
            same(got, torch.tensor([1 - 2j, 1 - 3j]))


def case_all_reduce_of_a_parameter_that_requires_grad_is_in_place():
    parameter = torch.nn.Parameter(of_rank(rank()))
    dist.all_reduce(parameter)
    same(parameter.detach(), sum(everybody()))
    strided = torch.nn.Parameter(of_rank(rank(), (3, 2)).t())
    dist.all_reduce(strided)
    same(strided.detach().contiguous(), sum(everybody((3, 2))).t().contiguous())


def case_the_groups_own_all_reduce_takes_a_reduce_op_however_often():
    tensor = of_rank(rank())
    dist.all_reduce(tensor)  # from here on the group knows a fast path for such tensors
    for options in ([OPS.SUM], [], [OPS.SUM], [OPS.MAX]):
        tensor = of_rank(rank())
        dist.group.WORLD.allreduce([tensor], *options).wait()
        largest = torch.stack(everybody()).amax(0)
        same(tensor, largest if OPS.MAX in options else sum(everybody()))


def case_all_reduce_coalesced_reduces_each_tensor():
    tensors = [of_rank(rank(), (3,)), of_rank(rank(), (2, 2))]
    dist.all_reduce_coalesced(tensors)
    same(tensors[0], sum(everybody((3,))))
    same(tensors[1], sum(everybody((2, 2))))


def case_async_all_reduces_complete_in_any_order_of_waiting():
    tensors = [of_rank(rank(), (n,)) for n in (5, LONG, 3)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    for work in reversed(works):
        work.wait()
    for tensor in tensors:
        same(tensor, sum(everybody(tensor.shape)))


def case_the_future_of_an_all_reduce_yields_its_tensors():
    tensor = of_rank(rank())
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    same(doubled.wait(), sum(everybody()) * 2)


def case_the_future_of_all_to_all_single_is_its_output():
    output = torch.zeros(size(), 3)
    work = dist.all_to_all_single(output, torch.ones(size(), 3), async_op=True)
    (tensor,) = work.get_future().wait()
    same(tensor, torch.ones(size(), 3))
    assert tensor.data_ptr() == output.data_ptr()


def case_broadcast_is_right_for_every_dtype_and_root():
    for dtype in ALL:
        for root in range(size()):
            tensor = of_rank(rank(), (4, 3), dtype)
            dist.broadcast(tensor, root)
            same(tensor, of_rank(root, (4, 3), dtype), f"{dtype} root {root}")


def case_broadcast_into_and_from_a_strided_tensor_is_right():
    home = torch.zeros(6, 4)
    if rank() == 0:
        home.copy_(of_rank(0, (6, 4)))
    dist.broadcast(home.t(), 0)
    same(home, of_rank(0, (6, 4)))


def case_reduce_changes_the_root_only():
    for root in range(size()):
        for op in (OPS.SUM, OPS.AVG):
            tensor = of_rank(rank())
            dist.reduce(tensor, root, op)
            expected = sum(everybody()) if op is OPS.SUM else sum(everybody()) / size()
            same(tensor, expected if rank() == root else of_rank(rank()), f"root {root} {op}")


def case_all_gather_collects_every_dtype_in_rank_order():
    for dtype in ALL:
        outputs = [torch.zeros((3, 2), dtype=dtype) for _ in range(size())]
        dist.all_gather(outputs, of_rank(rank(), (3, 2), dtype))
        for r, output in enumerate(outputs):
            same(output, of_rank(r, (3, 2), dtype), f"{dtype} from {r}")


def case_all_gather_accepts_uneven_shapes():
    outputs = [torch.zeros(r + 1) for r in range(size())]
    dist.all_gather(outputs, of_rank(rank(), (rank() + 1,)))
    for r, output in enumerate(outputs):
        same(output, of_rank(r, (r + 1,)), f"from {r}")


def case_all_gather_into_tensor_concatenates_and_stacks():
    flat = torch.zeros(2 * size(), 3)
    dist.all_gather_into_tensor(flat, of_rank(rank(), (2, 3)))
    same(flat, torch.cat(everybody((2, 3))))
    stacked = torch.zeros(size(), 2, 3)
    dist.all_gather_into_tensor(stacked, of_rank(rank(), (2, 3)))
    same(stacked, torch.stack(everybody((2, 3))))


def case_all_gather_into_a_tensor_that_holds_the_input_is_right():
    whole = torch.zeros(size(), 4)
    whole[rank()] = of_rank(rank(), (4,))
    dist.all_gather_into_tensor(whole, whole[rank()])
    same(whole, torch.stack(everybody((4,))))


def case_all_gather_coalesced_variants_are_right():
    shapes = [(2,), (3, 2)]
    inputs = [of_rank(rank(), s) for s in shapes]
    outputs = [torch.zeros(size() * s[0], *s[1:]) for s in shapes]
    dist.group.WORLD.allgather_into_tensor_coalesced(outputs, inputs).wait()
    for output, shape in zip(outputs, shapes, strict=True):
        same(output, torch.cat(everybody(shape)))
    rows = [[torch.zeros(s) for s in shapes] for _ in range(size())]
    dist.all_gather_coalesced(rows, inputs)
    for r, row in enumerate(rows):
        for output, shape in zip(row, shapes, strict=True):
            same(output, of_rank(r, shape))


def case_gather_and_scatter_are_each_other_s_inverse():
    for root in range(size()):
        outputs = [torch.zeros(4) for _ in range(size())] if rank() == root else None
        dist.gather(of_rank(rank(), (4,)), outputs, dst=root)
        if rank() == root:
            for r, output in enumerate(outputs):
                same(output, of_rank(r, (4,)))
        mine = torch.zeros(4)
        dist.scatter(mine, outputs, src=root)
        same(mine, of_rank(rank(), (4,)))


def case_reduce_scatter_gives_each_rank_its_part_even_uneven_ones():
    inputs = [of_rank(rank() + r, (r + 1,)) for r in range(size())]
    output = torch.zeros(rank() + 1)
    dist.reduce_scatter(output, inputs)
    same(output, sum(of_rank(s + rank(), (rank() + 1,)) for s in range(size())))


def case_reduce_scatter_tensor_is_right_also_for_averages_and_halves():
    for dtype in (torch.float32, torch.bfloat16):
        for op in (OPS.SUM, OPS.AVG):
            output = torch.zeros((2, 3), dtype=dtype)
            dist.reduce_scatter_tensor(output, of_rank(rank(), (2 * size(), 3), dtype), op)
            total = sum(everybody((2 * size(), 3), dtype))
            expected = total.chunk(size())[rank()] / (size() if op is OPS.AVG else 1)
            same(output, expected.to(dtype).contiguous(), f"{dtype} {op}")


def case_reduce_scatter_tensor_coalesced_is_right():
    shapes = [(size(), 2), (2 * size(),)]
    inputs = [of_rank(rank(), s) for s in shapes]
    outputs = [torch.zeros(1, 2), torch.zeros(2)]
    opts = dist.ReduceScatterOptions()
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs, opts).wait()
    for output, shape in zip(outputs, shapes, strict=True):
        same(output, sum(everybody(shape)).chunk(size())[rank()].contiguous())


def case_all_to_all_lists_transpose_the_ranks_even_uneven_ones():
    inputs = [torch.full((r + 1,), float(rank() * 10 + r)) for r in range(size())]
    outputs = [torch.zeros(rank() + 1) for _ in range(size())]
    dist.all_to_all(outputs, inputs)
    for r, output in enumerate(outputs):
        same(output, torch.full((rank() + 1,), float(r * 10 + rank())))


def case_all_to_all_single_is_right_even_and_uneven():
    even = torch.zeros(size(), 3)
    dist.all_to_all_single(even, torch.full((size(), 3), float(rank())))
    same(even, torch.arange(float(size()))[:, None].expand(-1, 3).contiguous())
    send = [r + 1 for r in range(size())]
    receive = [rank() + 1] * size()
    rows = torch.cat([torch.full((r + 1, 2), float(rank() * 10 + r)) for r in range(size())])
    got = torch.zeros(sum(receive), 2)
    dist.all_to_all_single(got, rows, receive, send)
    blocks = [torch.full((rank() + 1, 2), float(r * 10 + rank())) for r in range(size())]
    same(got, torch.cat(blocks))


def case_collectives_of_empty_tensors_return():
    dist.all_reduce(torch.empty(0))
    dist.broadcast(torch.empty(0, 4), 0)
    dist.all_gather([torch.empty(0) for _ in range(size())], torch.empty(0))
    dist.all_gather_into_tensor(torch.empty(0), torch.empty(0))
    dist.reduce_scatter_tensor(torch.empty(0), torch.empty(0))
    dist.all_to_all_single(torch.empty(0, 2), torch.empty(0, 2))


def case_object_collectives_work():
    gathered = [None] * size()
    dist.all_gather_object(gathered, {"rank": rank()})
    assert gathered == [{"rank": r} for r in range(size())]
    objects = [["from 0", 1.5], None] if rank() == 0 else [None, None]
    dist.broadcast_object_list(objects, 0)
    assert objects == [["from 0", 1.5], None]
    mine = [None]
    dist.scatter_object_list(mine, [f"for {r}" for r in range(size())], 0)
    assert mine == [f"for {rank()}"]
    at_root = [None] * size() if rank() == 0 else None
    dist.gather_object(rank() ** 2, at_root, 0)
    assert rank() != 0 or at_root == [r**2 for r in range(size())]


def case_impossible_reductions_say_what_to_do_instead():
    with refused(TypeError, "int64", "AVG", "divide"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), OPS.AVG)
    with refused(TypeError, "float32", "BAND", "integer"):
        dist.all_reduce(torch.ones(2), OPS.BAND)
    with refused(TypeError, "float8", "convert"):
        dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))
    with refused(TypeError, "int64", "PREMUL_SUM", "floating-point"):
        dist.all_reduce(torch.ones(2, dtype=torch.int64), dist._make_nccl_premul_sum(2.0))
    opts = dist.AllreduceOptions()
    opts.reduceOp = OPS.MAX
    with refused(TypeError, "complex64", "no order"):
        dist.group.WORLD.allreduce([torch.ones(2, dtype=torch.complex64)], opts)


def case_wrong_sizes_and_lists_are_named():
    with refused(ValueError, f"expected one per rank: {size()}"):
        dist.all_gather([torch.zeros(1)] * (size() + 1), torch.zeros(1))
    with refused(ValueError, f"{size()} times"):
        dist.all_gather_into_tensor(torch.zeros(size() * 2 + 1), torch.zeros(2))
    with refused(ValueError, "input_split_sizes"):
        dist.all_to_all_single(
            torch.zeros(size()), torch.zeros(size()), None, [size() + 1] * size()
        )
    with refused(ValueError, "meta"):
        dist.group.WORLD.allreduce([torch.ones(1, device="meta")], dist.AllreduceOptions())
    with refused(ValueError, str(size())):
        dist.broadcast(torch.zeros(1), size())


def case_all_to_all_in_place_is_right():
    tensors = [torch.full((LONG,), float(rank() * 10 + r)) for r in range(size())]
    dist.all_to_all(tensors, tensors)
    for r, tensor in enumerate(tensors):
        same(tensor, torch.full((LONG,), float(r * 10 + rank())))


def case_all_gather_into_a_tensor_that_is_not_contiguous_is_right():
    whole = torch.zeros(4, size() + 1).t()
    size_of_part = whole.numel() // size()
    if whole.numel() % size():
        return "cannot be shared equally by so many ranks"
    part = torch.arange(float(size_of_part)) + 100 * rank()
    dist.all_gather_into_tensor(whole, part)
    expected = torch.cat([torch.arange(float(size_of_part)) + 100 * r for r in range(size())])
    same(whole.contiguous().view(-1), expected)


def case_tensors_that_share_memory_with_themselves_are_refused_before_anything_is_sent():
    with refused(ValueError, "expand()", "clone()"):
        dist.all_reduce(torch.ones(1).expand(4))
    dist.barrier()


def case_different_dtypes_in_one_collective_are_named():
    opts = dist.ReduceScatterOptions()
    inputs = [torch.ones(2) for _ in range(size())]
    with refused(TypeError, "float32 and float64"):
        dist.group.WORLD.reduce_scatter([torch.ones(2, dtype=torch.float64)], [inputs], opts)


def case_a_future_can_be_waited_for_in_a_callback_of_another():
    first, second = of_rank(rank()), of_rank(rank(), (3,))

    def then(_):
        return dist.all_reduce(second, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(first, async_op=True).get_future()
    same(future.then(then).wait(), sum(everybody((3,))))


def case_asynchronous_means_work_in_inference_mode():
    with torch.inference_mode():
        tensor = of_rank(rank())
        future = dist.all_reduce(tensor, OPS.AVG, async_op=True).get_future()
        same(future.wait()[0], sum(everybody()) / size())


def case_blocking_and_async_calls_of_one_collective_belong_together():
    for k in range(40):
        tensor = of_rank(rank(), (6,))
        if (k + rank()) % 2:
            dist.all_reduce(tensor)
        else:
            dist.all_reduce(tensor, async_op=True).wait()
        same(tensor, sum(everybody((6,))), f"round {k}")


def case_hundreds_of_collectives_may_be_under_way():
    tensors = [of_rank(rank(), (3,)) + k for k in range(300)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in works:
        work.wait()
    for k, tensor in enumerate(tensors):
        same(tensor, sum(everybody((3,))) + k * size(), f"collective {k}")


def case_what_a_rank_sends_and_gets_is_on_record_by_definition_of_the_operation():
    from torch_mpi.record import log

    p, b, root = size(), 20, rank() == 0

    def parts(like=5):
        return [torch.ones(like) for _ in range(p)]

    calls = [
        (lambda: dist.all_reduce(torch.ones(5)), b, b),
        (lambda: dist.all_reduce(torch.ones(5)), b, b),
        (lambda: dist.broadcast(torch.ones(5), 0), b * root, b * (not root)),
        (lambda: dist.reduce(torch.ones(5), 0), b, b * root),
        (lambda: dist.gather(torch.ones(5), parts() if root else None), b, p * b * root),
        (lambda: dist.scatter(torch.ones(5), parts() if root else None), p * b * root, b),
        (lambda: dist.all_gather(parts(), torch.ones(5)), b, p * b),
        (lambda: dist.all_gather_into_tensor(torch.ones(5 * p), torch.ones(5)), b, p * b),
        (lambda: dist.reduce_scatter(torch.ones(5), parts()), p * b, b),
        (lambda: dist.reduce_scatter_tensor(torch.ones(5), torch.ones(5 * p)), p * b, b),
        (lambda: dist.all_to_all(parts(), parts()), p * b, p * b),
        (lambda: dist.all_to_all_single(torch.ones(5 * p), torch.ones(5 * p)), p * b, p * b),
        (dist.barrier, 0, 0),
    ]
    for call, sent, received in calls:
        mark = log.mark()
        call()
        (record,) = log.since(mark)
        assert (record.sent, record.received) == (sent, received), record


def case_a_sum_of_multiplied_tensors_is_as_multiplying_first():
    for dtype in FLOATS:
        for factor in (0.5, torch.tensor([0.25]), torch.tensor(-2.0)):
            op, number = dist._make_nccl_premul_sum(factor), float(factor)
            terms = [of_rank(r, (2 * size(), 3), dtype) * number for r in range(size())]
            expected = _reduced(OPS.SUM, terms)
            for async_op in (False, True):
                tensor = of_rank(rank(), (2 * size(), 3), dtype)
                work = dist.all_reduce(tensor, op, async_op=async_op)
                if async_op:
                    work.wait()
                same(tensor, expected, f"all_reduce {dtype} {factor}")
            strided = of_rank(rank(), (2 * size(), 3), dtype).t()
            dist.all_reduce(strided, op)
            same(strided.t().contiguous(), expected, f"strided {dtype} {factor}")
            mine, part = of_rank(rank(), (2 * size(), 3), dtype), torch.zeros((2, 3), dtype=dtype)
            dist.reduce_scatter_tensor(part, mine, op)
            same(part, expected.chunk(size())[rank()].contiguous(), f"{dtype} {factor}")
            same(mine, of_rank(rank(), (2 * size(), 3), dtype), "the input of reduce_scatter")
            dist.reduce(mine, 0, op)
            kept = of_rank(rank(), (2 * size(), 3), dtype)
            same(mine, expected if rank() == 0 else kept, f"reduce {dtype} {factor}")


def case_a_tensor_is_freed_with_its_last_name_however_long_its_communication_waited():
    if size() == 1:
        return "takes two ranks"
    gc.disable()
    try:
        for call in _CALLS:
            freed = _after_a_long_wait(call)
            assert freed() is None, f"{call.__name__}: {gc.get_referrers(freed())}"
    finally:
        gc.enable()


def _after_a_long_wait(call) -> weakref.ref:
    """What is left of a tensor when rank 0 has waited long enough to show it to the others."""
    dist.barrier()
    here = present.world
    while rank() == 1 and here.statuses()[0]["state"] != "waiting":
        time.sleep(1e-3)
    tensor = torch.ones(size() * 1000)
    call(tensor)
    return weakref.ref(tensor)


def _all_reduced(tensor: torch.Tensor) -> None:
    dist.all_reduce(tensor)


def _gathered(tensor: torch.Tensor) -> None:
    dist.all_gather_into_tensor(tensor, torch.ones(1000))


def _scattered(tensor: torch.Tensor) -> None:
    dist.reduce_scatter_tensor(torch.empty(1000), tensor)


def _passed_on(tensor: torch.Tensor) -> None:
    if rank() == 0:
        dist.recv(tensor, 1)
    if rank() == 1:
        dist.send(tensor, 0)


_CALLS = (_all_reduced, _gathered, _scattered, _passed_on)
