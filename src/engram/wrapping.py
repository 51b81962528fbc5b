"""A model as it was before something was put around it."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bare(model: nn.Module) -> nn.Module:
    """The model itself, whose weights have their own names, within torch.compile or DistributedDataParallel or both."""
    while True:
        within = getattr(model, "_orig_mod", model)
        if isinstance(within, DistributedDataParallel):
            within = within.module
        if within is model:
            return model
        model = within
