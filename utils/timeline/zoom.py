"""Which part of a timeline a look at one training step shows."""

from __future__ import annotations

from .collect import Lane

Window = tuple[float, float]


def window(lanes: list[Lane], zoom: int | Window | None) -> Window | None:
    """From when to when (seconds) to show; None without a zoom.

    zoom: two times in seconds, or the number k of a training step, counted from 1; -1 is the last.
    Raises TypeError or ValueError, with what can be asked for.
    """
    if zoom is None:
        return None
    if isinstance(zoom, (tuple, list)) and len(zoom) == 2:
        since, until = map(float, zoom)
        if until <= since:
            raise ValueError(f"since={since:g} must be less than until={until:g} (seconds)")
        return since, until
    if isinstance(zoom, bool) or not isinstance(zoom, int):
        raise TypeError(f"zoom is (since, until) in seconds, or the number of a step; not {zoom!r}")
    return _step(lanes, zoom)


def _step(lanes: list[Lane], k: int) -> Window:
    """From the end of one ``optimizer.step()`` to that of the next, on all ranks that made it."""
    count = max((len(lane.steps) for lane in lanes), default=0)
    if not count:
        raise ValueError(
            "no rank called optimizer.step() in this cell, so there is no training step to zoom "
            "to: give two times in seconds, zoom=(since, until)"
        )
    number = k if k >= 0 else count + 1 + k
    if not 1 <= number <= count:
        raise ValueError(f"the cell has {count} training step(s): zoom=1 to {count}, not {k}")
    made = [lane for lane in lanes if len(lane.steps) >= number]
    begins = [lane.steps[number - 2] if number > 1 else lane.begin for lane in made]
    return min(begins), max(lane.steps[number - 1] for lane in made)
