"""Steps in C, where the machine has a compiler: those of `WeightStep` with a path, and those of a limited gradient.

PyTorch takes Synaptic Intelligence's step in five passes. Other penalties add one pass to the product that moves a
weight, and C would not be faster there. A gradient of limited norm takes several calls for each weight; in a small
network these take longer than what they compute.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from engram.engine.cpu.compiled import TYPES, Function, Unavailable, compiled, is_plain
from engram.penalties.step import GainAndShift, WeightStep

KINDS = {None: 0, "proximal": 1, "gradient": 2}  # as in kernels.c
EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it
SMALL = 2**15  # PyTorch divides passes over so many values among its threads, and C does not


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


# --- plain SGD on a gradient of limited norm, in one call for all weights


class ClippedStep:
    """How weights take steps of plain SGD, with the norm of the whole gradient limited to M, in place:

        g ← g min(1, M / (‖g‖ + ε))        θ ← θ − lr g

    Args:
        weights: those that move together.
        rate: lr.
        largest: M.

    Example:
        >>> step = ClippedStep(list(model.parameters()), rate=0.1, largest=1.0)
        >>> loss.backward()
        >>> step.take()
    """

    def __init__(self, weights: Sequence[Tensor], rate: float, largest: float):
        self.weights = list(weights)
        self.rate = rate
        self.largest = largest
        divided = torch.get_num_threads() > 1 and any(theta.numel() >= SMALL for theta in self.weights)
        fits = not divided and all(is_plain(theta, torch.float32) for theta in self.weights)
        function = compiled_clip() if fits else None
        self.fused = None if function is None else FusedClip(function, self.weights)

    def take(self) -> None:
        """Take a step along `.grad` of each weight that has one."""
        moved = [(theta, theta.grad) for theta in self.weights if theta.grad is not None]
        gradients = [gradient for _, gradient in moved]
        if self.fused is not None and len(moved) == len(self.weights) and all(g.is_contiguous() for g in gradients):
            self.fused.take(gradients, self.rate, self.largest)
        else:
            clip_and_step(moved, self.rate, self.largest)


@torch.no_grad()
def clip_and_step(moved: Sequence[tuple[Tensor, Tensor]], rate: float, largest: float) -> None:
    """A step by PyTorch.

    Args:
        moved: weights with their gradients.
        rate: lr.
        largest: M.

    Example:
        >>> clip_and_step([(theta, gradient)], rate=0.1, largest=1.0)
    """
    factor = float(largest / (get_total_norm([gradient for _, gradient in moved]) + EPS))
    for theta, gradient in moved:
        if not factor >= 1:  # also where it is NaN
            gradient.mul_(factor)
        theta.add_(gradient, alpha=-rate)


class FusedClip:
    """The same step in C.

    Args:
        function: that of `compiled_clip`.
        weights: θ, plain tensors whose memory stays where it is.

    Example:
        >>> FusedClip(compiled_clip(), [theta]).take([gradient], rate=0.1, largest=1.0)
    """

    def __init__(self, function: Function, weights: Sequence[Tensor]):
        self.function = function
        self.weights = weights
        number = len(weights)
        self.pointers = ctypes.c_void_p * number
        self.sizes = (ctypes.c_int64 * number)(*[theta.numel() for theta in weights])
        self.theta = self.pointers(*[theta.data_ptr() for theta in weights])
        self.norms = (ctypes.c_float * number)()

    def take(self, gradients: Sequence[Tensor], rate: float, largest: float) -> None:
        """Take a step.

        Args:
            gradients: one for each weight, laid out as the weight is.
            rate: lr.
            largest: M.
        """
        pointers = self.pointers(*[gradient.data_ptr() for gradient in gradients])
        self.function(len(gradients), rate, largest, EPS, self.sizes, self.theta, pointers, self.norms)
        for theta in self.weights:
            torch.autograd.graph.increment_version(theta)  # as any operation in place does


@functools.cache
def compiled_clip() -> Function | None:
    """The step of kernels.c; None without a compiler, or if its results were not PyTorch's.

    Example:
        >>> function = compiled_clip()
    """
    try:
        function = compiled("clipped", torch.float32, 1, 3, 4)
    except Unavailable:
        return None
    return function if _clips_as_pytorch(function) else None


def _clips_as_pytorch(function: Function) -> bool:
    """Whether the steps are PyTorch's to the last digit: another build may sum squares in another order."""
    draw = torch.Generator().manual_seed(0)
    cases = [[size] for size in range(1, 100)] + [[64] * number for number in range(2, 20)]  # with and without a rest
    for sizes, scale in itertools.product(cases, (10.0, 1e-3)):  # one of them is clipped
        values = [torch.randn(2, size, generator=draw) for size in sizes]
        mine, theirs = ([(theta.clone(), scale * g) for theta, g in values] for _ in range(2))
        FusedClip(function, [theta for theta, _ in mine]).take([g for _, g in mine], 0.0123, 1.0)
        clip_and_step(theirs, 0.0123, 1.0)
        if not all(map(torch.equal, itertools.chain(*mine), itertools.chain(*theirs))):
            return False
    return True
