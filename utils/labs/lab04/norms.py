"""Task 4.7: a batch norm over the rows of all ranks. Its probes are in :mod:`.norm_probes`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from utils.checks.comparison import EXACT, Calls, Mistake, inside, only, table, waited
from utils.checks.task import Report, Step, communication, facts, task, to_each, value
from utils.checks.trials import (
    EVERYWHERE,
    PARTITIONS,
    WORLD,
    GroupAnswer,
    judge_groups,
    members_of,
    on,
)
from utils.cluster.questions import Ranks

from .norm_probes import (
    drawn_parameters,
    drawn_rows,
    images_of,
    probe_norm,
    probe_norm_module,
)

#: One call of each of these brings the sums of all ranks to all ranks.
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor")
#: Around this mean, float32 loses a variance of 1 in a sum of squares.
FAR = 1000.0
#: Tolerances: for float32, and for float32 around the mean :data:`FAR`.
SINGLE, COARSE = 1e-4, 2e-3


@task("4.7", "a synchronized batch norm", points=4)
def synced_norm(ranks: Ranks, report: Report) -> None:
    """Check the results of one process on all rows, and one collective in each direction."""
    draw = random.Random(report.seed)
    seeds = report.seeds(WORLD)
    cases = []
    for number, partition in enumerate(EVERYWHERE):
        counts = [_counts(draw, partition if number in (2, 4) else ()) for _ in range(2)]
        each = {"data_seed": seeds, "counts": list(map(list, zip(*counts, strict=True)))}
        cases.append({
            "partition": partition,
            "channels": draw.randint(1, 5) if number else 3,
            "mean": FAR if number == 1 else 0.0,
            "double": number not in (1, 3),
            "turned": number == 2,
            "seed": report.seed,
            "eps": 1e-5 if number == 1 else 0.5,
            "each": to_each(**each),
        })
    if judge_groups(ranks, report, probe_norm, cases, _norm_steps, hint=_without_rows):
        _judge_module(ranks, report, seeds, draw)


def _counts(draw: random.Random, partition: Any) -> list[int]:
    """Return each rank's number of rows.

    Args:
        partition: in its groups of more than one rank, one rank has no row and one has a single
            row; in none if it is ().
    """
    counts = [draw.randint(2, 6) for _ in range(WORLD)]
    groups = [range(WORLD)] if partition is None else partition
    for members in groups:
        if len(members) > 2:
            empty, single = draw.sample(list(members), 2)
            counts[empty], counts[single] = 0, 1
    return counts


def _without_rows(case: dict[str, Any]) -> str:
    """Return which ranks of a case have a batch without rows; "" if there are none."""
    empty = [rank for rank, given in enumerate(case["each"]) if 0 in given["counts"]]
    if not empty:
        return ""
    return (
        f"In this trial rank {empty[0]} has a batch without rows. It takes part in both "
        "collectives, because the other ranks wait for it"
    )


def _in_rows(wrong: dict[str, Tensor]) -> list[Mistake]:
    """Return mistakes from a mapping of texts to tensors, each as one row of numbers."""
    return table({said: gives.reshape(-1) for said, gives in wrong.items()})


@dataclass(frozen=True)
class Whole:
    """A batch of all ranks of a group on one process, in double precision.

    Attributes:
        rows, upstream: for each rank its rows, and what backward gets for them.
        weight, bias, eps: the arguments of the norm.
    """

    rows: Sequence[Tensor]
    upstream: Sequence[Tensor]
    weight: Tensor
    bias: Tensor
    eps: float

    @property
    def count(self) -> int:
        """Return the number of all rows."""
        return sum(map(len, self.rows))

    @property
    def mean(self) -> Tensor:
        """Return the mean of each channel."""
        return torch.cat(list(self.rows)).mean(0)

    @property
    def variance(self) -> Tensor:
        """Return the variance of each channel, divided by the number of rows."""
        return torch.cat(list(self.rows)).var(0, unbiased=False)

    def normal(self, place: int) -> Tensor:
        """Return the normalized rows of a rank."""
        return (self.rows[place] - self.mean) * self.scale

    @property
    def scale(self) -> Tensor:
        """Return the factor of each channel."""
        return (self.variance + self.eps).rsqrt()

    def both_ways(self, place: int) -> tuple[Tensor, Tensor]:
        """Return the output of a rank's rows and their gradient, as PyTorch computes them."""
        x = torch.cat(list(self.rows)).requires_grad_()
        y = functional.batch_norm(x, None, None, self.weight, self.bias, True, eps=self.eps)
        (gradient,) = torch.autograd.grad(y, x, torch.cat(list(self.upstream)))
        lengths = list(map(len, self.rows))
        return y.detach().split(lengths)[place], gradient.split(lengths)[place]

    def wrong_outputs(self, place: int) -> Iterator[Mistake]:
        """Yield the mistakes that give wrong outputs on a rank."""
        x, weight, bias = self.rows[place], self.weight, self.bias
        mean, variance, n = self.mean, self.variance, self.count

        def with_(mean: Tensor, variance: Tensor, eps: float = self.eps) -> Tensor:
            return weight * (x - mean) * (variance + eps).rsqrt() + bias

        means = [rows.mean(0) for rows in self.rows]
        variances = [rows.var(0, unbiased=False) for rows in self.rows]
        within = sum(len(r) * v for r, v in zip(self.rows, variances, strict=True) if len(r)) / n
        of_means = torch.stack(means).mean(0), torch.stack(variances).mean(0)
        merge = "Sum the sums, the sums of squares and the numbers of rows"
        squares = torch.cat(list(self.rows)).square().mean(0)
        yield from _in_rows({
            "You normalized with this rank's own mean and variance. Use those of all ranks' rows": (
                with_(means[place], variances[place])
            ),
            f"You took the mean of the ranks' means and of their variances. {merge}": (
                with_(*of_means)
            ),
            "You took the mean of the ranks' variances, which leaves out how far the ranks' means "
            f"are apart. {merge}": with_(mean, of_means[1]),
            "Your variance is the mean of the ranks' variances, weighted by their rows. It leaves "
            f"out how far the ranks' means are apart. {merge}": with_(mean, within),
            "You divided the squared deviations by the number of rows minus 1. A batch norm "
            "normalizes with the variance that is divided by the number of rows": (
                with_(mean, variance * n / max(1, n - 1))
            ),
            "You left out eps. Add it to the variance": with_(mean, variance, 0.0),
            "You added eps to the deviation. Add it to the variance, before the root": (
                weight * (x - mean) / (variance.sqrt() + self.eps) + bias
            ),
            "Your variance is the mean of the squares. Subtract the square of the mean": (
                with_(mean, squares)
            ),
            "You didn't subtract the mean": with_(0 * mean, variance),
            "You left out weight and bias": self.normal(place),
            "You left out the weight": self.normal(place) + bias,
            "You left out the bias": with_(mean, variance) - bias,
            "You divided by the variance. Divide by its root": (
                weight * (x - mean) / (variance + self.eps) + bias
            ),
        })

    def wrong_gradients(self, place: int) -> Iterator[Mistake]:
        """Yield the mistakes that give a wrong gradient of a rank's rows."""
        grad, normal = self.upstream[place], self.normal(place)
        factor = self.weight * self.scale
        both = [(g, g * self.normal(k)) for k, g in enumerate(self.upstream)]
        sums, products = (sum(part.sum(0) for part in parts) for parts in zip(*both, strict=True))
        n, own = self.count, max(1, len(grad))
        mean, product = sums / n, products / n
        right = factor * (grad - mean - normal * product)
        own_means = grad.sum(0) / own, (grad * normal).sum(0) / own
        yield from _in_rows({
            "You took the means over this rank's rows. Sum them over all ranks' rows": (
                factor * (grad - own_means[0] - normal * own_means[1])
            ),
            "The sums of grad are this rank's own. Sum them over all ranks' rows": (
                factor * (grad - grad.sum(0) / n - normal * (grad * normal).sum(0) / n)
            ),
            "The mean and the variance depend on x, too. Subtract the two means of the formula": (
                factor * grad
            ),
            "The last term of the formula is missing: the variance depends on x": (
                factor * (grad - mean)
            ),
            "The mean of grad is missing: the mean depends on x": (
                factor * (grad - normal * product)
            ),
            "You subtracted sums. Divide them by the number of rows of all ranks": (
                factor * (grad - sums - normal * products)
            ),
            "You divided the sums of all ranks by this rank's number of rows. Divide by the number "
            "of rows of all ranks": factor * (grad - sums / own - normal * products / own),
            "You left out the weight": right / self.weight,
            "You left out the factor 1 / √(variance + eps)": right / self.scale,
            "The gradient is zero. Use grad": 0 * right,
            "You returned grad itself": grad,
        })


