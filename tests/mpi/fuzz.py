"""Random programs on the mpi backend, until the time is over or one goes wrong.

    python tests/mpi/fuzz.py -n 3 --minutes 10 --seed 1      # programs 1, 2, 3, …
    python tests/mpi/fuzz.py -n 3 --only 17 --text           # program 17 alone, and its Python
    python tests/mpi/fuzz.py -n 3 --only 17 --shrink         # what is left of it that goes wrong
    python tests/mpi/fuzz.py -n 3 --faults --minutes 5       # each with a planted fault

Each program that goes wrong is printed with the command that runs it alone. `mpi_fuzz` says what a
program is.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from mpi_fuzz import faults, jobs, program, shrink, text

# Programs in a job: as many as are worth more than its start.
IN_A_JOB = 40


def drawn(seed: int, options: argparse.Namespace) -> dict:
    """The program of a seed, with a fault where that was asked for."""
    if options.faults:
        return faults.draw(seed, options.n)
    return program.draw(seed, options.n)


def main(arguments: list[str] | None = None) -> int:
    """Status 1 where a program went wrong."""
    options = _options(arguments)
    if options.only is not None:
        return _one(options)
    begin, wrong, counts = time.monotonic(), [], [0, 0]
    seeds = itertools.count(options.seed)
    with jobs.stage(options.n) as stage:
        waiting: list[dict] = []
        while time.monotonic() - begin < 60 * options.minutes and len(wrong) < options.most:
            waiting += [drawn(next(seeds), options) for _ in range(IN_A_JOB - len(waiting))]
            for outcome in stage.run(waiting):
                waiting.pop(0)
                counts[0] += 1
                counts[1] += len(outcome.program["steps"])
                if why := faults.wrong(outcome):
                    wrong.append(outcome)
                    _tell(outcome, why, options)
        spent = (time.monotonic() - begin) / 60
    what = "programs with a fault" if options.faults else "programs"
    print(
        f"{counts[0]} {what}, {counts[1]} steps in {spent:.1f} minutes and {stage.jobs} jobs on "
        f"{options.n} ranks, seeds {options.seed} to {options.seed + counts[0] - 1}: "
        f"{len(wrong)} went wrong"
    )
    return 1 if wrong else 0


def _tell(outcome: jobs.Outcome, why: str, options: argparse.Namespace) -> None:
    seed = outcome.program["seed"]
    kind = " --faults" if options.faults else ""
    print(f"\nWRONG: program {seed} on {options.n} ranks: {why}")
    print(
        f"  again: python tests/mpi/fuzz.py -n {options.n}{kind} --only {seed} --shrink", flush=True
    )


def _one(options: argparse.Namespace) -> int:
    """A program alone, as often as it takes to go wrong."""
    it = drawn(options.only, options)
    with jobs.stage(options.n) as stage:
        if options.shrink:
            it, why = shrink.shrunk(it, stage, options.times, print)
        else:
            why = shrink.failure(it, stage, options.times)
    if options.text or options.shrink:
        print(text.python(it, jobs.TESTS))
    print(f"WRONG: {why}" if why else "nothing went wrong")
    return 1 if why else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("-n", type=int, default=3, help="ranks (1 to 4)")
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first program")
    parser.add_argument("--faults", action="store_true", help="plant a fault in each program")
    parser.add_argument("--most", type=int, default=20, help="wrong ones, then it ends")
    parser.add_argument("--only", type=int, metavar="SEED", help="this program alone")
    parser.add_argument("--times", type=int, default=1, help="how often, until it goes wrong")
    parser.add_argument("--shrink", action="store_true", help="make it shorter while it is wrong")
    parser.add_argument("--text", action="store_true", help="print it as Python")
    return parser.parse_args(arguments)


class _AsWritten(argparse.RawDescriptionHelpFormatter):
    """The description with its lines."""


if __name__ == "__main__":
    sys.exit(main())
