"""The probes of lab 03, which run on the ranks beside the student's answers.

A history is a dict with a list for each of :data:`KEYS`. It has a loss for each step, and a test
loss and an accuracy for each epoch.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from utils import data
from utils.checks.draws import across, drawn
from utils.checks.groups import in_group
from utils.checks.probe import answer_named, in_double, recorded, told
from utils.labs.shared import small_models

# -- metrics, steps, and replicas ------------------------------------------------------------------


@in_group
def probe_metrics(user_ns: dict, *, rank: int, named: dict, parts: list) -> list[dict]:
    """Call `global_metrics` with this rank's sums, once for each part."""
    function = answer_named(user_ns, "global_metrics")
    answers = []
    for sums in parts:
        result, calls = recorded(function, *sums, **named)
        pair = isinstance(result, tuple | list)
        kinds = [type(number).__name__ for number in (result if pair else [result])]
        floats = pair and all(isinstance(number, float) for number in result)
        answers.append({"result": told(result), "kinds": [] if floats else kinds, "calls": calls})
    return answers


def rate_of(seed: int) -> float:
    """Return the learning rate that follows from this seed."""
    return 0.4 + seed % 41 / 200


def step_model(seed: int, kind: str) -> nn.Sequential:
    """Return the model of a kind of case, such as "frozen", "tied", "unused" or "double"."""
    model = small_models.net(seed, (6, 6, 6, 4) if kind == "tied" else widths(seed))
    if kind == "frozen":
        model[1].bias.requires_grad_(False)
        model[2].eval()  # only this layer
    elif kind == "tied":
        model[3].weight = model[1].weight
    elif kind == "evaluating":
        model.eval()
    elif kind == "unused":
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return model.double() if kind == "double" else model


def drawn_minibatch(
    seed: int, number: int, count: int, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a minibatch with a rank's samples."""
    dtype = torch.float64 if kind == "double" else torch.float32
    return small_models.samples(seed + number, count, dtype)


@in_group
def probe_steps(
    user_ns: dict, *, rank: int, named: dict, data_seed: int, seed: int, kind: str, counts: list
) -> list[dict]:
    """Take a `train_step` on each minibatch; ``data_seed`` draws this rank's samples."""
    model = step_model(seed, kind)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate_of(seed))
    step = answer_named(user_ns, "train_step"), model, small_models.watched(model), optimizer
    batches = [
        drawn_minibatch(data_seed, number, count, kind) for number, count in enumerate(counts)
    ]
    return [small_models.taken(*step, batch, **named) for batch in batches]


@torch.no_grad()
def _spoil(model: nn.Module, how: str, which: int, at: int) -> None:
    """Damage a parameter of a replica; see `_damage_of` in the checks."""
    row = list(model.parameters())[which].view(-1)
    k = at % len(row)
    if how in ("swap", "checksum"):
        k = at % (len(row) - 3)
    if how in ("last bit", "many"):
        part = slice(256) if how == "many" else slice(k, k + 1)
        row[part] = torch.nextafter(row[part], row.new_tensor(9.0))
    elif how in ("-0.0", "0.0", "nan", "one nan"):
        row[k] = float(how.removeprefix("one "))
    elif how == "checksum":
        bits = row.view(torch.int64 if row.dtype == torch.float64 else torch.int32)
        bits[k : k + 4] += torch.tensor([1, -3, 3, -1], dtype=bits.dtype)
    elif how == "other sign":
        row[k] = -row[k]
    elif how == "swap":
        row[k : k + 2] = row[k : k + 2].flip(0).clone()
    elif how:
        row[k] += {"larger": 1.0, "smaller": -1.0}[how]


