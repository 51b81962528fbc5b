"""The heads that the DHP Softmax is compared with. Each takes the targets too, and ignores them."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PlainSoftmax(nn.Linear):
    """The ordinary softmax layer, without bias:  z = θ h."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__(in_features, out_features, bias=False)

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return super().forward(hidden)

    def weight_slopes(self) -> dict[str, Tensor]:
        """Derivative of the weight in force by each parameter of its shape."""
        return {"weight": torch.ones_like(self.weight)}


class MatchedSoftmax(nn.Module):
    """The paper's baseline, as large as the plastic layer by an extra set of slow weights:  z = (θ + θ′) h.

    Both sets learn, so the layer's effective learning rate is twice that of a plain one.
    """

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.extra = nn.Parameter(torch.empty(out_features, in_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in (self.weight, self.extra):
            nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return F.linear(hidden, self.weight + self.extra)

    def weight_slopes(self) -> dict[str, Tensor]:
        """Derivative of the weight in force by each parameter of its shape."""
        return {"weight": torch.ones_like(self.weight), "extra": torch.ones_like(self.extra)}
