"""A classifier or a regressor in one file, from which it continues to learn as if it had never been saved."""

from __future__ import annotations

import json
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import InputError, reason
from engram.common.tensor_file import read_tensors, write_tensors
from engram.engine.build import choose_device
from engram.sklearn.arguments import Labels, as_python
from engram.sklearn.learner_file import (
    MALFORMED,
    memory_parts,
    names_of,
    network_parts,
    number_of,
    of_type,
    refill,
    restored_memory,
    restored_network,
    restored_ridge,
    ridge_parts,
    rows_of,
)
from engram.sklearn.network import ContinualLearner
from engram.sklearn.sums import MemoryLearner, RidgeSums

# Format 1 called the benchmark and the dataset of the settings "own". Formats 1 and 2 know networks only; memories of
# format 3, and regressors of format 1, have the first form of random features.
KIND, FORMAT = "classifier", 3
REGRESSOR, REGRESSOR_FORMAT = "regressor", 1
NAMES = (str, int, float, bool)  # the types of a task's name in a file
LABELS: dict[str, tuple[type, ...]] = {  # what labels are in JSON, by NumPy's letter for their type
    "b": (bool,), "i": (int,), "u": (int,), "f": (float,), "U": (str,), "O": (str,)
}  # fmt: skip
REGRESSOR_PARAMETERS = {"alpha": (int, float), "random_features": (int,), "random_state": (int, type(None))}


# --- a classifier


@dataclass(frozen=True)
class Saved:
    """All that a classifier consists of."""

    params: dict[str, Any]
    learner: ContinualLearner | MemoryLearner
    labels: Labels
    task: Hashable  # the current one
    task_rows: dict[Hashable, list[int]]  # the classes of each task with a name
    feature_names: list[str] | None


def save(saved: Saved, path: Path) -> None:
    """Write a classifier. Labels, tasks and parameters that JSON cannot hold are refused before anything is written."""
    learner = saved.learner
    in_memory = isinstance(learner, MemoryLearner)
    header = {
        "params": {name: _parameter(name, value) for name, value in saved.params.items()},
        "features": learner.num_features,
        "feature_names": saved.feature_names,
        "labels": [_as_json("the class", label) for label in saved.labels.values.tolist()],
        "labels_type": saved.labels.values.dtype.str,
        "tasks": [[_as_json("the task", task), rows] for task, rows in saved.task_rows.items()],
        "task": _as_json("the task", saved.task),
        "seen": learner.seen,
        "classes": learner.classes,
        "num_samples": learner.num_samples,
        "num_calls": learner.num_calls,
        "learner": "memory" if in_memory else "network",
    }
    more, tensors = memory_parts(learner) if isinstance(learner, MemoryLearner) else network_parts(learner)
    write_tensors(path, KIND, FORMAT, {**header, **more}, tensors)


def load(path: Path, device: str | None, parameters: Collection[str]) -> Saved:
    """Read a classifier.

    Args:
        path: the file.
        device: where to put it; by default where it was.
        parameters: the names of the parameters that a classifier has.
    """
    if device is not None:
        choose_device(device)  # refuses a device that is not there before the file is read
    header, tensors = read_tensors(path, KIND, FORMAT)
    try:
        params = _params(header["params"], parameters)
        params["device"] = of_type(str, "device", params["device"]) if device is None else device
    except MALFORMED as error:
        raise _refusal(path, KIND, error) from error
    on = choose_device(params["device"])
    try:
        return _restored(params, header, tensors, on)
    except MALFORMED as error:
        raise _refusal(path, KIND, error) from error


def _refusal(path: Path, kind: str, error: Exception) -> InputError:
    return InputError(f"{path} does not hold a {kind} of this version of Engram ({reason(error)})")


