"""Points need the work: answers that try to win them without it win none, or a person is told."""

from __future__ import annotations

import os
from pathlib import Path

import grading_tools as toy
import pytest
from test_grading import sandboxed

from utils.course.grading import imports
from utils.course.grading.grade_one import grade
from utils.course.grading.reference import Reference
from utils.course.grading.results import Result
from utils.course.grading.sandbox import Box, Limits

GB = 1 << 30

# --- code in the kernel --------------------------------------------------------------------------

#: A module that gives task 1.3 its points when the kernel imports it, whatever the kernel wanted.
PLANTED = """
import sys
if "toy_checks" in sys.modules:
    from utils.verdict import Verdict
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

def twice(number):
    # The check ends with an error in the kernel, which imports what writes tracebacks.
    import utils.cluster.on_rank
    real = utils.cluster.on_rank.dumps

    def nonsense(*arguments, **more):
        utils.cluster.on_rank.dumps = real
        return "null"

    utils.cluster.on_rank.dumps = nonsense
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory) -> Path:
    """A folder with solutions/ and checks/ of the toy lab."""
    folder = tmp_path_factory.mktemp("course")
    toy.make_course(folder)
    return folder


@pytest.fixture(scope="module")
def reference(course: Path) -> Reference:
    return Reference(course / "solutions" / f"{toy.LAB}.ipynb")


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


def test_a_folder_that_answers_write_to_holds_no_module(tmp_path):
    assert not imports.out_of_reach(str(tmp_path))
    assert not imports.out_of_reach(str(tmp_path / "comes" / "later"))
    assert not imports.out_of_reach("")
    (tmp_path / "stack_data.py").write_text("")
    os.chmod(tmp_path, 0o555)  # its owner opens it again
    finder = imports.refuse_writable(str(tmp_path))
    assert finder.find_spec("stack_data") is None
