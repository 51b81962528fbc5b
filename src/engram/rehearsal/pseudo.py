"""Pseudo-rehearsal: random inputs, with the outputs that the network gave them before the task."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engram.common.registry import REHEARSALS
from engram.rehearsal.rehearsal import Batch, Draws, Moment, Rehearsal, Shapes, State, masked, mean_distillation
from engram.rehearsal.reservoir import check_fits, check_size


@REHEARSALS.register(
    "pseudo-rehearsal",
    settings={
        "memory_size": "memory_size",
        "batch_size": "rehearsal_batch",
        "temperature": "distillation_temperature",
        "weight": "rehearsal_weight",
    },
    words="repeats random inputs, with the outputs that they had before the task",
)
class PseudoRehearsal(Rehearsal):
    """Pseudo-rehearsal (Robins 1995): before each task, M random inputs are labelled by the network.

        loss = (1/n) CE(new) + (1 − 1/n) D_T(z(x̃), z̃)        x̃ ∼ U(0, 1),  z̃ = z(x̃) before the task

    No sample of an earlier task is stored. Inputs are uniform in [0, 1], as pixels are.

    Args:
        memory_size: M.
        batch_size: how many of the M inputs a step repeats; None for as many as there are new samples.
        temperature: T of the distillation D.
        weight: in place of 1 − 1/n.

    Example:
        >>> PseudoRehearsal(memory_size=100).draws_at_end((1, 28, 28))
        {'inputs': (100, 1, 28, 28)}
    """

    unit_inputs = True

    def __init__(
        self,
        *,
        memory_size: int = 200,
        batch_size: int | None = None,
        temperature: float = 2.0,
        weight: float | None = None,
    ):
        super().__init__(weight=weight)
        check_size(memory_size)
        self.memory_size = memory_size
        self.batch_size = batch_size
        self.temperature = temperature

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        like, numbers = next(model.parameters()), math.prod(input_shape)
        drawn = numbers * torch.float64.itemsize  # inputs come from numbers in double precision
        check_fits(self.memory_size, drawn + (numbers + num_classes) * like.element_size(), like.device)
        inputs = like.new_zeros(self.memory_size, *input_shape)
        return {"inputs": inputs, "logits": like.new_zeros(self.memory_size, num_classes)}

    def draws(self, batch_size: int) -> Shapes:
        return {"read": (self.batch_size or batch_size,)}

    def draws_at_end(self, input_shape: Sequence[int]) -> Shapes:
        return {"inputs": (self.memory_size, *input_shape)}

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        if moment.task == 0:
            return super().loss(model, still, state, batch, random, moment)
        rows = (random["read"] * self.memory_size).long()
        inputs, teacher = state["inputs"].index_select(0, rows), state["logits"].index_select(0, rows)
        known = torch.stack([then for _, then in moment.groups]).any(dim=0)
        labels = masked(teacher, known).argmax(dim=1)  # for heads that write into a trace
        logits = model(torch.cat([batch.inputs, inputs]), torch.cat([batch.targets, labels]))
        size, w = len(batch.targets), self.share(moment.task)
        new = F.cross_entropy(masked(logits[:size], moment.new), batch.targets)
        repeated = mean_distillation(logits[size:], teacher, moment, self.temperature)
        return (1 - w) * new + w * repeated, logits[:size]

    def end_task(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> State:
        inputs = random["inputs"].to(state["inputs"].dtype)
        with torch.no_grad():
            return {"inputs": inputs, "logits": functional_call(still, dict(tensors), (inputs,)).detach()}
