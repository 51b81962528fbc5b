"""The points of a sweep: which it tries, which of them get more trials, and their scores. Reading needs no PyTorch.

Points come from a grid, or are proposed by Optuna (`search.py`). After a third of the trials, and not before three of
them, those points are dropped that are clearly worse than the best in the same trials. The steps are trials and not
tasks: what a network knows after half of its tasks says little about what it will have forgotten after all of them,
while each trial is a complete measurement.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from engram.common.errors import InputError
from engram.config.settings import Config
from engram.runs import metrics
from engram.runs.metrics import Array, Estimate
from engram.runs.result import Result
from engram.runs.sweep.axes import Choice, written

Name = TypeVar("Name")
Point = dict[str, Any]  # settings by name
MAX_POINTS = 10_000
GENERATION = 10  # points that are proposed before any of them has a score
FACTOR = 3  # from one decision to the next there are 3 times as many trials, and the best 1/3 of points continue
FEWEST = 2  # points that are never dropped, so that the best has one to compare with
FEWEST_TRIALS = 3  # before any point is dropped: one trial has no error, and two have an interval that says nothing
CHANCE = 0.05  # that a point is dropped that is as good as the best
DIGITS = 5  # digits of an accuracy; a hundred times finer than a sample
MEAN_DIGITS = 10  # digits of a mean of them over tasks and trials


def described(point: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {written(value)}" for name, value in point.items())


@dataclass
class Tried:
    """A point that was tried."""

    point: Point
    config: Config  # for all its trials
    scores: list[float] = field(default_factory=list)  # final average accuracy of each trial; 0 where it diverged
    num_diverged: int = 0
    why: str | None = None  # trials failed, where their loss was not the reason

    @property
    def label(self) -> str:
        return f"{self.config.method}: {described(self.point)}"

    @property
    def mean(self) -> float:
        return mean_score(self.scores)

    @property
    def finished(self) -> bool:
        """Whether it had all trials, and was not dropped."""
        return len(self.scores) == self.config.trials

    @property
    def failed(self) -> bool:
        """Whether every trial that it had diverged, or failed for another reason."""
        return bool(self.scores) and self.num_diverged == len(self.scores)

    def add(self, result: Result) -> None:
        """Add the scores of more of its trials, up to the first that is missing: scores are paired by position."""
        finals = metrics.average_accuracy(_rounded(result.accuracy))[:, -1]
        diverged = {divergence.trial: divergence for divergence in result.diverged}
        for trial, value in zip(result.trials, finals, strict=True):
            is_next = trial == self.config.first_trial + len(self.scores)  # not so where a file lost its entry
            if not is_next or (np.isnan(value) and trial not in diverged):
                break
            self.scores.append(0.0 if np.isnan(value) else float(value))
            if np.isnan(value):
                self.num_diverged += 1
                self.why = self.why or diverged[trial].why


def _rounded(accuracy: Array) -> Array:
    """To five digits, so that the same points survive on every device."""
    return np.array([round(value, DIGITS) for value in accuracy.ravel().tolist()]).reshape(accuracy.shape)


def mean_score(scores: Sequence[float]) -> float:
    """The mean over trials, without the last digits, which depend on the order of the trials and would break ties.

    Example:
        >>> mean_score([0.1, 0.2, 0.3]) == mean_score([0.3, 0.2, 0.1])
        True
    """
    return round(float(np.mean(scores)), MEAN_DIGITS) if len(scores) else math.nan


def best_of(tried: Sequence[Tried]) -> Tried:
    """The best of the points that had all trials; of equal ones the earlier."""
    return max((each for each in tried if each.finished), key=lambda each: each.mean)


def rungs(trials: int, prune: bool) -> list[int]:
    """After how many trials points are dropped, up to all: 3 and 10 for ten trials."""
    found = [trials]
    while prune and found[-1] // FACTOR >= FEWEST_TRIALS:
        found.append(found[-1] // FACTOR)
    return found[::-1]


def num_survivors(num_points: int) -> int:
    """How many points reach the next rung at least."""
    return min(num_points, max(FEWEST, -(-num_points // FACTOR)))


def survivors(scores: Mapping[Name, Sequence[float]]) -> list[Name]:
    """The points that get more trials, in their own order: the better third, and all that are not clearly worse.

    A point is clearly worse than the best if a t test of their differences, in the trials that both have, says so. The
    chance to drop any point that is as good as the best is CHANCE, shared by all others. No point is dropped that ties
    with one of the better third. Where several points are the best, one that is dropped is clearly worse than each.

    Args:
        scores: of the trials of each point.

    Example:
        >>> survivors({"a": [0.9, 0.8, 0.9], "b": [0.8, 0.9, 0.9], "c": [0.7, 0.9, 0.8], "d": [0.1, 0.1, 0.2]})
        ['a', 'b', 'c']
    """
    means = {name: mean_score(own) for name, own in scores.items()}
    ranked = sorted(means, key=lambda name: -means[name])
    if len(ranked) < 2:
        return ranked
    best = [scores[name] for name in ranked if means[name] == means[ranked[0]]]
    least = means[ranked[num_survivors(len(ranked)) - 1]]
    chance = CHANCE / (len(ranked) - 1)
    return [
        name
        for name, own in scores.items()
        if means[name] >= least or not all(_is_below(metrics.paired_difference(own, leader), chance) for leader in best)
    ]


def _is_below(difference: Estimate, chance: float) -> bool:
    """Whether a difference is below zero, where one of zero would be found so with this chance."""
    from scipy.special import stdtrit  # late, since it is slow to import

    if difference.num_trials < 2:
        return False
    return bool(difference.mean + stdtrit(difference.num_trials - 1, 1 - chance) * difference.sem < 0)


class Proposals(Protocol):
    """Points in generations. The scores of one generation are added before the next is asked for."""

    def next(self) -> list[Point]:
        """The next generation; empty when there is none."""

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        """For each point of the generation the scores of its trials, and whether it had all of them."""


def grid(choices: Sequence[Choice]) -> list[Point]:
    """Every combination of the values, the last axis fastest."""
    number = math.prod(len(choice.values) for choice in choices)
    if number > MAX_POINTS:
        raise InputError(f"a grid of {number} points is too large: at most {MAX_POINTS}")
    return [
        dict(zip((choice.name for choice in choices), values, strict=True))
        for values in itertools.product(*(choice.values for choice in choices))
    ]


class Grid:
    """All points in one generation."""

    def __init__(self, choices: Sequence[Choice]):
        self.points = grid(choices)

    def next(self) -> list[Point]:
        points, self.points = self.points, []
        return points

    def add_scores(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        pass
