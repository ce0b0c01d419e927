"""Answers to lab 02, wrong ones and right ones, that students really give."""

from __future__ import annotations

NOTEBOOK = "02_samplers.ipynb"
CELLS = {
    "2.1": "lab02-items-answer",
    "2.2": "lab02-epochs-answer",
    "2.3": "lab02-padding-answer",
    "2.4": "lab02-micro-answer",
    "2.5": "lab02-union-answer",
    "2.6": "lab02-mean-answer",
}

# Run on every rank before the solutions.
BEFORE = """
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader
from torch.utils.data.distributed import DistributedSampler

from utils.data import SimpleDataSet

dist.init_process_group("mpi")
rank, world_size = dist.get_rank(), dist.get_world_size()
"""

# Wrong versions of a solution: task, what the student did, text of the solution, text in its
# place, words of the message.
CHANGES = [
    ("2.1", "leaves shuffle at its default", ", shuffle=shuffle", "", "Your items are shuffled,"),
    ("2.1", "never shuffles", "shuffle=shuffle", "shuffle=False", "in order, but shuffle=True"),
    ("2.1", "forgets drop_last", ", drop_last=drop_last", "", "samples were repeated, but"),
    ("2.1", "takes the rank it runs on", "rank=r,", "rank=rank % p,", "You returned the"),
    ("2.1", "takes the world for p", "num_replicas=p, rank=r",
     "num_replicas=world_size, rank=r", "You shared the items among 4 ranks"),
    ("2.1", "forgets the sampler", ", sampler=sampler", "", "You returned all items"),
    ("2.1", "returns indices", "[item for batch in loader for item in batch.tolist()]",
     "list(sampler)", "You returned indices"),
    ("2.1", "returns minibatches", "[item for batch in loader for item in batch.tolist()]",
     "[batch.tolist() for batch in loader]", "a list of minibatches"),
    ("2.1", "gives shuffle to the loader", "sampler=sampler)", "sampler=sampler, shuffle=shuffle)",
     "mutually exclusive"),
    ("2.1", "gives drop_last to the loader", "sampler=sampler)",
     "sampler=sampler, drop_last=drop_last)", "The last items are missing"),
    ("2.1", "returns nothing", "return [item", "[item", "You returned None. Return a flat list"),
    ("2.2", "forgets set_epoch", "sampler.set_epoch(epoch)", "pass", "Every epoch has the same"),
    ("2.2", "sets the epoch too late",
     "sampler.set_epoch(epoch)\n        orders.append(list(sampler))",
     "orders.append(list(sampler))\n        sampler.set_epoch(epoch)",
     "Epochs 0 and 1 have the same order"),
    ("2.2", "counts epochs from one", "set_epoch(epoch)", "set_epoch(epoch + 1)",
     "seed + epoch is one too large"),
    ("2.2", "has a seed for each rank", "seed=seed", "seed=seed + r", "This rank shuffles with a"),
    ("2.2", "has a seed for each process", "seed=seed", "seed=rank", "This rank shuffles with a"),
    ("2.2", "ignores the seed", ", seed=seed", "", "You didn't use the argument seed"),
    ("2.2", "does not shuffle", "shuffle=True", "shuffle=False", "Your order isn't shuffled"),
    ("2.2", "returns one long list", "orders.append(list(sampler))", "orders += list(sampler)",
     "one long list"),
    ("2.2", "returns the samplers", "orders.append(list(sampler))", "orders.append(sampler)",
     "You returned samplers"),
    ("2.2", "returns nothing", "return orders", "pass", "one list of sample numbers per epoch"),
    ("2.3", "repeats what is too much", "missing = -n % p", "missing = n % p",
     "samples that are too many"),
    ("2.3", "repeats p where p divides n", "missing = -n % p", "missing = p - n % p",
     "p divides n, so nothing is missing"),
    ("2.3", "repeats the last samples", "[k % n for k in range(missing)]",
     "list(range(n))[n - missing:]", "You repeated the last samples of the order"),
    ("2.3", "goes through the samples once", "[k % n for k in range(missing)]",
     "list(range(n))[:missing]", "again and again"),
    ("2.3", "loses what is missing", "range(n - n % p, n)", "range(n - -n % p, n)",
     "samples, which are missing to the next multiple of p"),
    ("2.3", "loses the first samples", "range(n - n % p, n)", "range(n % p)", "the first samples"),
    ("2.3", "forgets drop_last", "if drop_last:", "if False:", "happens with drop_last=False"),
    ("2.3", "hard-codes four ranks", "    if drop_last:", "    p = 4\n    if drop_last:",
     "You returned the result for 4 ranks"),
    ("2.3", "swaps the lists", "return [k % n for k in range(missing)], []",
     "return [], [k % n for k in range(missing)]", "You swapped the two lists"),
    ("2.3", "returns numbers", "return [k % n for k in range(missing)], []",
     "return missing, 0", "You returned numbers"),
    ("2.4", "takes m for the batch size", "batch_size=m // p", "batch_size=m", "m / p"),
    ("2.4", "gives drop_last to the wrong sampler", "shuffle=shuffle\n",
     "shuffle=shuffle, drop_last=drop_last\n", "You passed drop_last to the DistributedSampler,"),
    ("2.4", "ignores drop_last", "drop_last=drop_last", "drop_last=False", "is too short"),
    ("2.4", "always drops", "drop_last=drop_last", "drop_last=True", "but drop_last=False"),
    ("2.4", "forgets set_epoch", "sampler.set_epoch(epoch)", "pass", "the order of epoch 0"),
    ("2.4", "forgets shuffle", ", shuffle=shuffle", "", "shuffled, but shuffle=False"),
    ("2.4", "returns the sampler", "return list(BatchSampler(sampler, batch_size=m // p, "
     "drop_last=drop_last))", "return BatchSampler(sampler, m // p, drop_last)",
     "You returned the BatchSampler"),
    ("2.4", "returns a flat list", "return list(BatchSampler(sampler, batch_size=m // p, "
     "drop_last=drop_last))", "return list(sampler)", "Put a BatchSampler around the sampler"),
    ("2.4", "takes the rank it runs on", "rank=r", "rank=rank % p", "You returned the"),
    ("2.4", "rounds m / p", "if m % p:", "if False:", "must raise a ValueError, but it returned"),
    ("2.5", "forgets the epoch of the twin", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 1, 0, shuffle)", "the order of epoch 0"),
    ("2.5", "gives the twin a share", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 2, 0, shuffle, epoch)", "You returned the microbatches of rank 0 of 2"),
    ("2.5", "keeps the twin in order", "microbatches(n, m, 1, 0, shuffle, epoch)",
     "microbatches(n, m, 1, 0)", "Your samples aren't shuffled, but shuffle=True"),
    ("2.5", "looks at this rank only",
     "dist.all_gather_object(parts, mine, group=group)", "parts = [mine]",
     "- ranks 0–3: in the group of ranks 0, 1, 2, 3"),
    ("2.5", "forgets the group", "dist.all_gather_object(parts, mine, group=group)",
     "parts = [None] * world_size; dist.all_gather_object(parts, mine)",
     "Pass group=group to every call"),
    ("2.5", "hard-codes four ranks", "[None] * dist.get_world_size(group)", "[None] * 4",
     "with groups of the ranks"),
    ("2.5", "compares sets", "sorted(union) != sorted(expected[k])",
     "set(union) != set(expected[k])", "A set forgets how often"),
    ("2.5", "compares in order", "sorted(union) != sorted(expected[k])", "union != expected[k]",
     "Ignore the order of the samples"),
    ("2.5", "stops at the shortest list", "max(len(batches) for batches in [*parts, expected])",
     "min(len(batches) for batches in [*parts, expected])", "zip stops at the shortest list"),
    ("2.5", "asks for the own part only", "sorted(union) != sorted(expected[k])",
     "not set(union) <= set(expected[k])", "Expected False, got True"),
    ("2.5", "returns nothing", "return True", "pass", "Return True or False"),
    ("2.6", "keeps the padding", "once = values[places < n]", "once = values",
     "samples. Index j of rank r has position r + j·p in the"),
    ("2.6", "counts the padding, too",
     "len(once)]", "len(values)]", "padding included"),
    ("2.6", "forgets the group", "dist.all_reduce(sums, group=group)", "dist.all_reduce(sums)",
     "Pass group=group to every call"),
    ("2.6", "forgets the all_reduce", "dist.all_reduce(sums, group=group)", "pass",
     "the mean of this rank's"),
    ("2.6", "takes places in blocks", "places = r + p * torch.arange(len(values))",
     "places = r * len(values) + torch.arange(len(values))", "ranks take turns"),
    ("2.6", "reduces twice", "dist.all_reduce(sums, group=group)",
     "dist.all_reduce(sums[:1], group=group); dist.all_reduce(sums[1:], group=group)",
     "You made all_reduce, all_reduce"),
    ("2.6", "returns the sum", "return total / count", "return total", "You returned a sum"),
    ("2.6", "returns nothing", "return total / count", "pass", "returned None"),
]  # fmt: skip

