"""What the backend's extras cost: the record of calls, and the entry point in PyTorch."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

import torch
import torch.distributed as dist

from torch_mpi.record import recorder

from .measure import Candidate, Case
from .transports import Transports

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_TIMED_IMPORT = """
import time
start = time.perf_counter()
import torch
print(time.perf_counter() - start)
"""


def recording_case(world: Transports, seconds: float) -> Case:
    """A 4-byte all_reduce on mpi that is recorded, and one that is not."""
    data = torch.zeros(1)

    def recorded(enabled: bool):
        def call(i):
            recorder.enabled = enabled
            dist.all_reduce(data, group=world.mpi)
            recorder.enabled = True

        return call

    ready = {"recorded": Candidate(recorded(True)), "not recorded": Candidate(recorded(False))}
    return Case("recording", lambda: (ready, None), seconds, 4)


def import_seconds(times: int) -> dict[str, list[float]]:
    """Seconds that `import torch` takes in fresh processes, with the entry points and without."""
    plain = {name: value for name, value in os.environ.items() if name != AUTOLOAD}
    ways = {"with entry point": plain, "without": plain | {AUTOLOAD: "0"}}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(times):
        for name, environment in ways.items():
            found[name].append(_import_torch(environment))
    return found


def _import_torch(environment: dict[str, str]) -> float:
    command = [sys.executable, "-c", _TIMED_IMPORT]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return float(done.stdout)


def medians(rounds: dict[str, list[float]]) -> dict[str, float]:
    """The median of each list."""
    return {name: statistics.median(values) for name, values in rounds.items()}
