"""What the command line of ``ddl-labs grade`` asks for, as grading is told."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from utils.__main__ import parser
from utils.grading.grading_options import GradingOptions
from utils.grading.sandbox import GB, make_box

pytestmark = pytest.mark.quick


def asked(*line: str) -> GradingOptions:
    arguments = parser().parse_args(["grade", "in", "-o", "out", *line])
    return GradingOptions.from_arguments(arguments, "ddl-labs grade")


def test_options_have_the_values_of_the_command_line_and_never_change():
    options = asked("--only", "01", "--format", "moodle", "-j", "1", "--no-sandbox")
    assert (options.submissions, options.out) == (Path("in"), Path("out"))
    assert (options.only, options.formats, options.jobs) == (("01",), ("moodle",), 1)
    assert (options.resume, options.watch, options.merge, options.quiet) == (False,) * 4
    assert options.command == "ddl-labs grade"
    assert not options.walls
    with pytest.raises(FrozenInstanceError):
        options.resume = True


def test_watch_implies_resume():
    assert asked("--watch").resume
    assert asked("--resume").resume


def test_a_sandbox_has_the_limits_of_the_options(tmp_path):
    line = ("--cell-timeout", "7", "--timeout", "70", "--memory", "0.5", "--path", str(tmp_path))
    box = make_box(asked(*line))
    assert (box.walls, box.paths) == (True, (tmp_path.resolve(),))
    assert (box.limits.cell, box.limits.total, box.limits.memory) == (7, 70, GB // 2)
