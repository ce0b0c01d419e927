"""The sequential reference of a training on a few images, and what noise its history may have.

:mod:`.probes` says what a history is.
"""

from __future__ import annotations

import copy
import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from utils import data
from utils.checks.comparison import Mistake, inside, same, some
from utils.checks.task import Report, Step, communication, each_of, facts, value
from utils.checks.trials import on
from utils.cluster.questions import Ranks
from utils.labs.shared import replicas

from .probes import EPOCHS, KEYS, Images, few, metrics_of, probe_run, small_mlp

# Images of a minibatch.
MINIBATCH = {"trained": 128, "tested": 1000}
#: How far entries may be from the reference's. Rounding may decide about one image of 1,100.
TOLERANCES = {"loss": 2e-5, "test_loss": 2e-5, "accuracy": 1e-3}
RATES = (0.1, 0.4, 0.5, 0.05, 0.01, 0.02, 0.8, 0.3, 1.0)  # wrong learning rates


def composed(seeds: Sequence[int], values: Sequence[dict]) -> list[dict[str, Images]]:
    """Return the images of each epoch, each taken from the rank whose model got it.

    Args:
        seeds: the seeds of the members' images.
        values: what :func:`.probes.probe_training` returned on each member.
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


def reference_history(
    epochs: list[dict[str, Images]],
    part: slice = slice(None),
    rate: float = 0.2,
    same_order: bool = False,
) -> dict:
    """Return the reference's history on these images, measured on a part of each minibatch."""
    reference = replicas.ReferenceModel(small_mlp(), rate)
    history: dict[str, list[float]] = {key: [] for key in KEYS}
    for epoch, images in enumerate(epochs):
        draw = torch.Generator().manual_seed(0 if same_order else epoch)
        loader = data.InMemoryLoader(images["trained"], 128, shuffle=True, generator=draw)
        for pixels, labels in loader:
            history["loss"].append(reference.loss(pixels[part], labels[part]))
            reference.step(pixels, labels)
        metrics = metrics_of(reference.model, images["tested"], part)
        for key, result in zip(KEYS[1:], metrics, strict=True):
            history[key].append(result)
    return history


