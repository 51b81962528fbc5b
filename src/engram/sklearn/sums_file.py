"""The sums of a memory in a file, and back, checked."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.sklearn.features import FORMS, SecondMoment, num_direct
from engram.sklearn.memory import MemoryLearner


def memory_parts(learner: MemoryLearner) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file holds of a memory, beyond what all learners have."""
    header = {
        "seed": learner.seed,
        "num_random": learner.features.num_random,
        "psi": learner.features.form,
        "shrinkage": learner.shrinkage,
        "clouds": [list(cloud) for cloud in learner.clouds],
    }
    arrays = {"count": learner.count, "total": learner.total, "moment": np.ascontiguousarray(learner.moment.upper())}
    return header, {f"sums.{n}": torch.from_numpy(a) for n, a in {**arrays, "origin": learner.features.origin}.items()}


def restored_memory(
    header: dict[str, Any], tensors: dict[str, Tensor], num_features: int, num_classes: int, device: torch.device
) -> MemoryLearner:
    """A memory from what a file holds. What contradicts itself raises an error that the caller makes a sentence of."""
    whole = {name: header[name] for name in ("seed", "num_random")}
    if any(type(value) is not int or value < 0 for value in whole.values()) or type(header["shrinkage"]) is not float:
        raise ValueError(f"its settings are {whole} and shrinkage {header['shrinkage']!r}")
    clouds = [(int(task), int(row)) for task, row in header["clouds"]]
    if [list(cloud) for cloud in clouds] != header["clouds"] or len(set(clouds)) != len(clouds) or not clouds:
        raise ValueError("its means are not of one class and one task each")
    if any(task < 0 or row not in range(num_classes) for task, row in clouds):
        raise ValueError("it has means of a class or a task that it does not have")
    width = num_direct(num_features, whole["num_random"]) + whole["num_random"]
    # The shapes are checked before random features are drawn, which may be far larger than the file.
    count = numbers_of(tensors, "sums.count", (len(clouds),))
    total = numbers_of(tensors, "sums.total", (len(clouds), width))
    moment = numbers_of(tensors, "sums.moment", (width, width))
    origin = numbers_of(tensors, "sums.origin", (num_features,))
    if not (count > 0).all():
        raise ValueError("it has means of no samples")
    learner = MemoryLearner(whole["seed"], num_features, num_classes, whole["num_random"], header["shrinkage"])
    learner.clouds, learner.count, learner.total, learner.moment = clouds, count, total, SecondMoment(moment)
    learner.features = FORMS[header.get("psi", 1)](num_features, whole["num_random"], whole["seed"])
    learner.features.origin = origin
    return learner


def numbers_of(tensors: dict[str, Tensor], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of a file, if it has this shape and holds finite numbers in double precision."""
    found = tensors[name]
    if found.shape != shape or found.dtype != torch.float64 or not torch.isfinite(found).all():
        raise ValueError(f"its {name} is not {shape} finite numbers in double precision")
    return found.numpy()
