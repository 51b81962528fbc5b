"""What the targets of a batch must be, wherever they are given."""

from __future__ import annotations

import torch
from torch import Tensor

from engram.common.errors import InputError

CLASS_NUMBER_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def check_targets(targets: object, num_samples: int) -> Tensor:
    """A vector of one class number for each sample; their range is for those to check who know the classes."""
    if not isinstance(targets, Tensor):
        raise InputError(f"targets must be a tensor of class numbers, not a {type(targets).__name__}")
    if targets.dtype not in CLASS_NUMBER_TYPES:
        raise InputError(f"targets must be class numbers (int64), not {targets.dtype}")
    if targets.shape != (num_samples,):
        raise InputError(f"targets must have shape ({num_samples},), one for each sample, not {tuple(targets.shape)}")
    return targets
