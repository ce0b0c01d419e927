"""Parts of pages that show the course at a glance: the map with links, and lists of labs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape

from utils.course import map as course
from utils.course.about import PARTS, About

from .address import ROOT, is_placeholder, repository

ROW = re.compile(
    r"^\| \[(\d\d) · .*?\]\(labs/(.*?)\) \| (?P<what>.*) \| \d+ \| [\d +]+ min \|$", re.MULTILINE
)
#: The sentence in README.md about the placeholder, and the commands that need an address.
PLACEHOLDER = re.compile(r"^`https://example\.org/\S+ is a placeholder .*\n", re.MULTILINE)
CLONE = re.compile(r"^git clone \S+\ncd \S+\n", re.MULTILINE)
#: The map in README.md.
FLOWCHART = re.compile(r"^```mermaid\nflowchart .*?^```$", re.MULTILINE | re.DOTALL)
#: How to look at a lab without installing. The key says whether the address is a placeholder.
WITHOUT_INSTALLING = {
    True: "You can read every lab here, [with its outputs](../labs/index.md), without installing "
    "anything.",
    False: "You can read every lab here, [with its outputs](../labs/index.md). The buttons on a "
    "lab's page open it in Binder or in your JupyterHub.",
}


def parts(labs: Sequence[About], files: Mapping[str, str]) -> dict[str, str]:
    """Return the MyST texts that replace ``<!-- map -->`` and similar comments in the site's pages.

    files: the names of the notebooks that have a page, by their labs' numbers.
    """
    mine = [lab for lab in labs if lab.number in files]
    return {
        "map": linked_map(labs, files),
        "paths": paths(files),
        "labs": listed(mine, files),
        "clone": clone(),
        "without": WITHOUT_INSTALLING[is_placeholder()],
    }


def linked_map(labs: Sequence[About], files: Mapping[str, str]) -> str:
    """Return the map in HTML: the labs as links, part by part, each with the labs before it.

    The map needs no script, unlike the flowchart that GitHub draws in README.md.
    """
    columns = []
    for part in PARTS:
        items = []
        for lab in (lab for lab in labs if lab.part == part):
            title = escape(f"{lab.number} · {lab.title}")
            if lab.number in files:
                page = f"labs/{files[lab.number].removesuffix('.ipynb')}.html"
                about = f"{title}: {lab.length} minutes, {lab.ranks} ranks"
                title = f'<a href="{page}" aria-label="{about}">{title}</a>'
            after = f"; after {' and '.join(lab.builds_on)}" if lab.builds_on else ""
            items.append(f"<li>{title}<br>{lab.length} min · {lab.ranks} ranks{after}</li>")
        columns.append(f"<div><p>{part}</p><ul>{''.join(items)}</ul></div>")
    return "\n".join(['<div class="course-map">', *columns, "</div>"])


def clone() -> str:
    """Return the commands that fetch the course, or nothing if nobody has given an address."""
    if is_placeholder():
        return ""
    return f"git clone {repository()}\ncd {repository().rpartition('/')[2]}\n"


def with_address(readme: str) -> str:
    """Return README's text with the repository's address, and without the placeholder."""
    return CLONE.sub(clone(), PLACEHOLDER.sub("", readme))


def promise(readme: str) -> dict[str, str]:
    """Return two parts of the front page: README's lead, and its text from there to the labs.

    Raises:
        ValueError: README no longer has these parts.
    """
    head, found, _ = readme.partition("\n## The labs\n")
    title, lead, rest = [*head.split("\n\n", 2), "", ""][:3]
    if not found or not title.startswith("# ") or not rest:
        raise ValueError(
            "README.md: the front page needs a title and a paragraph above '## The labs'"
        )
    return {"lead": f"{title}\n\n{lead}", "promise": rest}


def with_linked_map(readme: str, linked: str) -> str:
    """Return README's text with the linked map instead of the flowchart."""
    return FLOWCHART.sub(lambda _: linked, readme)


def paths(files: Mapping[str, str]) -> str:
    """Return the paths through the course, each with links to its labs."""
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
    """Return the list of labs, part by part, each with its purpose, its time and its ranks."""
    readme = (ROOT / "README.md").read_text("utf-8")
    what = {found[1]: found["what"] for found in ROW.finditer(readme)}
    lines = []
    for part in PARTS:
        inside = [lab for lab in labs if lab.part == part]
        lines += [f"## {part}", ""] if inside else []
        for lab in inside:
            link = f"**[{lab.number} · {lab.title}]({files[lab.number]})**"
            head = f"{link} · {lab.length} min · {lab.ranks} ranks"
            lines += [f"{head}\n: {what[lab.number]}.", ""]
    return "\n".join(lines)


def _all() -> list[About]:
    from utils.course.about import labs

    return labs()
