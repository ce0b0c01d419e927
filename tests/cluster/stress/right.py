"""Cells that are right: their values are checked on every rank."""

from __future__ import annotations

import random

from .cells import JOIN_AGAIN, RIGHT, WORKS, Cell, count, px

RING = """\
for hop in range($hops):
    mine = torch.full(($count,), $serial * 100 + 10 * hop + rank)
    theirs = torch.zeros_like(mine)
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank % 2:
        dist.recv(theirs, src=left, tag=$tag)
        dist.send(mine, dst=right, tag=$tag)
    else:
        dist.send(mine, dst=right, tag=$tag)
        dist.recv(theirs, src=left, tag=$tag)
    same(theirs, torch.full_like(theirs, $serial * 100 + 10 * hop + left))
"""

ALL_PAIRS = """\
out = [torch.full(($count,), $serial + 10 * rank + peer) for peer in range(size)]
into = [torch.zeros_like(one) for one in out]
requests = [dist.irecv(into[peer], peer, tag=$tag) for peer in range(size) if peer != rank]
requests += [dist.isend(out[peer], peer, tag=$tag) for peer in range(size) if peer != rank]
for request in requests:
    request.wait()
for peer in range(size):
    if peer != rank:
        same(into[peer], torch.full_like(into[peer], $serial + 10 * peer + rank))
"""

INPUT = """\
each = [(torch.arange($count) % 7 + r + $serial % 5).to(torch.$dtype) for r in range(size)]
mine, total, root = each[rank], sum(each), $serial % size
"""
COLLECTIVES = {
    "all_reduce": "y = mine.clone()\ndist.all_reduce(y)\nsame(y, total)\n",
    "async all_reduce": """\
many = [mine + k for k in range(5)]
works = [dist.all_reduce(y, async_op=True) for y in many]
for k, work in enumerate(works):
    work.wait()
    same(many[k], total + size * k)
""",
    "max": "y = mine.clone()\ndist.all_reduce(y, op=dist.ReduceOp.MAX)\nsame(y, each[-1])\n",
    "broadcast": "y = mine.clone()\ndist.broadcast(y, root)\nsame(y, each[root])\n",
    "reduce": "y = mine.clone()\ndist.reduce(y, root)\nrank == root and same(y, total)\n",
    "all_gather": """\
parts = [torch.zeros_like(mine) for _ in range(size)]
dist.all_gather(parts, mine)
for r in range(size):
    same(parts[r], each[r])
""",
    "gather": """\
parts = [torch.zeros_like(mine) for _ in range(size)] if rank == root else None
dist.gather(mine, parts, dst=root)
for r in range(size) if rank == root else ():
    same(parts[r], each[r])
""",
    "scatter": """\
y = torch.zeros_like(mine)
dist.scatter(y, each if rank == root else None, src=root)
same(y, mine)
""",
    "reduce_scatter": """\
y = torch.zeros_like(mine)
dist.reduce_scatter(y, [mine + r for r in range(size)])
same(y, total + size * rank)
""",
    "all_to_all": """\
parts = [torch.zeros_like(mine) for _ in range(size)]
dist.all_to_all_single(y := torch.zeros(size, dtype=mine.dtype),
                       torch.arange(size, dtype=mine.dtype) + 10 * rank)
same(y, torch.arange(size, dtype=mine.dtype) * 10 + rank)
""",
    "barrier": "dist.barrier()\n",
}

GROUPS = """\
for turn in range($turns):
    group = dist.new_group($members)
    if rank in $members:
        y = torch.tensor([$serial + rank + turn])
        dist.all_reduce(y, group=group)
        assert y.item() == sum($serial + r + turn for r in $members), y
        dist.destroy_process_group(group)
"""