# Whole answers: task, what the student did, code, words of the message.
WRONG = [
    ("2.1", "trusts the defaults", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, shuffle=shuffle, drop_last=drop_last)
            return [int(item) for item in DataLoader(dataset, sampler=sampler)]
        """, "items_of(24, 1, 0, shuffle=False, drop_last=False)"),
    ("2.1", "returns tensors", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle, drop_last=drop_last)
            return [item[0] for item in DataLoader(dataset, sampler=sampler)]
        """, "returned tensors"),
    ("2.1", "shares by hand", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
            share = n // p if drop_last else -(-n // p)
            order = (order * (p + 1))[: share * p] if not drop_last else order[: share * p]
            return [10 * sample for sample in order[r::p]]
        """, "You computed the samples by hand"),
    ("2.2", "makes a sampler for each epoch", """
        def epoch_orders(n, p, r, epochs, seed):
            return [list(DistributedSampler(range(n), p, r, True, seed + e)) for e in range(epochs)]
        """, "You never called set_epoch"),
    ("2.5", "stops at the end of the minibatches", """
        def same_minibatches(mine, expected, group=None):
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            for k, minibatch in enumerate(expected):
                union = [s for part in parts if k < len(part) for s in part[k]]
                if sorted(union) != sorted(minibatch):
                    return False
            return True
        """, "one microbatch too many"),
    ("2.6", "returns a tensor", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            total = values[r + p * torch.arange(len(values)) < n].sum()
            dist.all_reduce(total, group=group)
            return total / n
        """, "You returned a tensor"),
    ("2.6", "asks for its number in the world", """
        def mean_once(values, n, group=None):
            p = dist.get_world_size(group)
            total = values[dist.get_rank() + p * torch.arange(len(values)) < n].sum()
            dist.all_reduce(total, group=group)
            return total.item() / n
        """, "You counted positions from this rank's number in the world"),
    ("2.3", "asks the sampler", """
        def repeated_and_lost(n, p, drop_last=False):
            seen = [k for r in range(p) for k in DistributedSampler(
                range(n), num_replicas=p, rank=r, shuffle=False, drop_last=drop_last)]
            lost = [k for k in range(n) if k not in seen]
            for k in set(seen):
                seen.remove(k)
            return seen, lost
        """, "You asked a DistributedSampler"),
    ("2.5", "draws another permutation", """
        def sequential_minibatches(n, m, shuffle=False, epoch=0):
            torch.manual_seed(1234 + epoch)
            order = torch.randperm(n).tolist() if shuffle else list(range(n))
            return [order[k:k + m] for k in range(0, n, m)]
        """, "All samples are there, but not in the sampler's order"),
    ("2.5", "compares the whole epoch", """
        def same_minibatches(mine, expected, group=None):
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            flat = sorted(k for part in parts for batch in part for k in batch)
            return flat == sorted(k for batch in expected for k in batch)
        """, "minibatch by minibatch, not the whole epoch"),
    ("2.5", "gathers tensors of unequal size", """
        def same_minibatches(mine, expected, group=None):
            for own, minibatch in zip(mine, expected):
                own = torch.tensor(own)
                parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, own, group=group)
                if sorted(torch.cat(parts).tolist()) != sorted(minibatch):
                    return False
            return True
        """, "all_gather"),
    ("2.6", "averages the ranks' means", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            mean = values[r + p * torch.arange(len(values)) < n].mean()
            dist.all_reduce(mean, group=group)
            return (mean / p).item()
        """, "the mean of the ranks' means"),
    ("2.6", "drops the last round", """
        def mean_once(values, n, group=None):
            own = values[: n // dist.get_world_size(group)]
            sums = torch.tensor([own.sum(), len(own)])
            dist.all_reduce(sums, group=group)
            return (sums[0] / sums[1]).item()
        """, "You left samples out, as drop_last does"),
    ("2.6", "divides by n", """
        def mean_once(values, n, group=None):
            total = values.sum()
            dist.all_reduce(total, group=group)
            return total.item() / n
        """, "You divided by 25, but your sum contains repeated samples"),
    ("2.6", "lets ranks without samples go", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            own = values[r + p * torch.arange(len(values)) < n]
            if len(own) == 0:
                return 0.0
            sums = torch.tensor([own.sum(), len(own)])
            dist.all_reduce(sums, group=group)
            return (sums[0] / sums[1]).item()
        """, "waits"),
    ("2.6", "makes two all_reduces", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            mask = torch.arange(len(values)) * p + r < n
            total, count = (values * mask).sum(), mask.sum().to(values.dtype)
            dist.all_reduce(total, group=group)
            dist.all_reduce(count, group=group)
            return (total / count).item()
        """, "Make one all_reduce, of sum and count together"),
    ("2.4", "takes the items of a loader", """
        def microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False):
            if m % p:
                raise ValueError("m must be a multiple of p")
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle)
            sampler.set_epoch(epoch)
            loader = DataLoader(dataset, m // p, sampler=sampler, drop_last=drop_last)
            return [batch.tolist() for batch in loader]
        """, "You returned items"),
]  # fmt: skip

# Other ways that are right.
RIGHT = [
    ("2.1", "without batches", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle, drop_last=drop_last)
            return tuple(int(item[0]) for item in DataLoader(dataset, sampler=sampler))
        """),
    ("2.2", "the epochs from a dict", """
        def epoch_orders(n, p, r, epochs, seed):
            sampler = DistributedSampler(range(n), p, r, True, seed)
            orders = {}
            for epoch in reversed(range(epochs)):
                sampler.set_epoch(epoch)
                orders[epoch] = tuple(sampler)
            return [orders[epoch] for epoch in range(epochs)]
        """),
    ("2.3", "in the order of the sampler, with ceil", """
        import math
        def repeated_and_lost(n, p, drop_last=False):
            if drop_last:
                return [], sorted(range(n // p * p, n), reverse=True)
            return ((list(range(n)) * p)[: math.ceil(n / p) * p - n], [])
        """),
    ("2.4", "cut by hand", """
        def microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False):
            if m % p != 0:
                raise ValueError
            sampler = DistributedSampler(range(n), p, r, shuffle=shuffle)
            sampler.set_epoch(epoch)
            own, size = list(sampler), m // p
            parts = [own[k : k + size] for k in range(0, len(own), size)]
            return [part for part in parts if len(part) == size or not drop_last]
        """),
    ("2.5", "the permutation by hand, and padded tensors", """
        def sequential_minibatches(n, m, shuffle=False, epoch=0):
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()
            return [order[k:k + m] for k in range(0, n, m)]

        def same_minibatches(mine, expected, group=None):
            size = torch.tensor([len(mine), max([len(part) for part in mine], default=0)])
            dist.all_reduce(size, op=dist.ReduceOp.MAX, group=group)
            rows = max(int(size[0]), len(expected))
            own = torch.full((rows, int(size[1])), -1)
            for k, part in enumerate(mine):
                own[k, : len(part)] = torch.tensor(part)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, own, group=group)
            for k in range(rows):
                union = [int(s) for part in parts for s in part[k] if s >= 0]
                if sorted(union) != (sorted(expected[k]) if k < len(expected) else []):
                    return False
            return True
        """),
    ("2.6", "the count is n, and a sum of nothing is zero", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            total = sum((v for j, v in enumerate(values) if r + j * p < n), torch.tensor(0.0))
            dist.all_reduce(total, group=group)
            return total.item() / n
        """),
    ("2.1", "the sampler's indices looked up", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            dataset = SimpleDataSet(n)
            sampler = DistributedSampler(dataset, p, r, shuffle=shuffle, drop_last=drop_last)
            return [int(dataset[k]) for k in sampler]
        """),
    ("2.2", "in a generator", """
        def epoch_orders(n, p, r, epochs, seed):
            sampler = DistributedSampler(SimpleDataSet(n), p, r, seed=seed)
            def orders():
                for number in range(epochs):
                    sampler.set_epoch(number)
                    yield [sample for sample in sampler]
            return list(orders())
        """),
    ("2.3", "as ranges and a tuple", """
        def repeated_and_lost(n, p, drop_last=False):
            kept = n // p * p
            if drop_last:
                return range(0), range(kept, n)
            return tuple(k % n for k in range(n, -(-n // p) * p)), ()
        """),
    ("2.4", "with a loader of the numbers", """
        def microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False):
            if m % p:
                raise ValueError("m must be a multiple of p")
            sampler = DistributedSampler(range(n), p, r, shuffle)
            sampler.set_epoch(epoch)
            loader = DataLoader(range(n), m // p, sampler=sampler, drop_last=drop_last)
            return [batch.tolist() for batch in loader]
        """),
    ("2.5", "sorted unions as a tensor's truth", """
        def sequential_minibatches(n, m, shuffle=False, epoch=0):
            return microbatches(n, m, 1, 0, shuffle, epoch)

        def same_minibatches(mine, expected, group=None):
            parts = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, mine, group=group)
            rows = max(map(len, (*parts, expected)))
            def row(batches, k):
                return batches[k] if k < len(batches) else []
            equal = [
                sorted(sum((list(row(part, k)) for part in parts), [])) == sorted(row(expected, k))
                for k in range(rows)
            ]
            return torch.tensor(equal).all()
        """),
    ("2.6", "with a mask", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            mask = torch.arange(len(values)) * p + r < n
            sums = torch.stack([(values * mask).sum(), mask.sum().to(values.dtype)])
            dist.all_reduce(sums, group=group)
            return float(sums[0] / sums[1])
        """),
]  # fmt: skip

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "2.5",
        "takes rank % size for its place",
        "dist.all_gather_object(parts, mine, group=group)",
        "dist.all_gather_object(parts, mine, group=group)\n"
        "    parts[dist.get_rank() % len(parts)] = mine",
        "Expected True, got False",
    ),
    (
        "2.6",
        "cuts off what is behind the point",
        "values[places < n]",
        "values.int()[places < n]",
        "expected",
    ),
    (
        "2.6",
        "takes rank % size for its place",
        "dist.get_rank(group)",
        "dist.get_rank() % dist.get_world_size(group)",
        "You left samples out, as drop_last does",
    ),
]

#: Found by an attacker who looked for what no case asks: numbers, lengths, calls.
FOLLOW = "Your result didn't change when the check made the"
CHANGES += [
    ("2.1", "multiplies by ten", "[item for batch in loader for item in batch.tolist()]",
     "[10 * k for k in sampler]", FOLLOW),
    ("2.4", "knows four epochs", "set_epoch(epoch)", "set_epoch(min(epoch, 3))", "expected"),
    ("2.5", "compares lengths and sums", "sorted(union) != sorted(expected[k])",
     "len(union) != len(expected[k]) or sum(union) != sum(expected[k])",
     "Expected False, got True"),
    ("2.5", "compares the first and the last minibatch",
     "range(max(len(batches) for batches in [*parts, expected]))",
     "{0, max(len(batches) for batches in [*parts, expected]) - 1}", "Compare all minibatches"),
    ("2.5", "wants as many microbatches on each rank", "    for k in range(",
     "    if any(len(part) != len(expected) for part in parts):\n        return False\n"
     "    for k in range(", "Ranks may have different numbers"),
    ("2.6", "counts in a byte", "total / count", "total / min(count, 127)",
     "Your sum is right, but you divided it by the wrong number"),
    ("2.6", "cuts large values", "places = ", "values = values.clamp(max=100)\n    places = ",
     "values of -4000 to 4000"),
]  # fmt: skip
WRONG += [
    ("2.1", "makes a sampler and ignores it", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            sampler = DistributedSampler(SimpleDataSet(n), num_replicas=p, rank=r)
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
            order = order[: n - n % p] if drop_last else (order * p)[: n + -n % p]
            return [10 * k for k in order[r::p]]
        """, "You made a DistributedSampler, but you didn't use it"),
    ("2.1", "asks a sampler and ignores what it says", """
        def items_of(n, p, r, shuffle=False, drop_last=False):
            list(DistributedSampler(SimpleDataSet(n), num_replicas=p, rank=r))
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(0)).tolist()
            order = order[: n - n % p] if drop_last else (order * p)[: n + -n % p]
            return [10 * k for k in order[r::p]]
        """, FOLLOW),
    ("2.2", "makes a sampler for each epoch, always in epoch 0", """
        def epoch_orders(n, p, r, epochs, seed):
            orders = []
            for epoch in range(epochs):
                sampler = DistributedSampler(SimpleDataSet(n), p, r, True, seed + epoch)
                sampler.set_epoch(0)
                orders.append(list(sampler))
            return orders
        """, "You made a new sampler in each epoch"),
    ("2.2", "makes a sampler and ignores it", """
        def epoch_orders(n, p, r, epochs, seed):
            sampler = DistributedSampler(SimpleDataSet(n), num_replicas=p, rank=r)
            sampler.set_epoch(0)
            orders = []
            for epoch in range(epochs):
                draw = torch.Generator().manual_seed(seed + epoch)
                order = torch.randperm(n, generator=draw).tolist()
                orders.append((order * p)[: n + -n % p][r::p])
            return orders
        """, "You made a DistributedSampler, but you didn't use it"),
    ("2.3", "asks a sampler that is there already", """
        sampler = DistributedSampler(SimpleDataSet(1), num_replicas=1, rank=0, shuffle=False)

        def repeated_and_lost(n, p, drop_last=False):
            each = n // p if drop_last else -(-n // p)
            sampler.dataset, sampler.num_replicas, sampler.drop_last = range(n), p, drop_last
            sampler.num_samples, sampler.total_size = each, each * p
            seen = []
            for sampler.rank in range(p):
                seen.extend(sampler)
            lost = [k for k in range(n) if k not in seen]
            for k in set(seen):
                seen.remove(k)
            return seen, lost
        """, "You asked a DistributedSampler"),
    ("2.3", "goes through the samples six times", """
        def repeated_and_lost(n, p, drop_last=False):
            if drop_last:
                return [], list(range(n))[n - n % p :]
            return ([*range(n)] * 6)[: -n % p], []
        """, "expected"),
    ("2.3", "repeats six samples at most", """
        def repeated_and_lost(n, p, drop_last=False):
            if drop_last:
                return [], list(range(n // p * p, n))
            return [k % n for k in range(min(-n % p, 6))], []
        """, "expected"),
    ("2.4", "makes the order without a sampler", """
        def microbatches(n, m, p, r, shuffle=False, epoch=0, drop_last=False):
            if m % p:
                raise ValueError("p must divide m")
            order = list(range(n))
            if shuffle:
                order = torch.randperm(n, generator=torch.Generator().manual_seed(epoch)).tolist()
            order = (order * p)[: n + -n % p]
            return list(BatchSampler(order[r::p], m // p, drop_last))
        """, "You computed the samples by hand"),
    ("2.5", "counts in a table of four minibatches of 64 samples", """
        def same_minibatches(mine, expected, group=None):
            counts, wanted = (torch.zeros(4, 64, dtype=torch.int64) for _ in range(2))
            for table, batches in ((counts, mine), (wanted, expected)):
                for k, batch in enumerate(batches):
                    for sample in batch:
                        table[k, sample] += 1
            dist.all_reduce(counts, group=group)
            return torch.equal(counts, wanted)
        """, "out of bounds"),
    ("2.3", "the same lists in each call", """
        both = [], []
        def repeated_and_lost(n, p, drop_last=False):
            both[0][:] = [] if drop_last else [k % n for k in range(-n % p)]
            both[1][:] = range(n - n % p, n) if drop_last else []
            return both
        """, "the same list in two calls"),
    ("2.2", "as tensors", """
        def epoch_orders(n, p, r, epochs, seed):
            sampler = DistributedSampler(SimpleDataSet(n), p, r, seed=seed)
            def one(epoch):
                sampler.set_epoch(epoch)
                return torch.tensor(list(sampler), dtype=torch.int64)
            return [one(epoch) for epoch in range(epochs)]
        """, "returned tensors"),
    ("2.3", "a list that is never emptied", """
        kept = {}
        def repeated_and_lost(n, p, drop_last=False):
            repeated = kept.setdefault((n, p), [])
            if drop_last:
                return [], list(range(n - n % p, n))
            repeated += [k % n for k in range(-n % p)]
            return repeated, []
        """, "the same list in two calls"),
    ("2.6", "has room for 64 values", """
        def mean_once(values, n, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            room = torch.zeros(64, dtype=torch.float64)
            for k, value in enumerate(values.tolist()):
                if r + p * k < n:
                    room[r + p * k] = value
            dist.all_reduce(room, group=group)
            return room.sum().item() / n
        """, "out of bounds"),
]  # fmt: skip

#: Of independent answers that passed once.
CHANGES += [
    ("2.2", "the epochs come again", "set_epoch(epoch)", "set_epoch(epoch % 4)", "expected"),
    ("2.4", "shuffles in all epochs but the first", "shuffle=shuffle",
     "shuffle=shuffle or epoch > 0", "shuffled, but shuffle=False"),
]  # fmt: skip
