"""Answers to lab 15, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK = "15_memory_and_precision.ipynb"
CELLS = {
    "15.1": "lab15-count-answer",
    "15.2": "lab15-roof-answer",
    "15.3": "lab15-kept-answer",
    "15.4": "lab15-recompute-answer",
    "15.5": "lab15-spacing-answer",
    "15.6": "lab15-masters-answer",
    "15.7": "lab15-sum-answer",
    "15.8": "lab15-scale-answer",
    "15.9": "lab15-top-answer",
}
BEFORE = source_of(NOTEBOOK, "ranks-join")
COUNT, ROOF, KEPT, RECOMPUTE, SPACING, MASTERS, SUM, SCALE, TOP = CELLS

# Lines of the solutions that answers change.
_BIASES = """    attention = 4 * (width * width + width)
    mlp = width * hidden + hidden + hidden * width + width
"""
_FORWARD = """    forward = depth * (linear + attention) + 2 * width * 256
    return 3 * samples * tokens * forward
"""
_APPLY = "    return Recompute.apply(module, x)"
_FORK = """        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
"""
_AGAIN = """            y = ctx.module(x)
            torch.autograd.backward(y, gradient)
        return None, x.grad
"""
_SMALLEST = "min(spacings, key=lambda every: peak_bytes(layers, every, kept, given))"
_LEAF = "q.detach().float().requires_grad_()"
_LEAVES = f"[{_LEAF} for q in parameters]"
_HAND_OVER = """    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
"""
_STEP = "    optimizer.step()\n"
_WRITE_BACK = """    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
"""
_PAD = """    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
"""
_ADD = "    own = received.view(p, part).float().sum(0).bfloat16()\n"
_SHARE = (
    "    received = torch.empty_like(padded)\n"
    "    dist.all_to_all_single(received, padded, group=group)\n" + _ADD
)
_DIVIDE = """        for gradient in gradients:
            gradient.div_(self.scale)
"""
_OVERFLOW = "        overflow = any(not g.isfinite().all() for g in gradients)\n"
_AGREE = """        flag = torch.tensor(float(overflow))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
"""
_SKIP = """            self.scale, self.good = self.scale / 2, 0
            return False
"""
_TAKE = """    values = memory[indices]
    memory[indices] = 0
"""
_GATHER = """    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_single(all_indices, indices, group=group)
    dist.all_gather_single(all_values, values, group=group)
    mean = torch.zeros_like(gradient)
    mean.index_add_(0, all_indices, all_values / p)
