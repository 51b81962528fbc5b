"""Heads without a memory: the ordinary output layer, and the paper's baseline. They ignore the targets."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import HEADS
from engram.nn.classes import HEAD_INITS, draw_slow_weights, grow_rows
from engram.nn.distributed import ranks_of_call
from engram.nn.modules import as_linear, is_mapped, shown_settings
from engram.nn.typed import typed
from engram.nn.writing import batch_mean

STARTING_SIZE = 0.25  # s, the root mean square of the logits of a scaled head at the start


@HEADS.register(
    "linear",
    baseline=True,
    settings={"bias": "head_bias", "head_init": "head_init", "head_gain": "head_gain"},
    words="an ordinary linear output layer",
)
class LinearSoftmax(nn.Linear):
    """The ordinary softmax layer:  z = θ h + b, by default without b, as the paper's layer has none.

    With head_init="scaled" the first training batch decides how large θ is at the start, so that the logits have the
    same size whatever that of the features:

        θ ← θ · s g / rms(θ h),  s = 0.25,  g = head_gain

    The larger θ is, the less the features move while a task is learned (Chizat et al. 2019), and the less is forgotten.
    `scale` does it before the first batch, which a compiled model needs.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        bias: whether there is a b.
        head_init: how θ starts: "linear", "published" (`engram.nn.classes.draw_slow_weights`) or "scaled".
        head_gain: a factor of the range of θ at the start.

    Example:
        >>> logits = LinearSoftmax(512, 10)(torch.rand(64, 512))
    """

    factor: Tensor  # of a scaled head

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
        check_choice("head_init", head_init, (*HEAD_INITS, "scaled"))
        self.head_init, self.head_gain = head_init, head_gain  # before PyTorch's layer draws its weights
        super().__init__(in_features, out_features, bias=bias)
        if head_init == "scaled":
            self.register_buffer("factor", torch.zeros(()))  # by which θ was multiplied; 0 before

    def reset_parameters(self) -> None:
        """θ as `head_init` says, and b as in `torch.nn.Linear`."""
        self._waits = self.head_init == "scaled"
        if "factor" in self._buffers:
            self.factor.zero_()
        draw_slow_weights(self.weight, "linear" if self._waits else self.head_init, self.head_gain)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    @property
    def waits(self) -> bool:
        """Whether θ waits for features that say how large it is. Copied tensors bring the factor of their head."""
        return self._waits and not self.factor

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        """Logits (B, C) of hidden activations (B, m); the targets are ignored."""
        if self._waits and self.training:
            if torch.compiler.is_compiling() or is_mapped():
                raise InputError("call head.scale(features) before a scaled head is compiled or mapped")
            self._waits = self.waits
            if self._waits:
                self.scale(hidden)
        return super().forward(hidden)

    @torch.no_grad()
    def scale(self, hidden: Tensor) -> None:
        """Let features decide how large θ is; the first training batch does, if this is not called before.

        Args:
            hidden: features of some samples (B, m).

        Example:
            >>> head = LinearSoftmax(512, 10, head_init="scaled")
            >>> head.scale(torch.rand(64, 512))
        """
        if self.head_init != "scaled":
            raise InputError("features decide how large the weights are only with head_init='scaled'")
        if not isinstance(self.weight, nn.Parameter):
            raise InputError("call head.scale(features) before the weight of a scaled head is replaced or parametrized")
        # Half precision cannot hold the squares, and autocast would keep a copy of θ as it was.
        dtype = torch.promote_types(self.weight.dtype, torch.float32)
        with torch.autocast(hidden.device.type, enabled=False):
            squares = F.linear(hidden.to(dtype), self.weight.to(dtype)).square().mean(dim=-1).flatten()
        size = float(batch_mean(squares, ranks_of_call(self)).sqrt())
        factor = STARTING_SIZE * self.head_gain / size if size > 0 else math.inf
        if not (math.isfinite(size) and factor <= torch.finfo(self.weight.dtype).max):
            raise InputError("a scaled head cannot start from features that are all zero, NaN or infinite")
        self.weight.mul_(factor)
        self.factor.copy_(factor * torch.where(self.factor == 0, 1, self.factor))
        self._waits = False

    def _load_from_state_dict(self, state: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state, prefix, *arguments)
        if self.head_init == "scaled":
            if f"{prefix}weight" in state and f"{prefix}factor" not in state:
                self.factor.fill_(1)  # weights of another layer stay as they are
            self._waits = float(self.factor) == 0

    def grow(self, out_features: int) -> None:
        """Add classes, as `DHPSoftmax.grow` does.

        Args:
            out_features: the new number of classes.

        Example:
            >>> head.grow(12)
        """
        waits, before = self.waits, self.out_features
        grow_rows(self, out_features)
        if self.head_init == "scaled" and not waits:
            with torch.no_grad():
                self.weight[before:].mul_(self.factor)
        self._waits = waits

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
