"""What the README recommends, beside finetuning and others, on five streams of real data.

python benchmarks/recommended.py                           the table of docs/which.md: fifteen seeds
python benchmarks/recommended.py --learning-rate 0.2       the same at another rate; --batch-size likewise
python benchmarks/recommended.py --streams cancer          only streams with this word in their name
python benchmarks/recommended.py --seeds 100,101,102       seeds on which settings were chosen

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
from engram.sklearn import ContinualClassifier

NETWORK = {"hidden": [100, 100], "epochs": 10, "batch_size": 32, "learning_rate": 0.1, "trials": 1}
CLASSIFIER = "`ContinualClassifier()`"
METHODS = {
    "finetuning": engram.preset("custom", "linear", **NETWORK),
    "plain head, SI": engram.preset("custom", "linear+si", **NETWORK),
    "the paper's layer, SI": engram.preset("custom", "dhp+si", **NETWORK, head_init="published"),
    "**`scaled` head, SI**": engram.preset("custom", "scaled+si", **NETWORK),
    "plain head, replay of 200": engram.preset("custom", "linear+replay", **NETWORK),
    "**`scaled` head, replay of 200**": engram.preset("custom", "scaled+replay", **NETWORK),
    "all samples kept": engram.preset("custom", "linear+joint", **NETWORK),
}
ROWS = (*METHODS, f"**{CLASSIFIER}**")
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


def reordered(parts: Parts, rng: np.random.Generator) -> engram.streams.Stream:
    """Five tasks, each with the inputs in another order: the same classes, changing inputs."""
    inputs, labels, tests, test_labels = parts
    orders = [rng.permutation(inputs.shape[1]) for _ in range(5)]
    return engram.streams.from_arrays([(inputs[:, o], labels, tests[:, o], test_labels) for o in orders])


def two_by_two(parts: Parts, rng: np.random.Generator, scenario: str) -> engram.streams.Stream:
    """Five tasks of two new classes each. A test asks for one of all ten classes, or of two if its task is known."""
    inputs, labels, tests, test_labels = parts
    pairs = [sorted(pair) for pair in rng.permutation(10).reshape(5, 2).tolist()]
    masks = [(np.isin(labels, pair), np.isin(test_labels, pair)) for pair in pairs]
    tasks = [(inputs[own], labels[own], tests[held], test_labels[held]) for own, held in masks]
    return engram.streams.in_scenario(engram.streams.from_arrays(tasks, classes=pairs), scenario)


STREAMS: dict[str, Callable[[np.random.Generator], engram.streams.Stream]] = {
    "8×8 digits, changing inputs": lambda rng: reordered(digits(rng), rng),
    "mnist-small, changing inputs": lambda rng: reordered(mnist(rng), rng),
    "breast cancer, changing inputs": lambda rng: reordered(cancer(rng), rng),
    "8×8 digits, new classes, task known": lambda rng: two_by_two(digits(rng), rng, "task"),
    "8×8 digits, new classes": lambda rng: two_by_two(digits(rng), rng, "class"),
}


def of_classifier(stream: engram.streams.Stream, seed: int) -> float:
    """Its accuracy, the mean over the tasks after the last. It sees each sample once."""
    classifier = ContinualClassifier(random_state=seed)
    for task in stream:
        train = task.train[:]
        classifier.partial_fit(train.inputs.numpy(), train.targets.numpy(), task=task.name)
    known = stream.scenario == "task"
    return float(
        np.mean(
            [
                classifier.score(
                    task.test[:].inputs.numpy(), task.test[:].targets.numpy(), task=task.name if known else None
                )
                for task in stream
            ]
        )
    )


def accuracies(streams: list[str], seeds: list[int], **changes: float) -> Iterator[tuple[str, str, float]]:
    """The stream, the method, and its accuracy over all tasks after the last, in %."""
    jobs = [(name, seed) for name in streams for seed in seeds]
    for name, seed in track(jobs, "streams"):
        stream = STREAMS[name](np.random.default_rng(seed))
        configs = [config.replace(seed=seed, **changes) for config in METHODS.values()]
        for method, result in zip(METHODS, engram.run_many(configs, stream=stream, progress=False), strict=True):
            yield name, method, 100 * float(result.average_accuracy[0, -1])
        yield name, ROWS[-1], 100 * of_classifier(stream, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default=",".join(map(str, range(15))), help="by commas")
    parser.add_argument("--streams", default="", help="a word in their names")
    parser.add_argument("--learning-rate", type=float, default=NETWORK["learning_rate"], help="of all networks")
    parser.add_argument("--batch-size", type=int, default=NETWORK["batch_size"], help="of all networks")
    given = parser.parse_args()
    seeds, streams = [int(seed) for seed in given.seeds.split(",")], [name for name in STREAMS if given.streams in name]
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[float]] = {}
    changes = {"learning_rate": given.learning_rate, "batch_size": given.batch_size}
    for name, method, accuracy in accuracies(streams, seeds, **changes):
        found.setdefault((name, method), []).append(accuracy)
    print("| accuracy in %, ± SEM |", " | ".join(streams), "|")
    print("|---|" + "---:|" * len(streams))
    for method in ROWS:
        cells = [np.array(found[name, method]) for name in streams]
        print(f"| {method} |", " | ".join(f"{c.mean():.1f} ± {sem(c):.1f}" for c in cells), "|")
    for other in ("finetuning", "plain head, SI"):
        best = "**`scaled` head, SI**"
        gains = [np.subtract(found[name, best], found[name, other]) for name in streams]
        print(f"| {best} minus {other} |", " | ".join(f"{g.mean():+.1f} ± {sem(g):.1f}" for g in gains), "|")


def sem(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")


if __name__ == "__main__":
    main()