def _whole(case: dict[str, Any], members: list[int], number: int) -> Whole:
    """Return the batch of this number of a group's ranks."""
    form = case["channels"], case["mean"], case["double"]
    drawn = [
        drawn_rows(given["data_seed"] + number, given["counts"][number], *form)
        for given in (case["each"][rank] for rank in members)
    ]
    rows, upstream = ([tensor.double() for tensor in of] for of in zip(*drawn, strict=True))
    both = drawn_parameters(case["seed"], case["channels"], case["double"])
    weight, bias = (parameter.double() for parameter in both)
    return Whole(rows, upstream, weight, bias, case["eps"])


def _norm_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge a rank's batches."""
    returned = answer.value.get("returned")
    yield facts({
        f"SyncedNorm.forward returned {returned}. Keep its last line, which returns y, mean, "
        "variance and count": returned
    })
    for number, batch in enumerate(answer.value["batches"]):
        yield from _batch_steps(answer, _whole(answer.case, answer.members, number), batch)


def _batch_steps(answer: GroupAnswer, whole: Whole, batch: dict[str, Any]) -> Iterator[Step]:
    """Yield steps that judge a rank's part of one batch."""
    members, case, place = answer.members, answer.case, answer.place
    shares = [len(rows) for rows in whole.rows]
    kind = "float64" if case["double"] else "float32"
    where = f"{kind}, {shares} rows {on(members)}"
    far = case["mean"] == FAR
    tolerance = EXACT if case["double"] else COARSE if far else SINGLE

    def near(got: Any, expected: Tensor, mistakes: Iterator[Mistake], what: str) -> Step:
        right = expected.reshape(-1).tolist()
        return value(got, right, mistakes, what=f"{where}: {what}", tolerance=tolerance)

    y, gradient = whole.both_ways(place)
    yield communication(batch["forward"], only(*COLLECTIVES), inside(members), waited)
    yield facts({
        f"{where}: y must have the shape and the dtype of x. Convert it": not batch["is like x"]
    })
    yield near(batch["y"], y, _outputs(whole, place, far), "y")
    right = ("mean", whole.mean), ("variance", whole.variance), ("count", torch.tensor(whole.count))
    for (name, expected), got in zip(right, batch["statistics"], strict=True):
        relative = max(1.0, float(expected.abs().max())) if name == "variance" else 1.0
        scaled = [one / relative for one in got] if isinstance(got, list) else got
        yield near(scaled, expected / relative, iter(()), name)
    yield facts(_not_once(batch["forward"], "forward", members, where))
    yield communication(batch["backward"], only(*COLLECTIVES), inside(members), waited)
    own = {
        "bias": whole.upstream[place].sum(0),
        "weight": (whole.upstream[place] * whole.normal(place)).sum(0),
    }
    yield near(batch["of x"], gradient, whole.wrong_gradients(place), "the gradient of x")
    for name, expected in own.items():
        mistakes = _wrong_parameter(whole, name, expected, own)
        yield near(batch[f"of {name}"], expected, mistakes, f"the gradient of {name}")
    yield facts(_not_once(batch["backward"], "backward", members, where))
    changed = " and ".join(batch["changed"])
    yield facts({f"You changed {changed}. Work on a copy": changed})


