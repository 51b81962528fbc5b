"""The mean over a task's samples of a function of each sample's gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from engram.errors import InputError, NotFiniteError
from engram.penalties.per_sample import Function, Objective, frozen, sum_per_sample

Variants = Callable[[Tensor, Tensor], Iterable[tuple[Tensor, ...]]]


def mean_per_sample(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    objective: Objective,
    function: Function,
    batches: Iterable[Any],
    variants: Variants | None = None,
) -> dict[str, Tensor]:
    """1/N Σ_samples Σ_variants function(∂ objective / ∂θ), with the model frozen and left as it was found.

    `variants` gives, for a batch, the further per-sample arguments of `objective`, once for each time that it
    is to be evaluated; by default it is evaluated once, on the outputs alone.
    """
    device = next(iter(parameters.values())).device
    total = {name: torch.zeros_like(theta) for name, theta in parameters.items()}
    num_samples = 0
    with frozen(model), torch.no_grad():
        for batch in batches:
            inputs, targets = _unpack(batch, device)
            for arguments in [()] if variants is None else variants(inputs, _checked(targets, inputs)):
                sums = sum_per_sample(model, parameters, objective, function, inputs, *arguments)
                total = {name: total[name] + sums[name] for name in total}
            num_samples += len(inputs)
    if num_samples == 0:
        raise InputError("there are no samples to compute importances from: batches is empty")
    for name, value in total.items():
        if not torch.isfinite(value).all():
            raise NotFiniteError(
                f"the importance of {name!r} is NaN or infinite: the samples or the weights are not finite"
            )
    return {name: value / num_samples for name, value in total.items()}


def _unpack(batch: Any, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """(inputs, targets, ...) as loaders yield it, or inputs alone."""
    parts = (batch,) if isinstance(batch, Tensor) else tuple(batch)[:2]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise InputError("batches must yield tensors: (inputs, targets), or inputs alone where no labels are needed")
    inputs, targets = (*(part.to(device) for part in parts), None)[:2]
    assert inputs is not None
    return inputs, targets


def _checked(targets: Tensor | None, inputs: Tensor) -> Tensor:
    if targets is None:
        raise InputError("this penalty's importances need labels: batches must yield (inputs, targets)")
    if targets.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise InputError(f"targets must be class numbers (int64), not {targets.dtype}")
    if targets.shape != inputs.shape[:1]:
        raise InputError(f"targets must have shape ({len(inputs)},), one for each input, not {tuple(targets.shape)}")
    return targets.long()
