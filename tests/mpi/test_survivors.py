"""A rank dies, and the others go on: a job that `mpiexec --with-ft ulfm` starts, and a notebook."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from fault_tools import Notebook, notebook
from mpi_jobs import find_mpiexec, mpi_environment, run_tree

from torch_mpi.library import is_open_mpi, version
from utils import cluster
from utils.jobs.site import Launcher

pytestmark = pytest.mark.timeout(120)

# Seconds from the last print of a job to its end: on a quiet machine, and on any.
SOON, IN_TIME = 3.0, 30.0

HEAD = """
import datetime, os, random, signal, sys, threading, time
import torch, torch.distributed as dist
from torch_mpi.survivors import shrink
dist.init_process_group("mpi", timeout=datetime.timedelta(seconds=30))
born = dist.get_rank()

def agree_on_the_smallest(step):
    steps = [None] * dist.get_world_size()
    dist.all_gather_object(steps, step)
    return min(steps)

def end():
    dist.barrier()
    print(f"END {born}: rank {dist.get_rank()} of {dist.get_world_size()}", time.time(), flush=True)
"""

# Each victim dies at the step that is given; everybody else takes all steps.
TRAINING = (
    HEAD
    + """
kills = {int(k): int(s) for k, s in (word.split(":") for word in sys.argv[1:])}
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = 0
while step < 12:
    try:
        if kills.get(born) == step:
            os.kill(os.getpid(), signal.SIGKILL)
        rank, size = dist.get_rank(), dist.get_world_size()
        batch = torch.arange(48.0).reshape(12, 4)[rank::size] + step
        model.zero_grad()
        (model(batch).sum() / 12).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-3 * parameter.grad
        step += 1
    except RuntimeError as error:
        print(f"ERROR {born}: {error}", flush=True)
        shrink()
        step = agree_on_the_smallest(step)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
print(f"WEIGHTS {born}:", [round(w, 4) for p in model.parameters() for w in p.flatten().tolist()])
end()
"""
)

# Victims die at random moments of a loop through all kinds of communication.
ANY_TIME = (
    HEAD
    + """
seed, deaths = map(int, sys.argv[1:])
chance = random.Random(seed)
victims = chance.sample(range(dist.get_world_size()), deaths)
moments = [chance.uniform(0.02, 0.5) for _ in victims]
if chance.random() < 0.4:
    moments = [moments[0] + chance.uniform(0, 0.02) for _ in victims]
