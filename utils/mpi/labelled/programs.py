"""The labelled set: pairs of a wrong program and its right twin.

Each is a script by itself: ``mpiexec -n 2 python program.py``. It begins with :data:`PRELUDE`,
which joins the backend that ``LABELLED_BACKEND`` names, and gives ``rank``, ``size``, ``small`` (4
elements of float32) and ``large`` (4 MB, more than any library sends before it is received).
``LABELLED_TIMEOUT`` has the seconds that a wait may last; a backend other than ``mpi`` needs a file
to meet in, ``LABELLED_STORE``. A line that ends in ``#!`` is one that a report has to name.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

PRELUDE = """\
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

backend = os.environ.get("LABELLED_BACKEND", "mpi")
limit = {"timeout": timedelta(seconds=float(os.environ.get("LABELLED_TIMEOUT", "20")))}
if backend != "mpi":
    from mpi4py import MPI

    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    store = dist.FileStore(os.environ["LABELLED_STORE"], size)
    limit |= {"store": store, "rank": rank, "world_size": size}
dist.init_process_group(backend, **limit)
rank, size = dist.get_rank(), dist.get_world_size()
small, large = torch.full((4,), float(rank)), torch.full((1_000_000,), float(rank))
"""

#: Classes that run through by luck: they are tried with ``TORCH_DISTRIBUTED_DEBUG=DETAIL``.
BY_LUCK = {"buffer and wait", "buffering hazard"}

#: The classes, and what they are in words.
KINDS = {
    "call matching": "a rank leaves out a collective, or makes one too many",
    "mixed collectives": "the ranks call different collectives, or in another order",
    "type or size": "dtype, number of elements or shape differ",
    "peer and tag": "a rank, root or tag that does not exist, or does not fit",
    "deadlock by blocking": "calls that wait for each other",
    "deadlock by waiting": "non-blocking calls, waited for in an order that cannot be",
    "buffer and wait": "a tensor is used before its communication is waited for",
    "buffering hazard": "right only while the library buffers small messages",
    "group misuse": "the wrong process group, or one that is gone",
    "unmatched at the end": "something was sent, or begun, that nobody takes",
}


@dataclass(frozen=True)
class Pair:
    """A wrong program and the right one.

    Attributes:
        name, kind: what it is called; one of :data:`KINDS`.
        wrong, right: their text after the prelude.
        says: regular expressions, of which each has to be found in a report of the wrong one.
        ranks: how many it needs.
    """

    name: str
    kind: str
    wrong: str
    right: str
    says: tuple[str, ...]
    ranks: int = 2

    def text(self, right: bool) -> str:
        """The whole program."""
        return PRELUDE + textwrap.dedent(self.right if right else self.wrong).lstrip("\n")


PAIRS: list[Pair] = []


def _pair(name: str, kind: str, wrong: str, right: str, *says: str, ranks: int = 2) -> None:
    PAIRS.append(Pair(name, kind, wrong, right, says, ranks))


# -- call matching --------------------------------------------------------------------------------

_pair(
    "a barrier on one rank only",
    "call matching",
    """
    if rank == 0:
        dist.barrier()  #!
    """,
    "dist.barrier()",
    r"rank 0 waits for rank 1, which has ended",
)
_pair(
    "one step less on one rank",
    "call matching",
    """
    for step in range(3 - rank):
        dist.all_reduce(small)  #!
    """,
    """
    for step in range(3):
        dist.all_reduce(small)
    """,
    r"rank 0 waits for rank 1, which has ended",
)
_pair(
    "a loss of its own ends the training of a rank",
    "call matching",
    """
    for step in range(4):
        loss = torch.tensor(float(rank * step))
        if loss > 3:
            break
        dist.all_reduce(loss)  #!
    """,
    """
    for step in range(4):
        loss = torch.tensor(float(rank * step))
        dist.all_reduce(loss)
        if loss > 3:
            break
    """,
    r"ranks 0, 1 wait for rank 2|rank [01] waits for rank 2",
    ranks=3,
)
_pair(
    "only the root broadcasts",
    "call matching",
    """
    if rank == 0:
        dist.broadcast(small, src=0)  #!
    """,
    "dist.broadcast(small, src=0)",
    r"rank 0 waits for rank 1, which has ended",
)
_pair(
    "an error that a rank swallows",
    "call matching",
    """
    try:
        if rank == 1:
            raise ValueError("a bad minibatch")
        dist.all_reduce(small)  #!
    except ValueError:
        pass
    """,
    """
    try:
        if rank == 1:
            raise ValueError("a bad minibatch")
    except ValueError:
        small.zero_()
    dist.all_reduce(small)
    """,
    r"rank 0 waits for rank 1, which has ended",
)
_pair(
    "the checkpoint of rank 0 has a barrier of its own",
    "call matching",
    """
    def save():
        dist.barrier()  #!

    dist.all_reduce(small)
    if rank == 0:
        save()
    dist.all_reduce(small)  #!
    """,
    """
    def save():
        dist.barrier()

    dist.all_reduce(small)
    save()
    dist.all_reduce(small)
    """,
    r"rank 0 calls barrier\(\)",
    r"rank 1 calls all_reduce\(SUM\)",
)

# -- mixed collectives ----------------------------------------------------------------------------

_pair(
    "all_reduce meets broadcast",
    "mixed collectives",
    """
    if rank == 0:
        dist.all_reduce(small)  #!
    else:
        dist.broadcast(small, src=0)  #!
    """,
    "dist.all_reduce(small)",
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls broadcast\(",
)
_pair(
    "two collectives in another order",
    "mixed collectives",
    """
    if rank == 0:
        dist.all_reduce(small)  #!
        dist.broadcast(large, src=0)
    else:
        dist.broadcast(large, src=0)  #!
        dist.all_reduce(small)
    """,
    """
    dist.all_reduce(small)
    dist.broadcast(large, src=0)
    """,
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls broadcast\(",
)
_pair(
    "the sum meets the largest",
    "mixed collectives",
    """
    op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
    dist.all_reduce(small, op=op)  #!
    """,
    "dist.all_reduce(small, op=dist.ReduceOp.MAX)",
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls all_reduce\(MAX\)",
)
_pair(
    "every rank is the root",
    "mixed collectives",
    "dist.broadcast(small, src=rank)  #!",
    "dist.broadcast(small, src=0)",
    r"rank 0 calls broadcast\(root=0\)|rank 0 calls broadcast\(",
    r"rank 1 calls broadcast\(",
)
_pair(
    "a gradient that a rank does not have",
    "mixed collectives",
    """
    model = torch.nn.Linear(4, 3)
    model(small).sum().backward()
    if rank == 1:
        model.weight.grad = None
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)  #!
    """,
    """
    model = torch.nn.Linear(4, 3)
    model(small).sum().backward()
    if rank == 1:
        model.weight.grad = None
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad)
    """,
    r"rank 0 calls all_reduce\(SUM\) of float32\[3, 4\]",
    r"rank 1 calls all_reduce\(SUM\) of float32\[3\]",
)
_pair(
    "asynchronous, in another order",
    "mixed collectives",
    """
    tensors = [small, large] if rank == 0 else [large, small]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  #!
    for work in works:
        work.wait()
    """,
    """
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (small, large)]
    for work in works:
        work.wait()
    """,
    r"all_reduce\(SUM\) of float32\[4\]",
    r"all_reduce\(SUM\) of float32\[1000000\]",
)
_pair(
    "a collective meets a message",
    "mixed collectives",
    """
    if rank == 0:
        dist.all_reduce(small)  #!
    else:
        dist.recv(small, src=0)  #!
    """,
    """
    if rank == 0:
        dist.send(small, dst=1)
    else:
        dist.recv(small, src=0)
    """,
    r"rank 0 waits in all_reduce",
    r"rank 1 waits in recv\(src=0",
)

# -- type or size ---------------------------------------------------------------------------------

_pair(
    "a last batch that is smaller",
    "type or size",
    "dist.all_reduce(torch.ones(4 - rank))  #!",
    "dist.all_reduce(torch.ones(4))",
    r"float32\[4\]",
    r"float32\[3\]",
)
_pair(
    "one rank in double precision",
    "type or size",
    "dist.all_reduce(small if rank == 0 else small.double())  #!",
    "dist.all_reduce(small.double())",
    r"float32\[4\]",
    r"float64\[4\]",
)
_pair(
    "a message that is longer than its tensor",
    "type or size",
    """
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.zeros(2), src=0)  #!
    """,
    """
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.zeros(4), src=0)
    """,
    r"rank 0 sent float32\[4\]",
    r"rank 1 receives float32\[2\]",
)
_pair(
    "as many bytes of another dtype",
    "type or size",
    """
    if rank == 0:
        dist.send(torch.ones(2, dtype=torch.int64), dst=1)
    else:
        dist.recv(torch.zeros(4), src=0)  #!
    """,
    """
    if rank == 0:
        dist.send(torch.ones(4), dst=1)
    else:
        dist.recv(torch.zeros(2, 2), src=0)
    """,
    r"rank 0 sent int64\[2\]",
    r"rank 1 receives float32\[4\]",
)
_pair(
    "a list with a tensor too few",
    "type or size",
    """
    outputs = [torch.zeros(4) for _ in range(size - 1)]
    dist.all_gather(outputs, small)  #!
    """,
    """
    outputs = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(outputs, small)
    """,
    r"1 tensors in the list, expected one per rank: 2|one per rank",
)
_pair(
    "splits that do not fit together",
    "type or size",
    """
    sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([2, 2], [2, 2])
    output = torch.zeros(sum(receives))
    dist.all_to_all_single(output, small, receives, sends)  #!
    """,
    """
    sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([1, 3], [2, 3])
    output = torch.zeros(sum(receives))
    dist.all_to_all_single(output, small, receives, sends)
    """,
    r"rank 1 sent 8 bytes, rank 0 expects 4|arrived is larger than the tensor to receive it",
)

# -- peer and tag ---------------------------------------------------------------------------------

_pair(
    "a neighbour beyond the last rank",
    "peer and tag",
    """
    if rank == size - 1:
        dist.send(small, dst=rank + 1)  #!
    """,
    """
    if rank == size - 1:
        dist.send(small, dst=(rank + 1) % size)
    if rank == 0:
        dist.recv(small, src=size - 1)
    """,
    r"rank 1 raised ValueError: .*2",
)
_pair(
    "another tag",
    "peer and tag",
    """
    if rank == 0:
        dist.send(small, dst=1, tag=1)
    else:
        dist.recv(small, src=0, tag=2)  #!
    """,
    """
    if rank == 0:
        dist.send(small, dst=1, tag=2)
    else:
        dist.recv(small, src=0, tag=2)
    """,
    r"rank 1 waits for rank 0, which has ended",
    r"tag",
)
_pair(
    "a message to the wrong rank",
    "peer and tag",
    """
    if rank == 0:
        dist.send(small, dst=2)
    elif rank == 1:
        dist.recv(small, src=0)  #!
    """,
    """
    if rank == 0:
        dist.send(small, dst=1)
    elif rank == 1:
        dist.recv(small, src=0)
    """,
    r"rank 1 waits for rank 0, which has ended",
    ranks=3,
)
_pair(
    "a ring that receives from the wrong side",
    "peer and tag",
    """
    dist.send(small, dst=(rank + 1) % size)
    dist.recv(small, src=(rank + 1) % size)  #!
    """,
    """
    work = dist.isend(small.clone(), dst=(rank + 1) % size)
    dist.recv(small, src=(rank - 1) % size)
    work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 2 → 0",
    ranks=3,
)
_pair(
    "a tag below zero",
    "peer and tag",
    """
    if rank == 0:
        dist.send(small, dst=1, tag=-1)  #!
    else:
        dist.recv(small, src=0)
    """,
    """
    if rank == 0:
        dist.send(small, dst=1, tag=0)
    else:
        dist.recv(small, src=0)
    """,
    r"rank 0 raised ValueError: send\(tag=-1\)",
)
_pair(
    "two messages from anybody, and one sender",
    "peer and tag",
    """
    if rank == 0:
        for _ in range(2):
            dist.recv(small)  #!
    elif rank == 1:
        dist.send(small, dst=0)
    """,
    """
    if rank == 0:
        for _ in range(2):
            dist.recv(small)
    else:
        dist.send(small, dst=0)
    """,
    r"rank 0 waits",
    r"any|have ended",
    ranks=3,
)