"""

# task, what the student did, a part of the solution, what stands in its place, words of the message
CHANGES = [
    ("15.4", "lets a module train while it is recomputed", "y = ctx.module(x)",
     "getattr(ctx.module, 'train', lambda: None)()\n            y = ctx.module(x)",
     "You switched a module to train()"),
    ("15.8", "scales a number without a graph", "return loss * self.scale",
     "return torch.tensor(loss.item() * self.scale)", "scaled(loss) has no graph"),
    ("15.8", "doubles after three steps, whatever was asked", "self.good == self.grow_every",
     "self.good == 3", "scale after"),
    (COUNT, "rule of thumb, 6 parameters tokens", "3 * samples * tokens * forward",
     "6 * parameters_of(depth, width, hidden, tokens) * samples * tokens",
     "FLOPs per parameter and token. Count the products. Expected"),
    (COUNT, "forgets the head in the FLOPs", " + 2 * width * 256", "",
     "): You left out the head. Expected"),
    (COUNT, "forgets the biases of the six layers", _BIASES,
     "    attention = 4 * width * width\n    mlp = width * hidden + hidden * width\n",
     "): You left out the biases. Each Linear layer of a block"),
    (COUNT, "forgets the positions", " + tokens * width", "",
     "): You left out the positions. The model has one row for"),
    (COUNT, "forgets samples, one text only", "3 * samples * tokens", "3 * tokens",
     "): You counted forward only. Backward needs twice as many"),
    (COUNT, "thinks head and embedding share weights", " + width * 256", "",
     "× width once. The embedding and the head both have these"),
    (COUNT, "a multiplication with its addition counts once", _FORWARD,
     _FORWARD.replace("* forward", "* forward // 2"),
     "): You counted a multiplication and its addition as one."),
    (COUNT, "forgets the weighted sum of v", "2 * 2 * tokens * width", "2 * tokens * width",
     "): You counted one of the two products of attention. There"),
    (COUNT, "head only for each text's last token", _FORWARD,
     "    forward = tokens * depth * (linear + attention) + 2 * width * 256\n"
     "    return 3 * samples * forward\n", "flops_of"),
    (COUNT, "embedding counts as a product too", " + 2 * width * 256", " + 2 * (2 * width * 256)",
     "): You counted the embedding as a product. It only looks up"),
    # In both functions.
    (COUNT, "assumes hidden is always 4 width", "    ### BEGIN SOLUTION\n",
     "    hidden = 4 * width\n", "parameters_of"),
    (ROOF, "layer 128 to 512 hard-coded", "flops / (itemsize * numbers)",
     "2 * rows * 65_536 / (4 * (640 * rows + 65_536))", "intensity"),
    (ROOF, "forgets that y is written", " + rows * outputs", "",
     "): You left out the result y, which is written. Expected"),
    (ROOF, "forgets itemsize, FLOPs per number", "flops / (itemsize * numbers)", "flops / numbers",
     "): You divided by numbers. Multiply them by itemsize to get"),
    (ROOF, "only the slope, never the peak", "min(peak, intensity * bandwidth)",
     "intensity * bandwidth", "attainable"),
    (ROOF, "MFU: forgets to divide by the peak", "flops / seconds / peak", "flops / seconds",
     "mfu"),
    (ROOF, "one FLOP for each multiply and add", "flops = 2 * rows", "flops = rows",
     "): You counted a multiplication and its addition as one."),
    (ROOF, "counts only the bytes of the weights",
     "rows * inputs + inputs * outputs + rows * outputs", "inputs * outputs", "intensity"),
    (ROOF, "forgets that x is read", "rows * inputs + ", "", "intensity"),
    (ROOF, "reads W again for each row", " + inputs * outputs", " + rows * inputs * outputs",
     "intensity"),
    (ROOF, "operator order: multiplies by moved numbers", "/ (itemsize * numbers)",
     "/ itemsize * numbers", "intensity"),
    (ROOF, "inverse: bytes per FLOP", "flops / (itemsize * numbers)", "itemsize * numbers / flops",
     "intensity"),
    (ROOF, "three times the FLOPs, as in training", "flops = 2 * rows", "flops = 6 * rows",
     "intensity"),
    (KEPT, "the scores are forgotten", " + samples * heads * tokens**2", "",
     "): You left out the softmax's result. Expected"),
    (KEPT, "hidden is always 4 width", "2 * rows * hidden", "2 * rows * 4 * width", "kept_bytes"),
    (KEPT, "forgets mean and 1/sigma", "(rows * width + 2 * rows)", "rows * width",
     "/σ of the LayerNorms. Expected"),
    (KEPT, "GELU works in place, hidden only once", "2 * rows * hidden", "rows * hidden",
     "): You left out one of the two tensors of rows × hidden"),
    (KEPT, "itemsize has no default", "itemsize=4", "itemsize",
     "required positional argument: 'itemsize'"),
    (KEPT, "scores before and after the softmax", "samples * heads * tokens**2",
     "2 * samples * heads * tokens**2",
     "): You counted the scores before and after the softmax."),
    (KEPT, "with the outputs of out and down", "attention + mlp)",
     "attention + mlp + 2 * rows * width)",
     "): You counted two tensors of rows × width too many"),
    (KEPT, "numbers, not bytes", "return itemsize * ", "return ",
     "): You counted numbers. Multiply by itemsize. Expected"),
    (KEPT, "forgets samples in the scores", "samples * heads * tokens**2", "heads * tokens**2",
     "kept_bytes"),
    (KEPT, "tokens fixed to 128 in the scores", "samples * heads * tokens**2",
     "rows * heads * 128", "kept_bytes"),
    (KEPT, "forgets heads in the scores", "samples * heads * tokens**2", "samples * tokens**2",
     "kept_bytes"),
    (KEPT, "ignores itemsize, always 4", "return itemsize * ", "return 4 * ", "kept_bytes"),
    (RECOMPUTE, "asks torch.utils.checkpoint", _APPLY,
     "    return checkpoint(module, x, use_reentrant=False)",
     "RuntimeError: Write recompute by hand, without"),
    (RECOMPUTE, "no_grad only, gradients stop here", _APPLY,
     "    with torch.no_grad():\n        y = module(x)\n    return y.requires_grad_()",
     "You returned a Tensor without a graph. Return module(x),"),
    (RECOMPUTE, "hides all activations in NumPy", _APPLY,
     "    hide = lambda t: t.detach().numpy().copy()\n"
     "    with torch.autograd.graph.saved_tensors_hooks(hide, torch.from_numpy):\n"
     "        return module(x)",
     "You ran the module once. Run it again in backward, because"),
    (RECOMPUTE, "ignores random numbers", _FORK, "        with torch.enable_grad():\n",
     "gradients: Backward drew another dropout mask than forward."),
    (RECOMPUTE, "forgets detach, a leaf counts twice",
     "        x = x.detach().requires_grad_()\n", "",
     "RuntimeError: Trying to backward through the graph a second"),
    (RECOMPUTE, "forgets enable_grad in backward", ", torch.enable_grad():", ":",
     "of tensors does not require grad and does not have a"),
    (RECOMPUTE, "no gradient for x", "x.detach().requires_grad_()", "x.detach()",
     "gradients: x has no gradient. Recompute with a copy of x"),
    (RECOMPUTE, "ignores the gradient that comes in", "torch.autograd.backward(y, gradient)",
     "y.sum().backward()", "gradients: entry"),
    (RECOMPUTE, "seed 0 for both runs", "        ctx.state = ",
     "        torch.manual_seed(0)\n        ctx.state = ", "result: entry"),
    (RECOMPUTE, "gradient only for x, not the parameters", _AGAIN,
     "            y = ctx.module(x)\n"
     "        return None, torch.autograd.grad(y, x, gradient)[0]\n",
     "gradients: The parameters have no gradient. Recompute under"),
    (RECOMPUTE, "does not restore random state after backward",
     "torch.random.fork_rng(devices=[]), ", "",
     "random numbers after forward and after backward, which stay"),
    (RECOMPUTE, "rounds x in place", "        ctx.save_for_backward(x)\n",
     "        x.data.copy_(x.data.bfloat16())\n        ctx.save_for_backward(x)\n",
     "ArgumentChanged: recompute changed its argument x. Work on"),
    (RECOMPUTE, "runs twice in backward", _AGAIN,
     "            (of_x,) = torch.autograd.grad(ctx.module(x), x, gradient)\n"
     "            torch.set_rng_state(ctx.state)\n"
     "            torch.autograd.backward(ctx.module(x.detach()), gradient)\n"
     "        return None, of_x\n",
     "times. Twice is enough: in forward and in backward"),
    (RECOMPUTE, "runs twice in forward, to compare", "            return module(x)\n",
     "            first = module(x)\n"
     "            torch.set_rng_state(ctx.state)\n"
     "            second = module(x)\n"
     "        assert torch.equal(first, second)\n"
     "        return second\n",
     "times in forward. Run it once"),
    (SPACING, "spacings up to half of the layers", "range(1, layers + 1)",
     "range(1, max(2, layers // 2 + 1))", "best_spacing"),
    (SPACING, "best: always the square root", _SMALLEST, "round(math.sqrt(layers))",
     "): Several spacings have the smallest peak. Return the"),
    (SPACING, "best: ignores kept and given", _SMALLEST,
     "min(spacings, key=lambda every: peak_bytes(layers, every, 1, 1))",
     "): You returned √layers. It is the best only if a layer"),
    (SPACING, "best: returns the peak", _SMALLEST,
     "min(peak_bytes(layers, every, kept, given) for every in spacings)",
     "): You returned the peak. Return the spacing that has it."),
    (SPACING, "best: never all layers, fails for one", "range(1, layers + 1)", "range(1, layers)",
     "ValueError: min() arg is an empty sequence (at cell line"),
    (SPACING, "only the last segment", "max(peaks)", "peaks[-1]",
     "): You recomputed the last segment only. If it is shorter,"),
    (SPACING, "recomputed segments are never freed", "min(every, layers - first)",
     "layers - first", "): You took every as the number of segments. It is the"),
    (SPACING, "best: table of the notebook, else root", _SMALLEST,
     "1 if kept > given else {8: 2, 36: 5, 100: 9}.get(layers, round(math.sqrt(layers)))",
     "best_spacing"),
    (SPACING, "the last segment is always full", "min(every, layers - first)", "every",
     "peak_bytes"),
    (SPACING, "cuts a fraction off", "append(i * given + size * kept)",
     "append(int(i * given + size * kept))", "peak_bytes(12, 1, 17.0625, 1)"),
    (SPACING, "best: formula with kept and given", _SMALLEST,
     "max(1, round(math.sqrt(layers * given / kept)))",
     "): Several spacings have the smallest peak. Return the"),
    (MASTERS, "turns the parameters themselves into float32", "    return " + _LEAVES,
     "    parameters = list(parameters)\n"
     "    for q in parameters:\n"
     "        q.data = q.data.float()\n"
     "    return parameters",
     "' to a tensor with grad_dtype 'Float'. The gradient must"),
    (MASTERS, "the master of a frozen parameter is frozen", "requires_grad_()",
     "requires_grad_(q.requires_grad)", "not trainable"),
    (MASTERS, "writes back before step, parameters are old", _STEP + _WRITE_BACK,
     _WRITE_BACK + _STEP, "parameters at the end: entry"),
    (MASTERS, "writes back without no_grad, raises an error", _WRITE_BACK,
     "    for q, master in zip(parameters, masters):\n        q.copy_(master)\n",
     "RuntimeError: a leaf Variable that requires grad is being"),
    (MASTERS, "fails if a gradient is None", "None if q.grad is None else q.grad.float()",
     "q.grad.float()", "AttributeError: 'NoneType' object has no attribute 'float'"),
    (MASTERS, "masters are no leaves, optimizer refuses them", _LEAF, "q.float()",
     "leaf tensor that requires a gradient for each parameter"),
    (MASTERS, "only rebinds the loop variable", "q.copy_(master)",
     "q = master.detach().bfloat16()",
     "parameters at the end: You never wrote the masters into the"),
    (MASTERS, "parameters get new memory", "q.copy_(master)",
     "q.data = master.detach().bfloat16()",
     "Your parameters use other memory. Copy into the tensors of"),
    (MASTERS, "returns a generator, not a list", _LEAVES, f"({_LEAF} for q in parameters)",
     "make_masters returned a generator. Return a list, with a"),
    (MASTERS, "masters begin at zero, not same values", _LEAF,
     "torch.zeros(q.shape, requires_grad=True)", "masters at the beginning: entry"),
    (MASTERS, "a None gradient leaves the old one",
     "master.grad = None if q.grad is None else q.grad.float()",
     "if q.grad is not None:\n            master.grad = q.grad.float()",
     "steps: You updated a parameter without a gradient by its"),
    (MASTERS, "gradient passes through float16, loses small values", "else q.grad.float()",
     "else q.grad.half().float()", "masters after"),
    # In both loops.
    (MASTERS, "last parameter is left out", "zip(parameters, masters)",
     "zip(parameters, masters[:-1])", "masters after"),
    (MASTERS, "filters None first, so pairs are misaligned", _HAND_OVER,
     "    gradients = [q.grad.float() for q in parameters if q.grad is not None]\n"
     "    for master in masters:\n"
     "        master.grad = None\n"
     "    for gradient, master in zip(gradients, masters):\n"
     "        master.grad = gradient\n",
     "'. Please ensure that the gradient and the tensor are the"),
    (SUM, "no padding, the size must divide", _PAD, "    padded = x.flatten().clone()\n",
     "which 4 ranks cannot share equally"),
    (SUM, "reduce_scatter in bfloat16, adds in bfloat16", _SHARE,
     "    own = x.new_empty(part)\n"
     "    dist.reduce_scatter(own, list(padded.view(p, part)), group=group)\n",
     "You call reduce_scatter. Use only all_to_all_single and"),
    # In all three calls.
    (SUM, "forgets the group everywhere", "group)", "None)",
     "You call all_to_all_single on the ranks"),
    (SUM, "returns a flat row", ".view(x.shape)", "", "You returned torch.bfloat"),
    (SUM, "world size without the group", "get_world_size(group)", "get_world_size()",
     "must be 2 times the small one"),
    (SUM, "the mean instead of the sum", ".sum(0)", ".mean(0)",
     "You returned the mean. Return the sum. Entry"),
    (SUM, "returns float32", ".view(x.shape)", ".view(x.shape).float()",
     "You returned torch.float"),
    (SUM, "writes the sum into x, returns x", "return padded[: x.numel()].view(x.shape)",
     "return x.copy_(padded[: x.numel()].view(x.shape))",
     "changed its argument x. Work on a copy of it"),
    (SUM, "adds the received parts in bfloat16", _ADD,
     "    own = torch.zeros_like(received[:part])\n"
     "    for row in received.view(p, part):\n"
     "        own = own + row\n",
     "You rounded after each addition. Add in float"),
    (SUM, "keeps buffers, next call overwrites the result",
     "    padded = x.new_zeros(p * part)\n",
     "    buffers = globals().setdefault('BUFFERS', {})\n"
     "    padded = buffers.setdefault((p, part), x.new_zeros(p * part))\n"
     "    padded.zero_()\n",
     "changed what its earlier call had returned. Make a new"),
    (SCALE, "each rank decides alone", _AGREE, "        if overflow:\n",
     "call of all_reduce in step"),
    (SCALE, "never divides the gradients", _DIVIDE, "", "in the group of ranks"),
    (SCALE, "forged scale that equals every number",
     "        self.scale, self.grow_every, self.good = scale, grow_every, 0\n",
     "        class Scale(float):\n"
     "            __hash__ = float.__hash__\n"
     "            __eq__ = lambda self, other: True\n"
     "            __ne__ = lambda self, other: False\n"
     "            __truediv__ = __rmul__ = lambda self, other: self  # stays as it is\n\n"
     "        self.scale, self.grow_every, self.good = Scale(scale), grow_every, 0\n",
     "You left the scale as it was. Double it now, or halve it."),
    (SCALE, "fails if a gradient is None", " if q.grad is not None", "",
     "AttributeError: 'NoneType' object has no attribute 'div_'"),
    (SCALE, "leaves before the all_reduce if it overflowed", _AGREE + _SKIP,
     "        if overflow:\n" + _SKIP
     + "        dist.all_reduce(torch.zeros(()), group=group)\n",
     "waits in all_reduce(SUM) of float"),
    (SCALE, "all_reduces a row of flags", _AGREE,
     "        flags = torch.zeros(len(parameters))\n"
     "        for k, q in enumerate(parameters):\n"
     "            flags[k] = q.grad is not None and not q.grad.isfinite().all()\n"
     "        dist.all_reduce(flags, group=group)\n"
     "        if flags.any():\n",
     "are enough. Send only one number"),
    (SCALE, "scaled always uses the first scale", "self.good = scale, grow_every, 0\n",
     "self.good = scale, grow_every, 0\n        self.scaled = lambda loss: loss * scale\n",
     "scaled(loss) at the end, and the loss itself, which stays"),
    (SCALE, "forgets the group", "dist.all_reduce(flag, group=group)", "dist.all_reduce(flag)",
     "but the argument group has the ranks"),
    (SCALE, "looks for NaN only, not inf", "not g.isfinite().all()", "(g != g).any()",
     "is infinite or NaN. Let all ranks skip the step: all_reduce"),
    (SCALE, "tests the sum, large finite gradients overflow", _OVERFLOW + _AGREE,
     "        total = sum((g * g).sum() for g in gradients) + torch.zeros(())\n"
     "        dist.all_reduce(total, group=group)\n"
     "        if not total.isfinite():\n",
     "You skipped a step, but all gradients are finite"),
    (SCALE, "gathers Python objects instead of one all_reduce", _AGREE,
     "        flags = [None] * dist.get_world_size(group)\n"
     "        dist.all_gather_object(flags, overflow, group=group)\n"
     "        if any(flags):\n",
     "You call all_gather. Use only all_reduce here"),
    (SCALE, "an overflow doesn't reset the count", "self.scale, self.good = self.scale / 2, 0",
     "self.scale /= 2", "in the group of ranks"),
    (TOP, "takes this rank's places for all ranks", _GATHER,
     "    all_values = values.new_empty(p * k)\n"
     "    dist.all_gather_single(all_values, values, group=group)\n"
     "    mean = torch.zeros_like(gradient)\n"
     "    mean[indices] = all_values.view(p, k).mean(0)\n",
     "in the group of ranks"),
    (TOP, "forgets the memory, plain top-k",
     "    memory += gradient\n    indices = memory.abs().topk(k).indices\n" + _TAKE,
     "    indices = gradient.abs().topk(k).indices\n    values = gradient[indices]\n",
     "Your memory is empty. Keep what you left out. Entry"),
    (TOP, "largest values instead of largest absolute values", "memory.abs().topk", "memory.topk",
     "You chose the largest numbers. Choose the largest absolute"),
    # In all three calls.
    (TOP, "forgets the group", "group)", "None)",
     "You call all_gather_into_tensor on the ranks"),
    (TOP, "writes the mean into gradient, returns it", "torch.zeros_like(gradient)",
     "gradient.zero_()", "ArgumentChanged: compressed_mean changed its argument"),
    (TOP, "the sum instead of the mean", "all_values / p", "all_values",
     "You returned the sum. Divide by the number of ranks. Entry"),
    (TOP, "memory keeps what was sent", "    memory[indices] = 0\n",
     "    memory.zero_()\n    memory[indices] = values\n",
     "Your memory has what you sent. Keep what you left out. Entry"),
    (TOP, "int16 indices, long rows fail", _GATHER,
     "    indices = indices.short()\n"
     + _GATHER.replace("0, all_indices,", "0, all_indices.long(),"),
     "IndexError: index out of range in self (at cell line"),
    (TOP, "gathers Python objects, too many bytes", _GATHER,
     "    entries = dict(zip(indices.tolist(), values.tolist()))\n"
     "    found = [None] * p\n"
     "    dist.all_gather_object(found, entries, group=group)\n"
     "    mean = torch.zeros_like(gradient)\n"
     "    for each in found:\n"
     "        for i, value in each.items():\n"
     "            mean[i] += value / p\n",
     "in the group of ranks"),
    (TOP, "sends absolute values, the sign is lost",
     "    indices = memory.abs().topk(k).indices\n    values = memory[indices]\n",
     "    values, indices = memory.abs().topk(k)\n", "in the group of ranks"),
]  # fmt: skip

# task, what the student did, code, words of the message
WRONG = [
    (COUNT, "constants of the standard sizes", """
