"""One room for each lab: `labs/lab06/` holds the checks, pictures and tools of lab 06.

    from utils.labs import lab06
    lab06.crossbar(ranks)               # a check, from labs/lab06/checks.py
    lab06.pictures.topologies()         # a picture, from labs/lab06/pictures.py

`shared/` holds what two or more labs use.

A room's modules are imported when a notebook first uses them: its first cell imports the room, and
PyTorch, which takes seconds, waits for the first check.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable
from typing import Any


def opened(
    room: str, front: str = "checks"
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a room (PEP 562).

    Args:
        room: the package's full name, such as ``utils.labs.lab06``.
        front: the module whose public names the room has as well.
    """

    def attribute(name: str) -> Any:
        missing = AttributeError(f"module {room!r} has no attribute {name!r}")
        if name.startswith("_"):
            raise missing
        if importlib.util.find_spec(f"{room}.{name}"):
            return importlib.import_module(f"{room}.{name}")
        try:
            return getattr(importlib.import_module(f"{room}.{front}"), name)
        except AttributeError:
            raise missing from None

    def names() -> list[str]:
        package = importlib.import_module(room)
        modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
        checks = vars(importlib.import_module(f"{room}.{front}"))
        return sorted({*modules, *(name for name in checks if not name.startswith("_"))})

    return attribute, names
