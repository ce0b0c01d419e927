"""Answers to lab 09, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "09_tensor_parallel.ipynb"
CELLS = {
    "9.1": "lab09-shard-answer",
    "9.2": "lab09-fg-answer",
    "9.3": "lab09-mlp-answer",
    "9.4": "lab09-attention-answer",
    "9.5": "lab09-traffic-answer",
    "9.6": "lab09-loss-answer",
    "9.7": "lab09-dtensor-answer",
    "9.8": "lab09-expert-answer",
}
BEFORE = "\n".join(
    source_of(NOTEBOOK, cell).replace("%%px\n", "")
    for cell in ("ranks-join", "expert-define")
)  # fmt: skip
