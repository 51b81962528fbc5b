"""Models of one architecture as tensors with a leading axis, while each of them remains its own module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.nn.dhp import DHPSoftmax
from engram.nn.heads import MatchedSoftmax
from engram.nn.networks import Network


class Rows:
    """Parameters and buffers of N models: one tensor (N, *shape) for each name. Model i is in row i.

    A model's own tensors become views of its row: whatever changes the rows changes the models, and the reverse.

    Args:
        models: their parameters and buffers must have the same names and shapes. If any of them has a plastic
            head, others may have a matched one: see `as_plastic`.

    Example:
        >>> rows = Rows([nn.Linear(4, 2) for _ in range(3)])
        >>> rows.parameters["weight"].shape
        torch.Size([3, 2, 4])
    """

    def __init__(self, models: Sequence[nn.Module]):
        plastic = any(isinstance(getattr(model, "head", None), DHPSoftmax) for model in models)
        alike = [as_plastic(model) if plastic else model for model in models]
        check_alike(alike)
        # for each model, the names in the rows of its own parameters
        self.names = [_names(own, model) for own, model in zip(models, alike, strict=True)]
        self.parameters = _stack([dict(model.named_parameters()) for model in alike])
        self.buffers = _stack([dict(model.named_buffers()) for model in alike])

    @torch.no_grad()
    def finite(self) -> Tensor:
        """(N,): whether all tensors of a model are finite."""
        tensors = [*self.parameters.values(), *self.buffers.values()]
        return torch.stack([tensor.isfinite().reshape(len(tensor), -1).all(dim=1) for tensor in tensors]).all(dim=0)


def as_plastic(model: nn.Module) -> nn.Module:
    """A network with a matched head as one with a plastic head that computes the same, with the same parameters.

    z = (θ + α Hebb) h  is  z = (θ + θ′ c) h  if α is θ′, and the trace is constant: Hebb = c and η = 0. So plastic
    and matched heads train in one section. Other models are returned as they are.

    Args:
        model: any.

    Example:
        >>> as_plastic(Network(features, MatchedSoftmax(8, 3))).head.hebb.unique()
        tensor([1.])
    """
    if not isinstance(model, Network) or type(model.head) is not MatchedSoftmax:
        return model
    matched = model.head
    head = DHPSoftmax(matched.in_features, matched.out_features, eta=0, device="meta")  # draws no weights
    head.weight, head.alpha = matched.weight, matched.extra
    head.eta = nn.Parameter(matched.weight.new_zeros(()), requires_grad=False)
    head.hebb = torch.full_like(matched.weight, matched.trace, requires_grad=False)
    head.check_values = False
    return Network(model.features, head)


def _names(own: nn.Module, model: nn.Module) -> dict[str, str]:
    names = {id(theta): name for name, theta in model.named_parameters()}
    return {name: names[id(theta)] for name, theta in own.named_parameters()}


def check_alike(models: Sequence[nn.Module]) -> None:
    """Refuse models that cannot be rows of the same tensors.

    Args:
        models: any.

    Example:
        >>> check_alike([nn.Linear(4, 2), nn.Linear(4, 2)])
    """
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