def _outputs(whole: Whole, place: int, far: bool) -> Iterator[Mistake]:
    """Yield mistakes of the forward pass; far from zero, its formulas have been right before."""
    yield from whole.wrong_outputs(place)
    if far:
        said = (
            f"In float32, a sum of squares around the mean {FAR:g} has too few digits for a "
            "variance of 1. Sum in float64, or merge the ranks' means and squared deviations"
        )
        yield Mistake(lambda _: True, said)


def _wrong_parameter(
    whole: Whole, name: str, expected: Tensor, own: dict[str, Tensor]
) -> Iterator[Mistake]:
    """Yield the mistakes that give a wrong gradient of the weight or the bias."""
    both = [
        {"bias": g.sum(0), "weight": (g * whole.normal(k)).sum(0)}
        for k, g in enumerate(whole.upstream)
    ]
    total = sum(of_rank[name] for of_rank in both)
    other = "weight" if name == "bias" else "bias"
    leave = "DDP adds up the ranks' gradients. Return the sum over this rank's rows"
    yield from _in_rows({
        f"You returned the sum over all ranks' rows, and {leave}": total,
        f"You returned the mean over all ranks' rows. {leave}": total / whole.count,
        f"You divided by the number of ranks. {leave}": expected / len(both),
        f"You divided by the number of all rows. {leave}": expected / whole.count,
        f"You returned the gradient of {other} in this place": own[other],
    })