@in_group
def probe_sync(
    user_ns: dict, *, rank: int, named: dict, seed: int, damages: list[list]
) -> list[dict]:
    """Call `replicas_in_sync` with replicas that may differ; return a dict for each call.

    Args:
        damages: the damage to this rank's replica in each call; see `_damage_of` in the checks.
    """
    function = answer_named(user_ns, "replicas_in_sync")
    answers = []
    first, *middle, last = widths(seed)  # 3.weight has more than 256 numbers
    model = small_models.net(seed, (first, *(width + 10 for width in middle), last))
    model[1].bias.requires_grad_(False)
    if not named:
        in_double(model)
    model.register_buffer("mean", torch.full((3,), float(rank)))  # a buffer, not a parameter
    healthy = copy.deepcopy(model.state_dict())
    for damage in damages:
        model.load_state_dict(healthy)
        _spoil(model, *damage)
        before = small_models.weights_of(model).view(torch.int32)
        result, calls = recorded(function, model, **named)
        changed = not torch.equal(before, small_models.weights_of(model).view(torch.int32))
        kind = result if isinstance(result, bool) else f"<{type(result).__name__}>"
        answers.append({"result": kind, "changed": changed, "calls": calls})
    return answers


# -- gradients -------------------------------------------------------------------------------------


def widths(seed: int) -> tuple[int, ...]:
    """Draw the widths of a model, so that no answer can be made for one model."""
    return 6, 7 + seed % 6, 7 + seed // 6 % 6, 4


#: The first parameter has at most so many numbers, see :func:`widths`.
MOST_OF_FIRST = 6 * 12


def drawn_gradient(seed: int, samples: int) -> torch.Tensor:
    """Return the numbers to fill a rank's gradients with; zeros without samples.

    With an odd seed, the first parameter's gradient is zero, too, and with another rank's seed not.
    """
    row = 10 * drawn(seed, 300, dtype=torch.float32) * (samples > 0)
    row[: MOST_OF_FIRST * (seed % 2)] = 0
    return row


def averaged_net(seed: int, sizes: Sequence[int]) -> nn.Sequential:
    """Return a net that has parameters beside those of its linear layers."""
    model = small_models.net(seed, sizes)
    model[4] = nn.PReLU(3)
    return model


@in_group
def probe_average(
    user_ns: dict, *, rank: int, named: dict, seed: int, counts: list, weighted: bool, sizes: list
) -> list[dict]:
    """Call `average_gradients`, or the weighted version, with known gradients.

    One parameter is frozen, and one isn't used in the first call and is frozen after the backward
    of the later ones. Matrices of gradients aren't contiguous. Without a group, all numbers are in
    double precision.

    Args:
        seed: draws this rank's gradients.
        counts: this rank's number of samples in each call.
    """
    name = "average_gradients_weighted" if weighted else "average_gradients"
    function = answer_named(user_ns, name)
    answers = []
    model = averaged_net(seed, sizes).to(torch.float32 if named else torch.float64)
    model[1].bias.requires_grad_(False)
    model[5].shared = model[1].weight  # as two layers that share one weight
    for k, count in enumerate(counts):
        model.zero_grad()
        model.train(k == 0)
        model[3].bias.requires_grad_(True)
        _fill_gradients(model, drawn_gradient(seed + 10 * k, count), all_used=k > 0)
        model[3].bias.requires_grad_(k == 0)
        before = small_models.weights_of(model)
        had = [p for p in model.parameters() if p.grad is not None]
        _, calls = recorded(function, model, *[count] * weighted, **named)
        answers.append({
            "gradient": torch.cat([p.grad.reshape(-1) for p in had]),
            "count": len(had),
            "others": sum(p.grad is not None for p in model.parameters()) - len(had),
            "moved": not torch.equal(small_models.weights_of(model), before),
            "nbytes": sorted((p.grad.nbytes for p in had), reverse=True),
            "calls": calls,
        })
    return answers


def _fill_gradients(model: nn.Sequential, values: torch.Tensor, all_used: bool) -> None:
    """Make these values the gradients of all trained parameters, perhaps except one."""
    for parameter in model.parameters():
        if parameter.requires_grad and (all_used or parameter is not model[3].bias):
            own = values[: parameter.numel()].view_as(parameter).to(parameter.dtype)
            parameter.grad = across(own)
            values = values[parameter.numel() :]


# -- a whole training ------------------------------------------------------------------------------


KEYS = ("loss", "test_loss", "accuracy")
EPOCHS = 4


def few(p: int) -> dict[str, int]:
    """Return how many images p ranks train on and test, in minibatches of 128 and 1,000.

    The last minibatch is smaller. There is one minibatch of test images for each rank.
    """
    return {"trained": 300, "tested": 1000 * p - 893}


