"""The ladder of fairness in one picture: what DHP adds to each method, and how that changes from rung to rung."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engram.report.figures.drawing import (
    INK,
    MEDIUM,
    OURS,
    PAPER,
    SMALL,
    WIDTH,
    Cell,
    Drawing,
    legend_below,
    new_figure,
    paper_mark,
    rule,
    tidy,
)
from engram.report.layout import Table, number
from engram.runs.metrics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#999999", "#E69F00", "#56B4E9", "#009E73")  # of the rungs: readable on white and on black
ROW, GAP = 0.2, 0.16  # inches of a row, and of what is between two rungs of it
PANELS = 2  # side by side


@dataclass(frozen=True)
class Differences:
    """What DHP adds to one method on one benchmark, by rung, in [-1, 1]; and the paper's own, in points."""

    benchmark: str
    method: str
    by_rung: Mapping[str, Estimate]
    paper: float | None


def ladder_figure(found: Sequence[Differences], opponent: str) -> Drawing:
    """A panel for each benchmark, a row for each method, and in it a mark with its 95% interval for each rung.

    Args:
        found: the differences, those of a benchmark together.
        opponent: the head that DHP is compared with, for the words.

    Example:
        ladder_figure([Differences("Split MNIST", "si", {"1: as published": estimate}, 1.38)], "linear")
    """
    from matplotlib.lines import Line2D

    benchmarks = list(dict.fromkeys(each.benchmark for each in found))
    rungs = sorted({rung for each in found for rung in each.by_rung})
    lines = -(-len(benchmarks) // PANELS)
    height = max(sum(each.benchmark == name for each in found) for name in benchmarks) * (ROW + GAP * len(rungs))
    figure = new_figure(1.2 * WIDTH, lines * (height + 0.6) + 0.5)
    panels = figure.subplots(lines, min(PANELS, len(benchmarks)), squeeze=False).flatten()
    for axes, benchmark in zip(panels, benchmarks, strict=False):
        _panel(axes, benchmark, [each for each in found if each.benchmark == benchmark], rungs)
    for axes in panels[len(benchmarks) :]:
        axes.set_visible(False)
    marks = [Line2D([], [], color=colour, **OURS, label=rung) for colour, rung in zip(COLOURS, rungs, strict=False)]
    legend_below(figure, [*marks, *([paper_mark()] if any(each.paper is not None for each in found) else [])])
    rows: list[tuple[Cell, ...]] = [
        (each.benchmark, each.method, rung, 100 * d.mean, 100 * d.low, 100 * d.high, d.num_trials)
        for each in found
        for rung, d in each.by_rung.items()
    ]
    shown = [
        (f"{each.benchmark}: {each.method}", *(_words(each.by_rung.get(rung)) for rung in rungs)) for each in found
    ]
    return Drawing(
        f"ladder-{opponent}",
        f"What DHP adds to a {opponent} head, rung by rung",
        "Each trial with DHP minus the same trial with the other head: right of the line, DHP is better. Bars are 95% "
        "intervals. From top to bottom of a row the comparison becomes fairer. Hollow: the paper's own difference.",
        figure,
        ("benchmark", "method", "rung", "points", "low", "high", "pairs"),
        rows,
        Table("Differences in points of accuracy", ("", *rungs), shown),
    )


def _panel(axes: Axes, benchmark: str, found: Sequence[Differences], rungs: Sequence[str]) -> None:
    rule(axes, x=0, strength=0.6)
    spread = [0.8 * (k / max(1, len(rungs) - 1) - 0.5) for k in range(len(rungs))]
    for position, each in enumerate(found):
        if position:
            rule(axes, y=position - 0.5)
        for rung, colour, offset in zip(rungs, COLOURS, spread, strict=False):
            difference = each.by_rung.get(rung)
            if difference is None:
                continue
            height = position + 0.8 * offset
            axes.plot([100 * difference.low, 100 * difference.high], [height, height], color=colour, lw=1.6)
            axes.plot([100 * difference.mean], [height], color=colour, **OURS)
        if each.paper is not None:
            axes.plot([each.paper], [position], color=INK, **PAPER)
    axes.set_title(benchmark, fontsize=MEDIUM, loc="left", fontweight="bold")
    axes.set_yticks(range(len(found)), [each.method for each in found], fontsize=SMALL)
    axes.set_ylim(len(found) - 0.5, -0.5)
    tidy(axes, "points of accuracy")
    axes.tick_params(axis="y", length=0)


def _words(difference: Estimate | None) -> str:
    if difference is None:
        return "–"
    return f"{number(100 * difference.mean, 2)} [{number(100 * difference.low, 2)}, {number(100 * difference.high, 2)}]"
