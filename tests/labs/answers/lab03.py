"""Answers to lab 03, wrong ones and right ones, that students really give."""

from __future__ import annotations

import textwrap

from lab_tools import source_of

NOTEBOOK = "03_data_parallel.ipynb"
CELLS = {
    "3.1": "lab03-average-answer",
    "3.2": "lab03-weighted-answer",
    "3.3": "lab03-metrics-answer",
    "3.4": "lab03-step-answer",
    "3.5": "lab03-run-answer",
    "3.6": "lab03-sync-answer",
}
# Their checks take a second.
SLOW = {"3.4", "3.5"}

_JOIN = """
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from utils import data, models

if dist.is_initialized():
    dist.destroy_process_group()
dist.init_process_group("mpi")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
"""

# In place of Fashion-MNIST and the three epochs: small histories of a model that was trained.
_RUN = """
from types import SimpleNamespace

class Small(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        random = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 10, (n,), generator=random)
        self.data = torch.randint(0, 60, (n, 28, 28), generator=random, dtype=torch.uint8)
        self.data[torch.arange(n), self.targets] += 150
    def __len__(self):
        return len(self.targets)

data.fashion_mnist = lambda train=True: Small(648 if train else 200, int(train))
train_data, test_data = data.fashion_mnist(), data.fashion_mnist(train=False)

def minibatches(epoch, size=128):
    order = torch.Generator().manual_seed(epoch)
    return data.InMemoryLoader(train_data, size, shuffle=True, generator=order)
"""
_TRAIN = """
import copy

if "trained" not in globals():
    if rank == 0:
        sequential_model = models.mlp(seed=0, sizes=(784, 32, 10))
        sequential = train_sequential(sequential_model, epochs=3)
    if rank in (0, 1):
        parallel_model = models.mlp(seed=0, sizes=(784, 32, 10))
        parallel = train_parallel(parallel_model, epochs=3, group=pair)
    results = ("sequential_model", "sequential", "parallel_model", "parallel")
    trained = {name: globals()[name] for name in results if name in globals()}
globals().update(copy.deepcopy(trained))
"""


BEFORE = _JOIN + _RUN + source_of(NOTEBOOK, "twin-train").partition("if rank == 0:")[0]
# The run of 3.5 is made once, with the solution.
AFTER = {"3.5": _TRAIN}

