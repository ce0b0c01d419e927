"""Can a run of tests be trusted when it says what it cost, and which tests a room needs?"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from imports import Reach
from places import ROOT
from processor_time import BUDGETS, ProcessorTime, kind_of, name_test, table
from room_tests import UnknownRoomError, files_of
from scheduling import Share

pytestmark = pytest.mark.quick

#: Uses the processor for as many seconds as its argument says.
BUSY = "import sys, time\nwhile time.process_time() < float(sys.argv[1]): pass"
#: The same in a child of a child, which end together.
NESTED = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProcessorTime:
    """A clock that has looked once; what this test starts counts for "a test"."""
    monkeypatch.setenv("DDL_LABS_PROCESSOR_TIME", str(tmp_path))
    monkeypatch.setenv("DDL_LABS_TEST", "")
    name_test("a test")
    clock = ProcessorTime(tmp_path)
    clock.look()
    clock.by_test.clear()
    return clock


ON_RANKS = [f"tests/labs/test_answers_on_ranks.py::test_on_real_ranks[1.{k}]" for k in range(60)]


def test_all_shares_together_run_each_test_once():
    shares = [Share.read(f"{part}/3") for part in (1, 2, 3)]
    for test in ON_RANKS:
        assert sum(share.has(test, rest=False) for share in shares) == 1
    assert all(any(share.has(test, rest=False) for test in ON_RANKS) for share in shares)


def test_what_make_test_runs_is_in_every_share():
    answer = "tests/labs/test_answers.py::test_a_wrong_answer_is_told_its_mistake[1.1-first]"
    assert all(Share(part, 3).has(answer, rest=False) for part in (1, 2, 3))
    assert sum(Share(part, 3).has(answer, rest=True) for part in (1, 2, 3)) == 1


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", ""])
def test_a_share_that_there_is_not_is_refused(text):
    with pytest.raises(ValueError, match="a share is a text such as 2/3"):
        Share.read(text)


#: Seconds that the processes of a test use.
USED = 0.6


def used_here() -> float:
    """Seconds that this process and its ended children have used: it looks, and they work."""
    return sum(os.times()[:4])


def is_counted_once(seconds: float, used: float) -> bool:
    """Whether a time is about what Linux says was used. A second count would add USED seconds."""
    return 0.9 * USED <= seconds < used + USED / 2


@needs_proc
@pytest.mark.parametrize("program", [[BUSY], [NESTED, BUSY]], ids=["child", "grandchild"])
def test_a_process_that_ends_between_two_looks_is_counted_once(clock, program):
    before = used_here()
    subprocess.run([sys.executable, "-c", *program, str(USED)], check=True, timeout=60)
    clock.look()
    assert is_counted_once(clock.by_test["a test"], used_here() - before), clock.by_test


@needs_proc
@pytest.mark.parametrize("program", [[BUSY], [NESTED, BUSY]], ids=["child", "grandchild"])
def test_a_process_that_was_seen_and_has_ended_is_counted_once(clock, program):
    before = used_here()
    process = subprocess.Popen([sys.executable, "-c", *program, str(USED)])
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        clock.look()
        time.sleep(0.05)
    clock.look()
    assert is_counted_once(clock.by_test["a test"], used_here() - before), clock.by_test


@needs_proc
def test_a_process_whose_parent_has_ended_still_counts_for_its_test(clock):
    orphan = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', *sys.argv[1:]])"
    leave = [sys.executable, "-c", f"{orphan}; import time; time.sleep(0.5)", BUSY, "1.5"]
    process = subprocess.Popen(leave)
    deadline = time.monotonic() + 60
    while clock.by_test["a test"] < 1.2 and time.monotonic() < deadline:
        clock.look()
        time.sleep(0.05)
    process.wait(60)
    assert clock.by_test["a test"] >= 1.2, clock.by_test


def test_a_run_above_its_budget_says_so_and_names_the_kinds_and_the_labs_that_pay():
    answers, solution = "tests/labs/test_answers.py::test_nan[6.1]", "[06_allreduce]"
    used = {answers: BUDGETS["test"] * 60, f"tests/labs/test_solutions.py::test_a{solution}": 31.0}
    lines = table(used, "test")
    assert lines[-1].endswith("ABOVE the budget of `make test`, 17 minutes")
    assert "labs above 25 s: 06 (1051 s)" in lines
    assert any(line.split() == ["solutions", "31"] for line in lines)
    slow = table({answers: 14 * 60.0}, "test", slowness=2.0)
    assert slow[-2] == "14.0 minutes of processor time; 200,000 additions took 10.0 ms here"
    assert slow[-1].startswith("7.0 minutes on a quiet processor")
    within = table({answers: 60.0}, "test")
    assert (
        within[-1]
        == "1.0 minutes on a quiet processor, where they take 5 ms, within the budget of "
        "`make test`, 17 minutes"
    )


def test_each_test_has_a_kind():
    assert kind_of("utils/mpi/tests/test_protocol.py::test_a") == "backend"
    assert kind_of("tests/grading/test_grading.py::test_a") == "grading"
    assert kind_of("tests/test_data.py::test_a") == "data, models, collection"


# --- which tests a room needs --------------------------------------------------------------------


@pytest.fixture(scope="module")
def reach() -> Reach:
    return Reach()


def reaches(reach: Reach, path: str, room: str, every_lab: bool = True) -> bool:
    return bool(files_of(room) & reach.of(ROOT / path, every_lab))


def test_a_change_in_a_lab_reaches_its_notebook_its_answers_and_no_other_lab(reach):
    for path in ("solutions/06_allreduce.ipynb", "tests/labs/answers/lab06.py"):
        assert reaches(reach, path, "lab06")
        assert not reaches(reach, path, "lab07")
    answers = "tests/labs/test_answers.py"
    assert reaches(reach, answers, "lab06")
    assert not reaches(reach, answers, "lab06", every_lab=False)


def test_a_change_in_a_room_below_reaches_what_is_built_on_it(reach):
    for room in ("checks", "cluster", "timeline", "mpi"):
        assert reaches(reach, "solutions/06_allreduce.ipynb", room)
    assert not reaches(reach, "solutions/06_allreduce.ipynb", "grading")
    assert reaches(reach, "tests/grading/test_grading.py", "grading")


def test_a_room_that_there_is_not_is_refused_with_the_names_of_all_rooms():
    with pytest.raises(UnknownRoomError, match=r"no room 'lab6'.*lab06.*timeline"):
        files_of("lab6")
