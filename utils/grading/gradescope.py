"""Gradescope: the zip of an autograder for one lab, and the program that it runs.

``ddl-labs gradescope 06`` writes the zip. Gradescope unpacks it into ``/autograder/source``, runs
``setup.sh`` once, and for each submission runs ``run_autograder``, which finds the student's files
in ``/autograder/submission`` and writes ``/autograder/results/results.json`` (Gradescope's
documentation, *Autograder specifications*).

A container of Gradescope can't build sandboxes. Each rank is another user there, see `sandbox`. The
course, the solution and the results are root's, and nobody else can read them.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

from utils.course.notebook import ROOT, NotebookError

from .grading_options import GradingOptions, add_options
from .results import Result, TaskResult, label, load

#: What grading needs of the repository.
FILES = (
    *("utils", ":(exclude)utils/**/tests/**", ":(exclude)utils/course/lectures"),
    *("Makefile", "pyproject.toml", "requirements.txt", "README.md", "LICENSE"),
    ".ci/constraints.txt",
)
#: Seconds for a submission, less than the shortest limit of Gradescope, and for a cell.
SECONDS, CELL = 540.0, 90.0
#: Gigabytes for a submission: the smallest container with more than that has 3 GB.
MEMORY = 2.5
PROGRAMS = ("setup.sh", "run_autograder")


def build(solution: Path, target: Path) -> Path:
    """Write ``target/gradescope-NAME.zip`` for the lab of a solution; return its path.

    Raises:
        NotebookError: This isn't a git clone.
    """
    done = subprocess.run(
        ["git", "ls-files", "-z", "--", *FILES], cwd=ROOT, capture_output=True, check=False
    )
    if done.returncode:
        raise NotebookError(f"{ROOT} isn't a git clone, so nobody knows which files the course has")
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"gradescope-{solution.stem}.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in PROGRAMS:
            text = (resources.files(__package__) / "gradescope_programs" / name).read_text("utf-8")
            entry = zipfile.ZipInfo(name)
            entry.external_attr = 0o755 << 16
            archive.writestr(entry, text.replace("LAB", solution.stem))
        for name in [*done.stdout.decode().split("\0")[:-1], f"solutions/{solution.name}"]:
            archive.write(ROOT / name, f"course/{name}")
    return path


def main(root: Path, lab: str) -> int:
    """Grade the submission below a folder as Gradescope lays it out; return the exit status.

    Without a grade there is no results.json, and Gradescope tells the instructor that the
    autograder failed.
    """
    from .command import main as grade

    with tempfile.TemporaryDirectory(prefix="class-") as name:
        submissions, out = Path(name, "submissions"), Path(name, "results")
        shutil.copytree(root / "submission", submissions / "student")
        status = grade(_options(submissions, out, lab))
        stored = map(load, out.glob("students/*/*/result.json"))
        graded = [result for result in stored if result and not result.error]
        if not graded:
            return status or 1
        report = json.dumps(report_of(graded[0]), ensure_ascii=False, indent=1)
        (root / "results" / "results.json").write_text(report, encoding="utf-8")
    return 0


def _options(submissions: Path, out: Path, lab: str) -> GradingOptions:
    """Return the options of `ddl-labs grade` for a container of Gradescope."""
    parser = argparse.ArgumentParser()
    add_options(parser, ROOT)
    words = [str(submissions), "-o", str(out), "--only", lab, "--by-user", "--quiet"]
    words += ["--timeout", str(SECONDS), "--cell-timeout", str(CELL), "--memory", str(MEMORY)]
    return GradingOptions.from_arguments(parser.parse_args(words), "ddl-labs gradescope")


def report_of(result: Result) -> dict[str, Any]:
    """Return a result in the form of Gradescope's results.json; written answers are left out."""
    written = [task.task for task in result.written]
    said = [*result.remarks]
    if written:
        said.append(f"A person grades the written answers: {', '.join(written)}.")
    return {
        "score": sum(task.points or 0 for task in result.tasks),
        "execution_time": round(result.seconds),
        "output": "\n".join(said),
        "tests": [_test(task) for task in result.tasks if task.task not in written],
    }


def _test(task: TaskResult) -> dict[str, Any]:
    shown = [f"{one.title}\n{one.text}" for one in task.shown]
    return {
        "name": f"{task.task} {task.title}",
        "score": task.points or 0,
        "max_score": task.most,
        "status": "passed" if task.status == "passed" else "failed",
        "output": "\n\n".join([task.said or label(task), *shown]),
        "visibility": "visible",
    }


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
