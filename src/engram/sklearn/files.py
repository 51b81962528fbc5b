"""A classifier in one file, from which it continues to learn as if it had never been saved."""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import InputError, reason
from engram.common.tensor_file import read_tensors, write_tensors
from engram.config.methods import CUSTOM
from engram.config.settings import Config, from_dict
from engram.engine.build import build_model, choose_device
from engram.sklearn.labels import Labels, as_python
from engram.sklearn.learner import ContinualLearner
from engram.sklearn.memory import MemoryLearner
from engram.sklearn.sums_file import memory_parts, numbers_of, restored_memory

# Format 1 called the benchmark and the dataset of the settings "own". Formats 1 and 2 know networks only; memories of
# format 3 have the first form of random features.
KIND, FORMAT = "classifier", 4
NAMES = (str, int, float, bool)  # the types of a task's name in a file
LABELS: dict[str, tuple[type, ...]] = {  # what labels are in JSON, by NumPy's letter for their type
    "b": (bool,), "i": (int,), "u": (int,), "f": (float,), "U": (str,), "O": (str,)
}  # fmt: skip
# What Python, NumPy and PyTorch raise when a file contradicts itself.
MALFORMED = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError)


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
    more, tensors = memory_parts(learner) if isinstance(learner, MemoryLearner) else _network_parts(learner)
    write_tensors(path, KIND, FORMAT, {**header, **more}, tensors)


def _network_parts(learner: ContinualLearner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    header = {
        "config": learner.config.to_dict(),
        "masked": learner.masked,
        "memory": [learner.memory_size, learner.memory.num_tasks, learner.memory.num_seen],
    }
    tensors = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    tensors |= {f"penalty.{name}": tensor for name, tensor in learner.penalty.state_dict().items()}
    if learner.memory.inputs is not None and learner.memory.targets is not None:
        tensors |= {"memory.inputs": learner.memory.inputs, "memory.targets": learner.memory.targets}
    return header, tensors | {"counts": torch.from_numpy(learner.counts)}


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
        params["device"] = _of(str, "device", params["device"]) if device is None else device
    except MALFORMED as error:
        raise _refusal(path, error) from error
    on = choose_device(params["device"])
    try:
        return _restored(params, header, tensors, on)
    except MALFORMED as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} does not hold a classifier of this version of Engram ({reason(error)})")


def _restored(
    params: dict[str, Any], header: dict[str, Any], tensors: dict[str, Tensor], device: torch.device
) -> Saved:
    labels = _labels(header["labels"], header["labels_type"])
    num_features, num_classes = _number(header, "features", least=1), len(labels.values)
    in_memory = header.get("learner") == "memory"
    learner = (restored_memory if in_memory else _restored_network)(header, tensors, num_features, num_classes, device)
    learner.seen = _rows("seen", header["seen"], range(num_classes))
    if not learner.seen:
        raise ValueError("it has seen no class")
    learner.classes = _rows("classes", header["classes"], learner.seen)
    learner.num_samples, learner.num_calls = _number(header, "num_samples"), _number(header, "num_calls", least=1)
    if isinstance(learner, ContinualLearner):
        _refill(learner, header["memory"], _part(tensors, "memory."))
    names = header["feature_names"]
    if (
        names is not None
        and len([_of(str, "feature_names", name) for name in _of(list, "feature_names", names)]) != num_features
    ):
        raise ValueError(f"it has {num_features} features and {len(names)} names of them")
    task = None if header["task"] is None else _of(NAMES, "task", header["task"])
    task_rows = {_of(NAMES, "tasks", name): _rows("tasks", rows, learner.seen) for name, rows in header["tasks"]}
    if len(task_rows) != len(header["tasks"]):
        raise ValueError("a task is in it twice")
    return Saved(params, learner, labels, task, task_rows, names)


