"""Play recorded answers with seeds of a test's own, and write every word that the checks say.

    python tests/labs/recorded_verdicts.py lab06 --seed 1 -o before.json
    python tests/labs/recorded_verdicts.py lab06 --seed 1 --compare before.json

The second call, after a change of the checks, lists each answer whose verdict has other words.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / room) for room in ("labs", "checks"))]

from answer_tools import LABS, Lab, ranks_of, right_answers, solutions_of, wrong_answers  # noqa: E402
from lab_tools import verdict  # noqa: E402
from local_ranks import LocalRanks  # noqa: E402


def played(name: str, seed: int, only: str) -> dict[str, str]:
    """Return what the check says of each answer of a lab, by task and name of the answer."""
    solutions = solutions_of(name)
    skipped = getattr(LABS[name], "ONLY_ON_RANKS", set())
    answers = [
        (task, what, code)
        for task, what, code, _ in wrong_answers(LABS[name], solutions)
        if what not in skipped
    ]
    answers += [
        (task, f"right: {what}", code) for task, what, code in right_answers(LABS[name], solutions)
    ]
    answers += [(task, "solution", code) for task, code in solutions.items()]
    with LocalRanks(ranks_of(name)) as ranks:
        lab = Lab(name, ranks)
        return {
            f"{task} {what}": _verdict(lab, task, code, f"{seed} {task} {what}")
            for task, what, code in answers
            if f"{task} {what}".startswith(only)
        }


def _verdict(lab: Lab, task: str, code: str, seed: str) -> str:
    """Return the words of one answer; the solution is back afterwards."""
    draw = random.Random(seed)
    secrets.randbelow = draw.randrange
    try:
        lab.run(code)
        said = verdict(lab.checks[task], lab.ranks)[1]
    except Exception as error:  # the answer's cell raises: no check is reached
        said = f"{type(error).__name__}: {error}"
    lab.solve(task)
    return said


def main() -> int:
    """Play one lab's answers; status 1 if words differ from those of an earlier run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lab", choices=sorted(LABS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="tasks that begin with this, such as 6.1")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    said = played(options.lab, options.seed, options.only)
    if options.output:
        options.output.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n")
    differing = {}
    if options.compare:
        before = json.loads(options.compare.read_text())
        differing = {
            name: (before.get(name), text)
            for name, text in said.items()
            if before.get(name) != text
        }
    for name, (old, new) in differing.items():
        print(f"{name}\n  before: {old}\n  now:    {new}")
    print(f"{options.lab}: {len(said)} answers, {len(differing)} with other words")
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main())