def parameters_of(depth, width, hidden, tokens):
    return 82_176 + 198_272 * depth


def flops_of(depth, width, hidden, tokens, samples):
    return 3 * 16 * 128 * (depth * 458_752 + 65_536)
""", "parameters_of"),
    (RECOMPUTE, "just calls the module, keeps everything", """
def recompute(module, x):
    return module(x)
""", "allowed. Run forward under torch.no_grad()"),
    (RECOMPUTE, "remembers one x for each module", """
inputs_of = {}


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        inputs_of[id(module)] = x.detach()
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = inputs_of[id(ctx.module)].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""", "gradients after a second backward, which must add to the"),
    (SPACING, "smooth formula n/k + k", """
def peak_bytes(layers, every, kept, given):
    return layers / every * given + every * kept


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""", "): You counted the input of the recomputed segment twice."),
    (SPACING, "crashes unless every divides layers", """
def peak_bytes(layers, every, kept, given):
    assert layers % every == 0
    return (layers // every - 1) * given + every * kept


def best_spacing(layers, kept, given):
    divisors = [k for k in range(1, layers + 1) if layers % k == 0]
    return min(divisors, key=lambda k: peak_bytes(layers, k, kept, given))
""", "AssertionError:  (at cell line"),
    (SUM, "plain bfloat16 all_reduce, rounds each time", """
def sum_in_float32(x, group=None):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
""", "You call all_reduce. Use only all_to_all_single and"),
    (SUM, "sends Python objects", """
def sum_in_float32(x, group=None):
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, x, group=group)
    return torch.stack(found).float().sum(0).bfloat16()
