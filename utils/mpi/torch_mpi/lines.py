"""The lines of a report as a notebook shows them: not too wide to read, broken between words."""

from __future__ import annotations

import textwrap

#: Columns of a line.
WIDTH = 80


def wrapped(text: str) -> list[str]:
    """Return a text in lines of at most 80 columns, or of one word that is longer.

    What follows a break is indented by two columns more than its line. A line with colors is of a
    traceback, which has its line breaks.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if "\x1b" in line:
            lines.append(line)
            continue
        indent = line[: len(line) - len(line.lstrip())]
        parts = textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=f"{indent}  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines += parts or [""]
    return lines
