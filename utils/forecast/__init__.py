"""What a recorded run would do on another machine with more ranks.

from utils.forecast import machine

ranks.timeline().on(machine("cluster"), ranks=1024)      # the last cell, elsewhere
run = ranks.timeline().run()                             # the last cell as data
run.save("run.json")                                     # for `ddl-labs forecast run.json`
"""

from __future__ import annotations

from .errors import ForecastError, MachineError, RunError, ScaleError
from .forecast import Forecast, Work, forecast
from .machines import Device, Level, Machine, catalog, flat, load, machine
from .run import Run

__all__ = [
    "Device",
    "Forecast",
    "ForecastError",
    "Level",
    "Machine",
    "MachineError",
    "Run",
    "RunError",
    "ScaleError",
    "Work",
    "catalog",
    "flat",
    "forecast",
    "load",
    "machine",
]
