"""Answers to lab 04, wrong ones and right ones, that students really give."""

from __future__ import annotations

from textwrap import indent

from lab_tools import source_of

NOTEBOOK = "04_ddp.ipynb"
CELLS = {
    "4.1": "lab04-step-answer",
    "4.2": "lab04-bucket-answer",
    "4.3": "lab04-share-answer",
    "4.4": "lab04-hook-answer",
    "4.5": "lab04-sync-answer",
    "4.6": "lab04-tokens-answer",
    "4.7": "lab04-norm-answer",
}
# Its check takes a second.
SLOW = {"4.1"}
# A right answer is tried on real steps, which take time on a network.
REAL = {"4.3"}
# What they wait for is over at once, where ranks take turns.
ONLY_ON_RANKS = {
    *("sleeps and copies", "one tensor for all buckets of a length"),
    "asks the future until it is over",
}
ON_RANKS = {
    *("waits inside", "waits for the future", "asks the work until it is over"),
    "synchronizes",
}
BEFORE = source_of(NOTEBOOK, "ranks-join")

# task, what the student did, a part of the solution, what stands in its place, words of the message
_CHANGES = [
    ("4.1", "wraps for the world", "(model, process_group=group)", "(model)",
     "process_group=group"),
    ("4.1", "wraps another model", "DistributedDataParallel(model,",
     "DistributedDataParallel(type(model)(*[nn.Flatten(), nn.Linear(6, 8), nn.Tanh(), "
     "nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]),", "replicate"),
    ("4.1", "does not wrap", "return DistributedDataParallel(model, process_group=group)",
     "return model", "replicate returned Sequential"),
    ("4.1", "returns no model", "return DistributedDataParallel(model, process_group=group)",
     "DistributedDataParallel(model, process_group=group)", "replicate returned NoneType"),
    ("4.1", "bypasses DDP", "model(images[part])", "model.module(images[part])",
     "all the DDP model, not model.module"),
    ("4.1", "averages again", "    optimizer.step()",
     "    for p in model.parameters():\n"
     "        dist.all_reduce(p.grad, group=group)\n"
     "        p.grad /= size\n"
     "    optimizer.step()", "The ranks reduced the gradients 2 times. Leave this to backward()"),
    ("4.1", "divides again", "    optimizer.step()",
     "    for p in model.parameters():\n        p.grad /= size\n    optimizer.step()",
     "You divided the gradients by the number of ranks, but DDP"),
    ("4.1", "keeps old gradients", "    optimizer.zero_grad()\n", "", "optimizer.zero_grad()"),
    ("4.1", "never steps", "    optimizer.step()\n", "", "The replica has not moved"),
    ("4.1", "computes everything everywhere", "images[part]), labels[part]", "images), labels",
     "Every rank computes the whole minibatch"),
    ("4.1", "hard-codes four ranks", "size = dist.get_world_size(group)", "size = 4",
     "all parts must have the same size"),
    ("4.1", "takes the rank of the world", "dist.get_rank(group)", "dist.get_rank()",
     "Compute the part from dist.get_rank(group)"),
    ("4.1", "takes a sum for the loss", "labels[part])", "labels[part], reduction='sum')",
     "Your loss is a sum over the part's samples"),
    ("4.1", "returns its own loss", "return total.item() / size", "return loss.item()",
     "DDP averages gradients, not losses"),
    ("4.1", "returns nothing", "return total.item() / size", "pass",
     "You returned None. Return the mean loss of the minibatch"),
    ("4.1", "sums the loss over the world", "all_reduce(total, group=group)", "all_reduce(total)",
     "all_reduce on the ranks [0, 1, 2, 3]"),
    ("4.2", "never overfills", """
        def assign_buckets(sizes, cap, first_cap):
            buckets = []
            for index, size in enumerate(sizes):
                limit = first_cap if len(buckets) <= 1 else cap
                if not buckets or sum(sizes[k] for k in buckets[-1]) + size > limit:
                    buckets.append([])
                buckets[-1].append(index)
            return buckets
        """, None, "You close a bucket before it becomes too large"),
    ("4.2", "forgets the last bucket", "return [*buckets, bucket] if bucket else buckets",
     "return buckets", "The last bucket is missing"),
    ("4.2", "one cap for all", "(cap if buckets else first_cap)", "cap",
     "You gave the first bucket the cap of the others"),
    ("4.2", "the first cap for all", "(cap if buckets else first_cap)", "first_cap",
     "You used first_cap for all"),
    ("4.2", "full is not full", "full >= ", "full > ", "holds exactly its cap"),
    ("4.2", "an empty bucket at the end", "[*buckets, bucket] if bucket else buckets",
     "[*buckets, bucket]", "You returned an empty bucket"),
    ("4.2", "sizes for indices", "bucket.append(index)", "bucket.append(size)",
     "You returned sizes"),
    ("4.2", "from the end", "enumerate(sizes):", "reversed(list(enumerate(sizes))):",
     "You began at the end, but sizes is in the order in which"),
    ("4.2", "returns nothing", "return [*buckets, bucket]", "[*buckets, bucket]",
     "You returned None. Return a list of lists"),
    ("4.3", "adds up overlapping transfers", """
        def hidden_share(transfers, begin, end):
            total = sum(e - s for s, e in transfers)
            hidden = sum(max(0, min(e, end) - max(s, begin)) for s, e in transfers)
            return hidden / total if total else 0.0
        """, None, "You counted moments with two transfers twice"),
    ("4.3", "does not sort", "in sorted(transfers)", "in transfers",
     "not in the order of their starts"),
    ("4.3", "forgets nested transfers", """
        def hidden_share(transfers, begin, end):
            moving = hidden = 0.0
            until = float("-inf")
            for start, stop in sorted(transfers):
                start = max(start, until)
                moving += stop - start
                hidden += max(0.0, min(stop, end) - max(start, begin))
                until = stop
            return hidden / moving if moving else 0.0
        """, None, "a short transfer inside a long one"),
    ("4.3", "takes transfers whole", "min(stop, end) - max(start, begin)",
     "(stop - start) * (stop <= end)", "A transfer may be partly hidden"),
    ("4.3", "forgets the begin", "max(start, begin)", "start",
     "a transfer that starts before backward"),
    ("4.3", "divides by backward", "hidden / moving if moving else 0.0", "hidden / (end - begin)",
     "You divided by the length of backward"),
    ("4.3", "returns seconds", "hidden / moving if moving else 0.0", "hidden",
     "Divide them by all the time in which data moved"),
    ("4.3", "returns percent", "hidden / moving", "100 * hidden / moving", "You returned percent"),
    ("4.3", "returns the other part", "hidden / moving if", "1 - hidden / moving if",
     "You returned the exposed share"),
    ("4.3", "divides by zero", "hidden / moving if moving else 0.0", "hidden / moving",
     "ZeroDivisionError"),
    ("4.3", "returns nothing", "return hidden", "hidden", "Return a number from 0 to 1"),
    ("4.4", "does not compress", ".to(torch.float16)", "", "- ranks 0–3: in the group of ranks"),
    ("4.4", "takes another format", "torch.float16", "torch.bfloat16", "- ranks 0–3: in the"),
    ("4.4", "does not divide", " / dist.get_world_size(group)", "",
     "The gradients are sums"),
    ("4.4", "hard-codes four ranks", "dist.get_world_size(group)", "4",
     "You divided the sum by 4, the size of the world"),
    ("4.4", "waits inside", "    def decompress", "    work.wait()\n\n    def decompress",
     "The hook waits for its all_reduce"),
    ("4.4", "waits for the future", "return work.get_future().then(decompress)",
     "future = work.get_future().then(decompress)\n    future.wait()\n    return future",
     "The hook waits for its all_reduce"),
    ("4.4", "blocks", """
        def fp16_hook(group, bucket):
            compressed = bucket.buffer().to(torch.float16) / dist.get_world_size(group)
            dist.all_reduce(compressed, group=group)
            future = torch.futures.Future()
            future.set_result(bucket.buffer().copy_(compressed))
            return future
        """, None, "async_op=True"),
    ("4.4", "reduces over the world", "all_reduce(compressed, group=group,",
     "all_reduce(compressed,", "Pass group=group"),
    ("4.4", "returns the work", "return work.get_future().then(decompress)", "return work",
     "Work instead of a future"),
    ("4.4", "returns nothing", "return work.get_future()", "work.get_future()",
     "fp16_hook returned NoneType"),
    ("4.4", "copies before the end", "return bucket.buffer().copy_(future.value()[0])",
     "return bucket.buffer()", "The gradients are this rank's own"),
    ("4.4", "divides after the sum", """
        def fp16_hook(group, bucket):
            half = bucket.buffer().half()
            future = dist.all_reduce(half, group=group, async_op=True).get_future()
            def back(done):
                return bucket.buffer().copy_(done.wait()[0]).div_(dist.get_world_size(group))
            return future.then(back)
        """, None, "Divide before the sum"),
    ("4.4", "leaves float16 in the future", "return bucket.buffer().copy_(future.value()[0])",
     "return future.value()[0]", "The value of the future is float16"),
    ("4.1", "returns the sum of the losses", "return total.item() / size", "return total.item()",
     "You returned the sum of the ranks' means"),
    ("4.1", "computes the loss again", "return total.item() / size",
     "return cross_entropy(model(images), labels).item()", "You call the model 2 times"),
    ("4.1", "takes the loss after the step", "    optimizer.zero_grad()\n    loss = cross_entropy("
     "model(images[part]), labels[part])\n    loss.backward()",
     "    optimizer.zero_grad()\n    cross_entropy(model(images[part]), labels[part]).backward()\n"
     "    seen = model.module[1].weight\n    loss = seen.sum()", "the loss: expected"),
    ("4.2", "a bucket for each", "if full >= (cap if buckets else first_cap)", "if True",
     "You made a bucket for every gradient"),
    ("4.2", "one bucket", "if full >= (cap if buckets else first_cap)", "if False",
     "You put all gradients into one bucket"),
    ("4.2", "a flat list", "return [*buckets, bucket] if bucket else buckets",
     "return sum([*buckets, bucket], [])", "Return a list of lists of indices"),
    ("4.2", "counts from one", "enumerate(sizes)", "enumerate(sizes, 1)", "You counted the"),
    ("4.2", "keeps the buckets of the last call", "buckets, bucket, full = [], [], 0",
     "bucket, full = [], 0\n    buckets = globals().setdefault('kept', [])",
     "the same list in two calls"),
    ("4.3", "divides by the span", "hidden / moving if moving else 0.0",
     "hidden / (max(e for _, e in transfers) - min(s for s, _ in transfers)) if moving else 0.0",
     "You divided by the span from the first transfer to the last"),
    ("4.3", "a coarse grid", """
        def hidden_share(transfers, begin, end):
            grid = [80 + 2 * k for k in range(40)]
            moving = [t for t in grid if any(s <= t < e for s, e in transfers)]
            return sum(begin <= t < end for t in moving) / len(moving) if moving else 0.0
        """, None, "Expected 0."),
    ("4.3", "rounds", "return hidden / moving if moving else 0.0",
     "return round(hidden / moving) if moving else 0.0", "Expected 0.5" ),
    ("4.4", "forgets then", "return work.get_future().then(decompress)",
     "return work.get_future()", "The value of the future is a list, as all_reduce leaves it"),
    ("4.4", "forgets return in decompress", "return bucket.buffer().copy_(future.value()[0])",
     "bucket.buffer().copy_(future.value()[0])", "The function that you pass to then() returns"),
    ("4.4", "returns the tensor", "return work.get_future().then(decompress)",
     "return compressed", "The sum hasn't arrived yet, so return"),
    ("4.5", "leaves out the last", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for j, (images, labels) in enumerate(microbatches):
                if j < k - 2:
                    with model.no_sync():
                        (cross_entropy(model(images), labels) / k).backward()
                elif j == k - 2:
                    (cross_entropy(model(images), labels) / k).backward()
        """, None, "The last microbatch is missing"),
    ("4.5", "never switches on again", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for j, (images, labels) in enumerate(microbatches):
                model.require_backward_grad_sync = not hasattr(model, "seen") and j == k - 1
                (cross_entropy(model(images), labels) / k).backward()
            model.seen = True
        """, None, "The gradients are this rank's own mean"),
    ("4.5", "makes one large batch", """
        def accumulate(model, microbatches):
            images = torch.cat([images for images, _ in microbatches])
            labels = torch.cat([labels for _, labels in microbatches])
            cross_entropy(model(images), labels).backward()
        """, None, "as one large batch"),
    ("4.5", "goes back once", """
        def accumulate(model, microbatches):
            losses = [cross_entropy(model(x), y) for x, y in microbatches]
            (sum(losses) / len(losses)).backward()
        """, None, "forwards, so the forwards keep memory that you want to save"),
    ("4.5", "reduces by hand", """
        def accumulate(model, microbatches):
            with model.no_sync():
                for x, y in microbatches:
                    (cross_entropy(model(x), y) / len(microbatches)).backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=model.process_group)
                parameter.grad /= dist.get_world_size(model.process_group)
        """, None, "Leave communication to DDP"),
    ("4.5", "communicates every time", "with model.no_sync():", "if True:",
     "The ranks communicated the gradients' bytes 3 times"),
    ("4.5", "forward outside of no_sync", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for j, (images, labels) in enumerate(microbatches):
                loss = cross_entropy(model(images), labels) / k
                if j < k - 1:
                    with model.no_sync():
                        loss.backward()
                else:
                    loss.backward()
        """, None, "The ranks communicated the gradients' bytes 3 times"),
    ("4.5", "does not divide", ") / k).backward", ")).backward", "3 times too large"),
    ("4.5", "divides by the ranks, too", ") / k).backward",
     ") / k / dist.get_world_size(model.process_group)).backward", "You divided by the 4 ranks"),
    ("4.5", "never communicates", """
        def accumulate(model, microbatches):
            with model.no_sync():
                for images, labels in microbatches:
                    (cross_entropy(model(images), labels) / len(microbatches)).backward()
        """, None, "The gradients are this rank's own mean"),
    ("4.5", "communicates first", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            first, *quiet = microbatches
            (cross_entropy(model(first[0]), first[1]) / k).backward()
            with model.no_sync():
                for images, labels in quiet:
                    (cross_entropy(model(images), labels) / k).backward()
        """, None, "You communicated the first microbatch"),
    ("4.5", "clears in between", "            (cross",
     "            model.zero_grad()\n            (cross",
     "Call zero_grad() before the first one only"),
    ("4.5", "hard-codes four microbatches", "k = len(microbatches)", "k = 4",
     "Every gradient is 0.75 times what it should be"),
    ("4.5", "takes a step", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            *quiet, (images, labels) = microbatches
            with model.no_sync():
                for x, y in quiet:
                    (cross_entropy(model(x), y) / k).backward()
            (cross_entropy(model(images), labels) / k).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        """, None, "You changed the weights"),
]  # fmt: skip

# Right answers that look different.
RIGHT = [
    ("4.1", "chunks and a reduced mean", """
        def replicate(model, group=None):
            ddp = nn.parallel.DistributedDataParallel(module=model, process_group=group)
            return ddp

        def ddp_step(model, optimizer, images, labels, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            n = len(labels) // p
            mine = slice(r * n, (r + 1) * n)
            model.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine])
            loss.backward()
            optimizer.step()
            sums = torch.tensor([loss.item() * n, n], dtype=torch.float64)
            dist.all_reduce(sums, group=group)
            return float(sums[0] / sums[1])
        """),
    ("4.1", "a frozen wrapper and a weighted mean", """
        def replicate(model, group=None):
            return DistributedDataParallel(
                model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=1
            )

        def ddp_step(model, optimizer, images, labels, group=None):
            p = dist.get_world_size(group=group)
            mine = torch.arange(dist.get_rank(group=group), len(labels), p)
            optimizer.zero_grad()
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(mine)
            loss.backward()
            optimizer.step()
            loss = loss.detach()
            dist.all_reduce(loss, group=group)
            return loss / p
        """),
    ("4.1", "an object gathered", """
        def replicate(model, group=None):
            return nn.parallel.DistributedDataParallel(model, None, process_group=group)

        def ddp_step(model, optimizer, images, labels, group=None):
            p, r = dist.get_world_size(group), dist.get_rank(group)
            optimizer.zero_grad(set_to_none=False)
            loss = cross_entropy(model(images.chunk(p)[r]), labels.chunk(p)[r])
            loss.backward()
            optimizer.step()
            losses = [torch.empty(()).to(loss.dtype) for _ in range(p)]
            dist.all_gather(losses, loss.detach(), group=group)
            return sum(losses).item() / p
        """),
    ("4.2", "PyTorch's own", """
        def assign_buckets(sizes, cap, first_cap):
            if not sizes:
                return []
            tensors = [torch.empty(size, dtype=torch.uint8) for size in sizes]
            found, _ = dist._compute_bucket_assignment_by_size(tensors, [first_cap, cap])
            return found
        """),
    ("4.2", "arrays of numbers", """
        def assign_buckets(sizes, cap, first_cap):
            import numpy as np
            left, buckets, limit = list(range(len(sizes))), [], first_cap
            while left:
                bucket = []
                while left and sum(sizes[k] for k in bucket) < limit:
                    bucket.append(left.pop(0))
                buckets.append(np.array(bucket))
                limit = cap
            return buckets
        """),
    ("4.3", "a fine grid", """
        def hidden_share(transfers, begin, end):
            if not transfers:
                return 0.0
            first, last = min(s for s, _ in transfers), max(e for _, e in transfers)
            t = torch.linspace(first, last, 40_001, dtype=torch.float64)
            moves = torch.zeros_like(t, dtype=torch.bool)
            for s, e in transfers:
                moves |= (s <= t) & (t < e)
            if not moves.any():
                return 0.0
            return (moves & (begin <= t) & (t <= end)).sum().item() / moves.sum().item()
        """),
    ("4.3", "events", """
        def hidden_share(transfers, begin, end):
            marks = sorted({begin, end, *(t for pair in transfers for t in pair)})
            moving = hidden = 0
            for a, b in zip(marks, marks[1:]):
                if any(s <= a and b <= e for s, e in transfers):
                    moving += b - a
                    if begin <= a and b <= end:
                        hidden += b - a
            return hidden / moving if moving else 0
        """),
    ("4.2", "tuples", """
        def assign_buckets(sizes, cap, first_cap):
            buckets, start = [], 0
            for end in range(1, len(sizes) + 1):
                full = sum(sizes[start:end]) >= (first_cap if start == 0 else cap)
                if full or end == len(sizes):
                    buckets.append(tuple(range(start, end)))
                    start = end
            return tuple(buckets)
        """),
    ("4.3", "merged intervals", """
        def hidden_share(transfers, begin, end):
            def union(intervals):
                merged = []
                for s, e in sorted(intervals):
                    if merged and s <= merged[-1][1]:
                        merged[-1][1] = max(merged[-1][1], e)
                    else:
                        merged.append([s, e])
                return sum(e - s for s, e in merged)
            inside = [(max(s, begin), min(e, end)) for s, e in transfers]
            total = union(transfers)
            return torch.tensor(union([i for i in inside if i[1] > i[0]]) / total if total else 0)
        """),
    ("4.4", "annotated, divides in float32", """
        def fp16_hook(group, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            half = (bucket.buffer() / dist.get_world_size(group)).half()
            future = dist.all_reduce(half, group=group, async_op=True).get_future()
            return future.then(lambda done: done.value()[0].float())
        """),
    ("4.4", "PyTorch's own", """
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
            fp16_compress_hook as fp16_hook,
        )
        """),
    ("4.4", "scales in place, chained", """
        def fp16_hook(group, bucket):
            half = bucket.buffer().div_(group.size()).half()
            work = dist.all_reduce(half, group=group, async_op=True)
            return work.get_future().then(
                lambda f: f.value()[0]).then(lambda f: bucket.buffer().copy_(f.value()))
        """),
    ("4.5", "the switch itself", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for j, (images, labels) in enumerate(microbatches):
                model.require_backward_grad_sync = j == k - 1
                loss = cross_entropy(model(images), labels)
                loss.div(k).backward()
            model.require_backward_grad_sync = True
        """),
    ("4.5", "a gradient at the end of backward", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            def loss_of(images, labels):
                return cross_entropy(model(images), labels, reduction="sum") / len(labels) / k
            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    loss_of(*microbatch).backward()
            loss_of(*microbatches[-1]).backward(torch.ones(()))
        """),
    ("4.5", "a context by case", """
        import contextlib
        def accumulate(model, microbatches):
            for left, (images, labels) in zip(reversed(range(len(microbatches))), microbatches):
                with model.no_sync() if left else contextlib.nullcontext():
                    loss = cross_entropy(model(images), labels) / len(microbatches)
                    loss.backward()
        """),
]  # fmt: skip

WRONG = [(task, what, code, words) for task, what, code, new, words in _CHANGES if new is None]
WRONG += [
    (
        "4.5",
        "is missing on one rank",
        source_of(NOTEBOOK, "sync-answer") + "\nif rank == 2:\n    del accumulate\n",
        "rank 2: NameError: accumulate is not defined on this rank",
    )
]
CHANGES = [change for change in _CHANGES if change[3] is not None]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "4.1",
        "takes rank % size for its place",
        "dist.get_rank(group)",
        "dist.get_rank() % size",
        "Each sample must be on one rank, once",
    ),
]

#: What won the points without what the task is about.
_CHANGES = [
    ("4.1", "moves the weights by hand", "    optimizer.step()\n", """\
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= optimizer.param_groups[0]["lr"] * parameter.grad
""", "You called optimizer.step() 0 times"),
    ("4.1", "moves the weights at a rate of its own", "    optimizer.step()\n", """\
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.5 * parameter.grad
""", "not the sequential step"),
    ("4.1", "takes the step of lab 03", """model(images[part]), labels[part])
    loss.backward()""", """model.module(images[part]), labels[part])
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= size""", "DDP did not average the gradients"),
    ("4.1", "reduces by hand in no_sync", """\
    loss = cross_entropy(model(images[part]), labels[part])
    loss.backward()""", """\
    with model.no_sync():
        loss = cross_entropy(model(images[part]), labels[part])
        loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group, async_op=True).wait()
            parameter.grad /= size""", "DDP did not average the gradients"),
    ("4.2", "knows small caps only", "full >= (cap if buckets else first_cap)",
     "full >= min(cap if buckets else first_cap, 10_000)", "before it had the"),
    ("4.2", "puts a hundred into a bucket", "full >= (cap if buckets else first_cap)",
     "full >= (cap if buckets else first_cap) or len(bucket) > 99", "before it had the"),
    ("4.2", "counts in fours", "full += size", "full += size // 4 * 4", "assign_buckets("),
    ("4.3", "begins at time 0", 'until = float("-inf")', "until = 0.0", "backward from -1e-06"),
    ("4.3", "knows sixteen transfers", "sorted(transfers)", "sorted(transfers)[:16]",
     "40 short transfers"),
    ("4.3", "takes short times for none", "if moving else", "if moving > 1e-4 else",
     "backward from -1e-06"),
    ("4.4", "asks the work until it is over", "    def decompress",
     "    while not work.is_completed():\n        pass\n\n    def decompress",
     "The hook waits for its all_reduce"),
    ("4.4", "synchronizes", "    def decompress", "    work.synchronize()\n\n    def decompress",
     "The hook waits for its all_reduce"),
    ("4.4", "asks the future until it is over", """
        def fp16_hook(group, bucket):
            compressed = bucket.buffer().to(torch.float16) / dist.get_world_size(group)
            future = dist.all_reduce(compressed, group=group, async_op=True).get_future()
            while not future.done():
                pass
            bucket.buffer().copy_(compressed)
            return future.then(lambda _: bucket.buffer())
        """, None, "The hook waits for its all_reduce"),
    ("4.4", "sleeps and copies", """
        import time
        def fp16_hook(group, bucket):
            compressed = bucket.buffer().to(torch.float16) / dist.get_world_size(group)
            future = dist.all_reduce(compressed, group=group, async_op=True).get_future()
            time.sleep(0.1)
            bucket.buffer().copy_(compressed)
            return future.then(lambda _: bucket.buffer())
        """, None, ". Don't use the sum before its future is complete"),
    ("4.5", "keeps all graphs", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            *quiet, (images, labels) = microbatches
            with model.no_sync():
                losses = [cross_entropy(model(x), y) / k for x, y in quiet]
                for loss in losses:
                    loss.backward()
            (cross_entropy(model(images), labels) / k).backward()
        """, None, "You called forward before the backward of the previous"),
    ("4.5", "communicates nothing at the end", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            with model.no_sync():
                for images, labels in microbatches:
                    (cross_entropy(model(images), labels) / k).backward()
            (0 * cross_entropy(model(images), labels)).backward()
        """, None, "You called forward 4 times and backward 4 times for 3 microbatches"),
    ("4.5", "leaves the model quiet", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for j, (images, labels) in enumerate(microbatches):
                model.require_backward_grad_sync = j == k - 1
                (cross_entropy(model(images), labels) / k).backward()
            model.require_backward_grad_sync = False
        """, None, "After the call, the model still doesn't communicate"),
    ("4.5", "knows the last one by identity", """
        def accumulate(model, microbatches):
            import contextlib

            for batch in microbatches:
                images, labels = batch
                loud = batch is microbatches[-1]
                with contextlib.nullcontext() if loud else model.no_sync():
                    (cross_entropy(model(images), labels) / len(microbatches)).backward()
        """, None, "The ranks communicated the gradients' bytes 2 times"),
    ("4.1", "wraps a copy", "DistributedDataParallel(model,",
     "DistributedDataParallel(__import__('copy').deepcopy(model),",
     "replicate"),
    ("4.4", "one tensor for all buckets of a length",
     "compressed = bucket.buffer().to(torch.float16) / dist.get_world_size(group)",
     "kept = globals().setdefault('kept', {})\n    local = bucket.buffer()\n"
     "    compressed = kept.setdefault(len(local), torch.empty(len(local), dtype=torch.float16))\n"
     "    compressed.copy_(local).div_(dist.get_world_size(group))", "4.4"),
    ("4.2", "remembers by number and caps", "buckets, bucket, full = [], [], 0",
     "known = globals().setdefault('known', {})\n"
     "    sizes = known.setdefault((len(sizes), cap, first_cap), sizes)\n"
     "    buckets, bucket, full = [], [], 0", "expected"),
    ("4.3", "one transfer for each beginning", "sorted(transfers)",
     "sorted(dict(transfers).items())",
     "two transfers that begin together"),
    ("4.3", "computes in float32", "sorted(transfers)",
     "sorted(torch.tensor(transfers, dtype=torch.float32).reshape(-1, 2).tolist())", "expected"),
    ("4.5", "goes without DDP", """
        def accumulate(model, microbatches):
            k = len(microbatches)
            for images, labels in microbatches:
                (cross_entropy(model.module(images), labels) / k).backward()
            group = model.process_group
            for parameter in model.parameters():
                parameter.grad /= dist.get_world_size(group)
                dist.all_reduce(parameter.grad, group=group, async_op=True).wait()
        """, None, "all the DDP model, not model.module"),
]  # fmt: skip
WRONG += [(task, what, code, words) for task, what, code, new, words in _CHANGES if new is None]
CHANGES += [change for change in _CHANGES if change[3] is not None]

