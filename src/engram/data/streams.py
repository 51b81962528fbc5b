"""Streams of tasks: permuted, imbalanced, split, mixture, and from your own data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engram.common.errors import InputError
from engram.common.seeding import generator
from engram.data import custom, scenarios
from engram.data.samples import Dataset, Samples, Stream, Task, as_colour_32, as_samples
from engram.data.sources import load

in_scenario = scenarios.in_scenario
from_dataset = custom.from_dataset
from_folder = custom.from_folder
from_dataframe = custom.from_dataframe
MOST_CLASSES = 10_000_000  # far above what a layer could hold: a larger target is no class number


def permuted(dataset: Dataset | str, *, num_tasks: int = 10, seed: int = 0, trial: int = 0) -> Stream:
    """Permuted MNIST: each task reads the pixels in another random order. The classes stay the same.

    Args:
        dataset: a loaded dataset, or its name.
        num_tasks: the number of tasks.
        seed: the permutations are drawn from this and the trial.
        trial: the number of the trial.

    Example:
        >>> stream = engram.streams.permuted("mnist-small", num_tasks=3)
        >>> len(stream), stream.num_classes
        (3, 10)
    """
    dataset = _loaded(dataset)
    classes = tuple(range(dataset.num_classes))
    num_pixels = dataset.train.inputs[0].numel()
    return Stream(
        tuple(
            Task(
                name=f"permutation {n + 1}",
                train=dataset.train,
                test=dataset.test,
                classes=classes,
                permutation=torch.randperm(num_pixels, generator=generator(seed, "permutation", trial, n)),
            )
            for n in range(num_tasks)
        ),
        num_classes=len(classes),
    )


def removal_probabilities(num_tasks: int, num_classes: int, imbalance_seed: int = 0) -> Tensor:
    """The probability, from U(0, 1), that a training sample is removed, for each task and class."""
    generators = (generator(imbalance_seed, "removal probability", n) for n in range(num_tasks))
    return torch.stack([torch.rand(num_classes, generator=g) for g in generators])


def imbalanced(
    dataset: Dataset | str, *, num_tasks: int = 10, seed: int = 0, trial: int = 0, imbalance_seed: int = 0
) -> Stream:
    """Imbalanced Permuted MNIST: `permuted` with training samples removed, of some classes more than of others.

    The other arguments are as for `permuted`.

    Args:
        imbalance_seed: of the removal probabilities. As in the paper, these are the same in all experiments.

    Example:
        >>> stream = engram.streams.imbalanced("mnist-small", num_tasks=2)
    """
    stream = permuted(dataset, num_tasks=num_tasks, seed=seed, trial=trial)
    removal = removal_probabilities(num_tasks, stream.num_classes, imbalance_seed)

    def thin(n: int, task: Task) -> Task:
        draw = torch.rand(len(task.train), generator=generator(seed, "removal", trial, n))
        kept = draw >= removal[n][task.train.labels]
        return replace(task, train=task.train.select(kept))

    return replace(stream, tasks=tuple(thin(n, task) for n, task in enumerate(stream.tasks)))


def split(
    dataset: Dataset | str,
    *,
    num_tasks: int | None = None,
    classes_per_task: int = 2,
    order: Sequence[int] | None = None,
    shared: bool = False,
) -> Stream:
    """Split MNIST: 0/1, 2/3, 4/5, 6/7, 8/9, one pair per task, with the other outputs masked out.

    Args:
        dataset: a loaded dataset, or its name.
        num_tasks: how many of the tasks; None for all.
        classes_per_task: the number of classes in each task.
        order: the labels in the order in which they are learned: label order[k] becomes class k. None for 0, 1, 2, …
        shared: whether tasks only have rows of the whole dataset, whose inputs several streams then share.

    Example:
        >>> engram.streams.split("mnist-small", num_tasks=2)[0].name
        '0/1'
    """
    dataset, size = _loaded(dataset), classes_per_task
    classes, groups = range(dataset.num_classes), custom.class_groups(dataset.num_classes, size)
    if num_tasks is not None and not 1 <= num_tasks <= len(groups):
        raise InputError(f"{dataset.name} splits into 1 to {len(groups)} tasks of {size} classes, not {num_tasks}")
    parts, names = [dataset.train, dataset.test], ["/".join(map(str, group)) for group in groups]
    if order is not None:
        if sorted(order) != list(classes):
            raise InputError(f"order must hold each label from 0 to {len(classes) - 1} once, not {list(order)}")
        parts = [_renumbered(samples, order) for samples in parts]
        names = [f"task {n + 1}" for n in range(len(groups))]  # in any order, since the tasks of all trials share names
    pick = Samples.select if shared else Samples.__getitem__
    tasks = []
    for name, group in list(zip(names, groups, strict=True))[:num_tasks]:
        train, test = (pick(samples, custom.is_among(samples, group)) for samples in parts)
        tasks.append(Task(name, train, test, group))
    return Stream(tuple(tasks), num_classes=len(classes))


def mixture(datasets: Sequence[Dataset | str], *, num_tasks: int | None = None) -> Stream:
    """The vision datasets mixture: one dataset per task, each with its own outputs, as 3-channel images of 32×32.

    Args:
        datasets: loaded datasets, or their names.
        num_tasks: how many of the datasets; None for all.

    Example:
        >>> engram.streams.mixture(["mnist-small", "mnist-small"]).num_classes
        20
    """
    if num_tasks is not None and not 1 <= num_tasks <= len(datasets):
        raise InputError(f"the mixture has 1 to {len(datasets)} tasks, not {num_tasks}")
    loaded = [_loaded(dataset) for dataset in datasets]
    sizes = [dataset.num_classes for dataset in loaded]
    offsets = [sum(sizes[:n]) for n in range(len(sizes))]

    def task(dataset: Dataset, offset: int, size: int) -> Task:
        train, test = (
            Samples(as_colour_32(samples.inputs), samples.targets + offset) for samples in (dataset.train, dataset.test)
        )
        return Task(dataset.name, train, test, classes=tuple(range(offset, offset + size)))

    tasks = [task(*parts) for parts in zip(loaded, offsets, sizes, strict=True)][:num_tasks]
    return Stream(tuple(tasks), num_classes=sum(sizes))


def from_arrays(
    tasks: Iterable[tuple[Any, Any, Any, Any]],
    *,
    classes: Sequence[Sequence[int]] | None = None,
    num_classes: int | None = None,
    names: Sequence[str] | None = None,
) -> Stream:
    """A stream of your own arrays, of NumPy or PyTorch.

    Args:
        tasks: for each task (train inputs, train targets, test inputs, test targets). Inputs are floats, or uint8
            pixels, which are scaled to [0, 1]. Targets are whole numbers from 0.
        classes: the outputs of each task, with the others masked out; by default every task has all outputs.
        num_classes: the number of outputs; by default one more than the largest target.
        names: of the tasks; by default "task 1" and so on.

    Example:
        >>> x, y = torch.rand(20, 8), torch.arange(20) % 2
        >>> stream = engram.streams.from_arrays([(x, y, x, y), (1 - x, y, 1 - x, y)])
        >>> stream.input_shape
        (8,)
    """
    pairs = []
    for arrays in tasks:
        if len(arrays) != 4:
            raise InputError(
                f"a task is (train inputs, train targets, test inputs, test targets), not {len(arrays)} arrays"
            )
        pairs.append((as_samples(*arrays[:2]), as_samples(*arrays[2:])))
    if num_classes is None:
        num_classes = 1 + max((int(s.labels.max()) for pair in pairs for s in pair if len(s)), default=0)
        if num_classes > MOST_CLASSES:
            raise InputError(f"the largest target is {num_classes - 1}: number the classes from 0")
    groups = [tuple(range(num_classes))] * len(pairs) if classes is None else [tuple(group) for group in classes]
    names = [f"task {n + 1}" for n in range(len(pairs))] if names is None else names
    if not len(pairs) == len(groups) == len(names):
        raise InputError(f"there are {len(pairs)} tasks but {len(groups)} groups of classes and {len(names)} names")
    return Stream(
        tuple(Task(name, *pair, classes=group) for name, pair, group in zip(names, pairs, groups, strict=True)),
        num_classes,
    )


def _loaded(dataset: Dataset | str) -> Dataset:
    """A dataset that may be given by name; it is then loaded from where `engram data list` finds it."""
    return load(dataset) if isinstance(dataset, str) else dataset


def _renumbered(samples: Samples, order: Sequence[int]) -> Samples:
    """The samples with label order[k] as class k."""
    places = torch.empty(len(order), dtype=torch.int64)
    places[list(order)] = torch.arange(len(order))
    return Samples(samples.inputs, places[samples.targets])
