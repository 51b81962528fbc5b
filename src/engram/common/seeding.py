"""Everything random is a function of (seed, purpose, trial, task, epoch), never of what ran before.

So trial 7 draws the same numbers alone or among ten, on any device, and two methods start a trial from the same weights
and see the same batches: they can be compared in pairs.
"""

from __future__ import annotations

import hashlib
import threading

import torch

# Held by whoever seeds PyTorch's global generator and draws from it, as new weights do: one thread at a time.
DRAWING = threading.RLock()


def derive_seed(seed: int, purpose: str, *position: int) -> int:
    """A 63-bit seed for one purpose at one position.

    Args:
        seed: of the experiment.
        purpose: a word such as "weights".
        position: trial, task and epoch, as far as the numbers depend on them.

    Example:
        >>> derive_seed(0, "weights", 7) != derive_seed(0, "weights", 8)
        True
    """
    text = "/".join(["engram", str(seed), purpose, *map(str, position)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *position: int) -> torch.Generator:
    """A generator on the CPU, so that its numbers do not depend on the device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *position))
