"""What a lab says about itself: title, time, ranks, and which labs it builds on.

The notebook's metadata have it once, under ``lab``::

    "lab": {
     "title": "DDP", "part": "Data parallel", "minutes": 75, "ranks": 4, "builds_on": ["03"]
    }

A lab that has more to offer than a session can hold has a second part with the heading *Go
further*, and its minutes under ``further``. The title cell says the same to readers, with the
points of each part, and ``ddl-labs lint`` reports a difference. The map of the course is drawn from
the metadata.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from .effort import announced, in_sessions
from .effort import minutes as minutes_of
from .notebook import SOLUTIONS, NotebookError, lab, notebooks, read

#: The parts of the course, in order.
PARTS = (
    "Data parallel",
    "Aggregating gradients",
    "Splitting the model",
    "Beyond the machine room",
    "All together",
    "The transformer track",
)
#: The heading of the cell behind which nothing belongs to the core path.
FURTHER = "## Go further"
#: Labs of this part are projects, whose minutes are planned. So are those of the first lab.
PROJECT, FIRST = "All together", "00"
#: A lab may announce this share of what the rule in :mod:`.effort` expects.
ENOUGH = 0.9
EXAMPLE = (
    '"lab": {"title": "DDP", "part": "Data parallel", "minutes": 75, "ranks": 4, '
    '"builds_on": ["03"]}'
)


@dataclass(frozen=True)
class About:
    """A lab, as its metadata has it.

    Attributes:
        number: In its file's name, "04".
        title: The name, without the number and without what follows a colon.
        part: One of :data:`PARTS`.
        minutes: That the core path takes a student.
        ranks: That it starts.
        builds_on: The numbers of the labs that come before it.
        further: The minutes of *Go further*; 0 if the lab has no such part.
    """

    number: str
    title: str
    part: str
    minutes: int
    ranks: int
    builds_on: tuple[str, ...]
    further: int = 0

    @property
    def length(self) -> str:
        """The minutes of both parts, as readers see them: "75", "90 + 60"."""
        return f"{self.minutes} + {self.further}" if self.further else f"{self.minutes}"

    @property
    def total(self) -> int:
        """The minutes of the core path and of *Go further* together."""
        return self.minutes + self.further


def labs(folder: Path = SOLUTIONS) -> list[About]:
    """Return all labs of a folder, by number.

    Raises:
        NotebookError: Metadata that lack something, or an unknown lab; says what and where.
    """
    solutions = {path: read(path) for path in notebooks(folder)}
    numbers = {number_of(path) for path in solutions}
    result = []
    for path, nb in solutions.items():
        if problems := list(problems_of(nb, number_of(path), numbers)):
            raise NotebookError("\n".join(f"{path.name}: {problem}" for problem in problems))
        about = {**nb.metadata["lab"], "builds_on": tuple(nb.metadata["lab"]["builds_on"])}
        result.append(About(number_of(path), **about))
    return result


def number_of(path: Path) -> str:
    """Return the number of a lab, "04" of 04_ddp.ipynb."""
    return path.stem.partition("_")[0]


def problems_of(nb: NotebookNode, number: str, numbers: set[str]) -> Iterator[str]:
    """Yield what is wrong with a lab's metadata, and where its title cell says something else.

    Args:
        numbers: Of all labs that there are.
    """
    about = nb.metadata.get("lab")
    if not isinstance(about, Mapping):
        yield f"the notebook's metadata don't say what the lab is: add {EXAMPLE}"
        return
    faults = list(_faults(about, number, numbers))
    yield from faults
    if not faults:
        title = nb.cells[0].source if nb.cells else ""
        yield from _differences(about, number, title)
        yield from _parts(about, number, nb, title)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


#: For each entry of the metadata when it is right, and what is said of another value.
RULES: dict[str, tuple[Callable[[Any], object], str]] = {
    "title": (lambda value: isinstance(value, str) and value.strip(), "is {!r}: give it words"),
    "part": (PARTS.__contains__, f"is {{!r}}: one of {', '.join(PARTS)}"),
    "minutes": (_is_count, "are {!r}: a whole number from 1 on"),
    "ranks": (_is_count, "are {!r}: a whole number from 1 on"),
    "builds_on": (lambda value: isinstance(value, list), 'is {!r}: a list such as ["03"]'),
    "further": (_is_count, "are {!r}: a whole number from 1 on, or leave it out"),
}
OPTIONAL = {"further"}


def _faults(about: Mapping[str, Any], number: str, numbers: set[str]) -> Iterator[str]:
    if found := _wrong_keys(about):
        yield f"its lab metadata {' and '.join(found)}: write {EXAMPLE}"
        return
    wrong = [key for key in RULES if key in about and not RULES[key][0](about[key])]
    for key in wrong:
        yield f"its {key} {RULES[key][1].format(about[key])}"
    if "builds_on" not in wrong:
        yield from _order_faults(about["builds_on"], number, numbers)


def _wrong_keys(about: Mapping[str, Any]) -> list[str]:
    """Return which keys the metadata lack, and which they have that nobody reads."""
    missing = [key for key in RULES if key not in about and key not in OPTIONAL]
    more = sorted(set(about) - set(RULES))
    lack = [f"lack {', '.join(missing)}"] if missing else []
    have = [f"have {', '.join(more)}, which nobody reads"] if more else []
    return lack + have


def _order_faults(builds_on: list[str], number: str, numbers: set[str]) -> Iterator[str]:
    for other in builds_on:
        if other not in numbers:
            few = f"{min(numbers)} to {max(numbers)}" if len(numbers) > 1 else ", ".join(numbers)
            yield f"builds on {other!r}, but there is no such lab: there are {few}"
        elif other >= number:
            yield f"builds on {other}, which does not come before it"


def _differences(about: Mapping[str, Any], number: str, title_cell: str) -> Iterator[str]:
    """Yield where the title cell says something else: heading, and the table of time and ranks."""
    heading = f"# {number} · {about['title']}"
    first = title_cell.partition("\n")[0]
    if first.partition(":")[0].strip() != heading:
        yield f"its metadata say {heading!r}, its title cell {first!r}: they must agree"
    row = re.search(
        r"^\|(?: core path \|)? *([^|\n]*minutes) *\| *(\d+)[^\n]*\|$", title_cell, re.MULTILINE
    )
    if row is None:
        yield "its title cell has no row such as '| 75 minutes | 4, on one machine | 15 |'"
        return
    for key, said, value in (
        ("", in_sessions(about["minutes"]), row[1]),
        (" ranks", str(about["ranks"]), row[2]),
    ):
        if value != said and not value.endswith(f" to {said}"):
            yield f"its metadata say {said}{key}, its title cell {value}: they must agree"


def _parts(
    about: Mapping[str, Any], number: str, nb: NotebookNode, title_cell: str
) -> Iterator[str]:
    """Yield where the title cell's rows differ from the core path and from *Go further*."""
    starts = sum(cell.source.startswith(FURTHER) for cell in nb.cells)
    if starts != ("further" in about):
        yield (
            f"{starts} cells begin with {FURTHER!r}: write one, and its minutes under "
            "'further', or none"
        )
        return
    core, further = in_parts(nb)
    if further:
        wanted = (
            rf"^\| \*Go further\* \| {about['further']} minutes \|[^\n]*\| {_points(further)} \|$"
        )
        if not re.search(wanted, title_cell, re.MULTILINE):
            yield (
                "its title cell needs a row '| *Go further* | "
                f"{about['further']} minutes | … | {_points(further)} |'"
            )
    if about["part"] != PROJECT and number != FIRST:
        yield from _hasty(about["minutes"], core, "core path")
        yield from _hasty(about.get("further", 0), further, "part *Go further*")
    row = re.search(r"^\|[^\n]*minutes[^\n]*\| *(\d[^|\n]*?) *\|$", title_cell, re.MULTILINE)
    if row and row[1] != _points(core):
        yield f"its title cell says {row[1]!r} points, its tasks give {_points(core)!r}"


