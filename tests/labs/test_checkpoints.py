"""Lab 13: saves that are killed, what a check of saves sees, what failures cost, ranks that die."""

from __future__ import annotations

import contextlib
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from fault_tools import notebook
from lab_tools import ROOT, answers, source_of
from mpi_jobs import find_mpiexec

from torch_mpi.library import is_open_mpi, version
from utils.figures import alt
from utils.labs.lab13 import faults, pictures
from utils.labs.lab13.checks import account
from utils.labs.lab13.save_probe import Watched

NOTEBOOK = "13_faults.ipynb"

# --- a save is killed -------------------------------------------------------------------------

# Two ranks save again and again; both are killed at one random moment; what is there is loaded.
KILLED = """
import io, os, random, shutil, signal, sys, tempfile, time
from pathlib import Path
import torch, torch.distributed as dist
torch.set_num_threads(1)
kills, helpers, save_cell = int(sys.argv[1]), sys.argv[2], sys.argv[3]

def place_and_size(group=None):
    return dist.get_rank(group), dist.get_world_size(group)

exec(helpers)
exec(save_cell)
chance, folder = random.Random(13), Path(tempfile.mkdtemp())

def state(step, rank):
    return {"step": step, "rank": rank, "weights": torch.full((20_000,), float(step + rank))}

def newest():
    name = (folder / "latest").read_text()
    for rank in range(2):
        found = torch.load(folder / name / f"rank-{rank}.pt")
        assert found["step"] == int(name[5:]) and found["rank"] == rank, (name, found)
        assert torch.equal(found["weights"], state(found["step"], rank)["weights"])
    return found["step"]

def rank_of_a_job(rank, first, store):
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    Path(store + f"-{rank}").touch()
    for step in range(first, 10**6):
        save(folder, step, state(step, rank))

def job(first, number):
    store, pids = f"{folder}-store-{number}", []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            try:
                rank_of_a_job(rank, first, store)
            finally:
                os._exit(1)
        pids.append(pid)
    deadline = time.monotonic() + 30
    while not all(os.path.exists(f"{store}-{rank}") for rank in range(2)):
        assert time.monotonic() < deadline, "the ranks do not come up"
        time.sleep(0.001)
    return pids

known, moved = 0, 0
for number in range(kills):
    pids = job(known + 1, number)
    time.sleep(chance.uniform(0, 0.03))
    # Stopped first: otherwise one could notice the end of the other, and end with an error.
    for kind in (signal.SIGSTOP, signal.SIGKILL):
        for pid in chance.sample(pids, 2):
            os.kill(pid, kind)
    for pid in pids:
        _, how = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(how), "a save ended with an error"
    if (folder / "latest").exists():
        step = newest()
        assert step >= known, (step, known)
        moved += step > known
        known = step
        for old in folder.glob("step-*"):
            if int(old.name[5:]) < known:
                shutil.rmtree(old)
    else:
        assert known == 0, "the marker is gone"
shutil.rmtree(folder)
print(f"{kills} kills, {moved} of them after a new checkpoint, at step {known}")
"""


def kill_saves(kills: int, save: str, timeout: float) -> subprocess.CompletedProcess:
    helpers = source_of(NOTEBOOK, "save-helpers")
    command = [sys.executable, "-c", KILLED, str(kills), helpers, save]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)


def saved() -> str:
    return answers(NOTEBOOK)["lab13-save-answer"]


def test_a_save_of_two_ranks_that_is_killed_leaves_a_checkpoint():
    done = kill_saves(10, saved(), 100)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.often
@pytest.mark.timeout(600)
def test_a_save_of_two_ranks_that_is_killed_200_times_leaves_a_checkpoint_each_time():
    done = kill_saves(200, saved(), 500)
    assert done.returncode == 0, done.stderr[-2000:]
    moved = int(re.search(r"(\d+) of them", done.stdout)[1])
    assert moved > 40, done.stdout


