"""Answers to lab 16, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "16_long_sequences.ipynb"
CELLS = {
    "16.1": "lab16-memory-answer",
    "16.2": "lab16-tokens-answer",
    "16.3": "lab16-softmax-answer",
    "16.4": "lab16-ring-answer",
    "16.5": "lab16-back-answer",
    "16.6": "lab16-zigzag-answer",
    "16.7": "lab16-heads-answer",
    "16.8": "lab16-which-answer",
}
SLOW = {"16.2", "16.4", "16.5", "16.7"}
BEFORE = "\n".join(source_of(NOTEBOOK, cell) for cell in ("ranks-join", "memory-define"))

_SEND = "dist.isend(block, group_dst=(r + 1) % p, group=group)"
_RECV = "dist.irecv(arriving, group_src=(r - 1) % p, group=group)"
_ATTEND = "found = attend(q, block[0], block[1], s)"
_ONE_FILL = "weights = (scores - maximum.masked_fill(maximum == -torch.inf, 0)).exp()"
_COMBINED = "return a * one[0] + b * other[0], maximum, a * one[2] + b * other[2]"
_WAIT = "        for work in works:\n            work.wait()\n"
_TRAVEL = "        dblock, more = pass_on(dblock, sizes[(s - 1) % p], group)\n"
_ZIGZAG = "return [pieces[r] + pieces[2 * p - 1 - r] for r in range(p)]"
_START = (
    "        if i < p - 1:\n"
    "            arriving, works = pass_on(block, sizes[(s - 1) % p], group)\n"
)
_BACK = "        own_dq, dk, dv = attend_back(q, block[0], block[1], s)\n"

# task, what the student did, a part of the solution, what stands in its place, words of the message
CHANGES = [
    ("16.1", "counts numbers", "return 4 * heads * (linear", "return heads * (linear",
     "A float32 has 4 bytes"),
    ("16.1", "16 bits", "return 4 * heads * (linear", "return 2 * heads * (linear",
     "You counted 2 bytes per number"),
    ("16.1", "one head", "return 4 * heads * (linear", "return 4 * (linear",
     "You counted one head"),
    ("16.1", "no probabilities", " + queries * keys)", ")", "You left out the probabilities"),
    ("16.1", "no output", "linear = 2 * (queries + keys) * head_size",
     "linear = (queries + 2 * keys) * head_size", "You left out the output"),
    ("16.1", "the scores, too", " + queries * keys)", " + 2 * queries * keys)",
     "You counted the scores, too"),
    ("16.1", "rounds down", "own = -(-tokens // p)", "own = tokens // p", "You rounded down"),
    ("16.1", "swaps the two", "return all_keys, attention_bytes(own, own, heads, head_size)",
     "return attention_bytes(own, own, heads, head_size), all_keys", "You swapped the two numbers"),
    ("16.1", "a fraction of all bytes",
     "all_keys = attention_bytes(own, tokens, heads, head_size)",
     "all_keys = attention_bytes(tokens, tokens, heads, head_size) // p",
     "each rank has all of k and v"),
    ("16.1", "one number", "return all_keys, attention_bytes(own, own, heads, head_size)",
     "return all_keys", "rank_bytes(1022, 4, 16, 4)"),
    ("16.1", "forgets the values", "linear = 2 * (queries + keys) * head_size",
     "linear = (2 * queries + keys) * head_size", "You left out k or v"),
    ("16.1", "an output as long as v", "linear = 2 * (queries + keys) * head_size",
     "linear = (queries + 3 * keys) * head_size", "Your output is as large as v"),
    ("16.1", "one matrix of probabilities", "return 4 * heads * (linear + queries * keys)",
     "return 4 * (heads * linear + queries * keys)", "You counted the probabilities of one head"),
    ("16.1", "float64", "return 4 * heads * (linear", "return 8 * heads * (linear",
     "You counted 8 bytes per number"),
    ("16.1", "always one more", "own = -(-tokens // p)", "own = tokens // p + 1",
     "You added a token although p divides the tokens"),
    ("16.1", "rounds to the nearest", "own = -(-tokens // p)", "own = round(tokens / p)",
     "You rounded down"),
    ("16.1", "prints", "return 4 * heads * (linear + queries * keys)",
     "print(4 * heads * (linear + queries * keys))", "You returned None"),
    ("16.1", "remembers by tokens and ranks",
     "return all_keys, attention_bytes(own, own, heads, head_size)",
     "pair = all_keys, attention_bytes(own, own, heads, head_size)\n"
     "    return globals().setdefault('of_tokens', {}).setdefault((tokens, p), pair)",
     "rank_bytes("),
    ("16.2", "no sum in backward",
     "return scattered(gradient, ctx.sizes, ctx.group), None, None",
     "return gradient.split(ctx.sizes)[dist.get_rank(ctx.group)].clone(), None, None",
     "You returned this rank's numbers alone"),
    ("16.2", "the mean", "    dist.reduce_scatter(own, parts, group=group)\n",
     "    dist.reduce_scatter(own, parts, group=group)\n    own /= len(sizes)\n",
     "times too small"),
    ("16.2", "forgets the group of the gather",
     "dist.all_gather(parts, x.contiguous(), group=group)",
     "dist.all_gather(parts, x.contiguous())", ""),
    ("16.2", "equal parts", "x.new_empty(n, *x.shape[1:]) for n in sizes",
     "torch.empty_like(x) for n in sizes", ""),
    ("16.2", "the reverse order", "return torch.cat(parts)", "return torch.cat(parts[::-1])",
     "You joined the tokens in another order"),
    ("16.2", "float32", "x.new_empty(n, *x.shape[1:])", "torch.empty(n, *x.shape[1:])", ""),
    ("16.2", "an all_reduce", "dist.reduce_scatter(own, parts, group=group)",
     "whole = x.clone()\n    dist.all_reduce(whole, group=group)\n"
     "    own.copy_(whole.split(sizes)[dist.get_rank(group)])", "You call all_reduce"),
    ("16.2", "sums in place", "    parts = [part.contiguous() for part in x.split(sizes)]\n",
     "    x.mul_(1.5)\n    parts = [part.contiguous() for part in x.split(sizes)]\n", ""),
    ("16.2", "the group of the last call", "ctx.sizes, ctx.group",
     "GatherTokens.sizes, GatherTokens.group", ""),
    ("16.2", "no gradient for sizes", "return gathered(gradient, ctx.sizes, ctx.group), None, None",
     "return gathered(gradient, ctx.sizes, ctx.group)",
     "returned an incorrect number of gradients"),
    ("16.2", "zeros for the others' tokens",
     "return gathered(gradient, ctx.sizes, ctx.group), None, None",
     "whole = gradient.new_zeros(sum(ctx.sizes), *gradient.shape[1:])\n"
     "        whole.split(ctx.sizes)[dist.get_rank(ctx.group)].copy_(gradient)\n"
     "        return whole, None, None", "Gather those of all ranks"),
    ("16.2", "a mean on the way back",
     "return gathered(gradient, ctx.sizes, ctx.group), None, None",
     "return gathered(gradient, ctx.sizes, ctx.group) / len(ctx.sizes), None, None",
     "Don't divide by the number of ranks"),
    ("16.2", "changes the gradient", "return scattered(gradient, ctx.sizes, ctx.group), None, None",
     "return -scattered(gradient.neg_(), ctx.sizes, ctx.group), None, None",
     "You changed the gradient that came in"),
    ("16.2", "a broadcast for each rank", "dist.all_gather(parts, x.contiguous(), group=group)",
     "parts[dist.get_rank(group)].copy_(x)\n    for r, part in enumerate(parts):\n"
     "        dist.broadcast(part, group_src=r, group=group)", "Use only all_gather here"),
    ("16.2", "the sum comes into x", "own = torch.empty_like(parts[dist.get_rank(group)])",
     "own = x.split(sizes)[dist.get_rank(group)]", "changed its argument x"),
    ("16.2", "the rank of the world", "own = torch.empty_like(parts[dist.get_rank(group)])",
     "own = torch.empty_like(parts[rank % len(sizes)])", "has the first p of"),
    ("16.3", "normalizes each block", "return weights @ v, maximum",
     "return weights @ v / weights.sum(-1, keepdim=True), maximum", ""),
    ("16.3", "no maximum", _ONE_FILL, "weights = scores.exp()", "You didn't subtract the maximum"),
    ("16.3", "nan for hidden blocks", "scores - maximum.masked_fill(maximum == -torch.inf, 0)",
     "scores - maximum", "You have nan in the result"),
    ("16.3", "no exponent below −60", "masked_fill(maximum == -torch.inf, 0)).exp()",
     "masked_fill(maximum == -torch.inf, 0)).clamp(min=-60).exp()", "entry 0: expected 0.0"),
    ("16.3", "leaves out small parts", _COMBINED,
     "a, b = a * (a > 1e-6), b * (b > 1e-6)\n    " + _COMBINED, "Right to six digits only"),
    ("16.3", "one maximum for all", "maximum = scores.amax(-1, keepdim=True)",
     "maximum = scores.amax().expand(*scores.shape[:2], 1)",
     "You took one maximum for all queries"),
    ("16.3", "adds as they are", _COMBINED,
     "return one[0] + other[0], maximum, one[2] + other[2]",
     "You added two parts with different maxima"),
    ("16.3", "nan if both are hidden", "unit = maximum.masked_fill(maximum == -torch.inf, 0)",
     "unit = maximum", "You have nan in the result"),
    ("16.3", "swaps the factors", "a, b = (one[1] - unit).exp(), (other[1] - unit).exp()",
     "b, a = (one[1] - unit).exp(), (other[1] - unit).exp()",
     "You gave each part the factor of the other part"),
    ("16.3", "divides at once", _COMBINED,
     "total = a * one[2] + b * other[2]\n"
     "    return (a * one[0] + b * other[0]) / total.clamp(min=1e-300), maximum, total",
     "Divide once, after the last block"),
    ("16.3", "without keepdim", "weights.sum(-1, keepdim=True)", "weights.sum(-1)",
     "You returned a tensor float64 [2, 6]"),
    ("16.3", "float32", "return weights @ v, maximum", "return (weights @ v).float(), maximum",
     "a tensor float32"),
    ("16.3", "in place", _COMBINED, "one[0].mul_(a)\n    " + _COMBINED, "changed its argument"),
    ("16.3", "changes only the first part", _COMBINED,
     "return a * one[0] + other[0], maximum, a * one[2] + other[2]",
     "You changed only the first part"),
    ("16.3", "maximum and total swapped",
     "return weights @ v, maximum, weights.sum(-1, keepdim=True)",
     "return weights @ v, weights.sum(-1, keepdim=True), maximum", "You swapped maximum and total"),
    ("16.3", "a maximum of 0 for nothing", "return weights @ v, maximum,",
     "maximum = maximum.masked_fill(maximum == -torch.inf, 0)\n    return weights @ v, maximum,",
     "has the maximum -inf, not 0"),
    ("16.3", "a billion for infinity", "    maximum = scores.amax",
     "    scores = scores.clamp(min=-1e9)\n    maximum = scores.amax", "expected 0.0, got"),
    ("16.3", "the mean of two outputs", _COMBINED,
     "return (a * one[0] + b * other[0]) / 2, maximum, a * one[2] + b * other[2]",
     "combine with scores of about 1: output"),
    ("16.3", "totals as they are", _COMBINED,
     "return a * one[0] + b * other[0], maximum, one[2] + other[2]",
     "total: You added two parts with different maxima"),
    ("16.3", "float32 if all is hidden", "    maximum = scores.amax(-1, keepdim=True)\n",
     "    if (scores == -torch.inf).all():\n"
     "        nothing = torch.zeros(*scores.shape[:2], 1)\n"
     "        return nothing.expand(-1, -1, v.shape[-1]), nothing - torch.inf, nothing\n"
     "    maximum = scores.amax(-1, keepdim=True)\n", "a tensor float32"),
    ("16.4", "passes on too late", _START + "        " + _ATTEND + "\n",
     "        " + _ATTEND + "\n" + _START, "Call pass_on before you compute"),
    ("16.4", "waits before it computes", "        " + _ATTEND + "\n",
     "        [work.wait() for work in works]\n        " + _ATTEND + "\n",
     "your block wasn't traveling while you computed"),
    ("16.4", "the other direction", "group_dst=(r + 1) % p", "group_dst=(r - 1) % p", ""),
    ("16.4", "receives as much as it sends, and waits for the send first", "tokens, block.shape[3]",
     "*block.shape[2:]", "stopped waiting, because another rank failed"),
    ("16.4", "turns the ring", _SEND + ",\n        " + _RECV,
     "dist.isend(block, group_dst=(r - 1) % p, group=group),\n"
     "        dist.irecv(arriving, group_src=(r + 1) % p, group=group)", ""),
    ("16.4", "waits in pass_on", "    return arriving, works\n",
     "    for work in works:\n        work.wait()\n    return arriving, works\n",
     "You waited for the messages"),
    ("16.4", "wrong s", "s, works = (r - i) % p, []", "s, works = (r + i) % p, []", ""),
    ("16.4", "the wrong block number", _ATTEND, "found = attend(q, block[0], block[1], r)",
     "In round i, group rank r has the block of (r − i) mod p"),
    ("16.4", "keeps only the last", "result = found if result is None else combine(result, found)",
     "result = found", "You returned the part of the last round alone"),
    ("16.4", "does not wait", _WAIT, "", ""),
    ("16.4", "gathers all keys", "block, result = torch.stack([k, v]), None",
     "block, result = torch.stack([k, v]), None\n"
     "    parts = [k.new_empty(k.shape[0], n, k.shape[2]) for n in sizes]\n"
     "    dist.all_gather(parts, k, group=group)", "You call all_gather"),
    ("16.4", "passes on once more", "        if i < p - 1:\n            arriving,",
     "        if i < p:\n            arriving,", "bytes, expected"),
    ("16.4", "keeps all blocks", "        if i < p - 1:\n            block = arriving\n",
     "        kept = block if i == 0 else (kept, block)\n"
     "        if i < p - 1:\n            block = arriving\n", "you still kept"),
    ("16.4", "forgets the group", "group_dst=(r + 1) % p, group=group", "dst=(r + 1) % p", ""),
    ("16.4", "begins with zeros", "block, result = torch.stack([k, v]), None",
     "block, zeros = torch.stack([k, v]), 0 * q[..., :1]\n    result = 0 * q, zeros, zeros",
     "You began with a maximum of 0"),
    ("16.4", "the send without a wait", "    return arriving, works\n",
     "    return arriving, works[1:]\n", "You never call wait() on the work of isend"),
    ("16.4", "the output alone", "    return result\n", "    return result[0] / result[2]\n",
     "ring_forward must return a tuple of 3 values"),
    ("16.4", "rotates the sizes", "arriving, works = pass_on(block, sizes[(s - 1) % p], group)",
     "sizes.insert(0, sizes.pop())\n            arriving, works = pass_on(block, sizes[r], group)",
     "ring_forward changed its argument sizes"),
    ("16.4", "its own attention", _ATTEND, "found = part(scores_of(q, block[0]), block[1])",
     "You called the function for blocks []"),
    ("16.4", "alone, to itself", "    if p == 1:\n        return block, []\n", "", "expected 0"),
    ("16.4", "into the block that leaves", "arriving = block.new_empty(",
     "arriving = block if tokens == block.shape[2] else block.new_empty(", ""),
    ("16.5", "no scale", "scale = q.shape[-1] ** -0.5", "scale = 1", "You forgot the square root"),
    ("16.5", "softmax of the block", "probabilities = (scores - lse).exp()",
     "probabilities = scores.softmax(-1)", "You applied softmax to one block"),
    ("16.5", "no delta", " - delta)", ")", "You left delta out"),
    ("16.5", "adds delta", " - delta)", " + delta)", "You added delta"),
    ("16.5", "gradients stay", _TRAVEL, "        more = []\n", ""),
    ("16.5", "not the last step home", _TRAVEL,
     "        more = []\n        if i < p - 1:\n    " + _TRAVEL, ""),
    ("16.5", "forgets its own dq", "dq = dq + own_dq", "dq = own_dq",
     "You kept only the last term"),
    ("16.5",
     "starts late", _START + _BACK,
     _BACK + _START, "Call pass_on before you compute"),
    ("16.5", "waits before it computes", _BACK,
     "        [work.wait() for work in works]\n" + _BACK,
     "your block wasn't traveling while you computed"),
    ("16.5", "only the last term", "dblock = dblock + torch.stack([dk, dv])",
     "dblock = torch.stack([dk, dv])", "You kept only the last term"),
    ("16.5", "sums by all_reduce", "    return dq, dblock[0], dblock[1]\n",
     "    dist.all_reduce(dq, group=group)\n    return dq, dblock[0], dblock[1]\n",
     "CommunicationMismatch"),
    ("16.5", "scales dv", "@ q * scale, dv", "@ q * scale, dv * scale", "You scaled dv"),
    ("16.5", "swaps dk and dv", "return dq, dblock[0], dblock[1]",
     "return dq, dblock[1], dblock[0]",
     "You swapped dk and dv"),
    ("16.5", "swaps dk and dv of a block", "@ k * scale, ds.transpose(-2, -1) @ q * scale, dv",
     "@ k * scale, dv, ds.transpose(-2, -1) @ q * scale",
     "block_gradients: dk: You swapped dk and dv"),
    ("16.5", "head_size without a root", "scale = q.shape[-1] ** -0.5", "scale = 1 / q.shape[-1]",
     "You divided by head_size"),
    ("16.5", "scores without a mask", "probabilities = (scores - lse).exp()",
     "probabilities = (scores_of(q, k) - lse).exp()", "block_gradients: dq"),
    ("16.5", "scales the scores again", "probabilities = (scores - lse).exp()",
     "probabilities = (scores / q.shape[-1] ** 0.5 - lse).exp()", "You scaled the scores again"),
    ("16.5", "the mean", "return dq, dblock[0], dblock[1]",
     "return dq, dblock[0] / p, dblock[1] / p", "You took the mean over the ranks"),
    ("16.5", "keys travel home, too", "        if i < p - 1:\n            arriving, works",
     "        if p > 1:\n            arriving, works", "gradients p times, but not to a rank"),
    ("16.5", "does not wait for gradients", "for work in works + more:", "for work in works:",
     "You never call wait() on the work of"),
    ("16.6", "in order", _ZIGZAG, "return [pieces[2 * r] + pieces[2 * r + 1] for r in range(p)]",
     "You kept the tokens in order"),
    ("16.6", "every p-th", _ZIGZAG, "return [list(range(tokens))[r::p] for r in range(p)]",
     "You gave every p-th token"),
    ("16.6", "r and p + r", _ZIGZAG, "return [pieces[r] + pieces[p + r] for r in range(p)]",
     "You combined the pieces r and p + r"),
    ("16.6", "late piece first", _ZIGZAG,
     "return [pieces[2 * p - 1 - r] + pieces[r] for r in range(p)]", "Return sorted positions"),
    ("16.6", "swaps", "return first, last", "return last, first", "You swapped the two numbers"),
    ("16.6", "less than", "t <= mine[-1]", "t < mine[-1]", "A query sees its own key"),
    ("16.6", "skips its own key", "t < theirs[0]", "t <= theirs[0]",
     "so use < for the queries"),
    ("16.6", "skips nothing", "return first, last", "return 0, len(theirs)", "You skip nothing"),
    ("16.6", "the first query", "t <= mine[-1]", "t <= mine[0]",
     "You looked at the first query"),
    ("16.6", "visible queries", "return first, last", "return len(mine) - first, last",
     "You counted visible queries"),
    ("16.6", "positions are tensors", _ZIGZAG,
     "return torch.arange(tokens).tensor_split(p)", ""),
    ("16.6", "tensors", _ZIGZAG,
     "return [torch.tensor(pieces[r] + pieces[2 * p - 1 - r]) for r in range(p)]",
     "You returned tensors"),
    ("16.6", "two lists for each rank", _ZIGZAG,
     "return [[pieces[r], pieces[2 * p - 1 - r]] for r in range(p)]", "got [[0, 1], [14, 15]]"),
    ("16.6", "its own tokens only", _ZIGZAG,
     "return pieces[rank % p] + pieces[2 * p - 1 - rank % p]", "zigzag(16, 4)"),
    ("16.6", "drops the rest", "for size in split_evenly(tokens, 2 * p):",
     "for size in [tokens // (2 * p)] * (2 * p):", "zigzag("),
    ("16.6", "the last key", "t < theirs[0]", "t < theirs[-1]", "You looked at the last key"),
    ("16.6", "shortens the block", "return first, last",
     "del theirs[last:]\n    return first, last",
     "visible changed its argument theirs"),
    ("16.7", "every p-th head", "parts = [part.contiguous() for part in x.chunk(p)]",
     "parts = [x[h::p].contiguous() for h in range(p)]", "Give it a block of heads"),
    ("16.7", "joins along the heads", "return torch.cat(arriving, 1)", "return torch.cat(arriving)",
     ""),
    ("16.7", "own tokens only", "x.new_empty(len(x) // p, n, x.shape[2]) for n in sizes",
     "x.new_empty(len(x) // p, sizes[r], x.shape[2]) for _ in sizes", ""),
    ("16.7", "gathers",
     "    dist.all_to_all(arriving, parts, group=group)\n    return torch.cat(arriving, 1)",
     "    whole = [x.new_empty(len(x), n, x.shape[2]) for n in sizes]\n"
     "    dist.all_gather(whole, x.contiguous(), group=group)\n"
     "    return torch.cat([one.chunk(p)[r] for one in whole], 1)", "You call all_gather"),
    ("16.7", "backward is itself", "return to_tokens(gradient, ctx.sizes, ctx.group), None, None",
     "return to_heads(gradient, ctx.sizes, ctx.group), None, None", ""),
    ("16.7", "no exchange in backward",
     "return to_heads(gradient, ctx.sizes, ctx.group), None, None",
     "return gradient, None, None", ""),
    ("16.7", "forgets the group", "dist.all_to_all(arriving, parts, group=group)",
     "dist.all_to_all(arriving, parts)", ""),
    ("16.7", "wrong number of gradients",
     "return to_tokens(gradient, ctx.sizes, ctx.group), None, None",
     "return to_tokens(gradient, ctx.sizes, ctx.group)", "incorrect number of gradients"),
    ("16.7", "reverses the ranks", "return torch.cat(arriving, 1)",
     "return torch.cat(arriving[::-1], 1)", ""),
    ("16.7", "the mean", "return to_tokens(gradient, ctx.sizes, ctx.group), None, None",
     "return to_tokens(gradient, ctx.sizes, ctx.group) / len(ctx.sizes), None, None",
     "Don't divide by the number of ranks"),
    ("16.7", "its own tokens first", "return torch.cat(arriving, 1)",
     "return torch.cat(arriving[r:] + arriving[:r], 1)", "to_heads"),
    ("16.7", "an exchange for each head",
     "    dist.all_to_all(arriving, parts, group=group)\n    return torch.cat(arriving, 1)",
     "    for h in range(len(x) // p):\n"
     "        dist.all_to_all([a[h] for a in arriving], [t[h] for t in parts], group=group)\n"
     "    return torch.cat(arriving, 1)", "bytes that all_to_all sends and receives"),
    ("16.7", "splits evenly", "    arriving = [x.new_empty(len(x)",
     "    sizes = split_evenly(sum(sizes), p)\n    arriving = [x.new_empty(len(x)",
     "has the first p of"),
    ("16.7", "the rank of the world", "torch.empty_like(parts[r])",
     "torch.empty_like(parts[rank % p])", "has the first p of"),
    ("16.7", "the group of the last call", "ctx.sizes, ctx.group", "ToHeads.sizes, ToHeads.group",
     ""),
    ("16.8", "a list of copies", "k.repeat_interleave(max(1, p // len(k)), 0)",
     "k.repeat(max(1, p // len(k)), 1, 1)", "Put copies side by side"),
    ("16.8", "p copies", "k.repeat_interleave(max(1, p // len(k)), 0)",
     "k.repeat_interleave(p, 0)", "You returned a tensor"),
    ("16.8", "no gradient", "k.repeat_interleave(max(1, p // len(k)), 0)",
     "k.detach().repeat_interleave(max(1, p // len(k)), 0)", "gradient"),
    ("16.8", "p rounds", "return 4 * (p - 1) * block", "return 4 * p * block",
     "You counted p rounds"),
    ("16.8", "keys only", "block = 2 * kv_heads * tokens", "block = kv_heads * tokens",
     "Values travel, too"),
    ("16.8", "all heads in the ring", "block = 2 * kv_heads * tokens", "block = 2 * heads * tokens",
     "Keys and values have kv_heads"),
    ("16.8", "does not repeat", "2 * max(kv_heads, p)", "2 * kv_heads",
     "You forgot to repeat the KV heads"),
    ("16.8", "keeps its own part", "head_size * (p - 1) // p", "head_size",
     "You counted a rank's part for itself"),
    ("16.8", "not the way back", "rows = 2 * heads +", "rows = heads +",
     "You forgot the way back of the output"),
    ("16.8", "numbers", "return 4 * rows", "return rows", "You counted numbers"),
    ("16.8", "no heads left", "k.repeat_interleave(max(1, p // len(k)), 0)",
     "k.repeat_interleave(p // len(k), 0)", "You returned a tensor float64 [0, 3, 2]"),
    ("16.8", "repeats tokens", "k.repeat_interleave(max(1, p // len(k)), 0)",
     "k.repeat_interleave(max(1, p // len(k)), 1)", "You returned a tensor float64 [2, 6, 2]"),
    ("16.8", "repeats for the ring, too", "block = 2 * kv_heads * tokens",
     "block = 2 * max(kv_heads, p) * tokens", "only Ulysses needs that"),
    ("16.8", "whole sequences", "block = 2 * kv_heads * tokens // p",
     "block = 2 * kv_heads * tokens", "You counted the whole sequence"),
    ("16.8", "16 bits", "return 4 * (p - 1) * block", "return 2 * (p - 1) * block",
     "a float32 has 4 bytes"),
    ("16.8", "keys only in Ulysses", "2 * max(kv_heads, p)", "max(kv_heads, p)",
     "You counted keys or values only"),
    ("16.8", "all heads in Ulysses", "2 * max(kv_heads, p)", "2 * heads",
     "You counted heads for keys and values, too"),
    ("16.8", "remembers by KV heads and ranks", "return 4 * (p - 1) * block",
     "bytes_of = globals().setdefault('bytes_of', {})\n"
     "    return bytes_of.setdefault((kv_heads, p), 4 * (p - 1) * block)", "ring_traffic("),
]  # fmt: skip

WRONG: list[tuple[str, str, str, str]] = []

RIGHT = [
    (
        "16.1",
        "adds up five tensors",
        """
