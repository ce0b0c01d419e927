"""How long a wait may last, where a part of a program has a limit of its own.

Attributes:
    present: seconds, in place of every group's timeout; ``None`` outside of such a part.
"""

present: float | None = None
