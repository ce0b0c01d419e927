"""Records of cells and of the run's end, which the plugin writes and the grader reads."""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class End(StrEnum):
    """Why a run ended before its last cell, where that says something of the answers."""

    CELL_TIME = "out of time"
    TOTAL_TIME = "out of time in all"
    MEMORY = "too much memory"
    OUTPUT = "too much output"
    MACHINE_MEMORY = "out of memory"
    KERNEL = "the kernel died"
    RANKS = "the ranks are gone"
    STOPPED = "interrupted"


#: Of one cell that nbval has run, in the types of JSON. `cell` is its id, `outcome` pytest's word,
#: `seconds` its time, `end` why the run ended there (or None), `outputs` what it has shown,
#: `verdicts` those of a check as data, and `message` what nbval said of it.
Record = dict[str, Any]
