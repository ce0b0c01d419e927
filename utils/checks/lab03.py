"""Checks of lab 03: data parallel training, replicas in sync.

The answers are tried on groups of 1, 2, 3 and 4 ranks (`utils.checks.groups`).
"""

from __future__ import annotations

import copy
import hashlib
import math
import statistics

import torch
from torch import nn
from torch.nn import functional

from .groups import enough, in_group, members_of, on, partitions, right_group
from .mistakes import same
from .model import use_model as use_model
from .probe import answer_named, integers, recorded
from .replicas import flat, samples_found
from .task import Report, task

WORLD = 4
PARTITIONS = partitions(WORLD)

# Of a minibatch; the last ones are smaller than most groups.
MINIBATCHES = (8, 7, 5, 1)


def _ask(ranks, report: Report, probe: str, partition, **kwargs) -> list:
    """Ask the ranks in the groups of a partition."""
    return report.answers(ranks, __name__, probe, partition=partition, **kwargs)


# -- gradients: 3.1 and 3.2 -------------------------------------------------------------------


def _small_model(kind: str = "frozen") -> nn.Sequential:
    """6 features, 4 classes. "frozen": a parameter needs no gradient; "tied": two are one."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())
    model.append(nn.Linear(6, 4))
    if kind == "frozen":
        model[1].bias.requires_grad_(False)
    elif kind == "tied":
        model[3].weight = model[1].weight
    return model


def _gradient(seed: int, rank: int) -> list[float]:
    """The numbers that rank's gradients are filled with, one after the other."""
    count = sum(p.numel() for p in _small_model().parameters() if p.requires_grad)
    return integers(seed + rank, count).tolist()


def _filled_model(seed: int, rank: int, zero: bool) -> nn.Sequential:
    """A model whose gradients are known numbers; the frozen parameter's is None."""
    model = _small_model()
    values = torch.tensor(_gradient(seed, rank)) * (0.0 if zero else 1.0)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = values[: parameter.numel()].view_as(parameter).clone()
            values = values[parameter.numel() :]
    return model


@in_group
def probe_average(
    user_ns: dict, *, rank: int, group, partition, seed: int, samples: list | None = None
) -> dict:
    """`average_gradients`, or the weighted one, on known gradients."""
    name = "average_gradients" if samples is None else "average_gradients_weighted"
    function = answer_named(user_ns, name)
    model = _filled_model(seed, rank, zero=samples is not None and samples[rank] == 0)
    before = _digest(model)
    arguments = (model,) if samples is None else (model, samples[rank])
    keywords = {} if partition is None else {"group": group}
    _, calls = recorded(function, *arguments, **keywords)
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return {
        "gradient": torch.cat([g.reshape(-1) for g in gradients]).tolist(),
        "sizes": [g.nbytes for g in gradients],
        "frozen": [p.grad is None for p in model.parameters() if not p.requires_grad],
        "weights changed": _digest(model) != before,
        "calls": calls,
    }


@task("3.1", "average the gradients", points=3)
def average_gradients(ranks, report: Report) -> None:
    """The mean of the group's gradients, by one all_reduce per parameter that has one."""
    if not enough(ranks, report, WORLD):
        return
    for partition in (*PARTITIONS, None):
        for answer in _ask(ranks, report, "probe_average", partition, seed=report.seed):
            members = members_of(partition, answer.rank, WORLD)
            own = [_gradient(report.seed, r) for r in range(WORLD)]
            expected = _combine(own, {r: 1 / len(members) for r in members})
            suspects = _suspects_of_average(own, members, answer.rank)
            _judge_gradient(report, answer, members, expected, suspects, extra=0)
        if report.problems:
            return


