"""What is in `.grad`: how much of a penalty's own gradient, and whether it is still what backward() left there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engram.nn.distributed import after_averaging, several_processes
from engram.penalties.terms import cost, gradient


@dataclass(frozen=True)
class Share:
    """One backward pass through a loss that included the penalty's."""

    scale: Tensor  # the factor by which the loss was multiplied
    fast: dict[str, Tensor]  # the fast parts at that time, multiplied by the same factor
    accumulated: int  # the number of gradients accumulated until then


class Watch:
    """Follows the gradient of a weight through a step: how often it was accumulated, and its version afterwards."""

    def __init__(self, theta: nn.Parameter):
        self.theta = weakref.ref(theta)
        self.accumulated = 0
        self.begin_step()
        theta.register_post_accumulate_grad_hook(self)

    def begin_step(self) -> None:
        self.version: int | None = None  # the gradient's version after the last backward() of this step
        self.weight_version: int | None = None  # the weight's version at the first gradient of this step
        self.moved = False  # whether the weight changed between the first and the last gradient

    def __call__(self, theta: Tensor) -> None:
        self.accumulated += 1
        self.note_version()
        if several_processes():  # the gradient may be averaged over the ranks, in place, before backward() ends
            after_averaging(self.note_version)
        if self.weight_version is None:
            self.weight_version = theta._version
        self.moved = self.moved or theta._version != self.weight_version

    def note_version(self) -> None:
        theta = self.theta()
        self.version = None if theta is None or theta.grad is None else theta.grad._version

    def sees_a_change(self) -> bool:
        """Whether the gradient was changed in place since backward() left it."""
        theta = self.theta()
        if theta is None or theta.grad is None or self.version is None:
            return False
        return theta.grad._version != self.version


class Gradients:
    """The gradients of some weights, between one step and the next."""

    def __init__(self) -> None:
        self.shares: list[Share] = []
        self.watches: dict[str, Watch] = {}

    def watch(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch these weights. Called from the first step on, since Engram's own engine never needs it."""
        for name, theta in parameters.items():
            if name not in self.watches or self.watches[name].theta() is not theta:
                self.watches[name] = Watch(theta)

    def begin_step(self) -> None:
        self.shares = []
        for watch in self.watches.values():
            watch.begin_step()

    @property
    def accumulated(self) -> int:
        return sum(watch.accumulated for watch in self.watches.values())

    def note(self, parameters: Mapping[str, nn.Parameter], scale: Tensor, fast: dict[str, Tensor]) -> None:
        """A backward pass through the penalty's loss starts. The gradient of an earlier one may have been discarded."""
        own = [theta.grad for theta in parameters.values() if theta.requires_grad and theta.grad is not None]
        if self.shares and (not own or (self.changed() and not any(grad.any() for grad in own))):
            self.shares = []  # it was discarded without a step
        self.shares.append(Share(scale, fast, self.accumulated))

    def held(self) -> list[Share]:
        """The shares that are in `.grad`: torch.autograd.grad of the penalty's loss puts nothing there."""
        if not self.watches or not self.shares:
            return self.shares
        until = [share.accumulated for share in self.shares[1:]] + [self.accumulated]
        return [share for share, end in zip(self.shares, until, strict=True) if end > share.accumulated]

    def changed(self) -> bool:
        return any(watch.sees_a_change() for watch in self.watches.values())

    def moved(self) -> bool:
        return any(watch.moved for watch in self.watches.values())

    @torch.no_grad()
    def scale(self) -> float:
        """The factor by which the penalty's loss was multiplied, over all passes."""
        return float(sum(share.scale for share in self.held()))


class QuadraticForm(torch.autograd.Function):
    """`Quadratic.loss` with its explicit gradient: an elementwise pass instead of a graph over all weights.

    Its first input is the penalty, and the others are its weights.
    """

    @staticmethod
    def forward(ctx: Any, penalty: Any, *theta: Tensor) -> Tensor:
        ctx.penalty = penalty
        ctx.save_for_backward(*theta)
        weights = penalty.in_force(dict(zip(penalty.parameters, theta, strict=True)))
        return cost(penalty.terms, weights, penalty.strength)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        penalty, (scale,) = ctx.penalty, outer
        penalty._note_backward(scale.detach())  # SI must later take this part out of .grad again
        if not penalty.terms:
            return (None,) * (1 + len(ctx.saved_tensors))
        weights = penalty.in_force(dict(zip(penalty.parameters, ctx.saved_tensors, strict=True)))
        return None, *(scale * slope for slope in gradient(penalty.terms, weights, penalty.strength).values())
