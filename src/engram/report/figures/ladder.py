"""The ladder of fairness in one picture: what DHP adds to each method, and how that changes from rung to rung."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engram.report.figures.drawing import (
    COLOURS,
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
    rule,
    tidy,
)
from engram.report.layout import Table, number
from engram.runs.metrics import Estimate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.22  # inches
MARK = {**OURS, "ms": 2.8}  # small, so that short intervals are seen
VALUE = 0.75  # the width of a number beside the marks, as a part of theirs
NARROW = 9  # characters of a line above a column
THEIRS = "the paper"
DIVERGED = "diverged"
# By where the interval lies. Okabe and Ito's blue and orange differ with any colour vision; grey stands back.
SIDES = {"above zero": COLOURS["si"], "around zero": "#777777", "below zero": COLOURS["online-ewc"]}


@dataclass(frozen=True)
class Differences:
    """What DHP adds to one method on one benchmark.

    Args:
        benchmark: its title.
        method: the penalty's name, or "alone".
        by_rung: the differences, in [-1, 1]. Those of trials that diverged are left out.
        paper: the paper's own difference, in points.
        lost: the rungs on which trials diverged.
    """

    benchmark: str
    method: str
    by_rung: Mapping[str, Estimate]
    paper: float | None
    lost: Collection[str] = ()


def ladder_figure(found: Sequence[Differences], opponent: str) -> Drawing:
    """A column for the paper and for each rung, a row for each method of each benchmark, a mark with its interval.

    All columns of a benchmark have one scale, so that a row shows how a difference shrinks or grows. Benchmarks have
    their own: the differences of one may be ten times those of another.

    Args:
        found: the differences, those of a benchmark together.
        opponent: the head that DHP is compared with, for the words.

    Example:
        ladder_figure([Differences("Split MNIST", "si", {"1: as published": estimate}, 1.38)], "linear")
    """
    from matplotlib.lines import Line2D

    benchmarks = {name: [d for d in found if d.benchmark == name] for name in dict.fromkeys(d.benchmark for d in found)}
    rungs = sorted({rung for each in found for rung in each.by_rung})
    columns = [*([THEIRS] if any(each.paper is not None for each in found) else []), *rungs]
    heights = [len(group) for group in benchmarks.values()]
    figure = new_figure(WIDTH, ROW * sum(heights) + 0.5 * len(heights) + 1.1)
    grid = figure.subplots(len(heights), len(columns), squeeze=False, sharex="row", sharey="row", height_ratios=heights)
    for panels, (name, group) in zip(grid, benchmarks.items(), strict=True):
        for axes, column in zip(panels, columns, strict=True):
            _block(axes, column, group)
        _finish(panels, name, group)
    for axes, column in zip(grid[0], columns, strict=True):
        title = "\n".join(textwrap.wrap(column, NARROW, break_long_words=False))
        axes.set_title(f"{title}\n", fontsize=SMALL)  # above the name of the benchmark
    grid[-1][len(columns) // 2].set_xlabel("points of accuracy", fontsize=SMALL)
    marks = [Line2D([], [], color=colour, **MARK, label=side) for side, colour in SIDES.items()]
    legend_below(figure, marks, ncols=len(marks))
    rows: list[tuple[Cell, ...]] = [
        (each.benchmark, each.method, rung, 100 * d.mean, 100 * d.low, 100 * d.high, d.num_trials)
        for each in found
        for rung, d in each.by_rung.items()
    ]
    shown = [(f"{each.benchmark}: {each.method}", *(_words(each, rung) for rung in rungs)) for each in found]
    return Drawing(
        f"ladder-{opponent}",
        f"What DHP adds to a {opponent} head, rung by rung",
        "Each trial with DHP minus the same trial with the other head: right of the line, DHP is better. Bars are 95% "
        "intervals, and colours say where they lie; a bar shorter than its mark is not seen. Each benchmark has its "
        "own scale. From left to right the comparison becomes fairer. Hollow: the paper's own difference, which has no "
        "interval. The numbers are the differences in points; with an asterisk, without the trials that diverged.",
        figure,
        ("benchmark", "method", "rung", "points", "low", "high", "pairs"),
        rows,
        Table("Differences in points of accuracy", ("", *rungs), shown),
    )


def _block(axes: Axes, column: str, group: Sequence[Differences]) -> None:
    """The rows of one benchmark in one column, or the words that it was not run."""
    if column != THEIRS and not any(column in each.by_rung for each in group):
        middle, where = (len(group) - 1) / 2, axes.get_yaxis_transform()
        text = axes.text(0.5, middle, "not\nrun yet", transform=where, ha="center", va="center", fontsize=SMALL)
        text.set(style="italic", alpha=0.6)
        return
    axes.axvline(0, color=INK, alpha=0.6, lw=0.6, zorder=0)
    for at, each in enumerate(group):
        rule(axes, y=at, strength=0.08)
        difference = each.by_rung.get(column)
        if column == THEIRS and each.paper is not None:
            axes.plot([each.paper], [at], color=INK, clip_on=False, **PAPER)
            _value(axes, each.paper, at, INK)
        elif difference is not None and difference.num_trials:
            colour = SIDES[_side(difference)]
            axes.plot([100 * difference.low, 100 * difference.high], [at, at], color=colour, lw=1.2, clip_on=False)
            axes.plot([100 * difference.mean], [at], color=colour, clip_on=False, **MARK)
            _value(axes, 100 * difference.mean, at, colour, "*" if column in each.lost else "")
        elif column in each.lost:
            _at_the_end(axes, DIVERGED, at, INK)
        elif column != THEIRS:
            _at_the_end(axes, "–", at, SIDES["around zero"])


def _finish(panels: Sequence[Axes], name: str, group: Sequence[Differences]) -> None:
    """The names of a benchmark and its methods, and a scale with room for numbers beside the marks."""
    first = panels[0]
    first.set_title(" ", fontsize=MEDIUM)  # room for the name, which is wider than a column
    where = first.transAxes
    first.text(0, 1.03, name, transform=where, fontsize=MEDIUM, fontweight="bold", va="bottom", in_layout=False)
    first.set_yticks(range(len(group)), [each.method for each in group])
    first.set_ylim(len(group) - 0.5, -0.5)
    left, right = first.get_xlim()
    # Zero and a round number on one side: a third would touch them. A minus needs more room.
    ticks = sorted([0, _round(right) if 1.5 * right > -left else -_round(-left)])
    first.set_xticks(ticks, [f"{tick:g}".replace("-", "−") for tick in ticks])
    first.set_xlim(left, right + VALUE * (right - left))
    for axes in panels:
        tidy(axes, "")
        axes.spines["left"].set_visible(False)
        axes.patch.set_visible(False)  # the name of a benchmark continues over the next columns
        axes.tick_params(axis="y", length=0)


def _round(largest: float) -> float:
    """The largest round number that is not above this."""
    power = 10.0 ** math.floor(math.log10(largest))
    return max(digit * power for digit in (0.8, 1, 2, 3, 4, 5, 6, 8) if digit * power <= largest)


def _value(axes: Axes, points: float, at: float, colour: str, mark: str = "") -> None:
    """A difference as a number at the end of its row: many are too small for the scale that a row shares."""
    _at_the_end(axes, number(points, 1 if abs(points) >= 0.1 else 2) + mark, at, colour)


def _at_the_end(axes: Axes, words: str, at: float, colour: str) -> None:
    where = axes.get_yaxis_transform()
    axes.text(1, at - 0.05, words, transform=where, ha="right", va="center", fontsize=SMALL, color=colour)


def _side(difference: Estimate) -> str:
    return "above zero" if difference.low > 0 else "below zero" if difference.high < 0 else "around zero"


def _words(each: Differences, rung: str) -> str:
    difference = each.by_rung.get(rung)
    if difference is None or not difference.num_trials:
        return DIVERGED if rung in each.lost else "–"
    low, high = number(100 * difference.low, 2), number(100 * difference.high, 2)
    return f"{number(100 * difference.mean, 2)} [{low}, {high}]" + ("*" if rung in each.lost else "")
