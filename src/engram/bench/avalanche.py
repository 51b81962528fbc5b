"""Avalanche's own strategies on the same network, where avalanche-lib is installed: by its cheapest way to the data."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from engram.bench.loops import plain_model
from engram.bench.timing import Take, synchronize
from engram.bench.workload import Workload
from engram.common.errors import InputError

STRATEGIES = ("Naive", "EWC", "SynapticIntelligence", "MAS")


def is_installed() -> bool:
    return importlib.util.find_spec("avalanche") is not None


def version() -> dict[str, str]:
    """By the package's name, where it is installed."""
    return {"avalanche-lib": metadata.version("avalanche-lib")} if is_installed() else {}


class TimedBatches:
    """Batches that are ready made, with the time from the first to when the last has been used."""

    def __init__(self, batches: list[tuple[Tensor, ...]], device: torch.device):
        self.batches = batches
        self.device = device
        self.seconds = 0.0

    def __iter__(self) -> Iterator[list[Tensor]]:
        synchronize(self.device)
        start = time.perf_counter()
        for batch in self.batches:
            yield list(batch)
        synchronize(self.device)
        self.seconds = time.perf_counter() - start


def strategy_loop(name: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Take:
    """Each take learns one experience more, so that from the second on the strategy's penalty is in force.

    Only its steps count, not what it does before and after an experience.
    """
    try:
        from avalanche.benchmarks import benchmark_from_datasets
        from avalanche.benchmarks.utils import as_classification_dataset
    except Exception as reason:
        raise InputError(f"avalanche-lib is installed, but cannot be imported: {reason}") from reason
    inputs, targets = workload.batch(workload.samples(device), dtype)
    few = TensorDataset(inputs[: workload.batch_size].cpu(), targets[: workload.batch_size].cpu())
    few.targets = targets[: workload.batch_size].tolist()  # type: ignore[attr-defined]
    (experience,) = benchmark_from_datasets(train=[as_classification_dataset(few)]).train_stream
    strategy = _strategy(name, workload, device, dtype)
    no_task = torch.zeros(workload.batch_size, dtype=torch.int64, device=device)
    ready: list[tuple[Tensor, ...]] = [
        (x, y, no_task)
        for x, y in zip(inputs.split(workload.batch_size), targets.split(workload.batch_size), strict=True)
    ]

    def take(num_steps: int) -> float:
        batches = TimedBatches(ready[:num_steps], device)
        strategy.make_train_dataloader = lambda **options: setattr(strategy, "dataloader", batches)
        strategy.train(experience)
        return batches.seconds

    take(1)  # the experience that it then remembers
    return take


def _strategy(name: str, workload: Workload, device: torch.device, dtype: torch.dtype) -> Any:
    from avalanche.training.plugins import EvaluationPlugin, MASPlugin
    from avalanche.training.supervised import EWC, Naive, SynapticIntelligence

    model = plain_model(workload, device, dtype)
    common: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
        "criterion": torch.nn.CrossEntropyLoss(),
        "train_mb_size": workload.batch_size,
        "train_epochs": 1,
        "device": device,
        "evaluator": EvaluationPlugin(),
    }
    make: dict[str, Callable[[], Any]] = {
        "Naive": lambda: Naive(**common),
        "EWC": lambda: EWC(ewc_lambda=1.0, mode="online", decay_factor=1.0, **common),
        "SynapticIntelligence": lambda: SynapticIntelligence(si_lambda=0.1, **common),
        "MAS": lambda: Naive(plugins=[MASPlugin(lambda_reg=0.1)], **common),
    }
    return make[name]()
