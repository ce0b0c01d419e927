"""Gradescope: the autograder's zip, its report, and ranks that are other users."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook

from utils.course.notebook import KERNELSPEC, SOLUTIONS
from utils.grading import gradescope
from utils.grading.notebook_run import run
from utils.grading.results import Result, Shown, TaskResult
from utils.grading.sandbox import Box, SandboxError, require

#: On a rank: what of root's it can read, and whether it has a network.
TRIES = """\
%%px
import os, socket
def told(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error.strerror
    return "it works"
print(os.getuid(), "|", told(open, SECRET), "|", told(os.listdir, os.path.dirname(SECRET)), "|",
      told(socket.create_connection, ("127.0.0.1", 9), 1), "|", told(os.kill, os.getppid(), 0))
"""


def for_others(path: Path) -> bool:
    """Whether another user can get to a file."""
    return all(parent.stat().st_mode & 0o001 for parent in path.resolve().parents)


@pytest.mark.skipif(
    os.geteuid() != 0 or not for_others(Path(sys.executable)),
    reason="needs root, and a Python that other users can run",
)
def test_a_rank_that_is_another_user_can_read_nothing_of_roots_and_has_no_network(tmp_path):
    secret = tmp_path / "private" / "solution.txt"
    secret.parent.mkdir(mode=0o700)
    secret.write_text("42")
    cells = [
        new_code_cell("from utils import cluster; ranks = cluster.start(2)", id="start"),
        new_code_cell(TRIES.replace("SECRET", repr(str(secret))), id="tries"),
        new_code_cell("ranks.stop()", id="stop"),
    ]
    nb = new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})
    box = Box(walls=False, by_user=True)
    require(box, tmp_path)
    done = run(nb, box, tmp_path / "job")
    assert done.end is None, done.log
    said = "".join(output.get("text", "") for output in done.records[1]["outputs"])
    lines = [line.split(" | ") for line in said.splitlines() if "|" in line]
    users = {line[0].strip() for line in lines}
    assert len(users) == 2, said
    assert "0" not in users
    refused = ["Permission denied", "Permission denied", *["Operation not permitted"] * 2]
    assert [line[1:] for line in lines] == [refused, refused]


def test_without_root_there_are_no_other_users(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SandboxError, match="--by-user needs root"):
        require(Box(walls=False, by_user=True), tmp_path)


def test_the_zip_has_both_programs_one_solution_and_no_test(tmp_path):
    (solution,) = SOLUTIONS.glob("06_*.ipynb")
    with zipfile.ZipFile(gradescope.build(solution, tmp_path)) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        program = archive.read("run_autograder").decode()
    assert all(entries[name].external_attr >> 16 & 0o111 for name in ("setup.sh", "run_autograder"))
    assert program.endswith(f"/autograder {solution.stem}\n")
    assert [name for name in entries if "/solutions/" in name] == [
        f"course/solutions/{solution.name}"
    ]
    assert {"course/Makefile", "course/utils/grading/gradescope.py"} <= set(entries)
    assert not [name for name in entries if "/tests/" in name or "/labs/.models/" in name]


def test_the_report_has_a_test_for_each_task_that_a_check_grades():
    tasks = [
        TaskResult("6.1", "crossbar", 2, 2, "passed"),
        TaskResult("6.2", "reducer", 2, 0, "failed", "✗ too much", [Shown("error", "line 3")]),
        TaskResult("6.A", "explain", 2, None, "by hand"),
    ]
    result = Result("student", "06", "key", tasks=tasks, remarks=["Two files."], seconds=12.4)
    report = gradescope.report_of(result)
    assert json.loads(json.dumps(report)) == {
        "score": 2,
        "execution_time": 12,
        "output": "Two files.\nA person grades the written answers: 6.A.",
        "tests": [
            {
                **{"name": "6.1 crossbar", "score": 2, "max_score": 2, "status": "passed"},
                **{"output": "passed", "visibility": "visible"},
            },
            {
                **{"name": "6.2 reducer", "score": 0, "max_score": 2, "status": "failed"},
                **{"output": "✗ too much\n\nerror\nline 3", "visibility": "visible"},
            },
        ],
    }
