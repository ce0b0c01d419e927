"""A check's problems that come from the notebook's cells, and not from the answer.

A cell may not have run, or it has run in the kernel instead of on the ranks, because it doesn't
begin with ``%%px``.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from IPython import get_ipython

from utils.cluster.questions import Ranks

from .probe import definitions, digest


def without_group(after: str) -> str:
    """Return what to do if the ranks have no process group.

    Args:
        after: the task whose answer makes the process group; "" if the lab's own cells do.
    """
    if after:
        return f"Task {after} comes first, because its cell lets the ranks communicate"
    return "The ranks can't communicate yet. Run the cell that calls dist.init_process_group first"


def forgotten_px(ranks: Ranks, missing: set[str], timeout: float) -> Iterator[str]:
    """Yield a problem for each function that the kernel has, and the ranks lack or have otherwise.

    Args:
        missing: the names that the ranks lacked.
        timeout: seconds that a rank may take to reply.
    """
    shell = get_ipython()
    functions = {} if shell is None else _functions(shell.user_ns)
    if not functions:
        return
    replies = ranks.ask(definitions, names=sorted(functions), timeout=timeout)
    if any(reply.status != "ok" for reply in replies):
        return
    for name, function in functions.items():
        there = [reply.value["functions"].get(name) for reply in replies]
        if name in missing and not any(there):
            yield (
                f"You defined {name} in the notebook itself, but not on the ranks. Begin its cell "
                "with %%px"
            )
        elif all(there) and _is_newer(shell, function, there):
            yield (
                f"The notebook itself has a newer {name} than the ranks, and the check calls the "
                "ranks' function. Begin each cell that defines it with %%px"
            )


def _is_newer(shell: Any, function: types.FunctionType, there: list[list[Any]]) -> bool:
    """Return whether the kernel's function differs from the ranks', and its cell ran later.

    Args:
        there: each rank's digest of its function, and the number of the function's cell.
    """
    if digest(function) in [of_rank for of_rank, _ in there]:
        return False
    numbers = getattr(shell.compile, "_filename_map", {})
    own = numbers.get(function.__code__.co_filename)
    return own is None or all(cell is None or cell < own for _, cell in there)


def _functions(user_ns: dict[str, Any]) -> dict[str, types.FunctionType]:
    """Return the functions that the kernel's cells have defined."""
    return {
        name: value
        for name, value in user_ns.items()
        if isinstance(value, types.FunctionType)
        and value.__module__ == "__main__"
        and not name.startswith("_")
    }
