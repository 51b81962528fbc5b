"""Modules that draw random numbers as they train, as dropout does: their draws have an address too."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from engram.common.seeding import derive_seed


def draws_numbers(model: nn.Module, inputs: Tensor, targets: Tensor) -> bool:
    """Whether a training pass draws from PyTorch's own generators, found out on a copy."""
    with own_generators(inputs.device), torch.no_grad():
        before = _states(inputs.device)
        copy.deepcopy(model).train()(inputs, targets)
        return not all(torch.equal(a, b) for a, b in zip(before, _states(inputs.device), strict=True))


@contextmanager
def own_generators(device: torch.device) -> Iterator[None]:
    """Within it, draws and seeds leave no mark on what is drawn after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def seed_draws(seed: int, *place: int) -> None:
    """Let what is drawn next depend on nothing but the place: (trial, task, epoch, step)."""
    torch.manual_seed(derive_seed(seed, "draws", *place))


def _states(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
