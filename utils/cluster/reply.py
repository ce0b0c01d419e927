"""What the kernel and one rank tell each other: of a cell, and in answer to a question."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from utils.cluster.open_tasks import open_task

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
        rank: the rank.
        status: "ok"; "error" (the function raised, or the rank died); "silent" (no answer in time).
            A rank that was silent and could be interrupted has `error` and `line` of where it was.
        value: the function's result.
        error: class and text of the error, such as "ZeroDivisionError: division by zero".
        line: the innermost line of a cell on the way to the error: "cell line 3 in ring()".
        stdout: what was printed meanwhile.
        balance: how many more messages the rank has sent than received, since the ranks last met.
        unreceived: for each message that the rank sent and no rank received, the message, its
            receiver, and its line. These messages are thrown away.
        forged: signs that the rank's own code did not print this reply; "" without any.
        kind: the name of the error's class.
        open: number and title of the task whose stub raised the error.
        missing: the name that a NameError is about.
        lost: whether the rank is dead or cannot communicate again, so that only fresh ranks help.
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
    open: tuple[str, str] | None = None
    missing: str = ""
    lost: bool = False


def about(error: BaseException, text: str) -> dict[str, Any]:
    """Return what a reply says of an error besides its text, as JSON values.

    Args:
        error: what a rank raised.
        text: its message; a student's class may have none that can be shown.
    """
    kind = type(error).__name__
    missing = error.name if isinstance(error, NameError) else None
    return {"kind": kind, "open": open_task(kind, text), "missing": missing or ""}
