"""Answers to lab 17, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "17_serving.ipynb"
CELLS = {
    "17.1": "lab17-cache-answer",
    "17.2": "lab17-roof-answer",
    "17.3": "lab17-tp-answer",
    "17.4": "lab17-cut-answer",
    "17.5": "lab17-serve-answer",
    "17.6": "lab17-batch-answer",
    "17.7": "lab17-hand-answer",
}
# The solution passes once more after each test of a stub; these checks take longer than others.
SLOW = {"17.1", "17.3", "17.6", "17.7"}
#: Ranks that are threads cannot be interrupted.
ONLY_ON_RANKS = {"tries all cuts"}
BEFORE = source_of(NOTEBOOK, "ranks-join").replace("%%px\n", "")

_WRITE = "keys[:, first:end], values[:, first:end] = attention.k(h), attention.v(h)"
_SUM = "        dist.all_reduce(y, group=group)\n        x = x + y + attention.out.bias"
_SUM_MLP = "        dist.all_reduce(y, group=group)\n        x = x + y + mlp.down.bias"
_GAP = "        if running and seconds > server.gap:\n            break\n"
_DECODE = "logits = forward_cached(model, tokens[-1], cache)"
_FILLED = "torch.stack([part[:, :n] for part in cache.keys + cache.values])"
_RECV = "            dist.recv(x, group_src=s - 1, group=group)\n"
_PASS_ON = """            sends.append(dist.isend(x, group_dst=s + 1, group=group))
        else:
            logits.append(x)
    for request in sends:
        request.wait()
