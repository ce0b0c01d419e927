"""The options of ``ddl-labs grade`` and ``rerun``; imports nothing that is slow."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class SandboxOptions:
    """What a submission may use and see: seconds, gigabytes, and folders to import from.

    Attributes:
        walls: Whether there is a sandbox around the submission.
    """

    cell_timeout: float
    timeout: float
    memory: float
    walls: bool
    paths: tuple[Path, ...]

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """Return the options that a parser of this module has read."""
        options: dict[str, Any] = {}
        for field in fields(cls):
            value = getattr(arguments, field.name)
            options[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**options)


@dataclass(frozen=True)
class GradingOptions(SandboxOptions):
    """What ``ddl-labs grade`` is asked to do.

    Attributes:
        submissions: A folder or a zip; None if none was named.
        only: Labs to grade, by number or name; empty for all.
        formats: Formats of the books that are asked for besides gradebook.csv.
        command: The command line, as a person would type it.
    """

    submissions: Path | None
    out: Path
    jobs: int
    only: tuple[str, ...]
    resume: bool
    watch: bool
    merge: bool
    formats: tuple[str, ...]
    solutions: Path
    quiet: bool
    command: str

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace, command: str = "") -> Self:
        """Return the options that were read from the line `command`; who watches also resumes."""
        more = {"command": command, "resume": arguments.resume or arguments.watch}
        return super().from_arguments(argparse.Namespace(**vars(arguments) | more))


def add_options(parser: argparse.ArgumentParser, root: Path) -> None:
    """Add all options of ``ddl-labs grade``."""
    add = parser.add_argument
    add(
        "submissions",
        type=Path,
        nargs="?",
        metavar="SUBMISSIONS",
        help="a folder of notebooks or of one folder per student, or a zip of Moodle or Canvas",
    )
    add("-o", "--out", type=Path, required=True, metavar="RESULTS", help="folder for the results")
    add("-j", "--jobs", type=_count, default=1, metavar="N", help="submissions at the same time: 1")
    add("--only", action="append", default=[], metavar="LAB", help="only this lab: 01, or 01_c10d")
    add("--resume", action="store_true", help="keep what was graded before and has not changed")
    add(
        "--watch",
        action="store_true",
        help="stay, and grade what is handed in or changed, until Ctrl-C; implies --resume",
    )
    add(
        "--merge",
        action="store_true",
        help="grade nothing: put the points of explain.csv into gradebook and pages",
    )
    add(
        "--format",
        dest="formats",
        action="append",
        choices=["moodle", "canvas", "github"],
        default=[],
        help="also write gradebook-FORMAT.csv to import there; "
        "github: points into the summary of a job of GitHub Actions",
    )
    add_sandbox_options(parser)
    add(
        "--solutions",
        type=Path,
        default=root / "solutions",
        metavar="FOLDER",
        help="the references: solutions/",
    )
    add("--quiet", action="store_true", help="no progress bar")


def add_rerun_options(parser: argparse.ArgumentParser) -> None:
    """Add the notebook, and in what it is run."""
    parser.add_argument(
        "notebook",
        type=Path,
        metavar="NOTEBOOK",
        help="RESULTS/students/NAME/LAB/run-1/notebook.ipynb, or the folder that it lies in",
    )
    add_sandbox_options(parser)


def add_sandbox_options(parser: argparse.ArgumentParser) -> None:
    """Add what a submission may use and see."""
    add = parser.add_argument
    add("--cell-timeout", type=_seconds, default=120, metavar="S", help="for each cell: 120")
    add("--timeout", type=_seconds, default=900, metavar="S", help="for each submission: 900")
    add("--memory", type=float, default=6, metavar="GB", help="for each submission: 6")
    add(
        "--no-sandbox",
        dest="walls",
        action="store_false",
        help="run submissions with all rights that you have: only if you trust every one",
    )
    add(
        "--path",
        dest="paths",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder that notebooks may read and import from, besides the course's own",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: seconds, more than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4 * (os.cpu_count() or 1):
        raise argparse.ArgumentTypeError(
            f"{text}: 1 to {4 * (os.cpu_count() or 1)} on this machine"
        )
    return value
