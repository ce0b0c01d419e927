"""Answers to the notebook to start with, wrong ones and right ones, that students really give."""

from __future__ import annotations

NOTEBOOK = "00_start_here.ipynb"
RANKS = 2
CELLS = {"0.1": "neighbour-answer"}


def neighbor(result: str) -> str:
    """The function with this result."""
    return f"def right_neighbor(rank, world_size):\n    return {result}\n"


WRONG = [
    ("0.1", what, neighbor(result), words)
    for what, result, words in (
        ("forgets the last rank", "rank + 1", "There is no rank 3. Close the ring"),
        ("hard-codes three ranks", "(rank + 1) % 3", "expected 0, got 1"),
        ("goes to the left", "(rank - 1) % world_size", "You returned the left neighbor"),
        ("returns nothing", "print(rank + 1)", "You returned None. Return"),
        ("wraps around too late", "(rank + 1) % (world_size + 1)", "There is no rank 3"),
        ("wraps around too early", "(rank + 1) % max(1, world_size - 1)", "Expected 2, got 0"),
        ("stays", "rank", "Return its neighbor. Expected 1, got 0"),
        ("makes a text", "str((rank + 1) % world_size)", "expected"),
    )
]
RIGHT = [
    ("0.1", "by cases", neighbor("0 if rank == world_size - 1 else rank + 1")),
    ("0.1", "by a list", neighbor("[*range(1, world_size), 0][rank]")),
]
