"""A student's notebook, run again by the instructor: it must not reach what is the instructor's."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell, new_notebook
from test_grading import sandboxed

from utils.__main__ import main
from utils.checks.verdict import Verdict
from utils.course.notebook import KERNELSPEC, dumps
from utils.grading import notebook_run
from utils.grading.notebook_run import Run


def a_notebook(folder: Path, source: str) -> Path:
    cells = [new_code_cell(source, id="answer")]
    path = folder / "run-1" / "notebook.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nb = new_notebook(cells=cells, metadata={"kernelspec": KERNELSPEC})
    path.write_text(dumps(nb), encoding="utf-8")
    return path


@sandboxed
def test_a_students_code_that_is_run_again_can_not_change_the_instructors_files(tmp_path, capsys):
    target = tmp_path / "mine"
    source = f"open({str(target)!r}, 'w').write('theirs')"
    path = a_notebook(tmp_path, source)
    before = path.read_bytes()
    main(["rerun", str(path.parent)])
    assert "✗ cell 'answer'" in capsys.readouterr().out
    assert not target.exists()
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["notebook.ipynb"]


@pytest.fixture
def pretended(monkeypatch, tmp_path):
    """`pretended(run)`: the status of a rerun that goes so."""

    def go(done: Run) -> int:
        monkeypatch.setattr(notebook_run, "run", lambda nb, box, job: done)
        return main(["rerun", "--no-sandbox", str(a_notebook(tmp_path, "1"))])

    return go


def a_record(outcome: str, text: str = "", end: str | None = None) -> dict:
    said = [Verdict("1.1", "a", passed=outcome == "passed").data()]
    outputs = [{"type": "stream", "text": text}]
    return {"cell": "check", "outcome": outcome, "verdicts": said, "outputs": outputs, "end": end}


def test_a_check_that_fails_again_shows_in_the_status(pretended, capsys):
    assert pretended(Run([a_record("passed")], 1.0)) == 0
    assert pretended(Run([a_record("failed", "expected 5")], 1.0)) == 1
    assert "    expected 5" in capsys.readouterr().out
    assert pretended(Run([a_record("passed")], 1.0, "out of time")) == 1
    assert "ended early: out of time" in capsys.readouterr().out


def test_a_students_output_can_not_control_the_instructors_terminal(pretended, capsys):
    pretended(Run([a_record("failed", "\x1b]0;owned\x07\tx")], 1.0))
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert "\tx" in said


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_the_error_names_a_file_that_is_not_a_notebook(tmp_path, capsys, content):
    path = tmp_path / "notebook.ipynb"
    if content is not None:
        path.write_text(content)
    assert main(["rerun", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
