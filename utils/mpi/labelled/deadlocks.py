"""Pairs of programs in which a rank waits for ever: for the wrong message, or in a circle."""

from __future__ import annotations

from .programs import CIRCLE_OF_THREE, CIRCLE_OF_TWO, Pair, collector

PAIRS: list[Pair] = []

peer_and_tag = collector(PAIRS, "peer and tag")
peer_and_tag(
    "a neighbour beyond the last rank",
    """
      if rank == size - 1:
    -     dist.send(small, dst=rank + 1)  #!
    +     dist.send(small, dst=(rank + 1) % size)
    + if rank == 0:
    +     dist.recv(small, src=size - 1)
    """,
    r"rank 1 raised ValueError: .*2",
)
peer_and_tag(
    "another tag",
    """
      if rank == 0:
    -     dist.send(small, dst=1, tag=1)
    +     dist.send(small, dst=1, tag=2)
      else:
          dist.recv(small, src=0, tag=2)  #!
    """,
    r"rank 1 waits for rank 0, which has ended",
    r"tag",
)
peer_and_tag(
    "a message to the wrong rank",
    """
      if rank == 0:
    -     dist.send(small, dst=2)
    +     dist.send(small, dst=1)
      elif rank == 1:
          dist.recv(small, src=0)  #!
    """,
    r"rank 1 waits for rank 0, which has ended",
    ranks=3,
)
peer_and_tag(
    "a ring that receives from the wrong side",
    """
    - dist.send(small, dst=(rank + 1) % size)
    - dist.recv(small, src=(rank + 1) % size)  #!
    + work = dist.isend(small.clone(), dst=(rank + 1) % size)
    + dist.recv(small, src=(rank - 1) % size)
    + work.wait()
    """,
    *CIRCLE_OF_THREE,
    ranks=3,
)
peer_and_tag(
    "a tag below zero",
    """
      if rank == 0:
    -     dist.send(small, dst=1, tag=-1)  #!
    +     dist.send(small, dst=1, tag=0)
      else:
          dist.recv(small, src=0)
    """,
    r"rank 0 raised ValueError: send\(tag=-1\)",
)
peer_and_tag(
    "two messages from anybody, and one sender",
    """
      if rank == 0:
          for _ in range(2):
              dist.recv(small)  #!
    - elif rank == 1:
    + else:
          dist.send(small, dst=0)
    """,
    r"rank 0 waits",
    r"any|have ended",
    ranks=3,
)

deadlock_by_blocking = collector(PAIRS, "deadlock by blocking")
deadlock_by_blocking(
    "both receive first",
    """
    - dist.recv(torch.zeros(4), src=1 - rank)  #!
    - dist.send(small, dst=1 - rank)
    + if rank == 0:
    +     dist.send(small, dst=1)
    +     dist.recv(torch.zeros(4), src=1)
    + else:
    +     dist.recv(torch.zeros(4), src=0)
    +     dist.send(small, dst=0)
    """,
    *CIRCLE_OF_TWO,
)
deadlock_by_blocking(
    "both send first, too much to be buffered",
    """
    - dist.send(large, dst=1 - rank)  #!
    + work = dist.isend(large, dst=1 - rank)
      dist.recv(torch.empty_like(large), src=1 - rank)
    + work.wait()
    """,
    *CIRCLE_OF_TWO,
)
deadlock_by_blocking(
    "a ring of blocking receives",
    """
    + if rank == 0:
    +     dist.send(small, dst=1)
      dist.recv(torch.zeros(4), src=(rank - 1) % size)  #!
    - dist.send(small, dst=(rank + 1) % size)
    + if rank:
    +     dist.send(small, dst=(rank + 1) % size)
    """,
    r"Deadlock",
    r"cycle 0 → 2 → 1 → 0",
    ranks=3,
)
deadlock_by_blocking(
    "forward meets backward",
    """
      incoming = torch.empty_like(large)
      if rank == 0:
          dist.send(large, dst=1)
    +     dist.recv(incoming, src=1)
          dist.send(large, dst=1)  #!
    -     dist.recv(incoming, src=1)
      else:
          dist.recv(incoming, src=0)
          dist.send(large, dst=0)  #!
          dist.recv(incoming, src=0)
    """,
    *CIRCLE_OF_TWO,
)
deadlock_by_blocking(
    "collectives of groups that cross",
    """
      groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
    - order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
    - for pair in order:
    -     dist.all_reduce(small, group=groups[pair])  #!
    + for pair in groups:
    +     if rank in pair:
    +         dist.all_reduce(small, group=groups[pair])
    """,
    *CIRCLE_OF_THREE,
    ranks=3,
)
deadlock_by_blocking(
    "a barrier between send and receive",
    """
      if rank == 0:
          dist.send(large, dst=1)  #!
    -     dist.barrier()
      else:
    -     dist.barrier()  #!
          dist.recv(large, src=0)
    + dist.barrier()
    """,
    *CIRCLE_OF_TWO,
)

deadlock_by_waiting = collector(PAIRS, "deadlock by waiting")
deadlock_by_waiting(
    "wait before the other side can begin",
    """
    - work = dist.irecv(torch.zeros(4), src=1 - rank)  #!
    - work.wait()
    - dist.isend(small, dst=1 - rank).wait()
    + works = [dist.irecv(torch.zeros(4), src=1 - rank), dist.isend(small, dst=1 - rank)]
    + for work in works:
    +     work.wait()
    """,
    *CIRCLE_OF_TWO,
)
deadlock_by_waiting(
    "an asynchronous sum, waited for too early",
    """
      if rank == 0:
          work = dist.all_reduce(small, async_op=True)  #!
    +     dist.send(large[:4], dst=1)
          work.wait()
    -     dist.send(small, dst=1)
      else:
          dist.recv(torch.zeros(4), src=0)  #!
          dist.all_reduce(small)
    """,
    *CIRCLE_OF_TWO,
)
deadlock_by_waiting(
    "two receives, waited for in crossed order",
    """
    - other = torch.zeros(4)
    - works = {tag: dist.irecv(other, src=1 - rank, tag=tag) for tag in (1, 2)}  #!
    - works[1 + rank].wait()
    - dist.send(small, dst=1 - rank, tag=1 + rank)
    + others = {tag: torch.zeros(4) for tag in (1, 2)}
    + works = {tag: dist.irecv(others[tag], src=1 - rank, tag=tag) for tag in (1, 2)}
    + for tag in (1, 2):
    +     dist.send(small, dst=1 - rank, tag=tag)
    + for work in works.values():
    +     work.wait()
    """,
    *CIRCLE_OF_TWO,
)
