"""Everything random is a function of (seed, purpose, trial, task, epoch), never of what ran before.

So trial 7 draws the same numbers alone or among ten, on one device or another, and two methods of one
trial start from the same weights and see the same batches: they can be compared in pairs.
"""

from __future__ import annotations

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *place: int) -> int:
    """A 63-bit seed for one purpose (a word) at one place (trial, task, epoch)."""
    text = "/".join(["engram", str(seed), purpose, *map(str, place)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, purpose: str, *place: int) -> torch.Generator:
    """A generator on the CPU, so that its numbers do not depend on the device."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *place))
