"""Memory: how many models fit into a stack, and how many samples are processed at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from engram.data.batches import LONGEST_PIECE, read_inputs
from engram.engine.gpu.heads import BATCHES_KEPT, writes_sums
from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer
from engram.engine.program import Batches
from engram.nn.memory_heads import MemoryHead
from engram.penalties.quadratic import form_of
from engram.rehearsal import Batch, Rehearsal
from engram.rehearsal.rehearsal import moment_of

Made = TypeVar("Made")
SHARE_OF_MEMORY = 0.8  # the fraction of the free memory that a stack may take
TRIED = 1000  # samples at most, to count what a step keeps: of a larger batch it keeps proportionally more


class Portion:
    """How many samples are processed at a time, over all models that are called as one: halved until it fits, and kept.

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


def bytes_of(learner: Learner, inputs: Tensor) -> int:
    """The memory that a learner takes as part of a stack, at the moment when it takes the most.

    Always there are its weights and buffers; what its optimizer and its rehearsal remember; and what its penalty does:
    SI's path and start, and an importance and an anchor of each protected weight, with EWC for every task.

    One of three moments takes the most:

    - The start of a task. Gain and shift of each protected weight are made model by model and copied into the stack,
      so they are there twice. So is what the rehearsal remembers, and what the optimizer does of one weight at a time.
    - A step: gain and shift; a gradient of each weight (also of linear layers, which only need one where a layer is
      called twice), and a copy of the largest, which a kernel may need in another
      layout; and what `bytes_of_step` counts. What a batch adds to the sums of a head is as large as they are. A-GEM
      has two gradients and their projection. When all this but the gradients is gone, a memory of samples is made from
      the old one.
    - The end of a task, when importances are computed. `vmap` gets copies of the weights and buffers, and a second one
      of the protected weights. An importance is there three times: the sum so far, a batch's part, and the new sum.
      Inputs are there twice, as they are read and as they are dealt out. Gradients, gain and shift are gone by then.
      More samples than those of a batch are read at a time only if they fit.

    Args:
        learner: before its first task.
        inputs: a small batch.

    Example:
        >>> bytes_of(learner, inputs)
    """
    model, rehearsal = learner.model, learner.rehearsal
    weights, buffers, remembered = map(_sum, (model.parameters(), model.buffers(), learner.remembered.values()))
    sums = _sum(buffer for buffer in model.buffers() if buffer.dtype == torch.float64 != inputs.dtype)
    sizes = [theta.nbytes for theta in model.parameters() if theta.requires_grad]
    largest = max(sizes, default=0)
    num_slots = len(set(Optimizer.of(learner.config).slots) - {"steps"})
    protected, pull, of_penalty = _bytes_of_penalty(learner)
    activations = bytes_of_step(learner, inputs)

    held = weights + buffers + num_slots * sum(sizes) + remembered + of_penalty
    start = held + 2 * pull + num_slots * largest + remembered
    num_gradients = 3 if rehearsal is not None and rehearsal.projects else 1
    stored = remembered if rehearsal is not None and rehearsal.stores else 0
    gradients = num_gradients * sum(sizes)
    step = held + pull + max(gradients + largest + activations + sums, gradients + stored)
    batch = inputs[0].nbytes * learner.config.batch_size
    end = held + weights + buffers + protected + 3 * protected + activations + batch if protected else 0
    return max(start, step, end)


def _bytes_of_penalty(learner: Learner) -> tuple[int, int, int]:
    """Of the protected weights; of gain and shift, with those that move with a trace; and of all it remembers."""
    penalty = learner.penalty
    if not penalty.remembers:
        return 0, 0, 0
    protected = _sum(penalty.parameters.values())
    moving = _sum(theta for name, theta in penalty.parameters.items() if name in penalty.fast)
    form = form_of(penalty)
    every = form is not None and form.keeps_every_term
    num_terms = max(1, learner.config.num_tasks - 1) if every else 1  # in the last task
    return protected, 2 * protected + moving, 2 * num_terms * protected + _sum(penalty.state.values())


