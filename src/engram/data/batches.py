"""Batches, on the device where the data are, and the plan of an epoch for several trials that train together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engram.common.seeding import generator
from engram.data.samples import Samples, Stream

Batches = Iterator[tuple[Tensor, Tensor]]
LONGEST_PIECE = 64  # steps; between two pieces a run reports its progress and may write a checkpoint


def batches_of(
    samples: Samples,
    batch_size: int,
    *,
    permutation: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Batches:
    """(inputs, targets) of `batch_size` samples in the order of the samples. The last batch may be smaller.

    Args:
        samples: to divide into batches.
        batch_size: the number of samples in a batch.
        permutation: the order in which the pixels of each input are read.
        dtype: of the inputs.

    Example:
        >>> samples = Samples(torch.rand(5, 3), torch.arange(5))
        >>> [len(targets) for _, targets in batches_of(samples, 2)]
        [2, 2, 1]
    """
    for start in range(0, len(samples), batch_size):
        batch = samples[slice(start, start + batch_size)]
        yield read_inputs(batch.inputs, permutation, dtype), batch.targets


def epoch_order(samples: Samples, seed: int, trial: int, task: int, epoch: int) -> Tensor:
    """The order in which a trial learns its samples in one epoch, as rows of their inputs."""
    order = torch.randperm(len(samples), generator=generator(seed, "order", trial, task, epoch))
    return order if samples.rows is None else samples.rows.cpu()[order]


def num_batches(num_samples: int, batch_size: int) -> int:
    return -(-num_samples // batch_size)


def read_inputs(inputs: Tensor, permutation: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs as floats: uint8 pixels are scaled to [0, 1] and read in the order of `permutation`."""
    read = inputs.to(dtype).div_(255) if inputs.dtype == torch.uint8 else inputs.to(dtype)
    if permutation is not None:
        # Permuting floats is several times as fast on a CPU as permuting uint8.
        read = read.flatten(1).index_select(1, permutation).view_as(read)
    return read


def read_many(inputs: Tensor, chosen: Tensor, permutations: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`read_inputs` for several trials.

    Args:
        inputs: the pixels of all samples.
        chosen: rows of them (T, B).
        permutations: the order of the pixels of each trial (T, pixels), if they are permuted.
        dtype: of what is returned.

    Example:
        >>> read_many(torch.zeros(9, 1, 28, 28), torch.tensor([[0, 1, 2], [5, 7, 8]]), None, torch.float32).shape
        torch.Size([2, 3, 1, 28, 28])
    """
    if permutations is None:
        return read_inputs(inputs[chosen], dtype=dtype)
    pixels = inputs.flatten(1)[chosen[:, :, None], permutations[:, None, :]]
    return read_inputs(pixels.unflatten(2, inputs.shape[1:]), dtype=dtype)


@dataclass(frozen=True)
class Piece:
    """Consecutive steps that some trials take together, with batches of one size."""

    trials: slice  # among the trials of a stack
    first_step: int  # in the epoch
    num_steps: int
    first_sample: int  # in the epoch's order
    batch_size: int

    @property
    def end(self) -> int:
        """The step after the last."""
        return self.first_step + self.num_steps


def record_steps(num_steps: int, records_per_epoch: int) -> list[int]:
    """The steps of an epoch after which a record is made: the last one, and others at even distances."""
    return [
        i for i in range(num_steps) if (i + 1) * records_per_epoch // num_steps > i * records_per_epoch // num_steps
    ]


def plan_epoch(
    num_samples: Sequence[int], batch_size: int, records_per_epoch: int, stops: Sequence[set[int]] | None = None
) -> list[Piece]:
    """All steps of an epoch, for trials that have these numbers of samples.

    All trials take full batches together, as many as the smallest trial has. Where their sizes differ, trials of one
    size take the rest on their own. A piece ends at each step after which one of its trials makes a record, and at
    further `stops` of each trial.
    """
    common = min(num_samples) // batch_size
    whole = slice(0, len(num_samples))
    spans = [(whole, 0, common, batch_size)] if common else []
    for _, equal in itertools.groupby(range(len(num_samples)), key=num_samples.__getitem__):
        first, *others = equal
        trials = slice(first, first + 1 + len(others))
        full, rest = divmod(num_samples[first], batch_size)
        if full > common:
            spans.append((trials, common, full, batch_size))
        if rest:
            spans.append((trials, full, full + 1, rest))
    records = [set(record_steps(num_batches(n, batch_size), records_per_epoch)) for n in num_samples]
    if stops is not None:
        records = [record | stop for record, stop in zip(records, stops, strict=True)]
    pieces = []
    for trials, start, end, size in spans:
        recorded = set().union(*records[trials])
        first = start
        for step in range(start, end):
            if step in recorded or step + 1 == end or step + 1 - first == LONGEST_PIECE:
                pieces.append(Piece(trials, first, step + 1 - first, first * batch_size, size))
                first = step + 1
    return pieces


def move_streams(streams: Sequence[Stream], device: torch.device) -> list[Stream]:
    """The streams on a device. Tensors that tasks or streams share are copied once."""
    moved: dict[int, Tensor] = {}
    parts: dict[int, Samples] = {}

    def move(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    def move_samples(samples: Samples) -> Samples:
        if id(samples) not in parts:
            parts[id(samples)] = Samples(move(samples.inputs), move(samples.targets), move(samples.rows))  # type: ignore[arg-type]
        return parts[id(samples)]

    return [
        replace(
            stream,
            tasks=tuple(
                replace(
                    task,
                    train=move_samples(task.train),
                    test=move_samples(task.test),
                    permutation=move(task.permutation),
                )
                for task in stream.tasks
            ),
        )
        for stream in streams
    ]
