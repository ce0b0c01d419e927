"""One rank of a recording: `python -m utils.labs.lab18.ward.rank NAME BACKEND FOLDER`."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .cases import CASES
from .counters import Census, Watched, Work, place_in
from .program import loaded, repaired

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


def main(names: str, backend: str, folder: str, rank: str = "") -> None:
    """Run sick programs with the instruments of their cases, and write what these show.

    Args:
        names: the patients, with commas in between; only one if it doesn't come to its end.
        backend: "gloo" or "mpi".
        folder: has a folder for each patient.
        rank: this rank's number; "" if mpiexec says it.
    """
    import torch._dynamo  # here, because an optimizer imports it, and that takes seconds

    torch.set_num_threads(1)
    if backend == "gloo":
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/meeting",
            rank=int(rank),
            world_size=4,
            timeout=timedelta(seconds=60),
        )
    else:
        dist.init_process_group(backend)
    for name in names.split(","):
        if backend == "mpi":
            dist.barrier()  # not a call that gloo's flight recorder should show
        _run(name, backend, Path(folder) / name / str(dist.get_rank()))
    if backend == "gloo":
        time.sleep(2 * PATIENCE)  # the others may wait for this rank
    dist.destroy_process_group()


def _run(name: str, backend: str, own: Path) -> None:
    """Run one sick program; the files of this rank begin with the path `own`."""
    found: dict[str, Any] = {}
    if backend == "gloo":
        # A thread in C writes the stack: a call of gloo may hold Python's lock while it waits.
        faulthandler.dump_traceback_later(
            PATIENCE, file=own.with_suffix(".stack").open("w", encoding="utf-8")
        )
        threading.Thread(target=_watch, args=(own,), daemon=True).start()
    try:
        with contextlib.redirect_stdout(Lines(dist.get_rank(), own.with_suffix(".lines"))):
            _examine(name, backend, found)
    except BaseException as error:
        found["traceback"] = _own_frames(error, name)
        raise
    finally:
        own.with_suffix(".json").write_text(json.dumps(found), encoding="utf-8")


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
    own = [frame for frame in frames if Path(frame.filename).name == f"{name}.py"]
    for frame in own:
        frame.filename = Path(frame.filename).name
    head = "Traceback (most recent call last):\n"
    said = "".join(traceback.format_exception_only(error)).rstrip()
    return head + "".join(traceback.format_list(own)) + said


def _examine(name: str, backend: str, found: dict[str, Any]) -> None:
    """Run the program once, and again for each instrument that would disturb the others."""
    case = CASES[name]
    train = loaded(case.text, name)
    if "returned" in case.instruments and "traceback" in case.instruments:
        _returned(train, found)
    if "traceback" in case.instruments:
        _limit_memory()
    if backend == "gloo":
        train(SEED)
        return
    result, found["timeline"] = _timed(train)
    with contextlib.redirect_stdout(io.StringIO()):
        if "curves" in case.instruments:
            right = loaded(repaired(case.text, case.repairs[0]), name)(SEED)[case.curve]
            found["curves"] = {"this run": result[case.curve], "one process": right}
        if "traffic" in case.instruments:
            found["calls"] = _calls(name)
        if "work" in case.instruments:
            found["work"] = _work(train)
        if "returned" in case.instruments:
            _returned(train, found)
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


def _timed(train: Any) -> tuple[Any, dict[str, Any]]:
    """Run the program; return its result, and its report for a timeline."""
    from torch_mpi.record import log
    from utils.timeline.cell_log import as_record

    dist.barrier()
    mark = log.mark()
    begin = time.perf_counter()
    cpu = time.thread_time()
    result = train(SEED)
    end = time.perf_counter()
    report = _rounded({
        "rank": dist.get_rank(),
        "begin": begin,
        "end": end,
        "cpu": time.thread_time() - cpu,
        "cores": os.cpu_count(),
        "records": [as_record(call) for call in log.since(mark)],
    })
    return result, report


def _rounded(value: Any) -> Any:
    """Return a report with times in whole microseconds."""
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


class Placed(Watched):
    """Stands for `torch.distributed` in a program, and notes the line of each call.

    Args:
        file: the program.

    Attributes:
        places: by a call's position in the log, its function and line.
    """

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.places: dict[int, tuple[str, int]] = {}

    def call(self, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function, and note the line of what it communicates."""
        from torch_mpi.record import log

        place = place_in(self.file)
        before = log.mark()
        result = super().call(function, *args, **kwargs)
        self.places |= dict.fromkeys(range(before, log.mark()), place)
        return result


