"""The two rules of elastic averaging: a spring pulls worker and centre together (8.1)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import is_number, same, short, table
from utils.checks.probe import answer_named, told
from utils.checks.task import Report, Step, each_of, facts, task, to_each, value
from utils.cluster.questions import Ranks

from .replays import moved_center, moved_worker, precision, start


def probe_moves(user_ns: dict, *, rank: int, seed: int) -> dict:
    """Ask for both ends of the spring in every case; return them, and what has changed."""
    worker, center = (answer_named(user_ns, name) for name in ("move_worker", "move_center"))
    results: dict = {}
    for case, arguments in _move_cases(seed).items():
        moved = []
        changed = set()
        for function, names in ((worker, ["w", "center", "gradient"]), (center, ["center", "w"])):
            copies = {name: arguments[name].clone() for name in names}
            moved.append(told(function(*copies.values(), arguments["eta"], arguments["rho"])))
            changed |= {name for name in names if not torch.equal(copies[name], arguments[name])}
        results[case] = {"moved": moved, "changed": sorted(changed)}
    return results


def _move_cases(seed: int) -> dict[str, dict[str, Any]]:
    """Return arguments of the rules, by what is told of them."""
    by_hand = {"w": 5.0, "center": 1.0, "gradient": 3.0}
    fresh: dict[str, Any] = {
        name: start(seed + 7 * k, like=seed) for k, name in enumerate(by_hand, 1)
    }
    chance = random.Random(seed)
    fresh["eta"] = eta = chance.uniform(0.02, 0.22)
    fresh["rho"] = chance.uniform(0.5, 2.5)
    of_one = {name: torch.tensor([number]) for name, number in by_hand.items()}
    return {
        "the step by hand": {**of_one, "eta": 0.1, "rho": 2.0},
        "no gradient": fresh | {"gradient": torch.zeros_like(fresh["w"])},
        "random weights": fresh,
        "α = 0.8": fresh | {"rho": 0.8 / eta},
        "α = 1.3": fresh | {"rho": 1.3 / eta},
    }


def _wrong_workers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    descended = w - eta * gradient
    return {
        "nothing pulls the worker to the centre: the term ρ(W − W̄) is missing": descended,
        "the pull has the wrong sign, and drives the worker away from the centre: it moves by "
        "−ηρ(W − W̄)": descended + pull,
        "ρ(W − W̄) is not multiplied by η: both terms are in the bracket": descended
        - rho * distance,
        "the pull is multiplied by η twice: α = ηρ": descended - eta * pull,
        "the pull goes to the centre after it has moved; equation (1) has the old W̄": descended
        - eta * rho * (w - moved_center(center, w, eta, rho)),
        "the gradient has the wrong sign: the worker climbs": w + eta * gradient - pull,
        "the gradient is missing: only the spring acts": w - pull,
        "the gradient is not multiplied by η": w - gradient - pull,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the worker; return the new weights": -eta * gradient - pull,
    }


def _wrong_centers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    return {
        "nothing pulls the centre": center,
        "the centre moves away from the worker: the sign is +ηρ(W − W̄)": center - pull,
        "ρ(W − W̄) is not multiplied by η": center + rho * distance,
        "multiplied by η twice: α = ηρ": center + eta * pull,
        "multiplied by η alone: ρ is missing": center + eta * distance,
        "this follows from the worker's new weights; equation (2) has the old ones, W": center
        + eta * rho * (moved_worker(w, center, gradient, eta, rho) - center),
        "the centre descends along the gradient, too. "
        "It has no gradient: only the springs move it": center - eta * gradient + pull,
        "divided by the number of workers: the sum over the workers is no mean": center + pull / 3,
        "this is the plain average of both": (w + center) / 2,
        "this is the change of the centre; return the new centre": pull,
    }


@task("8.1", "the two rules", points=2)
def moves(ranks: Ranks, report: Report) -> None:
    """Check a step by hand; W + W̄ conserved without a gradient; then random weights."""
    seeds = [report.seed + rank for rank in range(ranks.n)]  # so weights of each length and type
    for answer in report.answers(ranks, probe_moves, each=to_each(seed=seeds)):
        report.follow(answer.rank, _moves(_move_cases(seeds[answer.rank]), answer.value))


def _moves(cases: dict[str, dict[str, Any]], results: dict[str, Any]) -> Iterator[Step]:
    """Yield the step by hand and the sum, as each sees what the other does not; then the rest."""
    by_hand, still, *fresh = cases
    yield each_of(
        _moved(by_hand, cases[by_hand], results[by_hand]), _conserved(cases[still], results[still])
    )
    for case in fresh:
        yield from _moved(case, cases[case], results[case])


def _unchanged(result: dict[str, Any]) -> Step:
    changed = result["changed"]
    text = f"{', '.join(changed)} has changed: return a new tensor, leave arguments alone"
    return facts({text: changed})


def _conserved(arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    yield _unchanged(result)
    before = (arguments["w"] + arguments["center"]).tolist()
    ends = result["moved"]
    # Where nothing was returned, the step by hand has said so.
    are_rows = all(isinstance(end, list) and len(end) == len(ends[0]) for end in ends)
    after = [w + center for w, center in zip(*ends, strict=True)] if are_rows else before
    yield facts({
        "without a gradient W + W̄ must stay, as what pulls the one pulls the other. It was "
        f"{short(before)}, and is {short(after)}": not same(after, before)
    })


def _moved(case: str, arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    yield _unchanged(result)
    w, center, eta, rho = (arguments[name] for name in ("w", "center", "eta", "rho"))
    new_w, new_center = result["moved"]
    descended = w - eta * arguments["gradient"]
    wrong_workers = _wrong_workers(**arguments)
    wrong_workers |= _other_share(new_w, descended, center - w, eta * rho)
    wrong_centers = _wrong_centers(**arguments)
    wrong_centers |= _other_share(new_center, center, w - center, eta * rho)
    right_center = moved_center(center, w, eta, rho)
    yield each_of(
        [_end(f"move_worker, {case}", new_w, moved_worker(**arguments), wrong_workers)],
        [_end(f"move_center, {case}", new_center, right_center, wrong_centers)],
    )


def _end(name: str, moved: Any, expected: Tensor, by_mistake: dict[str, Tensor]) -> Step:
    """Return the step that an end of the spring has moved as it should."""
    mistakes = {"this is a single number: return a tensor of the shape of w": is_number}
    mistakes |= by_mistake
    right = expected.tolist()
    form = "the new weights"
    exact = precision(expected)
    return value(moved, right, table(mistakes), what=name, form=form, tolerance=exact)


def _other_share(moved: Any, end: Tensor, distance: Tensor, alpha: float) -> dict[str, Tensor]:
    """Return the mistake that an end of the spring moves by another share of the distance."""
    numeric = isinstance(moved, list) and all(map(is_number, moved))
    # Of one number alone, every result is some share.
    if not numeric or not len(moved) == len(end) > 1:
        return {}
    end = end.double()
    distance = distance.double()
    share = (torch.tensor(moved, dtype=torch.float64) - end) @ distance / (distance @ distance)
    text = f"it moves by the share {share:.4g} of the distance, expected α = ηρ = {alpha:.4g}: α "
    return {text + "has no limit, and no value of its own": end + share * distance}
