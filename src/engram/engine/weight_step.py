"""The steps of one weight, with any optimizer and any penalty of the quadratic form."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engram.engine.cpu.fused import FusedStep, can_fuse
from engram.engine.learner import Learner
from engram.engine.optimizer import Optimizer, Slots
from engram.penalties.step import SCRATCH, GainAndShift, WeightStep, add_to_path, pull_weight


class OptimizedStep:
    """How one weight takes its steps with an optimizer that is not plain SGD; otherwise as `WeightStep`, in place.

    g + gain (θ − shift) instead of g, if the penalty is in the gradient, then the optimizer's step, and then
    θ ← gain θ + shift, if the penalty is proximal. If a path is given,  path ← path − g Δθ  with g of the loss alone.

    Args:
        theta: θ.
        optimizer: which.
        slots: what it remembers of this weight.
        kind: "proximal" or "gradient".
        pull: gain and shift; None for a weight that no penalty pulls.
        path: the tensor in which the path is summed, if at all.

    Example:
        >>> step = OptimizedStep(theta, optimizer, optimizer.slots_of("weight", state), "proximal", None, None)
        >>> step.take(gradient)
    """

    def __init__(
        self,
        theta: Tensor,
        optimizer: Optimizer,
        slots: Slots,
        kind: str,
        pull: GainAndShift | None,
        path: Tensor | None,
    ):
        self.theta = theta
        self.optimizer = optimizer
        self.slots = slots
        self.slope = pull if kind == "gradient" else None
        self.pull_after = pull if kind == "proximal" else None
        self.path = path

    def take(self, gradient: Tensor) -> None:
        """Take a step.

        Args:
            gradient: g, of the task's loss alone.
        """
        before = None if self.path is None else SCRATCH.like(self.theta, "before").copy_(self.theta)
        whole = gradient
        if self.slope is not None:
            gain, anchor = self.slope
            apart = torch.sub(self.theta, anchor, out=SCRATCH.like(self.theta, "slope"))
            whole = torch.addcmul(gradient, gain, apart, out=apart)
        self.optimizer.step(self.theta, whole, self.slots)
        if self.pull_after is not None:
            pull_weight(self.theta, *self.pull_after)
        if self.path is not None and before is not None:
            add_to_path(self.path, gradient, torch.sub(self.theta, before, out=before))

    def take_product(self, delta: Tensor, entered: Tensor) -> None:
        """Take the step of a linear layer's weight, g = δᵀ x.

        Args:
            delta: δ (B, out), the gradient with respect to the layer's output.
            entered: x (B, in), what entered the layer.
        """
        self.take(torch.mm(delta.t(), entered, out=SCRATCH.like(self.theta, "gradient")))


def weight_step(
    theta: Tensor, optimizer: Optimizer, slots: Slots, kind: str, pull: GainAndShift | None, path: Tensor | None
) -> WeightStep | OptimizedStep:
    """How a weight takes its steps; the arguments are those of `OptimizedStep`.

    Example:
        >>> weight_step(theta, Optimizer("sgd", rate=0.01), {}, "proximal", None, None).take(gradient)
    """
    if optimizer.plain:
        if path is not None and can_fuse(theta, pull, path):
            return FusedStep(theta, optimizer.rate, kind, pull, path)
        return WeightStep(theta, optimizer.rate, kind, pull, path)
    return OptimizedStep(theta, optimizer, slots, kind, pull, path)


def prepare_state(learner: Learner, trained: Mapping[str, Tensor]) -> Optimizer:
    """The optimizer of a learner, whose state is then complete for the weights that are trained.

    Args:
        learner: any.
        trained: its trained weights by name.

    Example:
        >>> optimizer = prepare_state(learner, dict(learner.model.named_parameters()))
    """
    optimizer = Optimizer.of(learner.config)
    learner.optimizer_state |= optimizer.state_for(trained, learner.optimizer_state)
    return optimizer
