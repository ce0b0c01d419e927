"""The map of the course with a link on each lab, and the labs in words: parts of two pages."""

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


def parts(labs: Sequence[About], files: Mapping[str, str]) -> dict[str, str]:
    """What stands for ``<!-- map -->``, ``<!-- paths -->`` and ``<!-- labs -->``, in MyST.

    files: the names of the notebooks that have a page, by their labs' numbers.
    """
    labs = [lab for lab in labs if lab.number in files]
    return {"map": linked_map(labs, files), "paths": paths(files), "labs": listed(labs, files)}


def linked_map(labs: Sequence[About], files: Mapping[str, str]) -> str:
    """The picture, and over each of its boxes a link."""
    links = []
    everything = _all()
    frames = course.frames(everything)
    for lab in labs:
        left, top, width, height = (f"{100 * share:.3f}%" for share in frames[lab.number])
        page = f"labs/{files[lab.number].removesuffix('.ipynb')}.html"
        said = escape(f"{lab.number} · {lab.title}: {lab.minutes} minutes, {lab.ranks} ranks")
        links.append(
            f'<a href="{page}" aria-label="{said}" title="{said}" '
            f'style="left: {left}; top: {top}; width: {width}; height: {height}"></a>'
        )
    picture = f"![{course.in_words(everything)}]({course.PICTURE.as_posix()})"
    head = '<div class="course-map" tabindex="0" role="region" aria-label="Map of the course"><div>'
    return "\n".join([head, "", picture, "", *links, "</div></div>"])


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
