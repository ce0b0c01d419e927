"""Ctrl-C and errors while groups are made and destroyed: nothing leaks, nobody hangs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

# Each accident happens three times; the ranks get together, and what they hold is counted.
START = f"""
import json, os, signal, sys, time
sys.path.insert(0, {str(TESTS)!r})
import torch, torch.distributed as dist
from counts import count
from torch_mpi.group.process_group import ProcessGroupMPI
from torch_mpi.protocol import rendezvous, wait_monitor, world
from torch_mpi.protocol.progress import progress

dist.init_process_group("mpi")
rank, both = dist.get_rank(), [0, 1]

def tell(error):
    "What a cell does with an error of the user's code."
    world.current().raised(error, "a line")

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def again():
    "What a student runs next."
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("mpi")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()

def repeat(accident):
    counts = []
    for _ in range(3):
        accident()
        again()
        counts.append(count({{}}, rank)["communicators"])
    print(json.dumps(counts), flush=True)
"""

WHILE_MADE = """
real = ProcessGroupMPI._open

def interrupted(group):
    real(group)
    interrupt()

def accident():
    ProcessGroupMPI._open = interrupted
    try:
        dist.new_group(both)
    except KeyboardInterrupt as error:
        tell(error)
    ProcessGroupMPI._open = real
"""

WHILE_DESTROYED = """
def interrupted(group):
    raise KeyboardInterrupt

def accident():
    group, progress.finish = dist.new_group(both), interrupted
    try:
        dist.destroy_process_group(group)
    except KeyboardInterrupt as error:
        tell(error)
    del progress.finish
"""

AS_IT_BEGINS_TO_BE_DESTROYED = """
real = ProcessGroupMPI.forget_fast_path

def interrupted(group):
    real(group)
    interrupt()

def accident():
    group = dist.new_group(both)
    dist.barrier(group=group)
    if rank == 1:
        ProcessGroupMPI.forget_fast_path = interrupted
    try:
        dist.destroy_process_group(group)
        tell(KeyboardInterrupt())
    except KeyboardInterrupt as error:
        ProcessGroupMPI.forget_fast_path = real
        tell(error)
"""

AFTER_IT_WAS_MADE = """
real = ProcessGroupMPI._set_group_name

def interrupted(group, name):
    raise KeyboardInterrupt

def accident():
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        ProcessGroupMPI._set_group_name = interrupted
    try:
        dist.init_process_group("mpi")
        dist.barrier()
    except (KeyboardInterrupt, RuntimeError) as error:
        tell(error)
    ProcessGroupMPI._set_group_name = real
"""

DESTROYED_BEFORE_AND_DURING = """
def accident():
    group = dist.new_group(both)
    dist.barrier()
    if rank == 0:
        dist.destroy_process_group(group)
    dist.barrier()
    tell(KeyboardInterrupt())
    if rank == 1:
        dist.destroy_process_group(group)
"""

DESTROYED_DURING_AND_AFTER = """
def accident():
    group = dist.new_group(both)
    dist.barrier()
    tell(KeyboardInterrupt())
    if rank == 0:
        dist.destroy_process_group(group)
    dist.barrier()  # the ranks get together
    if rank == 1:
        dist.destroy_process_group(group)
"""

IN_THE_SECOND_ROUND = """
real, began = rendezvous.wait_for, []

def waits(waitable, *args, **more):
    began.append(waitable)
    if len(began) == 2 and rank == 0:  # rank 1 has seen it come, and is late itself
        interrupt()
    real(waitable, *args, **more)
    if len(began) == 1 and rank == 1:
        time.sleep(0.3)

def accident():
    began.clear()
    rendezvous.wait_for = waits
    try:
        dist.new_group(both)
        tell(KeyboardInterrupt())  # the stop button interrupts this rank, too, a moment later
    except (KeyboardInterrupt, RuntimeError) as error:
        tell(error)
    rendezvous.wait_for = real
