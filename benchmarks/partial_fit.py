"""How long a call of `partial_fit` takes: `ContinualClassifier` beside scikit-learn's `MLPClassifier`.

OMP_NUM_THREADS=1 python benchmarks/partial_fit.py --out benchmarks/records/2025-01-31-my-laptop-partial-fit

Both learn the same samples in 32 bits, in one pass, with the same hidden layers and batches. `MLPClassifier` takes
plain SGD's steps, as the network of `ContinualClassifier` does, or Adam's, its default. The floor is the products of
all steps of a call, by PyTorch on memory that is allocated already. `ContinualClassifier()` is a memory: its time does
not depend on hidden layers and batches, and its floor is the products of its features and of their second moment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy is imported

import numpy as np
import torch
from arguments import networks, whole_numbers, words
from contestants import floor_of_mlp
from growth import ratio_in_turns
from record import RECORD, to_markdown
from rich.progress import Progress
from scipy.linalg.blas import dsyrk, ssyrk
from sklearn.datasets import load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier
from timing import Contestant, Take, Timing, busy_notes, hardware, measure, timed

import sklearn
from engram.common.errors import InputError, check_choice
from engram.common.files import write_atomically
from engram.data.sources import load
from engram.report.layout import Table
from engram.runs.folder import versions
from engram.sklearn import ContinualClassifier
from engram.sklearn.features import ROWS, Features
from engram.sklearn.sums import blocks

CPU = torch.device("cpu")
CLASSES = np.arange(10)
FLOOR, MEMORY_FLOOR = "floor: products", "floor: the memory's products"
SGD, ADAM, MEMORY = "MLPClassifier, SGD", "MLPClassifier, Adam", "ContinualClassifier()"
RATE = 0.1  # of SGD, the default of `ContinualClassifier`
Arrays = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A network, its batches, and the samples of a call."""

    data: str
    hidden: tuple[int, ...]
    batch_size: int
    samples: int

    @property
    def batch_sizes(self) -> list[int]:
        """Of all steps of a call; the last may be smaller."""
        return [min(self.batch_size, self.samples - start) for start in range(0, self.samples, self.batch_size)]


@dataclass(frozen=True)
class Plan:
    """What to measure: all combinations, without those that have the same steps as another."""

    data: tuple[str, ...] = ("digits", "mnist-small")
    hidden: tuple[tuple[int, ...], ...] = ((100,), (400, 400))
    batch_sizes: tuple[int, ...] = (32, 64, 200)
    samples: tuple[int, ...] = (10, 64, 500, 2000)
    methods: tuple[str, ...] = ("finetune",)
    seconds: float = 0.5  # for each contestant

    def __post_init__(self) -> None:
        for name in self.data:
            check_choice("data", name, SOURCES)
        if not all((self.data, self.hidden, self.batch_sizes, self.samples)):
            raise InputError("give at least one of the data, the hidden layers, the batch sizes and the samples")
        if min(*self.batch_sizes, *self.samples, *itertools.chain(*self.hidden), 1) < 1:
            raise InputError("batches, samples and hidden layers must be at least 1")
        if not 0 < self.seconds < float("inf"):
            raise InputError(f"the seconds of a measurement must be above 0, not {self.seconds}")

    def cases(self) -> list[Case]:
        found: dict[tuple, Case] = {}
        for parts in itertools.product(self.data, self.hidden, self.batch_sizes, self.samples):
            case = Case(*parts)
            found.setdefault((case.data, case.hidden, *case.batch_sizes), case)
        return list(found.values())


@dataclass(frozen=True)
class Found:
    """The time of a call in each round, by contestant."""

    case: Case
    timings: dict[str, Timing]

    def ratio(self, name: str, other: str) -> float:
        return self.timings[name].seconds / self.timings[other].seconds


# --- data


def digits() -> Arrays:
    X, y = load_digits(return_X_y=True)
    return (X / 16).astype(np.float32), y


def mnist_small() -> Arrays:
    train = load("mnist-small").train
    return train.inputs.flatten(1).numpy() / np.float32(255), train.labels.numpy()


