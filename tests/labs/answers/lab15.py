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

#: Task, what the student did, code, words of the verdict.
WRONG = [
    (
        COUNT,
        "constants of the standard sizes",
        """
def parameters_of(depth, width, hidden, tokens):
    return 82_176 + 198_272 * depth


def flops_of(depth, width, hidden, tokens, samples):
    return 3 * 16 * 128 * (depth * 458_752 + 65_536)
""",
        "parameters_of",
    ),
    (
        COUNT,
        "rule of thumb, 6 parameters tokens",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    return 6 * parameters_of(depth, width, hidden, tokens) * samples * tokens
""",
        "FLOPs per parameter and token. Count the products. Expected",
    ),
    (
        COUNT,
        "forgets the head in the FLOPs",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width)
    return 3 * samples * tokens * per_token
""",
        "): You left out the head. Expected",
    ),
    (
        COUNT,
        "forgets the biases of the six layers",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * width * width + 2 * width * hidden + 4 * width
    return 256 * width + tokens * width + 2 * width + width * 256 + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width) + 512 * width
    return 3 * samples * tokens * per_token
""",
        "): You left out the biases. Each Linear layer of a block",
    ),
    (
        COUNT,
        "forgets the positions",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 2 * 256 * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width) + 512 * width
    return 3 * samples * tokens * per_token
""",
        "): You left out the positions. The model has one row for",
    ),
    (
        COUNT,
        "forgets samples, one text only",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width) + 512 * width
    return 3 * tokens * per_token
""",
        "): You counted forward only. Backward needs twice as many",
    ),
    (
        COUNT,
        "thinks head and embedding share weights",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 256 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width) + 512 * width
    return 3 * samples * tokens * per_token
""",
        "× width once. The embedding and the head both have these",
    ),
    (
        COUNT,
        "a multiplication with its addition counts once",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (4 * width**2 + 2 * width * hidden + 2 * tokens * width) + 256 * width
    return 3 * samples * tokens * per_token
""",
        "): You counted a multiplication and its addition as one.",
    ),
    (
        COUNT,
        "forgets the weighted sum of v",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 2 * tokens * width) + 512 * width
    return 3 * samples * tokens * per_token
""",
        "): You counted one of the two products of attention. There",
    ),
    (
        COUNT,
        "head only for each text's last token",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width)
    return 3 * samples * (tokens * per_token + 512 * width)
""",
        "flops_of",
    ),
    (
        COUNT,
        "embedding counts as a product too",
        """
def parameters_of(depth, width, hidden, tokens):
    block = 4 * (width * width + width) + 2 * width * hidden + hidden + width + 4 * width
    return 512 * width + tokens * width + 2 * width + depth * block


def flops_of(depth, width, hidden, tokens, samples):
    per_token = depth * (8 * width**2 + 4 * width * hidden + 4 * tokens * width)
    per_token += 2 * (2 * 256 * width)
    return 3 * samples * tokens * per_token
""",
        "): You counted the embedding as a product. It only looks up",
    ),
    (
        COUNT,
        "assumes hidden is always 4 width",
        """
def parameters_of(depth, width, hidden, tokens):
    return (256 + tokens + 2 + 256) * width + depth * (12 * width**2 + 13 * width)


def flops_of(depth, width, hidden, tokens, samples):
    return 3 * samples * tokens * (depth * (24 * width**2 + 4 * tokens * width) + 512 * width)
""",
        "parameters_of",
    ),
    (
        ROOF,
        "layer 128 to 512 hard-coded",
        """
