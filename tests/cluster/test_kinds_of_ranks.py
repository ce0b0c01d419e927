"""The same call gives the same values, errors and records on each kind of ranks.

`KINDS_OF_RANKS=file` has the table written to a file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import call_tools
import pytest

from utils import cluster

pytestmark = pytest.mark.timeout(300)
N = 3
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")

REDUCE = "x = {tensor}; dist.all_reduce(x, dist.ReduceOp.{op}); out = x"
VALUES = {
    "float32": "torch.tensor([1.5, -2.0]) + r",
    "float16": "torch.tensor([1.5, -2.0], dtype=torch.float16) + r",
    "complex64": "torch.tensor([1 + 2j, r * 1j])",
    "int64": "torch.tensor([6, 3]) + r",
    "uint8": "torch.tensor([250, 3], dtype=torch.uint8) + r",
    "bool": "torch.tensor([True, r == 1])",
}

#: What each rank calls; `r` is the rank, `n` the world size, `pair` a group of ranks 0 and 2.
CALLS: dict[str, str] = {
    f"all_reduce of {dtype} with {op}": REDUCE.format(tensor=tensor, op=op)
    for dtype, tensor in VALUES.items()
    for op in OPS
}
CALLS |= {
    "a NaN in MAX": "x = torch.tensor([1.0, 2.0])\nif r == 2: x[0] = float('nan')\n"
    "dist.all_reduce(x, dist.ReduceOp.MAX); out = repr(x)",
    "a NaN in MIN of float64": "x = torch.ones(3, dtype=torch.float64)\nif r == 1: x[2] = "
    "float('nan')\ndist.all_reduce(x, dist.ReduceOp.MIN); out = repr(x)",
    "PREMUL_SUM": "x = torch.ones(2); dist.all_reduce(x, op=dist._make_nccl_premul_sum(3.0)); "
    "out = x",
    "PREMUL_SUM of int64": "dist.all_reduce(torch.ones(2, dtype=torch.int64), "
    "op=dist._make_nccl_premul_sum(3.0))",
    "all_reduce of float8": "dist.all_reduce(torch.ones(2).to(torch.float8_e5m2))",
    "all_reduce of four elements in two shapes": "x = torch.ones(4 if r else (2, 2)); "
    "dist.all_reduce(x); out = x",
    "broadcast of four elements in two shapes": "x = torch.full((4,) if r else (2, 2), float(r)); "
    "dist.broadcast(x, 0); out = x",
    "all_reduce of other sizes": "dist.all_reduce(torch.ones(3 + r))",
    "all_reduce of other dtypes": "dist.all_reduce(torch.ones(3, dtype=[torch.float32, "
    "torch.float64, torch.float32][r]))",
    "all_reduce of an expanded tensor": "dist.all_reduce(torch.ones(1).expand(3))",
    "all_reduce of a strided tensor": "x = torch.arange(6.0).reshape(2, 3).t(); "
    "dist.all_reduce(x); out = x",
    "all_reduce of an empty tensor": "x = torch.empty(0); dist.all_reduce(x); out = x",
    "all_reduce of a list": "dist.all_reduce([torch.ones(1)])",
    "all_reduce on meta": "dist.all_reduce(torch.ones(1, device='meta'))",
    "all_reduce of a sparse tensor": "dist.group.WORLD.allreduce([torch.eye(2).to_sparse()])",
    "all_reduce of two tensors": "dist.group.WORLD.allreduce([torch.ones(1), torch.ones(1)])",
    "all_reduce_coalesced": "x = [torch.ones(2) * r, torch.tensor([r])]; "
    "dist.group.WORLD.allreduce_coalesced(x).wait(); out = x",
    "all_reduce of a subgroup": "x = torch.ones(1)\n"
    "if r != 1: dist.all_reduce(x, group=pair)\nout = x",
    "async all_reduce": "x = torch.ones(2) * r; work = dist.all_reduce(x, async_op=True); "
    "work.wait(); out = x",
    "future of an all_reduce": "x = torch.ones(2) * r; work = dist.all_reduce(x, async_op=True); "
    "out = work.get_future().wait()[0]",
    "reduce": "x = torch.ones(2) * r; dist.reduce(x, 1); out = x if r == 1 else None",
    "reduce of bool with AVG": "dist.reduce(torch.tensor([True]), 0, dist.ReduceOp.AVG)",
    "a root that isn't there": "dist.group.WORLD.broadcast([torch.ones(1)], 7)",
    "broadcast of a strided tensor": "x = (torch.arange(6.0) * r).reshape(2, 3).t(); "
    "dist.broadcast(x, 2); out = x",
    "broadcast with other roots": "dist.broadcast(torch.ones(1), int(r == 0))",
    "gather": "x = [torch.zeros(2) for _ in range(n)] if r == 0 else None; "
    "dist.gather(torch.full((2,), float(r)), x); out = x",
    "gather of other sizes": "x = [torch.zeros(2 + r) for _ in range(n)] if r == 0 else None; "
    "dist.gather(torch.ones(2 + r), x)",
    "scatter": "x = torch.zeros(2); dist.scatter(x, [torch.full((2,), 1.0 + k) for k in range(n)] "
    "if r == 0 else None); out = x",
    "all_gather": "x = [torch.zeros(2) for _ in range(n)]; dist.all_gather(x, torch.ones(2) * r); "
    "out = x",
    "all_gather of other shapes": "x = [torch.zeros(k + 1) for k in range(n)]; "
    "dist.all_gather(x, torch.ones(r + 1)); out = x",
    "all_gather into too few": "dist.all_gather([torch.zeros(2)], torch.ones(2))",
    "all_gather into another own size": "dist.all_gather([torch.zeros(3)] * n, torch.ones(2))",
    "all_gather of other dtypes": "dist.group.WORLD.allgather([[torch.zeros(2)] * n], "
    "[torch.ones(2, dtype=torch.int32)])",
    "all_gather_into_tensor": "x = torch.zeros(n, 2); dist.all_gather_into_tensor(x, "
    "torch.ones(2) * r); out = x",
    "all_gather_into_tensor of a wrong size": "dist.all_gather_into_tensor(torch.zeros(5), "
    "torch.ones(2))",
    "all_gather_coalesced": "x = [[torch.zeros(2), torch.zeros(1)] for _ in range(n)]; "
    "dist.all_gather_coalesced(x, [torch.ones(2) * r, torch.ones(1)]); out = x",
    "all_gather_coalesced into other sizes": "x = [[torch.zeros(2 + k)] for k in range(n)]; "
    "dist.group.WORLD.allgather_coalesced(x, [torch.ones(2)])",
    "all_gather_coalesced into too few": "dist.group.WORLD.allgather_coalesced([[torch.zeros(2)]], "
    "[torch.ones(2)])",
    "reduce_scatter": "x = torch.zeros(2); dist.reduce_scatter(x, [torch.ones(2) * k for k in "
    "range(n)]); out = x",
    "reduce_scatter into another size": "dist.reduce_scatter(torch.zeros(3), [torch.ones(2)] * n)",
    "reduce_scatter of too few": "dist.reduce_scatter(torch.zeros(2), [torch.ones(2)])",
    "reduce_scatter_tensor with AVG": "x = torch.zeros(2); dist.reduce_scatter_tensor(x, "
    "torch.arange(6.0) * r, dist.ReduceOp.AVG); out = x",
    "reduce_scatter_tensor in place": "x = torch.arange(6.0); "
    "dist.reduce_scatter_tensor(x[:2], x); out = x",
    "reduce_scatter_tensor of a wrong size": "dist.reduce_scatter_tensor(torch.zeros(2), "
    "torch.ones(5))",
    "all_to_all": "x = [torch.zeros(1) for _ in range(n)]; dist.all_to_all(x, "
    "[torch.tensor([10.0 * r + k]) for k in range(n)]); out = x",
    "all_to_all with a part of another size": "x = [torch.zeros(2 if (r, k) == (0, 1) else 1) "
    "for k in range(n)]; dist.all_to_all(x, [torch.ones(1) for _ in range(n)])",
    "all_to_all with an own part of another size": "dist.all_to_all([torch.zeros(2)] * n, "
    "[torch.ones(1)] * n)",
    "all_to_all_single": "x = torch.zeros(n); "
    "dist.all_to_all_single(x, torch.arange(3.0) + 10 * r); out = x",
    "all_to_all_single with splits": "x = torch.zeros(3 * (r + 1)); dist.all_to_all_single(x, "
    "torch.arange(6.0) + 10 * r, [r + 1] * 3, [1, 2, 3]); out = x",
    "all_to_all_single with splits that differ": "dist.all_to_all_single(torch.zeros(3), "
    "torch.ones(3), [1, 1, 1], [[1, 1, 1], [2, 0, 1], [1, 1, 1]][r])",
    "all_to_all_single with splits of another sum": "dist.all_to_all_single(torch.zeros(3), "
    "torch.ones(3), [1, 1, 2], [1, 1, 1])",
    "barrier": "dist.barrier()",
    "another collective": "dist.barrier() if r == 1 else dist.all_reduce(torch.ones(1))",
    "ring of messages": "x = torch.zeros(2); works = [dist.isend(torch.ones(2) * r, (r + 1) % n), "
    "dist.irecv(x, (r - 1) % n)]\nfor work in works: work.wait()\nout = x",
    "message of another shape": "x = torch.zeros(2, 2)\nif r == 0: dist.send(torch.arange(4.0), 1, "
    "tag=5)\nif r == 1: dist.recv(x, 0, tag=5)\nout = x",
    "message of another dtype": "if r == 0: dist.send(torch.ones(4), 1)\n"
    "if r == 1: dist.recv(torch.ones(4, dtype=torch.int32), 0)",
    "message from any rank": "x = torch.zeros(1)\nif r == 0: dist.send(torch.ones(1), 1)\n"
    "if r == 1: out = dist.recv(x)",
    "message to a rank that isn't there": "dist.group.WORLD.send([torch.ones(1)], 9, 0)",
    "message with a tag below zero": "dist.group.WORLD.recv([torch.ones(1)], 0, -1)",
    "receive into an expanded tensor": "dist.recv(torch.ones(1).expand(3), (r + 1) % n)",
    "call on a destroyed group": "group = dist.new_group([0, 1, 2]); dist.destroy_process_group("
    "group); group.allreduce([torch.ones(1)])",
    "message in a destroyed group": "group = dist.new_group([0, 1, 2]); dist.destroy_process_group("
    "group); group.send([torch.ones(1)], 0, 0)",
    "split_group": "group = dist.group.WORLD.split_group([0, 1, 2][::1]); x = torch.ones(1); "
    "group.allreduce([x]).wait(); out = x",
    "an error on one rank": "if r == 1: raise ValueError('mine')\ndist.all_reduce(torch.ones(1))",
    "a group of gloo": "dist.new_group(backend='gloo')",
    "a group of two backends": "dist.new_group([0, 1], backend='cpu:gloo,cuda:nccl')",
    "the store of the world": "dist.distributed_c10d._get_default_store().set('key', 'value')",
    "a tensor changed before its wait": "x = torch.ones(2000); work = dist.isend(x, (r + 1) % n)\n"
    "dist.recv(torch.zeros(2000), (r - 1) % n)\nif r == 0: x += 1\ndist.barrier()\nwork.wait()",
    "a tensor changed after its wait": "x = torch.ones(2000); work = dist.isend(x, (r + 1) % n)\n"
    "y = torch.zeros(2000); dist.recv(y, (r - 1) % n); work.wait(); x += 1; out = y",
    "object lists": "x = [None] * n; dist.all_gather_object(x, {'rank': r}); out = x",
}


def played(where: str) -> dict[str, list[dict[str, Any]]]:
    """What each call gave on each rank of this kind."""
    found = {}
    with cluster.start(N, where=where, timeout=30) as ranks:
        ranks.view.execute(f"import sys; sys.path.append({str(Path(__file__).parent)!r})").get()
        ranks.ask_or_raise(call_tools.join)
        for name, code in CALLS.items():
            replies = ranks.ask(call_tools.call, code=code)
            records = ranks.ask_or_raise(call_tools.recorded)
            found[name] = [
                {"value": reply.value, "error": reply.error, "record": record}
                for reply, record in zip(replies, records, strict=True)
            ]
    return found


@pytest.fixture(scope="module")
def kinds() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """What each call gave, by kind of ranks."""
    tables = {where: played(where) for where in ("processes", "here", "boxes")}
    if path := os.environ.get("KINDS_OF_RANKS"):
        lines = [f"| call | rank | {' | '.join(tables)} |", f"|{'---|' * (len(tables) + 2)}"]
        for name in CALLS:
            for rank, sides in enumerate(zip(*(t[name] for t in tables.values()), strict=True)):
                told = (str(side["error"] or side["value"]).splitlines()[0] for side in sides)
                lines.append(f"| {name} | {rank} | {' | '.join(told)} |")
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tables


def comparable(told: list[dict[str, Any]]) -> list[Any]:
    """What does not depend on which rank is first.

    Of an incident, each rank gets one of two errors. What it had begun by then differs as well.
    """
    incident = ("CommunicationMismatch: ", "CommunicationStopped: ")
    errors = [rank["error"] or "" for rank in told]
    if any(error.startswith(incident) for error in errors):
        return ["incident" if error.startswith(incident) else error for error in errors]
    return told


@pytest.mark.parametrize("where", ["here", "boxes"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_the_same_on_each_kind_of_ranks(kinds, name, where):
    processes, others = (comparable(kinds[kind][name]) for kind in ("processes", where))
    for rank in range(N):
        assert others[rank] == processes[rank], f"rank {rank}"


def test_a_mismatch_names_two_ranks_on_each_kind_of_ranks(kinds):
    for table in kinds.values():
        mismatches = [
            rank["error"]
            for told in table.values()
            for rank in told
            if (rank["error"] or "").startswith("CommunicationMismatch: ")
        ]
        assert len(mismatches) > 5
        assert all(re.search(r"rank \d (.|\n)*rank \d ", error) for error in mismatches)


def test_nobody_is_told_to_report_a_bug_to_pytorch(kinds):
    tables = kinds.values()
    errors = [rank["error"] or "" for table in tables for told in table.values() for rank in told]
    assert not [error for error in errors if "PyTorch" in error and "report" in error]
    refused = [table["a group of gloo"][0]["error"] for table in tables]
    assert all("leave backend=… out" in error for error in refused)


def test_at_least_sixty_calls_are_compared():
    assert len(CALLS) >= 60
