"""The contract of every penalty, and the quadratic form that they share (Eq. 1, Eq. 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import InputError

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Term:
    """What one consolidation remembers of each slow weight: its importance Ω and its anchor θ*."""

    importance: dict[str, Tensor]
    anchor: dict[str, Tensor]


class Penalty(ABC):
    """A quadratic cost for moving weights that mattered to earlier tasks.

    Eq. 4:  L̃(θ, α, η) = L(θ, α, η) + λ Σ_k Ω_k (θ_k − θ*_k)²

    A subclass says in `consolidate` what Ω is. In a training loop, with Eq. 4's gradient in the loss:

        loss = cross_entropy(model(inputs), targets) + penalty.loss()
        loss.backward()
        optimizer.step()
        penalty.after_step()

    or with the proximal step in place of `penalty.loss()`, stable however large λ Ω has grown:

        optimizer.step()
        penalty.proximal_step(learning_rate)
        penalty.after_step()

    and `penalty.consolidate(batches)` when a task has been learned.

    Args:
        model: any module, already on its device. Its trainable slow weights are protected; parameters that a
            module lists in `plastic_parameters` (the DHP Softmax's α and η) are left free.
        strength: λ of Eq. 4.
        regularize_alpha: protect the plasticity coefficients α too (the paper does not).
    """

    keeps_every_term = False  # a term a task, or one for all
    extra_groups: tuple[str, ...] = ()  # attributes of a subclass, each a tensor per weight, that are state as well

    def __init__(self, model: nn.Module, *, strength: float, regularize_alpha: bool = False):
        if not (math.isfinite(strength) and strength > 0):
            raise InputError(f"a penalty's strength must be a positive number, not {strength}")
        self.model = model
        self.strength = strength
        self.parameters = slow_parameters(model, regularize_alpha)
        if not self.parameters:
            raise InputError("the model has no trainable slow weights for a penalty to protect")
        self.terms: list[Term] = []
        self.gradient_share: Tensor | None = None  # how many times `loss`'s gradient is in .grad; None for not at all
        self._proximal: _ProximalMap | None = None

    def loss(self) -> Tensor:
        """λ Σ_k Ω_k (θ_k − θ*_k)², a scalar; zero before the first consolidation."""
        return _QuadraticForm.apply(self, *self.parameters.values())

    def gradient(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of `loss` at the given values, written down:  2 λ Σ_terms Ω_k (θ_k − θ*_k)."""
        gradient = {}
        for name, theta in parameters.items():
            slope = torch.zeros_like(theta)
            for term in self.terms:
                slope = slope + term.importance[name] * (theta - term.anchor[name])
            gradient[name] = 2 * self.strength * slope
        return gradient

    @torch.no_grad()
    def proximal_step(self, learning_rate: float) -> None:
        """The exact minimiser of  ‖θ′ − θ‖² / (2 lr) + loss(θ′): it has `loss`'s fixed point and cannot diverge.

        θ ← (θ + 2 lr λ Σ Ω θ*) / (1 + 2 lr λ Σ Ω)
        """
        if not self.terms:
            return
        if self._proximal is None or not self._proximal.fits(self.terms, learning_rate, self.strength):
            self._proximal = _ProximalMap(self.terms, learning_rate, self.strength)
        for name, theta in self.parameters.items():
            torch.addcmul(self._proximal.shift[name], theta, self._proximal.gain[name], out=theta)

    def after_step(self) -> None:  # noqa: B027 - most penalties rightly do nothing here
        """Called after each step of the optimizer. Only SI watches the path that the weights take."""

    @abstractmethod
    def consolidate(self, batches: Iterable[Batch], classes: Sequence[int] | None = None) -> None:
        """Give the weights as they are now their importance for the task in `batches`, and anchor them.

        `batches` yields (inputs, targets) of the task just learned; `classes` are the outputs that take part
        where a task has its own (all by default). The model is left as it was found: traces, BatchNorm
        statistics, gradients and modes untouched.
        """

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the protected weights as they are now."""
        return {name: theta.detach().clone() for name, theta in self.parameters.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """Everything that has been remembered, as one flat dictionary of tensors."""
        state: dict[str, Tensor] = {}
        for i, term in enumerate(self.terms):
            state |= _prefixed(f"terms.{i}.importance.", term.importance)
            state |= _prefixed(f"terms.{i}.anchor.", term.anchor)
        return {name: tensor.clone() for name, tensor in (state | self.extra_state()).items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` gave; refused whole if it belongs to another model."""
        state = dict(state)
        num_terms = len({key.split(".")[1] for key in state if key.startswith("terms.")})
        if num_terms > 1 and not self.keeps_every_term:
            raise InputError(f"this state does not belong to {type(self).__name__}: it has {num_terms} terms, not one")
        terms = [
            Term(self._take(state, f"terms.{i}.importance."), self._take(state, f"terms.{i}.anchor."))
            for i in range(num_terms)
        ]
        extra = {group: self._take(state, f"{group}.") for group in self.extra_groups}
        if state:
            raise InputError(
                f"this state does not belong to {type(self).__name__} of this model: {next(iter(state))!r} is unknown"
            )
        self.terms = terms
        for group, tensors in extra.items():
            setattr(self, group, tensors)

    def extra_state(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for group in self.extra_groups:
            state |= _prefixed(f"{group}.", getattr(self, group))
        return state

    def _take(self, state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
        taken = {}
        for name, theta in self.parameters.items():
            tensor = state.pop(prefix + name, None)
            if tensor is None or tensor.shape != theta.shape:
                found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {tuple(theta.shape)}"
                raise InputError(f"this state is not of this model: {prefix + name!r} {found}")
            taken[name] = tensor.to(device=theta.device, dtype=theta.dtype, copy=True)
        return taken


class _ProximalMap:
    """The proximal step as θ ← shift + gain θ, worked out once for all steps between two consolidations.

    It is a weighted mean of θ and of the anchors' own mean (by importance), and stays one where 2 lr λ Ω overflows.
    """

    def __init__(self, terms: list[Term], learning_rate: float, strength: float):
        self.made_for = (list(terms), learning_rate, strength)
        self.gain: dict[str, Tensor] = {}
        self.shift: dict[str, Tensor] = {}
        scale = 2 * learning_rate * strength
        for name in terms[0].importance:
            hold = torch.stack([term.importance[name] for term in terms]).sum(dim=0)
            pull = torch.stack([term.importance[name] * term.anchor[name] for term in terms]).sum(dim=0)
            anchor = torch.where(hold > 0, pull / hold, 0)
            held = scale * hold
            self.gain[name] = 1 / (1 + held)
            weight = torch.where(held > 1, 1 - self.gain[name], held * self.gain[name])  # each exact where it is used
            self.shift[name] = weight * anchor

    def fits(self, terms: list[Term], learning_rate: float, strength: float) -> bool:
        own_terms, *settings = self.made_for
        same_terms = len(terms) == len(own_terms) and all(a is b for a, b in zip(terms, own_terms, strict=True))
        return same_terms and settings == [learning_rate, strength]


class NoPenalty(Penalty):
    """Plain finetuning: nothing is remembered, so every task is free to overwrite the last."""

    def __init__(self, model: nn.Module):
        super().__init__(model, strength=1)

    def consolidate(self, batches: Any = None, classes: Sequence[int] | None = None) -> None:
        pass


class _QuadraticForm(torch.autograd.Function):
    """`Penalty.loss` with its gradient written down: an elementwise pass instead of a graph over all weights."""

    @staticmethod
    def forward(ctx: Any, penalty: Penalty, *theta: Tensor) -> Tensor:
        ctx.penalty = penalty
        ctx.save_for_backward(*theta)
        cost = torch.zeros((), device=theta[0].device, dtype=theta[0].dtype)
        for term in penalty.terms:
            for name, value in zip(penalty.parameters, theta, strict=True):
                cost = cost + (term.importance[name] * (value - term.anchor[name]).square()).sum()
        return penalty.strength * cost

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        penalty, (scale,) = ctx.penalty, outer
        # SI must later take this part out of .grad again, so how much of it went in is kept. Where .grad is None,
        # nothing is in it yet: an earlier backward pass may have been thrown away without a step.
        kept = next(iter(penalty.parameters.values())).grad is not None
        so_far = penalty.gradient_share if kept else None
        penalty.gradient_share = scale.detach() if so_far is None else so_far + scale.detach()
        if not penalty.terms:
            return (None,) * (1 + len(ctx.saved_tensors))
        at = dict(zip(penalty.parameters, ctx.saved_tensors, strict=True))
        return None, *(scale * gradient for gradient in penalty.gradient(at).values())


def slow_parameters(model: nn.Module, with_alpha: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model by name, without those of the plastic component (Eq. 4)."""
    plastic = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "plastic_parameters", ())
        if not (with_alpha and name == "alpha")
    }
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in plastic}


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
