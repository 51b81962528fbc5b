"""Checks that a penalty makes of its model and of its arguments, at every step: each is a few comparisons."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError, NotFiniteError


class Places:
    """Where a model holds some of its parameters, so that it takes microseconds to see that it still does.

    Args:
        model: any module.
        parameters: some of its parameters by name.

    Example:
        >>> Places(model, dict(model.named_parameters())).check()
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, Tensor]):
        self.parameters = parameters
        found: dict[tuple[int, str], tuple[dict[str, Any], str, Any, str]] = {}
        for name, theta in parameters.items():
            module, *path = model, *name.split(".")
            for part in path[:-1]:
                child = module._modules[part]
                assert child is not None
                found[id(module._modules), part] = (module._modules, part, child, name)
                module = child
            found[id(module._parameters), path[-1]] = (module._parameters, path[-1], theta, name)
        self.entries = list(found.values())

    def check(self) -> None:
        """Refuse a model that no longer computes with these tensors."""
        for holder, key, expected, name in self.entries:
            if holder.get(key) is not expected:
                raise InputError(
                    f"the model's {name!r} is no longer the tensor that this penalty was made for: "
                    "call penalty.grow() after head.grow(), or make a new penalty"
                )


def check_arguments(model: Any, strength: Any) -> None:
    """Refuse what is not a module, and a strength that is not a positive number.

    Args:
        model: what a penalty is to protect.
        strength: its λ.

    Example:
        >>> check_arguments(torch.nn.Linear(2, 2), 1.0)
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"a penalty protects a torch.nn.Module, not {type(model).__name__}")
    if not (isinstance(strength, Real) and 0 < float(strength) < math.inf):
        raise InputError(f"a penalty's strength must be a positive number, not {strength!r}")


def check_converging(name: str, theta: Tensor) -> None:
    """Refuse a weight that is NaN or infinite: the training has diverged.

    Args:
        name: of the weight.
        theta: the weight.

    Example:
        >>> check_converging("weight", torch.ones(2))
    """
    if not torch.isfinite(theta).all():
        raise NotFiniteError(
            f"{name!r} is NaN or infinite: the training has diverged, or the inputs are not finite; "
            "check the inputs, or try a smaller learning rate"
        )


def frozen_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that are not trained now.

    Args:
        model: any module.

    Example:
        >>> frozen_parameters(torch.nn.Linear(2, 2).requires_grad_(False))
        ['weight', 'bias']
    """
    return [name for name, theta in model.named_parameters() if not theta.requires_grad]


def warn_of_unfrozen(model: nn.Module, frozen: Sequence[str]) -> bool:
    """Warn of parameters that are trained now, and were frozen when a penalty was made: it does not protect them.

    Args:
        model: the penalty's.
        frozen: the names of what was frozen.

    Example:
        >>> warn_of_unfrozen(model, frozen=[])
        False
    """
    own = dict(model.named_parameters()) if frozen else {}
    names = [name for name in frozen if name in own and own[name].requires_grad]
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        warnings.warn(
            f"the model now trains {names[0]!r}{more}, frozen when this penalty was made, which it does not protect: "
            "make the penalty when everything that will be trained can be",
            UserWarning,
            stacklevel=4,
        )
    return bool(names)


def check_rate(rate: float | Tensor) -> float:
    """Return a learning rate as a number, as it is now, if it is at least 0; refuse it otherwise.

    Args:
        rate: a number, or a tensor of one.

    Example:
        >>> check_rate(0.5)
        0.5
    """
    value = float(rate)
    if not (math.isfinite(value) and value >= 0):
        raise InputError(f"a learning rate must be a number of at least 0, not {value}")
    return value


def check_grown(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Refuse a model that changed in any other way than by more rows.

    Args:
        before: its slow weights by name, as they were.
        now: the same, as they are.

    Example:
        >>> check_grown({"weight": torch.ones(2, 3)}, {"weight": torch.ones(4, 3)})
    """
    if before.keys() != now.keys():
        other = min(before.keys() ^ now.keys())
        raise InputError(f"a penalty can follow layers that grew, but the model has different slow weights: {other!r}")
    for name, theta in now.items():
        then = before[name]
        if then.shape[1:] != theta.shape[1:] or then.ndim != theta.ndim or (theta.ndim and len(theta) < len(then)):
            raise InputError(
                f"a penalty can follow layers that grew, but {name!r} has shape {tuple(theta.shape)}, "
                f"and had {tuple(then.shape)}"
            )
