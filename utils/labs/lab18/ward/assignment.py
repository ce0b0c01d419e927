"""Which twelve of the thirty patients a student has."""

from __future__ import annotations

import hashlib
import random

from .case import DRAWN
from .cases import CASES

BEDS = sum(DRAWN.values())


def patients_of(name: object) -> list[str]:
    """Return the patients of a student, by bed; the same for each spelling of a name.

    Each ward has as many patients of each group as `DRAWN` says, in an order that tells nothing.
    """
    spelled = " ".join(str(name).split()).casefold()
    draw = random.Random(hashlib.sha256(spelled.encode()).digest())
    beds = [
        case
        for group, count in DRAWN.items()
        for case in draw.sample(sorted(c.name for c in CASES.values() if c.group == group), count)
    ]
    draw.shuffle(beds)
    return beds