DDP = """\
torch.manual_seed($serial)
model = DistributedDataParallel(torch.nn.Linear(16, 4), bucket_cap_mb=0.0001)
twin = torch.nn.Linear(16, 4)
twin.load_state_dict(model.module.state_dict())
batches = torch.randn(size, 8, 16)
for step in range($steps):
    model.zero_grad()
    model(batches[rank]).square().mean().backward()
    twin.zero_grad()
    twin(batches.reshape(-1, 16)).square().mean().backward()
    for found, expected in zip(model.parameters(), twin.parameters()):
        assert torch.allclose(found.grad, expected.grad, atol=1e-6), (rank, step)
del model, twin
gc.collect()
"""

OBJECTS = """\
objects = [None] * size
dist.all_gather_object(objects, {"rank": rank, "serial": $serial, "pad": "x" * $count})
assert [one["rank"] for one in objects] == list(range(size)), objects
assert {one["serial"] for one in objects} == {$serial}
told = [("told", $serial)] if rank == 1 else [None]
dist.broadcast_object_list(told, src=1)
assert told == [("told", $serial)], told
mine = [None]
dist.scatter_object_list(mine, [$serial + r for r in range(size)] if rank == 0 else None, src=0)
assert mine == [$serial + rank], mine
"""


def messages(chance: random.Random, n: int, number: int) -> Cell:
    """Blocking messages around a ring."""
    drawn = {"count": count(chance), "tag": chance.choice([0, 0, 3]), "hops": chance.randint(1, 6)}
    return Cell(RIGHT, "ring of send and recv", px(RING + WORKS, serial=number, **drawn))


def pairs(chance: random.Random, n: int, number: int) -> Cell:
    """Messages between all pairs at once."""
    text = px(ALL_PAIRS + WORKS, serial=number, count=count(chance), tag=chance.choice([0, 5]))
    return Cell(RIGHT, "isend and irecv", text)


def collectives(chance: random.Random, n: int, number: int) -> Cell:
    """A few collectives in a drawn order."""
    names = chance.choices(list(COLLECTIVES), k=chance.randint(2, 6))
    text = INPUT + "".join(COLLECTIVES[name] for name in names) + WORKS
    dtype = chance.choice(["float32", "float64", "int64", "int32"])
    return Cell(RIGHT, "collectives", px(text, serial=number, count=count(chance), dtype=dtype))


def groups(chance: random.Random, n: int, number: int) -> Cell:
    """Groups that are made, used and destroyed."""
    members = sorted(chance.sample(range(n), chance.randint(2, n)))
    drawn = {"members": members, "turns": chance.randint(1, 3)}
    return Cell(RIGHT, "groups", px(GROUPS + WORKS, serial=number, **drawn))


def ddp(chance: random.Random, n: int, number: int) -> Cell:
    """Gradients of DDP beside those of one model with all batches."""
    text = px(DDP + WORKS, serial=number, steps=chance.randint(1, 4))
    return Cell(RIGHT, "DDP", text)


def objects(chance: random.Random, n: int, number: int) -> Cell:
    """Collectives of Python objects."""
    text = px(OBJECTS + WORKS, serial=number, count=min(count(chance), 20_000))
    return Cell(RIGHT, "objects", text)


def rejoin(chance: random.Random, n: int, number: int) -> Cell:
    """The default group is destroyed and made again."""
    return Cell(RIGHT, "destroy and init", JOIN_AGAIN + WORKS)


def slow_network(chance: random.Random, n: int, number: int) -> Cell:
    """A cell on a slow network."""
    inner = chance.choice([messages, pairs, collectives])(random.Random(number), n, number)
    on = f'ranks.network("{chance.choice(["1gbit", "100mbit"])}")'
    off = 'ranks.network("off")'
    return Cell(RIGHT, "slow network", inner.text, before=(on,), after=(off,))


def looks(chance: random.Random, n: int, number: int) -> Cell:
    """What a user looks at between cells of the ranks."""
    text = f"ranks.where()\nranks.describe()\nranks.timeline()\nfor r in range({n}):\n    "
    return Cell(RIGHT, "where, timeline", text + 'print("works on", r)\n')


MAKERS = {
    messages: 3, pairs: 3, collectives: 6, groups: 3, ddp: 2, objects: 2, rejoin: 1,
    slow_network: 1, looks: 1,
}  # fmt: skip
