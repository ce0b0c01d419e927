"""What the moving picture of README.md shows: a notebook, and four scenes of it.

An exchange deadlocks, its repair passes a check of lab 01, and the ring of lab 06 adds up. The
cells of lab 06 come from its solution, so that the picture changes with the lab.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_notebook

from utils.course.notebook import KERNELSPEC, SOLUTIONS, read

RING_LAB = SOLUTIONS / "06_allreduce.ipynb"
#: Cells of that lab: its helpers and its ring.
RING = ("ranks-join", "scatter-answer", "gather-answer")

#: The cells before these, by their ids.
BEFORE = {
    "start": """\
from utils import cluster
ranks = cluster.start(4)""",
    "hello": """\
%%px
import os
import torch
import torch.distributed as dist

dist.init_process_group("mpi")
rank = dist.get_rank()
print(f"rank {rank} of {dist.get_world_size()} is process {os.getpid()}")""",
    "deadlock": """\
%%px
if rank < 2:
    theirs = torch.empty(3)
    dist.recv(theirs, src=1 - rank)
    dist.send(torch.ones(3), dst=1 - rank)""",
    "repair": """\
%%px
def exchange(mine, rank):
    theirs = mine.clone()
    if rank < 2:
        sending = dist.isend(mine, dst=1 - rank)
        dist.recv(theirs, src=1 - rank)
        sending.wait()
    return theirs""",
    "check": """\
from utils.labs import lab01
lab01.exchange(ranks)""",
}
#: And the cells after them.
AFTER = {
    "watch": """\
%%px
from utils.labs.lab06.chunk_trace import watch
story = watch(ring, 8)""",
    "ring": """\
from utils.labs.lab06.chunk_pictures import film
film(ranks.view["story"], "ring")""",
}


@dataclass(frozen=True)
class Scene:
    """A part of the notebook, photographed when its cells have run.

    Attributes:
        caption: what a reader is told.
        shows: what is seen, for those who don't see it.
        cells: ids of the cells in it.
        running: seconds for which the last cell is shown while it runs; 0: it is not.
        seconds: for each picture: one, or one for each position of the slider.
        last: seconds for which the last of several pictures is shown.
        has_slider: whether the picture below the last cell has a slider, which is moved.
        fails: whether the last cell ends with an error, on purpose.
    """

    caption: str
    shows: str
    cells: tuple[str, ...]
    running: float = 0.0
    seconds: float = 1.0
    last: float = 0.0
    has_slider: bool = False
    fails: bool = False


#: In the order of the moving picture. The first is what is seen where nothing moves.
SCENES = (
    Scene(
        "Two ranks deadlock: the notebook shows who waits for whom, at which line.",
        "Arrows join the circles of ranks 0 and 1. An explanation names calls, lines and a remedy.",
        ("deadlock",),
        seconds=2.4,
        fails=True,
    ),
    Scene(
        "You repair the exchange, and a check tries it on every rank.",
        "Below the new code, a green check mark says that task 1.5 is passed.",
        ("repair", "check"),
        running=0.4,
        seconds=1.3,
    ),
    Scene(
        "You write a ring all-reduce, and watch its chunks add up.",
        "A slider moves through six steps. After the last one, all ranks have every sum.",
        ("watch", "ring"),
        seconds=0.35,
        last=0.6,
        has_slider=True,
    ),
    Scene(
        "One line starts four real MPI ranks on your laptop.",
        "Each rank prints its number and its process.",
        ("start", "hello"),
        seconds=1.2,
    ),
)


def words() -> str:
    """Return what the whole picture shows: its description in README.md."""
    scenes = " ".join(f"{scene.caption} {scene.shows}" for scene in SCENES)
    return f"Scenes in JupyterLab. {scenes}"


def notebook() -> NotebookNode:
    """Return the notebook of all scenes: its cells run from top to bottom."""
    cells = [new_code_cell(source, id=name) for name, source in _cells()]
    return new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})


def _cells() -> Iterator[tuple[str, str]]:
    yield from BEFORE.items()
    ring = {cell.id: cell.source for cell in read(RING_LAB).cells}
    for name in RING:
        if name not in ring:
            raise KeyError(f"{RING_LAB.name} has no cell {name!r}: change RING in {__name__}.py")
        yield name, ring[name]
    yield from AFTER.items()
