"""Which part of a timeline a look at one training step shows."""

from __future__ import annotations

from collections.abc import Iterable

from .collect import Lane

Window = tuple[float, float]


def spans(lanes: list[Lane], zoom: int | Window | None) -> list[Window] | None:
    """Return from when to when (seconds) each rank is looked at; None without a zoom.

    Args:
        lanes: of each rank.
        zoom: two times in seconds, or the number k of a training step, counted from 1; -1 is the
            last.

    Raises:
        TypeError, ValueError: there is no such zoom; says what can be asked for.
    """
    if zoom is None:
        return None
    if isinstance(zoom, (tuple, list)) and len(zoom) == 2:
        since, until = map(float, zoom)
        if until <= since:
            raise ValueError(f"since={since:g} must be less than until={until:g} (seconds)")
        return [(since, until)] * len(lanes)
    if isinstance(zoom, bool) or not isinstance(zoom, int):
        raise TypeError(f"zoom is (since, until) in seconds, or the number of a step; not {zoom!r}")
    return _step(lanes, zoom)


def _step(lanes: list[Lane], k: int) -> list[Window]:
    """From the end of one ``optimizer.step()`` to that of the next, as each rank made them.

    Of ranks that did not, it is the time that the others took.
    """
    count = max((len(lane.steps) for lane in lanes), default=0)
    if not count:
        raise ValueError(
            "no rank called optimizer.step() in this cell, so there is no training step to zoom "
            "to: give two times in seconds, zoom=(since, until)"
        )
    number = k if k >= 0 else count + 1 + k
    if not 1 <= number <= count:
        raise ValueError(f"the cell has {count} training step(s): zoom=1 to {count}, not {k}")
    found = {lane.rank: _span(lane, number) for lane in lanes if len(lane.steps) >= number}
    return [found.get(lane.rank, around(found.values())) for lane in lanes]


def _span(lane: Lane, number: int) -> Window:
    since = lane.steps[number - 2] if number > 1 else lane.begin
    return since, lane.steps[number - 1]


def around(spans: Iterable[Window]) -> Window:
    """Return the time from the first begin to the last end."""
    begins, ends = zip(*spans, strict=True)
    return min(begins), max(ends)
