"""The cells of a file that a student handed in, whatever it is, and what stands in them.

Two answers are near-identical if they have one shape: names, layout and comments are not in it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import ijson

from .submissions import MB, MOST_FILE

#: A notebook with pictures has a few MB; JSON of 200 MB takes gigabytes to read. A larger one is
#: read without its outputs, and no more than this may be left of it.
MOST_NOTEBOOK = 25 * MB
#: Cells of a notebook; twenty labs together have fewer.
MOST_CELLS = 10_000
#: Characters of a source that is parsed: a megabyte of it takes a gigabyte of memory.
MOST_SOURCE = 200_000
#: Parts of a cell that no answer is in, and the depth from which on nothing is an answer.
HEAVY = {"outputs", "attachments"}
DEEPEST = 12
#: Of what is no JSON: an upload that broke off, or two versions that git could not join.
DAMAGED = "can't be read, it is cut short or damaged"
#: Answers shorter than this, in nodes of their syntax tree or in words, look alike by nature.
LEAST_NODES = 25
LEAST_WORDS = 12
#: Type, id, grade_id and source of a cell.
Cell = dict[str, str]


class UnreadableError(Exception):
    """A file that can't be read as JSON, or is larger than is read: nobody knows what is in it."""


def read_cells(path: Path, remarks: list[str]) -> list[Cell] | None:
    """Return the cells of a file, or None with a remark on why there are none.

    Raises:
        OSError, UnreadableError: The file can't be read, which says nothing of what is in it: an
            upload that broke off is no wrong answer.
    """
    content = _content(path, remarks)
    try:
        if "cells" in content:
            cells = content["cells"]
        else:  # format 3, which came before 2015, and of converters since
            cells = [cell for sheet in content["worksheets"] for cell in sheet["cells"]]
    except (KeyError, TypeError):
        remarks.append(f"{path.name}: not a notebook: it has no cells")
        return None
    if not isinstance(cells, list):
        remarks.append(f"{path.name}: not a notebook: its cells are no list")
        return None
    if len(cells) > MOST_CELLS:
        remarks.append(f"only the first {MOST_CELLS} of {len(cells)} cells were read")
    return [_cell(cell) for cell in cells[:MOST_CELLS] if isinstance(cell, dict)]


def known_cells(path: Path) -> list[Cell]:
    """Return a file's cells; none if it can't be read: whoever grades it says so."""
    with contextlib.suppress(OSError, UnreadableError):
        return read_cells(path, []) or []
    return []


def _content(path: Path, remarks: list[str]) -> Any:
    """Return what is in a file of JSON, without the outputs if it is large or deeply nested."""
    size = path.stat().st_size
    if size > MOST_FILE:
        raise UnreadableError(
            f"{path.name}: it has {size // MB} MB or more, over the limit of {MOST_FILE // MB} MB: "
            "clear its outputs"
        )
    if not size:
        raise UnreadableError(f"{path.name}: can't be read: the file is empty")
    try:
        with contextlib.suppress(RecursionError):  # ijson reads what is nested deeper
            if size <= MOST_NOTEBOOK:
                return json.loads(path.read_bytes())
        return _without_outputs(path, remarks)
    except ijson.JSONError as error:
        why = str(error).split("\n")[0][:120]
        raise UnreadableError(
            f"{path.name}: {DAMAGED} ({why}); clearing its outputs may help"
        ) from None
    except (ValueError, RecursionError) as error:
        why = str(error)[:120] or type(error).__name__
        raise UnreadableError(f"{path.name}: {DAMAGED} ({why})") from None


def _cell(cell: dict[str, Any]) -> Cell:
    """Return type, id, grade_id and source of a cell, whatever they were."""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    metadata = cell.get("metadata")
    graded = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    values = {
        "type": cell.get("cell_type"),
        "id": cell.get("id"),
        "grade_id": graded.get("grade_id") if isinstance(graded, dict) else None,
        "source": source,
    }
    texts = {key: value if isinstance(value, str) else "" for key, value in values.items()}
    return texts | {"source": _printable(texts["source"])}


