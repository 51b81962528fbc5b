"""Models of one architecture as tensors with a leading axis, each of them still a module of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram.common.errors import InputError


class Rows:
    """Parameters and buffers of N models: one tensor (N, *shape) for each name. Model i lives in row i.

    A model's own tensors become views of its row, so what is done to the whole is done to each, and the reverse.
    """

    def __init__(self, models: Sequence[nn.Module]):
        check_alike(models)
        self.parameters = _stack([dict(model.named_parameters()) for model in models])
        self.buffers = _stack([dict(model.named_buffers()) for model in models])

    @torch.no_grad()
    def finite(self) -> Tensor:
        """(N,): whether all that a model consists of are numbers."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        return torch.stack([tensor.isfinite().reshape(len(tensor), -1).all(dim=1) for tensor in tensors]).all(dim=0)


def check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be rows of the same tensors."""
    first = _shapes(models[0])
    for model in models[1:]:
        if _shapes(model) != first:
            raise InputError("the models differ in the names or shapes of their parameters")


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors}


def _stack(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    stacked = {}
    for name in states[0]:
        stacked[name] = torch.stack([state[name].detach() for state in states])
        for row, state in enumerate(states):
            state[name].data = stacked[name][row]
    return stacked