# Right answers that look different.
RIGHT = [
    ("3.1", "divides before the sum", """
def average_gradients(model, group=None):
    for p in model.parameters():
        if p.grad is None:
            continue
        p.grad.div_(dist.get_world_size(group=group))
        dist.all_reduce(p.grad, dist.ReduceOp.SUM, group)
"""),
    ("3.1", "starts all, then waits", """
def average_gradients(model, group=None):
    with_grad = [p for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(p.grad, group=group, async_op=True) for p in with_grad]
    for p, work in zip(with_grad, works):
        work.wait()
        p.grad = p.grad / dist.get_world_size(group)
"""),
    ("3.1", "sums a copy, in the order of backward", """
@torch.no_grad()
def average_gradients(model, group=None):
    for name, p in reversed(list(model.named_parameters())):
        if p.grad is not None:
            total = p.grad.clone()
            dist.all_reduce(total, group=group)
            p.grad.copy_(total / dist.get_world_size(group))
"""),
    ("3.2", "single precision total, kept as a tensor", """
def average_gradients_weighted(model, samples, group=None):
    total = torch.tensor([samples], dtype=torch.float32)
    dist.all_reduce(total, group=group)
    for p in model.parameters():
        if p.grad is not None:
            p.grad *= samples / total
            dist.all_reduce(p.grad, group=group)
"""),
    ("3.2", "divides at the end", """
def average_gradients_weighted(model, samples, group=None):
    total = torch.tensor(samples)
    dist.all_reduce(total, group=group)
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(samples)
            dist.all_reduce(p.grad, group=group)
            p.grad.div_(total.item())
"""),
    ("3.2", "counts last", """
def average_gradients_weighted(model, samples, group=None):
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    works = [dist.all_reduce(g.mul_(samples), group=group, async_op=True) for g in grads]
    total = torch.tensor(float(samples))
    dist.all_reduce(total, group=group)
    for g, work in zip(grads, works):
        work.wait()
        g /= total.item()
"""),
    ("3.3", "a list", """
def global_metrics(loss_sum, correct, count, group=None):
    t = torch.tensor([loss_sum, correct, count], dtype=torch.float64)
    dist.all_reduce(t, group=group)
    return (t[:2] / t[2]).tolist()
"""),
    ("3.3", "single precision, items", """
def global_metrics(loss_sum, correct, count, group=None):
    t = torch.tensor([loss_sum, correct, count])
    dist.all_reduce(t, op=dist.ReduceOp.SUM, group=group)
    return (t[0] / t[2]).item(), (t[1] / t[2]).item()
"""),
    ("3.3", "NumPy numbers", """
def global_metrics(loss_sum, correct, count, group=None):
    import numpy as np
    t = torch.from_numpy(np.array([loss_sum, correct, count], dtype=np.float64))
    dist.all_reduce(t, group=group)
    a = t.numpy()
    return tuple(a[:2] / a[2])
"""),
    ("3.4", "zeros for an empty part, returns a tensor", """
def train_step(model, optimizer, images, labels, group=None):
    p, r = dist.get_world_size(group), dist.get_rank(group)
    mine, n = slice(r, None, p), len(labels)
    k = len(labels[mine])
    optimizer.zero_grad(set_to_none=False)
    loss_sum = torch.zeros(())
    if k:
        loss = cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        loss_sum = loss.detach() * k
    else:
        (cross_entropy(model(images[mine]), labels[mine], reduction="sum") * 0).backward()
    average_gradients_weighted(model, k, group)
    optimizer.step()
    total = (loss_sum / n).to(torch.float64)
    dist.all_reduce(total, group=group)
    return total
"""),
    ("3.4", "a weighted loss and the plain mean", """
def train_step(model, optimizer, images, labels, group=None):
    p, r = dist.get_world_size(group), dist.get_rank(group)
    x, y = images[r::p], labels[r::p]
    losses = cross_entropy(model(x), y, reduction="none")
    optimizer.zero_grad()
    (losses.sum() * p / len(labels)).backward()
    average_gradients(model, group)
    optimizer.step()
    return global_metrics(losses.sum().item(), 0, len(y), group=group)[0]
"""),
    ("3.6", "smallest and largest bits", """
def replicas_in_sync(model, group=None):
    bits = torch.cat([p.detach().reshape(-1).view(torch.int32) for p in model.parameters()])
    low, high = bits.clone(), bits.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return torch.equal(low, high)
"""),
    ("3.6", "gathers everything", """
def replicas_in_sync(model, group=None):
    bits = torch.cat([p.detach().flatten().view(torch.int32) for p in model.parameters()])
    all_bits = [torch.empty_like(bits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_bits, bits, group=group)
    return all(torch.equal(bits, other) for other in all_bits)
"""),
    ("3.6", "compares digests", """
def replicas_in_sync(model, group=None):
    import hashlib
    told = hashlib.sha256()
    for p in model.parameters():
        told.update(p.detach().numpy().tobytes())
    number = torch.tensor(int(told.hexdigest()[:15], 16))
    largest = number.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    differs = (largest != number).to(torch.int64)
    dist.all_reduce(differs, group=group)
    return int(differs) == 0
"""),
]  # fmt: skip


AVERAGE = """
def average_gradients(model, group=None):
    for parameter in model.parameters():
        if parameter.grad is not None:
            {0}
"""
WEIGHTED = """
def average_gradients_weighted(model, samples, group=None):
    total = torch.tensor(float(samples))
    {0}
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad *= {1}
            dist.all_reduce(parameter.grad{2})
"""
TOTAL = "dist.all_reduce(total, group=group)"
METRICS = """
def global_metrics(loss_sum, correct, count, group=None):
    {0}
"""

