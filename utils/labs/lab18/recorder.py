"""PyTorch's flight recorder on one rank, and a group of gloo that feeds it.

The recorder is a ring buffer below `torch.distributed`, with an entry for each collective. NCCL and
gloo write into it, see `torch/csrc/distributed/c10d/FlightRecorder.hpp`. When we ran this module
with PyTorch 2.13, gloo noted each call, its sizes and its line, but never that a call had started
or completed.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from utils.cluster.left_out import need_processes
from utils.jobs import NeedsProcesses, python_command

#: PyTorch's analyzer as a program; its command is `torchfrtrace`.
ANALYZER = "from torch.distributed.flight_recorder import fr_trace; fr_trace.main()"
#: PyTorch's folder. In a stack, PyTorch's frames come before the frames of a cell.
LIBRARY = f"{Path(torch.__file__).parent}{os.sep}"


@dataclass
class Recording:
    """What the recorder noted in a block on this rank.

    Attributes:
        raw: the entries as PyTorch keeps them.
        calls: the same in short, for each entry `seq`, `call`, `sizes`, `line` and `state`.
    """

    ranks: int
    trace: dict[str, Any] = field(default_factory=dict)
    raw: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def save(self, folder: str | Path, rank: int) -> None:
        """Write the file that PyTorch's own analyzer reads: `torchfrtrace FOLDER -p rank_`."""
        # Gloo gives the group no name here, but the analyzer looks up each entry's group by name.
        group = {"name": "0", "desc": "default_pg", "ranks": str(list(range(self.ranks)))}
        short = [entry | {"frames": _students(entry["frames"])} for entry in self.raw]
        trace = self.trace | {"pg_config": {"0": group}, "entries": short, "rank": rank}
        Path(folder, f"rank_{rank}").write_bytes(pickle.dumps(trace))


@contextlib.contextmanager
def gloo(seconds: float = 2.0) -> Iterator[Recording]:
    """Make gloo the default group for a block, and record its calls; then go back to "mpi".

    All ranks call it, and all of them are on one machine.

    Args:
        seconds: time that a call waits for the other ranks before it raises `RuntimeError`.

    Raises:
        NeedsProcesses: the ranks are threads of one process.
    """
    need_processes(
        "Each process has one flight recorder, and gloo connects processes. Read what the ranks "
        "would have recorded, and write task 18.3: its check brings recordings."
    )
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    first = max((entry["record_id"] for entry in _trace()["entries"]), default=-1) + 1
    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    dist.destroy_process_group()
    store = dist.FileStore(f"{names[0]}/meeting", ranks)
    options = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=seconds)}
    dist.init_process_group("gloo", store=store, **options)
    recording = Recording(ranks)
    try:
        yield recording
    finally:
        trace = _trace()
        recording.trace = trace
        new = (entry for entry in trace["entries"] if entry["record_id"] >= first)
        recording.raw = [entry for entry in new if entry["profiling_name"].startswith("gloo:")]
        recording.calls = [in_short(entry) for entry in recording.raw]
        dist.destroy_process_group()
        dist.init_process_group("mpi")  # from here on, no rank needs the folder
        shutil.rmtree(names[0], ignore_errors=True)


def in_short(entry: dict[str, Any]) -> dict[str, Any]:
    """Return sequence number, call, sizes, the student's line, and state of an entry."""
    frames = _students(entry["frames"])
    return {
        "seq": entry["collective_seq_id"],
        "call": entry["profiling_name"].rpartition(":")[2],
        "sizes": [list(size) for size in entry["input_sizes"]],
        "line": f"{frames[0]['name']}, line {frames[0]['line']}" if frames else "",
        "state": entry["state"],
    }


def _students(frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the frames outside PyTorch, innermost first, down to the cell itself."""
    own = [frame for frame in frames if not frame["filename"].startswith(LIBRARY)]
    cell = next((k for k, frame in enumerate(own) if frame["name"] == "<module>"), len(own))
    return own[: cell + 1]


def _trace() -> dict[str, Any]:
    """Return this process's buffer, with Python's stacks."""
    dump = torch._C._distributed_c10d._dump_fr_trace  # type: ignore[attr-defined]
    trace: dict[str, Any] = pickle.loads(dump(True, True, False))
    return {"entries": []} | trace


def analyzed(folder: str | Path, seconds: float = 60.0) -> str:
    """Return what `torchfrtrace` says about the saved recordings, without the stacks' folders.

    The folder is removed.

    Raises:
        NeedsProcesses: no rank has saved a recording there.
        subprocess.TimeoutExpired: the analyzer didn't end.
    """
    if not list(Path(folder).glob("rank_*")):
        raise NeedsProcesses("The cell that saves the recordings failed or was left out.")
    command = python_command(ANALYZER, str(folder), "-p", "rank_")
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds, encoding="utf-8")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line.replace(LIBRARY, "") for line in lines if "ipykernel" not in line)