def _calls(name: str) -> list[dict[str, Any]]:
    """Return the calls of the program with their lines."""
    from torch_mpi.record import log

    train = loaded(CASES[name].text, name)
    placed = Placed(f"{name}.py")
    train.__globals__["dist"] = placed
    mark = log.mark()
    train(SEED)
    names = ("op", "sent", "received", "blocking", "waited")
    return [
        {**{key: getattr(call, key) for key in names}, "place": placed.places[k][::-1]}
        for k, call in enumerate(log.since(mark), start=mark)
        if k in placed.places
    ]


def _work(train: Any) -> dict[str, int]:
    """Return the numbers that each function of the program computed."""
    with Work(train.__code__.co_filename) as work:
        train(SEED)
    return dict(work.by_function)


def _returned(train: Any, found: dict[str, Any]) -> None:
    """Note in "returned" what each function returned in its first and in its last call.

    An entry is [function, first, last], in the order of the first calls.
    """
    file = train.__code__.co_filename
    seen = {}

    def look(frame: Any, event: str, value: Any) -> None:
        code = frame.f_code
        if event != "return" or code.co_filename != file or not code.co_name.isidentifier():
            return
        if code.co_name in ("train", "norms", "make_teams"):
            return
        about = _about(code.co_name, frame.f_locals.get("model"))
        said = " · ".join(filter(None, [_in_words(value), *about]))
        first, _ = seen.get(code.co_name, (said, ""))
        seen[code.co_name] = (first, said)
        found["returned"] = [[name, *both] for name, both in seen.items()]

    sys.setprofile(look)
    try:
        train(SEED)
    finally:
        sys.setprofile(None)


def _in_words(value: Any) -> str:
    """Return a result in a few words: numbers as they are, and tensors by their norms."""
    if isinstance(value, torch.Tensor):
        if value.numel() == 1:
            return f"{value.item():.5f}"
        return f"{list(value.shape)} with norm {value.double().norm().item():.4f}"
    if isinstance(value, torch.nn.Module):
        return f"weights {_norm(value.parameters()):.5f}"
    if isinstance(value, float):
        return f"{value:.5f}"
    if isinstance(value, bool | int):
        return str(value)
    if isinstance(value, tuple):
        return ", ".join(filter(None, map(_in_words, value)))
    return ""


def _norm(tensors: Any) -> float:
    return torch.cat([tensor.detach().flatten() for tensor in tensors]).norm().item()


def _about(function: str, model: Any) -> Iterator[str]:
    """Yield the norm of the gradient if the function is about it, and the mode if it matters."""
    if not isinstance(model, torch.nn.Module):
        return
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if gradients and re.search("gradients|share", function):
        yield f"gradient {_norm(gradients):.5f}"
    if any(isinstance(layer, torch.nn.Dropout) for layer in model.modules()):
        yield "mode train" if model.training else "mode eval"


def _profile(train: Any) -> dict[str, Any]:
    """Return the operations that took most of the CPU time, of this rank."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        train(SEED)
    rows = sorted(profiler.key_averages(), key=lambda row: -row.self_cpu_time_total)[:8]
    table = [[row.key, row.count, round(row.self_cpu_time_total / 1000, 2)] for row in rows]
    return {"head": ["operation on rank 0", "calls", "own CPU time (ms)"], "rows": table}


def _memory(train: Any) -> tuple[list[int], list[list[int]]]:
    """Return the bytes of tensors over time, and count, bytes and line of those at the peak."""
    with Census(train.__code__.co_filename) as meter:
        train(SEED)
    held = [size for _, size in meter.history]
    step = max(1, len(held) // POINTS)
    curve = [max(held[k : k + step]) for k in range(0, len(held), step)]
    most = sorted(meter.sizes.items(), key=lambda item: -item[0][0] * item[1])[:5]
    return curve, [[count, size, line] for (size, line), count in most]


def _gradients(name: str) -> dict[str, Any]:
    """Return the norms of the gradients that the second step sees, here and in one process.

    We run the program with the reference's repair instead of one process: its gradients are equal.
    """
    sick = CASES[name].text
    ours, right = [_gradients_of(t, name) for t in (sick, repaired(sick, CASES[name].repairs[0]))]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, ours)
    rows = [[k, *row] for k, row in enumerate(zip(*everyone, right, strict=True))]
    return {"head": ["parameter", *(f"rank {k}" for k in range(4)), "one process"], "rows": rows}


def _gradients_of(text: str, name: str) -> list[str]:
    seen: list[list[str]] = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = (p.grad for p in parameters)
        seen.append(["none" if g is None else f"{g.norm().item():.4f}" for g in gradients])

    hook = register_optimizer_step_pre_hook(look)
    try:
        loaded(text, name)(SEED)
    finally:
        hook.remove()
    return seen[1]


if __name__ == "__main__":
    main(*sys.argv[1:])
