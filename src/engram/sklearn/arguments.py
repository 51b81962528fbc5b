"""What a call is given, checked: labels and the row that each has in the head, names of tasks, numbers, and weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight

from engram.common.errors import InputError

ClassWeights = Callable[[np.ndarray], np.ndarray | None]  # from the samples of each class so far to its weight (C,)
LEAST = 1e-300  # a weight of 0, so that its logarithm is finite


# --- labels


class Labels:
    """The class labels that are known.

    Rows of the head are in the order in which labels came, since old labels must keep theirs; columns of probabilities
    are in sorted order. `values` are the labels by row, `classes` by column, and `row_of_column` maps columns to rows.
    """

    def __init__(self, values: np.ndarray):
        self.values = values
        self.row_of_column = np.argsort(values, kind="stable")
        self.classes = values[self.row_of_column]

    def rows_of(self, labels: np.ndarray) -> np.ndarray:
        """The row of each label; all of them must be known."""
        return self.row_of_column[np.searchsorted(self.classes, labels)]

    def unknown(self, labels: np.ndarray) -> np.ndarray:
        """The labels that are not known yet, sorted."""
        check_same_kind(labels, self.values)
        labels = np.unique(labels)
        return labels[~np.isin(labels, self.values)]

    def extended(self, labels: np.ndarray) -> Labels:
        """A copy with further labels at the end."""
        return Labels(np.concatenate([self.values, labels])) if len(labels) else self


def check_same_kind(labels: np.ndarray, known: np.ndarray) -> None:
    """Refuse labels that NumPy could only compare with the known ones after converting them."""
    if labels.dtype == known.dtype and labels.dtype.kind in "biuU":
        return
    if kind_of(labels) != kind_of(known):
        raise InputError(
            f"all labels must be of one kind: {known[0]!s} is one of the {kind_of(known)}, "
            f"and {labels[0]!s} one of the {kind_of(labels)}"
        )
    common = np.result_type(labels, known)
    for given in (labels, known):
        distinct = np.unique(given)
        # Python compares integers with floats exactly; NumPy would first convert them to one type.
        for label, converted in zip(distinct.tolist(), distinct.astype(common).tolist(), strict=True):
            if label != converted:
                raise InputError(
                    f"labels of the types {known.dtype} and {labels.dtype} cannot be compared exactly: "
                    f"{label!r} would become {converted!r}"
                )


def kind_of(labels: np.ndarray) -> str:
    """Numbers of all types are one kind, and so is text, whether NumPy's or Python's."""
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels):
        return "text"
    return {"b": "Booleans", "i": "numbers", "u": "numbers", "f": "numbers", "U": "text"}.get(
        labels.dtype.kind, f"values of {labels.dtype}"
    )


def declared_classes(classes: Any, labels: np.ndarray) -> np.ndarray:
    """The classes that a call adds: those of its samples, or those it declares, which must include them."""
    if classes is None:
        return labels
    if isinstance(classes, str):
        raise InputError(f"classes must be a list of labels, not {classes!r}: a task is named by task={classes!r}")
    declared = np.unique(np.asarray(classes))
    if not len(declared):
        raise InputError(f"y holds {as_python(labels[0])!r}, but classes is empty")
    check_same_kind(labels, declared)
    undeclared = labels[~np.isin(labels, declared)]
    if len(undeclared):
        raise InputError(f"y holds {as_python(undeclared[0])!r}, which is not among the classes {declared.tolist()}")
    return declared


# --- names and numbers


def task_name(task: Any) -> Hashable:
    """A task's name, checked."""
    task = as_python(task)
    try:
        hash(task)
    except TypeError:
        raise InputError(f"the name of a task must be text, a number or another hashable value, not {task!r}") from None
    if isinstance(task, float) and math.isnan(task):
        raise InputError("NaN cannot be the name of a task: it is not equal to itself")
    return task


def whole_number(name: str, value: Any, least: int) -> int:
    """A whole number, checked."""
    value = as_python(value)
    if type(value) is not int or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def as_python(value: Any) -> Any:
    """A NumPy number, as in grids of parameters, as a Python number."""
    return value.item() if isinstance(value, np.generic) else value


# --- weights


def checked_weights(sample_weight: Any, inputs: np.ndarray) -> np.ndarray | None:
    """A weight of at least 0 for each sample (B,), or None where all count the same.

    Args:
        sample_weight: one for each sample, a number for all, or None.
        inputs: the samples (B, m).
    """
    if sample_weight is None:
        return None
    return _check_sample_weight(sample_weight, inputs, dtype=np.float64, ensure_non_negative=True)


def check_class_weight(class_weight: Any) -> None:
    """Refuse what is neither None, nor "balanced", nor a dictionary of labels and numbers of at least 0."""
    if class_weight is None or (isinstance(class_weight, str) and class_weight == "balanced"):
        return
    if not isinstance(class_weight, Mapping):
        raise InputError(f'class_weight must be None, "balanced" or {{label: weight}}, not {class_weight!r}')
    for label, weight in class_weight.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float | np.number) or not 0 <= weight < np.inf:
            raise InputError(f"the weight of the class {label!r} must be a number of at least 0, not {weight!r}")


def class_weights(class_weight: Any, labels: Labels, counts: np.ndarray) -> np.ndarray | None:
    """The weight of each class by its row (C,), or None where all count the same.

    Balanced weights are n / (C n_c), of the classes that have been seen. In a stream n_c counts the samples so far.

    Args:
        class_weight: None, "balanced" or {label: weight}; a class that is not in it has weight 1.
        labels: those that are known.
        counts: n_c, the samples of each class so far, by row.
    """
    check_class_weight(class_weight)  # it may have been set after `fit`
    if class_weight is None:
        return None
    if class_weight == "balanced":
        seen = counts > 0
        return np.where(seen, counts.sum() / (max(1, seen.sum()) * np.where(seen, counts, 1)), 1.0)
    return np.array([float(class_weight.get(label, 1.0)) for label in labels.values.tolist()])


def add_log(logits: np.ndarray, weight: np.ndarray | None) -> np.ndarray:
    """z + log w: prior probabilities multiplied by the weights of the classes.

    Args:
        logits: z (B, C).
        weight: w (C,); None for 1.
    """
    return logits if weight is None else logits + np.log(np.maximum(weight, LEAST))
