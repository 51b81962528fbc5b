"""Streams of new classes and of changing inputs: `ContinualClassifier` by default beside what else learns in streams.

python benchmarks/new_classes.py [--seeds 5] [--quick]    a Markdown table, with the progress on stderr

Class-incremental rows: classes in a random order, two in a task; the accuracy is among all classes at the end, on
test samples. Permuted and rotated: five tasks with all ten digits, whose pixels are permuted or which are rotated by a
further 15 degrees; the accuracy is the mean over the tasks at the end, and the task of a test sample is not known.
Samples come in calls of 250 (digits: 100). Times are of the processor, for learning and prediction, with one thread.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import NearestCentroid
from sklearn.neural_network import MLPClassifier

import engram
from engram.data.sources import load
from engram.sklearn import ContinualClassifier

FIRST_SEED = 100  # settings were chosen with seeds below it, on held-out training samples
NUM_TASKS = 5
CLASSES = np.arange(10)
BUFFER = 200  # samples that replay stores
RANDOM_FEATURES = 1000  # of the row "SLDA on random features"
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Stream:
    """Tasks to learn from, in calls of some samples and some passes, and samples to test on."""

    tasks: list[Arrays]
    tests: list[Arrays]
    passes: int
    samples_a_call: int

    def calls(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for task, (X, y) in enumerate(self.tasks):
            for _ in range(self.passes):
                for start in range(0, len(y), self.samples_a_call):
                    part = slice(start, start + self.samples_a_call)
                    yield task, X[part], y[part]


# --- streams


def shuffled(data: Arrays, random: np.random.RandomState) -> Arrays:
    order = random.permutation(len(data[1]))
    return data[0][order], data[1][order]


def digits(random: np.random.RandomState) -> tuple[Arrays, Arrays]:
    X, y = shuffled((load_digits().data / 16, load_digits().target), random)
    return (X[500:], y[500:]), (X[:500], y[:500])


def mnist(random: np.random.RandomState) -> tuple[Arrays, Arrays]:
    data = load("mnist-small")
    train, test = ((s.inputs.flatten(1).numpy() / 255.0, s.labels.numpy()) for s in (data.train, data.test))
    return shuffled(train, random), test


def class_incremental(source: Callable[..., Any], passes: int, samples_a_call: int, seed: int) -> Stream:
    random = np.random.RandomState(seed)
    (X, y), test = source(random)
    pairs = random.permutation(CLASSES).reshape(NUM_TASKS, -1)
    own = [np.isin(y, pair) for pair in pairs]
    return Stream([(X[o], y[o]) for o in own], [test], passes, samples_a_call)


def permuted(seed: int) -> Stream:
    random = np.random.RandomState(seed)
    (X, y), (test_X, test_y) = mnist(random)
    orders = [np.arange(X.shape[1]), *(random.permutation(X.shape[1]) for _ in range(NUM_TASKS - 1))]
    return Stream([(X[:, o], y) for o in orders], [(test_X[:, o], test_y) for o in orders], 1, 250)


def rotated(seed: int) -> Stream:
    (X, y), (test_X, test_y) = mnist(np.random.RandomState(seed))

    def turned(images: np.ndarray, degrees: int) -> np.ndarray:
        square = images.reshape(-1, 28, 28)
        return rotate(square, degrees, axes=(1, 2), reshape=False, order=1).reshape(len(images), -1)

    angles = [15 * task for task in range(NUM_TASKS)]
    return Stream([(turned(X, a), y) for a in angles], [(turned(test_X, a), test_y) for a in angles], 1, 250)


STREAMS: dict[str, Callable[[int], Stream]] = {
    "new classes, digits, one pass": lambda seed: class_incremental(digits, 1, 100, seed),
    "new classes, digits, five passes": lambda seed: class_incremental(digits, 5, 100, seed),
    "new classes, mnist-small, one pass": lambda seed: class_incremental(mnist, 1, 250, seed),
    "new classes, mnist-small, five passes": lambda seed: class_incremental(mnist, 5, 250, seed),
    "permuted mnist-small": permuted,
    "rotated mnist-small": rotated,
}


# --- contestants: from a stream and a seed to a function that predicts

Predict = Callable[[np.ndarray], np.ndarray]


def by_partial_fit(make: Callable[[int], Any]) -> Callable[[Stream, int], Predict]:
    def learn(stream: Stream, seed: int) -> Predict:
        classifier = make(seed)
        for _, X, y in stream.calls():
            classifier.partial_fit(X, y, classes=CLASSES)
        return classifier.predict

    return learn


def nearest_centroid(stream: Stream, seed: int) -> Predict:
    """It has no `partial_fit`; its means over all samples are what sums over a stream would give."""
    X, y = (np.concatenate(part) for part in zip(*stream.tasks, strict=True))
    return NearestCentroid().fit(X, y).predict


def replay(stream: Stream, seed: int) -> Predict:
    """MLPClassifier on each call together with 200 stored samples, a uniform draw from all so far."""
    random, classifier = np.random.RandomState(seed), MLPClassifier(random_state=seed)
    kept: list[tuple[np.ndarray, int]] = []
    num_seen = 0
    for _, X, y in stream.calls():
        old = ([x for x, _ in kept], [label for _, label in kept])
        both = (np.concatenate([X, old[0]]), np.concatenate([y, old[1]])) if kept else (X, y)
        classifier.partial_fit(*both, classes=CLASSES)
        for sample in zip(X, y, strict=True):
            num_seen += 1
            place = len(kept) if len(kept) < BUFFER else random.randint(num_seen)
            if place < BUFFER:
                kept[place : place + 1] = [sample]
    return classifier.predict


def slda(random_features: int) -> Callable[[Stream, int], Predict]:
    def learn(stream: Stream, seed: int) -> Predict:
        torch.manual_seed(seed)
        head = engram.heads.create("slda", stream.tasks[0][0].shape[1], 10, random_features=random_features)
        for _, X, y in stream.calls():
            head.write(torch.tensor(X, dtype=torch.float32), torch.tensor(y))
        head.eval()
        return lambda X: head(torch.tensor(X, dtype=torch.float32)).argmax(dim=1).numpy()

    return learn


def ours(stream: Stream, seed: int) -> Predict:
    classifier = ContinualClassifier(random_state=seed)
    for task, X, y in stream.calls():
        classifier.partial_fit(X, y, task=task)
    return classifier.predict


REFERENCE = "MLPClassifier"
CONTESTANTS: dict[str, Callable[[Stream, int], Predict]] = {
    "SGDClassifier": by_partial_fit(lambda seed: SGDClassifier(loss="log_loss", random_state=seed)),
    REFERENCE: by_partial_fit(lambda seed: MLPClassifier(random_state=seed)),
    "GaussianNB": by_partial_fit(lambda seed: GaussianNB()),
    "NearestCentroid": nearest_centroid,
    f"replay, {BUFFER} samples": replay,
    "SLDA on inputs": slda(0),
    f"SLDA on {RANDOM_FEATURES} random features": slda(RANDOM_FEATURES),
    "ContinualClassifier()": ours,
}


def measure(stream: Stream, learn: Callable[[Stream, int], Predict], seed: int) -> tuple[float, float]:
    """The mean accuracy over the tests, and seconds of the processor."""
    began = time.process_time()
    predict = learn(stream, seed)
    right = [np.mean(predict(X) == y) for X, y in stream.tests]
    return float(np.mean(right)), time.process_time() - began


def cell(found: list[tuple[float, float]], reference: list[tuple[float, float]]) -> str:
    """Mean accuracy in % ± its standard error, and the time as a ratio."""
    accuracy = 100 * np.array([a for a, _ in found])
    error = accuracy.std(ddof=1) / len(accuracy) ** 0.5 if len(accuracy) > 1 else float("nan")
    ratio = sum(t for _, t in found) / sum(t for _, t in reference)
    return f"{accuracy.mean():.1f} ± {error:.1f} ({ratio:.2g}×)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one seed, and digits only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    warnings.filterwarnings("ignore", message="self.within_class_std_dev_")  # pixels that are always 0
    seeds = range(FIRST_SEED, FIRST_SEED + (1 if options.quick else options.seeds))
    streams = dict(list(STREAMS.items())[:2]) if options.quick else STREAMS
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    rounds = [(name, seed) for name in streams for seed in seeds]
    for name, seed in track(rounds, description="learning", console=Console(stderr=True)):
        stream = streams[name](seed)
        for contestant, learn in CONTESTANTS.items():
            found.setdefault((name, contestant), []).append(measure(stream, learn, seed))
    print(f"| accuracy in % ± SEM of {len(seeds)} seeds (time, {REFERENCE} = 1) | " + " | ".join(streams) + " |")
    print("|---|" + "---:|" * len(streams))
    for contestant in CONTESTANTS:
        cells = [cell(found[name, contestant], found[name, REFERENCE]) for name in streams]
        print(f"| {contestant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
