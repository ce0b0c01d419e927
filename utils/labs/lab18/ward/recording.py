"""Record the evidence: `python -m utils.labs.lab18.ward.recording [NAME …]` runs the sick programs.

A patient whose evidence has stacks or the flight recorder runs on PyTorch's gloo, as it would in a
data center without this course's backend. It hangs, and each rank then writes its stack and its
flight recorder.
All others run on the "mpi" backend, whose records become tables and timelines.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from utils.jobs import mpi_job
from utils.jobs.start_plan import Plan
from utils.labs.lab18.stacks import threads_of

from .case import Case
from .cases import CASES
from .evidence import FOLDER, digest_of
from .rank import HANGS, PATIENCE
from .rank import main as rank_of

RANKS = 4
#: Seconds for a whole job.
DEADLINE = 400.0
#: Calls of each rank that the table of the flight recorder shows.
LAST_CALLS = 4


#: Instruments of programs that don't come to their end.
ENDLESS = {*HANGS, "report", "traceback"}


def main(names: list[str]) -> None:
    """Record these patients; all of them if there are no names.

    Programs that come to their end share one job, because a job starts slowly.
    """
    cases = [CASES[name] for name in names or CASES]
    ended = [case for case in cases if not ENDLESS & set(case.instruments)]
    jobs = [*([ended] if ended else []), *([case] for case in cases if case not in ended)]
    for job in jobs:
        for name, found in recorded(job).items():
            text = json.dumps(found, ensure_ascii=False)
            (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
            print(f"{name}: {', '.join(found)}, {len(text):,} bytes", flush=True)


def recorded(cases: list[Case]) -> dict[str, dict[str, Any]]:
    """Return the evidence of patients that share a job, by their names."""
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            (Path(folder) / case.name).mkdir()
        hangs = bool(HANGS & set(cases[0].instruments))
        err = (_on_gloo if hangs else _on_mpi)(cases, Path(folder))
        return {case.name: _shown(case, Path(folder) / case.name, err) for case in cases}


def _shown(case: Case, folder: Path, err: str) -> dict[str, Any]:
    """Return the entries that a case shows, from the files of its ranks."""
    by_rank = [_read(folder / str(rank), case.name) for rank in range(RANKS)]
    lines = sorted(line for one in by_rank for line in one["log"])
    start = lines[0][0] if lines else 0.0
    entries: dict[str, Any] = {
        "log": [[round(at - start, 3), rank, text] for at, rank, text in lines],
        "report": _report(err),
        "traceback": _traceback(by_rank),
        **_joined(by_rank),
    }
    shown = {key: entries[key] for key in case.instruments}
    if empty := [key for key, value in shown.items() if not value]:
        raise RuntimeError(f"{case.name} has no {', '.join(empty)}: {by_rank}\n{err}")
    return {"digest": digest_of(case.text), **shown}


def _read(own: Path, name: str) -> dict[str, Any]:
    """Return what a rank has left in its files."""

    def text(suffix: str) -> str:
        path = own.with_suffix(suffix)
        return path.read_text(encoding="utf-8") if path.exists() else ""

    found: dict[str, Any] = json.loads(text(".json") or "{}")
    found["log"] = [json.loads(line) for line in text(".lines").splitlines()]
    if flight := text(".flight"):
        found["flight"] = json.loads(flight)
    if stack := text(".stack"):
        found["stacks"] = _frames(stack, name)
        if not found["stacks"] and not own.with_suffix(".json").exists():
            raise RuntimeError(f"{name} had not begun when its ranks were stopped: {stack}")
    return found


def _frames(text: str, name: str) -> list[list[Any]]:
    """Return the frames of the program's thread, the innermost first; none if it has ended."""
    program = f"{name}.py"
    own = next((one for one in threads_of(text) if any(f.file == program for f in one)), [])
    last = max((k for k, frame in enumerate(own) if frame.file == program), default=-1)
    return [
        [Path(frame.file).name, frame.line, frame.function]
        for frame in own[: last + 1]
        if frame.function != "wrapper"
    ]


def _on_gloo(cases: list[Case], folder: Path) -> str:
    """Run a job of PyTorch's gloo, and kill it when its ranks have written where they wait."""
    importlib.import_module("torch._dynamo")  # so that the ranks, which are forks, have it

    name = cases[0].name
    os.environ["TORCH_FR_BUFFER_SIZE"] = "2000"
    fork = multiprocessing.get_context("fork").Process
    jobs = [fork(target=rank_of, args=(name, "gloo", str(folder), str(k))) for k in range(RANKS)]
    for job in jobs:
        job.start()
    try:
        until = time.monotonic() + DEADLINE
        stacks = [folder / name / f"{rank}.stack" for rank in range(RANKS)]
        while not all(path.exists() and path.stat().st_size for path in stacks):
            if time.monotonic() > until or not all(job.is_alive() for job in jobs):
                raise RuntimeError(f"{name} has no stacks, because a rank died or took too long")
            time.sleep(0.2)
        time.sleep(2.0)  # until the flight recorders are written, too
    finally:
        for job in jobs:
            job.kill()
            job.join()
    return ""