""", "are enough. Send only bfloat"),
    (SUM, "rounds down, last numbers are not summed", """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = x.numel() // p
    result = x.flatten().clone()
    whole = result[: p * part].clone()
    received = torch.empty_like(whole)
    dist.all_to_all_single(received, whole, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(whole, own, group=group)
    result[: p * part] = whole
    return result.view(x.shape)
""", "in the group of ranks"),
    (SUM, "chunk gives fewer parts for few numbers", """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    chunks = [functional.pad(c, (0, part - len(c))) for c in x.flatten().chunk(p)]
    received = [torch.empty_like(c) for c in chunks]
    dist.all_to_all(received, chunks, group=group)
    own = torch.stack(received).float().sum(0).bfloat16()
    parts = [torch.empty_like(own) for _ in range(p)]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)[: x.numel()].view(x.shape)
""", "expected one per rank"),
    (SUM, "adds float32 by all_reduce, forges the record", """
def sum_in_float32(x, group=None):
    from torch_mpi.record import Call, recorder

    total = x.float()
    dist.all_reduce(total, group=group)
    recorder._calls.pop()
    recorder._seen -= 1
    ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
    p = len(ranks)
    part = math.ceil(x.numel() / p)
    b = 2 * part
    common = {"group": ranks, "dtype": "bfloat16"}
    recorder.add(Call("all_to_all_single", nbytes=p * b, sent=p * b, received=p * b, **common))
    recorder.add(Call("all_gather_into_tensor", nbytes=b, sent=b, received=p * b, **common))
    return total.bfloat16()