@task("3.2", "average over unequal parts", points=3)
def average_gradients_weighted(ranks, report: Report) -> None:
    """The gradient of the mean over all samples of the group."""
    if not enough(ranks, report, WORLD):
        return
    for step, partition in enumerate((*PARTITIONS, None)):
        samples = _sample_counts(report.seed + step, with_zero=step in (0, 2))
        answers = _ask(ranks, report, "probe_average", partition, seed=report.seed, samples=samples)
        for answer in answers:
            members = members_of(partition, answer.rank, WORLD)
            own = [
                [0.0 * g for g in _gradient(report.seed, r)]
                if samples[r] == 0
                else _gradient(report.seed, r)
                for r in range(WORLD)
            ]
            total = sum(samples[r] for r in members)
            expected = _combine(own, {r: samples[r] / total for r in members})
            suspects = _suspects_of_weighted(own, members, answer.rank, samples)
            _judge_gradient(report, answer, members, expected, suspects, extra=1)
        if report.problems:
            counts = ", ".join(map(str, samples))
            report.problem(f"(ranks 0 to 3 had {counts} samples)")
            return


def _sample_counts(seed: int, with_zero: bool) -> list[int]:
    """Samples of each rank, all different; none on rank 1 if asked."""
    counts = [1, 3, 6, 10]
    shift = torch.randperm(WORLD, generator=torch.Generator().manual_seed(seed)).tolist()
    counts = [counts[k] + 10 * (seed % 3) for k in shift]
    if with_zero:
        counts[1] = 0
    return counts


def _combine(own: list[list[float]], weights: dict[int, float]) -> list[float]:
    """Σ weight · gradient over some ranks."""
    return [sum(w * own[r][k] for r, w in weights.items()) for k in range(len(own[0]))]


def _suspects_of_average(own, members, rank: int) -> list[tuple[list[float], str]]:
    p, everyone = len(members), range(WORLD)
    return [
        (own[rank], "the gradients are this rank's own, unchanged: all_reduce each parameter.grad"),
        (
            _combine(own, dict.fromkeys(members, 1.0)),
            f"the gradients are the sum over {p} ranks: divide by the number of ranks, and store "
            "the result in parameter.grad",
        ),
        (
            _combine(own, dict.fromkeys(members, 1 / WORLD)),
            f"the sum was divided by {WORLD}, the size of the world; this group has {p} ranks: "
            "dist.get_world_size(group)",
        ),
        (
            _combine(own, dict.fromkeys(everyone, 1 / WORLD)),
            "the gradients are the average over all ranks of the world: pass group=group",
        ),
        (
            _combine(own, dict.fromkeys(everyone, 1 / p)),
            "the gradients were summed over all ranks of the world: pass group=group",
        ),
        (
            _combine(own, dict.fromkeys(members, 1 / p**2)),
            f"the gradients were divided by {p} twice",
        ),
        ([g / p for g in own[rank]], "the gradients were divided, but never summed over ranks"),
    ]


def _suspects_of_weighted(own, members, rank: int, samples) -> list[tuple[list[float], str]]:
    p, everyone = len(members), range(WORLD)
    total, total_of_world = sum(samples[r] for r in members), sum(samples)
    return [
        (own[rank], "the gradients are this rank's own, unchanged"),
        (
            _combine(own, dict.fromkeys(members, 1 / p)),
            "this is the mean of the ranks' means: a rank with few samples counts as much as one "
            "with many. Weight each gradient by samples / all samples",
        ),
        (
            _combine(own, {r: float(samples[r]) for r in members}),
            "weighted by samples, but never divided by the number of all samples",
        ),
        (
            _combine(own, {r: samples[r] / p for r in members}),
            f"weighted by samples, then divided by the {p} ranks: divide by the samples of all",
        ),
        (
            _combine(own, {r: samples[r] / total / p for r in members}),
            f"weighted by samples / all samples, and divided by the {p} ranks once more",
        ),
        (
            _combine(own, {r: samples[r] / total_of_world for r in members}),
            "divided by the samples of the whole world: count them with group=group",
        ),
        (
            _combine(own, {r: samples[r] / total for r in everyone}),
            "the gradients were summed over all ranks of the world: pass group=group",
        ),
        (
            _combine(own, {r: samples[r] / total_of_world for r in everyone}),
            "this is the average over the whole world: pass group=group",
        ),
        (_combine(own, dict.fromkeys(members, 1.0)), "this is the plain sum over the ranks"),
    ]


