"""A head that knows which classes are around, and relies on no single feature."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn import trace, writing
from engram.nn.classes import draw_slow_weights
from engram.nn.distributed import ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear
from engram.nn.typed import typed

FADING = 0.01  # ρ: what a batch takes from the counts of those before it
RAREST = 1e-6  # the share of a class that is not around at all: its logarithm is finite
WORD = 2**32 - 1


@HEADS.register(
    "balanced",
    listed=False,
    settings="head_dropout head_init head_gain",
    words="an output layer that drops features and allows for how frequent each class is",
)
class BalancedSoftmax(Head):
    """A softmax layer that remembers how frequent each class is, and reads a random part of its features:

        in training    z = θ (k ⊙ h) / (1 − d) + log π        n_c ← (1 − ρ) n_c + #{y = c},   π = n / Σ n
        in evaluation  z = θ h

    k keeps each feature with probability 1 − d, the same for all samples of a batch, so that no class depends on few of
    them (dropout; Mirzadeh et al. 2020). The frequencies π explain what the batch's classes alone would teach θ (Menon
    et al. 2021): rare classes learn as frequent ones do, and a class that is not around is not pushed away.

    k is drawn from the number of the batch and a key that the head draws once. So it is the same on all ranks, and
    after a resume.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        head_dropout: d in [0, 1).
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).
        head_gain: a factor of the range of θ at the start.

    Example:
        >>> head = BalancedSoftmax(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    class_rows = ("weight", "around")

    weight: nn.Parameter  # θ (C, m)
    around: Tensor  # n (C,)
    dropout: Tensor  # d (), a tensor, so that models with different ones can be computed together
    key: Tensor  # (), a whole number
    batches: Tensor  # (), how many were written

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        head_dropout: float = 0.5,
        head_init: str = "linear",
        head_gain: float = 1.0,
    ):
        super().__init__(in_features, out_features)
        if not 0 <= head_dropout < 1:
            raise InputError(f"head_dropout must be at least 0 and below 1, not {head_dropout}")
        self.head_dropout = head_dropout
        self.head_init, self.head_gain = head_init, head_gain
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("around", torch.empty(out_features))
        self.register_buffer("dropout", torch.tensor(float(head_dropout)))
        self.register_buffer("key", torch.empty((), dtype=torch.int64))
        self.register_buffer("batches", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as `head_init` says, a new key, and no class around."""
        draw_slow_weights(self.weight, self.head_init, self.head_gain)
        with torch.no_grad():
            self.key.copy_(torch.randint(WORD, ()))
        nn.init.zeros_(self.around)
        nn.init.zeros_(self.batches)

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {"head_dropout": self.head_dropout}

    def kept(self) -> Tensor:
        """k / (1 − d) (m,) of the next batch."""
        feature = torch.arange(self.in_features, device=self.weight.device)
        drawn = mixed(mixed(self.key + trace.before_batch(self.batches)) + feature) / (WORD + 1)
        return (drawn >= self.dropout).to(self.weight.dtype) / (1 - self.dropout)

    def log_frequency(self) -> Tensor:
        """log π (C,)."""
        share = self.around / self.around.sum().clamp(min=RAREST)
        return share.clamp(min=RAREST).log()

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            kept = self.kept()
            _, number = writing.batch_sums(hidden, target, self.out_features, ranks_of_call(self))
            self.around.copy_((1 - FADING) * self.around + number.squeeze(-1))
            self.batches.copy_(self.batches + 1)
        return F.linear(hidden, self.weight * kept, self.log_frequency())

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to θ: 1."""
        return {"weight": torch.ones_like(self.weight)}

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """A plain layer with a copy of θ, for use after training.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(self.weight).train(self.training)


def mixed(number: Tensor) -> Tensor:
    """A whole number in [0, 2³²) for each whole number; neighbours have nothing in common.

    Example:
        >>> mixed(torch.tensor([0, 1, 2]))
        tensor([         0, 1364076727,  821347078])
    """
    word = number & WORD  # a product of two words wraps around, and its lower word is right
    word = ((word ^ (word >> 16)) * 0x85EBCA6B) & WORD
    word = ((word ^ (word >> 13)) * 0xC2B2AE35) & WORD
    return word ^ (word >> 16)
