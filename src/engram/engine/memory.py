"""Work that takes as much memory as there is, and no more."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from engram.config.settings import Config
from engram.engine.learner import Learner
from engram.engine.program import Batches

Made = TypeVar("Made")


class Portion:
    """So many samples at a time, over all models, as memory allows; found out once, and kept."""

    def __init__(self, samples: int, what: str, notes: list[str]):
        self.samples = samples
        self.what = what
        self.notes = notes

    def fitting(self, work: Callable[[int], Made], num_models: int) -> Made:
        """Do the work with so many samples at a time for each of the models, or with half of them until it fits."""
        while True:
            at_once = max(1, self.samples // num_models)
            try:
                return work(at_once)
            except torch.cuda.OutOfMemoryError:
                if at_once == 1:
                    raise
            self.samples = num_models * (at_once // 2)
            torch.cuda.empty_cache()
            self.notes.append(f"{self.what} takes {at_once // 2} samples at a time, as more do not fit into memory")


def tensors_per_weight(config: Config) -> int:
    """Of how many tensors, each as large as the weights, a learner consists at most.

    The weights and room for a gradient; for a penalty an importance and an anchor, gain and shift, and as much again
    while those of the next task are made; for SI path, start and step before; for EWC a term for every task.
    """
    if config.penalty is None:
        return 2
    terms = 2 * config.num_tasks if config.penalty == "ewc" else 2
    return 2 + terms + 2 + 2 + (3 if config.penalty == "si" else 0)


def bytes_of(learner: Learner, inputs: Tensor) -> int:
    """What a learner takes of memory: its tensors, and what a step keeps of a batch on its way."""
    weights = sum(theta.numel() * theta.element_size() for theta in learner.model.parameters())
    kept = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.numel() * tensor.element_size()
        return tensor

    model = copy.deepcopy(learner.model).eval()
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        model(inputs)
    per_sample = kept // len(inputs)
    return weights * tensors_per_weight(learner.config) + 2 * per_sample * learner.config.batch_size


def bytes_of_data(batches: Batches) -> int:
    """What the samples take, each counted once."""
    tensors = {
        id(tensor): tensor.numel() * tensor.element_size()
        for stream in batches.streams
        for task in stream
        for samples in (task.train, task.test)
        for tensor in (samples.inputs, samples.targets)
    }
    return sum(tensors.values())
