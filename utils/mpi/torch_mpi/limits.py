"""How long a wait may last, where one cell of a notebook has a limit of its own.

Attributes:
    cell: seconds, in place of every group's timeout; ``None`` outside of such a cell.
"""

cell: float | None = None
