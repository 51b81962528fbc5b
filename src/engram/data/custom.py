"""Streams of your own data: datasets of PyTorch, folders of images, data frames of pandas.

Each function reads its data as samples; the rest (samples held out for testing, tasks by class) is the same for all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engram.common.errors import InputError, shortened
from engram.common.seeding import generator
from engram.data.inputs import Size, column_of, image_folders, read_columns, read_dataset, read_images, sorted_labels
from engram.data.samples import Samples, Stream, Task

CLASSES_PER_TASK = 2  # as in `split`


def from_dataset(
    train: Any,
    test: Any = None,
    *,
    tasks: Sequence[Hashable] | None = None,
    classes_per_task: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Stream:
    """A stream of PyTorch's datasets: a list of them, one for each task; or one, split by its classes or by `tasks`.

    All samples are read into memory, once. A transform that draws random numbers therefore draws them once.

    Args:
        train: a dataset whose samples are (input, label), or a list of them. Inputs are tensors, arrays or images;
            labels are whole numbers from 0.
        test: the same for testing; by default some training samples are held out.
        tasks: for each sample of one dataset, its task: any number or word. Tasks come in the order in which they are
            first found, and each has all outputs.
        classes_per_task: of one dataset without `tasks`: each task has so many new classes (2 by default), with the
            other outputs masked out, as in `split`.
        test_fraction: the share of each class that is held out for testing, where `test` is not given.
        seed: which samples are held out.

    Raises:
        InputError: if samples are not (input, label) or differ in shape, or a class is too small to be held out.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.rand(40, 8), torch.arange(40) % 4)
        >>> stream = engram.streams.from_dataset(dataset)
        >>> [(task.name, len(task.train), len(task.test)) for task in stream]
        [('0/1', 16, 4), ('2/3', 16, 4)]
    """
    if isinstance(train, list | tuple):
        _refuse_split(tasks, classes_per_task, f"a list of {len(train)} datasets")
        if test is not None and not (isinstance(test, list | tuple) and len(test) == len(train)):
            raise InputError(f"{len(train)} training datasets need a list of {len(train)} test datasets, one each")
        trains = [read_dataset(dataset, f"training dataset {n + 1}") for n, dataset in enumerate(train)]
        tests = [read_dataset(dataset, f"test dataset {n + 1}") for n, dataset in enumerate(test or ())] or None
        return _tasks(trains, tests, [f"task {n + 1}" for n in range(len(trains))], test_fraction, seed)
    samples = read_dataset(train, "the training dataset")
    if tasks is None:
        tested = None if test is None else read_dataset(test, "the test dataset")
        return _by_class(samples, tested, None, classes_per_task, test_fraction, seed)
    _refuse_split(None, classes_per_task, "a dataset with `tasks`")
    if test is not None:
        raise InputError("`tasks` says where training samples belong, not test samples: give a list of datasets")
    return _by_task(samples, None, list(tasks), None, test_fraction, seed)


def from_folder(
    folder: str | Path | Sequence[str | Path],
    test: str | Path | Sequence[str | Path] | None = None,
    *,
    size: Size = None,
    colour: bool = True,
    classes_per_task: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Stream:
    """A stream of images in folders: FOLDER/CLASS/IMAGE. It needs Pillow, the extra `images`.

    Classes are numbered in the order of their names. Pixels stay uint8 and are all kept in memory.

    Args:
        folder: a folder with a folder of images for each class, split by classes; or a list of such folders, one for
            each task, in which a name means the same class everywhere.
        test: the same for testing; by default some training images are held out.
        size: (height, width), or one number for both: images are resized to it. By default all must have one size.
        colour: three channels; False for one, grey.
        classes_per_task: of one folder: each task has so many new classes, 2 by default.
        test_fraction: the share of each class that is held out for testing, where `test` is not given.
        seed: which images are held out.

    Raises:
        InputError: if a folder has no images, or an image cannot be read or has another size.

    Example:
        >>> from PIL import Image
        >>> for name in ("cat", "dog"):
        ...     Path("pets", name).mkdir(parents=True)
        ...     for n in range(5):
        ...         Image.new("RGB", (24, 16), (n, 0, 0)).save(f"pets/{name}/{n}.png")
        >>> stream = engram.streams.from_folder("pets")
        >>> stream[0].name, stream.input_shape, len(stream[0].test)
        ('cat/dog', (3, 16, 24), 2)
    """
    folders, tested = _paths(folder), None if test is None else _paths(test)
    many = not isinstance(folder, str | Path)
    if many:
        _refuse_split(None, classes_per_task, f"a list of {len(folders)} folders")
    if tested is not None and len(tested) != len(folders):
        raise InputError(f"there are {len(folders)} training folders but {len(tested)} test folders")
    found = [image_folders(each) for each in [*folders, *(tested or ())]]
    names = sorted({name for classes in found[: len(folders)] for name in classes})
    files = [(file, name) for classes in found for name, paths in classes.items() for file in paths]
    numbers = _numbers([name for _, name in files], names, "a folder of test images")
    images = read_images([file for file, _ in files], size, colour)  # together, since all have one size
    ends = np.cumsum([sum(map(len, classes.values())) for classes in found])[:-1]
    parts = [
        Samples(*part) for part in zip(*(torch.tensor_split(t, ends.tolist()) for t in (images, numbers)), strict=True)
    ]
    train, tests = parts[: len(folders)], None if tested is None else parts[len(folders) :]
    if many:
        return _tasks(train, tests, [each.name for each in folders], test_fraction, seed, len(names))
    return _by_class(train[0], None if tests is None else tests[0], names, classes_per_task, test_fraction, seed)


def from_dataframe(
    frame: Any,
    label: Hashable,
    test: Any = None,
    *,
    task: Hashable | None = None,
    columns: Sequence[Hashable] | None = None,
    classes_per_task: int | None = None,
    test_fraction: float = 0.2,
    seed: int = 0,
) -> Stream:
    """A stream of a pandas DataFrame: numeric columns as inputs, one column of labels, optionally one of tasks.

    Labels may be words or numbers; classes are numbered in the sorted order of the labels. Columns are not scaled: a
    network learns better if you do that first.

    Args:
        frame: the training samples, one a row.
        label: the name of the column of labels.
        test: a frame with the same columns for testing; by default some rows are held out.
        task: the name of the column of tasks, which come in the order in which they are first found and each have all
            outputs; by default tasks are made of `classes_per_task` new classes.
        columns: the names of the columns of inputs; by default all others.
        classes_per_task: without `task`: the number of new classes in each task, 2 by default.
        test_fraction: the share of each class that is held out for testing, where `test` is not given.
        seed: which rows are held out.

    Raises:
        InputError: if a column is missing, holds text or has missing values, or labels are fractions.

    Example:
        >>> import pandas
        >>> frame = pandas.DataFrame({"x": torch.rand(20), "y": torch.rand(20), "kind": ["bat", "cat"] * 10})
        >>> stream = engram.streams.from_dataframe(frame, "kind")
        >>> stream[0].name, stream.input_shape
        ('bat/cat', (2,))
    """
    labels = column_of(frame, label, "label")
    tasks = None if task is None else column_of(frame, task, "task")
    if tasks is not None:
        _refuse_split(None, classes_per_task, "a frame with a column of tasks")
    names = sorted_labels(labels, f"the column {shortened(label)}")
    columns = [name for name in frame.columns if name not in (label, task)] if columns is None else columns
    train, tests = Samples(read_columns(frame, columns), _numbers(labels, names, "the frame")), None
    if test is not None:
        numbers = _numbers(column_of(test, label, "label"), names, "the test frame")
        tests = Samples(read_columns(test, columns), numbers)
    if tasks is None:
        return _by_class(train, tests, names, classes_per_task, test_fraction, seed)
    test_tasks = None if test is None else column_of(test, task, "task")
    return _by_task(train, tests, tasks, test_tasks, test_fraction, seed, len(names))


# --- samples


def _numbers(labels: Sequence[Any], names: Sequence[Any], where: str) -> Tensor:
    """The class numbers of labels: their places among the names."""
    places = {name: number for number, name in enumerate(names)}
    unknown = [label for label in labels if label not in places]
    if unknown:
        raise InputError(f"{where} has the class {shortened(unknown[0])}, which has no training samples")
    return torch.tensor([places[label] for label in labels], dtype=torch.int64)


def _paths(given: str | Path | Sequence[str | Path]) -> list[Path]:
    return [Path(each) for each in ([given] if isinstance(given, str | Path) else given)]


# --- tasks


def class_groups(num_classes: int, size: int) -> list[tuple[int, ...]]:
    """The classes of each task, if each has so many new ones."""
    if size < 1:
        raise InputError(f"a task needs at least one class, not {size}")
    classes = tuple(range(num_classes))
    return [classes[i : i + size] for i in range(0, num_classes, size)]


def is_among(samples: Samples, classes: Sequence[int]) -> Tensor:
    """Which of the samples are of these classes."""
    return torch.isin(samples.targets, torch.tensor(classes))


def _refuse_split(tasks: object, classes_per_task: object, what: str) -> None:
    for name, given in (("tasks", tasks), ("classes_per_task", classes_per_task)):
        if given is not None:
            raise InputError(f"{name} has no effect on {what}, which has its tasks already: leave it out")


def _by_class(
    train: Samples, test: Samples | None, names: Sequence[Any] | None, size: int | None, fraction: float, seed: int
) -> Stream:
    """Tasks of so many new classes, with the other outputs masked out."""
    if test is None:
        train, test = _hold_out(train, fraction, seed, 0)
    num_classes = 1 + int(train.targets.max())
    tasks = []
    for group in class_groups(num_classes, CLASSES_PER_TASK if size is None else size):
        own, own_test = (samples[is_among(samples, group)] for samples in (train, test))
        tasks.append(Task("/".join(str(names[n] if names else n) for n in group), own, own_test, group))
    return Stream(tuple(tasks), num_classes)


def _by_task(
    train: Samples,
    test: Samples | None,
    tasks: Sequence[Any],
    test_tasks: Sequence[Any] | None,
    fraction: float,
    seed: int,
    num_classes: int | None = None,
) -> Stream:
    """A task for each value of `tasks`, in the order in which they are first found."""
    if len(tasks) != len(train):
        raise InputError(f"there are {len(train)} samples but {len(tasks)} tasks")
    values = list(dict.fromkeys(tasks))
    unknown = set(test_tasks or ()) - set(values)
    if unknown:
        raise InputError(f"the test samples have the task {shortened(unknown.pop())}, which has no training samples")

    def parts(samples: Samples, own: Sequence[Any]) -> list[Samples]:
        return [samples[torch.tensor([each == value for each in own])] for value in values]

    tests = None if test is None or test_tasks is None else parts(test, test_tasks)
    return _tasks(parts(train, tasks), tests, [str(value) for value in values], fraction, seed, num_classes)


def _tasks(
    train: list[Samples],
    test: list[Samples] | None,
    names: Sequence[str],
    fraction: float,
    seed: int,
    num_classes: int | None = None,
) -> Stream:
    """One task for each of these samples, all with all outputs."""
    if test is None:
        pairs = [_hold_out(samples, fraction, seed, n) for n, samples in enumerate(train)]
    else:
        pairs = list(zip(train, test, strict=True))
    largest = max((int(part.targets.max()) for pair in pairs for part in pair if len(part)), default=0)
    classes = tuple(range(num_classes or largest + 1))
    return Stream(tuple(Task(n, *pair, classes=classes) for n, pair in zip(names, pairs, strict=True)), len(classes))


def _hold_out(samples: Samples, fraction: float, seed: int, task: int) -> tuple[Samples, Samples]:
    """Training and test samples: of each class a share is drawn for testing, at least one sample."""
    if not 0 < fraction < 1:
        raise InputError(f"test_fraction must lie between 0 and 1, not {fraction}")
    held = torch.zeros(len(samples), dtype=torch.bool)
    random = generator(seed, "held out", task)
    for number, count in zip(*(each.tolist() for each in samples.targets.unique(return_counts=True)), strict=True):
        if count < 2:
            raise InputError(f"class {number} has a single sample, so none can be held out: give test samples")
        own = (samples.targets == number).nonzero()[:, 0][torch.randperm(count, generator=random)]
        held[own[: min(count - 1, max(1, round(count * fraction)))]] = True
    return samples[~held], samples[held]
