"""Answers to lab 11, wrong ones and right ones, that students really give."""

from __future__ import annotations

from lab_tools import source_of

NOTEBOOK, RANKS = "11_hybrid.ipynb", 6
CELLS = {
    "11.1": "lab11-mesh-answer",
    "11.2": "lab11-hybrid-answer",
    "11.3": "lab11-tensor-answer",
    "11.4": "lab11-one-answer",
    "11.5": "lab11-two-answer",
    "11.6": "lab11-three-answer",
    "11.7": "lab11-offload-answer",
    "11.8": "lab11-map-answer",
}
GIVEN = ("ranks-join", "zero-define", "map-define")
BEFORE = "\n".join(source_of(NOTEBOOK, cell) for cell in GIVEN)
MESH, HYBRID, TENSOR, ONE, TWO, THREE, OFFLOAD, MAP = CELLS


#: Wrong answers that are tried on real ranks as well.
ON_RANKS = {"averages over all ranks", "everything at the end", "all gradients kept"}
ON_RANKS |= {"group forgotten", "three rows for a moment"}
#: Ranks that are threads raise other errors there.
ONLY_ON_RANKS = {"not padded", "gathers in float32"}

# Task, what the student did, code, words of the verdict.
WRONG = [
    (
        MESH,
        "own groups only",
        """
def mesh_groups(shape):
    me = dist.get_rank()
    return [dist.new_group(line(me, shape, axis)) for axis in range(len(shape))]
""",
        "You make only this rank's own groups",
    ),
    (
        MESH,
        "two axes only",
        """
def line(rank, shape, axis):
    rows, columns = shape[0], shape[-1]
    i, j = rank // columns, rank % columns
    if axis == 0:
        return [k * columns + j for k in range(rows)]
    return [i * columns + k for k in range(columns)]
""",
        "expected [[0], [1]",
    ),
    (
        MESH,
        "by the library",
        """
def mesh_groups(shape):
    return [dist.group.WORLD for _ in shape]
""",
        "Return groups of dist.new_group with this rank in each",
    ),
    (
        TWO,
        "late binding",
        """
def zero2_hooks(layers, shards, group=None):
    p = dist.get_world_size(group)
    for layer, shard in zip(layers, shards):
        parameters = list(layer.parameters())

        def ready(_):
            if any(q.grad is None for q in parameters):
                return
            row = flat([q.grad for q in parameters], p)
            for q in parameters:
                q.grad = None
            part = torch.empty_like(shard)
            dist.reduce_scatter_single(part, row, group=group)
            shard.grad = part / p

        for q in parameters:
            q.register_post_accumulate_grad_hook(ready)
""",
        "last value of the loop's variables",
    ),
    (
        TWO,
        "a counter that is never reset",
        """
def zero2_hooks(layers, shards, group=None):
    p = dist.get_world_size(group)

    def watch(layer, shard):
        parameters, done = list(layer.parameters()), []

        def ready(parameter):
            done.append(parameter)
            if len(done) != len(parameters):
                return
            row = flat([q.grad for q in parameters], p)
            for q in parameters:
                q.grad = None
            part = torch.empty_like(shard)
            dist.reduce_scatter_single(part, row, group=group)
            shard.grad = part / p

        for q in parameters:
            q.register_post_accumulate_grad_hook(ready)

    for layer, shard in zip(layers, shards):
        watch(layer, shard)
""",
        "your code made none",
    ),
    (
        TWO,
        "everything at the end",
        """
def zero2_hooks(layers, shards, group=None):
    p = dist.get_world_size(group)
    every = [q for layer in layers for q in layer.parameters()]

    def ready(_):
        if any(q.grad is None for q in every):
            return
        for layer, shard in zip(layers, shards):
            row = flat([q.grad for q in layer.parameters()], p)
            part = torch.empty_like(shard)
            dist.reduce_scatter_single(part, row, group=group)
            shard.grad = part / p
        for q in every:
            q.grad = None

    for q in every:
        q.register_post_accumulate_grad_hook(ready)
""",
        "You kept the gradients of layer",
    ),
    (
        THREE,
        "the whole weight is kept",
        """
class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, shard, shape, group):
        weight, bias = whole(shard, shape, group)
        ctx.save_for_backward(x, shard, weight)
        ctx.group = group
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        x, shard, weight = ctx.saved_tensors
        p = dist.get_world_size(ctx.group)
        row = flat([gradient.t() @ x, gradient.sum(0)], p)
        part = torch.empty_like(shard)
        dist.reduce_scatter_single(part, row, group=ctx.group)
        return gradient @ weight, part / p, None, None
""",
        "keep only the shard in ctx",
    ),
    (
        OFFLOAD,
        "all weights at once",
        """
def device_step(worker, group=None):
    rows = [torch.empty(worker.length(n), dtype=worker.dtype) for n in range(len(worker.order))]
    requests = [dist.irecv(row, group_src=1, group=group, tag=n) for n, row in enumerate(rows)]
    sending = None
    for n, row in enumerate(rows):
        requests[n].wait()
        gradient = worker.work(n, row)
        if gradient is not None:
            if sending is not None:
                sending.wait()
            sending = dist.isend(gradient, group_dst=1, group=group, tag=n)
    sending.wait()
    return worker.loss
""",
        "You prefetch too far ahead",
    ),
    (
        OFFLOAD,
        "no prefetch",
        """
def device_step(worker, group=None):
    sending = None
    for n in range(len(worker.order)):
        row = torch.empty(worker.length(n), dtype=worker.dtype)
        dist.recv(row, group_src=1, group=group, tag=n)
        gradient = worker.work(n, row)
        if gradient is not None:
            if sending is not None:
                sending.wait()
            sending = dist.isend(gradient, group_dst=1, group=group, tag=n)
    sending.wait()
    return worker.loss
""",
        "You don't prefetch",
    ),
    (
        OFFLOAD,
        "sends block",
        """
def device_step(worker, group=None):
    def fetch(n):
        row = torch.empty(worker.length(n), dtype=worker.dtype)
        return row, dist.irecv(row, group_src=1, group=group, tag=n)

    coming = fetch(0)
    for n in range(len(worker.order)):
        row, request = coming
        request.wait()
        coming = fetch(n + 1) if n + 1 < len(worker.order) else None
        gradient = worker.work(n, row)
        if gradient is not None:
            dist.send(gradient, group_dst=1, group=group, tag=n)
    return worker.loss
""",
        "You wait for each gradient right after you send it",
    ),
    (
        OFFLOAD,
        "updates at the end",
        """
def host_step(weights, optimizers, order, group=None):
    first = len(weights) - 1
    sends = [dist.isend(weights[i].detach(), group_dst=0, group=group, tag=n)
             for n, i in enumerate(order)]
    for n in range(first, len(order)):
        gradient = torch.empty_like(weights[order[n]])
        dist.recv(gradient, group_src=0, group=group, tag=n)
        weights[order[n]].grad = gradient
    for send in sends:
        send.wait()
    for optimizer in optimizers:
        optimizer.step()
""",
        "You update too late",
    ),
    (
        OFFLOAD,
        "all gradients kept",
        """
def device_step(worker, group=None):
    def fetch(n):
        row = torch.empty(worker.length(n), dtype=worker.dtype)
        return row, dist.irecv(row, group_src=1, group=group, tag=n)

    coming, sends, kept = fetch(0), [], []
    for n in range(len(worker.order)):
        row, request = coming
        request.wait()
        coming = fetch(n + 1) if n + 1 < len(worker.order) else None
        gradient = worker.work(n, row)
        if gradient is not None:
            if sends:
                sends[-1].wait()
            sends.append(dist.isend(gradient, group_dst=1, group=group, tag=n))
            kept.append(gradient)
    sends[-1].wait()
    return worker.loss
""",
        "Keep no row after its piece",
    ),
]

