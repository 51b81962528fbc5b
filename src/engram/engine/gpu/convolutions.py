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
    for first in range(len(chain) - 2):
        if not _is_block(chain[first : first + 3]):
            continue
        convolution, activation, pooling = (link.layer for link in chain[first : first + 3])
        assert isinstance(convolution, nn.Conv2d)
        assert isinstance(activation, nn.LeakyReLU)
        inner = _is_block(chain[first + 3 : first + 6])
        convolution.forward = _block_of(convolution, activation.negative_slope, kernels, inner)  # type: ignore[method-assign, assignment]
        activation.forward = pooling.forward = pass_on  # type: ignore[method-assign, assignment]


def _is_block(links: Sequence[Link]) -> bool:
    if len(links) < 3 or not all(link.sole for link in links):
        return False
    convolution, activation, pooling = (link.layer for link in links)
    return _is_plain(convolution) and type(activation) is nn.LeakyReLU and _halves(pooling)


def _block_of(layer: nn.Conv2d, slope: float, kernels: ModuleType, inner: bool) -> Callable[[Tensor], Tensor]:
    return lambda entered: mapped(StackedBlock, entered, layer.weight, layer.bias, slope, kernels, inner)


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
    """A convolution, LeakyReLU and 2×2 max-pooling for every model of a stack: (T, M, B, in, H, W) and its weights.

    Where products may be in TF32, those of convolutions are in bfloat16, and so is what one block hands to the next
    (`inner`) and gets back from it: a patch is read many times, and half the bytes take half the time.
    """

    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, weight: Tensor, bias: Tensor, slope: float, kernels: ModuleType, inner: bool
    ) -> Tensor:
        dtype = product_type(weight)
        axes, images = weight.shape[:2], channels_last(once(entered), dtype, padded=True)  # of T trials, or of N models
        theta = channels_last(weight.flatten(0, 1), dtype, padded=True)
        pooled, codes = kernels.convolve(images, theta, bias.flatten(0, 1).contiguous(), slope, inner)
        ctx.save_for_backward(images, theta, codes)
        ctx.slope, ctx.kernels, ctx.axes, ctx.channels = slope, kernels, axes, weight.shape[3]
        return (pooled.movedim(-1, -3) if inner else pooled).unflatten(0, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        images, theta, codes = ctx.saved_tensors
        delta = channels_last(gradients[0].flatten(0, 1), theta.dtype)
        slopes = ctx.kernels.weight_slopes(delta, codes, images, theta, ctx.channels, ctx.slope)
        by_weight, by_bias = (slope.unflatten(0, ctx.axes) for slope in slopes)
        by_entered = None
        if ctx.needs_input_grad[0]:
            shape = torch.Size((len(theta), *images.shape[1:]))
            by_entered = ctx.kernels.image_slopes(delta, codes, theta, shape, ctx.slope)[..., : ctx.channels]
            by_entered = by_entered.movedim(-1, -3).unflatten(0, ctx.axes)
        return by_entered, by_weight, by_bias, None, None, None


def product_type(weight: Tensor) -> torch.dtype:
    """In which convolutions multiply: bfloat16 where TF32 is allowed, on GPUs that have both.

    Args:
        weight: of a convolution.

    Example:
        >>> product_type(torch.zeros(1))
        torch.float32
    """
    has_both = weight.is_cuda and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return torch.bfloat16 if has_both and torch.backends.cuda.matmul.allow_tf32 else weight.dtype


def channels_last(maps: Tensor, dtype: torch.dtype, padded: bool = False) -> Tensor:
    """(..., channels, H, W) as (..., H, W, channels) in memory.

    Args:
        maps: images, or weights.
        dtype: of what is returned.
        padded: with a fourth channel of zeros if there are three, since four numbers can be read at once.

    Example:
        >>> channels_last(torch.zeros(2, 3, 32, 32), torch.float32).shape
        torch.Size([2, 32, 32, 3])
    """
    turned = maps.movedim(-3, -1)
    if not (padded and turned.shape[-1] == 3):
        return turned.to(dtype, memory_format=torch.contiguous_format).contiguous()
    wider = turned.new_zeros(*turned.shape[:-1], 4, dtype=dtype)
    wider[..., :3] = turned
    return wider


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
