"""`ContinualClassifier`: Engram as a scikit-learn estimator."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.validation import check_is_fitted

from engram.sklearn.arguments import check_same_kind, declared_classes, task_name, whole_number
from engram.sklearn.base import ClassifierBase, all_or_nothing
from engram.sklearn.files import Saved, load, save

AT_ONCE = ("partial_fit_epochs", "class_weight", "verbose", "epochs")  # parameters that no later `fit` is needed for


class ContinualClassifier(ClassifierMixin, ClassifierBase):
    """A classifier that keeps learning: new samples, new classes and new tasks, without the old data.

    By default it is a memory of sums: linear discriminant analysis (LDA) on the inputs and on fixed random features of
    them. It needs one pass, forgets nothing, and is the same for any order of the samples and any division into calls.
    A class that comes back in another task, with other inputs, is remembered separately. It supports the three
    scenarios of continual learning:

    - class-incremental: tasks bring new classes, and `predict(X)` chooses among all classes so far;
    - domain-incremental: tasks bring the same classes in other conditions, and `predict(X)` does the same;
    - task-incremental: the task of a sample is known, and `predict(X, task=...)` chooses among its classes.

    With `head` or `method` it is a neural network instead, whose head grows as classes come; each task is consolidated
    when it ends: the weights that it needs become hard to change. A task ends when `partial_fit` is called with another
    `task` than before, or by `consolidate()`. `task=None` is a name like any other, with one exception: where no task
    is named, a call whose classes are all new starts a new task if the current one has had at least `batch_size`
    samples. (So a stream of single samples is one task.)

    Features should be of about unit size: put a `StandardScaler` before it. The scale of each input matters only to the
    random features, and to networks, whose gradients are clipped to norm 1.

    Args:
        hidden: the widths of the hidden layers of a network; a single number is one layer.
        method: None, "finetune", "dhp" (the plastic head alone), "si", "ewc", "online-ewc", "mas" (a penalty alone), or
            both, as in "dhp+si". With "ewc" memory grows with the number of tasks.
        head: "auto", or a name of `engram.heads.list()`, with `method` None or a penalty. "auto" is the memory above,
            or what `method` names. "slda", "ridge" and "ncm" remember the inputs, or random features of them.
        random_features: how many random features of the inputs a memory uses. Default: with "auto" six for an input,
            at least 256, at most 800 features in all, and none for more than 1000 inputs; otherwise none.
        shrinkage: ε in [0, 1], by which the correlations of a memory's features are reduced. Default: 0.03 with "auto".
        strength: λ, how strongly consolidated weights are protected. Default: 3, 0.03 for "mas", others as registered.
        steady: use the steady form of the plastic head (`engram.config.presets.STEADY`), not the paper's.
        masked: only classes of the current task are in the softmax during training. Without it, each new task teaches
            the network that the old classes no longer occur.
        class_weight: None, "balanced" or {label: weight}. A memory multiplies the prior probability of each class, so
            "balanced" makes them equal. A network multiplies the loss; "balanced" is n / (C n_c) of the samples so far.
        learning_rate: of plain SGD.
        batch_size: samples per step.
        epochs: passes over the samples of `fit`. A memory takes one.
        partial_fit_epochs: passes over the samples of each call of `partial_fit`.
        memory_size: how many samples of the *current* task are kept, as a uniform random sample, to compute importances
            when it ends; they are discarded then. Only "ewc", "online-ewc" and "mas" keep any.
        random_state: a seed, a `RandomState` from which one is drawn, or None.
        device: "cpu", "cuda" or "auto", of a network.
        verbose: print a line for each call that learns.

    A warning names what is given without an effect: what only networks use, such as `epochs`, for a memory, and
    `random_features`, `shrinkage` and `strength` for a head or a method that does not use them.

    `set_params` after `fit`: `class_weight`, `verbose`, `epochs` and `partial_fit_epochs` take effect at the next call,
    all others at the next `fit`, as a warning says.

    Attributes:
        classes_: all classes, sorted. A new class may shift the columns of `predict_proba`.
        tasks_: the classes of each task with a name.
        n_features_in_, feature_names_in_: as in all of scikit-learn.
        learner_: the sums, or the network (`learner_.model`) and its penalty (`learner_.penalty`).

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
        method: str | None = None,
        *,
        head: str = "auto",
        random_features: int | None = None,
        shrinkage: float | None = None,
        strength: float | None = None,
        steady: bool = True,
        masked: bool = True,
        class_weight: Any = None,
        learning_rate: float = 0.1,
        batch_size: int = 32,
        epochs: int = 20,
        partial_fit_epochs: int = 1,
        memory_size: int = 500,
        random_state: int | np.random.RandomState | None = None,
        device: str = "cpu",
        verbose: bool | int = False,
    ):
        self.hidden = hidden
        self.method = method
        self.head = head
        self.random_features = random_features
        self.shrinkage = shrinkage
        self.strength = strength
        self.steady = steady
        self.masked = masked
        self.class_weight = class_weight
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.epochs = epochs
        self.partial_fit_epochs = partial_fit_epochs
        self.memory_size = memory_size
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, task: Hashable = None) -> Self:
        """Learn from scratch, in `epochs` passes over the data; everything learned before is discarded.

        Args:
            X: the samples, (samples, features).
            y: a label for each sample.
            sample_weight: a weight of at least 0 for each sample.
            task: a name for the task of these samples, with which `partial_fit` can continue.

        Example:
            >>> ContinualClassifier(random_state=0).fit([[0.0], [1.0]], ["cold", "warm"]).predict([[1.0]])
            array(['warm'], dtype='<U4')
        """
        task, passes = task_name(task), whole_number("epochs", self.epochs, least=1)
        with all_or_nothing(self):
            inputs, labels, weights = self._checked(X, y, sample_weight, first=True)
            self._start(inputs, np.unique(labels), task)
            return self._learn(inputs, labels, weights, passes)

    def partial_fit(
        self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None, *, task: Hashable = None
    ) -> Self:
        """Continue to learn, in `partial_fit_epochs` passes over these samples.

        Args:
            X: the samples, (samples, features), dense. A network computes with them in 32 bits.
            y: a label for each sample: text, numbers or Booleans, the same kind in all calls. Labels may be new.
            classes: all labels that `y` may hold, if they should have a column from now on. Unlike elsewhere in
                scikit-learn it is never needed, and may differ from call to call.
            sample_weight: a weight of at least 0 for each sample.
            task: the task of these samples, any hashable value. If it is not the current task, the current one is
                consolidated first. A task may come back.

        Example:
            >>> classifier.partial_fit([[2.0]], ["hot"], task="summer").tasks_["summer"].tolist()
            ['hot']
        """
        task, passes = task_name(task), whole_number("partial_fit_epochs", self.partial_fit_epochs, least=1)
        if not hasattr(self, "classes_"):
            with all_or_nothing(self):
                inputs, labels, weights = self._checked(X, y, sample_weight, first=True)
                self._start(inputs, np.unique(declared_classes(classes, labels)), task)
                return self._learn(inputs, labels, weights, passes)
        inputs, labels, weights = self._checked(X, y, sample_weight, first=False)
        check_same_kind(labels, self._labels.values)
        grown = self._labels.extended(self._labels.unknown(declared_classes(classes, labels)))
        self.learner_.check(inputs)
        self._switch_task(task, labels)
        self._set_labels(grown)
        return self._learn(inputs, labels, weights, passes)

    def set_params(self, **params: Any) -> Self:
        """Change parameters, with a warning about those that take effect at the next `fit` only.

        Args:
            params: by name.

        Example:
            >>> classifier = classifier.set_params(class_weight="balanced")
        """
        before = self.get_params()
        super().set_params(**params)
        late = [name for name in params if name not in AT_ONCE and params[name] is not before.get(name)]
        if late and hasattr(self, "classes_"):
            warnings.warn(f"{', '.join(late)}: changes take effect at the next fit, not before", stacklevel=2)
        return self

    def consolidate(self) -> Self:
        """End the current task now, as a call with another `task` would.

        Example:
            >>> classifier = classifier.partial_fit(X, y).consolidate()
        """
        check_is_fitted(self, "classes_")
        self.learner_.start_task(self._task_rows.get(self._task, ()))
        return self

    def predict(self, X: Any, *, task: Hashable = None) -> np.ndarray:
        """The most probable class of each sample, among all classes so far, or among those of a task.

        Args:
            X: the samples, (samples, features).
            task: the name of a task, if it is known that all samples belong to it.

        Example:
            >>> classifier.predict([[0.0], [1.0]], task="winter").shape
            (2,)
        """
        columns = self._logits(X, task).argmax(axis=1)
        return self.classes_[columns]

    def predict_proba(self, X: Any, *, task: Hashable = None) -> np.ndarray:
        """The probability of each class, in the order of `classes_`: (samples, classes).

        Args:
            X: the samples, (samples, features).
            task: the name of a task; classes of other tasks then have probability 0.

        Example:
            >>> classifier.predict_proba([[0.0], [1.0]]).sum(axis=1).round(6)
            array([1., 1.])
        """
        logits = self._logits(X, task)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return odds / odds.sum(axis=1, keepdims=True)

    def decision_function(self, X: Any, *, task: Hashable = None) -> np.ndarray:
        """The logits that `predict_proba` is the softmax of, in the order of `classes_`: (samples, classes).

        A class that has had no sample, or is not in the task, has −∞. With two classes it is one number for each sample
        (samples,), which is positive where `classes_[1]` is predicted.

        Args:
            X: the samples, (samples, features).
            task: the name of a task, as in `predict`.

        Example:
            >>> len(classifier.decision_function([[0.0], [1.0]]))
            2
        """
        logits = self._logits(X, task)
        return logits[:, 1] - logits[:, 0] if logits.shape[1] == 2 else logits

    def score(self, X: Any, y: Any, sample_weight: Any = None, *, task: Hashable = None) -> float:
        """The fraction of samples whose class is predicted correctly.

        Args:
            X: the samples, (samples, features).
            y: the right label of each sample.
            sample_weight: a weight for each sample.
            task: the name of a task, as in `predict`.

        Example:
            >>> accuracy = classifier.score(X, y)
        """
        return float(accuracy_score(y, self.predict(X, task=task), sample_weight=sample_weight))

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
