"""The steps of `WeightStep` with a path in one pass over memory, where the machine has a C compiler.

PyTorch takes Synaptic Intelligence's step in five passes. Other penalties add one pass to the product that moves a
weight, and C would not be faster there.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from engram.engine.cpu.compiled import TYPES, Function, Unavailable, compiled, is_plain
from engram.penalties.step import GainAndShift, WeightStep

KINDS = {None: 0, "proximal": 1, "gradient": 2}  # as in kernels.c


class FusedStep(WeightStep):
    """`WeightStep` in one pass. Where a gradient is not laid out as the weight is, PyTorch takes the step.

    The arguments are those of `WeightStep`, with tensors for which `can_fuse` is true.

    Args:
        function: that of the weight's type; None for that of `compiled_step`.

    Example:
        >>> step = FusedStep(theta, 0.01, "proximal", pull, path)
        >>> step.take(gradient)
    """

    def __init__(
        self,
        theta: Tensor,
        rate: float,
        kind: str,
        pull: GainAndShift | None,
        path: Tensor,
        function: Function | None = None,
    ):
        super().__init__(theta, rate, kind, pull, path)
        self.function = compiled_step(theta.dtype) if function is None else function
        self.kind = KINDS[None if pull is None else kind]
        self.followed = path
        self.pull: tuple[Tensor | None, Tensor | None] = (None, None) if pull is None else pull

    def take(self, gradient: Tensor) -> None:
        # With several threads PyTorch divides its passes among them, and this one does not.
        if _fits(gradient, self.theta) and torch.get_num_threads() == 1:
            self.take_fused(gradient)
        else:
            super().take(gradient)

    def take_fused(self, gradient: Tensor) -> None:
        """Take a step by the compiled function.

        Args:
            gradient: g, laid out as the weight is.
        """
        # Pointers are asked for each time, in case someone has given a parameter other memory.
        tensors = (self.theta, gradient, *self.pull, self.followed)
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        self.function(self.kind, self.theta.numel(), self.rate, *pointers)
        for tensor in (self.theta, self.followed):
            torch.autograd.graph.increment_version(tensor)  # as any operation in place does


def can_fuse(theta: Tensor, pull: GainAndShift | None, path: Tensor | None) -> bool:
    """Whether a weight has a path, and its steps can be fused on this machine.

    Args:
        theta: θ.
        pull: gain and shift; None for a weight that no penalty pulls.
        path: the tensor in which the path is summed, if at all.

    Example:
        >>> can_fuse(theta, pull=None, path=None)
        False
    """
    if path is None:
        return False
    return all(_fits(tensor, theta) for tensor in (theta, path, *(pull or ()))) and why_not_fused() is None


def _fits(tensor: Tensor, theta: Tensor) -> bool:
    return tensor.shape == theta.shape and is_plain(tensor, theta.dtype) and tensor.dtype in TYPES


def why_not_fused() -> str | None:
    """Why steps are not fused on this machine; None if they are.

    Example:
        >>> why_not_fused()
    """
    reasons = [str(step) for step in map(_checked_step, TYPES) if isinstance(step, Unavailable)]
    return reasons[0] if reasons else None


def compiled_step(dtype: torch.dtype) -> Function:
    """The step of kernels.c; `Unavailable` without a compiler, or if its results were not PyTorch's.

    Args:
        dtype: of the weights.

    Example:
        >>> step = compiled_step(torch.float32)
    """
    step = _checked_step(dtype)
    if isinstance(step, Unavailable):
        raise step
    return step


@functools.cache
def _checked_step(dtype: torch.dtype) -> Function | Unavailable:
    try:
        function = compiled("step", dtype, 2, 1, 5)
    except Unavailable as why:
        return why
    if not _equals_pytorch(function, dtype):
        return Unavailable("the compiled step differs from PyTorch's in its last digits")
    return function


def _equals_pytorch(function: Function, dtype: torch.dtype) -> bool:
    """Whether the steps are PyTorch's to the last digit: another build of PyTorch may round in other places."""
    draw = torch.Generator().manual_seed(0)
    for kind, pulled in itertools.product(["proximal", "gradient"], [True, False]):
        # an odd number of values, so that the last vector is not full
        start, gradient, gain, shift, path = torch.randn(5, 1003, generator=draw, dtype=dtype)
        pull = (gain, shift) if pulled else None
        mine, theirs = [(start.clone(), path.clone()) for _ in range(2)]
        FusedStep(mine[0], 0.0123, kind, pull, mine[1], function).take_fused(gradient)
        WeightStep(theirs[0], 0.0123, kind, pull, theirs[1]).take(gradient)
        if not all(map(torch.equal, mine, theirs)):
            return False
    return True
