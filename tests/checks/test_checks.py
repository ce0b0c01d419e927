"""What checks are made of: words for a mistake, values of a rank, rules, clocks, the verdict."""

from __future__ import annotations

import datetime
import html
import importlib
import json
import re
import subprocess
import sys
import threading
import time
import timeit
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lab_tools import ROOT, verdict
from local_ranks import LocalRanks
from mpi4py import MPI

from torch_mpi.record import Call
from utils.checks import comparison, score
from utils.checks.clock import NotEnded, ends_within, moved_clocks
from utils.checks.comparison import Mistake, made, recognise, same
from utils.checks.failures import Failed
from utils.checks.probe import as_dict, definitions, fingerprint
from utils.checks.task import Report, communication, task, value
from utils.checks.verdict import MIME, MOST_LINES, Problem, Verdict, read
from utils.cluster.questions import NO_GROUP, Reply, about, plain
from utils.labs import lab00, lab01
from utils.labs.lab04 import buckets

pytestmark = pytest.mark.quick


# -- what comes back from a rank -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.tensor([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor(2.5, requires_grad=True), 2.5),
        (torch.ones(1, dtype=torch.bfloat16), [1.0]),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        (np.arange(3), [0, 1, 2]),
        (range(0), []),
        ((1, (2.0, None)), [1, [2.0, None]]),
        ({"a": {3, 1, 2}}, {"a": [1, 2, 3]}),
        ("text", "text"),
    ],
)
def test_a_result_of_any_usual_kind_reaches_the_check_as_numbers_and_lists(value, told):
    assert plain(value) == told
    assert json.loads(json.dumps(plain(value))) == told


class Chooses:
    """Would like to tell what a check is shown."""

    def tolist(self) -> list:
        return [1.0]

    def __index__(self) -> int:
        return 1


@pytest.mark.parametrize("value", [Chooses(), [Chooses()], {"a": Chooses()}])
def test_an_object_that_chooses_what_a_check_is_shown_is_no_number(value):
    with pytest.raises(TypeError, match=r"a Chooses. Use numbers"):
        plain(value)
    assert same(plain(value, other=lambda one: type(one).__name__), 1) is False


@pytest.mark.parametrize(
    "got", [float("nan"), [float("nan")], pytest.param(10**400, id="huge"), float("inf"), "nan"]
)
@pytest.mark.parametrize("expected", [0, 1.5, [1.5], float("inf"), float("nan"), True, None])
def test_nan_passes_nowhere_and_no_number_is_near_infinity(got, expected):
    assert same(got, expected) is (got == expected == float("inf"))
    assert same(3.0, float("inf")) is False


def test_a_function_that_was_not_called_is_told_so_with_the_name_it_was_given():
    with pytest.raises(
        TypeError, match=r"^rank is the function get_rank itself\. Call the function"
    ):
        plain({"rank": torch.distributed.get_rank})


def test_what_cannot_be_told_is_named_with_its_type_and_place():
    with pytest.raises(TypeError, match=r"^entry 1 of the result is an object. Use numbers"):
        plain([1, object()])
    assert plain([1, object()], other=lambda value: type(value).__name__) == [1, "object"]


# -- mistakes --------------------------------------------------------------------------------------


def test_all_mistakes_that_give_the_result_are_told_with_expected_and_got():
    mistakes = [
        Mistake(lambda got: got is None, "nothing"),
        Mistake([2.0, 3.0], "this is the sum: divide it"),
        Mistake([2.0, 3.0], "you doubled it"),
        Mistake([2.0, 4.0], "you squared it"),
    ]
    said, _ = recognise([2.0, 3.0], [1.0, 1.5], mistakes)
    both = "this is the sum: divide it. Or: you doubled it"
    assert said == f"{both}. Expected [1.0, 1.5], got [2.0, 3.0]"


def test_a_right_result_is_no_mistake_even_if_a_mistake_would_give_it_too():
    assert recognise(3, 3, [Mistake(3, "wrong")]) is None


def test_who_returns_nothing_is_told_what_to_return():
    said, _ = recognise(None, [1], form="a list")
    assert said == "You returned None. Return a list"


