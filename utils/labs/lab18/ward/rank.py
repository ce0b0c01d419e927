"""One rank of a recording: `python -m utils.labs.lab18.ward.rank NAME BACKEND FOLDER`."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import sys
import threading
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .case import text_of
from .cases import CASES
from .counters import Census, Work
from .program import loaded, repaired

if TYPE_CHECKING:
    from torch_mpi.record import Call

#: Instruments that need a job that hangs.
HANGS = {"stacks", "flight"}
SEED = 18
#: Seconds until a rank that hangs writes its stack.
PATIENCE = 8.0
#: Bytes that a rank may have beyond what it has before the program begins.
MOST_BYTES = 1_200_000_000
#: Points of a memory curve.
POINTS = 60


class Lines(io.TextIOBase):
    """Writes each printed line with its time and rank into a file, as a JSON list."""

    def __init__(self, rank: int, path: Path):
        self.rank = rank
        self._file = path.open("w", encoding="utf-8")
        self._open = ""

    def write(self, text: str) -> int:
        """Write the complete lines at once, because the rank may be killed."""
        *done, self._open = (self._open + text).split("\n")
        for line in done:
            print(json.dumps([time.time(), self.rank, line]), file=self._file, flush=True)
        return len(text)


def main(name: str, backend: str, folder: str) -> None:
    """Run the sick program with the instruments of its case, and write what they show."""
    torch.set_num_threads(1)
    if backend == "gloo":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=int(os.environ["RANK"]),
            world_size=4,
            timeout=timedelta(seconds=60),
        )
    else:
        dist.init_process_group(backend)
    rank = dist.get_rank()
    own = Path(folder) / str(rank)
    found: dict[str, Any] = {}
    if backend == "gloo":
        # A thread in C writes the stack: a call of gloo may hold Python's lock while it waits.
        faulthandler.dump_traceback_later(
            PATIENCE, file=own.with_suffix(".stack").open("w", encoding="utf-8")
        )
        threading.Thread(target=_watch, args=(own,), daemon=True).start()
    try:
        with contextlib.redirect_stdout(Lines(rank, own.with_suffix(".lines"))):
            _examine(name, backend, found)
    except BaseException as error:
        found["traceback"] = _own_frames(error, name)
        raise
    finally:
        own.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")
    if backend == "gloo":
        time.sleep(2 * PATIENCE)  # the others may wait for this rank
    dist.destroy_process_group()


def _watch(own: Path) -> None:
    """Write PyTorch's flight recorder when the program should have ended."""
    time.sleep(PATIENCE)
    own.with_suffix(".flight").write_text(json.dumps(_flight()), encoding="utf-8")


def _flight() -> list[list[Any]]:
    """Return the calls in PyTorch's flight recorder: number, group, operation and shape."""
    from torch._C import _distributed_c10d

    entries = json.loads(_distributed_c10d._dump_fr_trace_json())["entries"]
    groups = {
        str(group.group_name): dist.get_process_group_ranks(group)
        for group in dist.distributed_c10d._world.pg_map
    }
    return [
        [
            entry["collective_seq_id"],
            groups.get(entry["process_group"][0], entry["process_group"][0]),
            entry["profiling_name"].removeprefix("gloo:"),
            entry["input_sizes"],
        ]
        for entry in entries
    ]


