"""What a tool that runs parts of programs on the ranks, such as a notebook, sets in the backend.

A tool assigns to these names, and to :func:`place`: its words on the ranks and where it explains
what they said. A script has none of its own.

Attributes:
    section: a part of a program that all ranks run together, see ``World.begin_section``.
    fresh_ranks: how a user gets ranks that can communicate again.
    fault_tolerant: how a user starts ranks that live on when one dies.
    time_limit: seconds that a wait may last in the present part of the program, in place of every
        group's timeout; ``None`` outside of a part that has such a limit.
"""

from __future__ import annotations

section = "section"
fresh_ranks = "start the program again"
fault_tolerant = "mpiexec --with-ft ulfm"
time_limit: float | None = None


def place(filename: str, line: int, function: str) -> str | None:
    """Return a line of the user's in words; ``None`` for one of a plain file."""
