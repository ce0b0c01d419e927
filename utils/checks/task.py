"""The machinery of a check: it asks every rank, collects every problem, and shows one verdict.

A check runs in the kernel. The answers run on the ranks, where :meth:`utils.cluster.Ranks.ask` runs
the lab's probes, which call them. Only JSON text comes back, so the student's code
can't change the verdict. CONTRIBUTING.md builds a check as an example.

A generator of steps says what has to be right, so that no step after a failed step is computed:
`Report.follow` runs them. The steps `communication`, `value` and `facts` check what was
communicated, what was returned, and which facts hold.

The student's code runs in its rank's process, and could read there everything that the probe knows.
So a rank gets only the seed of its data, and nothing that a right answer gets from other ranks.
"""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, cast

from IPython import get_ipython

from utils.checks.clock import NotEnded
from utils.checks.verdict import STILL_OPEN, Problem, Verdict
from utils.cluster.notebook_words import WITHOUT_IT, show_errors, way_on
from utils.cluster.questions import NO_GROUP, AskStopped, Ranks, Reply

from . import cells, comparison, progress, score
from .comparison import TOLERANCE, Calls, Mistake, Rule
from .failures import Failed
from .quantities import off_by

# Seconds an answer may take. Longer than the labs' communication timeout of 20 s, so that a
# deadlock is reported by the ranks that wait, with the line they wait at.
PATIENCE = 45.0
# The error of a rank that was waiting when another rank failed.
STOPPED = "CommunicationStopped"

# The errors of a judge that gets a reply in another form than its probe makes.
UNREADABLE = (AttributeError, IndexError, KeyError, TypeError, ValueError)
# If one of these is set, nbval or a command runs the cells: only an error tells it of a problem.
UNATTENDED = ("IPP_NONINTERACTIVE", "PYTEST_VERSION")
FORGED = (
    "The check's own code never replies like this. Does your answer change a function of the lab? "
    "Restart the ranks, and run your cells again"
)


class CheckFailed(AssertionError):
    """A check found problems, which it has shown: a person at the notebook sees no error."""

    def _render_traceback_(self) -> list[str]:
        return [f"CheckFailed: {self}"]


#: A step checks one thing and returns whether it is right. If not, it adds a problem to the report:
#: a problem of a rank, or for `None`, a problem of all ranks together.
Step = Callable[["Report", int | None], bool]


