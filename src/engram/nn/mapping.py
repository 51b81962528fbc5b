"""Functions of a whole stack of models, called from within `torch.func.vmap` over its models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def mapped(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Apply a function whose tensors may have further axes in front; under a mapping, once for all of it."""
    # PyTorch has no public name for this question, and asks it in the same words.
    if torch._C._are_functorch_transforms_active():
        return _Mapped.apply(function, *inputs)
    return function.apply(*inputs)


class _Mapped(torch.autograd.Function):
    """What `torch.func.vmap` calls once for all it maps over, with the mapped axis in front of every tensor."""

    @staticmethod
    def forward(*inputs: Any) -> Any:
        raise NotImplementedError("it is only ever mapped")

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
