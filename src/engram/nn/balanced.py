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
from engram.nn.dhp import DHPSoftmax
from engram.nn.distributed import ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear
from engram.nn.typed import typed

FADING = 0.01  # ρ: what a batch takes from the counts of those before it
RAREST = 1e-6  # the share of a class that is not around at all: its logarithm is finite
WORD = 2**32 - 1


class Balance:
    """What heads have that read a random part of their features and know how frequent each class is.

        k ∈ {0, 1}, kept with probability 1 − d        n_c ← (1 − ρ) n_c + #{y = c},   π = n / Σ n

    k is the same for all samples of a batch. It is drawn from the number of the batch and a key that the head draws
    once: so it is the same on all ranks, and after a resume.
    """

    weight: nn.Parameter
    in_features: int
    out_features: int
    head_dropout: float
    around: Tensor  # n (C,)
    dropout: Tensor  # d (), a tensor, so that models with different ones can be computed together
    key: Tensor  # (), a whole number
    batches: Tensor  # (), how many were written

    def _add_balance(self: Any, head_dropout: float) -> None:
        if not 0 <= head_dropout < 1:
            raise InputError(f"head_dropout must be at least 0 and below 1, not {head_dropout}")
        self.head_dropout = head_dropout
        self.register_buffer("around", torch.zeros(self.out_features))
        self.register_buffer("dropout", torch.tensor(float(head_dropout)), persistent=False)
        self.register_buffer("key", torch.zeros((), dtype=torch.int64))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def _reset_balance(self) -> None:
        """A new key, and no class around."""
        self.key.copy_(torch.randint(WORD, ()))
        nn.init.zeros_(self.around)
        nn.init.zeros_(self.batches)

    def kept(self) -> Tensor:
        """k / (1 − d) (m,) of the next batch."""
        feature = torch.arange(self.in_features, device=self.weight.device)
        drawn = mixed(mixed(self.key + trace.before_batch(self.batches)) + feature) / (WORD + 1)
        return (drawn >= self.dropout).to(self.weight.dtype) / (1 - self.dropout)

    def log_frequency(self) -> Tensor:
        """log π (C,)."""
        share = self.around / self.around.sum().clamp(min=RAREST)
        return share.clamp(min=RAREST).log()

    @torch.no_grad()
    def _count(self: Any, hidden: Tensor, target: Tensor) -> None:
        """Remember the classes of a batch, that of all ranks together."""
        _, number = writing.batch_sums(hidden, target, self.out_features, ranks_of_call(self))
        self.around.copy_((1 - FADING) * self.around + number.squeeze(-1))
        self.batches.copy_(self.batches + 1)


@HEADS.register(
    "balanced",
    listed=False,
    settings="head_dropout head_init head_gain",
    words="an output layer that drops features and allows for how frequent each class is",
)
class BalancedSoftmax(Balance, Head):
    """A softmax layer that remembers how frequent each class is, and reads a random part of its features (`Balance`):

        in training    z = θ (k ⊙ h) / (1 − d) + log π
        in evaluation  z = θ h

    So no class depends on few features (dropout; Mirzadeh et al. 2020). The frequencies π explain what the batch's
    classes alone would teach θ (Menon et al. 2021): rare classes learn as frequent ones do, and a class that is not
    around is not pushed away.

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
        self.head_init, self.head_gain = head_init, head_gain
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self._add_balance(head_dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as `head_init` says, a new key, and no class around."""
        draw_slow_weights(self.weight, self.head_init, self.head_gain)
        self._reset_balance()

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {"head_dropout": self.head_dropout}

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        kept = self.kept()
        self._count(hidden, target)
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


@HEADS.register(
    "balanced-trace",
    listed=False,
    settings="head_dropout alpha_init head_init",
    preset={"protect": "in-force", "alpha_init": 0.1, "head_dropout": 0.25},
    words="the steady trace in an output layer that drops features and allows for how frequent each class is",
)
class BalancedTrace(Balance, DHPSoftmax):
    """The steady trace (`engram.heads.create("steady")`) in a head that is balanced as `BalancedSoftmax` is:

        in training    z = (θ + α Ĥ) (k ⊙ h) / (1 − d) + log π        Hebb is written from k ⊙ h / (1 − d)
        in evaluation  z = (θ + α Ĥ) h

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        head_dropout: d in [0, 1).
        alpha_init: α starts at alpha_init · U(0, 1).
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = BalancedTrace(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    class_rows = ("weight", "alpha", "hebb", "around")

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        head_dropout: float = 0.25,
        alpha_init: float = 0.1,
        head_init: str = "linear",
    ):
        super().__init__(
            in_features,
            out_features,
            eta=1e-4,
            alpha_init=alpha_init,
            learn_eta=False,
            trace_gradient=False,
            trace_scale=2.0,
            trace_centred=True,
            head_init=head_init,
        )
        self._add_balance(head_dropout)
        self._reset_balance()

    def reset_parameters(self) -> None:
        """θ, α and the trace as those of a `DHPSoftmax`, a new key, and no class around."""
        super().reset_parameters()
        if hasattr(self, "around"):  # not yet while the DHP Softmax is made
            self._reset_balance()

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {**super().plastic_settings, "head_dropout": self.head_dropout}

    def _learn(self, hidden: Tensor, target: Tensor) -> Tensor:
        kept = self.kept()
        self._count(hidden, target)
        return super()._learn(hidden * kept, target) + self.log_frequency()


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