@dataclass
class Report:
    """The problems that a check found.

    Attributes:
        seed: fresh for every run of the check; for inputs that all ranks may know.
        found: text of each problem, its kind (see :class:`.verdict.Problem`), and the rank
            that has it; ``None`` for all ranks together.
        open: number and title of a task whose stub was met.
        missing: names that ranks lack.
        failures: the errors that ranks raised.
        records: the ranks' lists with records that the kernel has confirmed.
        note: words in front of the score, such as "try 4". Like the score, no stored output has it.
    """

    seed: int = field(default_factory=lambda: secrets.randbelow(2**31))
    found: list[tuple[str, str, int | None]] = field(default_factory=list)
    open: tuple[str, str] | None = None
    missing: set[str] = field(default_factory=set)
    failures: set[Failed] = field(default_factory=set)
    records: list[tuple[int, Any]] = field(default_factory=list)
    note: str = ""

    def seeds(self, n: int) -> list[int]:
        """Return independent fresh seeds, one for each of n ranks.

        Each rank gets only its seed, see :func:`to_each`. So the data of another rank's seed can
        only come from this rank.
        """
        return [secrets.randbelow(2**31) for _ in range(n)]

    @property
    def kinds(self) -> set[str]:
        """Return the names of the classes of the errors that ranks raised."""
        return {failure.kind for failure in self.failures}

    @property
    def problems(self) -> list[Problem]:
        """Return the problems; equal problems of several ranks are one problem."""
        ranks: dict[tuple[str, str], list[int]] = {}
        for text, kind, rank in self.found:
            ranks.setdefault((text, kind), []).extend([] if rank is None else [rank])
        return [Problem(text, tuple(sorted(of)), kind) for (text, kind), of in ranks.items()]

    def problem(self, text: str, rank: int | None = None, kind: str = "mistake") -> None:
        """Add a problem of one rank, or of all ranks together."""
        if (text, kind, rank) not in self.found:
            self.found.append((text, kind, rank))

    def behind_errors(self, explanations: Mapping[str | Failed, str]) -> str | None:
        """Return the reason for an error that ranks raised; `None` if no explanation fits.

        Args:
            explanations: explanation by the kind of error, or by a part of the text of an error of
                Python or PyTorch. The first that fits counts.
        """
        errors = [text for text, kind, _ in self.found if kind == "error"]
        for cause, explanation in explanations.items():
            if isinstance(cause, Failed):
                fits = any(failure.is_a(cause) for failure in self.failures)
            else:
                fits = any(cause in text for text in errors)
            if fits:
                return explanation
        return None

    def begin_with(self, hint: str) -> None:
        """Put a hint in front of the problems, because a long report is cut at its end."""
        self.found.insert(0, (hint, "mistake", None))

    def follow(self, rank: int | None, steps: Iterable[Step]) -> bool:
        """Run steps until one fails; return whether none failed."""
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

        If the kernel carries the ranks' messages, a reply with a record of another call is refused.

        Returns:
            The replies of all ranks, in rank order; an empty list if one of them failed, which
            then becomes a problem.
        """
        by_user = False
        try:
            replies = ranks.ask(probe, timeout=patience, each=each, **kwargs)
        except AskStopped as stopped:
            replies, by_user = stopped.replies, True
        if stub := next((reply.open for reply in replies if reply.open), None):
            self.open = stub
            number, title = stub
            self.problem(f"Task {number} ({title}) is still open", kind="open")
            return []
        self._note_failures(replies)
        if failed := [reply for reply in replies if reply.status != "ok"]:
            self._add_errors(failed, by_user)
            return []
        if by_user:
            self.problem("You stopped the check", kind="interrupted")
            return []
        self.records += [(reply.rank, each) for reply in replies for each in reply.records]
        if self._is_forged(replies, getattr(probe, "beside", ()), getattr(probe, "part", ())):
            return []
        return replies

    def _note_failures(self, replies: list[Reply]) -> None:
        """Note which errors ranks raised, and the messages that nobody received."""
        for reply in replies:
            self.missing |= {reply.missing} - {""}
            if reply.kind:
                self.failures.add(Failed(reply.kind, reply.call or ""))
            for message in reply.unreceived:
                self.problem(message, reply.rank, "unreceived")

    def _is_forged(
        self, replies: list[Reply], beside: Collection[str], part: Collection[str]
    ) -> bool:
        """Return whether a reply, now or earlier, shows that somebody forged it.

        Args:
            beside: operations that the probe calls beside those that it records. Everything is
                allowed if no rank has a record.
            part: operations that are allowed on ranks without records, too.
        """
        looks = any(reply.records for reply in replies)
        for reply in replies:
            allowed = {*beside, *(() if reply.records else part)}
            if looks and (unseen := sorted({*reply.unseen} - allowed)):
                seen = f"the rank called {', '.join(unseen)} where the check did not look"
                self.problem(f"{seen}. {FORGED}", reply.rank, "forged")
            if reply.forged:
                self.problem(f"{reply.forged}. {FORGED}", reply.rank, "forged")
        return any(kind == "forged" for _, kind, _ in self.found)

    def refuse_unread_records(self) -> None:
        """Add a problem if a reply had records where no judge has looked for them."""
        for rank, records in self.records:
            if not records.was_read:
                self.problem(f"a reply has records that nobody asked for. {FORGED}", rank, "forged")

    def judge_cases(
        self,
        ranks: Ranks,
        probe: Callable[..., Any],
        cases: Iterable[dict[str, Any]],
        judge: Callable[[dict[str, Any], Reply], Iterable[Step]],
    ) -> bool:
        """Ask a probe in one case after the other, until a case has a problem.

        Args:
            cases: arguments of the probe; the argument `each` of :meth:`answers` may be among them.
            judge: returns the steps for the answer of one rank in one case.

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

    def _add_errors(self, failed: list[Reply], by_user: bool) -> None:
        """Add the ranks' errors, and then the ranks that stopped because of these errors."""
        failed = sorted(failed, key=lambda reply: reply.kind == STOPPED)
        is_caused = failed[0].kind != STOPPED
        cause = next((reply.because for reply in failed if reply.because), "")
        if cause and not is_caused:
            # A rank may leave the call before it hears of its mismatch, but the others tell it.
            self.problem(cause.rstrip("."), kind="error")
            is_caused = True
        # The later lines of a communication error explain all ranks that wait, so they come once.
        explanations = [(reply.error or "").partition("\n")[2] for reply in failed]
        explained = next(filter(None, explanations), "")
        for reply in failed:
            if is_caused and reply.kind == STOPPED:
                self.problem("stopped waiting, because another rank failed", reply.rank, "error")
            elif not (explained and reply.call):
                text = _why_silent(reply, failed, by_user) or _first_line(reply)
                self.problem(text, reply.rank, _kind_of(reply))
        if explained:
            self.problem(explained, kind="error")


