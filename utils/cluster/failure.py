"""From what went wrong on the ranks in one cell to the one error that the notebook shows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_mpi.lines import wrapped
from torch_mpi.protocol import diagnosis
from utils.cluster import lost_names
from utils.cluster.notebook_words import explained, open_task, shown_as, stopped_here

if TYPE_CHECKING:
    from torch_mpi.protocol.status import Status
    from utils.cluster.questions import Reply

# How mpiexec (Open MPI 4 and 5) and srun say which rank died first. MPICH's names any of them.
_DEATHS = (
    re.compile(
        r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on\s+signal (?P<n>\d+)"
    ),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exiting\s+improperly"),
    re.compile(r"Process name: \[\S+,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    re.compile(r"srun: error: \S+: task (?P<rank>\d+): Exited with exit code (?P<code>\d+)"),
    re.compile(r"srun: error: \S+: task (?P<rank>\d+): (?P<words>[A-Z][a-z]+)"),
)
# How Slurm says that it ended the ranks, unless one of them had died before.
_ENDED = re.compile(
    r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+))?|Node (?P<node>failure)"
    r"|Force Terminated"
)
# The same by the state of their job, which Slurm knows also where its last words were lost.
_ENDED_JOB = {
    "TIMEOUT": "the time of their job is over; start(…, time=minutes) asks for more",
    "NODE_FAIL": "a node failed",
    "CANCELLED": "their job was cancelled, by scancel or by an administrator",
}
_SIGNALS = {
    "6": "signal 6, abort",
    "7": "signal 7, bus error",
    "9": "signal 9, killed: out of memory?",
    "11": "signal 11, segmentation fault",
    "15": "signal 15, terminated",
}
# Of signals, by the first of Slurm's words for them.
_NUMBERS = {"Aborted": "6", "Bus": "7", "Killed": "9", "Segmentation": "11", "Terminated": "15"}
# A line of another cell than the one that ran (`notebook_words.place_in_cell`).
_ELSEWHERE = re.compile(r"(?<!Cell )\bIn\[(\d+)\], line (\d+)")
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined$")


class CellFailed(RuntimeError):
    """A cell failed on the ranks. The message is the explanation; there is no traceback of ours.

    Attributes:
        diagnosis: who waited for whom (``torch_mpi.protocol.diagnosis``), or ``None``.
        records: what each rank said of itself: a list of dicts, see ``torch_mpi.protocol.status``.
    """

    def __init__(
        self,
        message: str,
        explanation: diagnosis.Diagnosis | None = None,
        records: list[Status] | None = None,
    ):
        super().__init__(message)
        self.diagnosis = explanation
        self.records = records or []

    def _render_traceback_(self) -> list[str]:
        return wrapped(str(self))


class RanksLostError(CellFailed):
    """A cell failed, and so will all that follow: ranks are dead, or stuck, or can't meet again."""


def ended_by_slurm(job_state: str) -> str:
    """Return a sentence on why Slurm ended the ranks; "" if their job's state names no reason."""
    how = _ENDED_JOB.get(job_state)
    return f"Slurm ended the ranks: {how}." if how else ""


