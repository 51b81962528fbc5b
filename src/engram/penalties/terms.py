"""The terms of the quadratic form (Eq. 4), as pure functions: importance and anchor of each weight, cost and pull."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engram.common.errors import InputError, NotFiniteError

State = dict[str, Tensor]  # what a penalty remembers; a tensor of one weight is called "GROUP.NAME OF THE WEIGHT"
Weights = Mapping[str, Tensor]
Settings = Mapping[str, Any]  # the penalty's own, such as its strength
Batches = Iterable[Any]  # yields (inputs, targets) of a task
Classes = Sequence[int] | None  # the outputs that take part in a task; None for all
TERMS = "terms."  # the state holds "terms.0.importance.NAME" and "terms.0.anchor.NAME", and so on


@dataclass(frozen=True)
class Term:
    """What one consolidation remembers of each slow weight: its importance Ω and its anchor θ*."""

    importance: dict[str, Tensor]
    anchor: dict[str, Tensor]


@dataclass(frozen=True)
class Pull:
    """A penalty's part of a step, as an affine map of each weight:  θ ← gain θ + shift.

    If `is_slope`, it is the penalty's gradient instead, which an optimizer adds to that of the loss:
    gain (θ − shift).
    """

    gain: dict[str, Tensor]
    shift: dict[str, Tensor]
    is_slope: bool = False


def terms_of(state: Mapping[str, Tensor]) -> list[Term]:
    """The terms that a penalty's state holds, in order.

    Args:
        state: what a penalty remembers.

    Example:
        >>> terms_of({"terms.0.importance.weight": omega, "terms.0.anchor.weight": anchor})[0].anchor["weight"]
    """
    terms: dict[int, Term] = {}
    for key in state:
        if key.startswith(TERMS):
            _, number, group, name = key.split(".", 3)
            term = terms.setdefault(int(number), Term({}, {}))
            (term.importance if group == "importance" else term.anchor)[name] = state[key]
    return [terms[number] for number in sorted(terms)]


def state_of(terms: Sequence[Term]) -> State:
    """A state that holds these terms; `terms_of` is the reverse.

    Args:
        terms: any number.

    Example:
        >>> list(state_of([Term({"weight": omega}, {"weight": anchor})]))
        ['terms.0.importance.weight', 'terms.0.anchor.weight']
    """
    state: State = {}
    for i, term in enumerate(terms):
        state |= {f"{TERMS}{i}.importance.{name}": omega for name, omega in term.importance.items()}
        state |= {f"{TERMS}{i}.anchor.{name}": theta for name, theta in term.anchor.items()}
    return state


def cost(terms: Sequence[Term], weights: Weights, strength: float) -> Tensor:
    """λ Σ_terms Σ_k Ω_k (θ_k − θ*_k)², a scalar.

    Args:
        terms: any number.
        weights: θ by name, in force where that is what is protected.
        strength: λ.

    Example:
        >>> cost(penalty.terms, penalty.in_force(penalty.parameters), penalty.strength)
    """
    first = next(iter(weights.values()))
    total = torch.zeros((), device=first.device, dtype=first.dtype)
    for term in terms:
        for name, theta in weights.items():
            total = total + (term.importance[name] * (theta - term.anchor[name]).square()).sum()
    return strength * total


def gradient(terms: Sequence[Term], weights: Weights, strength: float) -> dict[str, Tensor]:
    """The gradient of `cost`, explicitly:  2 λ Σ_terms Ω_k (θ_k − θ*_k).

    Args:
        terms: any number.
        weights: θ by name, in force where that is what is protected.
        strength: λ.

    Example:
        >>> gradient(penalty.terms, penalty.in_force(penalty.parameters), penalty.strength)["head.weight"]
    """
    found = {}
    for name, theta in weights.items():
        slope = torch.zeros_like(theta)
        for term in terms:
            slope = slope + term.importance[name] * (theta - term.anchor[name])
        found[name] = 2 * strength * slope
    return found


def remember(
    state: Mapping[str, Tensor],
    importance: dict[str, Tensor],
    anchor: dict[str, Tensor],
    every_task: bool,
    gamma: float,
) -> State:
    """The state after a task:  Ω ← γ Ω + Ω_task  and  θ* ← θ;  or one more term, where every task has its own.

    Args:
        state: what was remembered before the task.
        importance: Ω_task of each weight.
        anchor: the current θ of each weight.
        every_task: whether every task has its own term.
        gamma: γ.

    Example:
        >>> state = remember(state, importance, anchor, every_task=False, gamma=1.0)
    """
    terms = terms_of(state)
    if every_task:
        terms = [*terms, Term(importance, anchor)]
    else:
        for term in terms:
            importance = {name: gamma * term.importance[name] + omega for name, omega in importance.items()}
        terms = [Term(importance, anchor)]
    others = {key: tensor for key, tensor in state.items() if not key.startswith(TERMS)}
    return {**state_of(terms), **others}


def proximal_pull(terms: Sequence[Term], scale: Mapping[str, float]) -> Pull:
    """After the optimizer's step:  θ ← (θ + s Σ Ω θ*) / (1 + s Σ Ω),  with s = 2 lr λ of each weight.

    It is a weighted mean of θ and of the anchors' own mean (by importance), and stays one where s Ω overflows.

    Args:
        terms: at least one.
        scale: s of each weight.

    Example:
        >>> pull = proximal_pull(penalty.terms, dict.fromkeys(penalty.parameters, 2 * 0.01 * penalty.strength))
    """
    gain, shift = {}, {}
    for name, (hold, drag) in _sums_over(terms).items():
        anchor = torch.where(hold > 0, drag / hold, 0)
        held = scale[name] * hold
        gain[name] = 1 / (1 + held)
        weight = torch.where(held > 1, 1 - gain[name], held * gain[name])  # each exact where it is used
        shift[name] = weight * anchor
    return Pull(gain, shift)


def gradient_pull(terms: Sequence[Term], scale: Mapping[str, float]) -> Pull:
    """Together with the optimizer's step:  θ ← θ − lr g − s Σ Ω (θ − θ*),  with s = 2 lr λ of each weight.

    Args:
        terms: at least one.
        scale: s of each weight.

    Example:
        >>> pull = gradient_pull(penalty.terms, dict.fromkeys(penalty.parameters, 2 * 0.01 * penalty.strength))
    """
    sums = _sums_over(terms)
    return Pull(
        {name: 1 - scale[name] * hold for name, (hold, _) in sums.items()},
        {name: scale[name] * drag for name, (_, drag) in sums.items()},
    )


def slope_pull(terms: Sequence[Term], scale: Mapping[str, float]) -> Pull:
    """The penalty's gradient itself:  s Σ Ω (θ − θ*) = gain (θ − shift),  with s = 2 λ of each weight.

    The shift is the anchors' mean by importance, written so that it is θ* to the last digit where all anchors are the
    same. At θ* the gradient is then exactly 0, and not a rounding error that Adam would make a whole step of.

    Args:
        terms: at least one.
        scale: s of each weight.

    Example:
        >>> pull = slope_pull(penalty.terms, dict.fromkeys(penalty.parameters, 2 * penalty.strength))
    """
    gain, shift = {}, {}
    for name, last in terms[-1].anchor.items():
        hold = torch.stack([term.importance[name] for term in terms]).sum(dim=0)
        apart = torch.stack([term.importance[name] * (term.anchor[name] - last) for term in terms]).sum(dim=0)
        gain[name] = scale[name] * hold
        shift[name] = last + torch.where(hold > 0, apart / hold, 0)
    return Pull(gain, shift, is_slope=True)


def _sums_over(terms: Sequence[Term]) -> dict[str, tuple[Tensor, Tensor]]:
    """Σ Ω and Σ Ω θ* over the terms, for each weight."""
    return {
        name: (
            torch.stack([term.importance[name] for term in terms]).sum(dim=0),
            torch.stack([term.importance[name] * term.anchor[name] for term in terms]).sum(dim=0),
        )
        for name in terms[0].importance
    }


def check_finite(importance: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the importances if all are finite; others would keep a weight at NaN forever, and are refused.

    Args:
        importance: Ω of each weight.

    Example:
        >>> check_finite({"weight": torch.ones(2)})
        {'weight': tensor([1., 1.])}
    """
    for name, omega in importance.items():
        if not torch.isfinite(omega).all():
            raise NotFiniteError(
                f"the importance of {name!r} is NaN or infinite: the samples or the weights are not finite"
            )
    return importance


