"""A reservoir: a fixed number of stored samples, at every moment a uniform choice of all that were offered.

The state holds `inputs`, `targets`, `tasks` (M + 1 rows; the last takes what is not kept), and `offered`, a count.
`Reservoir` has no such state: what it draws does not depend on how samples are divided into batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from engram.common.errors import InputError
from engram.common.seeding import derive_seed
from engram.nn import memory
from engram.rehearsal.rehearsal import Batch, Memory, State

FEWEST_ROWS = 4096  # of a `Reservoir`, unless its size is smaller


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
    return Memory(size, sum(tensor[:-1].nbytes for tensor in rows))


def rows_of(batch: Batch, n: int) -> dict[str, Tensor]:
    """A batch of task n as rows of a reservoir."""
    return {"inputs": batch.inputs, "targets": batch.targets, "tasks": torch.full_like(batch.targets, n)}


class Reservoir:
    """A memory of at most `size` samples, in which each sample so far is with the same probability.

    It is Vitter's algorithm R. What is drawn for a sample depends only on its position in the stream, so the content is
    the same whether samples come one at a time or in batches.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        self.num_tasks = 0  # how many times it was emptied, so that no two tasks draw the same
        self.clear()

    def clear(self) -> None:
        """Discard all samples."""
        self.num_tasks += 1
        self.num_seen = 0
        self.inputs: Tensor | None = None  # (rows, features); the first `len(self)` rows are samples
        self.targets: Tensor | None = None  # (rows,)

    def __len__(self) -> int:
        return min(self.num_seen, self.size)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Store some of the samples."""
        if not self.size:
            return
        rows = self.rows_for(self.num_seen + len(targets))
        self.inputs, self.targets = _with_rows(rows, self.inputs, inputs), _with_rows(rows, self.targets, targets)
        stored: dict[int, int] = {}  # the sample for each position: the last one that was drawn for it
        for i in range(len(targets)):
            position = self._position(self.num_seen + i)
            if position < self.size:
                stored[position] = i
        positions, chosen = list(stored), list(stored.values())
        self.inputs[positions] = inputs[chosen]
        self.targets[positions] = targets[chosen]
        self.num_seen += len(targets)

    def rows_for(self, num_seen: int) -> int:
        """How many rows it has after so many samples: a power of two, so that few copies are made, up to its size."""
        return min(self.size, max(FEWEST_ROWS, 1 << max(0, num_seen - 1).bit_length()))

    def _position(self, n: int) -> int:
        """Where the n-th sample goes: the first ones in order, then anywhere in 0..n, which may be outside."""
        return n if n < self.size else derive_seed(self.seed, "memory", self.num_tasks, n) % (n + 1)

    def batches(self, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Its samples in batches."""
        if self.inputs is None or self.targets is None:
            return []
        stored = slice(len(self))
        return list(zip(self.inputs[stored].split(batch_size), self.targets[stored].split(batch_size), strict=True))


def _with_rows(rows: int, stored: Tensor | None, new: Tensor) -> Tensor:
    """What is stored, with at least so many rows of the shape that new samples have."""
    held = new[:0] if stored is None else stored
    return held if len(held) >= rows else torch.cat([held, new.new_zeros(rows - len(held), *new.shape[1:])])
