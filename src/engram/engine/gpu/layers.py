"""Layers that a stack computes in a faster way; all others go through `torch.func.vmap` unchanged.

Each of these is called once for the whole stack: its tensors then have two axes in front, the trials (T) and the models
of a trial (M), which share their batch. So the input of the network's first layer is the same for all M, and one wide
product serves them all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engram.engine.gpu.convolutions import fuse_convolutions, once, pass_on
from engram.engine.gpu.heads import LateMoment, fuse_heads
from engram.engine.inspection import Link, chain_of
from engram.nn.classes import mask_logits, masked_classes
from engram.nn.modules import mapped


class Products:
    """Gradients of linear layers' weights as the factors of their products, g = δ xᵀ, by the names of the weights.

    A backward pass leaves them here instead of the gradients, which are then computed while the steps are taken and
    never written to memory.

    Example:
        >>> products = Products()
        >>> products.add("features.1.weight", delta, entered)
    """

    def __init__(self) -> None:
        self.factors: dict[str, list[tuple[Tensor, Tensor]]] = {}

    def add(self, name: str, delta: Tensor, entered: Tensor) -> None:
        """Of one call of the layer: δ (N, out, B), and x (N, in, B), or (T, in, B) where models share it."""
        self.factors.setdefault(name, []).append((delta, entered))

    def take(self, name: str) -> list[tuple[Tensor, Tensor]]:
        """The factors of this weight, which are then forgotten; none if it has a gradient of its own, or no use."""
        return self.factors.pop(name, [])


def gradient_of(factors: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """The gradient (N, out, in) as a tensor.

    Args:
        factors: δ and x of each call of the layer.

    Example:
        >>> gradient = gradient_of(products.take(name))
    """
    found = [
        torch.bmm(delta.reshape(len(entered), -1, delta.shape[-1]), entered.mT).view(len(delta), -1, entered.shape[1])
        for delta, entered in factors
    ]
    return found[0] if len(found) == 1 else torch.stack(found).sum(dim=0)


def prepare(
    model: nn.Module,
    kernels: ModuleType | None,
    products: Products | None = None,
    moments: Mapping[str, LateMoment] | None = None,
) -> None:
    """Replace the forward passes of a model's layers by those of a stack. The model is then only for vmap.

    Args:
        model: the skeleton of a section.
        kernels: the Triton kernels, if there are any.
        products: where backward passes leave the gradients of linear layers' weights; None to return them.
        moments: of the heads that have a second moment, by their names.

    Example:
        >>> prepare(copy.deepcopy(model), kernels)
    """
    if kernels is None:
        return
    chain = chain_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    _fuse_linear_layers(chain, kernels, products, names)
    fuse_convolutions(chain, kernels)
    fuse_heads(model, kernels, moments or {})


def _fuse_linear_layers(
    chain: Sequence[Link], kernels: ModuleType, products: Products | None, names: Mapping[int, str]
) -> None:
    """A linear layer and its LeakyReLU become one layer: the first computes both, the second returns its input."""
    for first, second in pairwise(chain):
        linear, activation = first.layer, second.layer
        if not (first.sole and second.sole):
            continue
        if type(linear) is nn.Linear and linear.bias is not None and type(activation) is nn.LeakyReLU:
            how = (activation.negative_slope, kernels, products, f"{names[id(linear)]}.weight")
            linear.forward = _linear_of(linear, *how)  # type: ignore[method-assign, assignment]
            activation.forward = pass_on  # type: ignore[method-assign, assignment]


def _linear_of(
    layer: nn.Linear, slope: float, kernels: ModuleType, products: Products | None, name: str
) -> Callable[[Tensor], Tensor]:
    def forward(entered: Tensor) -> Tensor:
        if entered.ndim != 2:
            return F.leaky_relu(F.linear(entered, layer.weight, layer.bias), slope)
        return mapped(StackedLinear, entered, layer.weight, layer.bias, slope, kernels, products, name)

    return forward


def cross_entropy(logits: Tensor, targets: Tensor, classes: Sequence[int], kernels: ModuleType | None) -> Tensor:
    """A model's mean loss over its batch; outputs outside `classes` take no part.

    Args:
        logits: (B, C).
        targets: (B,).
        classes: the outputs that take part.
        kernels: the Triton kernels, if there are any.

    Example:
        >>> loss = cross_entropy(logits, targets, (0, 1), None)
    """
    if kernels is None:
        return F.cross_entropy(mask_logits(logits, classes), targets)
    others = masked_classes(classes, logits.shape[-1], logits.device)
    return mapped(StackedCrossEntropy, logits, targets, others, kernels)


class StackedLinear(torch.autograd.Function):
    """LeakyReLU(x θᵀ + b) for every model of a stack: x (T, M, B, in) and θ (T, M, out, in).

    Inside, the samples are the last axis, the layout that tensor cores need.
    """

    @staticmethod
    def forward(
        ctx: Any,
        entered: Tensor,
        weight: Tensor,
        bias: Tensor,
        slope: float,
        kernels: ModuleType,
        products: Products | None,
        name: str,
    ) -> Tensor:
        trials, models, outputs, inputs = weight.shape
        # (T, in, B) where all models of a trial get the same input, else (N, in, B)
        turned = once(entered).mT.contiguous()
        if inputs % 4 == 0:
            out = torch.bmm(weight.reshape(len(turned), -1, inputs), turned).view(trials * models, outputs, -1)
            kernels.activate(out, bias, slope)
        else:  # for which PyTorch would not use tensor cores
            out = kernels.multiply(weight.flatten(0, 1), turned, bias.flatten(0, 1), slope)
        ctx.save_for_backward(turned, weight, out)
        ctx.slope, ctx.kernels, ctx.products, ctx.name = slope, kernels, products, name
        return out.unflatten(0, (trials, models)).mT

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        turned, weight, out = ctx.saved_tensors
        axes = weight.shape[:2]
        delta, by_bias = ctx.kernels.pass_back(gradients[0].flatten(0, 1), out, ctx.slope)  # (N, out, B)
        by_entered = None
        if ctx.needs_input_grad[0]:
            theta = weight.flatten(0, 1)
            aligned = theta.shape[2] % 4 == 0
            product = torch.bmm(theta.mT, delta) if aligned else ctx.kernels.multiply_back(theta, delta)
            by_entered = product.unflatten(0, axes).mT
        by_weight = None
        if ctx.needs_input_grad[1] and ctx.products is not None and delta.shape[2] <= ctx.kernels.LARGEST_BATCH:
            ctx.products.add(ctx.name, delta, turned)
        elif ctx.needs_input_grad[1]:
            by_weight = gradient_of([(delta, turned)]).view(weight.shape)
        return by_entered, by_weight, by_bias.unflatten(0, axes), None, None, None, None


class StackedCrossEntropy(torch.autograd.Function):
    """The mean loss of every model of a stack; its gradient is computed in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, others: Tensor, kernels: ModuleType) -> Tensor:
        flat = logits.flatten(0, 1).contiguous()
        losses, slopes = kernels.cross_entropy(flat, once(targets), others[0, 0])
        ctx.save_for_backward(slopes.view(logits.shape))
        return losses.view(logits.shape[:2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[0][..., None, None], None, None, None
