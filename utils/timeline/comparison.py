"""Two runs or more, compared: what they called, how their time went, and one trace of all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from . import collect, ideal_network, phrases, trace
from .collect import COMMUNICATING, COMPUTING, WAITING, Lane

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from . import Timeline

_TIMES = {
    COMPUTING: "seconds computing",
    WAITING: "seconds waiting",
    COMMUNICATING: "seconds communicating",
}


class Comparison:
    """What distinguishes runs: in a notebook two tables, by ``figure()`` a picture.

    Args:
        runs: timelines, by what they are called. Those of ``ranks.timeline(zoom=3)`` compare steps.

    Attributes:
        calls: one dict per kind of call. For each run, by its name: ``calls`` and ``bytes`` of all
            ranks together, and the seconds that these calls were ``waiting`` for their partners and
            ``communicating``, also where that was hidden.
        times: one dict per run: ``seconds`` it took, ``ideal`` seconds on an ideal network (None:
            it does not end), and seconds computing, waiting, communicating and hidden, as the mean
            of its ranks.
    """

    def __init__(self, runs: dict[str, Timeline]):
        if len(runs) < 2:
            raise ValueError(
                f"{len(runs)} run(s) were given: two are compared, for example "
                'timeline.compare({"by hand": one, "DDP": other})'
            )
        self.runs = runs
        counted = {name: _counts(run) for name, run in runs.items()}
        kinds = dict.fromkeys(kind for found in counted.values() for kind in found)
        self.calls = [
            {"call": kind, **{name: found.get(kind, _none()) for name, found in counted.items()}}
            for kind in kinds
        ]
        self.times = [{"run": name, **_times(run)} for name, run in runs.items()]

    def save(self, path: str | os.PathLike) -> None:
        """Write one trace of all runs for https://ui.perfetto.dev: they begin at the same time."""
        shown = [(name, run.lanes, run.window) for name, run in self.runs.items()]
        trace.save_together(shown, path)

    def figure(self, width: float = 8) -> Figure:
        """Return a bar per run: computing, waiting, communicating; a mark for the ideal network."""
        from . import bars

        made = bars.figure(self.times, _TIMES, width)
        made.alt_text = self.alt_text
        return made

    @property
    def alt_text(self) -> str:
        """Return the picture in words."""
        return " ".join(f"{row['run']}: {_spent(row)}." for row in self.times)

    def __repr__(self) -> str:
        from tabulate import tabulate  # the ranks import this package, too, and need no tables

        times = [
            {
                "run": row["run"],
                "took": phrases.duration(row["seconds"]),
                "ideal network": _ideal(row),
            }
            | {
                phrases.plain(key): phrases.duration(row[key])
                for key in row
                if key.startswith("seconds ")
            }
            for row in self.times
        ]
        calls = [
            {"call": row["call"], "run": name}
            | {"calls": row[name]["calls"], "bytes": phrases.size(row[name]["bytes"])}
            | {key: phrases.duration(row[name][key]) for key in (WAITING, COMMUNICATING)}
            for row in self.calls
            for name in self.runs
        ]
        tables = (
            tabulate(rows, headers="keys", tablefmt="simple") for rows in (times, calls) if rows
        )
        return "\n\n".join(tables)


def _none() -> dict:
    return {"calls": 0, "bytes": 0, WAITING: 0.0, COMMUNICATING: 0.0}


def _counts(run: Timeline) -> dict[str, dict]:
    """Of each kind of call: how often, bytes, seconds until the partner came, and after that."""
    found: dict[str, dict] = {}
    for lane, (since, until) in zip(run.lanes, run.spans, strict=True):
        for record in lane.records:
            if since <= record["start"] < until:
                _add(found.setdefault(phrases.operation(record), _none()), record, lane)
    return found


def _add(row: dict, record: dict, lane: Lane) -> None:
    row["calls"] += 1
    row["bytes"] += record["nbytes"]
    for begin, end, state in collect.phases(record, record["start"], collect.end_of(record, lane)):
        row[COMMUNICATING if state == COMMUNICATING else WAITING] += end - begin


def _times(run: Timeline) -> dict:
    keys = (*_TIMES.values(), "seconds hidden")
    rows = [row for row, lane in zip(run.totals, run.lanes, strict=True) if not lane.problem]
    means = {key: sum(row[key] for row in rows) / max(len(rows), 1) for key in keys}
    return {"seconds": ideal_network.measured(run.lanes, run.spans), "ideal": run.ideal, **means}


def _ideal(row: dict) -> str:
    return "never ends" if row["ideal"] is None else phrases.duration(row["ideal"])


def _spent(row: dict) -> str:
    spent = (f"{state} {phrases.duration(row[key])}" for state, key in _TIMES.items())
    took = f"{phrases.duration(row['seconds'])} in all; mean of the ranks: {', '.join(spent)}"
    return f"{took}; {phrases.ideal(row['ideal'], row['seconds'])}"
