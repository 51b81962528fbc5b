"""Which defaults `ContinualClassifier` should have: two streams of digits, learned with many settings.

python benchmarks/classifier_defaults.py [passes] [seeds]    accuracies on held-out training samples of mnist-small

Class-incremental: the digits two classes at a time, in calls of 250 samples; final accuracy over all ten.
Domain-incremental: five tasks of 3,000 samples with their pixels permuted; final mean accuracy over the tasks.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from engram.data.sources import load
from engram.sklearn import ContinualClassifier

SAMPLES_A_CALL = 250
NUM_TASKS = 5
SETTINGS: list[dict[str, Any]] = [
    {},
    *({"shrinkage": shrinkage} for shrinkage in (0.01, 0.1)),
    *({"random_features": number} for number in (500, 1000, 2000)),
    {"method": "finetune", "masked": False},
    {"method": "finetune"},
    {"method": "dhp", "steady": False},
    {"method": "dhp", "steady": True},
    *({"method": "dhp+si", "strength": strength, "steady": False} for strength in (10.0, 30.0)),
    *({"method": "dhp+si", "strength": strength, "steady": True} for strength in (3.0, 10.0, 30.0, 100.0)),
    *({"method": "dhp+online-ewc", "strength": strength, "steady": True} for strength in (3.0, 10.0, 30.0)),
    *({"method": "dhp+mas", "strength": strength, "steady": True} for strength in (0.03, 0.1, 0.3)),
]


def arrays(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    return samples.inputs.flatten(1).numpy() / np.float32(255), samples.labels.numpy()


def learn(classifier: ContinualClassifier, task: int, X: np.ndarray, y: np.ndarray, passes: int) -> None:
    for _ in range(passes):
        for start in range(0, len(y), SAMPLES_A_CALL):
            part = slice(start, start + SAMPLES_A_CALL)
            classifier.partial_fit(X[part], y[part], task=task)


def main(passes: int, seeds: int) -> None:
    torch.set_num_threads(1)
    data = load("mnist-small").held_out()
    (X, y), (held_X, held_y) = arrays(data.train), arrays(data.test)
    orders = [np.random.RandomState(task).permutation(X.shape[1]) for task in range(NUM_TASKS)]

    def class_incremental(setting: dict[str, Any]) -> float:
        classifier = ContinualClassifier(**setting)
        for task in range(NUM_TASKS):
            own = y // 2 == task
            learn(classifier, task, X[own], y[own], passes)
        return classifier.score(held_X, held_y)

    def domain_incremental(setting: dict[str, Any]) -> float:
        classifier = ContinualClassifier(**setting)
        for task, order in enumerate(orders):
            learn(classifier, task, X[task::2][:3000, order], y[task::2][:3000], passes)
        return float(np.mean([classifier.score(held_X[:, order], held_y) for order in orders]))

    table = Table("setting", "classes", "domains", title=f"{passes} passes, mean of {seeds} seeds")
    for setting in track(SETTINGS, transient=True):
        found = [
            [f({**setting, "random_state": s}) for s in range(seeds)] for f in (class_incremental, domain_incremental)
        ]
        table.add_row(
            " ".join(f"{k}={v}" for k, v in setting.items()) or "default", *(f"{np.mean(row):.3f}" for row in found)
        )
        print(setting, found, file=sys.stderr, flush=True)
    Console(width=100).print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("passes", type=int, nargs="?", default=3, help="over each task's samples")
    parser.add_argument("seeds", type=int, nargs="?", default=2, help="how many")
    main(**vars(parser.parse_args()))
