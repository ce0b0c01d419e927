"""The reference model that trains alone, for checks of replicas.

A check compares a replica with the reference model, parameter by parameter, as one row of numbers.
The reference model also computes what likely mistakes lead to. Each mistake has a name, and a lab
has words for it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.comparison import Mistake
from utils.checks.task import Report, Step, facts, value

from .small_models import gradient_of, weights_of


def multiple(gradient: list[float], expected: list[float]) -> Iterator[Mistake]:
    """Yield a mistake if every number is the same multiple of the expected number."""
    row, right = (torch.tensor(numbers, dtype=torch.float64) for numbers in (gradient, expected))
    factor = (row @ right / (right @ right)).item() if row.shape == right.shape else 0.0
    if not row.any():
        yield Mistake(
            gradient, "All gradients are zeros. Check that backward() reaches the parameters"
        )
    elif (row - factor * right).abs().max() <= 1e-4 * row.abs().max():
        times = f"Every gradient is {factor:.4g} times what it should be. Check the divisor"
        yield Mistake(gradient, times)


class Seeds(NamedTuple):
    """The model's seed, which all ranks know, and the seed of each rank's samples in a group."""

    model: int
    own: tuple[int, ...]


class ReferenceModel:
    """The reference model, trained with SGD on one process: what ranks should compute together.

    Attributes:
        model: the model before the next step.
        old: the row along which the last step moved the weights.
        loss_of: returns the loss, given the model's outputs and the labels, if there are labels.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        momentum: float = 0.0,
        loss_of: Callable[..., Tensor] = functional.cross_entropy,
    ):
        self.model = copy.deepcopy(model)
        self.rate = rate
        self.momentum = momentum
        self.loss_of = loss_of
        self.old = torch.zeros_like(weights_of(model))

    def gradient(self, inputs: Tensor, *labels: Tensor, **options: Any) -> Tensor:
        """Return the gradient of the loss, in one row."""
        self.model.zero_grad()
        self.loss_of(self.model(inputs), *labels, **options).backward()
        return gradient_of(self.model)

    @torch.no_grad()
    def loss(self, inputs: Tensor, *labels: Tensor, **options: Any) -> float:
        """Return the loss of these samples with the present weights."""
        return self.loss_of(self.model(inputs), *labels, **options).item()

    def after(self, gradient: Tensor) -> list[float]:
        """Return the weights after a step along this row."""
        return self._moved(gradient).tolist()

    def step(self, *batch: Tensor) -> None:
        """Take the step for a minibatch."""
        self.move(self.gradient(*batch))

    def move(self, gradient: Tensor) -> None:
        """Take the step for a gradient, which may be a wrong one."""
        self.old = self.momentum * self.old + gradient
        nn.utils.vector_to_parameters(self._moved(self.old), self.model.parameters())

    def _moved(self, along: Tensor) -> Tensor:
        """Return the weights as `torch.optim.SGD` computes them, to the last bit."""
        return torch.add(weights_of(self.model), along, alpha=-self.rate)

    def wrong_steps(self, images: Tensor, labels: Tensor, p: int, place: int) -> dict[str, list]:
        """Return, by name, the weights to which mistakes lead the replica with this group rank."""
        counts = [len(labels[r::p]) for r in range(p)]
        sums = [self.gradient(images[r::p], labels[r::p], reduction="sum") for r in range(p)]
        whole = sum(sums) / len(labels)
        gradients = _wrong_means(sums, counts, place) | {
            "still": torch.zeros_like(whole),
            "kept": whole + self.old,
            "sum over the part": sum(sums) / p,
        }
        return {name: self.after(gradient) for name, gradient in gradients.items()}

    def wrong_losses(self, images: Tensor, labels: Tensor, p: int, place: int) -> dict[str, Any]:
        """Return, by name, wrong values of the minibatch's mean loss before the step."""
        counts = [len(labels[r::p]) for r in range(p)]
        sums = [self.loss(images[r::p], labels[r::p], reduction="sum") for r in range(p)]
        stepped = ReferenceModel(self.model, self.rate)
        stepped.step(images, labels)
        return _wrong_means(sums, counts, place) | {
            "nan": lambda loss: loss != loss,
            "own of all": sums[place] / len(labels),
            "afterwards": stepped.loss(images, labels),
        }


def _wrong_means(sums: list, counts: list[int], place: int) -> dict[str, Any]:
    """Return, by name, wrong means of losses or gradients on the rank with this group rank.

    Args:
        sums: the sum over the samples of each part.
        counts: the number of samples of each part.
    """
    p = len(counts)
    means = [part / max(count, 1) for part, count in zip(sums, counts, strict=True)]
    return {
        "own": means[place],
        "own of the sum": sums[place],
        "own, divided": means[place] / p,
        "means": sum(means) / p,
        "summed": sum(means),
        "sum over samples": sum(sums),
        "divided": sum(sums) / sum(counts) / p,
    }


def named(words: Mapping[str, str], wrong: Callable[..., Mapping], *args: Any) -> Iterator[Mistake]:
    """Yield those mistakes of `wrong(*args)` for which a lab has words."""
    results = wrong(*args)
    yield from (Mistake(results[name], text) for name, text in words.items())


