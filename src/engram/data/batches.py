"""Batches by index, on the device where the data are."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from engram.data.samples import Samples

Batches = Iterator[tuple[Tensor, Tensor]]


def batches_of(
    samples: Samples,
    batch_size: int,
    *,
    permutation: Tensor | None = None,
    order: torch.Generator | None = None,
) -> Batches:
    """(inputs, targets) of `batch_size` samples, the last batch maybe smaller; shuffled if `order` is given.

    Inputs come as floats: uint8 pixels are scaled to [0, 1], and read in the order of `permutation`.
    """
    device = samples.targets.device
    index = None if order is None else torch.randperm(len(samples), generator=order).to(device)
    for start in range(0, len(samples), batch_size):
        chosen = slice(start, start + batch_size) if index is None else index[start : start + batch_size]
        yield read_inputs(samples.inputs[chosen], permutation), samples.targets[chosen]


def num_batches(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def read_inputs(inputs: Tensor, permutation: Tensor | None = None) -> Tensor:
    if permutation is not None:
        inputs = inputs.flatten(1)[:, permutation].view_as(inputs)
    return inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