def test_of_long_lists_the_first_difference_is_shown():
    said, _ = recognise(list(range(40)), [*range(39), 0])
    assert said == "entry 39: expected 0, got 39"


def test_of_long_texts_that_begin_alike_the_place_where_they_differ_is_shown():
    expected = [["F", k] for k in range(60)]
    got = [*expected[:55], ["B", 1], *expected[56:]]
    said, _ = recognise({"a": got}, {"a": expected})
    assert "['F', 55]" in said
    assert "['B', 1]" in said


@pytest.mark.parametrize("wrong", [float("nan"), None, "1", True, [1.0], float("inf")])
def test_no_other_kind_of_value_counts_as_the_number_one(wrong):
    assert not same(wrong, 1.0)


# -- what was communicated -------------------------------------------------------------------------


def call(op: str, **more) -> dict:
    """A recorded call."""
    made = Call(op, (0, 1), nbytes=12, waited=True, start=1.0, matched=1.0, end=2.0, sequence=1)
    return as_dict(made) | more


@pytest.mark.parametrize(
    ("rule", "good", "bad", "said"),
    [
        (comparison.only("send", "recv"), [call("recv")], [call("broadcast")],
         "You call broadcast. Use only send and recv here"),
        (comparison.made("all_reduce", 1), [call("all_reduce")], [],
         "Expected 1 call of all_reduce, but your code made none"),
        (comparison.made("all_reduce", (2, 3)), [call("all_reduce")] * 3, [call("all_reduce")],
         "Expected 2 or 3 calls of all_reduce, but your code made 1"),
        (comparison.inside([0, 1]), [call("all_reduce")], [call("all_reduce", group=[0, 1, 2])],
         "Pass group=group"),
        (comparison.messages(("send", 1)), [call("send", peer=1)], [call("recv", peer=1)],
         "Expected send to rank 1, but your code made recv from rank 1"),
        (comparison.blocking(False), [call("send", blocking=False)], [call("recv")],
         "You call dist.recv, but this task asks for dist.irecv"),
        (comparison.waited, [call("send")], [call("all_reduce", waited=False)],
         "You never call wait() on all_reduce(async_op=True)"),
    ],
)  # fmt: skip
def test_a_rule_says_what_was_asked_and_what_was_made(rule, good, bad, said):
    assert comparison.broken(good, rule) is None
    assert said in comparison.broken(bad, rule)


# -- clocks ----------------------------------------------------------------------------------------


class Read(list):
    """Records that a judge has read."""

    was_read = True


class TamperedRanks:
    """Ranks whose replies to a probe are changed before the check reads them."""

    n = 2

    def __init__(self, value=None, **changes):
        self.value, self.changes = value, changes

    def ask(self, target, **_):
        if target is definitions:
            known = {"functions": {}}
            return [Reply(rank, "ok", known) for rank in range(2)]
        return [Reply(rank, "ok", self.value, **self.changes) for rank in range(2)]


def _probe(user_ns: dict, *, rank: int) -> int:
    """What a check asks with; the ranks of these tests answer by themselves."""
    return rank


@pytest.mark.parametrize(
    ("ranks", "kind", "said"),
    [
        (TamperedRanks([1]), "", "✓"),
        (TamperedRanks([]), "error", "The check can't read the ranks' replies"),
        (TamperedRanks([1], forged="a record is of a call 9"), "forged", "a call 9"),
        (
            TamperedRanks([1], records=[Read()], unseen=("send",)),
            "forged",
            "called send where",
        ),
    ],
)
def test_a_reply_that_was_tampered_with_passes_nothing_and_says_why(ranks, kind, said):
    reports = []

    @task("9.9", "a check", points=1)
    def check(ranks, report):
        reports.append(report)
        for answer in report.answers(ranks, _probe):
            assert answer.value[0]

    assert said in verdict(check, ranks)[1]
    assert [kind] * bool(kind) == list({problem.kind for problem in reports[0].problems})


def test_a_fingerprint_is_of_bits_dtype_and_shape():
    one = torch.tensor([1.0, 2.0])
    assert fingerprint(one) == fingerprint(torch.tensor([[1.0, 0.0], [2.0, 0.0]])[:, 0])
    others = [one.double(), one.view(2, 1), one + 1, one.view(torch.int32), torch.tensor(1.0), None]
    assert len({fingerprint(other) for other in [one, *others]}) == 1 + len(others)