def _why_silent(reply: Reply, failed: list[Reply], by_user: bool) -> str:
    """Return who stopped a rank, when, and at which line; "" for a rank that was not stopped."""
    if reply.status != "silent":
        return ""
    if not reply.line:
        return "had not begun when the ranks were stopped" if reply.kind else ""
    who = "you" if by_user else "the check"
    words = f"{who} stopped it after {reply.waited:.0f} s, at {reply.line}"
    is_first = by_user or all(other.status == "silent" for other in failed)
    return words if is_first else f"{words}, because another rank had failed"


def _first_line(reply: Reply) -> str:
    """Return what happened to a rank that gave no value, and at which line."""
    words = (reply.error or "the call did not return").partition("\n")[0]
    # An endless loop was ended at an arbitrary line, which would not help.
    has_place = reply.line and reply.kind != NotEnded.__name__
    return f"{words} (at {reply.line})" if has_place else words


def _kind_of(reply: Reply) -> str:
    """Return the kind of problem of a rank that gave no value."""
    if reply.lost:
        return "lost"
    return "interrupted" if reply.status == "silent" else "error"


# --- steps ---------------------------------------------------------------------------------------


def communication(calls: Calls, *rules: Rule) -> Step:
    """Return the step that these calls keep all rules; the first broken rule is the problem."""

    def step(report: Report, rank: int | None) -> bool:
        problem = comparison.broken(calls, *rules)
        if problem:
            report.problem(problem, rank, "communication")
        return problem is None

    return step


def value(
    result: Any,
    expected: Any,
    mistakes: Iterable[Mistake] = (),
    *,
    what: str = "",
    form: str = "",
    tolerance: float = TOLERANCE,
    quantities: Mapping[str, float] | None = None,
) -> Step:
    """Return the step that a JSON value is the expected value; a mistake is named.

    The text is the one of :func:`utils.checks.comparison.recognise`.

    Args:
        what: the name of the result, if a task has several results.
        quantities: the numbers that the task gives, by name. If no mistake is known, the text
            says which product of them the result is off by.
    """

    def step(report: Report, rank: int | None) -> bool:
        wrong = comparison.recognise(result, expected, mistakes, form=form, tolerance=tolerance)
        if wrong:
            text, kind = wrong
            if kind == "value" and (by := off_by(result, expected, quantities or {})):
                text = f"{text}. {by}"
            report.problem(f"{what}: {text}" if what else text, rank, kind)
        return wrong is None

    return step


