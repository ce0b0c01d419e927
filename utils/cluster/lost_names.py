"""The names that ranks lost in a restart, and advice for a cell that misses one of them."""

from __future__ import annotations

import contextlib
import json
import symtable
from pathlib import Path

AFTER_A_RESTART = (
    "They have lost everything that earlier cells made. Choose Run → Run All Above Selected Cell "
    "to run those cells again."
)


def of_cells(folder: Path) -> set[str]:
    """Return the names that the ranks' cells have made, from the ranks' notes in a folder."""
    sources = set()
    for file in folder.glob("cells-*"):
        with contextlib.suppress(OSError):
            for line in file.read_text(encoding="utf-8").splitlines():
                if line.endswith("}"):  # otherwise it is still being written, or was cut
                    sources.add(json.loads(line)["source"])
    return {name for source in sources for name in made_by(source)}


def made_by(source: str) -> set[str]:
    """Return the names that a cell assigns, imports, or defines; an empty set if it can't parse."""
    if source.lstrip().startswith("%%"):
        source = source.lstrip().partition("\n")[2]
    try:
        symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    except (SyntaxError, ValueError):
        return set()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


def hint(name: str) -> str:
    """Return the advice that an error adds about a name that a restart has lost.

    Once a cell has made the name again, no error misses it, so the hint ends by itself.
    """
    return f"The ranks lost `{name}` in a restart. Choose Run → Run All Above Selected Cell."
