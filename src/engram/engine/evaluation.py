"""How well a network knows a task: its accuracy on the task's test samples, everything frozen."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from engram.data.batches import batches_of
from engram.data.streams import Task
from engram.nn.freezing import frozen
from engram.nn.masking import mask_logits

EVALUATION_BATCH = 1000


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, dtype: torch.dtype = torch.float32) -> float:
    """The share of test samples, in [0, 1], whose class gets the largest of the task's own logits."""
    correct = torch.zeros((), dtype=torch.int64, device=task.test.targets.device)
    with frozen(model):
        for inputs, targets in batches_of(task.test, EVALUATION_BATCH, permutation=task.permutation, dtype=dtype):
            correct += (mask_logits(model(inputs), task.classes).argmax(dim=1) == targets).sum()
    return int(correct) / len(task.test)


def evaluate(model: nn.Module, tasks: Iterable[Task]) -> list[float]:
    """One row of the accuracy matrix: the accuracy on each of the tasks."""
    return [accuracy(model, task) for task in tasks]
