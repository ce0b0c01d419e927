"""What the plugin beside nbval takes for the end of a run: kinds of errors, never their words."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from nbformat.v4 import new_code_cell, new_output

from utils.checks import task as tasks
from utils.checks.task import CheckFailed, Report
from utils.checks.verdict import MIME, Problem, Verdict
from utils.cluster.failure import CellFailed, Outcome, RanksLostError
from utils.cluster.questions import Reply
from utils.grading import plugin, results
from utils.jobs import DeadRankError

pytestmark = pytest.mark.quick


def item(*outputs: object, check: bool = False) -> SimpleNamespace:
    cell = new_code_cell("", metadata={"lab": {"check": True}} if check else {})
    return SimpleNamespace(cell=cell, test_outputs=list(outputs))


def an_error(name: str, text: str = "no"):
    return new_output("error", ename=name, evalue=text, traceback=[])


def a_verdict(problem: Problem):
    data = Verdict("1.1", "a", passed=False, problems=(problem,)).data()
    return new_output("display_data", data={MIME: data, "text/plain": "✗"})


def test_the_plugin_and_the_feedback_know_the_errors_by_their_names():
    assert {RanksLostError.__name__, DeadRankError.__name__} == plugin.LOST
    assert {CellFailed.__name__, RanksLostError.__name__} == results.OF_RANKS


def test_the_look_of_a_verdict_is_not_compared_so_an_older_reference_still_grades(monkeypatch):
    monkeypatch.setattr(plugin, "IPyNbCell", SimpleNamespace)
    parent = SimpleNamespace(kernel=SimpleNamespace(watched=True), given=1, skip_compare=("name",))
    option = SimpleNamespace(nbval_cell_timeout=1)
    compared = []
    for cell in (item(check=True), item(), item(check=True)):
        cell.parent, cell.config = parent, SimpleNamespace(option=option)
        plugin.pytest_runtest_call(cell)
        compared.append(parent.skip_compare)
    assert compared == [("name", "text/html"), ("name",), ("name", "text/html")]


def test_ranks_are_lost_if_the_kernel_says_so_but_not_if_an_answer_does():
    said = "give it ranks.restart()"
    lost = plugin._ranks_are_lost
    assert lost(item(an_error("RanksLostError")))
    assert lost(item(an_error("DeadRankError")))
    assert not lost(item(an_error("CellFailed", said)))
    assert lost(item(a_verdict(Problem("dead", (1,), "lost")), check=True))
    assert not lost(item(a_verdict(Problem(said, (1,), "error")), check=True))
    assert not lost(item(a_verdict(Problem("dead", (1,), "lost")))), "a student displays anything"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, CellFailed),
        ({"fresh": False}, RanksLostError),
        ({"busy": {1: "cell line 3"}}, RanksLostError),
        ({"interrupted": True}, CellFailed),
        ({"interrupted": True, "busy": {1: "cell line 3"}}, RanksLostError),
    ],
)
def test_the_error_of_a_cell_says_whether_later_cells_can_work(changes, kind):
    error = Outcome(2, {0: ValueError("no")}, **changes).explain()
    assert type(error) is kind
    assert ("Call ranks.restart() for fresh ranks." in str(error)) == (kind is RanksLostError)


def test_a_dead_rank_counts_as_lost():
    from utils.cluster.questions import dead

    assert dead(1).lost
    assert not Reply(1, "error", error="ValueError: no").lost


@pytest.mark.parametrize(
    ("reply", "kind", "status"),
    [
        (
            Reply(0, "error", error="ValueError: KeyboardInterrupt", kind="ValueError"),
            "error",
            "wrong",
        ),
        (
            Reply(0, "silent", error="KeyboardInterrupt: ", kind="KeyboardInterrupt"),
            "interrupted",
            "hung",
        ),
        (Reply(0, "error", error="the rank is dead", lost=True), "lost", "wrong"),
    ],
)
def test_grading_judges_by_the_kinds_of_errors_that_a_check_reports(reply, kind, status):
    report = Report()
    report._add_errors([reply], by_user=False)
    assert [one.kind for one in report.problems] == [kind]
    data = Verdict("1.1", "a", passed=False, problems=tuple(report.problems)).data()
    assert results.failure([{"verdicts": [data]}]) == status


# --- a red check under nbval ---------------------------------------------------------------------


@pytest.mark.parametrize("runs_it", ["", "IPP_NONINTERACTIVE", "PYTEST_VERSION"])
def test_under_nbval_a_red_check_fails_its_cell_and_a_person_sees_no_error(monkeypatch, runs_it):
    """nbval sees an error only if the kernel shows one, and has nothing else to compare."""
    silenced = []
    shell = SimpleNamespace(user_ns={}, set_custom_exc=lambda kinds, _: silenced.append(kinds))
    monkeypatch.setattr(tasks, "get_ipython", lambda: shell)
    for name in tasks.UNATTENDED:
        monkeypatch.delenv(name, raising=False)
    if runs_it:
        monkeypatch.setenv(runs_it, "1")

    @tasks.task("9.1", "a task", points=2)
    def check(_ranks, report: Report) -> None:
        report.problem("wrong")

    with pytest.raises(CheckFailed):
        check(None)
    assert bool(silenced) == (not runs_it)


def test_feedback_shows_what_a_check_said_and_not_that_its_cell_failed(reference):
    problem = Problem("the sum: expected 5, got 7", (0,))
    verdict = Verdict("1.3", "total", problems=(problem,), passed=False)
    failed = {"type": "error", "ename": "CheckFailed", "evalue": "Task 1.3 · total: 1 problem(s)"}
    record = {"cell": "total-check", "outcome": "failed", "verdicts": [verdict.data()]}
    record |= {"outputs": [{"type": "display_data", "text": str(verdict)}, failed]}
    assert results.words(record) == str(verdict)
    assert results.shown([record], reference) == []
    assert results.failure([record]) == "wrong"