def attention_bytes(queries, keys, heads, head_size):
    shapes = [(queries, head_size)] * 2 + [(keys, head_size)] * 2 + [(queries, keys)]
    return sum(4 * heads * a * b for a, b in shapes)


def rank_bytes(tokens, heads, head_size, p):
    own = max(split_evenly(tokens, p))
    return [attention_bytes(own, n, heads, head_size) for n in (tokens, own)]
""",
    ),
    (
        "16.1",
        "measures meta tensors",
        """
def attention_bytes(queries, keys, heads, head_size):
    q, k = (torch.empty(heads, n, head_size, device="meta") for n in (queries, keys))
    tensors = [q, k, k.clone(), q @ k.transpose(1, 2), q.clone()]
    return sum(t.numel() * t.element_size() for t in tensors)


def rank_bytes(tokens, heads, head_size, p):
    own = (tokens + p - 1) // p
    return (attention_bytes(own, tokens, heads, head_size),
            attention_bytes(own, own, heads, head_size))
""",
    ),
    (
        "16.2",
        "collects into one tensor",
        """
def gathered(x, sizes, group):
    whole = torch.zeros(sum(sizes), *x.shape[1:], dtype=x.dtype)
    dist.all_gather(list(whole.split(sizes)), x.clone(), group=group)
    return whole