@pytest.mark.often
@pytest.mark.timeout(600)
def test_kills_find_a_save_that_writes_the_marker_first():
    """The test above can fail."""
    marker = '    if place == 0:\n        write_safely(folder / "latest", own.name.encode())\n'
    data = '    write_safely(own / f"rank-{place}.pt", to_bytes(state))\n'
    careless = saved().replace(marker, "").replace(data, marker + data)
    done = kill_saves(200, careless, 500)
    assert "No such file or directory" in done.stderr, done.stderr + done.stdout


# --- what a check sees ------------------------------------------------------------------------


def watched(folder: Path, write: Callable[[Path], None]) -> list[tuple[dict, dict, dict, dict]]:
    """What was left after each operation of `write`."""
    watch = Watched(folder)
    watch.run(write, folder, names={})
    return [moment.left for moment in watch.moments]


def test_a_file_that_is_written_over_is_empty_for_a_moment(tmp_path):
    (tmp_path / "a").write_text("old")

    def write(folder: Path) -> None:
        with open(folder / "a", "w", encoding="utf-8") as file:
            file.write("new")

    left = watched(tmp_path, write)
    assert [seen["a"] for seen, *_ in left] == [b"old", b"", b"new"]
    assert {lasting["a"] for _, lasting, *_ in left} == {b"old"}


@pytest.mark.parametrize("folders", [False, True])
def test_what_was_not_forced_to_the_disk_is_lost_with_the_power(tmp_path, folders):
    def write(folder: Path) -> None:
        with open(folder / "b", "wb") as file:
            file.write(b"new")
            file.flush()
            os.fsync(file.fileno())
        os.replace(folder / "b", folder / "a")
        if folders:
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    seen, lasting, kept, _ = watched(tmp_path, write)[-1]
    assert seen == kept == {"a": b"new"}
    assert lasting == ({"a": b"new"} if folders else {})


def test_a_renamed_file_without_fsync_has_a_name_and_no_content(tmp_path):
    def write(folder: Path) -> None:
        (folder / "b").write_bytes(b"new")
        os.replace(folder / "b", folder / "a")

    seen, lasting, kept, _ = watched(tmp_path, write)[-1]
    assert (seen, lasting, kept) == ({"a": b"new"}, {}, {"a": b""})


