"""Play wrong answers in random order on real ranks, each followed by the right one.

A wrong answer may deadlock, leave messages behind or destroy its group early. Whatever it does, the
right answer that comes next must pass on the same ranks. The command plays as many pairs as asked
for, of all labs::

    python tests/labs/answer_pairs.py --pairs 500 --seed 1
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from answer_tools import LABS, Lab, ranks_of, solutions_of, wrong_answers
from lab_tools import verdict

from utils import cluster

# Seconds that a communication may wait: a deadlock is found earlier.
TIMEOUT = 5.0


@dataclass(frozen=True)
class Pair:
    """A wrong answer of a task: which lab, which task, the mistake in words, and its code."""

    lab: str
    task: str
    mistake: str
    code: str

    def __str__(self) -> str:
        return f"{self.task} {self.mistake}"


def draw(seed: int, count: int, labs: list[str]) -> dict[str, list[Pair]]:
    """Return ``count`` wrong answers of these labs in random order, by lab."""
    known = [
        Pair(name, task, mistake, code)
        for name in labs
        for task, mistake, code, _ in wrong_answers(LABS[name], solutions_of(name))
    ]
    dice = random.Random(seed)
    drawn = dice.sample(known, min(count, len(known)))
    return {name: [pair for pair in drawn if pair.lab == name] for name in labs}


def play(pairs: list[Pair]) -> Iterator[tuple[Pair, str]]:
    """Play wrong answers of one lab on the same ranks; yield what went wrong after each, or ""."""
    name = pairs[0].lab
    with cluster.start(ranks_of(name), timeout=TIMEOUT) as ranks:
        lab = Lab(name, ranks)
        for pair in pairs:
            broken = _play(lab, pair)
            yield pair, broken
            if broken:
                ranks.restart()
                lab = Lab(name, ranks)


def _play(lab: Lab, pair: Pair) -> str:
    """Return how the right answer fails after the wrong one; "" if it passes."""
    try:
        lab.run(pair.code)
        passed, printed = verdict(lab.checks[pair.task], lab.ranks)
        if passed:
            return f"the wrong answer passes: {printed}"
        lab.solve(pair.task)
        passed, printed = verdict(lab.checks[pair.task], lab.ranks)
    except Exception as error:  # of the ranks or of a check: it is the finding
        return f"{type(error).__name__}: {error}"
    return "" if passed else f"the right answer fails: {printed}"


def main() -> int:
    """Play, print each finding, and return 1 if there is one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--labs", nargs="+", default=list(LABS), choices=list(LABS))
    asked = parser.parse_args()
    begin, played, findings = time.monotonic(), 0, 0
    for name, pairs in draw(asked.seed, asked.pairs, asked.labs).items():
        for pair, broken in play(pairs) if pairs else ():
            played += 1
            findings += bool(broken)
            if broken:
                print(f"{pair}: {broken}", flush=True)
        minutes = (time.monotonic() - begin) / 60
        print(f"{name}: {played} pairs, {findings} findings, {minutes:.1f} min", flush=True)
    return bool(findings)


if __name__ == "__main__":
    sys.exit(main())