def in_parts(nb: NotebookNode) -> tuple[list[NotebookNode], list[NotebookNode]]:
    """Return the cells of the core path, and those from *Go further* on."""
    starts = (k for k, cell in enumerate(nb.cells) if cell.source.startswith(FURTHER))
    end = next(starts, len(nb.cells))
    return nb.cells[:end], nb.cells[end:]


def core_path(nb: NotebookNode) -> dict[str, int]:
    """Return the tasks with a check on a lab's core path, and the minutes that are left after each.

    The minutes are those that the lab announces, shared out by the rule in :mod:`.effort`.
    """
    cells, _ = in_parts(nb)
    whole = minutes_of(cells) or 1.0
    minutes = nb.metadata.get("lab", {}).get("minutes", 0)
    checks = [k for k, cell in enumerate(cells) if lab(cell).get("check") is True]
    return {
        str(lab(cells[k])["task"]): round(minutes * minutes_of(cells[k + 1 :]) / whole)
        for k in checks
    }


def _hasty(said: int, cells: list[NotebookNode], part: str) -> Iterator[str]:
    """Yield where a part announces less time than students need."""
    needed = minutes_of(cells)
    if said < ENOUGH * needed and cells:
        yield (
            f"its {part} takes about {needed:.0f} minutes by the rule in effort.py, but announces "
            f"{said}: write {announced(needed)}"
        )


def _points(cells: list[NotebookNode]) -> str:
    """Return the points of some cells as a title cell says them: "17, and 4 for explanations"."""
    sums = {"code": 0.0, "markdown": 0.0}
    for cell in cells:
        if cell.metadata.get("nbgrader", {}).get("solution"):
            sums[cell.cell_type] += cell.metadata.get("lab", {}).get("points", 0)
    explained = f", and {sums['markdown']:g} for explanations" if sums["markdown"] else ""
    return f"{sums['code']:g}{explained}"
