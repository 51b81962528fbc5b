"""Which head is recommended, how every head does on rung 4, and the best settings that are known of each method."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from engram.config.paper import PAPER_BENCHMARKS
from engram.config.presets import title_of
from engram.report.layout import Table
from engram.report.tables import final_accuracy
from engram.reproduction import ladder
from engram.reproduction.ladder import (
    ENDINGS,
    SEARCH,
    Contestant,
    Runs,
    rounds_of,
    scores_of,
    search_rounds,
    with_one_budget,
)
from engram.reproduction.rungs import rung_pairs
from engram.reproduction.verdicts import added, points, where
from engram.runs import metrics
from engram.runs.metrics import Array
from engram.runs.result import Result
from engram.runs.run import Run


def candidates_table(runs: Runs) -> Table:
    """The candidates for the form that is recommended, the chosen one first, by what they gain on validation samples.

    The rule: most comparisons above zero; of those that have as many, the largest mean.

    Args:
        runs: those of a reproduction.

    Example:
        >>> candidates_table(read_reproduction("results").runs).rows[0][0]
    """
    found = {head: _gains(runs, head) for head in ladder.CANDIDATES}
    ranked = sorted(
        (head for head in found if found[head]),
        key=lambda head: (sum(gain > 0 for gain in found[head]), sum(found[head])),
        reverse=True,
    )
    return Table(
        "Candidates for the form, each at its best setting minus the plain head at its own, on validation samples",
        ("candidate", "comparisons", "above zero", "mean, points"),
        [
            (head, f"{len(gains)}", f"{sum(gain > 0 for gain in gains)}", f"{100 * sum(gains) / len(gains):+.2f}")
            for head, gains in ((head, found[head]) for head in ranked)
        ],
    )


def chosen_head(runs: Runs) -> str:
    """The candidate that is chosen, by the searches that are finished.

    Args:
        runs: those of a reproduction; at least one search is finished.

    Example:
        >>> chosen_head(read_reproduction("results").runs)
    """
    return candidates_table(runs).rows[0][0]


def _gains(runs: Runs, head: str) -> list[float]:
    """The best score of a head minus that of the plain one, alone and with each penalty, where the search is over."""
    gains = []
    for benchmark in PAPER_BENCHMARKS:
        sizes = search_rounds(benchmark)
        rounds = rounds_of(runs, benchmark, SEARCH)
        if len(rounds) == len(sizes):
            scores = {
                each.config.method: max(scores_of(each, rounds, sizes).values())
                for each in with_one_budget(benchmark)
                if each.config.head in (head, "linear")
            }
            gains += [scores[head + ending] - scores["linear" + ending] for ending in ENDINGS]
    return gains


def crossed_table(runs: Runs, benchmark: str) -> Table:
    """Each head minus the plain one in the search, with settings chosen on all trials but one and compared on that one.

    The best of many settings was partly lucky in the trials that chose it. In another trial it has no such luck; but
    the search followed all trials when it decided what to try, so a little is left.

    Args:
        runs: those of a reproduction.
        benchmark: on which benchmark.

    Example:
        >>> print(crossed_table(read_reproduction("results").runs, "split-mnist").to_text())
    """
    rounds = rounds_of(runs, benchmark, SEARCH)
    several = any(config.trials > 1 for run in rounds for config in run.configs.values())
    scores = {each.config.method: _crossed(each, rounds, benchmark) for each in with_one_budget(benchmark) if several}
    rows = [
        (head, *(points(metrics.estimate(scores[head + ending] - scores["linear" + ending])) for ending in ENDINGS))
        for head in ladder.KNOBS
        if scores and head != "linear"
    ]
    tried = f"{len(rounds)} of {len(search_rounds(benchmark))} rounds"
    title = f"{title_of(benchmark)}: heads in the search ({tried}), minus the plain one, in trials that did not choose"
    return Table(title, ("head", *(ending.removeprefix("+") or "alone" for ending in ENDINGS)), rows)


def _crossed(contestant: Contestant, rounds: Sequence[Run], benchmark: str) -> Array:
    """(trials,): the accuracy of a contestant in each trial, at the setting that is the best of the other trials."""
    results = {label: result for run in rounds for label, result in run.results.items()}
    tried = [results[contestant.tried(p)[0]] for p in scores_of(contestant, rounds, search_rounds(benchmark))]
    finals = np.stack([result.average_accuracy[:, -1] for result in tried])  # (settings, trials)
    finals = finals[[not result.diverged for result in tried]]
    if not len(finals):
        return np.full(finals.shape[1], np.nan)
    return np.array([finals[np.delete(finals, k, axis=1).mean(axis=1).argmax(), k] for k in range(finals.shape[1])])


def by_rate_table(runs: Runs) -> Table:
    """DHP and the candidates minus the plain head at one learning rate for all, from the search for rung 4.

    All else is as in the middle of the search: every head starts as the published layer, at the paper's strengths.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(by_rate_table(read_reproduction("results").runs).to_text())
    """
    heads = tuple(dict.fromkeys(("dhp", *ladder.CANDIDATES)))
    rows = []
    for benchmark in PAPER_BENCHMARKS:
        rounds = rounds_of(runs, benchmark, SEARCH)
        tried = {each.config.method: _by_rate(each, rounds, benchmark) for each in with_one_budget(benchmark)}
        for ending in ENDINGS:
            plain = tried[f"linear{ending}"]
            for rate in sorted(plain):
                cells = [added(tried[head + ending].get(rate), plain[rate]) for head in heads]
                if any(cell != "–" for cell in cells):
                    name = f"{title_of(benchmark)}: {ending.removeprefix('+') or 'alone'}, {rate:g}"
                    rows.append((name, final_accuracy(plain[rate]), *cells))
    title = "At one learning rate for all, on validation samples: the plain head in %, and points that others add to it"
    return Table(title, ("", "linear", *heads), rows)


def _by_rate(contestant: Contestant, rounds: Sequence[Run], benchmark: str) -> dict[float, Result]:
    """What a contestant tried with nothing but its learning rate changed."""
    results = {label: result for run in rounds for label, result in run.results.items()}
    tried = scores_of(contestant, rounds, search_rounds(benchmark))
    found = [results[contestant.tried(point)[0]] for point in tried if not any(point[1:])]
    return {result.config.learning_rate: result for result in found}


def counts_table(runs: Runs) -> Table:
    """Where the differences of each head on rung 4 lie: how many means are above zero, and how many intervals.

    Args:
        runs: those of a reproduction.

    Example:
        >>> print(counts_table(read_reproduction("results").runs).to_text())
    """
    rows = []
    for head in ladder.KNOBS:
        found = [p.accuracy for name in PAPER_BENCHMARKS for p in rung_pairs(runs, name, 4, "linear", head)]
        found = [difference for difference in found if not math.isnan(difference.mean)]  # none is left if all diverged
        if found and head != "linear":
            at = [where(difference) for difference in found]
            counts = [f"{at.count(f'{side} zero')}" for side in ("above", "around", "below")]
            mean = 100 * sum(difference.mean for difference in found) / len(found)
            rows.append((head, f"{len(found)}", f"{sum(d.mean > 0 for d in found)}", *counts, f"{mean:+.2f}"))
    columns = ("head", "differences", "mean above zero", "interval above", "around", "below zero", "mean, points")
    return Table("Heads on rung 4, minus the plain one", columns, rows)
