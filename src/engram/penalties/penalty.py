"""The contract of every penalty: five verbs for a training loop, and a memory that is a dict of tensors."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.common.errors import InputError, check_choice
from engram.nn.distributed import bare
from engram.nn.modules import fast_parts, slow_parameters
from engram.penalties.checks import Places, check_arguments, check_grown, frozen_parameters, warn_of_unfrozen
from engram.penalties.task_checks import check_started, checked_classes
from engram.penalties.terms import Batches, Classes, State, fitted, with_rows

VERBS = ("loss", "proximal_step", "after_backward", "after_step", "consolidate")


class Penalty(ABC):
    """A cost for changing weights that mattered to earlier tasks.

    In a training loop, with the penalty's gradient in the loss:

        loss = cross_entropy(model(inputs), targets) + penalty.loss()
        loss.backward()
        optimizer.step()
        penalty.after_step()

    or with the proximal step in place of `penalty.loss()`, which is stable at any strength:

        optimizer.step()
        penalty.proximal_step(optimizer)
        penalty.after_step()

    and `penalty.consolidate(batches)` when a task has been learned.

    A custom penalty of the form  λ Σ Ω (θ − θ*)²  derives from `engram.penalties.Quadratic` and defines `importance`.
    Any other derives from this class and defines `loss`, `consolidate` and any other verbs that it needs. An engine
    calls the verbs that a class defines.

    Args:
        model: any module, already on its device. Its trainable slow weights are protected; parameters that a
            module lists in `plastic_parameters` (the DHP Softmax's α and η) are left free. What torch.compile or
            DistributedDataParallel returned works as well.
        strength: λ of Eq. 4.
        regularize_alpha: protect the plasticity coefficients α too (the paper does not).
        protect: "slow" protects θ (Eq. 4). "in-force" protects the weight that the network computes with, θ + α Hebb:
            Ω is its importance too, since ∂z/∂θ is its derivative, and θ then compensates for what the trace would
            change where it matters:  λ Σ Ω ((θ + α Hebb) − (θ* + α* Hebb*))².

    Example:
        >>> class Absolute(Penalty):
        ...     def loss(self):
        ...         anchors = self.group("anchor")
        ...         moved = [(theta - anchors[name]).abs().sum() for name, theta in self.parameters.items()]
        ...         return self.strength * torch.stack(moved).sum()
        ...     @classmethod
        ...     def initial_state(cls, parameters):
        ...         return {f"anchor.{name}": theta.detach().clone() for name, theta in parameters.items()}
        ...     def consolidate(self, batches=(), classes=None):
        ...         self.state = self.initial_state(self.parameters)
    """

    remembers: ClassVar[bool] = True  # False for a penalty whose `consolidate` never does anything
    _custom_verbs: ClassVar[tuple[str, ...]] = ()
    num_tasks: int | None = 0  # how many were consolidated; None after a state was loaded, which does not say

    def __init_subclass__(cls, **options: Any) -> None:
        """Record the verbs that a class defines. One whose verbs an engine need not call declares `_custom_verbs`."""
        super().__init_subclass__(**options)
        if "_custom_verbs" not in vars(cls):
            cls._custom_verbs = tuple(verb for verb in VERBS if verb in vars(cls) or verb in cls._custom_verbs)

    def __init__(self, model: nn.Module, *, strength: float, regularize_alpha: bool = False, protect: str = "slow"):
        check_arguments(model, strength)
        model = bare(model)
        self.model = model
        self.strength = strength
        self.regularize_alpha = regularize_alpha
        self.parameters = slow_parameters(model, regularize_alpha)
        if not self.parameters and self.remembers:
            raise InputError("the model has no trainable slow weights for a penalty to protect")
        check_choice("protect", protect, ("slow", "in-force"))
        self.protect = protect
        # what the trace adds to a slow weight; the penalty reads it, and moves the slow weight only
        self.fast = fast_parts(model, self.parameters) if protect == "in-force" else {}
        self.state: State = self.initial_state(self.parameters)
        self._places: Places | None = None
        self._frozen = frozen_parameters(model)  # what was not trained, and is not protected if it is later

    def __repr__(self) -> str:
        num_weights = sum(theta.numel() for theta in self.parameters.values())
        facts = [f"strength={self.strength:g}", f"{num_weights:,} weights protected", self.held()]
        return f"{type(self).__name__}({', '.join(filter(None, facts)) if self.remembers else ''})"

    def held(self) -> str:
        """What it has consolidated so far, in words; "" where a class does not say."""
        return ""

    # --- the five verbs

    @abstractmethod
    def loss(self) -> Tensor:
        """The cost of the current weights, a scalar."""

    def proximal_step(self, learning_rate: float | Optimizer) -> None:
        """Move the weights to the minimiser of  ‖θ′ − θ‖² / (2 lr) + loss(θ′).

        Args:
            learning_rate: a number, or the optimizer: each weight then has the rate of its parameter group.
        """
        raise InputError(f"{type(self).__name__} has no proximal step: add penalty.loss() to the loss instead")

    def before_backward(self, logits: Tensor, targets: Tensor, scale: float = 1.0) -> None:  # noqa: B027
        """Call before backward() where a penalty reads the logits. Only SI with a temperature does.

        Args:
            logits: (B, C), those that the loss is computed from.
            targets: (B,).
            scale: the factor of this batch in the loss.
        """

    def after_backward(self, scale: float = 1.0) -> None:  # noqa: B027 - most penalties need nothing here
        """Call directly after backward(), where gradients are then clipped or unscaled. Only SI reads them.

        Args:
            scale: the factor by which the loss was multiplied.
        """

    def after_step(self) -> None:  # noqa: B027 - most penalties need nothing here
        """Call after each step of the optimizer. Only SI follows the path of the weights."""

    @abstractmethod
    def consolidate(self, batches: Batches = (), classes: Classes = None) -> None:
        """Remember the task in `batches`, which has been learned, and protect it from now on.

        Args:
            batches: yields (inputs, targets) of the task just learned.
            classes: the outputs that take part, where a task has its own; None for all.

        Example:
            >>> penalty.consolidate(loader)
        """

    # --- the memory

    @classmethod
    def initial_state(cls, parameters: Mapping[str, Tensor]) -> State:
        """What is remembered of these weights before the first step: nothing, unless a class says otherwise.

        Args:
            parameters: the protected weights by name.
        """
        return {}

    def group(self, group: str) -> dict[str, Tensor]:
        """The tensors of one group of the state, by the names of the weights.

        Args:
            group: the part of their names before the first point.

        Example:
            >>> engram.SI(model, strength=1.0).group("path")["head.weight"].shape
            torch.Size([3, 8])
        """
        return {name: self.state[f"{group}.{name}"] for name in self.parameters}

    def state_dict(self) -> State:
        """A copy of everything that is remembered.

        Example:
            >>> torch.save({"model": model.state_dict(), "penalty": penalty.state_dict()}, "model.pt")
        """
        copied = OrderedDict((key, tensor.clone()) for key, tensor in self.state.items())
        copied._metadata = {"penalty": type(self).__name__}  # type: ignore[attr-defined] # where PyTorch keeps its own
        return copied

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned. A state of another model is refused, and changes nothing.

        Args:
            state: what `state_dict` returned.

        Example:
            >>> torch.save({"model": model.state_dict(), "penalty": penalty.state_dict()}, "model.pt")
            >>> penalty.load_state_dict(torch.load("model.pt")["penalty"])
        """
        kind = getattr(state, "_metadata", {}).get("penalty", type(self).__name__)
        if kind != type(self).__name__:
            raise InputError(f"this state is one of {kind}, whose importances are no {type(self).__name__}'s")
        expected = self.expected_state(state)
        loaded = {key: fitted(key, state.get(key), like) for key, like in expected.items()}
        unknown = [key for key in state if key not in expected]
        if unknown:
            raise InputError(
                f"this state does not belong to {type(self).__name__} of this model: {unknown[0]!r} is unknown"
            )
        self.state, self.num_tasks = loaded, None

    def expected_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Tensors of the shapes that a state to be loaded must have.

        Args:
            state: the state to be loaded, only the names of which are read.
        """
        return self.initial_state(self.parameters)

    @torch.no_grad()
    def grow(self) -> None:
        """Follow layers of the model that have grown: call it after `head.grow(...)`, between two steps.

        What is remembered of the old rows stays the same, bit for bit. New rows are remembered as in a new penalty.

        Example:
            >>> head.grow(12)
            >>> penalty.grow()
        """
        parameters = slow_parameters(self.model, self.regularize_alpha)
        check_grown(self.parameters, parameters)
        self.parameters = parameters
        self.state = with_rows(self.state, self.grown_state())

    def grown_state(self) -> State:
        """What would be remembered now of weights that are all new."""
        return self.initial_state(self.parameters)

    # --- what an engine asks

    def unwatch(self) -> None:  # noqa: B027 - most penalties watch nothing
        """Leave the gradients of the weights alone: an engine that takes the steps itself makes no mistakes."""

    @property
    def custom_verbs(self) -> tuple[str, ...]:
        """The verbs that this penalty defines in its own way, so that an engine must call them."""
        return tuple(verb for verb in VERBS if verb in self._custom_verbs or verb in vars(self))

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """The numbers and words that the penalty was made with: arguments of constructors, kept under their names."""
        kinds = [kind for kind in type(self).__mro__ if issubclass(kind, Penalty)]
        parameters = [p for kind in kinds for p in inspect.signature(kind.__init__).parameters.values()]
        names = dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        values = {name: getattr(self, name, None) for name in names}
        return {name: value for name, value in values.items() if isinstance(value, bool | int | float | str)}

    def check_alive(self) -> None:
        """Refuse to protect tensors that the model no longer computes with."""
        if self._places is None or self._places.parameters is not self.parameters:
            self._places = Places(self.model, self.parameters)
        self._places.check()

    def check_task(self, classes: Classes) -> list[int] | None:
        """Refuse to consolidate a model that is not ready for it; the classes of the task, as numbers.

        Args:
            classes: those given to `consolidate`.
        """
        check_started(self.model)
        return checked_classes(classes)

    def warn_of_unfrozen(self) -> None:
        """Warn once of weights that are trained now and were frozen when the penalty was made."""
        if self.remembers and warn_of_unfrozen(self.model, self._frozen):
            self._frozen = []


def check_step(penalty: Penalty | type[Penalty], step: str) -> None:
    """Refuse a custom loss that the proximal step, made for the quadratic form, would ignore.

    Args:
        penalty: any penalty, or its class.
        step: "proximal" or "gradient".

    Example:
        >>> check_step(engram.SI(model, strength=1.0), "proximal")
    """
    kind, verbs = (
        (penalty, penalty._custom_verbs) if isinstance(penalty, type) else (type(penalty), penalty.custom_verbs)
    )
    if step == "proximal" and "loss" in verbs and "proximal_step" not in verbs:
        raise InputError(f"{kind.__name__} defines its own `loss` but no `proximal_step`: set penalty_step to gradient")