SOURCES: dict[str, Callable[[], Arrays]] = {"digits": digits, "mnist-small": mnist_small}


def drawn(data: Arrays, samples: int) -> Arrays:
    """So many samples, and more than once those of a dataset that has fewer."""
    chosen = np.random.RandomState(0).permutation(max(samples, len(data[1])))[:samples] % len(data[1])
    return data[0][chosen], data[1][chosen]


# --- contestants


def calls_of(classifier: Any, X: np.ndarray, y: np.ndarray) -> Take:
    """Calls of `partial_fit` after the first, which makes the network."""
    classifier.partial_fit(X, y, classes=CLASSES)

    def work(num_calls: int) -> None:
        for _ in range(num_calls):
            classifier.partial_fit(X, y)

    return timed(work, CPU)


def floor_of_memory(features: Features, num_samples: int) -> Take:
    """The products of a memory's call, on memory that is allocated already."""
    dtype, syrk = (np.float64, dsyrk) if features.num_direct else (np.float32, ssyrk)
    moment = np.zeros((features.width, features.width), dtype, order="F")
    inputs = np.random.RandomState(0).rand(ROWS, features.num_inputs).astype(dtype)
    psi = np.random.RandomState(0).rand(ROWS, features.width).astype(dtype)
    projections = [(w, r.astype(dtype)) for w, r in zip(features.windows, features.projections, strict=True)]

    def work(num_calls: int) -> None:
        for part in (part for _ in range(num_calls) for part in blocks(num_samples)):
            rows = slice(min(part.stop, num_samples) - part.start)
            column = features.num_direct
            for window, projection in projections:
                np.matmul(inputs[rows, window], projection, out=psi[rows, column : column + projection.shape[1]])
                column += projection.shape[1]
            syrk(1.0, psi[rows].T, beta=1.0, c=moment, overwrite_c=1)

    return timed(work, CPU)


def named(method: str) -> str:
    return f"ContinualClassifier, {method}"


def contestants_of(case: Case, methods: Sequence[str], data: Arrays) -> list[Contestant]:
    X, y = drawn(data, case.samples)
    # never more than the samples, about which `MLPClassifier` would warn in each call
    same: dict[str, Any] = {"batch_size": min(case.batch_size, case.samples), "random_state": 0}
    sgd = {"solver": "sgd", "momentum": 0.0, "learning_rate_init": RATE}
    made = {
        SGD: MLPClassifier(case.hidden, **sgd, **same),
        ADAM: MLPClassifier(case.hidden, solver="adam", **same),
        **{named(method): ContinualClassifier(case.hidden, method, learning_rate=RATE, **same) for method in methods},
        MEMORY: ContinualClassifier(random_state=0),
    }
    floor = floor_of_mlp((X.shape[1], *case.hidden, len(CLASSES)), case.batch_sizes, CPU, torch.float32)
    calls = [Contestant(name, 1, calls_of(classifier, X, y)) for name, classifier in made.items()]
    of_memory = floor_of_memory(made[MEMORY].learner_.features, case.samples)
    return [Contestant(FLOOR, 1, floor), Contestant(MEMORY_FLOOR, 1, of_memory), *calls]


def measure_calls(plan: Plan, report: Callable[[float, str], None] = lambda done, what: None) -> list[Found]:
    """Measure all that is planned, one case after another.

    Args:
        plan: what to measure.
        report: called with the fraction that is done, and with what is being measured.
    """
    data = {name: SOURCES[name]() for name in plan.data}
    cases, found = plan.cases(), []
    for number, case in enumerate(cases):
        report(number / len(cases), f"{case.data}, {case.hidden}, {case.samples} samples by {case.batch_size}")
        group = contestants_of(case, plan.methods, data[case.data])
        timings = measure(group, plan.seconds, fewest_steps=1)
        found.append(Found(case, dict(zip((c.name for c in group), timings, strict=True))))
    return found


# --- tables and the record


