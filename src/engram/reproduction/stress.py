"""The stress table: does the chosen head do harm where things are other than where it was chosen?

The chosen head and the plain one, each with its settings of rung 4, on Permuted MNIST with Online EWC, where one thing
is changed at a time; and the mixture, for another kind of network. How each change is made is in
docs/reproduction/registration.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engram.config.settings import Config
from engram.report.layout import Table, count
from engram.report.pairs import Pair
from engram.report.tables import final_accuracy
from engram.reproduction.form import chosen_head
from engram.reproduction.ladder import (
    RATE_FACTOR,
    SEARCH,
    Contestant,
    Runs,
    Step,
    final_configs,
    round_configs,
    rounds_of,
    scores_of,
    search_rounds,
    with_one_budget,
)
from engram.reproduction.rungs import rung_pairs, tried_table
from engram.reproduction.search import Axis
from engram.reproduction.study import CHANGES as STUDIED
from engram.reproduction.verdicts import points

BENCHMARK, PENALTY, PLAIN = "permuted-mnist", "online-ewc", "linear"
STRESS_TRIALS = 5
MOST_HARM = 0.005  # half a point

CHANGES: dict[str, dict[str, Any]] = {
    "as on rung 4": {},
    "inputs standardised": STUDIED["inputs standardised"].settings,
    "He's initialisation": STUDIED["He's initialisation"].settings,
    "momentum 0.9": {"momentum": 0.9},
    "Adam": {"optimizer": "adam"},
    "width 100": {"hidden": [100, 100]},
    "width 2,000": {"hidden": [2000, 2000]},
    "1 epoch": {"epochs": 1},
    "5 epochs": {"epochs": 5},
}
# These are other tasks, so they are another run.
CLASSES: dict[str, dict[str, Any]] = {"100 classes": {"scenario": "task"}}
CNN = "a CNN, on the mixture"

# Where the search for the learning rate of another optimizer starts. Momentum 0.9 adds up ten steps.
RATES = {"momentum 0.9": 0.003, "Adam": 0.001}
RATE_ROUNDS = (5, 3)


def contestants(
    benchmark: str, runs: Runs, head: str, changes: Mapping[str, Mapping[str, Any]] = CHANGES
) -> list[Contestant]:
    """A head and the plain one with each change.

    Args:
        benchmark: on which benchmark.
        runs: with the search for rung 4 on this benchmark.
        head: the head.
        changes: settings by the name of the change.

    Example:
        >>> contestants("permuted-mnist", runs, "steady", {"1 epoch": {"epochs": 1}})[0].label
        '1 epoch: linear+online-ewc, published'
    """
    methods = [f"{name}+{PENALTY}" for name in (PLAIN, head)]
    found = []
    for each in with_one_budget(benchmark):
        if each.config.method in methods:
            scores = scores_of(each, rounds_of(runs, benchmark, SEARCH), search_rounds(benchmark))
            for name, settings in changes.items():
                config = each.chosen(scores).replace(**settings, trials=STRESS_TRIALS)
                axes = (Axis("learning_rate", RATES[name], RATE_FACTOR),) if name in RATES else ()
                found.append(Contestant(config, axes, each.trying, name))
    return found


def _rates(benchmark: str, runs: Runs) -> dict[str, Config]:
    both = contestants(benchmark, runs, chosen_head(runs))
    return round_configs(both, rounds_of(runs, benchmark, ROUNDS), RATE_ROUNDS)


def _stress(benchmark: str, runs: Runs) -> dict[str, Config]:
    both = contestants(benchmark, runs, chosen_head(runs))
    return final_configs(both, rounds_of(runs, benchmark, ROUNDS), RATE_ROUNDS)


def _classes(benchmark: str, runs: Runs) -> dict[str, Config]:
    return final_configs(contestants(benchmark, runs, chosen_head(runs), CLASSES), (), ())


ROUNDS, FINAL = ("rates-1", "rates-2"), ("stress", "stress-classes")
STEPS = {
    "rates-1": Step(_rates, of_all=SEARCH),
    "rates-2": Step(_rates, ROUNDS[:1], of_all=SEARCH),
    "stress": Step(_stress, ROUNDS, of_all=SEARCH),
    "stress-classes": Step(_classes, of_all=SEARCH),
}


# --- what came out


def stress_pairs(runs: Runs) -> dict[str, Pair]:
    """The chosen head and the plain one, by the name of the change; nothing if the stress table was not run.

    Args:
        runs: those of a reproduction.

    Example:
        >>> stress_pairs(read_reproduction("results").runs)["Adam"].accuracy.mean
    """
    results = {k: r for part in FINAL if (BENCHMARK, part) in runs for k, r in runs[BENCHMARK, part].results.items()}
    found: dict[str, dict[bool, str]] = {}
    for label, result in results.items():
        found.setdefault(label.partition(":")[0], {})[result.config.head == PLAIN] = label
    both = [(name, labels[False], labels[True]) for name, labels in found.items() if len(labels) == 2]
    made = {name: Pair(head, plain, results[head], results[plain]) for name, head, plain in both}
    if not made:
        return {}
    head = next(iter(made.values())).result.config.head
    on_mixture = {pair.label: pair for pair in rung_pairs(runs, "vision-mixture", 4, PLAIN, head)}
    method = f"{head}+{PENALTY}"
    return made | ({CNN: on_mixture[method]} if method in on_mixture else {})


def stress_table(runs: Runs) -> Table:
    """The chosen head and the plain one with each change, and the change in which it is furthest below.

    A change in which more of its trials diverge than of the plain head's is the worst.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(stress_table(read_reproduction("results").runs).to_text())
    """
    found = stress_pairs(runs)
    head = next((pair.result.config.head for pair in found.values()), "the chosen head")
    rows = [
        (name, final_accuracy(pair.baseline), final_accuracy(pair.result), points(pair.accuracy))
        for name, pair in found.items()
    ]
    return Table(
        f"Does {head} do harm? Both heads with {PENALTY}, average accuracy in % after all tasks",
        ("what is changed", PLAIN, head, "difference, points with 95% interval"),
        rows,
        (_worst(found),) if found else (),
    )


def rates_table(runs: Runs) -> Table:
    """The learning rates that both heads tried with other optimizers, with their scores.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(rates_table(read_reproduction("results").runs).to_text())
    """
    rounds = rounds_of(runs, BENCHMARK, ROUNDS)
    heads = {config.head for run in rounds for config in run.configs.values()} - {PLAIN}
    both = [each for head in heads for each in contestants(BENCHMARK, runs, head)]
    return tried_table("The stress table", both, rounds, RATE_ROUNDS)


def _worst(found: Mapping[str, Pair]) -> str:
    name = min(found, key=lambda name: _gain(found[name]))
    gain = _gain(found[name])
    by = "more of its trials diverge" if gain == -math.inf else f"{100 * gain:+.2f} points"
    verdict = "more than half a point below" if gain < -MOST_HARM else "no more than half a point below"
    return f"The worst of {count(len(found), 'difference')} is “{name}”: {by}, {verdict}."


def _gain(pair: Pair) -> float:
    """The mean difference; −∞ if more trials diverged than of the plain head, and +∞ if nothing can be compared."""
    if len(pair.result.diverged) > len(pair.baseline.diverged):
        return -math.inf
    return math.inf if math.isnan(pair.accuracy.mean) else pair.accuracy.mean
