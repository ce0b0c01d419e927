"""What stands in a cell's source: its body, what it defines and imports."""

from __future__ import annotations

import ast
import re


def body(source: str) -> str:
    """A cell without the cell magics at its top."""
    lines = source.split("\n")
    while lines and (not lines[0].strip() or lines[0].lstrip().startswith("%%")):
        lines.pop(0)
    return "\n".join(lines)


def defined(source: str) -> set[str]:
    """Functions and classes that a source defines at its top level."""
    try:
        tree = ast.parse(without_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))
    return {node.name for node in tree.body if hasattr(node, "name")}


def bound(source: str) -> set[str]:
    """As `defined`, and the variables that are set at the top level."""
    try:
        body_of = ast.parse(without_magics(source)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return defined(source)
    targets = [t for node in body_of if isinstance(node, ast.Assign) for t in node.targets]
    return defined(source) | {t.id for t in targets if isinstance(t, ast.Name)}


def without_magics(source: str) -> str:
    """With empty lines for shell commands and line magics, so that line numbers stay."""
    return "\n".join("" if line.startswith(("!", "%")) else line for line in source.split("\n"))


def parses(source: str) -> bool:
    """Whether it is Python, but for magics."""
    try:
        ast.parse(without_magics(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def imports(source: str) -> str:
    """The imports at the top level; none of a source with an error."""
    if not parses(source):
        return ""
    nodes = ast.parse(without_magics(source)).body
    return "\n".join(ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))
