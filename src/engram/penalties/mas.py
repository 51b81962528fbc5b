"""Memory Aware Synapses: importance is how sensitive the network's function is to a weight."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.registry import PENALTIES
from engram.penalties.importance import mean_per_sample
from engram.penalties.quadratic import Quadratic


@PENALTIES.register("mas")
class MAS(Quadratic):
    """MAS (Aljundi et al. 2018). It needs no labels: a batch may also be the inputs alone.

    Ω ← Ω + mean over samples of |∂ ‖f(x)‖² / ∂θ|        θ* ← θ

    f(x) are the logits, their norm is squared, and the absolute value is taken of each sample's gradient.

    The arguments are those of `Penalty`.

    Example:
        >>> penalty = engram.MAS(model, strength=0.1)
        >>> penalty.consolidate(loader)
    """

    @classmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        settings: Mapping[str, Any],
        batches: Iterable[Any],
        classes: Sequence[int] | None = None,
    ) -> dict[str, Tensor]:
        def squared_norm(outputs: Tensor) -> Tensor:
            own = outputs if classes is None else outputs[:, list(classes)]
            return own.square().sum(dim=1)

        return mean_per_sample(model, parameters, squared_norm, torch.abs, batches)
