"""The page of questions: each leads to a section of a lab that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from myst_parser.mdit_to_docutils.base import default_slugify

from utils.course.notebook import LABS, ROOT, read

PAGE = ROOT / "docs" / "questions.md"
QUESTIONS = PAGE.read_text(encoding="utf-8").split("\n### ")[1:]
LINK = re.compile(r"\]\((?P<path>[^)#]+)(?:#(?P<anchor>[^)]+))?\)")


def anchors(path: Path) -> set[str]:
    """Return the anchors of a notebook's sections, as the site makes them."""
    texts = [cell.source for cell in read(path).cells if cell.cell_type == "markdown"]
    titles = re.findall(r"^##+ (.*)$", "\n".join(texts), re.MULTILINE)
    return {default_slugify(title.replace("`", "")) for title in titles}


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda text: text.partition("\n")[0])
def test_a_question_is_answered_and_leads_to_a_section_where_one_tries_it(question):
    _, answer, tried = question.split("\n\n")[:3]
    assert len(re.findall(r"[.!?)](?=\s|$)", answer)) >= 2, "two sentences"
    assert tried.startswith("Try it: ")
    links = list(LINK.finditer(tried))
    assert links
    for link in links:
        path = (PAGE.parent / link["path"]).resolve()
        assert path.exists(), link["path"]
        if path.parent == LABS:
            assert link["anchor"] in anchors(path), link["anchor"]


def test_every_question_of_the_list_is_there():
    assert len(QUESTIONS) == 55