"""

ACCIDENTS = {
    "Ctrl-C while a group is made": WHILE_MADE,
    "Ctrl-C in PyTorch when a group was made": AFTER_IT_WAS_MADE,
    "Ctrl-C while a group is destroyed": WHILE_DESTROYED,
    "Ctrl-C on one rank in the first moment of destroying a group": AS_IT_BEGINS_TO_BE_DESTROYED,
    "a group destroyed by one rank before an incident, by one during it": (
        DESTROYED_BEFORE_AND_DURING
    ),
    "a group destroyed by one rank during an incident, by one after it": (
        DESTROYED_DURING_AND_AFTER
    ),
    "Ctrl-C on one rank when all have come to make a group": IN_THE_SECOND_ROUND,
}


@pytest.mark.parametrize("accident", ACCIDENTS.values(), ids=ACCIDENTS)
def test_an_accident_with_a_group_hangs_no_rank_and_leaks_no_communicator(accident, mpiexec):
    done = mpiexec(2, START + accident + "repeat(accident)\n", timeout=90)
    counts = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(counts) == 2
    if counts[0][0] is None:
        pytest.skip("this MPI library keeps no table of its communicators")
    assert all(len(set(counted)) == 1 for counted in counts), counts


BETWEEN_CALL_AND_WAIT = """
import pathlib

def wait_for(file):
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline, f"{file.name}: never"
        time.sleep(0.01)

told, out = (pathlib.Path(sys.argv[1]) / name for name in ("rank 0 has told", "rank 1 is out"))
real = ProcessGroupMPI.run

def interrupted(group, operation):
    if rank == 1:  # it has looked already whether all is well
        wait_for(told)
    work = real(group, operation)
    if rank == 0:
        interrupt()
    return work

ProcessGroupMPI.run = interrupted
try:
    dist.all_gather_object([None] * 2, "x")
except (KeyboardInterrupt, RuntimeError) as error:
    tell(error)
ProcessGroupMPI.run = real
if rank == 0:
    told.touch()
    wait_for(out)
else:
    out.touch()
again()
"""


def test_a_ctrl_c_between_a_collective_and_its_wait_leaves_no_other_rank_inside_mpi(
    mpiexec, tmp_path
):
    mpiexec(2, START + BETWEEN_CALL_AND_WAIT, tmp_path, timeout=90)


WHILE_IT_IS_ANNOUNCED = """
from pathlib import Path
from torch_mpi.protocol.handshake import Handshake

pump, out = Handshake.pump, Path(sys.argv[1])

def interrupted(handshake):
    "The guard keeps the Ctrl-C back until the call is announced."
    Handshake.pump = pump
    interrupt()
    pump(handshake)

dist.barrier()
if rank == 0:
    Handshake.pump = interrupted
else:
    time.sleep(0.5)
try:
    dist.broadcast(torch.ones(1), 0)
    assert rank == 1, "no interrupt"
except RuntimeError:
    assert rank == 1
except KeyboardInterrupt:
    deadline = time.monotonic() + 10
    while not out.exists() and time.monotonic() < deadline:  # the rank calls nothing
        time.sleep(1e-2)
    print("rank 1 is out:", out.exists(), flush=True)
if rank == 1:
    out.touch()
again()
"""


def test_a_ctrl_c_that_the_user_catches_as_a_call_is_announced_leaves_no_rank_inside_mpi(
    mpiexec, tmp_path
):
    done = mpiexec(2, START + WHILE_IT_IS_ANNOUNCED, tmp_path / "out", timeout=60)
    assert done.stdout == "rank 1 is out: True\n"


IN_THE_LOCK_OF_AN_EVENT = """
import threading

class Interrupted(threading.Condition):
    "A Ctrl-C comes when the lock is taken, and the block that gives it back has not begun."

    def __enter__(self):
        global armed
        taken = super().__enter__()
        if armed and threading.current_thread() is threading.main_thread():
            armed = False
            interrupt()
            time.sleep(0)
        return taken

