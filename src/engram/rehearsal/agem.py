"""Averaged gradient episodic memory: a step must not increase the loss on stored samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from engram.common.registry import REHEARSALS
from engram.rehearsal import reservoir
from engram.rehearsal.rehearsal import Batch, Draws, Moment, Rehearsal, State, masked
from engram.rehearsal.replay import Replay


@REHEARSALS.register(
    "a-gem",
    settings={"memory_size": "memory_size", "batch_size": "rehearsal_batch"},
    words="changes a step that would raise the loss of stored samples",
)
class AGEM(Replay):
    """A-GEM (Chaudhry 2019): the gradient g is projected where it opposes that of stored samples, g̃.

        g ← g − (gᵀ g̃ / g̃ᵀ g̃) g̃    if gᵀ g̃ < 0

    g̃ is of samples of earlier tasks, drawn from a reservoir, with the model in evaluation mode: a plastic head reads
    its trace for it, and writes nothing.

    Args:
        memory_size: the number of stored samples.
        batch_size: how many of them g̃ is computed from; None for as many as there are new ones.

    Example:
        >>> AGEM(memory_size=200).projects
        True
    """

    projects = True

    def __init__(self, *, memory_size: int = 200, batch_size: int | None = None):
        super().__init__(memory_size=memory_size, batch_size=batch_size)

    def loss(
        self, model: nn.Module, still: nn.Module, state: State, batch: Batch, random: Draws, moment: Moment
    ) -> tuple[Tensor, Tensor]:
        return Rehearsal.loss(self, model, still, state, batch, random, moment)

    def reference_loss(
        self, still: nn.Module, tensors: Mapping[str, Tensor], state: State, random: Draws, moment: Moment
    ) -> Tensor:
        rows, any_stored = reservoir.read_earlier(state, random["read"], moment.task)
        old = reservoir.stored(state, rows)
        logits = functional_call(still, dict(tensors), (old.inputs,))
        assert old.tasks is not None
        return any_stored * F.cross_entropy(masked(logits, moment.allowed[old.tasks]), old.targets)


def project(gradients: Sequence[Tensor], reference: Sequence[Tensor]) -> list[Tensor]:
    """The gradients without their part against the reference, all tensors taken as one vector.

    Args:
        gradients: g, one tensor for each parameter.
        reference: g̃, of the same shapes.

    Example:
        >>> project([torch.tensor([1.0, -1.0])], [torch.tensor([0.0, 1.0])])
        [tensor([1., 0.])]
    """
    along = torch.stack([(g * r).sum() for g, r in zip(gradients, reference, strict=True)]).sum()
    length = torch.stack([r.square().sum() for r in reference]).sum()
    against = torch.where((along < 0) & (length > 0), along / length, torch.zeros_like(along))
    return [g - against * r for g, r in zip(gradients, reference, strict=True)]