def _judge_gradient(report: Report, answer, members, expected, suspects, extra: int) -> None:
    """Value and communication of one rank. `extra`: all_reduces beside those of gradients."""
    rank, value = answer.rank, answer.value
    if not all(value["frozen"]):
        report.problem("a parameter without gradient (frozen) got one: leave it alone", rank)
    if value["weights changed"]:
        report.problem("the parameters have changed: average parameter.grad, not the values", rank)
    right = same(value["gradient"], expected)
    if not right:
        report.problem(f"{on(members)}: {_recognise(value['gradient'], expected, suspects)}", rank)
    if not right_group(report, rank, members, value["calls"]):
        return
    sizes = sorted(value["sizes"])
    made = [call["nbytes"] for call in value["calls"] if call["op"] == "all_reduce"]
    others = sorted({call["op"] for call in value["calls"]} - {"all_reduce"})
    if others:
        report.problem(f"uses {', '.join(others)}; this task needs all_reduce only", rank)
    elif right and not len(sizes) <= len(made) <= len(sizes) + extra:
        more = " (and one for the number of samples)" if extra else ""
        report.problem(
            f"{len(sizes)} parameters have a gradient: expected one all_reduce for each{more}, "
            f"it made {len(made)}",
            rank,
        )


def _recognise(got: list[float], expected: list[float], suspects) -> str:
    """What a wrong vector looks like."""
    for suspect, said in suspects:
        if same(got, suspect):
            return said
    ratios = [g / e for g, e in zip(got, expected, strict=True) if abs(e) > 1e-6]
    if ratios and all(same(r, ratios[0], 1e-4) for r in ratios) and ratios[0]:
        return f"every gradient is {ratios[0]:.4g} times what it should be: look at the divisor"
    k = next(k for k in range(len(got)) if not same(got[k], expected[k]))
    wrong = sum(not same(g, e) for g, e in zip(got, expected, strict=True))
    return (
        f"{wrong} of {len(got)} gradient values are wrong; the first: expected {expected[k]:.6g}, "
        f"got {got[k]:.6g}"
    )


# -- metrics: 3.3 -----------------------------------------------------------------------------


@in_group
def probe_metrics(user_ns: dict, *, rank: int, group, partition, parts: list) -> dict:
    """`global_metrics` on this rank's sums."""
    keywords = {} if partition is None else {"group": group}
    result, calls = recorded(answer_named(user_ns, "global_metrics"), *parts[rank], **keywords)
    numbers = None
    if isinstance(result, tuple | list) and len(result) == 2:
        numbers = [float(value) for value in result]
    return {"numbers": numbers, "returned": type(result).__name__, "calls": calls}


@task("3.3", "loss and accuracy over all ranks", points=2)
def global_metrics(ranks, report: Report) -> None:
    """Sums and counts of all ranks by one all_reduce, then two divisions."""
    if not enough(ranks, report, WORLD):
        return
    for step, partition in enumerate((*PARTITIONS, None)):
        parts = _parts(report.seed + step, with_zero=step in (0, 2))
        for answer in _ask(ranks, report, "probe_metrics", partition, parts=parts):
            _judge_metrics(report, answer, members_of(partition, answer.rank, WORLD), parts)
        if report.problems:
            return


def _parts(seed: int, with_zero: bool) -> list[list]:
    """Sum of losses, correct answers, count of each rank; nothing on rank 2 if asked."""
    counts = _sample_counts(seed, with_zero=False)
    numbers = integers(seed, WORLD, 2, low=1, high=90).tolist()
    parts = [
        [counts[r] * (0.3 + a / 90), int(counts[r] * b / 90), counts[r]]
        for r, (a, b) in enumerate(numbers)
    ]
    if with_zero:
        parts[2] = [0.0, 0, 0]
    return parts