def wrong_histories(
    key: str, right: dict, epochs: list[dict[str, Images]], part: slice
) -> Iterator[Mistake]:
    """Yield mistakes that lead to another list in the history."""
    histories = functools.partial(reference_history, epochs)
    expected = right[key]
    of_part = histories(part)[key]
    entries = len(expected)
    yield Mistake(
        lambda got: not isinstance(got, list) or len(got) != entries,
        f"Return {entries} entries for {EPOCHS} epochs, one for each "
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
            yield Mistake(
                with_rate,
                f"Your learning rate is {rate}, and the baseline's is 0.2. Use the same rate",
            )
    else:
        yield Mistake(
            of_part, "You kept this rank's own number. Reduce sums and counts with global_metrics"
        )
        each = [histories(slice(place, None, part.step))[key] for place in range(part.step)]
        yield Mistake(
            [statistics.mean(of_epoch) for of_epoch in zip(*each, strict=True)],
            "You used the mean of the ranks' means, but the ranks test different numbers "
            "of images. Reduce sums and counts with global_metrics",
        )
        other = KEYS[3 - KEYS.index(key)]
        yield Mistake(right[other], f'You swapped this list with "{other}"')
        yield Mistake([100 * value for value in expected], "You returned percent. Return a share")


# Limits for noise. A wrong result is far outside, as the lab's section on bugs and noise shows.
FIRST_LOSS = 1e-4
TYPICAL_LOSS = 0.03
LAST = {"test_loss": 0.05, "accuracy": 0.02}
# So many steps stay below FIRST_LOSS, because rounding makes a few 1e-7 there. If rounding moves an
# input of a ReLU across 0, the difference grows by a factor of a thousand at once. This happens in
# one run of six within 40 steps.
FIRST_STEPS = 10
FIRST = (
    "The very first step has the same weights and the same minibatch, so the losses must agree. "
    "Do both runs have the same seed and the same order?"
)
AGREED = (
    "The losses before it agree, so the reason is another step, not noise. Do you use the "
    "baseline's learning rate?"
)


def more_than_noise(sequential: dict, parallel: dict) -> str | None:
    """Return where the histories differ by more than noise, or None."""
    gaps = [abs(a - b) for a, b in zip(sequential["loss"], parallel["loss"], strict=True)]
    length = -(-len(gaps) // len(sequential["accuracy"]))
    for k, gap in enumerate(gaps[: min(FIRST_STEPS, length)]):
        if not gap <= FIRST_LOSS:
            return f"The losses of step {k} differ by {gap:.2g}. {AGREED if k else FIRST}"
    for epoch in range(-(-len(gaps) // length)):
        part = gaps[epoch * length : (epoch + 1) * length]
        if not statistics.median(part) <= TYPICAL_LOSS:
            return (
                f"In epoch {epoch} the losses differ by {statistics.median(part):.2g} in a "
                "typical step, which is more than noise. Do both runs have the same order of "
                "samples in this epoch?"
            )
    for key, most in LAST.items():
        gap = abs(sequential[key][-1] - parallel[key][-1])
        if not gap <= most:
            return f"The last {key} differs by {gap:.2g}, but noise stays below {most:g}"
    return None


def tell_each(report: Report, wrong: Mapping[str, object]) -> bool:
    """Report every text that is true, for all ranks together; return whether none is."""
    return all([report.follow(None, [facts({text: is_so})]) for text, is_so in wrong.items()])


def judge_run(ranks: Ranks, report: Report) -> None:
    """Judge whether the histories agree up to noise, and whether both models were trained."""
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
        untrained = _untrained(name, runs, len(sequential["loss"]))
        both = each_of([value(lengths, expected, what=what)], [facts(untrained)])
        right.append(report.follow(rank, [both]))
    differing = [key for key in KEYS if parallel[key] != on_rank_1["parallel"][key]]
    unequal = on_rank_0["digest"] != on_rank_1["digest"]
    out_of_sync = {
        "The weights on ranks 0 and 1 differ, so the replicas aren't in sync. Average the "
        "gradients in every step": unequal,
        f"{differing} differ between ranks 0 and 1. Reduce them over the group": differing,
    }
    right.append(tell_each(report, out_of_sync))
    if all(right):
        difference = more_than_noise(sequential, parallel)
        report.follow(None, [facts({str(difference): difference})])


def _untrained(name: str, runs: dict[str, Any], steps: int) -> dict[str, bool]:
    """Return what contradicts a rank's history of so many steps."""
    history = runs[name]
    sent = runs["gradients sent"]
    return {
        f"{name}: The last {key} in the history is {history[key][-1:]}, but {name}_model has "
        f"{now:.4f} on all test images. Run the training again": not same(
            history[key][-1:], [now], 2e-3
        )
        for key, now in zip(KEYS[1:], history["measured"], strict=True)
    } | {
        f"{steps} steps on ranks 0 and 1 need as many all_reduces of the largest gradient, but "
        f"this rank made {sent}. Run the training again": sent < steps,
    }


# -- shares of the images ----------------------------------------------------------------------

TAKE = {
    "trained": "Let train_step(…, group) take this rank's part of each minibatch",
    "tested": "In each epoch give test_sums this rank's part, images[part] and labels[part], and "
    "reduce the sums",
}


def trains_alike(
    report: Report, seeds: list[int], members: list[int], values: list[dict[str, Any]]
) -> bool:
    """Judge the trainings of a group; return whether they agree with the reference."""
    shares = [_share(kind, members, values) for kind in MINIBATCH]
    if not tell_each(report, {problem: is_hopeless for problem, is_hopeless, _ in shares}):
        return False
    epochs = composed(seeds, values)
    reference = reference_history(epochs)
    right = []
    for place, rank in enumerate(members):
        part = slice(place, None, len(members))
        steps = _history_steps(values[place], members, reference, epochs, part)
        right.append(report.follow(rank, steps))
    return all(right) and tell_each(report, {problem: is_so for problem, _, is_so in shares})


def _share(kind: str, members: list[int], values: list[dict[str, Any]]) -> tuple[str, bool, bool]:
    """Return how a group shared the images of a kind, in all epochs together.

    Returns:
        A problem in words; whether each rank took all images or too few were tested, so that
        nothing else can be right; and whether an image was on no rank or on several ranks, or parts
        differ by more than a minibatch.
    """
    taken = [len(of_rank[kind]) for of_rank in values]
    wanted = EPOCHS * few(len(members))[kind]
    all_on_each = len(taken) > 1 and min(taken) >= wanted
    too_few_tests = kind == "tested" and sum(taken) < wanted
    apart = max(taken) - min(taken) > EPOCHS * MINIBATCH[kind]
    how = "The ranks take too few images in all epochs together"
    if apart or sum(taken) > wanted:
        how = "The ranks take unequal parts"
    if all_on_each:
        how = "Every rank takes all images"
    problem = f"{on(members)}: {how} ({taken} of {wanted} were {kind}). {TAKE[kind]}"
    return problem, all_on_each or too_few_tests, apart or sum(taken) != wanted


def _history_steps(
    outcome: dict[str, Any], members: list[int], reference: dict, epochs: list, part: slice
) -> Iterator[Step]:
    """Yield steps that judge a rank's history and how it trained the model."""
    history = outcome["history"]
    calls = outcome["calls"]
    keys = sorted(history) if isinstance(history, dict) else history
    form = 'Return a dict with "loss", "test_loss" and "accuracy"'
    is_history = isinstance(history, dict) and set(history) == set(KEYS)
    yield facts({f"train_parallel returned {keys}. {form}": not is_history})
    yield communication(calls, inside(members), some(members))
    for key, expected in reference.items():
        where = f'train_parallel on a few images {on(members)}: "{key}"'
        mistakes = wrong_histories(key, reference, epochs, part)
        tolerance = TOLERANCES[key]
        yield value(history[key], expected, mistakes, what=where, tolerance=tolerance)
    evaluates = (
        "The model was in evaluation mode during training, where dropout and batch normalization "
        "work differently. Call model.train() after the test"
    )
    yield facts({evaluates: not outcome["in training mode"]})
