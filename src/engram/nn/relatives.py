"""Relatives of the DHP Softmax that learn nothing of their memory: the Hebbian Softmax, and fast weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn import writing
from engram.nn.classes import draw_slow_weights
from engram.nn.distributed import ranks_of_call
from engram.nn.head import Head
from engram.nn.modules import as_linear
from engram.nn.psi import Readout
from engram.nn.typed import typed


@HEADS.register(
    "hebbian-softmax",
    listed=False,
    settings="rare_until head_init",
    words="an output layer whose weights are means of activations while a class is rare",
)
class HebbianSoftmax(Head):
    """The Hebbian Softmax (Rae et al. 2018): while a class is rare, its weights are the mean of its activations.

        z = θ h        θ_c ← (1 − λ_c) θ_c + λ_c h̄_c,   λ_c = max(k_c / n_c, γ) while n_c < T, then 0

    h̄_c is the mean over the k_c samples of class c in a batch, and n_c counts all of them so far. It is written after
    the optimizer's step: what a batch leaves is kept until the next one, and until then added in every reading. No
    gradient flows through it.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        slowest_rate: γ in [0, 1].
        rare_until: T, the samples of a class after which only the gradient moves its weights.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = HebbianSoftmax(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    weight: nn.Parameter  # θ (C, m)
    count: Tensor  # n (C, 1)
    pending: Tensor  # h̄ (C, m) of the last batch
    added: Tensor  # k (C, 1) of the last batch; 0 when it is written
    until: Tensor  # T (), a tensor, so that models with different ones can be computed together

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        slowest_rate: float = 0.01,
        rare_until: float = 500.0,
        head_init: str = "linear",
    ):
        super().__init__(in_features, out_features)
        if not 0 <= slowest_rate <= 1:
            raise InputError(f"slowest_rate must lie in [0, 1], not {slowest_rate}")
        if rare_until < 0:
            raise InputError(f"rare_until must be at least 0, not {rare_until}")
        self.slowest_rate = slowest_rate
        self.rare_until = rare_until
        self.head_init = head_init
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.register_buffer("count", torch.empty(out_features, 1))
        self.register_buffer("pending", torch.empty(out_features, in_features))
        self.register_buffer("added", torch.empty(out_features, 1))
        self.register_buffer("until", torch.tensor(float(rare_until)), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as `head_init` says, and nothing written yet."""
        draw_slow_weights(self.weight, self.head_init)
        for buffer in (self.count, self.pending, self.added):
            nn.init.zeros_(buffer)

    @property
    def plastic_settings(self) -> dict[str, Any]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {"slowest_rate": self.slowest_rate, "rare_until": self.rare_until}

    def rate(self) -> Tensor:
        """λ (C, 1) at which the last batch is written; 0 for the classes that it did not have."""
        rate = writing.running_rate(self.added, self.count, self.slowest_rate)
        return writing.while_rare(rate, self.count, self.until)

    def in_force(self) -> Tensor:
        """θ (C, m) with the last batch written.

        Example:
            >>> logits = hidden @ head.in_force().T
        """
        rate = self.rate()
        return (1 - rate) * self.weight + rate * self.pending  # θ once: so its importances are products

    @torch.no_grad()
    def settle(self) -> None:
        """Write the last batch now, so that θ is what the layer computes with: before a penalty takes it as its anchor.

        Example:
            >>> head.settle()
            >>> penalty.consolidate(loader)
        """
        self.weight.copy_(self.in_force())
        self.added.zero_()

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to θ: 1 − λ."""
        return {"weight": (1 - self.rate()).expand_as(self.weight)}

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.in_force())

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.detach().copy_(self.in_force())
            sums, added = writing.batch_sums(hidden, target, self.out_features, ranks_of_call(self))
            self.pending.copy_(sums / added.clamp(min=1))
            self.added.copy_(added)
            self.count.copy_(self.count + added)
        return F.linear(hidden, self.weight)

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for use after training.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(self.in_force()).train(self.training)


