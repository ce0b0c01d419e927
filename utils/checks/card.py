"""A verdict as HTML: a colored badge, the problems as a list, and the next step.

The badge has its own background, and all other text has the color of the page around it. So a
card is readable on light and dark pages, and without the styles that JupyterLab removes from a
notebook that it doesn't trust. Every badge says its state in a word, for screen readers.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import NamedTuple

_CODE = re.compile(r"`([^`<]+)`")


class Badge(NamedTuple):
    """The look of a state, and the word that a screen reader reads out."""

    sign: str
    word: str
    paper: str
    ink: str


PASSED = Badge("✓", "passed", "#1a7f37", "#ffffff")
OPEN = Badge("○", "open", "#ffc107", "#222222")
WRONG = Badge("✗", "not passed", "#b42318", "#ffffff")


def card(
    badge: Badge, task: str, title: str, *, problems: Iterable[str] = (), notes: Iterable[str] = ()
) -> str:
    """Return the HTML of one verdict.

    Args:
        badge: the state.
        task: the task, such as "Task 1.4"; shown in bold.
        title: the words after the task.
        problems: the entries of a list that says what is wrong.
        notes: lines below the list; empty lines are left out.
    """
    look = f"background-color: {badge.paper}; color: {badge.ink}; border-radius: 4px"
    head = (
        f'<span style="{look}; padding: 1px 8px; font-weight: bold">{badge.sign} {badge.word}'
        f"</span> <b>{_escaped(task)}</b>" + (f" · {_escaped(title)}" if title else "")
    )
    entries = "".join(f"<li>{_escaped(problem)}</li>" for problem in problems)
    below = [f'<ul style="margin: 4px 0 4px 0">{entries}</ul>'] if entries else []
    below += [f'<div style="padding-top: 4px">{_escaped(note)}</div>' for note in notes if note]
    return (
        f'<div style="border-left: 4px solid {badge.paper}; padding: 4px 0 4px 12px">'
        f"<div>{head}</div>{''.join(below)}</div>"
    )


def _escaped(text: str) -> str:
    """Return a text as HTML that keeps line breaks, indentation, and `code` in backticks."""
    lines = []
    for line in text.splitlines():
        words = line.lstrip(" ")
        lines.append("&nbsp;" * (len(line) - len(words)) + html.escape(words))
    return _CODE.sub(r"<code>\1</code>", "<br>".join(lines))