def _own_frames(error: BaseException, name: str) -> str:
    """Return a traceback with only the program's frames."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).name in (f"{name}.py", "job.py")]
    for frame in own:
        frame.filename = Path(frame.filename).name
    head = "Traceback (most recent call last):\n"
    said = "".join(traceback.format_exception_only(error)).rstrip()
    return head + "".join(traceback.format_list(own)) + said


def _examine(name: str, backend: str, found: dict[str, Any]) -> None:
    """Run the program once, and again for each instrument that would disturb the others."""
    case = CASES[name]
    train = loaded(text_of(name), name)
    if "traceback" in case.instruments:
        _limit_memory()
    if backend == "gloo":
        train(SEED)
        return
    result, found["timeline"], calls = _timed(train)
    found["calls"] = [_short(call) for call in calls]
    with contextlib.redirect_stdout(io.StringIO()):
        if "curves" in case.instruments:
            right = loaded(repaired(text_of(name), case.repairs[0]), name)(SEED)["losses"]
            found["curves"] = {"this run": result["losses"], "one process": right}
        if "totals" in case.instruments:
            found["work"] = _work(train, found["timeline"])
        if "profile" in case.instruments:
            found["profile"] = _profile(train)
        if "memory" in case.instruments:
            found["memory"], found["sizes"] = _memory(train)
        if "probe" in case.instruments:
            found["probe"] = _gradients(name)


def _limit_memory() -> None:
    import resource  # Windows has none

    size = (
        int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        * resource.getpagesize()
    )
    resource.setrlimit(resource.RLIMIT_AS, (size + MOST_BYTES, resource.RLIM_INFINITY))


def _timed(train: Any) -> tuple[Any, dict[str, Any], list[Call]]:
    """Run the program; return its result, its report for a timeline, and its calls."""
    from torch_mpi.record import log
    from utils.timeline.cell_log import as_record

    dist.barrier()
    mark, begin, cpu = log.mark(), time.perf_counter(), time.thread_time()
    result = train(SEED)
    end = time.perf_counter()
    calls = log.since(mark)
    report = _rounded({
        "rank": dist.get_rank(),
        "begin": begin,
        "end": end,
        "cpu": time.thread_time() - cpu,
        "cores": os.cpu_count(),
        "records": [as_record(call) for call in calls],
    })
    return result, report, calls


def _rounded(value: Any) -> Any:
    """Return a report with times in whole microseconds."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def _short(call: Call) -> dict[str, Any]:
    names = ("op", "sent", "received", "blocking", "waited")
    return {**{name: getattr(call, name) for name in names}, "shape": str(list(call.shape))}


def _work(train: Any, report: dict[str, Any]) -> list[Any]:
    """Return milliseconds of computing and waiting, and the numbers that the rank computed."""
    with Work() as work:
        train(SEED)
    waiting = sum(r["end"] - r["start"] for r in report["records"] if r["blocking"])
    computing = report["end"] - report["begin"] - waiting
    return [round(1000 * computing, 1), round(1000 * waiting, 1), work.numbers]


def _profile(train: Any) -> dict[str, Any]:
    """Return the operations that took most of the CPU time, of this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(SEED)
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)[:8]
    table = [[row.key, row.count, round(row.self_cpu_time_total / 1000, 2)] for row in rows]
    return {"head": ["operation on rank 0", "calls", "own CPU time (ms)"], "rows": table}


def _memory(train: Any) -> tuple[list[int], list[list[int]]]:
    """Return the bytes of tensors over time, and the sizes of the tensors at the peak."""
    with Census() as meter:
        train(SEED)
    held = [size for _, size in meter.history]
    step = max(1, len(held) // POINTS)
    curve = [max(held[k : k + step]) for k in range(0, len(held), step)]
    sizes = sorted(meter.sizes.items(), key=lambda item: -item[0] * item[1])[:5]
    return curve, [list(item) for item in sizes]


def _gradients(name: str) -> dict[str, Any]:
    """Return the norms of the gradients that the first step sees, in this run and in one process.

    We run the program with the reference's repair instead of one process: its gradients are equal.
    """
    sick = text_of(name)
    both = [_first_gradients(t, name) for t in (sick, repaired(sick, CASES[name].repairs[0]))]
    rows = [
        [k, f"{one:.4f}", f"{other:.4f}"] for k, (one, other) in enumerate(zip(*both, strict=True))
    ]
    return {"head": ["parameter", "this run", "one process"], "rows": rows}


def _first_gradients(text: str, name: str) -> list[float]:
    seen: list[list[float]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = optimizer.param_groups[0]["params"]
        seen.append([float(p.grad.norm()) for p in parameters])

    hook = register_optimizer_step_pre_hook(look)
    try:
        loaded(text, name)(SEED)
    finally:
        hook.remove()
    return seen[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
