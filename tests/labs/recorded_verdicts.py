"""Play recorded answers with given seeds, and report every word of the checks that changes.

    python tests/labs/recorded_verdicts.py lab06 --seed 1 -o before.json
    python tests/labs/recorded_verdicts.py lab06 --seed 1 --compare before.json
    python tests/labs/recorded_verdicts.py lab06 --seeds 200
    python tests/labs/recorded_verdicts.py lab06 --on processes --every 4 --compare before.json

The second call, after a change of the checks, lists each answer whose verdict has other words. The
third call checks each answer with 200 seeds, and lists the answers whose verdict or words depend on
the seed: a student would pass, or read a message, by luck. The fourth call plays every fourth
answer of each task on MPI ranks (``boxes``: on processes without MPI, as in grading), and lists
those whose words differ, numbers aside, from the ranks inside the kernel that all other calls use.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), *(str(TESTS / room) for room in ("labs", "checks"))]

from answer_tools import (  # noqa: E402
    LABS,
    Lab,
    ranks_of,
    right_answers,
    seeded,
    solutions_of,
    wrong_answers,
)
from lab_tools import verdict  # noqa: E402
from local_ranks import LocalRanks  # noqa: E402

from utils import cluster  # noqa: E402

# What follows from the draw or from which rank was first, and what stands for it: numbers, lists of
# numbers, which entry of a list, and which ranks.
DRAWN = [
    (re.compile(r"-?\b\d+(\.\d+)?(e[-+]?\d+|st|nd|rd|th)?\b"), "#"),
    (re.compile(r"[\[(][-#., …\[\]()]*([\])]|…)"), "#"),
    (re.compile(r"[Ee]ntry #: "), ""),
    (re.compile(r"ranks? #((, |–| and )(rank )?#)*"), "ranks #"),
]


def recorded(name: str, only: str, every: int = 1) -> Iterator[tuple[str, str, str]]:
    """Yield task, name, and code of recorded answers of a lab, and of its solutions.

    Args:
        name: such as lab06.
        only: with what task and name begin.
        every: 4 yields the first, the fifth, … of each task.
    """
    solutions = solutions_of(name)
    skipped = getattr(LABS[name], "ONLY_ON_RANKS", set())
    answers = [
        (task, about, code)
        for task, about, code, _ in wrong_answers(LABS[name], solutions)
        if about not in skipped
    ]
    answers += [
        (task, f"right: {about}", code)
        for task, about, code in right_answers(LABS[name], solutions)
    ]
    answers += [(task, "solution", code) for task, code in solutions.items()]
    chosen = [answer for answer in answers if " ".join(answer[:2]).startswith(only)]
    seen: Counter[str] = Counter()
    for answer in chosen:
        if seen[answer[0]] % every == 0:
            yield answer
        seen[answer[0]] += 1


def played(
    name: str, seeds: list[int], only: str, on: str = "here", every: int = 1
) -> dict[str, list[str]]:
    """Return what the check says of answers of a lab, with one seed after the other.

    Args:
        name, only, every: see :func:`recorded`.
        seeds: what the checks draw from.
        on: the kind of ranks, see `where` of :func:`utils.cluster.start`.
    """
    # 3 s: a deadlock of a wrong answer is reported soon.
    n = ranks_of(name)
    with LocalRanks(n) if on == "here" else cluster.start(n, timeout=3, where=on) as ranks:
        lab = Lab(name, ranks)
        return {
            f"{task} {about}": verdicts(lab, task, code, [f"{s} {task} {about}" for s in seeds])
            for task, about, code in recorded(name, only, every)
        }


def verdicts(lab: Lab, task: str, code: str, seeds: list[str]) -> list[str]:
    """Return the words of one answer for each seed; the solution is back afterwards."""
    said = []
    try:
        for seed in seeds:
            with contextlib.redirect_stdout(io.StringIO()):
                if said:
                    lab.solve(task)  # a check may delete what it found wrong, and cells may add up
                lab.run(code)
            with seeded(seed):
                said.append(verdict(lab.checks[task], lab.ranks)[1])
    except Exception as error:  # the answer's cell raises: no check is reached
        said.append(f"{type(error).__name__}: {error}")
    lab.solve(task)
    return said


def without_numbers(text: str) -> str:
    """Return the words of a verdict, without what follows from the draw or from who was first."""
    for pattern, stands_for in DRAWN:
        text = pattern.sub(stands_for, text)
    return "\n".join(sorted({line.strip().lower() for line in text.splitlines()}))


def print_lucky(answers: dict[str, list[str]]) -> int:
    """Print the answers whose words depend on the seed; return how many they are."""
    lucky = 0
    for name, said in answers.items():
        words = Counter(map(without_numbers, said))
        if len(words) > 1:
            lucky += 1
            passed = sum(text.startswith("✓") for text in said)
            luck = "THE VERDICT DEPENDS ON THE SEED, " if 0 < passed < len(said) else ""
            print(f"{name}: {luck}{passed} of {len(said)} passed")
            for text, times in words.most_common():
                print(f"  {times} times:", *text.splitlines(), sep="\n    ")
    return lucky


def print_changed(answers: dict[str, str], before: dict[str, str], exactly: bool) -> int:
    """Print the answers that have other words than before; return how many they are.

    Args:
        answers, before: what the check says, by answer.
        exactly: whether the numbers count as well.
    """
    changed = 0
    for name, text in answers.items():
        then = before.get(name, "")
        if then != text and (exactly or without_numbers(then) != without_numbers(text)):
            changed += 1
            print(f"{name}\n  before: {before.get(name)}\n  now:    {text}")
    return changed


def main() -> int:
    """Play one lab's answers; status 1 if words differ from an earlier run, or between seeds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("lab", choices=sorted(LABS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seeds", type=int, help="how many seeds; lists what depends on them")
    parser.add_argument("--on", choices=["here", "boxes", "processes"], default="here")
    parser.add_argument("--every", type=int, default=1, help="play every n-th answer of a task")
    parser.add_argument("--only", default="", help="tasks that begin with this, such as 6.1")
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--compare", type=Path)
    options = parser.parse_args()
    if options.seeds:
        seeds = list(range(options.seeds))
        answers = played(options.lab, seeds, options.only, options.on, options.every)
        lucky = print_lucky(answers)
        print(f"{options.lab}: {len(answers)} answers, the words of {lucky} depend on the seed")
        return bool(lucky)
    once = played(options.lab, [options.seed], options.only, options.on, options.every)
    texts = {name: said[0] for name, said in once.items()}
    if options.output:
        options.output.write_text(json.dumps(texts, indent=1, ensure_ascii=False) + "\n")
    before = json.loads(options.compare.read_text()) if options.compare else texts
    changed = print_changed(texts, before, exactly=options.on == "here")
    print(f"{options.lab}: {len(texts)} answers, {changed} with other words")
    return bool(changed)


if __name__ == "__main__":
    sys.exit(main())