def table_of(found: Iterable[Found], name: str, notes: Sequence[str] = ()) -> Table:
    """The times of one contestant, beside both forms of `MLPClassifier` and the floor."""
    rows, floor = [], MEMORY_FLOOR if name == MEMORY else FLOOR
    for one in found:
        case, ms = one.case, {other: f"{1e3 * timing.seconds:.3f}" for other, timing in one.timings.items()}
        ratios = [one.ratio(name, other) for other in (SGD, ADAM, floor)]
        in_turns = ratio_in_turns(one.timings[name], one.timings[SGD])
        hidden = "×".join(map(str, case.hidden))
        rows.append(
            (
                f"{case.data}, {hidden}",
                str(case.batch_size),
                str(case.samples),
                *(ms[other] for other in (floor, SGD, ADAM, name)),
                *(f"{ratio:.2f}" for ratio in (ratios[0], in_turns, *ratios[1:])),
                f"{one.ratio(floor, SGD):.2f}",
            )
        )
    columns = ("network", "batch", "samples", floor, SGD, ADAM, name)
    ratio_columns = ("× SGD", "median", "× Adam", "× floor", "floor × SGD")
    explained = (
        "Milliseconds of a call: the lower quartile of rounds in which the contestants take turns; ratios of these, "
        "and beside the first the median of the ratios of each round. Floor × SGD: if products alone took time.",
    )
    return Table(f"{name}: time of a call", (*columns, *ratio_columns), rows, (*explained, *notes))


def tables_of(plan: Plan, found: list[Found], notes: Sequence[str]) -> list[Table]:
    return [table_of(found, name, notes) for name in (*map(named, plan.methods), MEMORY)]


def write_record(folder: Path, plan: Plan, found: list[Found], notes: Sequence[str], command: str) -> None:
    """All that is needed to repeat the measurement, as JSON, and the tables to read."""
    about = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "hardware": hardware("cpu"),
        "threads": torch.get_num_threads(),
        "versions": versions() | {"platform": platform.system(), "scikit-learn": sklearn.__version__},
        "plan": asdict(plan),
    }
    calls = [
        {
            **asdict(one.case),
            "rounds_ms": {name: [1e3 * s for s in timing.rounds] for name, timing in one.timings.items()},
        }
        for one in found
    ]
    folder.mkdir(parents=True, exist_ok=True)
    content = about | {"calls": calls, "notes": list(notes)}
    write_atomically(folder / RECORD, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    write_atomically(folder / "README.md", to_markdown(about, tables_of(plan, found, notes)))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="partial_fit.py", description=(__doc__ or "").splitlines()[0])
    usual = Plan()
    parser.add_argument("--data", type=words, default=usual.data, help=",".join(SOURCES))
    parser.add_argument("--hidden", type=networks, default=usual.hidden, help="layers of each network: 100,400x400")
    parser.add_argument("--batch-sizes", type=whole_numbers, default=usual.batch_sizes, help="32,64,200")
    parser.add_argument("--samples", type=whole_numbers, default=usual.samples, help="of a call: 10,64,500,2000")
    parser.add_argument("--methods", type=words, default=usual.methods, help="of ContinualClassifier: finetune,dhp+si")
    parser.add_argument("--seconds", type=float, default=usual.seconds, help="how long each contestant is measured")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep a record in this folder")
    options = vars(parser.parse_args(arguments))
    out: Path | None = options.pop("out")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", ConvergenceWarning)
    try:
        plan = Plan(**options)
        if out is not None and (out / RECORD).exists():
            raise InputError(f"{out} holds a record already")
        notes = [f"{note}." for note in busy_notes()]
        with Progress(transient=True) as bar:
            task = bar.add_task("starting", total=1.0)
            found = measure_calls(plan, lambda done, what: bar.update(task, completed=done, description=what))
    except InputError as reason:
        parser.error(str(reason))
    print(*(table.to_markdown() for table in tables_of(plan, found, notes)), sep="\n")
    if out is not None:
        command = shlex.join(["python", "benchmarks/partial_fit.py", *arguments])
        write_record(out, plan, found, notes, f"OMP_NUM_THREADS=1 {command}")
        print(f"The record is in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