# Task, what the student did, what the solution has, and what stands in its place; words.
CHANGES = [
    (
        "11.5",
        "thinks that a layer has a weight and a bias",
        "parameters = list(layer.parameters())",
        "weight, bias = layer.parameters()\n        parameters = [weight, bias]",
        "A layer may have any number of parameters",
    ),
    (
        MESH,
        "the rank within the line",
        "first + k * stride for k",
        "k for k",
        "You returned coordinates in the line",
    ),
    (
        MESH,
        "column by column",
        "math.prod(shape[axis + 1 :])",
        "math.prod(shape[:axis])",
        "counted column by column",
    ),
    (
        MESH,
        "without itself",
        "for k in range(shape[axis])]",
        "for k in range(shape[axis]) if k != place]",
        "You left out the rank itself",
    ),
    (
        MESH,
        "reversed",
        "for k in range(shape[axis])]",
        "for k in reversed(range(shape[axis]))]",
        "You returned the right ranks in another order",
    ),
    (
        MESH,
        "all ranks",
        "return [first + k * stride for k in range(shape[axis])]",
        "return list(range(math.prod(shape)))",
        "You returned all ranks",
    ),
    (
        MESH,
        "returns nothing",
        "    return [first +",
        "    [first +",
        "You returned None",
    ),
    (
        MESH,
        "groups backwards",
        "for axis in range(len(shape)):",
        "for axis in reversed(range(len(shape))):",
        "You returned the groups in the wrong order",
    ),
    (
        MESH,
        "a group each time",
        "lines = sorted({tuple(line(r, shape, axis)) for r in range(math.prod(shape))})",
        "lines = [tuple(line(r, shape, axis)) for r in range(math.prod(shape))]",
        "one for each axis",
    ),
    (
        MESH,
        "the axes swapped",
        "stride = math.prod(shape[axis + 1 :])",
        "axis = len(shape) - 1 - axis\n    stride = math.prod(shape[axis + 1 :])",
        "You swapped the axes",
    ),
    (
        MESH,
        "another order on each rank",
        "lines = sorted({tuple(line(r, shape, axis)) for r in range(math.prod(shape))})",
        "lines = sorted({tuple(line(r, shape, axis)) for r in range("
        "math.prod(shape))}, key=lambda one: dist.get_rank() not in one)",
        "in the same order",
    ),
    (
        HYBRID,
        "averages over all ranks",
        "dist.all_reduce(parameter.grad, group=dp)",
        "dist.all_reduce(parameter.grad)",
        "Ranks with other layers or other shards took part in a collective",
    ),
    (
        HYBRID,
        "pp and dp swapped",
        "dist.all_reduce(parameter.grad, group=dp)",
        "dist.all_reduce(parameter.grad, group=pp)",
        "Ranks with other layers or other shards took part in a collective",
    ),
    (HYBRID, "a sum", "parameter.grad /= replicas", "pass", "replicas. Divide by their number"),
    (
        HYBRID,
        "divided by all ranks",
        "parameter.grad /= replicas",
        "parameter.grad /= dist.get_world_size()",
        "once too often, by all ranks or by the stages",
    ),
    (
        HYBRID,
        "divided by the stages as well",
        "parameter.grad /= replicas",
        "parameter.grad /= replicas * stages",
        "stages share the layers, not the samples",
    ),
    (
        HYBRID,
        "no average",
        "dist.all_reduce(parameter.grad, group=dp)\n",
        "continue\n",
        "this replica's samples alone",
    ),
    (
        HYBRID,
        "the first piece on every replica",
        ".chunk(replicas)[d]",
        ".chunk(replicas)[0]",
        "You trained all replicas on the first piece of the minibatch",
    ),
    (
        HYBRID,
        "the samples cut by stages",
        "images.chunk(replicas)[d], labels.chunk(replicas)[d]",
        "images.chunk(stages)[s], labels.chunk(stages)[s]",
        "You split the minibatch by stages",
    ),
    (
        HYBRID,
        "no microbatches",
        "one_f_one_b(stages, microbatches), inputs, targets",
        "one_f_one_b(stages, 1), [images], [labels]",
        "Run each microbatch through once",
    ),
    (
        HYBRID,
        "divided by the microbatches",
        "parameter.grad /= replicas",
        "parameter.grad /= replicas * microbatches",
        "microbatches again. run_schedule has done so",
    ),
    (
        HYBRID,
        "the replica's loss",
        "    dist.all_reduce(loss, group=dp)\n    return loss.item() / replicas",
        "    return loss.item()",
        "You returned this replica's loss",
    ),
    (
        HYBRID,
        "the loss is a sum",
        "loss.item() / replicas",
        "loss.item()",
        "replicas. Divide by their number",
    ),
    (
        HYBRID,
        "a loss on every stage",
        "return None",
        "return 0.0",
        "You returned a loss on a stage that has none",
    ),
    (
        HYBRID,
        "the loss as a tensor",
        "loss.item() / replicas",
        "[loss.item() / replicas]",
        "Return one number",
    ),
    (
        HYBRID,
        "pipeline over all ranks",
        "targets, group=pp",
        "targets",
        "You passed tensors that don't fit the collective",
    ),
    (
        TENSOR,
        "the norm of its own shards",
        "dist.all_reduce(squares[True], group=tp)",
        "pass",
        "You used only what this rank has",
    ),
    (
        TENSOR,
        "whole ones counted twice",
        "dist.all_reduce(squares[True], group=tp)",
        "dist.all_reduce(squares[True], group=tp)\n    dist.all_reduce(squares[False], group=tp)",
        "You counted the whole parameters",
    ),
    (TENSOR, "a square", ".sqrt().item()", ".item()", "You returned the square of the norm"),
    (
        TENSOR,
        "a sum over dp",
        "parameter.grad /= replicas",
        "pass",
        "You summed the gradients over dp",
    ),
    (
        TENSOR,
        "tp and dp swapped",
        "dist.all_reduce(parameter.grad, group=dp)",
        "dist.all_reduce(parameter.grad, group=tp)",
        "average gradients over dp",
    ),
    (
        TENSOR,
        "averaged over all",
        "dist.all_reduce(parameter.grad, group=dp)\n        parameter.grad /= replicas",
        "dist.all_reduce(parameter.grad)\n        parameter.grad /= 6",
        "but different ranks have different shards",
    ),
    (
        TENSOR,
        "squares over all ranks",
        "dist.all_reduce(squares[True], group=tp)",
        "dist.all_reduce(squares[True])",
        "sum the squares of the shards over tp",
    ),
    (
        TENSOR,
        "squares over dp",
        "dist.all_reduce(squares[True], group=tp)",
        "dist.all_reduce(squares[True], group=tp)\n    for k in squares:\n        "
        "dist.all_reduce(squares[k], group=dp)",
        "You summed the squares over dp, too",
    ),
    (TENSOR, "no clipping", "if norm > most:", "if False:", "You didn't clip the gradients"),
    (
        TENSOR,
        "always scaled",
        "if norm > most:",
        "if True:",
        "You enlarged gradients whose norm is smaller than most",
    ),
    (
        TENSOR,
        "the norm after clipping",
        "return norm\n",
        "return min(norm, most)\n",
        "the norm after clipping",
    ),
    (TENSOR, "returns nothing", "return norm\n", "norm\n", "returned None"),
    (
        TENSOR,
        "no average",
        "dist.all_reduce(parameter.grad, group=dp)\n        parameter.grad /= replicas",
        "pass",
        "You used this replica's gradients",
    ),
    (ONE, "a sum", "shard.grad /= p", "pass", "Take the mean"),
    (
        ONE,
        "adds up",
        "    dist.reduce_scatter_single(shard.grad, row, group=group)\n    shard.grad /= p\n",
        "    dist.reduce_scatter_single(shard.grad, row, group=group)\n"
        "    shard.added = getattr(shard, 'added', 0) + shard.grad / p\n"
        "    shard.grad.copy_(shard.added)\n",
        "You kept the previous step's gradient in shard.grad",
    ),
    (
        ONE,
        "not padded",
        "row = flat([parameter.grad for parameter in parameters], p)",
        "row = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])",
        "Make the large one p times the small one",
    ),
    (ONE, "divided twice", "shard.grad /= p", "shard.grad /= p * p", "once too often"),
    (
        ONE,
        "not gathered",
        "dist.all_gather_single(row, shard.detach(), group=group)\n    copy_back(row, parameters)",
        "pass",
        "your code made none",
    ),
    (
        ONE,
        "not put back",
        "copy_back(row, parameters)",
        "pass",
        "You never changed the model's weights",
    ),
    (
        ONE,
        "an all_reduce",
        "dist.reduce_scatter_single(shard.grad, row, group=group)",
        "dist.all_reduce(row, group=group)\n    shard.grad.copy_(row.chunk(p)["
        "dist.get_rank(group)])",
        "You call all_reduce",
    ),
    (
        ONE,
        "its own gradient",
        "dist.reduce_scatter_single(shard.grad, row, group=group)",
        "shard.grad.copy_(row.chunk(p)[dist.get_rank(group)])",
        "your code made none",
    ),
    (
        ONE,
        "group forgotten",
        "dist.reduce_scatter_single(shard.grad, row, group=group)",
        "dist.reduce_scatter_single(shard.grad, row)",
        "You passed tensors that don't fit the collective",
    ),
    (
        ONE,
        "the optimizer forgotten",
        "optimizer.step()",
        "pass",
        "You never changed the model's weights",
    ),
    (
        ONE,
        "gathered before the step",
        "    optimizer.step()\n    dist.all_gather_single(row, shard.detach(), group=group)",
        "    dist.all_gather_single(row, shard.detach(), group=group)\n    optimizer.step()",
        "You never changed the model's weights",
    ),
    (
        ONE,
        "gathers gradients",
        "dist.all_gather_single(row, shard.detach(), group=group)",
        "dist.all_gather_single(row, shard.grad, group=group)",
        "You gathered the gradients",
    ),
    (TWO, "a sum", "part.div_(p)", "part", "Take the mean"),
    (TWO, "not freed", "parameter.grad = None", "pass", "parameters still have a gradient"),
    (
        TWO,
        "adds up",
        "shard.grad = part.div_(p)",
        "shard.grad = part.div_(p) if shard.grad is None else shard.grad + part.div_(p)",
        "You added the previous backward's gradient",
    ),
    (TWO, "divided twice", "part.div_(p)", "part.div_(p * p)", "once too often"),
    (
        TWO,
        "no communication",
        "dist.reduce_scatter_single(part, row, group=group)",
        "part.copy_(row.chunk(p)[dist.get_rank(group)])",
        "your code made none",
    ),
    (
        TWO,
        "an all_reduce",
        "dist.reduce_scatter_single(part, row, group=group)",
        "dist.all_reduce(row, group=group)\n            part.copy_(row.chunk(p)[dist.get_rank("
        "group)"
        "])",
        "You call all_reduce",
    ),
    (
        TWO,
        "nobody waits",
        "dist.reduce_scatter_single(part, row, group=group)",
        "dist.reduce_scatter_single(part, row, group=group, async_op=True)",
        "You never call wait()",
    ),
    (
        TWO,
        "the first layer only",
        "watch(layer, shard)\n    ",
        "watch(layer, shard)\n        break\n    ",
        "your code made 1",
    ),
    (THREE, "a sum", "part.div_(p)", "part", "Take the mean"),
    (
        THREE,
        "transposes the weight's gradient",
        "gradient.t() @ x",
        "x.t() @ gradient",
        "You transposed the weight's gradient",
    ),
    (
        THREE,
        "gathers in float32",
        "row = torch.empty(p * len(shard), dtype=shard.dtype)",
        "row = torch.empty(p * len(shard))",
        "with the shard's dtype",
    ),
    (THREE, "divided twice", "part.div_(p)", "part.div_(p * p)", "once too often"),
    (
        THREE,
        "no bias",
        "row[numbers : numbers + shape[0]]",
        "torch.zeros(shape[0], dtype=row.dtype)",
        "You left out the bias",
    ),
    (
        THREE,
        "the input's gradient is a mean",
        "return of_x,",
        "return of_x / p,",
        "Average only the shard's gradient",
    ),
    (THREE, "no gradient of the input", "return of_x,", "return None,", "You returned none"),
    (
        THREE,
        "the gradient is not exchanged",
        "dist.reduce_scatter_single(part, row, group=ctx.group)",
        "part.copy_(row.chunk(p)[dist.get_rank(ctx.group)])",
        "your code made none",
    ),
    (
        THREE,
        "three values",
        "part.div_(p), None, None",
        "part.div_(p), None",
        "one value for each argument of forward",
    ),
    (
        THREE,
        "bias in front",
        "flat([gradient.t() @ x, gradient.sum(0)], p)",
        "flat([gradient.sum(0), gradient.t() @ x], p)",
        "You put the bias in front of the weight",
    ),
    (
        THREE,
        "the bias is the end of the row",
        "row[numbers : numbers + shape[0]]",
        "row[-shape[0] :]",
        "You took the bias from the row's end, where padding follows",
    ),
    (
        THREE,
        "group forgotten",
        "whole(shard, ctx.shape, ctx.group)",
        "whole(shard, ctx.shape)",
        "Pass group=group",
    ),
    (
        OFFLOAD,
        "waits at once",
        "sending = dist.isend(gradient, group_dst=1, group=group, tag=n)",
        "sending = dist.isend(gradient, group_dst=1, group=group, tag=n)\n"
        "            sending.wait()",
        "You wait for each gradient right after you send it",
    ),
    (
        OFFLOAD,
        "updates while it is sent",
        "send.wait()",
        "pass",
        "You update a layer whose row is still being sent",
    ),
    (
        OFFLOAD,
        "waits for one of the two",
        "if layer == i:",
        "if send is sends[n]:",
        "You update a layer whose row is still being sent",
    ),
    (
        OFFLOAD,
        "adds gradients up",
        "        weights[i].grad = gradient\n        optimizers[i].step()\n"
        "        weights[i].grad = None\n",
        "        before = weights[i].grad\n"
        "        weights[i].grad = gradient if before is None else before + gradient\n"
        "        optimizers[i].step()\n",
        "You kept the previous step's gradient in weights[i].grad",
    ),
    (
        OFFLOAD,
        "three rows for a moment",
        "        row, request = coming\n        request.wait()\n"
        "        coming = fetch(n + 1) if n + 1 < pieces else None\n",
        "        following = fetch(n + 1) if n + 1 < pieces else None\n"
        "        row, request = coming\n        request.wait()\n        coming = following\n",
        "3 rows are in the device's memory",
    ),
    (
        OFFLOAD,
        "keeps the row before",
        "        row, request = coming\n",
        "        before = row if n else None\n        row, request = coming\n",
        "3 rows are in the device's memory",
    ),
    (OFFLOAD, "no loss", "return worker.loss", "return None", "You returned nothing"),
    (
        OFFLOAD,
        "no update",
        "optimizers[i].step()",
        "pass",
        "Step each once, as its gradient arrives",
    ),
    (
        OFFLOAD,
        "gradient not used",
        "weights[i].grad = gradient",
        "pass",
        "You never changed the weights",
    ),
    (
        OFFLOAD,
        "no tags",
        "group_dst=1, group=group, tag=n",
        "group_dst=1, group=group",
        "A rank is waiting for a message that nobody sends",
    ),
]