def _not_once(calls: Calls, way: str, members: list[int], where: str) -> dict[str, object]:
    """Return what is wrong with the number of collectives of one direction."""
    most = len(members) > 1
    return {
        f"{where}: {way} called {len(calls)} collectives. Put all numbers into one tensor": (
            len(calls) > 1
        ),
        f"{where}: {way} communicated nothing, although the ranks need each other's sums": (
            most and not calls
        ),
    }


# -- the module around it --------------------------------------------------------------------------


def _judge_module(ranks: Ranks, report: Report, seeds: list[int], draw: random.Random) -> None:
    """Judge the module: its running statistics, and that in eval a rank works alone."""
    cases = []
    for partition, wide in ((PARTITIONS[0], True), (PARTITIONS[2], False)):
        alone = {draw.choice(list(members)) for members in partition or ()}
        counts = [[4 * draw.randint(1, 3) for _ in range(WORLD)] for _ in range(2)]
        own = {
            "data_seed": seeds,
            "counts": list(map(list, zip(*counts, strict=True))),
            "evaluates": [rank in alone for rank in range(WORLD)],
        }
        channels = draw.randint(2, 4)
        given = {"partition": partition, "channels": channels, "wide": wide}
        cases.append(given | {"each": to_each(**own)})
    judge_groups(ranks, report, probe_norm_module, cases, _module_steps, hint=_evaluating)


def _evaluating(case: dict[str, Any]) -> str:
    """Return which ranks of a case evaluate."""
    alone = [rank for rank, given in enumerate(case["each"]) if given["evaluates"]]
    groups = " and ".join(
        f"rank {rank} of {members_of(case['partition'], rank, WORLD)}" for rank in alone
    )
    return f"After training, only {groups} evaluates SyncedBatchNorm, after eval()"


def _module_steps(answer: GroupAnswer) -> Iterator[Step]:
    """Yield steps that judge the module on a rank."""
    case, members = answer.case, answer.members
    reference = (nn.BatchNorm2d if case["wide"] else nn.BatchNorm1d)(case["channels"]).double()
    where = f"SyncedBatchNorm {on(members)}"
    form = case["channels"], 0.0, True
    for number, got in enumerate(answer.value["trained"]):
        given = [case["each"][rank] for rank in members]
        parts = [
            images_of(rows, case["wide"])
            for of in given
            for rows, _ in [drawn_rows(of["data_seed"] + number, of["counts"][number], *form)]
        ]
        y = reference(torch.cat(parts)).detach().split([len(part) for part in parts])
        yield value(got, y[answer.place].reshape(-1).tolist(), what=f"{where}: y in training")
    running = {"mean": reference.running_mean, "variance": reference.running_var}
    for name, right in running.items():
        yield value(answer.value[name], right.tolist(), what=f"{where}: the running {name}")
    if given[answer.place]["evaluates"]:
        reference.eval()
        mine = case["each"][answer.rank]
        rows = drawn_rows(mine["data_seed"], mine["counts"][0], *form)[0]
        right = reference(images_of(rows, case["wide"])).detach().reshape(-1).tolist()
        yield communication(answer.value["calls"], only())
        yield value(answer.value["evaluated"], right, what=f"{where}: y after eval()")
