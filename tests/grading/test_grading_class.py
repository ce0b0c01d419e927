"""A class of thirty real submissions: everyone gets what is due, also when the grader is killed.

Half an hour on two cores, so on demand. GRADING_CLASS=folder keeps both runs' results there, and
does not grade again what it finds:

    make test ARGS="-m often tests/grading/test_grading_class.py -s"
"""

from __future__ import annotations

import csv
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import grading_class
import psutil
import pytest
from test_grading import ROOT, sandboxed

from utils.grading.results import Result, load

pytestmark = [pytest.mark.often, pytest.mark.timeout(3 * 3600), sandboxed]
#: Seconds of one run of the class, at most.
MOST = 2 * 3600
#: Exit status: all was graded but for the file that is cut short.
NO_GRADE = 1


def command(submissions: Path, out: Path) -> list[str]:
    """The command line that grades the class, or what is missing of it."""
    options = ["-j", "2", "--resume", "--quiet", "--cell-timeout", "90", "--format", "moodle"]
    return [sys.executable, "-m", "utils", "grade", str(submissions), "-o", str(out), *options]


def start(submissions: Path, out: Path) -> subprocess.Popen:
    """Grade; what the grader says goes to a file beside its results."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(
            command(submissions, out), cwd=ROOT, env=env, stdout=log, stderr=log
        )


def graded(out: Path) -> dict[str, Result]:
    """The results in a folder, by student and lab's number."""
    found = map(load, stored(out))
    return {(one.student, one.lab[:2]): one for one in found}


def stored(out: Path) -> list[Path]:
    return sorted(out.glob("students/*/*/result.json"))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with the class's submissions in `in`."""
    kept = os.environ.get("GRADING_CLASS")
    folder = Path(kept).resolve() if kept else tmp_path_factory.mktemp("class")
    grading_class.hand_in(folder / "in")
    return folder


@pytest.fixture(scope="module")
def whole(place) -> Path:
    """The class, graded in one go."""
    before, begin = len(stored(place / "whole")), time.monotonic()
    process = start(place / "in", place / "whole")
    try:
        status = process.wait(MOST)
    finally:
        process.kill()
    minutes = (time.monotonic() - begin) / 60
    print(f"\n{30 - before} submissions in {minutes:.1f} minutes with -j 2")
    assert status == NO_GRADE, (place / "whole.log").read_text()
    return place / "whole"


@pytest.mark.parametrize("name", grading_class.CLASS)
def test_everyone_gets_the_points_that_are_due(whole, name):
    results = graded(whole)
    for (student, number), work in grading_class.the_class().items():
        if student == name:
            one = results[student, number]
            points = {task.task: task.points for task in one.tasks if task.task in work.points}
            said = {task.task: (task.status, task.said, task.note) for task in one.tasks}
            assert points == work.points, (number, said, one.remarks)
            named = {text.split(":")[0].removeprefix("Task ") for text in one.look}
            assert work.flagged <= named, (number, one.look)


@pytest.fixture(scope="module")
def killed(place) -> Path:
    """The class, graded by graders of which three were killed at random moments."""
    out, draw = place / "killed", random.Random()
    for kill in range(3):
        done = len(stored(out))
        if done == 30:  # kept from an earlier session
            break
        until = draw.randint(done + 1, max(done + 1, 9 * (kill + 1)))
        process = start(place / "in", out)
        try:
            wait_for(until, out, process)
            time.sleep(draw.uniform(0, 10))
            started = psutil.Process(process.pid).children(recursive=True)
        finally:
            process.kill()
        assert process.wait(30) == -9, (place / "killed.log").read_text()
        assert psutil.wait_procs(started, 30)[1] == [], "what it had started runs on"
        before = {path: path.read_bytes() for path in stored(out)}
        print(f"\nkilled with {len(before)} of 30 graded")
    process = start(place / "in", out)
    try:
        assert process.wait(MOST) == NO_GRADE, (place / "killed.log").read_text()
    finally:
        process.kill()
    if done < 30:
        assert before == {path: path.read_bytes() for path in before}, "was graded again"
    return out


def wait_for(results: int, out: Path, process: subprocess.Popen) -> None:
    """Wait until so many submissions are graded; fails where the grader ends before."""
    deadline = time.monotonic() + MOST
    while len(stored(out)) < results:
        assert process.poll() is None, out.with_suffix(".log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_grader_that_is_killed_three_times_loses_nobodys_points(killed):
    results = graded(killed)
    for key, work in grading_class.the_class().items():
        points = {t.task: t.points for t in results[key].tasks if t.task in work.points}
        assert points == work.points, (key, results[key].remarks)


def test_a_grader_that_is_killed_three_times_writes_the_same_books_in_the_end(killed, whole):
    for name in ("gradebook.csv", "gradebook-moodle.csv", "explain.csv"):
        assert books(killed / name) == books(whole / name), name
    for path in sorted(whole.glob("students/*/feedback.html")):
        assert outline(killed / path.relative_to(whole)) == outline(path), path.parent.name
    assert outline(killed / "summary.html") == outline(whole / "summary.html")


def books(path: Path) -> list[list[str]]:
    """The cells of a book."""
    return list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))


def outline(page: Path) -> list[str]:
    """A page's lines but for what checks have said and drawn: their inputs are new in each run."""
    text = page.read_text(encoding="utf-8")
    for drawn in (
        r'<p class="made.*?</p>',
        r"<pre.*?</pre>",
        r"<img.*?>",
        r'<section id="problems">.*?</section>',
    ):
        text = re.sub(drawn, "", text, flags=re.DOTALL)
    return text.splitlines()
