"""Learning without forgetting: the model before the task is the teacher of its successor, on the new inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.registry import REHEARSALS
from engram.rehearsal.rehearsal import (
    Batch,
    Draws,
    Moment,
    Rehearsal,
    State,
    masked,
    mean_distillation,
    snapshot,
    teacher_logits,
    tensors_of,
)


@REHEARSALS.register(
    "lwf",
    settings={"temperature": "distillation_temperature", "weight": "rehearsal_weight"},
    words="keeps the outputs that the new samples had before the task",
)
class LwF(Rehearsal):
    """Learning without forgetting (Li & Hoiem 2017), weighted as by van de Ven & Tolias (2019):

        loss = (1/n) CE(z(x), y) + (1 − 1/n) D_T(z(x), z̃(x))        n tasks so far, z̃ the model before this one

    Nothing of earlier tasks is stored but the teacher.

    Args:
        temperature: T of the distillation D.
        weight: in place of 1 − 1/n.

    Example:
        >>> LwF(temperature=2.0).share(4)
        0.8
    """

    def __init__(self, *, temperature: float = 2.0, weight: float | None = None):
        super().__init__(weight=weight)
        self.temperature = temperature

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        return snapshot(tensors_of(model))

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        logits = model(batch.inputs, batch.targets)
        new = F.cross_entropy(masked(logits, moment.new), batch.targets)
        if moment.task == 0:
            return new, logits
        w, teacher = self.share(moment.task), teacher_logits(still, state, batch.inputs)
        return (1 - w) * new + w * mean_distillation(logits, teacher, moment, self.temperature), logits

    def end_task(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> State:
        return {**state, **snapshot(tensors)}
