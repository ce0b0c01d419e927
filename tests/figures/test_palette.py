"""The meaning of colors: activities and ranks can be told apart, and words on them can be read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from utils.figures import palette

ACTIVITIES = {
    "computing": palette.COMPUTING,
    "communicating": palette.COMMUNICATING,
    "waiting": palette.WAITING,
    "exposed": palette.EXPOSED,
}
# Machado, Oliveira and Fernandes (2009), severity 1: what an eye without red or green cones sees,
# in linear RGB.
EYES = {
    "all cones": np.eye(3),
    "no red cones": np.array([
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ]),
    "no green cones": np.array([
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ]),
}
# Ottosson's OKLab (2020): distances are about what is seen; black and white are 1 apart.
TO_CONES = np.array([
    [0.4122214708, 0.5363325363, 0.0514459929],
    [0.2119034982, 0.6806995451, 0.1073969566],
    [0.0883024619, 0.2817188376, 0.6299787005],
])
TO_LAB = np.array([
    [0.2104542553, 0.7936177850, -0.0040720468],
    [1.9779984951, -2.4285922050, 0.4505937099],
    [0.0259040371, 0.7827717662, -0.8086757660],
])


def seen(color: str, eye: np.ndarray) -> np.ndarray:
    parts = np.array(to_rgb(color))
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return TO_LAB @ np.cbrt(TO_CONES @ np.clip(eye @ linear, 0, 1))


def distances(colors: dict[str, str], eye: np.ndarray) -> dict[tuple[str, str], float]:
    return {
        (a, b): float(np.linalg.norm(seen(colors[a], eye) - seen(colors[b], eye)))
        for a, b in itertools.combinations(colors, 2)
    }


@pytest.mark.parametrize("eye", EYES)
def test_nobody_takes_a_rank_for_an_activity_or_for_another_rank(eye):
    ranks = {f"rank {rank}": palette.rank_color(rank) for rank in range(len(palette.RANKS))}
    found = distances(ACTIVITIES | ranks, EYES[eye])
    pair = min(found, key=found.get)
    assert found[pair] > 0.08, pair
    # Labs start four to six ranks: these differ more.
    few = {pair: found[pair] for pair in found if not {"rank 6", "rank 7"} & set(pair)}
    pair = min(few, key=few.get)
    assert few[pair] > 0.1, pair


@pytest.mark.parametrize("eye", EYES)
def test_kinds_of_computing_differ_in_lightness(eye):
    kinds = dict(zip("FBU", (palette.FORWARD, palette.BACKWARD, palette.UPDATE), strict=True))
    assert min(distances(kinds, EYES[eye]).values()) > 0.1


@pytest.mark.parametrize(
    "color", [*palette.RANKS, palette.COMMUNICATING, palette.COMPUTING, palette.UPDATE]
)
def test_words_on_a_color_can_be_read(color):
    assert palette._contrast(palette.ink_on(color), color) >= 4.5


def test_words_on_a_pale_tint_of_a_dark_color_are_dark():
    assert palette.ink_on(palette.COMMUNICATING) == palette.PAPER
    assert palette.ink_on((*to_rgb(palette.COMMUNICATING), 0.3)) == palette.INK
