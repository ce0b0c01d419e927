"""The names that ranks lost by a restart, so that a cell that misses one of them can say so."""

from __future__ import annotations

import contextlib
import json
import symtable
from pathlib import Path

AFTER_A_RESTART = (
    "They have forgotten all earlier cells: to run those again, choose Run → Run All Above "
    "Selected Cell."
)


def of_cells(folder: Path) -> set[str]:
    """Return the names that the cells of the ranks have made, by the ranks' notes in a folder."""
    sources = set()
    for file in folder.glob("cells-*"):
        with contextlib.suppress(OSError):
            for line in file.read_text().splitlines():
                if line.endswith("}"):  # another one is just being written, or was cut
                    sources.add(json.loads(line)["source"])
    return {name for source in sources for name in _made_by(source)}


def _made_by(source: str) -> set[str]:
    """Return the names that a cell assigns, imports, or defines; none if it can't be read."""
    try:
        symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    except (SyntaxError, ValueError):
        return set()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def hint(name: str) -> str:
    """Return what an error adds about a name that a restart has lost.

    A cell that makes the name again ends the hint by itself, because then no error misses it.
    """
    return f"The ranks are fresh and have lost `{name}`: choose Run → Run All Above Selected Cell."