def facts(wrong: Mapping[str, object], kind: str = "mistake") -> Step:
    """Return the step that none of these facts is true; the first true fact is the problem.

    Args:
        wrong: by the text that a student reads, whether it is true.
        kind: kind of the problem, see :class:`.verdict.Problem`.
    """

    def step(report: Report, rank: int | None) -> bool:
        problem = next((text for text, is_so in wrong.items() if is_so), None)
        if problem:
            report.problem(problem, rank, kind)
        return problem is None

    return step


class Wrong(NamedTuple):
    """A problem of a rank (`None`: of all ranks together); `kind` is as in `Report.problem`."""

    text: str
    rank: int | None
    kind: str = "mistake"


def none_of(problems: Iterable[Wrong]) -> Step:
    """Return the step that there are no such problems; the report gets all of them."""

    def step(report: Report, _: int | None) -> bool:
        listed = list(problems)
        for wrong in listed:
            report.problem(*wrong)
        return not listed

    return step


def each_of(*parts: Iterable[Step]) -> Step:
    """Return the step that follows all parts; each part adds its first problem."""
    return lambda report, rank: all([report.follow(rank, steps) for steps in parts])


def all_came(answers: Sequence[Reply]) -> bool:
    """Return whether all ranks answered, and no message is left over."""
    return bool(answers) and not any(answer.unreceived for answer in answers)


# --- tasks ---------------------------------------------------------------------------------------


def to_each(**of_ranks: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the argument `each` of :meth:`Report.answers` from lists with one entry per rank."""
    rows = zip(*of_ranks.values(), strict=True)
    return [dict(zip(of_ranks, row, strict=True)) for row in rows]


class Check(Protocol):
    """The check of one task, which you call with the ranks."""

    number: str
    title: str
    points: int

    def __call__(self, ranks: Ranks, **kwargs: Any) -> None:
        """Judge the answer on these ranks, and show the verdict."""


def task(
    number: str, title: str, points: int, *, after: str = ""
) -> Callable[[Callable[..., None]], Check]:
    """Make a check from a function ``(ranks, report)`` that adds problems to the report.

    Args:
        after: the task whose answer makes the ranks' process group, if the lab's own cells don't.

    You call the check with the ranks, and it shows a :class:`utils.checks.verdict.Verdict`:
    ``✓ Task 1.4 · all_reduce · 3 points``, or the problems, or that the task is still open.

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
                    f"The check can't read the ranks' replies ({type(error).__name__}: {error}). "
                    "Return a result of the form that the task asks for",
                    kind="error",
                )
            if not report.found:
                report.refuse_unread_records()
            if report.found and not report.open:
                _add_from_cells(ranks, report, after if after != number else None)
            problems = tuple(report.problems)
            still = _still_open(number, *report.open) if report.open else ""
            score.note(room, number, not problems)
            verdict = Verdict(number, title, points, not problems, still, problems)
            progress_made = "" if problems else progress.in_words(number)
            words = filter(None, [report.note, progress_made, score.in_words(room)])
            verdict.show(" · ".join(words))
            if problems:
                if (shell := get_ipython()) and not any(map(os.environ.get, UNATTENDED)):
                    show_errors(shell, CheckFailed, lambda *_: None)
                raise CheckFailed(f"Task {number} · {title}: {len(problems)} problem(s), see above")

        made = cast(Check, check)
        vars(made).update(number=number, title=title, points=points)
        return made

    return decorate


def _still_open(number: str, met: str, title: str) -> str:
    if met == number:
        return STILL_OPEN
    said = f"needs Task {met} ({title}), which is still open."
    return f"{said} {WITHOUT_IT} {way_on(met)}" if way_on(met) else said


def _add_from_cells(ranks: Ranks, report: Report, after: str | None) -> None:
    """Add the problems that come from cells; if the ranks never met, it is the only problem.

    Args:
        after: see :func:`task`; None for the task whose answer makes the process group.
    """
    if after is not None and NO_GROUP in report.kinds:
        report.found = [(cells.without_group(after), "mistake", None)]
        return
    for text in cells.forgotten_px(ranks, report.missing, PATIENCE):
        report.problem(text)
