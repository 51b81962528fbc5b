"""One weight and its gradient, followed from one step to the next.

No value of a tensor is read here, except in the first, second, fourth, eighth… step of a task: PyTorch counts how often
a tensor was changed in place, and numbers its backward passes.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from engram.nn.distributed import after_averaging, several_processes


def current_pass() -> int:
    """The number of the backward pass that is running; each has its own, and later ones have larger numbers."""
    return torch._C._current_graph_task_id()  # PyTorch has no public name for it


class Watch:
    """Follows one weight and its gradient from one step to the next."""

    def __init__(self, theta: nn.Parameter):
        self.theta = weakref.ref(theta)
        self.left = theta._version  # the weight's version when the last step was followed
        self.gradient: weakref.ref[Tensor] | None = None  # what `.grad` was after the last backward()
        self.inspects = False
        self.followed = False  # whether steps are followed: not before the first of a task
        self.begin_step()
        own = weakref.ref(self)
        handle = theta.register_post_accumulate_grad_hook(lambda theta: _call(own, theta))
        self.stop = weakref.finalize(self, handle.remove)

    def begin_step(self) -> None:
        self.passes: list[int] = []  # the backward passes that are in `.grad`
        self.others: list[tuple[int, Tensor]] = []  # gradients of other penalties, each with its backward pass
        self.version: int | None = None  # the gradient's version after the last backward() of this step
        self.mixed = False  # whether the gradient was changed between two backward passes of this step
        self.weight_version: int | None = None  # the weight's version at the first gradient of this step
        self.moved = False  # whether the weight changed between the first and the last gradient
        self.found: Tensor | None = None  # the weight before this step, if it changed since the last was followed
        self.entered: Tensor | None = None  # the weight before this step, if this step is inspected
        self.checksum: Tensor | None = None  # of the gradient after backward(), if this step is inspected

    def __call__(self, theta: Tensor) -> None:
        if self._is_new(theta.grad):
            self.passes, self.version, self.mixed = [], None, False
            self.others = [other for other in self.others if other[0] == current_pass()]
            if not self.followed:
                self.weight_version, self.moved = None, False
        elif self._was_changed(theta.grad):
            self.mixed, self.others = True, []
        if self.weight_version is None:
            self.weight_version = theta._version
            self.found = None if theta._version == self.left else theta.detach().clone()
            self.entered = theta.detach().clone() if self.inspects else None
        self.moved = self.moved or theta._version != self.weight_version
        self.passes.append(current_pass())
        self.note_gradient()
        if several_processes():  # the gradient may be averaged over the ranks, in place, before backward() ends
            after_averaging(self.note_gradient)

    def _is_new(self, grad: Tensor | None) -> bool:
        """Whether the last gradient was discarded: PyTorch then makes a new tensor, and otherwise adds to the old."""
        if not self.passes:
            return True
        if self.gradient is not None and self.gradient() is grad:
            return not self.followed and self._was_changed(grad)  # set to 0 rather than to None
        return type(grad) is Tensor and not grad.requires_grad  # others are never added to in place

    def _was_changed(self, grad: Tensor | None) -> bool:
        """Whether more was done to the gradient, since the last backward pass, than adding that of this one."""
        return grad is not None and self.version is not None and grad._version != self.version + 1

    def note_gradient(self) -> None:
        theta = self.theta()
        grad = None if theta is None else theta.grad
        self.version = None if grad is None else grad._version
        self.gradient = None if grad is None else weakref.ref(grad)
        self.checksum = checksum(grad) if self.inspects and grad is not None else None

    def sees_a_change(self) -> bool:
        """Whether the gradient was changed in place since backward() left it."""
        theta = self.theta()
        if theta is None or theta.grad is None or self.version is None:
            return False
        return theta.grad._version != self.version

    def sees_a_hidden_change(self) -> bool:
        """The same by its values, since what is done to `.grad.data` is not counted as a change."""
        theta = self.theta()
        if theta is None or theta.grad is None or self.checksum is None or is_captured(theta):
            return False
        return not torch.allclose(checksum(theta.grad), self.checksum, rtol=0, atol=0, equal_nan=True)

    def has_stepped(self) -> bool | None:
        """Whether the weight changed since the first gradient of this step; None if there was none."""
        theta = self.theta()
        return None if theta is None or self.weight_version is None else theta._version != self.weight_version

    def has_moved_unseen(self) -> bool:
        """The same by its values, since what is done to `.data` is not counted as a change."""
        theta = self.theta()
        if theta is None or self.entered is None or is_captured(theta):
            return False
        return not torch.equal(self.entered, theta)

    def moved_before(self) -> bool:
        """Whether the weight changed after the last step was followed and before the first gradient of this one."""
        theta = self.theta()
        now = self.weight_version if self.weight_version is not None or theta is None else theta._version
        return now is not None and now != self.left


def _call(watch: weakref.ref[Watch], theta: Tensor) -> None:
    alive = watch()
    if alive is not None:
        alive(theta)


def checksum(gradient: Tensor) -> Tensor:
    """Two numbers that differ if the gradient does."""
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    return torch.stack([torch.linalg.vector_norm(dense), dense.sum()])


def is_captured(theta: Tensor) -> bool:
    """Whether a CUDA graph is being captured, in which no value can be looked at."""
    return theta.is_cuda and torch.cuda.is_current_stream_capturing()