# Wrong versions of a solution: (task, text in the solution, text in its place, what is said).
_CHANGES = [
    ("3.4", "average_gradients_weighted(model, samples, group)", "pass", "Each replica took its"),
    (
        "3.4",
        "average_gradients_weighted(model, samples, group)",
        "average_gradients(model, group)",
        "You used the mean of the ranks' means",
    ),
    ("3.4", "optimizer.zero_grad()", "pass", "optimizer.zero_grad()"),
    ("3.4", "optimizer.step()", "pass", "The replica has not moved"),
    ("3.4", "return loss", "return loss_sum.item() / max(samples, 1)", "You returned the loss of"),
    ("3.4", "return loss", "pass", "Return the mean loss of the minibatch"),
    ("3.4", "images[part], labels[part]", "images, labels", "computes the whole minibatch"),
    (
        "3.4",
        "slice(dist.get_rank(group), None, dist.get_world_size(group))",
        "slice(dist.get_rank(), None, dist.get_world_size())",
        "Each sample must be on one rank, once",
    ),
    ("3.4", "loss_sum.item(), 0", "(loss_sum / samples).item() * samples, 0", "0 / 0"),
    ("3.4", "global_metrics(loss_sum.item(), 0, samples, group)",
     "global_metrics(loss_sum.item(), 0, samples)", "Pass group=group"),
    ("3.4", "optimizer.zero_grad()", "if samples == 0: return 0.0\n    optimizer.zero_grad()",
     "did not make this one"),
    ("3.6", "torch.equal(bits, reference)",
     "torch.allclose(parameter, reference.view(torch.float32))", "last bit"),
    ("3.6", "dist.all_reduce(different, op=dist.ReduceOp.MAX, group=group)", "pass",
     "expected False, got True"),
    ("3.6", "reference = bits.clone()", "reference = bits", "You changed the model"),
    ("3.6", "return different.item() == 0", "return different == 0", "a Python bool"),
    ("3.6", ".view(torch.int32)", ".clone()", "NaN"),
    ("3.6", "group_src=0", "src=0", "group_src=0 (or group_dst=0) for the first rank of the group"),
    ("3.6", "for parameter in model.parameters():",
     "for parameter in [p for p in model.parameters() if p.requires_grad]:", "1.bias (frozen)"),
    ("3.6", "for parameter in model.parameters():",
     "for parameter in list(model.parameters())[-1:]:", "of 1.weight differs in its last bit"),
    ("3.6", "for parameter in model.parameters():",
     "for parameter in list(model.parameters())[:1]:", "of 1.bias (frozen) differs"),
    ("3.6", "return different.item() == 0", "pass", "Return True or False as a Python bool"),
    ("3.6", "return different.item() == 0", "return different.item() != 0", "identical replicas"),
    ("3.6", ", op=dist.ReduceOp.MAX, group=group", ", op=dist.ReduceOp.MAX, group=group, "
     "async_op=True", "You never call wait()"),
    ("3.4", "return loss", "return cross_entropy(model(images), labels).item()",
     "You call the model 2 times in a step"),
    ("3.4", "return loss", "return loss * len(labels)", "a sum over the samples"),
    ("3.4", "(loss_sum / max(samples, 1)).backward()",
     "loss_sum.backward()", "not the sequential step"),
]  # fmt: skip