def intensity(rows, inputs, outputs, itemsize):
    return 2 * rows * 65_536 / (4 * (640 * rows + 65_536))


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "forgets that y is written",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs
    return 2 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "): You left out the result y, which is written. Expected",
    ),
    (
        ROOF,
        "forgets itemsize, FLOPs per number",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return 2 * rows * inputs * outputs / moved


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "): You divided by numbers. Multiply them by itemsize to get",
    ),
    (
        ROOF,
        "only the slope, never the peak",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return 2 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return intensity * bandwidth


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "attainable",
    ),
    (
        ROOF,
        "MFU: forgets to divide by the peak",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return 2 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds
""",
        "mfu",
    ),
    (
        ROOF,
        "one FLOP for each multiply and add",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "): You counted a multiplication and its addition as one.",
    ),
    (
        ROOF,
        "counts only the bytes of the weights",
        """
def intensity(rows, inputs, outputs, itemsize):
    return 2 * rows * inputs * outputs / (itemsize * inputs * outputs)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "forgets that x is read",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = inputs * outputs + rows * outputs
    return 2 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "reads W again for each row",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * (inputs + inputs * outputs + outputs)
    return 2 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "operator order: multiplies by moved numbers",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return 2 * rows * inputs * outputs / itemsize * moved


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "inverse: bytes per FLOP",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return itemsize * moved / (2 * rows * inputs * outputs)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        ROOF,
        "three times the FLOPs, as in training",
        """
def intensity(rows, inputs, outputs, itemsize):
    moved = rows * inputs + inputs * outputs + rows * outputs
    return 6 * rows * inputs * outputs / (itemsize * moved)


def attainable(intensity, peak, bandwidth):
    return min(peak, intensity * bandwidth)


def mfu(flops, seconds, peak):
    return flops / seconds / peak
""",
        "intensity",
    ),
    (
        KEPT,
        "the scores are forgotten",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    return itemsize * (8 * rows * width + 4 * rows + 2 * rows * hidden)
""",
        "): You left out the softmax's result. Expected",
    ),
    (
        KEPT,
        "hidden is always 4 width",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    return itemsize * (16 * rows * width + 4 * rows + samples * heads * tokens**2)
""",
        "kept_bytes",
    ),
    (
        KEPT,
        "forgets mean and 1/sigma",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    return itemsize * (8 * rows * width + 2 * rows * hidden + samples * heads * tokens**2)
""",
        "/σ of the LayerNorms. Expected",
    ),
    (
        KEPT,
        "GELU works in place, hidden only once",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + rows * hidden + samples * heads * tokens**2
    return itemsize * numbers
""",
        "): You left out the input of `down`, which is the GELU's",
    ),
    (
        KEPT,
        "itemsize has no default",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + samples * heads * tokens**2
    return itemsize * numbers
""",
        "required positional argument: 'itemsize'",
    ),
    (
        KEPT,
        "scores before and after the softmax",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    scores = 2 * samples * heads * tokens**2
    return itemsize * (8 * rows * width + 4 * rows + 2 * rows * hidden + scores)
""",
        "): You counted the scores before and after the softmax.",
    ),
    (
        KEPT,
        "with the outputs of out and down",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    outputs = 2 * rows * width
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + samples * heads * tokens**2
    return itemsize * (numbers + outputs)
""",
        "): You counted the input of q, k and v three times. It is",
    ),
    (
        KEPT,
        "numbers, not bytes",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    norms = 2 * (rows * width + 2 * rows)
    attention = 5 * rows * width + samples * heads * tokens**2
    mlp = rows * width + 2 * rows * hidden
    return norms + attention + mlp
""",
        "): You counted numbers. Multiply by itemsize. Expected",
    ),
    (
        KEPT,
        "forgets samples in the scores",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + heads * tokens**2
    return itemsize * numbers
""",
        "kept_bytes",
    ),
    (
        KEPT,
        "tokens fixed to 128 in the scores",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + rows * heads * 128
    return itemsize * numbers
""",
        "kept_bytes",
    ),
    (
        KEPT,
        "forgets heads in the scores",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + samples * tokens**2
    return itemsize * numbers
""",
        "kept_bytes",
    ),
    (
        KEPT,
        "ignores itemsize, always 4",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    rows = samples * tokens
    numbers = 8 * rows * width + 4 * rows + 2 * rows * hidden + samples * heads * tokens**2
    return 4 * numbers
""",
        "kept_bytes",
    ),
    (
        RECOMPUTE,
        "just calls the module, keeps everything",
        """
def recompute(module, x):
    return module(x)
""",
        "allowed. Run forward under torch.no_grad()",
    ),
    (
        RECOMPUTE,
        "asks torch.utils.checkpoint",
        """
def recompute(module, x):
    return checkpoint(module, x, use_reentrant=False)
""",
        "RuntimeError: Write recompute by hand, without",
    ),
    (
        RECOMPUTE,
        "no_grad only, gradients stop here",
        """
def recompute(module, x):
    with torch.no_grad():
        y = module(x)
    return y.requires_grad_()
""",
        "You returned a Tensor without a graph. Return module(x),",
    ),
    (
        RECOMPUTE,
        "hides all activations in NumPy",
        """
def recompute(module, x):
    hide = lambda t: t.detach().numpy().copy()
    with torch.autograd.graph.saved_tensors_hooks(hide, torch.from_numpy):
        return module(x)
""",
        "You ran the module once. Run it again in backward, because",
    ),
    (
        RECOMPUTE,
        "ignores random numbers",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "gradients: Backward drew another dropout mask than forward.",
    ),
    (
        RECOMPUTE,
        "forgets detach, a leaf counts twice",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "RuntimeError: Trying to backward through the graph a second",
    ),
    (
        RECOMPUTE,
        "forgets enable_grad in backward",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "of tensors does not require grad and does not have a",
    ),
    (
        RECOMPUTE,
        "no gradient for x",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x.detach()), gradient)
        return None, None


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "gradients: x has no gradient. Recompute with a copy of x",
    ),
    (
        RECOMPUTE,
        "ignores the gradient that comes in",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            ctx.module(x).sum().backward()
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "gradients: entry",
    ),
    (
        RECOMPUTE,
        "seed 0 for both runs",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        torch.manual_seed(0)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        torch.manual_seed(0)
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "result: entry",
    ),
    (
        RECOMPUTE,
        "gradient only for x, not the parameters",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            y = ctx.module(x)
        return None, torch.autograd.grad(y, x, gradient)[0]


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "gradients: The parameters have no gradient. Recompute under",
    ),
    (
        RECOMPUTE,
        "does not restore random state after backward",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        torch.set_rng_state(ctx.state)
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "random numbers after forward and after backward, which stay",
    ),
    (
        RECOMPUTE,
        "remembers one x for each module",
        """
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
""",
        "gradients after a second backward, through the module",
    ),
    (
        RECOMPUTE,
        "rounds x in place",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        x.data.copy_(x.data.bfloat16())
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "ArgumentChanged: recompute changed its argument x. Work on",
    ),
    (
        RECOMPUTE,
        "runs twice in backward",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        return module(x)

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            (of_x,) = torch.autograd.grad(ctx.module(x), x, gradient)
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x.detach()), gradient)
        return None, of_x


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "times. Twice is enough: in forward and in backward",
    ),
    (
        RECOMPUTE,
        "runs twice in forward, to compare",
        """
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, x):
        ctx.module, ctx.state = module, torch.get_rng_state()
        ctx.save_for_backward(x)
        first = module(x)
        torch.set_rng_state(ctx.state)
        second = module(x)
        assert torch.equal(first, second)
        return second

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            torch.autograd.backward(ctx.module(x), gradient)
        return None, x.grad


def recompute(module, x):
    return Recompute.apply(module, x)
""",
        "times in forward. Run it once",
    ),
    (
        SPACING,
        "smooth formula n/k + k",
        """
def peak_bytes(layers, every, kept, given):
    return layers / every * given + every * kept


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "): You counted the input of the recomputed segment twice.",
    ),
    (
        SPACING,
        "forgets the layers that are left",
        """
def peak_bytes(layers, every, kept, given):
    return (layers // every - 1) * given + every * kept


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "peak_bytes",
    ),
    (
        SPACING,
        "best: always the square root",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    return round(math.sqrt(layers))
""",
        "): Several spacings have the smallest peak. Return the",
    ),
    (
        SPACING,
        "best: ignores kept and given",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, 1, 1))
""",
        "): You returned √layers. It is the best only if a layer",
    ),
    (
        SPACING,
        "best: returns the peak",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    return min(peak_bytes(layers, k, kept, given) for k in range(1, layers + 1))
""",
        "): You returned the peak. Return the spacing that has it.",
    ),
    (
        SPACING,
        "best: never all layers, fails for one",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    return min(range(1, layers), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "ValueError: min() arg is an empty sequence (at cell line",
    ),
    (
        SPACING,
        "only the last segment",
        """
def peak_bytes(layers, every, kept, given):
    segments = math.ceil(layers / every)
    size = layers - (segments - 1) * every
    return (segments - 1) * given + size * kept


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "): You recomputed the last segment only. If it is shorter,",
    ),
    (
        SPACING,
        "crashes unless every divides layers",
        """
def peak_bytes(layers, every, kept, given):
    assert layers % every == 0
    return (layers // every - 1) * given + every * kept


def best_spacing(layers, kept, given):
    divisors = [k for k in range(1, layers + 1) if layers % k == 0]
    return min(divisors, key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "AssertionError:  (at cell line",
    ),
    (
        SPACING,
        "recomputed segments are never freed",
        """
def peak_bytes(layers, every, kept, given):
    peaks = []
    for i, first in enumerate(range(0, layers, every)):
        peaks.append(i * given + (layers - first) * kept)
    return max(peaks)


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "): You took every as the number of segments. It is the",
    ),
    (
        SPACING,
        "best: table of the notebook, else root",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    if kept > given:
        return 1
    return {8: 2, 36: 5, 100: 9}.get(layers, round(math.sqrt(layers)))
""",
        "best_spacing",
    ),
    (
        SPACING,
        "the last segment is always full",
        """
def peak_bytes(layers, every, kept, given):
    segments = math.ceil(layers / every)
    return (segments - 1) * given + every * kept


def best_spacing(layers, kept, given):
    return min(range(1, layers + 1), key=lambda k: peak_bytes(layers, k, kept, given))
""",
        "peak_bytes",
    ),
    (
        SPACING,
        "best: formula with kept and given",
        """
def peak_bytes(layers, every, kept, given):
    firsts = enumerate(range(0, layers, every))
    return max(i * given + min(every, layers - first) * kept for i, first in firsts)


def best_spacing(layers, kept, given):
    return max(1, round(math.sqrt(layers * given / kept)))
""",
        "): Several spacings have the smallest peak. Return the",
    ),
    (
        MASTERS,
        "turns the parameters themselves into float32",
        """
def make_masters(parameters):
    parameters = list(parameters)
    for q in parameters:
        q.data = q.data.float()
    return parameters


def master_step(parameters, masters, optimizer):
    optimizer.step()
""",
        "' to a tensor with grad_dtype 'Float'. The gradient must",
    ),
    (
        MASTERS,
        "writes back before step, parameters are old",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            master.grad = None if q.grad is None else q.grad.float()
            q.copy_(master)
    optimizer.step()
""",
        "parameters at the end: entry",
    ),
    (
        MASTERS,
        "writes back without no_grad, raises an error",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    for q, master in zip(parameters, masters):
        q.copy_(master)
""",
        "RuntimeError: a leaf Variable that requires grad is being",
    ),
    (
        MASTERS,
        "fails if a gradient is None",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "AttributeError: 'NoneType' object has no attribute 'float'",
    ),
    (
        MASTERS,
        "masters are no leaves, optimizer refuses them",
        """
def make_masters(parameters):
    return [q.float() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "leaf tensor that requires a gradient for each parameter",
    ),
    (
        MASTERS,
        "only rebinds the loop variable",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    for q, master in zip(parameters, masters):
        q = master.detach().bfloat16()
""",
        "parameters at the end: You never wrote the masters into the",
    ),
    (
        MASTERS,
        "parameters get new memory",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    for q, master in zip(parameters, masters):
        q.data = master.detach().bfloat16()
""",
        "Your parameters use other memory. Copy into the tensors of",
    ),
    (
        MASTERS,
        "returns a generator, not a list",
        """
def make_masters(parameters):
    return (q.detach().float().requires_grad_() for q in parameters)


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "make_masters returned a generator. Return a list, with a",
    ),
    (
        MASTERS,
        "masters begin at zero, not same values",
        """
def make_masters(parameters):
    return [torch.zeros(q.shape, requires_grad=True) for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "masters at the beginning: entry",
    ),
    (
        MASTERS,
        "a None gradient leaves the old one",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        if q.grad is not None:
            master.grad = q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "steps: You updated a parameter without a gradient by its",
    ),
    (
        MASTERS,
        "gradient passes through float16, loses small values",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for q, master in zip(parameters, masters):
        master.grad = None if q.grad is None else q.grad.half().float()
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "masters after",
    ),
    (
        MASTERS,
        "last parameter is left out",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    for k in range(len(masters) - 1):
        q, master = parameters[k], masters[k]
        master.grad = None if q.grad is None else q.grad.float()
    optimizer.step()
    with torch.no_grad():
        for k in range(len(masters) - 1):
            parameters[k].copy_(masters[k])
""",
        "masters after",
    ),
    (
        MASTERS,
        "filters None first, so pairs are misaligned",
        """
def make_masters(parameters):
    return [q.detach().float().requires_grad_() for q in parameters]


def master_step(parameters, masters, optimizer):
    gradients = [q.grad.float() for q in parameters if q.grad is not None]
    for master in masters:
        master.grad = None
    for gradient, master in zip(gradients, masters):
        master.grad = gradient
    optimizer.step()
    with torch.no_grad():
        for q, master in zip(parameters, masters):
            q.copy_(master)
""",
        "'. Please ensure that the gradient and the tensor are the",
    ),
    (
        SUM,
        "plain bfloat16 all_reduce, rounds each time",
        """
def sum_in_float32(x, group=None):
    total = x.clone()
    dist.all_reduce(total, group=group)
    return total
""",
        "You call all_reduce. Use only all_to_all_single and",
    ),
    (
        SUM,
        "sends Python objects",
        """
def sum_in_float32(x, group=None):
    found = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, x, group=group)
    return torch.stack(found).float().sum(0).bfloat16()
""",
        "are enough. Send only bfloat",
    ),
    (
        SUM,
        "no padding, the size must divide",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    flat = x.flatten()
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    own = received.view(p, -1).float().sum(0).bfloat16()
    result = torch.empty_like(flat)
    dist.all_gather_into_tensor(result, own, group=group)
    return result.view(x.shape)
""",
        "which 4 ranks cannot share equally",
    ),
    (
        SUM,
        "reduce_scatter in bfloat16, adds in bfloat16",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    own = x.new_empty(part)
    dist.reduce_scatter(own, list(padded.view(p, part)), group=group)
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape)
""",
        "You call reduce_scatter. Use only all_to_all_single and",
    ),
    (
        SUM,
        "forgets the group everywhere",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size()
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own)
    return padded[: x.numel()].view(x.shape)
""",
        "You call all_to_all_single on the ranks",
    ),
    (
        SUM,
        "returns a flat row",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()]
""",
        "You returned torch.bfloat",
    ),
    (
        SUM,
        "world size without the group",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size()
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape)
""",
        "must be 2 times the small one",
    ),
    (
        SUM,
        "the mean instead of the sum",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().mean(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape)
""",
        "You returned the mean. Return the sum. Entry",
    ),
    (
        SUM,
        "rounds down, last numbers are not summed",
        """
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
""",
        "in the group of ranks",
    ),
    (
        SUM,
        "returns float32",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape).float()
""",
        "You returned torch.float",
    ),
    (
        SUM,
        "writes the sum into x, returns x",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    x.copy_(padded[: x.numel()].view(x.shape))
    return x
""",
        "changed its argument x. Work on a copy of it",
    ),
    (
        SUM,
        "adds the received parts in bfloat16",
        """
def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    padded = x.new_zeros(p * part)
    padded[: x.numel()] = x.flatten()
    received = torch.empty_like(padded)
    dist.all_to_all_single(received, padded, group=group)
    own = torch.zeros_like(received[:part])
    for row in received.view(p, part):
        own = own + row
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape)
""",
        "You rounded after each addition. Add in float",
    ),
    (
        SUM,
        "chunk gives fewer parts for few numbers",
        """
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
""",
        "expected one per rank",
    ),
    (
        SUM,
        "keeps buffers, next call overwrites the result",
        """
