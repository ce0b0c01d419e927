"""Training with less memory than the model needs, under a real limit, with files instead of RAM.

:func:`compare` starts a fresh Python whose data segment may grow by only a few MB (`RLIMIT_DATA`).
Weights, gradients and Adam's state in RAM need more. Weights and Adam's state in mapped files don't
count, because the system can write them to disk and take their pages back.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from utils.jobs import POSIX, NeedsLinux, python_command

from .layers import Layers, step_on

SIZES = (1024,) * 8 + (10,)
STEPS = 2
SAMPLES = 32
RATE = 1e-3
#: Bytes that the process may have in addition to PyTorch's own.
EXTRA = 56 * 2**20
PATIENCE = 240  # seconds
#: With these settings, glibc returns large free blocks at once, so they don't count for the limit
#: in any run (mallopt(3), M_MMAP_THRESHOLD).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}


def compare() -> dict:
    """Train the same model twice under a limit, and once without, all in a separate process.

    Returns:
        "needed", "allowed": bytes; "in RAM": the error, in PyTorch's words; "in files", "without
        the limit": the losses of each step. "in files" has an error if that training failed.

    Raises:
        NeedsLinux: this system has no such limit.
        RuntimeError: the process failed.
    """
    if not sys.platform.startswith("linux") or not POSIX:
        raise NeedsLinux("RLIMIT_DATA limits allocations only there.")
    with tempfile.TemporaryDirectory() as folder:
        code = f"from utils.labs.lab11 import memory_limit; memory_limit.child({folder!r})"
        done = subprocess.run(
            python_command(code),
            capture_output=True,
            timeout=PATIENCE,
            env=os.environ | MALLOC,
            encoding="utf-8",
        )
    if done.returncode:
        raise RuntimeError(f"The limited process ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def child(folder: str) -> None:
    """Train in the limited process; print the results as JSON."""
    import resource  # Windows has none

    torch.set_num_threads(1)
    # Here libraries allocate what they need on first use, before the limit is set.
    small = (64, 64, 10)
    _train([row.clone() for row in _weights(small)], small)
    numbers = sum((a + 1) * b for a, b in itertools.pairwise(SIZES))
    results: dict = {"needed": 4 * 4 * numbers, "allowed": EXTRA}
    free = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    data_segment = 1024 * int(re.search(r"^VmData:\s+(\d+)", status, re.M)[1])
    resource.setrlimit(resource.RLIMIT_DATA, (data_segment + EXTRA, free[1]))
    # The files come first, because memory that a failure leaves in malloc's pools would count.
    results["in files"] = _tried(lambda: _train_in_files(Path(folder)))
    results["in RAM"] = _tried(lambda: _train(list(_weights(SIZES)), SIZES))
    resource.setrlimit(resource.RLIMIT_DATA, free)
    results["without the limit"] = _train(list(_weights(SIZES)), SIZES)
    print(json.dumps(results))


def _tried(train: Callable[[], list[float]]) -> list[float] | str:
    try:
        return train()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _weights(sizes: Sequence[int]) -> Iterator[Tensor]:
    """Yield one layer's row after the other, so that nobody needs all rows at once."""
    draw = torch.Generator().manual_seed(0)
    for wide, narrow in itertools.pairwise(sizes):
        row = torch.empty((wide + 1) * narrow)
        yield row.uniform_(-(wide**-0.5), wide**-0.5, generator=draw)


def _train(
    rows: list[Tensor], sizes: Sequence[int], moments: Sequence[Sequence[Tensor]] = ()
) -> list[float]:
    """Return the losses of the steps; Adam keeps its moments in `moments`, or makes them itself."""
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, sizes[0], generator=draw)
    labels = torch.randint(0, sizes[-1], (SAMPLES,), generator=draw)
    rows = [row.requires_grad_() for row in rows]
    optimizers = [torch.optim.Adam([row], lr=RATE, foreach=False) for row in rows]
    for row, optimizer, (first, second) in zip(rows, optimizers, moments, strict=False):
        optimizer.state[row] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}
    return [step_on("cpu", rows, optimizers, Layers(sizes, x, labels)) for _ in range(STEPS)]


def _train_in_files(folder: Path) -> list[float]:
    """Train with weights and moments in mapped files: three rows for each layer."""
    rows = []
    moments = []
    for i, row in enumerate(_weights(SIZES)):
        mapped = torch.from_file(str(folder / f"layer{i}"), shared=True, size=3 * len(row))
        weight, *moments_of_layer = mapped.chunk(3)
        rows.append(weight.copy_(row))
        moments.append(moments_of_layer)
    return _train(rows, SIZES, moments)
