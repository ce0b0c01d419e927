"""Check of a mesh in lab 11: the lines of ranks along its axes, and their groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from utils.checks.comparison import Mistake, short, table
from utils.checks.task import Report, Step, facts, task, value
from utils.checks.trials import enough, members_of
from utils.cluster.questions import Ranks

from .probes import OTHERS, probe_mesh
from .sharding import WORLD

SHAPES = ((2, 3), (3, 2), (6, 1), (1, 2, 3), (3, 1, 2), (6,), (2, 1, 3, 1))


def lines(shape: Sequence[int], axis: int) -> list[list[int]]:
    """Return all lines of a mesh along an axis."""
    ranks = torch.arange(math.prod(shape)).view(tuple(shape))
    return sorted(ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist())


def lines_of_all(shape: Sequence[int], axis: int) -> list[list[int]]:
    """Return each rank's line along an axis."""
    of_ranks = {rank: line for line in lines(shape, axis) for rank in line}
    return [of_ranks[rank] for rank in sorted(of_ranks)]


def _wrong_lines(shape: tuple[int, ...], axis: int) -> list[Mistake]:
    right = lines_of_all(shape, axis)
    every = range(len(right))
    n = len(shape)
    other = n - 1 - axis if n - 1 != 2 * axis else (axis + 1) % n
    return table({
        "You returned None. Return a list of ranks": [None] * len(right),
        "You returned another type. Return a list of ranks": lambda reply: any(
            isinstance(members, str) for members in reply
        ),
        "You swapped the axes. Return lines along this axis": lines_of_all(shape, other),
        "You returned coordinates in the line. Return global ranks": [
            list(range(shape[axis])) for _ in every
        ],
        "You counted column by column. The last coordinate changes fastest, so consecutive ranks "
        "are neighbors along the last axis": lines_of_all(shape[::-1], n - 1 - axis),
        "You returned all ranks. Return the ranks of one line": [list(every) for _ in every],
        "You left out the rank itself. Include it": [
            [q for q in right[r] if q != r] for r in every
        ],
        "You returned the right ranks in another order. Sort them": lambda reply: (
            isinstance(reply, list) and _any_order(reply) == _any_order(right)
        ),
    })


def _any_order(of_ranks: list) -> list[list[str]]:
    """Return lines in a form without the order of their ranks."""
    return [sorted(map(str, members or [])) for members in of_ranks]


@task("11.1", "a mesh of ranks and its groups", points=2)
def mesh(ranks: Ranks, report: Report) -> None:
    """Judge the lines of meshes of several shapes, and groups that all ranks make alike."""
    if not enough(ranks, report, WORLD):
        return
    shapes = (*SHAPES, *OTHERS)
    answers = report.answers(ranks, probe_mesh, shapes=[list(shape) for shape in shapes])
    for k, shape in enumerate(shapes):
        meshes = {answer.rank: answer.value[k] for answer in answers}
        right = [report.follow(rank, _mesh(rank, shape, made)) for rank, made in meshes.items()]
        if not (all(right) and report.follow(None, _asked_alike(shape, meshes))):
            return


def _mesh(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    for axis in range(len(shape)):
        of_ranks = [of_rank[axis] for of_rank in result["lines"]]
        call = f"line(r, {shape}, {axis}) for r = 0, 1, …"
        yield value(of_ranks, lines_of_all(shape, axis), _wrong_lines(shape, axis), what=call)
    if shape in SHAPES:
        yield from _mesh_groups(rank, shape, result)


def _mesh_groups(rank: int, shape: tuple[int, ...], result: dict[str, Any]) -> Iterator[Step]:
    call = f"mesh_groups({shape})"
    asked = sorted(result["asked"])
    axes = [lines(shape, axis) for axis in range(len(shape))]
    own_lines = [members_of(axis, rank, WORLD) for axis in axes]
    every_line = sorted(itertools.chain(*axes))
    alone = (
        f"{call}: You make only this rank's own groups. Let every rank call new_group for every "
        "line, because the call is collective"
    )
    yield facts({alone: asked == sorted(own_lines) != every_line})
    wrong = {
        "Return a list of groups": lambda reply: isinstance(reply, str),
        "You returned the groups in the wrong order. Put axis 0 first": own_lines[::-1],
        f"Return {len(own_lines)} groups on each rank, one for each axis": lambda reply: (
            isinstance(reply, list) and len(reply) != len(own_lines)
        ),
        "Return groups of dist.new_group with this rank in each": lambda reply: (
            isinstance(reply, list) and any(isinstance(of, str) for of in reply)
        ),
    }
    yield value(result["groups"], own_lines, table(wrong), what=call, form="a list of groups")
    missing = [members for members in every_line if members not in asked]
    twice = [members for members in asked if asked.count(members) > every_line.count(members)]
    yield facts({
        f"{call}: You never made the group {missing[:1]}. Make a group for every line": missing,
        f"{call}: You made the group of {twice[:1]} more than once, or it isn't a line of this "
        "mesh": twice,
    })


def _asked_alike(shape: tuple[int, ...], meshes: dict[int, dict[str, Any]]) -> Iterator[Step]:
    """Judge whether all ranks ask for the same groups in the same order."""
    first = meshes[0]["asked"]
    for rank, result in meshes.items():
        yield facts({
            f"mesh_groups({shape}): rank 0 asks for {short(first)}, rank {rank} for "
            f"{short(result['asked'])}. Make every group on every rank, in the same order, "
            "because new_group is collective": result["asked"] != first
        })