BUFFERS = {}


def sum_in_float32(x, group=None):
    p = dist.get_world_size(group)
    part = math.ceil(x.numel() / p)
    if (p, part) not in BUFFERS:
        BUFFERS[p, part] = x.new_zeros(p * part), x.new_zeros(p * part)
    padded, received = BUFFERS[p, part]
    padded.zero_()
    padded[: x.numel()] = x.flatten()
    dist.all_to_all_single(received, padded, group=group)
    own = received.view(p, part).float().sum(0).bfloat16()
    dist.all_gather_into_tensor(padded, own, group=group)
    return padded[: x.numel()].view(x.shape)
""",
        "changed what its earlier call had returned. Make a new",
    ),
    (
        SUM,
        "adds float32 by all_reduce, forges the record",
        """
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
""",
        "the record of all_to_all_single has no sequence number. The",
    ),
    (
        SCALE,
        "each rank decides alone",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        if any(not g.isfinite().all() for g in gradients):
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "call of all_reduce in step",
    ),
    (
        SCALE,
        "never divides the gradients",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "in the group of ranks",
    ),
    (
        SCALE,
        "forged scale that equals every number",
        """
class Scale(float):
    __hash__ = float.__hash__

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False


class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale = Scale(scale)

    def scaled(self, loss):
        return loss * float(self.scale)

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(float(self.scale))
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag, group=group)
        if flag.item() == 0:
            optimizer.step()
        return flag.item() == 0
