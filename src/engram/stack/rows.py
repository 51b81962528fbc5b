"""Models of one architecture as tensors with a leading axis, each of them still a module of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from engram.errors import InputError


class Rows:
    """Parameters and buffers of N models: one tensor (N, *shape) for each name. Model i lives in row i.

    A model's own tensors become views of its row, so what is done to the whole is done to each, and the reverse.
    """

    def __init__(self, models: Sequence[nn.Module]):
        self.models = list(models)
        check_alike(self.models)
        self.parameters = _stack([dict(model.named_parameters()) for model in self.models])
        self.buffers = _stack([dict(model.named_buffers()) for model in self.models])
        for row, model in enumerate(self.models):
            _live_in(model, self.parameters, self.buffers, row)

    def __len__(self) -> int:
        return len(self.models)

    @torch.no_grad()
    def finite(self) -> Tensor:
        """(N,): whether all that a model consists of are numbers."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        return torch.stack([torch.isfinite(tensor).flatten(1).all(dim=1) for tensor in tensors]).all(dim=0)


def check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be rows of the same tensors."""
    first = _shapes(models[0])
    for model in models[1:]:
        if _shapes(model) != first:
            raise InputError("the models differ in the names or shapes of their parameters")


def _shapes(model: nn.Module) -> dict[str, tuple[torch.Size, torch.dtype, bool]]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: (tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


@torch.no_grad()
def _stack(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def _live_in(model: nn.Module, parameters: dict[str, Tensor], buffers: dict[str, Tensor], row: int) -> None:
    names = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    made: dict[str, nn.Parameter] = {}  # a weight that two layers share stays shared

    def parameter(old: nn.Parameter) -> nn.Parameter:
        name = names[id(old)]
        if name not in made:
            made[name] = nn.Parameter(parameters[name][row], requires_grad=old.requires_grad)
        return made[name]

    def buffer(old: Tensor) -> Tensor:
        return buffers[names[id(old)]][row]

    for module in model.modules():
        _replace(module._parameters, parameter)
        _replace(module._buffers, buffer)


def _replace(own: dict, view_of: Callable) -> None:
    for name, tensor in own.items():
        if tensor is not None:
            own[name] = view_of(tensor)