#: A mean over tokens.
_SUM = 'cross_entropy(scores, targets.flatten(), reduction="sum")'
_MEANS = """
        def accumulate_tokens(model, microbatches, group=None):
            def loss(inputs, targets):
                return cross_entropy(model(inputs).flatten(0, 1), targets.flatten()) / k

            k = len(microbatches)
            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    loss(*microbatch).backward()
            loss(*microbatches[-1]).backward()
        """
_CHANGES = [
    ("4.6", "means of microbatches", _MEANS, None,
     "mean of the microbatches' means"),
    ("4.6", "means of microbatches that aren't empty", _MEANS.replace(
        "targets.flatten()) / k", "targets.flatten(), reduction='sum') / k\\\n"
        "                    / max(1, (targets >= 0).sum().item())"), None,
     "mean of the microbatches' means"),
    ("4.6", "counts on its own rank", "    dist.all_reduce(count, group=group)\n", "",
     "Sum the number of tokens over the group"),
    ("4.6", "forgets that DDP divides", "dist.get_world_size(group) / max", "1 / max",
     "DDP divides by the 4 ranks, so multiply each loss by 4"),
    ("4.6", "counts padding, too", "(targets != -100).sum().item()", "targets.numel()",
     "You counted padded positions, too"),
    ("4.6", "does not divide", "max(1, count.item())", "1", "This is the sum over the tokens"),
    ("4.6", "divides by the ranks only", "(weight * loss)", "loss",
     "You divided by the number of ranks only"),
    ("4.6", "masks by hand", """
        def accumulate_tokens(model, microbatches, group=None):
            def backward(inputs, targets):
                losses = cross_entropy(
                    model(inputs).transpose(1, 2), targets.clamp(min=0), reduction="none")
                counts = (targets >= 0).float()
                ((losses * counts).sum() / counts.sum() / len(microbatches)).backward()
            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    backward(*microbatch)
            backward(*microbatches[-1])
        """, None, "A microbatch without tokens has the mean 0 / 0"),
    ("4.6", "masks by hand and divides 0 by 0", """
        def accumulate_tokens(model, microbatches, group=None):
            count = sum((targets >= 0).sum() for _, targets in microbatches)
            dist.all_reduce(count, group=group)
            def backward(inputs, targets):
                losses = cross_entropy(
                    model(inputs).transpose(1, 2), targets.clamp(min=0), reduction="none")
                kept = losses * (targets >= 0)
                (kept.sum() / count * dist.get_world_size(group)).backward()
            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    backward(*microbatch)
            backward(*microbatches[-1])
        """, None, "Divide by at least 1"),
    ("4.6", "fails without tokens", "max(1, count.item())", "count.item()",
     "It still needs a forward and a backward"),
    ("4.6", "returns early without tokens", "    *quiet, last = microbatches\n",
     "    if own == 0:\n        return\n    *quiet, last = microbatches\n",
     "It still needs a forward and a backward"),
    ("4.6", "counts in the world", "all_reduce(count, group=group)", "all_reduce(count)",
     "Pass group=group"),
    ("4.6", "takes the size of the world", "get_world_size(group)", "get_world_size()",
     "Every gradient is"),
    ("4.6", "one all_reduce for each microbatch", """\
    count = torch.tensor(own)
    dist.all_reduce(count, group=group)
""", """\
    count = torch.tensor(0)
    for _, targets in microbatches:
        part = (targets >= 0).sum()
        dist.all_reduce(part, group=group)
        count += part
""", "You call all_reduce 3 times before the first backward"),
    ("4.6", "reduces the numbers of all microbatches", """\
    count = torch.tensor(own)
    dist.all_reduce(count, group=group)
""", """\
    count = torch.tensor([(targets >= 0).sum() for _, targets in microbatches])
    dist.all_reduce(count, group=group)
    count = count.sum()
""", "You reduce 24 bytes before the first backward"),
    ("4.6", "gathers the numbers", "    dist.all_reduce(count, group=group)\n", """\
    every = [count.clone() for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, count, group=group)
    count = sum(every)
""", "You call all_gather. Use only all_reduce here"),
    ("4.6", "scales at the end", """
        def accumulate_tokens(model, microbatches, group=None):
            def backward(inputs, targets):
                scores = model(inputs).flatten(0, 1)
                cross_entropy(scores, targets.flatten(), reduction="sum").backward()

            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    backward(*microbatch)
            backward(*microbatches[-1])
            count = sum((targets >= 0).sum() for _, targets in microbatches)
            dist.all_reduce(count, group=group)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad *= dist.get_world_size(group) / max(1, count.item())
        """, None, "You sum the number of tokens after the first backward"),
    ("4.6", "communicates every time", "with model.no_sync():", "if True:",
     "The ranks communicated the gradients' bytes 3 times"),
    ("4.6", "never communicates", "    backward(*last)",
     "    with model.no_sync():\n        backward(*last)",
     "The gradients are this rank's own"),
    ("4.6", "leaves out the last one", "    backward(*last)", "    last",
     "The last microbatch is missing"),
    ("4.6", "goes backward once", """
        def accumulate_tokens(model, microbatches, group=None):
            count = sum((targets >= 0).sum() for _, targets in microbatches)
            dist.all_reduce(count, group=group)
            weight = dist.get_world_size(group) / max(1, count.item())
            def loss(inputs, targets):
                scores = model(inputs).flatten(0, 1)
                return weight * cross_entropy(scores, targets.flatten(), reduction="sum")
            with model.no_sync():
                quiet = sum(loss(*microbatch) for microbatch in microbatches[:-1])
            (quiet + loss(*microbatches[-1])).backward()
        """, None, "so the forwards keep memory that you want to save"),
    ("4.6", "goes without DDP", "model(inputs)", "model.module(inputs)",
     "The gradients are this rank's own"),
    ("4.6", "sums the number twice", "    backward(*last)",
     "    backward(*last)\n    dist.all_reduce(count, group=group)",
     "You call all_reduce again after the first backward"),
    ("4.6", "takes a step", "    backward(*last)",
     "    backward(*last)\n    torch.optim.SGD(model.parameters(), lr=0.1).step()",
     "You changed the weights"),
    ("4.6", "switches to eval", "    *quiet, last", "    model.eval()\n    *quiet, last",
     "You switched the model to another mode"),
    ("4.6", "leaves the model quiet", "    backward(*last)",
     "    backward(*last)\n    model.require_backward_grad_sync = False",
     "After the call, the model still doesn't communicate"),
    ("4.6", "knows the last one by identity", """\
    *quiet, last = microbatches
    with model.no_sync():
        for microbatch in quiet:
            backward(*microbatch)
    backward(*last)
""", """\
    for microbatch in microbatches:
        model.require_backward_grad_sync = microbatch is microbatches[-1]
        backward(*microbatch)
""", "The ranks communicated the gradients' bytes 2 times"),
    ("4.6", "keeps the count of the first call",
     "sum((targets != -100).sum().item() for _, targets in microbatches)",
     "sum((targets != -100).sum().item() for _, targets in microbatches)\n"
     "    own = accumulate_tokens.__dict__.setdefault('own', own)", "Every gradient is"),
    ("4.6", "changes the targets", "    backward(*last)",
     "    backward(*last)\n    last[1].fill_(0)",
     "accumulate_tokens changed its argument microbatches"),
]  # fmt: skip
WRONG += [(task, what, code, words) for task, what, code, new, words in _CHANGES if new is None]
CHANGES += [change for change in _CHANGES if change[3] is not None]
RIGHT += [
    (
        "4.6",
        "asynchronous, and transposed scores",
        """
        def accumulate_tokens(model, microbatches, group=None):
            count = torch.zeros((), dtype=torch.int64)
            for _, targets in microbatches:
                count += targets.ge(0).sum()
            work = dist.all_reduce(count, group=group, async_op=True)
            weight = None
            for left, (inputs, targets) in zip(reversed(range(len(microbatches))), microbatches):
                model.require_backward_grad_sync = not left
                scores = model(inputs).transpose(1, 2)
                if weight is None:
                    work.wait()
                    weight = dist.get_world_size(group) / count.clamp(min=1)
                loss = cross_entropy(scores, targets, reduction="none").sum()
                (loss * weight).backward()
        """,
    ),
    (
        "4.6",
        "weighted means",
        """
        import contextlib
        def accumulate_tokens(model, microbatches, group=None):
            counts = [int((targets != -100).sum()) for _, targets in microbatches]
            count = torch.tensor([float(sum(counts))])
            dist.all_reduce(count, group=group)
            p = group.size() if group else dist.get_world_size()
            for j, (inputs, targets) in enumerate(microbatches):
                with contextlib.nullcontext() if j == len(counts) - 1 else model.no_sync():
                    scores = model(inputs)
                    loss = cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="sum")
                    mean = loss / max(1, counts[j])
                    mean.backward(mean.new_tensor(p * counts[j] / max(1.0, count.item())))
        """,
    ),
    (
        "4.6",
        "masked by hand",
        """
        def accumulate_tokens(model, microbatches, group=None):
            count = sum((targets >= 0).sum() for _, targets in microbatches)
            dist.all_reduce(count, group=model.process_group)
            weight = dist.get_world_size(model.process_group) / max(1, int(count))
            def backward(inputs, targets):
                logs = model(inputs).log_softmax(-1)
                chosen = logs.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
                (-weight * chosen.where(targets >= 0, 0.0).sum()).backward()
            with model.no_sync():
                for microbatch in microbatches[:-1]:
                    backward(*microbatch)
            backward(*microbatches[-1])
        """,
    ),
]
CHANGES_THAT_ARE_RIGHT = [
    ("4.6", "leaves out microbatches without tokens", "    *quiet, last = microbatches\n",
     "    *quiet, last = [m for m in microbatches if (m[1] >= 0).any()] or microbatches[:1]\n"),
]  # fmt: skip