# -- deadlock by blocking -------------------------------------------------------------------------

_pair(
    "both receive first",
    "deadlock by blocking",
    """
    dist.recv(torch.zeros(4), src=1 - rank)  #!
    dist.send(small, dst=1 - rank)
    """,
    """
    if rank == 0:
        dist.send(small, dst=1)
        dist.recv(torch.zeros(4), src=1)
    else:
        dist.recv(torch.zeros(4), src=0)
        dist.send(small, dst=0)
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "both send first, too much to be buffered",
    "deadlock by blocking",
    """
    dist.send(large, dst=1 - rank)  #!
    dist.recv(torch.empty_like(large), src=1 - rank)
    """,
    """
    work = dist.isend(large, dst=1 - rank)
    dist.recv(torch.empty_like(large), src=1 - rank)
    work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "a ring of blocking receives",
    "deadlock by blocking",
    """
    dist.recv(torch.zeros(4), src=(rank - 1) % size)  #!
    dist.send(small, dst=(rank + 1) % size)
    """,
    """
    if rank == 0:
        dist.send(small, dst=1)
    dist.recv(torch.zeros(4), src=(rank - 1) % size)
    if rank:
        dist.send(small, dst=(rank + 1) % size)
    """,
    r"Deadlock",
    r"cycle 0 → 2 → 1 → 0",
    ranks=3,
)
_pair(
    "forward meets backward",
    "deadlock by blocking",
    """
    incoming = torch.empty_like(large)
    if rank == 0:
        dist.send(large, dst=1)
        dist.send(large, dst=1)  #!
        dist.recv(incoming, src=1)
    else:
        dist.recv(incoming, src=0)
        dist.send(large, dst=0)  #!
        dist.recv(incoming, src=0)
    """,
    """
    incoming = torch.empty_like(large)
    if rank == 0:
        dist.send(large, dst=1)
        dist.recv(incoming, src=1)
        dist.send(large, dst=1)
    else:
        dist.recv(incoming, src=0)
        dist.send(large, dst=0)
        dist.recv(incoming, src=0)
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "collectives of groups that cross",
    "deadlock by blocking",
    """
    groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    for pair in order:
        dist.all_reduce(small, group=groups[pair])  #!
    """,
    """
    groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    for pair in groups:
        if rank in pair:
            dist.all_reduce(small, group=groups[pair])
    """,
    r"Deadlock",
    r"0 → 1 → 2 → 0",
    ranks=3,
)
_pair(
    "a barrier between send and receive",
    "deadlock by blocking",
    """
    if rank == 0:
        dist.send(large, dst=1)  #!
        dist.barrier()
    else:
        dist.barrier()  #!
        dist.recv(large, src=0)
    """,
    """
    if rank == 0:
        dist.send(large, dst=1)
    else:
        dist.recv(large, src=0)
    dist.barrier()
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)

