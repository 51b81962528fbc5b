"""What is remembered of each weight, for layers that have got more rows."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from engram.common.errors import InputError


def with_rows(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new tensors with the old ones in place of their first rows."""
    larger = {name: tensor.detach().clone() for name, tensor in new.items()}
    for name, tensor in old.items():
        (larger[name][: len(tensor)] if tensor.ndim else larger[name]).copy_(tensor)
    return larger


def check_grown(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
    """Refuse a model that changed in any other way than by more rows."""
    if before.keys() != now.keys():
        other = min(before.keys() ^ now.keys())
        raise InputError(f"a penalty can follow layers that grew, but the model's slow weights are others: {other!r}")
    for name, theta in now.items():
        then = before[name]
        if then.shape[1:] != theta.shape[1:] or then.ndim != theta.ndim or (theta.ndim and len(theta) < len(then)):
            raise InputError(
                f"a penalty can follow layers that grew, but {name!r} has shape {tuple(theta.shape)}, "
                f"and had {tuple(then.shape)}"
            )
