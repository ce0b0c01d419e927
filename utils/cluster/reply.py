"""What the kernel and one rank tell each other: of a cell, and in answer to a question."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

# The name under which a rank tells its balance.
BALANCE = "balance"
# How the cell begins that asks a rank; what follows are arguments, which may be its secret.
QUESTION = "__import__('utils.cluster.on_rank', fromlist=['answer']).answer("
# The first line of a cell, in place of its `%%px`: lines count as the student sees them, and a
# traceback says "Cell In[12]" where the notebook shows [12].
FIRST_LINE = "# %%px of [{}]\n"
NUMBER = re.compile(r"# %%px of \[(\d+)\]")


@dataclass(frozen=True)
class Reply:
    """What one rank answered.

    Attributes:
        rank: the rank's number at the start.
        status: "ok"; "error" (the function raised, or the rank died); "silent" (no answer in time).
        value: the function's result.
        error: such as "ZeroDivisionError: division by zero". A rank that was silent and could be
            interrupted says here and in `line` where it was.
        line: such as "cell line 3 in ring()", the innermost line of a cell on the way to the error.
        stdout: what was printed meanwhile.
        balance: how many more messages the rank has sent than received, since the ranks last met.
        unreceived: of each message that the rank has sent and no rank has received: what, to whom,
            and where. These messages are thrown away.
        forged: why the reply is not the one that the rank's own code has printed, if there are
            signs.
        kind: the name of the error's class.
    """

    rank: int
    status: str
    value: Any = None
    error: str | None = None
    line: str | None = None
    stdout: str = ""
    balance: int = 0
    unreceived: tuple[str, ...] = ()
    forged: str = ""
    kind: str = ""
