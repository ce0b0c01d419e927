"""What was reported of a program of the set, and whether that is right."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .programs import Pair

#: The programs' name: a report names a line as ``program.py:12``.
NAME = "program.py"


@dataclass(frozen=True)
class Reading:
    """How to read a tool's report: a regular expression for each thing that a label asks for.

    Attributes:
        rank: the number of a rank.
        line: the number of a line of the program, as its group.
        mistake: words for what is wrong. ``None`` stands for the words of the label, which we have
            written for our backend, so that other tools are judged by words of theirs.
    """

    rank: str
    line: str
    mistake: str | None


BACKEND = Reading(r"\branks? \d", rf"{NAME}:(\d+)", None)
#: Gloo has a traceback, in which PyTorch writes ``[rank0]:``. Any message counts as the mistake,
#: except that time is up or a connection was lost, because neither says what is wrong.
GLOO = Reading(
    r"(?i)\branks? ?\d",
    rf'{NAME}", line (\d+)',
    r"mismatch|failed to pass monitoredBarrier|expected|nonnegative|not part of group",
)
#: What ``torchfrtrace`` prints of a call without a match, or with one that differs.
RECORDER = Reading(
    r"missing ranks: \{\d|Culprit rank \d|dumps from ranks \(\{\d",
    rf"{NAME}:(\d+)",
    r"missing ranks|Error type|Input/output mismatch",
)


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

    @property
    def is_as_labelled(self) -> bool:
        """What the label expects of our backend: `is_good`, or silence if it says `instead`."""
        if self.pair.instead and not self.right:
            return not self.reported
        return self.is_good


def judged(
    pair: Pair, right: bool, status: int, err: str, seconds: float, reading: Reading = BACKEND
) -> Trial:
    """Compare what a job has said with the label: exit status, stderr, and how long it took."""
    marked = marked_lines(pair.text(right))
    named = {int(line) for line in re.findall(reading.line, err)}
    words = pair.says if reading.mistake is None else (reading.mistake,)
    says = bool(words) and all(re.search(word, err) for word in words)
    ranks = re.search(reading.rank, err) is not None
    reported = bool(status or err.strip())
    return Trial(pair, right, reported, bool(named & marked) and ranks, says, seconds, err)


def marked_lines(text: str) -> set[int]:
    """Numbers of the lines that end in ``#!``."""
    return {k for k, line in enumerate(text.splitlines(), 1) if line.endswith("#!")}
