"""What was reported of a program of the set, and whether that is right."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .programs import Pair

#: The programs' name: a report names a line as ``program.py:12``.
NAME = "program.py"


@dataclass(frozen=True)
class Trial:
    """What came of a program.

    Attributes:
        pair, right: which one it was.
        reported: the job failed, or something was said on stderr.
        named_rank_and_line, named_class: of a report, whether it has what the label asks for.
        seconds: until the job had ended, with the start of the ranks.
        text: the report.
    """

    pair: Pair
    right: bool
    reported: bool
    named_rank_and_line: bool
    named_class: bool
    seconds: float
    text: str

    @property
    def is_good(self) -> bool:
        """Silence about a right program; of a wrong one rank, line and class."""
        if self.right:
            return not self.reported
        return self.reported and self.named_rank_and_line and self.named_class


def judged(pair: Pair, right: bool, status: int, err: str, seconds: float) -> Trial:
    """Compare what a job has said with the label: exit status, stderr, and how long it took."""
    marked = marked_lines(pair.text(right))
    named = {int(line) for line in re.findall(rf"{NAME}:(\d+)", err)}
    says = all(re.search(words, err) for words in pair.says)
    ranks = re.search(r"\branks? \d", err) is not None
    reported = bool(status or err.strip())
    return Trial(pair, right, reported, bool(named & marked) and ranks, says, seconds, err)


def marked_lines(text: str) -> set[int]:
    """Numbers of the lines that end in ``#!``."""
    return {k for k, line in enumerate(text.splitlines(), 1) if line.endswith("#!")}