armed = rank == 0
progress._wake._cond = Interrupted(threading.Lock())
try:
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    dist.barrier()
    assert rank == 1, "no interrupt"
except (KeyboardInterrupt, RuntimeError) as error:
    tell(error)
again()
work = dist.all_reduce(torch.ones(1), async_op=True)
work.wait()
"""


def test_a_ctrl_c_as_the_progress_thread_is_woken_does_not_lock_it_for_good(mpiexec):
    mpiexec(2, START + IN_THE_LOCK_OF_AN_EVENT, timeout=40)


OLD_INTERRUPT = """
from torch.nn.parallel import DistributedDataParallel

signal.signal(signal.SIGINT, signal.default_int_handler)  # as a kernel does for each cell
try:
    if rank == 1:
        interrupt()
    time.sleep(0.05)
except KeyboardInterrupt:
    print("INTERRUPTED", flush=True)
world.current().begin_section("the next cell")
model = DistributedDataParallel(torch.nn.Linear(3, 3))
if rank == 0:
    time.sleep(0.3)  # rank 1 waits for the buckets, and listens
model(torch.ones(2, 3)).sum().backward()
print("WORKED", flush=True)
"""


def test_a_ctrl_c_of_one_cell_is_not_heard_again_by_ddp_in_the_next(mpiexec):
    done = mpiexec(2, START + OLD_INTERRUPT, timeout=90)
    assert done.stdout.count("INTERRUPTED") == 1
    assert done.stdout.count("WORKED") == 2


TO_ITSELF = """
from torch_mpi.errors import CommunicationError

for elements in (3, 100_000):
    kept = dist.isend(torch.zeros(elements), rank)
    dist.barrier()
    tell(RuntimeError("an error of the user's"))
    dist.barrier()  # the ranks get together
    sent, got = torch.full((elements,), 7.0), torch.zeros(elements)
    request = dist.isend(sent, rank)
    dist.recv(got, rank)
    request.wait()
    assert got.eq(7).all(), got
print("WORKED", flush=True)
"""


def test_after_an_error_no_old_message_of_a_rank_to_itself_is_received(mpiexec):
    done = mpiexec(2, START + TO_ITSELF, timeout=90)
    assert done.stdout.count("WORKED") == 2


BEHIND_ANOTHER = """
from torch_mpi.errors import CommunicationError

if rank == 0:
    call = lambda: dist.recv(torch.zeros(1), 1)
else:
    def call():
        dist.all_reduce(torch.zeros(2), async_op=True)
        dist.all_reduce(torch.zeros(3))
try:
    call()
except CommunicationError as error:
    print(f"rank {rank} {type(error).__name__}: {error}", flush=True)
"""


def test_a_deadlock_behind_a_collective_that_nobody_waits_for_is_found_at_once(mpiexec):
    done = mpiexec(2, START + BEHIND_ANOTHER, timeout=90)  # the group's own timeout is longer
    assert "Deadlock: these ranks wait for each other" in done.stdout, done.stdout


TOO_LATE_TO_LEAVE = """
import threading
from pathlib import Path
from torch_mpi.protocol.handshake import ACKNOWLEDGED, Handshake

dist.barrier()
pump, withdraw = Handshake.pump, Handshake.withdraw

def refused_once(handshake, entry):
    "Rank 1 acknowledges after this rank's last look, and before it takes its word back."
    Handshake.withdraw = withdraw
    while handshake.announcements.board.of_all(ACKNOWLEDGED)[1] < entry.number:
        time.sleep(1e-3)
    return handshake.announcements.withdraw(entry.number, entry.mine)

def late(handshake):
    Handshake.pump = pump
    while not world.current().incident():
        time.sleep(1e-3)
    pump(handshake)  # sees rank 0, and enters MPI's blocking call