def in_a_thread(body) -> None:
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


def test_every_clock_that_a_student_may_use_is_moved_on_and_right_again_afterwards():
    space = {"clock": time.perf_counter, "now": datetime.datetime, "time": time, "MPI": MPI}
    exec("def timed(read=clock):\n    return read()", space)
    with moved_clocks(space) as clock:
        names = ("perf_counter", "monotonic", "time")
        reads = [
            *(getattr(time, name) for name in names),
            *(lambda name=name: getattr(time, f"{name}_ns")() / 1e9 for name in names),
            lambda: datetime.datetime.now().timestamp(),
            lambda: space["now"].now().timestamp(),
            lambda: timeit.default_timer(),
            lambda: MPI.Wtime(),
            lambda: space["clock"](),
            lambda: space["timed"](),
        ]
        before = [read() for read in reads]
        clock.advance(1000.0)
        passed = [read() - start for read, start in zip(reads, before, strict=True)]
    assert all(1000 <= seconds < 1060 for seconds in passed), passed
    assert space["clock"] is time.perf_counter
    assert space["timed"].__defaults__ == (time.perf_counter,)
    assert datetime.datetime is space["now"]


@pytest.mark.parametrize("start", [lambda body: body(), in_a_thread])
def test_an_endless_loop_ends_in_any_thread_and_what_is_in_time_goes_on(start):
    messages = []

    def body() -> None:
        try:
            with ends_within(0.05, "Return a plan"):
                while True:
                    pass
        except NotEnded as error:
            messages.append(f"{type(error).__name__}: {error}")
        with ends_within(60.0, "Return a plan"):
            messages.append("in time")

    start(body)
    assert messages == ["NotEnded: your code did not end within 0.05 s. Return a plan", "in time"]


# -- the verdict -----------------------------------------------------------------------------------


def judged(find) -> str:
    """What a check prints that finds this."""

    @task("9.1", "a task", points=2)
    def check(ranks, report: Report) -> None:
        find(report, ranks)

    return verdict(check, SimpleNamespace(n=4, ask=lambda *_, **__: []))[1]


def test_what_several_ranks_have_in_common_is_one_line():
    def find(report, _ranks):
        for rank in range(4):
            report.problem("the same", rank)
        for rank in (0, 2):
            report.problem("twice", rank)
        report.problem("once", 3)
        report.problem("together")

    lines = ["ranks 0–3: the same", "ranks 0 and 2: twice", "rank 3: once", "together"]
    assert judged(find).splitlines() == ["✗ Task 9.1 · a task", *(f"  - {line}" for line in lines)]


def test_many_problems_are_cut():
    printed = judged(lambda report, _: [report.problem(f"{k}") for k in range(10)])
    assert len(printed.splitlines()) == MOST_LINES + 2
    assert printed.endswith("  … and 4 more\n")


def test_an_open_task_is_one_line_and_one_that_needs_it_says_which():
    def stub(number: str):
        error = f"NotImplementedError: Task {number}: average"
        answers = [Reply(rank, "error", error=error, open=(number, "average")) for rank in range(4)]
        ranks = SimpleNamespace(ask=lambda *_, **__: answers)
        return lambda report, _: report.answers(ranks, _probe)

    assert judged(stub("9.1")) == "✗ Task 9.1 · a task · still open\n"
    needs = (
        "needs Task 8.2 (average), which is still open. "
        'To continue without it, run: lab08.use_model(ranks, "8.2")'
    )
    assert judged(stub("8.2")) == f"✗ Task 9.1 · a task · {needs}\n"


