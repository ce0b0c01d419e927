"""``python -m benchmarks.diagnosis_score``: measures which wrong programs a tool finds."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from benchmarks import diagnosis_page, labelled
from benchmarks.labelled import PAIRS
from benchmarks.labelled.judge import BACKEND, GLOO, NAME, RECORDER, Reading, Trial, judged
from benchmarks.labelled.programs import BY_LUCK, Pair
from utils.jobs import RanksError, mpi_job
from utils.jobs.start_plan import Plan

#: Seconds that a wait may last. A report after that time was found only by the timeout.
PATIENCE = 4.0
#: Seconds after which a job is stopped that does not end by itself.
DEADLINE = 30.0
#: Programs that run at the same time. Most of the time, the ranks of a wrong one wait.
AT_ONCE = 2
#: Entries that the flight recorder keeps, PyTorch's default.
ENTRIES = "2000"

#: `torchfrtrace` as a module, and what it prints although it has found nothing.
ANALYZER = "torch.distributed.flight_recorder.fr_trace"
NOTHING = ("No errors found for this collective entry", "tabulate is not installed")


@dataclass(frozen=True)
class Tool:
    """A tool that reports mistakes.

    Attributes:
        title: how the tables call it.
        backend: what the programs run on.
        debug: ``TORCH_DISTRIBUTED_DEBUG``; "" is DETAIL for the classes `BY_LUCK` only.
        reading: how to read its reports.
        recorded: the report is what ``torchfrtrace`` prints, not the job's stderr.
    """

    title: str
    backend: str
    debug: str
    reading: Reading
    recorded: bool = False


TOOLS = {
    "mpi": Tool(diagnosis_page.OURS, "mpi", "", BACKEND),
    "gloo": Tool("gloo", "gloo", "OFF", GLOO),
    "gloo-detail": Tool("gloo with TORCH_DISTRIBUTED_DEBUG=DETAIL", "gloo", "DETAIL", GLOO),
    "recorder": Tool("flight recorder with torchfrtrace", "gloo", "OFF", RECORDER, recorded=True),
}
#: The tools of docs/diagnosis.md.
PUBLISHED = ("mpi", "gloo-detail", "recorder")


def main(options: argparse.Namespace) -> int:
    """Run the programs with each requested tool, and print or write the tables.

    Returns:
        0 if our backend reported no right program, 1 if it reported one, and 2 if the programs
        can't be run.
    """
    pairs = chosen("" if options.page else options.only)
    if not pairs:
        print(f"No program has {options.only!r} in its name or class.", file=sys.stderr)
        return 2
    try:
        trials = _measure(pairs, options)
    except (RanksError, ValueError, OSError) as error:
        print(f"diagnosis: {error}", file=sys.stderr)
        return 2
    print(diagnosis_page.tables(trials))
    ours = trials.get(diagnosis_page.OURS, [])
    return int(any(trial.right and trial.reported for trial in ours))


def _measure(pairs: list[Pair], options: argparse.Namespace) -> diagnosis_page.Trials:
    """Run the programs with each tool, and write the page if there is one.

    Raises:
        RanksError, ValueError, OSError: no ranks can be started, or the page can't be written.
    """
    begin = time.monotonic()
    if options.page:
        diagnosis_page.around(options.page)
    trials = {}
    for name in PUBLISHED if options.page else options.tools:
        tool = TOOLS[name]
        if tool.recorded:
            title = f"{tool.title}, on {options.recorded}"
            tool = dataclasses.replace(tool, title=title, backend=options.recorded)
        trials[tool.title] = _run(pairs, tool, options.verbose)
    if options.page:
        minutes = (time.monotonic() - begin) / 60
        diagnosis_page.write(options.page, trials, PATIENCE, minutes)
    return trials


def chosen(words: str) -> list[Pair]:
    """Return the pairs whose name or class contains these words; all pairs if there are none."""
    return [pair for pair in PAIRS if words in pair.name or words in pair.kind]


def _run(pairs: list[Pair], tool: Tool, verbose: bool) -> list[Trial]:
    wanted = [pair for pair in pairs for _ in (False, True)]
    sides = [False, True] * len(pairs)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        coming = pool.map(run, wanted, sides, [tool] * len(sides))
        trials = list(tqdm(coming, tool.title, len(sides), unit="program", disable=None))
    for trial in trials if verbose else ():
        print(f"\n=== {trial.pair.name}, {'right' if trial.right else 'wrong'}\n{trial.text}")
    return trials


def run(pair: Pair, right: bool, tool: Tool) -> Trial:
    """Run one program of a pair on fresh ranks.

    Raises:
        ValueError, RanksError: no ranks can be started here.
    """
    plan = Plan(pair.ranks, timeout=PATIENCE, launcher="mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / NAME
        program.write_text(pair.text(right), encoding="utf-8")
        environment = {
            "LABELLED_BACKEND": tool.backend,
            "LABELLED_TIMEOUT": str(PATIENCE),
            "LABELLED_STORE": str(Path(folder) / "store"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISTRIBUTED_DEBUG": tool.debug or ("DETAIL" if pair.kind in BY_LUCK else "OFF"),
        }
        if tool.recorded:
            return _recorded(pair, right, plan, program, environment)
        ended = mpi_job.run_on(plan, [str(program)], DEADLINE, environment)
    # If we had to end a job, its status isn't a report.
    status = 0 if ended.status == mpi_job.LATE and not right else ended.status
    return judged(pair, right, status, ended.err, ended.seconds, tool.reading)


# --- the flight recorder --------------------------------------------------------------------------


def _recorded(
    pair: Pair, right: bool, plan: Plan, program: Path, environment: dict[str, str]
) -> Trial:
    """Run a program with the flight recorder, and judge what ``torchfrtrace`` prints."""
    dumps = program.parent / "dumps"
    environment = environment | {
        "LABELLED_DUMPS": str(dumps),
        "LABELLED_RANKS": str(pair.ranks),
        "TORCH_FR_BUFFER_SIZE": ENTRIES,
    }
    recorder = Path(labelled.__file__).with_name("recorded.py")
    ended = mpi_job.run_on(plan, [str(recorder), str(program)], DEADLINE, environment)
    begin = time.monotonic()
    report = analyzed(plan, dumps)
    seconds = ended.seconds + time.monotonic() - begin
    if right and ended.status:
        return judged(pair, right, ended.status, report + ended.err, seconds, RECORDER)
    return judged(pair, right, 0, report, seconds, RECORDER)


def analyzed(plan: Plan, dumps: Path) -> str:
    """Return what ``torchfrtrace`` prints about a folder of dumps; "" if it finds nothing or fails.

    If it fails, maybe because a rank was killed before it could write its dump, it gets a second
    chance with ``--allow-incomplete-ranks``.
    """
    with contextlib.closing(mpi_job.Python(plan)) as python:
        for more in ([], ["--allow-incomplete-ranks"]):
            done = subprocess.run(
                [*python.command, "-m", ANALYZER, str(dumps), *more],
                env=os.environ | plan.environment | python.outside_mpiexec(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=DEADLINE,
                check=False,
                encoding="utf-8",
            )
            if not done.returncode:
                return found(done.stdout + done.stderr)
    return ""


def found(text: str) -> str:
    """Return the lines of ``torchfrtrace`` that describe a mistake."""
    return "\n".join(line for line in text.splitlines() if not line.startswith(NOTHING))


# --- the command line -----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.diagnosis_score",
        description="Run right and wrong programs, and say which of them a tool reports, and how "
        "well. Status 0: our backend reported no right program. Status 1: it reported one. "
        "Status 2: the programs can't be run.",
    )
    top.add_argument("--only", default="", metavar="WORDS", help="part of a name or class")
    top.add_argument("--tools", nargs="+", default=["mpi"], choices=list(TOOLS), help="mpi")
    top.add_argument("--recorded", default="gloo", metavar="BACKEND", help="for the recorder: gloo")
    top.add_argument("--verbose", action="store_true", help="print every report")
    what = f"all programs with {', '.join(PUBLISHED)}; write the tables into this page"
    top.add_argument("--page", type=Path, metavar="FILE", help=what)
    return top


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
