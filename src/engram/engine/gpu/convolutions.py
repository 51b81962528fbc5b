"""Convolutions of a stack: a convolution, its LeakyReLU and 2×2 max-pooling as one layer, for all models at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engram.engine.inspection import Link
from engram.nn.modules import mapped


def fuse_convolutions(chain: Sequence[Link], kernels: ModuleType) -> None:
    """A convolution, its LeakyReLU and 2×2 max-pooling become one: the first computes all three.

    Args:
        chain: the layers of a model, in the order in which they are called.
        kernels: the Triton kernels of convolutions.

    Example:
        >>> fuse_convolutions(chain_of(model), kernels)
    """
    for links in zip(chain, chain[1:], chain[2:], strict=False):
        convolution, activation, pooling = (link.layer for link in links)
        if not all(link.sole for link in links):
            continue
        if _is_plain(convolution) and type(activation) is nn.LeakyReLU and _halves(pooling):
            assert isinstance(convolution, nn.Conv2d)
            convolution.forward = _block_of(convolution, activation.negative_slope, kernels)  # type: ignore[method-assign, assignment]
            activation.forward = pooling.forward = pass_on  # type: ignore[method-assign, assignment]


def _block_of(layer: nn.Conv2d, slope: float, kernels: ModuleType) -> Callable[[Tensor], Tensor]:
    return lambda entered: mapped(StackedBlock, entered, layer.weight, layer.bias, slope, kernels)


def _is_plain(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Conv2d
        and layer.padding in ((0, 0), 0)
        and layer.groups == 1
        and set(layer.stride) == set(layer.dilation) == {1}
        and layer.bias is not None
    )


def _halves(layer: nn.Module) -> bool:
    two = (2, (2, 2))
    return (
        type(layer) is nn.MaxPool2d
        and layer.kernel_size in two
        and layer.stride in two
        and layer.padding in (0, (0, 0))
        and layer.dilation in (1, (1, 1))
        and not layer.ceil_mode
        and not layer.return_indices
    )


class StackedBlock(torch.autograd.Function):
    """A convolution, LeakyReLU and 2×2 max-pooling for every model of a stack: (T, M, B, in, H, W) and its weights."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, weight: Tensor, bias: Tensor, slope: float, kernels: ModuleType) -> Tensor:
        axes, images = weight.shape[:2], channels_last(once(entered))  # of T trials, or of N models
        theta = channels_last(weight.flatten(0, 1))
        pooled, codes = kernels.convolve(images, theta, bias.flatten(0, 1).contiguous(), slope)
        ctx.save_for_backward(images, theta, codes)
        ctx.slope, ctx.kernels, ctx.axes = slope, kernels, axes
        return pooled.movedim(-1, -3).unflatten(0, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, theta, codes = ctx.saved_tensors
        delta = channels_last(gradients[0].flatten(0, 1))
        by_weight, by_bias = ctx.kernels.weight_slopes(delta, codes, images, theta, ctx.slope)
        by_entered = None
        if ctx.needs_input_grad[0]:
            shape = torch.Size((len(theta), *images.shape[1:]))
            by_entered = ctx.kernels.image_slopes(delta, codes, theta, shape, ctx.slope)
            by_entered = by_entered.movedim(-1, -3).unflatten(0, ctx.axes)
        by_weight, by_bias = by_weight.movedim(-1, -3).unflatten(0, ctx.axes), by_bias.unflatten(0, ctx.axes)
        return by_entered, by_weight, by_bias, None, None


def channels_last(maps: Tensor) -> Tensor:
    """(..., channels, H, W) as (..., H, W, channels) in memory.

    Args:
        maps: images, or weights.

    Example:
        >>> channels_last(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 32, 32, 3])
    """
    return maps.movedim(-3, -1).contiguous()


def pass_on(entered: Tensor) -> Tensor:
    """The forward pass of a layer whose work another one does.

    Args:
        entered: what enters it.

    Example:
        >>> pass_on(torch.ones(1))
        tensor([1.])
    """
    return entered


def once(tensor: Tensor) -> Tensor:
    """A tensor (T, M, ...) as (T, ...) if it is the same for all M, else as (N, ...).

    Args:
        tensor: of all models.

    Example:
        >>> once(torch.zeros(2, 1, 5).expand(2, 3, 5)).shape
        torch.Size([2, 5])
    """
    return tensor[:, 0] if tensor.stride(1) == 0 else tensor.flatten(0, 1)
