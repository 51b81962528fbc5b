"""The penalty of quadratic form that EWC, SI and MAS share (Eq. 1, Eq. 4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engram.common.errors import InputError
from engram.penalties.gradients import QuadraticForm
from engram.penalties.penalty import Penalty
from engram.penalties.step import learning_rates, moved_shift, pull_weight, zeros_for_sums
from engram.penalties.task_checks import warn_of_misuse
from engram.penalties.terms import (
    TERMS,
    Batches,
    Classes,
    Pull,
    Settings,
    State,
    Term,
    Weights,
    check_finite,
    gradient_pull,
    proximal_pull,
    remember,
    slope_pull,
    state_of,
    terms_of,
)


class Quadratic(Penalty):
    """A quadratic cost for moving weights that mattered to earlier tasks.

    Eq. 4:  L̃(θ, α, η) = L(θ, α, η) + λ Σ_k Ω_k (θ_k − θ*_k)²

    A subclass defines `importance`, which depends on nothing but its arguments, so that a stack can compute it for all
    of its models together. Importances of successive tasks add up (γ = 1); set `gamma = 0` to keep only those of the
    last task. The arguments are those of `Penalty`.

    Example:
        >>> class Uniform(Quadratic):
        ...     gamma = 0  # so that the importance stays 1 after any number of tasks
        ...
        ...     @classmethod
        ...     def importance(cls, model, parameters, state, settings, batches, classes=None):
        ...         return {name: torch.ones_like(theta) for name, theta in parameters.items()}
    """

    _custom_verbs = ()  # an engine takes the steps of the quadratic form itself
    keeps_every_term: ClassVar[bool] = False  # a term for every task, or one for all
    path_group: ClassVar[str | None] = None  # the group of the state in which an engine sums the path of each weight
    gamma: float = 1.0  # γ of  Ω ← γ Ω + Ω_task,  for penalties with one term for all tasks

    def __init__(self, model: nn.Module, *, strength: float, regularize_alpha: bool = False, protect: str = "slow"):
        super().__init__(model, strength=strength, regularize_alpha=regularize_alpha, protect=protect)
        # Each belongs to one `state`, which is replaced whenever the terms change.
        self._alive: State | None = None
        self._unused: State | None = None
        self._terms: tuple[State, list[Term]] | None = None
        self._pull: tuple[State, tuple[float | Mapping[str, float], float, str], Pull] | None = None

    @property
    def terms(self) -> list[Term]:
        """What is remembered: importance and anchor of each weight, for all tasks or for each."""
        if self._terms is None or self._terms[0] is not self.state:
            self._terms = (self.state, terms_of(self.state))
        return self._terms[1]

    # --- the verbs
    def loss(self) -> Tensor:
        """λ Σ_k Ω_k (θ_k − θ*_k)², a scalar; zero before the first consolidation.

        Example:
            >>> (cross_entropy(model(inputs), targets) + penalty.loss()).backward()
        """
        self._check_model()
        self._unused = None
        return QuadraticForm.apply(self, *self.parameters.values())

    @torch.no_grad()
    def proximal_step(self, learning_rate: float | Optimizer) -> None:
        """The exact minimiser of  ‖θ′ − θ‖² / (2 lr) + loss(θ′): it has `loss`'s fixed point and cannot diverge.

        θ ← (θ + 2 lr λ Σ Ω θ*) / (1 + 2 lr λ Σ Ω)

        Weights that carry a trace come last: they compensate for the trace after α has moved, if α is protected too.

        Args:
            learning_rate: a number, or the optimizer: each weight then has the current rate of its parameter group,
                and a weight that the optimizer does not move stays the same.

        Example:
            >>> optimizer.step()
            >>> penalty.proximal_step(optimizer)
        """
        self._check_model()
        pull = self.pull(learning_rates(learning_rate, self.parameters))
        if pull is not None:
            for name, theta in sorted(self.parameters.items(), key=lambda item: item[0] in self.fast):
                if theta.requires_grad:  # otherwise it has been frozen since
                    pull_weight(theta, pull.gain[name], moved_shift(pull, name, self.fast))

    def consolidate(self, batches: Batches = (), classes: Classes = None) -> None:
        """Compute the importance of the weights for the task in `batches`, and anchor them where they are now.

        The model is left as it was: traces, BatchNorm statistics, gradients and modes.

        Under DistributedDataParallel every rank calls this, each with its own part of the task.

        Args:
            batches: yields (inputs, targets) of the task just learned.
            classes: the outputs that take part, where a task has its own; None for all.

        Example:
            >>> penalty.consolidate(loader)
        """
        self._check_model()
        classes = self.check_task(classes)
        checked = self.checked(batches, classes)
        found = self.importance(self.model, self.parameters, self.state, self.settings, checked, classes)
        if self.terms:
            unused = self._unused is self.state and not {"loss", "proximal_step"} & set(self.custom_verbs)
            warn_of_misuse(self.anchors(), self.terms[-1].anchor, found, unused)
        self.remember(check_finite(found))

    # --- what a penalty of this form defines

    @classmethod
    @abstractmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches,
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        """Ω of each weight for the task in `batches` alone. It changes nothing, and does not branch on values.

        Args:
            model: the model, in any mode.
            parameters: the protected weights by name.
            state: what the penalty remembers.
            settings: the penalty's settings, such as `strength`; in a stack, numbers are tensors.
            batches: yields (inputs, targets) of the task.
            classes: the outputs that take part; None for all.
        """

    def checked(self, batches: Batches, classes: Classes) -> Iterable[Any]:
        """The batches, checked one by one as they are read.

        Args:
            batches: those given to `consolidate`.
            classes: those given to `consolidate`.
        """
        return batches

    # --- what an engine uses
    @torch.no_grad()
    def pull(self, learning_rate: float | Mapping[str, float], step: str = "proximal") -> Pull | None:
        """What the penalty does to the weights in a step; None before the first consolidation.

        It is computed once for all steps between two consolidations that have the same arguments.

        Args:
            learning_rate: one for all weights, or each weight's own by its name.
            step: "proximal", "gradient", or "slope" for the gradient itself, times the learning rate.

        Example:
            >>> pull = penalty.pull(0.01, "gradient")
        """
        self._unused = None
        if not self.terms:
            return None
        asked = (learning_rate, self.strength, step)
        if self._pull is None or self._pull[0] is not self.state or self._pull[1] != asked:
            make = {"proximal": proximal_pull, "gradient": gradient_pull, "slope": slope_pull}[step]
            own = learning_rate if isinstance(learning_rate, Mapping) else dict.fromkeys(self.parameters, learning_rate)
            scales = {name: 2 * rate * self.strength for name, rate in own.items()}
            self._pull = (self.state, asked, make(self.terms, scales))
        return self._pull[2]

    def forget_pull(self) -> None:
        """Free the memory of the last `pull`, for an engine that has its own copy."""
        self._pull = None

    def remember(self, importance: dict[str, Tensor]) -> None:
        """Take the importances of a task, and anchor the weights where they are now.

        Args:
            importance: Ω_task of each weight.

        Example:
            >>> penalty.remember({name: torch.ones_like(theta) for name, theta in penalty.parameters.items()})
        """
        before = self.num_tasks if self.terms else 0
        self.state = remember(self.state, importance, self.anchors(), self.keeps_every_term, self.gamma)
        self.num_tasks = None if before is None else before + 1
        self._alive = self._terms = self._pull = None  # which would keep the last state in memory
        self._unused = self.state

    def in_force(self, parameters: Weights) -> dict[str, Tensor]:
        """Weights as the network computes with them: where a trace is protected too, with what it adds.

        Args:
            parameters: θ by name.
        """
        return {n: t + self.fast[n]().detach() if n in self.fast else t for n, t in parameters.items()}

    @torch.no_grad()
    def anchors(self) -> dict[str, Tensor]:
        """A copy of the protected weights, in force if that is what is protected."""
        return self.in_force(self.snapshot())

    def snapshot(self) -> dict[str, Tensor]:
        """A copy of the protected weights as they are now."""
        return {name: theta.detach().clone() for name, theta in self.parameters.items()}

    def expected_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        num_terms = len({key.split(".")[1] for key in state if key.startswith(TERMS)})
        if num_terms > 1 and not self.keeps_every_term:
            raise InputError(f"this state does not belong to {type(self).__name__}: it has {num_terms} terms, not one")
        own: dict[str, Tensor] = dict(self.parameters)
        return {**state_of([Term(self._nothing(), own)] * num_terms), **super().expected_state(state)}

    def held(self) -> str:
        if not self.terms:
            return "no task consolidated"
        known = len(self.terms) if self.keeps_every_term else self.num_tasks
        if not known:  # one term is the sum over any number of tasks
            return "at least 1 task consolidated"
        return f"{known} task{'s' if known > 1 else ''} consolidated"

    def grown_state(self) -> State:
        return {**state_of([Term(self._nothing(), self.anchors())] * len(self.terms)), **super().grown_state()}

    def _nothing(self) -> dict[str, Tensor]:
        return {name: zeros_for_sums(theta) for name, theta in self.parameters.items()}

    def _check_model(self) -> None:
        self.check_alive()
        if self._alive is not self.state:  # once between two consolidations
            self.warn_of_unfrozen()
            self._alive = self.state

    def _note_backward(self, scale: Tensor) -> None:
        """A backward pass goes through `loss`, which was multiplied by `scale`. Only SI needs to know."""


def form_of(penalty: Penalty) -> Quadratic | None:
    """The penalty, if its steps are those of the quadratic form; None if an engine must call its verbs.

    Args:
        penalty: any penalty.

    Example:
        >>> pull = form_of(engram.SI(model, strength=1.0)).pull(0.01)
    """
    custom = set(penalty.custom_verbs) - {"consolidate"}
    return penalty if isinstance(penalty, Quadratic) and not custom else None


class NoPenalty(Quadratic):
    """Plain finetuning: nothing is remembered, so every task can overwrite the last.

    Args:
        model: any module.

    Example:
        >>> NoPenalty(model).loss().item()
        0.0
    """

    _custom_verbs = ()
    remembers = False

    def __init__(self, model: nn.Module):
        super().__init__(model, strength=1)

    def consolidate(self, batches: Batches = (), classes: Classes = None) -> None:
        pass

    @classmethod
    def importance(
        cls,
        model: nn.Module,
        parameters: Weights,
        state: Weights,
        settings: Settings,
        batches: Batches,
        classes: Classes = None,
    ) -> dict[str, Tensor]:
        return {name: torch.zeros_like(theta) for name, theta in parameters.items()}
