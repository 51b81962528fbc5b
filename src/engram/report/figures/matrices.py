"""The mean accuracy matrix of each label, as heat maps on one scale."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from engram.report.figures.drawing import MEDIUM, SMALL, WIDTH, Cell, Drawing, new_figure
from engram.report.layout import Table, number
from engram.report.tables import label_heading
from engram.runs.metrics import Array
from engram.runs.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LARGEST_WITH_NUMBERS = 5  # tasks: with more, the numbers in the cells are too small to read
SHADES = 64
CHARACTERS = 26  # of a title in one line


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
