"""The thirty patients: what is said of each one, what is wrong with it, and repairs that help.

The programs are in `patients/`, and what was recorded of them is in `evidence/`. Their names say
nothing about what is wrong. `tests/labs/test_clinic.py` runs every program sick and repaired.
"""

from __future__ import annotations

from .running import DRIFTS, MEMORY, SLOW, WRONG
from .stopped import DIES, HANGS

CASES = {case.name: case for case in (*HANGS, *WRONG, *SLOW, *MEMORY, *DIES, *DRIFTS)}
