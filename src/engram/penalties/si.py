"""Synaptic Intelligence: importance is how much a weight's own path lowered the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import InputError
from engram.penalties.base import Penalty


class SI(Penalty):
    """SI (Zenke et al. 2017). `strength` is its c; importance is gathered while a task is learned.

    path_k ← path_k − g_k Δθ_k            after each step, g the gradient of the task's loss alone
    Ω_k ← Ω_k + max(path_k, 0) / ((θ_k − θ_start,k)² + ξ)        θ* ← θ        when the task ends

    Three traps are avoided here. The penalty's own gradient is no part of g: where `loss()` went into the
    backward pass, it is taken out again (if gradients are clipped, or scaled for mixed precision, only
    `proximal_step` keeps it out). A path that raised the loss makes a weight unimportant, not of
    negative importance. What is remembered of the weights is copies, never views of the live ones.

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
        self._start_task()

    def _start_task(self) -> None:
        self.start: dict[str, Tensor] = self.snapshot()  # θ when the task began
        self.before = self.start  # θ before the current step; a copy of its own once there has been one
        self.path: dict[str, Tensor] = {name: torch.zeros_like(theta) for name, theta in self.start.items()}

    @torch.no_grad()
    def after_step(self) -> None:
        """Follow the step just taken. Call it while `.grad` still holds what the step was made from."""
        if all(theta.grad is None for theta in self.parameters.values()):
            raise InputError(
                "SI.after_step() found no gradients: call it after optimizer.step() and before zero_grad()"
            )
        if self.before is self.start:
            self.before = {name: theta.clone() for name, theta in self.start.items()}
        of_penalty = self.gradient_within(self.before)
        for name, theta in self.parameters.items():
            if theta.grad is not None:
                g = theta.grad - of_penalty[name] if of_penalty else theta.grad
                self.path[name].addcmul_(g, theta - self.before[name], value=-1)
            self.before[name].copy_(theta)
        self.gradient_share = None

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
