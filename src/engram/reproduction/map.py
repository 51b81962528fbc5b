"""The map: where a head helps. Small learning rates, few epochs and rare classes are where a trace may.

DHP and the candidates of rung 4 against a plain head, all starting as the published layer, over learning rates and
epochs.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from engram.reproduction.ladder import CANDIDATES, PUBLISHED, Runs, score
from engram.reproduction.search import DIVERGED
from engram.reproduction.verdicts import added
from engram.runs.metrics import Estimate
from engram.runs.result import Result

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
HEADS = ("dhp", *CANDIDATES)
PENALTIES: dict[str, dict[str, Any]] = {"": {}, "+si": {"strength": 1.0}}
RATES, EPOCHS = (0.003, 0.01, 0.03, 0.1), (1, 5, 20)


def label_of(epochs: int, rate: float, method: str) -> str:
    return f"{count(epochs, 'epoch')}, rate {rate:g}: {method}"


def map_configs(benchmark: str) -> dict[str, Config]:
    """Each head and the plain one, alone and with SI, at each learning rate and number of epochs.

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


def map_table(runs: Runs, benchmark: str) -> Table:
    """The plain head at each learning rate and number of epochs, and what others add to it; no row without the map.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.

    Example:
        >>> print(map_table(read_reproduction("results").runs, "split-mnist").to_text())
    """
    results = _results(runs, benchmark)
    rows = []
    for ending, epochs, rate in product(PENALTIES, EPOCHS, RATES) if results else ():
        plain, *others = (results.get(label_of(epochs, rate, head + ending)) for head in ("linear", *HEADS))
        cells = ("–" if plain is None else final_accuracy(plain), *(added(other, plain) for other in others))
        rows.append((f"{_named(ending)}, {count(epochs, 'epoch')}", f"{rate:g}", *cells))
    title = f"{title_of(benchmark)} with few digits: the plain head in %, and points that others add to it"
    return Table(title, ("", "rate", "linear", *HEADS), rows)


def best_rates_table(runs: Runs) -> Table:
    """Each head at its best learning rate minus the plain head at its own.

    The rates are the best on the same test samples, so the differences have no interval: they describe the map. No rate
    at which a trial diverged is the best.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(best_rates_table(read_reproduction("results").runs).to_text())
    """
    rows = []
    for benchmark, ending, epochs in product(PAPER_BENCHMARKS, PENALTIES, EPOCHS):
        plain, *others = (_best(_results(runs, benchmark), epochs, head + ending) for head in ("linear", *HEADS))
        cells = ["–" if other is None or plain is None else f"{100 * (other - plain):+.2f}" for other in others]
        if any(cell != "–" for cell in cells):
            rows.append((f"{title_of(benchmark)}: {_named(ending)}, {count(epochs, 'epoch')}", *cells))
    return Table("Each head at its best learning rate, minus the plain head at its own, in points", ("", *HEADS), rows)


def _best(results: Mapping[str, Result], epochs: int, method: str) -> float | None:
    """The score at the best rate; None if a rate was not run, or trials diverged at all of them."""
    tried = [results.get(label_of(epochs, rate, method)) for rate in RATES]
    scores = [score(result) for result in tried if result is not None]
    return max(scores) if len(scores) == len(RATES) and max(scores) > DIVERGED else None


def draw_map(runs: Runs) -> Drawing | None:
    """What each head adds on all benchmarks, as a figure; None without the map.

    Example:
        >>> draw_map(read_reproduction("results").runs).to_bytes("png")
    """
    panels = [
        _panel(title_of(benchmark), results, head, ending)
        for head, ending in product(HEADS, PENALTIES)
        for benchmark in PAPER_BENCHMARKS
        if (results := _results(runs, benchmark))
    ]
    drawn = {panel.row for panel in panels if panel.differences}  # an older map has fewer heads
    if not drawn:
        return None
    panels = [panel for panel in panels if panel.row in drawn]
    return difference_map(panels, "Where a head helps", "epochs", "learning rate")


def _named(ending: str) -> str:
    return ending.removeprefix("+") or "alone"


def _panel(name: str, results: Mapping[str, Result], head: str, ending: str) -> Panel:
    differences: dict[tuple[str, str], Estimate | None] = {}
    for epochs, rate in product(EPOCHS, RATES):
        ours, plain = (results.get(label_of(epochs, rate, each + ending)) for each in (head, "linear"))
        if ours is not None and plain is not None:
            whole = not (ours.diverged or plain.diverged)
            differences[str(epochs), f"{rate:g}"] = accuracy_difference(ours, plain) if whole else None
    return Panel(head + ending, name, differences)


def _results(runs: Runs, benchmark: str) -> Mapping[str, Result]:
    return runs[benchmark, "map"].results if (benchmark, "map") in runs else {}
