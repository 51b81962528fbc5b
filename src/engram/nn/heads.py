"""Heads by name; those that the DHP Softmax is compared with, which ignore the targets; and two of its forms."""

from __future__ import annotations

import builtins
import inspect
import math
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import HEADS
from engram.nn.classes import draw_slow_weights, grow_rows
from engram.nn.dhp import DHPSoftmax
from engram.nn.modules import as_linear, shown_settings


def list(pattern: str = "*") -> builtins.list[str]:
    """The names of the heads that match a pattern.

    Args:
        pattern: as in a shell: "d*".

    Example:
        >>> engram.heads.list("d*")
        ['dhp', 'dhp-uniform']
    """
    return sorted(name for name in HEADS.names() if fnmatchcase(name, pattern))


def create(name: str, in_features: int, out_features: int, **settings: Any) -> nn.Module:
    """A head by its name.

    Args:
        name: one of `list()`.
        in_features: the width of the features.
        out_features: the number of classes.
        settings: of the head, by name.

    Example:
        >>> head = engram.heads.create("dhp", 512, 10, eta=1e-4)
    """
    make = HEADS[name].make
    parameters = inspect.signature(make).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):  # a function that passes them on
        known += HEADS.facts(name).get("settings", {})
    only = f"only {', '.join(known)}" if known else "and none at all"
    for setting in settings:
        if setting not in known:
            raise InputError(f"the head {name} has no setting {setting!r}, {only}")
    for what, size in (("features", in_features), ("classes", out_features)):
        if isinstance(size, bool) or not isinstance(size, Integral) or size < 1:
            raise InputError(f"a head needs a whole number of {what}, at least 1, not {size!r}")
    if settings.get("random_window") and "random_features" in known and not settings.get("random_features"):
        raise InputError("random_window has no effect without random_features: leave it out, or give both")
    return make(in_features, out_features, **settings)


@HEADS.register("linear", baseline=True, settings={"bias": "head_bias", "head_init": "head_init"})
class LinearSoftmax(nn.Linear):
    """The ordinary softmax layer:  z = θ h + b, by default without b, as the paper's layer has none.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        bias: whether there is a b.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> logits = LinearSoftmax(512, 10)(torch.rand(64, 512))
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, head_init: str = "linear"):
        self.head_init = head_init  # before PyTorch's layer draws its weights
        super().__init__(in_features, out_features, bias=bias)

    def reset_parameters(self) -> None:
        """θ as `head_init` says, and b as in `torch.nn.Linear`."""
        draw_slow_weights(self.weight, self.head_init)
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
        return super().extra_repr() + ("" if self.head_init == "linear" else f", head_init={self.head_init!r}")


@HEADS.register("matched", baseline=True, settings={"trace": "baseline_trace", "head_init": "head_init"})
class MatchedSoftmax(nn.Module):
    """The paper's baseline, as large as the plastic layer by a second set of slow weights:  z = (θ + c θ′) h.

    Both sets learn, so the layer's effective learning rate is 1 + c² times that of a plain one: twice, for the paper's
    c = 1.

    Args:
        in_features: number m of hidden units.
        out_features: number C of classes.
        trace: c > 0. θ′ starts smaller by this factor, so that the initial weights do not depend on it.
        head_init: how θ and c θ′ start: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> logits = MatchedSoftmax(512, 10)(torch.rand(64, 512))
    """

    plastic_parameters = ()  # θ′ is as slow as θ

    def __init__(self, in_features: int, out_features: int, *, trace: float = 1.0, head_init: str = "linear"):
        super().__init__()
        if not trace > 0:
            raise InputError(f"trace must be above 0, not {trace}")
        if in_features < 1 or out_features < 1:
            raise InputError(f"a layer needs at least one feature and one class, not {in_features} and {out_features}")
        self.in_features = in_features
        self.out_features = out_features
        self.trace = trace
        self.head_init = head_init
        self.weight = nn.Parameter(torch.empty(out_features, in_features))  # θ
        self.extra = nn.Parameter(torch.empty(out_features, in_features))  # θ′
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Both sets of weights as `head_init` says, and the second divided by c."""
        for parameter in (self.weight, self.extra):
            draw_slow_weights(parameter, self.head_init)
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


@HEADS.register(
    "dhp-uniform",
    listed=False,
    settings=[
        "eta",
        "eta_range",
        "alpha_init",
        "learn_eta",
        "trace_gradient",
        "trace_scale",
        "trace_centred",
        "head_init",
    ],
)
def dhp_uniform(in_features: int, out_features: int, **settings: Any) -> DHPSoftmax:
    """The DHP Softmax with one plasticity coefficient that all synapses share:  z = (θ + α Hebb) h,  α ().

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        settings: those of `DHPSoftmax`, without `alpha`.

    Example:
        >>> head = engram.heads.create("dhp-uniform", 512, 10)
    """
    return DHPSoftmax(in_features, out_features, alpha="uniform", **settings)


@HEADS.register(
    "steady",
    listed=False,
    settings=["alpha", "head_init"],
    preset={"protect": "in-force"},
)
def steady(
    in_features: int,
    out_features: int,
    *,
    eta: float = 1e-4,
    alpha: str = "synapse",
    alpha_init: float = 0.1,
    trace_scale: float = 2.0,
    head_init: str = "linear",
) -> DHPSoftmax:
    """The steady trace: the form of the DHP Softmax in which it helps, with a penalty that protects what is in force.

        z = (θ + α s Hebb / rms(Hebb_c)) h        Hebb_c ← (1 − η) Hebb_c + η (h̃_c − mean over classes of h̃)

    η is not learned, and no gradient flows through what a batch writes.

    Args:
        in_features: number m of features.
        out_features: number C of classes.
        eta: η, fixed.
        alpha: "synapse" or "uniform".
        alpha_init: α starts at alpha_init · U(0, 1).
        trace_scale: s, the root mean square at which the trace of each class is read.
        head_init: how θ starts: "linear" or "published" (`engram.nn.classes.draw_slow_weights`).

    Example:
        >>> head = engram.heads.create("steady", 512, 10)
    """
    return DHPSoftmax(
        in_features,
        out_features,
        eta=eta,
        alpha=alpha,
        alpha_init=alpha_init,
        learn_eta=False,
        trace_gradient=False,
        trace_scale=trace_scale,
        trace_centred=True,
        head_init=head_init,
    )