def misshared(
    passes: Sequence[list[list[int]]], count: int, members: Sequence[int], *, equal: bool = False
) -> str | None:
    """Return what is wrong with how ranks share a minibatch; None if each sample is on one rank.

    Args:
        passes: for each member the samples of each forward pass.
        count: the number of samples of the minibatch.
        equal: whether all parts must have the same size; otherwise sizes may differ by one.
    """
    parts = [list(itertools.chain(*of_rank)) for of_rank in passes]
    first = [next(iter(of_rank), []) for of_rank in passes]
    everything = list(range(count))
    once = sorted(itertools.chain(*parts)) == everything
    lengths = list(map(len, parts))
    if once and max(lengths) - min(lengths) <= (not equal):
        return None
    if len(members) > 1 and list(map(sorted, first)) == [everything] * len(first):
        return "Every rank computes the whole minibatch. Take this rank's part"
    if sorted(itertools.chain(*first)) == everything and not once:
        most = max(map(len, passes))
        return (
            f"You call the model {most} times in a step. Call it once, with this rank's part, and "
            "reduce the sum of its losses over the ranks"
        )
    shared = "; ".join(f"rank {rank}: {part}" for rank, part in zip(members, parts, strict=True))
    sizes = "the same size" if equal else "the same size, give or take one"
    return (
        f"Each sample must be on one rank, once, and all parts must have {sizes}. The models got "
        f"{shared}. Compute the part from dist.get_rank(group) and dist.get_world_size(group)"
    )


def composed(
    minibatches: Sequence[tuple[Tensor, Tensor]], steps: Sequence[dict]
) -> tuple[Tensor, Tensor]:
    """Return a minibatch that takes each sample from the rank whose model got it.

    Args:
        minibatches: one for each member, all of the same size and unknown to the other members.
        steps: what `small_models.taken` returned on each member. A sample that no model got is
            the first member's.
    """
    images, labels = (tensor.clone() for tensor in minibatches[0])
    for step, (theirs, of_theirs) in zip(steps, minibatches, strict=True):
        part = [k for k in itertools.chain(*step["passes"]) if 0 <= k < len(labels)]
        images[part] = theirs[part]
        labels[part] = of_theirs[part]
    return images, labels


def scaled(row: Tensor, like: Tensor) -> list[float]:
    """Return the row divided by the largest absolute value of `like`."""
    return (row / like.abs().max().clamp(min=1e-30)).tolist()


#: Words for :meth:`ReferenceModel.wrong_steps`, and for :meth:`ReferenceModel.wrong_losses`.
Words = tuple[Mapping[str, str], Mapping[str, str]]
#: Gets a member's step and the steps that compare weights and loss; yields all that is judged.
Around = Callable[[dict[str, Any], Iterator[Step]], Iterator[Step]]


@dataclass(frozen=True)
class GroupStep:
    """A training step of a group, to be compared with the sequential step.

    Attributes:
        members: the global ranks of the group.
        steps: what `small_models.taken` returned on each member.
        reference: the reference model before the step.
        batch: the images and labels of the minibatch.
        where: the step, in words.
    """

    members: list[int]
    steps: Sequence[dict[str, Any]]
    reference: ReferenceModel
    batch: tuple[Tensor, Tensor]
    where: str

    def is_right(self, report: Report, mistakes: Words, around: Around, equal: bool) -> bool:
        """Judge each rank's samples, the communication, the weights and the loss."""
        if any(len(step["stepped"]) != step["steps"] for step in self.steps):
            raise ValueError("a rank's reply lists more or fewer optimizer steps than it counts")
        passes = [step["passes"] for step in self.steps]
        parts = misshared(passes, len(self.batch[1]), self.members, equal=equal)
        if not report.follow(None, [facts({f"{self.where}: {parts}": parts})]):
            return False
        right = [
            report.follow(rank, around(step, self._compared(place, mistakes)))
            for place, (rank, step) in enumerate(zip(self.members, self.steps, strict=True))
        ]
        return all(right) and report.follow(None, [facts(self._differences())])

    def _compared(self, place: int, mistakes: Words) -> Iterator[Step]:
        """Yield steps that compare a member's weights and loss with the sequential step."""
        step = self.steps[place]
        made_by = (*self.batch, len(self.members), place)
        likely = named(mistakes[0], self.reference.wrong_steps, *made_by)
        weights = self.reference.after(self.reference.gradient(*self.batch))
        yield value(step["weights"], weights, likely, what=f"{self.where}: not the sequential step")
        likely = named(mistakes[1], self.reference.wrong_losses, *made_by)
        loss = self.reference.loss(*self.batch)
        what = f"{self.where}: the loss"
        form = "the mean loss of the minibatch"
        yield value(step["loss"], loss, likely, what=what, form=form, tolerance=1e-4)

    def _differences(self) -> dict[str, bool]:
        """Return in words how replicas, each of them nearly right, differ from each other."""
        weights, gradients = (
            {repr(step[name]) for step in self.steps} for name in ("weights", "stepped")
        )
        return {
            f"{self.where}: The replicas aren't identical to the last bit. Let every rank do the "
            "same arithmetic on the same reduced gradient": len(weights) > 1,
            f"{self.where}: The optimizers stepped with different gradients. Average the gradients "
            "before the step, not the weights after it": len(gradients) > 1,
        }


@dataclass(frozen=True)
class GroupTraining:
    """Training steps of a group, with what a check needs to judge them; see :class:`GroupStep`.

    The reference model takes each right step. Each step and each member has a minibatch.
    """

    reference: ReferenceModel
    members: list[int]
    steps: Sequence[Sequence[dict[str, Any]]]
    minibatches: Sequence[Sequence[tuple[Tensor, Tensor]]]
    where: Sequence[str]

    def right_steps(
        self, report: Report, mistakes: Words, around: Around, *, equal: bool = False
    ) -> Iterator[GroupStep]:
        """Judge one step after the other; yield each right step, and end at a wrong one.

        Args:
            equal: whether all parts of a minibatch must have the same size.
        """
        for steps, own, where in zip(self.steps, self.minibatches, self.where, strict=True):
            batch = composed(own, steps)
            group_step = GroupStep(self.members, steps, self.reference, batch, where)
            if not group_step.is_right(report, mistakes, around, equal):
                return
            yield group_step
            self.reference.step(*batch)
