"""The mean over a task's samples of a function of each sample's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engram.common.errors import InputError
from engram.nn.distributed import add_over_ranks, ranks_of
from engram.nn.modules import frozen
from engram.penalties.per_sample import Function, Objective, known_layers, sum_per_sample
from engram.penalties.step import zeros_for_sums

Variants = Callable[[Tensor, Tensor | None], Iterable[tuple[Tensor, ...]]]


def mean_per_sample(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    objective: Objective,
    function: Function,
    batches: Iterable[Any],
    variants: Variants | None = None,
) -> dict[str, Tensor]:
    """1/N Σ_samples Σ_variants function(∂ objective / ∂θ), with the model frozen and left as it was found.

    The samples are those of all ranks that train the model together. The ranks communicate once, at the end: one may
    have more batches than another, or none.

    Args:
        model: any module.
        parameters: the weights by name.
        objective: a function of the outputs (B, C), and of what `variants` yields, with one value for each sample.
        function: torch.square or torch.abs.
        batches: yields (inputs, targets), or inputs alone.
        variants: yields, for a batch, the further arguments of `objective`, once for each time that it is evaluated;
            by default it is evaluated once, on the outputs alone.

    Example:
        >>> norm = lambda outputs: outputs.square().sum(dim=1)
        >>> omega = mean_per_sample(model, dict(model.named_parameters()), norm, torch.abs, loader)
    """
    device = next(iter(parameters.values())).device
    total = {name: zeros_for_sums(theta) for name, theta in parameters.items()}
    num_samples = 0
    # squares of small gradients are what half precision cannot hold
    full_precision = torch.autocast(device.type, enabled=False)
    with frozen(model), known_layers(model), torch.no_grad(), full_precision:
        for batch in batches:
            inputs, targets = (part if part is None else part.to(device) for part in unpack(batch))
            assert inputs is not None
            if targets is not None and targets.ndim and len(targets) != len(inputs):
                raise InputError(
                    f"a batch has inputs of length {len(inputs)} and {len(targets)} targets: "
                    "importances need the samples on the first axis of both"
                )
            for arguments in [()] if variants is None else variants(inputs, targets):
                sums = sum_per_sample(model, parameters, objective, function, inputs, *arguments)
                total = {name: total[name] + sums[name] for name in total}
            num_samples += len(inputs)
    ranks = ranks_of(model)
    if ranks is not None:
        count = torch.tensor(num_samples, device=device)
        add_over_ranks([*total.values(), count], ranks)
        num_samples = int(count)
    if num_samples == 0:
        raise InputError("there are no samples to compute importances from: batches is empty")
    return {name: value / num_samples for name, value in total.items()}


def check_temperature(temperature: float) -> float:
    """Return the temperature of an importance pass if it is a positive number; refuse it otherwise.

    Args:
        temperature: T, by which logits are divided.

    Example:
        >>> check_temperature(200)
        200.0
    """
    if not (math.isfinite(temperature) and temperature > 0):
        raise InputError(f"temperature must be a positive number, not {temperature}")
    return float(temperature)


def unpack(batch: Any) -> tuple[Tensor, Tensor | None]:
    """The inputs of a batch, and its targets or None.

    Args:
        batch: (inputs, targets, ...) as loaders yield it, or inputs alone.

    Example:
        >>> unpack(torch.ones(2, 3))[1] is None
        True
    """
    parts = (batch,) if isinstance(batch, Tensor) else tuple(batch)[:2]
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise InputError("batches must yield tensors: (inputs, targets), or inputs alone where no labels are needed")
    return parts[0], parts[1] if len(parts) > 1 else None
