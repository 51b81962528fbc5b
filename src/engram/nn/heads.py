"""The heads that the DHP Softmax is compared with. Each takes the targets too, and ignores them."""

from __future__ import annotations

import builtins
import inspect
import math
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError, check_choice
from engram.common.registry import HEADS
from engram.nn.dhp import DHPSoftmax, plastic_weight
from engram.nn.growth import grow_rows


def list(pattern: str = "*") -> builtins.list[str]:
    """The names of the heads that match a pattern.

    Args:
        pattern: as in a shell: "d*".

        engram.heads.list()  # ["dhp", "matched", "plain"]
    """
    return [name for name in HEADS.names() if fnmatchcase(name, pattern)]


def create(name: str, in_features: int, out_features: int, **settings: Any) -> nn.Module:
    """A head by its name.

    Args:
        name: one of `list()`.
        in_features: the width of the features.
        out_features: the number of classes.
        settings: of the head, by name.

        engram.heads.create("dhp", 512, 10, eta=1e-4)
    """
    make = HEADS[name].make
    known = [p.name for p in inspect.signature(make).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for setting in settings:
        check_choice(f"setting of the head {name},", setting, known)
    return make(in_features, out_features, **settings)


@HEADS.register("plain", baseline=True)
class PlainSoftmax(nn.Linear):
    """The ordinary softmax layer, without bias:  z = θ h."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return super().forward(hidden)

    def grow(self, out_features: int) -> None:
        """Take up more classes, as `DHPSoftmax.grow` does."""
        grow_rows(self, out_features)

    def weight_slopes(self) -> dict[str, Tensor]:
        """Derivative of the weight in force by each parameter of its shape."""
        return {"weight": torch.ones_like(self.weight)}


@HEADS.register("matched", baseline=True, settings={"trace": "baseline_trace"})
class MatchedSoftmax(DHPSoftmax):
    """The paper's baseline, as large as the plastic layer by an extra set of slow weights:  z = (θ + c θ′) h.

    Both sets learn, so the layer's effective learning rate is 1 + c² times that of a plain one: twice, for the paper's
    c = 1. It is the plastic layer with a constant trace that is never written (η = 0): so the two have tensors of the
    same shapes, and a stack of models trains them as one.

    Args:
        trace: c. θ′ starts smaller by as much, so that the initial weights do not depend on it.
    """

    plastic_parameters = ()  # θ′ is as slow as θ

    def __init__(self, in_features: int, out_features: int, *, trace: float = 1.0):
        if not trace > 0:
            raise InputError(f"trace must be above 0, not {trace}")
        self.constant = trace
        super().__init__(in_features, out_features, eta=0)
        self.eta.requires_grad_(False)

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.extra):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        with torch.no_grad():
            self.extra.div_(self.constant)
        nn.init.zeros_(self.eta)
        nn.init.constant_(self.hebb, self.constant)

    @property
    def extra(self) -> nn.Parameter:
        """θ′, in the place of the plastic layer's α."""
        return self.alpha

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return F.linear(hidden, plastic_weight(self.weight, self.extra, self.hebb))

    def dynamics(self) -> dict[str, Tensor]:
        """It has none."""
        return {}

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}"
