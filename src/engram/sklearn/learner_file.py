"""What a file holds of what learns (a network, a memory, the sums of a regressor), and back, checked.

What contradicts itself raises one of the errors `MALFORMED`, which the caller makes a sentence of.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.common.tensor_file import tensors_under
from engram.config.methods import CUSTOM
from engram.config.settings import Config, from_dict
from engram.engine.build import build_model
from engram.sklearn.features import Features, SecondMoment
from engram.sklearn.network import ContinualLearner
from engram.sklearn.sums import MemoryLearner, RidgeSums, Sums

Parts = tuple[dict[str, Any], dict[str, Tensor]]  # what is added to the header, and tensors
# What Python, NumPy and PyTorch raise when a file contradicts itself.
MALFORMED = (KeyError, TypeError, ValueError, RuntimeError, AttributeError, IndexError, OverflowError)


# --- a network


def network_parts(learner: ContinualLearner) -> Parts:
    """What a file holds of a network, beyond what all learners have."""
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


def restored_network(
    header: dict[str, Any], tensors: dict[str, Tensor], num_features: int, num_classes: int, device: torch.device
) -> ContinualLearner:
    """A network from what a file holds."""
    config = from_dict(_current_names(header["config"]))
    _check_shapes(config, num_features, num_classes, tensors_under(tensors, "model."))
    masked, size = of_type(bool, "masked", header["masked"]), of_type(int, "memory", header["memory"][0])
    learner = ContinualLearner(config, num_features, num_classes, device, masked, size)
    learner.model.load_state_dict(tensors_under(tensors, "model."))
    learner.penalty.load_state_dict(tensors_under(tensors, "penalty."))
    learner.model.eval()
    if "counts" in tensors:  # not in formats 1 and 2
        learner.counts = numbers_of(tensors, "counts", (num_classes,))
    return learner


def _current_names(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they are named today."""
    old = {name: CUSTOM for name in ("benchmark", "dataset") if settings[name] == "own"}
    return {**settings, **old}


def _check_shapes(config: Config, num_features: int, num_classes: int, tensors: dict[str, Tensor]) -> None:
    """Refuse tensors of other shapes before a model is built, which may be far larger than the file."""
    with torch.device("meta"):
        model = build_model(config, 0, (num_features,), num_classes)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in tensors.items()}:
        raise ValueError(f"its tensors are not those of {config.method} with {num_classes} classes")