@dataclass
class Outcome:
    """The outcome of a cell on the ranks."""

    n: int  # ranks
    errors: dict[int, Exception]  # ipyparallel's, by rank
    # What those ranks wrote on the board that could be asked.
    statuses: dict[int, Status] = field(default_factory=dict)
    busy: dict[int, str] = field(default_factory=dict)  # ranks that did not end, and where they are
    interrupted: bool = False  # the user stopped the cell
    output: str = ""  # of mpiexec
    over: bool = False  # mpiexec has ended, and every rank with it
    fresh: bool = True  # the ranks met again, and their process groups work
    job_state: str = ""  # of the ranks' own Slurm job, as Slurm says it
    survivors: list[int] = field(default_factory=list)  # ranks that live on without the dead
    cell: str = ""  # its source
    cells: Mapping[int, str] = field(default_factory=dict)  # the source of each cell, by number
    lost: set[str] = field(default_factory=set)  # names that a restart has taken from the ranks

    def add(self, reply: Reply) -> None:
        """Take in what a rank says that was asked after the cell."""
        if reply.status == "ok":
            self.statuses |= {status["rank"]: status for status in reply.value["statuses"]}
        self.fresh &= reply.status == "ok" and reply.value["fresh"]

    def renumber(self, numbers: dict[int, int]) -> None:
        """Call the ranks by other numbers, as they do themselves."""
        self.errors = {numbers[rank]: error for rank, error in self.errors.items()}
        self.busy = {numbers[rank]: place for rank, place in self.busy.items()}
        self.survivors = [numbers[rank] for rank in self.survivors]

    def dead(self) -> list[int]:
        """Return the ranks whose process is gone."""
        return [rank for rank, error in sorted(self.errors.items()) if _is_death(error)]

    def explain(self) -> CellFailed:
        """Return the one error: a RanksLostError if only fresh ranks help."""
        if self.dead():
            return self._of_death()
        if self.interrupted:
            return self._of_interrupt()
        cause = diagnosis.first_cause(self.statuses.values())
        if cause is not None and cause["kind"] not in ("raised", "interrupted"):
            return self._of_communication()
        return self._of_error(cause)

    def _of_death(self) -> RanksLostError:
        dead = self.dead()
        how, text = self._deaths(dead)
        if self.survivors:
            verb = "lives" if len(self.survivors) == 1 else "live"
            text += (
                f"\n{diagnosis.names(self.survivors)} {verb} on, and the next %%px cell runs there."
                " Before they communicate, all of them call torch_mpi.survivors.shrink()."
            )
        text += "\nThe notebook's own variables are kept. Fresh ranks: ranks.restart()"
        records: list[Status] = [
            {"rank": rank, "state": "dead", "kind": "died", "error": how, "at": 0.0}
            for rank in dead
        ]
        return RanksLostError(text, None, records)

    def _deaths(self, dead: list[int]) -> tuple[str, str]:
        """Return how ranks died: in short, and as a sentence."""
        matches = (pattern.search(self.output) for pattern in _DEATHS)
        first = next(filter(None, matches), None)
        reason = _ENDED_JOB.get(self.job_state, "")
        if not reason and first is None:
            reason = _why_slurm_ended(self.output)
        if reason:
            return reason, f"Slurm ended the ranks: {reason}."
        if first is not None:
            how = _how(**first.groupdict())
            return how, f"rank {first['rank']} died ({how})." + self._ended_with(first["rank"])
        text = f"{diagnosis.names(dead)} died (killed, os._exit, a crash inside C, out of memory)."
        if len(dead) > 1 and not self.survivors:
            text = f"one of {text} MPI ended the others with it."
        return "its process is gone", text

    def _ended_with(self, first: str) -> str:
        """Return a sentence on the ranks that MPI ended because this one died, if it did."""
        others = [rank for rank in range(self.n) if rank != int(first)]
        all_ended = self.over or len(self.dead()) > 1
        if not others or self.survivors or not all_ended:
            return ""
        return f" MPI ended {diagnosis.names(others)} with it."

    def _of_interrupt(self) -> CellFailed:
        lines = [diagnosis.line(status) for _, status in sorted(self.statuses.items())]
        lines += [f"rank {rank} goes on: {place}" for rank, place in sorted(self.busy.items())]
        return self._error("\n  ".join(["The ranks were interrupted.", *lines]))

    def _of_communication(self) -> CellFailed:
        statuses = dict(self.statuses)
        for rank, place in self.busy.items():
            statuses[rank] = {"rank": rank, "state": "running", "where": place}
        records = [status for _, status in sorted(statuses.items())]
        explanation = diagnosis.diagnose(records)
        return self._error(str(explanation), explanation, records)

    def _of_error(self, cause: Status | None) -> CellFailed:
        first = cause["rank"] if cause and cause["rank"] in self.errors else min(self.errors)
        summaries = {rank: _summary(error) for rank, error in sorted(self.errors.items())}
        kind, _, text = summaries[first].partition(": ")
        if task := open_task(kind, text):
            return self._of_open_task(task, explained(kind, text) or "")
        lines = [_traceback(self.errors[first]), *self._where(first, summaries)]
        if missing := _MISSING.match(summaries[first]):
            lines.append(self._about_missing(missing[1]))
        return self._error("\n".join(lines))

    def _of_open_task(self, task: tuple[str, str], said: str) -> CellFailed:
        """Return the error that shows one amber line, and what to do if the ranks are lost."""
        error = self._error(said)
        lost = str(error).removeprefix(said).strip()
        return shown_as(error, [*stopped_here(task, self.cell), *wrapped(lost)])

    def _about_missing(self, name: str) -> str:
        if name in self.lost:
            return lost_names.hint(name)
        return f"If a cell above makes `{name}`, it has failed or was not run."

    def _where(self, first: int, summaries: dict[int, str]) -> list[str]:
        """Return lines on which ranks have the first one's error, and on the other errors."""
        same = [rank for rank, summary in summaries.items() if summary == summaries[first]]
        others = [self._in_a_line(rank, summaries[rank]) for rank in summaries if rank not in same]
        if self.n == 1:
            return others
        whose = f"The same on {diagnosis.names(same)}." if len(same) > 1 else f"On rank {first}."
        return [whose, *others]

    def _in_a_line(self, rank: int, summary: str) -> str:
        status = self.statuses.get(rank, {})
        if status.get("kind") == "followed":
            where = f" at {status['where']}" if status.get("where") else ""
            call = f" waiting in {status['call']}" if status.get("call") else ""
            return f"rank {rank} stopped{call}{where}."
        return f"rank {rank}: {summary}"

    def _error(
        self,
        text: str,
        explanation: diagnosis.Diagnosis | None = None,
        records: list[Status] | None = None,
    ) -> CellFailed:
        """Return the error with this text, and with what to do now if only fresh ranks help."""
        kind: type[CellFailed] = RanksLostError
        text = _with_sources(text, self.cells)
        if self.busy:
            ranks = diagnosis.names(self.busy)
            text += f"\n{ranks} could not be stopped. Fresh ranks: ranks.restart()"
        elif not self.fresh:
            text += "\nThe ranks could not get together again. Fresh ranks: ranks.restart()"
        else:
            kind = CellFailed
        return kind(text, explanation, records or list(self.statuses.values()))