@pytest.mark.parametrize(
    ("on_the_ranks", "cell", "said"),
    [
        ({}, 0, "You defined mean in the notebook itself, but not on the ranks"),
        ({"mean": lambda x: x - 1}, 4, "The notebook itself has a newer mean than the ranks"),
        ({"mean": lambda x: x - 1}, 6, ""),
        ({"mean": lambda x: x + 1}, 4, ""),
    ],
    ids=["lacking", "older", "newer", "the same"],
)
def test_a_forgotten_px_is_told_and_not_after_it_was_mended(monkeypatch, on_the_ranks, cell, said):
    def mean(x):
        return x + 1

    mean.__module__ = "__main__"
    shell = SimpleNamespace(
        user_ns={"mean": mean, "other": 3},
        set_custom_exc=lambda *_: None,
        compile=SimpleNamespace(_filename_map={__file__: 5}),
    )
    monkeypatch.setattr("utils.checks.task.get_ipython", lambda: shell)
    monkeypatch.setattr("utils.checks.cells.get_ipython", lambda: shell)
    monkeypatch.setattr("utils.checks.probe.number_of", lambda _: cell)

    def find(report, _ranks):
        report.missing = set() if on_the_ranks else {"mean"}
        report.problem("mean is not defined on this rank" if report.missing else "wrong", 0)

    def ask(target, *, names, timeout):
        known = definitions(on_the_ranks, rank=0, names=names)
        return [Reply(rank, "ok", known) for rank in (0, 1)]

    @task("9.1", "a task", points=2)
    def check(ranks, report: Report) -> None:
        find(report, ranks)

    printed = verdict(check, SimpleNamespace(n=2, ask=ask))[1]
    assert said in printed
    assert len(printed.splitlines()) == 2 + bool(said)


@pytest.mark.parametrize(
    ("number", "said"),
    [("1.5", "Task 1.1 comes first, because its cell lets the ranks communicate"), ("1.1", "no")],
)
def test_a_check_on_ranks_that_never_met_names_the_task_that_comes_first(number, said):
    """Otherwise a student who skipped the first task reads about an attribute of None."""

    def ask(_target, *, names, timeout):
        return [Reply(rank, "ok", {"functions": {}}) for rank in (0, 1)]

    @task(number, "a task", points=2, after="1.1")
    def check(_ranks, report: Report) -> None:
        report.failures.add(Failed(NO_GROUP))
        report.problem("no", 0, "error")

    printed = verdict(check, SimpleNamespace(n=2, ask=ask))[1]
    assert said in printed.splitlines()[1]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (lambda: dist.send(torch.ones(1), 1), NO_GROUP),
        (lambda: [].pop(), "IndexError"),
        (lambda: unknown, "NameError"),  # noqa: F821
    ],
)
def test_only_an_error_for_want_of_a_group_is_explained_by_it(answer, kind):
    """Otherwise a mistake of another kind hides behind a cell that the task doesn't need."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        answer()
    assert about(raised.value, str(raised.value))["kind"] == kind


def test_a_right_answer_is_one_line_with_its_points():
    assert judged(lambda *_: None) == "✓ Task 9.1 · a task · 2 points\n"


@pytest.fixture
def shown(monkeypatch) -> list[dict]:
    """What a notebook is given to show, updates included."""
    shown = []

    def display(data: dict, *, raw: bool, display_id: bool) -> SimpleNamespace:
        shown.append(data)
        return SimpleNamespace(update=lambda data, raw: shown.append(data))

    monkeypatch.delenv("IPP_NONINTERACTIVE", raising=False)
    monkeypatch.setattr("utils.checks.verdict.get_ipython", lambda: object())
    monkeypatch.setattr("utils.checks.verdict.display", display)
    return shown


def test_a_verdict_is_data_beside_its_words(shown):
    def find(report, _ranks):
        report.follow(1, [value(3.0, 6.0, [Mistake(3.0, "halved")])])
        report.follow(0, [value(3.0, 6.0, [Mistake(3.0, "halved")])])
        report.follow(2, [value(1, 2, what="the size")])
        report.follow(3, [communication([], made("all_reduce", 1))])

    judged(find)
    output = shown[0]
    data = json.loads(json.dumps(output[MIME]))
    assert (data["task"], data["points"], data["passed"]) == ("9.1", 2, False)
    assert [(p["ranks"], p["kind"]) for p in data["problems"]] == [
        ([0, 1], "mistake"),
        ([2], "value"),
        ([3], "communication"),
    ]
    (found,) = read([{"output_type": "display_data", "data": output}])
    assert str(found) == output["text/plain"]
    assert found.data() == data


def read_aloud(page: str) -> str:
    """What a screen reader says of HTML."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def wrong(*problems: str) -> Verdict:
    return Verdict("9.1", "a <task>", 2, False, problems=tuple(map(Problem, problems)))


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        (Verdict("9.1", "a <task>", 2), "✓ passed Task 9.1 · a <task> · 2 points"),
        (Verdict("0.1", "a <task>"), "✓ passed Task 0.1 · a <task>"),
        (
            Verdict("9.1", "a <task>", passed=False, open="still open"),
            "○ open Task 9.1 · a <task> This task is still open. Write it in the cell above.",
        ),
        (
            Verdict(
                "9.1", "a <task>", passed=False, open="needs Task 8.2 (b), which is still open."
            ),
            "○ open Task 9.1 · a <task> This task needs Task 8.2 (b), which is still open.",
        ),
        (wrong("<b>2</b>", "no"), "✗ not passed Task 9.1 · a <task> <b>2</b> no"),
        (wrong(*"abcdefgh"), "✗ not passed Task 9.1 · a <task> a b c d e f … and 2 more"),
    ],
    ids=["passed", "passed, without points", "open", "needs another", "wrong", "many problems"],
)
def test_a_screen_reader_says_the_state_in_a_word_and_a_students_text_is_no_html(verdict, said):
    page = verdict.bundle()["text/html"]
    assert read_aloud(page) == said
    assert "<task>" not in page
    assert "<b>2" not in page
    assert page.count("<li>") == min(len(verdict.problems), MOST_LINES + 1)