def _restored_network(
    header: dict[str, Any], tensors: dict[str, Tensor], num_features: int, num_classes: int, device: torch.device
) -> ContinualLearner:
    config = from_dict(_current_names(header["config"]))
    _check_shapes(config, num_features, num_classes, _part(tensors, "model."))
    masked, size = _of(bool, "masked", header["masked"]), _of(int, "memory", header["memory"][0])
    learner = ContinualLearner(config, num_features, num_classes, device, masked, size)
    learner.model.load_state_dict(_part(tensors, "model."))
    learner.penalty.load_state_dict(_part(tensors, "penalty."))
    learner.model.eval()
    if "counts" in tensors:  # not in formats 1 and 2
        learner.counts = numbers_of(tensors, "counts", (num_classes,))
    return learner


def _current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are named today."""
    old = {name: CUSTOM for name in ("benchmark", "dataset") if settings[name] == "own"}
    return {**settings, **old}


def _params(params: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters as they were given, except that a list of widths comes back as a tuple."""
    for name, value in params.items():
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}")
        if name == "class_weight" and isinstance(value, list):
            params = {**params, name: {_of(NAMES, name, label): _of((int, float), name, w) for label, w in value}}
        elif name != "hidden" and value is not None:
            _of(NAMES, name, value)
    hidden = params["hidden"]
    widths = tuple(_of(int, "hidden", width) for width in (hidden if isinstance(hidden, list) else [hidden]))
    return {**params, "hidden": widths if isinstance(hidden, list) else hidden}


def _labels(values: list[Any], kind: str) -> Labels:
    """The labels, checked. The width of text is that of its longest label, not what the file says."""
    letter = "U" if "U" in _of(str, "labels_type", kind) else np.dtype(kind).kind
    if letter not in LABELS or not values:
        raise ValueError(f"there are no labels of the type {kind!r}")
    values = [_of(LABELS[letter], "labels", value) for value in values]
    made = np.array(values, dtype={"U": np.str_, "O": object}.get(letter) or np.dtype(kind))
    if made.tolist() != values or len(set(values)) != len(values):
        raise ValueError("its labels are not of their type, or one is in it twice")
    return Labels(made)


def _check_shapes(config: Config, num_features: int, num_classes: int, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of other shapes before a model is built, which may be far larger than the file."""
    with torch.device("meta"):
        model = build_model(config, 0, (num_features,), num_classes)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise ValueError(f"its tensors are not those of {config.method} with {num_classes} classes")


def _refill(learner: ContinualLearner, numbers: list[int], tensors: dict[str, Tensor]) -> None:
    memory = learner.memory
    _, num_tasks, num_seen = (_of(int, "memory", number) for number in numbers)
    if learner.memory_size < 1 or num_tasks < 1 or num_seen < 0 or bool(num_seen) != bool(tensors):
        raise ValueError(f"its memory of {learner.memory_size} has seen {num_seen} samples in {num_tasks} tasks")
    memory.num_tasks, memory.num_seen = num_tasks, num_seen
    if tensors:
        memory.inputs, memory.targets = tensors["inputs"], tensors["targets"]
        if memory.inputs.shape != (memory.size, learner.num_features) or memory.targets.shape != (memory.size,):
            raise ValueError(f"its memory has shape {tuple(memory.inputs.shape)}")
        if (memory.inputs.dtype, memory.targets.dtype) != (torch.float32, torch.int64):
            raise ValueError(f"its memory holds {memory.inputs.dtype} and {memory.targets.dtype}")
        _rows("memory", sorted(set(memory.targets[: len(memory)].tolist())), learner.classes)


def _rows(name: str, rows: list[int], known: Container[int]) -> list[int]:
    for row in rows:
        if _of(int, name, row) not in known:
            raise ValueError(f"its {name} hold a class of number {row}, which it does not have")
    if len(set(rows)) != len(rows):
        raise ValueError(f"its {name} hold a class twice")
    return list(rows)


def _number(header: dict[str, Any], name: str, least: int = 0) -> int:
    value = _of(int, name, header[name])
    if value < least:
        raise ValueError(f"its {name} is {value}")
    return value


def _of(types: type | tuple[type, ...], name: str, value: Any) -> Any:
    """The value, if its type is exactly one of these: a Boolean is not accepted as a number."""
    if type(value) not in (types if isinstance(types, tuple) else (types,)):
        raise TypeError(f"its {name} cannot be of the type {type(value).__name__}")
    return value


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


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
