"""The options of ``ddl-labs grade`` and ``rerun``, without any slow import."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True)
class SandboxOptions:
    """The limits of a submission (seconds and gigabytes) and the folders that it may import from.

    Attributes:
        walls: Whether submissions run in a sandbox.
        by_user: Whether ranks are other users instead, see `sandbox`.
    """

    cell_timeout: float
    timeout: float
    memory: float
    walls: bool
    by_user: bool
    paths: tuple[Path, ...]

    @classmethod
    def from_arguments(cls, arguments: argparse.Namespace) -> Self:
        """Return the options as a parser of this module has read them."""
        options: dict[str, Any] = {}
        for field in fields(cls):
            value = getattr(arguments, field.name)
            options[field.name] = tuple(value) if isinstance(value, list) else value
        return cls(**options)


@dataclass(frozen=True)
class GradingOptions(SandboxOptions):
    """The options of ``ddl-labs grade``.

    Attributes:
        submissions: A folder or a zip; None if the user named none.
        only: Labs to grade, by number or name; empty for all.
        formats: Formats in which to write the gradebook in addition to gradebook.csv.
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
        """Return the options that were read from the line `command`; --watch implies --resume."""
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
        help="a folder with notebooks or with one folder per student, or a zip of Moodle or Canvas",
    )
    add("-o", "--out", type=Path, required=True, metavar="RESULTS", help="folder for the results")
    add("-j", "--jobs", type=_count, default=1, metavar="N", help="grade N submissions at once: 1")
    add("--only", action="append", default=[], metavar="LAB", help="grade only 01, or 01_c10d")
    add("--resume", action="store_true", help="keep the grades of unchanged submissions")
    add(
        "--watch",
        action="store_true",
        help="keep running and grade new and changed submissions until Ctrl-C; implies --resume",
    )
    add(
        "--merge",
        action="store_true",
        help="don't grade: put the points from explain.csv into gradebook and pages",
    )
    add(
        "--format",
        dest="formats",
        action="append",
        choices=["moodle", "canvas", "github"],
        default=[],
        help="also write gradebook-FORMAT.csv for an import; "
        "github: write the points into the summary of a GitHub Actions job",
    )
    add_sandbox_options(parser)
    add(
        "--solutions",
        type=Path,
        default=root / "solutions",
        metavar="FOLDER",
        help="folder with the reference notebooks: solutions/",
    )
    add("--quiet", action="store_true", help="show no progress bar")


def add_rerun_options(parser: argparse.ArgumentParser) -> None:
    """Add the notebook, and the options of the sandbox."""
    parser.add_argument(
        "notebook",
        type=Path,
        metavar="NOTEBOOK",
        help="RESULTS/students/NAME/LAB/run-1/notebook.ipynb, or its folder",
    )
    add_sandbox_options(parser)


def add_sandbox_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit a submission and say what it may see."""
    add = parser.add_argument
    add("--cell-timeout", type=_seconds, default=120, metavar="S", help="limit for a cell: 120")
    add("--timeout", type=_seconds, default=900, metavar="S", help="limit for a submission: 900")
    add("--memory", type=float, default=6, metavar="GB", help="limit for a submission: 6")
    add(
        "--no-sandbox",
        dest="walls",
        action="store_false",
        help="run submissions with your permissions and no sandbox; only if you trust every one",
    )
    add(
        "--by-user",
        action="store_true",
        help="instead of a sandbox, run each rank as another user; only as root, in a container of "
        "one submission",
    )
    add(
        "--path",
        dest="paths",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="another folder that notebooks may read and import from",
    )


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 4 * (os.cpu_count() or 1):
        raise argparse.ArgumentTypeError(
            f"{text} is not between 1 and {4 * (os.cpu_count() or 1)}, the limit on this machine"
        )
    return value
