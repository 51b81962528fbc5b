"""Layers that a stack runs in a way of its own; all others go through `torch.func.vmap` as they are.

Within the mapping, each of these layers is called once for the whole stack, with the models' axis in front.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


class Tape:
    """What entered each factored layer in the last step, and the loss's gradient by what came out of it."""

    def __init__(self) -> None:
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}


def prepare(model: nn.Module, factored: Sequence[str], kernels: ModuleType | None) -> Tape:
    """Make a model's layers ready to be mapped over a stack; only for mapping, from then on."""
    tape = Tape()
    for name in factored:
        layer = model.get_submodule(name)
        layer.forward = _linear_of(layer, tape, name)  # type: ignore[method-assign, assignment]
    for layer in model.modules():
        if kernels is not None and isinstance(layer, nn.Conv2d) and kernels.fits_convolution(layer):
            layer.forward = _convolution_of(layer, kernels)  # type: ignore[method-assign, assignment]
    return tape


def _linear_of(layer: nn.Module, tape: Tape, name: str) -> Callable[[Tensor], Tensor]:
    def forward(entered: Tensor) -> Tensor:
        return MappedLinear.apply(entered, layer.weight, layer.bias, tape, name)  # type: ignore[no-any-return]

    return forward


def _convolution_of(layer: nn.Conv2d, kernels: ModuleType) -> Callable[[Tensor], Tensor]:
    def forward(entered: Tensor) -> Tensor:
        return MappedConvolution.apply(entered, layer.weight, layer.bias, layer.padding, kernels)  # type: ignore[no-any-return]

    return forward


class StackedLinear(torch.autograd.Function):
    """y = x θᵀ + b for every model of a stack; θ's gradient stays on the tape as its factors."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, weight: Tensor, bias: Tensor | None, tape: Tape, name: str) -> Tensor:
        ctx.save_for_backward(entered, weight)
        ctx.tape, ctx.name, ctx.has_bias = tape, name, bias is not None
        if bias is None:
            return torch.bmm(entered, weight.mT)
        return torch.baddbmm(bias[:, None, :], entered, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (delta,) = gradients
        entered, weight = ctx.saved_tensors
        ctx.tape.factors[ctx.name] = (entered, delta)
        by_entered = torch.bmm(delta, weight) if ctx.needs_input_grad[0] else None
        return by_entered, None, delta.sum(dim=1) if ctx.has_bias else None, None, None


class StackedConvolution(torch.autograd.Function):
    """A convolution with weights of its own for every model of a stack."""

    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, weight: Tensor, bias: Tensor | None, padding: tuple[int, int], kernels: ModuleType
    ) -> Tensor:
        entered, weight = entered.contiguous(), weight.contiguous()
        ctx.save_for_backward(entered, weight)
        ctx.padding, ctx.kernels, ctx.has_bias = padding, kernels, bias is not None
        return kernels.convolve(entered, weight, bias, padding)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        delta = gradients[0].contiguous()
        entered, weight = ctx.saved_tensors
        by_entered = None
        if ctx.needs_input_grad[0]:
            # ∂L/∂x is the convolution of ∂L/∂y with the weights turned round.
            turned = weight.flip(-2, -1).transpose(1, 2).contiguous()
            padding = tuple(size - 1 - pad for size, pad in zip(weight.shape[-2:], ctx.padding, strict=True))
            by_entered = ctx.kernels.convolve(delta, turned, None, padding)
        by_weight, by_bias = ctx.kernels.correlate(entered, delta, weight.shape, ctx.padding)
        return by_entered, by_weight, by_bias if ctx.has_bias else None, None, None


class _Mapped(torch.autograd.Function):
    """A function that `torch.func.vmap` calls once, with the mapped axis in front of every tensor."""

    stacked: type[torch.autograd.Function]

    @staticmethod
    def forward(*inputs: Any) -> Tensor:
        raise NotImplementedError("it is only ever mapped")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @classmethod
    def _apply_stacked(cls, info: Any, in_dims: tuple[int | None, ...], inputs: tuple[Any, ...]) -> tuple[Tensor, int]:
        in_front = [
            tensor
            if not isinstance(tensor, Tensor)
            else tensor.expand(info.batch_size, *tensor.shape)
            if axis is None
            else tensor.movedim(axis, 0)
            for tensor, axis in zip(inputs, in_dims, strict=True)
        ]
        return cls.stacked.apply(*in_front), 0  # type: ignore[no-any-return]


class MappedLinear(_Mapped):
    stacked = StackedLinear

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return MappedLinear._apply_stacked(info, in_dims, inputs)


class MappedConvolution(_Mapped):
    stacked = StackedConvolution

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        return MappedConvolution._apply_stacked(info, in_dims, inputs)
