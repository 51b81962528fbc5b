"""New classes on pretrained features: a frozen or a slowly learning backbone under a DHP head, on CIFAR-10.

A small CNN learns the first four classes. Then the other six come, two at a time, and no sample of the earlier tasks is
seen again. The methods differ in the head, in what protects it, and in whether the backbone still learns.

    engram data fetch cifar-10
    python examples/cifar10_features.py
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import Progress
from torch import nn
from torch.nn.functional import cross_entropy

import engram
from engram.cli.data import DataFolder
from engram.cli.terminal import columns, print_table
from engram.common.errors import InputError
from engram.data.batches import batches_of, epoch_order, read_inputs
from engram.data.samples import Dataset, Samples
from engram.data.sources import load
from engram.data.streams import Stream, Task
from engram.nn.classes import mask_logits
from engram.nn.networks import Network
from engram.report.tables import Table, with_error
from engram.runs.metrics import average_accuracy, estimate, forgetting, paired_difference

BASE = 4  # classes on which the backbone is trained; the others come two at a time
WIDTH = 128  # features
BATCH = 100
HEAD_RATE = 0.05
IMPORTANCE_SAMPLES = 1000  # samples of a task from which importances are computed


@dataclass(frozen=True)
class Method:
    """A head, the strength of its protection, and the learning rate of the backbone: 0 for a frozen one."""

    name: str
    head: Callable[[int, int], nn.Module]
    strength: float | None = None
    backbone_rate: float = 0.0


def methods(strength: float, slow: float) -> list[Method]:
    return [
        Method("frozen, Linear", engram.LinearSoftmax),
        Method("frozen, Linear, Online EWC", engram.LinearSoftmax, strength),
        Method("frozen, DHP, Online EWC", engram.DHPSoftmax, strength),
        Method("slow, Linear", engram.LinearSoftmax, backbone_rate=slow),
        Method("slow, DHP, Online EWC", engram.DHPSoftmax, strength, slow),
    ]


# --- the backbone


def make_backbone() -> nn.Sequential:
    """Three convolutions with BatchNorm, from images (B, 3, 32, 32) to features (B, 128)."""

    def block(inputs: int, outputs: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    return nn.Sequential(*block(3, 16), *block(16, 32), *block(32, WIDTH), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def train_backbone(task: Task, epochs: int, seed: int, tick: Callable[[], None]) -> nn.Sequential:
    """A backbone that has learned one task; the head on top of it is discarded."""
    torch.manual_seed(seed)
    backbone = make_backbone()
    model = nn.Sequential(backbone, nn.Linear(WIDTH, BASE))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for epoch in range(epochs):
        for rows in epoch_order(task.train, seed, 0, 0, epoch).split(BATCH):
            batch = task.train[rows]
            optimizer.zero_grad()
            cross_entropy(model(read_inputs(batch.inputs)), batch.targets).backward()
            optimizer.step()
        tick()
    return backbone.eval()


@torch.no_grad()
def features_of(backbone: nn.Module, stream: Stream) -> Stream:
    """The stream as features of a frozen backbone, which sees each sample only once."""

    def seen(samples: Samples) -> Samples:
        return Samples(torch.cat([backbone(inputs) for inputs, _ in batches_of(samples, 500)]), samples.labels)

    return replace(stream, tasks=tuple(replace(task, train=seen(task.train), test=seen(task.test)) for task in stream))


# --- the stream


def class_stream(dataset: Dataset, num_samples: int) -> Stream:
    """The classes of the backbone as one task, then the others, two at a time."""
    groups = [range(BASE), *(range(first, first + 2) for first in range(BASE, 10, 2))]

    def only(samples: Samples, classes: range, num_samples: int | None = None) -> Samples:
        rows = torch.cat([(samples.targets == c).nonzero()[:num_samples, 0] for c in classes])
        return samples[rows.sort().values]

    return Stream(
        tuple(
            Task(
                "/".join(map(str, group)),
                only(dataset.train, group, num_samples),
                only(dataset.test, group),
                classes=tuple(group),
            )
            for group in groups
        ),
        num_classes=10,
    )


def learn_stream(
    method: Method, features: nn.Module, stream: Stream, epochs: int, seed: int, tick: Callable[[], None]
) -> np.ndarray:
    """Learn task after task, each with its own classes; returns the two accuracy matrices of `evaluate` (2, T, T)."""
    torch.manual_seed(seed)
    model = Network(features, method.head(WIDTH, stream.num_classes))
    penalty = engram.NoPenalty(model)
    if method.strength is not None:
        penalty = engram.OnlineEWC(model, strength=method.strength)
    groups = [{"params": model.head.parameters()}, {"params": model.features.parameters(), "lr": method.backbone_rate}]
    optimizer = torch.optim.SGD(groups, lr=HEAD_RATE)
    accuracy = np.full((2, len(stream), len(stream)), np.nan)
    for n, task in enumerate(stream):
        model.eval()  # BatchNorm keeps the statistics of the backbone's training
        model.head.train()  # only the head is in training mode, and writes its trace
        for epoch in range(epochs):
            for rows in epoch_order(task.train, seed, 0, n, epoch).split(BATCH):
                batch = task.train[rows]
                logits = model(read_inputs(batch.inputs), batch.targets)
                optimizer.zero_grad()
                cross_entropy(mask_logits(logits, task.classes), batch.targets).backward()
                optimizer.step()
                penalty.proximal_step(optimizer)
                penalty.after_step()
            tick()
        chosen = task.train[slice(0, IMPORTANCE_SAMPLES)]
        penalty.consolidate(batches_of(chosen, 100), task.classes)
        accuracy[:, n, : n + 1] = evaluate(model, stream[: n + 1])
    return accuracy


@torch.no_grad()
def evaluate(model: nn.Module, tasks: Sequence[Task]) -> np.ndarray:
    """Accuracy on each task (2, T): among the classes of the task, and among all classes so far."""
    model.eval()
    seen = tuple(c for task in tasks for c in task.classes)
    right = np.zeros((2, len(tasks)))
    for j, task in enumerate(tasks):
        for inputs, targets in batches_of(task.test, 500):
            logits = model(inputs)
            for i, classes in enumerate((task.classes, seen)):
                right[i, j] += int((mask_logits(logits, classes).argmax(dim=1) == targets).sum())
    return right / [len(task.test) for task in tasks]


# --- the command


def table(accuracy: dict[str, np.ndarray], stream: Stream) -> Table:
    """From each method's matrices (seeds, 2, T, T): means over the seeds, and paired differences to the first."""
    baseline = average_accuracy(next(iter(accuracy.values()))[:, 0])[:, -1]
    rows = []
    for name, matrices in accuracy.items():
        known, among_all = matrices[:, 0], matrices[:, 1]
        average = average_accuracy(known)[:, -1]
        gain = paired_difference(100 * average, 100 * baseline)
        interval = f" [{gain.low:+.1f}, {gain.high:+.1f}]" if len(matrices) > 1 else ""
        rows.append(
            (
                name,
                *(f"{100 * value:.1f}" for value in known[:, -1].mean(axis=0)),
                with_error(estimate(average)),
                f"{gain.mean:+.1f}{interval}" if rows else "–",
                f"{100 * forgetting(known).mean():.1f}",
                f"{100 * average_accuracy(among_all)[:, -1].mean():.1f}",
            )
        )
    columns = ("method", *(task.name for task in stream), "average", "minus the first [95%]", "forgetting", "among all")
    notes = (
        "Accuracy in % on each task after the last one, among the classes of the task; forgetting in points.",
        "Among all: the average among all ten classes, where the task is not known.",
    )
    return Table("CIFAR-10: new classes on pretrained features", columns, rows, notes)


