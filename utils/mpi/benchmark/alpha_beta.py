"""The α–β model of a message's time, fitted to measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Huber's constant: 95 % as efficient as least squares where the noise is normal (Huber 1981).
_HUBER = 1.345
_REWEIGHTINGS = 30


@dataclass(frozen=True)
class AlphaBeta:
    """The time of a message of n bytes: t(n) = α + n·β.

    Attributes:
        alpha: latency in seconds.
        beta: seconds per byte.
        error: mean of ``|α + n·β − t| / t`` over the points of the fit.
        max_error: the largest of them.
    """

    alpha: float
    beta: float
    error: float
    max_error: float

    @property
    def bandwidth(self) -> float:
        """1/β in bytes per second; infinite where the time does not depend on the size."""
        return 1 / self.beta if self.beta > 0 else math.inf

    def predict(self, nbytes):
        """Seconds for a message of `nbytes` bytes: a number, or an array of them."""
        return self.alpha + np.asarray(nbytes, dtype=float)[()] * self.beta


def fit_alpha_beta(nbytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """The α ≥ 0 (seconds) and β ≥ 0 (seconds per byte) that fit the times of messages best.

    Relative errors count, so that a message of 4 bytes weighs as much as one of 64 MiB; points
    far off the others count less (Huber's weights), so that a disturbed sample does little harm.
    One line seldom fits all sizes, because MPI changes its protocol and caches overflow: look
    at `error`, and fit small and large messages apart.

    Raises:
        ValueError: lengths differ, fewer than two different sizes, a size that is negative, a
            time that is not positive, or a number that is not finite.

    Source: R. W. Hockney, "The communication challenge for MPP: Intel Paragon and Meiko CS-2",
    Parallel Computing 20(3), 1994. His r∞ is 1/β, his t₀ is α.
    """
    sizes, times = _checked(nbytes, seconds)
    # Units in which both columns are of the order of 1.
    unit_size, unit_time = sizes.max(), np.median(times)
    columns = np.stack([unit_time / times, sizes / unit_size * unit_time / times], axis=1)
    weights = np.ones(len(times))
    for _ in range(_REWEIGHTINGS):
        solution = nonnegative(columns, weights)
        errors = np.abs(columns @ solution - 1)
        # 1.4826: from the median of |errors| to a standard deviation, for normal noise.
        limit = _HUBER * 1.4826 * np.median(errors)
        weights = np.where(errors <= limit, 1.0, limit / np.maximum(errors, 1e-300))
        if limit < 1e-9:  # half of the points lie on the line: rounding is all that is left
            break
    alpha, beta = solution[0] * unit_time, solution[1] * unit_time / unit_size
    return AlphaBeta(float(alpha), float(beta), float(errors.mean()), float(errors.max()))


def _checked(nbytes, seconds) -> tuple[np.ndarray, np.ndarray]:
    sizes, times = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if sizes.ndim != 1 or sizes.shape != times.shape:
        raise ValueError(
            f"a fit needs one time per size, got {sizes.size} sizes and {times.size} times"
        )
    if not (np.isfinite(sizes).all() and np.isfinite(times).all()):
        raise ValueError("sizes and times must be finite, without NaN")
    if (sizes < 0).any():
        raise ValueError(f"sizes must not be negative, got {sizes.min():g} bytes")
    if (times <= 0).any():
        raise ValueError(f"times must be positive, got {times.min():g} s")
    if len(np.unique(sizes)) < 2:
        raise ValueError(f"a fit needs at least 2 different sizes, got {sizes.tolist()}")
    return sizes, times


def nonnegative(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Weighted least squares of columns · x = 1 with both x ≥ 0."""
    scale = np.sqrt(weights)
    left, right = columns * scale[:, None], scale
    solution = np.linalg.lstsq(left, right, rcond=None)[0]
    if (solution >= 0).all():
        return solution
    # All entries of `left` are non-negative, so exactly one x is negative: the best allowed
    # one has it at 0.
    keep = int(solution.argmax())
    best = np.zeros(2)
    best[keep] = left[:, keep] @ right / (left[:, keep] @ left[:, keep])
    return best
