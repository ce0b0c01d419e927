"""The machinery of a check: ask every rank, collect every problem, end in one line.

A check runs in the kernel. The answers run on the ranks, called by functions of the same
checks module that :meth:`utils.cluster.Ranks.ask` runs there; JSON text is all that comes
back. So the student's code has no hold on the verdict.

    @task("1.4", "all_reduce", points=3)
    def sum_over_ranks(ranks, report):
        for answer in report.answers(ranks, __name__, "probe_sum", seed=report.seed):
            report.expect(answer.rank, "the sum", answer.value, expected)
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Seconds an answer may take. Longer than the labs' communication timeout of 20 s, so that a
# deadlock is reported by the ranks that wait, with the line they wait at.
PATIENCE = 45.0
MOST_LINES = 12


class CheckFailed(AssertionError):
    """A check found problems. They are printed already: the notebook shows no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


@dataclass
class Report:
    """What a check found.

    Attributes:
        seed: fresh for every run of the check, for its inputs.
        problems: texts, in the order in which they were found.
    """

    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    problems: list[str] = field(default_factory=list)

    def problem(self, text: str, rank: int | None = None) -> None:
        """Add a problem, of one rank or of all together."""
        self.problems.append(text if rank is None else f"rank {rank}: {text}")

    def expect(self, rank: int | None, what: str, got: Any, expected: Any) -> bool:
        """Compare a JSON value with the expected one; tensors are given as lists."""
        if same(got, expected):
            return True
        self.problem(f"{what}: expected {short(expected)}, got {short(got)}", rank)
        return False

    def answers(self, ranks, module: str, probe: str, *, patience=PATIENCE, **kwargs) -> list:
        """Run ``module:probe`` on every rank.

        Returns:
            The replies of all ranks, in rank order; an empty list when one of them failed,
            which is then among the problems.
        """
        replies = ranks.ask(f"{module}:{probe}", timeout=patience, **kwargs)
        explanation = ""
        for reply in replies:
            for message in reply.unreceived:
                self.problem(message, reply.rank)
            if reply.status != "ok":
                said = reply.error or f"no answer within {patience:.0f} s"
                # After its first line an error of communication explains all ranks: shown once.
                first, _, rest = said.partition("\n")
                explanation = explanation or rest
                at = f" (at {reply.line})" if reply.line else ""
                self.problem(f"{first}{at}", reply.rank)
        if explanation:
            self.problem(explanation)
        return replies if all(reply.status == "ok" for reply in replies) else []


def task(number: str, title: str, points: int) -> Callable:
    """Make a check of a function ``(ranks, report)`` that adds problems to the report.

    The check is called with the ranks. It prints ``✓ Task 1.4 · all_reduce · 3 points``, or the
    problems.

    Raises:
        CheckFailed: there were problems.
    """

    def decorate(judge: Callable) -> Callable:
        @functools.wraps(judge)
        def check(ranks, **kwargs) -> None:
            report = Report()
            judge(ranks, report, **kwargs)
            name = f"Task {number} · {title}"
            if not report.problems:
                print(f"✓ {name} · {points} point{'s' * (points != 1)}")
                return
            print(f"✗ {name}")
            for text in report.problems[:MOST_LINES]:
                print(f"  - {text}")
            if len(report.problems) > MOST_LINES:
                print(f"  … and {len(report.problems) - MOST_LINES} more")
            raise CheckFailed(f"{name}: {len(report.problems)} problem(s), listed above")

        check.number, check.title, check.points = number, title, points
        return check

    return decorate


def same(got: Any, expected: Any, tolerance: float = 1e-5) -> bool:
    """Equal, numbers to a relative tolerance, lists element by element."""
    if isinstance(expected, list | tuple):
        return (
            isinstance(got, list)
            and len(got) == len(expected)
            and all(same(g, e, tolerance) for g, e in zip(got, expected, strict=True))
        )
    if isinstance(expected, bool) or isinstance(got, bool) or expected is None:
        return got is expected
    if isinstance(expected, int | float) and isinstance(got, int | float):
        return abs(got - expected) <= tolerance * max(1.0, abs(expected))
    return got == expected


def short(value: Any, most: int = 160) -> str:
    """A value for a message: numbers rounded, long lists cut."""
    text = str(_rounded(value))
    return text if len(text) <= most else text[: most - 1] + "…"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list | tuple):
        return [_rounded(v) for v in value]
    return value


# -- on the ranks -----------------------------------------------------------------------------


def answer_named(user_ns: dict, name: str) -> Any:
    """What the student defined as ``name`` on this rank.

    Raises:
        NameError: nothing; says which cell to run.
    """
    if name not in user_ns:
        raise NameError(f"{name} is not defined on this rank: run the cell that defines it")
    return user_ns[name]


def recorded(function: Callable, *args: Any, **kwargs: Any) -> tuple[Any, list[dict]]:
    """Call a function; return its result and what it communicated, as JSON-able records."""
    from torch_mpi.record import log

    mark = log.mark()
    result = function(*args, **kwargs)
    return result, [as_dict(call) for call in log.since(mark)]


def as_dict(call) -> dict:
    """A :class:`~torch_mpi.record.Call`; ``peer`` and ``group`` are global ranks.

    ``sent`` and ``received`` are bytes by the definition of the operation, see
    :mod:`torch_mpi.record`; times are seconds of the rank's ``time.perf_counter``.
    """
    peer = call.peer
    return {
        "op": call.op,
        "group": list(call.group),
        "nbytes": call.nbytes,
        "peer": call.group[peer] if peer is not None and peer >= 0 else peer,
        "tag": call.tag,
        "blocking": call.blocking,
        "waited": call.waited,
        "any_source": call.any_source,
        "message": None if call.message is None else list(call.message),
        "sent": call.sent,
        "received": call.received,
        "start": call.start,
        "matched": call.matched,
        "end": call.end,
    }


def integers(seed: int, *shape: int, low: int = -50, high: int = 50) -> torch.Tensor:
    """Whole numbers as float32, so that sums are exact; the same for the same seed."""
    import torch  # the checks of a kernel that compare numbers only do without

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator).float()


# -- judging what was communicated ------------------------------------------------------------

POINT_TO_POINT = ("send", "recv")


def no_collectives(report: Report, rank: int, calls: list[dict]) -> None:
    """A problem when a collective was called where messages were asked for."""
    others = sorted({call["op"] for call in calls} - set(POINT_TO_POINT))
    if others:
        report.problem(f"uses {', '.join(others)}; this task is about send and recv only", rank)


def all_waited(report: Report, rank: int, calls: list[dict]) -> None:
    """A problem for every isend or irecv that nobody waited for."""
    for call in calls:
        if not call["waited"]:
            name = call["op"] if call["blocking"] else f"i{call['op']}"
            report.problem(
                f"nobody called wait() on the request of {name} (rank {call['peer']}): the tensor "
                f"may be read or overwritten before the message is complete",
                rank,
            )
