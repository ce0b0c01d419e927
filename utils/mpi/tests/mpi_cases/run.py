"""Run every ``case_…`` of some files on all ranks; rank 0 prints what came of each as JSON.

    mpiexec -n 3 python run.py collectives.py groups.py

A case gets a default process group of the backend "mpi". A case that returns a text is
skipped, with the text as the reason. A file's ``begin()`` and ``end()`` are called before its first
case and after its last one.
"""

import importlib
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def main(path: Path) -> None:
    """Run the cases of ``path`` in the order of the file."""
    module = importlib.import_module(path.stem)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    getattr(module, "begin", bool)()
    for name, case in list(vars(module).items()):
        if name.startswith("case_"):
            outcomes = world.gather(outcome(case), root=0)
            if world.rank == 0:
                told = {"name": f"{path.stem} {name}", "outcomes": outcomes}
                print("CASE " + json.dumps(told), flush=True)
    getattr(module, "end", bool)()


def outcome(case) -> dict:
    """``{"status": passed | failed | skipped, "detail": text}`` of a case on this rank."""
    dist.init_process_group("mpi", timeout=timedelta(seconds=30))
    try:
        reason = case()
        return {"status": "skipped" if reason else "passed", "detail": reason or ""}
    except Exception:
        return {"status": "failed", "detail": traceback.format_exc(limit=6)}
    finally:
        dist.destroy_process_group()
        _forget_incidents()


def _forget_incidents() -> None:
    """One failed case must not stop the next one."""
    from torch_mpi import present

    present.world.begin_section("")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(sys.argv[1]).parent))
    for file in sys.argv[1:]:
        main(Path(file))
