"""Memory: how many models fit into a stack, and how many samples are processed at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from engram.data.batches import read_inputs
from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer
from engram.engine.program import Batches
from engram.penalties.quadratic import form_of

Made = TypeVar("Made")
SHARE_OF_MEMORY = 0.8  # the fraction of the free memory that a stack may take


class Portion:
    """How many samples are processed at a time, over all models: halved until it fits, and then kept.

    Args:
        samples: the number to start with.
        what: what is done with them, for notes.
        notes: to which a line is added whenever the number is halved.

    Example:
        >>> portion = Portion(400_000, "an evaluation", notes)
        >>> correct = portion.fitting(count, num_models=80)
    """

    def __init__(self, samples: int, what: str, notes: list[str]):
        self.samples = samples
        self.what = what
        self.notes = notes

    def fitting(self, work: Callable[[int], Made], num_models: int) -> Made:
        """Do the work, with fewer samples at a time until it fits into memory.

        Args:
            work: a function of the number of samples at a time for each model.
            num_models: among which the samples are divided.
        """
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


def tensors_per_weight(learner: Learner) -> int:
    """The largest number of tensors, each the size of the weights, that a learner consists of.

    The weights and room for a gradient; what the optimizer remembers; for a penalty what it remembers now (SI's path,
    start and step before), importance and anchor of its terms (EWC has a term for every task), gain and shift, and as
    much again while those of the next task are made.

    Args:
        learner: before its first task.

    Example:
        >>> tensors_per_weight(learner)  # without a penalty
        2
    """
    penalty = learner.penalty
    own = 2 + len(set(Optimizer.of(learner.config).slots) - {"steps"})
    if not penalty.remembers:
        return own
    form = form_of(penalty)
    terms = 2 * learner.config.num_tasks if form is not None and form.keeps_every_term else 2
    return own + terms + 2 + 2 + len(penalty.state) // len(penalty.parameters)


def bytes_of(learner: Learner, inputs: Tensor) -> int:
    """The memory that a learner takes: its tensors, and what a step saves of a batch for the backward pass.

    Args:
        learner: before its first task.
        inputs: a small batch.

    Example:
        >>> bytes_of(learner, inputs)
    """
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
    # A second moment is larger than any weight: it, what a batch adds to it, and their sum.
    sums = 3 * sum(t.numel() * t.element_size() for t in model.buffers() if t.dtype == torch.float64 != inputs.dtype)
    remembered = 2 * sum(tensor.numel() * tensor.element_size() for tensor in learner.remembered.values())
    repeats = 1 if learner.rehearsal is None else 3  # batches of one step: the new one and what is repeated
    steps = 2 * repeats * per_sample * learner.config.batch_size
    return sums + remembered + weights * tensors_per_weight(learner) + steps


def bytes_of_data(batches: Batches) -> int:
    """The memory that the samples take, each counted once.

    Args:
        batches: of any number of trials.

    Example:
        >>> bytes_of_data(batches)
    """
    tensors = {
        id(tensor): tensor.numel() * tensor.element_size()
        for stream in batches.streams
        for task in stream
        for samples in (task.train, task.test)
        for tensor in (samples.inputs, samples.targets)
    }
    return sum(tensors.values())


def largest_stack(built: Iterable[tuple[Learner, Batches]], device: torch.device) -> int | None:
    """How many models of the largest kind fit into memory together with the data; None for any number.

    Args:
        built: one learner of each kind, and what it learns. They are built one by one, after the free memory is known.
        device: whose memory.

    Example:
        >>> largest_stack([(learner, batches)], torch.device("cpu"))
    """
    free = free_bytes(device)
    if free is None:
        return None
    largest, data = 1, 0
    for learner, batches in built:
        inputs = read_inputs(batches.tasks(0)[0].train[slice(2)].inputs, dtype=batches.dtype)
        largest = max(largest, bytes_of(learner, inputs))
        data = max(data, bytes_of_data(batches))
    if device.type == "cpu":
        data = 0  # they are in memory already
    return max(1, int(SHARE_OF_MEMORY * (free - data)) // largest)


def free_bytes(device: torch.device) -> int | None:
    """The free memory of a device; None where it is unknown.

    Args:
        device: any.

    Example:
        >>> free_bytes(torch.device("cpu"))
    """
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:  # what Linux can free counts as free
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None
