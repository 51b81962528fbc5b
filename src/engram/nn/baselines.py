"""The heads that the DHP Softmax is compared with. They remember nothing, and ignore the targets."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn.classes import draw_slow_weights, grow_rows
from engram.nn.modules import as_linear, shown_settings
from engram.nn.typed import typed


@HEADS.register(
    "linear",
    baseline=True,
    settings={"bias": "head_bias", "head_init": "head_init", "head_gain": "head_gain"},
    words="an ordinary linear output layer",
)
class LinearSoftmax(nn.Linear):
    """The ordinary softmax layer:  z = θ h + b, by default without b, as the paper's layer has none.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        bias: whether there is a b.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).
        head_gain: a factor of the range of θ at the start.

    Example:
        >>> logits = LinearSoftmax(512, 10)(torch.rand(64, 512))
    """

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        head_init: str = "linear",
        head_gain: float = 1.0,
    ):
        self.head_init, self.head_gain = head_init, head_gain  # before PyTorch's layer draws its weights
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """θ as `head_init` says, and b as in `torch.nn.Linear`."""
        draw_slow_weights(self.weight, self.head_init, self.head_gain)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (B, C) of hidden activations (B, m); the targets are ignored."""
        return super().forward(hidden)

    def grow(self, out_features: int) -> None:
        """Add classes, as `DHPSoftmax.grow` does.

        Args:
            out_features: the new number of classes.

        Example:
            >>> head.grow(12)
        """
        grow_rows(self, out_features)

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to each parameter of its shape: 1 for θ.

        Example:
            >>> LinearSoftmax(4, 3).weight_slopes()["weight"].unique()
            tensor([1.])
        """
        return {"weight": torch.ones_like(self.weight)}

    def fold(self) -> nn.Linear:
        """A plain layer with copies of its weights, as every head gives one for use after training.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(self.weight, self.bias).train(self.training)

    def extra_repr(self) -> str:
        return shown_settings(self, bias=self.bias is not None)


@HEADS.register(
    "matched",
    baseline=True,
    settings={"trace": "baseline_trace", "head_init": "head_init", "head_gain": "head_gain"},
    words="an output layer with two sets of slow weights, as large as the DHP Softmax",
)
class MatchedSoftmax(nn.Module):
    """The paper's baseline, as large as the plastic layer by a second set of slow weights:  z = (θ + c θ′) h.

    Both sets learn, so the layer's effective learning rate is 1 + c² times that of a plain one: twice, for the paper's
    c = 1.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        trace: c > 0. θ′ starts smaller by this factor, so that the initial weights do not depend on it.
        head_init: how θ and c θ′ start: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).
        head_gain: a factor of their range at the start.

    Example:
        >>> logits = MatchedSoftmax(512, 10)(torch.rand(64, 512))
    """

    plastic_parameters = ()  # θ′ is as slow as θ

    @typed
    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        trace: float = 1.0,
        head_init: str = "linear",
        head_gain: float = 1.0,
    ):
        super().__init__()
        if trace <= 0:
            raise InputError(f"trace must be above 0, not {trace}")
        if in_features < 1 or out_features < 1:
            raise InputError(f"a layer needs at least one feature and one class, not {in_features} and {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.trace = trace
        self.head_init, self.head_gain = head_init, head_gain
        self.weight = nn.Parameter(torch.empty(out_features, in_features))  # θ
        self.extra = nn.Parameter(torch.empty(out_features, in_features))  # θ′
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both sets of weights as `head_init` says, and the second divided by c."""
        for parameter in (self.weight, self.extra):
            draw_slow_weights(parameter, self.head_init, self.head_gain)
        with torch.no_grad():
            self.extra.div_(self.trace)

    @property
    def plastic_settings(self) -> dict[str, float]:
        """The settings that change what the layer computes: a saved layer fits only a layer with the same ones."""
        return {"trace": self.trace}

    def in_force(self) -> Tensor:
        """θ + c θ′, the weight that the layer computes with.

        Example:
            >>> logits = hidden @ head.in_force().T
        """
        return torch.add(self.weight, self.extra, alpha=self.trace)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (B, C) of hidden activations (B, m); the targets are ignored."""
        return F.linear(hidden, self.in_force())

    def grow(self, out_features: int) -> None:
        """Add classes, as `DHPSoftmax.grow` does.

        Args:
            out_features: the new number of classes.

        Example:
            >>> head.grow(12)
        """
        grow_rows(self, out_features)

    def weight_slopes(self) -> dict[str, Tensor]:
        """The derivative of the weight in force with respect to each parameter of its shape: 1 for θ, c for θ′.

        Example:
            >>> MatchedSoftmax(4, 3, trace=2.0).weight_slopes()["extra"].unique()
            tensor([2.])
        """
        return {"weight": torch.ones_like(self.weight), "extra": torch.full_like(self.extra, self.trace)}

    @torch.no_grad()
    def fold(self) -> nn.Linear:
        """The same function as a plain layer, for use after training.

        Example:
            >>> linear = head.fold()
        """
        return as_linear(self.in_force()).train(self.training)

    def extra_repr(self) -> str:
        return shown_settings(self)