if born in victims:
    moment = moments[victims.index(born)]
    threading.Timer(moment, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

def communicate(step):
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones((1, 1000, 100_000, 4_000_000)[step % 4])
    kind = step % 7
    if kind < 2:
        dist.all_reduce(tensor)
        assert tensor[0] == size
    elif kind == 2:
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()
        assert tensor[0] == size
    elif kind == 3 and size > 1:
        sent, got = dist.isend(tensor, (rank + 1) % size), torch.zeros_like(tensor)
        dist.recv(got, (rank - 1) % size)
        sent.wait()
    elif kind == 4:
        dist.barrier()
    elif kind == 5 and rank == 0:
        for _ in range(size - 1):
            dist.recv(tensor)
    elif kind == 5:
        dist.send(tensor, 0)
    else:
        dist.destroy_process_group(dist.new_group(list(range(size))))

step, over, begin = 0, False, time.perf_counter()
while not over:
    try:
        communicate(step)
        step += 1
        late = torch.tensor([float(time.perf_counter() - begin > 0.8)])
        dist.all_reduce(late, op=dist.ReduceOp.MAX)
        over = late.item() > 0
    except RuntimeError:
        step = None
        while step is None:
            try:
                shrink()
                step = agree_on_the_smallest(0)
            except RuntimeError as again:
                print(f"AGAIN {born}: {again}", flush=True)
end()
"""
)


@pytest.fixture(scope="module")
def survive() -> Callable[..., tuple[str, int]]:
    """`survive(code, *arguments)` on four ranks: what they printed, and mpiexec's status.

    After the last word the job has to end by itself.
    """
    launcher = find_mpiexec()
    if launcher is None or not is_open_mpi(version(launcher)):
        pytest.skip("ULFM takes Open MPI")

    def run(
        code: str, *arguments: object, ranks: int = 4, within: float = IN_TIME
    ) -> tuple[str, int]:
        command = [launcher, "--with-ft", "ulfm", "-n", str(ranks), "--bind-to", "none"]
        command += [sys.executable, "-c", code, *map(str, arguments)]
        done = run_tree(command, timeout=90, env=mpi_environment())
        ended = time.time()
        said = done.stdout + done.stderr
        if ends := re.findall(r"^END .* (\d+\.\d+)$", done.stdout, re.MULTILINE):
            assert ended - float(max(ends)) < within, said
        return said, done.returncode

    return run


def ends(said: str) -> dict[int, str]:
    """What the ranks were at the end, by their first numbers."""
    found = re.findall(r"^END (\d): (rank \d of \d)", said, re.MULTILINE)
    return {int(born): now for born, now in found}


@pytest.mark.parametrize("kills", [("1:5",), ("0:5",), ("1:5", "2:8"), ("0:3", "3:3")])
def test_a_training_goes_on_with_the_ranks_that_live_and_ends_by_itself(survive, kills):
    said, status = survive(TRAINING, *kills)
    dead = {int(kill[0]) for kill in kills}
    living = [rank for rank in range(4) if rank not in dead]
    assert status == 0, said
    assert ends(said) == {r: f"rank {k} of {len(living)}" for k, r in enumerate(living)}, said
    # Each death is an error that names the dead on every other rank. Two may die in one step.
    steps = {kill[0]: int(kill.split(":")[1]) for kill in kills}
    first = "".join(rank for rank, step in steps.items() if step == min(steps.values()))
    named = rf"ERROR \d: rank \d stopped waiting in all_reduce.*rank [{first}] died"
    assert re.search(named, said), said
    weights = {tuple(w.split()) for w in re.findall(r"WEIGHTS \d: \[(.*)\]", said)}
    assert len(weights) == 1, said


@pytest.mark.parametrize(("seed", "deaths"), [(1, 1), (2, 2)])
def test_a_rank_may_die_at_any_moment(survive, seed, deaths):
    said, status = survive(ANY_TIME, seed, deaths)
    assert status == 0, said
    assert len(ends(said)) == 4 - deaths, said


@pytest.mark.often
@pytest.mark.parametrize("deaths", [1, 2])
@pytest.mark.parametrize("seed", range(100, 120))
def test_a_rank_may_die_at_many_moments(survive, seed, deaths):
    said, status = survive(ANY_TIME, seed, deaths, within=SOON)
    assert status == 0, said
    assert len(ends(said)) == 4 - deaths, said


OWN_END = (
    HEAD
    + """
how = sys.argv[1]
try:
    for step in range(4):
        if born == 1 and step == 2:
            if how == "raises":
                raise ZeroDivisionError("a bug")
            if how == "exits":
                sys.exit()
            os._exit(3)
        dist.all_reduce(torch.ones(2))
except RuntimeError as error:
    print(f"ERROR {born}: {error}", flush=True)
    shrink()
    dist.all_reduce(torch.ones(2))
end()
"""
)


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_that_fails_or_leaves_is_done_without_too(survive, how):
    said, _ = survive(OWN_END, how)
    assert ends(said) == {0: "rank 0 of 3", 2: "rank 1 of 3", 3: "rank 2 of 3"}, said
    assert ("ZeroDivisionError: a bug" in said) == (how == "raises")


def test_a_death_that_mpi_does_not_notice_is_said_instead_of_a_hang(survive):
    said, status = survive(OWN_END, "a status other than 0")
    assert "Open MPI did not notice that rank 1 died" in said
    assert status != 0


REFUSED = (
    HEAD
    + """
try:
    shrink()
except RuntimeError as error:
    print(f"REFUSED {born}: {error}", flush=True)
end()
"""
)


def test_shrink_with_all_ranks_alive_is_refused(survive):
    said, status = survive(REFUSED, ranks=2)
    assert said.count("all ranks live") == 2
    assert status == 0


def test_shrink_in_an_ordinary_job_says_how_to_start_one_that_survives(mpiexec):
    said = mpiexec(2, REFUSED).stdout
    assert said.count("Start the ranks with mpiexec --with-ft ulfm") == 2


def test_the_other_ranks_still_end_together_where_nobody_handles_a_death(survive):
    code = (
        HEAD
        + """
if born == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(2))
"""
    )
    said, status = survive(code)
    assert status != 0
    assert len(re.findall("^rank 1 died: its process", said, re.MULTILINE)) == 1, said


# --- in a notebook ----------------------------------------------------------------------------

START = "from utils import cluster\nranks = cluster.start(4, fault_tolerant=True)"
SET_UP = """\
%%px
import os, signal, torch, torch.distributed as dist
from torch_mpi.survivors import shrink
dist.init_process_group("mpi")
born = dist.get_rank()
"""
SHRINK = """\
%%px
shrink()
total = torch.tensor(born)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item()}")
"""


def die(rank: int, how: str = "os.kill(os.getpid(), signal.SIGKILL)") -> str:
    return f"%%px\nif born == {rank}:\n    {how}\nfor _ in range(9):\n    dist.all_reduce(total)"


@pytest.fixture(scope="module")
def book() -> Iterator[Notebook]:
    launcher = find_mpiexec()
    if launcher is None or not is_open_mpi(version(launcher)):
        pytest.skip("ULFM takes Open MPI")
    with notebook(IPP_NONINTERACTIVE="1") as book:
        yield book


@pytest.fixture
def course(book) -> Notebook:
    for cell in (START, SET_UP, "%px total = torch.ones(3)"):
        shown = book.run(cell)
        assert not shown.failed(), shown.everything()
    return book


def failed(book: Notebook, cell: str) -> str:
    shown = book.run(cell)
    assert shown.failed(), shown.everything()
    return re.sub(r"\s+", " ", shown.message())


def test_in_a_notebook_the_next_cell_runs_on_the_ranks_that_live(course):
    text = failed(course, die(2))
    assert text.startswith("rank 2 died"), text
    assert "ranks 0, 1, 3 survived" in text
    assert "torch_mpi.survivors.shrink()" in text
    assert "MPI then ended" not in text
    # Without it, a communication is an error that says what to do.
    assert "rank 2 is dead" in failed(course, "%%px\ndist.all_reduce(total)")
    shown = course.run(SHRINK)
    assert re.findall(r"rank \d of 3: 4", shown.streams) == [f"rank {r} of 3: 4" for r in range(3)]
    # The timeline, a deadlock's report and what was not received use the ranks' new numbers.
    shown = course.run("[t['rank'] for t in ranks.timeline().totals]")
    assert "[0, 1, 2]" in shown.everything()
    text = failed(course, "%%px\ndist.recv(torch.ones(1), src=(dist.get_rank() + 1) % 3)")
    assert "cycle 0 → 1 → 2 → 0" in text, text
    shown = course.run("%%px\nif born == 3:\n    dist.send(torch.ones(1), 0)")
    assert "rank 2 sent float32[1]" in shown.streams, shown.everything()
    # A second death, of rank 0, which ends with a status of its own.
    text = failed(course, die(0, "os._exit(3)"))
    assert text.startswith("rank 0 died"), text
    assert "ranks 1, 2 survived" in text
    shown = course.run(SHRINK)
    assert re.findall(r"rank \d of 2: 4", shown.streams) == ["rank 0 of 2: 4", "rank 1 of 2: 4"]
    shown = course.run("len(ranks.ask('os:nothing')), ranks.where()")
    assert "(2, None)" in shown.everything()
    # What each rank is told goes by its number at the start: the error names its argument.
    shown = course.run(
        "each = [{f'of_{r}': 0} for r in range(4)]\n"
        "[r.error for r in ranks.ask('utils.checks.probe:definitions', each=each)]"
    )
    assert re.findall(r"unexpected keyword argument 'of_(\d)'", shown.everything()) == ["1", "3"]
    shown = course.run("ranks.restart()")
    assert not shown.failed(), shown.everything()
    shown = course.run("%px print('fresh', mpi_rank)")
    assert shown.streams.count("fresh") == 4


@pytest.mark.often
@pytest.mark.parametrize("deaths", [(1,), (0, 3)])
@pytest.mark.parametrize("_again", range(20))
def test_in_a_notebook_many_times(course, deaths, _again):
    for victim in deaths:
        assert "survived" in failed(course, die(victim))
        shown = course.run(SHRINK)
        assert not shown.failed(), shown.everything()
    before = time.monotonic()
    assert not course.run("ranks.stop()").failed()
    assert time.monotonic() - before < SOON


def test_ranks_that_cannot_live_on_are_refused_before_they_start(monkeypatch):
    hydra = Launcher("/opt/mpich/bin/mpiexec", "HYDRA 4.0.2")
    monkeypatch.setattr("utils.jobs.start_plan.find_launcher", lambda: hydra)
    with pytest.raises(ValueError, match=r"Open MPI 5 on one host, but .*HYDRA"):
        cluster.start(2, fault_tolerant=True)