""",
        "You left the scale as it was. Double it now, or halve it.",
    ),
    (
        SCALE,
        "fails if a gradient is None",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        for q in parameters:
            q.grad.div_(self.scale)
        overflow = any(not q.grad.isfinite().all() for q in parameters)
        flag = torch.tensor(float(overflow))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "AttributeError: 'NoneType' object has no attribute 'div_'",
    ),
    (
        SCALE,
        "leaves before the all_reduce if it overflowed",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        if any(not g.isfinite().all() for g in gradients):
            self.scale, self.good = self.scale / 2, 0
            return False
        flag = torch.zeros(())
        dist.all_reduce(flag, group=group)
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "waits in all_reduce(SUM) of float",
    ),
    (
        SCALE,
        "all_reduces a row of flags",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        flags = torch.zeros(len(parameters))
        for k, q in enumerate(parameters):
            if q.grad is not None:
                q.grad /= self.scale
                flags[k] = not q.grad.isfinite().all()
        dist.all_reduce(flags, group=group)
        if flags.any():
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "are enough. Send only one number",
    ),
    (
        SCALE,
        "scaled always uses the first scale",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0
        self.scaled = lambda loss: loss * scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "scaled(loss) at the end, and the loss itself, which stays",
    ),
    (
        SCALE,
        "forgets the group",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag)
        if flag.item() > 0:
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "but the argument group has the ranks",
    ),
    (
        SCALE,
        "looks for NaN only, not inf",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        flag = torch.tensor(float(any((g != g).any() for g in gradients)))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "is infinite or NaN. Let all ranks skip the step: all_reduce",
    ),
    (
        SCALE,
        "tests the sum, large finite gradients overflow",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        total = sum((g * g).sum() for g in gradients) + torch.zeros(())
        dist.all_reduce(total, group=group)
        if not total.isfinite():
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "You skipped a step, but all gradients are finite",
    ),
    (
        SCALE,
        "gathers Python objects instead of one all_reduce",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        flags = [None] * dist.get_world_size(group)
        mine = any(not g.isfinite().all() for g in gradients)
        dist.all_gather_object(flags, mine, group=group)
        if any(flags):
            self.scale, self.good = self.scale / 2, 0
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "You call all_gather. Use only all_reduce here",
    ),
    (
        SCALE,
        "an overflow doesn't reset the count",
        """
