"""Checks that a penalty makes once for each task, when `consolidate` is called."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.nn.modules import call_with


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


def warn_of_misuse(
    anchors: Mapping[str, Tensor], last: Mapping[str, Tensor], importance: Mapping[str, Tensor], unused: bool
) -> None:
    """Warn of a task that is consolidated again, and of one in which the penalty protected nothing.

    Args:
        anchors: the weights as they are now.
        last: the same when they were consolidated last.
        importance: what would be added.
        unused: whether the penalty has neither been in a loss nor taken a step since then.

    Example:
        >>> warn_of_misuse(penalty.anchors(), penalty.terms[-1].anchor, importance, unused=False)
    """
    same = all(torch.equal(theta, last[name]) for name, theta in anchors.items())
    if same and any(omega.any() for omega in importance.values()):
        warnings.warn(
            "no weight has changed since the last consolidate(), so that what was learned then counts twice: "
            "call it once for each task",
            UserWarning,
            stacklevel=3,
        )
    if unused and not same:
        warnings.warn(
            "weights have changed since the last consolidate(), and the penalty did not hold them: call "
            "penalty.proximal_step(optimizer) after each step, or add penalty.loss() to the loss",
            UserWarning,
            stacklevel=3,
        )


def check_logits(outputs: Tensor, fewest: int) -> None:
    """Refuse outputs without a row of at least two logits for each sample: a single one has the probability 1.

    Args:
        outputs: of a model.
        fewest: 2, or 1 for a head that may get more classes.

    Example:
        >>> check_logits(torch.ones(4, 2), fewest=2)
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
        value = call_with(model, copies, inputs).square().sum()
    found = torch.autograd.grad(value, list(trained.values()), allow_unused=True) if value.requires_grad else ()
    for name, slope in zip(trained, found, strict=False):
        if slope is not None and slope.any():
            raise InputError(
                f"the model uses {name!r} through another reference than its own attribute, so that no gradients can "
                "be found for single samples: use the attribute itself"
            )
