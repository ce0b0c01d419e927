"""The lines of a report, narrow enough for a notebook, and the text of an error in it."""

from __future__ import annotations

import textwrap

#: The longest line, in columns.
WIDTH = 80
#: Characters of an error's text that are shown: wrapping a million of them takes minutes.
LONGEST = 10_000


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
    """Return an error's text, or its beginning; if its ``__str__`` fails, a note that says so."""
    try:
        return _shown(str(error))
    except Exception as worse:
        return f"(its text can't be shown: {type(worse).__name__})"


def _shown(text: str) -> str:
    """Return the beginning of a text, in a form that can be sent."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]} … (the error's text has {len(text):,} characters)"
    return sayable(text)


def sayable(text: str) -> str:
    """Return a text that can be sent: half of a pair of UTF-16 becomes a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8")


def sayable_error(error: BaseException, causes: int = 20) -> BaseException:
    """Return the error, if its text and those of its causes can be shown; otherwise a stand-in.

    The stand-in has a class of the same name, the same traceback, and the text of :func:`text_of`.

    Args:
        causes: how many earlier errors are looked at.
    """
    earlier = (error.__cause__ or error.__context__) if causes else None
    safe = None if earlier is None else sayable_error(earlier, causes - 1)
    try:
        text = str(error)
        if safe is earlier and text == _shown(text):
            return error
    except Exception:  # the user's __str__ has raised it
        pass
    stand_in: BaseException = type(type(error).__name__, (Exception,), {})(text_of(error))
    if error.__cause__ is not None:
        stand_in.__cause__ = safe
    else:
        stand_in.__context__ = safe
    stand_in.__suppress_context__ = error.__suppress_context__
    return stand_in.with_traceback(error.__traceback__)
