"""``ddl-labs diagnosis``: measures which wrong programs the diagnosis finds, class by class."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from utils.jobs import RanksError, mpi_job
from utils.jobs.start_plan import Plan
from utils.mpi.labelled import PAIRS
from utils.mpi.labelled.judge import NAME, Trial, judged
from utils.mpi.labelled.programs import BY_LUCK, KINDS, Pair

#: Seconds that a wait may last. A report after that time was found only by the timeout.
PATIENCE = 10.0
#: Seconds after which a job is stopped that does not end by itself.
DEADLINE = 60.0

HEADS = ("class", "wrong programs", "reported", "rank, line, class named", "right, silent", "s")


def main(options: argparse.Namespace) -> int:
    """Run the programs on each requested backend; return 1 if a right program was reported."""
    pairs = chosen(options.only)
    if not pairs:
        print(f"No program has {options.only!r} in its name or class.", file=sys.stderr)
        return 2
    status = 0
    for backend in options.backends:
        try:
            trials = _run(pairs, backend, options.verbose)
        except (RanksError, ValueError) as error:
            print(f"diagnosis: {error}", file=sys.stderr)
            return 2
        print(f"\n{backend}\n\n{tabulate(rows(trials), HEADS, 'github')}")
        failed = [trial for trial in trials if not trial.is_good]
        for trial in failed:
            print(f"- {'right' if trial.right else 'wrong'}: {trial.pair.name}: {_how(trial)}")
        if any(trial.right for trial in failed):
            status = 1
    return status


def chosen(words: str) -> list[Pair]:
    """Return the pairs whose name or class contains these words; all pairs if there are none."""
    return [pair for pair in PAIRS if words in pair.name or words in pair.kind]


def _run(pairs: list[Pair], backend: str, verbose: bool) -> list[Trial]:
    trials = []
    programs = [(pair, right) for pair in pairs for right in (False, True)]
    for pair, right in tqdm(programs, backend, unit="program", disable=None):
        trials.append(run(pair, right, backend))
        if verbose:
            print(f"\n=== {pair.name}, {'right' if right else 'wrong'}\n{trials[-1].text}")
    return trials


def rows(trials: Iterable[Trial]) -> list[list[object]]:
    """Return a row per class and one for all: counts, and the wrong programs' median seconds."""
    trials = list(trials)
    classes = {kind: [trial for trial in trials if trial.pair.kind == kind] for kind in KINDS}
    filled = {kind: members for kind, members in classes.items() if members}
    return [_row(name, members) for name, members in {**filled, "all": trials}.items()]


def _row(name: str, trials: list[Trial]) -> list[object]:
    wrong = [trial for trial in trials if not trial.right]
    right = [trial.is_good for trial in trials if trial.right]
    return [
        name,
        len(wrong),
        sum(trial.reported for trial in wrong),
        sum(trial.is_good for trial in wrong),
        f"{sum(right)} of {len(right)}",
        f"{statistics.median(trial.seconds for trial in wrong):.1f}",
    ]


def _how(trial: Trial) -> str:
    if trial.right:
        return "reported, although it is right"
    if not trial.reported:
        return "not reported"
    parts = (("rank and line", trial.named_rank_and_line), ("what is wrong", trial.named_class))
    return f"the report lacks {' and '.join(part for part, named in parts if not named)}"


def run(pair: Pair, right: bool, backend: str) -> Trial:
    """Run one program of a pair on fresh ranks.

    Raises:
        ValueError, RanksError: no ranks can be started here.
    """
    plan = Plan(pair.ranks, timeout=PATIENCE, launcher="mpiexec")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / NAME
        program.write_text(pair.text(right))
        environment = {
            "LABELLED_BACKEND": backend,
            "LABELLED_TIMEOUT": str(PATIENCE),
            "LABELLED_STORE": str(Path(folder) / "store"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if pair.kind in BY_LUCK else "OFF",
        }
        ended = mpi_job.run_on(plan, [str(program)], DEADLINE, environment)
    return judged(pair, right, ended.status, ended.err, ended.seconds)
