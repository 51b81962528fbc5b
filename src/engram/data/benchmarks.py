"""The paper's four benchmarks: the tasks of each, its datasets, and the paper's settings for it.

A registration's facts are
    title      as headings show it,
    scenario   that its tasks have by themselves (data/scenarios.py),
    datasets   that a config may choose from,
    settings   arguments of the function and the settings of `Config` that they take,
    preset     what differs from the defaults of `Config` (Appendix A, with the choices of docs/departures.md),
    strengths  λ of each penalty. The paper has none for EWC with a term per task, which takes Online EWC's.
    heads      what differs for a head: the paper's layer starts as its author published it.

The function takes the loaded datasets and the numbers of the trials, and makes a stream for each trial.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram.common.registry import BENCHMARKS
from engram.common.seeding import generator
from engram.data import streams
from engram.data.samples import Dataset, Stream

MIXTURE = ("mnist", "notmnist", "fashion-mnist", "svhn", "cifar-10")  # the five datasets, in the paper's order


@BENCHMARKS.register(
    "permuted-mnist",
    title="Permuted MNIST",
    scenario="domain",
    datasets=["mnist", "mnist-small", "fashion-mnist", "notmnist"],
    settings="num_tasks seed",
    preset={"num_tasks": 10, "hidden": [400, 400], "epochs": 20, "xi": 0.1},
    strengths={"online-ewc": 100, "ewc": 100, "si": 0.1, "mas": 0.1},
    heads={"dhp": {"head_init": "published"}},
)
def permuted_mnist(datasets: Sequence[Dataset], trials: Sequence[int], *, num_tasks: int, seed: int) -> list[Stream]:
    """Each task reads the pixels in another random order."""
    (dataset,) = datasets
    return [streams.permuted(dataset, num_tasks=num_tasks, seed=seed, trial=trial) for trial in trials]


@BENCHMARKS.register(
    "imbalanced-permuted-mnist",
    title="Imbalanced Permuted MNIST",
    scenario="domain",
    datasets=["mnist", "mnist-small", "fashion-mnist", "notmnist"],
    settings="num_tasks seed imbalance_seed",
    preset={"num_tasks": 10, "hidden": [400, 400], "epochs": 20, "xi": 0.1},
    strengths={"online-ewc": 400, "ewc": 400, "si": 1.0, "mas": 0.1},
    heads={"dhp": {"head_init": "published"}},
)
def imbalanced_permuted_mnist(
    datasets: Sequence[Dataset], trials: Sequence[int], *, num_tasks: int, seed: int, imbalance_seed: int
) -> list[Stream]:
    """Permuted MNIST with some training samples removed, of some classes more than of others."""
    (dataset,) = datasets
    return [
        streams.imbalanced(dataset, num_tasks=num_tasks, seed=seed, trial=trial, imbalance_seed=imbalance_seed)
        for trial in trials
    ]


@BENCHMARKS.register(
    "split-mnist",
    title="Split MNIST",
    scenario="task",
    datasets=["mnist", "mnist-small", "fashion-mnist", "notmnist"],
    settings={"num_tasks": "num_tasks", "order": "class_order", "seed": "seed"},
    preset={"num_tasks": 5, "hidden": [256, 256], "epochs": 10, "xi": 0.001},
    strengths={"online-ewc": 400, "ewc": 400, "si": 1.0, "mas": 1.5},
    heads={"dhp": {"head_init": "published"}},
)
def split_mnist(
    datasets: Sequence[Dataset], trials: Sequence[int], *, num_tasks: int, order: str, seed: int
) -> list[Stream]:
    """Two classes per task: the same in all trials, or with `order` "random" others in each trial."""
    (dataset,) = datasets
    if order == "fixed":
        return [streams.split(dataset, num_tasks=num_tasks)] * len(trials)
    draws = [torch.randperm(dataset.num_classes, generator=generator(seed, "class order", trial)) for trial in trials]
    return [streams.split(dataset, num_tasks=num_tasks, order=draw.tolist(), shared=True) for draw in draws]


@BENCHMARKS.register(
    "vision-mixture",
    title="Vision datasets mixture",
    scenario="task",
    datasets=["five-datasets"],
    settings="num_tasks",
    preset={
        "dataset": "five-datasets",
        "num_tasks": 5,
        "network": "cnn",
        "hidden": [500],
        "leaky_slope": 0.3,
        "eta": 1e-4,
        "epochs": 50,
        "batch_size": 32,
        "xi": 0.1,
    },
    strengths={"online-ewc": 100, "ewc": 100, "si": 0.1, "mas": 1.0},
    heads={"dhp": {"head_init": "published"}},
)
def vision_mixture(datasets: Sequence[Dataset], trials: Sequence[int], *, num_tasks: int) -> list[Stream]:
    """One dataset per task. The tasks are the same in all trials."""
    return [streams.mixture(datasets, num_tasks=num_tasks)] * len(trials)


def source_names(dataset: str, num_tasks: int) -> tuple[str, ...]:
    """The published datasets that are loaded for a config's dataset."""
    return MIXTURE[:num_tasks] if dataset == "five-datasets" else (dataset,)
