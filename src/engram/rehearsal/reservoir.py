"""A reservoir: a fixed number of stored samples, at every moment a uniform choice of all that were offered.

The state holds `inputs`, `targets`, `tasks` (M + 1 rows; the last takes what is not kept), and `offered`, a count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.common.errors import InputError
from engram.nn import memory
from engram.rehearsal.rehearsal import Batch, Memory, State


def check_size(size: int) -> None:
    """Refuse a memory that can hold nothing."""
    if size < 1:
        raise InputError(f"a memory of stored samples must hold at least 1, not {size}")


def check_fits(size: int, bytes_of_sample: int, device: torch.device) -> None:
    """Refuse a memory that would take more than half of the device's: a step makes the next one from the old one.

    Args:
        size: M, the number of samples.
        bytes_of_sample: that one of them takes.
        device: where it would be.
    """
    memory.check_fits(size * bytes_of_sample, f"a memory of {size} samples", "lower memory_size", device)


def empty(size: int, input_shape: Sequence[int], like: Tensor) -> State:
    """A reservoir for M = `size` samples, on the device and of the type of `like`."""
    numbers = 2 * torch.int64.itemsize  # the class and the task
    check_fits(size, math.prod(input_shape) * like.element_size() + numbers, like.device)
    zeros = like.new_zeros(size + 1, dtype=torch.int64)
    inputs = like.new_zeros(size + 1, *input_shape)
    return {"inputs": inputs, "targets": zeros, "tasks": zeros - 1, "offered": zeros[0].clone()}


def write(state: State, rows: dict[str, Tensor], uniform: Tensor) -> State:
    """Offer a batch, sample by sample (Vitter 1985, algorithm R).

    The sample that is the c-th offered goes to place c while c ≤ M, then to place ⌊c u⌋ + 1 if that is at most M.

    Args:
        state: with M + 1 rows of each name in `rows`.
        rows: the new samples' tensors, (B, ...).
        uniform: u (B,), in [0, 1).
    """
    size = len(state["tasks"]) - 1
    count = state["offered"] + 1 + torch.arange(len(uniform), device=uniform.device)  # c of each sample
    place = torch.where(count <= size, count - 1, (uniform * count).long())
    # Of several samples for one place the last one stays; those not kept go to the row after the last.
    same = place[:, None] == place[None, :]
    replaced = torch.triu(same, diagonal=1).any(dim=1)
    place = torch.where(replaced | (place >= size), size, place)
    written = {name: state[name].index_copy(0, place, tensor.to(state[name].dtype)) for name, tensor in rows.items()}
    return {**state, **written, "offered": state["offered"] + len(uniform)}


def read(state: State, uniform: Tensor) -> Tensor:
    """The rows of samples drawn uniformly, with replacement, among those stored; one for each number."""
    held = state["offered"].clamp(max=len(state["tasks"]) - 1)
    return (uniform * held).long()


def read_earlier(state: State, uniform: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The same among samples of tasks before n; and whether there are any."""
    tasks = state["tasks"][:-1]
    earlier = (tasks >= 0) & (tasks < n)
    order = torch.argsort((~earlier).to(torch.uint8), stable=True)  # earlier tasks' rows first
    return order[(uniform * earlier.sum()).long()], earlier.any()


def stored(state: State, rows: Tensor) -> Batch:
    """The samples of some rows."""
    return Batch(*(state[name].index_select(0, rows) for name in ("inputs", "targets", "tasks")))


def memory_of(state: State) -> Memory:
    """The samples that a reservoir can hold, and their bytes."""
    size = len(state["tasks"]) - 1
    rows = [tensor for tensor in state.values() if tensor.ndim and len(tensor) == size + 1]
    return Memory(size, sum(tensor[:-1].numel() * tensor.element_size() for tensor in rows))


def rows_of(batch: Batch, n: int) -> dict[str, Tensor]:
    """A batch of task n as rows of a reservoir."""
    return {"inputs": batch.inputs, "targets": batch.targets, "tasks": torch.full_like(batch.targets, n)}
