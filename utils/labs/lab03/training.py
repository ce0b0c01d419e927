"""A training on a few images and its sequential twin; histories, and what noise may do to them.

A history is a dict with a list for each of :data:`KEYS`: one loss a step, one test an epoch.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from utils import data
from utils.checks.comparison import Mistake, inside, same, some
from utils.checks.probe import answer_named, recorded, told
from utils.checks.task import Report, Step, communication, facts, value
from utils.checks.trials import in_group, on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas

KEYS = ("loss", "test_loss", "accuracy")
EPOCHS = 3
# Images in a minibatch.
MINIBATCH = {"trained": 128, "tested": 1000}
#: How far entries may be from the twin's. Rounding may decide of an image, which is 1 of 1,100.
TOLERANCES = {"loss": 2e-5, "test_loss": 2e-5, "accuracy": 1e-3}
RATES = (0.1, 0.4, 0.5, 0.05, 0.01, 0.02, 0.8, 0.3, 1.0)  # wrong ones


def few(p: int) -> dict[str, int]:
    """Return how many images p ranks train on, in minibatches of 128, and test, in such of 1,000.

    The last minibatch is a smaller one; of those that are tested there is one for each rank.
    """
    return {"trained": 300, "tested": 1000 * p - 900}


class Images(Dataset):
    """Random images of a rank's own seed; their first pixels tell what they are for, and which.

    With an odd seed the labels of those that are tested are wrong: the ranks' results lie far
    apart, so that the mean of their means is another one than that of all images.
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
    """Return the numbers of the images in what a model got, by what they are for."""
    marks = ((inputs.flatten(1)[:, :3] * data.STD + data.MEAN) * 255).round().int()
    trained = marks[:, 0] > 127
    which = 200 * marks[:, 1] + marks[:, 2]
    return {"trained": which[trained].tolist(), "tested": which[~trained].tolist()}


def small_mlp() -> nn.Module:
    """Return the untrained model. It has no ReLU, at which rounding makes jumps."""
    return replicas.net(1, (784, 16, 10))


