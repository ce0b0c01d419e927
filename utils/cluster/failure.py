"""The one error that the notebook shows, made from everything that failed in a cell."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_mpi.lines import WIDTH, wrapped
from torch_mpi.protocol import diagnosis
from utils.cluster import lost_names
from utils.cluster.notebook_words import FRESH_RANKS, explained, open_task, shown_as, stopped_here
from utils.jobs import NeedsBackend, NeedsProcesses

if TYPE_CHECKING:
    from torch_mpi.protocol.status import Status
    from utils.cluster.questions import Reply

# How mpiexec (Open MPI 4 and 5) and srun say which rank died first; MPICH may name any dead rank.
_DEATHS = (
    re.compile(
        r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exited on\s+signal (?P<n>\d+)"
    ),
    re.compile(r"process rank (?P<rank>\d+) with PID \d+ on node \S+ exiting\s+improperly"),
    re.compile(r"Process name: \[\S+,(?P<rank>\d+)\]\s+Exit code:\s+(?P<code>\d+)"),
    re.compile(r"srun: error: \S+: task (?P<rank>\d+): Exited with exit code (?P<code>\d+)"),
    re.compile(r"srun: error: \S+: task (?P<rank>\d+): (?P<words>[A-Z][a-z]+)"),
)
# How Slurm says that it ended the ranks, unless a rank had died before.
_ENDED = re.compile(
    r"(?:JOB|STEP) \S+ ON \S+ CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+))?|Node (?P<node>failure)"
    r"|Force Terminated"
)
# The reason by the state of their job, which Slurm keeps even if its last output was lost.
_ENDED_JOB = {
    "TIMEOUT": "their job reached its time limit; start(…, time=minutes) asks for more time",
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
# The number of a signal, by the first word of Slurm's name for it.
_NUMBERS = {"Aborted": "6", "Bus": "7", "Killed": "9", "Segmentation": "11", "Terminated": "15"}
# A line of a cell other than the one that ran (`notebook_words.place_in_cell`).
_ELSEWHERE = re.compile(r"(?<!Cell )\bIn\[(\d+)\], line (\d+)")
# A line of the cell that ran.
_HERE = re.compile(r"\bcell line (\d+)\b")
_MISSING = re.compile(r"NameError: name '(\w+)' is not defined$")
# PyTorch's words if a process group of another backend finds no address.
_NO_ADDRESS = re.compile(r"ValueError: .*env:// rendezvous")
_CHOOSE_MPI = (
    'You chose another backend than "mpi", or none, and it needs the address of rank 0. Call '
    'dist.init_process_group("mpi").'
)


class CellFailed(RuntimeError):
    """A cell failed on the ranks. The message explains why, and no traceback of the kernel follows.

    Attributes:
        diagnosis: which rank waited for which (``torch_mpi.protocol.diagnosis``), or ``None``.
        records: the status that each rank reported, as in ``torch_mpi.protocol.status``.
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


#: The kinds of a rank's error after which the notebook leaves the cell out.
LEFT_OUT = {one.__name__: one for one in (NeedsProcesses, NeedsBackend)}


class CellLeftOut(CellFailed):
    """A cell needs something that these ranks lack. The notebook goes on.

    Attributes:
        name: the name that the cell lacks because an earlier cell was left out; "" if none.
        needs: what it needs, such as "ranks that are processes".
    """

    def __init__(self, message: str, name: str = "", needs: str = NeedsProcesses.needs):
        super().__init__(message)
        self.needs = needs
        self.name = name


class RanksLostError(CellFailed):
    """A cell failed, and so will all later cells, because ranks are dead, stuck or out of step."""


def ended_by_slurm(job_state: str) -> str:
    """Return a sentence on why Slurm ended the ranks; "" if their job's state names no reason."""
    how = _ENDED_JOB.get(job_state)
    return f"Slurm ended the ranks: {how}." if how else ""


