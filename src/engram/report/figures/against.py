"""Ours against the paper's, and with DHP against without: a row each, its mean and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from engram.report.figures.drawing import Cell, Drawing, new_figure
from engram.report.figures.style import (
    INK,
    MEDIUM,
    OURS,
    PAPER,
    SMALL,
    WIDTH,
    colour_of,
    colour_of_method,
    legend_below,
    paper_mark,
    percent,
    rule,
    tidy,
)
from engram.report.layout import Table, number
from engram.report.pairs import Pair, paper_value
from engram.runs import metrics
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

ROW = 0.27  # inches


def differences(pairs: Sequence[Pair], name: str = "differences") -> Drawing:
    """A forest plot: what DHP adds to each method, in points of accuracy, with Student's 95% interval."""
    benchmarks = list(dict.fromkeys(pair.benchmark for pair in pairs))
    figure = new_figure(WIDTH, ROW * (len(pairs) + 1.4 * (len(benchmarks) > 1) * len(benchmarks)) + 1.3)
    axes = figure.subplots()
    rule(axes, x=0, strength=0.6)
    places: list[float] = []
    place = 0.0
    last = None
    for pair in pairs:
        if len(benchmarks) > 1 and pair.benchmark != last:
            axes.annotate(
                pair.benchmark, (0, place + 0.1), xycoords=("axes fraction", "data"), fontsize=SMALL, fontweight="bold"
            )
            place += 1
        difference = pair.accuracy
        colour = colour_of_method(pair.method)
        axes.plot([100 * difference.low, 100 * difference.high], [place, place], color=colour, lw=1.6)
        axes.plot([100 * difference.mean], [place], color=colour, **OURS)
        if pair.paper is not None:
            axes.plot([pair.paper], [place], color=colour, **PAPER)
        places.append(place)
        place, last = place + 1, pair.benchmark
    _rows(axes, places, [f"{pair.method} − {pair.baseline}" for pair in pairs])
    tidy(axes, "what DHP adds, points of accuracy")
    axes.tick_params(axis="y", length=0)
    legend_below(figure, _marks(_has_paper(pairs), "ours, with 95% interval"))
    rows: list[tuple[Cell, ...]] = [
        (
            p.benchmark,
            p.method,
            p.baseline,
            *(100 * value for value in (p.accuracy.mean, p.accuracy.low, p.accuracy.high)),
            p.accuracy.num_trials,
            "" if p.paper is None else p.paper,
        )
        for p in pairs
    ]
    return Drawing(
        name,
        "What DHP adds, in pairs",
        "Each trial with DHP less the same without: right of the line, DHP is better. Bars are 95% intervals."
        + (" Hollow: the paper's own difference, which has no interval." if _has_paper(pairs) else ""),
        figure,
        ("benchmark", "method", "baseline", "points", "low", "high", "pairs", "paper points"),
        rows,
        Table(
            "Differences in points of accuracy",
            _columns(len(benchmarks) > 1),
            [_in_words(p, benchmarks) for p in pairs],
        ),
    )


def paper_against_ours(results: Sequence[Result]) -> Drawing:
    """Each method's final accuracy, ours with SEM and the paper's."""
    figure = new_figure(WIDTH, ROW * len(results) + 1.2)
    axes = figure.subplots()
    rows: list[tuple[Cell, ...]] = []
    numbers = []
    for place, result in enumerate(results):
        ours, paper = metrics.estimate(result.average_accuracy[:, -1]), paper_value(result)
        colour = colour_of(result)
        rule(axes, y=place, strength=0.08)
        axes.errorbar([100 * ours.mean], [place], xerr=[100 * ours.sem], color=colour, elinewidth=1.4, **OURS)
        if paper is not None:
            axes.plot([paper[0]], [place], color=colour, **PAPER)
        theirs = paper[0] if paper is not None else ""
        rows.append((result.config.method, 100 * ours.mean, 100 * ours.sem, ours.num_trials, theirs))
        gap = number(100 * ours.mean - paper[0], 2) if paper is not None else "–"
        numbers.append((result.config.method, percent(ours), "–" if paper is None else f"{paper[0]:.2f}", gap))
    _rows(axes, list(range(len(results))), [result.config.method for result in results])
    tidy(axes, "average accuracy after the last task, %")
    axes.tick_params(axis="y", length=0)
    axes.set_title(f"{results[0].config.benchmark} ({results[0].config.dataset})", fontsize=MEDIUM)
    legend_below(figure, _marks(True, "ours, with SEM"))
    return Drawing(
        "paper",
        "The paper's numbers against ours",
        "After the last task. Filled: ours, with one standard error. Hollow: the paper's Table I.",
        figure,
        ("method", "accuracy %", "SEM", "trials", "paper %"),
        rows,
        Table("Final average accuracy in %", ("method", "ours", "paper", "ours − paper"), numbers),
    )


def _rows(axes: Axes, places: Sequence[float], labels: Sequence[str]) -> None:
    axes.set_yticks(places, labels)
    axes.set_ylim(places[-1] + 0.6, -0.6)
    axes.spines["left"].set_visible(False)


def _marks(with_paper: bool, ours: str) -> list[Artist]:
    from matplotlib.lines import Line2D

    mine: Artist = Line2D([], [], color=INK, lw=1.4, label=ours, **OURS)
    return [mine, paper_mark()] if with_paper else [mine]


def _has_paper(pairs: Sequence[Pair]) -> bool:
    return any(pair.paper is not None for pair in pairs)


def _columns(with_benchmark: bool) -> tuple[str, ...]:
    return (*(["benchmark"] if with_benchmark else []), "difference", "points", "95% interval", "pairs", "paper")


def _in_words(pair: Pair, benchmarks: Sequence[str]) -> tuple[str, ...]:
    e = pair.accuracy
    interval = "–" if e.low != e.low else f"[{100 * e.low:+.2f}, {100 * e.high:+.2f}]"
    mean = "–" if e.mean != e.mean else f"{100 * e.mean:+.2f}"
    paper = "–" if pair.paper is None else f"{pair.paper:+.2f}"
    first = [pair.benchmark] if len(benchmarks) > 1 else []
    return (*first, f"{pair.method} − {pair.baseline}", mean, interval, str(e.num_trials), paper)
