"""Records of cells, which the plugin writes in the run and the grader reads afterwards."""

from __future__ import annotations

from typing import Any

#: Of one cell that nbval has run, in the types of JSON. `cell` is its id, `outcome` pytest's word,
#: `seconds` its time, `end` why the run ended there (or None), `outputs` what it has shown,
#: `verdicts` those of a check as data, and `message` what nbval said of it.
Record = dict[str, Any]
