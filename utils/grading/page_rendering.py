"""The templates of grading's pages, with the words that all of them use."""

from __future__ import annotations

from pathlib import Path

from utils.course.pages import environment

from .answer_states import KIND_LABELS, MARKS, NO_ANSWER, kind, label

TEMPLATES = Path(__file__).with_name("templates")
#: Names beside a problem.
MOST_NAMES = 12


def render(template: str, **values: object) -> str:
    """Return a page: a template that is filled in with these values."""
    made = environment(TEMPLATES)
    made.globals |= {"label": label, "kind": kind, "NO_ANSWER": NO_ANSWER}
    made.globals |= {"MARKS": MARKS, "KIND_LABELS": KIND_LABELS, "MOST_NAMES": MOST_NAMES}
    return made.get_template(template).render(**values)
