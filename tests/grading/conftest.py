"""Fixtures for tests that grade a class of the toy lab with runs that are pretended."""

from __future__ import annotations

from pathlib import Path

import grading_tools as toy
import pytest

from utils.__main__ import main
from utils.grading import command, grader


@pytest.fixture
def runs(reference, monkeypatch):
    """All runs are pretended; a right answer passes."""
    pretended = toy.Pretended(reference, {})
    monkeypatch.setattr(grader, "run", pretended)
    monkeypatch.setattr(command.compileall, "compile_dir", lambda *a, **k: True)
    return pretended


@pytest.fixture
def class_(course, runs, tmp_path):
    """`class_(…options)`: grade tmp_path/in into tmp_path/out; the exit status."""

    def go(*options: str, source: Path = tmp_path / "in") -> int:
        merge = "--merge" in options
        line = ["grade", *([] if merge else [str(source), "--no-sandbox"]), "--quiet"]
        line += ["-o", str(tmp_path / "out"), "--solutions", str(course / "solutions")]
        return main([*line, *options])

    return go


@pytest.fixture
def everyone(tmp_path) -> Path:
    """A class of five has handed in."""
    for name in toy.NAMES:
        toy.hand_in(tmp_path / "in", name, toy.filled())
    return tmp_path / "in"
