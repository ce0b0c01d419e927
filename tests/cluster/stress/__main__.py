"""The command: `python -m tests.cluster.stress --help`."""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from . import draw
from .load import load
from .runner import DEADLINE, Runner
from .summary import summary


def main(arguments: list[str] | None = None) -> int:
    """Play cells; 1 where something was found."""
    args = _parser().parse_args(arguments)
    if args.show:
        print(draw.cell(args.seed, args.show, args.ranks))
        return 0
    begin = time.monotonic()
    cells = draw.cells(args.seed, args.ranks, args.first)
    if args.cells:
        cells = itertools.islice(cells, args.cells)
    left: list[str] = []
    with load(args.load):
        runner = Runner(args.seed, args.ranks, args.census, args.deadline, say=_say)
        try:
            runner.play(cells, begin + 60 * args.minutes)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            left = runner.close()
            print(_title(args, time.monotonic() - begin), summary(runner.record), sep="\n\n")
    if left:
        print("left behind:", *left, sep="\n  ")
    return bool(runner.record.findings or left)


def _title(args: argparse.Namespace, seconds: float) -> str:
    load = f"{args.ranks} ranks, load {args.load}"
    return f"\nseed {args.seed}, {load}, {seconds / 60:.1f} minutes"


def _say(what: object) -> None:
    print(what, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.cluster.stress", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=5.0, help="how long it runs (default: 5)")
    add("--seed", type=int, default=1, help="what is drawn follows from it")
    add("--ranks", type=int, default=4, help="at least 2 (default: 4)")
    add("--load", type=int, default=0, help="busy loops beside it")
    add("--census", type=int, default=20, metavar="CELLS", help="from count to count")
    add("--deadline", type=float, default=DEADLINE, help="seconds that a cell may take")
    add("--first", type=int, default=1, metavar="CELL", help="begin with the cell of this number")
    add("--cells", type=int, default=0, help="play only so many")
    add("--show", type=int, default=0, metavar="CELL", help="print that cell, and play nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
