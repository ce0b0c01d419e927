"""Pairs of programs that misuse a tensor, a group, or a message, and may come through by luck."""

from __future__ import annotations

from .programs import CIRCLE_OF_THREE, CIRCLE_OF_TWO, Pair, collector

PAIRS: list[Pair] = []

buffer_and_wait = collector(PAIRS, "buffer and wait")
buffer_and_wait(
    "the tensor is refilled while it is sent",
    """
      if rank == 0:
          work = dist.isend(large, dst=1)  #!
    +     work.wait()
          large.fill_(7)
    -     work.wait()
      else:
          time.sleep(0.3)
          dist.recv(large, src=0)
    """,
    r"isend|send",
    r"chang|modif|writ",
)
buffer_and_wait(
    "the sum is read before the wait",
    """
      work = dist.all_reduce(large, async_op=True)  #!
    + work.wait()
      mean = large / size
    """,
    r"all_reduce",
    r"wait",
)
buffer_and_wait(
    "a receive that is never waited for",
    """
      if rank == 0:
          dist.send(small, dst=1)
      else:
    -     dist.irecv(small, src=0)  #!
    +     dist.irecv(small, src=0).wait()
          print(small.sum().item())
    """,
    r"recv",
    r"wait",
)

buffering_hazard = collector(PAIRS, "buffering hazard")
buffering_hazard(
    "both send first, little enough to be buffered",
    """
    - dist.send(small, dst=1 - rank)  #!
    + work = dist.isend(small, dst=1 - rank)
      dist.recv(torch.zeros(4), src=1 - rank)
    + work.wait()
    """,
    *CIRCLE_OF_TWO,
)
buffering_hazard(
    "a ring in which all send first",
    """
    - dist.send(small, dst=(rank + 1) % size)  #!
    + work = dist.isend(small, dst=(rank + 1) % size)
      dist.recv(torch.zeros(4), src=(rank - 1) % size)
    + work.wait()
    """,
    *CIRCLE_OF_THREE,
    ranks=3,
)

group_misuse = collector(PAIRS, "group misuse")
group_misuse(
    "a global rank that is not in the group",
    """
      group = dist.new_group([1, 2])
      if rank in (1, 2):
    -     dist.broadcast(small, src=0, group=group)  #!
    +     dist.broadcast(small, src=1, group=group)
    """,
    r"Global rank 0 is not part of group",
    ranks=3,
)
group_misuse(
    "a group that is gone",
    """
      group = dist.new_group([0, 1])
    + dist.all_reduce(small, group=group)
      dist.destroy_process_group(group)
    - dist.all_reduce(small, group=group)  #!
    """,
    r"destroyed|cannot be used any more|Invalid process group|does not exist",
)
group_misuse(
    "the world on one rank, a group on the other",
    """
      pair = dist.new_group([0, 1])
    - dist.all_reduce(small, group=pair if rank == 0 else None)  #!
    + if rank < 2:
    +     dist.all_reduce(small, group=pair)
    """,
    r"rank 0 waits in all_reduce",
    r"rank 1 waits in all_reduce",
    ranks=3,
)
group_misuse(
    "a sum over a group that this rank is not in",
    """
      evens = dist.new_group([0, 2])
    - dist.all_reduce(small, group=evens)  #!
    + if rank in (0, 2):
    +     dist.all_reduce(small, group=evens)
    """,
    r"rank 1",
    r"does not belong to the given group|not in the group|not part of",
    ranks=3,
)

unmatched_at_the_end = collector(PAIRS, "unmatched at the end")
unmatched_at_the_end(
    "a message that nobody receives",
    """
      if rank == 0:
          dist.send(small, dst=1, tag=3)  #!
    + else:
    +     dist.recv(small, src=0, tag=3)
    """,
    r"rank 0",
    r"float32\[4\]",
    r"(never|no rank|nobody) received|received",
)
unmatched_at_the_end(
    "one message too many",
    """
      for step in range(3):
          if rank == 0:
              dist.send(small, dst=1)  #!
    -     elif step:
    +     else:
              dist.recv(small, src=0)
    """,
    r"rank 0",
    r"received",
)
unmatched_at_the_end(
    "an asynchronous sum that the others never begin",
    """
    - if rank == 0:
    -     work = dist.all_reduce(small, async_op=True)  #!
    + work = dist.all_reduce(small, async_op=True)
    + work.wait()
    """,
    r"rank 0",
    r"all_reduce",
)
