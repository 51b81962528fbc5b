"""How much each sample and each class counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight

from engram.common.errors import InputError
from engram.sklearn.labels import Labels

ClassWeights = Callable[[np.ndarray], np.ndarray | None]  # from the samples of each class so far to its weight (C,)
LEAST = 1e-300  # a weight of 0, so that its logarithm is finite


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
