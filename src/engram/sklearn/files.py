"""A classifier in one file, from which it goes on learning as if it had never been saved."""

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
from engram.sklearn.arguments import as_python
from engram.sklearn.continual import DRAWING, ContinualLearner
from engram.sklearn.labels import Labels

KIND, FORMAT = "classifier", 1
NAMES = (str, int, float, bool)  # what a task may be named in a file
LABELS: dict[str, tuple[type, ...]] = {  # what labels are in JSON, by NumPy's letter for their type
    "b": (bool,), "i": (int,), "u": (int,), "f": (float,), "U": (str,), "O": (str,)
}  # fmt: skip
# How Python, NumPy and PyTorch say that a file contradicts itself
REFUSALS = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError)


@dataclass(frozen=True)
class Kept:
    """All that a classifier is made of."""

    params: dict[str, Any]
    learner: ContinualLearner
    labels: Labels
    task: Hashable  # the current one
    task_rows: dict[Hashable, list[int]]  # the classes of each task that was named
    feature_names: list[str] | None


def save(kept: Kept, path: Path) -> None:
    """Refuses labels, tasks and parameters that JSON cannot hold, before anything is written."""
    learner = kept.learner
    header = {
        "params": {name: _parameter(name, value) for name, value in kept.params.items()},
        "config": learner.config.to_dict(),
        "features": learner.num_features,
        "feature_names": kept.feature_names,
        "labels": [_as_json("the class", label) for label in kept.labels.values.tolist()],
        "labels_type": kept.labels.values.dtype.str,
        "tasks": [[_as_json("the task", task), rows] for task, rows in kept.task_rows.items()],
        "task": _as_json("the task", kept.task),
        "seen": learner.seen,
        "classes": learner.classes,
        "num_samples": learner.num_samples,
        "num_calls": learner.num_calls,
        "masked": learner.masked,
        "memory": [learner.memory_size, learner.memory.num_begun, learner.memory.num_seen],
    }
    tensors = {f"model.{name}": tensor for name, tensor in learner.model.state_dict().items()}
    tensors |= {f"penalty.{name}": tensor for name, tensor in learner.penalty.state_dict().items()}
    if learner.memory.inputs is not None and learner.memory.targets is not None:
        tensors |= {"memory.inputs": learner.memory.inputs, "memory.targets": learner.memory.targets}
    write_tensors(path, KIND, FORMAT, header, tensors)


def load(path: Path, device: str | None, parameters: Collection[str]) -> Kept:
    """All that a classifier with these parameters is made of, or one sentence on why there is none."""
    if device is not None:
        choose_device(device)  # which refuses what is not there; the file has no part in that
    header, tensors = read_tensors(path, KIND, FORMAT)
    try:
        params = _params(header["params"], parameters)
        params["device"] = _of(str, "device", params["device"]) if device is None else device
    except REFUSALS as error:
        raise _refusal(path, error) from error
    on = choose_device(params["device"])
    try:
        return _restored(params, header, tensors, on)
    except REFUSALS as error:
        raise _refusal(path, error) from error


def _refusal(path: Path, error: Exception) -> InputError:
    return InputError(f"{path} does not hold a classifier of this version of Engram ({reason(error)})")


