"""Several heads in one layer: a task's own classes take part, all others are masked out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def mask_logits(logits: Tensor, classes: Sequence[int] | None) -> Tensor:
    """The logits (B, C) with −∞ outside `classes`, to which softmax then gives no probability."""
    if classes is None or len(classes) == logits.shape[-1]:
        return logits
    return logits.masked_fill(masked_classes(tuple(classes), logits.shape[-1], logits.device), float("-inf"))


@lru_cache(maxsize=64)
def masked_classes(classes: tuple[int, ...], num_classes: int, device: torch.device) -> Tensor:
    """Which outputs do not take part (C,); kept, so that a GPU does not wait for it at every step."""
    with torch.inference_mode(False):  # it is kept for training too
        others = torch.ones(num_classes, dtype=torch.bool)
        others[list(classes)] = False
        return others.to(device)