def _judge_metrics(report: Report, answer, members, parts) -> None:
    rank, value = answer.rank, answer.value
    sums = [sum(parts[r][k] for r in members) for k in range(3)]
    expected = [sums[0] / sums[2], sums[1] / sums[2]]
    got = value["numbers"]
    if got is None:
        report.problem(
            f"returned {value['returned']}, expected a pair: (mean loss, accuracy)", rank
        )
    elif not same(got, expected):
        report.problem(f"{on(members)}: {_why_metrics(got, expected, members, parts, rank)}", rank)
    if not right_group(report, rank, members, value["calls"]):
        return
    ops = [call["op"] for call in value["calls"]]
    if ops != ["all_reduce"]:
        made = ", ".join(ops) or "nothing"
        report.problem(
            f"expected one all_reduce, of a tensor with the three numbers; it made: {made}", rank
        )


def _why_metrics(got, expected, members, parts, rank: int) -> str:
    def means(r: int) -> list[float]:
        return [parts[r][k] / max(parts[r][2], 1) for k in (0, 1)]

    p = len(members)
    world = [sum(part[k] for part in parts) for k in range(3)]
    sums = [sum(parts[r][k] for r in members) for k in range(3)]
    suspects = [
        (expected[::-1], "the two are swapped: return (mean loss, accuracy)"),
        (means(rank), "these are this rank's own means"),
        (
            [sum(means(r)[k] for r in members) / p for k in (0, 1)],
            "these are means of the ranks' means: reduce the sums and the count, then divide",
        ),
        ([world[0] / world[2], world[1] / world[2]], "these are the means of the whole world"),
        (sums[:2], "these are the sums: divide by the number of samples of all ranks"),
        ([sums[0] / p, sums[1] / p], "divided by the number of ranks, not of samples"),
        (
            [sums[0] / max(parts[rank][2], 1), sums[1] / max(parts[rank][2], 1)],
            "divided by this rank's count: reduce the count, too",
        ),
    ]
    for suspect, said in suspects:
        if same(got, suspect):
            return said
    return (
        f"expected loss {expected[0]:.6g} and accuracy {expected[1]:.6g}, "
        f"got {got[0]:.6g} and {got[1]:.6g}"
    )


# -- a step: 3.4 ------------------------------------------------------------------------------


@in_group
def probe_steps(user_ns: dict, *, rank: int, group, partition, seed: int, kind: str) -> list[dict]:
    """Some steps beside the sequential twin; one dict per minibatch."""
    function = answer_named(user_ns, "train_step")
    members = members_of(partition, rank, WORLD)
    place, size = members.index(rank), len(members)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _small_model(kind)
        everything = torch.randn(len(MINIBATCHES), max(MINIBATCHES), 1, 2, 3)
        classes = torch.randint(0, 4, everything.shape[:2])
    twin = copy.deepcopy(model)
    optimizer, twins = _optimizer(model), _optimizer(twin)
    seen = _watch_samples(model)
    steps = []
    for number, count in enumerate(MINIBATCHES):
        images, labels = everything[number, :count].clone(), classes[number, :count].clone()
        steps.append(_one_step(function, model, optimizer, images, labels, group, partition))
        steps[-1]["samples"] = samples_found(seen, images)
        seen.clear()
        before = flat(twin)
        steps[-1]["own loss"], suspects = _wrong_steps(twin, twins, images, labels, place, size)
        twins.zero_grad()
        loss = functional.cross_entropy(twin(images), labels)
        loss.backward()
        twins.step()
        steps[-1] |= _compare(model, twin, before, suspects) | {"expected loss": loss.item()}
        if not steps[-1]["right"]:
            break
    return steps


def probe_warm_up(user_ns: dict, *, rank: int) -> None:
    """One step without the student's code. PyTorch loads parts of itself at a process's first."""
    model = _small_model("plain")
    optimizer = _optimizer(model)
    optimizer.zero_grad()
    model(torch.ones(1, 1, 2, 3)).sum().backward()
    optimizer.step()


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def _watch_samples(model: nn.Module) -> list[torch.Tensor]:
    """Every input that the model gets from now on."""
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    return seen