"""
_SEND = "sends.append(dist.isend(x, group_dst=s + 1, group=group))"

# task, what the student did, a part of the solution, what stands in its place, words of the message
CHANGES = [
    ("17.1", "positions from 0", "embedded(text, first)", "embedded(text)",
     "You gave each call's tokens the positions 0, 1"),
    ("17.1", "attends to the new tokens only", "keys[:, :end], values[:, :end]",
     "keys[:, first:end], values[:, first:end]", "attend only to the tokens of the same call"),
    ("17.1", "no causal mask", "causal=True", "causal=False", "attend to later tokens"),
    ("17.1", "attends to the whole room", "keys[:, :end], values[:, :end]", "keys, values",
     "You attended to the whole room"),
    ("17.1", "swaps keys and values", "attend(q, k, v,", "attend(q, v, k,",
     "You swapped keys and values"),
    ("17.1", "never raises the length", "    cache.length = end\n", "",
     "cache.length is 0, expected 5"),
    ("17.1", "raises the length by one", "cache.length = end", "cache.length += 1",
     "cache.length is 1, expected 5"),
    ("17.1", "computes everything again", "    first, end = cache.length",
     "    if cache.length:\n        new = text.shape[1]\n"
     "        text = torch.cat([cache.text, text], 1)\n        cache.length = 0\n"
     "        return forward_cached(model, text, cache)[:, -new:]\n"
     "    cache.text = text\n    first, end = cache.length",
     "Compute only the new tokens"),
    ("17.1", "stores what the norm has not seen", _WRITE,
     "keys[:, first:end], values[:, first:end] = attention.k(x), attention.v(x)", "logits"),
    ("17.1", "returns the prompt, too", "return torch.cat(tokens, 1)",
     "return torch.cat([prompt, *tokens], 1)", "You returned the prompt, too"),
    ("17.1", "prefills the prompt twice", _DECODE,
     "forward_cached(model, prompt, Cache(model, samples, n))\n        " + _DECODE,
     "Prefill once"),
    ("17.1", "leaves out the first new token", "return torch.cat(tokens, 1)",
     "logits = forward_cached(model, tokens[-1], Cache(model, samples, 1))\n"
     "    return torch.cat(tokens[1:], 1)", "You left out the first new token"),
    ("17.1", "byte 0 ends a text", "logits = forward_cached(model, tokens[-1], cache)",
     "logits = forward_cached(model, tokens[-1], cache) * (tokens[-1] != 0)[..., None]",
     "generate with another model"),
    ("17.1", "one token too many", "while len(tokens) < new:", "while len(tokens) < new + 1:",
     "You returned too many tokens"),
    ("17.1", "returns the last logits only", "return model.logits(x)",
     "return model.logits(x[:, -1:])", "logits"),
    ("17.2", "one FLOP for a product and its sum", "flops = 2 * weights", "flops = weights",
     "You counted one FLOP for each weight"),
    ("17.2", "no attention", "batch * new + attention", "batch * new",
     "You left out the attention"),
    ("17.2", "half of the attention", "attention = 4 *", "attention = 2 *",
     "one of the attention's two products"),
    ("17.2", "no cache", "4 * (weights + cache)", "4 * weights", "You left out the cache"),
    ("17.2", "only keys", "cache = 2 *", "cache =", "You counted keys or values, but not both"),
    ("17.2", "numbers, not bytes", "4 * (weights + cache)", "weights + cache",
     "You counted numbers. A float32 has 4 bytes"),
    ("17.2", "reads the weights for each text", "4 * (weights + cache)",
     "4 * (batch * weights + cache)", "You read the weights for each text"),
    ("17.2", "the cache of one text", "width * batch * context  #", "width * context  #",
     "You counted the cache of one text"),
    ("17.2", "the cache of the new tokens", "width * batch * context  #", "width * batch * new  #",
     "You read only the new tokens' keys and values"),
    ("17.2", "no cache in the batch", "flops / peak - (nbytes - 4 * weights) / bandwidth",
     "flops / peak", "You left out the caches"),
    ("17.2", "rounds down", "math.ceil(", "math.floor(", "Memory still limits this batch"),
    ("17.2", "one more where both times are equal", "math.ceil(", "1 + math.floor(",
     "compute_bound_from(4, 1, 1, 1, 8.0, 8.0): expected 4, got 5"),
    ("17.2", "a batch where none is", "        return None\n", "        return 1\n",
     "Each further text adds more reading than computing"),
    ("17.3", "no sum", "        dist.all_reduce(y, group=group)\n", "", "none"),
    ("17.3", "sums on all ranks", "dist.all_reduce(y, group=group)", "dist.all_reduce(y)",
     "Pass group=group"),
    ("17.3", "a bias on each rank", "functional.linear(heads, attention.out.weight)\n" + _SUM,
     "attention.out(heads)\n        dist.all_reduce(y, group=group)\n        x = x + y",
     "You added the bias of out on each rank"),
    ("17.3", "a bias before the sum", _SUM + "\n        hidden",
     "        y += attention.out.bias\n        dist.all_reduce(y, group=group)\n        x = x + y\n"
     "        hidden", "You added the bias of out on each rank"),
    ("17.3", "the mean", _SUM_MLP,
     "        dist.all_reduce(y, group=group)\n"
     "        x = x + y / dist.get_world_size(group) + mlp.down.bias",
     "You took the mean of down over the ranks"),
    ("17.3", "one all_reduce per block", _SUM, "        x = x + y + attention.out.bias",
     "Expected 4 calls of all_reduce"),
    ("17.3", "does not wait", "dist.all_reduce(y, group=group)",
     "dist.all_reduce(y, group=group, async_op=True)", "You never call wait()"),
    ("17.3", "sums x, too", _SUM, "        y = x + y + attention.out.bias\n"
     "        dist.all_reduce(y, group=group)\n        x = y", ""),
    ("17.3", "never raises the length", "    cache.length = end\n", "",
     "cache.length is 0, expected 5. Raise it"),
    ("17.3", "one all_reduce in the prediction", "2 * depth * rounds", "depth * rounds",
     "There are two"),
    ("17.3", "no rounds", "depth * rounds * message", "depth * message * (p > 1)",
     "You counted one round for each all_reduce"),
    ("17.3", "does not split the computing", "compute / p", "compute",
     "You did not split the compute time"),
    ("17.3", "no latency", "message = latency + nbytes", "message = nbytes",
     "You left out the latency"),
    ("17.3", "a ring", "math.ceil(math.log2(p))", "(p - 1)", "You counted p − 1 rounds"),
    ("17.3", "log2, not rounded", "math.ceil(math.log2(p))", "math.log2(p)",
     "Round log2(p) up"),
    ("17.5", "blocks", "if s > 0:", "if s >= 0:", ""),
    ("17.5", "sends back", "group_dst=s + 1", "group_dst=s", ""),
    ("17.5", "all layers on each rank", "chain.run(first, first + counts[s], x)",
     "chain.run(0, sum(counts), x) if s == p - 1 else chain.run(first, first + counts[s], x)", ""),
    ("17.5", "one layer too few", "first + counts[s], x)", "first + counts[s] - 1, x)", ""),
    ("17.5", "forgets the group", _RECV, "            dist.recv(x, s - 1)\n", ""),
    ("17.5", "never waits", "    for request in sends:\n        request.wait()\n", "",
     "You never call wait()"),
    ("17.5", "returns the last one", "return logits", "return logits[-1:]", ""),
    ("17.5", "returns None on other stages", "return logits", "return logits or None", ""),
    ("17.5", "float32", "dtype=chain.dtype", "dtype=torch.float32", ""),
    ("17.5", "the text of each rank", "            x = torch.empty(*x.shape, chain.width, "
     "dtype=chain.dtype)\n" + _RECV,
     "            y = torch.empty(*x.shape, chain.width, dtype=chain.dtype)\n"
     "            dist.recv(y, group_src=s - 1, group=group)\n"
     "            x = chain.layers[0](x)\n", ""),
    ("17.5", "sends all at the end", _PASS_ON,
     "            sends.append(x)\n        else:\n            logits.append(x)\n"
     "    for x in sends:\n        dist.send(x, group_dst=s + 1, group=group)\n",
     "You sent microbatches after later ones were done"),
    ("17.5", "receives all before it begins", "    for x in texts:\n        if s > 0:\n"
     "            x = torch.empty(*x.shape, chain.width, dtype=chain.dtype)\n" + _RECV,
     "    coming = []\n    for x in texts:\n        if s > 0:\n"
     "            x = torch.empty(*x.shape, chain.width, dtype=chain.dtype)\n" + _RECV
     + "        coming.append(x)\n    for x in coming:\n",
     "You received several microbatches before you began"),
    ("17.6", "lets everybody join", _GAP, "", "Let fewer prompt tokens join"),
    ("17.6", "never more than the slots, but twice", "        joining.append(request)\n",
     "        joining += [request, request]\n", "twice"),
    ("17.6", "forgets the slots", "waiting[: server.slots - len(running)]", "waiting",
     "slots"),
    ("17.6", "the newest first", "in waiting[: server.slots - len(running)]",
     "in waiting[: (server.slots - len(running)) // 8]", ""),
    ("17.7", "the whole room", _FILLED, "torch.stack(cache.keys + cache.values)", ""),
    ("17.7", "only keys", "cache.keys + cache.values", "cache.keys", ""),
    ("17.7", "no length", "        cache.length = n\n", "", "tokens"),
    ("17.7", "forgets the group", "dist.send(filled, group_dst=p - 1, group=group)",
     "dist.send(filled, dst=p - 1)", ""),
    ("17.7", "returns on all ranks", "        dist.send(token, group_dst=p - 1, group=group)\n"
     "        return None\n", "        dist.send(token, group_dst=p - 1, group=group)\n"
     "        return token\n", "Return None there"),
    ("17.7", "swaps keys and values", "zip(cache.keys + cache.values, filled)",
     "zip(cache.values + cache.keys, filled)", "tokens"),
    ("17.7", "sends to the next rank", "group_dst=p - 1", "group_dst=1", ""),
    ("17.7", "never receives the token", "        dist.recv(token, group_src=0, group=group)\n",
     "", ""),
    ("17.7", "leaves out the first token", "return torch.cat(tokens, 1)",
     "return torch.cat(tokens[1:], 1)", "You left out the first new token"),
    ("17.7", "in half precision", "dist.send(filled, group_dst=p - 1, group=group)",
     "dist.send(filled.half(), group_dst=p - 1, group=group)", ""),
]  # fmt: skip

WRONG = [
    ("17.1", "each text of the batch is computed for itself", """
