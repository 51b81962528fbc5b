"""The contract of every penalty, and the quadratic form that they share (Eq. 1, Eq. 4)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.common.errors import InputError, NotFiniteError, check_choice
from engram.nn.distributed import bare
from engram.penalties.growth import check_grown, with_rows


@dataclass(frozen=True)
class Term:
    """What one consolidation remembers of each slow weight: its importance Ω and its anchor θ*."""

    importance: dict[str, Tensor]
    anchor: dict[str, Tensor]


class Penalty(ABC):
    """A quadratic cost for moving weights that mattered to earlier tasks.

    Eq. 4:  L̃(θ, α, η) = L(θ, α, η) + λ Σ_k Ω_k (θ_k − θ*_k)²

    A subclass says in `importance` what Ω is. In a training loop, with Eq. 4's gradient in the loss:

        loss = cross_entropy(model(inputs), targets) + penalty.loss()
        loss.backward()
        optimizer.step()
        penalty.after_step()

    or with the proximal step in place of `penalty.loss()`, stable however large λ Ω has grown:

        optimizer.step()
        penalty.proximal_step(optimizer)
        penalty.after_step()

    and `penalty.consolidate(batches)` when a task has been learned.

    Args:
        model: any module, already on its device. Its trainable slow weights are protected; parameters that a
            module lists in `plastic_parameters` (the DHP Softmax's α and η) are left free. What torch.compile or
            DistributedDataParallel returned will do as well.
        strength: λ of Eq. 4.
        regularize_alpha: protect the plasticity coefficients α too (the paper does not).
        protect: "slow" protects θ (Eq. 4). "in-force" protects the weight that the network computes with, θ + α Hebb:
            Ω is its importance all the same, since ∂z/∂θ is its derivative, and θ then makes up for what the trace
            would change where it matters:  λ Σ Ω ((θ + α Hebb) − (θ* + α* Hebb*))².
    """

    keeps_every_term = False  # a term a task, or one for all
    gamma: float = 1.0  # how much of the older tasks' importance stays, where one term is for all
    extra_groups: tuple[str, ...] = ()  # attributes of a subclass, each a tensor per weight, that are state as well

    def __init__(self, model: nn.Module, *, strength: float, regularize_alpha: bool = False, protect: str = "slow"):
        if not (math.isfinite(strength) and strength > 0):
            raise InputError(f"a penalty's strength must be a positive number, not {strength}")
        model = bare(model)
        self.model = model
        self.strength = strength
        self.regularize_alpha = regularize_alpha
        self.parameters = slow_parameters(model, regularize_alpha)
        if not self.parameters:
            raise InputError("the model has no trainable slow weights for a penalty to protect")
        check_choice("protect", protect, ("slow", "in-force"))
        # what stands beside a slow weight in force; the penalty looks at it, and moves the slow weight only
        self.fast = fast_parts(model, self.parameters) if protect == "in-force" else {}
        self.terms: list[Term] = []
        self._found_alive: list[Term] | None = None  # the terms for which the weights were last seen to be the model's
        self._pull: tuple[list[Term], tuple[float | Mapping[str, float], float, str], Pull] | None = None

    def loss(self) -> Tensor:
        """λ Σ_k Ω_k (θ_k − θ*_k)², a scalar; zero before the first consolidation."""
        if self._found_alive is not self.terms:  # once between two consolidations
            self.check_alive()
        return _QuadraticForm.apply(self, *self.parameters.values())

    def gradient(self, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        """The gradient of `loss` at the given values, written down:  2 λ Σ_terms Ω_k (θ_k − θ*_k)."""
        gradient = {}
        for name, theta in self.in_force(parameters).items():
            slope = torch.zeros_like(theta)
            for term in self.terms:
                slope = slope + term.importance[name] * (theta - term.anchor[name])
            gradient[name] = 2 * self.strength * slope
        return gradient

    @torch.no_grad()
    def proximal_step(self, learning_rate: float | Optimizer) -> None:
        """The exact minimiser of  ‖θ′ − θ‖² / (2 lr) + loss(θ′): it has `loss`'s fixed point and cannot diverge.

        θ ← (θ + 2 lr λ Σ Ω θ*) / (1 + 2 lr λ Σ Ω)

        `learning_rate` is a number, or the optimizer itself: each weight then has the rate of its parameter group as it
        stands now, and one that the optimizer does not move stays where it is.

        Weights that stand beside a fast part come last: they make up for it as it is then, also where α is held.
        """
        if isinstance(learning_rate, Optimizer):
            pull = self.pull(learning_rates(learning_rate, self.parameters))
        else:
            pull = self.pull(learning_rate)
        if pull is not None:
            for name, theta in sorted(self.parameters.items(), key=lambda item: item[0] in self.fast):
                if theta.requires_grad:  # else it was frozen, and stays where it is
                    torch.addcmul(moved_shift(pull, name, self.fast), theta, pull.gain[name], out=theta)

    def in_force(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights as the network computes with them: those that have a fast part, with it."""
        return {n: t + self.fast[n]().detach() if n in self.fast else t for n, t in parameters.items()}

    @torch.no_grad()
    def pull(self, learning_rate: float | Mapping[str, float], step: str = "proximal") -> Pull | None:
        """What the penalty does to the weights in a step of one kind; None before the first consolidation.

        The learning rate is one for all weights, or each weight's own by its name. It is worked out once for all steps
        between two consolidations that have the same.
        """
        if not self.terms:
            return None
        asked = (learning_rate, self.strength, step)
        if self._pull is None or self._pull[0] is not self.terms or self._pull[1] != asked:
            make = {"proximal": proximal_pull, "gradient": gradient_pull}[step]
            rates = (
                learning_rate if isinstance(learning_rate, Mapping) else dict.fromkeys(self.parameters, learning_rate)
            )
            scales = {name: 2 * rate * self.strength for name, rate in rates.items()}
            self._pull = (self.terms, asked, make(self.terms, scales))
        return self._pull[2]

    def forget_pull(self) -> None:
        """Free the memory of the last `pull`, for who has a copy of it."""
        self._pull = None

    def check_alive(self) -> None:
        """Refuse to protect tensors that the model no longer computes with."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, theta in self.parameters.items():
            if own.get(name) is not theta:
                raise InputError(
                    f"the model's {name!r} is no longer the tensor that this penalty was made for: "
                    "call penalty.grow() after head.grow(), or make the penalty anew"
                )
        self._found_alive = self.terms

    def note_backward(self, scale: Tensor) -> None:  # noqa: B027 - most penalties rightly do nothing here
        """Called when a backward pass comes through `loss`, which was multiplied by `scale`. Only SI needs to know."""

    def after_backward(self, scale: float = 1.0) -> None:  # noqa: B027 - most penalties rightly do nothing here
        """Called directly after backward(), where gradients are then clipped or unscaled. Only SI looks at them."""

    def after_step(self) -> None:  # noqa: B027 - most penalties rightly do nothing here
        """Called after each step of the optimizer. Only SI watches the path that the weights take."""

    def consolidate(self, batches: Iterable[Any], classes: Sequence[int] | None = None) -> None:
        """Give the weights as they are now their importance for the task in `batches`, and anchor them.

        `batches` yields (inputs, targets) of the task just learned; `classes` are the outputs that take part
        where a task has its own (all by default). The model is left as it was found: traces, BatchNorm
        statistics, gradients and modes untouched.

        Under DistributedDataParallel every rank calls this, each with its own share of the task.
        """
        self.check_alive()
        self.remember(check_finite(self.importance(batches, classes)))

    @abstractmethod
    def importance(self, batches: Iterable[Any], classes: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Ω of each protected weight for the task in `batches` alone; nothing is changed.

        Written for one model, and without looking at values: a stack of models then has it mapped over them.
        """

    def remember(self, importance: dict[str, Tensor]) -> None:
        """Ω ← γ Ω + Ω_task  and  θ* ← θ; or a term of its own for every task."""
        if self.keeps_every_term:
            self.terms = [*self.terms, Term(importance, self.anchors())]
            return
        for term in self.terms:
            importance = {name: self.gamma * term.importance[name] + omega for name, omega in importance.items()}
        self.terms = [Term(importance, self.anchors())]

    @torch.no_grad()
    def anchors(self) -> dict[str, Tensor]:
        """A copy of the protected weights, as they are in force now if that is what is protected."""
        return {name: theta.clone() for name, theta in self.in_force(self.snapshot()).items()}

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the protected weights as they are now."""
        return {name: theta.detach().clone() for name, theta in self.parameters.items()}

    @torch.no_grad()
    def grow(self) -> None:
        """Follow the model's layers that grew: call it after `head.grow(...)`, between two steps.

        What is remembered of the old rows stays as it is, bit for bit. New rows have no importance, and as their
        anchor the weights that they have now.
        """
        parameters = slow_parameters(self.model, self.regularize_alpha)
        check_grown(self.parameters, parameters)
        self.parameters = parameters
        none, now = {name: torch.zeros_like(theta) for name, theta in parameters.items()}, self.anchors()
        self.terms = [Term(with_rows(term.importance, none), with_rows(term.anchor, now)) for term in self.terms]
        for group in self.extra_groups:
            setattr(self, group, with_rows(getattr(self, group), self.begun(group)))
        self._found_alive = None

    def begun(self, group: str) -> dict[str, Tensor]:
        """What a group of `extra_groups` holds of weights that have taken no step yet: zeros, unless overridden."""
        return {name: torch.zeros_like(theta) for name, theta in self.parameters.items()}

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
            if tensor.is_complex() and not theta.is_complex():
                raise InputError(f"this state is not of this model: {prefix + name!r} is of {tensor.dtype}")
            taken[name] = tensor.to(device=theta.device, dtype=theta.dtype, copy=True)
        return taken


@dataclass(frozen=True)
class Pull:
    """A penalty's part of a step as an affine map of each weight:  θ ← gain θ + shift."""

    gain: dict[str, Tensor]
    shift: dict[str, Tensor]


def moved_shift(pull: Pull, name: str, fast: Mapping[str, Callable[[], Tensor]]) -> Tensor:
    """The shift of a weight now. Where it stands beside a fast part f, its anchor is θ* − f, which moves with f:

    shift − (1 − gain) f,  for either kind of step, since shift = (1 − gain) θ*.
    """
    shift = pull.shift[name]
    return shift if name not in fast else torch.addcmul(shift, pull.gain[name] - 1, fast[name]().detach())


def learning_rates(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, float]:
    """Each weight's rate in its group of the optimizer as it stands now; 0 for one that it does not move."""
    rates = {id(theta): float(group["lr"]) for group in optimizer.param_groups for theta in group["params"]}
    if not any(id(theta) in rates for theta in parameters.values()):
        raise InputError("the optimizer holds none of the weights that the penalty protects: it is of another model")
    return {name: rates.get(id(theta), 0.0) for name, theta in parameters.items()}


def proximal_pull(terms: list[Term], scale: Mapping[str, float]) -> Pull:
    """After the optimizer's step:  θ ← (θ + s Σ Ω θ*) / (1 + s Σ Ω),  with s = 2 lr λ of each weight.

    It is a weighted mean of θ and of the anchors' own mean (by importance), and stays one where s Ω overflows.
    """
    gain, shift = {}, {}
    for name, (hold, drag) in _sums_over(terms).items():
        anchor = torch.where(hold > 0, drag / hold, 0)
        held = scale[name] * hold
        gain[name] = 1 / (1 + held)
        weight = torch.where(held > 1, 1 - gain[name], held * gain[name])  # each exact where it is used
        shift[name] = weight * anchor
    return Pull(gain, shift)


def gradient_pull(terms: list[Term], scale: Mapping[str, float]) -> Pull:
    """Together with the optimizer's step:  θ ← θ − lr g − s Σ Ω (θ − θ*),  with s = 2 lr λ of each weight."""
    sums = _sums_over(terms)
    return Pull(
        {name: 1 - scale[name] * hold for name, (hold, _) in sums.items()},
        {name: scale[name] * drag for name, (_, drag) in sums.items()},
    )


def _sums_over(terms: list[Term]) -> dict[str, tuple[Tensor, Tensor]]:
    """Σ Ω and Σ Ω θ* over the terms, for each weight."""
    return {
        name: (
            torch.stack([term.importance[name] for term in terms]).sum(dim=0),
            torch.stack([term.importance[name] * term.anchor[name] for term in terms]).sum(dim=0),
        )
        for name in terms[0].importance
    }


class NoPenalty(Penalty):
    """Plain finetuning: nothing is remembered, so every task is free to overwrite the last."""

    def __init__(self, model: nn.Module):
        super().__init__(model, strength=1)

    def consolidate(self, batches: Any = None, classes: Sequence[int] | None = None) -> None:
        pass

    def importance(self, batches: Any = None, classes: Sequence[int] | None = None) -> dict[str, Tensor]:
        return {name: torch.zeros_like(theta) for name, theta in self.parameters.items()}


class _QuadraticForm(torch.autograd.Function):
    """`Penalty.loss` with its gradient written down: an elementwise pass instead of a graph over all weights."""

    @staticmethod
    def forward(ctx: Any, penalty: Penalty, *theta: Tensor) -> Tensor:
        ctx.penalty = penalty
        ctx.save_for_backward(*theta)
        cost = torch.zeros((), device=theta[0].device, dtype=theta[0].dtype)
        for term in penalty.terms:
            for name, value in penalty.in_force(dict(zip(penalty.parameters, theta, strict=True))).items():
                cost = cost + (term.importance[name] * (value - term.anchor[name]).square()).sum()
        return penalty.strength * cost

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        penalty, (scale,) = ctx.penalty, outer
        penalty.note_backward(scale.detach())  # SI must later take this part out of .grad again
        if not penalty.terms:
            return (None,) * (1 + len(ctx.saved_tensors))
        at = dict(zip(penalty.parameters, ctx.saved_tensors, strict=True))
        return None, *(scale * gradient for gradient in penalty.gradient(at).values())


def check_finite(importance: dict[str, Tensor]) -> dict[str, Tensor]:
    """Refuse importances that would hold a weight at NaN for ever."""
    for name, omega in importance.items():
        if not torch.isfinite(omega).all():
            raise NotFiniteError(
                f"the importance of {name!r} is NaN or infinite: the samples or the weights are not finite"
            )
    return importance


def slow_parameters(model: nn.Module, with_alpha: bool = False) -> dict[str, nn.Parameter]:
    """The trainable parameters of a model by name, without those of the plastic component (Eq. 4)."""
    plastic = {
        id(getattr(module, name))
        for module in model.modules()
        for name in getattr(module, "plastic_parameters", ())
        if not (with_alpha and name == "alpha")
    }
    return {name: p for name, p in model.named_parameters() if p.requires_grad and id(p) not in plastic}


def fast_parts(model: nn.Module, slow: Mapping[str, Tensor]) -> dict[str, Callable[[], Tensor]]:
    """For each of the slow weights that stand beside a trace, a function that gives what the trace adds to it."""
    found = {}
    for name, module in model.named_modules():
        weight = f"{name}.weight".removeprefix(".")
        fast_part = getattr(module, "fast_part", None)
        if weight in slow and getattr(module, "plastic_parameters", None) and callable(fast_part):
            found[weight] = fast_part
    return found


def _prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}