def test_the_lines_of_a_report_stay_lines_in_the_notebook():
    page = wrong("Deadlock\n  rank 0 waits\n  rank 1 waits").bundle()["text/html"]
    assert "<li>Deadlock<br>&nbsp;&nbsp;rank 0 waits<br>&nbsp;&nbsp;rank 1 waits</li>" in page


@pytest.fixture
def lab(monkeypatch) -> dict[str, Any]:
    """A lab of three tasks: its checks, and the problem that each one finds."""
    monkeypatch.setattr(score, "_points", defaultdict(dict))
    monkeypatch.setattr(score, "_passed", defaultdict(set))
    found: dict[str, str] = {}

    def made_check(number: str, points: int):
        def judge(ranks, report: Report) -> None:
            if number in found:
                report.problem(found[number])

        judge.__module__ = "utils.labs.lab99.checks"
        return task(number, "a task", points)(judge)

    checks = {
        "9.2": made_check("9.2", 3),
        "9.10": made_check("9.10", 4),
        "9.1": made_check("9.1", 2),
    }
    return {"checks": checks, "found": found}


def test_a_verdict_ends_with_the_points_of_the_notebook_and_the_next_task(shown, lab):
    ranks = SimpleNamespace(n=4, ask=lambda *_, **__: [])

    def ends_with(number: str, words: str) -> bool:
        verdict(lab["checks"][number], ranks)
        return read_aloud(shown[-1]["text/html"]).endswith(words)

    assert ends_with("9.1", "2 of 9 points · next: Task 9.2")
    assert ends_with("9.10", "6 of 9 points · next: Task 9.2")
    lab["found"]["9.1"] = "no"
    assert ends_with("9.1", "4 of 9 points · next: Task 9.1"), "the latest verdict counts"
    lab["found"].clear()
    assert ends_with("9.1", "6 of 9 points · next: Task 9.2"), "once for each task"
    assert ends_with("9.2", "9 of 9 points · every task has passed")


def test_what_nbval_compares_does_not_depend_on_earlier_checks(shown, lab, monkeypatch):
    ranks = SimpleNamespace(n=4, ask=lambda *_, **__: [])
    verdict(lab["checks"]["9.1"], ranks)
    first, update = shown
    assert "points · next" not in first["text/html"]
    assert update == first | {"text/html": update["text/html"]}
    verdict(lab["checks"]["9.2"], ranks)
    verdict(lab["checks"]["9.1"], ranks)
    assert shown[4] == first
    assert shown[5] != update
    monkeypatch.setenv("IPP_NONINTERACTIVE", "1")
    verdict(lab["checks"]["9.1"], ranks)
    assert shown[6:] == [first], "stored outputs are the same in every run"