@in_group
def probe_training(user_ns: dict, *, rank: int, named: dict, seed: int) -> dict:
    """Ask for `train_parallel` on a few images; return its history, and what the model got.

    Args:
        seed: of this rank's images. Only in its own parts are they what the group trains on.
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


def composed(seeds: Sequence[int], values: Sequence[dict]) -> list[dict[str, Images]]:
    """Return the images of each epoch, each of them that of the rank that took it.

    Args:
        seeds: of the members' images.
        values: what :func:`probe_training` told on each member.
    """
    epochs: list[dict[str, Images]] = [{} for _ in range(EPOCHS)]
    for kind, count in few(len(seeds)).items():
        copies = [Images(kind, count, seed) for seed in seeds]
        for epoch, images in enumerate(epochs):
            whole = images[kind] = copy.deepcopy(copies[0])
            for of_rank, theirs in zip(values, copies, strict=True):
                n = len(of_rank[kind]) // EPOCHS
                taken = of_rank[kind][epoch * n : (epoch + 1) * n]
                part = [k for k in taken if 0 <= k < count]
                whole.data[part] = theirs.data[part]
                whole.targets[part] = theirs.targets[part]
    return epochs


def history_of_twin(
    epochs: list[dict[str, Images]],
    part: slice = slice(None),
    rate: float = 0.2,
    same_order: bool = False,
) -> dict:
    """Return the twin's history on these images; of one rank's part of each minibatch only."""
    twin = replicas.Twin(small_mlp(), rate)
    history: dict[str, list[float]] = {key: [] for key in KEYS}
    for epoch, images in enumerate(epochs):
        draw = torch.Generator().manual_seed(0 if same_order else epoch)
        loader = data.InMemoryLoader(images["trained"], 128, shuffle=True, generator=draw)
        for pixels, labels in loader:
            history["loss"].append(twin.loss(pixels[part], labels[part]))
            twin.step(pixels, labels)
        metrics = metrics_of(twin.model, images["tested"], part)
        for key, result in zip(KEYS[1:], metrics, strict=True):
            history[key].append(result)
    return history


@torch.no_grad()
def metrics_of(model: nn.Module, images: Dataset, part: slice = slice(None)) -> list[float]:
    """Return mean loss and accuracy."""
    sums = torch.zeros(3, dtype=torch.float64)
    for pixels, labels in data.InMemoryLoader(images, 1000):
        outputs = model(pixels[part])
        labels = labels[part]
        loss = functional.cross_entropy(outputs, labels, reduction="sum")
        sums += torch.tensor([loss, (outputs.argmax(1) == labels).sum(), len(labels)])
    return (sums[:2] / sums[2]).tolist()


def wrong_histories(
    key: str, right: dict, epochs: list[dict[str, Images]], part: slice
) -> Iterator[Mistake]:
    """Yield mistakes that give another list."""
    histories = functools.partial(history_of_twin, epochs)
    expected = right[key]
    of_part = histories(part)[key]
    entries = len(expected)
    yield Mistake(
        lambda got: not isinstance(got, list) or len(got) != entries,
        f"expected {entries} entries in {EPOCHS} epochs, one for each "
        f"{'step' if key == 'loss' else 'epoch'}",
    )
    if key == "loss":
        yield Mistake(
            of_part, "You kept the losses of this rank's part. Keep what train_step returns"
        )
        same_order = histories(same_order=True)[key]
        yield Mistake(same_order, "Every epoch has the same order. Use minibatches(epoch)")
        for rate in RATES:
            with_rate = histories(rate=rate)[key]
            yield Mistake(with_rate, f"Your learning rate is {rate}, and the baseline's is 0.2")
    else:
        yield Mistake(
            of_part, "You kept this rank's own number. Reduce sums and counts with global_metrics"
        )
        each = [histories(slice(place, None, part.step))[key] for place in range(part.step)]
        yield Mistake(
            [statistics.mean(of_epoch) for of_epoch in zip(*each, strict=True)],
            (
                "You used the mean of the ranks' means, but the ranks test different numbers "
                "of images. Reduce sums and counts with global_metrics"
            ),
        )
        other = KEYS[3 - KEYS.index(key)]
        yield Mistake(right[other], f'You swapped it with "{other}"')
        yield Mistake([100 * value for value in expected], "expected a share, not percent")


# What noise may do. A wrong result is far outside: see the figure in "Tell a bug from noise".
FIRST_LOSS = 1e-4
TYPICAL_LOSS = 0.03
LAST = {"test_loss": 0.05, "accuracy": 0.02}
# So many steps stay below FIRST_LOSS: rounding is a few 1e-7 there. It grows at once by a factor of
# a thousand where it takes an input of a ReLU across 0, in one run of six within 40 steps.
FIRST_STEPS = 10
FIRST = (
    "The very first step has the same weights and the same minibatch, so it must have the "
    "same loss. Do both runs have the same seed and the same order?"
)
AGREED = (
    "The losses before agree. A difference so early is no noise, but another step. Do you "
    "use the baseline's learning rate?"
)


def more_than_noise(sequential: dict, parallel: dict) -> str | None:
    """Return where the histories differ by more than noise; None if nowhere."""
    gaps = [abs(a - b) for a, b in zip(sequential["loss"], parallel["loss"], strict=True)]
    length = -(-len(gaps) // len(sequential["accuracy"]))
    for k, gap in enumerate(gaps[: min(FIRST_STEPS, length)]):
        if not gap <= FIRST_LOSS:
            return f"the losses of step {k} differ by {gap:.2g}; {AGREED if k else FIRST}"
    for epoch in range(-(-len(gaps) // length)):
        part = gaps[epoch * length : (epoch + 1) * length]
        if not statistics.median(part) <= TYPICAL_LOSS:
            return (
                f"In epoch {epoch} the losses differ by {statistics.median(part):.2g} in a "
                "typical step, which is more than noise. Do both runs have the same order "
                "of samples in this epoch?"
            )
    for key, most in LAST.items():
        gap = abs(sequential[key][-1] - parallel[key][-1])
        if not gap <= most:
            return f"The last {key} differs by {gap:.2g}, but noise stays below {most:g}"
    return None


def probe_run(user_ns: dict, *, rank: int) -> dict | None:
    """Return the histories on ranks 0 and 1, and test results computed anew from the models."""
    from torch_mpi.record import log

    answer: dict = {}
    for name in ("parallel", "sequential")[: max(2 - rank, 0)]:
        history = answer_named(user_ns, name)
        model = answer_named(user_ns, f"{name}_model")
        if not isinstance(history, dict) or not set(KEYS) <= set(history):
            raise TypeError(f'{name} must be a dict with "loss", "test_loss" and "accuracy"')
        answer[name] = {key: told(list(history[key])) for key in KEYS}
        answer[name]["measured"] = metrics_of(model, data.fashion_mnist(train=False))
        if name == "parallel":
            weights = replicas.weights_of(model)
            largest = max(p.nbytes for p in model.parameters())
            answer["digest"] = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
            sent = ("all_reduce", (0, 1), largest)
            calls = log.since(0)
            answer["gradients sent"] = sum((c.op, c.group, c.nbytes) == sent for c in calls)
    return answer


def tell_each(report: Report, wrong: Mapping[str, object]) -> bool:
    """Say all of these that are so, of all ranks together; return whether none is."""
    return all([report.facts(None, {text: is_so}) for text, is_so in wrong.items()])


def judge_run(ranks: Ranks, report: Report) -> None:
    """Judge whether the histories agree up to noise, and both models were really trained."""
    answers = report.answers(ranks, probe_run)
    if not answers:
        return
    on_rank_0, on_rank_1 = (answer.value for answer in answers[:2])
    sequential = on_rank_0["sequential"]
    parallel = on_rank_0["parallel"]
    right = []
    for rank, name in ((0, "sequential"), (0, "parallel"), (1, "parallel")):
        runs = answers[rank].value
        lengths, expected = ([len(run[key]) for key in KEYS] for run in (runs[name], sequential))
        what = "numbers of losses, test losses, accuracies"
        right.append(report.expect(rank, what, lengths, expected))
        right.append(report.facts(rank, _untrained(name, runs, len(sequential["loss"]))))
    differing = [key for key in KEYS if parallel[key] != on_rank_1["parallel"][key]]
    unequal = on_rank_0["digest"] != on_rank_1["digest"]
    out_of_sync = {
        "The weights on ranks 0 and 1 differ, so the replicas are not in sync": unequal,
        f"{differing} differ between ranks 0 and 1: reduce them over the group": differing,
    }
    right.append(tell_each(report, out_of_sync))
    if all(right):
        difference = more_than_noise(sequential, parallel)
        report.facts(None, {str(difference): difference})


def _untrained(name: str, runs: dict[str, Any], steps: int) -> dict[str, bool]:
    """Return why a model on a rank is not what its history tells of so many steps."""
    history = runs[name]
    sent = runs["gradients sent"]
    return {
        f"{name}: the last {key} in the history is {history[key][-1:]}, but {name}_model has "
        f"{now:.4f} on all test images": not same(history[key][-1:], [now], 2e-3)
        for key, now in zip(KEYS[1:], history["measured"], strict=True)
    } | {
        f"{steps} steps on ranks 0 and 1 need as many all_reduces of the largest gradient; this "
        f"rank made {sent}: run the training again": sent < steps,
    }


# -- shares of the images ----------------------------------------------------------------------

TAKE = {
    "trained": "train_step(…, group) takes this rank's part of each minibatch",
    "tested": "In each epoch give test_sums this rank's part, images[part] and labels[part], and "
    "reduce the sums",
}


def trains_alike(
    report: Report, seeds: list[int], members: list[int], values: list[dict[str, Any]]
) -> bool:
    """Judge the trainings of a group; return whether they and the twin's are alike."""
    shares = [_share(kind, members, values) for kind in MINIBATCH]
    if not tell_each(report, {problem: is_hopeless for problem, is_hopeless, _ in shares}):
        return False
    epochs = composed(seeds, values)
    twin = history_of_twin(epochs)
    right = []
    for place, rank in enumerate(members):
        part = slice(place, None, len(members))
        steps = _history_steps(values[place], members, twin, epochs, part)
        right.append(report.follow(rank, steps))
    return all(right) and tell_each(report, {problem: is_so for problem, _, is_so in shares})