# Task, what is different, code.
RIGHT = [
    (
        MESH,
        "by a tensor, and by enumeration",
        """
def line(rank, shape, axis):
    ranks = torch.arange(math.prod(shape)).view(shape)
    rows = ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist()
    return next(row for row in rows if rank in row)


def mesh_groups(shape):
    found = []
    for axis in range(len(shape)):
        lines = {tuple(line(r, shape, axis)) for r in range(math.prod(shape))}
        own, _ = dist.new_subgroups_by_enumeration([list(one) for one in sorted(lines)])
        found.append(own)
    return found
""",
    ),
    (
        MESH,
        "by coordinates",
        """
def line(rank, shape, axis):
    every = list(itertools.product(*(range(n) for n in shape)))
    mine = every[rank]
    return [r for r, one in enumerate(every)
            if all(a == b for k, (a, b) in enumerate(zip(one, mine)) if k != axis)]


def mesh_groups(shape):
    groups = {}
    for axis in range(len(shape)):
        for r in range(math.prod(shape)):
            key = axis, *line(r, shape, axis)
            if key not in groups:
                groups[key] = dist.new_group(ranks=line(r, shape, axis))
    return [groups[axis, *line(dist.get_rank(), shape, axis)] for axis in range(len(shape))]
""",
    ),
    (
        HYBRID,
        "one all_reduce for all",
        """
def hybrid_step(stage, images, labels, microbatches, pp, dp):
    d, replicas = place_and_size(dp)
    s, stages = place_and_size(pp)
    size = len(images) // replicas
    own = slice(d * size, (d + 1) * size)
    inputs = list(images[own].split(size // microbatches))
    targets = list(labels[own].split(size // microbatches))
    loss = run_schedule(stage, one_f_one_b(stages, microbatches), inputs, targets, pp)
    grads = [q.grad for q in stage.parameters()]
    row = torch.cat([g.reshape(-1) for g in grads]) / replicas
    dist.all_reduce(row, group=dp)
    for g, new in zip(grads, row.split([g.numel() for g in grads])):
        g.copy_(new.view_as(g))
    if s == stages - 1:
        loss = torch.tensor([loss], dtype=torch.float64)
        dist.all_reduce(loss, group=dp)
        return float(loss / replicas)
""",
    ),
    (
        TENSOR,
        "with PyTorch's functions",
        """
def average_and_clip(layer, cut, most, tp, dp):
    for q in layer.parameters():
        dist.all_reduce(q.grad, op=dist.ReduceOp.SUM, group=dp)
        q.grad.div_(dist.get_world_size(dp))
    named = dict(layer.named_parameters())
    own = nn.utils.get_total_norm([named[n].grad for n in named if n in cut]) ** 2
    dist.all_reduce(own, group=tp)
    rest = nn.utils.get_total_norm([named[n].grad for n in named if n not in cut]) ** 2
    norm = (own + rest) ** 0.5
    nn.utils.clip_grads_with_norm_(layer.parameters(), most, norm)
    return float(norm)
""",
    ),
    (
        TENSOR,
        "whole ones on the first rank",
        """
def average_and_clip(layer, cut, most, tp, dp):
    total = torch.zeros(1, dtype=torch.float64)
    for name, q in layer.named_parameters():
        dist.all_reduce(q.grad, group=dp)
        q.grad /= dist.get_world_size(dp)
        if name in cut or dist.get_rank(tp) == 0:
            total += (q.grad.double() ** 2).sum()
    dist.all_reduce(total, group=tp)
    norm = math.sqrt(total.item())
    for q in layer.parameters():
        q.grad.mul_(min(1, most / norm))
    return norm
""",
    ),
    (
        ONE,
        "by the older names",
        """
def zero1_step(model, shard, optimizer, group=None):
    p = dist.get_world_size(group)
    row = flat([q.grad for q in model.parameters()], p) / p
    part = torch.empty_like(shard)
    dist.reduce_scatter_tensor(part, row, group=group)
    shard.grad = part
    optimizer.step()
    whole_row = torch.empty(p * len(shard), dtype=shard.dtype)
    dist.all_gather_into_tensor(whole_row, shard.data, group=group)
    copy_back(whole_row, list(model.parameters()))
""",
    ),
    (
        TWO,
        "a count",
        """
def zero2_hooks(layers, shards, group=None):
    p = dist.get_world_size(group)
    for layer, shard in zip(layers, shards):
        parameters = list(layer.parameters())
        count = [0]

        def ready(_, parameters=parameters, shard=shard, count=count):
            count[0] += 1
            if count[0] % len(parameters):
                return
            row = flat([q.grad for q in parameters], p)
            for q in parameters:
                q.grad = None
            shard.grad = torch.empty_like(shard)
            dist.reduce_scatter_single(shard.grad, row, group=group)
            shard.grad /= p

        for q in parameters:
            q.register_post_accumulate_grad_hook(ready)
""",
    ),
    (
        THREE,
        "with a list of views",
        """
def whole(shard, shape, group=None):
    row = shard.new_empty(dist.get_world_size(group) * shard.numel())
    dist.all_gather_single(row, shard.detach(), group=group)
    weight, bias, _ = row.split([shape[0] * shape[1], shape[0],
                                 len(row) - shape[0] * shape[1] - shape[0]])
    return weight.view(shape), bias
""",
    ),
    (
        OFFLOAD,
        "two buffers in turn",
        """
def device_step(worker, group=None):
    pieces = len(worker.order)
    longest = max(worker.length(n) for n in range(pieces))
    buffers = [torch.empty(longest, dtype=worker.dtype) for _ in range(2)]

    def fetch(n):
        return dist.irecv(buffers[n % 2][: worker.length(n)], group_src=1, group=group, tag=n)

    request, sends = fetch(0), []
    for n in range(pieces):
        request.wait()
        if n + 1 < pieces:
            request = fetch(n + 1)
        gradient = worker.work(n, buffers[n % 2][: worker.length(n)])
        while sends and gradient is not None:
            sends.pop().wait()
        if gradient is not None:
            sends.append(dist.isend(gradient, group_dst=1, group=group, tag=n))
    sends.pop().wait()
    return worker.loss
""",
    ),
    (
        OFFLOAD,
        "a dict of rows",
        """
def device_step(worker, group=None):
    rows, requests, sending = {}, {}, None
    for n in range(len(worker.order) + 1):
        if n < len(worker.order):
            rows[n] = torch.empty(worker.length(n), dtype=worker.dtype)
            requests[n] = dist.irecv(rows[n], group_src=1, group=group, tag=n)
        if n:
            requests.pop(n - 1).wait()
            gradient = worker.work(n - 1, rows.pop(n - 1))
            if gradient is None:
                continue
            if sending:
                sending.wait()
            sending = dist.isend(gradient, group_dst=1, group=group, tag=n - 1)
    sending.wait()
    return worker.loss
""",
    ),
    (
        OFFLOAD,
        "receives all posted on the host",
        """
def host_step(weights, optimizers, order, group=None):
    first = len(weights) - 1
    gradients = {n: torch.empty_like(weights[order[n]]) for n in range(first, len(order))}
    requests = {n: dist.irecv(g, group_src=0, group=group, tag=n) for n, g in gradients.items()}
    sends = {}
    for n, i in enumerate(order):
        sends.setdefault(i, []).append(
            dist.isend(weights[i].data, group_dst=0, group=group, tag=n))
    for n, request in requests.items():
        request.wait()
        for send in sends.pop(order[n]):
            send.wait()
        weights[order[n]].grad = gradients.pop(n)
        optimizers[order[n]].step()
""",
    ),
]

