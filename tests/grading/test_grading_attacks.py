"""Points need the work: answers that try to win them without it win none, or a person is told."""

from __future__ import annotations

import ast
import queue
import textwrap
from pathlib import Path
from threading import Event

import grading_tools as toy
import pytest
from answer_tools import LABS, right_answers, solutions_of
from test_grading import sandboxed

from utils.course.notebook import SOLUTIONS, notebooks
from utils.grading import gradebook, inspection, pages, worklist
from utils.grading.grader import grade
from utils.grading.inspection import MOST_CODE
from utils.grading.pages import feedback, summary
from utils.grading.reference import Reference, body
from utils.grading.results import Result, TaskResult, load
from utils.grading.sandbox import Box, Limits
from utils.grading.submissions import File, Student
from utils.grading.worklist import Job

GB = 1 << 30

# --- code in the kernel --------------------------------------------------------------------------

#: A module that gives task 1.3 its points when the kernel imports it, whatever the kernel wanted.
PLANTED = """
import sys
if "toy_checks" in sys.modules:
    from utils.checks.verdict import Verdict
    sys.modules["toy_checks"].total = lambda ranks: Verdict("1.3", "total", 2).show()
raise ImportError("not here")
"""
#: Leaves it under every name that a kernel may still import, wherever a rank can write.
PLANTS = f"""
import os, sys
more = ["stack_data", "executing", "asttokens", "pure_eval", "colorama", "ipywidgets", "cython"]
for folder in {{os.getcwd(), "/tmp", os.path.expanduser("~"), "/dev/shm"}}:
    for name in {{*sys.stdlib_module_names, *more}}:
        try:
            with open(os.path.join(folder, name + ".py"), "w") as file:
                file.write({PLANTED!r})
        except OSError:
            break
user = "~/.local/lib/python%d.%d/site-packages" % sys.version_info[:2]
for folder, name, text in [
    ("~/.ipython/profile_default", "ipython_config.py", {PLANTED!r}),
    ("~/.ipython/profile_default/startup", "00.py", {PLANTED!r}),
    (user, "usercustomize.py", {PLANTED!r}),
    (user, "a.pth", "import colorama"),
    (".", "matplotlibrc", "backend: module://colorama"),
    ("~/.config/matplotlib", "matplotlibrc", "backend: module://colorama"),
]:
    folder = os.path.expanduser(folder)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)

def twice(number):
    # The check ends with an error in the kernel, which imports what writes tracebacks.
    import utils.cluster.rank_side
    real = utils.cluster.rank_side.dumps

    def nonsense(*arguments, **more):
        utils.cluster.rank_side.dumps = real
        return '{{"status": "error", "error": 5, "stdout": ""}}'

    utils.cluster.rank_side.dumps = nonsense
"""


def graded(course: Path, reference: Reference, folder: Path, **answers: str) -> Result:
    """The result of a submission of the toy lab, right but for these answers, in the sandbox."""
    box = Box(limits=Limits(cell=60, total=400, memory=4 * GB), paths=(course / "checks",))
    path = toy.hand_in(folder, "mallory", toy.filled(**answers))
    return grade(path, reference, box, folder / "out")


@sandboxed
@pytest.mark.timeout(500)
def test_a_module_left_in_the_current_folder_gives_no_points(course, reference, tmp_path):
    result = graded(course, reference, tmp_path, twice=PLANTS, total=toy.WRONG)
    points = [task.points for task in result.tasks if task.status != "by hand"]
    assert points == [0, 2, 0, 1, 2], (result.remarks, result.error)


# --- a person is told ----------------------------------------------------------------------------

RIGHT = "def total(tensor, rank):\n    dist.all_reduce(tensor)\n    return tensor\n"


def lab_06() -> Reference:
    return Reference(next(path for path in notebooks(SOLUTIONS) if path.stem.startswith("06")))


def test_a_forgery_that_a_check_has_found_is_shown_to_a_person(reference):
    result = a_result(RIGHT)
    result.tasks[0].status, result.tasks[0].points = "wrong", 0.0
    result.tasks[0].problems = [{"text": "a record that no call has made", "kind": "forged"}]
    (said,) = inspection.look(result, reference)
    assert "Task 1.3" in said
    assert "a record that no call has made" in said