@pytest.mark.parametrize("forced", [False, True])
def test_a_new_folder_whose_name_was_not_forced_is_lost_with_what_is_in_it(tmp_path, forced):
    def flush(folder: Path) -> None:
        handle = os.open(folder, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    def write(folder: Path) -> None:
        (folder / "new").mkdir()
        if forced:
            flush(folder)
        (folder / "new" / "a").write_bytes(b"1")
        flush(folder / "new")
        (folder / "b").write_bytes(b"2")

    *_, without_new_folders = watched(tmp_path, write)[-1]
    assert without_new_folders.keys() == ({"new/a", "b"} if forced else {"b"})


# --- what failures cost -----------------------------------------------------------------------


@pytest.mark.parametrize(("save", "mtbf"), [(1.0, 5000.0), (60.0, 3600.0)])
def test_dalys_interval_is_where_the_overhead_is_smallest(save, mtbf):
    best = faults.daly(save, mtbf)
    at_best = faults.overhead(best, save, 10.0, mtbf)
    assert all(faults.overhead(best * f, save, 10.0, mtbf) > at_best for f in (0.8, 1.25))
    assert faults.daly(2.0, 1.0) == 1.0
    assert best == pytest.approx(math.sqrt(2 * save * mtbf), rel=0.1)


def test_many_failures_cost_what_is_expected():
    failures = faults.failure_times(100.0, 2e6, seed=1)
    run = account(1e6, 15.0, 1.0, 4.0, failures)
    assert run["seconds"] / 1e6 - 1 == pytest.approx(
        faults.overhead(15.0, 1.0, 4.0, 100.0), rel=0.05
    )
    assert run["lost"] / run["failures"] == pytest.approx(7.5, rel=0.1)


@pytest.mark.parametrize(
    ("guess", "marks"), [({"minutes": 30.0, "lost": 5.0}, 2), ({"minutes": None, "lost": None}, 0)]
)
def test_a_student_sees_the_prediction_beside_formula_and_random_failures(guess, marks):
    formula = {save: {n: (60.0 * save, 0.9) for n in (1024, 4096)} for save in (300, 5)}
    figure = pictures.at_scale(formula, {300: 0.91, 5: 0.96}, 1.8e8, guess)
    said = alt.describe(figure)
    assert "a save of 300 s: every 300 min on 4,096, useful 90.0 % of 4,096" in said
    assert "simulated 91.0 % of 4,096" in said
    lines = [line for axes in figure.axes for line in axes.lines]
    assert sum(line.get_marker() == "D" for line in lines) == marks


# --- jobs that die ----------------------------------------------------------------------------


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(source_of(NOTEBOOK, "script-write").partition("\n")[2])
    return path


def needs_ulfm() -> None:
    launcher = find_mpiexec()
    if launcher is None or not is_open_mpi(version(launcher)):
        pytest.skip("ULFM takes Open MPI")


@pytest.mark.timeout(120)
def test_a_job_that_was_killed_goes_on_from_its_checkpoint(script, tmp_path):
    needs_ulfm()
    first_death = {}
    exec(f"import re\n{answers(NOTEBOOK)['lab13-report-answer']}", first_death)
    first_death = first_death["first_death"]
    ended = faults.mpiexec(3, script, tmp_path / "c", "--die", "2:7")
    assert ended.status != 0
    assert first_death(ended.out + ended.err) == {"rank": 2, "signal": 9}
    again = faults.mpiexec(2, script, tmp_path / "c")
    assert again.status == 0, again.err
    assert "go on from step 4" in again.out
    silent = faults.mpiexec(3, script, tmp_path / "d", "--die", "1:2", survive=True)
    assert first_death(silent.out + silent.err) == {"rank": 1, "signal": None}, silent.err
    with pytest.raises(FileNotFoundError, match="Run the cell that writes it"):
        faults.mpiexec(1, tmp_path / "nothing.py")


@pytest.mark.timeout(180)
def test_torchrun_starts_all_processes_anew(script, tmp_path):
    ended = faults.torchrun(2, script, tmp_path / "c", "--die", "1:7", restarts=1)
    assert ended.status == 0, ended.err
    assert "life 1: 2 ranks go on from step 4" in ended.out
    assert ended.out.rstrip().endswith("at step 12: [0.0, 0.9313, 1.8626, 2.7938]")


@pytest.mark.timeout(240)
def test_after_each_death_of_the_notebook_the_next_cell_runs(tmp_path):
    """That no process is left is seen to by conftest.py."""
    needs_ulfm()
    nb = nbformat.read(ROOT / "solutions" / NOTEBOOK, as_version=4)
    cells = {cell.id: cell.source for cell in nb.cells}
    with notebook(IPP_NONINTERACTIVE="1") as book, contextlib.ExitStack() as stack:
        stack.callback(book.run, "ranks.stop()")

        def run(*names: str) -> str:
            shown = None
            for name in names:
                shown = book.run(cells[name])
                assert not shown.failed(), f"{name}: {shown.everything()}"
            return shown.streams if shown else ""

        run("ranks-up")
        shown = book.run(cells["death-notebook"])
        assert "rank 2 died (signal 9" in shown.message()
        run("ranks-again", "job-define", "data-load", "shrink-define", "lab13-shrink-answer",
            "shrink-train")  # fmt: skip
        shown = book.run(cells["shrink-kill"])
        assert "ranks 0, 1, 3 survived" in re.sub(r"\s+", " ", shown.message())
        assert shown.streams.count("of 3, and goes on from step 12") == 3
        assert run("shrink-see").count("0 done again") == 3
        run("grow-restart")
        shown = book.run("%px print('fresh', mpi_rank)")
        assert shown.streams.count("fresh") == 4
