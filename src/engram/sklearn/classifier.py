"""`ContinualClassifier`: Engram as a scikit-learn estimator."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from engram.common.errors import InputError
from engram.engine.build import choose_device
from engram.sklearn.files import Saved, load, save
from engram.sklearn.labels import Labels, check_same_kind, declared_classes, task_name, whole_number
from engram.sklearn.learner import ContinualLearner, make_config


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """A neural network that keeps learning: new samples, new classes and new tasks, without the old data.

    Its head grows as classes come, and each task is consolidated when it ends: the weights that it needs become hard to
    change. It supports the three scenarios of continual learning:

    - class-incremental: tasks bring new classes, and `predict(X)` chooses among all classes so far;
    - domain-incremental: tasks bring the same classes in other conditions, and `predict(X)` does the same;
    - task-incremental: the task of a sample is known, and `predict(X, task=...)` chooses among its classes.

    A task ends when `partial_fit` is called with another `task` than before, or by `consolidate()`. `task=None` is a
    name like any other, with one exception: where no task is named, a call whose classes are all new starts a new task
    if the current one has had at least `batch_size` samples. (So a stream of single samples is one task.)

    Features should be of about unit size: put a `StandardScaler` before it. Gradients are clipped to norm 1, so that
    other features are learned badly rather than not at all.

    Args:
        hidden: the widths of the hidden layers; a single number is one layer.
        method: "finetune", "dhp" (the plastic head alone), "si", "ewc", "online-ewc", "mas" (a penalty alone), or both,
            as in "dhp+si". With "ewc" memory grows with the number of tasks.
        strength: λ, how strongly consolidated weights are protected. Default: 3, 0.03 for "mas", others as registered.
        steady: use the steady form of the plastic head (`engram.config.presets.STEADY`), not the paper's.
        masked: only classes of the current task are in the softmax during training. Without it, each new task teaches
            the network that the old classes no longer occur.
        learning_rate: of plain SGD.
        batch_size: samples per step.
        epochs: passes over the samples of `fit`.
        partial_fit_epochs: passes over the samples of each call of `partial_fit`.
        memory_size: how many samples of the *current* task are kept, as a uniform random sample, to compute importances
            when it ends; they are discarded then. "si", "dhp" and "finetune" keep none.
        random_state: a seed, a `RandomState` from which one is drawn, or None.
        device: "cpu", "cuda" or "auto".

    Changes by `set_params` take effect at the next `fit`, those of `partial_fit_epochs` at the next `partial_fit`.

    Attributes:
        classes_: all classes, sorted. A new class may shift the columns of `predict_proba`.
        tasks_: the classes of each task with a name.
        n_features_in_, feature_names_in_: as in all of scikit-learn.
        learner_: the network (`learner_.model`) and its penalty (`learner_.penalty`).

    Example:
        >>> classifier = ContinualClassifier(random_state=0)
        >>> classifier.partial_fit([[0.0], [1.0]], ["cold", "warm"], task="winter").classes_.tolist()
        ['cold', 'warm']
        >>> classifier.partial_fit([[2.0]], ["hot"], task="summer").classes_.tolist()
        ['cold', 'hot', 'warm']
    """

    def __init__(
        self,
        hidden: int | Sequence[int] = (256,),
        method: str = "dhp+si",
        *,
        strength: float | None = None,
        steady: bool = True,
        masked: bool = True,
        learning_rate: float = 0.1,
        batch_size: int = 32,
        epochs: int = 20,
        partial_fit_epochs: int = 1,
        memory_size: int = 500,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
    ):
        self.hidden = hidden
        self.method = method
        self.strength = strength
        self.steady = steady
        self.masked = masked
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.epochs = epochs
        self.partial_fit_epochs = partial_fit_epochs
        self.memory_size = memory_size
        self.random_state = random_state
        self.device = device

    def fit(self, X: Any, y: Any, task: Hashable = None) -> Self:
        """Learn from scratch, in `epochs` passes over the data; everything learned before is discarded.

        Args:
            X: the samples, (samples, features).
            y: a label for each sample.
            task: a name for the task of these samples, with which `partial_fit` can continue.

        Example:
            >>> ContinualClassifier(random_state=0).fit([[0.0], [1.0]], ["cold", "warm"]).predict([[1.0]])
            array(['warm'], dtype='<U4')
        """
        task = task_name(task)
        with _all_or_nothing(self):
            inputs, labels = self._checked(X, y, first=True)
            self._start(inputs, np.unique(labels), task)
            return self._learn(inputs, labels, self.learner_.config.epochs)

    def partial_fit(self, X: Any, y: Any, task: Hashable = None, classes: Any = None) -> Self:
        """Continue to learn, in `partial_fit_epochs` passes over these samples.

        Args:
            X: the samples, (samples, features), dense; computed with in 32 bits.
            y: a label for each sample: text, numbers or Booleans, the same kind in all calls. The head grows by
                labels that are new.
            task: the task of these samples, any hashable value. If it is not the current task, the current one is
                consolidated first. A task may come back.
            classes: all labels that `y` may hold, if they should have a column from now on. Unlike elsewhere in
                scikit-learn it is never needed, and may differ from call to call.

        Example:
            >>> classifier.partial_fit([[2.0]], ["hot"], task="summer").tasks_["summer"].tolist()
            ['hot']
        """
        task, passes = task_name(task), whole_number("partial_fit_epochs", self.partial_fit_epochs, least=1)
        if not hasattr(self, "classes_"):
            with _all_or_nothing(self):
                inputs, labels = self._checked(X, y, first=True)
                self._start(inputs, np.unique(declared_classes(classes, labels)), task)
                return self._learn(inputs, labels, passes)
        inputs, labels = self._checked(X, y, first=False)
        check_same_kind(labels, self._labels.values)
        grown = self._labels.extended(self._labels.unknown(declared_classes(classes, labels)))
        self._switch_task(task, labels)
        self._set_labels(grown)
        return self._learn(inputs, labels, passes)

    def consolidate(self) -> Self:
        """End the current task now, as a call with another `task` would.

        Example:
            >>> classifier = classifier.partial_fit(X, y).consolidate()
        """
        check_is_fitted(self, "classes_")
        self.learner_.start_task(self._task_rows.get(self._task, ()))
        return self

    def predict(self, X: Any, task: Hashable = None) -> np.ndarray:
        """The most probable class of each sample, among all classes so far, or among those of a task.

        Args:
            X: the samples, (samples, features).
            task: the name of a task, if it is known that all samples belong to it.

        Example:
            >>> classifier.predict([[0.0], [1.0]], task="winter").shape
            (2,)
        """
        columns = self.predict_proba(X, task).argmax(axis=1)
        return self.classes_[columns]

    def predict_proba(self, X: Any, task: Hashable = None) -> np.ndarray:
        """The probability of each class, in the order of `classes_`: (samples, classes).

        Args:
            X: the samples, (samples, features).
            task: the name of a task; classes of other tasks then have probability 0.

        Example:
            >>> classifier.predict_proba([[0.0], [1.0]]).sum(axis=1).round(6)
            array([1., 1.])
        """
        check_is_fitted(self, "classes_")
        inputs = validate_data(self, X, dtype=np.float32, order="C", reset=False)
        rows = self.learner_.seen if task is None else self._rows_of(task_name(task))
        logits = self.learner_.logits(torch.tensor(inputs)).numpy()[:, rows]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        by_row = np.zeros((len(inputs), len(self.classes_)))
        by_row[:, rows] = odds / odds.sum(axis=1, keepdims=True)
        return by_row[:, self._labels.row_of_column]

    def score(self, X: Any, y: Any, sample_weight: Any = None, task: Hashable = None) -> float:
        """The fraction of samples whose class is predicted correctly.

        Args:
            X: the samples, (samples, features).
            y: the right label of each sample.
            sample_weight: a weight for each sample.
            task: the name of a task, as in `predict`.

        Example:
            >>> accuracy = classifier.score(X, y)
        """
        return float(accuracy_score(y, self.predict(X, task), sample_weight=sample_weight))

    @property
    def tasks_(self) -> dict[Hashable, np.ndarray]:
        check_is_fitted(self, "classes_")
        return {task: np.sort(self._labels.values[rows]) for task, rows in self._task_rows.items()}

    def save(self, path: str | Path) -> None:
        """Write all that is needed to continue learning into one safetensors file, without pickle.

        Args:
            path: the file; an existing one is replaced once the new one is complete.

        Example:
            >>> classifier.save("classifier.safetensors")
        """
        check_is_fitted(self, "classes_")
        names = self.feature_names_in_.tolist() if hasattr(self, "feature_names_in_") else None
        save(Saved(self.get_params(), self.learner_, self._labels, self._task, self._task_rows, names), Path(path))

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> Self:
        """Read what `save` wrote.

        Args:
            path: the file.
            device: where to put the network; by default where it was.

        Example:
            >>> classifier.save("classifier.safetensors")
            >>> classifier = ContinualClassifier.load("classifier.safetensors", device="cpu")
        """
        saved = load(Path(path), device, cls._get_param_names())
        classifier = cls(**saved.params)
        classifier.learner_, classifier._labels = saved.learner, saved.labels
        classifier._task, classifier._task_rows = saved.task, saved.task_rows
        classifier.classes_ = saved.labels.classes
        classifier.n_features_in_ = saved.learner.num_features
        if saved.feature_names is not None:
            classifier.feature_names_in_ = np.array(saved.feature_names, dtype=object)
        return classifier

    def _checked(self, X: Any, y: Any, first: bool) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = validate_data(self, X, y, dtype=np.float32, order="C", reset=first)
        check_classification_targets(labels)
        return inputs, labels

    def _start(self, inputs: np.ndarray, labels: np.ndarray, task: Hashable) -> None:
        """Build a new network for these classes."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        memory_size = whole_number("memory_size", self.memory_size, least=1)
        config, device = make_config(self.get_params(), seed), choose_device(self.device)
        self.learner_ = ContinualLearner(config, inputs.shape[1], len(labels), device, bool(self.masked), memory_size)
        self._task: Hashable = task
        self._task_rows: dict[Hashable, list[int]] = {}
        self._set_labels(Labels(labels))

    def _set_labels(self, labels: Labels) -> None:
        self._labels = labels
        self.classes_ = labels.classes
        self.learner_.grow(len(self.classes_))

    def _switch_task(self, task: Hashable, labels: np.ndarray) -> None:
        """End the current task if the next samples, with these labels, belong to another."""
        all_new = not np.isin(labels, self._labels.values[self.learner_.seen]).any()
        long_enough = self.learner_.num_samples >= self.learner_.config.batch_size
        if task != self._task or (task is None and all_new and long_enough):
            self.learner_.start_task(self._task_rows.get(task, ()))
        self._task = task

    def _learn(self, inputs: np.ndarray, labels: np.ndarray, epochs: int) -> Self:
        rows = torch.tensor(self._labels.rows_of(labels))
        self.learner_.learn(torch.tensor(inputs), rows, epochs)
        if self._task is not None:
            self._task_rows[self._task] = list(self.learner_.classes)
        return self

    def _rows_of(self, task: Hashable) -> list[int]:
        if task not in self._task_rows:
            known = ", ".join(map(repr, self._task_rows))
            raise InputError(f"there is no task {task!r}, " + (f"only {known}" if known else "and no task has a name"))
        return self._task_rows[task]


@contextmanager
def _all_or_nothing(classifier: ContinualClassifier) -> Iterator[None]:
    """If it fails, the classifier stays as it was, with what it learned before."""
    before = dict(vars(classifier))
    try:
        yield
    except BaseException:
        classifier.__dict__.clear()
        classifier.__dict__.update(before)
        raise