# -- deadlock by waiting --------------------------------------------------------------------------

_pair(
    "wait before the other side can begin",
    "deadlock by waiting",
    """
    work = dist.irecv(torch.zeros(4), src=1 - rank)  #!
    work.wait()
    dist.isend(small, dst=1 - rank).wait()
    """,
    """
    works = [dist.irecv(torch.zeros(4), src=1 - rank), dist.isend(small, dst=1 - rank)]
    for work in works:
        work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "an asynchronous sum, waited for too early",
    "deadlock by waiting",
    """
    if rank == 0:
        work = dist.all_reduce(small, async_op=True)  #!
        work.wait()
        dist.send(small, dst=1)
    else:
        dist.recv(torch.zeros(4), src=0)  #!
        dist.all_reduce(small)
    """,
    """
    if rank == 0:
        work = dist.all_reduce(small, async_op=True)
        dist.send(large[:4], dst=1)
        work.wait()
    else:
        dist.recv(torch.zeros(4), src=0)
        dist.all_reduce(small)
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "two receives, waited for in crossed order",
    "deadlock by waiting",
    """
    other = torch.zeros(4)
    works = {tag: dist.irecv(other, src=1 - rank, tag=tag) for tag in (1, 2)}  #!
    works[1 + rank].wait()
    dist.send(small, dst=1 - rank, tag=1 + rank)
    """,
    """
    others = {tag: torch.zeros(4) for tag in (1, 2)}
    works = {tag: dist.irecv(others[tag], src=1 - rank, tag=tag) for tag in (1, 2)}
    for tag in (1, 2):
        dist.send(small, dst=1 - rank, tag=tag)
    for work in works.values():
        work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
# -- buffer and wait ------------------------------------------------------------------------------

_pair(
    "the tensor is refilled while it is sent",
    "buffer and wait",
    """
    if rank == 0:
        work = dist.isend(large, dst=1)  #!
        large.fill_(7)
        work.wait()
    else:
        time.sleep(0.3)
        dist.recv(large, src=0)
    """,
    """
    if rank == 0:
        work = dist.isend(large, dst=1)
        work.wait()
        large.fill_(7)
    else:
        time.sleep(0.3)
        dist.recv(large, src=0)
    """,
    r"isend|send",
    r"chang|modif|writ",
)
_pair(
    "the sum is read before the wait",
    "buffer and wait",
    """
    work = dist.all_reduce(large, async_op=True)  #!
    mean = large / size
    """,
    """
    work = dist.all_reduce(large, async_op=True)
    work.wait()
    mean = large / size
    """,
    r"all_reduce",
    r"wait",
)
_pair(
    "a receive that is never waited for",
    "buffer and wait",
    """
    if rank == 0:
        dist.send(small, dst=1)
    else:
        dist.irecv(small, src=0)  #!
        print(small.sum().item())
    """,
    """
    if rank == 0:
        dist.send(small, dst=1)
    else:
        dist.irecv(small, src=0).wait()
        print(small.sum().item())
    """,
    r"recv",
    r"wait",
)

# -- buffering hazard -----------------------------------------------------------------------------

_pair(
    "both send first, little enough to be buffered",
    "buffering hazard",
    """
    dist.send(small, dst=1 - rank)  #!
    dist.recv(torch.zeros(4), src=1 - rank)
    """,
    """
    work = dist.isend(small, dst=1 - rank)
    dist.recv(torch.zeros(4), src=1 - rank)
    work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 0",
)
_pair(
    "a ring in which all send first",
    "buffering hazard",
    """
    dist.send(small, dst=(rank + 1) % size)  #!
    dist.recv(torch.zeros(4), src=(rank - 1) % size)
    """,
    """
    work = dist.isend(small, dst=(rank + 1) % size)
    dist.recv(torch.zeros(4), src=(rank - 1) % size)
    work.wait()
    """,
    r"Deadlock",
    r"0 → 1 → 2 → 0",
    ranks=3,
)

