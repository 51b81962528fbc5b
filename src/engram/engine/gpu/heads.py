"""Heads that a stack computes in a faster way: a plastic head's trace, and the sums of a memory on learned features."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from engram.engine.gpu.convolutions import once
from engram.nn.dhp import DHPSoftmax
from engram.nn.memory_heads import MemoryHead
from engram.nn.modules import mapped

LARGEST_HEAD = 128  # classes that the kernels of heads can hold
WIDEST_HEAD = 4096  # features of a class that one program can hold


def fuse_heads(model: nn.Module, kernels: ModuleType) -> None:
    """Replace the forward passes, or the writing, of heads that the kernels know.

    Args:
        model: the skeleton of a section.
        kernels: the Triton kernels.

    Example:
        >>> fuse_heads(model, kernels)
    """
    for module in model.modules():
        if isinstance(module, DHPSoftmax) and type(module).forward is DHPSoftmax.forward:
            fits = module.alpha.ndim == 2 and module.out_features <= LARGEST_HEAD
            if fits and (module.literal or is_steady(module)):
                module.forward = _plastic_of(module, kernels)  # type: ignore[method-assign]
        if writes_half(module):
            module._write = _sums_of(module, kernels)  # type: ignore[arg-type, assignment]


def is_steady(module: nn.Module) -> bool:
    """Whether a head has a trace of another form than the paper's that the kernels know: without a gradient through it.

    Args:
        module: a layer.

    Example:
        >>> is_steady(engram.DHPSoftmax(4, 2, trace_gradient=False, trace_scale=2.0))
        True
    """
    if not isinstance(module, DHPSoftmax) or type(module).read is not DHPSoftmax.read:
        return False
    known = not module.trace_gradient and module.trace_write == "before"
    return known and module.in_features <= WIDEST_HEAD


def is_movable(head: DHPSoftmax) -> bool:
    """Whether the kernels can move the anchors of this head's weight with its fast part.

    Args:
        head: any.

    Example:
        >>> is_movable(engram.DHPSoftmax(4, 2))
        True
    """
    return head.alpha.ndim == 2 and head.in_features <= WIDEST_HEAD


def writes_half(module: nn.Module) -> bool:
    """Whether a stack adds to the sums of this head by its kernel, which keeps the lower half of a second moment.

    A memory alone is not among them: its sums are exact, since nothing else is learned.

    Args:
        module: a layer.

    Example:
        >>> writes_half(nn.Linear(2, 2))
        False
    """
    return type(module) is MemoryHead and module.weight is not None and module.out_features <= LARGEST_HEAD


def _plastic_of(head: DHPSoftmax, kernels: ModuleType) -> Callable[..., Tensor]:
    form = None if head.literal else (head.trace_centred, head.trace_scale)

    def forward(hidden: Tensor, target: Tensor | None = None) -> Tensor:
        how = (head.eta_range == "unit", form, kernels)
        return mapped(StackedPlastic, hidden, target, head.weight, head.alpha, head.eta, head.hebb, *how)

    return forward


def _sums_of(head: MemoryHead, kernels: ModuleType) -> Callable[..., None]:
    @torch.no_grad()
    def write(psi: Tensor, target: Tensor | None) -> None:
        rows, targets = head._checked_rows(psi.detach(), target)
        mapped(StackedSums, rows, targets, head.count, head.total, head.moment, head.unread, kernels)

    return write


class StackedPlastic(torch.autograd.Function):
    """`PlasticSoftmax` for every model of a stack, in few passes over memory; η and the trace change in place."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        target: Tensor,
        weight: Tensor,
        alpha: Tensor,
        eta: Tensor,
        hebb: Tensor,
        bounded: bool,
        form: tuple[bool, float | None] | None,
        kernels: ModuleType,
    ) -> Tensor:
        axes = weight.shape[:2]
        hidden, targets = hidden.flatten(0, 1), once(target)
        weight, alpha, eta, hebb = (tensor.flatten(0, 1) for tensor in (weight, alpha, eta, hebb))
        in_force, surprise = kernels.write_trace(hidden, targets, weight, alpha, eta, hebb, bounded, form)
        if form is not None:  # no gradient goes through the trace: as if nothing had been written, and this were read
            eta, hebb = torch.zeros_like(eta), surprise
        ctx.save_for_backward(hidden, targets, alpha, eta, hebb, in_force, surprise)
        ctx.axes, ctx.kernels, ctx.learns_eta = axes, kernels, form is None
        return torch.bmm(hidden, in_force.mT).unflatten(0, axes)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        delta = gradients[0].flatten(0, 1).contiguous()
        by_weight, by_alpha, by_eta, by_hidden = ctx.kernels.read_back(delta, *ctx.saved_tensors)
        by_hidden, by_weight, by_alpha, by_eta = (
            tensor.unflatten(0, ctx.axes) for tensor in (by_hidden.mT, by_weight, by_alpha, by_eta)
        )
        return by_hidden, None, by_weight, by_alpha, by_eta if ctx.learns_eta else None, None, None, None, None


class StackedSums(torch.autograd.Function):
    """`MemoryHead._write` for every model of a stack: the sums change in place."""

    @staticmethod
    def forward(
        ctx: Any,
        psi: Tensor,
        target: Tensor,
        count: Tensor,
        total: Tensor,
        moment: Tensor | None,
        unread: Tensor,
        kernels: ModuleType,
    ) -> Tensor:
        sums = (tensor if tensor is None else tensor.flatten(0, 1) for tensor in (count, total, moment, unread))
        kernels.write_sums(psi.flatten(0, 1), once(target), *sums)
        return unread.clone()  # a function returns something
