"""``python -m benchmarks.startup``: measures how soon ranks compute, forked and as processes.

A run measures both ways in turn for several rounds, and prints the medians and their ratio. Each
measurement starts a fresh Python, like a fresh kernel. "nothing warm" uses a new temporary folder,
so that there is no fork server yet.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile

from tabulate import tabulate
from tqdm import tqdm

from utils.jobs.forkserver.client import VARIABLE

WAYS = {"processes": {VARIABLE: "off"}, "forked": {}}
DEADLINE = 300.0

# Each program prints a JSON object with seconds or bytes by the name of the measurement.
_FIRST_REDUCE = (
    "import torch, torch.distributed as dist; dist.init_process_group('mpi');"
    "x = torch.ones(1); dist.all_reduce(x); dist.barrier()"
)
_NOTEBOOK = f"""
import json, sys, time
n = int(sys.argv[1])
from utils import cluster
begin = time.perf_counter()
ranks = cluster.start(n)
ranks.view.execute({_FIRST_REDUCE!r}).get()
found = {{"start": time.perf_counter() - begin}}
def pss(pid):
    text = open(f"/proc/{{pid}}/smaps_rollup").read()
    return 1024 * int(text.partition("Pss:")[2].split()[0])
found["memory"] = sum(pss(r["pid"]) for r in ranks.describe().records)
begin = time.perf_counter()
ranks.restart()
found["restart"] = time.perf_counter() - begin
ranks.stop()
print(json.dumps(found))
"""
_JOB = f"""
import contextlib, json, os, subprocess, time
from utils.jobs.mpi_job import Python
from utils.jobs.start_plan import Plan
plan = Plan(4, launcher="mpiexec")
with contextlib.closing(Python(plan)) as python:
    command = python.job("-c", {_FIRST_REDUCE!r})
    begin = time.perf_counter()
    done = subprocess.run(command, env=os.environ | plan.environment)
    found = {{"job": time.perf_counter() - begin}}
assert done.returncode == 0
print(json.dumps(found))
"""
_IMPORT = """
import IPython, ipykernel.ipkernel, json, time
begin = time.perf_counter()
from utils import cluster
print(json.dumps({"kernel": time.perf_counter() - begin}))
"""

# For each name: the program, its arguments, and the key in its output.
_COLD = "the same, nothing warm"
MEASUREMENTS = {
    "cluster.start(4), import torch, init, all_reduce": (_NOTEBOOK, ("4",), "start"),
    _COLD: (_NOTEBOOK, ("4",), "start"),
    "ranks.restart()": (_NOTEBOOK, ("4",), "restart"),
    "mpiexec -n 4, start to end, one all_reduce": (_JOB, (), "job"),
    "cluster.start(16), the same": (_NOTEBOOK, ("16",), "start"),
    "memory (PSS) of four idle ranks with PyTorch": (_NOTEBOOK, ("4",), "memory"),
    "from utils import cluster, in a kernel": (_IMPORT, (), "kernel"),
}


def measure(name: str, way: str) -> float:
    """Return one measurement, in seconds or bytes.

    Raises:
        RuntimeError: the measured program fails.
    """
    program, arguments, wanted = MEASUREMENTS[name]
    with contextlib.ExitStack() as stack:
        environment = os.environ | WAYS[way]
        if name == _COLD:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ddl-"))
            environment["TMPDIR"] = folder
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=DEADLINE,
            check=False,
            encoding="utf-8",
        )
    if done.returncode:
        raise RuntimeError(f"{name} ({way}) failed:\n{done.stdout}{done.stderr}")
    return float(json.loads(done.stdout.splitlines()[-1])[wanted])


def _row(name: str, values: dict[tuple[str, str], list[float]]) -> list[str]:
    """Return the name, a median for each way, and their ratio."""
    medians = [statistics.median(values[name, way]) for way in WAYS]
    shown = [f"{median:.2f} s" for median in medians]
    if name.startswith("memory"):
        shown = [f"{median / 2**20:.0f} MiB" for median in medians]
    return [name, *shown, f"{medians[0] / medians[1]:.1f} ×"]


def measured(names: list[str], rounds: int) -> dict[tuple[str, str], list[float]]:
    """Return all measurements by name and way, taken in turn for several rounds."""
    turns = [(name, way) for name in names for way in WAYS] * rounds
    values: dict[tuple[str, str], list[float]] = {turn: [] for turn in turns}
    # A first measurement of each way warms up the server and the system's file cache.
    for way in WAYS:
        measure(next(iter(MEASUREMENTS)), way)
    for name, way in tqdm(turns, unit="measurement"):
        values[name, way].append(measure(name, way))
    return values


def main() -> int:
    """Measure, print a table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.startup", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, metavar="R", help="medians of R rounds: 5")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="names with one of these words")
    options = parser.parse_args()
    words = options.only or [""]
    names = [name for name in MEASUREMENTS if any(word in name for word in words)]
    values = measured(names, options.rounds)
    rows = [_row(name, values) for name in names]
    print(tabulate(rows, headers=["", *WAYS, "ratio"], tablefmt="github"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