def scattered(x, sizes, group):
    own = x.new_zeros(sizes[dist.get_rank(group)], *x.shape[1:])
    work = dist.reduce_scatter(own, list(x.clone().split(sizes)), group=group, async_op=True)
    work.wait()
    return own


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        ctx.rest = rest
        return gathered(x, *rest)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, *ctx.rest), None, None


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        ctx.rest = rest
        return scattered(x, *rest)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, *ctx.rest), None, None


def gather_tokens(x, sizes, group=None):
    return GatherTokens.apply(x, sizes, group)


def scatter_sums(x, sizes, group=None):
    return ScatterSums.apply(x, sizes, group)
""",
    ),
    (
        "16.3",
        "by log-sum-exp",
        """
def part(scores, v):
    heads, queries, keys = scores.shape
    maximum = scores.max(-1, keepdim=True).values
    hidden = torch.isneginf(maximum)
    weights = torch.where(hidden, torch.zeros_like(scores), (scores - maximum).exp())
    return torch.einsum("hqk,hkd->hqd", weights, v), maximum, weights.sum(2, keepdim=True)


def combine(one, other):
    m = torch.stack([one[1], other[1]]).amax(0)

    def changed(part):
        factor = torch.where(torch.isneginf(part[1]), torch.zeros_like(m), (part[1] - m).exp())
        return part[0] * factor, part[2] * factor

    (o1, t1), (o2, t2) = changed(one), changed(other)
    return [o1 + o2, m, t1 + t2]
