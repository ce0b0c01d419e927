"""Random cells, errors, interrupts and kills in one notebook.

`python -m tests.cluster.stress` runs for an hour; this is the same in small.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

import psutil
import pytest

from tests.cluster.stress import cells, draw
from tests.cluster.stress.__main__ import main
from tests.cluster.stress.cells import RIGHT, WRONG, Cell, px
from tests.cluster.stress.load import load
from tests.cluster.stress.runner import Runner

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    made = Runner(seed=1, n=2, warm=False, say=lambda what: None)
    yield made
    assert made.close() == [], "what stays behind"


@pytest.fixture
def found(runner) -> Iterator[list]:
    """What is found during a test."""
    runner.record.findings.clear()
    yield runner.record.findings
    runner.record.findings.clear()


def test_a_notebook_works_after_an_error_a_stop_a_kill_and_a_restart(runner, found):
    runner.play(draw.one_of_each(seed=1, n=2))
    runner.count()
    assert not found, "\n\n".join(map(str, found))
    assert {kind for kind, _ in runner.record.cells} == {
        *(RIGHT, WRONG, cells.INTERRUPT, cells.KILL, cells.RESTART, cells.FREEZE)
    }
    assert runner.record.restarts == 2
    assert runner.record.notebooks == 1


# --- it notices what it is there for --------------------------------------------------------------

LEAKS = {
    "descriptors": "kept = [os.open('/dev/null', os.O_RDONLY) for _ in range(9)]\n",
    "communicators": "kept = [MPI.COMM_WORLD.Dup() for _ in range(2)]\n",
    "threads": "import threading\nfor _ in range(4):\n"
    "    threading.Thread(target=threading.Event().wait, args=(60,), daemon=True).start()\n",
    "memory": "kept = torch.ones(50_000_000)\n",
    "files in /dev/shm": "import tempfile\n"
    "kept = [tempfile.TemporaryFile(dir='/dev/shm') for _ in range(3)]\n",
}


@pytest.mark.parametrize("what", LEAKS)
def test_a_rank_that_keeps_more_and_more_is_found(what, runner, found):
    runner.count()
    runner.play([(1, Cell(RIGHT, "leak", px(LEAKS[what])))])
    runner.count()
    grown = [finding.what for finding in found if f" {what}, now " in finding.what]
    assert len(grown) == 2, found  # on each rank
    if what == "descriptors":
        assert "9 × /dev/null" in grown[0]


HANGS = "def endless():\n    while True:\n        time.sleep(0.01)\nendless()\n"


def test_a_cell_that_hangs_is_found_with_the_line_of_each_rank(runner, found):
    runner.deadline, before = 3.0, runner.deadline
    try:
        runner.play([(7, Cell(RIGHT, "hang", px(HANGS)))])
    finally:
        runner.deadline = before
    (finding,) = found
    assert finding.number == 7
    assert "not over after 3.0 s" in finding.what
    for rank in (0, 1):
        stack = finding.stacks.partition(f"rank {rank} (")[2]
        assert "in endless" in stack, finding.stacks
    assert "kernel (" in finding.stacks
    # The notebook was mended.
    found.clear()
    runner.play([(8, draw.cell(1, 8, 2))])
    assert not found, "\n\n".join(map(str, found))


WRONG_CELLS = {
    "it failed": Cell(RIGHT, "", px("1 / 0\n")),
    "some ranks have not printed": Cell(RIGHT, "", px(f"if rank:\n    {cells.WORKS}")),
    "nothing was said; expected: ^Deadlock": Cell(WRONG, "", px("pass\n"), says="^Deadlock"),
    "not said: ^Deadlock": Cell(WRONG, "", px("1 / 0\n"), says="^Deadlock"),
    "not printed: received": Cell(WRONG, "", px("pass\n"), prints="received"),
    "it does not advise to restart": Cell(WRONG, "", px("1 / 0\n"), says="Zero", restart=True),
}


@pytest.mark.parametrize("what", WRONG_CELLS)
def test_a_cell_that_ends_in_another_way_than_it_must_is_found(what, runner, found):
    runner.play([(1, WRONG_CELLS[what])])
    assert what in found[0].what
    assert found[0].cell == WRONG_CELLS[what]


# --- without ranks --------------------------------------------------------------------------------


@pytest.mark.quick
def test_a_cell_follows_from_seed_and_number_alone():
    for number in range(50):
        assert draw.cell(3, number, 4) == draw.cell(3, number, 4)
    played = list(itertools.islice(draw.cells(3, 4, first=40), 3))
    assert played == [(k, draw.cell(3, k, 4)) for k in (40, 41, 42)]
    assert draw.cell(3, 1, 4) != draw.cell(4, 1, 4)


@pytest.mark.quick
@pytest.mark.parametrize("n", [2, 3, 4])
def test_what_is_drawn_is_python_and_all_kinds_come(n):
    drawn = [draw.cell(0, number, n) for number in range(700)]
    for cell in drawn:
        for text in (*cell.before, cell.text, *cell.after):
            ast.parse(text.partition("\n")[2] if text.startswith("%%px") else text)
            assert "$" not in text
    kinds = {cell.kind for cell in drawn}
    assert kinds == {RIGHT, WRONG, cells.INTERRUPT, cells.KILL, cells.RESTART, cells.FREEZE}


@pytest.mark.quick
def test_the_load_ends_with_its_block():
    with load(2) as loops:
        assert all(psutil.pid_exists(loop.pid) for loop in loops)
    assert all(loop.poll() is not None for loop in loops)


# --- five minutes ---------------------------------------------------------------------------------


@pytest.mark.often
@pytest.mark.timeout(900)
def test_a_notebook_works_after_five_minutes_of_accidents_under_load(capsys):
    status = main(["--minutes", "5", "--seed", "3", "--ranks", "4", "--load", "2"])
    assert status == 0, capsys.readouterr().out
