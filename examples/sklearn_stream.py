"""Digits, two classes at a time, each seen once: ContinualClassifier and scikit-learn's own partial_fit compared.

python examples/sklearn_stream.py [passes]    the 10,000 training digits of mnist-small, in calls of 250
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sklearn.linear_model import SGDClassifier
from sklearn.neural_network import MLPClassifier

from engram.data.sources import load
from engram.sklearn import ContinualClassifier

PAIRS = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
SAMPLES_A_CALL = 250


def arrays(samples: Any) -> tuple[np.ndarray, np.ndarray]:
    return samples.inputs.flatten(1).numpy() / np.float32(255), samples.labels.numpy()


def calls(X: np.ndarray, y: np.ndarray, passes: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The stream: for each pair of digits its samples, in calls of 250, in one or more passes."""
    for task, pair in enumerate(PAIRS):
        own = np.flatnonzero(np.isin(y, pair))
        for _ in range(passes):
            for start in range(0, len(own), SAMPLES_A_CALL):
                rows = own[start : start + SAMPLES_A_CALL]
                yield task, X[rows], y[rows]


def learn(classifier: Any, stream: Iterator[tuple[int, np.ndarray, np.ndarray]]) -> Any:
    """ContinualClassifier takes the task; scikit-learn's classifiers need to know all classes in advance."""
    ours = isinstance(classifier, ContinualClassifier)
    for task, X, y in stream:
        classifier.partial_fit(X, y, **({"task": task} if ours else {"classes": np.arange(10)}))
    return classifier


def main(passes: int = 1) -> dict[str, tuple[float, float]]:
    """Accuracy on all digits, and on the first pair, after the whole stream."""
    torch.set_num_threads(1)  # small networks are slower on several threads
    data = load("mnist-small")
    (X, y), (test_X, test_y) = arrays(data.train), arrays(data.test)
    first = np.isin(test_y, PAIRS[0])
    makers: dict[str, Callable[[], Any]] = {
        "SGDClassifier": lambda: SGDClassifier(loss="log_loss", random_state=0),
        "MLPClassifier of the same size, batches of 32": lambda: MLPClassifier((256,), batch_size=32, random_state=0),
        "ContinualClassifier": lambda: ContinualClassifier(random_state=0),
        '  as a network (method="dhp+si")': lambda: ContinualClassifier(method="dhp+si", random_state=0),
        "    with all outputs in training (masked=False)": lambda: ContinualClassifier(
            method="dhp+si", masked=False, random_state=0
        ),
        '    without consolidation (method="finetune")': lambda: ContinualClassifier(method="finetune", random_state=0),
    }
    found = {}
    for name, make in track(makers.items(), description="learning", transient=True):
        classifier = learn(make(), calls(X, y, passes))
        found[name] = (classifier.score(test_X, test_y), classifier.score(test_X[first], test_y[first]))
    table = Table(title=f"Test accuracy after five pairs of digits, {passes} pass{'es' * (passes > 1)} over each")
    for heading in ("", "all ten digits", "the first pair"):
        table.add_column(heading)
    for name, accuracies in found.items():
        table.add_row(name, *(f"{accuracy:.1%}" for accuracy in accuracies))
    Console(width=100).print(table)
    return found


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]))