if rank == 0:
    Handshake.withdraw = refused_once
    threading.Timer(0.3, interrupt).start()
else:
    Handshake.pump = late
total, went_on = torch.ones(5), Path(sys.argv[1])
try:
    dist.all_reduce(total)
    went_on.touch()
except KeyboardInterrupt:
    deadline = time.monotonic() + 10
    while not went_on.exists() and time.monotonic() < deadline:  # the rank calls nothing
        time.sleep(1e-2)
    print("rank 1 went on:", went_on.exists(), total[0].item(), flush=True)
"""


def test_a_ctrl_c_that_comes_too_late_leaves_no_rank_inside_of_mpi(mpiexec, tmp_path):
    done = mpiexec(2, START + TOO_LATE_TO_LEAVE, tmp_path / "went-on", timeout=60)
    assert done.stdout == "rank 1 went on: True 2.0\n"


ENDS_FAST_PATH = """
import threading, torch, torch.distributed as dist

dist.init_process_group("mpi")
ones = torch.ones(1)
for _ in range(3):  # after the first two, the group knows a fast path
    dist.all_reduce(ones)
handshake = dist.group.WORLD.handshake
end = handshake.end_fast_path

def interrupted():
    end()
    raise KeyboardInterrupt

handshake.end_fast_path = interrupted
try:
    dist.all_reduce(ones)
    print("no fast path")
except KeyboardInterrupt:
    pass
handshake.end_fast_path = end
free = []
thread = threading.Thread(target=lambda: free.append(handshake.lock.acquire(blocking=False)))
thread.start()
thread.join()
print(free, flush=True)
"""


def test_a_ctrl_c_at_the_end_of_the_fast_path_leaves_the_group_to_other_threads(mpiexec):
    assert mpiexec(1, ENDS_FAST_PATH, timeout=60).stdout.split() == ["[True]"]


INTERRUPTS_THE_LOCK = """
import os, signal, threading, torch, torch.distributed as dist

dist.init_process_group("mpi")

class Lock:
    def __init__(self, lock):
        self._lock, self.release = lock, lock.release

    def acquire(self, *given, **more):
        taken = self._lock.acquire(*given, **more)
        if threading.current_thread() is threading.main_thread():
            os.kill(os.getpid(), signal.SIGINT)  # the lock is taken, and its release not prepared
        return taken

ones = torch.ones(1)
for _ in range(3):  # after the first two, the group knows a fast path
    dist.all_reduce(ones)
handshake = dist.group.WORLD.handshake
lock = handshake.lock
handshake.lock = Lock(lock)
try:
    dist.all_reduce(ones)
    print("not interrupted")
except KeyboardInterrupt:
    handshake.lock = lock
free = []
thread = threading.Thread(target=lambda: free.append(lock.acquire(blocking=False)))
thread.start()
thread.join()
print(free, flush=True)
"""


def test_a_ctrl_c_right_after_the_lock_of_the_fast_path_leaves_it_to_other_threads(mpiexec):
    assert mpiexec(1, INTERRUPTS_THE_LOCK, timeout=60).stdout.split() == ["[True]"]


ALONE_ON_FAST_PATH = """
import threading

tensor, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
calls = {
    "broadcast": lambda: dist.broadcast(tensor, 1),
    "all_gather": lambda: dist.all_gather(parts, tensor),
    "barrier": dist.barrier,
}
for name, call in calls.items():
    for _ in range(20):
        call()
    if rank == 0:  # rank 1 does not come
        threading.Timer(0.3, interrupt).start()
        try:
            call()
            print("rank 0 was not interrupted")
        except KeyboardInterrupt as error:
            tell(error)
            print(name, "interrupted", flush=True)
    else:
        while not world.current().incident():
            time.sleep(1e-2)
        tell(RuntimeError("rank 0 has left"))
    again()