def _with_sources(report: str, cells: Mapping[int, str]) -> str:
    """Return a report that shows each line of another cell, below where it is named first."""
    lines: list[str] = []
    for line in report.splitlines():
        lines.append(line)
        indent = line[: len(line) - len(line.lstrip())]
        for place in _ELSEWHERE.finditer(line):
            source = dict(enumerate(cells.get(int(place[1]), "").splitlines(), 1))
            code = source.get(int(place[2]), "").strip()
            shown = f"{place[0]}: {code}"
            if code and code not in line and not any(shown in earlier for earlier in lines):
                lines.append(f"{indent}    {shown}")
    return "\n".join(lines)


def _why_slurm_ended(output: str) -> str:
    """Return why Slurm ended the ranks, by its last words; "" if it says nothing."""
    words = _ENDED.search(output)
    if words is None:
        return ""
    why = words["why"] or ""
    if "TIME LIMIT" in why:
        return _ENDED_JOB["TIMEOUT"]
    if words["node"] or "NODE FAIL" in why:
        return _ENDED_JOB["NODE_FAIL"]
    return _ENDED_JOB["CANCELLED"]


def _how(rank: str, n: str = "", code: str = "", words: str = "") -> str:
    n = _NUMBERS.get(words, n)
    if n:
        return _SIGNALS.get(n, f"signal {n}")
    return f"its process ended with status {code}" if code else "its process ended"


def _is_death(error: Exception) -> bool:
    """Return whether it is the controller's word that an engine died, maybe as a rank's error."""
    import ipyparallel as ipp  # here, as the kernel imports this module before it has ranks

    remote = isinstance(error, ipp.error.RemoteError) and error.ename == "EngineError"
    return remote or isinstance(error, ipp.error.EngineError)


def _summary(error: Exception) -> str:
    """Return the error's class and the first line of its text."""
    import ipyparallel as ipp

    if isinstance(error, ipp.error.RemoteError):
        first = (str(error.evalue).splitlines() or [""])[0]
        return f"{error.ename}: {first}".rstrip(": ")
    return f"{type(error).__name__}: {error}"


def _traceback(error: Exception) -> str:
    """Return the rank's own traceback, as IPython wrote it there."""
    text = getattr(error, "traceback", None)
    return str(text).rstrip() if text else _summary(error)
