"""What a classifier does between its public methods and its learner: check, number classes and tasks, learn, read."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _num_samples, check_is_fitted, validate_data

from engram.common.errors import InputError
from engram.sklearn.arguments import Labels, check_class_weight, checked_weights, class_weights, task_name
from engram.sklearn.network import ContinualLearner
from engram.sklearn.settings import is_memory, make_learner, without_effect
from engram.sklearn.sums import MemoryLearner


class ClassifierBase(BaseEstimator):
    """The private part of `ContinualClassifier`, whose parameters it uses."""

    head: str
    method: str | None
    class_weight: Any
    random_state: Any
    verbose: bool | int
    classes_: np.ndarray
    learner_: ContinualLearner | MemoryLearner
    _labels: Labels
    _task: Hashable  # the current one
    _task_rows: dict[Hashable, list[int]]  # the classes of each task with a name

    @property
    def tasks_(self) -> dict[Hashable, np.ndarray]:
        check_is_fitted(self, "classes_")
        return {task: np.sort(self._labels.values[rows]) for task, rows in self._task_rows.items()}

    def _checked(
        self, X: Any, y: Any, sample_weight: Any, first: bool
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        check_class_weight(self.class_weight)
        if isinstance(y, np.ndarray) and y.ndim == 1 and y.dtype.kind in "biuU" and len(y) == _num_samples(X):
            # such labels can only be right, and scikit-learn's checks of them take longer than a small call
            inputs, labels = validate_data(self, X, dtype=self._types(first), order="C", reset=first), y
        else:
            inputs, labels = validate_data(self, X, y, dtype=self._types(first), order="C", reset=first)
            check_classification_targets(labels)
        return inputs, labels, checked_weights(sample_weight, inputs)

    def _types(self, first: bool) -> Any:
        """A network computes in 32 bits; a memory takes inputs as they are."""
        in_memory = is_memory(self.head, self.method) if first else isinstance(self.learner_, MemoryLearner)
        return (np.float64, np.float32) if in_memory else np.float32

    def _start(self, inputs: np.ndarray, labels: np.ndarray, task: Hashable) -> None:
        """Make a new memory or network for these classes."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        params = self.get_params()
        self.learner_ = make_learner(params, seed, inputs.shape[1], len(labels))
        defaults = {name: known.default for name, known in inspect.signature(type(self)).parameters.items()}
        if unused := ", ".join(without_effect(params, defaults, self.learner_)):
            what = "a memory of sums" if self.head == "auto" else f"the head {self.head}"
            what += ", which takes one pass and trains nothing"
            if isinstance(self.learner_, ContinualLearner) and self.learner_.learns:
                what = self.learner_.config.method
            warnings.warn(f"{unused}: no effect on {what}", stacklevel=3)
        self._task = task
        self._task_rows = {}
        self._set_labels(Labels(labels))
        self.learner_.check(inputs)

    def _set_labels(self, labels: Labels) -> None:
        self._labels = labels
        self.classes_ = labels.classes
        self.learner_.grow(len(self.classes_))

    def _switch_task(self, task: Hashable, labels: np.ndarray) -> None:
        """End the current task if the next samples, with these labels, belong to another."""
        all_new = not np.isin(labels, self._labels.values[self.learner_.seen]).any()
        long_enough = self.learner_.num_samples >= self.learner_.task_size
        if task != self._task or (task is None and all_new and long_enough):
            self.learner_.start_task(self._task_rows.get(task, ()))
        self._task = task

    def _learn(self, inputs: np.ndarray, labels: np.ndarray, weights: np.ndarray | None, epochs: int) -> Self:
        rows = self._labels.rows_of(labels)
        if weights is not None and not weights.all():  # a sample of weight 0 is no sample
            there = weights > 0
            inputs, rows, weights = inputs[there], rows[there], weights[there]
        if self._task is not None:
            self._task_rows.setdefault(self._task, [])
        said = self.learner_.learn(inputs, rows, weights, self._class_weights, self._number_of(self._task), epochs)
        if self._task is not None:
            self._task_rows[self._task] = list(self.learner_.classes)
        if self.verbose:
            named = "" if self._task is None else f", task {self._task!r}"
            print(f"call {self.learner_.num_calls}: {len(rows)} samples{named}, {len(self.classes_)} classes, {said}")
        return self

    def _logits(self, X: Any, task: Hashable) -> np.ndarray:
        """(samples, classes), −∞ for a class that cannot occur."""
        check_is_fitted(self, "classes_")
        inputs = validate_data(self, X, dtype=self._types(first=False), order="C", reset=False)
        rows, number = self.learner_.seen, None
        if task is not None:
            rows, number = self._rows_of(task_name(task)), self._number_of(task)
        by_row = np.full((len(inputs), len(self.classes_)), -np.inf)
        by_row[:, rows] = self.learner_.logits(inputs, self._class_weights, number)[:, rows]
        return by_row[:, self._labels.row_of_column]

    def _class_weights(self, counts: np.ndarray) -> np.ndarray | None:
        return class_weights(self.class_weight, self._labels, counts)

    def _number_of(self, task: Hashable) -> int:
        """0 for samples whose task has no name, then tasks in the order in which they came."""
        return 0 if task is None else 1 + list(self._task_rows).index(task)

    def _rows_of(self, task: Hashable) -> list[int]:
        if task not in self._task_rows:
            known = ", ".join(map(repr, self._task_rows))
            raise InputError(f"there is no task {task!r}, " + (f"only {known}" if known else "and no task has a name"))
        return self._task_rows[task]


@contextmanager
def all_or_nothing(estimator: BaseEstimator) -> Iterator[None]:
    """If it fails, the estimator stays as it was, with what it learned before."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        estimator.__dict__.clear()
        estimator.__dict__.update(before)
        raise
