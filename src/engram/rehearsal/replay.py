"""Replay of stored samples, from a reservoir."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.registry import REHEARSALS
from engram.rehearsal import reservoir
from engram.rehearsal.rehearsal import Batch, Draws, Memory, Moment, Rehearsal, Shapes, State, masked


@REHEARSALS.register(
    "replay",
    settings={"memory_size": "memory_size", "batch_size": "rehearsal_batch", "weight": "rehearsal_weight"},
    words="repeats stored samples of earlier tasks",
)
class Replay(Rehearsal):
    """Experience replay (Ratcliff 1990; Chaudhry 2019): each step repeats samples stored in a reservoir.

        loss = ½ CE(new) + ½ CE(stored)

    Each sample is offered to the reservoir once, in the first epoch of its task. New and stored samples are one batch
    for the network, and each uses the outputs that its task allows.

    Args:
        memory_size: the number M of stored samples.
        batch_size: how many of them a step repeats; None for as many as there are new ones.
        weight: of the stored samples, in place of ½.

    Example:
        >>> Replay(memory_size=200, batch_size=64).draws(64)
        {'read': (64,), 'write': (64,)}
    """

    stores = True

    def __init__(self, *, memory_size: int = 200, batch_size: int | None = None, weight: float | None = None):
        super().__init__(weight=weight)
        reservoir.check_size(memory_size)
        self.memory_size = memory_size
        self.batch_size = batch_size

    def initial_state(self, model: nn.Module, input_shape: Sequence[int], num_classes: int) -> State:
        return reservoir.empty(self.memory_size, input_shape, next(model.parameters()))

    def draws(self, batch_size: int) -> Shapes:
        return {"read": (self.batch_size or batch_size,), "write": (batch_size,)}

    def share(self, n: int) -> float:
        return 0.5 if self.weight is None else self.weight

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        if moment.first:
            return super().loss(model, still, state, batch, random, moment)
        w, old = self.share(moment.task), reservoir.stored(state, reservoir.read(state, random["read"]))
        logits = model(torch.cat([batch.inputs, old.inputs]), torch.cat([batch.targets, old.targets]))
        size = len(batch.targets)
        assert old.tasks is not None
        new = F.cross_entropy(masked(logits[:size], moment.new), batch.targets)
        repeated = F.cross_entropy(masked(logits[size:], moment.allowed[old.tasks]), old.targets)
        return (1 - w) * new + w * repeated, logits[:size]

    def store(self, state: State, batch: Batch, logits: Tensor, random: Draws, n: int) -> State:
        return reservoir.write(state, reservoir.rows_of(batch, n), random["write"])

    def memory(self, state: State) -> Memory:
        return reservoir.memory_of(state)
