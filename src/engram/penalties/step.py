"""One step of a weight: the optimizer's part, the penalty's pull, and the path that the weight takes.

This is written once: the penalties' own `proximal_step` and `after_step` use it, and so do the engine's steps on a
CPU, and on a GPU without Triton kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.optim import Optimizer

from engram.common.errors import InputError
from engram.penalties.checks import check_rate
from engram.penalties.terms import Pull

GainAndShift = tuple[Tensor, Tensor]


def zeros_for_sums(theta: Tensor) -> Tensor:
    """Zeros of the shape of a weight, to sum in: in single precision where the weight is in half precision.

    A sum of many small parts in half precision stops growing, and squares of small gradients are 0 in float16.

    Args:
        theta: a weight.

    Example:
        >>> zeros_for_sums(torch.ones(2, dtype=torch.bfloat16))
        tensor([0., 0.])
    """
    return torch.zeros_like(theta, dtype=at_least_single(theta.dtype), requires_grad=False)


def at_least_single(dtype: torch.dtype) -> torch.dtype:
    """The type itself, or float32 instead of half precision.

    Args:
        dtype: of a weight.

    Example:
        >>> at_least_single(torch.float16)
        torch.float32
    """
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def moved_shift(pull: Pull, name: str, fast: Mapping[str, Callable[[], Tensor]]) -> Tensor:
    """The shift of a weight now. If a trace adds f to the weight, its anchor is θ* − f, which moves with f:

    shift − (1 − gain) f,  for either kind of step, since shift = (1 − gain) θ*;  shift − f,  for a slope.

    Args:
        pull: of all weights.
        name: of the weight.
        fast: for each weight that carries a trace, a function that returns f.

    Example:
        >>> shift = moved_shift(pull, "head.weight", penalty.fast)
    """
    shift = pull.shift[name]
    if name not in fast:
        return shift
    part = fast[name]().detach()
    return shift - part if pull.is_slope else torch.addcmul(shift, pull.gain[name] - 1, part)


def pull_weight(theta: Tensor, gain: Tensor, shift: Tensor) -> None:
    """θ ← gain θ + shift, in place.

    Args:
        theta: θ.
        gain: of the same shape.
        shift: of the same shape.

    Example:
        >>> pull_weight(theta, gain=torch.tensor(0.5), shift=torch.tensor(1.0))
    """
    torch.addcmul(shift, theta, gain, out=theta)


def add_to_path(path: Tensor, gradient: Tensor, move: Tensor, scale: float = 1.0) -> None:
    """SI's path integral over one step:  path ← path − g Δθ,  with Δθ = scale · move, in place.

    Args:
        path: the sum so far.
        gradient: g, of the task's loss alone, before the step.
        move: the step of the weight, divided by `scale`.
        scale: by which the step is larger than `move`.

    Example:
        >>> add_to_path(path, gradient, theta - before)
    """
    path.addcmul_(gradient, move, value=-scale)


class Scratch(threading.local):
    """Memory for intermediate results of a step. Each thread has its own, for all its models."""

    def __init__(self) -> None:
        self.tensors: dict[tuple, Tensor] = {}

    def like(self, theta: Tensor, use: str) -> Tensor:
        """A tensor of the same shape, with any content.

        Args:
            theta: whose shape and type.
            use: a name, so that two uses at the same time have two tensors.

        Example:
            >>> before = SCRATCH.like(theta, "before").copy_(theta)
        """
        key = (use, theta.shape, theta.dtype, theta.device)
        if key not in self.tensors:
            self.tensors[key] = torch.empty_like(theta, memory_format=torch.contiguous_format)
        return self.tensors[key]


SCRATCH = Scratch()


class WeightStep:
    """How one weight takes its steps of plain SGD with a penalty's pull, in place:

        θ ← gain (θ − lr g) + shift, the proximal step        θ ← gain θ + shift − lr g, the gradient's step

    and, if a path is given,  path ← path − g Δθ.

    Args:
        theta: θ.
        rate: lr.
        kind: "proximal" or "gradient".
        pull: gain and shift; None for a weight that no penalty pulls.
        path: the tensor in which the path is summed, if at all.

    Example:
        >>> step = WeightStep(theta, 0.01, "proximal", pull=None, path=None)
        >>> step.take(gradient)
    """

    def __init__(self, theta: Tensor, rate: float, kind: str, pull: GainAndShift | None, path: Tensor | None):
        self.theta = theta
        self.rate = rate
        self.pull_before = pull if kind == "gradient" else None
        self.pull_after = pull if kind == "proximal" else None
        self.pulled = pull is not None
        self.path = path

    def take(self, gradient: Tensor) -> None:
        """Take a step.

        Args:
            gradient: g, of the task's loss alone.
        """
        theta, path = self.theta, self.path
        if path is None:
            self._move(gradient)
        elif not self.pulled:
            add_to_path(path, gradient, gradient, scale=-self.rate)  # Δθ = −lr g
            self._move(gradient)
        else:
            before = SCRATCH.like(theta, "before").copy_(theta)
            self._move(gradient)
            add_to_path(path, gradient, torch.sub(theta, before, out=before))

    def take_product(self, delta: Tensor, entered: Tensor) -> None:
        """Take the step of a linear layer's weight, g = δᵀ x, without computing g unless the path needs it.

        Args:
            delta: δ (B, out), the gradient with respect to the layer's output.
            entered: x (B, in), what entered the layer.
        """
        if self.path is not None:
            self.take(torch.mm(delta.t(), entered, out=SCRATCH.like(self.theta, "gradient")))
        else:
            self._move(delta.t(), entered)

    def _move(self, *gradient: Tensor) -> None:
        """The step itself; a gradient of two matrices is their product."""
        if self.pull_before is not None:
            pull_weight(self.theta, *self.pull_before)
        descend = self.theta.add_ if len(gradient) == 1 else self.theta.addmm_
        descend(*gradient, alpha=-self.rate)
        if self.pull_after is not None:
            pull_weight(self.theta, *self.pull_after)


def learning_rates(given: float | Optimizer, parameters: Mapping[str, Tensor]) -> float | dict[str, float]:
    """One rate for all weights, or each one's current rate in its parameter group; 0 if the optimizer does not move it.

    Args:
        given: a rate, or any optimizer.
        parameters: weights by name.

    Example:
        >>> learning_rates(torch.optim.SGD(model.parameters(), lr=0.1), dict(model.named_parameters()))
    """
    if not isinstance(given, Optimizer):
        return check_rate(given)
    rates: dict[int, float] = {}
    for group in given.param_groups:
        rates |= dict.fromkeys(map(id, group["params"]), check_rate(group["lr"]))
    if not any(id(theta) in rates for theta in parameters.values()):
        raise InputError("the optimizer has none of the weights that the penalty protects: it belongs to another model")
    return {name: rates.get(id(theta), 0.0) for name, theta in parameters.items()}