def refill(learner: ContinualLearner, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """The samples of the current task that a network stores, once it has its classes."""
    memory, tensors = learner.memory, tensors_under(tensors, "memory.")
    _, num_tasks, num_seen = (of_type(int, "memory", number) for number in header["memory"])
    if learner.memory_size < 1 or num_tasks < 1 or num_seen < 0 or bool(num_seen) != bool(tensors):
        raise ValueError(f"its memory of {learner.memory_size} has seen {num_seen} samples in {num_tasks} tasks")
    memory.num_tasks, memory.num_seen = num_tasks, num_seen
    if tensors:
        memory.inputs, memory.targets = tensors["inputs"], tensors["targets"]
        allowed = (memory.rows_for(num_seen), memory.size)  # once there were as many rows as its size from the start
        shapes = [((rows, learner.num_features), (rows,)) for rows in allowed]
        if (memory.inputs.shape, memory.targets.shape) not in shapes:
            raise ValueError(f"its memory has shape {tuple(memory.inputs.shape)}")
        if (memory.inputs.dtype, memory.targets.dtype) != (torch.float32, torch.int64):
            raise ValueError(f"its memory holds {memory.inputs.dtype} and {memory.targets.dtype}")
        rows_of("memory", sorted(set(memory.targets[: len(memory)].tolist())), learner.classes)


# --- sums


def memory_parts(learner: MemoryLearner) -> Parts:
    """What a file holds of a memory, beyond what all learners have."""
    header = {"shrinkage": learner.shrinkage, "clouds": [list(cloud) for cloud in learner.clouds]}
    arrays = {"count": learner.count, "total": learner.total}
    return {**header, **_described(learner)}, {f"sums.{n}": t for n, t in _tensors(learner, arrays).items()}


def ridge_parts(sums: RidgeSums) -> Parts:
    """What a file holds of a regressor's sums."""
    header = {"features": sums.features.num_inputs, "outputs": list(sums.shape), "count": sums.count}
    arrays = {name: getattr(sums, name) for name in ("total", "goals", "products", "zero")}
    return {**header, **_described(sums)}, _tensors(sums, arrays)


def _described(sums: Sums) -> dict[str, Any]:
    features = sums.features
    return {"seed": features.seed, "num_direct": features.num_direct, "num_random": features.num_random}


def _tensors(sums: Sums, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    arrays = {**arrays, "moment": sums.moment.upper(), "origin": sums.features.origin}
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def restored_memory(
    header: dict[str, Any], tensors: dict[str, Tensor], num_features: int, num_classes: int, device: torch.device
) -> MemoryLearner:
    """A memory from what a file holds; it is on the CPU whatever the device."""
    clouds = [(int(task), int(row)) for task, row in header["clouds"]]
    if [list(cloud) for cloud in clouds] != header["clouds"] or len(set(clouds)) != len(clouds) or not clouds:
        raise ValueError("its means are not of one class and one task each")
    if any(task < 0 or row not in range(num_classes) for task, row in clouds):
        raise ValueError("it has means of a class or a task that it does not have")
    width = _width(header, num_features)
    shapes = {"count": (len(clouds),), "total": (len(clouds), width)}
    arrays = _arrays(tensors_under(tensors, "sums."), shapes, width, num_features)
    if not (arrays["count"] > 0).all():
        raise ValueError("it has means of no samples")
    shrinkage = of_type(float, "shrinkage", header["shrinkage"])
    learner = MemoryLearner(_features(header, num_features), num_classes, shrinkage)
    learner.clouds = clouds
    _fill(learner, arrays)
    return learner


def restored_ridge(header: dict[str, Any], tensors: dict[str, Tensor]) -> RidgeSums:
    """A regressor's sums from what a file holds."""
    num_inputs = number_of(header, "features", least=1)
    shape = tuple(of_type(int, "outputs", size) for size in header["outputs"])
    count = of_type(float, "count", header["count"])
    if not 0 < count < np.inf or len(shape) > 1 or min(shape, default=1) < 1:
        raise ValueError("it has no samples, or outputs of no known shape")
    width = _width(header, num_inputs)
    outputs = int(np.prod(shape))
    shapes = {"total": (width,), "goals": (outputs,), "products": (width, outputs), "zero": (outputs,)}
    arrays = _arrays(tensors, shapes, width, num_inputs)
    sums = RidgeSums(_features(header, num_inputs), np.zeros((1, *shape)))
    sums.count = count
    _fill(sums, arrays)
    return sums


def _width(header: dict[str, Any], num_inputs: int) -> int:
    """The number of features, checked; and so is the seed."""
    number_of(header, "seed")
    num_direct, num_random = number_of(header, "num_direct"), number_of(header, "num_random")
    if num_direct not in (0, num_inputs) or not num_direct + num_random:
        raise ValueError(f"it has {num_direct} of {num_inputs} inputs and {num_random} random features")
    return num_direct + num_random


def _features(header: dict[str, Any], num_inputs: int) -> Features:
    return Features(num_inputs, header["num_direct"], header["num_random"], header["seed"])


def _arrays(
    tensors: dict[str, Tensor], shapes: dict[str, tuple[int, ...]], width: int, num_inputs: int
) -> dict[str, np.ndarray]:
    """All sums, checked before random features are drawn, which may be far larger than the file."""
    shapes = {**shapes, "moment": (width, width), "origin": (num_inputs,)}
    return {name: numbers_of(tensors, name, shape) for name, shape in shapes.items()}


def _fill(sums: Sums, arrays: dict[str, np.ndarray]) -> None:
    sums.features.origin = arrays.pop("origin")
    sums.moment = SecondMoment(arrays.pop("moment"))
    for name, array in arrays.items():
        setattr(sums, name, array)


# --- values


def names_of(header: dict[str, Any], num_features: int) -> list[str] | None:
    """The names of the features, if they have names."""
    names = header["feature_names"]
    if names is None:
        return None
    if len([of_type(str, "feature_names", name) for name in of_type(list, "feature_names", names)]) != num_features:
        raise ValueError(f"it has {num_features} features and {len(names)} names of them")
    return names


def numbers_of(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a file, if it has this shape and holds finite numbers in double precision."""
    found = tensors[name]
    if found.shape != shape or found.dtype != torch.float64 or not torch.isfinite(found).all():
        raise ValueError(f"its {name} is not {shape} finite numbers in double precision")
    return found.numpy()


def rows_of(name: str, rows: list[int], known: Container[int]) -> list[int]:
    """Numbers of classes, if all are known and none is there twice."""
    for row in rows:
        if of_type(int, name, row) not in known:
            raise ValueError(f"its {name} hold a class of number {row}, which it does not have")
    if len(set(rows)) != len(rows):
        raise ValueError(f"its {name} hold a class twice")
    return list(rows)


def number_of(header: dict[str, Any], name: str, least: int = 0) -> int:
    """A whole number of a header, if it is at least this."""
    value = of_type(int, name, header[name])
    if value < least:
        raise ValueError(f"its {name} is {value}")
    return value


def of_type(types: type | tuple[type, ...], name: str, value: Any) -> Any:
    """The value, if its type is exactly one of these: a Boolean is not accepted as a number."""
    if type(value) not in (types if isinstance(types, tuple) else (types,)):
        raise TypeError(f"its {name} cannot be of the type {type(value).__name__}")
    return value