def _share(kind: str, members: list[int], values: list[dict[str, Any]]) -> tuple[str, bool, bool]:
    """Return how a group has shared the images of a kind in all epochs together.

    Returns:
        A problem in words. Whether each rank took all images, or too few were tested: then all else
        is wrong. Whether an image was on no rank or on several, or parts differ by a minibatch.
    """
    taken = [len(of_rank[kind]) for of_rank in values]
    wanted = EPOCHS * few(len(members))[kind]
    all_on_each = len(taken) > 1 and min(taken) >= wanted
    too_few_tests = kind == "tested" and sum(taken) < wanted
    apart = max(taken) - min(taken) > EPOCHS * MINIBATCH[kind]
    how = "too few in all epochs together"
    if apart or sum(taken) > wanted:
        how = "unequal parts"
    if all_on_each:
        how = "every rank takes all images"
    problem = f"{on(members)}: {how}: {taken} of {wanted} were {kind}. {TAKE[kind]}"
    return problem, all_on_each or too_few_tests, apart or sum(taken) != wanted


def _history_steps(
    outcome: dict[str, Any], members: list[int], twin: dict, epochs: list, part: slice
) -> Iterator[Step]:
    """Yield what a rank's history has to be, and how the model was trained."""
    history = outcome["history"]
    calls = outcome["calls"]
    keys = sorted(history) if isinstance(history, dict) else history
    form = 'train_parallel must return a dict with "loss", "test_loss" and "accuracy"'
    is_history = isinstance(history, dict) and set(history) == set(KEYS)
    yield facts({f"{form}; it returned {keys}": not is_history})
    yield communication(calls, inside(members), some(members))
    for key, expected in twin.items():
        where = f'train_parallel on a few images {on(members)}: "{key}"'
        mistakes = wrong_histories(key, twin, epochs, part)
        tolerance = TOLERANCES[key]
        yield value(history[key], expected, mistakes, what=where, tolerance=tolerance)
    evaluates = (
        "The model was in evaluation mode during training, so dropout and batch "
        "normalization would not train as they should. Call model.train() after the test"
    )
    yield facts({evaluates: not outcome["in training mode"]})
