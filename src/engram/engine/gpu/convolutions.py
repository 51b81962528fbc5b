"""Convolutions of a stack: a convolution, its LeakyReLU and 2×2 max-pooling as one layer, for all models at once.

A convolution is a product of its weights with the patches of its inputs, to which a one is added for the bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engram.engine.inspection import Link
from engram.nn.modules import mapped


def fuse_convolutions(chain: Sequence[Link], patches: ModuleType) -> None:
    """A convolution, its LeakyReLU and 2×2 max-pooling become one: the first computes all three.

    Args:
        chain: the layers of a model, in the order in which they are called.
        patches: the Triton kernels of convolutions.

    Example:
        >>> fuse_convolutions(chain_of(model), patches)
    """
    for links in zip(chain, chain[1:], chain[2:], strict=False):
        convolution, activation, pooling = (link.layer for link in links)
        if not all(link.sole for link in links):
            continue
        if _is_plain(convolution) and type(activation) is nn.LeakyReLU and _halves(pooling):
            assert isinstance(convolution, nn.Conv2d)
            convolution.forward = _block_of(convolution, activation.negative_slope, patches)  # type: ignore[method-assign, assignment]
            activation.forward = pooling.forward = pass_on  # type: ignore[method-assign, assignment]


def _block_of(layer: nn.Conv2d, slope: float, patches: ModuleType) -> Callable[[Tensor], Tensor]:
    return lambda entered: mapped(StackedBlock, entered, layer.weight, layer.bias, slope, patches)


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
    def forward(ctx: Any, entered: Tensor, weight: Tensor, bias: Tensor, slope: float, patches: ModuleType) -> Tensor:
        trials, models, channels = weight.shape[:3]
        kernel = (weight.shape[-2], weight.shape[-1])
        images = once(entered).contiguous()  # T batches of images, or N
        columns = patches.unfold(images, kernel)
        room = columns.shape[1] - weight[0, 0, 0].numel() - 1
        theta = torch.cat([weight.flatten(3), bias[..., None], bias.new_zeros(*bias.shape, room)], dim=-1)
        theta = theta.flatten(0, 1)  # (N, out, rows)
        size = [side - length + 1 for side, length in zip(images.shape[-2:], kernel, strict=True)]
        maps = torch.bmm(theta.reshape(len(images), -1, theta.shape[-1]), columns)
        shape = (trials * models, channels, images.shape[1], *size)
        pooled, winners = patches.pool(maps.view(shape), slope)
        ctx.save_for_backward(columns, theta, pooled, winners)
        ctx.shape, ctx.kernel, ctx.slope, ctx.patches = shape, kernel, slope, patches
        ctx.entered, ctx.weight = entered.shape, weight.shape
        return pooled.unflatten(0, (trials, models))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        columns, theta, pooled, winners = ctx.saved_tensors
        delta = ctx.patches.unpool(gradients[0].flatten(0, 1), pooled, winners, ctx.shape, ctx.slope)
        delta = delta.view(*ctx.shape[:2], -1)  # (N, out, B · H′ · W′)
        slopes = torch.bmm(delta.view(len(columns), -1, delta.shape[-1]), columns.mT)
        slopes = slopes.view(*ctx.weight[:3], -1)
        rows = ctx.weight[3] * ctx.kernel[0] * ctx.kernel[1]
        by_entered = None
        if ctx.needs_input_grad[0]:
            by_columns = torch.bmm(theta.mT, delta)
            shape = torch.Size((len(theta), *ctx.entered[2:]))
            by_entered = ctx.patches.fold(by_columns, shape, ctx.kernel).view(ctx.entered)
        return by_entered, slopes[..., :rows].reshape(ctx.weight), slopes[..., rows], None, None


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
