"""Collectives as rounds of messages, and what they cost on a tree of links.

The algorithms of an all-reduce are those of lab 06, and two that large clusters use:

====================  ==========================================  =================================
algorithm             rounds                                      bytes of a message
====================  ==========================================  =================================
central               2                                           n
tree                  2 log p                                     n
direct                2, of p − 1 messages each                   n/p
ring                  2(p − 1)                                    n/p
halving and doubling  2 log p                                     n/2, n/4, … n/p and back
hierarchical          ring in each unit, all-reduce across units  n/k in the units, then n/k across
====================  ==========================================  =================================

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", IJHPCA 19(1), 2005; for hierarchical: M. Cho et al., "BlueConnect", MLSys 2019.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .machines import CATALOG, Machine
from .tree import Cost, Devices, of_all_pairs, of_messages


@dataclass(frozen=True)
class Round:
    """A round of messages that start together, and how often it is repeated."""

    cost: Cost  # of one round, by the bytes of a message
    share: float  # bytes of a message as a share of the tensor
    times: int = 1  # how many equal rounds follow each other


@dataclass(frozen=True)
class Price:
    """The time of a collective."""

    seconds: float  # from the last rank's call to the end on the last rank
    algorithm: str = ""
    level: int = 0  # the number of the level whose links take the most time
    busy: float = 0.0  # seconds for which a rank's link carries bytes


Rounds = Iterable[Round]
Algorithm = Callable[[Machine, Devices], Rounds]


# --- the parts of algorithms ---------------------------------------------------------------------


def _ring(machine: Machine, groups: Devices) -> Rounds:
    """Yield p − 1 rounds in which each rank sends a chunk to the next rank."""
    p = groups.shape[1]
    sources, targets = groups.ravel(), np.roll(groups, -1, axis=1).ravel()
    yield Round(of_messages(machine, sources, targets), 1 / p, p - 1)


def _direct(machine: Machine, groups: Devices) -> Rounds:
    """Yield one round in which each rank sends every other rank a chunk."""
    yield Round(of_all_pairs(machine, groups), 1 / groups.shape[1])


def _halving(machine: Machine, groups: Devices) -> Iterator[Round]:
    """Yield log p rounds with pairs at distances p/2, p/4, … 1, and half as many bytes each time.

    If p is not a power of two, the ranks beyond the largest power first pass their tensor on.
    """
    p = groups.shape[1]
    power = 1 << (p.bit_length() - 1)
    if power < p:
        yield Round(
            of_messages(machine, groups[:, power:].ravel(), groups[:, : p - power].ravel()), 1
        )
    ranks = np.arange(power)
    distance, share = power // 2, 0.5
    while distance:
        pairs = groups[:, ranks].ravel(), groups[:, ranks ^ distance].ravel()
        yield Round(of_messages(machine, *pairs), share)
        distance, share = distance // 2, share / 2


def _to_root(machine: Machine, groups: Devices) -> Rounds:
    """Yield one round in which all ranks send to rank 0 of their group."""
    roots = np.repeat(groups[:, 0], groups.shape[1] - 1)
    yield Round(of_messages(machine, groups[:, 1:].ravel(), roots), 1)


def _by_root(machine: Machine, groups: Devices) -> Iterator[Round]:
    """Yield a tree of rounds of the whole tensor, and a round in which the root has all parts."""
    yield from _doubling_tree(machine, groups)
    for one in _to_root(machine, groups):
        yield Round(one.cost, 1 / groups.shape[1])


def _doubling_tree(machine: Machine, groups: Devices) -> Iterator[Round]:
    """Yield the rounds of a binomial tree, in which twice as many ranks take part each time."""
    p, reach = groups.shape[1], 1
    while reach < p:
        sources = groups[:, : min(reach, p - reach)].ravel()
        yield Round(of_messages(machine, sources, groups[:, reach : 2 * reach].ravel()), 1)
        reach *= 2


def _doubling(machine: Machine, groups: Devices) -> Iterator[Round]:
    """Yield ⌈log₂ p⌉ rounds, after which each rank has what all ranks had.

    For a power of two of ranks this is recursive doubling: the pairs of `_halving` exchange whole
    tensors. Otherwise each rank passes on the tensors of all ranks that it has (Bruck et al.,
    "Efficient algorithms for all-to-all communications", IEEE TPDS 1997).
    """
    p, have = groups.shape[1], 1
    if p & (p - 1) == 0:
        yield from (Round(one.cost, 1) for one in _halving(machine, groups))
        return
    while have < p:
        more = min(have, p - have)
        targets = np.roll(groups, have, axis=1).ravel()
        yield Round(of_messages(machine, groups.ravel(), targets), more)
        have += more


def _dissemination(machine: Machine, groups: Devices) -> Iterator[Round]:
    """Yield the rounds of a barrier, in which round k sends nothing over a distance of 2^k."""
    distance = 1
    while distance < groups.shape[1]:
        targets = np.roll(groups, -distance, axis=1).ravel()
        yield Round(of_messages(machine, groups.ravel(), targets), 0)
        distance *= 2


def _twice(half: Algorithm) -> Algorithm:
    """Return an algorithm that runs the rounds of another one there and back."""

    def both(machine: Machine, groups: Devices) -> Iterator[Round]:
        for one in half(machine, groups):
            yield Round(one.cost, one.share, 2 * one.times)

    return both


def _hierarchical(across: Algorithm) -> Algorithm:
    """Return a ring inside each unit, and another algorithm across the units.

    A unit is the smallest one in which every group has equally many consecutive members, but not
    all. If there is none, the algorithm has no rounds.
    """

    def rounds(machine: Machine, groups: Devices) -> Iterator[Round]:
        p, k = groups.shape[1], _members_of_a_unit(machine, groups)
        if not 1 < k < p:
            return
        yield from _ring(machine, groups.reshape(-1, k))
        # Member i of a unit joins the members i of the group's other units.
        peers = groups.reshape(len(groups), -1, k).swapaxes(1, 2).reshape(-1, p // k)
        for one in across(machine, peers):
            yield Round(one.cost, one.share / k, one.times)

    return rounds


def _members_of_a_unit(machine: Machine, groups: Devices) -> int:
    """Return how many consecutive members each group has in a unit below the root; or 1."""
    for size in machine.sizes[:-1]:
        units = groups // size
        changes = (units[:, 1:] != units[:, :-1]).sum(axis=1) + 1
        count, rest = divmod(groups.shape[1], int(changes[0]))
        if rest or count < 2 or (changes != changes[0]).any():
            continue
        if (units.reshape(len(groups), -1, count) == units[:, ::count, None]).all():
            return count
    return 1


_PART: dict[str, Algorithm] = {
    "ring": _ring,
    "direct": _direct,
    "halving and doubling": _halving,
    "hierarchical": _hierarchical(_ring),
    "hierarchical halving": _hierarchical(_halving),
}
ALL_REDUCE: dict[str, Algorithm] = {name: _twice(half) for name, half in _PART.items()}
ALL_REDUCE |= {
    "tree": _twice(_doubling_tree),
    "central": _twice(_to_root),
    "recursive doubling": _doubling,
}
_FROM_ROOT: dict[str, Algorithm] = {"tree": _doubling_tree, "central": _to_root}

#: The algorithms of each collective, by the words of torch.distributed.
ALGORITHMS: dict[str, dict[str, Algorithm]] = {
    "all_reduce": ALL_REDUCE,
    "reduce_scatter": {**_PART, "tree": _by_root},
    "all_gather": {**_PART, "tree": _by_root},
    "all_to_all": {"direct": _direct},
    "broadcast": _FROM_ROOT,
    "reduce": _FROM_ROOT,
    "gather": {"central": _to_root},
    "scatter": {"central": _to_root},
    "barrier": {"dissemination": _dissemination},
}

#: Libraries whose choices are known, from machines.toml: for each operation, rules in order. Calls
#: that are pending together share the latency there. Others, such as NCCL, run one call at a time.
LIBRARIES: dict[str, dict[str, list[dict[str, Any]]]]
LIBRARIES = tomllib.loads(CATALOG.read_text(encoding="utf-8"))["libraries"]


def _chosen(library: str, op: str, nbytes: float, ranks: int) -> str:
    """Return the algorithm that a library chooses; without a rule, it is the first one."""
    for rule in LIBRARIES[library].get(op, []):
        if nbytes <= rule.get("bytes", math.inf) and ranks <= rule.get("ranks", math.inf):
            return str(rule["algorithm"])
    return next(iter(ALGORITHMS[op]))


def _asked_or_chosen(machine: Machine, op: str, nbytes: float, ranks: int, algorithm: str) -> str:
    """Return the algorithm that was asked for, or that a library chooses; "" for the fastest."""
    if algorithm not in {*LIBRARIES, *ALGORITHMS[op]}:
        algorithm = machine.library
    return _chosen(algorithm, op, nbytes, ranks) if algorithm in LIBRARIES else algorithm


# Lab 06 teaches these, but no library that we know runs them for large tensors or many ranks.
_FOR_LESSONS = {"direct", "central"}


# --- the price -----------------------------------------------------------------------------------


def price(machine: Machine, op: str, groups: Devices, nbytes: float, algorithm: str = "") -> Price:
    """Return the time of a collective that all groups run at the same time.

    Args:
        machine: the tree of links.
        op: a key of `ALGORITHMS`.
        groups: int64 array of device numbers, of shape [groups, ranks of a group], in group order.
        nbytes: of the tensor: what each rank contributes to an all_reduce, broadcast, or reduce;
            the input of a reduce_scatter and of an all_to_all; the output of an all_gather; one
            rank's part in a gather or scatter.
        algorithm: a key of `ALGORITHMS[op]`, or of `LIBRARIES`. By default, or if the operation
            does not have it, the machine's library chooses.

    Raises:
        ValueError: there is no such operation, or the groups can't run the algorithm.
    """
    if op not in ALGORITHMS:
        raise ValueError(f"There is no model of {op!r}. Choose one of: {', '.join(ALGORITHMS)}.")
    algorithm = _asked_or_chosen(machine, op, nbytes, groups.shape[1], algorithm)
    usual = [name for name in ALGORITHMS[op] if name not in _FOR_LESSONS]
    names = [algorithm] if algorithm else usual or list(ALGORITHMS[op])
    if groups.shape[1] == 1:
        return Price(0.0, names[0])
    prices = (_of(machine, op, name, groups, nbytes) for name in names)
    possible = [one for one in prices if one is not None]
    if not possible:
        raise ValueError(f"{op}: these groups can't run {algorithm!r} on {machine.name}.")
    return min(possible, key=lambda one: one.seconds)


def _of(machine: Machine, op: str, name: str, groups: Devices, nbytes: float) -> Price | None:
    played = rounds(machine, op, name, groups)
    if not played:
        return None
    seconds = [one.times * one.cost.seconds(one.share * nbytes) for one in played]
    longest = played[int(np.argmax(seconds))]
    busy = sum(one.times * one.cost.per_byte * one.share * nbytes for one in played)
    if op == "all_reduce" and name in _FROM_ROOT:
        busy /= 2  # first one direction of the links carries all bytes, then the other direction
    return Price(sum(seconds), name, longest.cost.level, busy)


def rounds(machine: Machine, op: str, name: str, groups: Devices) -> list[Round]:
    """Return the rounds of an algorithm; none if the groups can't run it."""
    return _rounds(machine, op, name, groups.shape, groups.tobytes())


@functools.lru_cache(maxsize=4096)
def _rounds(
    machine: Machine, op: str, name: str, shape: tuple[int, int], content: bytes
) -> list[Round]:
    groups = np.frombuffer(content, dtype=np.int64).reshape(shape)
    return list(ALGORITHMS[op][name](machine, groups))
