"""Inputs with their labels: the one shape in which data travel through Engram."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from engram.common.errors import InputError

Origin = Literal["published", "structure", "custom"]


@dataclass(frozen=True)
class Samples:
    """`inputs` (N, ...) as uint8 pixels or floats, and `targets` (N,) as int64 class numbers.

    With `rows`, only those of the N belong: so many selections share one store of pixels.
    """

    inputs: Tensor
    targets: Tensor
    rows: Tensor | None = None

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.targets):
            raise InputError(f"there are {len(self.inputs)} inputs but {len(self.targets)} targets")
        if self.targets.ndim != 1 or self.targets.dtype != torch.int64:
            raise InputError(
                f"targets must be a vector of int64 class numbers, not {self.targets.dtype} of shape "
                f"{tuple(self.targets.shape)}"
            )

    def __len__(self) -> int:
        return len(self.targets if self.rows is None else self.rows)

    def __getitem__(self, index: Tensor | slice) -> Samples:
        chosen = index if self.rows is None else self.rows[index]
        return Samples(self.inputs[chosen], self.targets[chosen])

    @property
    def labels(self) -> Tensor:
        """The targets of those that belong."""
        return self.targets if self.rows is None else self.targets[self.rows]

    def select(self, chosen: Tensor) -> Samples:
        """Those of the samples, by a mask, without a copy of their inputs."""
        assert self.rows is None
        return Samples(self.inputs, self.targets, chosen.nonzero()[:, 0])


@dataclass(frozen=True)
class Dataset:
    """A loaded dataset: inputs (N, 1, 28, 28) or (N, 3, 32, 32) as uint8, targets as int64 from 0 to 9."""

    name: str
    train: Samples
    test: Samples
    origin: Origin

    def provenance(self) -> dict[str, Any]:
        """What a result file keeps about its data."""
        return {"name": self.name, "origin": self.origin, "train": len(self.train), "test": len(self.test)}

    def held_out(self) -> Dataset:
        """For choices that the test samples must not see: the last sixth of the training samples in their place."""
        last = len(self.train) * 5 // 6
        return replace(self, train=self.train[slice(0, last)], test=self.train[slice(last, None)])

    def shortened(self, num_samples: int) -> Dataset:
        """With at most so many samples for training, and for testing, the first of each."""
        first = slice(0, num_samples)
        return replace(self, train=self.train[first], test=self.test[first])

    def fingerprint(self) -> str:
        """The same for the same samples, and for no others."""
        digest = hashlib.sha256()
        for samples in (self.train, self.test):
            for tensor in (samples[slice(None)].inputs, samples.labels):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()