"""


def test_ctrl_c_frees_a_rank_whose_fast_call_finds_no_other_rank(mpiexec):
    done = mpiexec(2, START + ALONE_ON_FAST_PATH, timeout=90)
    names = ("broadcast", "all_gather", "barrier")
    assert done.stdout.splitlines() == [f"{name} interrupted" for name in names]


AT_ANY_MOMENT = """
import random, threading

stop, calls = threading.Event(), 0

def many():
    draw = random.Random(f"{rank} {sys.argv[1]}")
    while not stop.is_set():
        time.sleep(draw.uniform(1e-4, 3e-3))
        if rank == 0 and calls > 50:
            interrupt()
            return

tensor, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
thread = threading.Thread(target=many)
thread.start()
try:
    while True:
        dist.broadcast(tensor, calls % 2)
        dist.all_gather(parts, tensor)
        dist.all_reduce(tensor)
        tensor.fill_(1)
        calls += 1
except (KeyboardInterrupt, RuntimeError) as error:
    tell(error)
stop.set()
thread.join()
again()
print("WORKED", flush=True)
"""


@pytest.mark.parametrize("seed", range(3))
def test_a_ctrl_c_at_any_moment_of_fast_calls_ends_both_ranks_calls(seed, mpiexec):
    done = mpiexec(2, START + AT_ANY_MOMENT, seed, timeout=90)
    assert done.stdout.split() == ["WORKED"] * 2


WARM = """
import sys, torch, torch.distributed as dist
dist.init_process_group("mpi")
rank, tensor, other = dist.get_rank(), torch.ones(3), torch.ones(4)
parts = [torch.ones(3), torch.ones(3)]
usual = lambda: dist.broadcast(tensor, 0)
for _ in range(50):
    usual()
    dist.broadcast(tensor, 1)
    dist.broadcast(other, 0)
    dist.all_reduce(tensor)
    dist.all_gather(parts, tensor)
unusual = {
    "root": lambda: dist.broadcast(tensor, 1),
    "shape": lambda: dist.broadcast(other, 0),
    "call": lambda: dist.all_reduce(tensor),
    "gather": lambda: dist.all_gather(parts, tensor),
}
try:
    (unusual[sys.argv[1]] if rank else usual)()
except RuntimeError as error:
    print(type(error).__name__, error, flush=True)
"""
SIDES = {
    "root": "broadcast(root=1) of float32[3] (12 bytes)",
    "shape": "broadcast(root=0) of float32[4] (16 bytes)",
    "call": "all_reduce(SUM) of float32[3] (12 bytes)",
    "gather": "all_gather() of float32[3] (12 bytes)",
}


@pytest.mark.parametrize("what", SIDES)
def test_a_mismatch_of_two_fast_calls_names_both_ranks_calls_and_lines(what, mpiexec):
    done = mpiexec(2, WARM, what, check=False)
    assert "CommunicationMismatch rank 0 calls broadcast(root=0) of float32[3] (12" in done.stdout
    assert f"<string>:6, but rank 1 calls {SIDES[what]} at <string>:1" in done.stdout


WHILE_IT_IMPORTS = """
import os, signal, sys, threading, time
from pathlib import Path
from torch_mpi.protocol.interrupts import guard

guard.install()
package = Path(sys.argv[1], "half_done")
package.mkdir()
(package / "part.py").write_text("ready = True")
interrupts = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(0.2)"
(package / "__init__.py").write_text(f"from .part import ready\\n{interrupts}")
sys.path.insert(0, sys.argv[1])
try:
    import half_done
    time.sleep(20)
    print("no interrupt")
except KeyboardInterrupt:
    import half_done
    print(half_done.part.ready)
"""


def test_a_ctrl_c_in_an_import_comes_after_it_so_that_the_package_is_whole(tmp_path):
    command = [sys.executable, "-c", WHILE_IT_IMPORTS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=False)
    assert done.stdout == "True\n", done.stderr
