"""The lines of a report, narrow enough for a notebook, and the text of an error in it."""

from __future__ import annotations

import textwrap

#: The longest line, in columns.
WIDTH = 80


def wrapped(text: str) -> list[str]:
    """Return a text in lines of at most 80 columns; only a single word may be longer.

    Continuation lines are indented by two more columns. A line with colors belongs to a traceback,
    which already has its line breaks, so it stays as it is.
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


def text_of(error: BaseException) -> str:
    """Return an error's text; if the user's own ``__str__`` fails, a note that names its error."""
    try:
        return str(error)
    except Exception as worse:
        return f"(its text can't be shown: {type(worse).__name__})"