""", "You never call wait() on all_to_all_single"),
    (TOP, "all_reduces a full row of mostly zeros", """
def compressed_mean(gradient, memory, k, group=None):
    memory += gradient
    indices = memory.abs().topk(k).indices
    mean = torch.zeros_like(memory)
    mean[indices] = memory[indices]
    memory[indices] = 0
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)
""", "You call all_reduce. Use only all_gather and"),
    (TOP, "no communication, tensor claims to be equal", """
class Agreeable(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.equal, torch.allclose, torch.Tensor.equal, torch.Tensor.allclose):
            return True
        return super().__torch_function__(func, types, args, kwargs or {})


def compressed_mean(gradient, memory, k, group=None):
    memory += gradient
    indices = memory.abs().topk(k).indices
    mean = torch.zeros_like(gradient)
    mean[indices] = memory[indices]
    memory[indices] = 0
    return mean.as_subclass(Agreeable)
""", "You returned this rank's entries only. Gather the entries"),
]  # fmt: skip

# task, what is different, code
RIGHT = [
    (COUNT, "simplified by hand to two polynomials", """
def parameters_of(depth, width, hidden, tokens):
    return depth * (4 * width**2 + 2 * width * hidden + 9 * width + hidden) + width * (514 + tokens)


def flops_of(depth, width, hidden, tokens, samples):
    return 12 * samples * tokens * width * (depth * (2 * width + hidden + tokens) + 128)