class Images(Dataset):
    """Random images from a rank's seed, whose first pixels contain their kind and their number.

    With an odd seed, the labels of test images are wrong. So the ranks' results differ a lot, and
    the mean of their means differs from the mean over all images.
    """

    def __init__(self, kind: str, count: int, seed: int):
        draw = torch.Generator().manual_seed(seed)
        self.targets = torch.randint(0, 10, (count,), generator=draw)
        self.data = torch.randint(0, 60, (count, 28, 28), generator=draw, dtype=torch.uint8)
        number = torch.arange(count)
        self.data[number, self.targets + 1] += 150
        if kind == "tested":
            self.targets = (self.targets + seed % 2) % 10
        self.data[:, 0, 0] = 255 if kind == "trained" else 0
        self.data[:, 0, 1] = number // 200
        self.data[:, 0, 2] = number % 200

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return (self.data[k : k + 1] / 255 - data.MEAN) / data.STD, int(self.targets[k])


def _which(inputs: torch.Tensor) -> dict[str, list[int]]:
    """Return the numbers of the images among a model's inputs, by their kind."""
    marks = ((inputs.flatten(1)[:, :3] * data.STD + data.MEAN) * 255).round().int()
    trained = marks[:, 0] > 127
    which = 200 * marks[:, 1] + marks[:, 2]
    return {"trained": which[trained].tolist(), "tested": which[~trained].tolist()}


def small_mlp() -> nn.Module:
    """Return the untrained model, which has no ReLU, because rounding makes jumps there."""
    return small_models.net(1, (784, 16, 10))


@in_group
def probe_training(user_ns: dict, *, rank: int, named: dict, seed: int) -> dict:
    """Call `train_parallel` with a few images; return its history, and which images the model got.

    Args:
        seed: draws this rank's images. The group trains on them only in this rank's parts.
    """
    function = answer_named(user_ns, "train_parallel")
    model = small_mlp()
    size = dist.get_world_size(named.get("group"))
    images = [Images(*one, seed) for one in few(size).items()]
    seen: dict[str, list[int]] = {"trained": [], "tested": []}
    modes = []

    def note(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        for kind, which in _which(inputs[0]).items():
            seen[kind] += which
            modes.extend([module.training] * (kind == "trained" and len(which) > 0))

    model.register_forward_pre_hook(note)
    with (
        mock.patch.dict(user_ns, {"train_data": images[0], "test_data": images[1]}),
        mock.patch.object(data, "fashion_mnist", lambda train=True, **_: images[not train]),
    ):
        history, calls = recorded(function, model, EPOCHS, **named)
    return {"history": told(history), "calls": calls, "in training mode": all(modes)} | seen


@torch.no_grad()
def metrics_of(model: nn.Module, images: Dataset, part: slice = slice(None)) -> list[float]:
    """Return the mean loss and the accuracy on a part of each minibatch."""
    sums = torch.zeros(3, dtype=torch.float64)
    for pixels, labels in data.InMemoryLoader(images, 1000):
        outputs = model(pixels[part])
        labels = labels[part]
        loss = functional.cross_entropy(outputs, labels, reduction="sum")
        sums += torch.tensor([loss, (outputs.argmax(1) == labels).sum(), len(labels)])
    return (sums[:2] / sums[2]).tolist()


def probe_run(user_ns: dict, *, rank: int) -> dict | None:
    """Return the histories on ranks 0 and 1, and new test results of the models."""
    from torch_mpi import record

    answer: dict = {}
    for name in ("parallel", "sequential")[: max(2 - rank, 0)]:
        history = answer_named(user_ns, name)
        model = answer_named(user_ns, f"{name}_model")
        if not isinstance(history, dict) or not set(KEYS) <= set(history):
            raise TypeError(f'{name} must be a dict with "loss", "test_loss" and "accuracy"')
        answer[name] = {key: told(list(history[key])) for key in KEYS}
        answer[name]["measured"] = metrics_of(model, data.fashion_mnist(train=False))
        if name == "parallel":
            weights = small_models.weights_of(model)
            largest = max(p.nbytes for p in model.parameters())
            answer["digest"] = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            sent = ("all_reduce", (0, 1), largest)
            calls = record.recorder.since(0)
            answer["gradients sent"] = sum((c.op, c.group, c.nbytes) == sent for c in calls)
    return answer
