"""The notebooks on ranks inside the kernel, for users who have no MPI and can't fork.

A notebook shows the stored outputs there, too: those of ranks that are processes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import without_mpi
from test_solutions import nbval

from utils.course.notebook import LABS, SOLUTIONS, notebooks

#: Seconds for a notebook.
NOTEBOOK = 300
#: `make test` runs these, and `make test-all` the others, too.
FIRST = {"00", "01"}
WITHOUT_PROCESSES = {*FIRST, "02", "03", "04", "05", "06", "10"}
#: What `cluster.start` says is the only difference.
SANITIZE = r"""
[processes]
regex: (\d+) MPI (ranks? ha(ve|s) started\.)
replace: \1 \2

[threads]
regex: (started\.) They are threads of this kernel.*
replace: \1
"""

pytestmark = pytest.mark.timeout(NOTEBOOK + 60)


def solutions() -> list:
    """Return the notebooks' paths for pytest."""
    return [
        pytest.param(
            path,
            id=path.stem,
            marks=() if path.stem[:2] in FIRST else pytest.mark.extended,
        )
        for path in notebooks(SOLUTIONS)
        if path.stem[:2] in WITHOUT_PROCESSES
    ]


@pytest.mark.parametrize("path", solutions())
def test_without_mpi_and_fork_a_lab_shows_the_same_and_checks_the_same(path: Path, tmp_path: Path):
    (tmp_path / "sanitize.cfg").write_text(SANITIZE)
    found = nbval(
        path,
        tmp_path / "report.xml",
        student=LABS / path.name,
        notebook=NOTEBOOK,
        environment=without_mpi.environment() | {"DDL_LABS_WHERE": "here"},
        options=["--nbval-sanitize-with", str(tmp_path / "sanitize.cfg")],
    )
    assert not found, "\n".join(found)
