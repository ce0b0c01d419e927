"""The pages of grading: what they say first, whom they link to, and whether everyone can read them.

What a browser has to judge (contrast, landmarks, names, width) is left to axe-core.
"""

from __future__ import annotations

import re
from pathlib import Path

import grading_tools as toy
import pytest
from browser_tools import photograph

from utils.grading.command import described, provenance_now
from utils.grading.pages import feedback, next_step, task_summary, write_pages
from utils.grading.pages import summary as a_summary
from utils.grading.reference import Reference
from utils.grading.results import Result, Shown, TaskResult, common

WRONG = "✗ Task {} · a\n  - rank 0: the sum: expected 5, got 7"
LINKS = {"Ada": "students/Ada/feedback.html", "Bob & Co": "students/Bob & Co/feedback.html"}


def task(number: str, status: str = "passed", points: float | None = 0.0, **more) -> TaskResult:
    more = {"said": WRONG.format(number) if status == "wrong" else "", **more}
    return TaskResult(number, f"title {number}", 2.0, points, status, **more)


def result(*tasks: TaskResult, student: str = "Ada", **more) -> Result:
    return Result(student, more.pop("lab", toy.LAB), "key", "a.ipynb", tasks=[*tasks], **more)


def summary(results: list[Result], reference: Reference, made: dict[str, str] | None = None) -> str:
    return a_summary(results, [reference], {}, LINKS, made)


# --- what they say -------------------------------------------------------------------------------


def test_feedback_starts_with_the_first_open_task_and_its_message():
    page = feedback("Ada", [result(task("1.1", points=2), task("1.2", "wrong"))])
    first = page[page.index("<main") : page.index(f"<h2>{toy.LAB}")]
    assert f'href="#{toy.LAB}-1.2"' in first
    assert "expected 5, got 7" in first
    assert "Task 1.2 · a" not in first, "the line that names the task repeats the title above it"


def test_feedback_never_suggests_an_answer_that_is_graded_by_hand():
    done = result(task("1.1", points=2), task("1.A", "by hand", None))
    assert "your instructor will grade the rest" in feedback("Ada", [done])
    done.tasks[1].points = 0.0
    assert "no check found a mistake" in feedback("Ada", [done])


def test_a_written_answer_awaits_grading_until_it_has_points():
    waits, read = task("1.A", "by hand", None), task("1.A", "by hand", 0.0)
    assert "awaits grading" in feedback("Ada", [result(waits)])
    assert "✎ graded by hand" not in feedback("Ada", [result(waits)])
    assert "✎ graded by hand" in feedback("Ada", [result(read)])
    found = task_summary([result(waits), result(read, student="Bob")], toy.LAB, "1.A")
    assert found.counts == {"waits": 1, "hand": 1}


def test_an_instructor_gets_from_a_problem_to_the_students_who_have_it(reference):
    results = [result(task("1.1", "wrong"), student=name) for name in LINKS]
    page = summary(results, reference)
    problems = page[page.index('id="problems"') : page.index('id="alike"')]
    assert f'href="students/Ada/feedback.html#{toy.LAB}-1.1"' in problems
    assert f'href="students/Bob%20%26%20Co/feedback.html#{toy.LAB}-1.1"' in problems


def test_no_student_with_a_common_problem_is_left_out(reference):
    names = [f"student {number}" for number in range(30)]
    results = [result(task("1.1", "wrong"), student=name) for name in names]
    page = a_summary(results, [reference], {}, {name: f"at/{name}" for name in names})
    problems = page[page.index('id="problems"') : page.index('id="alike"')]
    assert len(re.findall("<a href", problems)) == 30
    assert "and 18 more" in problems


def test_the_commonest_problem_comes_first_for_any_task_and_ranks(reference):
    said = "✗ Task 1.2 · a\n  - {}: the sum: expected 5, got 7"
    rare, often = task("1.1", "wrong"), [said.format("ranks 0–3"), said.format("ranks 0, 2 and 3")]
    names = dict(zip(LINKS, often, strict=True))
    results = [
        result(rare, task("1.2", "wrong", said=text), student=name) for name, text in names.items()
    ]
    results[1].tasks[0] = task("1.1", points=2)
    page = summary(results, reference)
    problems = page[page.index('id="problems"') : page.index('id="looks"')]
    assert re.findall(r'"k">([\d.]+)</th><td class="n">(\d)', problems) == [
        ("1.2", "2"),
        ("1.1", "1"),
    ]


def test_answers_to_look_at_are_not_hidden_among_remarks(reference):
    looks = [
        f"Task {number}: look at this answer: it names sys.modules" for number in ("1.1", "1.2")
    ]
    remarks = ["Task 1.2: judged alone", "This lab has 2 files, and b.ipynb counts."]
    page = summary([result(task("1.1"), look=looks, remarks=remarks)], reference)
    found = page[page.index('id="looks"') : page.index('id="alike"')]
    assert "Tasks 1.1, 1.2: it names sys.modules" in found
    rest = page[page.index('id="remarks"') :]
    assert "it names" not in rest
    assert f"Task 1.2: judged alone<br>{toy.LAB}: This lab has 2 files" in rest


