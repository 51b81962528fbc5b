"""A bounded memory of the current task: a fair draw from all samples that came, however many."""

from __future__ import annotations

from torch import Tensor

from engram.common.seeding import derive_seed


class Reservoir:
    """At most `size` samples, each that came being among them with the same probability (Vitter's algorithm R).

    What is drawn for a sample depends on its place in the stream alone: so it is the same whether samples come one at
    a time or in batches.
    """

    def __init__(self, size: int, seed: int):
        self.size = size
        self.seed = seed
        self.num_begun = 0  # how many times it was emptied, so that no two tasks draw the same
        self.clear()

    def clear(self) -> None:
        """Forget all samples."""
        self.num_begun += 1
        self.num_seen = 0
        self.inputs: Tensor | None = None  # (size, features), of which the first `len(self)` are samples
        self.targets: Tensor | None = None  # (size,)

    def __len__(self) -> int:
        return min(self.num_seen, self.size)

    def add(self, inputs: Tensor, targets: Tensor) -> None:
        """Take up some of the samples."""
        if not self.size:
            return
        if self.inputs is None or self.targets is None:
            self.inputs = inputs.new_zeros(self.size, *inputs.shape[1:])
            self.targets = targets.new_zeros(self.size)
        kept: dict[int, int] = {}  # which of these samples comes to lie in a place: the last one drawn for it
        for i in range(len(targets)):
            place = self._place(self.num_seen + i)
            if place < self.size:
                kept[place] = i
        places, chosen = list(kept), list(kept.values())
        self.inputs[places] = inputs[chosen]
        self.targets[places] = targets[chosen]
        self.num_seen += len(targets)

    def _place(self, n: int) -> int:
        """Where the n-th sample goes: the first ones in order, then anywhere in 0..n, which may be outside."""
        return n if n < self.size else derive_seed(self.seed, "memory", self.num_begun, n) % (n + 1)

    def batches(self, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        """What is in it, in batches."""
        if self.inputs is None or self.targets is None:
            return []
        held = slice(len(self))
        return list(zip(self.inputs[held].split(batch_size), self.targets[held].split(batch_size), strict=True))