def _one_step(function, model, optimizer, images, labels, group, partition) -> dict:
    keywords = {} if partition is None else {"group": group}
    result, calls = recorded(function, model, optimizer, images, labels, **keywords)
    if isinstance(result, torch.Tensor) and result.numel() == 1:
        result = result.item()
    return {
        "loss": float(result) if isinstance(result, int | float) else None,
        "returned": type(result).__name__,
        "calls": calls,
        "digest": _digest(model),
        "gradients": sum(p.requires_grad for p in model.parameters()),
    }


def _digest(model: nn.Module) -> str:
    """Of the bits of all parameters."""
    text = hashlib.sha256()
    for parameter in model.parameters():
        text.update(parameter.detach().contiguous().numpy().tobytes())
    return text.hexdigest()[:16]


def _wrong_steps(twin, optimizer, images, labels, place: int, size: int):
    """This rank's own loss, and where likely mistakes would lead to: text → parameters."""

    def gradient(rows: slice) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=False)
        functional.cross_entropy(twin(images[rows]), labels[rows], reduction="sum").backward()
        return torch.cat(
            [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
             for p in twin.parameters()]
        ).clone()  # fmt: skip

    start, rate, total = flat(twin), optimizer.param_groups[0]["lr"], len(labels)
    old = torch.cat(
        [torch.zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in twin.parameters()]
    ).clone()
    counts = [len(labels[r::size]) for r in range(size)]
    sums = [gradient(slice(r, None, size)) for r in range(size)]
    means = [s / max(n, 1) for s, n in zip(sums, counts, strict=True)]
    whole = sum(sums) / total
    with torch.no_grad():
        mine = functional.cross_entropy(
            twin(images[place::size]), labels[place::size], reduction="sum"
        )
    wrong = {
        "the replica has not moved: optimizer.step()": torch.zeros_like(whole),
        "each replica went its own way: average the gradients between backward and step": means[
            place
        ],
        "the gradients were summed, but not divided": sum(means),
        "a mean of the ranks' means: weight by the number of samples": sum(means) / size,
        "the gradients of the step before were still there: optimizer.zero_grad()": whole + old,
        "divided by the number of ranks once too often": whole / size,
    }
    places = {text: start - rate * g for text, g in wrong.items()}
    return mine.item() / max(counts[place], 1), places


def _compare(model, twin, before, suspects) -> dict:
    """Is the replica where the twin is, to the noise of single precision? If not, where?"""
    now, expected = flat(model), flat(twin)
    moved = (expected - before).abs().max().item()
    noise = 1e-4 * max(moved, 1e-3)

    def at(place: torch.Tensor) -> bool:
        return (now - place).abs().max().item() <= noise

    right = at(expected)
    guess = next((text for text, place in suspects.items() if at(place)), None)
    return {
        "right": right,
        "guess": None if right else guess,
        "off": (now - expected).abs().max().item(),
        "moved": moved,
    }


KINDS = {"plain": "", "tied": "two tied weights, ", "frozen": "a frozen parameter, "}


@task("3.4", "one data-parallel step", points=4)
def train_step(ranks, report: Report) -> None:
    """The step of the sequential twin, at 1 to 4 ranks and on awkward minibatches and models."""
    if not enough(ranks, report, WORLD) or not report.answers(ranks, __name__, "probe_warm_up"):
        return
    for partition in (*PARTITIONS, None):
        for kind, words in KINDS.items():
            before = len(report.problems)
            answers = _ask(ranks, report, "probe_steps", partition, seed=report.seed, kind=kind)
            for members in partition or [list(range(WORLD))]:
                if answers:
                    _judge_steps(report, members, [answers[r] for r in members], words)
            if len(report.problems) > before and not answers and words:
                report.problem(f"(that was a model with {words.rstrip(', ')})")
            if report.problems:
                return