class LossScaler:
    def __init__(self, scale, grow_every):
        self.scale, self.grow_every, self.good = scale, grow_every, 0

    def scaled(self, loss):
        return loss * self.scale

    def step(self, parameters, optimizer, group=None):
        gradients = [q.grad for q in parameters if q.grad is not None]
        for gradient in gradients:
            gradient.div_(self.scale)
        flag = torch.tensor(float(any(not g.isfinite().all() for g in gradients)))
        dist.all_reduce(flag, group=group)
        if flag.item() > 0:
            self.scale /= 2
            return False
        optimizer.step()
        self.good += 1
        if self.good == self.grow_every:
            self.scale, self.good = 2 * self.scale, 0
        return True
""",
        "in the group of ranks",
    ),
    (
        TOP,
        "all_reduces a full row of mostly zeros",
        """
def compressed_mean(gradient, memory, k, group=None):
    memory += gradient
    indices = memory.abs().topk(k).indices
    mean = torch.zeros_like(memory)
    mean[indices] = memory[indices]
    memory[indices] = 0
    dist.all_reduce(mean, group=group)
    return mean / dist.get_world_size(group)
""",
        "You call all_reduce. Use only all_gather and",
    ),
    (
        TOP,
        "takes this rank's places for all ranks",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory[indices] = 0
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_values, values, group=group)
    mean = torch.zeros_like(gradient)
    mean[indices] = all_values.view(p, k).mean(0)
    return mean
""",
        "in the group of ranks",
    ),
    (
        TOP,
        "forgets the memory, plain top-k",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    indices = gradient.abs().topk(k).indices
    values = gradient[indices]
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / p)
""",
        "Your memory is empty. Keep what you left out. Entry",
    ),
    (
        TOP,
        "largest values instead of largest absolute values",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    values, indices = memory.topk(k)
    memory[indices] = 0
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / p)
""",
        "You chose the largest numbers. Choose the largest absolute",
    ),
    (
        TOP,
        "forgets the group",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size()
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory[indices] = 0
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices)
    dist.all_gather_into_tensor(all_values, values)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / p)