_WRONG = [
    ("3.1", AVERAGE.format("dist.all_reduce(parameter.grad, group=group)"), "are the sum over 4"),
    ("3.1", AVERAGE.format("parameter.grad /= dist.get_world_size(group)"), "never summed"),
    (
        "3.1",
        AVERAGE.format(
            "dist.all_reduce(parameter.grad, group=group); parameter.grad /= dist.get_world_size()"
        ),
        "You divided the sum by 4, the size of the world, but this group has 2",
    ),
    (
        "3.1",
        AVERAGE.format("dist.all_reduce(parameter.grad); parameter.grad /= dist.get_world_size()"),
        "Pass group=group",
    ),
    (
        "3.1",
        AVERAGE.format("dist.all_reduce(parameter.grad, group=group); parameter.grad /= 64"),
        "Check the divisor",
    ),
    (
        "3.1",
        AVERAGE.format(
            "dist.all_reduce(parameter.data, group=group); "
            "parameter.data /= dist.get_world_size(group)"
        ),
        "not the values",
    ),
    (
        "3.1",
        """
def average_gradients(model, group=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)
""",
        "in average_gradients()",
    ),
    (
        "3.1",
        AVERAGE.format(
            "p = dist.get_world_size(group); "
            "every = [torch.empty_like(parameter.grad) for _ in range(p)]; "
            "dist.all_gather(every, parameter.grad, group=group); "
            "parameter.grad = sum(every) / len(every)"
        ),
        "You call all_gather",
    ),
    (
        "3.1",
        "def average_gradients(model, group=None):\n"
        "    if dist.get_rank(group) == 0:\n"
        "        return\n" + source_of(NOTEBOOK, "average-answer").split("\n", 1)[1],
        "wait for rank 0",
    ),
    ("3.2", WEIGHTED.format(TOTAL, "1 / dist.get_world_size(group)", ", group=group"),
     "mean of the ranks' means"),
    ("3.2", WEIGHTED.format(TOTAL, "samples", ", group=group"), "never divided"),
    ("3.2", WEIGHTED.format(TOTAL, "samples / dist.get_world_size(group)", ", group=group"),
     "You weighted by samples, and then divided by the 4 ranks"),
    ("3.2", WEIGHTED.format("dist.all_reduce(total)", "samples / total", ", group=group"),
     "Pass group=group to every call"),
    ("3.2", WEIGHTED.format("dist.all_reduce(total)", "samples / total", ""),
     "Pass group=group to every call"),
    (
        "3.3",
        METRICS.format(
            "m = torch.tensor([loss_sum / max(count, 1), correct / max(count, 1)]); "
            "dist.all_reduce(m, group=group); m /= dist.get_world_size(group); return m.tolist()"
        ),
        "means of the ranks' means",
    ),
    (
        "3.3",
        METRICS.format(
            "t = [torch.tensor(float(v)) for v in (loss_sum, correct, count)]; "
            "[dist.all_reduce(v, group=group) for v in t]; "
            "return (t[0] / t[2]).item(), (t[1] / t[2]).item()"
        ),
        "Expected 1 call of all_reduce, of a tensor with the three numbers, but your code made 3",
    ),
    (
        "3.3",
        METRICS.format(
            "t = torch.tensor([loss_sum, correct, count]); dist.all_reduce(t); "
            "return (t[:2] / t[2]).tolist()"
        ),
        "Pass group=group to every call",
    ),
    (
        "3.3",
        METRICS.format(
            "t = torch.tensor([loss_sum, correct, count]); dist.all_reduce(t, group=group); "
            "return t[1] / t[2], t[0] / t[2]"
        ),
        "swapped",
    ),
    (
        "3.3",
        METRICS.format("return loss_sum / max(count, 1), correct / max(count, 1)"),
        "You returned this rank's means",
    ),
    ("3.1", AVERAGE.format("dist.all_reduce(parameter.grad, group=group, async_op=True); "
     "parameter.grad /= dist.get_world_size(group)"), "You never call wait()"),
    ("3.1", AVERAGE.format("total = parameter.grad.clone(); dist.all_reduce(total, group=group); "
     "total /= dist.get_world_size(group)"), "and store the result there"),
    ("3.1", AVERAGE.format("dist.all_reduce(parameter.grad, group=group); parameter.grad.div_("
     "dist.get_world_size(group), rounding_mode='trunc')"), "to whole numbers"),
    ("3.1", AVERAGE.format("dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX, group=group)"),
     "op=dist.ReduceOp.SUM"),
    ("3.1", AVERAGE.replace("grad is not None", "requires_grad").format(
        "dist.all_reduce(parameter.grad, group=group)"), "'NoneType'"),
    ("3.1", AVERAGE.replace("if parameter.grad is not None", "if parameter.grad is None: "
     "parameter.grad = torch.zeros_like(parameter)\n        if True").format(
        "dist.all_reduce(parameter.grad, group=group); "
        "parameter.grad /= dist.get_world_size(group)"), "a parameter that had none"),
    ("3.1", "def average_gradients(model, group=None):\n"
     "    grads = [p.grad for p in model.parameters() if p.grad is not None]\n"
     "    flat = torch.cat([g.flatten() for g in grads])\n"
     "    dist.all_reduce(flat, group=group)\n"
     "    flat /= dist.get_world_size(group)\n"
     "    for g in grads:\n"
     "        g.copy_(flat[: g.numel()].view_as(g))\n"
     "        flat = flat[g.numel() :]\n", "Expected 5 calls of all_reduce: one for each"),
    ("3.2", WEIGHTED.format(TOTAL, "1", ", group=group); parameter.grad *= (samples / total"),
     "weighted after the sum"),
    ("3.2", WEIGHTED.format(TOTAL, "samples / total", ", group=group, async_op=True"),
     "You never call wait()"),
    ("3.2", WEIGHTED.format(TOTAL, "1 / total", ", group=group"), "You divided by the samples of"),
    ("3.2", WEIGHTED.format("", "samples / total", ", group=group"), "plain sum over the ranks"),
    ("3.2", WEIGHTED.format(TOTAL, "1", ".clone(), group=group"), "The gradients are still this"),
    ("3.2", WEIGHTED.format(TOTAL, "samples / total", ".clone(), group=group"), "never summed"),
    ("3.2", WEIGHTED.format(TOTAL, "samples / total / dist.get_world_size(group)",
                            ", group=group"), "You weighted by samples / all samples, and then"),
    ("3.2", WEIGHTED.format("global known\n    known = globals().get('known', None)\n"
     "    if known is None:\n        dist.all_reduce(total, group=group)\n"
     "        known = total\n    total = known", "samples / total", ", group=group")
     + "known = None\n", "of an earlier call"),
    ("3.2", WEIGHTED.format("if samples == 0:\n        return\n    " + TOTAL, "samples / total",
                            ", group=group"), "did not make this one"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]); "
     "dist.all_reduce(t, group=group); return t[0] / t[2], t[1] / t[2]"), "Your numbers are"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]); "
     "dist.all_reduce(t, group=group); return t[:2] / t[2]"), "Your numbers are right, but you"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]); "
     "dist.all_reduce(t, group=group); return t.tolist()"), "You returned the three sums"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]); "
     "dist.all_reduce(t, group=group); (t[:2] / t[2]).tolist()"), "You returned None. Return"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]).long(); "
     "dist.all_reduce(t, group=group); return (t[:2] / t[2]).tolist()"), "to whole numbers"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct]); "
     "dist.all_reduce(t, group=group); return (t / max(count, 1)).tolist()"),
     "You divided by this rank's count"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum, correct, count]); "
     "dist.all_reduce(t, group=group); return (t[:2] / dist.get_world_size(group)).tolist()"),
     "divided by the number of ranks"),
    ("3.3", METRICS.format("t = torch.tensor([loss_sum / count, correct / count]); "
     "dist.all_reduce(t, group=group); return (t / dist.get_world_size(group)).tolist()"),
     "means of the ranks' means"),
    ("3.6", "def replicas_in_sync(model, group=None):\n    return True\n",
     "You communicate nothing, although the result"),
    (
        "3.6",
        """
def replicas_in_sync(model, group=None):
    total = sum(p.detach().double().sum() for p in model.parameters())
    low, high = total.clone(), total.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    return bool(low == high)
""",
        "swapped",
    ),
]  # fmt: skip
# What `train_parallel` may look like: a part of the solution, and what stands in its place.
_TRAININGS = [
    ("lr=0.2", "lr=0.1", "Your learning rate is 0.1, and the baseline's is 0.2"),
    ("lr=0.2", "lr=0.4", "Your learning rate is 0.4, and the baseline's is 0.2"),
    ("test_sums(model, images[part], labels[part])", "test_sums(model, images, labels)",
     "Every rank takes all images"),
    ("minibatches(epoch)", "minibatches(0)", "Every epoch has the same order"),
    ("minibatches(epoch)", "minibatches(epoch + 1)", '"loss": entry 0'),
    ("train_step(model, optimizer, images, labels, group)",
     "train_step(model, optimizer, images, labels)", "Pass group=group"),
    ("*map(sum, zip(*sums)), group)", "*map(sum, zip(*sums)))", "Pass group=group"),
    ("test_loss, accuracy = global_metrics(*map(sum, zip(*sums)), group)",
     "a, b, c = map(sum, zip(*sums)); test_loss, accuracy = a / c, b / c", "this rank's own"),
    ("test_loss, accuracy = global", "accuracy, test_loss = global", 'You swapped this list'),
    ("].append(accuracy)", "].append(100 * accuracy)", "You returned percent"),
    ("return history", "return history['loss']", 'Return a dict with "loss"'),
    ("return history", "pass", 'Return a dict with "loss"'),
    ("return history", "return history if rank == 0 else None", 'Return a dict with "loss"'),
    ("            history[\"loss\"].append(loss)\n",
     "        history[\"loss\"].append(loss)\n",
     "epochs, one for each"),
    ("range(epochs)", "range(epochs + 1)", "Return 12 entries for 4 epochs"),
]  # fmt: skip
_OTHER_TRAININGS = [
    ("global_metrics(*map(sum, zip(*sums)), group)", "(lambda t: (dist.all_reduce(t, group=group), "
     "(t[:2] / t[2]).tolist())[1])(torch.tensor(sums, dtype=torch.float64).sum(0))"),
    ("        sums = [\n            test_sums(model, images[part], labels[part])\n"
     "            for images, labels in data.InMemoryLoader(test_data, 1000)\n        ]",
     "        p, r = dist.get_world_size(group), dist.get_rank(group)\n"
     "        sums = [test_sums(model, *batch) for k, batch in "
     "enumerate(data.InMemoryLoader(test_data, 1000)) if k % p == r]"),
    ("        sums = [", "        print(epoch)\n        sums = ["),
    # It leaves the model in evaluation mode, of which the task says nothing.
    ("loss = train_step(model, optimizer, images, labels, group)\n"
     "            history[\"loss\"].append(loss)\n",
     "loss = train_step(model.train(), optimizer, images, labels, group)\n"
     "            history[\"loss\"].append(loss)\n        model.eval()\n"),
]  # fmt: skip


