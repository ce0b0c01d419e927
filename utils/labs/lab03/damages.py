"""Damages of replicas: what is done to them, and how they differ afterwards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

# Parameters of the model that is damaged.
PARAMETERS = ["1.weight", "1.bias (frozen)", "3.weight", "3.bias", "5.weight", "5.bias"]
SUBTLE = {
    "swap": "two weights are swapped on one rank, so that all sums agree",
    "checksum": "four weights in a row differ in their last bits on one rank, so that sums of the "
    "bits agree, also if each counts k times at place k",
    "opposite": "one weight is larger by 1 on one rank and smaller by 1 on another",
    "one nan": "NaN on one rank only",
    "nan": "NaN at the same place on all ranks: NaN is not equal to itself, but its bits are",
    "signs": "one weight has the other sign on every second rank, so that a sum of the bits wraps",
    "many": "256 weights of 3.weight differ in their last bits on one rank, so that a count of "
    "them in 8 bits is 0",
    "zero": "0.0 on one rank and -0.0 on another, equal as numbers, but the bits differ",
    "none": "identical replicas",
}
# Every parameter in turn, and every rank. So many are sound that nobody guesses which.
DAMAGES = ["none", *map(str, range(len(PARAMETERS))), *SUBTLE, *["none"] * 6]


def damage_of(damage: str, place: int, size: int, seed: int) -> list:
    """Return what is done to the replica at a place of a group: how, which parameter, where in it.

    "" is nothing: who is told so cannot know whether another replica is damaged.
    """
    which = int(damage) if damage.isdigit() else seed % len(PARAMETERS)
    if damage == "many":
        which = PARAMETERS.index("3.weight")
    if damage.isdigit():
        how = "last bit" if place == (which + seed) % size else ""
    else:
        how = _how(damage, place, last=place == size - 1)
    return [how, which, _spot(damage, size, seed)]


def _how(damage: str, place: int, last: bool) -> str:
    ends = "smaller" if last else ""
    on_some = {
        "none": "",
        "nan": "nan",
        "opposite": "larger" if place == 0 else ends,
        "signs": "other sign" if place % 2 else "",
        "zero": "-0.0" if last else "0.0",
    }
    return on_some.get(damage, damage if last else "")


def _spot(damage: str, size: int, seed: int) -> int:
    """Return which weight is damaged: over all groups the last one (-1), the first one, another."""
    return (-1, 0, seed // 7)[(int(damage) + size) % 3] if damage.isdigit() else seed // 7


@torch.no_grad()
def spoil(model: nn.Module, how: str, which: int, at: int) -> None:
    """Change a parameter of a replica; see `damage_of`."""
    row = list(model.parameters())[which].view(-1)
    k = at % len(row)
    if how in ("swap", "checksum"):
        k = at % (len(row) - 3)
    if how in ("last bit", "many"):
        part = slice(256) if how == "many" else slice(k, k + 1)
        row[part] = torch.nextafter(row[part], row.new_tensor(9.0))
    elif how in ("-0.0", "0.0", "nan", "one nan"):
        row[k] = float(how.removeprefix("one "))
    elif how == "checksum":
        bits = row.view(torch.int64 if row.dtype == torch.float64 else torch.int32)
        bits[k : k + 4] += torch.tensor([1, -3, 3, -1], dtype=bits.dtype)
    elif how == "other sign":
        row[k] = -row[k]
    elif how == "swap":
        row[k : k + 2] = row[k : k + 2].flip(0).clone()
    elif how:
        row[k] += {"larger": 1.0, "smaller": -1.0}[how]


def in_words(damage: str, members: Sequence[int], seed: int) -> str:
    """Return how the replicas of a group differ."""
    if not damage.isdigit():
        return SUBTLE[damage]
    which = int(damage)
    size = len(members)
    victim = members[(which + seed) % size]
    weight = {-1: "the last", 0: "the first"}.get(_spot(damage, size, seed), "one")
    return f"{weight} weight of {PARAMETERS[which]} differs in its last bit on rank {victim}"
