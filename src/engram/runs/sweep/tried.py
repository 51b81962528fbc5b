"""The points that a sweep has tried, with their scores. Reading them needs no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from engram.config.settings import Config
from engram.runs import metrics
from engram.runs.metrics import Array
from engram.runs.result import Result
from engram.runs.sweep.points import Point, described

DIGITS = 5  # digits of an accuracy; a hundred times finer than a sample


@dataclass
class Tried:
    """A point that was tried."""

    point: Point
    config: Config  # for all its trials
    scores: list[float] = field(default_factory=list)  # final average accuracy of each trial; 0 where it diverged
    num_diverged: int = 0

    @property
    def label(self) -> str:
        return f"{self.config.method}: {described(self.point)}"

    @property
    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else math.nan

    @property
    def finished(self) -> bool:
        """Whether it had all trials, and was not dropped."""
        return len(self.scores) == self.config.trials

    def add(self, result: Result) -> None:
        """Add the scores of more of its trials, up to the first unfinished one: scores are paired by position."""
        finals = metrics.average_accuracy(_rounded(result.accuracy))[:, -1]
        diverged = {divergence.trial for divergence in result.diverged}
        for trial, value in zip(result.trials, finals, strict=True):
            if np.isnan(value) and trial not in diverged:
                break
            self.scores.append(0.0 if np.isnan(value) else float(value))
            self.num_diverged += int(np.isnan(value))


def _rounded(accuracy: Array) -> Array:
    """To five digits, so that the same points survive on every device."""
    return np.array([round(value, DIGITS) for value in accuracy.ravel().tolist()]).reshape(accuracy.shape)


def best_of(tried: Sequence[Tried]) -> Tried:
    """The best of the points that had all trials; of equal ones the earlier."""
    return max((each for each in tried if each.finished), key=lambda each: each.mean)
