"""Looking at a network without changing it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, in which traces and BatchNorm statistics are only read; each module's own mode returns."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
