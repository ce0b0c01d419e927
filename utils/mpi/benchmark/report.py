"""The numbers as tables, and as JSON."""

from __future__ import annotations

import math

from tabulate import tabulate

from .alpha_beta import fit_alpha_beta
from .options import KI, MI, TRANSPORTS

#: MPI sends these by different protocols, and the large ones leave the caches.
REGIMES = {"≤ 1 KiB": (0, KI), "1 KiB … 1 MiB": (KI + 1, MI - 1), "≥ 1 MiB": (MI, math.inf)}
SMALL, MIDDLE, LARGE = REGIMES


# --- what follows from the numbers -------------------------------------------------------------


def complete(found: dict) -> None:
    """Add ratios, fits and remarks to the measured numbers."""
    for row in found["operations"]:
        seconds = row["seconds"]
        row["mpi/mpi4py"] = seconds["mpi"] / seconds["mpi4py"]
        row["gloo/mpi"] = seconds["gloo"] / seconds["mpi"]
    found["fits"] = fits(found["operations"])
    found["remarks"] = remarks(found["operations"])


def fits(rows: list[dict]) -> list[dict]:
    """t = α + n·β for each operation, transport and regime that has at least two sizes."""
    made = []
    for operation in dict.fromkeys(row["name"] for row in rows):
        for transport in TRANSPORTS:
            for regime, (least, most) in REGIMES.items():
                points = {
                    row["bytes"]: row["seconds"][transport]
                    for row in rows
                    if row["name"] == operation and least <= row["bytes"] <= most
                }
                if len(points) >= 2:
                    about = {"operation": operation, "transport": transport, "regime": regime}
                    made.append(about | _fit(points))
    return made


def _fit(points: dict[int, float]) -> dict:
    fit = fit_alpha_beta(list(points), list(points.values()))
    return {
        "points": len(points),
        "alpha": fit.alpha,
        "beta": fit.beta,
        "bandwidth": fit.bandwidth if fit.beta > 0 else None,  # JSON has no infinity
        "error": fit.error,
        "max_error": fit.max_error,
    }


def remarks(rows: list[dict]) -> list[str]:
    """Where mpi does worse than it should."""

    def named(bad) -> str:
        sizes: dict[str, list[str]] = {}
        for row in filter(bad, rows):
            sizes.setdefault(row["name"], []).append(size(row["bytes"]))
        return "; ".join(f"{name} {', '.join(at)}" for name, at in sizes.items()) or "nowhere"

    def above(row) -> float:
        return row["seconds"]["mpi"] - row["seconds"]["mpi4py"]

    return [
        f"mpi is slower than gloo: {named(lambda r: r['gloo/mpi'] < 1)}",
        "mpi is more than 5 % over mpi4py, from 1 MiB: "
        + named(lambda r: r["bytes"] >= MI and r["mpi/mpi4py"] > 1.05),
        "mpi is more than 5 µs over mpi4py, at 4 B: "
        + named(lambda r: r["bytes"] == 4 and above(r) > 5e-6),
    ]


# --- text --------------------------------------------------------------------------------------


def text(found: dict) -> str:
    """All tables, and what is to be said about them."""
    names = dict.fromkeys(row["name"] for row in found["operations"])
    parts = [_operation(found, name) for name in names]
    if names:
        parts.append(_legend(found))
    parts += [make(found) for make in (_fits, _others, _costs)]
    if found["operations"]:
        parts.append("\n".join(found["remarks"]))
    return "".join(f"\n{part}\n" for part in parts if part)


def heading(found: dict) -> str:
    """Ranks, threads, binding and load; versions; warnings."""
    hosts = found["hosts"]
    first, *others = hosts
    where = f"{first['name']}" if not others else f"{len(hosts)} hosts ({first['name']} …)"
    cpus = sorted({n for host in hosts for n in host["cpus_per_rank"]})
    bound = f"bound to {_span(cpus)} CPU each" if all(h["bound"] for h in hosts) else "not bound"
    version = found["versions"]
    lines = [
        f"{found['ranks']} ranks on {where}, {found['threads']} thread each, {bound}; "
        f"{_span([h['cpus'] for h in hosts])} CPUs per host, "
        f"load average {max(h['load'] for h in hosts):.2f}",
        f"PyTorch {version['torch']}, mpi4py {version['mpi4py']}, {version['mpi']}, "
        f"Python {version['python']}",
    ]
    return "\n".join(lines + [f"Warning: {line}." for line in found["warnings"]])


def _span(values: list[int]) -> str:
    least, most = min(values), max(values)
    return f"{least}" if least == most else f"{least} to {most}"


