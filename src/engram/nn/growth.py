"""Output layers that take up more classes, and keep what they know of the old ones."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import nn

from engram.common.errors import InputError


@torch.no_grad()
def grow_rows(layer: Any, out_features: int) -> None:
    """Give every tensor of a layer that has a row a class as many rows as there will be classes.

    Old rows, and what all rows share, stay as they are, bit for bit; new ones are as `reset_parameters` makes them.
    """
    num_before = layer.out_features
    if isinstance(out_features, bool) or not isinstance(out_features, Integral):
        raise InputError(f"a layer grows to a whole number of classes, not {out_features!r}")
    out_features = int(out_features)
    if out_features < num_before:
        raise InputError(f"a layer of {num_before} classes cannot shrink to {out_features}")
    if out_features == num_before:
        return
    before = {**dict(layer.named_parameters(recurse=False)), **dict(layer.named_buffers(recurse=False))}
    for name, tensor in before.items():
        if tensor.ndim:
            larger = tensor.new_empty(out_features, *tensor.shape[1:])
            is_parameter = isinstance(tensor, nn.Parameter)
            setattr(layer, name, nn.Parameter(larger, tensor.requires_grad) if is_parameter else larger)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    layer.out_features = out_features
    layer.reset_parameters()
    for name, tensor in kept.items():
        now = getattr(layer, name)
        (now[:num_before] if now.ndim else now).copy_(tensor)
