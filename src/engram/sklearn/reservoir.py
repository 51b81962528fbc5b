"""A uniform sample of a stream, in memory of a fixed size."""

from __future__ import annotations

from torch import Tensor

from engram.common.seeding import derive_seed


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
        self.inputs: Tensor | None = None  # (size, features); the first `len(self)` rows are samples
        self.targets: Tensor | None = None  # (size,)

    def __len__(self) -> int:
        return min(self.num_seen, self.size)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Store some of the samples."""
        if not self.size:
            return
        if self.inputs is None or self.targets is None:
            self.inputs = inputs.new_zeros(self.size, *inputs.shape[1:])
            self.targets = targets.new_zeros(self.size)
        stored: dict[int, int] = {}  # the sample for each position: the last one that was drawn for it
        for i in range(len(targets)):
            position = self._position(self.num_seen + i)
            if position < self.size:
                stored[position] = i
        positions, chosen = list(stored), list(stored.values())
        self.inputs[positions] = inputs[chosen]
        self.targets[positions] = targets[chosen]
        self.num_seen += len(targets)

    def _position(self, n: int) -> int:
        """Where the n-th sample goes: the first ones in order, then anywhere in 0..n, which may be outside."""
        return n if n < self.size else derive_seed(self.seed, "memory", self.num_tasks, n) % (n + 1)

    def batches(self, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """Its samples in batches."""
        if self.inputs is None or self.targets is None:
            return []
        stored = slice(len(self))
        return list(zip(self.inputs[stored].split(batch_size), self.targets[stored].split(batch_size), strict=True))
