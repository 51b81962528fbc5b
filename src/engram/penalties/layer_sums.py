"""Sums over samples of a function of the gradients of one layer, in closed form."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.penalties.step import at_least_single

Function = Callable[[Tensor], Tensor]  # torch.square or torch.abs: f(ab) = f(a) f(b)


@torch.no_grad()
def layer_sums(layer: nn.Module, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    """Σ_b function(gradient) of one layer's parameters, from its inputs x and its outputs' gradients d.

    Args:
        layer: a linear layer, a convolution, or a head with `weight_slopes`.
        entered: x, one row for each sample.
        delta: d, one row for each sample.
        function: torch.square or torch.abs.

    Example:
        >>> sums = layer_sums(nn.Linear(3, 2), torch.ones(4, 3), torch.ones(4, 2), torch.square)["weight"]
    """
    entered, delta = (tensor.to(at_least_single(tensor.dtype)) for tensor in (entered, delta))
    if isinstance(layer, nn.Conv2d):
        return _convolution_sums(layer, entered, delta, function)
    weight = function(delta).T @ function(entered)  # (B, out)ᵀ (B, in) -> (out, in)
    slopes = getattr(layer, "weight_slopes", None)
    sums = {"weight": weight} if slopes is None else {n: function(slope) * weight for n, slope in slopes().items()}
    if isinstance(layer, nn.Linear):
        sums["bias"] = function(delta).sum(dim=0)
    return sums


def _convolution_sums(layer: nn.Conv2d, entered: Tensor, delta: Tensor, function: Function) -> dict[str, Tensor]:
    assert not isinstance(layer.padding, str)  # `_has_products` saw to that
    patches = patches_of(layer, entered)  # (B, in·k·k, L)
    patches = patches.unflatten(1, (layer.groups, -1))  # (B, G, in/G·k·k, L)
    d = delta.flatten(2).unflatten(1, (layer.groups, -1))  # (B, G, out/G, L)
    per_sample = torch.einsum("bgol,bgil->bgoi", d, patches)
    return {
        "weight": function(per_sample).sum(dim=0).reshape(layer.weight.shape),
        "bias": function(delta.flatten(2).sum(dim=2)).sum(dim=0),
    }


def patches_of(layer: nn.Conv2d, entered: Tensor) -> Tensor:
    """What the kernel of a convolution sees, a column for each place.

    As a view that is copied once: `F.unfold` calls a GPU once for every sample, which takes most of the time.
    """
    assert not isinstance(layer.padding, str)
    if layer.dilation != (1, 1):
        return F.unfold(entered, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    (rows, columns), (down, across) = layer.kernel_size, layer.stride
    padded = F.pad(entered, (layer.padding[1], layer.padding[1], layer.padding[0], layer.padding[0]))
    windows = padded.unfold(2, rows, down).unfold(3, columns, across)  # (B, in, H′, W′, k, k)
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(entered), -1, windows.shape[2] * windows.shape[3])
