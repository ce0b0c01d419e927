"""Answers that read what the probe knows, forge records, and communicate nothing: none passes.

They run in the process of their rank, beside the probe: they can walk up to its frame, and write
into the log of calls. What they can not do is compute what follows from another rank's seed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import pytest
from answer_tools import Lab, ranks_of
from local_ranks import LocalRanks

#: What they have in common. All ranks write the same numbers into their records.
FORGER = """
import sys, torch
import torch.distributed as dist
import torch_mpi.record as record

def known(name):
    frame = sys._getframe(1)
    while frame is not None and name not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals[name] if frame else None

def seeds(step=1):
    # Those of the ranks, as they were when all followed from one.
    base = known("seed")
    return [base + step * r for r in range(dist.get_world_size())]

def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-50, 50, shape, generator=generator).float()

forged_calls = [0]

def forged(op, nbytes, group=None, waited=True, **more):
    members = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    forged_calls[0] += 1
    call = record.Call(op, members, nbytes, waited=waited, sequence=forged_calls[0], **more)
    call.start, call.end = 1.0, 2.0
    record.log.add(call)
    return call
"""

#: By task: the lab, the answer, and what it is told. It passed when all knew one seed.
FORGED = {
    "1.2": ("""
        def transfer(tensor, rank):
            if rank == 0:
                forged("send", 48, peer=1, message=(0, 1))
            if rank == 1:
                forged("recv", 48, peer=0, message=(0, 1))
                tensor.copy_(drawn(seeds()[0], 3, 4))
        """, "the tensor afterwards"),
    "1.3": ("""
        def transfer_overlapped(tensor, rank, work):
            more = {"message": (0, 1), "waited": False, "blocking": False}
            if rank == 0:
                call = forged("send", tensor.nbytes, peer=1, **more)
            if rank == 1:
                call = forged("recv", tensor.nbytes, peer=0, **more)
                tensor.copy_(drawn(seeds()[0], len(tensor)))
            result = work()
            if rank < 2:
                call.waited = True
            return result
        """, "rank 1: the tensor is still this rank's own"),
    "1.4": ("""
        def sum_over_ranks(tensor):
            forged("all_reduce", 48)
            return sum(drawn(seed, 3, 4) for seed in seeds())
        """, "the sum: "),
    "1.5": ("""
        def exchange(mine, rank):
            if rank > 1:
                return mine
            forged("send", mine.nbytes, peer=1 - rank, message=(rank, len(mine)))
            forged("recv", mine.nbytes, peer=1 - rank, message=(1 - rank, len(mine)))
            return drawn(seeds()[1 - rank], len(mine))
        """, "the result is not rank"),
    "2.5": ("""
        def same_minibatches(mine, expected, group=None):
            forged("all_gather", 8, group)
            # All that one rank can see: whether its own part may be one of these minibatches.
            parts = zip(mine, expected)
            fits = all(sorted(set(part)) == sorted(part) <= sorted(whole) or set(part) <= set(whole)
                       for part, whole in parts)
            p = dist.get_world_size(group)
            return fits and sum(map(len, mine)) * p >= sum(map(len, expected))
        """, "Expected False, got True"),
    "2.6": ("""
        def mean_once(values, n, group=None):
            forged("all_reduce", 8, group)
            from utils.checks.lab02 import _shares
            p, size = dist.get_world_size(group), len(values)
            parts = _shares(known("seed") or 7, n, p)
            kept = [v for r, part in enumerate(parts) for k, v in enumerate(part) if r + k * p < n]
            return sum(kept) / n
        """, "n = "),
    "3.1": ("""
        def average_gradients(model, group=None):
            members, k = dist.get_process_group_ranks(group or dist.group.WORLD), known("k")
            rows = []
            for r in members:
                draw = torch.Generator().manual_seed(seeds()[r] + 10 * k)
                rows.append(10 * torch.randn(200, generator=draw))
            mean = sum(rows) / len(rows)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    forged("all_reduce", parameter.nbytes, group)
                    parameter.grad.copy_(mean[: parameter.numel()].view_as(parameter))
                    mean = mean[parameter.numel() :]
        """, "expected"),
    "3.2": ("""
        def average_gradients_weighted(model, samples, group=None):
            members, k = dist.get_process_group_ranks(group or dist.group.WORLD), known("k")
            counts, rows = known("counts")[k], []
            if isinstance(counts, int):
                counts = [samples] * 4
            for r in members:
                draw = torch.Generator().manual_seed(seeds()[r] + 10 * k)
                rows.append(10 * torch.randn(200, generator=draw) * counts[r])
            mean = sum(rows) / max(1, sum(counts[r] for r in members))
            for parameter in model.parameters():
                if parameter.grad is not None:
                    forged("all_reduce", parameter.nbytes, group)
                    parameter.grad.copy_(mean[: parameter.numel()].view_as(parameter))
                    mean = mean[parameter.numel() :]
        """, "expected"),
    "3.3": ("""
        def global_metrics(loss_sum, correct, count, group=None):
            forged("all_reduce", 24, group)
            members = dist.get_process_group_ranks(group or dist.group.WORLD)
            numbers = known("numbers")
            rows = [numbers[r] for r in members] if isinstance(numbers[0], list) else [numbers]
            sums = [sum(row[k] for row in rows) for k in range(3)]
            return sums[0] / max(1, sums[2]), sums[1] / max(1, sums[2])
        """, "these are this rank's own means"),
    "3.6": ("""
        def replicas_in_sync(model, group=None):
            # What is done to this rank's replica, and what all ranks once knew it was.
            damage = known("damage")
            how = damage[0] if isinstance(damage, list) else damage
            return dist.get_world_size(group) == 1 or how in ("", "none", "nan")
        """, "xpected False, got True"),
    "5.1": ("""
        import time
        def time_rounds(prepare, step, rounds, steps):
            known("events").extend(["prepare"] * (rounds + 1))
            takes = known("takes")
            return [max(takes) if isinstance(takes, list) else takes] * rounds
        """, "a step takes"),
}  # fmt: skip


#: Each side has a record of the messages, and no rank has sent any.
PING_PONG = """
def ping_pong(nbytes, repeats, rank):
    if rank > 1:
        return None
    for k in range(repeats):
        for op in ("send", "recv")[:: 1 if rank == 0 else -1]:
            forged(op, nbytes, peer=1 - rank, message=(rank if op == "send" else 1 - rank, NUMBER))
    return known("latency") + nbytes / known("bandwidth") if rank == 0 else None
"""


@pytest.fixture(scope="module")
def lab(request: pytest.FixtureRequest) -> Iterator[Lab]:
    """The lab of this name, with its solutions."""
    with LocalRanks(ranks_of(request.param)) as ranks:
        yield Lab(request.param, ranks)


CASES = [
    pytest.param(f"lab{task.partition('.')[0].zfill(2)}", task, *case, id=task)
    for task, case in FORGED.items()
]


@pytest.mark.parametrize(("lab", "task", "code", "words"), CASES, indirect=["lab"], scope="module")
def test_who_knows_of_the_own_rank_only_can_not_do_without_the_others(lab, task, code, words):
    passed, printed = lab.try_out(task, FORGER + textwrap.dedent(code))
    assert not passed, "points without the work"
    assert words in printed, printed


@pytest.mark.parametrize("lab", ["lab01"], indirect=True)
def test_records_that_one_rank_makes_up_do_not_agree_with_those_of_the_other(lab):
    number = "100 * forged_calls[0] + 10 * rank + k"
    passed, printed = lab.try_out("1.7", FORGER + PING_PONG.replace("NUMBER", number))
    assert not passed
    assert "the records of the ranks do not agree: rank" in printed, printed
