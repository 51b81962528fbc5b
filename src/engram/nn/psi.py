"""ψ, as a module: what a head with a memory uses of the features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.nn import memory
from engram.nn.modules import shown_settings
from engram.nn.typed import typed


class Psi(nn.Module):
    """ψ: what a memory head uses of the features. With all settings left out, the features as they are.

    Args:
        in_features: m.
        normalised: divide each sample's features by their norm.
        random_features: the number k of random ReLU features, ψ(h) = max(h R, 0) with R from N(0, 1/m); 0 for none.
        random_window: how many neighbouring features of h each random feature sees, which is better where neighbours
            belong together, as in images; 0 for all m. The windows are spread evenly over h.
        top_k: keep this many of the largest features of each sample; 0 for all.

    Example:
        >>> Psi(4, random_features=100)(torch.rand(2, 4)).shape
        torch.Size([2, 100])
    """

    projection: Tensor | None

    @typed
    def __init__(
        self,
        in_features: int,
        *,
        normalised: bool = False,
        random_features: int = 0,
        random_window: int = 0,
        top_k: int = 0,
    ):
        super().__init__()
        counts = {"random_features": random_features, "random_window": random_window, "top_k": top_k}
        for name, count in counts.items():
            if count < 0:
                raise InputError(f"{name} must be a whole number of at least 0, not {count!r}")
        memory.check_fits(4 * in_features * random_features, f"a projection to {random_features} random features")
        self.out_features = random_features or in_features
        if top_k > self.out_features:
            raise InputError(f"top_k cannot be {top_k}: there are {self.out_features} features")
        self.in_features = in_features
        self.normalised = normalised
        self.random_features = random_features
        self.random_window = random_window
        self.top_k = top_k
        window = min(random_window or in_features, in_features)
        drawn = draw_projection(in_features, random_features, window) if random_features else None
        self.register_buffer("projection", drawn)

    @property
    def is_identity(self) -> bool:
        return self.projection is None and not self.normalised and not self.top_k

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = memory.normalise(hidden) if self.normalised else hidden
        hidden = hidden if self.projection is None else random_relu(hidden, self.projection)
        return memory.top_k(hidden, self.top_k) if self.top_k else hidden

    def extra_repr(self) -> str:
        return shown_settings(self)


def random_relu(hidden: Tensor, projection: Tensor) -> Tensor:
    """ψ(h) = max(h R, 0), with a random R that never changes.

    Args:
        hidden: h (..., m).
        projection: R (m, k).

    Example:
        >>> random_relu(torch.tensor([1.0, -1.0]), torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        tensor([1., 0.])
    """
    return F.relu(hidden @ projection)


def draw_projection(num_inputs: int, num_features: int, window: int) -> Tensor:
    """R (m, k) from N(0, 1/w) where a random feature sees an input, and 0 elsewhere: each sees w neighbouring inputs.

    Args:
        num_inputs: m.
        num_features: k.
        window: w, from 1 to m.

    Example:
        >>> (draw_projection(4, 3, window=2) != 0).int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [0, 1, 1],
                [0, 0, 1]], dtype=torch.int32)
    """
    drawn = torch.randn(num_inputs, num_features) / window**0.5
    if window == num_inputs:
        return drawn
    first = torch.linspace(0, num_inputs - window, num_features).round()
    place = torch.arange(num_inputs).unsqueeze(-1) - first  # of each input in each window
    return drawn * ((place >= 0) & (place < window))


class Readout(nn.Module):
    """What a head with a ψ folds to: ψ, then a linear layer. It accepts a target, as the head did, and ignores it.

    Args:
        psi: from features to what is used of them.
        linear: from there to logits.

    Example:
        >>> Readout(Psi(4, top_k=2), nn.Linear(4, 3))(torch.rand(2, 4)).shape
        torch.Size([2, 3])
    """

    def __init__(self, psi: nn.Module, linear: nn.Linear):
        super().__init__()
        self.psi = psi
        self.linear = linear

    def forward(self, hidden: Tensor, target: Tensor | None = None) -> Tensor:
        return self.linear(self.psi(hidden))