def _sum(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors, each counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in list(tensors)}.values())


def bytes_of_step(learner: Learner, inputs: Tensor) -> int:
    """What a step keeps of its batch until the backward pass, and the largest gradient that this makes.

    A convolution's backward pass makes as much as the patches of its inputs, and frees it. A memory head makes its
    features ψ, and again in double precision; on a GPU those of some batches are kept for its second moment. Weights
    are not counted: they are there in any case. A rehearsal also has the random numbers of the next steps, for batches
    of the usual size and for a shorter last one.

    Args:
        learner: before its first task.
        inputs: a small batch.

    Example:
        >>> bytes_of_step(learner, inputs)
    """
    model, rehearsal, batch_size = copy.deepcopy(learner.model).eval(), learner.rehearsal, learner.config.batch_size
    inputs = inputs[torch.arange(min(batch_size, TRIED), device=inputs.device) % len(inputs)]
    there = [*model.parameters(), *model.buffers(), *learner.remembered.values()]
    places = {tensor.untyped_storage().data_ptr() for tensor in there}
    kept = {inputs.untyped_storage().data_ptr(): inputs.nbytes}  # by place, since several layers may keep one tensor

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    def keep_patches(layer: nn.Module, entered: tuple[Tensor, ...], maps: Tensor) -> None:
        assert isinstance(layer, nn.Conv2d)
        patches.append((layer.weight[0].numel() + 1) * maps.nbytes // layer.out_channels)  # with a one for the bias

    def make_features(waits: bool, psi: nn.Module, entered: tuple[Tensor, ...], features: Tensor) -> None:
        made.append(features.nbytes + (BATCHES_KEPT * features.nbytes if waits else features.double().nbytes))

    patches: list[int] = []
    made: list[int] = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and rehearsal is None:  # a stack that rehearses maps it as it is
            layer.register_forward_hook(keep_patches)
        if isinstance(layer, MemoryHead):
            waits = inputs.is_cuda and writes_sums(layer) and layer.moment is not None
            layer.psi.register_forward_hook(partial(make_features, waits))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        # What is returned holds what is kept, so that no two of these tensors have the same place.
        losses = [model(inputs)] if rehearsal is None else _rehearsed(rehearsal, model, learner.remembered, inputs)
    del losses
    numbers = 0 if rehearsal is None else sum(map(math.prod, rehearsal.draws(batch_size).values()))
    of_batch = (sum(kept.values()) + max([*kept.values(), *patches]) + sum(made)) * batch_size // len(inputs)
    return of_batch + 2 * LONGEST_PIECE * numbers * torch.float64.itemsize


def _rehearsed(rehearsal: Rehearsal, model: nn.Module, state: dict[str, Tensor], inputs: Tensor) -> list[Tensor]:
    """The losses of a step that rehearses, in the second of two tasks that have all classes."""
    with torch.no_grad():
        classes = range(model(inputs[:1]).shape[-1])
    targets = torch.zeros(len(inputs), dtype=torch.int64, device=inputs.device)
    moment = moment_of([classes, classes], 1, len(classes), inputs.device)
    shapes = rehearsal.draws(len(inputs))
    random = {name: torch.zeros(s, dtype=torch.float64, device=inputs.device) for name, s in shapes.items()}
    losses = [*rehearsal.loss(model, model, state, Batch(inputs, targets), random, moment)]
    if rehearsal.projects:
        losses.append(rehearsal.reference_loss(model, dict(model.named_parameters()), state, random, moment))
    return losses


def bytes_of_data(batches: Batches) -> int:
    """The memory that the samples take, each counted once.

    Args:
        batches: of any number of trials.

    Example:
        >>> bytes_of_data(batches)
    """
    tensors = {
        id(tensor): tensor.nbytes
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