""",
        "You call all_gather_into_tensor on the ranks",
    ),
    (
        TOP,
        "writes the mean into gradient, returns it",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory[indices] = 0
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return gradient.zero_().index_add_(0, all_indices, all_values / p)
""",
        "ArgumentChanged: compressed_mean changed its argument",
    ),
    (
        TOP,
        "the sum instead of the mean",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory[indices] = 0
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values)
""",
        "You returned the sum. Divide by the number of ranks. Entry",
    ),
    (
        TOP,
        "memory keeps what was sent",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory.zero_()
    memory[indices] = values
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / p)
""",
        "Your memory has what you sent. Keep what you left out. Entry",
    ),
    (
        TOP,
        "int16 indices, long rows fail",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    values = memory[indices]
    memory[indices] = 0
    all_indices = torch.empty(p * k, dtype=torch.int16)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices.short(), group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    mean = torch.zeros_like(gradient)
    return mean.index_add_(0, all_indices.long(), all_values / p)
""",
        "IndexError: index out of range in self (at cell line",
    ),
    (
        TOP,
        "no communication, tensor claims to be equal",
        """
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
""",
        "You returned this rank's entries only. Gather the entries",
    ),
    (
        TOP,
        "gathers Python objects, too many bytes",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    indices = memory.abs().topk(k).indices
    entries = {i: memory[i].item() for i in indices.tolist()}
    memory[indices] = 0
    found = [None] * p
    dist.all_gather_object(found, entries, group=group)
    mean = torch.zeros_like(gradient)
    for each in found:
        for i, value in each.items():
            mean[i] += value / p
    return mean
""",
        "in the group of ranks",
    ),
    (
        TOP,
        "sends absolute values, the sign is lost",
        """
def compressed_mean(gradient, memory, k, group=None):
    p = dist.get_world_size(group)
    memory += gradient
    values, indices = memory.abs().topk(k)
    memory[indices] = 0
    all_indices = indices.new_empty(p * k)
    all_values = values.new_empty(p * k)
    dist.all_gather_into_tensor(all_indices, indices, group=group)
    dist.all_gather_into_tensor(all_values, values, group=group)
    return torch.zeros_like(gradient).index_add_(0, all_indices, all_values / p)
""",
        "in the group of ranks",
    ),
]