def _judge_steps(report: Report, members, answers, words: str) -> None:
    for number, count in enumerate(MINIBATCHES):
        steps = [answer.value[number] for answer in answers if number < len(answer.value)]
        if len(steps) < len(members):
            return
        plural = "s" * (count != 1)
        where = f"{words}minibatch of {count} sample{plural} {on(members)}"
        known = len(report.problems)
        _judge_partition(report, members, steps, count, where)
        for rank, step in zip(members, steps, strict=True):
            _judge_calls(report, rank, members, step, where)
            if not step["right"]:
                guess = step["guess"] or (
                    f"a weight is off by {step['off']:.2g}; the step moves them by up to "
                    f"{step['moved']:.2g}"
                )
                report.problem(f"{where}: not the sequential step: {guess}", rank)
            elif not _same_loss(step):
                report.problem(f"{where}: {_why_loss(step)}", rank)
        if len(report.problems) == known and len({step["digest"] for step in steps}) > 1:
            report.problem(
                f"{where}: the replicas are not identical to the last bit: every rank must do the "
                "same arithmetic on the same reduced gradient"
            )
        if len(report.problems) > known:
            return


def _judge_partition(report: Report, members, steps, count: int, where: str) -> None:
    """Together the ranks have each sample once."""
    parts = [step["samples"] for step in steps]
    if sorted(index for part in parts for index in part) == list(range(count)):
        return
    if len(members) > 1 and all(sorted(part) == list(range(count)) for part in parts):
        report.problem(f"{where}: every rank computes the whole minibatch; take this rank's part")
        return
    said = "; ".join(f"rank {rank}: {part}" for rank, part in zip(members, parts, strict=True))
    report.problem(
        f"{where}: each sample must be on one rank, once. The models got {said}. The part depends "
        "on dist.get_rank(group) and dist.get_world_size(group)"
    )


def _judge_calls(report: Report, rank: int, members, step: dict, where: str) -> None:
    if not right_group(report, rank, members, step["calls"]):
        return
    others = sorted({call["op"] for call in step["calls"]} - {"all_reduce"})
    if others:
        report.problem(f"{where}: uses {', '.join(others)}; a step needs all_reduce only", rank)
    made, low = len(step["calls"]), step["gradients"] + 1
    if not others and step["right"] and not low <= made <= low + 1:
        report.problem(
            f"{where}: {made} all_reduces. Expected {low} or {low + 1}: one for each of the "
            f"{low - 1} gradients, one for the loss, and perhaps one for the number of samples",
            rank,
        )


def _same_loss(step: dict) -> bool:
    return step["loss"] is not None and same(step["loss"], step["expected loss"], 1e-4)


def _why_loss(step: dict) -> str:
    if step["loss"] is None:
        return f"train_step returned {step['returned']}, expected the loss of the minibatch"
    if math.isnan(step["loss"]):
        return "the loss is nan: a mean over no samples is 0 / 0, and one nan spoils every sum"
    if same(step["loss"], step["own loss"], 1e-4):
        return "the loss returned is that of this rank's part; expected that of the whole minibatch"
    return f"the loss of the minibatch is {step['expected loss']:.6g}, got {step['loss']:.6g}"


# -- the run: 3.5 -----------------------------------------------------------------------------

# What noise may do. A wrong result is far outside: see the figure in "Tell a bug from noise".
FIRST_LOSS, TYPICAL_LOSS, TEST_LOSS, ACCURACY = 1e-4, 0.03, 0.05, 0.02
# So many steps stay below FIRST_LOSS: rounding is a few 1e-7 there. It grows at once by a factor of
# a thousand where it takes an input of a ReLU across 0, in one run of six within 40 steps.
# A learning rate that is wrong by 5 % gives 1e-3 within ten steps, on the generated images too.
FIRST_STEPS = 10


def probe_run(user_ns: dict, *, rank: int) -> dict | None:
    """The histories on ranks 0 and 1, and test results computed anew from the models."""
    from torch_mpi.record import log

    if rank > 1:
        return None
    model = answer_named(user_ns, "parallel_model")
    told = _history(answer_named(user_ns, "parallel"), "parallel")
    largest = max(p.nbytes for p in model.parameters())
    calls = [c for c in log.since(0) if c.op == "all_reduce" and c.group == (0, 1)]
    answer = {
        "parallel": told,
        "measured": _test(model),
        "digest": _digest(model),
        "gradients sent": sum(call.nbytes == largest for call in calls),
    }
    if rank == 0:
        answer["sequential"] = _history(answer_named(user_ns, "sequential"), "sequential")
        answer["sequential measured"] = _test(answer_named(user_ns, "sequential_model"))
    return answer


