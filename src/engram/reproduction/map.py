"""The map: where a trace helps. Small learning rates, few epochs and rare classes are where it may.

DHP and the steady trace against a plain head, all starting as the published layer, over learning rates and epochs.
"""

from __future__ import annotations

from itertools import product
from typing import Any

from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import preset, title_of
from engram.config.settings import Config
from engram.report.figures.drawing import Drawing
from engram.report.figures.matrices import Panel, difference_map
from engram.report.layout import Table, count
from engram.report.pairs import accuracy_difference
from engram.report.tables import final_accuracy
from engram.reproduction.ladder import PUBLISHED, Runs
from engram.reproduction.verdicts import points
from engram.runs.metrics import Estimate

# Few digits are enough, and they come with the package. The seed is of no other part.
FEW: dict[str, Any] = {
    "dataset": "mnist-small",
    "num_tasks": 5,
    "max_samples": 2000,
    "batch_size": 20,
    "trials": 5,
    "seed": 2,
    **PUBLISHED,
}
HEADS = ("dhp", "steady")
PENALTIES: dict[str, dict[str, Any]] = {"": {}, "+si": {"strength": 1.0}}
RATES, EPOCHS = (0.003, 0.01, 0.03, 0.1), (1, 5, 20)


def label_of(epochs: int, rate: float, method: str) -> str:
    return f"{count(epochs, 'epoch')}, rate {rate:g}: {method}"


def map_configs(benchmark: str) -> dict[str, Config]:
    """Heads with a trace and the plain one, alone and with SI, at each learning rate and number of epochs.

    Example:
        >>> map_configs("split-mnist")["1 epoch, rate 0.01: dhp+si"].epochs
        1
    """
    return {
        label_of(epochs, rate, head + ending): preset(
            benchmark, f"{head}{ending}", **strength, epochs=epochs, learning_rate=rate, **FEW
        )
        for epochs in EPOCHS
        for rate in RATES
        for ending, strength in PENALTIES.items()
        for head in ("linear", *HEADS)
    }


def map_differences(runs: Runs, benchmark: str) -> dict[str, dict[tuple[int, float], Estimate]]:
    """By method: what its trace adds to the plain head, by epochs and learning rate; nothing if the map was not run.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.

    Example:
        >>> map_differences(read_reproduction("results").runs, "split-mnist")["dhp+si"][1, 0.01].mean
    """
    if (benchmark, "map") not in runs:
        return {}
    results = runs[benchmark, "map"].results
    return {
        f"{head}{ending}": {
            (epochs, rate): accuracy_difference(
                results[label_of(epochs, rate, head + ending)], results[label_of(epochs, rate, "linear" + ending)]
            )
            for epochs in EPOCHS
            for rate in RATES
        }
        for head in HEADS
        for ending in PENALTIES
    }


def map_table(runs: Runs, benchmark: str) -> Table:
    """The plain head at each learning rate and number of epochs, and what a trace adds to it; no row without the map.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.

    Example:
        >>> print(map_table(read_reproduction("results").runs, "split-mnist").to_text())
    """
    found = map_differences(runs, benchmark)
    rows = []
    for epochs, rate in product(EPOCHS, RATES) if found else ():
        cells = []
        for ending in PENALTIES:
            plain = runs[benchmark, "map"].results[label_of(epochs, rate, f"linear{ending}")]
            cells += [final_accuracy(plain), *(points(found[head + ending][epochs, rate]) for head in HEADS)]
        rows.append((count(epochs, "epoch"), f"{rate:g}", *cells))
    columns = [name + ending for ending in PENALTIES for name in ("linear", *HEADS)]
    title = f"{title_of(benchmark)} with few digits: the plain head in %, and points that a trace adds to it"
    return Table(title, ("", "rate", *columns), rows)


def draw_map(runs: Runs) -> Drawing | None:
    """The same on all benchmarks, as a figure; None without the map."""
    panels = [
        Panel(title_of(benchmark), method, {(str(epochs), f"{rate:g}"): e for (epochs, rate), e in found.items()})
        for benchmark in PAPER_BENCHMARKS
        for method, found in map_differences(runs, benchmark).items()
    ]
    return difference_map(panels, "Where a trace helps", "epochs", "learning rate") if panels else None
