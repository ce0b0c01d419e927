"""``ddl-labs diagnosis``: recall and precision for each class of wrong programs."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable

from tabulate import tabulate
from tqdm import tqdm

from utils.jobs.errors import RanksError
from utils.jobs.labelled_trial import stage
from utils.mpi.labelled.judge import Trial
from utils.mpi.labelled.programs import KINDS, PAIRS, Pair

HEADS = ("class", "wrong programs", "reported", "rank, line, class named", "right, silent", "s")


def chosen(words: str) -> list[Pair]:
    """Return the pairs whose name or class holds these words; all of them for no words."""
    return [pair for pair in PAIRS if words in pair.name or words in pair.kind]


def rows(trials: Iterable[Trial]) -> list[list[object]]:
    """Return a row per class, and one for all: counts, and the median of a wrong one's seconds."""
    trials = list(trials)
    kinds = [kind for kind in KINDS if any(t.pair.kind == kind for t in trials)]
    found = [_row(kind, [t for t in trials if t.pair.kind == kind]) for kind in kinds]
    return [*found, _row("all", trials)]


def _row(name: str, trials: list[Trial]) -> list[object]:
    wrong, right = [t for t in trials if not t.right], [t for t in trials if t.right]
    return [
        name,
        len(wrong),
        sum(t.reported for t in wrong),
        sum(t.is_good for t in wrong),
        f"{sum(t.is_good for t in right)} of {len(right)}",
        f"{statistics.median(t.seconds for t in wrong):.1f}",
    ]


def main(options: argparse.Namespace) -> int:
    """Run the set on each backend asked for; status 1 where a right program was reported."""
    pairs = chosen(options.only)
    if not pairs:
        print(f"no program has {options.only!r} in its name or class", file=sys.stderr)
        return 2
    wrongly = 0
    for backend in options.backends:
        try:
            trials = _run(pairs, backend, options.verbose)
        except (RanksError, ValueError) as error:
            print(f"diagnosis: {error}", file=sys.stderr)
            return 2
        wrongly += sum(t.right and not t.is_good for t in trials)
        print(f"\n{backend}\n\n{tabulate(rows(trials), HEADS, 'github')}")
        for trial in trials:
            if not trial.is_good:
                print(f"- {'right' if trial.right else 'wrong'}: {trial.pair.name}: {_how(trial)}")
    return 1 if wrongly else 0


def _run(pairs: list[Pair], backend: str, verbose: bool) -> list[Trial]:
    trials = []
    with stage(backend) as place:
        programs = [(pair, right) for pair in pairs for right in (False, True)]
        for pair, right in tqdm(programs, backend, unit="program", disable=None):
            trials.append(place.run(pair, right))
            if verbose:
                print(f"\n=== {pair.name}, {'right' if right else 'wrong'}\n{trials[-1].text}")
    return trials


def _how(trial: Trial) -> str:
    if trial.right:
        return "reported, though nothing is wrong"
    if not trial.reported:
        return "not reported"
    lacks = []
    if not trial.named_rank_and_line:
        lacks.append("rank and line")
    if not trial.named_class:
        lacks.append("what is wrong")
    return f"the report lacks {' and '.join(lacks)}"
