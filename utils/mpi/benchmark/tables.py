"""The tables of the measured numbers, and what follows from them: ratios, fits, remarks."""

from __future__ import annotations

import itertools
import math

from tabulate import tabulate

from . import KI, MI, TRANSPORTS
from .alpha_beta import fit_alpha_beta

#: MPI sends these sizes by different protocols, and the largest ones don't fit into the caches.
REGIMES = {"≤ 1 KiB": (0, KI), "1 KiB … 1 MiB": (KI + 1, MI - 1), "≥ 1 MiB": (MI, math.inf)}
SMALL, MIDDLE, LARGE = REGIMES


# --- what follows from the numbers -------------------------------------------------------------


def complete(result: dict) -> None:
    """Add ratios, fits and remarks to the measured numbers."""
    for row in result["operations"]:
        seconds = row["seconds"]
        row["mpi/mpi4py"] = seconds["mpi"] / seconds["mpi4py"]
        row["gloo/mpi"] = seconds["gloo"] / seconds["mpi"]
    result["fits"] = fits(result["operations"])
    result["remarks"] = remarks(result["operations"])


def fits(rows: list[dict]) -> list[dict]:
    """Fit t = α + n·β for each operation, transport and regime that has at least two sizes."""
    lines = []
    names = dict.fromkeys(row["name"] for row in rows)
    for operation, transport, regime in itertools.product(names, TRANSPORTS, REGIMES):
        least, most = REGIMES[regime]
        points = {
            row["bytes"]: row["seconds"][transport]
            for row in rows
            if row["name"] == operation and least <= row["bytes"] <= most
        }
        if len(points) < 2:
            continue
        fit = fit_alpha_beta(list(points), list(points.values()))
        lines.append({
            "operation": operation,
            "transport": transport,
            "regime": regime,
            "points": len(points),
            "alpha": fit.alpha,
            "beta": fit.beta,
            "bandwidth": fit.bandwidth if fit.beta > 0 else None,  # JSON has no infinity
            "error": fit.error,
            "max_error": fit.max_error,
        })
    return lines


def remarks(rows: list[dict]) -> list[str]:
    """Return the operations and sizes at which mpi is slower than it should be."""
    slower = [row for row in rows if row["gloo/mpi"] < 1]
    large = [row for row in rows if row["bytes"] >= MI and row["mpi/mpi4py"] > 1.05]
    smallest = [row for row in rows if row["bytes"] == 4]
    small = [r for r in smallest if r["seconds"]["mpi"] - r["seconds"]["mpi4py"] > 5e-6]
    return [
        f"mpi is slower than gloo: {_places(slower)}",
        f"mpi is more than 5 % slower than mpi4py, from 1 MiB: {_places(large)}",
        f"mpi is more than 5 µs slower than mpi4py, at 4 B: {_places(small)}",
    ]


def _places(rows: list[dict]) -> str:
    sizes: dict[str, list[str]] = {}
    for row in rows:
        sizes.setdefault(row["name"], []).append(size(row["bytes"]))
    return "; ".join(f"{name} {', '.join(at)}" for name, at in sizes.items()) or "nowhere"


# --- text --------------------------------------------------------------------------------------


def heading(result: dict) -> str:
    """Return the first lines: ranks, threads, binding and load; versions; warnings."""
    hosts = result["hosts"]
    where = hosts[0]["name"] if len(hosts) == 1 else f"{len(hosts)} hosts ({hosts[0]['name']} …)"
    cpus = [n for host in hosts for n in host["cpus_per_rank"]]
    bound = f"bound to {_span(cpus)} CPU each" if all(h["bound"] for h in hosts) else "not bound"
    version = result["versions"]
    lines = [
        f"{result['ranks']} ranks on {where}, {result['threads']} thread each, {bound}; "
        f"{_span([host['cpus'] for host in hosts])} CPUs per host, "
        f"load average {max(host['load'] for host in hosts):.2f}",
        f"PyTorch {version['torch']}, mpi4py {version['mpi4py']}, {version['mpi']}, "
        f"Python {version['python']}",
    ]
    return "\n".join(lines + [f"Warning: {line}." for line in result["warnings"]])


def _span(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def text(result: dict) -> str:
    """Return all tables with their explanations."""
    rows = result["operations"]
    parts = [_times(rows, name) for name in dict.fromkeys(row["name"] for row in rows)]
    parts.append(
        f"A time is the median of {result['rounds']} rounds, on the slowest rank. A size is the "
        "size of each rank's tensor.\nA ping_pong is half a round trip. In broadcast, the ranks "
        "take turns as the root."
    )
    if result["fits"]:
        parts.append(_lines(result["fits"]))
    parts.append("\n".join(result["remarks"]))
    return "".join(f"\n{part}\n" for part in parts)


def _times(rows: list[dict], operation: str) -> str:
    cells = [
        [
            size(row["bytes"]),
            *(duration(row["seconds"][name]) for name in TRANSPORTS),
            f"{row['mpi/mpi4py']:.2f}",
            f"{row['gloo/mpi']:.2f}",
        ]
        for row in rows
        if row["name"] == operation
    ]
    return _table([operation, *TRANSPORTS, "mpi/mpi4py", "gloo/mpi"], cells)


def _lines(fits: list[dict]) -> str:
    """Return the table of the fits: latency of small messages, bandwidth of larger ones."""
    rows: dict[str, dict[str, list[str]]] = {}
    for fit in fits:
        if fit["regime"] == SMALL:
            value = duration(fit["alpha"])
        else:
            value = f"{digits(fit['bandwidth'] / 1e9)} GB/s" if fit["bandwidth"] else ""
        error = f"{fit['error']:.0%}" if fit["points"] > 2 else "2 points"
        row = rows.setdefault(f"{fit['operation']}, {fit['transport']}", {})
        if value:
            row[fit["regime"]] = [value, error]
    headers = ["α + n·β", f"α {SMALL}", "error", f"1/β {MIDDLE}", "error", f"1/β {LARGE}", "error"]
    cells = [
        [name, *(cell for regime in REGIMES for cell in values.get(regime, ["–", ""]))]
        for name, values in rows.items()
    ]
    return _table(headers, cells)


def _table(headers: list[str], rows: list[list[str]]) -> str:
    align = ["left", *["right"] * (len(headers) - 1)]
    return tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def size(nbytes: int) -> str:
    """Return a size as text: 4 B, 64 KiB, 1 MiB."""
    for unit, factor in (("MiB", MI), ("KiB", KI)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Return a time with three digits and a unit: 2.31 µs, 48.2 ms."""
    for unit, factor in (("s", 1), ("ms", 1e-3)):
        if seconds >= factor:
            return f"{digits(seconds / factor)} {unit}"
    return f"{digits(seconds / 1e-6)} µs"


def digits(value: float) -> str:
    """Return a number with three digits, without an exponent."""
    if value <= 0:
        return "0"
    return f"{value:.{max(0, 2 - max(0, math.floor(math.log10(value))))}f}"
