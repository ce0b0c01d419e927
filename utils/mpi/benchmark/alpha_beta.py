"""The α–β model: it predicts the time of a message, and is fitted to measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Huber's constant: for normal noise, the fit is 95 % as efficient as least squares (Huber 1981).
_HUBER = 1.345
_REWEIGHTINGS = 30


@dataclass(frozen=True)
class AlphaBeta:
    """A fitted model of the time of a message of n bytes: t(n) = α + n·β.

    Attributes:
        alpha: latency in seconds.
        beta: seconds per byte.
        error: mean of ``|α + n·β − t| / t`` over the points of the fit.
        max_error: the largest of these errors.
    """

    alpha: float
    beta: float
    error: float
    max_error: float

    @property
    def bandwidth(self) -> float:
        """Return 1/β in bytes per second; infinite if the time does not depend on the size."""
        return 1 / self.beta if self.beta > 0 else math.inf

    def predict(self, nbytes):
        """Return the seconds for a message of `nbytes` bytes, a number or an array."""
        return self.alpha + np.asarray(nbytes, dtype=float)[()] * self.beta


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit α ≥ 0 (seconds) and β ≥ 0 (seconds per byte) to the times of messages.

    Relative errors count, so that a message of 4 bytes weighs as much as a message of 64 MiB.
    Points far from the others count less (Huber's weights), so a disturbed sample does little harm.
    One line seldom fits all sizes, because MPI changes its protocol and caches overflow. Therefore
    look at `error`, and fit small and large messages separately.

    Raises:
        ValueError: the lengths differ, there are fewer than two different sizes, a size is
            negative, a time is not positive, or a number is not finite.

    Source: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
    Parallel Computing 20(3), 1994. His r∞ is 1/β, his t₀ is α.
    """
    sizes, times = _checked(nbytes, seconds)
    # Without these units, the two columns would differ by many orders of magnitude.
    unit_size, unit_time = sizes.max(), np.median(times)
    columns = np.stack([unit_time / times, sizes / unit_size * unit_time / times], axis=1)
    weights = np.ones(len(times))
    for _ in range(_REWEIGHTINGS):
        solution = nonnegative(columns, weights)
        errors = np.abs(columns @ solution - 1)
        # For normal noise, 1.4826 times the median of |errors| is a standard deviation.
        limit = _HUBER * 1.4826 * np.median(errors)
        weights = np.where(errors <= limit, 1.0, limit / np.maximum(errors, 1e-300))
        if limit < 1e-9:  # half of the points are on the line, and the rest is rounding
            break
    alpha, beta = solution[0] * unit_time, solution[1] * unit_time / unit_size
    return AlphaBeta(float(alpha), float(beta), float(errors.mean()), float(errors.max()))


def _checked(nbytes, seconds) -> tuple[np.ndarray, np.ndarray]:
    sizes, times = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if sizes.ndim != 1 or sizes.shape != times.shape:
        raise ValueError(
            f"A fit needs one time per size, but got {sizes.size} sizes and {times.size} times."
        )
    if not (np.isfinite(sizes).all() and np.isfinite(times).all()):
        raise ValueError("A size or a time is NaN or infinite. Remove it before the fit.")
    if (sizes < 0).any():
        raise ValueError(f"A size is negative ({sizes.min():g} bytes). Pass sizes of 0 or more.")
    if (times <= 0).any():
        raise ValueError(f"A time is {times.min():g} s. Pass positive times.")
    if len(np.unique(sizes)) < 2:
        raise ValueError(f"A fit needs at least 2 different sizes, but got {sizes.tolist()}.")
    return sizes, times


def nonnegative(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Solve columns · x = 1 by weighted least squares, with both x ≥ 0."""
    scale = np.sqrt(weights)
    left, right = columns * scale[:, None], scale
    solution = np.linalg.lstsq(left, right, rcond=None)[0]
    if (solution >= 0).all():
        return solution
    # All entries of `left` are non-negative, so exactly one x is negative. In the best allowed
    # solution, this x is 0.
    keep = int(solution.argmax())
    best = np.zeros(2)
    best[keep] = left[:, keep] @ right / (left[:, keep] @ left[:, keep])
    return best