""",
    ),
    (
        "16.3",
        "clamps to the lowest number",
        """
def part(scores, v):
    m = scores.amax(-1, keepdim=True)
    e = torch.exp(scores - m.clamp(min=torch.finfo(m.dtype).min))
    return e @ v, m, e @ torch.ones_like(v[..., :1])


def combine(one, other):
    m = torch.maximum(one[1], other[1])
    low = torch.finfo(m.dtype).min
    return tuple(
        m if i == 1 else sum(p[i] * torch.exp(p[1] - m.clamp(min=low)) for p in (one, other))
        for i in range(3)
    )
""",
    ),
    (
        "16.4",
        "keys and values apart",
        """
def pass_on(block, tokens, group=None):
    r, p = place_and_size(group)
    arriving = torch.zeros(*block.shape[:2], tokens, block.shape[-1], dtype=block.dtype)
    if p == 1:
        return block.clone(), []
    works = [dist.irecv(half, group_src=(r + p - 1) % p, group=group) for half in arriving]
    works += [dist.isend(half.contiguous(), group_dst=(r + 1) % p, group=group) for half in block]
    return arriving, works


def ring_forward(q, k, v, sizes, attend, group=None):
    r, p = place_and_size(group)
    part_so_far, owner, block = None, r, torch.stack((k, v))
    while True:
        previous = (owner - 1) % p
        last = previous == r
        if not last:
            following, works = pass_on(block, sizes[previous], group)
        found = attend(q, *block, owner)
        part_so_far = combine(part_so_far, found) if part_so_far else found
        if last:
            return part_so_far
        for work in works:
            work.wait()
        block, owner = following, previous
