"""A classifier in one file, from which it goes on learning as if it had never been saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from engram.build import choose_device
from engram.config import from_dict
from engram.errors import InputError
from engram.sklearn.continual import ContinualLearner
from engram.sklearn.labels import Labels
from engram.tensorfile import read_tensors, write_tensors

if TYPE_CHECKING:
    from engram.sklearn.classifier import ContinualClassifier

KIND, FORMAT = "classifier", 1


def save(classifier: ContinualClassifier, path: Path) -> None:
    """Refuses labels, tasks and parameters that JSON cannot hold, before anything is written."""
    learner = classifier.learner_
    names = getattr(classifier, "feature_names_in_", None)
    header = {
        "params": {name: _as_json(f"the parameter {name}", v) for name, v in classifier.get_params().items()},
        "config": learner.config.to_dict(),
        "features": learner.num_features,
        "feature_names": None if names is None else names.tolist(),
        "labels": [_as_json("the class", label) for label in classifier._labels.values.tolist()],
        "labels_type": classifier._labels.values.dtype.str,
        "tasks": [[_as_json("the task", task), rows] for task, rows in classifier._task_rows.items()],
        "task": _as_json("the task", classifier._task),
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


def load(kind: type[ContinualClassifier], path: Path, device: str | None) -> Any:
    """A whole classifier, or one sentence on why there is none."""
    header, tensors = read_tensors(path, KIND, FORMAT)
    params = header.get("params")
    if device is not None and isinstance(params, dict):
        params["device"] = device
    try:
        return _restored(kind, header, tensors)
    except (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError) as reason:
        said = str(reason).strip().splitlines()[0]
        raise InputError(f"{path} does not hold a classifier of this version of Engram ({said})") from reason


def _restored(kind: type[ContinualClassifier], header: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    params = header["params"]
    classifier = kind(**{**params, "hidden": tuple(params["hidden"])})
    labels = Labels(np.array(header["labels"], dtype=np.dtype(header["labels_type"])))
    config, device = from_dict(header["config"]), choose_device(classifier.device)
    size, num_begun, num_seen = map(int, header["memory"])
    learner = ContinualLearner(config, int(header["features"]), len(labels.values), device, header["masked"], size)
    learner.model.load_state_dict(_part(tensors, "model."))
    learner.penalty.load_state_dict(_part(tensors, "penalty."))
    learner.model.eval()
    known = range(len(labels.values))
    learner.seen, learner.classes = _rows(header["seen"], known), _rows(header["classes"], known)
    learner.num_samples, learner.num_calls = int(header["num_samples"]), int(header["num_calls"])
    memory = learner.memory
    memory.num_begun, memory.num_seen = num_begun, num_seen
    if held := _part(tensors, "memory."):
        memory.inputs, memory.targets = held["inputs"], held["targets"]
        if memory.inputs.shape != (memory.size, learner.num_features) or memory.targets.shape != (memory.size,):
            raise ValueError(f"its memory has shape {tuple(memory.inputs.shape)}")
    classifier.learner_ = learner
    classifier.n_features_in_ = learner.num_features
    if header["feature_names"] is not None:
        classifier.feature_names_in_ = np.array(header["feature_names"], dtype=object)
    classifier._task = header["task"]
    classifier._task_rows = {task: _rows(rows, known) for task, rows in header["tasks"]}
    classifier._labels = labels
    classifier.classes_ = labels.classes
    return classifier


def _rows(rows: list[int], known: range) -> list[int]:
    if any(row not in known for row in rows):
        raise ValueError(f"there is no class of number {max(rows)}")
    return list(rows)


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _as_json(what: str, value: Any) -> Any:
    """A value that comes back from JSON as it was."""
    value = value.item() if isinstance(value, np.generic) else value
    value = list(value) if isinstance(value, tuple) and what == "the parameter hidden" else value
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise InputError(f"{what} {value!r} cannot be saved: a file holds text, numbers and truth values only")