# What ranks 0 and 1 may have done with the results.
_RESULTS = [
    ("del parallel", "NameError"),
    ("parallel = parallel['loss']", "must be a dict"),
    ("parallel['accuracy'][-1] = 0.123", "accuracy in the history is [0.123]"),
    ("parallel['loss'].pop()", "numbers of losses"),
    ("parallel['loss'][0] += 0.01", "The very first step has the same weights and the same"),
    (
        "parallel['loss'][1:] = [x + 1.1e-4 for x in parallel['loss'][1:]]",
        "The losses of step",
    ),
    ("parallel['loss'][6:] = [x + 0.1 for x in parallel['loss'][6:]]", "In epoch 1 the losses"),
    ("parallel['test_loss'][0] += 0.1 * rank", "differ between ranks 0 and 1"),
    (
        "parallel_model.layers[1].weight.data[0, 0] += 1e-7 + rank * 1e-3",
        "The weights on ranks 0 and 1 differ, so the replicas aren't",
    ),
    ("parallel_model = models.mlp(seed=3)", "on all test images"),
]

_EARLY = "    return train_sequential(model, epochs)\n    part = slice"
WRONG = [
    *((task, said, code, said) for task, code, said in _WRONG),
    *(
        ("3.5", said, f"if rank < 2:\n{textwrap.indent(change, '    ')}", said)
        for change, said in _RESULTS
    ),
]
CHANGES = [
    *((task, said, right, wrong, said) for task, right, wrong, said in _CHANGES),
    *(("3.5", said, right, wrong, said) for right, wrong, said in _TRAININGS),
    ("3.5", "returns the sequential training", "    part = slice", _EARLY,
     "Let train_step(…, group) take this rank's part of each"),
]  # fmt: skip
CHANGES_THAT_ARE_RIGHT = [
    ("3.5", f"in another way, {k}", right, other)
    for k, (right, other) in enumerate(_OTHER_TRAININGS)
]

