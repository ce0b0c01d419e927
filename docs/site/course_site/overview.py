"""The map of the course as links, and the labs in words: parts of pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from utils.course import map as course
from utils.course.about import PARTS, About

from .address import ROOT

ROW = re.compile(
    r"^\| \[(\d\d) · .*?\]\(labs/(.*?)\) \| (?P<what>.*) \| \d+ \| \d+ min \|$", re.MULTILINE
)
#: The map in README.md.
FLOWCHART = re.compile(r"^```mermaid\nflowchart .*?^```$", re.MULTILINE | re.DOTALL)


def parts(labs: Sequence[About], files: Mapping[str, str]) -> dict[str, str]:
    """What stands for ``<!-- map -->``, ``<!-- paths -->`` and ``<!-- labs -->``, in MyST.

    files: the names of the notebooks that have a page, by their labs' numbers.
    """
    mine = [lab for lab in labs if lab.number in files]
    return {"map": linked_map(labs, files), "paths": paths(files), "labs": listed(mine, files)}


def linked_map(labs: Sequence[About], files: Mapping[str, str]) -> str:
    """The labs part by part, each a link, with what helps to know before.

    It needs no script, unlike the flowchart that GitHub draws in README.md.
    """
    columns = []
    for part in PARTS:
        items = []
        for lab in (lab for lab in labs if lab.part == part):
            title = escape(f"{lab.number} · {lab.title}")
            if lab.number in files:
                page = f"labs/{files[lab.number].removesuffix('.ipynb')}.html"
                about = f"{title}: {lab.minutes} minutes, {lab.ranks} ranks"
                title = f'<a href="{page}" aria-label="{about}">{title}</a>'
            after = f"; after {' and '.join(lab.builds_on)}" if lab.builds_on else ""
            items.append(f"<li>{title}<br>{lab.minutes} min · {lab.ranks} ranks{after}</li>")
        columns.append(f"<div><p>{part}</p><ul>{''.join(items)}</ul></div>")
    return "\n".join(['<div class="course-map">', *columns, "</div>"])


def with_linked_map(readme: str, linked: str) -> str:
    """README's text with that in the place of the flowchart."""
    return FLOWCHART.sub(lambda _: linked, readme)


def paths(files: Mapping[str, str]) -> str:
    """The paths through the course, each with links."""
    lines = []
    for route in course.paths(_all()):
        if route.name == course.WHOLE:
            said = route.labs
        else:
            said = re.sub(r"\d\d", lambda found: _link(found[0], files), route.labs)
        lines.append(
            f"- **{route.name}**, {course.hours(route.minutes)} hours: {route.aim}. Labs {said}"
        )
    return "\n".join(lines)


def _link(number: str, files: Mapping[str, str]) -> str:
    return f"[{number}](labs/{files[number]})" if number in files else number


def listed(labs: Sequence[About], files: Mapping[str, str]) -> str:
    """The labs, part by part: what one does in each, its time and its ranks."""
    readme = (ROOT / "README.md").read_text("utf-8")
    what = {found[1]: found["what"] for found in ROW.finditer(readme)}
    lines = []
    for part in PARTS:
        inside = [lab for lab in labs if lab.part == part]
        lines += [f"## {part}", ""] if inside else []
        for lab in inside:
            link = f"**[{lab.number} · {lab.title}]({files[lab.number]})**"
            head = f"{link} · {lab.minutes} min · {lab.ranks} ranks"
            lines += [f"{head}\n: {what[lab.number]}.", ""]
    return "\n".join(lines)


def _all() -> list[About]:
    from utils.course.about import labs

    return labs()