""",
    ),
    (
        "16.4",
        "combines at the end",
        """
def pass_on(block, tokens, group=None):
    r, p = place_and_size(group)
    if p == 1:
        return block, []
    arriving = block.new_empty(2, block.shape[1], tokens, block.shape[3])
    works = [dist.irecv(arriving, group_src=r - 1 if r else p - 1, group=group)]
    to = r + 1 if r < p - 1 else 0
    return arriving, [*works, dist.isend(tensor=block, group_dst=to, group=group)]


def ring_forward(q, k, v, sizes, attend, group=None):
    r, p = place_and_size(group)

    def rest(block, i):
        s = (r - i) % p
        if i == p - 1:
            return [attend(q, block[0], block[1], s)]
        arriving, works = pass_on(block, sizes[(s - 1) % p], group)
        found = attend(q, block[0], block[1], s)
        [work.wait() for work in works]
        del block
        return [found, *rest(arriving, i + 1)]

    block = torch.stack([k, v])
    found = rest(block, 0) if p < 3 else None
    if found is None:
        found = []
        for i in range(p):
            works = []
            if i + 1 < p:
                arriving, works = pass_on(block, sizes[(r - i - 1) % p], group)
            found.append(attend(q, block[0], block[1], (r - i) % p))
            for work in works:
                work.wait()
            block = arriving if works else block
    total = found[0]
    for one in found[1:]:
        total = combine(one, total)
    return total
