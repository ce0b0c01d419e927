"""Write this rank's record in the format of PyTorch's flight recorder, for ``torchfrtrace``.

PyTorch's recorder can't record this backend's groups (docs/pytorch-backend.md in the course
says why), but PyTorch's analyzer reads any dump in the recorder's format. We write version 2.10 of
the format, which ``FlightRecorder.hpp`` in PyTorch 2.15 defines.
"""

from __future__ import annotations

import os
import pickle
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from . import compat
from .record import Call, recorder

#: PyTorch's variables: the path of a dump without the rank, and the number of entries in it.
FILE_VARIABLE = "TORCH_FR_DUMP_TEMP_FILE"
SIZE_VARIABLE = "TORCH_FR_BUFFER_SIZE"
ENTRIES = 2000
VERSION = "2.10"

Sizes = list[list[int]]

# The analyzer knows these operations by the names that PyTorch's C++ code uses.
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_reduce_coalesced": "allreduce_coalesced",
    "all_gather_coalesced": "allgather_coalesced",
}
# Every rank passes a tensor of the same shape, and gets one.
_ONE_SHAPE = {"broadcast", "reduce", "all_reduce", "all_reduce_coalesced", "send", "recv"}


def write_if_asked(rank: int) -> None:
    """Write the dump if ``TORCH_FR_DUMP_TEMP_FILE`` is set; warn if the file can't be written."""
    if prefix := os.environ.get(FILE_VARIABLE):
        try:
            write(prefix, rank)
        except (OSError, ValueError) as error:
            warnings.warn(
                f"Rank {rank} could not write the dump that {FILE_VARIABLE} asks for: {error}. "
                f"Choose a folder that the rank may write to, and a number as {SIZE_VARIABLE}.",
                stacklevel=2,
            )


def write(prefix: str, rank: int) -> Path:
    """Write :func:`dump` to ``<prefix><rank>``, for ``torchfrtrace FOLDER``; return the path."""
    path = Path(f"{prefix}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # A rename at the end, so that the analyzer never reads half a file.
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(pickle.dumps(dump(rank)))
    part.replace(path)
    return path


def dump(rank: int) -> dict[str, Any]:
    """Return the last calls of this process, which is the global rank ``rank``.

    ``TORCH_FR_BUFFER_SIZE`` says how many calls these are at most (default: 2000).
    """
    size = int(os.environ.get(SIZE_VARIABLE) or ENTRIES)
    end = recorder.mark()
    first = max(0, end - size)
    calls = recorder.since(first)
    groups = {call.group_name: call.group for call in calls}
    config = {
        name: {"name": name, "desc": "undefined", "ranks": str(list(ranks))}
        for name, ranks in groups.items()
    }
    return {
        "version": VERSION,
        "pg_config": config,
        "pg_status": {},
        "entries": _entries(calls, rank, end - len(calls), list(groups)),
    }


def _entries(
    calls: Iterable[Call], rank: int, first: int, groups: list[str]
) -> list[dict[str, Any]]:
    offset = time.time() - time.perf_counter()
    collectives: dict[str, int] = {}
    messages: dict[str, int] = {}
    entries = []
    for number, call in enumerate(calls, first):
        name = _name(call, rank)
        if name is None:
            continue
        group = call.group_name
        is_message = call.op in ("send", "recv")
        if is_message:
            messages[group] = messages.get(group, 0) + 1
        elif call.sequence is not None:
            collectives[group] = call.sequence
        inputs, outputs = _sizes(call)
        entries.append({
            "record_id": number,
            "pg_id": groups.index(group),
            "process_group": (group, "undefined"),
            "collective_seq_id": collectives.get(group, 0),
            "p2p_seq_id": messages.get(group, 0),
            "op_id": number,
            "profiling_name": name,
            "time_created_ns": _nanoseconds(call.start, offset),
            "time_discovered_started_ns": _nanoseconds(call.matched, offset),
            "time_discovered_completed_ns": _nanoseconds(call.end, offset),
            "input_sizes": inputs,
            "input_dtypes": [call.dtype] * len(inputs),
            "output_sizes": outputs,
            "output_dtypes": [call.dtype] * len(outputs),
            "state": _state(call),
            "retired": call.end > 0,
            "timeout_ms": 0,
            "is_p2p": is_message,
            "frames": _frames(call),
        })
    return entries


def _name(call: Call, rank: int) -> str | None:
    """Return a name such as ``c10d:send 0->1``; ``None`` if the analyzer can't read the call."""
    # The analyzer accepts "c10d" from PyTorch 2.15 on; before, only names of PyTorch's backends.
    library = "c10d" if compat.analyzer_knows_any_backend() else "gloo"
    if call.op not in ("send", "recv"):
        return f"{library}:{_NAMES.get(call.op, call.op)}"
    known = call.peer is not None and call.peer >= 0
    if not known and not compat.analyzer_knows_any_backend():
        return None
    peer = call.peer if known else "?"
    return (
        f"{library}:{call.op} {call.group.index(rank)}{'->' if call.op == 'send' else '<-'}{peer}"
    )


def _sizes(call: Call) -> tuple[Sizes, Sizes]:
    """Return the shapes of inputs and outputs, or numbers of elements where the record has them."""
    if not call.dtype:
        return [], []
    shape = list(call.shape)
    if call.op in _ONE_SHAPE:
        return [shape], [shape]
    item = getattr(torch, call.dtype).itemsize
    sent, received = [call.sent // item], [call.received // item]
    if call.op == "all_gather":
        return [shape], [[sum(call.parts)]]
    if call.op in ("gather", "scatter"):
        parts = [shape] * len(call.group)
        gets, gives = call.received > call.nbytes, call.sent > call.nbytes
        if call.op == "gather":
            return [shape], parts if gets else []
        return parts if gives else [], [shape]
    return [sent], [received]


def _state(call: Call) -> str:
    if not call.matched and call.sequence is not None:
        return "scheduled"  # the ranks never met; an error may have ended the call
    if call.end:
        return "completed"
    return "started" if call.matched else "scheduled"


def _nanoseconds(moment: float, offset: float) -> int:
    """Return a point in time as nanoseconds since 1970; 0 if it has not come."""
    return round((moment + offset) * 1e9) if moment else 0


def _frames(call: Call) -> list[dict[str, object]]:
    if call.place is None:
        return []
    filename, line, function = call.place
    return [{"name": function, "filename": filename, "line": line}]