def _restored(params: dict[str, Any], header: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Kept:
    labels = _labels(header["labels"], header["labels_type"])
    num_features, num_classes = _number(header, "features", least=1), len(labels.values)
    config = from_dict(_current(header["config"]))
    _check_shapes(config, num_features, num_classes, _part(tensors, "model."))
    size, num_begun, num_seen = (_of(int, "memory", number) for number in header["memory"])
    masked = _of(bool, "masked", header["masked"])
    learner = ContinualLearner(config, num_features, num_classes, device, masked, size)
    learner.model.load_state_dict(_part(tensors, "model."))
    learner.penalty.load_state_dict(_part(tensors, "penalty."))
    learner.model.eval()
    learner.seen = _rows("seen", header["seen"], range(num_classes))
    if not learner.seen:
        raise ValueError("it has seen no class")
    learner.classes = _rows("classes", header["classes"], learner.seen)
    learner.num_samples, learner.num_calls = _number(header, "num_samples"), _number(header, "num_calls", least=1)
    _refill(learner, num_begun, num_seen, _part(tensors, "memory."))
    names = header["feature_names"]
    if names is not None and len([_of(str, "feature_names", name) for name in names]) != num_features:
        raise ValueError(f"it has {num_features} features and {len(names)} names of them")
    task = None if header["task"] is None else _of(NAMES, "task", header["task"])
    task_rows = {_of(NAMES, "tasks", name): _rows("tasks", rows, learner.seen) for name, rows in header["tasks"]}
    if len(task_rows) != len(header["tasks"]):
        raise ValueError("it has a task twice")
    return Kept(params, learner, labels, task, task_rows, names)


def _params(params: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The parameters as they were given, but for a list of widths, which comes back as a tuple."""
    for name, value in params.items():
        if name not in known:
            raise ValueError(f"there is no parameter {name!r}")
        if name != "hidden" and value is not None:
            _of(NAMES, name, value)
    hidden = params["hidden"]
    widths = tuple(_of(int, "hidden", width) for width in (hidden if isinstance(hidden, list) else [hidden]))
    return {**params, "hidden": widths if isinstance(hidden, list) else hidden}


def _labels(values: list[Any], kind: str) -> Labels:
    """Text is as wide as its longest label, whatever the file says."""
    letter = "U" if "U" in _of(str, "labels_type", kind) else np.dtype(kind).kind
    if letter not in LABELS or not values:
        raise ValueError(f"there are no labels of the type {kind!r}")
    values = [_of(LABELS[letter], "labels", value) for value in values]
    made = np.array(values, dtype={"U": np.str_, "O": object}.get(letter) or np.dtype(kind))
    if made.tolist() != values or len(set(values)) != len(values):
        raise ValueError("its labels are not of their type, or one is there twice")
    return Labels(made)


def _current(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a file; older files have "own" for what is now "custom"."""
    renamed = {name: CUSTOM for name in ("benchmark", "dataset") if config.get(name) == "own"}
    return {**config, **renamed}


def _check_shapes(config: Config, num_features: int, num_classes: int, held: dict[str, Tensor]) -> None:
    """Before anything is built, which may be far larger than what the file holds."""
    with DRAWING, torch.device("meta"):
        model = build_model(config, 0, (num_features,), num_classes)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in held.items()}:
        raise ValueError(f"its tensors are not those of {config.method} with {num_classes} classes")


def _refill(learner: ContinualLearner, num_begun: int, num_seen: int, held: dict[str, Tensor]) -> None:
    memory = learner.memory
    if learner.memory_size < 1 or num_begun < 1 or num_seen < 0 or bool(num_seen) != bool(held):
        raise ValueError(f"its memory of {learner.memory_size} has seen {num_seen} samples in {num_begun} tasks")
    memory.num_begun, memory.num_seen = num_begun, num_seen
    if held:
        memory.inputs, memory.targets = held["inputs"], held["targets"]
        if memory.inputs.shape != (memory.size, learner.num_features) or memory.targets.shape != (memory.size,):
            raise ValueError(f"its memory has shape {tuple(memory.inputs.shape)}")
        if (memory.inputs.dtype, memory.targets.dtype) != (torch.float32, torch.int64):
            raise ValueError(f"its memory holds {memory.inputs.dtype} and {memory.targets.dtype}")
        _rows("memory", sorted(set(memory.targets[: len(memory)].tolist())), learner.classes)


def _rows(name: str, rows: list[int], known: Container[int]) -> list[int]:
    for row in rows:
        if _of(int, name, row) not in known:
            raise ValueError(f"its {name} hold a class of number {row}, which is not there")
    if len(set(rows)) != len(rows):
        raise ValueError(f"its {name} hold a class twice")
    return list(rows)


def _number(header: dict[str, Any], name: str, least: int = 0) -> int:
    value = _of(int, name, header[name])
    if value < least:
        raise ValueError(f"its {name} is {value}")
    return value


def _of(types: type | tuple[type, ...], name: str, value: Any) -> Any:
    """A value whose type is one of these; a truth value is no number."""
    if type(value) not in (types if isinstance(types, tuple) else (types,)):
        raise TypeError(f"its {name} cannot be of the type {type(value).__name__}")
    return value


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _parameter(name: str, value: Any) -> Any:
    """As it is, but for the widths of hidden layers: a sequence of any kind becomes a list."""
    value = as_python(value)
    if name == "hidden" and type(value) is not int:
        widths = np.asarray(value)
        if widths.ndim > 1 or widths.dtype.kind not in "iu":
            raise InputError(f"the parameter hidden {value!r} cannot be saved: a file holds whole numbers there")
        value = widths.tolist()
    elif isinstance(value, list | dict):
        raise _too_much(f"the parameter {name}", value)
    return _as_json(f"the parameter {name}", value)


def _as_json(what: str, value: Any) -> Any:
    """A value that comes back from JSON as it was."""
    value = as_python(value)
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise _too_much(what, value)


def _too_much(what: str, value: Any) -> InputError:
    return InputError(f"{what} {value!r} cannot be saved: a file holds text, numbers and truth values only")