# Task, what is different, what the solution has, and what stands in its place.
CHANGES_THAT_ARE_RIGHT = [
    (
        HYBRID,
        "divided before",
        "dist.all_reduce(parameter.grad, group=dp)\n        parameter.grad /= replicas",
        "parameter.grad /= replicas\n        dist.all_reduce(parameter.grad, group=dp)",
    ),
    (
        ONE,
        "an average",
        "dist.reduce_scatter_single(shard.grad, row, group=group)\n    shard.grad /= p",
        "dist.reduce_scatter_single(shard.grad, row, op=dist.ReduceOp.AVG, group=group)",
    ),
    (
        TWO,
        "an average, started and waited for",
        "dist.reduce_scatter_single(part, row, group=group)",
        "dist.reduce_scatter_single(part, row, group=group, async_op=True).wait()",
    ),
    (
        THREE,
        "divided first",
        "row = flat([gradient.t() @ x, gradient.sum(0)], p)",
        "row = flat([gradient.t() @ x, gradient.sum(0)], p) * 1.0",
    ),
    (OFFLOAD, "the gradient is left", "        weights[i].grad = None\n", ""),
]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "11.2",
        "is made for one length",
        "images.chunk(replicas)[d], labels.chunk(replicas)[d]",
        "images.split(24 // replicas)[d], labels.split(24 // replicas)[d]",
        "index out of range",
    ),
    (
        "11.6",
        "computes in float32",
        "row = torch.empty(p * len(shard), dtype=shard.dtype)",
        "row = torch.empty(p * len(shard), dtype=shard.dtype)\n    shard = shard.float().double()",
        "Did you compute something in float32?",
    ),
]

