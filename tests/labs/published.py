"""Compare estimates with published times of training steps.

    .venv/bin/python tests/labs/published.py                # each row: measured and predicted
    .venv/bin/python tests/labs/published.py --fit          # the two constants of Table 1

The fit has two constants, both in machines.toml: the efficiency of an A100, and the bandwidth of
its memory as a share of the data sheet's. No other table had a part in the fit.
"""

from __future__ import annotations

import itertools
import math
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tabulate import tabulate

from utils.forecast.machines import Device, Level, Machine, machine
from utils.labs.lab11.mixes import Estimate, Mix, Transformer, estimate

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
AXES = ("tensor", "pipeline", "microbatch", "interleave")
DATA_SHEET = 2.0e12


@dataclass(frozen=True)
class Row:
    """A published time, and what the model says."""

    name: str
    measured: float
    estimate: Estimate

    @property
    def error(self) -> float:
        """Return by which share the predicted time is too long."""
        return self.estimate.seconds / self.measured - 1


def rows(table: str, target: Machine | None = None) -> list[Row]:
    """Return the rows of a table of published.toml, by default on the machine of its paper."""
    target = target or (llama() if table == "llama3" else machine("selene"))
    columns = TABLES[table]["columns"]
    found = (dict(zip(columns, values, strict=True)) for values in TABLES[table]["rows"])
    return [one for row in found for one in _rows(row, target)]


def _rows(row: dict[str, Any], target: Machine) -> Iterator[Row]:
    axes = {axis: row[axis] for axis in AXES}
    context = row.get("context", 1)
    axes |= {"data": row["ranks"] // (row["tensor"] * row["pipeline"] * context)}
    if "sequence" in row:  # Llama 3
        model = Transformer(
            row["layers"], row["width"], row["heads"], 128256, row["sequence"], kv_heads=8, mlp=9.75
        )
        mix = Mix(**axes, context=context, zero=1, recompute="none")
        yield Row(row["name"], row["seconds"], estimate(model, mix, target, row["batch"]))
        return
    model = Transformer(row["layers"], row["width"], row["heads"])
    zero, overlap = 3 if row.get("ddp") == "zero" else 0, 0.0 if row.get("ddp") == "local" else 0.8
    for column in sorted({"seconds", "full", "present"} & row.keys()):
        more: dict[str, Any] = {"recompute": "full", "sequence_parallel": False}
        if column == "present":
            more = {"recompute": "selective", "sequence_parallel": True}
        mix = Mix(**axes, zero=zero, flash=False, **more)
        one = estimate(model, mix, target, row["batch"], gradient=2, overlap=overlap)
        name = row["name"] + (f", {column}" if column != "seconds" else "")
        yield Row(name, row[column], one)


def llama() -> Machine:
    """Return the machine of Llama 3: pods of 3,072 H100, and 1:7 oversubscription between them.

    Efficiency is the A100's by the ratio of the best matrix products that were measured on both
    (S. Bekman, "Machine Learning Engineering": 80.3% and 86.9% of the peak). Memory copies reach
    2.9e12 bytes per second, NVLink 371e9 (NVIDIA/nccl, issue 1264), and RoCE 92% of 50e9.
    """
    a100 = machine("selene").device
    h100 = Device(
        "H100 80GB", 989e12, a100.efficiency * 0.803 / 0.869, 80e9, 2.9e12, 1300, 3.0, 50000, 1e-6
    )
    levels = (
        Level("node", 8, 3e-6, 371e9),
        Level("pod", 384, 20e-6, 8 * 46e9, lane=46e9),
        Level("top", 8, 20e-6, 3072 * 46e9, 7.0, lane=46e9),
    )
    return Machine("Llama 3", h100, levels)


def fit() -> tuple[float, float]:
    """Return the efficiency and the share of the memory's bandwidth that fit Table 1 best.

    "Best" has the least sum of squares of log(predicted / measured).
    """
    base = machine("selene")

    def badness(constants: tuple[float, float]) -> float:
        efficiency, share = constants
        device = replace(base.device, efficiency=efficiency, bandwidth=DATA_SHEET * share)
        return sum(math.log1p(r.error) ** 2 for r in rows("sc21", replace(base, device=device)))

    shares = [k / 100 for k in range(50, 112, 2)]
    return min(itertools.product([k / 100 for k in range(50, 90)], shares), key=badness)


def main() -> None:
    """Print all tables, or the fit."""
    if "--fit" in sys.argv:
        efficiency, share = fit()
        print(f"efficiency {efficiency}, {share:.0%} of the data sheet's memory bandwidth")
        return
    for table in TABLES:
        lines = [
            (r.name, f"{r.measured:.2f}", f"{r.estimate.seconds:.2f}", f"{r.error:+.1%}")
            for r in rows(table)
        ]
        print(table, tabulate(lines, ["row", "measured", "predicted", "error"]), sep="\n\n")
        errors = [abs(r.error) for r in rows(table)]
        print(f"\nmean error {sum(errors) / len(errors):.1%}, worst {max(errors):.1%}\n")


if __name__ == "__main__":
    main()
