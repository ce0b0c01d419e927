"""The global names that a cell needs and binds, from its source: which cells need which others."""

from __future__ import annotations

import ast
import functools
import re
import symtable
from collections.abc import Collection, Iterable
from itertools import dropwhile
from typing import NamedTuple

from nbformat import NotebookNode

#: The cell magics whose cells are code of the notebook.
PYTHON = ("%%px", "%%time", "%%timeit", "%%capture")
#: A cell with more statements isn't looked into, because each takes a fraction of a millisecond.
MOST_STATEMENTS = 2_000


class Names(NamedTuple):
    """Global names of a source.

    Attributes:
        needed: are looked up at once, and come from earlier cells (or are builtins).
        later: are looked up when the cell's functions are called, and come from any other cell.
        bound: get a value.
    """

    needed: frozenset[str]
    later: frozenset[str]
    bound: frozenset[str]


def body(source: str) -> str:
    """Return a cell's source without the cell magics at its top."""
    return "\n".join(dropwhile(_is_magic, source.split("\n")))


def _is_magic(line: str) -> bool:
    line = line.lstrip()
    return not line or line.startswith("%%")


@functools.lru_cache(maxsize=2_000)  # each run of a notebook asks for the same cells
def names_of(source: str) -> Names:
    """Return the global names of a cell.

    All words of a source are needed if it isn't Python, or if it is very long.
    """
    if source.startswith("%%") and source.split()[0] not in PYTHON:
        return Names(frozenset(), frozenset(), frozenset())
    try:
        return _names_of(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # of its symbols, too
        return Names(frozenset(re.findall(r"\w+", source)), frozenset(), frozenset())


def _names_of(source: str) -> Names:
    # Shell commands and line magics become empty lines.
    statements = ast.parse(re.sub(r"^[!%].*$", "", body(source), flags=re.MULTILINE)).body
    if len(statements) > MOST_STATEMENTS:
        raise ValueError("the cell is too long")
    needed: set[str] = set()
    later: set[str] = set()
    bound: set[str] = set()
    for statement in statements:
        at_once, in_functions, stored = _scopes(statement)
        needed |= at_once - bound
        later |= in_functions
        bound |= stored
    return Names(frozenset(needed), frozenset(later - bound), frozenset(bound))


def _scopes(statement: ast.stmt) -> tuple[set[str], set[str], set[str]]:
    """Return the global names that a statement looks up now, in its functions, and that it binds.

    ``for x in y: use(x)`` looks up x and binds it, so x doesn't count as looked up.
    """
    top = symtable.symtable(ast.unparse(ast.Module([statement], [])), "cell", "exec")
    at_once: set[str] = set()
    in_functions: set[str] = set()
    bound: set[str] = set()
    tables = [(top, top)]
    while tables:
        table, outer = tables.pop()
        runs_later = table is not top and (outer is not top or table.get_type() == "function")
        looked_up, stored = _globals_of(table, table is top)
        (in_functions if runs_later else at_once).update(looked_up)
        bound |= stored
        tables += [(child, table) for child in table.get_children()]
    if not isinstance(statement, ast.Assign | ast.AnnAssign):
        at_once -= bound  # otherwise the value is looked up before the name is bound
    return at_once | (_changed_names(statement) & bound), in_functions, bound


def _globals_of(table: symtable.SymbolTable, is_top: bool) -> tuple[set[str], set[str]]:
    """Return the global names that a scope looks up, and those that it binds."""
    symbols = [symbol for symbol in table.get_symbols() if is_top or symbol.is_global()]
    looked_up = {one.get_name() for one in symbols if one.is_referenced()}
    bound = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    return looked_up, bound


def _changed_names(statement: ast.stmt) -> set[str]:
    """Return the names that a statement looks up and binds again, as in ``n += 1``."""
    return {
        node.target.id
        for node in ast.walk(statement)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
    }


def not_needed(cells: Iterable[NotebookNode], kept: Collection[str], names: set[str]) -> set[str]:
    """Return the ids of the code cells that no kept cell needs, directly or not.

    Args:
        cells: a notebook's cells.
        kept: ids of the cells that run in any case.
        names: names that are needed after the last cell, or at any time.
    """
    code = {cell.id: names_of(cell.source) for cell in cells if cell.cell_type == "code"}
    kept = set(kept)
    while True:
        left_out = _not_needed(code, kept, names)
        late = _bound_late(code, code.keys() - left_out) & left_out
        if not late:
            return left_out
        kept |= late


def _not_needed(code: dict[str, Names], kept: Collection[str], names: set[str]) -> set[str]:
    """Return the cells without those that are kept, or that bind what a later cell needs."""
    wanted, left_out = set(names), set()
    for key, found in reversed(code.items()):
        if key in kept or found.bound & wanted:
            wanted |= found.needed | found.later
        else:
            left_out.add(key)
    return left_out


def _bound_late(code: dict[str, Names], kept: Collection[str]) -> set[str]:
    """Return the first cells that bind a name which a function of an earlier cell looks up."""
    bound: set[str] = set()
    open_names: set[str] = set()
    late = set()
    for key, found in code.items():
        if found.bound & open_names:
            late.add(key)
            open_names -= found.bound
        bound |= found.bound
        if key in kept:
            open_names |= found.later - bound
    return late
