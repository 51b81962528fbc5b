"""The forms that data have in Engram: inputs with their labels, datasets, tasks, and streams of tasks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from engram.common.errors import InputError

Origin = Literal["published", "structure", "custom"]


@dataclass(frozen=True)
class Samples:
    """`inputs` (N, ...) as uint8 pixels or floats, and `targets` (N,) as int64 class numbers.

    With `rows`, only those rows of the N are in it, so that several selections share one store of pixels.

    Args:
        inputs: (N, ...), uint8 pixels or floats.
        targets: (N,), int64 class numbers.
        rows: the rows that are in it; None for all.

    Example:
        >>> samples = Samples(torch.rand(4, 8), torch.tensor([0, 1, 0, 1]))
        >>> len(samples[:3])
        3
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
        """The targets of the samples that are in it."""
        return self.targets if self.rows is None else self.targets[self.rows]

    def check(self, what: str, shape: tuple[int, ...], classes: Sequence[int]) -> None:
        """Refuse samples that do not belong to a task with this shape of inputs and these classes."""
        if len(self) == 0:
            raise InputError(f"{what} are empty")
        if tuple(self.inputs.shape[1:]) != shape:
            raise InputError(f"{what} have shape {tuple(self.inputs.shape[1:])}, those of the first task {shape}")
        if self.inputs.is_floating_point() and not torch.isfinite(self.inputs).all():
            raise InputError(f"{what} hold NaN or infinity")
        stray = set(self.labels.unique().tolist()) - set(classes)
        if stray:
            raise InputError(f"{what} have the label {min(stray)}, which is not among the task's classes")

    def is_same(self, other: Samples) -> bool:
        """Whether both are made of the same tensors, so that what is computed for one holds for the other."""
        return self.inputs is other.inputs and self.targets is other.targets and self.rows is other.rows

    def select(self, chosen: Tensor) -> Samples:
        """The samples that a mask selects, without a copy of their inputs."""
        assert self.rows is None
        return Samples(self.inputs, self.targets, chosen.nonzero()[:, 0])


def as_samples(inputs: Any, targets: Any) -> Samples:
    """Samples from arrays of NumPy or PyTorch: inputs as uint8 pixels or floats, targets as whole numbers."""
    x, y = (a if isinstance(a, Tensor) else _as_tensor(np.ascontiguousarray(a)) for a in (inputs, targets))
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InputError(f"targets must be whole class numbers, not {y.dtype}")
    return Samples(x if x.dtype == torch.uint8 else x.float(), y.long())


def _as_tensor(array: np.ndarray) -> Tensor:
    try:
        return torch.from_numpy(array)
    except TypeError:
        raise InputError(f"arrays must hold numbers, not {array.dtype}") from None


@dataclass(frozen=True)
class Dataset:
    """A loaded dataset: inputs (N, 1, 28, 28) or (N, 3, 32, 32) as uint8, targets as int64 from 0 to 9."""

    name: str
    train: Samples
    test: Samples
    origin: Origin

    @property
    def num_classes(self) -> int:
        """One more than the largest label."""
        return 1 + int(self.train.targets.max())

    def provenance(self) -> dict[str, Any]:
        """What a result file records about its data."""
        return {"name": self.name, "origin": self.origin, "train": len(self.train), "test": len(self.test)}

    def held_out(self) -> Dataset:
        """The dataset for choosing settings: the last sixth of the training samples in place of the test samples."""
        last = len(self.train) * 5 // 6
        return replace(self, train=self.train[slice(0, last)], test=self.train[slice(last, None)])

    def shortened(self, num_samples: int) -> Dataset:
        """The first samples for training and for testing, at most `num_samples` of each."""
        first = slice(0, num_samples)
        return replace(self, train=self.train[first], test=self.test[first])

    def fingerprint(self) -> str:
        """A digest of all samples: two datasets have the same one if and only if their samples are the same."""
        digest = hashlib.sha256()
        for samples in (self.train, self.test):
            for tensor in (samples[slice(None)].inputs, samples.labels):
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()


@dataclass(frozen=True)
class Task:
    """Training and test samples, and the outputs that take part in the task.

    Args:
        name: for messages.
        train: the training samples. In a loop of your own take `train[:]`: `inputs` may hold those of other tasks too.
        test: the test samples.
        classes: the outputs that take part; the others are masked out.
        permutation: the order in which the pixels of each input are read; None for the order of the input.
        taught: the outputs that take part in training; by default the task's classes.

    Example:
        >>> samples = Samples(torch.rand(4, 8), torch.tensor([0, 1, 0, 1]))
        >>> Task("first", samples, samples, classes=(0, 1)).taught
        (0, 1)
    """

    name: str
    train: Samples
    test: Samples
    classes: tuple[int, ...]  # the other outputs are masked out
    permutation: Tensor | None = None  # the order in which the pixels of each input are read
    taught: tuple[int, ...] = ()  # the outputs that take part in training; by default the task's classes

    def __post_init__(self) -> None:
        if not self.taught:
            object.__setattr__(self, "taught", self.classes)


@dataclass(frozen=True)
class Stream:
    """Tasks in the order in which one network learns them.

    Args:
        tasks: at least one.
        num_classes: the number of outputs of the network.
        scenario: the one that `in_scenario` gave it; None for tasks that are each evaluated among their own classes.

    Example:
        >>> stream = engram.streams.split("mnist-small")
        >>> len(stream), stream[0].classes, stream.num_classes
        (5, (0, 1), 10)
    """

    tasks: tuple[Task, ...]
    num_classes: int
    scenario: str | None = None

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("a stream needs at least one task")
        shape = self.input_shape
        checked = set()  # samples that several tasks share are checked once
        for task in self.tasks:
            if len(set(task.classes)) < len(task.classes) or not set(task.classes) <= set(range(self.num_classes)):
                rule = f"must lie in 0..{self.num_classes - 1}, once each"
                raise InputError(f"the classes of task {task.name!r} {rule}, not {task.classes}")
            for part, samples in (("training", task.train), ("test", task.test)):
                if (id(samples), task.classes) in checked:
                    continue
                checked.add((id(samples), task.classes))
                samples.check(f"the {part} samples of task {task.name!r}", shape, task.classes)

    def __len__(self) -> int:
        return len(self.tasks)

    def __iter__(self) -> Iterator[Task]:
        return iter(self.tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Task, ...]: ...
    def __getitem__(self, index: int | slice) -> Task | tuple[Task, ...]:
        return self.tasks[index]

    @property
    def input_shape(self) -> tuple[int, ...]:
        return tuple(self.tasks[0].train.inputs.shape[1:])

    def provenance(self) -> dict[str, Any]:
        """What a result file records about the data of a custom stream."""
        train, test = (
            sum(len(samples) for samples in part) for part in zip(*((t.train, t.test) for t in self), strict=True)
        )
        return {"name": "custom", "origin": "custom", "train": train, "test": test}


def as_colour_32(images: Tensor) -> Tensor:
    """Images (N, 1 or 3, H, W) zero-padded on all sides to 32×32, with a single channel replicated to three."""
    rows, columns = 32 - images.shape[2], 32 - images.shape[3]
    if rows < 0 or columns < 0:
        size = f"{images.shape[2]}×{images.shape[3]}"
        raise InputError(
            f"images of {size} pixels do not fit into 32×32, and would be cropped: make them smaller first"
        )
    padded = F.pad(images, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return padded.expand(-1, 3, -1, -1)