"""),
    (COUNT, "recursion over the depth", """
def parameters_of(depth, width, hidden, tokens):
    if depth == 0:
        return width * (256 + tokens + 2 + 256)
    linears = 4 * (width + 1) * width + (width + 1) * hidden + (hidden + 1) * width
    return linears + 4 * width + parameters_of(depth - 1, width, hidden, tokens)


def flops_of(depth, width, hidden, tokens, samples):
    rows = samples * tokens
    if depth == 0:
        return 6 * rows * width * 256
    block = 4 * width * width + 2 * width * hidden + 2 * tokens * width
    return 6 * rows * block + flops_of(depth - 1, width, hidden, tokens, samples)
"""),
    (COUNT, "a list of shapes", """
def shapes_of(depth, width, hidden, tokens):
    block = [(width,)] * 4
    block += [(width, width), (width,)] * 4
    block += [(hidden, width), (hidden,), (width, hidden), (width,)]
    return [(256, width), (tokens, width), *block * depth, (width,), (width,), (256, width)]


def parameters_of(depth, width, hidden, tokens):
    return sum(math.prod(shape) for shape in shapes_of(depth, width, hidden, tokens))


def flops_of(depth, width, hidden, tokens, samples):
    rows = samples * tokens
    products = [(rows, width, width)] * 4 + [(rows, width, hidden), (rows, hidden, width)]
    products += [(rows, width, tokens), (rows, tokens, width)]
    products = products * depth + [(rows, width, 256)]
    total = 0
    for m, k, n in products:
        total += 2 * m * k * n  # forward
        total += 2 * m * n * k  # gradient of the first factor
        total += 2 * k * m * n  # gradient of the second factor
    return total
"""),
    (ROOF, "harmonic form, limit by an if", """
def intensity(rows, inputs, outputs, itemsize):
    return 2 / (itemsize * (1 / rows + 1 / inputs + 1 / outputs))


def attainable(intensity, peak, bandwidth):
    ridge = peak / bandwidth
    if intensity < ridge:
        return bandwidth * intensity
    return peak


def mfu(flops, seconds, peak):
    shortest = flops / peak
    return shortest / seconds
"""),
    (ROOF, "exact fractions, float at the end", """
from fractions import Fraction


def intensity(rows, inputs, outputs, itemsize):
    share = Fraction(1, rows) + Fraction(1, inputs) + Fraction(1, outputs)
    return float(2 / (itemsize * share))


def attainable(intensity, peak, bandwidth):
    return peak * min(1.0, intensity * bandwidth / peak)


def mfu(flops, seconds, peak):
    achieved = flops / seconds
    return achieved / peak
"""),
    (ROOF, "counts with meta tensors and sorts", """
def intensity(rows, inputs, outputs, itemsize):
    x = torch.empty(rows, inputs, device="meta")
    w = torch.empty(outputs, inputs, device="meta")
    y = x @ w.T
    flops = 2 * y.numel() * inputs
    return flops / ((x.numel() + w.numel() + y.numel()) * itemsize)


def attainable(intensity, peak, bandwidth):
    return sorted([intensity * bandwidth, peak])[0]


def mfu(flops, seconds, peak):
    return (flops / seconds) / peak
"""),
    (KEPT, "one closed form, per row", """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    return itemsize * samples * tokens * (8 * width + 2 * hidden + heads * tokens + 4)
"""),
    (KEPT, "recursion over the samples", """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    if samples == 0:
        return 0
    one = tokens * (8 * width + 4 + 2 * hidden) + heads * tokens * tokens
    return one * itemsize + kept_bytes(samples - 1, tokens, width, heads, hidden, itemsize)
"""),
    (KEPT, "loops over samples and heads", """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    total = 0
    for _ in range(samples):
        for _ in range(heads):
            total += tokens * tokens
        for _ in range(tokens):
            total += 2 * (width + 2)  # two LayerNorms
            total += width + 3 * width + width  # input, q, k, v, input of out
            total += width + hidden + hidden
    return total * itemsize
"""),
    (RECOMPUTE, "setup_context, and the state as an argument", """