def _table(rows: list[list[str]], headers: list[str]) -> str:
    return tabulate(
        rows,
        headers,
        tablefmt="simple",
        disable_numparse=True,
        colalign=["left", *["right"] * (len(headers) - 1)],
    )


def _operation(found: dict, operation: str) -> str:
    rows = [
        [
            size(row["bytes"]),
            *(duration(row["seconds"][name]) for name in TRANSPORTS),
            f"{row['mpi/mpi4py']:.2f}",
            f"{row['gloo/mpi']:.2f}",
        ]
        for row in found["operations"]
        if row["name"] == operation
    ]
    return _table(rows, [operation, *TRANSPORTS, "mpi/mpi4py", "gloo/mpi"])


def _legend(found: dict) -> str:
    return (
        f"Times of the slowest rank, medians of the rounds ({found['rounds']}). Size: of each "
        "rank's tensor.\nping_pong: half a round trip. broadcast: each rank is the root in turn."
    )


def _fits(found: dict) -> str:
    by_line: dict[tuple, dict] = {}
    for fit in found["fits"]:
        by_line.setdefault((fit["operation"], fit["transport"]), {})[fit["regime"]] = fit
    if not by_line:
        return ""
    rows = [
        [f"{operation}, {transport}", *_latency(fits.get(SMALL))]
        + [cell for regime in (MIDDLE, LARGE) for cell in _bandwidth(fits.get(regime))]
        for (operation, transport), fits in by_line.items()
    ]
    headers = ["α + n·β", f"α {SMALL}", "error"]
    return _table(rows, [*headers, f"1/β {MIDDLE}", "error", f"1/β {LARGE}", "error"])


def _latency(fit: dict | None) -> list[str]:
    return [duration(fit["alpha"]), _error(fit)] if fit else ["–", ""]


def _bandwidth(fit: dict | None) -> list[str]:
    if not fit or not fit["bandwidth"]:
        return ["–", ""]
    return [f"{digits(fit['bandwidth'] / 1e9)} GB/s", _error(fit)]


def _error(fit: dict) -> str:
    return f"{fit['error']:.0%}" if fit["points"] > 2 else "2 points"


def _others(found: dict) -> str:
    blocks = []
    about = found["training"]
    if "ddp_step" in found:
        seconds = found["ddp_step"]["seconds"]
        least = seconds["DDP on mpi"]
        rows = [[name, duration(t), f"{t / least:.2f}"] for name, t in seconds.items()]
        title = f"training step of the MLP, batch {about['batch_per_rank']} per rank"
        blocks.append(_table(rows, [title, "time", "× DDP on mpi"]))
    if "epoch" in found:
        seconds = found["epoch"]["seconds"]
        alone = seconds["1 rank"]
        rows = [[name, duration(t), f"{alone / t:.2f}"] for name, t in seconds.items()]
        title = (
            f"epoch of {about['images']:,} images, global batch {about['global_batch']}, DDP on mpi"
        )
        blocks.append(_table(rows, [title, "time", "speedup"]))
    return "\n\n".join(blocks)


def _costs(found: dict) -> str:
    lines = []
    if "recording" in found:
        # Nanoseconds drown in what else the machine does, which only ever adds: the fastest
        # rounds tell, as with timeit.
        fastest = {name: min(times) for name, times in found["recording"]["rounds"].items()}
        on, off = fastest["recorded"], fastest["not recorded"]
        lines.append(
            f"The record of a 4 B all_reduce costs {(on - off) * 1e9:.0f} ns "
            f"({duration(on)} with it, {duration(off)} without)."
        )
    if found["import"]:
        seconds = found["import"]["seconds"]
        on, off = seconds["with entry point"], seconds["without"]
        lines.append(
            f"The entry point adds {(on - off) * 1e3:.0f} ms to `import torch` "
            f"({duration(on)} with it, {duration(off)} without)."
        )
    return "\n".join(lines)


def size(nbytes: int) -> str:
    """4 B, 64 KiB, 1 MiB."""
    for unit, factor in (("MiB", MI), ("KiB", KI)):
        if nbytes >= factor and nbytes % factor == 0:
            return f"{nbytes // factor} {unit}"
    return f"{nbytes} B"


def duration(seconds: float) -> str:
    """Three digits and a unit: 2.31 µs, 48.2 ms."""
    for unit, factor in (("s", 1), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= factor:
            return f"{digits(seconds / factor)} {unit}"
    return f"{digits(seconds / 1e-6)} µs"


def digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.{max(0, 2 - max(0, math.floor(math.log10(value))))}f}" if value > 0 else "0"