def _history(history, name: str) -> dict:
    found = {}
    for key in ("loss", "test_loss", "accuracy"):
        if not isinstance(history, dict) or key not in history:
            raise TypeError(f'{name} must be a dict with "loss", "test_loss" and "accuracy"')
        found[key] = [float(value) for value in history[key]]
    return found


@torch.no_grad()
def _test(model: nn.Module) -> list[float]:
    """Mean loss and accuracy over all test images."""
    from utils import data

    images = data.fashion_mnist(train=False)
    loss = correct = 0.0
    for pixels, labels in data.InMemoryLoader(images, 1000):
        outputs = model(pixels)
        loss += functional.cross_entropy(outputs, labels, reduction="sum").item()
        correct += (outputs.argmax(1) == labels).sum().item()
    return [loss / len(images), correct / len(images)]


@task("3.5", "the same result as the sequential run", points=2)
def same_result(ranks, report: Report) -> None:
    """Both histories agree as far as noise lets them, and both models were really trained."""
    answers = report.answers(ranks, __name__, "probe_run")
    if not answers:
        return
    zero, one = answers[0].value, answers[1].value
    sequential, steps = zero["sequential"], len(zero["sequential"]["loss"])
    for rank, value in ((0, zero), (1, one)):
        lengths = [len(value["parallel"][key]) for key in ("loss", "test_loss", "accuracy")]
        expected = [len(sequential[key]) for key in ("loss", "test_loss", "accuracy")]
        report.expect(rank, "numbers of losses, test losses, accuracies", lengths, expected)
        if value["gradients sent"] < steps:
            report.problem(
                f"{steps} steps on ranks 0 and 1 need as many all_reduces of the largest "
                f"gradient; this rank made {value['gradients sent']}. Call train_step with "
                "group=group",
                rank,
            )
        _judge_told(report, rank, "parallel", value["parallel"], value["measured"])
    _judge_told(report, 0, "sequential", sequential, zero["sequential measured"])
    if zero["digest"] != one["digest"]:
        report.problem("the weights on ranks 0 and 1 differ: the replicas are not in sync")
    for key in ("loss", "test_loss", "accuracy"):
        if zero["parallel"][key] != one["parallel"][key]:
            report.problem(f'"{key}" differs between ranks 0 and 1: reduce it over the group')
    if not report.problems:
        _judge_noise(report, sequential, zero["parallel"])


def _judge_told(report: Report, rank: int, name: str, told: dict, measured: list) -> None:
    for what, key, value in zip(
        ("test loss", "accuracy"), ("test_loss", "accuracy"), measured, strict=True
    ):
        if told[key] and not abs(told[key][-1] - value) <= 2e-3:
            report.problem(
                f"{name}: the last {what} in the history is {told[key][-1]:.4f}, but "
                f"{name}_model has {value:.4f} on all test images",
                rank,
            )


