"""What students get wrong, from the tables that the checks are tested with.

Each line of ``tests/labs/answers`` is an answer that students really give, with words of what
its check says.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..notebook import ROOT, NotebookError

ANSWERS = ROOT / "tests/labs/answers"


@dataclass(frozen=True)
class Wrong:
    """What a student did, and words of what the check says."""

    what: str
    told: str


def mistakes(number: str, folder: Path = ANSWERS) -> dict[str, list[Wrong]]:
    """Of a lab ("01"): wrong answers by task, as the tables have them; none for a lab without.

    Raises:
        NotebookError: these are not there, as in a bundle for students.
    """
    if not folder.is_dir():
        raise NotebookError(f"there is no {folder}: the pack is made in a clone of the course")
    path = folder / f"lab{number}.py"
    if not path.is_file():
        return {}
    tables = _module(path)
    found = defaultdict(list)
    for task, what, *_, words in [*tables.WRONG, *getattr(tables, "CHANGES", ())]:
        found[task].append(Wrong(what, words))
    return {task: found[task] for task in tables.CELLS}


def _module(path: Path) -> ModuleType:
    """The tables of a lab; they import what lies beside ``answers``."""
    spec = importlib.util.spec_from_file_location(f"answers_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a module of Python")
    module = importlib.util.module_from_spec(spec)
    beside = str(path.parents[1])
    sys.path.insert(0, beside)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    return module
