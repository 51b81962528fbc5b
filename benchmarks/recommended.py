"""What the README recommends for a network, beside finetuning and a usual head, on four streams of real data.

python benchmarks/recommended.py                           the table of the README: five seeds
python benchmarks/recommended.py --seeds 100,101,102       seeds on which the settings were chosen

A seed draws the tasks, the samples that are held out, and the network. All methods share them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np
import torch
from rich.progress import track
from sklearn.datasets import load_breast_cancer, load_digits

import engram
from engram.data.sources import load

NETWORK = {"hidden": [100, 100], "epochs": 10, "batch_size": 32, "learning_rate": 0.1, "trials": 1}
WIDE = {"head_init": "published"}
METHODS = {
    "finetuning": engram.preset("custom", "linear", **NETWORK),
    "a usual head, SI": engram.preset("custom", "linear+si", **NETWORK),
    "**a wide head, SI**": engram.preset("custom", "linear+si", **NETWORK, **WIDE),
    "the paper's layer, SI": engram.preset("custom", "dhp+si", **NETWORK, **WIDE),
    "a usual head, replay of 200": engram.preset("custom", "linear+replay", **NETWORK),
    "all samples kept": engram.preset("custom", "linear+joint", **NETWORK),
}
Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # inputs and labels to learn, and to test


def held_out(inputs: np.ndarray, labels: np.ndarray, rng: np.random.Generator) -> Parts:
    """A fifth of the samples is for testing."""
    order = rng.permutation(len(labels))
    learned, tested = np.split(order, [int(0.8 * len(order))])
    return inputs[learned], labels[learned], inputs[tested], labels[tested]


def digits(rng: np.random.Generator) -> Parts:
    inputs, labels = load_digits(return_X_y=True)
    return held_out((inputs / 16).astype("float32"), labels, rng)


def mnist(rng: np.random.Generator) -> Parts:
    """2,000 digits to learn, and all 2,000 of the tests."""
    small = load("mnist-small")
    chosen = rng.permutation(len(small.train))[:2000]
    train, test = (part.inputs.flatten(1).numpy().astype("float32") / 255 for part in (small.train, small.test))
    return train[chosen], small.train.labels.numpy()[chosen], test, small.test.labels.numpy()


def cancer(rng: np.random.Generator) -> Parts:
    inputs, labels = load_breast_cancer(return_X_y=True)
    return held_out(((inputs - inputs.mean(axis=0)) / inputs.std(axis=0)).astype("float32"), labels, rng)


def reordered(parts: Parts, rng: np.random.Generator) -> engram.Stream:
    """Five tasks, each with the inputs in another order: the same classes, changing inputs."""
    inputs, labels, tests, test_labels = parts
    orders = [rng.permutation(inputs.shape[1]) for _ in range(5)]
    return engram.streams.from_arrays([(inputs[:, o], labels, tests[:, o], test_labels) for o in orders])


def split(parts: Parts, rng: np.random.Generator) -> engram.Stream:
    """Five tasks of two classes each; in a test the task is known."""
    inputs, labels, tests, test_labels = parts
    pairs = [sorted(pair) for pair in rng.permutation(10).reshape(5, 2).tolist()]
    masks = [(np.isin(labels, pair), np.isin(test_labels, pair)) for pair in pairs]
    tasks = [(inputs[own], labels[own], tests[held], test_labels[held]) for own, held in masks]
    return engram.streams.from_arrays(tasks, classes=pairs)


STREAMS: dict[str, Callable[[np.random.Generator], engram.Stream]] = {
    "digits, reordered": lambda rng: reordered(digits(rng), rng),
    "digits, two a task": lambda rng: split(digits(rng), rng),
    "mnist-small, reordered": lambda rng: reordered(mnist(rng), rng),
    "breast cancer, reordered": lambda rng: reordered(cancer(rng), rng),
}


def accuracies(seeds: list[int]) -> Iterator[tuple[str, str, float]]:
    """The stream, the method, and its accuracy over all tasks after the last, in %."""
    jobs = [(name, seed) for name in STREAMS for seed in seeds]
    for name, seed in track(jobs, "streams"):
        stream = STREAMS[name](np.random.default_rng(seed))
        configs = [config.replace(seed=seed) for config in METHODS.values()]
        for method, result in zip(METHODS, engram.run_many(configs, stream=stream, progress=False), strict=True):
            yield name, method, 100 * float(result.average_accuracy[0, -1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2,3,4", help="by commas")
    seeds = [int(seed) for seed in parser.parse_args().seeds.split(",")]
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[float]] = {}
    for name, method, accuracy in accuracies(seeds):
        found.setdefault((name, method), []).append(accuracy)
    print("| accuracy in %, ± SEM |", " | ".join(STREAMS), "|")
    print("|---|" + "---:|" * len(STREAMS))
    for method in METHODS:
        cells = [np.array(found[name, method]) for name in STREAMS]
        sems = [cell.std(ddof=1) / len(cell) ** 0.5 if len(cell) > 1 else float("nan") for cell in cells]
        print(f"| {method} |", " | ".join(f"{c.mean():.1f} ± {s:.1f}" for c, s in zip(cells, sems, strict=True)), "|")


if __name__ == "__main__":
    main()
