"""What the loops in this folder share: three tasks of permuted digits, a small classifier, and a table at the end."""

from __future__ import annotations

from collections.abc import Callable

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import engram
from engram.data.batches import read_inputs

Batches = DataLoader[tuple[Tensor, ...]]


class Classifier(nn.Module):
    """Any features, and the plastic head, which needs the targets in training."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU())
        self.head = engram.DHPSoftmax(200, 10)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        return self.head(self.features(inputs), targets)


def permuted_digits(quick: bool) -> list[tuple[Batches, Batches]]:
    """Three tasks: the batches to train on, and those to evaluate on."""
    torch.manual_seed(0)
    loaders = []
    for task in engram.streams.permuted(num_tasks=3, dataset="mnist-small"):
        parts = []
        for samples, count in ((task.train, 400 if quick else 10000), (task.test, 200 if quick else 2000)):
            inputs = read_inputs(samples.inputs[:count], task.permutation).flatten(1)
            parts.append(
                DataLoader(TensorDataset(inputs, samples.targets[:count]), batch_size=8 if quick else 32, shuffle=True)
            )
        loaders.append((parts[0], parts[1]))
    return loaders


Learn = Callable[[Classifier, engram.SI, torch.optim.Optimizer, Batches], None]


def learn_digits(
    learn: Learn,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    strength: float,
    quick: bool = False,
    epochs: int = 3,
    quiet: bool = False,
) -> list[list[float]]:
    """Learn one task after another; returns, after each task, the accuracy on all tasks so far."""
    torch.manual_seed(1)
    model = Classifier()
    penalty = engram.SI(model, strength=strength)
    made = optimizer(model)
    loaders = permuted_digits(quick)
    steps = [(n, epoch) for n in range(len(loaders)) for epoch in range(1 if quick else epochs)]
    rows = []
    for n, epoch in track(steps, "learning", console=Console(stderr=True, quiet=quiet), transient=True):
        learn(model.train(), penalty, made, loaders[n][0])
        if (n, epoch + 1) not in steps:  # the task is learned
            penalty.consolidate()
            rows.append([accuracy(model, test) for _, test in loaders[: n + 1]])
    return rows


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> float:
    model.eval()
    right = [(model(inputs).argmax(dim=1) == targets) for inputs, targets in batches]
    return float(torch.cat(right).float().mean())


def show(
    title: str,
    learn: Learn,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    strength: float,
    quiet: bool = False,
) -> None:
    """The command line of a script: learn with and without consolidation, and print both unless `quiet`."""

    def command(quick: bool = typer.Option(False, help="Few digits, one epoch.")) -> None:
        table = Table("accuracy in %", "task 1", "task 2", "task 3", title=title)
        for name, used in (("with SI", strength), ("without", 1e-12)):
            last = learn_digits(learn, optimizer, used, quick, quiet=quiet)[-1]
            table.add_row(name, *(f"{100 * value:.1f}" for value in last))
        Console(quiet=quiet).print(table)

    typer.run(command)
