"""``ddl-labs rerun``: a notebook that grading has run, once more and inside of the sandbox.

A notebook of a result holds a student's code. Under JupyterLab or nbval it could do all that the
instructor can; here it can do no more than it could while it was graded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from utils.course.notebook import NotebookError

from .grading_options import SandboxOptions
from .notebook_run import Run, run
from .sandbox import make_box, require

#: Lines that are told of one output.
MOST_LINES = 40


class RerunError(NotebookError):
    """There is no notebook that could be run; the message says which was given."""


def main(path: Path, options: SandboxOptions) -> int:
    """Run a notebook and print what its cells said.

    Args:
        path: The notebook, or the folder `run-1` of a result.
        options: What the notebook may use and see.

    Returns:
        0 if every check has passed; otherwise 1.
    """
    nb = notebook(path)
    box = make_box(options)
    with tempfile.TemporaryDirectory(prefix="grading-") as scratch:
        require(box, Path(scratch))
        done = run(nb, box, Path(scratch) / "run")
    for line in told(done):
        print(harmless(line))
    checks = [one for one in done.records if one["verdicts"]]
    whole = not done.end and not done.fault
    return 0 if whole and all(one["outcome"] == "passed" for one in checks) else 1


def notebook(path: Path) -> NotebookNode:
    """Return the notebook in a file, or in a folder `run-1`. Raises RerunError if none is there."""
    path = path / "notebook.ipynb" if path.is_dir() else path
    try:
        nb: NotebookNode = nbformat.read(path, as_version=4)
    except OSError as error:
        raise RerunError(
            f"{path}: {error.strerror}; give RESULTS/students/NAME/LAB/run-1/notebook.ipynb"
        ) from error
    except (ValueError, AttributeError, nbformat.ValidationError) as error:
        raise RerunError(f"{path} is not a notebook: {error}") from error
    return nb


def harmless(line: str) -> str:
    """Return the line without what a terminal would obey: students have printed it."""
    return "".join(one if one.isprintable() or one == "\t" else "�" for one in line)


def told(done: Run) -> Iterator[str]:
    """Yield in lines each cell's outcome, with its outputs if it has failed or is a check."""
    for record in done.records:
        yield f"{'✓' if record['outcome'] == 'passed' else '✗'} cell '{record['cell']}'"
        if record["outcome"] != "passed" or record["verdicts"]:
            texts = "\n".join(one.get("text", "") for one in record["outputs"]).splitlines()
            yield from (f"    {line}" for line in texts[:MOST_LINES])
            if len(texts) > MOST_LINES:
                yield f"    … and {len(texts) - MOST_LINES} more lines"
    if done.end or done.fault:
        yield f"ended early: {done.end or done.fault}"
    yield f"{len(done.records)} cells, {done.seconds:.0f} s"