def _printable(text: str) -> str:
    """Text that can be written as UTF-8 and run as Python: JSON can hold half characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd").replace("\r\n", "\n")


def _without_outputs(path: Path, remarks: list[str]) -> Any:
    """Return a notebook's content without what its cells have printed and drawn.

    Of more than `MOST_NOTEBOOK` the first part is read, and a remark says so.
    """
    builder = ijson.ObjectBuilder()
    size = 0
    with path.open("rb") as file:
        for event, value in _light(ijson.basic_parse(file, use_float=True)):
            size += len(value) + 8 if isinstance(value, str) else 8
            if size > MOST_NOTEBOOK:
                megabytes = MOST_NOTEBOOK // MB
                remarks.append(f"only its first {megabytes} MB without outputs were read")
                break
            builder.event(event, value)
    return builder.value


def _light(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ijson's events with null for heavy parts of cells, and for what is nested too deep."""
    depth = 0
    left_out_at = None
    for event, value in events:
        depth -= event.startswith("end_")
        if left_out_at is None and event.startswith("start_") and depth >= DEEPEST:
            left_out_at = depth
            yield "null", None
        depth += event.startswith("start_")
        if left_out_at is not None:
            left_out_at = None if depth == left_out_at else left_out_at
            continue
        yield event, value
        if event == "map_key" and value in HEAVY and depth >= 3:
            left_out_at = depth
            yield "null", None


# --- what stands in a cell's source ---------------------------------------------------------------


def body(source: str) -> str:
    """Return a cell's source without the cell magics at its top."""
    lines = source.split("\n")
    first = 0
    while first < len(lines) and (
        not lines[first].strip() or lines[first].lstrip().startswith("%%")
    ):
        first += 1
    return "\n".join(lines[first:])


def _tree(source: str) -> ast.Module | None:
    """Return the program; None for what is no Python, or too long or deep to be parsed."""
    if len(source) > MOST_SOURCE:
        return None
    try:  # shell commands and line magics become empty lines
        return ast.parse(re.sub(r"^[!%].*$", "", source, flags=re.MULTILINE))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _statements(source: str) -> list[ast.stmt]:
    """Return the statements at the top level; none for what is no Python."""
    tree = _tree(source)
    return tree.body if tree else []


def defined(source: str) -> frozenset[str]:
    """Return the functions and classes that a source defines at its top level."""
    # A source of many megabytes is not kept in the cache, either.
    return _defined(source) if len(source) <= MOST_SOURCE else _searched(source)


@lru_cache(maxsize=1_000)  # each of a notebook's cells is asked for each of its answers
def _defined(source: str) -> frozenset[str]:
    tree = _tree(source)
    if tree is None:
        return _searched(source)
    return frozenset(node.name for node in tree.body if hasattr(node, "name"))


def _searched(source: str) -> frozenset[str]:
    """Return what `defined` returns, for a source that is not parsed."""
    return frozenset(re.findall(r"^(?:def|class)\s+(\w+)", source, re.MULTILINE))


def bound(source: str) -> frozenset[str]:
    """Return what `defined` returns, and the variables that are set at the top level."""
    assigned = [node for node in _statements(source) if isinstance(node, ast.Assign)]
    targets = [target for node in assigned for target in node.targets]
    return defined(source) | {t.id for t in targets if isinstance(t, ast.Name)}


def parses(source: str) -> bool:
    """Return whether it is Python, but for magics."""
    return _tree(source) is not None


def imports(source: str) -> str:
    """Return the imports at the top level; none of a source with an error."""
    nodes = _statements(source)
    return "\n".join(ast.unparse(n) for n in nodes if isinstance(n, ast.Import | ast.ImportFrom))


# --- answers that are the same --------------------------------------------------------------------


class _Rename(ast.NodeTransformer):
    """Gives names and arguments numbers in the order of their appearance."""

    def __init__(self) -> None:
        self.numbers: dict[str, str] = {}

    def _number(self, name: str) -> str:
        return self.numbers.setdefault(name, f"n{len(self.numbers)}")

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._number(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._number(node.arg))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.name = self._number(node.name)
        node.returns = None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
        self.generic_visit(node)
        return node


def size(source: str) -> int:
    """Return how many nodes a program has; 0 for what is none."""
    tree = _tree(source)
    return len(list(ast.walk(tree))) if tree else 0


def code_shape(source: str) -> str:
    """Return the same for programs that differ in names, layout and comments; "" if short."""
    if tree := _tree(source):
        if len(list(ast.walk(tree))) < LEAST_NODES:
            return ""
        with contextlib.suppress(RecursionError, MemoryError):
            return ast.dump(_Rename().visit(tree))
    words = re.sub(r"#.*", "", source).split()
    return " ".join(words) if len(words) >= LEAST_WORDS else ""


def text_shape(text: str) -> str:
    """Return the words of a written answer; "" for short ones."""
    words = re.findall(r"\w+", text.casefold())
    return " ".join(words) if len(words) >= LEAST_WORDS else ""
