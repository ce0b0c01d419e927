"""Texts of the labs that quote a number of the stored run."""

from __future__ import annotations

import re

import pytest

from utils.course.notebook import SOLUTIONS, notebooks, read

pytestmark = pytest.mark.quick

#: How a text says that it speaks of the stored run. Other sentences hold on any machine.
OUR_RUN = re.compile(r"\b(our (run|sweep|computer)|stored run)\b", re.IGNORECASE)
NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*")
#: The quoted number may be rounded so much.
ROUNDED = 0.05


def quoted(text: str) -> list[tuple[str, float]]:
    """Return each number of a sentence about the stored run, with the sentence."""
    sentences = re.split(r"(?<=[.!?])\s", " ".join(text.split()))
    return [
        (sentence, float(number.replace(",", "")))
        for sentence in sentences
        if OUR_RUN.search(sentence)
        for number in re.findall(r"(\d+(?:[.,]\d+)*) (?:%|ms|s|µs|MB|GB)(?![\w/])", sentence)
    ]


def stored(nb) -> set[float]:
    """Return the numbers in a notebook's stored outputs, and in the words of its pictures."""
    texts = []
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            texts += [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
            texts += [str(about.get("alt", "")) for about in output.get("metadata", {}).values()]
    numbers = [number.replace(",", "") for text in texts for number in NUMBER.findall(text)]
    return {float(number) for number in numbers if number.count(".") <= 1}


@pytest.mark.parametrize("path", notebooks(SOLUTIONS), ids=lambda path: path.stem)
def test_a_number_that_a_text_quotes_from_our_run_is_in_the_stored_outputs(path):
    """Otherwise the output above a sentence contradicts it, as lab 05's speedup once did."""
    nb = read(path)
    there = stored(nb)
    there |= {100 * number for number in there}  # a share that the text gives in percent
    missing = [
        f"{cell.id}: {number:g} in {sentence!r}"
        for cell in nb.cells
        if cell.cell_type == "markdown"
        for sentence, number in quoted(cell.source)
        if not any(abs(number - other) <= ROUNDED * number for other in there)
    ]
    assert not missing