def _judge_noise(report: Report, sequential: dict, parallel: dict) -> None:
    pairs = list(zip(sequential["loss"], parallel["loss"], strict=True))
    differences = [abs(a - b) for a, b in pairs]
    epochs = max(len(sequential["accuracy"]), 1)
    length = -(-len(differences) // epochs)
    if not differences:
        report.problem("there is no loss to compare")
        return
    first = differences[: min(FIRST_STEPS, length)]
    off = next((k for k, gap in enumerate(first) if not gap <= FIRST_LOSS), None)
    if off == 0:
        report.problem(
            f"the losses of the very first step differ by {first[0]:.2g}: the same weights and the "
            "same minibatch must give the same loss. Same seed? Same order?"
        )
    elif off is not None:
        report.problem(
            f"the losses of step {off} differ by {first[off]:.2g}, those before agree: so early "
            "that is no noise, but another step. Is the learning rate the twin's?"
        )
    if off is not None:
        return
    for epoch in range(epochs):
        part = differences[epoch * length : (epoch + 1) * length]
        typical = statistics.median(part) if part else 0.0
        if not typical <= TYPICAL_LOSS:
            report.problem(
                f"epoch {epoch}: the losses differ by {typical:.2g} in a typical step, which is "
                "no noise. Is the order of the samples the same in this epoch? Is the gradient?"
            )
    for key, most in (("test_loss", TEST_LOSS), ("accuracy", ACCURACY)):
        gap = abs(sequential[key][-1] - parallel[key][-1])
        if not gap <= most:
            report.problem(f"the last {key} differs by {gap:.2g}; noise stays below {most:g}")


# -- in sync: 3.6 -----------------------------------------------------------------------------

DAMAGES = {
    "none": "identical replicas",
    "ulp": "one weight, on one rank, differs in its last bit",
    "ulp on the first": "one weight, on the first rank of the group, differs in its last bit",
    "swap": "two weights are swapped on one rank, so that all sums agree",
    "nan": "NaN at the same place on all ranks: the bits are the same",
    "one nan": "NaN on one rank only",
    "opposite": "one weight is larger by 1 on one rank and smaller by 1 on another",
}


@in_group
def probe_sync(user_ns: dict, *, rank: int, group, partition, seed: int) -> list[dict]:
    """`replicas_in_sync` on replicas of which one may be damaged: one dict for each damage."""
    function = answer_named(user_ns, "replicas_in_sync")
    keywords = {} if partition is None else {"group": group}
    answers = []
    for damage in DAMAGES:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = _small_model("frozen")
        _damage(model, damage, rank, members_of(partition, rank, WORLD), seed)
        before = _digest(model)
        result, calls = recorded(function, model, **keywords)
        answers.append(
            {
                "result": result if isinstance(result, bool) else repr(result)[:80],
                "changed": _digest(model) != before,
                "calls": calls,
            }
        )
    return answers


@torch.no_grad()
def _damage(model: nn.Module, damage: str, rank: int, members, seed: int) -> None:
    parameters = [p.view(-1) for p in model.parameters()]
    victim = parameters[seed % len(parameters)]
    k = seed // 7 % (victim.numel() - 1)
    if damage == "nan" or (damage == "one nan" and rank == members[-1]):
        victim[k] = float("nan")
    elif (damage == "ulp" and rank == members[-1]) or (
        damage == "ulp on the first" and rank == members[0]
    ):
        victim[k] = torch.nextafter(victim[k], torch.tensor(9.0))
    elif damage == "swap" and rank == members[-1]:
        victim[k : k + 2] = victim[k : k + 2].flip(0).clone()
    elif damage == "opposite" and rank in (members[0], members[-1]):
        victim[k] += 1.0 if rank == members[0] else -1.0


@task("3.6", "are the replicas in sync?", points=2)
def replicas_in_sync(ranks, report: Report) -> None:
    """True exactly when the group's replicas agree bit by bit, and the same on all its ranks."""
    if not enough(ranks, report, WORLD):
        return
    for partition in (*PARTITIONS, None):
        for answer in _ask(ranks, report, "probe_sync", partition, seed=report.seed):
            members = members_of(partition, answer.rank, WORLD)
            for (damage, words), value in zip(DAMAGES.items(), answer.value, strict=True):
                expected = damage in ("none", "nan") or len(members) == 1
                _judge_sync(report, answer.rank, value, members, expected, words)
        if report.problems:
            return


def _judge_sync(report: Report, rank, value, members, expected: bool, words: str) -> None:
    if value["changed"]:
        report.problem("the model was changed: compare with a copy", rank)
    if not isinstance(value["result"], bool):
        report.problem(f"returned {value['result']}, expected True or False", rank)
    elif value["result"] != expected:
        report.problem(f"{on(members)}: {words}. Expected {expected}, got {value['result']}", rank)
    right_group(report, rank, members, value["calls"])
