"""Programs on ranks: jobs, and what came of each program."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from utils.jobs import mpi_job
from utils.jobs.mpi_job import Python
from utils.jobs.start_plan import Plan

from . import ranks, text

TESTS = str(Path(__file__).resolve().parents[1])
_START = """
import sys
sys.path.insert(0, {tests!r})
{prelude}
from mpi_fuzz.ranks import main
main({file!r}, {tests!r})
"""


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        program: it.
        ranks: of each rank ``error`` (the class of its error, or nothing), ``text``, ``seconds``;
            empty where the job ended on the way.
        report: what the job printed on stderr, where it ended on the way.
    """

    program: dict
    ranks: list[dict]
    report: str = ""


class Stage:
    """Where the jobs of a number of ranks are run.

    Attributes:
        prelude: Python that each rank runs first: how a test breaks the backend on purpose.
        jobs: how many there have been.
    """

    def __init__(self, size: int):
        self.prelude = ""
        self._plan = Plan(size, launcher="mpiexec")
        self._python = Python(self._plan)
        self._folder = tempfile.TemporaryDirectory()
        self.jobs = 0

    def close(self) -> None:
        """Let the fork server go."""
        self._python.close()
        self._folder.cleanup()

    def run(self, programs: Sequence[dict]) -> list[Outcome]:
        """Run programs in one job: up to the first one that goes wrong, unless it was to."""
        self.jobs += 1
        file = Path(self._folder.name) / f"{self.jobs}.jsonl"
        file.write_text("".join(json.dumps(program) + "\n" for program in programs))
        code = _START.format(tests=TESTS, file=str(file), prelude=self.prelude)
        ended = self._job(["-c", code], ranks.DEADLINE + 30 + 2 * len(programs))
        return outcomes(programs, ended)

    def script(self, program: dict) -> mpi_job.Ended:
        """Run a program as the script that a person would run."""
        self.jobs += 1
        file = Path(self._folder.name) / str(self.jobs) / text.NAME
        file.parent.mkdir()
        file.write_text(text.python(program, TESTS))
        return self._job([str(file)], ranks.DEADLINE)

    def _job(self, words: list[str], deadline: float) -> mpi_job.Ended:
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment = os.environ | self._plan.environment | quiet
        return mpi_job.run(self._python.job(*words), environment, deadline)


@contextlib.contextmanager
def stage(size: int) -> Iterator[Stage]:
    """A :class:`Stage` that is closed."""
    with contextlib.closing(Stage(size)) as made:
        yield made


def outcomes(programs: Sequence[dict], ended: mpi_job.Ended) -> list[Outcome]:
    """What a job has said of its programs; of the one that it ended in, its last words."""
    found = []
    for line in ended.out.splitlines():
        if line.startswith("END "):
            told = json.loads(line[4:])
            found.append(Outcome(programs[len(found)], told["ranks"]))
    good = len(found) == len(programs) and not ended.status
    if not good and (not found or not _is_wrong(found[-1])) and len(found) < len(programs):
        report = f"status {ended.status} after {ended.seconds:.0f} s\n{ended.err[-6000:]}"
        found.append(Outcome(programs[len(found)], [], report))
    return found


def _is_wrong(outcome: Outcome) -> bool:
    return "fault" not in outcome.program and any(r["error"] for r in outcome.ranks)