#: Right with the lab's meshes and names.
CHANGES += [
    ("11.1", "three axes at most", "    stride = math.prod(shape[axis + 1 :])\n",
     "    axis, shape = axis + 3 - len(shape), (1, 1, 1, *shape)[-3:]\n"
     "    stride = math.prod(shape[axis + 1 :])\n", ""),
    ("11.1", "lists of ranks, not groups",
     "            group = dist.new_group(list(ranks))\n            if dist.get_rank() in ranks:\n"
     "                own.append(group)\n",
     "            dist.new_group(list(ranks))\n            if dist.get_rank() in ranks:\n"
     "                own.append(list(ranks))\n",
     "Return groups of dist.new_group with this rank in each"),
    ("11.2", "no pipelining", "one_f_one_b(stages, microbatches)",
     "[[(kind, k) for k in range(microbatches) for kind in 'FB'] for _ in range(stages)]",
     "Use the order of one_f_one_b"),
    ("11.2", "the loss in float32", "torch.tensor(loss, dtype=torch.float64)",
     "torch.tensor(loss)", "the loss"),
    ("11.4", "new tensors for the weights", "    copy_back(row, parameters)\n",
     "    begin = 0\n    for parameter in parameters:\n        n = parameter.numel()\n"
     "        parameter.data = row[begin : begin + n].view(parameter.shape).clone()\n"
     "        begin += n\n", "your parameters use other memory"),
    ("11.6", "copies, not views", "return row[:numbers].view(shape), row[numbers : numbers + "
     "shape[0]]", "return row[:numbers].view(shape).clone(), row[numbers : numbers + "
     "shape[0]].clone()", "Your whole() returns copies"),
    ("11.3", "cut by its name", "squares[name in cut]", 'squares["norm" not in name]', ""),
]  # fmt: skip

