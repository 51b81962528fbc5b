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
from engram.config.presets import STEADY, preset
from engram.config.settings import Config
from engram.engine.build import choose_device
from engram.sklearn.arguments import as_python, declared_classes, task_name, whole_number
from engram.sklearn.continual import ContinualLearner
from engram.sklearn.files import Kept, load, save
from engram.sklearn.labels import Labels, check_same_kind

# λ of each penalty where none is given: of those that benchmarks/classifier_defaults.py tries, the one with the best
# mean of its two accuracies on held-out samples; likewise `steady` and `masked`. EWC takes Online EWC's.
STRENGTHS = {"si": 3.0, "ewc": 3.0, "online-ewc": 3.0, "mas": 0.03}


class ContinualClassifier(ClassifierMixin, BaseEstimator):
    """A neural network that keeps learning: new samples, new classes and new tasks, without the old data.

    Its head takes up classes as they come, and a task that ends is consolidated: what it needs of the network becomes
    hard to change. It serves all three kinds of continual learning:

    - class-incremental: tasks bring new classes, `predict(X)` chooses among all that were seen;
    - domain-incremental: tasks bring the same classes in other circumstances, `predict(X)` as well;
    - task-incremental: one knows which task a sample is of, `predict(X, task=...)` chooses among its classes.

    A task ends, and is consolidated, when `partial_fit` is called with another `task` than the time before, or by
    `consolidate()`. `task=None` is a label like any other, but for one rule: without labels, a call whose classes are
    all new begins a new task, if the current one has had at least `batch_size` samples. (So a stream of single samples,
    whose first calls bring new classes all the time, is one task.)

    Features should be of about unit size: put a `StandardScaler` before it. Gradients are clipped to norm 1, so that
    others are learned badly rather than not at all.

    Args:
        hidden: the widths of the hidden layers; a single number is one layer.
        method: one of Engram's: "finetune", "dhp" (the plastic head alone), "si", "ewc", "online-ewc", "mas" (a
            penalty alone), or both, as in "dhp+si". The memory that "ewc" takes grows with the number of tasks; that of
            all others does not.
        strength: λ, how much consolidated weights are held. By default 3, for "mas" 0.03.
        steady: the plastic head in its steady form (`engram.presets.STEADY`), else as in the paper.
        masked: in training only classes of the current task take part in the softmax. Without it each new task teaches
            the network that the old classes no longer occur.
        learning_rate: of plain SGD.
        batch_size: samples a step.
        epochs: passes over the samples of `fit`.
        partial_fit_epochs: passes over the samples of each call of `partial_fit`.
        memory_size: how many samples of the *current* task are kept, as a fair draw, to compute importances when it
            ends; they are discarded then. "si", "dhp" and "finetune" keep none.
        random_state: a seed, a `RandomState` to draw one from, or None.
        device: "cpu", "cuda" or "auto".

    Parameters other than `partial_fit_epochs` are read by `fit` and the first `partial_fit`; what `set_params` changes
    after that counts from the next `fit` on.

    Attributes:
        classes_: all classes, sorted; when one comes between two others, the columns of `predict_proba` shift.
        tasks_: the classes of each task that was named.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
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
        """Learn from the beginning, forgetting whatever was learned before, in `epochs` passes over the data.

        `task` names the task of these samples, from which `partial_fit` may go on.
        """
        task = task_name(task)
        with _all_or_nothing(self):
            inputs, labels = self._checked(X, y, first=True)
            self._begin(inputs, np.unique(labels), task)
            return self._learn(inputs, labels, self.learner_.config.epochs)

    def partial_fit(self, X: Any, y: Any, task: Hashable = None, classes: Any = None) -> Self:
        """Go on learning, in `partial_fit_epochs` passes over these samples.

        Args:
            X: (samples, features), dense; computed with in 32 bits.
            y: a label for each: text, numbers or truth values, of one kind from the first call on. The head grows by
                those that are new.
            task: the task of these samples, by any hashable label. When it is another than the time before, that
                task is consolidated first. A task may come back.
            classes: all labels that may be in `y`, if they are to have a column from now on. Unlike elsewhere in
                scikit-learn it is never needed, and may differ from call to call.
        """
        task, passes = task_name(task), whole_number("partial_fit_epochs", self.partial_fit_epochs, least=1)
        if not hasattr(self, "classes_"):
            with _all_or_nothing(self):
                inputs, labels = self._checked(X, y, first=True)
                self._begin(inputs, np.unique(declared_classes(classes, labels)), task)
                return self._learn(inputs, labels, passes)
        inputs, labels = self._checked(X, y, first=False)
        check_same_kind(labels, self._labels.values)
        grown = self._labels.extended(self._labels.unknown(declared_classes(classes, labels)))
        self._turn_to(task, all_unseen=self._all_unseen(labels))
        self._take_up(grown)
        return self._learn(inputs, labels, passes)

    def consolidate(self) -> Self:
        """End the current task now, as a call with another `task` would."""
        check_is_fitted(self, "classes_")
        self.learner_.begin_task(self._task_rows.get(self._task, ()))
        return self

    def predict(self, X: Any, task: Hashable = None) -> np.ndarray:
        """The most probable class of each sample, among all that were seen, or among those of a task."""
        columns = self.predict_proba(X, task).argmax(axis=1)
        return self.classes_[columns]

    def predict_proba(self, X: Any, task: Hashable = None) -> np.ndarray:
        """The probability of each class, in the order of `classes_`: (samples, classes)."""
        check_is_fitted(self, "classes_")
        inputs = validate_data(self, X, dtype=np.float32, order="C", reset=False)
        rows = self.learner_.seen if task is None else self._rows_of(task_name(task))
        logits = self.learner_.logits(torch.tensor(inputs)).numpy()[:, rows]
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        by_row = np.zeros((len(inputs), len(self.classes_)))
        by_row[:, rows] = odds / odds.sum(axis=1, keepdims=True)
        return by_row[:, self._labels.row_of_column]

    def score(self, X: Any, y: Any, sample_weight: Any = None, task: Hashable = None) -> float:
        """The share of samples whose class is predicted rightly."""
        return float(accuracy_score(y, self.predict(X, task), sample_weight=sample_weight))

    @property
    def tasks_(self) -> dict[Hashable, np.ndarray]:
        """The classes of each task that was named."""
        check_is_fitted(self, "classes_")
        return {task: np.sort(self._labels.values[rows]) for task, rows in self._task_rows.items()}

    def save(self, path: str | Path) -> None:
        """Write all that is needed to go on learning into one safetensors file, without pickle."""
        check_is_fitted(self, "classes_")
        names = getattr(self, "feature_names_in_", None)
        kept = Kept(
            self.get_params(),
            self.learner_,
            self._labels,
            self._task,
            self._task_rows,
            None if names is None else names.tolist(),
        )
        save(kept, Path(path))

    @classmethod
    def load(cls, path: str | Path, device: str | None = None) -> Self:
        """Read what `save` wrote; on another device, if one is named."""
        kept = load(Path(path), device, cls._get_param_names())
        classifier = cls(**kept.params)
        classifier.learner_, classifier._labels = kept.learner, kept.labels
        classifier._task, classifier._task_rows = kept.task, kept.task_rows
        classifier.classes_ = kept.labels.classes
        classifier.n_features_in_ = kept.learner.num_features
        if kept.feature_names is not None:
            classifier.feature_names_in_ = np.array(kept.feature_names, dtype=object)
        return classifier

    def _checked(self, X: Any, y: Any, first: bool) -> tuple[np.ndarray, np.ndarray]:
        inputs, labels = validate_data(self, X, y, dtype=np.float32, order="C", reset=first)
        check_classification_targets(labels)
        return inputs, labels

    def _begin(self, inputs: np.ndarray, labels: np.ndarray, task: Hashable) -> None:
        """A new network for these classes, which has learned nothing."""
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        memory_size = whole_number("memory_size", self.memory_size, least=1)
        config, device = self._config(seed), choose_device(self.device)
        self.learner_ = ContinualLearner(config, inputs.shape[1], len(labels), device, bool(self.masked), memory_size)
        self._task: Hashable = task
        self._task_rows: dict[Hashable, list[int]] = {}
        self._take_up(Labels(labels))

    def _take_up(self, labels: Labels) -> None:
        self._labels = labels
        self.classes_ = labels.classes
        self.learner_.grow(len(self.classes_))

    def _turn_to(self, task: Hashable, all_unseen: bool) -> None:
        """End the current task if the samples that come now are of another."""
        unnamed = task is None and all_unseen and self.learner_.num_samples >= self.learner_.config.batch_size
        if task != self._task or unnamed:
            self.learner_.begin_task(self._task_rows.get(task, ()))
        self._task = task

    def _all_unseen(self, labels: np.ndarray) -> bool:
        known = self._labels.values[self.learner_.seen]
        return not np.isin(labels, known).any()

    def _learn(self, inputs: np.ndarray, labels: np.ndarray, epochs: int) -> Self:
        rows = torch.tensor(self._labels.rows_of(labels))
        self.learner_.learn(torch.tensor(inputs), rows, epochs)
        if self._task is not None:
            self._task_rows[self._task] = list(self.learner_.classes)
        return self

    def _rows_of(self, task: Hashable) -> list[int]:
        if task not in self._task_rows:
            known = ", ".join(map(repr, self._task_rows))
            raise InputError(f"there is no task {task!r}, " + (f"only {known}" if known else "and none was named yet"))
        return self._task_rows[task]

    def _config(self, seed: int) -> Config:
        """The parameters as settings of Engram, which refuses those that cannot be."""
        method = str(self.method)
        strength = STRENGTHS.get(method.split("+")[-1]) if self.strength is None else as_python(self.strength)
        return preset(
            "custom",
            method,
            hidden=[as_python(width) for width in np.atleast_1d(np.asarray(self.hidden, dtype=object))],
            strength=strength,
            learning_rate=as_python(self.learning_rate),
            batch_size=as_python(self.batch_size),
            epochs=as_python(self.epochs),
            seed=seed,
            baseline_head="plain",
            **(STEADY if self.steady else {}),
        )


@contextmanager
def _all_or_nothing(classifier: ContinualClassifier) -> Iterator[None]:
    """A beginning that fails leaves the classifier as it was, with what it had learned before."""
    before = dict(vars(classifier))
    try:
        yield
    except BaseException:
        classifier.__dict__.clear()
        classifier.__dict__.update(before)
        raise
