"""The thirty patients, whose texts are in `patients/`. Their names say nothing about what is wrong.

`tests/labs/test_clinic.py` runs every program sick and repaired.
"""

from __future__ import annotations

from .case import DRAWN, cases_of

CASES = {case.name: case for group in DRAWN for case in cases_of(group)}
