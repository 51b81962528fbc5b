"""Heat maps on one scale: the mean accuracy matrix of each label, and differences over two settings."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from engram.report.figures.drawing import COLOURS, INK, MEDIUM, SMALL, WIDTH, Cell, Drawing, new_figure
from engram.report.layout import Table, number
from engram.report.tables import label_heading
from engram.runs.metrics import Array, Estimate
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST_WITH_NUMBERS = 5  # tasks: with more, the numbers in the cells are too small to read
SHADES = 64
CHARACTERS = 26  # of a title in one line
NOTHING = Estimate(math.nan, math.nan, math.nan, math.nan, 0)  # of a cell that has not been run


def accuracy_matrices(results: Mapping[str, Result]) -> Drawing:
    """A row after each task, a column for each task evaluated; what lies above the diagonal is not shown.

    Args:
        results: the Results of one run, by label.

    Example:
        accuracy_matrices(read_run("runs/demo").results).to_bytes("png")
    """
    import matplotlib

    columns = min(2, len(results))
    rows = -(-len(results) // columns)
    figure = new_figure(WIDTH, WIDTH / columns * 0.93 * rows + 0.75)
    grid = figure.subplots(rows, columns, squeeze=False)
    means = {label: mean_matrix(result) for label, result in results.items()}
    low = min((float(np.nanmin(mean)) for mean in means.values() if np.isfinite(mean).any()), default=0)
    shades = matplotlib.colormaps["viridis"].resampled(SHADES)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, (label, mean) in zip(grid.flat, means.items(), strict=False):
        axes.set_axis_on()
        mesh = axes.pcolormesh(
            np.ma.masked_invalid(mean), vmin=low, vmax=100, cmap=shades, edgecolors="face", linewidth=0.2
        )
        _finish(axes, mean, low, label)
    grid[-1][0].set_xlabel("accuracy on task", fontsize=SMALL)
    grid[-1][0].set_ylabel("after learning task", fontsize=SMALL)
    bar = figure.colorbar(mesh, ax=grid, location="bottom", shrink=0.7, aspect=35, pad=0.02)
    bar.set_label("accuracy, %", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL, width=0.6)
    bar.outline.set_visible(False)
    long: list[tuple[Cell, ...]] = []
    short = []
    most_tasks = max(len(mean) for mean in means.values())
    for label, mean in means.items():
        for after, row in enumerate(mean, start=1):
            long += [(label, after, on, float(row[on - 1])) for on in range(1, after + 1)]
            cells = (number(row[on], 1) if on < after else "" for on in range(most_tasks))
            short.append((f"{label}, after {after}", *cells))
    return Drawing(
        "matrices",
        "Accuracy matrices",
        "A row after each task learned, a column for each task: a column that darkens downwards is forgotten.",
        figure,
        (label_heading(results), "after task", "on task", "accuracy %"),
        long,
        Table("Accuracy in %", (label_heading(results), *(f"task {n + 1}" for n in range(most_tasks))), short),
    )


@dataclass(frozen=True)
class Panel:
    """A heat map of differences in [-1, 1], by the values of two settings: (down, across). None: trials diverged."""

    row: str
    column: str
    differences: Mapping[tuple[str, str], Estimate | None]


def difference_map(panels: Sequence[Panel], title: str, down: str, across: str) -> Drawing:
    """Where a head is better than another and where worse, over two settings; a dot where its 95% interval says so.

    Args:
        panels: in rows and columns by their names; all have the same settings.
        title: of the figure.
        down: the name of the setting that goes down.
        across: that of the setting that goes across.

    Example:
        difference_map([Panel("dhp", "Split MNIST", {("1", "0.01"): estimate})], "Where it helps", "epochs", "rate")
    """
    from matplotlib.colors import LinearSegmentedColormap

    rows, columns = (list(dict.fromkeys(names)) for names in zip(*((p.row, p.column) for p in panels), strict=True))
    places = [place for panel in panels for place in panel.differences]
    ys, xs = (list(dict.fromkeys(values)) for values in zip(*places, strict=True))
    figure = new_figure(WIDTH, (0.2 * len(ys) + 0.4) * len(rows) + 1.7)
    grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
    colours = LinearSegmentedColormap.from_list("sides", [str(COLOURS["online-ewc"]), "#f4f4f4", str(COLOURS["si"])])
    means = [abs(e.mean) for panel in panels for e in panel.differences.values() if e is not None]
    limit = 100 * float(np.nanquantile(means, 0.9)) if means else 1.0  # so that one cell does not pale all others
    for panel in panels:
        axes = grid[rows.index(panel.row)][columns.index(panel.column)]
        found = [[panel.differences.get((y, x), NOTHING) for x in xs] for y in ys]
        values = np.ma.masked_invalid([[np.nan if e is None else 100 * e.mean for e in row] for row in found])
        mesh = axes.pcolormesh(values, vmin=-limit, vmax=limit, cmap=colours, edgecolors="#ffffff", linewidth=0.5)
        # On a dark page a cell keeps its colour, so its dot does too; an empty cell is as dark as the page.
        for mark, holds in (("o", _is_sure), ("x", lambda e: e is None)):
            at = [(x + 0.5, y + 0.5) for y, row in enumerate(found) for x, each in enumerate(row) if holds(each)]
            colour = "#101010" if mark == "o" else INK
            axes.plot([x for x, _ in at], [y for _, y in at], mark, ms=3 if mark == "o" else 5, color=colour)
        axes.set_xticks(np.arange(len(xs)) + 0.5, xs, fontsize=SMALL, rotation=90)
        axes.set_yticks(np.arange(len(ys)) + 0.5, ys, fontsize=SMALL)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
    grid[0][0].invert_yaxis()  # they share it
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_title(textwrap.fill(column, CHARACTERS // 2) + "\n", fontsize=SMALL)  # above the name of the row
    for (first, *_), name in zip(grid, rows, strict=True):
        first.set_title(name, fontsize=SMALL, fontweight="bold", loc="left")
        first.set_ylabel(down, fontsize=SMALL)
    for axes in grid[-1]:
        axes.set_xlabel(across, fontsize=SMALL)
    bar = figure.colorbar(mesh, ax=grid, location="bottom", shrink=0.7, aspect=35, pad=0.02, extend="both")
    bar.set_label("points of accuracy", fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL, width=0.6)
    bar.outline.set_visible(False)
    cells = [(p.row, p.column, *place, e) for p in panels for place, e in p.differences.items()]
    return Drawing(
        "map",
        title,
        "Blue: better than the plain head. Orange: worse. A dot: the 95% interval excludes zero; one in twenty does so "
        "by chance. A cross: trials diverged.",
        figure,
        ("head", "benchmark", down, across, "points", "low", "high", "pairs"),
        [(*names, *_in_points(e)) for *names, e in cells],
        Table(
            "Points of accuracy",
            ("", "difference"),
            [
                (f"{row}, {column}, {down} {y}, {across} {x}", "diverged" if e is None else number(100 * e.mean, 2))
                for row, column, y, x, e in cells
            ],
        ),
    )


def _in_points(e: Estimate | None) -> tuple[float, float, float, int]:
    return (np.nan, np.nan, np.nan, 0) if e is None else (100 * e.mean, 100 * e.low, 100 * e.high, e.num_trials)


def _is_sure(difference: Estimate | None) -> bool:
    return difference is not None and (difference.low > 0 or difference.high < 0)


def mean_matrix(result: Result) -> Array:
    """(tasks, tasks) in %: the means over trials of the measured values; NaN above the diagonal."""
    values = np.where(np.tri(result.accuracy.shape[-1]) > 0, result.accuracy, np.nan)
    measured = np.isfinite(values).sum(axis=0)
    mean: Array = np.where(measured > 0, np.nansum(values, axis=0) / np.maximum(measured, 1), np.nan)
    return 100 * mean


def _finish(axes: Axes, mean: Array, low: float, label: str) -> None:
    axes.set_title(
        textwrap.fill(label, CHARACTERS, break_on_hyphens=False), fontsize=MEDIUM if len(label) <= CHARACTERS else SMALL
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    centres = np.arange(len(mean)) + 0.5
    names = [str(task + 1) for task in range(len(mean))]
    axes.set_xticks(centres, names, fontsize=SMALL)
    axes.set_yticks(centres, names, fontsize=SMALL)
    axes.tick_params(length=0)
    if len(mean) > LARGEST_WITH_NUMBERS:
        return
    for (after, on), value in np.ndenumerate(mean):
        if np.isfinite(value):
            # Neither is INK, which a page replaces: a cell keeps its colour on a dark page, and so must its number.
            contrast = "#ffffff" if value < low + 0.6 * (100 - low) else "#101010"
            axes.text(on + 0.5, after + 0.5, number(value, 0), ha="center", va="center", fontsize=8, color=contrast)
