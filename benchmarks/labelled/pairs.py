"""Pairs with wrong calls, class by class: what `read_pairs` reads."""

from .programs import read_pairs

CALLS = read_pairs(r"""
# call matching

## a barrier on one rank only
says: rank 0 waits for rank 1, which has ended
- if rank == 0:
-     dist.barrier()  #!
+ dist.barrier()

## one step less on one rank
says: rank 0 waits for rank 1, which has ended
- for step in range(3 - rank):
+ for step in range(3):
      dist.all_reduce(small)  #!

## a loss of its own ends the training of a rank [3 ranks]
says: ranks 0, 1 wait for rank 2|rank [01] waits for rank 2
  for step in range(4):
      loss = torch.tensor(float(rank * step))
+     dist.all_reduce(loss)
      if loss > 3:
          break
-     dist.all_reduce(loss)  #!

## only the root broadcasts
says: rank 0 waits for rank 1, which has ended
- if rank == 0:
-     dist.broadcast(small, src=0)  #!
+ dist.broadcast(small, src=0)

## an error that a rank swallows
says: rank 0 waits for rank 1, which has ended
  try:
      if rank == 1:
          raise ValueError("a bad minibatch")
-     dist.all_reduce(small)  #!
  except ValueError:
-     pass
+     small.zero_()
+ dist.all_reduce(small)

## the checkpoint of rank 0 has a barrier
says: rank 0 calls barrier\(\)
says: rank 1 calls all_reduce\(SUM\)
  def save():
      dist.barrier()  #!

  dist.all_reduce(small)
- if rank == 0:
-     save()
+ save()
  dist.all_reduce(small)  #!

# mixed collectives

## all_reduce meets broadcast
says: rank 0 calls all_reduce\(SUM\)
says: rank 1 calls broadcast\(
- if rank == 0:
-     dist.all_reduce(small)  #!
- else:
-     dist.broadcast(small, src=0)  #!
+ dist.all_reduce(small)

## two collectives in another order
says: rank 0 calls all_reduce\(SUM\)
says: rank 1 calls broadcast\(
- if rank == 0:
-     dist.all_reduce(small)  #!
-     dist.broadcast(large, src=0)
- else:
-     dist.broadcast(large, src=0)  #!
-     dist.all_reduce(small)
+ dist.all_reduce(small)
+ dist.broadcast(large, src=0)

## the sum meets the largest
says: rank 0 calls all_reduce\(SUM\)
says: rank 1 calls all_reduce\(MAX\)
- op = dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX
- dist.all_reduce(small, op=op)  #!
+ dist.all_reduce(small, op=dist.ReduceOp.MAX)

## every rank is the root
says: rank 0 calls broadcast\(root=0\)|rank 0 calls broadcast\(
says: rank 1 calls broadcast\(
- dist.broadcast(small, src=rank)  #!
+ dist.broadcast(small, src=0)

## a gradient that a rank does not have
says: rank 0 calls all_reduce\(SUM\) of float32\[3, 4\]
says: rank 1 calls all_reduce\(SUM\) of float32\[3\]
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

## asynchronous, in another order
says: all_reduce\(SUM\) of float32\[4\]
says: all_reduce\(SUM\) of float32\[1000000\]
- tensors = [small, large] if rank == 0 else [large, small]
- works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]  #!
+ works = [dist.all_reduce(tensor, async_op=True) for tensor in (small, large)]
  for work in works:
      work.wait()

## a collective meets a message
says: rank 0 waits in all_reduce
says: rank 1 waits in recv\(src=0
  if rank == 0:
-     dist.all_reduce(small)  #!
+     dist.send(small, dst=1)
  else:
      dist.recv(small, src=0)  #!

# type or size

## a last batch that is smaller
says: float32\[4\]
says: float32\[3\]
- dist.all_reduce(torch.ones(4 - rank))  #!
+ dist.all_reduce(torch.ones(4))

## one rank in double precision
says: float32\[4\]
says: float64\[4\]
- dist.all_reduce(small if rank == 0 else small.double())  #!
+ dist.all_reduce(small.double())

## a message that is longer than its tensor
says: rank 0 sent float32\[4\]
says: rank 1 receives float32\[2\]
  if rank == 0:
      dist.send(torch.ones(4), dst=1)
  else:
-     dist.recv(torch.zeros(2), src=0)  #!
+     dist.recv(torch.zeros(4), src=0)

## as many bytes of another dtype
says: rank 0 sent int64\[2\]
says: rank 1 receives float32\[4\]
  if rank == 0:
-     dist.send(torch.ones(2, dtype=torch.int64), dst=1)
+     dist.send(torch.ones(4), dst=1)
  else:
-     dist.recv(torch.zeros(4), src=0)  #!
+     dist.recv(torch.zeros(2, 2), src=0)

## a list with a tensor too few
says: 1 tensors in the list, expected one per rank: 2|one per rank
- outputs = [torch.zeros(4) for _ in range(size - 1)]
+ outputs = [torch.zeros(4) for _ in range(size)]
  dist.all_gather(outputs, small)  #!

## splits that do not fit together
says: rank 1 sent 8 bytes, rank 0 expects 4|arrived is larger than the tensor to receive it
- sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([2, 2], [2, 2])
+ sends, receives = ([2, 2], [2, 1]) if rank == 0 else ([1, 3], [2, 3])
  output = torch.zeros(sum(receives))
  dist.all_to_all_single(output, small, receives, sends)  #!

# peer and tag

## a neighbour beyond the last rank
says: rank 1 raised ValueError: .*2
  if rank == size - 1:
-     dist.send(small, dst=rank + 1)  #!
+     dist.send(small, dst=(rank + 1) % size)
+ if rank == 0:
+     dist.recv(small, src=size - 1)

## another tag
says: rank 1 waits for rank 0, which has ended
says: tag
  if rank == 0:
-     dist.send(small, dst=1, tag=1)
+     dist.send(small, dst=1, tag=2)
  else:
      dist.recv(small, src=0, tag=2)  #!

## a message to the wrong rank [3 ranks]
says: rank 1 waits for rank 0, which has ended
  if rank == 0:
-     dist.send(small, dst=2)
+     dist.send(small, dst=1)
  elif rank == 1:
      dist.recv(small, src=0)  #!

## a ring that receives from the wrong side [3 ranks]
says: Deadlock
says: 0 → 1 → 2 → 0
- dist.send(small, dst=(rank + 1) % size)
- dist.recv(small, src=(rank + 1) % size)  #!
+ work = dist.isend(small.clone(), dst=(rank + 1) % size)
+ dist.recv(small, src=(rank - 1) % size)
+ work.wait()

## a tag below zero
says: rank 0 raised ValueError: send\(tag=-1\)
  if rank == 0:
-     dist.send(small, dst=1, tag=-1)  #!
+     dist.send(small, dst=1, tag=0)
  else:
      dist.recv(small, src=0)

## two messages from anybody, and one sender [3 ranks]
says: rank 0 waits
says: any|have ended
  if rank == 0:
      for _ in range(2):
          dist.recv(small)  #!
- elif rank == 1:
+ else:
      dist.send(small, dst=0)

# deadlock by blocking

## both receive first
says: Deadlock
says: 0 → 1 → 0
- dist.recv(torch.zeros(4), src=1 - rank)  #!
- dist.send(small, dst=1 - rank)
+ if rank == 0:
+     dist.send(small, dst=1)
+     dist.recv(torch.zeros(4), src=1)
+ else:
+     dist.recv(torch.zeros(4), src=0)
+     dist.send(small, dst=0)

## both send first, too much to be buffered
says: Deadlock
says: 0 → 1 → 0
- dist.send(large, dst=1 - rank)  #!
+ work = dist.isend(large, dst=1 - rank)
  dist.recv(torch.empty_like(large), src=1 - rank)
+ work.wait()

## a ring of blocking receives [3 ranks]
says: Deadlock
says: cycle 0 → 2 → 1 → 0
+ if rank == 0:
+     dist.send(small, dst=1)
  dist.recv(torch.zeros(4), src=(rank - 1) % size)  #!
- dist.send(small, dst=(rank + 1) % size)
+ if rank:
+     dist.send(small, dst=(rank + 1) % size)

## forward meets backward
says: Deadlock
says: 0 → 1 → 0
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

## collectives of groups that cross [3 ranks]
says: Deadlock
says: 0 → 1 → 2 → 0
  groups = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (1, 2), (0, 2))}
- order = {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)]}[rank]
- for pair in order:
-     dist.all_reduce(small, group=groups[pair])  #!
+ for pair in groups:
+     if rank in pair:
+         dist.all_reduce(small, group=groups[pair])

## a barrier between send and receive
says: Deadlock
says: 0 → 1 → 0
  if rank == 0:
      dist.send(large, dst=1)  #!
-     dist.barrier()
  else:
-     dist.barrier()  #!
      dist.recv(large, src=0)
+ dist.barrier()

# deadlock by waiting

## wait before the other side can begin
says: Deadlock
says: 0 → 1 → 0
- work = dist.irecv(torch.zeros(4), src=1 - rank)  #!
- work.wait()  #!
- dist.isend(small, dst=1 - rank).wait()
+ works = [dist.irecv(torch.zeros(4), src=1 - rank), dist.isend(small, dst=1 - rank)]
+ for work in works:
+     work.wait()

## an asynchronous sum, waited for too early
says: Deadlock
says: 0 → 1 → 0
  if rank == 0:
      work = dist.all_reduce(small, async_op=True)  #!
+     dist.send(large[:4], dst=1)
      work.wait()  #!
-     dist.send(small, dst=1)
  else:
      dist.recv(torch.zeros(4), src=0)  #!
      dist.all_reduce(small)

## two receives, waited for in crossed order
says: Deadlock
says: 0 → 1 → 0
- other = torch.zeros(4)
- works = {tag: dist.irecv(other, src=1 - rank, tag=tag) for tag in (1, 2)}  #!
- works[1 + rank].wait()  #!
- dist.send(small, dst=1 - rank, tag=1 + rank)
+ others = {tag: torch.zeros(4) for tag in (1, 2)}
+ works = {tag: dist.irecv(others[tag], src=1 - rank, tag=tag) for tag in (1, 2)}
+ for tag in (1, 2):
+     dist.send(small, dst=1 - rank, tag=tag)
+ for work in works.values():
+     work.wait()

# buffer and wait

## the tensor is refilled while it is sent
says: isend|send
says: chang|modif|writ
  if rank == 0:
      work = dist.isend(large, dst=1)  #!
+     work.wait()
      large.fill_(7)
-     work.wait()
  else:
      time.sleep(0.3)
      dist.recv(large, src=0)

## the sum is read before the wait
says: all_reduce
says: wait
  work = dist.all_reduce(large, async_op=True)  #!
+ work.wait()
  mean = large / size

## a receive that is never waited for
says: recv
says: wait
  if rank == 0:
      dist.send(small, dst=1)
  else:
-     dist.irecv(small, src=0)  #!
+     dist.irecv(small, src=0).wait()
      print(small.sum().item())

# buffering hazard

## both send first, little enough to be buffered
says: Deadlock
says: 0 → 1 → 0
- dist.send(small, dst=1 - rank)  #!
+ work = dist.isend(small, dst=1 - rank)
  dist.recv(torch.zeros(4), src=1 - rank)
+ work.wait()

## a ring in which all send first [3 ranks]
says: Deadlock
says: 0 → 1 → 2 → 0
- dist.send(small, dst=(rank + 1) % size)  #!
+ work = dist.isend(small, dst=(rank + 1) % size)
  dist.recv(torch.zeros(4), src=(rank - 1) % size)
+ work.wait()

# group misuse

## a global rank that is not in the group [3 ranks]
says: Global rank 0 is not part of group
  group = dist.new_group([1, 2])
  if rank in (1, 2):
-     dist.broadcast(small, src=0, group=group)  #!
+     dist.broadcast(small, src=1, group=group)

## a group that is gone
says: destroyed|cannot be used any more|Invalid process group|does not exist
  group = dist.new_group([0, 1])
+ dist.all_reduce(small, group=group)
  dist.destroy_process_group(group)
- dist.all_reduce(small, group=group)  #!

## the world on one rank, a group on the other [3 ranks]
says: rank 0 waits in all_reduce
says: rank 1 waits in all_reduce
  pair = dist.new_group([0, 1])
- dist.all_reduce(small, group=pair if rank == 0 else None)  #!
+ if rank < 2:
+     dist.all_reduce(small, group=pair)

## a sum over a group that this rank is not in [3 ranks]
says: rank 1
says: does not belong to the given group|not in the group|not part of
  evens = dist.new_group([0, 2])
- dist.all_reduce(small, group=evens)  #!
+ if rank in (0, 2):
+     dist.all_reduce(small, group=evens)

# unmatched at the end

## a message that nobody receives
says: rank 0
says: float32\[4\]
says: (never|no rank|nobody) received|received
  if rank == 0:
      dist.send(small, dst=1, tag=3)  #!
+ else:
+     dist.recv(small, src=0, tag=3)

## one message too many
says: rank 0
says: received
  for step in range(3):
      if rank == 0:
          dist.send(small, dst=1)  #!
-     elif step:
+     else:
          dist.recv(small, src=0)

## an asynchronous sum that the others never begin
says: rank 0
says: all_reduce
- if rank == 0:
-     work = dist.all_reduce(small, async_op=True)  #!
+ work = dist.all_reduce(small, async_op=True)
+ work.wait()
""")
