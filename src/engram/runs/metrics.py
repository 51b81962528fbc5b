"""What an accuracy matrix says, as pure functions of it.

R[i, j] is the accuracy on task j after learning task i, both counted from 0; all functions take leading axes
(trials) as well, and all values are fractions in [0, 1]. Entries that were not measured are NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def average_accuracy(matrix: ArrayLike) -> Array:
    """After each task n, the mean accuracy over the tasks learned so far:  1/n Σ_{j≤n} R[n, j]. Shape (..., T).

    Args:
        matrix: R (..., T, T).

    Example:
        >>> average_accuracy([[0.5, 0.25], [0.25, 0.75]]).tolist()
        [0.5, 0.5]
    """
    r = _square(matrix)
    return np.stack([r[..., n, : n + 1].mean(axis=-1) for n in range(r.shape[-1])], axis=-1)


def first_task(matrix: ArrayLike) -> Array:
    """After each task, the accuracy on the first one:  R[n, 0]. It measures memory. Shape (..., T).

    Args:
        matrix: R (..., T, T).

    Example:
        >>> first_task([[0.5, 0.25], [0.25, 0.75]]).tolist()
        [0.5, 0.25]
    """
    return _square(matrix)[..., :, 0]


def latest_task(matrix: ArrayLike) -> Array:
    """After each task, the accuracy on the task just learned:  R[n, n]. It measures flexibility. Shape (..., T).

    Args:
        matrix: R (..., T, T).

    Example:
        >>> latest_task([[0.5, 0.25], [0.25, 0.75]]).tolist()
        [0.5, 0.75]
    """
    return np.diagonal(_square(matrix), axis1=-2, axis2=-1).copy()


def backward_transfer(matrix: ArrayLike) -> Array:
    """The paper's BWT = 1/(T−1) Σ_{i<T} (R[T, i] − R[i, i]): below zero is forgetting. NaN for a single task.

    Args:
        matrix: R (..., T, T).

    Example:
        >>> float(backward_transfer([[0.5, 0.25], [0.25, 0.75]]))
        -0.25
    """
    r = _square(matrix)
    if r.shape[-1] == 1:
        return np.full(r.shape[:-2], np.nan)
    learned = np.diagonal(r, axis1=-2, axis2=-1)  # R[i, i]
    return (r[..., -1, :-1] - learned[..., :-1]).mean(axis=-1)


def forgetting(matrix: ArrayLike) -> Array:
    """Mean over earlier tasks of the best accuracy so far minus the final one (Chaudhry et al. 2018).

    Args:
        matrix: R (..., T, T).

    Example:
        >>> float(forgetting([[0.5, 0.25], [0.25, 0.75]]))
        0.25
    """
    r = _square(matrix)
    num_tasks = r.shape[-1]
    if num_tasks == 1:
        return np.full(r.shape[:-2], np.nan)
    best = np.stack([r[..., j:-1, j].max(axis=-1) for j in range(num_tasks - 1)], axis=-1)
    return (best - r[..., -1, :-1]).mean(axis=-1)


def forward_transfer(matrix: ArrayLike, untrained: ArrayLike) -> Array:
    """Mean over later tasks of the accuracy just before learning them, minus that of the untrained network.

    FWT = 1/(T−1) Σ_{i>1} (R[i−1, i] − b[i])   (Lopez-Paz and Ranzato 2017)

    Args:
        matrix: R (..., T, T).
        untrained: b (..., T), the accuracies of the untrained network.

    Example:
        >>> float(forward_transfer([[0.5, 0.25], [0.25, 0.75]], [0.125, 0.125]))
        0.125
    """
    r, b = _square(matrix), np.asarray(untrained, dtype=float)
    if r.shape[-1] == 1:
        return np.full(r.shape[:-2], np.nan)
    before = np.diagonal(r, offset=1, axis1=-2, axis2=-1)
    return (before - b[..., 1:]).mean(axis=-1)


@dataclass(frozen=True)
class Estimate:
    """A mean over trials with its standard error (NaN for fewer than two) and 95% interval."""

    mean: float
    sem: float
    low: float
    high: float
    num_trials: int


def estimate(values: ArrayLike) -> Estimate:
    """Mean, SEM and Student's 95% interval of the finite values.

    Args:
        values: one for each trial.

    Example:
        >>> estimate([0.5, 0.75, 1.0]).mean
        0.75
    """
    mean, sem, n = mean_and_sem(values)
    if n < 2:
        return Estimate(mean, sem, math.nan, math.nan, n)
    reach = _quantile(n - 1) * sem
    return Estimate(mean, sem, mean - reach, mean + reach, n)


def mean_and_sem(values: ArrayLike) -> tuple[float, float, int]:
    """The mean and SEM of the finite values, and their number.

    Args:
        values: one for each trial.

    Example:
        >>> mean_and_sem([0.5, 1.0, math.nan])
        (0.75, 0.25, 2)
    """
    v = np.asarray(values, dtype=float)
    v = v[np.isfinite(v)]
    n = len(v)
    mean = float(np.add.reduce(v) / n) if n else math.nan
    sem = math.sqrt(np.add.reduce((v - mean) ** 2) / (n - 1)) / math.sqrt(n) if n > 1 else math.nan
    return mean, sem, n


@cache
def _quantile(degrees_of_freedom: int) -> float:
    """The 97.5% quantile of Student's t distribution."""
    from scipy.special import stdtrit  # late, since it is slow to import; scipy.stats takes four times as long

    return float(stdtrit(degrees_of_freedom, 0.975))


def paired_difference(values: ArrayLike, baseline: ArrayLike) -> Estimate:
    """values − baseline, trial by trial. A pair with a missing side is left out.

    Args:
        values: one for each trial.
        baseline: those of the same trials, in the same order.

    Example:
        >>> paired_difference([0.75, 1.0], [0.5, 0.75]).mean
        0.25
    """
    a, b = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    shared = min(len(a), len(b))
    return estimate(a[:shared] - b[:shared])


def _square(matrix: ArrayLike) -> Array:
    r = np.asarray(matrix, dtype=float)
    if r.ndim < 2 or r.shape[-1] != r.shape[-2] or r.shape[-1] == 0:
        raise ValueError(f"an accuracy matrix is square in its last two axes, not of shape {r.shape}")
    return r
