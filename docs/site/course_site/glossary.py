"""The glossary's page, and the links from labs to its words.

A word becomes a link where it first appears in a lab, both in the lab that introduces it and in
each later lab.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

from .address import ROOT

ROW = re.compile(
    r"^\| \*\*(?P<words>.+?)\*\* \| (?P<meaning>.+) \[(?P<lab>\d\d)\] \|$", re.MULTILINE
)
NUMBER = re.compile(r"labs/(\d\d)_\w+")


@dataclass(frozen=True)
class Entry:
    """A row of the glossary: words, their meaning, and the lab that introduces them."""

    words: tuple[str, ...]
    meaning: str
    lab: str


def entries(text: str) -> list[Entry]:
    """Return the rows of labs/glossary.md.

    Raises:
        ValueError: a row is malformed, so it would be missing from the page.
    """
    found = [
        Entry(tuple(r["words"].split(", ")), r["meaning"], r["lab"]) for r in ROW.finditer(text)
    ]
    rows = [line for line in text.splitlines() if line.startswith("| **")]
    if len(found) != len(rows):
        bad = next(line for line in rows if not ROW.match(line))
        raise ValueError(f"labs/glossary.md: '| **word** | meaning [01] |' is wanted, not {bad}")
    return found


def page(text: str, notebooks: Mapping[str, str]) -> str:
    """Return the glossary's page in MyST. notebooks: names of the labs' files, by number."""
    head = text.partition("\n|")[0]
    lines = [head, "", "```{glossary}"]
    for entry in entries(text):
        lab = f"[{entry.lab}]({notebooks[entry.lab]})" if entry.lab in notebooks else entry.lab
        lines += [*entry.words, f"  {entry.meaning} Lab {lab}", ""]
    return "\n".join([*lines, "```", ""])


# --- links to it ---------------------------------------------------------------------------------


def setup(app: Sphinx) -> None:
    """Link each word where it first appears in a lab."""
    app.connect("doctree-read", link_words)


def link_words(app: Sphinx, doctree: nodes.document) -> None:
    """Link the first occurrence of each word, if the page is a lab."""
    lab = NUMBER.fullmatch(app.env.docname)
    if not lab:
        return
    words = _known(lab[1])
    any_of = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    pattern = re.compile(
        rf"(?<![\w-])({any_of})(?:e?s)?(?![\w-])",
        re.IGNORECASE,
    )
    for text in list(doctree.findall(nodes.Text)):
        if _is_prose(text):
            _link(text, pattern, words, app.env.docname)


def _known(lab: str) -> dict[str, str]:
    """Return the words of this lab and earlier labs: by each spelling, the word in the glossary."""
    text = (ROOT / "labs" / "glossary.md").read_text("utf-8")
    found = {}
    for entry in entries(text):
        if entry.lab <= lab:
            for word in entry.words:
                found |= {part.lower(): word for part in re.split(r" \(|\)", word) if len(part) > 1}
    return found


def _is_prose(text: nodes.Text) -> bool:
    """Return whether a text or name is in a paragraph, but not in a title, a link or a table."""
    parent = text.parent
    if isinstance(parent, nodes.literal):
        parent = parent.parent
    if not isinstance(parent, nodes.paragraph):
        return False
    while parent is not None:
        if isinstance(parent, (nodes.table, nodes.reference, nodes.title)):
            return False
        parent = parent.parent
    return True


def _link(text: nodes.Text, pattern: re.Pattern, words: dict[str, str], page: str) -> None:
    """Link each word that the pattern finds in a text, and remove it from `words`."""
    code = isinstance(text.parent, nodes.literal)
    source, made, done = text.astext(), [], 0
    for found in [pattern.fullmatch(source)] if code else pattern.finditer(source):
        if not found or not (word := words.pop(found[1].lower(), "")):
            continue
        for other in [key for key, value in words.items() if value == word]:
            del words[other]
        inner = nodes.literal("", found[0]) if code else nodes.inline("", found[0])
        made += [nodes.Text(source[done : found.start()]), _to(word, inner, page)]
        done = found.end()
    if made:
        old = text.parent if code else text
        old.parent.replace(old, [*made, nodes.Text(source[done:])])


def _to(word: str, inner: nodes.Element, page: str) -> pending_xref:
    """Return a link from a page to a word of the glossary."""
    about = {"refdomain": "std", "reftype": "term", "reftarget": word, "refexplicit": True}
    return pending_xref("", inner, **about, refwarn=True, refdoc=page, classes=["term"])
