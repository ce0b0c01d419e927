"""What stands in a cell's source: its body, what it defines and imports."""

from __future__ import annotations

import ast
import re
from functools import lru_cache

#: Characters of a source that is parsed: a megabyte of it takes a gigabyte of memory.
MOST_SOURCE = 200_000


def body(source: str) -> str:
    """A cell without the cell magics at its top."""
    lines = source.split("\n")
    above = (not line.strip() or line.lstrip().startswith("%%") for line in lines)
    first = next((k for k, left_out in enumerate(above) if not left_out), len(lines))
    return "\n".join(lines[first:])


def _statements(source: str) -> list[ast.stmt] | None:
    """Those at the top level; None for what is no Python, or too long or deep to be parsed."""
    if len(source) > MOST_SOURCE:
        return None
    try:
        return ast.parse(without_magics(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def defined(source: str) -> frozenset[str]:
    """Return the functions and classes that a source defines at its top level."""
    # A source of many megabytes is not kept in the cache, either.
    return _defined(source) if len(source) <= MOST_SOURCE else _searched(source)


@lru_cache(maxsize=1_000)  # each of a notebook's cells is asked for each of its answers
def _defined(source: str) -> frozenset[str]:
    statements = _statements(source)
    if statements is None:
        return _searched(source)
    return frozenset(node.name for node in statements if hasattr(node, "name"))


def _searched(source: str) -> frozenset[str]:
    """Return what `defined` returns, for a source that is not parsed."""
    return frozenset(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))


def bound(source: str) -> frozenset[str]:
    """As `defined`, and the variables that are set at the top level."""
    assigned = [node for node in _statements(source) or [] if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return defined(source) | {t.id for t in targets if isinstance(t, ast.Name)}


def without_magics(source: str) -> str:
    """With empty lines for shell commands and line magics, so that line numbers stay."""
    return "\n".join("" if line.startswith(("!", "%")) else line for line in source.split("\n"))


def parses(source: str) -> bool:
    """Whether it is Python, but for magics."""
    return _statements(source) is not None


def imports(source: str) -> str:
    """The imports at the top level; none of a source with an error."""
    nodes = _statements(source) or []
    return "\n".join(ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
