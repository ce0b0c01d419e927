"""After an error on some ranks: all go on together, or all are told to restart."""

from __future__ import annotations

import re
import sys

import pytest
from mpi_jobs import find_mpiexec, mpi_environment, run_tree

BROKEN = """
import torch, torch.distributed as dist
from torch_mpi.protocol import recovery, world
from torch_mpi.errors import CommunicationError

dist.init_process_group("mpi")
rank = dist.get_rank()
if rank == 1:
    def fail(*_):
        raise CommunicationError("a message did not come in time")
    recovery.exchange = fail
else:
    recovery.DEADLINE = 9999.0  # it waits for what will never come
world.current().begin_incident("raised", "a test's error")
for attempt in (1, 2):
    try:
        dist.all_reduce(torch.ones(1))
        print("WENT ON", flush=True)
    except CommunicationError as error:
        print(f"rank {rank}: {error}", flush=True)
"""


def test_where_the_ranks_cannot_get_together_again_all_are_told_to_restart(mpiexec):
    done = mpiexec(3, BROKEN, timeout=100)
    assert "WENT ON" not in done.stdout
    for rank in range(3):
        lines = re.findall(rf"^rank {rank}: (.*)$", done.stdout, re.MULTILINE)
        assert len(lines) == 2
        assert all("start the program again" in line for line in lines), lines


LATE = """
import time, torch, torch.distributed as dist
from torch_mpi.protocol import world
from torch_mpi.errors import CommunicationTimeout

dist.init_process_group("mpi")
rank = dist.get_rank()
here = world.current()
here.begin_incident("raised", "a test's error")
if rank == 0:  # it leaves the assembly, as after a deadline or Ctrl-C, and comes again
    for _ in range(3):
        try:
            here.recover(timeout=0.1)
        except CommunicationTimeout:
            print("LEFT", flush=True)
else:
    while not here.statuses()[0].get("told"):
        time.sleep(1e-3)
if rank == 0:
    here.write(**here.own, told=True)
tensor = torch.ones(1)
dist.all_reduce(tensor)
print("SUM", tensor.item(), flush=True)
"""


def test_a_rank_that_was_early_and_left_the_meeting_comes_to_the_next_one(mpiexec):
    done = mpiexec(3, LATE, timeout=100)
    assert done.stdout.count("LEFT") == 3
    assert done.stdout.count("SUM 3.0") == 3


THREADS = """
import concurrent.futures, threading, time, torch, torch.distributed as dist
from datetime import timedelta
from torch.utils.data import DataLoader
from torch_mpi.errors import CommunicationError

dist.init_process_group("mpi", timeout=timedelta(hours=3))
rank = dist.get_rank()
pool = concurrent.futures.ThreadPoolExecutor(2)
pool.submit(sum, [1]).result()
loader = iter(DataLoader(torch.arange(64.0), num_workers=1, prefetch_factor=2))
next(loader)
thread = threading.Thread(target=lambda: dist.send(torch.ones(1), 1 - rank, tag=9))
thread.start()
dist.recv(torch.empty(1), 1 - rank, tag=9)
thread.join()
print("THREADS", threading.active_count() > 2, flush=True)
try:
    dist.recv(torch.empty(1), 1 - rank)
except CommunicationError as error:
    print("CERTAIN" if "never comes" in str(error) or "cycle" in str(error) else error, flush=True)
pool.shutdown()
del loader
"""


def test_idle_threads_of_executors_and_loaders_do_not_hide_a_deadlock(mpiexec):
    """It is told within a second, not after the timeout, which is hours here."""
    done = mpiexec(2, THREADS, timeout=100)
    assert done.stdout.count("THREADS True") == 2, done.stdout
    assert "CERTAIN" in done.stdout, done.stdout


FORK = """
import os, sys, torch, torch.distributed as dist

dist.init_process_group("mpi")
if dist.get_rank() == 1:
    child = os.fork()
    if child == 0:
        {end}
    print("CHILD", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
tensor = torch.ones(1)
dist.all_reduce(tensor)
print("SUM", tensor.item(), flush=True)
"""