# -- group misuse ---------------------------------------------------------------------------------

_pair(
    "a global rank that is not in the group",
    "group misuse",
    """
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.broadcast(small, src=0, group=group)  #!
    """,
    """
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        dist.broadcast(small, src=1, group=group)
    """,
    r"Global rank 0 is not part of group",
    ranks=3,
)
_pair(
    "a group that is gone",
    "group misuse",
    """
    group = dist.new_group([0, 1])
    dist.destroy_process_group(group)
    dist.all_reduce(small, group=group)  #!
    """,
    """
    group = dist.new_group([0, 1])
    dist.all_reduce(small, group=group)
    dist.destroy_process_group(group)
    """,
    r"destroyed|cannot be used any more|Invalid process group|does not exist",
)
_pair(
    "the world on one rank, a group on the other",
    "group misuse",
    """
    pair = dist.new_group([0, 1])
    dist.all_reduce(small, group=pair if rank == 0 else None)  #!
    """,
    """
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(small, group=pair)
    """,
    r"rank 0 waits in all_reduce",
    r"rank 1 waits in all_reduce",
    ranks=3,
)
_pair(
    "a sum over a group that this rank is not in",
    "group misuse",
    """
    evens = dist.new_group([0, 2])
    dist.all_reduce(small, group=evens)  #!
    """,
    """
    evens = dist.new_group([0, 2])
    if rank in (0, 2):
        dist.all_reduce(small, group=evens)
    """,
    r"rank 1",
    r"does not belong to the given group|not in the group|not part of",
    ranks=3,
)

# -- unmatched at the end -------------------------------------------------------------------------

_pair(
    "a message that nobody receives",
    "unmatched at the end",
    """
    if rank == 0:
        dist.send(small, dst=1, tag=3)  #!
    """,
    """
    if rank == 0:
        dist.send(small, dst=1, tag=3)
    else:
        dist.recv(small, src=0, tag=3)
    """,
    r"rank 0",
    r"float32\[4\]",
    r"(never|no rank|nobody) received|received",
)
_pair(
    "one message too many",
    "unmatched at the end",
    """
    for step in range(3):
        if rank == 0:
            dist.send(small, dst=1)  #!
        elif step:
            dist.recv(small, src=0)
    """,
    """
    for step in range(3):
        if rank == 0:
            dist.send(small, dst=1)
        else:
            dist.recv(small, src=0)
    """,
    r"rank 0",
    r"received",
)
_pair(
    "an asynchronous sum that the others never begin",
    "unmatched at the end",
    """
    if rank == 0:
        work = dist.all_reduce(small, async_op=True)  #!
    """,
    """
    work = dist.all_reduce(small, async_op=True)
    work.wait()
    """,
    r"rank 0",
    r"all_reduce",
)
