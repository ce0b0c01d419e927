"""Run a program with PyTorch's flight recorder: ``python recorded.py program.py``.

At the end of the program, or after an error, each rank writes the recorder's entries as a file into
the folder ``LABELLED_DUMPS``, which ``torchfrtrace`` reads. NCCL's watchdog writes the same files.
The rank then waits until all ``LABELLED_RANKS`` ranks have written their files, because ``mpiexec``
ends all ranks when the first one fails. A rank that runs for longer than twice ``LABELLED_TIMEOUT``
seconds writes its entries and ends.
"""

from __future__ import annotations

import os
import pickle
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = Path(os.environ["LABELLED_DUMPS"])
RANKS = int(os.environ["LABELLED_RANKS"])
LIMIT = float(os.environ["LABELLED_TIMEOUT"])
#: The variables in which Open MPI, MPICH and Slurm tell a process its rank.
NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

#: By the name of a group, what `torchfrtrace` needs to know about the group.
groups: dict[str, dict[str, str]] = {}
#: The signals that mpiexec and the timer send if the program doesn't end by itself.
ENDS = {signal.SIGTERM, signal.SIGALRM}
destroy_process_group = dist.destroy_process_group
lock = threading.Lock()


def remember_groups() -> None:
    """Keep the names and ranks of all groups that exist now."""
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        name = getattr(group, "group_name", "")
        if name:
            members = str(sorted(ranks))
            groups[name] = {"name": name, "desc": group.group_desc, "ranks": members}


def destroy_and_remember(group: Any = None) -> None:
    """Do what `dist.destroy_process_group` does, but remember the groups."""
    remember_groups()
    destroy_process_group(group)


def complete(dump: dict[str, Any]) -> dict[str, Any]:
    """Return a dump in which the groups of all entries are known.

    Gloo tells the recorder about a group before the group has a name (PyTorch 2.13 to 2.15).
    Without the name, `torchfrtrace` ends with a `KeyError`.
    """
    known = dump["pg_config"]
    if all(entry["process_group"][0] in known for entry in dump["entries"]):
        return dump
    return {**dump, "pg_config": groups}


def write_dump() -> None:
    """Write the entries of this rank, unless they are written already."""
    with lock:
        rank = next(os.environ[name] for name in NUMBERS if name in os.environ)
        path = FOLDER / f"rank_{rank}"
        if path.exists():
            return
        remember_groups()
        dump = complete(pickle.loads(torch._C._distributed_c10d._dump_fr_trace()))
        part = Path(f"{FOLDER}.{rank}")  # outside the folder, where `torchfrtrace` reads all files
        part.write_bytes(pickle.dumps(dump))
        part.rename(path)


def wait_for_other_dumps() -> None:
    """Wait until all ranks have written their dumps, but not longer than 2 × `LIMIT` seconds."""
    end = time.monotonic() + 2 * LIMIT
    while len(list(FOLDER.iterdir())) < RANKS and time.monotonic() < end:
        time.sleep(0.02)


def end_on_signal(wake: int) -> None:
    """Write the dump of a rank that hangs, or that mpiexec ends because another rank was killed."""
    os.read(wake, 1)
    write_dump()
    os._exit(1)


def main() -> None:
    """Run the program that the command line names, and write the dump."""
    FOLDER.mkdir(exist_ok=True)
    dist.destroy_process_group = destroy_and_remember
    # A handler in Python runs only after a call into the library has returned. The descriptor is
    # written at once.
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken)
    for number in ENDS:
        signal.signal(number, lambda number, frame: None)
    threading.Thread(target=end_on_signal, args=(wake,), daemon=True).start()
    signal.setitimer(signal.ITIMER_REAL, 2 * LIMIT)
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        write_dump()
        wait_for_other_dumps()


if __name__ == "__main__":
    main()
