"""What a call is given, checked: numbers, names of tasks, and classes that are declared."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from engram.common.errors import InputError
from engram.sklearn.labels import check_same_kind


def as_python(value: Any) -> Any:
    """A number of NumPy's, as grids of parameters hold them, as one of Python's."""
    return value.item() if isinstance(value, np.generic) else value


def whole_number(name: str, value: Any, least: int) -> int:
    value = as_python(value)
    if type(value) is not int or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, not {value!r}")
    return value


def task_name(task: Any) -> Hashable:
    task = as_python(task)
    try:
        hash(task)
    except TypeError:
        raise InputError(
            f"a task is named by text, a number, or anything else that is hashable, not {task!r}"
        ) from None
    if isinstance(task, float) and math.isnan(task):
        raise InputError("a task cannot be named NaN, which is not even equal to itself")
    return task


def declared_classes(classes: Any, labels: np.ndarray) -> np.ndarray:
    """The classes that a call brings: those of its samples, or what it says, if those are among it."""
    if classes is None:
        return labels
    declared = np.unique(np.asarray(classes))
    if not len(declared):
        raise InputError(f"y holds {as_python(labels[0])!r}, and classes is empty")
    check_same_kind(labels, declared)
    stray = labels[~np.isin(labels, declared)]
    if len(stray):
        raise InputError(f"y holds {as_python(stray[0])!r}, which is not among the classes {declared.tolist()}")
    return declared