@dataclass
class Outcome:
    """The outcome of a cell on the ranks."""

    n: int  # ranks
    errors: dict[int, Exception]  # ipyparallel's, by rank
    # What the ranks that could be asked had written on the board.
    statuses: dict[int, Status] = field(default_factory=dict)
    busy: dict[int, str] = field(default_factory=dict)  # ranks that still run, and where they are
    interrupted: bool = False  # the user stopped the cell
    output: str = ""  # what mpiexec printed
    over: bool = False  # mpiexec has ended, and every rank with it
    fresh: bool = True  # the ranks met again, and their process groups work
    job_state: str = ""  # state of the ranks' own Slurm job, in Slurm's words
    survivors: list[int] = field(default_factory=list)  # ranks that are alive after others died
    cell: str = ""  # the source of the cell
    cells: Mapping[int, str] = field(default_factory=dict)  # the source of each cell, by number
    lost: set[str] = field(default_factory=set)  # names that a restart has taken from the ranks
    left_out: Callable[[str], bool] = lambda name: False  # whether a cell left out makes the name

    def add(self, reply: Reply) -> None:
        """Add the reply of a rank that was asked after the cell."""
        if reply.status == "ok":
            self.statuses |= {status["rank"]: status for status in reply.value["statuses"]}
        self.fresh &= reply.status == "ok" and reply.value["fresh"]

    def renumber(self, numbers: dict[int, int]) -> None:
        """Use new numbers for the ranks, as the surviving ranks do themselves."""
        self.errors = {numbers[rank]: error for rank, error in self.errors.items()}
        self.busy = {numbers[rank]: place for rank, place in self.busy.items()}
        self.survivors = [numbers[rank] for rank in self.survivors]

    def dead(self) -> list[int]:
        """Return the ranks whose process is gone."""
        return [rank for rank, error in sorted(self.errors.items()) if _is_death(error)]

    def explain(self) -> CellFailed:
        """Return the error to show: a RanksLostError if only fresh ranks help."""
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
            text += (
                f"\n{diagnosis.names(self.survivors)} survived. The next %%px cell runs there, and "
                "must call torch_mpi.survivors.shrink() before it communicates."
            )
        text += f"\nThe notebook's own variables are kept. {FRESH_RANKS}"
        records: list[Status] = [
            {"rank": rank, "state": "dead", "kind": "died", "error": how, "at": 0.0}
            for rank in dead
        ]
        return RanksLostError(text, None, records)

    def _deaths(self, dead: list[int]) -> tuple[str, str]:
        """Return how ranks died, in a few words and as a sentence."""
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
        text = (
            f"{diagnosis.names(dead)} died (killed, os._exit, a crash inside C, or out of memory)."
        )
        if len(dead) > 1 and not self.survivors:
            text = f"one of {text} MPI then ended the other ranks."
        return "its process is gone", text

    def _ended_with(self, first: str) -> str:
        """Return a sentence about the ranks that MPI ended because this rank died; "" if none."""
        others = [rank for rank in range(self.n) if rank != int(first)]
        all_ended = self.over or len(self.dead()) > 1
        if not others or self.survivors or not all_ended:
            return ""
        return f" MPI then ended {diagnosis.names(others)}."

    def _of_interrupt(self) -> CellFailed:
        lines = [diagnosis.line(status) for _, status in sorted(self.statuses.items())]
        lines += [f"rank {rank} still runs: {place}" for rank, place in sorted(self.busy.items())]
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
        if kind in LEFT_OUT:
            words = f"{text}{'' if text.endswith(('.', ')')) else '.'}"
            return CellLeftOut(words, needs=LEFT_OUT[kind].needs)
        missing = _MISSING.match(summaries[first])
        if missing and self.left_out(missing[1]):
            return CellLeftOut("", missing[1])
        lines = [_traceback(self.errors[first]), *self._where(first, summaries)]
        if missing:
            lines.append(self._about_missing(missing[1]))
        if _NO_ADDRESS.match(summaries[first]):
            lines.append(_CHOOSE_MPI)
        return self._error("\n".join(lines))

    def _of_open_task(self, task: tuple[str, str], said: str) -> CellFailed:
        """Return the error that shows one amber line, and advice if the ranks are lost."""
        error = self._error(said)
        lost = str(error).removeprefix(said).strip()
        return shown_as(error, [*stopped_here(task, self.cell), *wrapped(lost)])

    def _about_missing(self, name: str) -> str:
        if name in self.lost:
            return lost_names.hint(name)
        return f"Run the cell that makes `{name}` first, or run it again if it failed."

    def _where(self, first: int, summaries: dict[int, str]) -> list[str]:
        """Return a line with the ranks that have the first error, and a line per other error."""
        same = [rank for rank, summary in summaries.items() if summary == summaries[first]]
        others = [self._in_a_line(rank, summaries[rank]) for rank in summaries if rank not in same]
        if self.n == 1:
            return others
        here = f"The {'same ' * (len(same) > 1)}error occurred on {diagnosis.names(same)}."
        return [here, *others]

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
        """Return the error with this text, and with advice if only fresh ranks help."""
        kind: type[CellFailed] = RanksLostError
        text = _with_lines_of(self.cell, _with_sources(text, self.cells))
        if self.busy:
            ranks = diagnosis.names(self.busy)
            text += f"\n{ranks} could not be stopped. {FRESH_RANKS}"
        elif not self.fresh:
            text += f"\nThe ranks could not resynchronize. {FRESH_RANKS}"
        else:
            kind = CellFailed
        return kind(text, explanation, records or list(self.statuses.values()))


def _with_sources(report: str, cells: Mapping[int, str]) -> str:
    """Return the report with the code of each line of another cell, below its first mention."""
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


def _with_lines_of(cell: str, report: str) -> str:
    """Return the report with each line of the cell that it names, and the lines around it.

    The report may be so long that the cell above it has left the page. The lines come after the
    sentence, which may be wrapped.
    """
    source = dict(enumerate(cell.splitlines(), 1))
    lines: list[str] = []
    excerpt: list[str] = []
    shown: set[int] = set()
    for line in report.splitlines():
        if excerpt and not _goes_on(lines[-1], line):
            lines += excerpt
            excerpt = []
        lines.append(line)
        for place in _HERE.finditer(line):
            number = int(place[1])
            if number in source and number not in shown and source[number].strip() not in report:
                shown.add(number)
                around = [n for n in (number - 1, number, number + 1) if source.get(n, "").strip()]
                excerpt += [f"    {'→' if n == number else ' '} {n:3}  {source[n]}" for n in around]
    return "\n".join([*lines, *excerpt])


def _goes_on(line: str, after: str) -> bool:
    """Return whether the second line belongs to the first one, which was wrapped."""
    word = after.split(maxsplit=1)[0] if after.split() else ""
    return bool(word) and after[:1] == " " and len(line) + 1 + len(word) > WIDTH


def _why_slurm_ended(output: str) -> str:
    """Return why Slurm ended the ranks, from its last output; "" if it gives no reason."""
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
    """Return whether the error says that an engine died, directly or as a rank's error."""
    import ipyparallel as ipp  # here, because the kernel imports this module before it has ranks

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
    """Return the rank's traceback, as IPython wrote it on the rank."""
    text = getattr(error, "traceback", None)
    return str(text).rstrip() if text else _summary(error)
