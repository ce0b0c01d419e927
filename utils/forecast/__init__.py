"""What a recorded run would do on another machine with more ranks.

    from utils.forecast import machine

    ranks.timeline().on(machine("cluster"), ranks=1024)      # the last cell, elsewhere
    ranks.timeline().run().save("run.json")                  # for `ddl-labs forecast run.json`

The docstring of :func:`forecast` lists what you may ask.
"""

from __future__ import annotations

from .errors import ForecastError, MachineError, RunError, ScaleError
from .forecast import Forecast, Work, forecast
from .machines import Device, Level, Machine, catalog, flat, load, machine
from .run import Run

__all__ = ["Device", "Forecast", "ForecastError", "Level", "Machine", "MachineError", "Run"]
__all__ += ["RunError", "ScaleError", "Work", "catalog", "flat", "forecast", "load", "machine"]