#: Right with full meshes, linear layers in order, and arguments that nobody uses again.
CHANGES += [
    ("11.1", "a range", "return [first + k * stride for k in range(shape[axis])]",
     "return range(first, first + stride * shape[axis], stride)", "You returned another type"),
    ("11.1", "a tuple of groups", "    return own\n", "    return tuple(own)\n",
     "Return a list of groups"),
    ("11.1", "ranks of this run only", "for k in range(shape[axis])]",
     "for k in range(shape[axis]) if first + k * stride < dist.get_world_size()]",
     "line(r, (2, 5, 3), 0)"),
    ("11.2", "every replicas-th image", "images.chunk(replicas)[d], labels.chunk(replicas)[d]",
     "images[d::replicas], labels[d::replicas]", "You used other images than replica"),
    ("11.2", "the whole minibatch on every replica",
     "    images, labels = images.chunk(replicas)[d], labels.chunk(replicas)[d]\n", "",
     "one for each rank of dp"),
    ("11.2", "replicas by all ranks", "    images, labels = images.chunk(replicas)[d]",
     "    replicas = dist.get_world_size() // stages\n"
     "    images, labels = images.chunk(replicas)[d]", "one for each rank of dp"),
    ("11.2", "a stage in double precision", "    images, labels = images.chunk(replicas)[d]",
     "    stage.double()\n    images, labels = images.double().chunk(replicas)[d]",
     "You changed the stage's parameters from float32 to"),
    ("11.3", "the last part of a name", "squares[name in cut]",
     "squares[name.split('.')[-1] in cut]", "norm, most"),
    ("11.3", "replicas by all ranks", "replicas = dist.get_world_size(dp)",
     "replicas = dist.get_world_size() // dist.get_world_size(tp)",
     "Divide by the number of replicas, the size of dp"),
    ("11.3", "the set emptied", "    dist.all_reduce(squares[True], group=tp)\n",
     "    cut.clear()\n    dist.all_reduce(squares[True], group=tp)\n", "changed its argument cut"),
    ("11.3", "whole gradients averaged over tp", "        parameter.grad /= replicas\n",
     "        parameter.grad /= replicas\n    for name, q in layer.named_parameters():\n"
     "        if name not in cut:\n            dist.all_reduce(q.grad, group=tp)\n"
     "            q.grad /= dist.get_world_size(tp)\n", "average gradients over dp"),
    ("11.3", "decides by its own norm", "    if norm > most:",
     "    if nn.utils.get_total_norm([q.grad for q in layer.parameters()]) > most:",
     "You didn't clip the gradients"),
    ("11.4", "the shard is a view", "    copy_back(row, parameters)\n",
     "    copy_back(row, parameters)\n    shard.data = row.chunk(p)[dist.get_rank(group)]\n",
     "your shard or its gradient is a view, which keeps the whole row in memory"),
    ("11.4", "the gradient is a view", "    shard.grad /= p\n",
     "    own = torch.empty_like(row).chunk(p)[0]\n    shard.grad = own.copy_(shard.grad / p)\n",
     "your shard or its gradient is a view, which keeps the whole row in memory"),
    ("11.4", "linear layers only", "    shard.grad = torch.empty_like(shard)\n",
     "    parameters = [q for one in linear_layers(model) for q in one.parameters()]\n"
     "    shard.grad = torch.empty_like(shard)\n", ""),
    ("11.5", "a hook on the first parameter", "        for parameter in parameters:\n"
     "            parameter.register", "        for parameter in parameters[:1]:\n"
     "            parameter.register", ""),
    ("11.5", "weight and bias by name", "parameters = list(layer.parameters())",
     "parameters = [layer.weight, layer.bias]", "layers may have parameters of any name"),
    ("11.5", "rows made once and kept", "parameters = list(layer.parameters())\n",
     "parameters = list(layer.parameters())\n        layer.row = flat(parameters, p).clone()\n",
     "keep no row"),
    ("11.6", "the gradient changed", "row = flat([gradient.t()",
     "gradient /= 1 + p\n        row = flat([gradient.t()", "the gradient that came in"),
    ("11.7", "sends one by one", "for n, i in enumerate(order)\n    ]\n    for n in range(first, "
     "len(order)):\n", "for n, i in enumerate(order[: first + 1])\n    ]\n"
     "    for n in range(first, len(order)):\n        if n > first:\n"
     "            sends.append(dist.isend(weights[order[n]].detach(), group_dst=0, group=group, "
     "tag=n))\n", "before you receive a gradient"),
]  # fmt: skip


# --- 11.8: a model on a machine -------------------------------------------------------------------