def test_the_points_of_a_real_lab_are_those_of_its_checks(monkeypatch):
    monkeypatch.setattr(score, "_passed", defaultdict(set))  # other tests have passed tasks here
    dir(lab01)
    assert score.in_words("utils.labs.lab01").endswith("of 17 points · next: Task 1.1")
    dir(lab00)
    assert score.in_words("utils.labs.lab00") == "", "a lab without points has no line"


def test_a_verdict_that_was_only_printed_is_read_too():
    text = "\x1b[32m✗ Task 1.4 · sum\x1b[0m\n  - rank 1: no\nnoise\n✓ Task 1.5 · next · 2 points\n"
    found = read([{"output_type": "stream", "name": "stdout", "text": text}])
    assert found == [
        Verdict("1.4", "sum", passed=False, problems=(Problem("rank 1: no"),)),
        Verdict("1.5", "next · 2 points"),
    ]


@pytest.mark.parametrize("forged", [[1], {"passed": True}, "yes", {"task": "1", "problems": 3}])
def test_what_is_no_verdict_passes_nothing(forged):
    (found,) = read([{"output_type": "display_data", "data": {MIME: forged}}])
    assert not found.passed


# -- the page that builds a check from nothing ----------------------------------------------------

EXAMPLE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("total / 4", "✓ Task 9.1 · the mean over the ranks · 2 points\n"),
        ("total", "this is the sum: divide by dist.get_world_size()"),
        ("own", "rank 3: this is the rank's own tensor, unchanged"),
        ("None", "ranks 0–3: You returned None. Return the mean"),
    ],
)
def test_the_check_that_the_manual_builds_works_as_it_says(tmp_path, monkeypatch, result, said):
    _, _, page = EXAMPLE.read_text().partition("### Write a check")
    code = re.findall(r"```python\n(.*?)```", page.partition("\n### ")[0], re.DOTALL)
    assert len(code) == 2
    room = tmp_path / "room_of_the_manual"
    room.mkdir()
    for name, text in (("__init__", ""), ("probes", code[0]), ("checks", code[1])):
        (room / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.startswith(room.name)]:
        del sys.modules[name]
    module = importlib.import_module(f"{room.name}.checks")
    probes = importlib.import_module(f"{room.name}.probes")
    one = call("all_reduce", group=[0, 1, 2, 3])
    monkeypatch.setattr(probes, "recorded", lambda function, tensor: (function(tensor), [one]))

    with LocalRanks(4) as ranks:
        for user_ns in ranks.user_ns:

            def answer(own):
                total = sum(module.numbers(SEED + r, 3) for r in range(4))
                return eval(result, {"own": own, "total": total})

            user_ns["mean_over_ranks"] = answer
        monkeypatch.setattr(Report, "seeds", lambda _, n: [SEED + r for r in range(n)])
        printed = verdict(module.mean_over_ranks, ranks)[1]
    assert said in printed


SEED = 1234


def test_checks_see_whose_message_a_receive_from_anybody_took_and_when_it_matched():
    call = Call("recv", (4, 5), 12, peer=1, tag=0, start=1.0, matched=2.0, any_source=True)
    call.message, call.received = (5, 3), 12
    seen = as_dict(call)
    assert (seen["any_source"], seen["peer"], seen["message"]) == (True, 5, [5, 3])
    assert (seen["matched"], seen["sent"], seen["received"]) == (2.0, 0, 12)
    assert json.loads(json.dumps(seen)) == seen


def test_the_checks_rule_for_buckets_is_pytorchs():
    for case in buckets.cases(seed=5):
        tensors = [torch.empty(size, dtype=torch.uint8) for size in case["sizes"]]
        caps = [case["first_cap"], case["cap"]]
        if tensors:
            found, _ = torch.distributed._compute_bucket_assignment_by_size(tensors, caps)
            assert buckets.assign(**case) == found


def test_a_kernel_that_checks_does_not_start_mpi():
    """Its library would be one more process of the job, and prints what is not the verdict's."""
    labs = ", ".join(path.stem for path in (ROOT / "utils/labs").glob("lab*"))
    code = (
        f"from utils.labs import {labs}\n"
        f"for lab in ({labs}): dir(lab)\n"
        "import sys; sys.exit('mpi4py.MPI' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
