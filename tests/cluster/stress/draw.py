"""Which cell comes when: of a seed and a number, whatever has happened before."""

from __future__ import annotations

import random
from collections.abc import Iterator

from . import accidents, right, wrong
from .cells import Cell, Maker

# How often there is a cell of these tables.
WEIGHTS = ((right.MAKERS, 50), (wrong.MAKERS, 30), (accidents.STOPS, 16), (accidents.RARE, 4))
# One of each kind, with those that need fresh ranks last.
ONE_OF_EACH: tuple[Maker, ...] = (
    right.collectives, wrong.raises, accidents.stop_a_loop, accidents.freeze, accidents.kill,
    accidents.restart,
)  # fmt: skip


def cell(seed: int, number: int, n: int) -> Cell:
    """The cell of that number."""
    chance = random.Random(f"{seed}-{number}")
    tables, weights = zip(*WEIGHTS, strict=True)
    table = chance.choices(tables, weights)[0]
    maker = chance.choices(list(table), list(table.values()))[0]
    return maker(chance, n, number)


def cells(seed: int, n: int, first: int = 1) -> Iterator[tuple[int, Cell]]:
    """All cells from one number on, without an end."""
    while True:
        yield first, cell(seed, first, n)
        first += 1


def warm_up(seed: int, n: int) -> list[Cell]:
    """Each right cell once, and an error: what a rank makes once is then there."""
    chance = random.Random(f"{seed}-warm")
    makers = [*right.MAKERS, wrong.raises, wrong.cycle]
    return [maker(chance, n, 9000 + k) for k, maker in enumerate(makers)]


def one_of_each(seed: int, n: int) -> list[tuple[int, Cell]]:
    """Each kind of cell once."""
    return [(k, maker(random.Random(f"{seed}-{k}"), n, k))
            for k, maker in enumerate(ONE_OF_EACH, 1)]  # fmt: skip
