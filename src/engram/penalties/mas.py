"""Memory Aware Synapses: importance is how sensitive the network's function is to a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engram.common.registry import PENALTIES
from engram.penalties.importance import mean_per_sample
from engram.penalties.quadratic import Quadratic
from engram.penalties.terms import Batches, Classes, Settings, Weights


@PENALTIES.register("mas", words="holds each weight by how much the outputs depend on it")
class MAS(Quadratic):
    """MAS (Aljundi et al. 2018). It needs no labels: a batch may also be the inputs alone.

    Ω ← Ω + mean over samples of |∂ ‖f(x)‖² / ∂θ|        θ* ← θ

    f(x) are the logits, their norm is squared, and the absolute value is taken of each sample's gradient.

    Args:
        model: any module, as in `Penalty`.
        strength: λ of Eq. 4.
        regularize_alpha: protect the plasticity coefficients α too.
        protect: "slow" or "in-force", as in `Penalty`.

    Example:
        >>> penalty = engram.MAS(model, strength=0.1)
        >>> penalty.consolidate(loader)
    """

    @classmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches,
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        def squared_norm(outputs: Tensor) -> Tensor:
            own = outputs if classes is None else outputs[:, list(classes)]
            return own.square().sum(dim=1)

        return mean_per_sample(model, parameters, squared_norm, torch.abs, batches)