def forward_cached(model, text, cache):
    first, end = cache.length, cache.length + text.shape[1]
    rows = []
    for i in range(text.shape[0]):
        x = model.embedded(text[i : i + 1], first)
        for block, all_keys, all_values in zip(model.blocks, cache.keys, cache.values):
            keys, values = all_keys[i : i + 1], all_values[i : i + 1]
            attention, h = block.attention, block.norm1(x)
            keys[:, first:end] = attention.k(h)
            values[:, first:end] = attention.v(h)
            heads = models.attend(
                attention.q(h), keys[:, :end], values[:, :end], attention.head_size,
                causal=True,
            )
            x = x + attention.out(heads)
            x = x + block.mlp(block.norm2(x))
        rows.append(model.logits(x))
    cache.length = end
    return torch.cat(rows)


def generate(model, prompt, new):
    cache = Cache(model, prompt.shape[0], prompt.shape[1] + new - 1)

    def best(text):
        return forward_cached(model, text, cache)[:, -1:].argmax(-1)

    tokens = [best(prompt)]
    while len(tokens) < new:
        tokens.append(best(tokens[-1]))
    return torch.hstack(tokens)
""",
     "You ran the blocks several times"),
    ("17.1", "tensors that grow", """
def forward_cached(model, text, cache):
    first = cache.length
    x = model.embedded(text, first)
    for i, block in enumerate(model.blocks):
        a, h = block.attention, block.norm1(x)
        k = torch.cat([cache.keys[i][:, :first], a.k(h)], 1)
        v = torch.cat([cache.values[i][:, :first], a.v(h)], 1)
        cache.keys[i], cache.values[i] = k, v
        x = x + a.out(models.attend(a.q(h), k, v, a.head_size, True))
        x = x + block.mlp(block.norm2(x))
    cache.length += text.shape[1]
    return model.logits(x)


