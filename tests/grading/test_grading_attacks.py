"""Points need the work: answers that try to win them without it win none, or a person is told."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from pathlib import Path
from threading import Event

import grading_tools as toy
import pytest
from test_grading import sandboxed

from utils.course.notebook import SOLUTIONS, notebooks
from utils.grading import gradebook, inspection, worklist
from utils.grading.grader import grade
from utils.grading.inspection import MOST_CODE
from utils.grading.pages import feedback, summary
from utils.grading.reference import Reference, body
from utils.grading.results import Result, TaskResult, load
from utils.grading.sandbox import Box, Limits, prepare
from utils.grading.submissions import File, Student
from utils.grading.worklist import Job
from utils.jobs.box_plan import RANK

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


#: Tries to leave something for other ranks and submissions outside of all folders, and to have
#: memory that counts for nobody; prints what worked.
LEAVE = """
import ctypes, fcntl, os, platform, socket
file, system = open(os.__file__), ctypes.CDLL(None).syscall
name, key = ctypes.c_char_p(b"user"), ctypes.c_char_p(b"answer")
here = platform.machine() == "x86_64"
numbers = (248, 250, 294, 72, 101) if here else (217, 219, 26, 25, 117)
keys, join, inotify, control, trace = numbers
with_upper_half = fcntl.F_SETLK | 1 << 32
tries = {
    "add_key": lambda: system(keys, name, key, key, 6, -4),
    "keyctl": lambda: system(join, 1, None),
    "inotify": lambda: system(inotify, 0),
    "fcntl": lambda: system(control, file.fileno(), ctypes.c_long(with_upper_half), bytes(32)),
    "flock": lambda: fcntl.flock(file, fcntl.LOCK_SH),
    "lockf": lambda: fcntl.lockf(file, fcntl.LOCK_SH),
    "memfd": lambda: os.memfd_create("memory"),
    "ptrace": lambda: system(trace, 0, 0, None, None),  # PTRACE_TRACEME
    "vsock": lambda: socket.socket(40, socket.SOCK_STREAM),
    "bubblewrap": lambda: os.stat("/proc/1/mem"),
}
for what, call in tries.items():
    try:
        if call() != -1:
            print(what)
    except OSError:
        pass
print("end")
"""


@sandboxed
def test_a_rank_leaves_nothing_for_others_outside_its_folders(tmp_path):
    prepare(tmp_path)
    box = Box()
    for command in ([], box.inner(tmp_path, 0)):
        words = box.outer(tmp_path, [*command, sys.executable, "-c", LEAVE])
        done = subprocess.run(words, capture_output=True, encoding="utf-8", timeout=60, check=True)
        worked = done.stdout.split()
        assert worked == ["end"] if command else {"flock", "memfd", "end"} <= {*worked}


@sandboxed
def test_what_linux_counts_by_user_or_for_all_tells_a_rank_nothing_of_another_one(tmp_path):
    prepare(tmp_path)
    box, look = Box(), "import os; print(os.getuid(), os.path.exists('/proc/sys/fs'))"
    words = box.outer(tmp_path, [*box.inner(tmp_path, 0), sys.executable, "-c", look])
    seen = []
    for rank in ("0", "1"):
        environment = os.environ | {RANK: rank}
        done = subprocess.run(words, env=environment, capture_output=True, timeout=60, check=True)
        uid, has_counters = done.stdout.decode().split()
        assert has_counters == "False"
        seen.append(int(uid))
    assert len(set(seen)) == 2 or os.geteuid(), "root gives each rank a user of its own"


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


def with_answers(codes: dict[str, str], lab: str, student: str = "Mallory") -> Result:
    """A result in which these tasks passed with this code."""
    tasks = [TaskResult(task, task, 1, 1.0, "passed", code=code) for task, code in codes.items()]
    return Result(student, lab, "", tasks=tasks)