#: A synchronized batch norm.
_CHANGES = [
    ("4.7", "normalizes alone", "        dist.all_reduce(sums, group=group)\n", "",
     "You normalized with this rank's own mean and variance"),
    ("4.7", "means of means", """\
        rows = wide.new_tensor([len(x)])
        sums = torch.cat([wide.sum(0), wide.square().sum(0), rows])
        dist.all_reduce(sums, group=group)
        count = sums[-1]
        mean, squares = (sums[:-1] / count).chunk(2)
        variance = squares - mean.square()
""", """\
        sums = torch.stack([wide.mean(0), wide.var(0, unbiased=False)])
        dist.all_reduce(sums, group=group)
        mean, variance = sums / dist.get_world_size(group)
        count = wide.new_tensor(float(len(x)))
""", "You took the mean of the ranks' means and of their variances"),
    ("4.7", "divides by n minus 1", "variance = squares - mean.square()",
     "variance = (squares - mean.square()) * count / (count - 1)",
     "You divided the squared deviations by the number of rows minus 1"),
    ("4.7", "keeps the mean of the squares", "squares - mean.square()", "squares + 0",
     "Subtract the square of the mean"),
    ("4.7", "forgets eps", "(variance + eps).rsqrt()", "variance.rsqrt()", "You left out eps"),
    ("4.7", "adds eps to the deviation", "(variance + eps).rsqrt()", "1 / (variance.sqrt() + eps)",
     "You added eps to the deviation"),
    ("4.7", "forgets the root", "(variance + eps).rsqrt()", "1 / (variance + eps)",
     "You divided by the variance. Divide by its root"),
    ("4.7", "forgets weight and bias", "return weight * normal + bias", "return normal.clone()",
     "You left out weight and bias"),
    ("4.7", "does not subtract the mean", "(scale * (wide - mean))", "(scale * wide)",
     "You didn't subtract the mean"),
    ("4.7", "sums in float32", "wide = x.double()", "wide = x",
     "a sum of squares around the mean 1000 has too few digits"),
    ("4.7", "returns float64", "(scale * (wide - mean)).to(x.dtype)", "scale * (wide - mean)",
     "y must have the shape and the dtype of x"),
    ("4.7", "computes in float32", "wide = x.double()", "wide = x.float().double()",
     "Right to six digits only"),
    ("4.7", "three collectives", "        dist.all_reduce(sums, group=group)\n        count", """\
        for part in sums.split([x.shape[1], x.shape[1], 1]):
            dist.all_reduce(part, group=group)
        count""", "forward called 3 collectives. Put all numbers into one tensor"),
    ("4.7", "two collectives in backward", "        dist.all_reduce(sums, group=ctx.group)\n", """\
        dist.all_reduce(sums[0], group=ctx.group)
        dist.all_reduce(sums[1], group=ctx.group)
""", "backward called 2 collectives"),
    ("4.7", "reduces in the world", "all_reduce(sums, group=group)", "all_reduce(sums)",
     "Pass group=group"),
    ("4.7", "reduces in the world in backward", "all_reduce(sums, group=ctx.group)",
     "all_reduce(sums)", "Pass group=group"),
    ("4.7", "does not wait", "dist.all_reduce(sums, group=ctx.group)",
     "dist.all_reduce(sums, group=ctx.group, async_op=True)", "You never call wait()"),
    ("4.7", "sends everything", "        dist.all_reduce(sums, group=group)\n        count",
     "        dist.broadcast(sums, group_src=0, group=group)\n        count", "You call broadcast"),
    ("4.7", "goes backward alone", "        dist.all_reduce(sums, group=ctx.group)\n", "",
     "the gradient of x"),
    ("4.7", "takes own means in backward", "mean, product = sums / count",
     "mean, product = own / max(1, len(grad))", "You took the means over this rank's rows"),
    ("4.7", "takes the statistics for constants", "(grad - mean - normal * product)", "grad",
     "The mean and the variance depend on x, too"),
    ("4.7", "takes the variance for a constant", "(grad - mean - normal * product)",
     "(grad - mean)", "The last term of the formula is missing"),
    ("4.7", "takes the mean for a constant", "(grad - mean - normal * product)",
     "(grad - normal * product)", "The mean of grad is missing"),
    ("4.7", "forgets the weight in backward", "of_x = weight * scale", "of_x = scale",
     "You left out the weight"),
    ("4.7", "forgets the scale in backward", "of_x = weight * scale", "of_x = weight",
     "You left out the factor 1 / √(variance + eps)"),
    ("4.7", "subtracts sums", "mean, product = sums / count", "mean, product = sums",
     "You subtracted sums"),
    ("4.7", "divides by its own rows", "mean, product = sums / count",
     "mean, product = sums / max(1, len(grad))", "by this rank's number of rows"),
    ("4.7", "sums the weights' gradients", "return of_x, own[1], own[0]",
     "return of_x, sums[1], sums[0]", "You returned the sum over all ranks' rows"),
    ("4.7", "averages the weights' gradients", "return of_x, own[1], own[0]",
     "return of_x, *(own / dist.get_world_size(ctx.group)).flip(0)",
     "You divided by the number of ranks"),
    ("4.7", "swaps weight and bias", "return of_x, own[1], own[0]", "return of_x, own[0], own[1]",
     "in this place"),
    ("4.7", "returns too few gradients", "own[0], None, None", "own[0]",
     "returned an incorrect number of gradients"),
    ("4.7", "changes its argument", "        wide = x.double()",
     "        x -= 1\n        wide = x.double() + 1", "You changed x"),
    ("4.7", "leaves out a batch without rows",
     "        dist.all_reduce(sums, group=group)\n        count",
     "        if len(x):\n            dist.all_reduce(sums, group=group)\n        count",
     "In this trial rank"),
    ("4.7", "leaves out backward without rows", "        dist.all_reduce(sums, group=ctx.group)\n",
     "        if len(grad):\n            dist.all_reduce(sums, group=ctx.group)\n",
     "In this trial rank"),
    ("4.7", "works in place on grad", "        own = torch.stack",
     "        grad = grad.mul_(2) / 2\n        own = torch.stack", "You changed grad"),
    ("4.7", "subtracts its own mean first", "wide = x.double()",
     "wide = x.double() - x.mean(0)", "y: "),
    ("4.7", "communicates after eval()", "        if not self.training:\n", """\
        if not self.training:
            dist.all_reduce(self.running_mean.clone(), group=self.group)
""", "evaluates SyncedBatchNorm, after eval()"),
    ("4.7", "normalizes the batch after eval()", "if not self.training:", "if False:",
     "evaluates SyncedBatchNorm, after eval()"),
    ("4.7", "keeps a biased variance", "variance * count / (count - 1)", "variance",
     "the running variance"),
]  # fmt: skip
CHANGES += _CHANGES
_NORM = source_of(NOTEBOOK, "lab04-norm-answer")
_KEPT = "normal, weight, scale, count = "
WRONG += [
    (
        "4.7",
        "keeps the batch in the class",
        _NORM.replace("ctx.save_for_backward(", "SyncedNorm.kept = (").replace(
            f"{_KEPT}ctx.saved_tensors", f"{_KEPT}SyncedNorm.kept"
        ),
        "The size of tensor a",
    ),
    (
        "4.7",
        "variances within the ranks",
        _NORM.replace("wide.square()", "(wide - wide.sum(0) / max(1, len(x))).square()").replace(
            " - mean.square()", ""
        ),
        "Your variance is the mean of the ranks' variances, weighted by their rows",
    ),
]
_MODULE = _NORM[_NORM.index("class SyncedBatchNorm") :]
RIGHT += [
    ("4.7", "merges means and squared deviations", """
        class SyncedNorm(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, weight, bias, eps, group):
                c, n = x.shape[1], len(x)
                own = x.new_zeros(2 * c + 1)
                if n:
                    own[:c] = x.mean(0)
                    own[c : 2 * c] = (x - own[:c]).square().sum(0)
                own[-1] = n
                every = own.new_empty(dist.get_world_size(group), len(own))
                dist.all_gather_into_tensor(every, own, group=group)
                means, squares, counts = every.split([c, c, 1], dim=1)
                count = counts.sum()
                mean = (means * counts).sum(0) / count
                spread = (counts * (means - mean).square()).sum(0)
                variance = (squares.sum(0) + spread) / count
                ctx.save_for_backward(x, weight, mean, variance, count)
                ctx.eps, ctx.group = eps, group
                y = weight * (x - mean) / (variance + eps).sqrt() + bias
                ctx.mark_non_differentiable(mean, variance, count)
                return y, mean, variance, count

            @staticmethod
            def backward(ctx, grad, *_):
                x, weight, mean, variance, count = ctx.saved_tensors
                scale = (variance + ctx.eps).rsqrt()
                normal = (x - mean) * scale
                bias_own, weight_own = grad.sum(0), (grad * normal).sum(0)
                sums = torch.cat([bias_own, weight_own])
                work = dist.all_reduce(sums, group=ctx.group, async_op=True)
                work.wait()
                first, second = (sums / count).chunk(2)
                of_x = (grad - first - normal * second) * scale * weight
                return of_x, weight_own, bias_own, None, None
""" + "\n\n" + indent(_MODULE, 8 * " ")),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT += [
    ("4.7", "a list of parts", "        dist.all_reduce(sums, group=group)\n", """\
        parts = [sums.clone() for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, sums, group=group)
        sums = sum(parts)
"""),
    ("4.7", "sums in float64 in backward, too",
     "own = torch.stack([grad.sum(0), (grad * normal).sum(0)])",
     "wide = grad.double()\n        own = torch.stack([wide.sum(0), (wide * normal).sum(0)])"),
]  # fmt: skip
