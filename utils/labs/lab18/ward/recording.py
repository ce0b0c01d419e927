"""Record the evidence: `python -m utils.labs.lab18.ward.recording [NAME …]` runs the sick programs.

A patient whose evidence has stacks or the flight recorder runs on PyTorch's gloo, as it would in a
data center without this course's backend. It hangs, and each rank then writes its stack and its
flight recorder.
All others run on the "mpi" backend, whose records become tables and timelines.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from utils.jobs import mpi_job
from utils.jobs.start_plan import Plan
from utils.labs.lab18.stacks import threads_of

from .case import Case, text_of
from .cases import CASES
from .evidence import FOLDER, digest_of
from .rank import HANGS, PATIENCE

RANKS = 4
#: Seconds for a whole job.
DEADLINE = 90.0
#: Calls of each rank that the table of the flight recorder shows.
LAST_CALLS = 4


def main(names: list[str]) -> None:
    """Record these patients; all of them if there are no names."""
    for name in names or CASES:
        found = recorded(CASES[name])
        text = json.dumps(found, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        print(f"{name}: {', '.join(found)}, {len(text):,} bytes", flush=True)


def recorded(case: Case) -> dict[str, Any]:
    """Return the evidence of a patient, with the entries that its case shows."""
    with tempfile.TemporaryDirectory() as folder:
        hangs = bool(HANGS & set(case.instruments))
        err = (_on_gloo if hangs else _on_mpi)(case, Path(folder))
        by_rank = [_read(Path(folder) / str(rank), case.name) for rank in range(RANKS)]
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
    return {"digest": digest_of(text_of(case.name)), **shown}


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


def _on_gloo(case: Case, folder: Path) -> str:
    """Run a job of PyTorch's gloo, and kill it when its ranks have written where they wait."""
    program = [sys.executable, "-m", "utils.labs.lab18.ward.rank", case.name, "gloo", str(folder)]
    jobs = [
        subprocess.Popen(
            program,
            env={**os.environ, "RANK": str(rank), "TORCH_FR_BUFFER_SIZE": "2000"},
            stderr=subprocess.DEVNULL,
        )
        for rank in range(RANKS)
    ]
    try:
        until = time.monotonic() + DEADLINE
        stacks = [folder / f"{rank}.stack" for rank in range(RANKS)]
        while not all(path.exists() and path.stat().st_size for path in stacks):
            if time.monotonic() > until:
                raise RuntimeError(f"{case.name} has no stacks after {DEADLINE:.0f} s")
            time.sleep(0.2)
        time.sleep(2.0)  # until the flight recorders are written, too
    finally:
        for job in jobs:
            job.kill()
            job.wait()
    return ""


def _on_mpi(case: Case, folder: Path) -> str:
    words = ["-m", "utils.labs.lab18.ward.rank", case.name, "mpi", str(folder)]
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
        "totals": _totals(each("work")),
        "profile": by_rank[0].get("profile"),
        "probe": by_rank[0].get("probe"),
        "memory": _memory(by_rank),
    }


def _table(head: list[str], rows: list[list[Any]]) -> dict[str, Any] | None:
    return {"head": head, "rows": rows} if rows else None


def _traffic(calls: dict[str, list[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return calls and bytes of each operation on each rank."""
    rows = [
        [
            int(rank),
            op,
            len(these),
            sum(c["sent"] for c in these),
            sum(c["received"] for c in these),
        ]
        for rank, made in calls.items()
        for op in sorted({c["op"] for c in made})
        if (these := [c for c in made if c["op"] == op])
    ]
    return _table(["rank", "operation", "calls", "bytes sent", "bytes received"], rows)


def _totals(work: dict[str, Any]) -> dict[str, Any] | None:
    rows = [[int(rank), *row] for rank, row in work.items()]
    return _table(["rank", "computing (ms)", "waiting (ms)", "numbers computed"], rows)


def _memory(by_rank: list[dict[str, Any]]) -> dict[str, Any] | None:
    curves = {str(rank): one["memory"] for rank, one in enumerate(by_rank) if "memory" in one}
    if not curves:
        return None
    most = max(curves, key=lambda rank: max(curves[rank]))
    return {"curves": curves, "rank": int(most), "sizes": by_rank[int(most)]["sizes"]}


if __name__ == "__main__":
    main(sys.argv[1:])