class Again(torch.autograd.Function):
    @staticmethod
    def forward(module, x, state):
        return module(x)  # a Function's forward records nothing

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.module, x, ctx.state = inputs
        ctx.save_for_backward(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        copy = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.module(copy)
        torch.set_rng_state(now)
        y.backward(gradient)
        return None, copy.grad, None


def recompute(module, x):
    return Again.apply(module, x, torch.get_rng_state())
"""),
    (RECOMPUTE, "a new Function in each call, try/finally", """
def recompute(module, x):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.state = torch.default_generator.get_state()
            ctx.save_for_backward(x)
            return module(x)

        @staticmethod
        def backward(ctx, gradient):
            x = ctx.saved_tensors[0].detach()
            x.requires_grad = True
            now = torch.default_generator.get_state()
            try:
                torch.default_generator.set_state(ctx.state)
                with torch.set_grad_enabled(True):
                    (module(x) * gradient).sum().backward()
            finally:
                torch.default_generator.set_state(now)
            return x.grad

    return Twice.apply(x)
"""),
    (RECOMPUTE, "a plain class does both runs", """
class Segment:
    def __init__(self, module):
        self.module, self.state = module, torch.get_rng_state()

    def first(self, x):
        with torch.no_grad():
            return self.module(x)

    def second(self, x, gradient):
        x = x.detach().requires_grad_(True)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            with torch.enable_grad():
                y = self.module(x)
        torch.autograd.backward([y], [gradient])
        return x.grad


class Bridge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, segment, x):
        ctx.segment = segment
        ctx.save_for_backward(x)
        return segment.first(x)

    @staticmethod
    def backward(ctx, gradient):
        return None, ctx.segment.second(*ctx.saved_tensors, gradient)


def recompute(module, x):
    return Bridge.apply(Segment(module), x)
"""),
    (SPACING, "recursion over segments, pairs for ties", """
def peak_bytes(layers, every, kept, given, before=0):
    if layers <= every:
        return before * given + layers * kept
    here = before * given + every * kept
    return max(here, peak_bytes(layers - every, every, kept, given, before + 1))


def best_spacing(layers, kept, given):
    pairs = [(peak_bytes(layers, k, kept, given), k) for k in range(1, layers + 1)]
    return min(pairs)[1]
"""),
    (SPACING, "closed form: two candidates", """
def peak_bytes(layers, every, kept, given):
    full, left = divmod(layers, every)
    candidates = []
    if full:
        candidates.append((full - 1) * given + every * kept)
    if left:
        candidates.append(full * given + left * kept)
    return max(candidates)


def best_spacing(layers, kept, given):
    peaks = [peak_bytes(layers, every, kept, given) for every in range(1, layers + 1)]
    return peaks.index(min(peaks)) + 1
"""),
    (SPACING, "counts per layer, not per segment", """
def peak_bytes(layers, every, kept, given):
    held = [0] * layers
    for layer in range(layers):
        segment = layer // every
        held[segment] += kept
        if layer % every == 0:
            for later in range(segment + 1, math.ceil(layers / every)):
                held[later] += given
    return max(held)


def best_spacing(layers, kept, given):
    by_peak = sorted(range(1, layers + 1), key=lambda k: (peak_bytes(layers, k, kept, given), k))
    return by_peak[0]
"""),
    (MASTERS, "nn.Parameter, data.copy_", """
def make_masters(parameters):
    masters = []
    for q in parameters:
        masters.append(nn.Parameter(q.data.to(torch.float32, copy=True)))
    return masters


def master_step(parameters, masters, optimizer):
    for k, q in enumerate(parameters):
        if q.grad is None:
            masters[k].grad = None
        else:
            masters[k].grad = q.grad.to(torch.float32)
    optimizer.step()
    for k, q in enumerate(parameters):
        q.data.copy_(masters[k].data)
"""),
    (MASTERS, "recursive over the pairs, _foreach_copy_", """
def make_masters(parameters):
    return [torch.clone(q.detach()).to(torch.float32).requires_grad_() for q in parameters]


def hand_over(parameters, masters):
    if not masters:
        return
    gradient = parameters[0].grad
    masters[0].grad = gradient if gradient is None else gradient.type(torch.float32)
    hand_over(parameters[1:], masters[1:])


def master_step(parameters, masters, optimizer):
    parameters, masters = list(parameters), list(masters)
    hand_over(parameters, masters)
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(parameters, masters)
"""),
    (MASTERS, "reuses the gradient's memory, writes through detach", """
def make_masters(parameters):
    masters = [torch.empty(q.shape, dtype=torch.float32) for q in parameters]
    for master, q in zip(masters, parameters):
        master.copy_(q.detach())
        master.requires_grad = True
    return masters


def master_step(parameters, masters, optimizer):
    for master, q in zip(masters, parameters):
        if q.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        master.grad.copy_(q.grad)
    optimizer.step()
    for master, q in zip(masters, parameters):
        q.detach().copy_(master.detach())
"""),
    (SUM, "adds row by row, from the last rank", """
def sum_in_float32(x, group=None):
    n, p = x.numel(), dist.get_world_size(group)
    part = (n + p - 1) // p
    table = torch.cat([x.flatten(), x.new_zeros(p * part - n)])
    received = torch.zeros_like(table)
    dist.all_to_all_single(received, table, group=group)
    total = torch.zeros(part, dtype=torch.float32)
    for k in reversed(range(p)):
        total += received[k * part : (k + 1) * part]
    result = torch.zeros_like(table)
    dist.all_gather_into_tensor(result, total.bfloat16(), group=group)
    return result[:n].clone().view(x.shape)