def _on_mpi(cases: list[Case], folder: Path) -> str:
    names = ",".join(case.name for case in cases)
    words = ["-m", "utils.labs.lab18.ward.rank", names, "mpi", str(folder)]
    return mpi_job.run_on(Plan(RANKS, timeout=PATIENCE), words, DEADLINE).err


def _report(err: str) -> str:
    """Return the backend's report from the output of mpiexec."""
    lines = err.splitlines()
    begin = next((k for k, line in enumerate(lines) if "Deadlock" in line or "waits" in line), 0)
    return "\n".join(lines[begin:]).partition("\n\n")[0].partition("\n---")[0]


def _traceback(by_rank: list[dict[str, Any]]) -> str:
    texts = {rank: one["traceback"] for rank, one in enumerate(by_rank) if one.get("traceback")}
    return "\n\n".join(f"rank {rank}:\n{text}" for rank, text in texts.items())


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the entries that are made of the reports of all ranks."""

    def each(key: str) -> dict[str, Any]:
        return {str(rank): one[key] for rank, one in enumerate(by_rank) if key in one}

    flights = each("flight").items()
    return {
        "stacks": each("stacks"),
        "flight": [[int(r), *call] for r, calls in flights for call in calls[-LAST_CALLS:]],
        "timeline": [one["timeline"] for one in by_rank if "timeline" in one],
        "curves": by_rank[0].get("curves"),
        "traffic": _traffic(each("calls")),
        "work": _work(each("work")),
        "returned": _returned(each("returned")),
        "profile": by_rank[0].get("profile"),
        "probe": by_rank[0].get("probe"),
        "memory": _memory(by_rank),
    }


def _table(head: list[str], rows: list[list[Any]]) -> dict[str, Any] | None:
    return {"head": head, "rows": rows} if rows else None


def _traffic(calls: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return calls, waits and bytes of each line and operation, by rank."""
    rows = []
    made = [call for of in calls.values() for call in of]
    for (line, function), op in sorted({(tuple(c["place"]), c["op"]) for c in made}):
        of_ranks = [
            [c for c in of if tuple(c["place"]) == (line, function) and c["op"] == op]
            for of in calls.values()
        ]
        rows.append([f"{line}, {function}", op, *_totals(of_ranks)])
    return _table(["line", "operation", "calls", "waited for", "bytes sent and received"], rows)


def _totals(of_ranks: list[list[dict[str, Any]]]) -> list[str]:
    """Return how many calls the ranks made, for how many they waited, and how many bytes moved."""
    return [
        _by_rank([len(of) for of in of_ranks]),
        _by_rank([sum(c["blocking"] or c["waited"] for c in of) for of in of_ranks]),
        _by_rank([sum(c["sent"] + c["received"] for c in of) for of in of_ranks]),
    ]


def _by_rank(numbers: list[int]) -> str:
    """Return the number of all ranks, or the number of each rank if they differ."""
    told = [f"{number:,}" for number in numbers]
    return told[0] if len(set(told)) == 1 else " / ".join(told)


def _work(work: dict[str, dict[str, int]]) -> dict[str, Any] | None:
    functions = dict.fromkeys(name for of in work.values() for name in of)
    rows = [[name, *(of.get(name, 0) for of in work.values())] for name in functions if name]
    return _table(["function", *(f"rank {rank}" for rank in work)], rows)


def _returned(seen: dict[str, list[list[str]]]) -> dict[str, Any] | None:
    """Return a row for the first call of each function, and one for its last call."""
    by_rank = [{name: both for name, *both in of} for of in seen.values()]
    none = ["", ""]  # of a rank that does not call the function
    rows = []
    for name in dict.fromkeys(name for of in by_rank for name in of):
        first, last = ([of.get(name, none)[k] for of in by_rank] for k in (0, 1))
        rows += [[name, "first", *first]] if any(first) else []
        rows += [[name, "last", *last]] if any(last) and last != first else []
    return _table(["function", "call", *(f"rank {rank}" for rank in seen)], rows)


def _memory(by_rank: list[dict[str, Any]]) -> dict[str, Any] | None:
    curves = {str(rank): one["memory"] for rank, one in enumerate(by_rank) if "memory" in one}
    if not curves:
        return None
    most = max(curves, key=lambda rank: max(curves[rank]))
    return {"curves": curves, "rank": int(most), "sizes": by_rank[int(most)]["sizes"]}


if __name__ == "__main__":
    main(sys.argv[1:])
