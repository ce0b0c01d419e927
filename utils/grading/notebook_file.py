"""Reads the cells of a file that should be a notebook, whatever it contains.

If the file can't be read, the error says why, at which line, and what the student can do.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ijson

from .submissions import MB, MOST_FILE

#: Parsing 200 MB of JSON needs gigabytes, so a larger file is read without outputs up to this size.
MOST_NOTEBOOK = 25 * MB
#: Cells that are read; twenty labs together have fewer.
MOST_CELLS = 10_000
#: Parts of a cell that never hold an answer, and the nesting depth below which no answer exists.
HEAVY = {"outputs", "attachments"}
DEEPEST = 12
#: The lines that git writes around a conflict begin so, and no line of a notebook does.
MARKS = (b"<<<<<<< ", b">>>>>>> ")
#: What a student can do about a file that can't be read.
CLEAR = (
    "If JupyterLab opens your notebook, clear its outputs, save it, and submit it again. If not, "
    "repair it in a text editor, or submit a copy that JupyterLab opens."
)
EDITOR = "JupyterLab can't open this file, so open it in a text editor."
AGAIN = "When JupyterLab opens the file again, submit it."
MERGE = (
    f"{EDITOR} In each part between <<<<<<< and >>>>>>> delete one of the two versions and all "
    f"marks. {AGAIN}"
)
CUT = f"{EDITOR} Delete everything from {{}} on. {AGAIN}"

#: Type, id, grade_id and source of a cell, and the beginning of its HTML.
Cell = dict[str, str]
#: Characters of a cell's HTML that are read.
MOST_SHOWN = 2000


class UnreadableError(Exception):
    """A file can't be read as JSON or is too large, so nobody knows what it contains.

    advice: What the student can do about it.
    """

    def __init__(self, why: str, advice: str = CLEAR):
        super().__init__(why)
        self.advice = advice


def read_cells(path: Path, remarks: list[str]) -> list[Cell] | None:
    """Return the cells of a file; None, and a remark with the reason, if it is not a notebook.

    Raises:
        OSError, UnreadableError: The file can't be read, for example because an upload broke off.
            An unreadable file is not a wrong answer.
    """
    content = _content(path, remarks)
    try:
        if "cells" in content:
            cells = content["cells"]
        else:  # format 3, from before 2015 or from a converter
            cells = [cell for sheet in content["worksheets"] for cell in sheet["cells"]]
    except (KeyError, TypeError):
        remarks.append(f"{path.name} is not a notebook, because it has no cells.")
        return None
    if not isinstance(cells, list):
        remarks.append(f"{path.name} is not a notebook, because its cells are not a list.")
        return None
    if len(cells) > MOST_CELLS:
        remarks.append(f"Only the first {MOST_CELLS} of {len(cells)} cells were read.")
    return [_cell(cell) for cell in cells[:MOST_CELLS] if isinstance(cell, dict)]


def _content(path: Path, remarks: list[str]) -> Any:
    """Return the content of a JSON file, without the outputs if it is large or deeply nested."""
    size = path.stat().st_size
    if size > MOST_FILE:
        raise UnreadableError(
            f"{path.name} has {size // MB} MB or more, and the limit is {MOST_FILE // MB} MB. "
            "Clear its outputs."
        )
    if not size:
        raise UnreadableError(f"{path.name} can't be read, because the file is empty.")
    end = ""
    try:
        with contextlib.suppress(RecursionError):  # ijson can read deeper nesting
            if size <= MOST_NOTEBOOK:
                return json.loads(path.read_bytes())
        return _without_outputs(path, remarks)
    except ijson.JSONError as error:
        first_line = str(error).partition("\n")[0]
        why = f"({first_line[:120]}). Clearing its outputs may help."
    except (ValueError, RecursionError) as error:
        why = f"({str(error)[:120] or type(error).__name__})."
        if isinstance(error, json.JSONDecodeError) and error.msg == "Extra data":
            end = f"line {error.lineno}, column {error.colno}"
    because = f"{path.name} can't be read, because"
    if line := _merge_mark(path):
        raise UnreadableError(f"{because} git left the mark of a conflict in line {line}.", MERGE)
    if end:
        raise UnreadableError(f"{because} text follows its end, from {end}.", CUT.format(end))
    raise UnreadableError(f"{because} it is cut short or damaged {why}")


def _merge_mark(path: Path) -> int:
    """Return the number of the first line that git wrote because of a conflict; 0 for none."""
    with path.open("rb") as file:
        return next((n for n, line in enumerate(file, 1) if line.startswith(MARKS)), 0)


def _cell(cell: dict[str, Any]) -> Cell:
    """Return a :data:`Cell`; "" for anything that isn't text."""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    values = {
        "type": cell.get("cell_type"),
        "id": cell.get("id"),
        "grade_id": _part(_part(cell.get("metadata"), "nbgrader"), "grade_id"),
        "source": source,
        "shown": _shown(cell.get("outputs")),
    }
    texts = {key: value if isinstance(value, str) else "" for key, value in values.items()}
    # JSON can contain lone surrogates, and Python source can't contain null characters.
    printable = texts["source"].encode("utf-8", "replace").decode().replace("\0", "\ufffd")
    return texts | {"source": printable.replace("\r\n", "\n")}


def _shown(outputs: Any) -> str:
    """Return the beginning of the HTML that a cell's outputs show."""
    texts: list[Any] = []
    for output in outputs if isinstance(outputs, list) else []:
        parts = _part(_part(output, "data"), "text/html")
        texts += parts if isinstance(parts, list) else [parts]
    return "".join(text[:MOST_SHOWN] for text in texts[:100] if isinstance(text, str))[:MOST_SHOWN]


def _part(data: Any, key: str) -> Any:
    return data.get(key) if isinstance(data, dict) else None


def _without_outputs(path: Path, remarks: list[str]) -> Any:
    """Return a notebook's content without the outputs and attachments of its cells.

    If more than `MOST_NOTEBOOK` bytes remain, only the first part is read, and a remark says so.
    """
    builder = ijson.ObjectBuilder()
    size = 0
    with path.open("rb") as file:
        for event, value in _light(ijson.basic_parse(file, use_float=True)):
            size += len(value) + 8 if isinstance(value, str) else 8
            if size > MOST_NOTEBOOK:
                megabytes = MOST_NOTEBOOK // MB
                remarks.append(f"Only the first {megabytes} MB, without outputs, were read.")
                break
            builder.event(event, value)
    return builder.value


def _light(events: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield ijson's events, with null instead of heavy parts of cells and of too deep nesting."""
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
