"""The reference of what notebooks import: one page for each public module."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

#: What cells import, and what an author of a lab needs. The rest is for who reads the code.
MODULES = (
    *(
        "utils.cluster",
        "utils.data",
        "utils.models",
        "utils.timeline",
        "utils.labs.lab06.chunk_trace",
        "utils.labs.lab06.chunk_steps",
    ),
    *(
        "utils.figures",
        "utils.figures.predict",
        "utils.mpi.benchmark.alpha_beta",
        "utils.labs.lab05.laws",
    ),
    *(
        "utils.labs.lab05.forecast",
        "utils.labs.lab05.runs",
        "utils.labs.shared.slurm_script",
        "utils.labs.shared.schedules",
    ),
    *(
        "utils.labs.lab11.pipeline",
        "utils.memory",
        "utils.labs.lab11.layers",
        "utils.labs.lab11.memory_limit",
        "utils.labs.lab11.mixes",
    ),
    *(
        "utils.labs.lab13.faults",
        "utils.labs.shared.five_metrics",
        "utils.labs.lab14.capstone",
        "utils.jobs.program",
    ),
    *("torch_mpi.errors", "torch_mpi.survivors"),
)
#: Not imported to read docstrings: 200 MB, and seconds.
PRETENDED = ("torch", "torchvision", "mpi4py")


def api_page(module: str) -> str:
    """The page of a module, in reStructuredText."""
    return f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n   :members:\n"


#: A line of a docstring that says what a name stands for.
NAMES = re.compile(r"(?P<names>[a-z_]\w*(?:, [a-z_]\w*)*): (?P<meaning>\S.*)")


def setup(app: Sphinx) -> None:
    """Have docstrings read as this course writes them."""
    app.connect("autodoc-process-docstring", in_sphinxs_words, priority=400)  # before napoleon


def in_sphinxs_words(app, what: str, name: str, thing: object, options, lines: list[str]) -> None:
    """Change a docstring's lines, in place, to reStructuredText that says the same.

    A paragraph of lines ``timeout: seconds …`` becomes a list of definitions, and an indented
    paragraph is code.
    """
    blocks = "\n".join(lines).split("\n\n")
    before = ""
    for k, block in enumerate(blocks):
        rows = block.split("\n")
        if NAMES.match(rows[0]) and all(NAMES.match(row) or row[:1] in (" ", "") for row in rows):
            blocks[k] = "\n".join(_definition(row) for row in rows)
        elif rows[0].startswith("    ") and before and not before.startswith(" "):
            blocks[k] = f"::\n\n{block}"
        before = before if rows[0].startswith("    ") else rows[0]
    lines[:] = "\n\n".join(blocks).split("\n")


def _definition(row: str) -> str:
    found = NAMES.match(row)
    if not found:
        return row
    names = ", ".join(f"``{name}``" for name in found["names"].split(", "))
    return f"{names}\n    {found['meaning']}"
