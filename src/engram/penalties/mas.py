"""Memory Aware Synapses: importance is how sensitive the network's function is to a weight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engram.penalties.base import Batch, Penalty, Term
from engram.penalties.importance import mean_per_sample


class MAS(Penalty):
    """MAS (Aljundi et al. 2018). It needs no labels: a batch may also be the inputs alone.

    Ω ← Ω + mean over samples of |∂ ‖f(x)‖² / ∂θ|        θ* ← θ

    f(x) are the logits, their norm is squared, and the absolute value is taken of each sample's gradient.
    """

    def consolidate(self, batches: Iterable[Batch | Tensor], classes: Sequence[int] | None = None) -> None:
        def squared_norm(outputs: Tensor) -> Tensor:
            own = outputs if classes is None else outputs[:, list(classes)]
            return own.square().sum(dim=1)

        importance = mean_per_sample(self.model, self.parameters, squared_norm, torch.abs, batches)
        for term in self.terms:
            importance = {name: term.importance[name] + omega for name, omega in importance.items()}
        self.terms = [Term(importance, self.snapshot())]
