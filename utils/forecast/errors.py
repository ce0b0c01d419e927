"""The errors of a forecast, by kind. Each message says what was wrong and what to do."""

from __future__ import annotations


class ForecastError(ValueError):
    """A forecast is impossible with what was given."""


class MachineError(ForecastError):
    """The machine does not exist, is not described well, or does not hold the ranks."""


class RunError(ForecastError):
    """The recorded run can't be replayed: it is empty, or it ended in an error."""


class ScaleError(ForecastError):
    """The run doesn't say how it would grow to this number of ranks."""