def generate(model, prompt, new):
    cache = Cache(model, len(prompt), 0)
    text = prompt
    for _ in range(new):
        logits = forward_cached(model, text[:, cache.length :], cache)
        text = torch.cat([text, logits[:, -1:].argmax(-1)], 1)
    return text[:, prompt.shape[1] :]
""",
     "You made new tensors for the cache"),
    ("17.1", "token by token, with its own attention", """
def forward_cached(model, text, cache):
    return torch.cat([one_token(model, text[:, i : i + 1], cache) for i in range(text.shape[1])], 1)


def one_token(model, token, cache):
    n = cache.length
    x = model.embedded(token, n)
    for block, keys, values in zip(model.blocks, cache.keys, cache.values):
        a, h = block.attention, block.norm1(x)
        keys[:, n], values[:, n] = a.k(h)[:, 0], a.v(h)[:, 0]
        shape = len(x), n + 1, a.heads, a.head_size
        q = a.q(h).view(len(x), a.heads, a.head_size)
        k, v = keys[:, : n + 1].reshape(shape), values[:, : n + 1].reshape(shape)
        weights = (torch.einsum("bhd,bnhd->bhn", q, k) / a.head_size**0.5).softmax(-1)
        y = torch.einsum("bhn,bnhd->bhd", weights, v).reshape(len(x), 1, -1)
        x = x + a.out(y)
        x = x + block.mlp(block.norm2(x))
    cache.length = n + 1
    return model.logits(x)


def generate(model, prompt, new):
    cache = Cache(model, len(prompt), prompt.shape[1] + new)
    token = forward_cached(model, prompt, cache)[:, -1].max(-1).indices[:, None]
    found = token
    for _ in range(new - 1):
        token = forward_cached(model, token, cache).argmax(-1)
        found = torch.hstack([found, token])
    return found
""",
     "You ran the blocks several times"),
    ("17.4", "equally many layers", """
def balance(costs, stages):
    return [len(part) for part in torch.arange(len(costs)).tensor_split(stages)]
""", "You counted layers, but their times differ"),
    ("17.4", "fills up to the mean", """
def balance(costs, stages):
    counts, total = [0], 0
    for k, cost in enumerate(costs):
        left = len(costs) - k
        full = total + cost > sum(costs) / stages
        if counts[-1] and len(counts) < stages and (full or left <= stages - len(counts)):
            counts.append(0)
            total = 0
        counts[-1] += 1
        total += cost
    return counts
""", "is possible with other cuts"),
    ("17.4", "returns the time", """
def balance(costs, stages):
    return sum(costs) / stages
""", "Return a list with the number of layers of each stage"),
    ("17.4", "returns where stages end", """
def balance(costs, stages):
    counts = [len(part) for part in torch.arange(len(costs)).tensor_split(stages)]
    return [sum(counts[: s + 1]) for s in range(stages)]
""", "You returned where stages end"),
    ("17.4", "tries all cuts", """
import itertools
def balance(costs, stages):
    best = None
    for cuts in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = [0, *cuts, len(costs)]
        counts = [b - a for a, b in zip(ends, ends[1:])]
        slowest = max(sum(costs[a:b]) for a, b in zip(ends, ends[1:]))
        if best is None or slowest < best[0]:
            best = slowest, counts
    return best[1]
""", "Don't try all cuts"),
    ("17.4", "leaves stages empty", """
def balance(costs, stages):
    low, high = max(costs), sum(costs)
    def filled(bound):
        counts, total = [0], 0
        for cost in costs:
            if total + cost > bound:
                counts.append(0)
                total = 0
            counts[-1] += 1
            total += cost
        return counts
    for _ in range(60):
        middle = (low + high) / 2
        if len(filled(middle)) <= stages:
            high = middle
        else:
            low = middle
    counts = filled(high)
    return counts + [0] * (stages - len(counts))
""", "A stage has no layer"),
    ("17.4", "changes the costs", """