@pytest.mark.parametrize(
    ("end", "status"), [("sys.exit(3)", 3), ("raise ValueError('the child')", 1)]
)
def test_a_child_that_a_rank_forks_may_end_without_ending_the_rank(end, status, mpiexec):
    done = mpiexec(2, FORK.format(end=end), timeout=100)
    assert f"CHILD {status}" in done.stdout
    assert done.stdout.count("SUM 2.0") == 2
    assert "has ended" not in done.stderr


def test_so_it_may_where_the_ranks_are_processes_of_their_own(tmp_path):
    program = tmp_path / "fork.py"
    program.write_text(FORK.format(end="sys.exit(3)"))
    command = [find_mpiexec(), "-n", "2", "--bind-to", "none", sys.executable, str(program)]
    done = run_tree(command, timeout=100, env=mpi_environment())
    assert "CHILD 3" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("SUM 2.0") == 2


TWO_THREADS = """
import threading, torch, torch.distributed as dist
from torch_mpi.errors import CommunicationError, CommunicationMismatch

dist.init_process_group("mpi")
rank = dist.get_rank()
dist.all_reduce(torch.ones(4))  # later ones like it go the short way

def background():
    try:
        for _ in range(20):
            dist.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2))
    except CommunicationError as error:
        said.append(error)

for turn in range(12):
    said = []
    thread = threading.Thread(target=background, name="the-saver")
    thread.start()
    try:
        for _ in range(20):
            dist.all_reduce(torch.ones(4))
    except CommunicationError as error:
        said.append(error)
    thread.join()
    for error in said:
        if isinstance(error, CommunicationMismatch):
            print("MISMATCH", error, flush=True)
    # What both threads of both ranks do together next.
    while True:
        try:
            dist.barrier()
            break
        except CommunicationError:
            pass
print("END", flush=True)
"""


def test_two_threads_on_one_group_are_told_so_and_wedge_no_rank(mpiexec):
    """As in an asynchronous checkpoint on the default group."""
    done = mpiexec(2, TWO_THREADS, timeout=100)
    told = [line for line in done.stdout.splitlines() if "on its thread the-saver" in line]
    assert told, "the threads never met each other's calls"
    for line in told:
        assert "give each thread its own group with dist.new_group()" in line
    assert done.stdout.count("END") == 2


ENDS_EARLY = """
import sys, time, torch, torch.distributed as dist
from pathlib import Path
from torch_mpi.errors import CommunicationError

dist.init_process_group("mpi")
rank, waits = dist.get_rank(), Path(sys.argv[1])
try:
    dist.all_reduce(torch.ones(2)) if rank == 0 else dist.barrier()
except CommunicationError:
    print("DIFFERED", flush=True)
if rank == 1:
    while not waits.exists():
        time.sleep(1e-2)
    raise SystemExit
waits.touch()
try:
    dist.barrier()
except CommunicationError as error:
    print(error, flush=True)
"""


def test_a_rank_that_ends_while_another_waits_to_get_together_is_told_at_once(mpiexec, tmp_path):
    done = mpiexec(2, ENDS_EARLY, tmp_path / "waits", timeout=60)
    assert done.stdout.count("DIFFERED") == 2
    assert "rank 1 had ended, so the ranks cannot communicate any more" in done.stdout


OTHER_SPLITS = """
import torch, torch.distributed as dist
from torch_mpi.errors import CommunicationMismatch

dist.init_process_group("mpi")
rank = dist.get_rank()
sizes = [1, 3, 2] if rank == 1 else [1, 2, 3]
try:
    dist.reduce_scatter(torch.zeros(sizes[rank]), [torch.ones(size) for size in sizes])
except CommunicationMismatch as error:
    print(error, flush=True)
except dist.DistBackendError:
    pass
"""


def test_ranks_with_other_splits_are_told_both_splits(mpiexec):
    done = mpiexec(3, OTHER_SPLITS, timeout=60)
    call = "calls reduce_scatter(SUM) of float32[1] (24 bytes) in parts of"
    assert re.search(rf"rank [02] {re.escape(call)} 1, 2, 3 elements", done.stdout), done.stdout
    assert re.search(rf"rank 1 {re.escape(call)} 1, 3, 2 elements", done.stdout), done.stdout