def test_own_cells_are_named_and_are_no_remark(reference):
    one = result(task("1.1"), own_cells=2)
    page = summary([one], reference)
    assert f"{toy.LAB}: 2" in page[page.index('id="own"') :]
    remarks = page[page.index('id="remarks"') : page.index('id="own"')]
    assert "None." in remarks
    assert "The ranks also ran 2 cells that you added." in feedback("Ada", [one])


def test_a_student_who_submitted_little_has_one_remark_on_it(reference):
    nothing = {"remarks": ["Nothing was submitted."]}
    page = summary([result(task("1.1"), lab=lab, **nothing) for lab in ("02_a", "06_b")], reference)
    assert "02_a, 06_b: Nothing was submitted." in page


def test_the_table_of_students_has_every_task_of_every_lab(reference):
    results = [
        result(task("1.1", points=2)),
        result(task("2.1", "wrong"), lab="02_other"),
        result(task("1.1", "hung"), student="Bob & Co"),
    ]
    page = summary(results, reference)
    table = page[page.index('id="students"') : page.index('id="points"')]
    assert re.findall(r'scope="colgroup" colspan="1">(\w+)<', table) == [toy.LAB, "02_other"]
    assert f"feedback.html#{toy.LAB}-1.1" in table
    assert "feedback.html#02_other-2.1" in table
    assert "title 1.1: out of time" in table


def test_a_student_who_could_not_be_graded_looks_different_from_one_without_an_answer(reference):
    lost = result(task("1.1", "not graded", None), error="no kernel")
    page = summary([lost, result(task("1.1", "missing"), student="Bob & Co")], reference)
    table = page[page.index('<table class="marks"') : page.index('id="points"')]
    assert re.findall('<td class="n (.*?)">', table) == ["ungraded", "none"]


def test_the_summary_says_by_which_version_and_command_a_class_was_graded(reference):
    made = provenance_now("ddl-labs grade --merge -o out", "ddl-labs grade in/ -o 'my results'")
    page = summary([result(task("1.1"))], reference, made)
    line = re.search('<p class="made.*</p>', page)[0]
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d, ddl-labs \d", line)
    assert "grade --merge -o out" in line
    assert "my results" in line


def test_a_course_that_is_not_a_clone_has_a_version_too(tmp_path):
    assert described(tmp_path) == ""
    (tmp_path / ".git").mkdir()
    assert described(tmp_path) == "", "a broken clone costs no summary"


def test_the_summary_says_how_to_run_a_students_notebook_safely(reference):
    page = summary([result(task("1.1"))], reference)
    assert "ddl-labs rerun" in page[page.index('id="again"') :]


# --- who can read them ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(reference, tmp_path_factory) -> dict[str, Path]:
    """All kinds of pages, of a class that shows everything that they can show."""
    out = tmp_path_factory.mktemp("pages")
    statuses = ["wrong", "failed", "hung", "lost", "unchanged", "missing", "not reached"]
    every = [task(f"1.{n}", status) for n, status in enumerate(statuses, 2)]
    every[2].shown = [Shown("The ranks", "rank 0 waits " * 20)]
    texts = [task("1.A", "by hand", None, code="Because."), task("1.B", "by hand", 1.0, code="B")]
    long = "Zoë-Chandrasekharasubrahmanyan-Müller-Lüdenscheidt"
    results = [
        result(task("1.1", points=2), *every, *texts, student=long, remarks=["two files"]),
        result(task("1.1", points=2), *every, *texts, student="Ada"),
        result(task("1.1", "not graded", None), student="Max", error="pytest ended with SIGKILL"),
        result(task("2.1", points=2), student="Ada", lab="02_other"),
    ]
    folders = {one.student: out / "students" / one.student for one in results}
    command = "ddl-labs grade " + "long/" * 30
    made = {"date": "2026-01-01 10:00", "version": "0.1.0", "command": command}
    found = write_pages(results, [reference], out, folders, {"": ["nobody's"]}, made)
    return found | {"summary": out / "summary.html", "explain": out / "explain.html"}


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everyone_can_read_every_page(written, chromium, tmp_path, scheme, width):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for number, (name, path) in enumerate(written.items()):
        page.goto(path.resolve().as_uri())
        photograph(page, tmp_path, f"grading-{number}-{scheme}-{width}")
        said = axe.run(page).response["violations"]
        assert [(one["id"], one["nodes"][0]["html"]) for one in said] == [], name
        wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wider) <= 0, f"{name} scrolls sideways"
    page.close()


def test_the_next_step_is_never_cut_before_what_to_try():
    lines = [f"  - line {k}" for k in range(20)] + ["  What to try: send first", "  on rank 0"]
    told = "\n".join(["✗ Task 1.1 · twice", *lines])
    said = next_step([result(task("1.1", "wrong", said=told))]).said
    assert "line 7" in said
    assert "line 9" not in said
    assert said.endswith("What to try: send first\n  on rank 0")


def test_a_problem_of_one_student_is_counted_once():
    hung = task("1.1", "hung", note="The check was still running.")
    hung.said = "✗ Task 1.1 · twice\n  - did not finish and was interrupted"
    hung.problems = [{"text": "did not finish", "kind": "interrupted"}] * 2
    assert [count for _, count, _ in common([("Ada", hung)])] == [1]
