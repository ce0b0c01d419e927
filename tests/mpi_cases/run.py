"""Run every ``case_…`` of a file on all ranks; rank 0 prints what came of each as JSON.

    mpiexec -n 3 python run.py collectives.py

A case gets a default process group of the backend "mpi". A case that returns a text is
skipped, with the text as the reason.
"""

import importlib.util
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist


def main(path: str) -> None:
    """Run the cases of ``path`` in the order of the file."""
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for name, case in list(vars(module).items()):
        if name.startswith("case_"):
            outcomes = world.gather(outcome(case), root=0)
            if world.rank == 0:
                print("CASE " + json.dumps({"name": name, "outcomes": outcomes}), flush=True)


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
    from torch_mpi import world

    world.current().begin("")


if __name__ == "__main__":
    main(sys.argv[1])