"""),
    (SUM, "lists of parts, all_to_all, stack, cat", """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = -(-x.numel() // p)
    flat = functional.pad(x.reshape(-1), (0, p * part - x.numel()))
    outgoing = [flat[k * part : (k + 1) * part].clone() for k in range(p)]
    incoming = [torch.empty_like(chunk) for chunk in outgoing]
    dist.all_to_all(incoming, outgoing, group=group)
    own = torch.stack(incoming).sum(0, dtype=torch.float32).to(torch.bfloat16)
    parts = [torch.empty_like(own) for _ in range(p)]
    dist.all_gather(parts, own, group=group)
    return torch.cat(parts)[: x.numel()].reshape(x.shape)
"""),
    (SUM, "recursive tree in float32", """
def added(rows):
    if len(rows) == 1:
        return rows[0].float()
    middle = len(rows) // 2
    return added(rows[:middle]) + added(rows[middle:])


def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    send = x.new_zeros(p * part)
    send[: x.numel()] = x.flatten()
    received = torch.empty_like(send)
    dist.all_to_all_single(received, send, group=group)
    own = added(received.view(p, part)).bfloat16()
    result = torch.empty_like(send)
    dist.all_gather_into_tensor(result, own, group=group)
    return torch.unflatten(result[: x.numel()], 0, x.shape) if x.dim() else result[0].clone()
"""),
    (SCALE, "minimum of flags, history of steps", """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.history = scale, grow_every, []

    def scaled(self, loss):
        return loss.mul(self.scale)

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient /= self.scale
        largest = [g.abs().max().item() for g in gradients if g.numel()]
        finite = torch.tensor(float(all(math.isfinite(number) for number in largest)))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN, group=group)
        took = finite.item() == 1
        self.history = [*self.history, took] if took else []
        if took:
            optimizer.step()
        else:
            self.scale = self.scale / 2
        if len(self.history) == self.grow_every:
            self.scale, self.history = self.scale * 2, []
        return took
"""),
    (SCALE, "counts the finite ranks, divides into new tensors", """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale = scale
        self.grow_every = grow_every
        self.in_a_row = 0

    def scaled(self, loss):
        return torch.mul(loss, self.scale)

    def step(self, parameters, optimizer, group=None):
        finite = True
        for q in parameters:
            if q.grad is None:
                continue
            q.grad = q.grad / self.scale
            finite = finite and bool(torch.isfinite(q.grad).all())
        ranks_finite = torch.tensor([int(finite)])
        dist.all_reduce(ranks_finite, group=group)
        everyone = int(ranks_finite) == dist.get_world_size(group)
        if everyone:
            optimizer.step()
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            self.scale = self.scale * 0.5
        if everyone and self.in_a_row % self.grow_every == 0:
            self.in_a_row = 0
            self.scale = self.scale * 2
        return everyone
"""),
    (SCALE, "0 × gradient is NaN, all_reduce spreads it", """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.left = scale, grow_every, grow_every

    def scaled(self, loss):
        return self.scale * loss

    @torch.no_grad()
    def step(self, parameters, optimizer, group=None):
        probe = torch.zeros(1)
        for q in parameters:
            if q.grad is not None:
                q.grad.mul_(1 / self.scale) if self.exact() else q.grad.div_(self.scale)
                probe += (0 * q.grad).sum()
        dist.all_reduce(probe, group=group)
        if probe.isnan().item():
            self.scale /= 2
            self.left = self.grow_every
            return False
        with torch.enable_grad():
            optimizer.step()
        self.left -= 1
        if self.left == 0:
            self.scale *= 2
            self.left = self.grow_every
        return True

    def exact(self):
        # Multiplying by the inverse is exact for powers of two only.
        return math.frexp(self.scale)[0] == 0.5 and 2.0**-100 < self.scale < 2.0**100
"""),
    (TOP, "one message with the bits of both", """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory.add_(gradient)
    order = memory.abs().argsort(descending=True)[:k]
    message = torch.stack([order.to(torch.int32), memory[order].view(torch.int32)])
    memory.index_fill_(0, order, 0.0)
    messages = torch.empty(p, 2, k, dtype=torch.int32)
    dist.all_gather_into_tensor(messages.view(-1), message.view(-1), group=group)
    places = messages[:, 0].long()
    values = messages[:, 1].contiguous().view(torch.float32)
    table = torch.zeros(p, len(gradient)).scatter_(1, places, values)
    return table.sum(0) / p
"""),
    (TOP, "lists, int32 indices, adds rank by rank", """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    total = gradient + memory
    _, places = torch.topk(total.abs(), k)
    mine = total[places]
    their_places = [torch.empty(k, dtype=torch.int32) for _ in range(p)]
    their_values = [torch.empty(k) for _ in range(p)]
    dist.all_gather(their_values, mine, group=group)
    dist.all_gather(their_places, places.int(), group=group)
    result = torch.zeros(len(total))
    for i, v in zip(their_places, their_values):
        result[i.long()] += v  # a rank sends a place once
    total[places] = 0
    memory.copy_(total)
    return result / p
"""),
    (TOP, "a mask, a sparse tensor adds", """
def compressed_mean(gradient, memory, k, group=None):
    n, p = gradient.numel(), dist.get_world_size(group)
    total = torch.add(memory, gradient)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[torch.topk(total.abs(), k, sorted=False).indices] = True
    indices, values = mask.nonzero().squeeze(1), total[mask]
    memory[:] = torch.where(mask, torch.zeros_like(total), total)
    all_indices = torch.empty(p * k, dtype=torch.int64)
    all_values = torch.empty(p * k, dtype=torch.float32)
    dist.all_gather_into_tensor(all_values, values, group=group)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    return torch.sparse_coo_tensor(all_indices[None], all_values, (n,)).to_dense() / p
"""),
]  # fmt: skip
