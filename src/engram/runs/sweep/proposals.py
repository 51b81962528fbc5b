"""Who says which points to try next: a grid, all at once; or Optuna, generation after generation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from engram.common.errors import InputError
from engram.config.settings import as_setting
from engram.runs.sweep.space import Axis, Choice, Point, Range, grid

GENERATION = 10  # points that are sought before any of them is known


class Proposals(Protocol):
    """Points in generations. What came of one is told before the next is asked for."""

    def next(self) -> list[Point]:
        """The next generation; empty when there is none."""

    def tell(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        """For each point of the generation the scores of its trials, and whether it had all of them."""


class Grid:
    """All points in one generation."""

    def __init__(self, choices: Sequence[Choice]):
        self.points = grid(choices)

    def next(self) -> list[Point]:
        points, self.points = self.points, []
        return points

    def tell(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        pass


class Search:
    """Points by Optuna's tree of Parzen estimators. The same seed and the same scores give the same points."""

    def __init__(self, axes: Sequence[Axis], num_points: int, seed: int):
        self.optuna = _import_optuna()
        self.axes = list(axes)
        self.left = num_points
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna's own experiments
            sampler = self.optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        self.study = self.optuna.create_study(direction="maximize", sampler=sampler)
        self.asked: list[Any] = []

    def next(self) -> list[Point]:
        number = min(self.left, GENERATION)
        self.left -= number
        ranges = {axis.name: self._distribution(axis) for axis in self.axes}
        self.asked = [self.study.ask(ranges) for _ in range(number)]
        return [{axis.name: self._value(axis, trial.params[axis.name]) for axis in self.axes} for trial in self.asked]

    def tell(self, scores: Sequence[Sequence[float]], finished: Sequence[bool]) -> None:
        state = self.optuna.trial.TrialState
        for trial, own, whole in zip(self.asked, scores, finished, strict=True):
            mean = sum(own) / len(own)
            trial.report(mean, len(own))
            self.study.tell(trial, mean if whole else None, state.COMPLETE if whole else state.PRUNED)

    def _distribution(self, axis: Axis) -> Any:
        kinds = self.optuna.distributions
        if isinstance(axis, Choice):
            return kinds.CategoricalDistribution(range(len(axis.values)))
        if axis.whole:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def _value(self, axis: Axis, found: Any) -> Any:
        if isinstance(axis, Range):
            # four digits are more than a sweep can tell apart, and a person can type them
            return found if axis.whole else as_setting(axis.name, float(f"{found:.4g}"))
        return axis.values[found]


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError as reason:
        raise InputError("Optuna is not installed: pip install 'engram-cl[optuna]'; --grid needs nothing") from reason
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