def main(
    data: DataFolder = None,
    seeds: Annotated[int, typer.Option(min=1, help="Repetitions with other weights and orders.")] = 3,
    samples: Annotated[int, typer.Option(min=1, help="Training samples of each class.")] = 1000,
    backbone_epochs: Annotated[int, typer.Option(min=1, help="Passes of the backbone over the first task.")] = 6,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over each task.")] = 2,
    strength: Annotated[float, typer.Option(help="Strength λ of Online EWC.")] = 100.0,
    slow: Annotated[float, typer.Option(help="Learning rate of a slow backbone.")] = 0.005,
    quick: Annotated[bool, typer.Option("--quick", help="One pass over a few samples, to see that it works.")] = False,
) -> None:
    """Learn CIFAR-10's classes task after task, on a backbone that was trained on the first four."""
    console = Console()
    dataset = load("cifar-10", data)
    if quick:
        dataset, seeds, backbone_epochs, epochs = dataset.shortened(500), 1, 1, 1
    stream = class_stream(dataset, samples)
    compared = methods(strength, slow)
    accuracy: dict[str, list[np.ndarray]] = {method.name: [] for method in compared}
    with Progress(*columns("learning"), console=console) as progress:
        bar = progress.add_task("", total=seeds * (backbone_epochs + len(compared) * len(stream) * epochs))
        for seed in range(seeds):
            backbone = train_backbone(stream[0], backbone_epochs, seed, lambda: progress.advance(bar))
            seen = features_of(backbone, stream)
            for method in compared:
                features, tasks = (copy.deepcopy(backbone), stream) if method.backbone_rate else (nn.Identity(), seen)
                found = learn_stream(method, features, tasks, epochs, seed, lambda: progress.advance(bar))
                accuracy[method.name].append(found)
    print_table(table({name: np.stack(found) for name, found in accuracy.items()}, stream), console)


if __name__ == "__main__":
    try:
        typer.run(main)
    except InputError as error:
        sys.exit(f"cifar10_features: {error}")
