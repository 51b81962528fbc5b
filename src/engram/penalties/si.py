"""Synaptic Intelligence: importance is how much a weight's own path lowered the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.common.registry import PENALTIES
from engram.nn.distributed import ranks_of, take_from_first_rank
from engram.penalties.base import Penalty
from engram.penalties.gradients import Gradients

LARGEST_SHARE = 100  # a loss that holds the penalty so many times was scaled, for mixed precision


@PENALTIES.register("si", settings={"xi": "xi"})
class SI(Penalty):
    """SI (Zenke et al. 2017). `strength` is its c; importance is gathered while a task is learned.

    path_k ← path_k − g_k Δθ_k            after each step, g the gradient of the task's loss alone
    Ω_k ← Ω_k + max(path_k, 0) / ((θ_k − θ_start,k)² + ξ)        θ* ← θ        when the task ends

    Four traps are avoided here. The penalty's own gradient is no part of g: where `loss()` went into the
    backward pass, it is taken out again. Nor is g what clipping or a GradScaler makes of the gradient: where
    there is either, call `after_backward` before it; a loop that forgets to is told so. A path that raised the loss
    makes a weight unimportant, not of negative importance. What is remembered of the weights is copies, never views
    of the live ones.

    Args:
        xi: ξ > 0, which keeps the importance of weights that hardly moved finite.
    """

    extra_groups = ("path", "start", "before")

    def __init__(
        self,
        model: nn.Module,
        *,
        strength: float,
        xi: float = 0.1,
        regularize_alpha: bool = False,
        protect: str = "slow",
    ):
        super().__init__(model, strength=strength, regularize_alpha=regularize_alpha, protect=protect)
        if not (math.isfinite(xi) and xi > 0):
            raise InputError(f"xi must be a positive number, not {xi}")
        self.xi = xi
        self.task_gradient: dict[str, Tensor] = {}  # g, where it was taken before the gradient was changed
        self.gradients = Gradients()  # what is known of .grad
        self.trusted_scale: float | None = None  # the last that was found to be right
        self._start_task()

    def _start_task(self) -> None:
        self.start: dict[str, Tensor] = self.snapshot()  # θ when the task began
        self.before = self.start  # θ before the current step; a copy of its own once there has been one
        self.path: dict[str, Tensor] = {name: torch.zeros_like(theta) for name, theta in self.start.items()}

    def note_backward(self, scale: Tensor) -> None:
        fast = {name: scale * part().detach() for name, part in self.fast.items()}
        self.gradients.note(self.parameters, scale, fast)

    @torch.no_grad()
    def after_backward(self, scale: float = 1.0) -> None:
        """Take g from `.grad` before it is unscaled or clipped. Call it once, after the last backward() of a step.

        `scale` is by what the loss was multiplied: `scaler.get_scale()` with a GradScaler.
        """
        if not (math.isfinite(scale) and scale > 0):
            raise InputError(f"the scale of the loss must be a positive number, not {scale}")
        if scale != self.trusted_scale:  # not each time, since it makes a GPU wait
            self._refuse_forgotten(scale)
        self._refuse_changed("SI.after_backward() must come directly after backward(), before unscale_() and clipping")
        gradient = self._gradient_of_the_task()
        self.task_gradient = gradient if scale == 1 else {name: g / scale for name, g in gradient.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Follow the step just taken. Call it while `.grad` still holds what the step was made from."""
        if all(theta.grad is None for theta in self.parameters.values()):
            raise InputError(
                "SI.after_step() found no gradients: call it after optimizer.step() and before zero_grad()"
            )
        if self.gradients.moved():
            raise InputError(
                "the weights moved between two backward passes of one step, so SI cannot follow their path: "
                "call after_step() after every step, and use another optimizer than LBFGS"
            )
        if not self.task_gradient:
            self._refuse_changed(
                "the gradients were changed after backward(), by clipping, a GradScaler or the optimizer itself: "
                "call penalty.after_backward(), with a GradScaler's scale, before that"
            )
        gradient = self.task_gradient or self._gradient_of_the_task()
        if self.before is self.start:
            self.check_alive()
            ranks = ranks_of(self.model)
            if ranks is not None:  # made before DistributedDataParallel gave the model the first rank's weights
                take_from_first_rank(self.start.values(), ranks)
            self.before = {name: theta.clone() for name, theta in self.start.items()}
        for name, theta in self.parameters.items():
            if name in gradient:
                move = theta - self.before[name]
                # a weight that stood still has come no way, even where a GradScaler left out a step of infinities
                g = gradient[name].masked_fill(move == 0, 0)
                self.path[name].addcmul_(g, move, value=-1)
            self.before[name].copy_(theta)
        self.task_gradient = {}
        self.gradients.watch(self.parameters)
        self.gradients.begin_step()

    def _gradient_of_the_task(self) -> dict[str, Tensor]:
        """`.grad` less what `loss` put into it."""
        of_penalty = self._gradient_of_the_penalty()
        return {
            name: theta.grad - of_penalty[name] if of_penalty else theta.grad.clone()
            for name, theta in self.parameters.items()
            if theta.grad is not None
        }

    def _gradient_of_the_penalty(self) -> dict[str, Tensor]:
        """What of `.grad` came from `loss`: it was of the weights before the step, and of fast parts as they were."""
        held = self.gradients.held()
        if not held or not self.terms:
            return {}
        share = torch.stack([part.scale for part in held]).sum()
        within = {name: share * gradient for name, gradient in self.gradient(self.before).items()}
        for name, part in self.fast.items():
            then = torch.stack([of.fast[name] for of in held]).sum(dim=0)
            for term in self.terms:
                moved = 2 * self.strength * term.importance[name] * (then - share * part().detach())
                within[name] = within[name] + moved
        return within

    def _refuse_forgotten(self, scale: float) -> None:
        """`loss` knows by how much it was multiplied; far more than `scale` was a GradScaler's doing."""
        share = self.gradients.scale()
        if math.isfinite(share) and share / scale > LARGEST_SHARE:
            raise InputError(
                f"the loss was multiplied by {share:g} before backward(): "
                "call penalty.after_backward(scale=scaler.get_scale())"
            )
        if share:
            self.trusted_scale = scale

    def _refuse_changed(self, sentence: str) -> None:
        """A gradient that was changed in place since backward() left it is not g."""
        if self.gradients.changed():
            raise InputError(sentence)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "gradients": Gradients()}  # a copy has weights of its own, whose gradients nobody watches

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.task_gradient, self.trusted_scale = {}, None
        self.gradients.begin_step()

    def grow(self) -> None:
        super().grow()
        self.task_gradient, self.trusted_scale = {}, None
        self.gradients.begin_step()

    def begun(self, group: str) -> dict[str, Tensor]:
        return super().begun(group) if group == "path" else self.snapshot()

    def consolidate(self, batches: Any = None, classes: Sequence[int] | None = None) -> None:
        """End the task. SI needs no data for it."""
        super().consolidate(batches, classes)

    @torch.no_grad()
    def importance(self, batches: Any = None, classes: Sequence[int] | None = None) -> dict[str, Tensor]:
        return {
            name: self.path[name].clamp(min=0) / ((theta - self.start[name]).square() + self.xi)
            for name, theta in self.parameters.items()
        }

    def remember(self, importance: dict[str, Tensor]) -> None:
        super().remember(importance)
        self._start_task()
