"""What messages call the things around the backend.

A script has none of its own; a tool that runs parts of programs on the ranks, such as a notebook,
puts its words here, on the ranks and where it explains what they said.

A tool assigns to these, and to :func:`place`.

Attributes:
    section: a part of a program that all ranks run together, see ``World.begin_section``.
    fresh_ranks: how a user gets ranks that can communicate again.
    fault_tolerant: how a user starts ranks that live on when one dies.
"""

from __future__ import annotations

section = "section"
fresh_ranks = "start the program again"
fault_tolerant = "mpiexec --with-ft ulfm"


def place(filename: str, line: int, function: str) -> str | None:
    """A line of the user's in words; ``None`` for one of a plain file."""