def a_result(code: str) -> Result:
    """A result in which task 1.3 of the toy lab passed with this code."""
    result = Result("Mallory", toy.LAB, "")
    result.tasks = [TaskResult("1.3", "total", 2, 2.0, "passed", code=code)]
    return result


def test_points_for_the_stub_are_shown_to_a_person(reference):
    stub = body(reference.stubs["total-answer"])
    assert "it is still the stub" in inspection.look(a_result(stub), reference)[0]


def test_code_that_is_hidden_after_a_long_answer_is_shown_to_a_person(reference):
    code = "def total(tensor, rank):\n    pass\n" + "#" * MOST_CODE
    assert "only the first" in inspection.look(a_result(code[:MOST_CODE]), reference)[0]


def test_every_graded_submission_is_inspected_and_keeps_its_remarks(
    reference, tmp_path, monkeypatch
):
    stub = body(reference.stubs["total-answer"])
    monkeypatch.setattr(worklist, "grade", lambda *_, **__: a_result(stub))
    path = toy.hand_in(tmp_path, "mallory", "{}")
    job = Job(Student("Mallory"), reference, File(Student("Mallory"), path, "a.ipynb"), tmp_path)
    slots = queue.SimpleQueue()
    slots.put(0)
    worklist.do(job, Box(), slots, Event())
    assert "it is still the stub" in load(tmp_path / "result.json").look[0]


def test_remarks_for_a_person_are_in_summary_and_gradebook_but_not_in_the_feedback(
    reference,
):
    result = a_result(body(reference.stubs["total-answer"]))
    result.look = inspection.look(result, reference)
    assert "still the stub" in summary([result], [reference], {}, {"Mallory": "m"})
    assert "still the stub" in gradebook.gradebook([result])
    assert "look at this" not in feedback("Mallory", [result])


# --- copies of the solution ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def all_reduce() -> Reference:
    """Lab 06, whose solutions are long."""
    return lab_06()


def with_answers(codes: dict[str, str], lab: str, student: str = "Mallory") -> Result:
    """A result in which these tasks passed with this code."""
    tasks = [TaskResult(task, task, 1, 1.0, "passed", code=code) for task, code in codes.items()]
    return Result(student, lab, "", tasks=tasks)


def renamed(code: str) -> str:
    """The same program with other names of arguments and variables, without comments."""
    tree = ast.parse(code)
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.arg = f"my_{node.arg}"
        elif isinstance(node, ast.Name) and node.id in arguments:
            node.id = f"my_{node.id}"
    return ast.unparse(tree)


def test_a_renamed_copy_of_the_published_solution_is_shown_to_a_person(all_reduce):
    models = {task: body(code) for task, code in solutions_of("lab06").items()}
    copied = {task: renamed(code) for task, code in models.items()}
    found = pages.copies([with_answers(copied, all_reduce.lab)], [all_reduce])
    assert [one.students for one in found] == [("Mallory",)]
    assert {"6.1", "6.2", "6.3", "6.6", "6.8", "6.9"} <= set(found[0].tasks)
    page = summary([with_answers(copied, all_reduce.lab)], [all_reduce], {}, {"Mallory": "m"})
    assert "6.1, 6.2" in page.partition("Equal to the published solution")[2]


@pytest.mark.parametrize("name", LABS)
def test_no_right_answer_of_another_form_counts_as_a_copy(name):
    path = next(path for path in notebooks(SOLUTIONS) if path.name == LABS[name].NOTEBOOK)
    for task, what, code in right_answers(LABS[name], solutions_of(name)):
        one = with_answers({task: body(textwrap.dedent(code))}, path.stem)
        assert pages.copies([one], [Reference(path)]) == [], what


def test_a_short_solution_that_many_find_is_not_a_copy(reference):
    codes = {"1.3": toy.indented(*toy.ANSWERS["total"][3:])}
    assert pages.copies([with_answers(codes, toy.LAB)], [reference]) == []


def test_a_copied_text_is_shown_to_a_person(reference):
    result = with_answers({"1.A": f"**{toy.MODEL_TEXT.upper()}**"}, toy.LAB)
    result.tasks[0].status = "by hand"
    assert [one.tasks for one in pages.copies([result], [reference])] == [["1.A"]]