""",
    ),
    (
        "16.5",
        "adds into what arrives",
        """
def block_gradients(q, k, v, scores, lse, gradient, delta):
    weights = torch.exp(scores - lse)
    dv = torch.einsum("hqk,hqd->hkd", weights, gradient)
    ds = weights * (torch.einsum("hqd,hkd->hqk", gradient, v) - delta) / q.shape[-1] ** 0.5
    return torch.einsum("hqk,hkd->hqd", ds, k), torch.einsum("hqk,hqd->hkd", ds, q), dv


def ring_backward(q, k, v, sizes, attend_back, group=None):
    r, p = place_and_size(group)
    block = torch.stack([k, v])
    dq = torch.zeros_like(q)
    came = torch.zeros_like(block)
    pending = []
    for i in range(p):
        s = (r - i) % p
        works = []
        if i < p - 1:
            following, works = pass_on(block, sizes[s - 1], group)
        of_q, *of_block = attend_back(q, block[0], block[1], s)
        dq += of_q
        for work in pending:
            work.wait()
        came = came + torch.stack(of_block)
        came, pending = pass_on(came, sizes[s - 1], group)
        for work in works:
            work.wait()
        if works:
            block = following
    for work in pending:
        work.wait()
    return dq, came[0], came[1]
""",
    ),
    (
        "16.6",
        "by the owner of each token",
        """
def zigzag(tokens, p):
    piece = [i for i, size in enumerate(split_evenly(tokens, 2 * p)) for _ in range(size)]
    owner = [min(i, 2 * p - 1 - i) for i in piece]
    return [[t for t in range(tokens) if owner[t] == r] for r in range(p)]


def visible(mine, theirs):
    first = next((i for i, t in enumerate(mine) if t >= min(theirs)), len(mine))
    return [first, len([t for t in theirs if not t > max(mine)])]
""",
    ),
    (
        "16.6",
        "by the mask",
        """
def zigzag(tokens, p):
    ends = [0]
    for size in split_evenly(tokens, 2 * p):
        ends.append(ends[-1] + size)
    return [
        [*range(ends[r], ends[r + 1]), *range(ends[-2 - r], ends[-1 - r])] for r in range(p)
    ]


def visible(mine, theirs):
    sees = torch.tensor(mine)[:, None] >= torch.tensor(theirs)
    return int((~sees.any(1)).sum()), int(sees.any(0).sum())
""",
    ),
    (
        "16.7",
        "by permuting whole tensors",
        """
