"""A training on a few images and its sequential twin; histories, and what noise may do to them.

A history is a dict with a list for each of :data:`KEYS`: one loss a step, one test an epoch.
"""

from __future__ import annotations

import functools
import hashlib
import statistics
from collections.abc import Iterator
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from utils import data, models

from . import replicas
from .groups import WORLD, in_group, keywords, members_of
from .mistakes import Mistake, same
from .probe import answer_named, recorded, told
from .task import Report

KEYS = ("loss", "test_loss", "accuracy")
EPOCHS = 2
RATES = (0.1, 0.4, 0.5, 0.05, 0.01, 0.02, 0.8, 0.3, 1.0)  # wrong ones


def few(p: int) -> dict[str, int]:
    """How many images p ranks train on, in minibatches of 128, and test, in such of 1,000.

    The last minibatch is a smaller one; of those that are tested there is one for each rank.
    """
    return {"trained": 300, "tested": 1000 * p - 900}


class Images(Dataset):
    """Random images that tell by their first pixel what they are for."""

    def __init__(self, kind: str, count: int):
        self.data, self.targets = (tensor.clone() for tensor in _drawn(kind, count))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, int]:
        return (self.data[k : k + 1] / 255 - data.MEAN) / data.STD, int(self.targets[k])


@functools.cache
def _drawn(kind: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(count)
    targets = torch.randint(0, 10, (count,), generator=draw)
    pixels = torch.randint(0, 60, (count, 28, 28), generator=draw, dtype=torch.uint8)
    pixels[torch.arange(count), targets] += 150
    pixels[:, 0, 0] = 255 if kind == "trained" else 0
    return pixels, targets


def small_mlp() -> nn.Module:
    """The model as it is before the training."""
    return models.mlp(seed=1, sizes=(784, 16, 10))


@in_group
def probe_training(user_ns: dict, *, rank: int, group, partition) -> dict:
    """`train_parallel` on a few images: its history, and how many images the model got."""
    function, model = answer_named(user_ns, "train_parallel"), small_mlp()
    images = [Images(*one) for one in few(len(members_of(partition, rank, WORLD))).items()]
    counts = dict.fromkeys(("trained", "tested"), 0)

    def count(_, inputs: tuple[torch.Tensor]) -> None:
        trained = int((inputs[0].flatten(1)[:, 0] > 1).sum())
        counts["trained"] += trained
        counts["tested"] += len(inputs[0]) - trained

    model.register_forward_pre_hook(count)
    with (
        mock.patch.dict(user_ns, {"train_data": images[0], "test_data": images[1]}),
        mock.patch.object(data, "fashion_mnist", lambda train=True, **_: images[not train]),
    ):
        history, calls = recorded(function, model, EPOCHS, **keywords(partition, group))
    return {"history": told(history), "calls": calls} | counts


@functools.cache
def history_of_twin(
    p: int, rate: float = 0.2, place: int | None = None, same_order: bool = False
) -> dict:
    """What the twin gives on the images for p ranks; of one rank's part of each minibatch only."""
    model, images = small_mlp(), {kind: Images(kind, count) for kind, count in few(p).items()}
    part = slice(None) if place is None else slice(place, None, p)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    history: dict[str, list[float]] = {key: [] for key in KEYS}
    for epoch in range(EPOCHS):
        draw = torch.Generator().manual_seed(0 if same_order else epoch)
        loader = data.InMemoryLoader(images["trained"], 128, shuffle=True, generator=draw)
        for pixels, labels in loader:
            optimizer.zero_grad()
            losses = functional.cross_entropy(model(pixels), labels, reduction="none")
            losses.mean().backward()
            optimizer.step()
            history["loss"].append(losses[part].mean().item())
        for key, value in zip(KEYS[1:], metrics_of(model, images["tested"], part), strict=True):
            history[key].append(value)
    return history


@torch.no_grad()
def metrics_of(model: nn.Module, images: Dataset, part: slice = slice(None)) -> list[float]:
    """Mean loss and accuracy."""
    sums = torch.zeros(3, dtype=torch.float64)
    for pixels, labels in data.InMemoryLoader(images, 1000):
        outputs, labels = model(pixels[part]), labels[part]
        loss = functional.cross_entropy(outputs, labels, reduction="sum")
        sums += torch.tensor([loss, (outputs.argmax(1) == labels).sum(), len(labels)])
    return (sums[:2] / sums[2]).tolist()


def wrong_histories(key: str, place: int, p: int) -> Iterator[Mistake]:
    """Mistakes that give another list."""
    histories = functools.partial(history_of_twin, p)
    expected, own = histories()[key], histories(place=place)[key]
    entries = len(expected)
    yield Mistake(
        lambda got: not isinstance(got, list) or len(got) != entries,
        f"expected {entries} entries in {EPOCHS} epochs, one for each "
        f"{'step' if key == 'loss' else 'epoch'}",
    )
    if key == "loss":
        yield Mistake(own, "these are the losses of this rank's part: take what train_step returns")
        said = "every epoch has the same order: minibatches(epoch)"
        yield Mistake(histories(same_order=True)[key], said)
        for rate in RATES:
            said = f"this is learning rate {rate}, the twin's is 0.2"
            yield Mistake(histories(rate)[key], said)
    else:
        yield Mistake(own, "this is this rank's own: reduce sums and counts with global_metrics")
        other = KEYS[3 - KEYS.index(key)]
        yield Mistake(histories()[other], f'this is "{other}": the two are swapped')
        yield Mistake([100 * value for value in expected], "expected a share, not percent")


# What noise may do. A wrong result is far outside: see the figure in "Tell a bug from noise".
FIRST_LOSS, TYPICAL_LOSS, LAST = 1e-4, 0.03, {"test_loss": 0.05, "accuracy": 0.02}
# So many steps stay below FIRST_LOSS: rounding is a few 1e-7 there. It grows at once by a factor of
# a thousand where it takes an input of a ReLU across 0, in one run of six within 40 steps.
FIRST_STEPS = 10


def more_than_noise(sequential: dict, parallel: dict) -> str | None:
    """Where the histories differ by more than noise; `None` if nowhere."""
    gaps = [abs(a - b) for a, b in zip(sequential["loss"], parallel["loss"], strict=True)]
    length = -(-len(gaps) // len(sequential["accuracy"]))
    for k, gap in enumerate(gaps[: min(FIRST_STEPS, length)]):
        if not gap <= FIRST_LOSS:
            why = (
                "those before agree: so early that is no noise, but another step. Is the learning "
                "rate the twin's?" if k else "the very first step has the same weights and "
                "minibatch, and must have the same loss. Same seed? Same order?"
            )  # fmt: skip
            return f"the losses of step {k} differ by {gap:.2g}; {why}"
    for epoch in range(-(-len(gaps) // length)):
        part = gaps[epoch * length : (epoch + 1) * length]
        if not statistics.median(part) <= TYPICAL_LOSS:
            return (
                f"epoch {epoch}: the losses differ by {statistics.median(part):.2g} in a typical "
                "step, which is no noise. Is the order of the samples the same in this epoch?"
            )
    for key, most in LAST.items():
        gap = abs(sequential[key][-1] - parallel[key][-1])
        if not gap <= most:
            return f"the last {key} differs by {gap:.2g}; noise stays below {most:g}"
    return None


def probe_run(user_ns: dict, *, rank: int) -> dict | None:
    """The histories on ranks 0 and 1, and test results computed anew from the models."""
    from torch_mpi.record import log

    answer: dict = {}
    for name in ("parallel", "sequential")[: max(2 - rank, 0)]:
        history, model = answer_named(user_ns, name), answer_named(user_ns, f"{name}_model")
        if not isinstance(history, dict) or not set(KEYS) <= set(history):
            raise TypeError(f'{name} must be a dict with "loss", "test_loss" and "accuracy"')
        answer[name] = {key: told(list(history[key])) for key in KEYS}
        answer[name]["measured"] = metrics_of(model, data.fashion_mnist(train=False))
        if name == "parallel":
            weights, largest = replicas.weights_of(model), max(p.nbytes for p in model.parameters())
            answer["digest"] = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            calls = [c for c in log.since(0) if c.op == "all_reduce" and c.group == (0, 1)]
            answer["gradients sent"] = sum(call.nbytes == largest for call in calls)
    return answer


def judge_run(ranks, report: Report) -> None:
    """Both histories agree as far as noise lets them, and both models were really trained."""
    answers = report.answers(ranks, __name__, "probe_run")
    if not answers:
        return
    zero, one = (answer.value for answer in answers[:2])
    sequential, parallel = zero["sequential"], zero["parallel"]
    steps = len(sequential["loss"])
    for rank, name in ((0, "sequential"), (0, "parallel"), (1, "parallel")):
        value, history = answers[rank].value, answers[rank].value[name]
        lengths = [[len(h[key]) for key in KEYS] for h in (history, sequential)]
        report.expect(rank, "numbers of losses, test losses, accuracies", *lengths)
        wrong = {
            f"{name}: the last {key} in the history is {history[key][-1:]}, but {name}_model has "
            f"{now:.4f} on all test images": not same(history[key][-1:], [now], 2e-3)
            for key, now in zip(KEYS[1:], history["measured"], strict=True)
        } | {
            f"{steps} steps on ranks 0 and 1 need as many all_reduces of the largest gradient; "
            f"this rank made {value['gradients sent']}: run the training again":
                value["gradients sent"] < steps,
        }  # fmt: skip
        report.communication(rank, [], *replicas.rules_of(wrong))
    out = [key for key in KEYS if parallel[key] != one["parallel"][key]]
    wrong = {
        "the weights on ranks 0 and 1 differ: the replicas are not in sync":
            zero["digest"] != one["digest"],
        f"{out} differ between ranks 0 and 1: reduce them over the group": out,
    }  # fmt: skip
    for rule in replicas.rules_of(wrong):
        report.communication(None, [], rule)
    if not report.found:
        report.communication(None, [], lambda _: more_than_noise(sequential, parallel))
