"""Checks that a penalty makes of its model and of what it is given: each is a few comparisons, or once per task."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

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


def checked_classes(classes: Sequence[int] | None) -> list[int] | None:
    """Return the classes of a task as numbers; refuse them if one is there twice, or is no class number, or none is.

    Args:
        classes: the outputs that take part; None for all.

    Example:
        >>> checked_classes(torch.tensor([0, 2, 1]))
        [0, 2, 1]
    """
    if classes is None:
        return None
    numbers = [int(c) for c in classes]
    if not numbers:
        raise InputError("classes names no output: leave it out where all outputs take part")
    if len(set(numbers)) != len(numbers):
        twice = next(c for c in numbers if numbers.count(c) > 1)
        raise InputError(f"each class of a task counts once, but classes has {twice} more than once")
    for number, given in zip(numbers, classes, strict=True):
        if number < 0 or number != given:
            raise InputError(f"classes are numbers of outputs, from 0 on, not {given}")
    return numbers


def check_started(model: nn.Module) -> None:
    """Refuse to protect weights that the first training batch of a layer will change.

    Args:
        model: any module; a layer that needs features before it can start has the attribute `waits`.

    Example:
        >>> check_started(model)
    """
    if any(getattr(module, "waits", False) for module in model.modules()):
        raise InputError(
            "the first training batch will change how large the head's weights are, so that they cannot be protected "
            "yet: train the model before consolidate(), or call head.scale(features)"
        )


def warn_of_repetition(
    anchors: Mapping[str, Tensor], last: Mapping[str, Tensor], importance: Mapping[str, Tensor]
) -> None:
    """Warn of a task that is consolidated again: nothing was learned since the last time.

    Args:
        anchors: the weights as they are now.
        last: the same when they were consolidated last.
        importance: what would be added.

    Example:
        >>> warn_of_repetition(penalty.anchors(), penalty.terms[-1].anchor, importance)
    """
    same = all(torch.equal(theta, last[name]) for name, theta in anchors.items())
    if same and any(omega.any() for omega in importance.values()):
        warnings.warn(
            "no weight has changed since the last consolidate(), so that what was learned then counts twice: "
            "call it once for each task",
            UserWarning,
            stacklevel=3,
        )


def check_logits(outputs: Tensor, fewest: int = 2) -> None:
    """Refuse outputs without a row of at least two logits for each sample: a single one has the probability 1.

    Args:
        outputs: of a model.
        fewest: 1 for a head that may get more classes.

    Example:
        >>> check_logits(torch.ones(4, 2))
    """
    if outputs.ndim > 2:
        raise InputError(
            f"the model returns outputs of shape {tuple(outputs.shape)}, and EWC needs one row of logits for each "
            "sample: give it a model that returns (samples, classes), or use SI or MAS"
        )
    if fewest > 1 and (outputs.ndim < 2 or outputs.shape[1] == 1):
        raise InputError(
            "the model has a single output, whose softmax is always 1, so that EWC would find every weight "
            "unimportant: let it return a logit for each of two classes, or use SI or MAS"
        )


def looks_like_activations(outputs: Tensor) -> bool:
    """Whether outputs are those of a ReLU or of a softmax, and no logits.

    Args:
        outputs: (B, C).

    Example:
        >>> looks_like_activations(torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
        True
    """
    if bool((outputs < 0).any()) or not outputs.any():
        return False
    return bool((outputs == 0).any()) or bool(((outputs.sum(dim=1) - 1).abs() < 1e-4).all())


def check_rows(outputs: Tensor, num_samples: int) -> None:
    """Refuse outputs of a model that are not one row for each sample.

    Args:
        outputs: of the model.
        num_samples: the length of its inputs.

    Example:
        >>> check_rows(torch.ones(4, 3), num_samples=4)
    """
    if outputs.ndim == 0 or len(outputs) != num_samples:
        raise InputError(
            f"the model returns outputs of shape {tuple(outputs.shape)} for inputs of length {num_samples}: "
            "importances need the samples on the first axis of both"
        )


def check_no_hidden_uses(model: nn.Module, parameters: Mapping[str, Tensor], inputs: Tensor) -> None:
    """Refuse a weight that the outputs still depend on when its attribute holds a copy: not all uses are known.

    Args:
        model: in evaluation mode.
        parameters: those whose gradients are found through their attributes, by name.
        inputs: the batch.

    Example:
        >>> check_no_hidden_uses(model, {}, inputs)
    """
    trained = {name: theta for name, theta in parameters.items() if theta.requires_grad}
    if not trained:
        return
    copies = {name: theta.detach().clone() for name, theta in parameters.items()}
    with torch.enable_grad():
        value = functional_call(model, copies, (inputs,)).square().sum()
    found = torch.autograd.grad(value, list(trained.values()), allow_unused=True) if value.requires_grad else ()
    for name, slope in zip(trained, found, strict=False):
        if slope is not None and slope.any():
            raise InputError(
                f"the model uses {name!r} through another reference than its own attribute, so that no gradients can "
                "be found for single samples: use the attribute itself"
            )


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
