"""The probes of task 4.7: a batch norm over the rows of all ranks of a group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torch_mpi.record import as_dict, log
from utils.checks.draws import across, seeded
from utils.checks.groups import Group, in_group
from utils.checks.probe import answer_named, fingerprint, kind_of, recorded, values_of


def drawn_rows(
    seed: int, count: int, channels: int, mean: float, double: bool
) -> tuple[Tensor, Tensor]:
    """Return rows [count, channels] around a mean, and what backward gets for them.

    Rows of another seed have another mean, about 1 apart. Neighbors are about 2 apart, so that the
    variance of few rows is about 1, too.
    """
    draw = seeded(seed)
    options = {"generator": draw, "dtype": torch.float64}
    center = mean + torch.randn(channels, **options)
    noise, upstream = torch.randn(2, count, channels, **options)
    rows = noise / 2 + (1 - 2 * (torch.arange(count) % 2)).unsqueeze(1)
    dtype = torch.float64 if double else torch.float32
    return (center + rows).to(dtype), upstream.to(dtype)


def drawn_parameters(seed: int, channels: int, double: bool) -> tuple[Tensor, Tensor]:
    """Return a weight and a bias that all ranks know."""
    draw = seeded(seed)
    both = torch.randn(2, channels, generator=draw, dtype=torch.float64)
    weight, bias = both if double else both.float()
    return weight + 2, bias


@in_group
def probe_norm(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    data_seed: int,
    counts: list[int],
    channels: int,
    mean: float,
    double: bool,
    turned: bool,
    seed: int,
    eps: float,
) -> dict:
    """Apply `SyncedNorm` to several batches; then go backward, beginning with the last one.

    Args:
        counts: how many rows this rank has of each batch.
        turned: whether the rows are columns in memory.
    """
    function = answer_named(user_ns, "SyncedNorm").apply
    batches: list[dict[str, Any]] = []
    outputs = []
    for number, count in enumerate(counts):
        x, upstream = drawn_rows(data_seed + number, count, channels, mean, double)
        x = (across(x) if turned else x).requires_grad_()
        weight, bias = (p.requires_grad_() for p in drawn_parameters(seed, channels, double))
        given = {"x": x, "weight": weight, "bias": bias, "grad": upstream}
        before = {name: fingerprint(tensor) for name, tensor in given.items()}
        result, calls = recorded(function, x, weight, bias, eps, group)
        if not isinstance(result, tuple) or len(result) != 4:
            return {"returned": kind_of(result)}
        y, *statistics = result
        batches.append({
            "y": values_of(y),
            "is like x": getattr(y, "shape", None) == x.shape and y.dtype == x.dtype,
            "statistics": [values_of(one) for one in statistics],
            "forward": calls,
        })
        outputs.append((y, given, before))
    for batch, (y, given, before) in reversed(list(zip(batches, outputs, strict=True))):
        if not batch["is like x"]:
            return {"batches": batches}
        mark = log.mark()
        y.backward(given["grad"])
        batch["backward"] = [as_dict(call) for call in log.since(mark)]
        for name in ("x", "weight", "bias"):
            batch[f"of {name}"] = values_of(given[name].grad)
        batch["changed"] = [name for name in given if fingerprint(given[name]) != before[name]]
    return {"batches": batches}


def images_of(rows: Tensor, wide: bool) -> Tensor:
    """Return the rows as images [count / 4, channels, 2, 2] if `wide`."""
    return rows.reshape(-1, 2, 2, rows.shape[1]).movedim(-1, 1) if wide else rows


@in_group
def probe_norm_module(
    user_ns: dict,
    *,
    rank: int,
    group: Group,
    data_seed: int,
    counts: list[int],
    channels: int,
    wide: bool,
    evaluates: bool,
) -> dict:
    """Train `SyncedBatchNorm` on batches, and evaluate it on those ranks that evaluate.

    Args:
        wide: whether it gets images instead of rows.
    """
    module: nn.Module = answer_named(user_ns, "SyncedBatchNorm")(channels, group).double()
    drawn = [
        images_of(drawn_rows(data_seed + number, count, channels, 0.0, True)[0], wide)
        for number, count in enumerate(counts)
    ]
    trained = [values_of(module(x)) for x in drawn]
    answer = {
        "trained": trained,
        "mean": values_of(module.running_mean),
        "variance": values_of(module.running_var),
    }
    module.eval()
    if evaluates:
        y, answer["calls"] = recorded(module, drawn[0])
        answer["evaluated"] = values_of(y)
    return answer
