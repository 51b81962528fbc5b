"""Helpers for modules: evaluation mode for a moment, a linear layer of a given weight, one call for many models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode within the `with` block; afterwards each module has its own mode again.

    Traces and BatchNorm statistics are only read in evaluation mode.

    Args:
        model: any module.

    Example:
        >>> with frozen(model), torch.no_grad():
        ...     logits = model(inputs)
    """
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def as_linear(weight: Tensor) -> nn.Linear:
    """A linear layer without bias that has a copy of this weight. No random numbers are drawn.

    Args:
        weight: (out_features, in_features).

    Example:
        >>> as_linear(torch.ones(2, 3))
        Linear(in_features=3, out_features=2, bias=False)
    """
    rows, columns = weight.shape
    linear = nn.utils.skip_init(nn.Linear, columns, rows, bias=False, device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight)
    return linear


def mapped(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply an autograd function that accepts leading axes; within `torch.func.vmap`, call it once for all models.

    Args:
        function: its tensors may have further axes in front, the same for all.
        inputs: its arguments, as for one model.

    Example:
        >>> logits, hebb = mapped(PlasticSoftmax, hidden, target, weight, alpha, eta, hebb)
    """
    # PyTorch has no public name for this question. `torch.autograd.Function.apply` asks it in the same words.
    if torch._C._are_functorch_transforms_active():
        return _Mapped.apply(function, *inputs)
    return function.apply(*inputs)


class _Mapped(torch.autograd.Function):
    """`torch.func.vmap` calls its `vmap` once for all models; it moves the mapped axis to the front of each tensor."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise NotImplementedError("this function is only called within vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], function: Any, *inputs: Any) -> tuple[Any, int]:
        def in_front(value: Any, axis: int | None) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)

        return mapped(function, *map(in_front, inputs, in_dims[1:])), 0
