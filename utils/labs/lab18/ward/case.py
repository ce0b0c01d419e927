"""A patient of the ward: its complaint, its evidence, and the right findings and repairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ALL = "all"
EVERYONE = (ALL, 0, 1, 2, 3)

#: How many patients of each group a ward has.
DRAWN = {"hangs": 3, "wrong": 3, "slow": 2, "memory": 2, "dies": 1, "drifts": 1}


@dataclass(frozen=True)
class Case:
    """Describe a patient.

    Attributes:
        name: the name of its program.
        group: a key of `DRAWN`.
        complaint: what a colleague has seen.
        instruments: the evidence that is shown, in this order; see :mod:`.evidence`.
        ranks: guilty ranks of which any is right; "all" means that no rank differs.
        lines: lines of which any is right.
        kinds: classes of which any is right, see :mod:`.kinds`.
        repairs: repairs of which any gives a right program: new text by line.
        hint: what to look at, for a finding with a wrong line.
        limits: "calls", "bytes", "work" or "peak", see :func:`.program.measured`. The check
            compares them with the reference's repairs, because a repair must not waste them.
        arguments: arguments of `train` when the check runs it.
    """

    name: str
    group: str
    complaint: str
    instruments: tuple[str, ...]
    ranks: tuple[int | str, ...]
    lines: tuple[int, ...]
    kinds: tuple[str, ...]
    repairs: tuple[Mapping[int, str], ...]
    hint: str
    limits: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def finding(self) -> dict[str, Any]:
        """Return a right finding."""
        return {"rank": self.ranks[0], "line": self.lines[0], "kind": self.kinds[0]}


PATIENTS = Path(__file__).with_name("patients")


def text_of(name: str) -> str:
    """Return a patient's program."""
    return (PATIENTS / f"{name}.py").read_text(encoding="utf-8")
