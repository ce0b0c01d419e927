"""The map of the course: a flowchart of its labs, and paths through it, from the labs' metadata.

``ddl-labs map`` writes them into README.md. GitHub and JupyterLab draw the flowchart, which is
Mermaid's; the site makes links of the same labs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .about import PARTS, About
from .notebook import NotebookError

#: Paths through the course: name, what for, and the labs, meeting by meeting.
PATHS: Mapping[str, tuple[str, Sequence[Sequence[str]]]] = {
    "Two afternoons": ("from messages to data-parallel training", [["00", "01", "03"]]),
    "Four weeks": (
        "the core ideas, four sessions a week",
        [["00", "01", "02"], ["03", "04"], ["06", "07"], ["10", "13"]],
    ),
    "Two weeks of transformers": (
        "how a language model is split, trained, and served",
        [["09", "10"], ["15", "16", "17"]],
    ),
}
WHOLE = "The whole course"


def written(labs: Sequence[About]) -> str:
    """Return what README.md says: the flowchart, and the paths with their hours."""
    lines = [flowchart(labs), "", "| path | what for | labs | hours |", "|---|---|---|---|"]
    for path in paths(labs):
        lines.append(f"| {path.name} | {path.aim} | {path.labs} | {hours(path.minutes)} |")
    return "\n".join(lines)


def flowchart(labs: Sequence[About]) -> str:
    """Return the labs as a block of Mermaid: a box for each part, an arrow to what builds on it."""
    lines = ["```mermaid", "flowchart TB", "  accTitle: Map of the course"]
    lines.append(f"  accDescr: {in_words(labs)}")
    for name in dict.fromkeys(lab.part for lab in labs):
        lines.append(f'  subgraph part{PARTS.index(name)}["{name}"]')
        for lab in (lab for lab in labs if lab.part == name):
            label = f"{lab.number} · {lab.title}<br/>{lab.length} min · {lab.ranks} ranks"
            lines.append(f'    lab{lab.number}["{label}"]')
        lines.append("  end")
    lines += [f"  lab{other} --> lab{lab.number}" for lab in labs for other in lab.builds_on]
    return "\n".join([*lines, "```"])


def in_words(labs: Sequence[About]) -> str:
    """Return the map in words, for those who don't see it."""
    sentences = []
    for name in PARTS:
        titles = []
        for lab in (lab for lab in labs if lab.part == name):
            after = f" (after {' and '.join(lab.builds_on)})" if lab.builds_on else ""
            titles.append(f"{lab.number} {lab.title}{after}")
        if titles:
            sentences.append(f"{name}: {', '.join(titles)}.")
    return "Map of the course. " + " ".join(sentences)


@dataclass(frozen=True)
class Route:
    """A path through the course: name, what for, its labs in words, minutes, numbers."""

    name: str
    aim: str
    labs: str
    minutes: int
    numbers: tuple[str, ...]


def paths(labs: Sequence[About]) -> list[Route]:
    """Return the paths through these labs, the whole course last.

    Raises:
        NotebookError: A path names a lab that is not there.
    """
    minutes = {lab.number: lab.minutes for lab in labs}
    routes = []
    for name, (aim, meetings) in PATHS.items():
        numbers = tuple(number for meeting in meetings for number in meeting)
        if missing := [number for number in numbers if number not in minutes]:
            raise NotebookError(
                f"utils/course/map.py: the path {name!r} names lab {', '.join(missing)}, "
                "which does not exist"
            )
        words = " · ".join(", ".join(meeting) for meeting in meetings)
        routes.append(Route(name, aim, words, sum(minutes[n] for n in numbers), numbers))
    numbers = tuple(minutes)
    words = f"{numbers[0]} to {numbers[-1]}"
    aim = "all labs, with all of *Go further*"
    return [*routes, Route(WHOLE, aim, words, sum(lab.total for lab in labs), numbers)]


def hours(minutes: int) -> str:
    """Write half hours as a person would say them: 3, 12½."""
    halves = round(minutes / 30)
    return f"{halves // 2 or ''}{'½' if halves % 2 else ''}"
