"""CoPE: features that learn to be near the prototype of their class, which follows them slowly."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn import memory, writing
from engram.nn.distributed import ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear, is_exported, is_mapped
from engram.nn.psi import Psi, Readout
from engram.nn.typed import typed


@HEADS.register("cope", listed=False, words="an output layer of class prototypes, which follow the features slowly")
class CoPE(Head):
    """Continual prototype evolution (De Lange & Tuytelaars 2021).

        z = p ψ(h) / T,   ψ(h) = h / ‖h‖        p_c ← (1 − r) p_c + r h̄_c, then p_c / ‖p_c‖

    h̄_c is the mean of ψ over the samples of class c in a batch, and the whole of p_c when the class is first seen. It
    is written after the step: what a batch leaves is kept until the next one, and until then added in every reading.
    The head has no weights: the loss trains the features in front of it, and no gradient flows through the prototypes.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        rate: r in [0, 1].
        temperature: T above 0.

    Example:
        >>> head = CoPE(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    prototypes: Tensor  # p (C, m); 0 for a class that was never seen
    pending: Tensor  # h̄ (C, m) of the last batch
    added: Tensor  # k (C, 1), the samples of each class in the last batch

    @typed
    def __init__(self, in_features: int, out_features: int, *, rate: float = 0.01, temperature: float = 0.1):
        super().__init__(in_features, out_features)
        if not 0 <= rate <= 1:
            raise InputError(f"rate must lie in [0, 1], not {rate}")
        if temperature <= 0:
            raise InputError(f"temperature must be above 0, not {temperature}")
        self.rate = rate
        self.temperature = temperature
        self.register_buffer("prototypes", torch.empty(out_features, in_features))
        self.register_buffer("pending", torch.empty(out_features, in_features))
        self.register_buffer("added", torch.empty(out_features, 1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """No class has a prototype."""
        for buffer in (self.prototypes, self.pending, self.added):
            nn.init.zeros_(buffer)

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {"rate": self.rate, "temperature": self.temperature}

    def evolved(self) -> Tensor:
        """p (C, m) with the last batch written; the classes that it did not have stay the same bit for bit.

        Example:
            >>> similarity = memory.normalise(hidden) @ head.evolved().T
        """
        new = ~self.prototypes.any(dim=-1, keepdim=True)
        rate = torch.where(new, torch.ones_like(self.added), self.rate)
        moved = memory.normalise(writing.blend(self.prototypes, self.pending, rate))
        return torch.where(self.added > 0, moved, self.prototypes)

    def reading(self) -> memory.Reading:
        """Weight and bias of the linear layer behind ψ: p / T, and a class without a prototype never wins.

        Example:
            >>> weight, bias = head.reading()
        """
        prototypes = self.evolved()
        # In a stack, and where an exporter looks, there is no single value to ask for.
        if self.check_values and not is_exported() and not is_mapped() and not prototypes.any():
            raise InputError("nothing was written into this head yet: call it in training mode, with targets, first")
        bias = torch.where(prototypes.any(dim=-1), 0.0, memory.UNSEEN).to(prototypes.dtype)
        return prototypes / self.temperature, bias

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(memory.normalise(hidden), *self.reading())

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        psi = memory.normalise(hidden)
        with torch.no_grad():
            prototypes = self.evolved()
            sums, added = writing.batch_sums(psi, target, self.out_features, ranks_of_call(self))
            self.prototypes.copy_(prototypes)
            self.pending.copy_(sums / added.clamp(min=1))
            self.added.copy_(added)
        return F.linear(psi, prototypes / self.temperature)

    @torch.no_grad()
    def fold(self) -> Readout:
        """The same function as a linear layer behind ψ(h) = h / ‖h‖.

        Example:
            >>> linear = head.fold().linear
        """
        psi = Psi(self.in_features, normalised=True)
        return Readout(psi, as_linear(*self.reading())).train(self.training)