def _restored(
    params: dict[str, Any], header: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> Saved:
    labels = _labels(header["labels"], header["labels_type"])
    num_features, num_classes = number_of(header, "features", least=1), len(labels.values)
    in_memory = header.get("learner") == "memory"
    learner = (restored_memory if in_memory else restored_network)(header, tensors, num_features, num_classes, device)
    learner.seen = rows_of("seen", header["seen"], range(num_classes))
    if not learner.seen:
        raise ValueError("it has seen no class")
    learner.classes = rows_of("classes", header["classes"], learner.seen)
    learner.num_samples, learner.num_calls = number_of(header, "num_samples"), number_of(header, "num_calls", least=1)
    if isinstance(learner, ContinualLearner):
        refill(learner, header, tensors)
    task = None if header["task"] is None else of_type(NAMES, "task", header["task"])
    task_rows = {of_type(NAMES, "tasks", name): rows_of("tasks", rows, learner.seen) for name, rows in header["tasks"]}
    if len(task_rows) != len(header["tasks"]):
        raise ValueError("a task is in it twice")
    return Saved(params, learner, labels, task, task_rows, names_of(header, num_features))


def _params(params: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters as they were given, except that a list of widths comes back as a tuple."""
    for name, value in params.items():
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}")
        if name == "class_weight" and isinstance(value, list):
            params = {
                **params,
                name: {of_type(NAMES, name, label): of_type((int, float), name, w) for label, w in value},
            }
        elif name != "hidden" and value is not None:
            of_type(NAMES, name, value)
    hidden = params["hidden"]
    widths = tuple(of_type(int, "hidden", width) for width in (hidden if isinstance(hidden, list) else [hidden]))
    return {**params, "hidden": widths if isinstance(hidden, list) else hidden}


def _labels(values: list[Any], kind: str) -> Labels:
    """The labels, checked. The width of text is that of its longest label, not what the file says."""
    letter = "U" if "U" in of_type(str, "labels_type", kind) else np.dtype(kind).kind
    if letter not in LABELS or not values:
        raise ValueError(f"there are no labels of the type {kind!r}")
    values = [of_type(LABELS[letter], "labels", value) for value in values]
    made = np.array(values, dtype={"U": np.str_, "O": object}.get(letter) or np.dtype(kind))
    if made.tolist() != values or len(set(values)) != len(values):
        raise ValueError("its labels are not of their type, or one is in it twice")
    return Labels(made)


def _parameter(name: str, value: Any) -> Any:
    """The value as it is, except that the widths of hidden layers become a list."""
    value = as_python(value)
    if name == "hidden" and type(value) is not int:
        widths = np.asarray(value)
        if widths.ndim > 1 or widths.dtype.kind not in "iu":
            raise InputError(f"the parameter hidden {value!r} cannot be saved: it must be whole numbers")
        value = widths.tolist()
    elif name == "class_weight" and isinstance(value, dict):
        value = [[_as_json("the class", label), _as_json("the weight", weight)] for label, weight in value.items()]
    elif isinstance(value, list | dict):
        raise _unsavable(f"the parameter {name}", value)
    return _as_json(f"the parameter {name}", value)


def _as_json(what: str, value: Any) -> Any:
    """The value, if JSON gives it back as it was."""
    value = as_python(value)
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise _unsavable(what, value)


def _unsavable(what: str, value: Any) -> InputError:
    return InputError(f"{what} {value!r} cannot be saved: it must be text, a number or a Boolean")


# --- a regressor


def save_regressor(params: dict[str, Any], sums: RidgeSums, feature_names: list[str] | None, path: Path) -> None:
    """Write a regressor. Parameters that a file cannot hold are refused before anything is written.

    Args:
        params: its parameters by name.
        sums: what it remembers.
        feature_names: the names of the inputs, if they have names.
        path: the file.
    """
    params = {name: as_python(value) for name, value in params.items()}
    for name, value in params.items():
        if type(value) not in REGRESSOR_PARAMETERS[name]:
            raise InputError(f"the parameter {name} {value!r} cannot be saved: it must be a number")
    header, tensors = ridge_parts(sums)
    header |= {"params": params, "feature_names": feature_names}
    write_tensors(path, REGRESSOR, REGRESSOR_FORMAT, header, tensors)


def load_regressor(path: Path) -> tuple[dict[str, Any], RidgeSums, list[str] | None]:
    """The parameters, sums and names of the inputs that a file holds.

    Args:
        path: the file.
    """
    header, tensors = read_tensors(path, REGRESSOR, REGRESSOR_FORMAT)
    try:
        params = {name: of_type(types, name, header["params"][name]) for name, types in REGRESSOR_PARAMETERS.items()}
        sums = restored_ridge(header, tensors)
        return params, sums, names_of(header, sums.features.num_inputs)
    except MALFORMED as error:
        raise _refusal(path, REGRESSOR, error) from error
