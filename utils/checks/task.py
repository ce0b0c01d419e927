"""The machinery of a check: ask every rank, collect every problem, end in one line.

A check runs in the kernel. The answers run on the ranks, called by functions of the same
checks module that :meth:`utils.cluster.Ranks.ask` runs there; JSON text is all that comes
back. So the student's code has no hold on the verdict. CONTRIBUTING.md builds a check.

What has to be right is a generator of steps, so a step that follows a failed one is never computed:
`Report.follow` takes them. The verbs `communication`, `value` and `facts` say what was
communicated, what came out, and which facts hold.

The student's code runs in the process of its rank, and may read there what the probe knows. So a
rank is told nothing that a right answer gets from the others: the seed of its own data only.
"""

from __future__ import annotations

import functools
import secrets
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from IPython import get_ipython

from utils.checks.clock import NotEnded
from utils.checks.verdict import STILL_OPEN, Problem, Verdict
from utils.cluster.notebook_words import show_errors, way_on
from utils.cluster.questions import Ranks, Reply

from . import comparison, score
from .comparison import TOLERANCE, Calls, Mistake, Rule, same
from .probe import definitions, digest

# Seconds an answer may take. Longer than the labs' communication timeout of 20 s, so that a
# deadlock is reported by the ranks that wait, with the line they wait at.
PATIENCE = 45.0
# The kind of error of a rank that waited for another one, which has failed.
STOPPED = "CommunicationStopped"

# What a judge raises at a reply that is not what its probe makes.
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
FORGED = (
    "The check's own code does not make such a reply: does your answer change something of the "
    "lab? Restart the ranks, and run your cells again"
)


