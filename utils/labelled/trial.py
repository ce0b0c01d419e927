"""One program of the set on ranks: what was reported, and whether that is right."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from utils.jobs import run as jobs
from utils.jobs.forked import Python
from utils.jobs.plan import Plan, Request
from utils.labelled.join import BACKEND, STORE, TIMEOUT
from utils.labelled.programs import BY_LUCK, Pair

#: Seconds that a wait may last: what takes as long was found by nothing but the clock.
PATIENCE = 10.0
#: Seconds after which a job that does not end by itself is ended.
DEADLINE = 60.0
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


@contextlib.contextmanager
def stage(backend: str) -> Iterator[Stage]:
    """Where programs run on a backend."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Stage(backend, folder)) as made,
    ):
        yield made


class Stage:
    """Runs programs on a backend, in a folder of its own."""

    def __init__(self, backend: str, folder: str):
        self.backend, self.folder, self._count = backend, Path(folder), 0
        # Of each number of ranks. Held to the end: the fork server stays.
        self._pythons: dict[int, tuple[Plan, Python]] = {}

    def close(self) -> None:
        """Let the fork server go."""
        for _, python in self._pythons.values():
            python.close()

    def _python(self, n: int) -> tuple[Plan, Python]:
        if n not in self._pythons:
            plan = Plan.checked(Request(n, timeout=PATIENCE, launcher="mpiexec"))
            self._pythons[n] = plan, Python(plan)
        return self._pythons[n]

    def run(self, pair: Pair, right: bool) -> Trial:
        """Run one of the two programs.

        Raises:
            ValueError, RanksError: no ranks can be started here.
        """
        self._count += 1
        place = self.folder / str(self._count)
        place.mkdir()
        text = pair.text(right)
        (place / NAME).write_text(text)
        environment = {
            BACKEND: self.backend,
            TIMEOUT: str(PATIENCE),
            STORE: str(place / "store"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "TORCH_DISTRIBUTED_DEBUG": "DETAIL" if pair.kind in BY_LUCK else "OFF",
        }
        plan, python = self._python(pair.ranks)
        command = python.job(str(place / NAME))
        ended = jobs.run(command, os.environ | plan.environment | environment, DEADLINE)
        return judged(pair, right, ended)


def judged(pair: Pair, right: bool, ended: jobs.Ended) -> Trial:
    """Compare what a job has said with the label."""
    marked = marked_lines(pair.text(right))
    named = {int(line) for line in re.findall(rf"{NAME}:(\d+)", ended.err)}
    says = all(re.search(words, ended.err) for words in pair.says)
    ranks = re.search(r"\branks? \d", ended.err) is not None
    reported = bool(ended.status or ended.err.strip())
    return Trial(
        pair, right, reported, bool(named & marked) and ranks, says, ended.seconds, ended.err
    )


def marked_lines(text: str) -> set[int]:
    """Numbers of the lines that end in ``#!``."""
    return {k for k, line in enumerate(text.splitlines(), 1) if line.endswith("#!")}
