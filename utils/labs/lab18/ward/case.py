"""A patient of the ward: its complaint, its evidence, its program, right findings and repairs.

`patients/GROUP.diff` has the patients of a group. A patient begins with `## NAME`. Then come
labels, such as `ranks: all, 0`; a label that is repeated goes on. `with:` names the program's
parts in their order, each with its form, such as `deal.stride`; the part without a form is the
sick one.

Below is the text of the sick part as a diff. A line begins with `- ` if only the sick program
has it, with `+ ` if only the repaired one has it, and with two blanks if both have it. `#!`
marks the guilty line, and `#?` each other line that a careful reader can defend as the cause;
`also:` is such a line in `train`. Below a line `~ or` is the diff to another right program, if
two right programs give different results.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import parts

ALL = "all"

#: How many patients of each group a ward has.
DRAWN = {"hangs": 3, "wrong": 3, "slow": 2, "memory": 2, "dies": 1, "drifts": 1}
PATIENTS = Path(__file__).with_name("patients")
#: The labels of a patient.
LABELS = (
    *("complaint", "shows", "curve", "ranks", "kinds", "hint", "sizes", "arguments", "limits"),
    *("also", "with"),
)
GUILTY = "  #!"
ALSO = "  #?"


@dataclass(frozen=True)
class Case:
    """Describe a patient.

    Attributes:
        name: the name of its program.
        group: a key of `DRAWN`.
        complaint: what a colleague has seen.
        instruments: the evidence that is shown, in this order; see :mod:`.evidence`.
        ranks: guilty ranks of which any is right; "all" means that no rank differs.
        kinds: classes of which any is right, see :mod:`.kinds`.
        hint: what to look at, for a wrong finding.
        text: the sick program.
        lines: numbers of the lines of which any is right, the guilty one first.
        repairs: repairs of which any gives a right program: new text by line.
        limits: "calls", "bytes", "work", "peak" or "kept", see :func:`.program.measured`. The
            check compares them with the reference's repairs, because a repair must not waste them.
        arguments: arguments of `train` when the check runs it.
        curve: the entry of the result that the curves show.
    """

    name: str
    group: str
    complaint: str
    instruments: tuple[str, ...]
    ranks: tuple[int | str, ...]
    kinds: tuple[str, ...]
    hint: str
    text: str
    lines: tuple[int, ...]
    repairs: tuple[Mapping[int, str], ...]
    limits: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    curve: str = "losses"

    @property
    def finding(self) -> dict[str, Any]:
        """Return a right finding."""
        return {"rank": self.ranks[0], "line": self.lines[0], "kind": self.kinds[0]}

    @property
    def function(self) -> str:
        """Return the name of the function that has the guilty line."""
        above = self.text.splitlines()[: self.lines[0]]
        return [line for line in above if line.startswith("def ")][-1].split()[1].partition("(")[0]


@functools.cache
def cases_of(group: str) -> tuple[Case, ...]:
    """Return the patients of a group."""
    blocks = ("\n" + (PATIENTS / f"{group}.diff").read_text(encoding="utf-8")).split("\n## ")[1:]
    return tuple(_case(group, block) for block in blocks)


def _case(group: str, block: str) -> Case:
    name, *lines = block.rstrip().splitlines()
    labels: dict[str, list[str]] = {key: [] for key in LABELS}
    while lines[0].partition(": ")[0] in labels:
        key, _, value = lines.pop(0).partition(": ")
        labels[key].append(value)
    words = {key: " ".join(values) for key, values in labels.items()}
    diffs = [diff.strip("\n").splitlines() for diff in "\n".join(lines).split("\n~ or\n")]
    text, first = _composed(name, words["with"], words["sizes"], sick_of(diffs[0]))
    if any(_plain(sick_of(diff)) != _plain(sick_of(diffs[0])) for diff in diffs):
        raise ValueError(f"The diffs of {name} don't begin with the same sick part.")
    return Case(
        name,
        group,
        words["complaint"],
        _listed(words["shows"]),
        tuple(int(rank) if rank.isdigit() else rank for rank in _listed(words["ranks"])),
        _listed(words["kinds"]),
        words["hint"],
        text,
        (*_marked(diffs[0], GUILTY, first), *_marked(diffs[0], ALSO, first), *_also(text, labels)),
        tuple(repair_of(diff, first) for diff in diffs),
        _listed(words["limits"]),
        {key: int(value) for key, value in _pairs(words["arguments"]).items()},
        words["curve"] or "losses",
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(", ")) if text else ()


def _pairs(text: str) -> dict[str, str]:
    return dict((word.split("=")[0], word.split("=")[1]) for word in text.split())


def sick_of(diff: list[str]) -> list[str]:
    """Return the lines of the sick part, with their marks."""
    return [line[2:] for line in diff if not line.startswith("+")]


def _plain(lines: list[str]) -> list[str]:
    return [line.removesuffix(GUILTY).removesuffix(ALSO) for line in lines]


def _composed(name: str, with_: str, sizes: str, sick: list[str]) -> tuple[str, int]:
    """Return the sick program, and the number of the sick part's first line in it."""
    chosen = {}
    for word in with_.split(", "):
        part, _, form = word.partition(".")
        chosen[part] = parts.parts()[part].forms[form] if form else "\n".join(_plain(sick))
    text = parts.program(name, chosen, _pairs(sizes))
    before = text.partition("\n".join(_plain(sick)))[0]
    return text, before.count("\n") + 1


def _marked(diff: list[str], mark: str, first: int) -> list[int]:
    """Return the numbers of the lines that have a mark, in the sick program."""
    return [first + k for k, line in enumerate(sick_of(diff)) if line.endswith(mark)]


def _also(text: str, labels: Mapping[str, list[str]]) -> list[int]:
    lines = [line.strip() for line in text.splitlines()]
    return [lines.index(line) + 1 for line in labels["also"]]


def repair_of(diff: list[str], first: int) -> dict[int, str]:
    """Return the repair that a diff shows.

    New lines replace the removed lines above them; without any, they follow the line above them.
    """
    repair: dict[int, str] = {}
    number = first - 1  # the last line of the sick program
    removed = 0  # the first removed line
    above = ""
    for line in diff:
        if line.startswith("+"):
            key = removed or number
            old = repair.get(key) if removed else repair.get(key, above)
            repair[key] = f"{old}\n{line[2:]}" if old else line[2:]
            continue
        number += 1
        above = _plain([line[2:]])[0]
        if line.startswith("-"):
            removed = removed or number
            repair[number] = ""
        else:
            removed = 0
    return repair