class CheckFailed(AssertionError):
    """A check found problems. They are printed already: the notebook shows no traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


#: Looks at one thing, adds a problem of a rank (`None`: of all together) to the report if there is
#: one, and returns whether all is right.
Step = Callable[["Report", int | None], bool]


@dataclass
class Report:
    """What a check found.

    Attributes:
        seed: fresh for every run of the check, for what all ranks know of its inputs.
        found: text of each problem, its kind (see :class:`.verdict.Problem`), and the rank
            that has it; ``None`` for all together.
        open: number and title of a task whose stub was met.
        missing: names that ranks lack.
        kinds: names of the classes of the errors that ranks raised.
        doubt: how the records of the ranks contradict each other, in words.
    """

    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    found: list[tuple[str, str, int | None]] = field(default_factory=list)
    open: tuple[str, str] | None = None
    missing: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    doubt: str | None = None

    def seeds(self, n: int) -> list[int]:
        """Return fresh seeds, one for each of n ranks, that tell nothing of each other.

        Each rank is told its own, see :func:`to_each`: what another one leads to can only come
        from there.
        """
        return [secrets.randbelow(2**31) for _ in range(n)]

    @property
    def problems(self) -> list[Problem]:
        """Return the problems; what several ranks have in common is one problem."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for text, kind, rank in self.found:
            ranks.setdefault((text, kind), []).extend([] if rank is None else [rank])
        return [Problem(text, tuple(sorted(of)), kind) for (text, kind), of in ranks.items()]

    def problem(self, text: str, rank: int | None = None, kind: str = "mistake") -> None:
        """Add a problem, of one rank or of all together."""
        if (text, kind, rank) not in self.found:
            self.found.append((text, kind, rank))

    def behind_errors(self, explanations: Mapping[str, str]) -> str | None:
        """Return what is behind an error that ranks raised; `None` if no explanation fits.

        Args:
            explanations: by a part of the error's text; the first part that an error has counts.
        """
        errors = [text for text, kind, _ in self.found if kind == "error"]
        for part, explanation in explanations.items():
            if any(part in text for text in errors):
                return explanation
        return None

    def begin_with(self, hint: str) -> None:
        """Put a hint in front of the problems: a long report is cut at its end."""
        self.found.insert(0, (hint, "mistake", None))

    def expect(self, rank: int | None, what: str, result: Any, expected: Any) -> bool:
        """Compare a JSON value with the expected one; tensors are given as lists."""
        if same(result, expected):
            return True
        both = f"expected {comparison.short(expected)}, got {comparison.short(result)}"
        self.problem(f"{what}: {both}", rank, "value")
        return False

    def judge(
        self,
        rank: int | None,
        result: Any,
        expected: Any,
        mistakes: Iterable[Mistake] = (),
        *,
        what: str = "",
        form: str = "",
        tolerance: float = TOLERANCE,
    ) -> bool:
        """Compare, and say which mistake it is: see :func:`utils.checks.comparison.recognise`.

        ``what`` was computed, in words, where a task has several results.
        """
        wrong = comparison.recognise(result, expected, mistakes, form=form, tolerance=tolerance)
        if wrong:
            said, kind = wrong
            self.problem(f"{what}: {said}" if what else said, rank, kind)
        return wrong is None

    def communication(self, rank: int | None, calls: Calls, *rules: Rule) -> bool:
        """Return whether the calls keep all rules; the first broken rule becomes a problem."""
        problem = comparison.broken(calls, *rules)
        if problem:
            self.problem(problem, rank, "communication")
        return problem is None

    def facts(self, rank: int | None, wrong: Mapping[str, object], kind: str = "mistake") -> bool:
        """Return whether none of these is so; the first that is so becomes a problem.

        Args:
            rank: the rank that has the problem; `None` for all together.
            wrong: by the text that a student is told, whether it is so.
            kind: of the problem, see :class:`.verdict.Problem`.
        """
        problem = next((text for text, is_so in wrong.items() if is_so), None)
        if problem:
            self.problem(problem, rank, kind)
        return problem is None

    def follow(self, rank: int | None, steps: Iterable[Step]) -> bool:
        """Take steps until one fails; return whether none did."""
        return all(step(self, rank) for step in steps)

    def answers(
        self,
        ranks: Ranks,
        probe: Callable[..., Any],
        *,
        patience: float = PATIENCE,
        each: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[Reply]:
        """Run a probe on every rank; ``each`` has the arguments for one rank alone.

        Their records are compared: where they do not agree, and nothing else is wrong, the check
        ends with that.

        Returns:
            The replies of all ranks, in rank order; an empty list when one of them failed,
            which is then among the problems.
        """
        replies = ranks.ask(probe, timeout=patience, each=each, **kwargs)
        if stub := next((reply.open for reply in replies if reply.open), None):
            self.open = stub
            number, title = stub
            self.problem(f"Task {number} ({title}) is still open", kind="open")
            return []
        for reply in replies:
            self.missing |= {reply.missing} - {""}
            self.kinds |= {reply.kind} - {""}
            for message in reply.unreceived:
                self.problem(message, reply.rank, "unreceived")
        if failed := [reply for reply in replies if reply.status != "ok"]:
            self._add_errors(failed, patience)
            return []
        if self._is_forged(replies):
            return []
        self.doubt = self.doubt or comparison.disagreement({
            reply.rank: reply.value for reply in replies
        })
        return replies

    def _is_forged(self, replies: list[Reply]) -> bool:
        """Return whether a reply, of these or of earlier ones, shows that somebody forged it."""
        for reply in replies:
            if words := reply.forged or comparison.forgery(reply.rank, reply.value):
                self.problem(f"{words}. {FORGED}", reply.rank, "forged")
        return any(kind == "forged" for _, kind, _ in self.found)

    def judge_cases(
        self,
        ranks: Ranks,
        probe: Callable[..., Any],
        cases: Iterable[dict[str, Any]],
        judge: Callable[[dict[str, Any], Reply], Iterable[Step]],
    ) -> bool:
        """Ask a probe in one case after the other, until a case has a problem.

        Args:
            cases: arguments of the probe; of :meth:`answers`, `each` may be among them.
            judge: the steps for the answer of one rank in one case.

        Returns:
            Whether all cases are right.
        """
        before = len(self.found)
        for case in cases:
            for answer in self.answers(ranks, probe, **case):
                self.follow(answer.rank, judge(case, answer))
            if self.found:
                break
        return len(self.found) == before

    def _add_errors(self, failed: list[Reply], patience: float) -> None:
        """Add the errors of ranks, then which ranks stopped because of them."""
        failed = sorted(failed, key=lambda reply: reply.kind == STOPPED)
        is_caused = failed[0].kind != STOPPED
        for reply in failed:
            if is_caused and reply.kind == STOPPED:
                self.problem("stopped waiting, because of that", reply.rank, "error")
            else:
                self.problem(_first_line(reply, patience), reply.rank, _kind_of(reply))
        # After its first line an error of communication explains all ranks: shown once.
        explanations = [(reply.error or "").partition("\n")[2] for reply in failed]
        if any(explanations):
            self.problem(next(filter(None, explanations)), kind="error")


def _first_line(reply: Reply, patience: float) -> str:
    """Return what became of a rank that gave no value, and where."""
    words = (reply.error or f"no answer within {patience:.0f} s").partition("\n")[0]
    # A loop without an end was ended somewhere.
    has_place = reply.line and reply.kind != NotEnded.__name__
    return f"{words} (at {reply.line})" if has_place else words


def _kind_of(reply: Reply) -> str:
    """Return the kind of problem that a rank has which gave no value."""
    if reply.lost:
        return "lost"
    if reply.error is None:
        return "silent"
    return "interrupted" if reply.kind == KeyboardInterrupt.__name__ else "error"


# --- steps ---------------------------------------------------------------------------------------


def communication(calls: Calls, *rules: Rule) -> Step:
    """Return the step that these calls keep all rules; the first broken one is the problem."""
    return lambda report, rank: report.communication(rank, calls, *rules)


def value(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    what: str = "",
    form: str = "",
    tolerance: float = TOLERANCE,
) -> Step:
    """Return the step that a JSON value is the expected one; see `Report.judge`."""
    return lambda report, rank: report.judge(
        rank, result, expected, mistakes, what=what, form=form, tolerance=tolerance
    )


def facts(wrong: Mapping[str, object], kind: str = "mistake") -> Step:
    """Return the step that none of these is so, by the text that a student is told."""
    return lambda report, rank: report.facts(rank, wrong, kind)


class Wrong(NamedTuple):
    """A problem of a rank (`None`: of all together); `kind` as in `Report.problem`."""

    text: str
    rank: int | None
    kind: str = "mistake"


def none_of(problems: Iterable[Wrong]) -> Step:
    """Return the step that there are no such problems; all of them are told."""

    def step(report: Report, _: int | None) -> bool:
        listed = list(problems)
        for wrong in listed:
            report.problem(*wrong)
        return not listed

    return step


def each_of(*parts: Iterable[Step]) -> Step:
    """Return the step that takes all parts; each of them tells its own first problem."""
    return lambda report, rank: all([report.follow(rank, steps) for steps in parts])


def all_came(answers: Sequence[Reply]) -> bool:
    """Return whether all ranks answered, and no message is left over."""
    return bool(answers) and not any(answer.unreceived for answer in answers)


# --- tasks ---------------------------------------------------------------------------------------


def to_each(**of_ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the argument `each` of :meth:`Report.answers`, from lists with one entry per rank."""
    rows = zip(*of_ranks.values(), strict=True)
    return [dict(zip(of_ranks, row, strict=True)) for row in rows]


class Check(Protocol):
    """A check of one task: call it with the ranks."""

    number: str
    title: str
    points: int

    def __call__(self, ranks: Ranks, **kwargs: Any) -> None:
        """Judge the answer on these ranks, and show the verdict."""


def task(number: str, title: str, points: int) -> Callable[[Callable[..., None]], Check]:
    """Make a check of a function ``(ranks, report)`` that adds problems to the report.

    The check is called with the ranks, and shows a :class:`utils.checks.verdict.Verdict`:
    ``✓ Task 1.4 · all_reduce · 3 points``, or the problems; of an answer that was not begun, that
    it is still open.

    Raises:
        CheckFailed: there were problems.
    """

    def decorate(judge: Callable[..., None]) -> Check:
        room = score.room_of(judge.__module__)
        score.enter(room, number, points)

        @functools.wraps(judge)
        def check(ranks: Ranks, **kwargs: Any) -> None:
            report = Report()
            try:
                judge(ranks, report, **kwargs)
            except UNREADABLE as error:
                report.problem(
                    f"the check cannot read what the ranks replied ({type(error).__name__}: "
                    f"{error}): does your answer return what the task asks for?",
                    kind="error",
                )
            if report.doubt and not report.found:
                report.problem(f"{report.doubt}. {FORGED}", kind="forged")
            if report.found and not report.open:
                _compare_with_kernel(ranks, report)
            problems = tuple(report.problems)
            still = _still_open(number, *report.open) if report.open else ""
            score.note(room, number, not problems)
            verdict = Verdict(number, title, points, not problems, still, problems)
            verdict.show(score.in_words(room), stops=True)
            if problems:
                shell = get_ipython()
                if shell is not None:  # the kernel ends the cell, and those that wait, in silence
                    show_errors(shell, CheckFailed, lambda *_: None)
                raise CheckFailed(
                    f"Task {number} · {title}: {len(problems)} problem(s), listed above"
                )

        made = cast(Check, check)
        vars(made).update(number=number, title=title, points=points)
        return made

    return decorate


def _still_open(number: str, met: str, title: str) -> str:
    if met == number:
        return STILL_OPEN
    said = f"needs Task {met} ({title}), which is still open."
    return f"{said} To go on without it: {way_on(met)}" if way_on(met) else said


def _compare_with_kernel(ranks: Ranks, report: Report) -> None:
    """Say so where the kernel has what the ranks lack, or have in another version.

    A cell without ``%%px`` as its first line runs in the kernel only.
    """
    shell = get_ipython()
    functions = {} if shell is None else _functions(shell.user_ns)
    if not functions:
        return
    replies = ranks.ask(definitions, names=sorted(functions), timeout=PATIENCE)
    if any(reply.status != "ok" for reply in replies):
        return
    for name, function in functions.items():
        there = {reply.value.get(name) for reply in replies}
        if name in report.missing and there == {None}:
            report.problem(
                f"{name} is defined in the notebook itself, but not on the ranks: does its cell "
                "begin with %%px?"
            )
        elif None not in there and digest(function) not in there:
            report.problem(
                f"the notebook itself has another {name} than the ranks, whose one is checked. "
                "Did a cell that defines it lack %%px?"
            )


def _functions(user_ns: dict[str, Any]) -> dict[str, types.FunctionType]:
    """Return the functions that cells of the kernel have defined."""
    return {
        name: value
        for name, value in user_ns.items()
        if isinstance(value, types.FunctionType)
        and value.__module__ == "__main__"
        and not name.startswith("_")
    }