#: Made for what the check asked first: other types, lengths and groups are asked, too.
CHANGES += [
    (
        "3.1",
        "computes in float32",
        "dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)",
        "b = parameter.grad.float(); dist.all_reduce(b, group=group); parameter.grad.copy_(b)",
        "Some all_reduces have fewer bytes than the gradients",
    ),
    (
        "3.2",
        "computes in float32",
        "dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM, group=group)",
        "b = parameter.grad.float(); dist.all_reduce(b, group=group); parameter.grad.copy_(b)",
        "Some all_reduces have fewer bytes than the gradients",
    ),
    (
        "3.4",
        "takes rank % size for its place",
        "dist.get_rank(group)",
        "dist.get_rank() % dist.get_world_size(group)",
        "Each sample must be on one rank, once",
    ),
    (
        "3.6",
        "computes in float32",
        "bits = parameter.detach().contiguous()",
        "bits = parameter.detach().float().contiguous()",
        "differs in its last bit",
    ),
    (
        "3.6",
        "takes the group's first rank to be a multiple of its size",
        "group_src=0",
        "src=dist.get_rank() - dist.get_rank() % dist.get_world_size(group)",
        "is not in this group",
    ),
]

#: Found by an attacker who looked for what no case asks: lengths, places, sizes, calls.
_PART = "slice(dist.get_rank(group), None, dist.get_world_size(group))"
_OPTIMIZER = "optimizer.step() of the given optimizer 0 times"
_LOOP = "    with torch.no_grad():\n        for parameter in model.parameters():\n"
_TESTS = """        sums = [
            test_sums(model, images[part], labels[part])
            for images, labels in data.InMemoryLoader(test_data, 1000)
        ]
        test_loss, accuracy = global_metrics(*map(sum, zip(*sums)), group)
"""
CHANGES += [
    ("3.2", "keeps the total on the model", "    weight = samples / total.item()",
     "    model.total_ = getattr(model, 'total_', total.item())\n"
     "    weight = samples / model.total_", "an earlier call"),
    ("3.4", "averages the weights after the step",
     "    average_gradients_weighted(model, samples, group)\n    optimizer.step()\n",
     "    optimizer.step()\n    for parameter in model.parameters():\n"
     "        parameter.data.mul_(samples / len(labels))\n"
     "        dist.all_reduce(parameter.data, group=group)\n", "not the weights after it"),
    ("3.4", "zeros in place of None", "    optimizer.step()\n",
     "    for parameter in model.parameters():\n        if parameter.grad is None and "
     "parameter.requires_grad:\n            parameter.grad = torch.zeros_like(parameter)\n"
     "    optimizer.step()\n", "- ranks 1 and 3: a parameter that is not used, minibatch of 8 in"),
    ("3.6", "compares buffers, too", "model.parameters():", "model.state_dict().values():",
     "identical replicas"),
    ("3.6", "a sum of bits that wraps around",
     "dist.broadcast(reference, group_src=0, group=group)\n        if not torch.equal(bits,",
     "dist.all_reduce(reference, group=group)\n"
     "        if not torch.equal(bits * dist.get_world_size(group),", "on every second rank"),
    ("3.1", "reduces the first six rows", "all_reduce(parameter.grad,",
     "all_reduce(parameter.grad[:6],", "Some all_reduces have fewer bytes than the gradients"),
    ("3.1", "reduces the first 36 numbers", "all_reduce(parameter.grad,",
     "all_reduce(parameter.grad.reshape(-1)[:36],", "Some all_reduces have fewer bytes than the"),
    ("3.2", "reduces the first six rows", "all_reduce(parameter.grad,",
     "all_reduce(parameter.grad[:6],", "Some all_reduces have fewer bytes than the gradients"),
    ("3.2", "counts in a byte", "torch.tensor(float(samples), dtype=torch.float64)",
     "torch.tensor([samples], dtype=torch.uint8)", "uint8"),
    ("3.2", "cuts the samples", "    total =", "    samples = min(samples, 100)\n    total =",
     "the mean of the ranks' means"),
    ("3.4", "gives rank 0 the whole minibatch", _PART,
     "slice(dist.get_rank(group) * len(labels), (dist.get_rank(group) + 1) * len(labels))",
     "all parts must have the same size, give or take one"),
    ("3.4", "moves the weights by hand", "    optimizer.step()\n",
     _LOOP + "            if parameter.grad is not None:\n"
     "                parameter -= optimizer.defaults['lr'] * parameter.grad\n", _OPTIMIZER),
    ("3.4", "moves the weights at a rate by hand", "    optimizer.step()\n",
     _LOOP + "            if parameter.grad is not None:\n"
     "                parameter -= 0.5 * parameter.grad\n", _OPTIMIZER),
    ("3.4", "makes an optimizer", "optimizer.step()",
     "torch.optim.SGD(model.parameters(), lr=0.5).step()", _OPTIMIZER),
    ("3.5", "lets rank 0 test everything", "test_sums(model, images[part], labels[part])",
     "test_sums(model, *(x[1000 * dist.get_rank(group) :] for x in (images, labels)))",
     "unequal parts"),
    ("3.5", "tests in the first and the last epoch", _TESTS,
     "        if epoch in (0, epochs - 1):\n" + textwrap.indent(_TESTS, "    "),
     "The ranks take too few images in all epochs together"),
    ("3.6", "leaves out the last weight", ".contiguous()", ".reshape(-1)[:-1].contiguous()",
     "weight of"),
    ("3.6", "leaves out the first weight", ".contiguous()", ".reshape(-1)[1:].contiguous()",
     "weight of"),
    ("3.6", "compares the first six rows", "parameter.detach()", "parameter.detach()[:6]",
     "weight of"),
]  # fmt: skip
CHANGES += [
    ("3.5", "trains in evaluation mode from the second epoch on", "        sums = [",
     "        model.eval()\n        sums = [", "The model was in evaluation mode during"),
    ("3.5", "takes the mean of the ranks' means", _TESTS, _TESTS.replace(
        "global_metrics(*map(sum, zip(*sums)), group)", "map(sum, zip(*sums)), 0").replace(
        "test_loss, accuracy =", "(loss, right, count), _ =") + """\
        means = torch.tensor([loss / count, right / count], dtype=torch.float64)
        dist.all_reduce(means, group=group)
        test_loss, accuracy = (means / dist.get_world_size(group)).tolist()
""", "You used the mean of the ranks' means, but the ranks test different"),
]  # fmt: skip
WRONG += [
    ("3.4", "a contiguous part, a sum divided by all", """
def train_step(model, optimizer, images, labels, group=None):
    p, r = dist.get_world_size(group), dist.get_rank(group)
    images, labels, n = images.tensor_split(p)[r], labels.tensor_split(p)[r], len(labels)
    optimizer.zero_grad()
    loss = cross_entropy(model(images), labels, reduction="sum") / n
    loss.backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss, group=group)
    return loss.item()
""", "- rank 0: minibatch of 8 in the group of ranks 0, 1, 2, 3"),
    ("3.1", "walks over the modules", """
def average_gradients(model, group=None):
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad /= dist.get_world_size(group)
""", "one for each parameter that has a gradient"),
    ("3.1", "reduces all at once, and then nothing", """
def average_gradients(model, group=None):
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    row = torch.cat([g.flatten() for g in gradients]) / dist.get_world_size(group)
    dist.all_reduce(row, group=group)
    for g in gradients:
        g.copy_(row[: g.numel()].view_as(g))
        row = row[g.numel() :]
    for _ in gradients[1:]:
        dist.all_reduce(torch.zeros(1), group=group)
""", "Some all_reduces have fewer bytes than the gradients"),
    ("3.6", "counts the weights that differ in a byte", """
def replicas_in_sync(model, group=None):
    different = torch.zeros(1, dtype=torch.uint8)
    for parameter in model.parameters():
        bits = parameter.detach().view(torch.int32)
        reference = bits.clone()
        dist.broadcast(reference, group_src=0, group=group)
        different += (bits != reference).sum().to(torch.uint8)
    dist.all_reduce(different, op=dist.ReduceOp.MAX, group=group)
    return different.item() == 0
""", "256 weights of 3.weight differ in their last bits on one"),
    ("3.6", "compares a weighted sum of the bits", """
def replicas_in_sync(model, group=None):
    sums = []
    for parameter in model.parameters():
        bits = parameter.detach().reshape(-1).view(torch.int32).long()
        sums.append((bits * torch.arange(1, len(bits) + 1)).sum())
    most = torch.stack(sums)
    least = most.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    return torch.equal(most, least)
""", "four weights in a row"),
]  # fmt: skip
