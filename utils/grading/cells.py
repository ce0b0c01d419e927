"""The cells of a file that a student handed in, whatever it is."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ijson

from .zips import MB, MOST_FILE

#: A notebook with pictures has a few MB; JSON of 200 MB takes gigabytes to read. A larger one is
#: read without its outputs, and no more than this may be left of it.
MOST_NOTEBOOK = 25 * MB
#: Cells of a notebook; twenty labs together have fewer.
MOST_CELLS = 10_000
#: Parts of a cell that no answer is in, and the depth from which on nothing is an answer.
HEAVY = {"outputs", "attachments"}
DEEPEST = 12
#: Of what is no JSON: an upload that broke off, or two versions that git could not join.
DAMAGED = "can't be read, it is cut short or damaged"
#: Type, id, grade_id and source of a cell.
Cell = dict[str, str]


class UnreadableError(Exception):
    """A file that can't be read as JSON, or is larger than is read: nobody knows what is in it."""


def read_cells(path: Path, remarks: list[str]) -> list[Cell] | None:
    """The cells of a file, or None with a remark on why there are none.

    Raises OSError or UnreadableError where the file can't be read, which says nothing of what is
    in it: an upload that broke off is no wrong answer.
    """
    content = _content(path, remarks)
    try:
        cells = content["cells"] if "cells" in content else _of_worksheets(content)
    except (KeyError, TypeError):
        remarks.append(f"{path.name}: not a notebook: it has no cells")
        return None
    if not isinstance(cells, list):
        remarks.append(f"{path.name}: not a notebook: its cells are no list")
        return None
    if len(cells) > MOST_CELLS:
        remarks.append(f"only the first {MOST_CELLS} of {len(cells)} cells were read")
    return [_cell(cell) for cell in cells[:MOST_CELLS] if isinstance(cell, dict)]


def _content(path: Path, remarks: list[str]) -> Any:
    """Return what is in a file of JSON, without the outputs if it is large or deeply nested."""
    size = path.stat().st_size
    if size > MOST_FILE:
        raise UnreadableError(
            f"{too_large(f'{path.name}: it', size, MOST_FILE)}: clear its outputs"
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


def _of_worksheets(content: dict[str, Any]) -> list[Any]:
    """The cells of a notebook of format 3, which came before 2015, and of converters since."""
    return [cell for sheet in content["worksheets"] for cell in sheet["cells"]]


def _cell(cell: dict[str, Any]) -> Cell:
    """Type, id, grade_id and source of a cell, whatever they were."""
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    metadata = cell.get("metadata")
    graded = metadata.get("nbgrader") if isinstance(metadata, dict) else None
    found = {
        "type": cell.get("cell_type"),
        "id": cell.get("id"),
        "grade_id": graded.get("grade_id") if isinstance(graded, dict) else None,
        "source": source,
    }
    texts = {key: value if isinstance(value, str) else "" for key, value in found.items()}
    return texts | {"source": _printable(texts["source"])}


def _printable(text: str) -> str:
    """Text that can be written as UTF-8 and run as Python: JSON can hold half characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd").replace("\r\n", "\n")


def _without_outputs(path: Path, remarks: list[str]) -> Any:
    """Return a notebook's content without what its cells have printed and drawn.

    Of more than `MOST_NOTEBOOK` the first part is read, and a remark says so.
    """
    builder, size = ijson.ObjectBuilder(), 0
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
    depth, left_out_at = 0, None
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


def too_large(what: str, size: int, limit: int) -> str:
    """How large something is that is not read."""
    return f"{what} has {size // MB} MB or more, over the limit of {limit // MB} MB"