WRONG += [
    (
        MAP,
        "hard-coded for the first model",
        """
def map_model(model, machine, batch):
    mix = Mix(data=128, tensor=8, zero=1, microbatch=8, recompute="none")
    return {"mix": mix, "seconds": 3.676, "memory": 76.5e9,
            "levels": {"tensor": "node", "data": "spine"}}
""",
        "and the machine has 64 devices. Choose data",
    ),
    (
        MAP,
        "more tensor ranks than heads",
        """
def map_model(model, machine, batch):
    mix = Mix(tensor=machine.devices, zero=1)
    layers = model.layers * model.layer / machine.devices
    return {"mix": mix, "seconds": 1.0, "memory": 18 * layers, "levels": levels(mix, machine)}
""",
        "The tensor axis (1,024) does not divide the heads (64). Leave out such mixes",
    ),
    (
        MAP,
        "microbatches that don't divide the batch",
        """
def map_model(model, machine, batch):
    mix = Mix(data=machine.devices // 8, tensor=8, zero=1, microbatch=7)
    return {"mix": mix, "seconds": 1.0, "memory": 1e9, "levels": levels(mix, machine)}
""",
        "data axis × microbatch (896) does not divide the batch (1,024)",
    ),
    (
        MAP,
        "only the mix",
        """
def map_model(model, machine, batch):
    return Mix(data=machine.devices, zero=1)
""",
        "You returned a Mix. Return a dict with the keys mix, seconds, memory, levels",
    ),
    (
        MAP,
        "memory and levels left open, and copies of them",
        """
def map_model(model, machine, batch):
    best = None
    for t, p in itertools.product(range(1, model.heads + 1), range(1, model.layers + 1)):
        for b, r in itertools.product((1, 2, 4, 8), ("none", "full")):
            if machine.devices % (t * p):
                continue
            mix = Mix(machine.devices // (t * p), t, p, zero=1, microbatch=b, recompute=r)
            try:
                seconds, kept = step_cost(model, mix, machine, batch)
            except MixError:
                continue
            held = (model.layers / p * model.layer + model.embedding) / t * (6 + 12 / mix.data)
            if held + kept <= machine.device.memory and (not best or seconds < best["seconds"]):
                best = {"mix": mix, "seconds": seconds, "memory": held + kept}
    if best:
        mix, stride, best["levels"] = best["mix"], 1, {}
        for axis, size in axes(mix).items():
            stride *= size
            if size > 1:
                inside = [below % stride == 0 for below in machine.sizes]
                best["levels"][axis] = machine.levels[inside.index(True)].name
    return best


def levels(mix, machine):
    raise ValueError("see map_model")


def memory(model, mix, activations):
    raise ValueError("see map_model")
""",
        "ValueError: see map_model",
    ),
]
_KEEP = "if needed > machine.device.memory or (best and"
_RETURN = 'return best and best | {"levels": levels(best["mix"], machine)}'
_COST = "seconds, activations = step_cost(model, mix, machine, batch)\n"
_SPLITS = 'splits = {"data": data, "tensor": tensor, "pipeline": pipeline, "zero": 1}'
_WAYS = """    divisors = [k for k in range(1, n + 1) if n % k == 0]
    ways = itertools.product(divisors, divisors, (1, 2, 4, 8), ("none", "full"))
    for tensor, pipeline, microbatch, recompute in ways:
        data, rest = divmod(n, tensor * pipeline)
        if rest:
"""
_FIRSTS = "firsts = [r for r in range(mix.ranks) if r // stride % size == 0]"
CHANGES += [
    (MAP, "ignores memory", _KEEP, "if (best and",
     "doesn't fit: it needs 115.5 GB of 80 GB, and the largest part is gradients"),
    (MAP, "the data axis only", "itertools.product(divisors, divisors,",
     "itertools.product((1,), (1,),", "You returned None, but this mix fits"),
    (MAP, "a tensor axis across the nodes", "        if rest:\n",
     "        if rest or tensor <= machine.sizes[0] < n:\n",
     "tensor axis crosses the rack"),
    (MAP, "forgets the bubble", _COST,
     _COST + "            count = batch // (data * microbatch)\n"
     "            seconds *= count / (count + pipeline - 1)\n",
     "you left out the pipeline's bubble. Don't change what step_cost says"),
    (MAP, "uses half of the devices", "n, best = machine.devices, None",
     "n, best = machine.devices // 2, None", "and the machine has 1,024 devices. Choose data"),
    (MAP, "the models of an earlier check", "n, best = machine.devices, None",
     "n, best = machine.devices, None\n"
     "    if (model.layers, model.width) not in {(64, 8192), (192, 20480), (48, 6144),\n"
     "            (96, 12288), (48, 4096), (36, 6144), (40, 5120), (8, 256)}:\n"
     "        return None\n", "You returned None, but this mix fits"),
    (MAP, "a divisor that is a float", "            continue\n        splits",
     "            continue\n        data = n / (tensor * pipeline)\n        splits",
     "'float' object cannot be interpreted as an integer"),
    (MAP, "the first that fits", "(best and seconds >= best[\"seconds\"])", "best",
     "It loses most here: "),
    (MAP, "the least memory", "seconds >= best[\"seconds\"]", "needed >= best[\"memory\"]",
     "It loses most here: "),
    (MAP, "the slowest that fits", "seconds >= best", "seconds <= best",
     "It loses most here: "),
    (MAP, "microbatches of one sample", "(1, 2, 4, 8)", "(1,)", "It loses most here: "),
    (MAP, "always recomputes", '("none", "full")', '("full",)',
     "It loses most here: recomputation"),
    (MAP, "never recomputes", '("none", "full")', '("none",)',
     "You returned None, but this mix fits"),
    (MAP, "a mix although nothing fits", _RETURN,
     'best = best or {"mix": Mix(data=n, zero=1), "seconds": 1.0, "memory": 1e12}\n    '
     'return best | {"levels": levels(best["mix"], machine)}',
     "but no mix fits on these devices. Return None"),
    (MAP, "milliseconds", _RETURN,
     'return best and best | {"levels": levels(best["mix"], machine), '
     '"seconds": 1e3 * best["seconds"]}', "you returned milliseconds. Return seconds"),
    (MAP, "gigabytes", _RETURN,
     'return best and best | {"levels": levels(best["mix"], machine), '
     '"memory": best["memory"] / 1e9}', "you returned GB. Return bytes"),
    (MAP, "no activations", "+ activations\n", "\n", "you left out the activations"),
    (MAP, "the optimizer whole on each rank", "12 / mix.data", "12",
     "every rank has the whole optimizer. With ZeRO-1, divide it by data"),
    (MAP, "everything divided by data", "(2 + 4 + 12 / mix.data)", "(2 + 4 + 12) / mix.data",
     "you divided everything by data. ZeRO-1 divides only the optimizer"),
    (MAP, "numbers of levels", "= level.name", "= machine.levels.index(level)",
     "Use the names of machine.levels"),
    (MAP, "names of its own", "= level.name", '= level.name + "s"',
     "The machine has no level nodes, spines, but node, rack, spine"),
    (MAP, "the group of rank 0 only", _FIRSTS, "firsts = [0]",
     "the data axis crosses the spine, but you say rack. Its group"),
    (MAP, "the size without the stride", "(size - 1) * stride", "(size - 1)",
     "but you say"),
    (MAP, "data fastest", "axes(mix).items()", "sorted(axes(mix).items())", "but you say"),
    (MAP, "axes of one rank", "if size > 1 and all(", "if all(",
     "levels has pipeline, which has one rank"),
    (MAP, "two axes only", "axes(mix).items()", "list(axes(mix).items())[:2]",
     "levels lacks pipeline"),
    (MAP, "no levels", _RETURN, "return best", "The key levels is missing"),
    (MAP, "the mix as a dict", _RETURN,
     'return best and best | {"levels": levels(best["mix"], machine), "mix": vars(best["mix"])}',
     "The entry mix is a dict"),
    (MAP, "the model changed", "n, best = machine.devices, None",
     'vars(model)["layers"] *= 2\n    n, best = machine.devices, None',
     "You changed the model or the machine. Only read them"),
    (MAP, "tensor axes of 1, 2, 4 and 8", "itertools.product(divisors,",
     "itertools.product((1, 2, 4, 8),", "the fastest that fits takes 0.104 s"),
    (MAP, "tensor axes that divide a node", "        if rest:\n",
     "        if rest or machine.sizes[0] % tensor:\n", "the fastest that fits takes 0.104 s"),
    (MAP, "some devices idle", _WAYS,
     _WAYS.replace("n % k == 0", "k < 100").replace("divmod(n, ", "n // (").replace(
         ")\n        if", "), tensor * pipeline > n\n        if"),
     "Your mix has 20 ranks (tensor 2 × pipeline 5 × data 2"),
    (MAP, "two replicas at least", "        if rest:\n", "        if rest or data == 1:\n",
     "the fastest that fits takes 0.104 s"),
    (MAP, "each device has 80 GB", "machine.device.memory", "80e9", "of 4 GB, and the largest"),
    (MAP, "the embedding divided by pipeline", "/ mix.pipeline * model.layer\n"
     "    parameters = (layers + model.embedding)", "* model.layer\n"
     "    parameters = (layers + model.embedding) / mix.pipeline",
     "memory: you divided the embedding by pipeline. Divide only the layers"),
    (MAP, "no embedding", "(layers + model.embedding)", "layers",
     "memory: you left out the embedding"),
    (MAP, "the embedding whole on each tensor rank", "(layers + model.embedding) / mix.tensor",
     "layers / mix.tensor + model.embedding", "you didn't divide the embedding by tensor"),
    (MAP, "the optimizer divided by all ranks", "12 / mix.data", "12 / mix.ranks",
     "memory: you divided the optimizer by all ranks. ZeRO-1 divides it by data"),
    (MAP, "ZeRO-2", "4 + 12 / mix.data", "(4 + 12) / mix.data",
     "memory: you divided the gradients too. ZeRO-1 divides only the optimizer"),
    (MAP, "a gradient of two bytes", "(2 + 4 +", "(2 + 2 +",
     "memory: you return 63.52 GB, and it needs 76.51 GB"),
    (MAP, "ZeRO-3 always", '"zero": 1}', '"zero": 3}', "has zero=3. Use zero=1"),
    (MAP, "two parts in each stage", '"zero": 1}', '"zero": 1, "interleave": 1 + (pipeline > 1)}',
     "has interleave=2. Use interleave=1"),
    (MAP, "selective for none", '("none", "full")', '("selective", "full")',
     "Your mix has recompute='selective'. Choose one of none, full"),
    (MAP, "an empty dict if nothing fits", "return best and best |",
     "return {} if not best else best |",
     "You returned a dict without a mix, but no mix fits"),
    (MAP, "a dict of None if nothing fits", _RETURN,
     'return best | {"levels": levels(best["mix"], machine)} if best else dict.fromkeys(\n'
     '        ("mix", "seconds", "memory", "levels"))',
     "You returned a dict whose mix is None, but no mix fits on these devices. Return None"),
]  # fmt: skip
RIGHT += [
    (
        MAP,
        "a list of all, levels from lines",
        """
def levels(mix, machine):
    shape, found = (mix.pipeline, mix.data, mix.tensor), {}
    for k, axis in enumerate(("pipeline", "data", "tensor")):
        lines = [line(r, shape, k) for r in range(mix.ranks)]
        for size, level in list(zip(machine.sizes, machine.levels))[::-1]:
            if shape[k] > 1 and all(len({r // size for r in one}) == 1 for one in lines):
                found[axis] = level.name
    return found


def map_model(model, machine, batch):
    every = []
    for t in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32):
        for p in range(1, model.layers + 1):
            for b in (1, 2, 4, 8):
                for r in ("none", "full"):
                    if machine.devices % (t * p) == 0:
                        d = machine.devices // t // p
                        mix = Mix(d, t, p, zero=1, microbatch=b, recompute=r)
                        try:
                            seconds, kept = step_cost(model, mix, machine, batch)
                        except MixError:
                            pass
                        else:
                            every.append((seconds, memory(model, mix, kept), mix))
    every = [one for one in every if one[1] <= machine.device.memory]
    if not every:
        return None
    seconds, needed, mix = min(every, key=lambda one: one[0])
    return dict(mix=mix, seconds=seconds, memory=needed, levels=levels(mix, machine))
""",
    ),
    (
        MAP,
        "more kinds of mixes than the task names",
        """
from utils.labs.lab11.mix_search import mixes
from utils.labs.lab11.mixes import estimate


def map_model(model, machine, batch):
    best = None
    for mix in mixes(model, machine.devices, batch):  # also with microbatches of 16 samples
        if mix.context == mix.interleave == 1 and mix.zero == int(mix.data > 1):
            one = estimate(model, mix, machine, batch)
            if one.fits and (best is None or one.seconds < best.seconds):
                best = one
    if best:
        return {"mix": best.mix, "seconds": best.seconds, "memory": best.memory,
                "levels": dict(best.levels)}
""",
    ),
    (
        MAP,
        "the fewest stages of mixes that differ by two per cent, levels from dicts of groups",
        """
def levels(mix, machine):
    strides = {"tensor": 1, "data": mix.tensor, "pipeline": mix.tensor * mix.data}
    result = {}
    for axis, size in axes(mix).items():
        if size == 1:
            continue
        groups = {}
        for r in range(mix.ranks):
            key = r % strides[axis], r // (strides[axis] * size)
            groups.setdefault(key, []).append(r)
        inside = {
            level.name: all(len({r // below for r in one}) == 1 for one in groups.values())
            for level, below in zip(machine.levels, machine.sizes)
        }
        result[axis] = [name for name, is_so in inside.items() if is_so][0]
    return result


def map_model(model, machine, batch):
    n, found = machine.devices, []
    for t in range(1, n + 1):
        for p in range(1, n // t + 1):
            for b in (1, 2, 4, 8):
                for r in ("none", "full"):
                    if n % (t * p):
                        continue
                    mix = Mix(n // t // p, t, p, zero=1, microbatch=b, recompute=r)
                    try:
                        seconds, activations = step_cost(model, mix, machine, batch)
                    except MixError:
                        continue
                    needs = memory(model, mix, activations)
                    if needs <= machine.device.memory:
                        found.append({"mix": mix, "seconds": seconds, "memory": needs})
    if not found:
        return None
    limit = 1.02 * min(one["seconds"] for one in found)
    near = [one for one in found if one["seconds"] <= limit]
    best = min(near, key=lambda one: one["mix"].pipeline)
    return best | {"levels": levels(best["mix"], machine)}
""",
    ),
    (
        MAP,
        "levels from the span of an axis, sorted by time",
        """
def levels(mix, machine):
    found, span = {}, 1
    for axis, size in axes(mix).items():
        span *= size
        if size > 1:
            whole = [k for k, below in enumerate(machine.sizes) if below % span == 0]
            found[axis] = machine.levels[whole[0]].name
    return found


def map_model(model, machine, batch):
    n, found = machine.devices, []
    for t, p in itertools.product(range(1, model.heads + 1), range(1, model.layers + 1)):
        if n % (t * p) or model.heads % t or model.layers % p:
            continue
        for b, r in itertools.product((8, 4, 2, 1), ("none", "full")):
            mix = Mix(n // (t * p), t, p, zero=1, microbatch=b, recompute=r)
            if batch % (mix.data * b) == 0:
                seconds, activations = step_cost(model, mix, machine, batch)
                found.append((seconds, memory(model, mix, activations), mix))
    found.sort(key=lambda one: one[0])
    for seconds, needed, mix in found:
        if needed <= machine.device.memory:
            return {"mix": mix, "seconds": seconds, "memory": needed,
                    "levels": levels(mix, machine)}
    return None
""",
    ),
]
CHANGES_THAT_ARE_RIGHT += [
    (MAP, "no ZeRO if there are no replicas", '"zero": 1}', '"zero": int(data > 1)}'),
    (
        MAP,
        "another entry, which is not data",
        '{"mix": mix, "seconds": seconds,',
        '{"ways": ways, "mix": mix, "seconds": seconds,',
    ),
    (MAP, "four per cent more memory, to be safe", '"memory": needed}', '"memory": 1.04 * needed}'),
]
