"""Pairs whose calls match: wrong numbers, too slow, memory leaks and silent corruption.

A backend sees only calls, so it is silent about most of these programs. Then the label's `instead`
says which instrument finds the mistake, and `proof` shows that there is one (see `proof.py`).
"""

from .programs import read_pairs

TRAININGS = read_pairs(r"""
# wrong numbers

## a layer whose gradients are not summed
instead: Compare a digest of the weights across the ranks after each step.
proof: differ: weights(model)
  torch.manual_seed(0)
  model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
  torch.manual_seed(1 + rank)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 4)).square().mean().backward()
-     for parameter in model[0].parameters():  #!
+     for parameter in model.parameters():
          dist.all_reduce(parameter.grad)
          parameter.grad /= size
      with torch.no_grad():
          for parameter in model.parameters():
              parameter -= 0.1 * parameter.grad

## the mean of the gradients is divided again
instead: Compare the weights, up to rounding, with a run of one rank that has the whole minibatch.
proof: other: weights(model)
  def average_gradients(model):
      for parameter in model.parameters():
          dist.all_reduce(parameter.grad)
          parameter.grad /= size

  torch.manual_seed(0)
  model = torch.nn.Linear(4, 2)
  torch.manual_seed(1 + rank)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 4)).square().mean().backward()
      average_gradients(model)
      with torch.no_grad():
          for parameter in model.parameters():
-             parameter -= 0.1 * parameter.grad / size  #!
+             parameter -= 0.1 * parameter.grad

## only rank 0 loads the checkpoint
instead: Compare a digest of the weights across the ranks after each step.
proof: differ: weights(model)
  torch.manual_seed(0)
  model = torch.nn.Linear(4, 2)
  if rank == 0:
-     model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})  #!
+     model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.ones(2)})
+ for parameter in model.parameters():
+     dist.broadcast(parameter.data, src=0)
  torch.manual_seed(1 + rank)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 4)).square().mean().backward()
      with torch.no_grad():
          for parameter in model.parameters():
              dist.all_reduce(parameter.grad)
              parameter -= 0.1 * parameter.grad / size

## equal seeds draw equal minibatches
instead: Compare a digest of the minibatches across the ranks. The digests have to differ.
proof: equal: drawn
  torch.manual_seed(0)
  model, data, drawn = torch.nn.Linear(4, 2), torch.randn(100, 4), []
- torch.manual_seed(1)  #!
+ torch.manual_seed(1 + rank)
  for step in range(3):
      drawn.append(torch.randint(100, (8,)).tolist())
      model.zero_grad()
      model(data[drawn[-1]]).square().mean().backward()
      with torch.no_grad():
          for parameter in model.parameters():
              dist.all_reduce(parameter.grad)
              parameter -= 0.1 * parameter.grad / size

## the mean of means over minibatches of 12 and 4
instead: Compare the weights, up to rounding, with a run of one rank that has the whole minibatch.
proof: other: weights(model)
  torch.manual_seed(0)
  model, data = torch.nn.Linear(4, 1), torch.randn(16, 4)
  mine = data.split([12, 4])[rank]
  for step in range(3):
      model.zero_grad()
-     (model(mine).square().mean() / size).backward()  #!
+     (model(mine).square().sum() / len(data)).backward()
      with torch.no_grad():
          for parameter in model.parameters():
              dist.all_reduce(parameter.grad)
              parameter -= 0.1 * parameter.grad

# too slow

## a rank that computes three quarters of the minibatch
instead: In the timeline, rank 1 waits for rank 0 in the first all_reduce of each step.
proof: more: len(mine)
  torch.manual_seed(0)
  model, data = torch.nn.Linear(256, 256), torch.randn(4096, 256)
- mine = data.split([3072, 1024])[rank]  #!
+ mine = data.split([2048, 2048])[rank]
  for step in range(3):
      model.zero_grad()
      (model(mine).square().sum() / len(data)).backward()
      for parameter in model.parameters():
          dist.all_reduce(parameter.grad)

## buckets in the order of the forward pass
instead: In the timeline, the first all_reduce begins only when the last gradient is ready.
proof: more: len(works) - begun[-1]
  model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
- buckets = list(model)  #!
+ buckets = list(reversed(model))
  arrived, works, begun = set(), [], []

  def reduce_full_buckets(parameter):
      begun.append(len(works))
      arrived.add(parameter)
      while buckets and arrived.issuperset(buckets[0].parameters()):
          for full in buckets.pop(0).parameters():
              works.append(dist.all_reduce(full.grad, async_op=True))

  for parameter in model.parameters():
      parameter.register_post_accumulate_grad_hook(reduce_full_buckets)
  model(torch.randn(8, 64)).square().mean().backward()
  for work in works:
      work.wait()

## a barrier after each all_reduce
instead: In the timeline, half of all calls are barriers.
proof: more: barriers()
  model = torch.nn.Linear(64, 64)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 64)).square().mean().backward()
      for parameter in model.parameters():
          dist.all_reduce(parameter.grad)
-         dist.barrier()  #!

## each rank starts a thread for every core
instead: Compare the number of ranks times torch.get_num_threads() with the number of cores.
proof: more: size * torch.get_num_threads()
- torch.set_num_threads(os.cpu_count())  #!
+ torch.set_num_threads(max(1, os.cpu_count() // size))
  model = torch.nn.Linear(64, 64)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 64)).square().mean().backward()
      for parameter in model.parameters():
          dist.all_reduce(parameter.grad)

# memory leak

## each validation keeps its graph
instead: Measure the memory after each step. It grows by the same number of bytes in each step.
proof: more: bytes_for_backward()
  model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
  losses = []
  for step in range(4):
      loss = model(torch.randn(32, 64)).square().mean()
      dist.all_reduce(loss.detach())
-     losses.append(loss)  #!
+     losses.append(loss.item())

## a list of requests that nobody waits for
says: rank 1 never waited for isend
proof: more: len(requests)
  requests = []
  for step in range(4):
      gradients = torch.full((1000,), float(step))
      if rank == 0:
          dist.recv(gradients, src=1)
      else:
-         requests.append(dist.isend(gradients, dst=0))  #!
+         requests.append(dist.isend(gradients, dst=0))
+         requests.pop().wait()

## a new group in every step
instead: Count the groups, or measure the memory after each step.
proof: more: groups()
+ pair = dist.new_group([0, 1])
  for step in range(4):
-     pair = dist.new_group([0, 1])  #!
      dist.all_reduce(small, group=pair)

# silent corruption

## a bit of a weight flips on one rank
instead: Compare a digest of the weights across the ranks after each step.
proof: differ: weights(model)
  torch.manual_seed(0)
  model = torch.nn.Linear(4, 2)
  torch.manual_seed(1 + rank)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 4)).square().mean().backward()
-     if rank == 1 and step == 1:
-         model.weight.data.view(torch.int32)[0, 0] ^= 1 << 20  #!
      with torch.no_grad():
          for parameter in model.parameters():
              dist.all_reduce(parameter.grad)
              parameter -= 0.1 * parameter.grad / size

## a bit of a gradient flips before the sum
instead: Run it twice, and bisect for the first step after which the weights' digests differ.
proof: other: weights(model)
  torch.manual_seed(0)
  model = torch.nn.Linear(4, 2)
  torch.manual_seed(1 + rank)
  for step in range(3):
      model.zero_grad()
      model(torch.randn(8, 4)).square().mean().backward()
-     if rank == 1 and step == 1:
-         model.weight.grad.view(torch.int32)[0, 0] ^= 1 << 20  #!
      with torch.no_grad():
          for parameter in model.parameters():
              dist.all_reduce(parameter.grad)
              parameter -= 0.1 * parameter.grad / size
""")
