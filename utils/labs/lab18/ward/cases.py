"""The thirty patients: for each one, its complaint, its mistake, and repairs that help.

The programs are in `patients/`, and their recorded evidence is in `recorded/`. Their names say
nothing about what is wrong. `tests/labs/test_clinic.py` runs every program sick and repaired.
"""

from __future__ import annotations

from .running import DRIFTS, MEMORY, SLOW, WRONG
from .stopped import DIES, HANGS

CASES = {case.name: case for case in (*HANGS, *WRONG, *SLOW, *MEMORY, *DIES, *DRIFTS)}