def to_heads(x, sizes, group):
    p = len(sizes)
    arriving = [torch.zeros(len(x) // p, n, x.shape[2], dtype=x.dtype) for n in sizes]
    dist.all_to_all(arriving, [x[i * len(x) // p : (i + 1) * len(x) // p].clone()
                               for i in range(p)], group=group)
    return torch.cat(arriving, dim=-2)


def to_tokens(x, sizes, group):
    p, r = len(sizes), dist.get_rank(group)
    whole = x.new_zeros(p * len(x), sizes[r], x.shape[2])
    dist.all_to_all(list(whole.chunk(p)), [t.clone() for t in x.split(sizes, dim=1)], group=group)
    return whole


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        ctx.rest = rest
        return to_heads(x, *rest)

    @staticmethod
    def backward(ctx, gradient):
        return to_tokens(gradient, *ctx.rest), None, None


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *rest):
        ctx.rest = rest
        return to_tokens(x, *rest)

    @staticmethod
    def backward(ctx, gradient):
        return to_heads(gradient, *ctx.rest), None, None


def heads_of(x, sizes, group=None):
    return ToHeads.apply(x, sizes, group)


def tokens_of(x, sizes, group=None):
    return ToTokens.apply(x, sizes, group)
""",
    ),
    (
        "16.8",
        "expands and reshapes",
        """
def spread(k, p):
    times = p // len(k) if p > len(k) else 1
    return k[:, None].expand(-1, times, -1, -1).reshape(times * len(k), *k.shape[1:])


def ring_traffic(tokens, heads, kv_heads, head_size, p):
    return sum(2 * 4 * kv_heads * head_size * (tokens // p) for _ in range(p - 1))


def ulysses_traffic(tokens, heads, kv_heads, head_size, p):
    local = tokens // p * head_size * 4
    per_head = local * 2
    return (heads // p + max(kv_heads, p) // p) * per_head * (p - 1)
""",
    ),
    (
        "16.8",
        "by an index",
        """
def spread(k, p):
    n = max(p, len(k))
    return k[torch.arange(n) * len(k) // n]


def ring_traffic(tokens, heads, kv_heads, head_size, p):
    return 8 * tokens * kv_heads * head_size * (p - 1) / p


def ulysses_traffic(tokens, heads, kv_heads, head_size, p):
    return 8 * tokens * (heads + max(p, kv_heads)) * head_size * (p - 1) / p**2
""",
    ),
    (
        "16.1",
        "recursion over heads, own loop for tokens",
        """
def attention_bytes(queries, keys, heads, head_size):
    if heads == 0:
        return 0
    one_head = queries * (2 * head_size + keys) + keys * 2 * head_size
    return 4 * one_head + attention_bytes(queries, keys, heads - 1, head_size)


def rank_bytes(tokens, heads, head_size, p):
    own = len(range(0, tokens, p))  # the tokens 0, p, 2p, …
    all_keys = attention_bytes(own, tokens, heads, head_size)
    return all_keys, attention_bytes(own, own, heads, head_size)
""",
    ),
    (
        "16.2",
        "setup_context instead of ctx in forward",
        """
def gathered(x, sizes, group):
    parts = [x.new_empty(n, *x.shape[1:]) for n in sizes]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts)


def scattered(x, sizes, group):
    parts = [part.contiguous() for part in x.split(sizes)]
    own = torch.empty_like(parts[dist.get_rank(group)])
    dist.reduce_scatter(own, parts, group=group)
    return own


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(x, sizes, group):
        return gathered(x, sizes, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *ctx.rest = inputs

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, *ctx.rest), None, None


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(x, sizes, group):
        return scattered(x, sizes, group)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, *ctx.rest = inputs

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, *ctx.rest), None, None


def gather_tokens(x, sizes, group=None):
    return GatherTokens.apply(x, sizes, group)


def scatter_sums(x, sizes, group=None):
    return ScatterSums.apply(x, sizes, group)
""",
    ),
    (
        "16.3",
        "recursion: combines halves down to one key",
        """
def part(scores, v):
    keys = scores.shape[-1]
    if keys > 1:
        half = keys // 2
        left = part(scores[..., :half], v[:, :half])
        return combine(left, part(scores[..., half:], v[:, half:]))
    total = (scores > -torch.inf).to(scores.dtype)
    return total @ v, scores.clone(), total


def combine(one, other):
    maximum = torch.where(one[1] > other[1], one[1], other[1])
    unit = torch.where(maximum > -torch.inf, maximum, torch.zeros_like(maximum))
    parts = [((m - unit).exp(), o, t) for o, m, t in (one, other)]
    output = sum(factor * o for factor, o, _ in parts)
    return output, maximum, sum(factor * t for factor, _, t in parts)
""",
    ),
    (
        "16.3",
        "total by logsumexp, where instead of maximum",
        """
def part(scores, v):
    maximum = scores.amax(-1, keepdim=True)
    unit = maximum.masked_fill(maximum.isneginf(), 0)
    total = (scores.logsumexp(-1, keepdim=True) - unit).exp()
    return (scores - unit).exp() @ v, maximum, total


def combine(one, other):
    # The larger part stays, the smaller part shrinks by exp of the distance.
    swap = other[1] > one[1]
    (o1, m1, t1), (o2, m2, t2) = (
        [torch.where(swap, y, x) for x, y in zip(*pair, strict=True)]
        for pair in ((one, other), (other, one))
    )
    shrink = torch.where(m2.isneginf(), 0.0, (m2 - m1).exp())
    return o1 + shrink * o2, m1, t1 + shrink * t2
""",
    ),
    (
        "16.4",
        "a generator of parts, and functools.reduce",
        """
from functools import reduce


def pass_on(block, tokens, group=None):
    r, p = place_and_size(group)
    if p == 1:
        return block, []
    arriving = block.new_empty(*block.shape[:2], tokens, block.shape[3])
    works = [
        dist.isend(block, group_dst=(r + 1) % p, group=group),
        dist.irecv(arriving, group_src=(r - 1) % p, group=group),
    ]
    return arriving, works


def ring_forward(q, k, v, sizes, attend, group=None):
    r, p = place_and_size(group)
    order = [*range(r, -1, -1), *range(p - 1, r, -1)]

    def parts():
        block = torch.stack((k, v))
        for s, following in zip(order, [*order[1:], None]):
            arriving, works = None, []
            if following is not None:
                arriving, works = pass_on(block, sizes[following], group)
            found = attend(q, block[0], block[1], s)
            while works:
                works.pop().wait()
            block = arriving
            yield found

    return reduce(combine, parts())
""",
    ),
    (
        "16.5",
        "head by head; recursion over the rounds",
        """
def block_gradients(q, k, v, scores, lse, gradient, delta):
    found = []
    for h in range(q.shape[0]):
        p = (scores[h] - lse[h]).exp()
        ds = p * (gradient[h] @ v[h].T - delta[h])
        of_head = ds @ k[h], ds.T @ q[h], p.T @ gradient[h]
        found.append(of_head)
    dq, dk, dv = (torch.stack(list(t)) for t in zip(*found))
    root = q.shape[-1] ** 0.5
    return dq / root, dk / root, dv


def ring_backward(q, k, v, sizes, attend_back, group=None):
    r, p = place_and_size(group)

    def rounds(i, held):
        # Takes block and gradient out of the list, so that no frame keeps them.
        so_far, block = held.pop(), held.pop()
        s, works = (r - i) % p, []
        arriving, length = None, sizes[(r - i - 1) % p]
        if i + 1 < p:
            arriving, works = pass_on(block, length, group)
        dq, *of_block = attend_back(q, block[0], block[1], s)
        so_far = torch.stack(of_block) + so_far
        coming, more = pass_on(so_far, length, group)
        for work in [*works, *more]:
            work.wait()
        held += [arriving, coming]
        if arriving is None:
            return dq
        del block, so_far, of_block, arriving, coming, works, more, work
        return dq + rounds(i + 1, held)

    held = [torch.stack([k, v]), 0]
    dq = rounds(0, held)
    dk, dv = held.pop()
    return dq, dk, dv
""",
    ),
    (
        "16.6",
        "recursion from outside in, searchsorted",
        """
def zigzag(tokens, p):
    def from_outside(positions, sizes):
        if not sizes:
            return []
        early, late = sizes[0], sizes[-1]
        inner = positions[early : len(positions) - late]
        own = positions[:early] + positions[len(positions) - late :]
        return [own, *from_outside(inner, sizes[1:-1])]

    return from_outside(list(range(tokens)), split_evenly(tokens, 2 * p))


def visible(mine, theirs):
    queries, keys = torch.tensor(mine), torch.tensor(theirs)
    first = torch.searchsorted(queries, theirs[0])
    last = torch.searchsorted(keys, mine[-1], right=True)
    return first.item(), last.item()
""",
    ),
    (
        "16.7",
        "unflatten and index_select, fills one result",
        """
def to_heads(x, sizes, group):
    r, p = place_and_size(group)
    parts = [t.clone().contiguous() for t in x.unflatten(0, (p, len(x) // p))]
    arriving = [x.new_zeros(len(x) // p, n, x.shape[-1]) for n in sizes]
    dist.all_to_all(arriving, parts, group=group)
    whole, start = x.new_zeros(len(x) // p, sum(sizes), x.shape[-1]), 0
    for part in arriving:
        whole[:, start : start + part.shape[1]] = part
        start += part.shape[1]
    return whole


def to_tokens(x, sizes, group):
    r, p = place_and_size(group)
    places = torch.arange(sum(sizes)).split(list(sizes))
    parts = [x.index_select(1, place).contiguous() for place in places]
    arriving = [torch.zeros_like(parts[r]) for _ in parts]
    dist.all_to_all(arriving, parts, group=group)
    return torch.stack(arriving).flatten(0, 1)


class ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.back = {"sizes": sizes, "group": group}
        return to_heads(x, sizes, group)

    @staticmethod
    def backward(ctx, gradient):
        return to_tokens(gradient, **ctx.back), None, None


class ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, group):
        ctx.back = {"sizes": sizes, "group": group}
        return to_tokens(x, sizes, group)

    @staticmethod
    def backward(ctx, gradient):
        return to_heads(gradient, **ctx.back), None, None


def heads_of(x, sizes, group=None):
    return ToHeads.apply(x, sizes, group)


def tokens_of(x, sizes, group=None):
    return ToTokens.apply(x, sizes, group)
""",
    ),
    (
        "16.8",
        "recursion that doubles; Fraction",
        """
from fractions import Fraction


def spread(k, p):
    missing = p // len(k)
    if missing <= 1:
        return k
    prime = next(n for n in range(2, missing + 1) if missing % n == 0)
    return spread(torch.stack([k] * prime, 1).flatten(0, 1), p)


def ring_traffic(tokens, heads, kv_heads, head_size, p):
    kept = Fraction(1, p)
    return int(4 * 2 * kv_heads * tokens * head_size * (1 - kept))


def ulysses_traffic(tokens, heads, kv_heads, head_size, p):
    own = Fraction(tokens, p) * head_size * 4
    leaves = Fraction(p - 1, p)
    return int((heads + heads + 2 * max(p, kv_heads)) * own * leaves)
""",
    ),
]

CHANGES_THAT_ARE_RIGHT = [
    ("16.2", "receives a clone", "x.contiguous()", "x.detach().clone()"),
    ("16.4", "both messages at once",
     "works = [\n"
     "        dist.isend(block, group_dst=(r + 1) % p, group=group),\n"
     "        dist.irecv(arriving, group_src=(r - 1) % p, group=group),\n"
     "    ]\n",
     "works = dist.batch_isend_irecv([\n"
     "        dist.P2POp(dist.isend, block, group=group, group_peer=(r + 1) % p),\n"
     "        dist.P2POp(dist.irecv, arriving, group=group, group_peer=(r - 1) % p),\n"
     "    ])\n"),
    ("16.5", "in place", "        dq = dq + own_dq\n",
     "        dq = own_dq.clone() if i == 0 else dq.add_(own_dq)\n"),
    ("16.5", "the scale first", "return ds @ k * scale, ds.transpose(-2, -1) @ q * scale, dv",
     "ds = ds * scale\n    return ds @ k, ds.transpose(-2, -1) @ q, dv"),
    ("16.7", "all to all, not waiting at once", "dist.all_to_all(arriving, parts, group=group)",
     "dist.all_to_all(arriving, parts, group=group, async_op=True).wait()"),
]  # fmt: skip
