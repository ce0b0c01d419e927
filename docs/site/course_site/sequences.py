"""Mermaid's sequence diagrams as lists of messages, which a browser shows without a script.

GitHub draws the diagrams from the same text. Here each participant is a column, and a message
reaches from its sender's column to its receiver's. A screen reader says "rank A to rank B: …".
"""

from __future__ import annotations

import re
from html import escape

from docutils import nodes
from sphinx.application import Sphinx

# No text has a semicolon, because a semicolon ends a statement in Mermaid: GitHub shows an error.
PARTICIPANT = re.compile(r"participant (\w+) as ([^;]+)")
MESSAGE = re.compile(r"(\w+)->>(\w+): ([^;]+)")
NOTE = re.compile(r"Note over (\w+)(?:,\s*(\w+))?: ([^;]+)")
BRANCH = re.compile(r"(alt|else|opt|loop) ([^;]+)")


def setup(app: Sphinx) -> None:
    """Draw each code block in the language Mermaid."""
    app.connect("doctree-read", draw_all)


def draw_all(app: Sphinx, doctree: nodes.document) -> None:
    """Replace each diagram of a page by its list."""
    for block in list(doctree.findall(nodes.literal_block)):
        if block.get("language") == "mermaid":
            block.replace_self(nodes.raw("", drawn(block.astext()), format="html"))


def drawn(source: str) -> str:
    """Return a diagram in HTML.

    Raises:
        ValueError: the diagram has a line that the site can't draw.
    """
    names: dict[str, str] = {}
    columns: dict[str, int] = {}
    rows = []
    for line in map(str.strip, source.splitlines()):
        if found := PARTICIPANT.fullmatch(line):
            names[found[1]], columns[found[1]] = found[2], len(columns) + 1
        elif found := MESSAGE.fullmatch(line):
            rows.append(_step(names, columns, *found.groups()))
        elif found := NOTE.fullmatch(line):
            rows.append(_row(columns[found[1]], columns[found[2] or found[1]], "note", found[3]))
        elif found := BRANCH.fullmatch(line):
            word = "if" if found[1] == "alt" else found[1]
            rows.append(_row(1, len(columns), "branch", f"{word} {found[2]}"))
        elif line not in ("sequenceDiagram", "end", ""):
            raise ValueError(f"a sequence diagram has a line that the site can't draw: {line!r}")
    heads = "".join(f"<span>{escape(name)}</span>" for name in names.values())
    return (
        f'<div class="sequence" style="--columns: {len(columns)}">'
        f'<div class="heads" aria-hidden="true">{heads}</div><ol>{"".join(rows)}</ol></div>'
    )


def _step(names: dict[str, str], columns: dict[str, int], start: str, end: str, words: str) -> str:
    """Return the row of a message, or of a participant's own step, which spans two columns."""
    first, last = sorted((columns[start], columns[end]))
    if start != end:
        kind = "right" if columns[start] < columns[end] else "left"
        return _row(first, last, kind, words, f"{names[start]} to {names[end]}: ")
    if 1 < first == len(columns):
        return _row(first - 1, last, "self end", words, f"{names[start]}: ")
    return _row(first, min(last + 1, len(columns)), "self", words, f"{names[start]}: ")


def _row(first: int, last: int, kind: str, words: str, said: str = "") -> str:
    hidden = f'<span class="said">{escape(said)}</span>' if said else ""
    place = f"--from: {first}; --to: {last + 1}"
    return f'<li class="{kind}" style="{place}"><span>{hidden}{escape(words)}</span></li>'
