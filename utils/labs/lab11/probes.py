"""The probes of grids of ranks, of mixes and of meshes. :mod:`.memory_probes` has the others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from utils.checks.groups import group_of
from utils.checks.probe import (
    also_calls,
    answer_named,
    fingerprint,
    kind_of,
    number,
    reading_answer,
    recorded,
    told,
)
from utils.forecast.machines import Machine, machine
from utils.labs.shared.pipeline_stages import Piece, samples_and_labels
from utils.labs.shared.small_models import gradient_of

from .mixes import Mix, Transformer
from .small_layers import patched

# -- grids of pipelines and layers -----------------------------------------------------------------


@contextlib.contextmanager
def axes_of(grid: Sequence, rank: int) -> Iterator[list]:
    """Yield this rank's group along each axis of a grid."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(group_of(partition, rank)) for partition in grid]


@also_calls("all_reduce", "recv", "send")
def probe_hybrid(
    user_ns: dict, *, rank: int, seed: int, grid: list, microbatches: int, samples: int
) -> dict:
    """Take a step of a grid of pipelines; the seed belongs to this rank's stage."""
    with axes_of(grid, rank) as (pp, dp):
        place = dist.get_rank(pp), dist.get_world_size(pp)
        piece = Piece(seed, *place)
        x, labels = samples_and_labels(seed, samples)
        seen = []
        piece.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
        function = reading_answer(user_ns, "hybrid_step")
        loss, calls = recorded(function, piece, x, labels, microbatches, pp, dp)
        single = Piece(seed, *place).float()
        function(single, x.float(), labels, microbatches, pp, dp)
    return {
        "loss": number(loss),
        "gradient": gradient_of(piece),
        "calls": calls,
        "events": piece.log.events,
        "images": sum(map(len, seen)),
        "piece": fingerprint(torch.cat(seen)) if seen else "",
        "dtype": str(next(single.parameters()).dtype),
    }


# The names say nothing: only an argument says which parameters are split.
CUT = {"p1": (5, 3), "inner.p2": (2, 4), "p4": (5,)}
WHOLE = {"inner.p1": (7,), "p3": (6,)}


class CutLayer(nn.Module):
    """A layer whose parameters have these names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        for name, shape in (CUT | WHOLE).items():
            module, _, last_name = name.rpartition(".")
            parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
            self.get_submodule(module).register_parameter(last_name, parameter)


def probe_clip(user_ns: dict, *, rank: int, gradients: dict, grid: list, most: float) -> dict:
    """Average and clip the gradients of a made-up layer, which are given by name."""
    with axes_of(grid, rank) as (tp, dp):
        layer = CutLayer()
        for name, parameter in layer.named_parameters():
            parameter.grad = torch.tensor(gradients[name], dtype=torch.float64)
        function = reading_answer(user_ns, "average_and_clip")
        norm, calls = recorded(function, layer, set(CUT), most, tp, dp)
    return {"norm": number(norm), "calls": calls, "gradient": gradient_of(layer)}


# -- mixes -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, a machine, and a batch."""

    model: Transformer
    machine: Machine
    batch: int

    @classmethod
    def of(cls, sizes: dict[str, int], name: str, units: dict[str, int], batch: int) -> Case:
        """Return a case from numbers and names, which a rank gets as JSON."""
        target = machine(name)
        for level, count in units.items():
            target = target.with_level(level, units=count)
        return cls(Transformer(**sizes), target, batch)

    def __str__(self) -> str:
        model = f"{self.model.layers} layers of width {self.model.width:,}"
        return f"{model}, batch {self.batch:,}, {self.machine.devices:,} devices"


def mix_of(sizes: dict[str, int]) -> Mix:
    """Return a mix of these sizes, which needs the most memory for activations."""
    return Mix(**sizes, zero=1, recompute="none")


def probe_mapping(user_ns: dict, *, rank: int, cases: list, mixes: list) -> dict[str, list]:
    """Call `levels` and `memory` for some mixes, and `map_model` in each case.

    Note whether `map_model` changed its arguments.

    Args:
        mixes: a case, the sizes of a mix, and the bytes of its activations.
    """
    parts, answers = [], []
    for *given, sizes, activations in mixes:
        case, mix = Case.of(*given), mix_of(sizes)
        crossed = reading_answer(user_ns, "levels")(mix, case.machine)
        held = reading_answer(user_ns, "memory")(case.model, mix, activations)
        parts.append({"levels": told(crossed), "memory": number(held)})
    for given in cases:
        case, function = Case.of(*given), reading_answer(user_ns, "map_model")
        result = function(case.model, case.machine, case.batch)
        answers.append({"changed": case != Case.of(*given), "result": listed_mapping(result)})
    return {"parts": parts, "mapped": answers}


def listed_mapping(result: Any) -> Any:
    """Return a mapping in plain types; for any other value, the name of its type."""
    if not isinstance(result, dict):
        return None if result is None else f"a {kind_of(result)}"
    listed = {key: told(value) for key, value in result.items()}
    listed |= {key: number(result[key]) for key in ("seconds", "memory") if key in result}
    if (mix := result.get("mix")) is not None:
        listed["mix"] = asdict(mix) if isinstance(mix, Mix) else f"a {kind_of(mix)}"
    return listed


# -- meshes ----------------------------------------------------------------------------------------


#: Meshes with more or fewer ranks than the lab has: the check asks only for their lines.
OTHERS = ((2, 5, 3), (2, 2))


class _Group:
    """A stand-in for a process group that nobody made."""

    def __init__(self, ranks: list[int]):
        self.ranks = ranks


def probe_mesh(user_ns: dict, *, rank: int, shapes: list) -> list:
    """Return the lines of all ranks, the arguments of `new_group`, and the groups."""
    line = answer_named(user_ns, "line")
    meshes = []
    for shape in map(tuple, shapes):
        axes = range(len(shape))
        of_ranks = [
            [listed_line(line(r, shape, axis)) for axis in axes] for r in range(math.prod(shape))
        ]
        lost = any(members is None for of_rank in of_ranks for members in of_rank)
        groups: Any = None
        asked: list[list[int]] = []
        if not lost and shape not in OTHERS:
            with _groups_noted(rank, asked):
                groups = _groups_listed(answer_named(user_ns, "mesh_groups")(shape))
        meshes.append({"lines": of_ranks, "asked": asked, "groups": groups})
    return meshes


@contextlib.contextmanager
def _groups_noted(rank: int, asked: list[list[int]]) -> Iterator[None]:
    """Make no group, but list the ranks of each group that `new_group` should make."""

    def new_group(ranks: Iterable[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        asked.append(sorted(range(dist.get_world_size()) if ranks is None else ranks))
        return _Group(asked[-1]) if rank in asked[-1] else dist.GroupMember.NON_GROUP_MEMBER

    with patched("new_group", new_group):
        yield


def _groups_listed(groups: Any) -> Any:
    if groups is None:
        return None
    if not isinstance(groups, list):
        return f"<{type(groups).__name__}>"
    return [
        group.ranks if isinstance(group, _Group) else f"<{type(group).__name__}>"
        for group in groups
    ]


def listed_line(line: Any) -> Any:
    """Return a list or None in plain types; for any other value, the name of its type."""
    return told(line) if line is None or isinstance(line, list) else f"<{kind_of(line)}>"
