"""Ask for process groups in turn, and write what came of each; every launcher runs this program.

    launcher_program.py FOLDER PORTS [spawn|debug_launcher]

Each process writes FOLDER/<process id>.json: for each request the rank, the world size, the sum
over the ranks and the backend, or the error and the seconds until it came. PORTS is a free port for
each request, with commas between them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

SIZE = 2
REQUESTS = ("mpi", "gloo", "nothing", "Accelerate")


def by_pytorch(backend: str | None, given: dict) -> dict:
    """Make a process group and sum over it; debug_launcher has made the default group."""
    named = {"backend": backend} if backend else {}
    group = None
    if dist.is_initialized():
        group = dist.new_group(**named)
    else:
        dist.init_process_group(**named, **given)
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    found = {"rank": dist.get_rank(group), "size": dist.get_world_size(group), "sum": ones.item()}
    return found | {"backend": dist.get_backend(group).replace("undefined", "gloo")}


def by_accelerate(given: dict) -> dict:
    """Let Accelerate choose on a CPU, told as its own launchers tell it."""
    from accelerate import Accelerator

    if given:
        variables = {"WORLD_SIZE": given["world_size"], "RANK": given["rank"]}
        os.environ |= {key: str(value) for key, value in variables.items()}
    accelerator = Accelerator(cpu=True)
    total = accelerator.reduce(torch.ones(1)).item()
    group = {"rank": accelerator.process_index, "size": accelerator.num_processes, "sum": total}
    return group | {"backend": accelerator.state.backend}


def cells(index: int | None, folder: str, ports: list[str]) -> None:
    """Write what came of each request. ``index``: this process's number below mp.spawn."""
    given = {} if index is None else {"rank": index, "world_size": SIZE}
    found = {"torch": torch.__version__, "available": dist.is_mpi_available()}
    started = dist.is_initialized()
    for request, port in zip(REQUESTS, ports, strict=True):
        if given or "RANK" in os.environ:
            # Each group gets a store without the addresses of the group before it.
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        begun = time.perf_counter()
        try:
            if request == "Accelerate":
                found[request] = by_accelerate(given)
            elif request == "mpi":
                found[request] = by_pytorch("mpi", {})
            else:
                found[request] = by_pytorch("gloo" if request == "gloo" else None, given)
        except Exception as error:
            took = time.perf_counter() - begun
            found[request] = {"error": type(error).__name__, "said": str(error), "seconds": took}
        if dist.is_initialized() and not started:
            dist.destroy_process_group()
    Path(folder, f"{os.uname().nodename}-{os.getpid()}.json").write_text(
        json.dumps(found), encoding="utf-8"
    )


def main(folder: str, ports: str, way: str = "") -> None:
    """Start two processes in the given way, or be one of them."""
    if way == "spawn":
        torch.multiprocessing.spawn(cells, args=(folder, ports.split(",")), nprocs=SIZE)
    elif way == "debug_launcher":
        from accelerate import debug_launcher

        debug_launcher(cells, args=(None, folder, ports.split(",")), num_processes=SIZE)
    else:
        cells(None, folder, ports.split(","))


if __name__ == "__main__":
    main(*sys.argv[1:])
