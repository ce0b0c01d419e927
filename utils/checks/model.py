"""The model answer to an earlier task, for a student who wants to continue without solving it.

``make release`` writes the answers into the folder ``.models`` beside the student's notebooks. They
are packed, so that nobody reads one by accident. The grading sandbox doesn't have this folder.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import TYPE_CHECKING

from IPython import get_ipython

if TYPE_CHECKING:
    from utils import cluster

FOLDER = ".models"


def pack(answers: dict[str, list[str]]) -> str:
    """Return the text of a file with the cells of each task."""
    return base64.encodebytes(json.dumps(answers, sort_keys=True).encode()).decode()


def unpack(text: str) -> dict[str, list[str]]:
    """Return the cells that :func:`pack` has packed."""
    answers: dict[str, list[str]] = json.loads(base64.b64decode(text))
    return answers


def use_model(ranks: cluster.Ranks, task: str) -> None:
    """Put the model answer to a task on the ranks. The task stays open.

    Args:
        ranks: the ranks that :func:`utils.cluster.start` returned.
        task: the number of the task, such as "4.1".

    Raises:
        ValueError: there is no such task; the message lists the tasks.
        FileNotFoundError: these notebooks came without model answers.
    """
    ranks.running()
    models: dict[str, list[str]] = {}
    for file in _files(task):
        models |= unpack(file.read_text(encoding="utf-8"))
    if task not in models:
        there = ", ".join(models) or "none"
        raise ValueError(f"There is no model answer for task {task!r}. Pass one of: {there}")
    for source in models[task]:
        get_ipython().run_cell(source, store_history=False).raise_error()
    print(f"The ranks now have the model answer to task {task}, which stays open (no points).")


def _files(task: str) -> list[Path]:
    """Return the files of the task's lab."""
    number = str(task).partition(".")[0].zfill(2)
    return sorted(folder().glob(f"{number}_*"))


def folder() -> Path:
    """Return the folder of the model answers, beside the notebook or in the course's folder.

    Raises:
        FileNotFoundError: these notebooks came without model answers.
    """
    for place in (Path.cwd(), Path(__file__).parents[2] / "labs"):
        if (place / FOLDER).is_dir():
            return place / FOLDER
    raise FileNotFoundError(
        f"There is no folder {FOLDER} beside this notebook. Copy it together with the labs, or "
        "run `make release` in the course's folder"
    )
