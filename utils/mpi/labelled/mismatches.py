"""Pairs of programs in which calls do not match: who calls, what, and with which tensor."""

from __future__ import annotations

from .programs import Pair, collector

PAIRS: list[Pair] = []

call_matching = collector(PAIRS, "call matching")
call_matching(
    "a barrier on one rank only",
    """
    - if rank == 0:
    -     dist.barrier()  #!
    + dist.barrier()
    """,
    r"rank 0 waits for rank 1, which has ended",
)
call_matching(
    "one step less on one rank",
    """
    - for step in range(3 - rank):
    + for step in range(3):
          dist.all_reduce(small)  #!
    """,
    r"rank 0 waits for rank 1, which has ended",
)
call_matching(
    "a loss of its own ends the training of a rank",
    """
      for step in range(4):
          loss = torch.tensor(float(rank * step))
    +     dist.all_reduce(loss)
          if loss > 3:
              break
    -     dist.all_reduce(loss)  #!
    """,
    r"ranks 0, 1 wait for rank 2|rank [01] waits for rank 2",
    ranks=3,
)
call_matching(
    "only the root broadcasts",
    """
    - if rank == 0:
    -     dist.broadcast(small, src=0)  #!
    + dist.broadcast(small, src=0)
    """,
    r"rank 0 waits for rank 1, which has ended",
)
call_matching(
    "an error that a rank swallows",
    """
      try:
          if rank == 1:
              raise ValueError("a bad minibatch")
    -     dist.all_reduce(small)  #!
      except ValueError:
    -     pass
    +     small.zero_()
    + dist.all_reduce(small)
    """,
    r"rank 0 waits for rank 1, which has ended",
)
call_matching(
    "the checkpoint of rank 0 has a barrier of its own",
    """
      def save():
          dist.barrier()  #!

      dist.all_reduce(small)
    - if rank == 0:
    -     save()
    + save()
      dist.all_reduce(small)  #!
    """,
    r"rank 0 calls barrier\(\)",
    r"rank 1 calls all_reduce\(SUM\)",
)

mixed_collectives = collector(PAIRS, "mixed collectives")
mixed_collectives(
    "all_reduce meets broadcast",
    """
    - if rank == 0:
    -     dist.all_reduce(small)  #!
    - else:
    -     dist.broadcast(small, src=0)  #!
    + dist.all_reduce(small)
    """,
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls broadcast\(",
)
mixed_collectives(
    "two collectives in another order",
    """
    - if rank == 0:
    -     dist.all_reduce(small)  #!
    -     dist.broadcast(large, src=0)
    - else:
    -     dist.broadcast(large, src=0)  #!
    -     dist.all_reduce(small)
    + dist.all_reduce(small)
    + dist.broadcast(large, src=0)
    """,
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls broadcast\(",
)
mixed_collectives(
    "the sum meets the largest",
    """
    - op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
    - dist.all_reduce(small, op=op)  #!
    + dist.all_reduce(small, op=dist.ReduceOp.MAX)
    """,
    r"rank 0 calls all_reduce\(SUM\)",
    r"rank 1 calls all_reduce\(MAX\)",
)
mixed_collectives(
    "every rank is the root",
    """
    - dist.broadcast(small, src=rank)  #!
    + dist.broadcast(small, src=0)
    """,
    r"rank 0 calls broadcast\(root=0\)|rank 0 calls broadcast\(",
    r"rank 1 calls broadcast\(",
)
mixed_collectives(
    "a gradient that a rank does not have",
    """
      model = torch.nn.Linear(4, 3)
      model(small).sum().backward()
      if rank == 1:
          model.weight.grad = None
      for parameter in model.parameters():
    -     if parameter.grad is not None:
    -         dist.all_reduce(parameter.grad)  #!
    +     if parameter.grad is None:
    +         parameter.grad = torch.zeros_like(parameter)
    +     dist.all_reduce(parameter.grad)
    """,
    r"rank 0 calls all_reduce\(SUM\) of float32\[3, 4\]",
    r"rank 1 calls all_reduce\(SUM\) of float32\[3\]",
)
mixed_collectives(
    "asynchronous, in another order",
    """
    - tensors = [small, large] if rank == 0 else [large, small]
    - works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  #!
    + works = [dist.all_reduce(tensor, async_op=True) for tensor in (small, large)]
      for work in works:
          work.wait()
    """,
    r"all_reduce\(SUM\) of float32\[4\]",
    r"all_reduce\(SUM\) of float32\[1000000\]",
)
mixed_collectives(
    "a collective meets a message",
    """
      if rank == 0:
    -     dist.all_reduce(small)  #!
    +     dist.send(small, dst=1)
      else:
          dist.recv(small, src=0)  #!
    """,
    r"rank 0 waits in all_reduce",
    r"rank 1 waits in recv\(src=0",
)

type_or_size = collector(PAIRS, "type or size")
type_or_size(
    "a last batch that is smaller",
    """
    - dist.all_reduce(torch.ones(4 - rank))  #!
    + dist.all_reduce(torch.ones(4))
    """,
    r"float32\[4\]",
    r"float32\[3\]",
)
type_or_size(
    "one rank in double precision",
    """
    - dist.all_reduce(small if rank == 0 else small.double())  #!
    + dist.all_reduce(small.double())
    """,
    r"float32\[4\]",
    r"float64\[4\]",
)
type_or_size(
    "a message that is longer than its tensor",
    """
      if rank == 0:
          dist.send(torch.ones(4), dst=1)
      else:
    -     dist.recv(torch.zeros(2), src=0)  #!
    +     dist.recv(torch.zeros(4), src=0)
    """,
    r"rank 0 sent float32\[4\]",
    r"rank 1 receives float32\[2\]",
)
type_or_size(
    "as many bytes of another dtype",
    """
      if rank == 0:
    -     dist.send(torch.ones(2, dtype=torch.int64), dst=1)
    +     dist.send(torch.ones(4), dst=1)
      else:
    -     dist.recv(torch.zeros(4), src=0)  #!
    +     dist.recv(torch.zeros(2, 2), src=0)
    """,
    r"rank 0 sent int64\[2\]",
    r"rank 1 receives float32\[4\]",
)
type_or_size(
    "a list with a tensor too few",
    """
    - outputs = [torch.zeros(4) for _ in range(size - 1)]
    + outputs = [torch.zeros(4) for _ in range(size)]
      dist.all_gather(outputs, small)  #!
    """,
    r"1 tensors in the list, expected one per rank: 2|one per rank",
)
type_or_size(
    "splits that do not fit together",
    """
    - sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([2, 2], [2, 2])
    + sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([1, 3], [2, 3])
      output = torch.zeros(sum(receives))
      dist.all_to_all_single(output, small, receives, sends)  #!
    """,
    r"rank 1 sent 8 bytes, rank 0 expects 4|arrived is larger than the tensor to receive it",
)
