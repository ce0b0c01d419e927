"""Cells to which something happens: the stop button, a killed rank, a frozen one, a restart."""

from __future__ import annotations

import random

from . import right
from .cells import (
    FREEZE,
    INTERRUPT,
    JOIN_AGAIN,
    KILL,
    RESTART,
    SIGKILL,
    SIGSTOP,
    STOP_BUTTON,
    WORKS,
    Act,
    Cell,
    px,
)

LOOPS = {
    "while all compute": "while True:\n    pass\n",
    "while all sleep": "time.sleep(1000)\n",
    "while one waits, others compute": "if rank == $one:\n"
    "    dist.recv(torch.ones(1), src=$other)\nwhile True:\n    time.sleep(0.01)\n",
    "in a loop of collectives": "x = torch.ones($count)\nwhile True:\n    dist.all_reduce(x)\n",
    "in a loop of async collectives": "x = torch.ones($count)\nwhile True:\n"
    "    works = [dist.all_reduce(x, async_op=True) for _ in range(8)]\n"
    "    for work in works:\n        work.wait()\n",
    "in a loop of messages": "x, y = torch.ones($count), torch.ones($count)\nwhile True:\n"
    "    request = dist.isend(x, (rank + 1) % size)\n    dist.recv(y, (rank - 1) % size)\n"
    "    request.wait()\n",
    "in a loop of objects": "while True:\n    dist.all_gather_object([None] * size, 'x' * 999)\n",
    "in a loop of groups": "while True:\n    group = dist.new_group([0, 1])\n    if rank < 2:\n"
    "        dist.barrier(group=group)\n        dist.destroy_process_group(group)\n",
    "in DDP": "model = DistributedDataParallel(torch.nn.Linear(64, 64))\nwhile True:\n"
    "    model(torch.ones(4, 64)).sum().backward()\n",
}
REJOIN = "while True:\n    dist.destroy_process_group()\n    dist.init_process_group('mpi')\n"
STUCK = "if rank == $one:\n    MPI.COMM_WORLD.Recv(np.zeros(1), $other)\n"
INTERRUPTED = "ranks were interrupted|KeyboardInterrupt"


def _drawn(chance: random.Random, n: int) -> dict[str, int]:
    one, other = chance.sample(range(n), 2)
    return {"one": one, "other": other, "count": chance.choice([1, 1000, 100_000])}


def stop_a_loop(chance: random.Random, n: int, number: int) -> Cell:
    """The stop button in a loop that would never end."""
    name = chance.choice(list(LOOPS))
    act = Act(STOP_BUTTON, round(chance.uniform(0.05, 1.5), 3))
    text = px(LOOPS[name], **_drawn(chance, n))
    return Cell(INTERRUPT, f"stop {name}", text, says=INTERRUPTED, act=act)


def stop_anything(chance: random.Random, n: int, number: int) -> Cell:
    """The stop button at a random moment of a right cell; it may come too late."""
    inner = chance.choice([right.messages, right.pairs, right.collectives, right.groups,
                           right.ddp, right.objects])(chance, n, number)  # fmt: skip
    act = Act(STOP_BUTTON, round(chance.uniform(0.0, 0.4), 3))
    name = f"stop {inner.name}"
    return Cell(INTERRUPT, name, inner.text, says=INTERRUPTED, act=act, may_pass=True)


def stop_a_rejoin(chance: random.Random, n: int, number: int) -> Cell:
    """The stop button while the default group is destroyed and made again and again."""
    act = Act(STOP_BUTTON, round(chance.uniform(0.05, 1.0), 3))
    name = "stop destroy and init"
    return Cell(INTERRUPT, name, px(REJOIN), says=INTERRUPTED, act=act, after=(JOIN_AGAIN,))


def stop_a_stuck_one(chance: random.Random, n: int, number: int) -> Cell:
    """The stop button where a rank is in mpi4py's Recv, which nothing but a restart ends."""
    act = Act(STOP_BUTTON, round(chance.uniform(0.5, 1.5), 3))
    text = px(STUCK, **_drawn(chance, n))
    name = "stop mpi4py's Recv"
    return Cell(INTERRUPT, name, text, says=INTERRUPTED, act=act, restart=True)


def stop_a_restart(chance: random.Random, n: int, number: int) -> Cell:
    """The stop button in `ranks.restart()`: the next one brings the ranks up."""
    act = Act(STOP_BUTTON, round(chance.uniform(0.0, 1.5), 3))
    says = "KeyboardInterrupt|RanksError"
    return Cell(
        RESTART, "stop ranks.restart()", "ranks.restart()", says=says, act=act, may_pass=True,
        restart=True,
    )  # fmt: skip


def kill(chance: random.Random, n: int, number: int) -> Cell:
    """A rank is killed while the cell runs."""
    name = chance.choice(list(LOOPS))
    act = Act(SIGKILL, round(chance.uniform(0.0, 1.0), 3), chance.randrange(n))
    text = px(LOOPS[name], **_drawn(chance, n))
    says = rf"rank {act.rank} (died|is dead)|ranks .* (died|are dead)"
    return Cell(KILL, f"kill {name}", text, says=says, act=act, restart=True)


def restart(chance: random.Random, n: int, number: int) -> Cell:
    """Fresh ranks, for no reason."""
    return Cell(RESTART, "ranks.restart()", "ranks.restart()", restart=True)


def freeze(chance: random.Random, n: int, number: int) -> Cell:
    """A rank stands still for a second: a busy machine is no error."""
    text = px(right.RING + WORKS, serial=number, count=1000, tag=0, hops=400)
    act = Act(SIGSTOP, round(chance.uniform(0.0, 0.5), 3), chance.randrange(n))
    return Cell(FREEZE, "freeze a rank", text, act=act)


STOPS = {stop_a_loop: 24, stop_anything: 12, stop_a_rejoin: 3, stop_a_stuck_one: 1}
RARE = {kill: 4, restart: 2, stop_a_restart: 1, freeze: 10}
