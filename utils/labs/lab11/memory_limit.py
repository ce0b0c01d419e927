"""Training with less memory than the model needs: a real limit, and files that stand in.

:func:`compare` starts a fresh Python whose data segment may grow by a few MB only (`RLIMIT_DATA`).
Weights, gradients and Adam's state in RAM need more; weights and Adam's state in files that are
mapped into memory do not count, as the system can write them out and take the pages away.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from utils.jobs import python_command

SIZES = (1024,) * 8 + (10,)
STEPS, SAMPLES, RATE = 2, 32, 1e-3
#: Bytes that the process may have on top of what PyTorch takes.
EXTRA = 56 * 2**20
PATIENCE = 240  # seconds
#: glibc gives large blocks back at once, instead of keeping them for later: what is free does not
#: count for the limit then, in every run (mallopt(3), M_MMAP_THRESHOLD).
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20), "MALLOC_ARENA_MAX": "1"}


def compare(extra: int = EXTRA) -> dict:
    """Train the same model twice under a limit, and once without; all in a process of its own.

    Returns:
        "needed", "allowed": bytes; "in RAM": the error, in PyTorch's words; "in files",
        "without the limit": the losses of each step. "in files" has an error where that failed.

    Raises:
        RuntimeError: the process failed, or this system has no such limit; says which.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError("RLIMIT_DATA limits what a program allocates on Linux only")
    with tempfile.TemporaryDirectory() as folder:
        code = f"from utils.labs.lab11 import memory_limit; memory_limit.child({folder!r}, {extra})"
        done = subprocess.run(
            python_command(code),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=os.environ | MALLOC,
        )
    if done.returncode:
        raise RuntimeError(f"the limited process ended with {done.returncode}: {done.stderr}")
    return json.loads(done.stdout)


def child(folder: str, extra: int) -> None:
    """What runs in the limited process; prints JSON."""
    import resource

    import torch

    torch.set_num_threads(1)
    # Whatever libraries allocate when they are first used, before the limit is set.
    _train([t.clone() for t in _weights(torch, (64, 64, 10))], (64, 64, 10), torch)
    numbers = sum((a + 1) * b for a, b in itertools.pairwise(SIZES))
    found: dict = {"needed": 4 * 4 * numbers, "allowed": extra}
    free = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_segment() + extra, free[1]))
    # The files first: what a failure leaves in malloc's pools would count for them.
    found["in files"] = _tried(lambda: _train_in_files(Path(folder), torch))
    found["in RAM"] = _tried(lambda: _train(list(_weights(torch, SIZES)), SIZES, torch))
    resource.setrlimit(resource.RLIMIT_DATA, free)
    found["without the limit"] = _train(list(_weights(torch, SIZES)), SIZES, torch)
    print(json.dumps(found))


def _data_segment() -> int:
    """Bytes that count for the limit now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmData")))


def _tried(train) -> list[float] | str:
    try:
        return train()
    except RuntimeError as error:
        return str(error).splitlines()[0]


def _weights(torch, sizes):
    """Of each layer a row, one after the other, so that nobody needs all of them at once."""
    draw = torch.Generator().manual_seed(0)
    for wide, narrow in itertools.pairwise(sizes):
        row = torch.empty((wide + 1) * narrow)
        yield row.uniform_(-(wide**-0.5), wide**-0.5, generator=draw)


def _train(rows: list, sizes, torch, states=None) -> list[float]:
    """Losses of the steps. `states` is where Adam keeps its moments; by default it makes them."""
    from .layers import Layers, step_on

    draw = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, sizes[0], generator=draw)
    labels = torch.randint(0, sizes[-1], (SAMPLES,), generator=draw)
    rows = [row.requires_grad_() for row in rows]
    optimizers = [torch.optim.Adam([row], lr=RATE, foreach=False) for row in rows]
    for row, optimizer, state in zip(rows, optimizers, states or [None] * len(rows), strict=True):
        if state is not None:
            moments = dict(zip(("exp_avg", "exp_avg_sq"), state, strict=True))
            optimizer.state[row] = {"step": torch.tensor(0.0), **moments}
    return [step_on("cpu", rows, optimizers, Layers(sizes, x, labels)) for _ in range(STEPS)]


def _train_in_files(folder: Path, torch) -> list[float]:
    """The same with weights and moments in mapped files: three rows for each layer."""
    parts = []
    for i, row in enumerate(_weights(torch, SIZES)):
        mapped = torch.from_file(str(folder / f"layer{i}"), shared=True, size=3 * len(row))
        weight, *moments = mapped.chunk(3)
        weight.copy_(row)
        parts.append((weight, moments))
    return _train([one for one, _ in parts], SIZES, torch, [moments for _, moments in parts])