def balance(costs, stages):
    counts = [1] * (stages - 1) + [len(costs) - stages + 1]
    costs.sort()
    return counts
""", "balance changed its argument costs"),
    ("17.4", "merges the smallest neighbors", """
def balance(costs, stages):
    groups = [[cost] for cost in costs]
    while len(groups) > stages:
        sums = [sum(a) + sum(b) for a, b in zip(groups, groups[1:])]
        k = sums.index(min(sums))
        groups[k : k + 2] = [groups[k] + groups[k + 1]]
    return [len(group) for group in groups]
""", "is possible with other cuts"),
    ("17.6", "static batches", """
def admit(now, waiting, running, server):
    return [] if running else waiting[: server.slots]
""", "Let requests join while others run"),
    ("17.6", "one at a time, when nobody runs", """
def admit(now, waiting, running, server):
    return [] if running else waiting[:1]
""", "Let requests join while others run"),
    ("17.6", "nobody", """
def admit(now, waiting, running, server):
    return []
""", "Let requests join while others run"),
    ("17.6", "forgets the running texts", """
def admit(now, waiting, running, server):
    joining, seconds = [], 0
    for request in waiting[: server.slots - len(running)]:
        seconds += server.prefill * request.prompt
        if running and seconds > server.gap:
            break
        joining.append(request)
    return joining
""", "Let fewer prompt tokens join"),
    ("17.6", "numbers instead of requests", """
def admit(now, waiting, running, server):
    return [request.number for request in waiting[: server.slots - len(running)]]
""", "isn't waiting"),
    ("17.6", "one request in each step", """
def admit(now, waiting, running, server):
    return waiting[:1] if len(running) < server.slots else []
""", "Your goodput is"),
]  # fmt: skip

RIGHT = [
    ("17.1", "narrow and copy_", """
def appended(store, new, first):
    # Writes the new rows behind the old ones, and returns all rows so far.
    store.narrow(1, first, new.shape[1]).copy_(new)
    return store.narrow(1, 0, first + new.shape[1])


def forward_cached(model, text, cache):
    first = cache.length
    x = model.embedded(text, first)
    for b, block in enumerate(model.blocks):
        layer = block.attention
        h = block.norm1(x)
        k = appended(cache.keys[b], layer.k(h), first)
        v = appended(cache.values[b], layer.v(h), first)
        x = x + layer.out(models.attend(layer.q(h), k, v, layer.head_size, causal=True))
        x = x + block.mlp(block.norm2(x))
    cache.length += text.shape[1]
    return model.logits(x)


def generate(model, prompt, new):
    samples, n = prompt.shape
    cache = Cache(model, samples=samples, room=n + new)
    text = prompt
    while True:
        known = text.shape[1]
        logits = forward_cached(model, text[:, cache.length :], cache)
        text = torch.cat([text, logits[:, -1].topk(1).indices], 1)
        if known + 1 == n + new:
            return text[:, n:].clone()
"""),
    ("17.2", "by two steps of the batch", """
def step_cost(weights, depth, width, batch, new, context):
    tokens = batch * new
    return (2 * weights + 4 * depth * width * context) * tokens, 4 * (
        weights + batch * context * width * depth * 2)


def compute_bound_from(weights, depth, width, context, peak, bandwidth):
    lead = []
    for batch in (1, 2):
        flops, read = step_cost(weights, depth, width, batch, 1, context)
        lead.append(flops / peak - read / bandwidth)
    slope = lead[1] - lead[0]
    if slope <= 0:
        return None
    return max(1, math.ceil(1 - lead[0] / slope))
"""),
    ("17.2", "doubles the batch, then searches", """
def step_cost(weights, depth, width, batch, new, context):
    flops = 0
    for _ in range(depth):
        flops += 2 * 2 * width * batch * new * context
    return flops + 2 * weights * batch * new, 4 * weights + 8 * depth * batch * context * width


def compute_bound_from(weights, depth, width, context, peak, bandwidth):
    def computes(batch):
        flops, read = step_cost(weights, depth, width, batch, 1, context)
        return flops / peak >= read / bandwidth
    high = 1
    while not computes(high):
        high *= 2
        if high > 2**40:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if computes(middle) else (middle, high)
    return high
"""),
    ("17.2", "floats", """
def step_cost(weights, depth, width, batch, new, context):
    per_token = 2.0 * weights + 4.0 * depth * width * context
    return [per_token * batch * new, 4.0 * weights + 8.0 * depth * width * batch * context]