class Keys(nn.Module):
    """ψ(h) = (h, tanh(V h)): the features, and the keys that fast weights are stored under.

    Args:
        in_features: m.
        num_keys: k.

    Example:
        >>> Keys(4, 2)(torch.rand(3, 4)).shape
        torch.Size([3, 6])
    """

    def __init__(self, in_features: int, num_keys: int):
        super().__init__()
        self.linear = nn.Linear(in_features, num_keys, bias=False)  # V

    def of(self, hidden: Tensor) -> Tensor:
        """f(h) = tanh(V h) (..., k)."""
        return torch.tanh(self.linear(hidden))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.cat([hidden, self.of(hidden)], dim=-1)


@HEADS.register(
    "fast-weights",
    listed=False,
    settings="num_keys head_init",
    words="an output layer with Hebbian fast weights beside the slow ones",
)
class FastWeights(Head):
    """Hebbian fast weights beside the slow ones (Munkhdalai & Trischler 2018).

        z = θ h + F f(h)        F_c = 1/n_c Σ_{y = c} f(h)        f(h) = tanh(V h)

    A batch is written before the logits, at rate 1, without anything learned but f: the loss is differentiated through
    what a batch writes, and the sums before it are constants. Reading the sum as a mean keeps F from growing with the
    length of the stream.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        num_keys: the width of f.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = FastWeights(512, 10)
        >>> logits = head(torch.rand(64, 512), torch.randint(10, (64,)))
    """

    sums = ("total", "count")
    class_rows = ("weight", "total", "count")
    weight: nn.Parameter  # θ (C, m)
    total: Tensor  # Σ f(h) (C, k)
    count: Tensor  # n (C, 1)

    @typed
    def __init__(self, in_features: int, out_features: int, *, num_keys: int = 64, head_init: str = "linear"):
        super().__init__(in_features, out_features)
        if num_keys < 1:
            raise InputError(f"num_keys must be at least 1, not {num_keys}")
        self.num_keys = num_keys
        self.head_init = head_init
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.keys = Keys(in_features, num_keys)
        self.register_buffer("total", torch.empty(out_features, num_keys, dtype=torch.float64))
        self.register_buffer("count", torch.empty(out_features, 1, dtype=torch.float64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Slow weights as `head_init` says, and no fast ones. V stays as it was drawn."""
        draw_slow_weights(self.weight, self.head_init)
        nn.init.zeros_(self.total)
        nn.init.zeros_(self.count)

    def fast_weights(self) -> Tensor:
        """F (C, k).

        Example:
            >>> logits = hidden @ head.weight.T + head.keys.of(hidden) @ head.fast_weights().T
        """
        return (self.total / self.count.clamp(min=1)).to(self.weight.dtype)

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight of h with respect to θ: 1."""
        return {"weight": torch.ones_like(self.weight)}

    def read(self, hidden: Tensor) -> Tensor:
        return F.linear(self.keys(hidden), torch.cat([self.weight, self.fast_weights()], dim=-1))

    def write_then_read(self, hidden: Tensor, target: Tensor) -> Tensor:
        keys = self.keys.of(hidden)
        sums, added = writing.batch_sums(keys, target, self.out_features, ranks_of_call(self))
        total, count = self.total + sums.double(), self.count + added.double()
        fast = (total / count.clamp(min=1)).to(keys.dtype)
        with torch.no_grad():
            self.total.copy_(total)
            self.count.copy_(count)
        return F.linear(hidden, self.weight) + F.linear(keys, fast)

    @torch.no_grad()
    def fold(self) -> Readout:
        """The same function as a linear layer behind ψ(h) = (h, f(h)).

        Example:
            >>> linear = head.fold().linear
        """
        linear = as_linear(torch.cat([self.weight, self.fast_weights()], dim=-1))
        return Readout(copy.deepcopy(self.keys), linear).train(self.training)
