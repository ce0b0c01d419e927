"""Task 8.1: the two rules of elastic averaging, by which a spring pulls worker and center."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from utils.checks.comparison import is_number, same, short, table
from utils.checks.task import Report, Step, each_of, facts, task, to_each, value
from utils.cluster.questions import Ranks

from .probes import move_cases, moved_center, moved_worker, probe_moves
from .replays import precision


def _wrong_workers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    descended = w - eta * gradient
    return {
        "Nothing pulls the worker to the center. Add the term ρ(W − W̄)": descended,
        "The pull has the wrong sign and drives the worker away from the center. Use "
        "−ηρ(W − W̄)": descended + pull,
        "You didn't multiply ρ(W − W̄) by η. Put both terms into the bracket": descended
        - rho * distance,
        "You multiplied the pull by η twice. Use α = ηρ": descended - eta * pull,
        "You used the center after it had moved. Use the old W̄, as in equation (1)": descended
        - eta * rho * (w - moved_center(center, w, eta, rho)),
        "The gradient has the wrong sign, so the worker climbs": w + eta * gradient - pull,
        "The gradient is missing, so only the spring acts": w - pull,
        "You didn't multiply the gradient by η": w - gradient - pull,
        "You returned the plain average of both": (w + center) / 2,
        "You returned the change of the worker. Return the new weights": -eta * gradient - pull,
    }


def _wrong_centers(
    w: Tensor, center: Tensor, gradient: Tensor, eta: float, rho: float
) -> dict[str, Tensor]:
    distance = w - center
    pull = eta * rho * distance
    return {
        "Nothing pulls the center. Add ηρ(W − W̄)": center,
        "The center moves away from the worker. The sign is +ηρ(W − W̄)": center - pull,
        "You didn't multiply ρ(W − W̄) by η": center + rho * distance,
        "You multiplied the pull by η twice. Use α = ηρ": center + eta * pull,
        "You multiplied the pull by η alone. Use α = ηρ": center + eta * distance,
        "You used the worker's new weights. Use the old W, as in equation (2)": center
        + eta * rho * (moved_worker(w, center, gradient, eta, rho) - center),
        "You moved the center along the gradient, too. Let only the springs move it": center
        - eta * gradient
        + pull,
        "You divided by the number of workers. Equation (2) has a sum, not a mean": center
        + pull / 3,
        "You returned the plain average of both": (w + center) / 2,
        "You returned the change of the center. Return the new center": pull,
    }


@task("8.1", "the two rules", points=2)
def moves(ranks: Ranks, report: Report) -> None:
    """Check the example, then that W + W̄ stays without a gradient, and then random weights."""
    seeds = [report.seed + rank for rank in range(ranks.n)]  # each rank has another form of weights
    for answer in report.answers(ranks, probe_moves, each=to_each(seed=seeds)):
        report.follow(answer.rank, _moves(move_cases(seeds[answer.rank]), answer.value))


def _moves(cases: dict[str, dict[str, Any]], results: dict[str, Any]) -> Iterator[Step]:
    """Yield the steps for the example and the sum, which find different mistakes, and the rest."""
    by_hand, still, *fresh = cases
    yield each_of(
        _moved(by_hand, cases[by_hand], results[by_hand]), _conserved(cases[still], results[still])
    )
    for case in fresh:
        yield from _moved(case, cases[case], results[case])


def _unchanged(result: dict[str, Any]) -> Step:
    changed = result["changed"]
    text = f"You changed {', '.join(changed)}. Return a new tensor, and leave arguments as they are"
    old = "A result is in the memory of an argument or of an earlier result. Return a new tensor"
    return facts({text: changed, old: result["old"]})


def _conserved(arguments: dict[str, Any], result: dict[str, Any]) -> Iterator[Step]:
    yield _unchanged(result)
    before = (arguments["w"] + arguments["center"]).tolist()
    ends = result["moved"]
    # If a rule returned no tensor, the example has reported it.
    are_rows = all(isinstance(end, list) and len(end) == len(ends[0]) for end in ends)
    after = [w + center for w, center in zip(*ends, strict=True)] if are_rows else before
    yield facts({
        "Without a gradient, W + W̄ must stay, because the spring pulls both ends equally. It was "
        f"{short(before)}, and now it is {short(after)}": not same(after, before)
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
    yield other_dtype(result["kinds"], w.dtype)


def other_dtype(kinds: list[str], dtype: torch.dtype) -> Step:
    """Return the step that results have the dtype of the weights."""
    other = next((kind for kind in kinds if kind != str(dtype)), "")
    return facts({
        f"You returned {other}, but the weights are {dtype}. Keep their dtype, because a message "
        "of another one would not fit": other
    })


def _end(name: str, moved: Any, expected: Tensor, by_mistake: dict[str, Tensor]) -> Step:
    """Return the step that an end of the spring moved to the right place."""
    mistakes = {"You returned a single number. Return a tensor of the shape of w": is_number}
    mistakes |= by_mistake
    right = expected.tolist()
    form = "the new weights"
    exact = precision(expected)
    return value(moved, right, table(mistakes), what=name, form=form, tolerance=exact)


def _other_share(moved: Any, end: Tensor, distance: Tensor, alpha: float) -> dict[str, Tensor]:
    """Return the mistake that an end of the spring moves by a wrong share of the distance."""
    numeric = isinstance(moved, list) and all(map(is_number, moved))
    # With a single number, every result would be some share.
    if not numeric or not len(moved) == len(end) > 1:
        return {}
    end = end.double()
    distance = distance.double()
    share = (torch.tensor(moved, dtype=torch.float64) - end) @ distance / (distance @ distance)
    text = f"You moved by a share of {share:.4g} of the distance. Use α = ηρ, here {alpha:.4g}"
    return {text: end + share * distance}