def compute_bound_from(weights, depth, width, context, peak, bandwidth):
    a = (2 * weights + 4 * depth * width * context) / peak
    b = 8 * depth * width * context / bandwidth
    return -int(-4 * weights / bandwidth // (a - b)) if a > b else None
"""),
    ("17.4", "guesses a time, and fills the stages", """
def balance(costs, stages):
    n = len(costs)
    sums = sorted({sum(costs[a:b]) for a in range(n) for b in range(a + 1, n + 1)})

    def cut(bound):
        counts, total = [], 0
        for k, cost in enumerate(costs):
            left = len(costs) - k
            must = counts and left == stages - len(counts)
            if not counts or must or total + cost > bound:
                counts.append(0)
                total = 0
            counts[-1] += 1
            total += cost
            if total > bound or len(counts) > stages:
                return None
        return counts if len(counts) == stages else None

    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cut(sums[middle]) else (middle + 1, high)
    return cut(sums[low])
"""),
    ("17.4", "recursion with a memory", """
import functools

def balance(costs, stages):
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    @functools.cache
    def best(first, parts):
        if parts == 1:
            return sums[-1] - sums[first], (len(costs) - first,)
        options = []
        for end in range(first + 1, len(costs) - parts + 2):
            rest, counts = best(end, parts - 1)
            options.append((max(sums[end] - sums[first], rest), (end - first, *counts)))
        return min(options)

    return list(best(0, stages)[1])
"""),
    ("17.4", "starts from the last layer", """
def balance(costs, stages):
    n = len(costs)
    table = {(0, n): (0, [])}
    for s in range(1, stages + 1):
        for first in range(n):
            options = [
                (max(sum(costs[first:end]), table[s - 1, end][0]),
                 [end - first, *table[s - 1, end][1]])
                for end in range(first + 1, n + 1)
                if (s - 1, end) in table
            ]
            if options:
                table[s, first] = min(options, key=lambda option: option[0])
    return table[stages, 0][1]
"""),
    ("17.6", "skips prompts that do not fit", """
def admit(now, waiting, running, server):
    room = server.gap - server.base - server.decode * len(running)
    joining = []
    for request in waiting:
        if len(joining) + len(running) == server.slots:
            return joining
        if not running or server.prefill * request.prompt <= room:
            joining.append(request)
            room -= server.prefill * request.prompt
    return joining
"""),
    ("17.6", "keeps a margin", """
def admit(now, waiting, running, server):
    free, joining = server.slots - len(running), []
    tokens = (0.98 * server.gap - server.base - server.decode * len(running)) / server.prefill
    while waiting and free and (not running or waiting[0].prompt <= tokens):
        tokens -= waiting[0].prompt
        free -= 1
        joining.append(waiting.pop(0))
    return tuple(joining)
"""),
]  # fmt: skip

RIGHT += [
    ("17.7", "a message for each tensor, by isend", """
def disaggregated(model, prompt, new, group=None):
    s, p = place_and_size(group)
    samples, n = prompt.shape
    if p == 1:
        return generate(model, prompt, new)
    cache = Cache(model, samples, n if s == 0 else n + new)
    both = [t for pair in zip(cache.keys, cache.values) for t in pair]
    if s == 0:
        logits = forward_cached(model, prompt, cache)
        token = logits[:, -1].argmax(-1)
        works = [dist.isend(t.clone(), group_dst=p - 1, group=group) for t in both]
        works.append(dist.isend(token, group_dst=p - 1, group=group))
        for work in works:
            work.wait()
    elif s == p - 1:
        for t in both:
            came = torch.empty(samples, n, t.shape[2], dtype=t.dtype)
            dist.recv(came, group_src=0, group=group)
            t[:, :n] = came
        token = torch.empty(samples, dtype=torch.long)
        dist.recv(token, group_src=0, group=group)
        cache.length = n
        found = [token]
        for _ in range(new - 1):
            found.append(forward_cached(model, found[-1][:, None], cache)[:, 0].argmax(-1))
        return torch.stack(found, 1)
"""),
]  # fmt: skip

RIGHT += [
    ("17.7", "receives with irecv, from a list of tensors", """
def disaggregated(model, prompt, new, group=None):
    s, p = place_and_size(group)
    n = prompt.shape[1]
    cache = Cache(model, len(prompt), n + new)
    if s == 0:
        token = forward_cached(model, prompt, cache)[:, -1:].argmax(-1)
    else:
        token = torch.zeros(len(prompt), 1, dtype=torch.int64)
    if s not in (0, p - 1):
        return None
    buffers = [t[:, :n].contiguous() for t in [*cache.values, *cache.keys]] + [token]
    if s < p - 1:
        for buffer in buffers:
            dist.send(buffer, group=group, group_dst=p - 1)
        return None
    if p > 1:
        for work in [dist.irecv(b, group=group, group_src=0) for b in buffers]:
            work.wait()
        for t, buffer in zip([*cache.values, *cache.keys], buffers):
            t[:, :n] = buffer
        cache.length = n
    text = token
    for _ in range(new - 1):
        text = torch.cat([text, forward_cached(model, text[:, -1:], cache).argmax(-1)], 1)
    return text
"""),
]  # fmt: skip

CHANGES_THAT_ARE_RIGHT = [
    ("17.1", "stores keys and values by copy_", _WRITE,
     "keys[:, first:end].copy_(attention.k(h))\n        "
     "values[:, first:end].copy_(attention.v(h))"),
    ("17.3", "waits for a work", "dist.all_reduce(y, group=group)",
     "dist.all_reduce(y, group=group, async_op=True).wait()"),
    ("17.3", "the bias first, on x", "x = x + y + attention.out.bias",
     "x = (x + attention.out.bias) + y"),
    ("17.3", "a matrix product", "functional.linear(heads, attention.out.weight)",
     "(heads @ attention.out.weight.T)"),
    ("17.5", "blocking sends", _SEND, "dist.send(x, group_dst=s + 1, group=group)"),
    ("17.5", "receives ahead", "    for x in texts:\n        if s > 0:\n"
     "            x = torch.empty(*x.shape, chain.width, dtype=chain.dtype)\n" + _RECV,
     "    coming = []\n    for text in texts if s > 0 else ():\n"
     "        x = torch.empty(*text.shape, chain.width, dtype=chain.dtype)\n"
     "        coming.append((x, dist.irecv(x, group_src=s - 1, group=group)))\n"
     "    for k, x in enumerate(texts):\n        if s > 0:\n"
     "            x, request = coming[k]\n            request.wait()\n"),
    ("17.5", "counts the microbatches", "    for x in texts:\n",
     "    for k, x in enumerate(texts):\n"),
    ("17.6", "a request that will be late lets others go first",
     "        seconds += server.prefill * request.prompt\n",
     "        more = seconds + server.prefill * request.prompt\n"
     "        if now + more > request.arrival + server.first:\n            continue\n"
     "        seconds = more\n"),
    ("17.7", "one tensor for keys, one for values", _FILLED, "torch.stack([torch.stack([t[:, :n] "
     "for t in of]) for of in (cache.keys, cache.values)]).flatten(0, 1)"),
]  # fmt: skip

#: By somebody who had not seen the checks.
WRONG += [
    (
        "17.2",
        "table of the printed H100 lines",
        """
def step_cost(weights, depth, width, batch, new, context):
    flops = 2 * weights * batch * new + 4 * depth * width * batch * new * context
    return flops, 4 * (weights + 2 * depth * width * batch * context)


def compute_bound_from(weights, depth, width, context, peak, bandwidth):
    return {100: 48, 500: 173}.get(context)
""",
        "): You returned None. Return a batch",
    ),
    (
        "17.4",
        "equally many layers on each stage",
        """
def balance(costs, stages):
    n = len(costs)
    return [n // stages + (s < n % stages) for s in range(stages)]
""",
        "is possible with other cuts. You counted layers, but their",
    ),
    (
        "17.4",
        "largest layer to emptiest stage, order lost",
        """
def balance(costs, stages):
    load, counts = [0.0] * stages, [0] * stages
    for cost in sorted(costs, reverse=True):
        s = min(range(stages), key=lambda s: (load[s], counts[s]))
        load[s] += cost
        counts[s] += 1
    return counts
""",
        "is possible with other cuts. Minimize the slowest stage's",
    ),
    (
        "17.4",
        "halves again and again: powers of two",
        """
def balance(costs, stages):
    if stages == 1:
        return [len(costs)]
    half = stages // 2
    n = len(costs)
    cut = min(
        range(half, n - half + 1),
        key=lambda c: max(sum(costs[:c]), sum(costs[c:])),
    )
    return balance(costs[:cut], half) + balance(costs[cut:], half)
""",
        "): You returned",
    ),
    (
        "17.4",
        "returns where the stages end, not counts",
        """
def balance(costs, stages):
    n, sums = len(costs), [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(1, k): (sums[k], [k]) for k in range(1, n + 1)}
    for s in range(2, stages + 1):
        for k in range(s, n + 1):
            best[s, k] = min(
                (max(best[s - 1, j][0], sums[k] - sums[j]), best[s - 1, j][1] + [k])
                for j in range(s - 1, k)
            )
    return best[stages, n][1]
""",
        "): You returned where stages end. Return a list with the",
    ),
    (
        "17.4",
        "returns the slowest stage's time, too",
        """
def balance(costs, stages):
    n, sums = len(costs), [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    best = {(1, k): (sums[k], [k]) for k in range(1, n + 1)}
    for s in range(2, stages + 1):
        for k in range(s, n + 1):
            best[s, k] = min(
                (max(best[s - 1, j][0], sums[k] - sums[j]), best[s - 1, j][1] + [k - j])
                for j in range(s - 1, k)
            )
    return best[stages, n]
""",
        "Return a list with the number of layers of each stage",
    ),
    (
        "17.5",
        "last stage runs all layers, nothing is sent",
        """
def serve(chain, counts, texts, group=None):
    s, p = place_and_size(group)
    if s < p - 1:
        return []
    return [chain.run(0, sum(counts), text) for text in texts]
""",
        "but your code made no message",
    ),
    (
        "17.6",
        "nobody joins, so no gap is ever broken",
        """
def admit(now, waiting, running, server):
    return []
""",
        "for a later one. Let requests join while others",
    ),
    (
        "17.6",
        "eager: fills all free slots",
        """
def admit(now, waiting, running, server):
    return waiting[: server.slots - len(running)]
""",
        "for a later one. Let fewer prompt tokens join while texts",
    ),
    (
        "17.6",
        "constants of the notebook's server",
        """
def admit(now, waiting, running, server):
    joining, seconds = [], 0.025 + 0.0008 * len(running)
    for request in waiting[: 32 - len(running)]:
        seconds += 0.00025 * request.prompt
        if running and seconds > 0.15:
            break
        joining.append(request)
    return joining
""",
        "a large model: Your goodput is",
    ),
    (
        "17.6",
        "slots of the notebook's server",
        """
def admit(now, waiting, running, server):
    joining, seconds = [], server.base + server.decode * len(running)
    for request in waiting[: 32 - len(running)]:
        seconds += server.prefill * request.prompt
        if running and seconds > server.gap:
            break
        joining.append(request)
    return joining
""",
        "running texts, but there are only",
    ),
    (
        "17.7",
        "last rank computes the prompt itself",
        """
def disaggregated(model, prompt, new, group=None):
    s, p = place_and_size(group)
    if s < p - 1:
        return None
    return generate(model, prompt, new)
""",
        "Send the filled part of the cache and the first new token",
    ),
    (
        "17.7",
        "sends the whole room, not the filled part",
        """
def disaggregated(model, prompt, new, group=None):
    s, p = place_and_size(group)
    samples, n = prompt.shape
    if 0 < s < p - 1:
        return None
    cache = Cache(model, samples, n + new - 1)
    token = torch.empty(samples, 1, dtype=torch.long)
    if s == 0:
        token = forward_cached(model, prompt, cache)[:, -1].argmax(-1, keepdim=True)
    if p > 1:
        for part in [*cache.keys, *cache.values, token]:
            if s == 0:
                dist.send(part, group_dst=p - 1, group=group)
            else:
                dist.recv(part, group_src=0, group=group)
        if s == 0:
            return None
    cache.length = n
    tokens = [token]
    while len(tokens) < new:
        logits = forward_cached(model, tokens[-1], cache)
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)
""",
        "You sent the whole room of the cache. Send the filled part",
    ),
    (
        "17.7",
        "broadcasts the cache to all ranks",
        """
def disaggregated(model, prompt, new, group=None):
    s, p = place_and_size(group)
    samples, n = prompt.shape
    cache = Cache(model, samples, n + new - 1)
    token = torch.empty(samples, 1, dtype=torch.long)
    if s == 0:
        token = forward_cached(model, prompt, cache)[:, -1].argmax(-1, keepdim=True)
    if p > 1:
        filled = torch.stack([part[:, :n] for part in cache.keys + cache.values])
        dist.broadcast(filled, group_src=0, group=group)
        dist.broadcast(token, group_src=0, group=group)
        for part, came in zip(cache.keys + cache.values, filled):
            part[:, :n] = came
        cache.length = n
    if s < p - 1:
        return None
    tokens = [token]
    while len(tokens) < new:
        logits = forward_cached(model, tokens[-1], cache)
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
    return torch.cat(tokens, 1)
""",
        "You call broadcast. Use only send and recv here",
    ),
]
