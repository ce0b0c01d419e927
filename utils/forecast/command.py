"""``ddl-labs forecast``: what would my training do on N devices?"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import machines
from .errors import ForecastError, ScaleError
from .forecast import forecast
from .machines import Machine
from .run import Run

#: A recorded run that comes with the course: twelve steps of DDP on two ranks.
EXAMPLE = Path(__file__).with_name("example.json")


def main(options: argparse.Namespace) -> int:
    """Print the forecast; return the exit status, 2 if there is no answer."""
    try:
        known = machines.catalog() | (machines.load(options.machines) if options.machines else {})
        if options.machine == "list":
            print("\n".join(map(str, known.values())))
            return 0
        _print(Run.load(options.run or EXAMPLE), machines.machine(options.machine, known), options)
    except ForecastError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _print(run: Run, machine: Machine, options: argparse.Namespace) -> None:
    from tabulate import tabulate

    try:
        grow = tuple(map(int, options.grow.split(","))) if options.grow else None
    except ValueError:
        raise ScaleError(
            f"--grow {options.grow}: name the ranks of a group, such as --grow 0,2"
        ) from None
    most = machine.devices if options.ranks is None else options.ranks
    told = forecast(run, machine, most, grow=grow, strong=options.strong)
    print(f"{run.title or options.run}, recorded on {run.ranks} ranks, {run.steps} steps\n")
    smaller = [n for n in (run.ranks * 4**k for k in range(8)) if n < most]
    curve = [forecast(run, machine, n, grow=grow, strong=options.strong) for n in smaller]
    rows = []
    for one in (*curve, told):
        expected = " to ".join(f"{seconds * 1e3:,.1f}" for seconds in one.band)
        step = f"{one.seconds * 1e3:,.1f}"
        rows.append((f"{one.ranks:,}", step, expected, f"{one.waiting:.0%}", one.bottleneck))
    headers = ("ranks", "ms per step", "expected", "waiting", "mostly for")
    print(tabulate(rows, headers=headers, stralign="right", disable_numparse=True))
    print(f"\n{told}\n\n{options.steps:,} steps take {told.cost(options.steps)}")
