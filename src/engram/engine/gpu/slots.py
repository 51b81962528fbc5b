"""What the optimizers of a section remember: one tensor for all models, for each slot of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer


class Clock:
    """The number of steps that each parameter of each model has taken, which Adam needs. The kernels only read it.

    Args:
        optimizers: of each model.
        num_parameters: of a model.
        like: a tensor of the device and type of the parameters.

    Example:
        >>> clock = Clock(optimizers, len(parameters), theta)
        >>> clock.tick(slice(0, 8))  # before a step of the first eight models
    """

    def __init__(self, optimizers: Sequence[Optimizer], num_parameters: int, like: Tensor):
        shape = (num_parameters, len(optimizers))
        self.steps = torch.zeros(shape, dtype=torch.float64, device=like.device)
        self.left = torch.ones(*shape, 2, dtype=like.dtype, device=like.device)  # 1 − β₁ᵗ and 1 − β₂ᵗ
        betas = [(optimizer.beta1, optimizer.beta2) for optimizer in optimizers]
        self.betas = torch.tensor(betas, dtype=torch.float64, device=like.device)

    def tick(self, rows: slice) -> None:
        """Count one more step of the models in `rows`, in a few calls for all their parameters."""
        steps = self.steps[:, rows]
        steps += 1
        self.left[:, rows] = (1 - self.betas[rows] ** steps[..., None]).to(self.left.dtype)


@dataclass(frozen=True)
class Slots:
    """The slots of one parameter in all models of a section, whose optimizers have the same name and slots."""

    optimizers: tuple[Optimizer, ...]  # of each model
    numbers: Tensor  # (N, 6): momentum, decay, 1 − β₁, β₂, 1 − β₂, ε
    tensors: dict[str, Tensor]  # by slot, (N, *shape); (N,) for the steps
    clock: Clock | None  # of the section, for Adam and AdamW
    left: Tensor | None  # (N, 2), the clock's for this parameter

    def __getitem__(self, rows: slice) -> Slots:
        """Those of some of the models."""
        return replace(
            self,
            optimizers=self.optimizers[rows],
            numbers=self.numbers[rows],
            tensors={slot: tensor[rows] for slot, tensor in self.tensors.items()},
            left=None if self.left is None else self.left[rows],
        )

    def of(self, row: int) -> dict[str, Tensor]:
        """What is remembered of one model, as `Optimizer.step` takes it."""
        return {slot: tensor[row] for slot, tensor in self.tensors.items()}


@torch.no_grad()
def stack_slots(
    learners: Sequence[Learner], names: Sequence[Mapping[str, str]], parameters: Mapping[str, Tensor]
) -> dict[str, Slots]:
    """The slots of each parameter; empty for plain SGD. Each learner's state then holds views of its rows.

    Args:
        learners: those of a section.
        names: for each of them, the names that its own parameters have in the section.
        parameters: (N, *shape) by name, those that are trained.

    Example:
        >>> slots = stack_slots(learners, rows.names, rows.parameters)
    """
    optimizers = tuple(Optimizer.of(learner.config) for learner in learners)
    first, like = optimizers[0], next(iter(parameters.values()), None)
    if like is None or all(optimizer.plain for optimizer in optimizers):
        return {}
    assert all((optimizer.name, optimizer.slots) == (first.name, first.slots) for optimizer in optimizers)
    numbers = [(o.momentum, o.weight_decay, 1 - o.beta1, o.beta2, 1 - o.beta2, o.eps) for o in optimizers]
    clock = Clock(optimizers, len(parameters), like) if "steps" in first.slots else None
    made = {}
    for place, (name, theta) in enumerate(parameters.items()):
        tensors = {slot: torch.zeros_like(theta) for slot in first.slots if slot != "steps"}
        if clock is not None:
            tensors["steps"] = clock.steps[place]
        for row, learner in enumerate(learners):
            _move_into(tensors, row, learner, {there: own for own, there in names[row].items()}.get(name))
        made[name] = Slots(
            optimizers,
            torch.tensor(numbers, dtype=theta.dtype, device=theta.device),
            tensors,
            clock,
            None if clock is None else clock.left[place],
        )
    return made


def _move_into(tensors: Mapping[str, Tensor], row: int, learner: Learner, name: str | None) -> None:
    """Copy what a learner has of its weight `name` into a row, which the learner's state then refers to."""
    if name is None or not learner.model.get_parameter(name).requires_grad:
        return
    for slot, tensor in tensors.items():
        key = f"{slot}.{name}"
        if key in learner.optimizer_state:
            tensor[row].copy_(learner.optimizer_state[key])
        learner.optimizer_state[key] = tensor[row]