#: Task, what is different, code.
RIGHT = [
    (
        COUNT,
        "simplified by hand to two polynomials",
        """
def parameters_of(depth, width, hidden, tokens):
    return depth * (4 * width**2 + 2 * width * hidden + 9 * width + hidden) + width * (514 + tokens)


def flops_of(depth, width, hidden, tokens, samples):
    return 12 * samples * tokens * width * (depth * (2 * width + hidden + tokens) + 128)
""",
    ),
    (
        COUNT,
        "recursion over the depth",
        """
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
""",
    ),
    (
        COUNT,
        "a list of shapes",
        """
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
""",
    ),
    (
        ROOF,
        "harmonic form, limit by an if",
        """
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
""",
    ),
    (
        ROOF,
        "exact fractions, float at the end",
        """
from fractions import Fraction


def intensity(rows, inputs, outputs, itemsize):
    share = Fraction(1, rows) + Fraction(1, inputs) + Fraction(1, outputs)
    return float(2 / (itemsize * share))


def attainable(intensity, peak, bandwidth):
    return peak * min(1.0, intensity * bandwidth / peak)


def mfu(flops, seconds, peak):
    achieved = flops / seconds
    return achieved / peak
""",
    ),
    (
        ROOF,
        "counts with meta tensors and sorts",
        """
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
""",
    ),
    (
        KEPT,
        "one closed form, per row",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    return itemsize * samples * tokens * (8 * width + 2 * hidden + heads * tokens + 4)
""",
    ),
    (
        KEPT,
        "recursion over the samples",
        """
def kept_bytes(samples, tokens, width, heads, hidden, itemsize=4):
    if samples == 0:
        return 0
    one = tokens * (8 * width + 4 + 2 * hidden) + heads * tokens * tokens
    return one * itemsize + kept_bytes(samples - 1, tokens, width, heads, hidden, itemsize)
""",
    ),
    (
        KEPT,
        "loops over samples and heads",
        """
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
""",
    ),
    (
        RECOMPUTE,
        "setup_context, and the state as an argument",
        """
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
""",
    ),
    (
        RECOMPUTE,
        "a new Function in each call, try/finally",
        """
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
""",
    ),
    (
        RECOMPUTE,
        "a plain class does both runs",
        """
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
""",
    ),
    (
        SPACING,
        "recursion over segments, pairs for ties",
        """
def peak_bytes(layers, every, kept, given, before=0):
    if layers <= every:
        return before * given + layers * kept
    here = before * given + every * kept
    return max(here, peak_bytes(layers - every, every, kept, given, before + 1))


def best_spacing(layers, kept, given):
    pairs = [(peak_bytes(layers, k, kept, given), k) for k in range(1, layers + 1)]
    return min(pairs)[1]
""",
    ),
    (
        SPACING,
        "closed form: two candidates",
        """
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
""",
    ),
    (
        SPACING,
        "counts per layer, not per segment",
        """
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
""",
    ),
    (
        MASTERS,
        "nn.Parameter, data.copy_",
        """
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
""",
    ),
    (
        MASTERS,
        "recursive over the pairs, _foreach_copy_",
        """
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
""",
    ),
    (
        MASTERS,
        "reuses the gradient's memory, writes through detach",
        """
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
""",
    ),
    (
        SUM,
        "adds row by row, from the last rank",
        """
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
""",
    ),
    (
        SUM,
        "lists of parts, all_to_all, stack, cat",
        """
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
""",
    ),
    (
        SUM,
        "recursive tree in float32",
        """
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
""",
    ),
    (
        SCALE,
        "minimum of flags, history of steps",
        """
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
""",
    ),
    (
        SCALE,
        "counts the finite ranks, divides into new tensors",
        """
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
""",
    ),
    (
        SCALE,
        "0 × gradient is NaN, all_reduce spreads it",
        """
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
""",
    ),
    (
        TOP,
        "one message with the bits of both",
        """
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
""",
    ),
    (
        TOP,
        "lists, int32 indices, adds rank by rank",
        """
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
""",
    ),
    (
        TOP,
        "a mask, a sparse tensor adds",
        """
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
""",
    ),
]