def with_rows(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> State:
    """The new tensors with the old ones as their first rows; an old one without a new one stays.

    Args:
        old: tensors by name.
        new: tensors of the same names, with as many rows or more.

    Example:
        >>> with_rows({"a": torch.ones(1)}, {"a": torch.zeros(2)})
        {'a': tensor([1., 0.])}
    """
    larger = {key: tensor.detach().clone() for key, tensor in {**old, **new}.items()}
    for key, tensor in old.items():
        (larger[key][: len(tensor)] if tensor.ndim else larger[key]).copy_(tensor)
    return larger


def fitted(key: str, tensor: Tensor | None, like: Tensor) -> Tensor:
    """A copy of a loaded tensor, on the device and of the type of the one that it stands for.

    Args:
        key: its name in the state.
        tensor: the one that was loaded; None if there is none.
        like: the one that it stands for.

    Example:
        >>> fitted("path.weight", torch.ones(2), torch.zeros(2, dtype=torch.float64)).dtype
        torch.float64
    """
    if tensor is None or tensor.shape != like.shape:
        found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {tuple(like.shape)}"
        raise InputError(f"this state is not of this model: {key!r} {found}")
    if tensor.is_complex() and not like.is_complex():
        raise InputError(f"this state is not of this model: {key!r} is of {tensor.dtype}")
    return tensor.to(device=like.device, dtype=like.dtype, copy=True)
