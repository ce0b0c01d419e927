"""Settings for a tool, such as a notebook, that runs parts of programs on the ranks.

The tool assigns to these names, and to :func:`place`, so that messages use its words. It does so on
the ranks, and in the process that explains their errors. A script keeps the values below.

Attributes:
    section: the tool's word for a part of a program, see ``World.begin_section``.
    fresh_ranks: how a user gets ranks that can communicate again.
    fault_tolerant: how a user starts ranks that survive the death of a rank.
    time_limit: seconds that a wait may last in the current part of the program. The limit replaces
        every group's timeout; ``None`` means that this part has no limit.
    seals_sends: whether each ``isend`` is watched for changes of its tensor, see ``group/seals``.
"""

from __future__ import annotations

section = "section"
fresh_ranks = "start the program again"
fault_tolerant = "mpiexec --with-ft ulfm"
time_limit: float | None = None
seals_sends = False


def place(filename: str, line: int, function: str) -> str | None:
    """Return the tool's name for a line of the user's; ``None`` for a line of a plain file."""
